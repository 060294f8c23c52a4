"""RoPE of rows, in place.

    x[-dims:] = rotate(x[-dims:])                           dims / 8 lanes a row, nothing else is touched

    rotate: (x[2i], x[2i+1]) -> (x[2i] cos - x[2i+1] sin, x[2i] sin + x[2i+1] cos)

A table has cos and sin for each token.

It is bound by HBM: it reads a number once and writes it once. A lane loads 16 bytes of each of several rows, and issues
all loads before it needs the first. Rows are (token, head); a token's row of the table comes from L1.
"""

from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.abi import Rope
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.rows import ceil_div

from .config import VECTOR, Config
from .rows import as_float, read, rotate, token, write


class RopeKernel(Kernel):
    """RoPE in place."""

    symbol = "rope"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # [rows, d]
        table: cute.Pointer,  # float32 [rows / heads, dims / 2, 2]: cos and sin
        rows: Int32,
        heads: Int32,
        d: Int32,
        direction: Float32,  # 1, or -1 to rotate back
        stream: cuda.CUstream,
    ):
        ctas = ceil_div(rows, Int32(self.config.tile_m))
        self.launch(x, table, rows, heads, d, direction, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Pointer, table: cute.Pointer, rows: Int32, heads: Int32, d: Int32, direction: Float32):
        c, thread = self.config, cute.arch.thread_idx()[0]
        column = thread % c.lanes * VECTOR
        row0 = cute.arch.block_idx()[0] * c.tile_m + thread // c.lanes
        given = cute.make_rmem_tensor((VECTOR, c.tile_n), self.dtype)
        rotations = cute.make_rmem_tensor((VECTOR, c.tile_n), Float32)
        if row0 < rows:
            for i in cutlass.range_constexpr(c.tile_n):
                row = row0 + i * c.at_once
                row = row if row < rows else row0  # without a branch, so that all loads are under way at a time
                read(x + (Int64(row) * d + (d - c.dims + column)), given[None, i])
                read(table + (token(row, heads) * c.dims + column), rotations[None, i])
            for i in cutlass.range_constexpr(c.tile_n):
                row = row0 + i * c.at_once
                values = as_float(given[None, i])
                rotate(values, rotations[None, i], direction)
                if row < rows:
                    write(x + (Int64(row) * d + (d - c.dims + column)), values)

    def examples(self, variant: Rope) -> tuple:
        return *pointers(variant.dtype, "x", "float32"), *(i32() for _ in range(3)), Float32(1.0)


def compile(variant: Rope, out_dir: Path) -> Compiled:
    return RopeKernel(Config(variant.dtype, variant.dims)).compile(variant, out_dir)
