"""Compile-time choices of `indexer_scores_at_sm100`, and the counts, columns and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.indexer import D
from kernels.lib.scores_at import ScoresAtConfig
from kernels.lib.tcgen05 import LANES

SMEM_OF_SM = 228 * 1024  # bytes, of which every CTA takes 1 KiB beside its own
SMALL_BYTES = 16  # a barrier, and where TMEM was allocated


@dataclass(frozen=True)
class Config(ScoresAtConfig):
    """The choices, and what follows from them for Blackwell."""

    cluster, gradient = 1, False

    @property
    def ctas(self) -> int:
        """CTAs of an SM: as many as have room for two tiles of keys each, or more."""
        return 2 if self.element_bytes == 2 else 3

    @property
    def tile_n(self) -> int:
        return LANES

    @property
    def fixed_bytes(self) -> int:
        return 1024 + self.element_bytes * D * self.heads + SMALL_BYTES

    @property
    def key_bytes(self) -> int:
        """The bytes of a tile of keys."""
        return self.element_bytes * D * self.tile_n

    @property
    def stages(self) -> int:
        return (SMEM_OF_SM // self.ctas - 1024 - self.fixed_bytes) // self.key_bytes

    @property
    def smem_bytes(self) -> int:
        return self.fixed_bytes + self.stages * self.key_bytes

    @property
    def columns(self) -> int:
        """The columns of TMEM: one for each head, and 32 at least, the fewest that can be allocated."""
        return max(self.heads, 32)

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase)"""
        return ((1, 1),)  # made
