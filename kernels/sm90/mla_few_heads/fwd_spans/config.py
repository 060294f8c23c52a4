"""Compile-time choices of `mla_few_heads_spans_sm90`, and the counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.column_softmax import WARPS
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB

CONSUMERS = 2  # warpgroups, which have queries of their own
COLUMNS = 32  # (query, head) columns of a consumer at most, of which O fills 128 registers


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...]  # one span
    tile_m: int  # heads
    keys: int = SLAB  # of a query's tile: the rows of one WGMMA
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
    def queries(self) -> int:
        """Of a consumer, at a time; the state of four of 8 heads would be more than registers hold."""
        return min(COLUMNS // self.tile_m, 2)

    @property
    def group(self) -> int:
        """Queries of a CTA, at a time."""
        return CONSUMERS * self.queries

    @property
    def threads(self) -> int:
        return (1 + CONSUMERS) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return 40, 232

    @property
    def columns_q(self) -> int:
        return self.piece

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    @property
    def pieces(self) -> int:
        return self.d // self.piece

    @property
    def piece_bytes(self) -> int:
        return self.tile_n * self.piece * 2

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def numbers(self) -> int:
        """That the producer publishes for a consumer: of the tile, of all passes, and of each query."""
        return PUBLISHED + 3 + 2 * self.group

    @property
    def slabs_at_a_time(self) -> int:
        """Slabs of O of each query in SMEM at a time: P's place, and another one."""
        return 2

    @property
    def places(self) -> int:
        """Tiles of P, or slabs of O, of a consumer."""
        return self.queries * self.slabs_at_a_time

    @property
    def smem_bytes(self) -> int:
        of_consumer = (
            self.queries * self.tile_m * (self.row_bytes + self.slabs_at_a_time * 2 * SLAB + 4 * WARPS)
            + 4 * self.numbers
            + 16
        )
        return self.stages * (self.piece_bytes + 16) + CONSUMERS * of_consumer

    def __post_init__(self):
        if self.d % self.piece or self.keys != SLAB or self.spare % 8:
            raise ValueError(f"wanted d in pieces of {self.piece} and tiles of {SLAB} keys, got {self}")
        if self.tile_m % 8 or COLUMNS % self.tile_m or self.d != 512:
            raise ValueError(f"wanted 8, 16 or 32 heads, of which O fits into a warpgroup's registers, got {self}")
        if self.stages % self.pieces or self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit, for whole tiles: {self}")
