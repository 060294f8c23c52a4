"""Compile-time choices of `indexer_scores_within_sm90`, and the sizes that follow from them."""

from dataclasses import dataclass

from kernels.abi import INDEX_BLOCK
from kernels.lib.index_fp4 import KEY_BYTES
from kernels.lib.indexer import KEYS, D
from kernels.lib.scores_at import ScoresAtConfig

BLOCKS = KEYS // INDEX_BLOCK  # of a tile


@dataclass(frozen=True)
class Config(ScoresAtConfig):
    """The choices, and what follows from them."""

    paged: bool
    packing: str = ""  # "index_fp4": keys have 4 bits

    @property
    def of_4_bits(self) -> bool:
        return self.packing != ""

    @property
    def scaled(self) -> bool:
        """True if 4 bytes of scales go with a key."""
        return self.element_bytes == 1 or self.of_4_bits

    @property
    def key_bytes(self) -> int:
        return KEY_BYTES if self.of_4_bits else D * self.element_bytes

    @property
    def stages(self) -> int:
        return 4 if self.of_4_bits else 3

    @property
    def ctas(self) -> int:
        """CTAs of an SM, by what its SMEM holds, or of keys of 4 bits its registers."""
        if self.of_4_bits:
            return 4
        return 6 if self.scaled else 3

    @property
    def tile_n(self) -> int:
        return KEYS

    @property
    def smem_bytes(self) -> int:
        of_queries = D * self.element_bytes * self.heads
        return 1024 + of_queries + self.stages * KEYS * (self.key_bytes + 4 * self.scaled)
