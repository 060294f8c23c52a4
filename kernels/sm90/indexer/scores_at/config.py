"""Compile-time choices of `indexer_scores_at_sm90`, and the sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.indexer import KEYS, D
from kernels.lib.launch import WARP
from kernels.lib.scores_at import THREADS, ScoresAtConfig

WARPS = THREADS // WARP


@dataclass(frozen=True)
class Config(ScoresAtConfig):
    """The choices, and what follows from them for Hopper."""

    gradient: bool
    stages: int = 3

    @property
    def ctas(self) -> int:
        """CTAs of an SM, by what its registers hold."""
        return 2 if self.gradient else 3

    @property
    def tile_n(self) -> int:
        return KEYS

    @property
    def smem_bytes(self) -> int:
        masks = 2 * KEYS * self.heads + 4 * WARPS * self.heads if self.gradient else 0
        return 1024 + self.element_bytes * D * (self.heads + self.stages * KEYS) + masks

    def __post_init__(self):
        super().__post_init__()
        if self.gradient and self.element_bytes == 1:
            raise ValueError("gradients are of 16 bits")
