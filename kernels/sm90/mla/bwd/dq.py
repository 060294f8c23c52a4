"""One side's half of dQ: `mla_bwd` keeps it in registers over all tiles of keys."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels.lib.output import store_output
from kernels.lib.rows import ROWS, BoxedRows, PlacedTile
from kernels.lib.wgmma import MN_MAJOR, SLAB, accumulator, multiply, operand_b, tiled_mma, transposed


def part(k: cute.Tensor, rows: int, first: int, columns: int) -> cute.Tensor:
    """Some columns of a tile: whole slabs, or of one slab."""
    if columns % SLAB == 0:
        return cute.local_tile(k, (rows, columns), (0, first // columns))
    slab = cute.local_tile(k, (rows, SLAB), (0, first // SLAB))
    return cute.local_tile(cute.domain_offset((0, first % SLAB), slab), (rows, columns), (0, 0))


@dataclass(frozen=True)
class QGradient:
    """Half of the columns that are values too, and half of RoPE's where these are not: accumulators of their own."""

    columns: tuple[tuple[int, int], ...]  # the first one of each part, and how many
    mma: tuple[cute.TiledMma, ...]
    acc: tuple[cute.Tensor, ...]
    keys: tuple[cute.Tensor, ...]

    @staticmethod
    def of(c: Any, side: int, k: cute.Tensor, a_source: Any = warpgroup.OperandSource.SMEM) -> "QGradient":
        """a_source: where dS comes from."""
        columns = c.columns_of_dq(side)
        mma = tuple(tiled_mma(k.element_type, n, MN_MAJOR, a_source) for _, n in columns)
        keys = tuple(operand_b(x, transposed(part(k, c.tile_n, *of))) for x, of in zip(mma, columns, strict=True))
        acc = tuple(accumulator(x, n) for x, (_, n) in zip(mma, columns, strict=True))
        return QGradient(columns, mma, acc, keys)

    @cute.jit
    def add(self, ds: cute.Tensor, fresh: cutlass.Boolean):
        """Starts dS K of a tile of keys, a group of products for each part; fresh: it is the first tile."""
        for i in cutlass.range_constexpr(len(self.acc)):
            multiply(self.mma[i], self.acc[i], ds, self.keys[i], fresh)

    def clear(self) -> None:
        for acc in self.acc:
            acc.fill(0.0)

    def store(self, dq: cute.Pointer, tile: PlacedTile, boxed: BoxedRows, thread: Int32, d: int) -> None:
        ones = cute.make_rmem_tensor(ROWS, Float32)
        ones.fill(1.0)
        for acc, (first, _) in zip(self.acc, self.columns, strict=True):
            store_output(acc, ones, dq, tile, boxed, first, thread, d)
