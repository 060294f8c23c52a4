"""Compile-time choices of `mla_few_heads_spans_sm90`, and the counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import PUBLISHED, ROWS_OF_WARPGROUP
from kernels.lib.wgmma import SLAB

ADDERS = 2  # warpgroups that add up O, each half of its columns
PLACES_OF_P = 2


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...]  # one span
    tile_m: int  # heads
    keys: int = SLAB  # of a query's tile
    spare: int = 8  # keys by which queries of one pass may begin later than its first one
    piece: int = 2 * SLAB  # columns of a key tile that are filled and freed together
    stages: int = 8  # pieces
    gathers: bool = True  # a tile of rows has heads of one query
    shared_kv: bool = True
    cluster: int = 1

    @property
    def tile_n(self) -> int:
        """Keys in a place in SMEM."""
        return self.keys + self.spare

    @property
    def rows(self) -> int:
        """(query, head) pairs of a group."""
        return ROWS_OF_WARPGROUP

    @property
    def group(self) -> int:
        """Queries of a CTA, at a time."""
        return self.rows // self.tile_m

    @property
    def threads(self) -> int:
        return (2 + ADDERS) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """A thread's, of those that load and store, that score, and that add. With the other ones, ptxas serialises the
        products: `ptxas -v` says so.
        """
        return (40, 104, 184) if self.group == 2 else (32, 112, 184)

    @property
    def columns_q(self) -> int:
        return SLAB

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    @property
    def pieces(self) -> int:
        return self.d // self.piece

    @property
    def pieces_of_adder(self) -> int:
        return self.pieces // ADDERS

    @property
    def piece_bytes(self) -> int:
        return self.tile_n * self.piece * 2

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def numbers(self) -> int:
        """The count of the numbers that the producer publishes: of the tile, of the group, and of each query."""
        return PUBLISHED + 6 + self.group

    @property
    def smem_bytes(self) -> int:
        rows = self.rows * (self.row_bytes + PLACES_OF_P * 2 * self.keys + 4 * (PLACES_OF_P + 1))
        barriers = 2 * 8 * (self.stages + 1 + 2 + PLACES_OF_P + 1 + ADDERS)
        return self.stages * self.piece_bytes + rows + 2 * 4 * self.numbers + 16 + barriers

    def __post_init__(self):
        if self.d % (self.piece * ADDERS) or self.keys != SLAB or self.spare % 8:
            raise ValueError(f"wanted d in pieces of {self.piece} for {ADDERS} and tiles of {SLAB} keys, got {self}")
        if self.tile_m % 8 or self.rows % self.tile_m or self.d != 512:
            raise ValueError(f"wanted 8, 16 or 32 heads, of which O fits into two warpgroups' registers, got {self}")
        if self.stages % self.pieces or self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit, for whole tiles: {self}")
