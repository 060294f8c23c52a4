"""Finds once which keys every tile of rows sees, because every CTA of `mha_dkdv` needs those of all tiles.

A warp takes a tile of rows of one batch entry. The result is the same for all KV heads.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from kernels.abi import TileSpans
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.rows import WARP, Extents, RowTile, ceil_div, divide, extents
from kernels.lib.spans import SpanOperands, open_span, prefetch_span

NUMBERS = 2  # numbers of a tile: lo and hi of the union of its rows' spans


@dataclass(frozen=True)
class Config:
    """Compile-time choices."""

    tile_m: int = 128  # most rows of a tile
    tile_n: int = 4  # tiles that a CTA takes
    smem_bytes: int = 0

    @property
    def threads(self) -> int:
        return WARP * self.tile_n

    @property
    def launch_options(self) -> dict[str, int]:
        return {}


class TileSpansSm90(Kernel):
    symbol = "tile_spans_sm90"

    @cute.jit
    def __call__(
        self,
        start: cute.Pointer,
        stop: cute.Pointer,
        seen: cute.Pointer,  # int32 [b, row tile, NUMBERS]
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, False, b, s_q, h_q, h_kv, Int32(1), Int32(1))
        self.launch(start, stop, seen, n, ctas=ceil_div(n.tiles_of_pair * b, c.tile_n), stream=stream)

    @cute.kernel
    def kernel(self, start: cute.Pointer, stop: cute.Pointer, seen: cute.Pointer, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        i = cute.arch.block_idx()[0] * c.tile_n + warp
        if i < n.tiles_of_pair * divide(n.pairs, n.h_kv)[0]:
            batch, tile = divide(i, n.tiles_of_pair)
            outer, inner = divide(tile, n.tiles_inner)
            rows = RowTile(n, Int32(0), batch, Int32(0), inner * n.box_inner, outer * n.box_outer)
            operands = SpanOperands(start, stop, Int32(2**31 - 1))  # the reader has its own keys
            span = open_span(operands, rows, WARP, prefetch_span(operands, rows, c.tile_m))
            if cute.arch.lane_idx() == 0:
                values = cute.make_rmem_tensor(NUMBERS, Int32)
                for j, x in enumerate((span.lo, span.hi)):
                    values[j] = x
                target = (seen + i * NUMBERS).align(8)
                cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(NUMBERS)))

    def examples(self, variant: TileSpans) -> tuple:
        return *pointers("bfloat16", "int32", "int32", "int32"), *(i32() for _ in range(4))


@cute.jit
def read_seen(seen: cute.Pointer, tile: Int32) -> tuple[Int32, Int32]:
    """(lo, hi) of a tile of rows."""
    values = cute.make_rmem_tensor(NUMBERS, Int32)
    cute.autovec_copy(cute.make_tensor((seen + tile * NUMBERS).align(8), cute.make_layout(NUMBERS)), values)
    return values[0], values[1]


def compile(variant: TileSpans, out_dir: Path) -> Compiled:
    return TileSpansSm90(Config()).compile(variant, out_dir)
