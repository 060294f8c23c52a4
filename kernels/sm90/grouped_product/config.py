"""Compile-time choices of `grouped_product`, and the sizes that follow."""

from dataclasses import dataclass

from kernels.abi import FEW_ROWS
from kernels.lib.launch import SMEM_LIMIT, WARP, WARPGROUP, element_type
from kernels.lib.rows import ROWS_OF_WARPGROUP
from kernels.lib.wgmma import SLAB

from .weights import FORMATS, Bfloat16, Fp8, Mxfp4

LANES_A_ROW = 8  # neighbouring lanes copy a row of 128 bytes
BLOCK = 16  # rows of a matrix that a warp multiplies: in memory they are 16 neighbours, or 8 gates and 8 beside them
SLAB_OF_8_BITS = ROWS_OF_WARPGROUP * SLAB  # bytes
SMEM_OF_SM, SMEM_RESERVED = 228 * 1024, 1024  # bytes; the latter of each CTA


@dataclass(frozen=True)
class Config:
    dtype: str  # of x and y
    weights: str  # what matrices are in: a key of `FORMATS`
    gated: bool  # whether rows of a matrix are pairs of a gate and what it lets through
    max_rows: int  # of a group that share a tile
    stages: int = 0  # of the ring; as many as there is room for if 0

    @property
    def format(self) -> Mxfp4 | Fp8 | Bfloat16:
        return FORMATS[self.weights]

    @property
    def is_packed(self) -> bool:
        """True where a tile's codes lie together in memory, and bulk copies bring them; rows come by cp.async."""
        return self.format.is_packed

    @property
    def is_few(self) -> bool:
        """True where reading the matrices takes the time, and not multiplying."""
        return self.max_rows <= FEW_ROWS

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, each rows of the matrix of its own."""
        return 1 if self.is_few else 2

    @property
    def units(self) -> int:
        """Products of 64 rows of the matrix that a consumer makes in turn."""
        return 1 if self.is_few else 2

    @property
    def ctas(self) -> int:
        """The number of CTAs that run on an SM. Without unpacking, two keep up with memory."""
        return (4 if self.is_packed else 2) if self.is_few else 1

    @property
    def slabs(self) -> int:
        """The number of slabs, of 64 of k, that a stage has: half as many of more than 4 bits, to have four stages."""
        return (4 if self.is_few else 2) // (1 if self.format.slab_bytes < SLAB_OF_8_BITS else 2)

    @property
    def stages_at_once(self) -> int:
        """Whose products follow one another, the next operand decoded meanwhile."""
        return 1 if self.is_few else 2

    @property
    def step(self) -> int:
        """A product has a multiple of so many rows of x."""
        return 8 if self.is_few else 16

    @property
    def columns(self) -> tuple[int, ...]:
        """The numbers of rows of x that a product may have: the least that has a tile's rows is taken."""
        return tuple(range(self.step, self.max_rows + 1, self.step))

    @property
    def loaders(self) -> int:
        """Threads that load."""
        return WARP if self.is_few else WARPGROUP

    @property
    def arrivals(self) -> int:
        """The number of arrivals of loaders that fill a stage."""
        by_threads = 0 if self.is_few and self.is_packed else self.loaders
        by_bulk_copies = 1 if self.is_few or self.is_packed else 0
        return by_threads + by_bulk_copies

    @property
    def threads(self) -> int:
        return self.consumers * WARPGROUP + self.loaders

    @property
    def registers(self) -> tuple[int, int]:
        """The registers of a loader's thread and of a consumer's, where a warpgroup loads."""
        return 40, 232

    @property
    def tile_m(self) -> int:
        """Rows of x."""
        return self.max_rows

    @property
    def tiles_of_cta(self) -> int:
        """The number of tiles of 64 rows of the matrix that a CTA has."""
        return self.consumers * self.units

    @property
    def tile_n(self) -> int:
        """Rows of the matrix."""
        return self.tiles_of_cta * ROWS_OF_WARPGROUP

    @property
    def tile_bytes(self) -> int:
        """The bytes of 64 rows of the matrix in a stage."""
        return self.slabs * self.format.slab_bytes

    @property
    def weight_bytes(self) -> int:
        return self.tiles_of_cta * self.tile_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of a slab of a row of x."""
        return SLAB * element_type(self.dtype).width // 8

    @property
    def pitch(self) -> int:
        """Bytes from one row of x to the next, in a stage that bulk copies fill: eight rows meet in no bank."""
        return self.slabs * self.row_bytes + 16

    @property
    def x_bytes(self) -> int:
        return self.max_rows * (self.pitch if self.is_few else self.slabs * self.row_bytes)

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.weight_bytes

    @property
    def depth(self) -> int:
        """Stages."""
        room = min(SMEM_LIMIT, SMEM_OF_SM // self.ctas - SMEM_RESERVED) - 1024
        return self.stages or room // (self.stage_bytes + 16)

    @property
    def smem_bytes(self) -> int:
        return 1024 + self.depth * (self.stage_bytes + 16)

    @property
    def rows_at_a_time(self) -> int:
        """The number of rows of x that all loaders copy at a time."""
        return self.loaders // LANES_A_ROW

    @property
    def rows_of_loader(self) -> int:
        return self.max_rows // self.rows_at_a_time

    @property
    def turns_of_block(self) -> int:
        """The number of times that all loaders copy until 16 rows of a matrix are there."""
        return BLOCK // self.rows_at_a_time

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": self.ctas, "preferred_smem_carveout": 100}
