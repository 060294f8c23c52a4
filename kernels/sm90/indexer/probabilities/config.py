"""Compile-time choices of `probabilities_sm90`, and the tiles, counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.wgmma import SLAB

CONSUMERS = 2  # warpgroups


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    tile_m: int = 128  # heads: columns of a product
    tile_n: int = 64  # keys: its rows
    pieces: int = 4  # columns of a piece of Q and K

    @property
    def threads(self) -> int:
        return (1 + CONSUMERS) * WARPGROUP

    @property
    def piece(self) -> int:
        return self.d // self.pieces

    @property
    def slabs_of_piece(self) -> int:
        return self.piece // SLAB

    @property
    def fixed_bytes(self) -> int:
        return 2 * self.tile_m * self.d + 4 * CONSUMERS * self.tile_m

    @property
    def stages(self) -> int:
        """Pieces of keys that SMEM holds."""
        return (SMEM_LIMIT - 1024 - self.fixed_bytes) // (2 * self.tile_n * self.piece)

    @property
    def smem_bytes(self) -> int:
        return self.fixed_bytes + self.stages * 2 * self.tile_n * self.piece + 8 * 2 * (self.stages + self.pieces) + 16

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    def __post_init__(self):
        if self.d % (self.pieces * SLAB):
            raise ValueError(f"d must be a multiple of {self.pieces * SLAB}, got {self.d}")
        if self.stages < self.pieces:
            raise ValueError(f"SMEM holds {self.stages} pieces of keys, wanted {self.pieces} at least: {self}")
