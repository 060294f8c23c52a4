"""Compile-time choices of `few_rows_product`, and the sizes that follow."""

from dataclasses import dataclass

from kernels.lib.e4m3 import E4m3
from kernels.lib.launch import SMEM_LIMIT, WARP, WARPGROUP, element_type
from kernels.lib.rows import ROWS_OF_WARPGROUP
from kernels.lib.wgmma import SLAB

from .weights import FORMATS

FEWEST_ROWS = 16  # of a CTA: columns of a product with a packed matrix, whose rows are its tiles of 64
MOST_ROWS = 2 * ROWS_OF_WARPGROUP
CHUNK = 4  # float32 numbers that a thread moves at once
PAD = 8  # float32 numbers after each row of sums: then no two rows that a warp stores meet in a bank
PAD_OF_PACKED = 4  # the same, where a thread has two columns of every other row
HEAD = 512  # numbers of a query head
LINE = 128  # bytes of a line of L2, in which bulk copies come
INDEX_D = WARP * CHUNK  # numbers of an indexer's query head


@dataclass(frozen=True)
class Config:
    dtype: str  # of x and w
    parts: int  # of k, one for each CTA of a cluster; or, with a norm, one CTA has all of k
    tile_m: int  # rows of a CTA
    norms: bool  # whether a cluster's columns are a query head, which gets norm and RoPE
    turns_back: bool  # whether x has heads, whose RoPE is turned back first
    indexes: bool = False  # whether columns are an indexer's query heads, one to a CTA, which get RoPE and Hadamard
    to_fp8: bool = False  # whether these are quantized
    weights: str = ""  # how w is packed: a key of `FORMATS`; "" where it is a matrix in dtype

    @property
    def format(self) -> E4m3:
        return FORMATS[self.weights]

    @property
    def tile_n(self) -> int:
        """Columns of a CTA."""
        return HEAD // 2 if self.norms and not self.in_quarters else WARP * CHUNK

    @property
    def in_quarters(self) -> bool:
        """True where four CTAs share a query head, not two: beside an operand a thread has too few registers for sums
        of 128 rows of half of a head.
        """
        return self.norms and self.weights != "" and self.row_tiles > 1

    @property
    def cluster(self) -> int:
        """CTAs."""
        return HEAD // self.tile_n if self.norms else self.parts

    @property
    def ctas(self) -> int:
        """The number of CTAs that have registers on an SM. With two, clusters of 4 and 8 leave no SM idle."""
        if self.weights and self.cluster <= 3:
            return 1
        return 1 if self.norms or ((self.turns_back or self.weights) and self.row_tiles > 1) else 2

    @property
    def row_tiles(self) -> int:
        """The number of tiles of 64 rows that a CTA has."""
        return -(-self.tile_m // ROWS_OF_WARPGROUP)

    @property
    def mma_n(self) -> int:
        """Columns of a consumer, which has all columns of half of the rows, or half of the columns."""
        return self.tile_n * self.row_tiles // self.consumers

    @property
    def tiles(self) -> int:
        """The number of tiles of 64 columns that a CTA has: of a packed matrix, whose columns are a product's rows."""
        return self.tile_n // ROWS_OF_WARPGROUP

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: of a packed matrix one for each tile of 64 columns."""
        return self.tiles if self.weights else 2

    @property
    def warpgroups(self) -> int:
        """Those that finish rows: more than have products where a CTA has an SM."""
        return 4 if self.weights and self.ctas == self.row_tiles == 1 else self.consumers

    @property
    def slabs(self) -> int:
        """The number of slabs, of 64 of k, that a stage has. A consumer of a packed matrix decodes the second one
        under the first one's product."""
        return 2 if self.weights else 1

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP + WARP

    @property
    def tile_bytes(self) -> int:
        """The bytes of a tile of a packed matrix in a stage."""
        return self.slabs * self.format.slab_bytes

    @property
    def tile_room(self) -> int:
        """The same, and what lies before it in its line: whole lines."""
        return -(-(self.tile_bytes + LINE - 16) // LINE) * LINE

    @property
    def weight_bytes(self) -> int:
        if self.weights:
            return self.tiles * self.tile_room
        return self.tile_n * SLAB * element_type(self.dtype).width // 8

    @property
    def x_bytes(self) -> int:
        return self.tile_m * self.slabs * SLAB * element_type(self.dtype).width // 8

    @property
    def loaded_bytes(self) -> int:
        """The bytes that come into a stage."""
        return self.x_bytes + (self.tiles * self.tile_bytes if self.weights else self.weight_bytes)

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.weight_bytes

    @property
    def pitch(self) -> int:
        """float32 numbers from one row of sums to the next."""
        return self.tile_n + (PAD_OF_PACKED if self.weights else PAD)

    @property
    def stages(self) -> int:
        """Some 100 KB, which keep HBM busy. What a step does beside the product finds room in the rest. Half of a stage
        of a packed matrix is x, so there are more where an SM has one CTA."""
        room = SMEM_LIMIT * 3 // 4 if self.weights and self.ctas == 1 else SMEM_LIMIT // 2 - 2048
        return max(3, room // self.stage_bytes)

    @property
    def smem_bytes(self) -> int:
        """Sums lie where stages were."""
        return 1024 + self.stages * (self.stage_bytes + 16)

    @property
    def rows_of_cta(self) -> int:
        """Rows that a CTA of a cluster finishes."""
        return -(-self.tile_m // self.cluster)

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": self.ctas, "preferred_smem_carveout": 100}  # without it the DSL asks a driver

    def __post_init__(self):
        rows = (FEWEST_ROWS,) * bool(self.weights) + (ROWS_OF_WARPGROUP, MOST_ROWS)
        if self.tile_m not in rows or not 1 <= self.parts <= 8:
            raise ValueError(f"wanted {', '.join(map(str, rows))} rows, and 1 to 8 parts: {self}")
        if self.stages < 3 or self.tile_m * self.pitch * 4 > self.stages * self.stage_bytes:
            raise ValueError(f"SMEM holds {self.stages} stages, wanted 3, and room for sums: {self}")
