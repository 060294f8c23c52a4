"""Compile-time choices of `indexer_scores_within_sm90`, and the sizes that follow from them."""

from dataclasses import dataclass

from kernels.abi import INDEX_BLOCK
from kernels.lib.indexer import KEYS, D
from kernels.lib.scores_at import ScoresAtConfig

BLOCKS = KEYS // INDEX_BLOCK  # of a tile


@dataclass(frozen=True)
class Config(ScoresAtConfig):
    """The choices, and what follows from them."""

    paged: bool
    stages: int = 3

    @property
    def scaled(self) -> bool:
        return self.element_bytes == 1

    @property
    def key_bytes(self) -> int:
        return D * self.element_bytes

    @property
    def ctas(self) -> int:
        """CTAs of an SM, by what its SMEM holds."""
        return 6 if self.scaled else 3

    @property
    def tile_n(self) -> int:
        return KEYS

    @property
    def smem_bytes(self) -> int:
        return 1024 + self.key_bytes * (self.heads + self.stages * KEYS) + 4 * KEYS * self.stages * self.scaled
