"""Compile-time choices of `indexer_scores_at_sm90`, and the sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.indexer import HEADS, KEYS, D
from kernels.lib.launch import WARP, WARPGROUP, element_type
from kernels.lib.wgmma import SLAB

THREADS = WARPGROUP
WARPS = THREADS // WARP


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every size follows from them."""

    heads: int
    dtype: str
    gradient: bool
    stages: int = 3

    @property
    def element_bytes(self) -> int:
        return element_type(self.dtype).width // 8

    @property
    def slabs(self) -> int:
        """Slabs of a row of q or of keys: each is 128 bytes, copied as 64 numbers of 16 bits, whatever they are."""
        return D * self.element_bytes // (2 * SLAB)

    @property
    def ctas(self) -> int:
        """CTAs of an SM, by what its registers hold."""
        return 2 if self.gradient else 3

    @property
    def tile_m(self) -> int:
        return self.heads

    @property
    def tile_n(self) -> int:
        return KEYS

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def smem_bytes(self) -> int:
        masks = 2 * KEYS * self.heads + 4 * WARPS * self.heads if self.gradient else 0
        return 1024 + self.element_bytes * D * (self.heads + self.stages * KEYS) + masks

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": self.ctas, "preferred_smem_carveout": 100}  # without it the DSL asks a driver

    def __post_init__(self):
        if self.heads not in HEADS:
            raise ValueError(f"heads must be 16, 32 or 64, got {self.heads}")
        if self.gradient and self.element_bytes == 1:
            raise ValueError("gradients are of 16 bits")
