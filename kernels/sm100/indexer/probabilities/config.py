"""Compile-time choices of `probabilities_sm100`, and the tiles, counts, columns and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import WARP
from kernels.lib.tcgen05 import COLUMNS, LANES
from kernels.lib.wgmma import SLAB

LOAD_WARPS = WARPGROUP // WARP
GROUPS = 2  # warpgroups that sum up, each every other tile of keys; then one of which a warp issues MMA


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count, column and size follows from them."""

    d: int
    dtype: str
    tile_m: int = 128  # heads: columns of a product
    tile_n: int = LANES  # keys: its rows

    cluster = 1

    @property
    def piece(self) -> int:
        """Columns of a piece of Q and K."""
        return SLAB

    @property
    def pieces(self) -> int:
        return self.d // self.piece

    @property
    def slabs_of_piece(self) -> int:
        return self.piece // SLAB

    @property
    def buffers(self) -> int:
        """The number of buffers for a tile's products that TMEM has room for."""
        return COLUMNS // self.tile_m

    @property
    def threads(self) -> int:
        return (2 + GROUPS) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """The registers of a thread: of the warps that load, of those that sum up, and of the one that issues MMA."""
        return 88, 176, 72

    @property
    def fixed_bytes(self) -> int:
        return 1024 + 2 * self.tile_m * self.d + 4 * GROUPS * self.tile_m + 16

    @property
    def stages(self) -> int:
        """Pieces of keys that SMEM holds, beside room for barriers."""
        return (SMEM_LIMIT - 512 - self.fixed_bytes) // (2 * self.tile_n * self.piece)

    @property
    def smem_bytes(self) -> int:
        barriers = 8 * sum(count for count, _ in self.barriers)
        return self.fixed_bytes + self.stages * 2 * self.tile_n * self.piece + barriers

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase), in the order in which they lie in memory."""
        return (
            (self.pieces, WARPGROUP),  # q_full
            (self.pieces, 1),  # q_empty
            (self.stages, WARPGROUP),  # k_full
            (self.stages, 1),  # k_empty
            (self.buffers, 1),  # s_full
            (self.buffers, WARPGROUP // WARP),  # s_empty: a warp arrives once
        )

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    def __post_init__(self):
        if self.d % self.piece:
            raise ValueError(f"d must be a multiple of {self.piece}, got {self.d}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
