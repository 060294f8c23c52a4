"""Compile-time choices of `mla_columns_sm90`, and what its two kernels leave for one another."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.lib.launch import SMEM_LIMIT, WARP, WARPGROUP
from kernels.lib.rows import ROWS_OF_WARPGROUP, RowTile, divide
from kernels.lib.wgmma import SLAB

TILE = 64  # keys
SCORES = ROWS_OF_WARPGROUP * TILE  # of a tile of rows and one of keys
SCORES_BYTES = 4 * SCORES
EACH = SCORES // WARPGROUP  # of a thread, in the order of its accumulator
CHUNK = 4  # that it moves at once


class Between(NamedTuple):
    """The scores that the first kernel leaves for the second, besides keys, of queries with room for `tiles` tiles."""

    scores: cute.Pointer  # float32 [queries, head tiles, tiles, EACH / CHUNK, threads, CHUNK]; -inf for absent keys
    tops: cute.Pointer  # float32 [queries, head tiles, tiles, rows]: the greatest of each row
    counts: cute.Pointer  # int32 [queries]: tiles that it sees
    tiles: Int32

    def of_rows(self, tile: RowTile) -> Int64:
        """The number of a row tile's first tile of scores."""
        return (Int64(query_of(tile)) * tile.n.tiles_inner + divide(tile.inner0, tile.n.box_inner)[0]) * self.tiles


def query_of(tile: RowTile) -> Int32:
    """The query of a row tile's heads, counted over all batch entries."""
    return tile.batch * tile.n.s_q + tile.outer0


@dataclass(frozen=True)
class Config:
    """The choices of the second kernel, and the sizes that follow from them."""

    d: int
    dtype: str
    tile_m: int = ROWS_OF_WARPGROUP
    tile_n: int = SLAB  # columns of a CTA
    stages: int = 8  # tiles of keys of which SMEM holds scores and columns
    places: int = 4  # the same of P

    @property
    def threads(self) -> int:
        return 3 * WARPGROUP + WARP

    @property
    def stage_bytes(self) -> int:
        return 2 * TILE * self.tile_n + SCORES_BYTES

    @property
    def smem_bytes(self) -> int:
        p, sums, barriers = self.places * 2 * SCORES, 2 * 4 * self.tile_m, 8 * 2 * (self.stages + self.places)
        return self.stages * self.stage_bytes + p + sums + barriers + 16

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    def __post_init__(self):
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
