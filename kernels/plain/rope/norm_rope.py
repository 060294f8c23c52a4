"""The norm of query heads and then RoPE, in one pass; and that pass's gradient.

    norm_rope      y = rotate(x r),         r = rsqrt(mean(x²) + eps)    a warp a row, which registers hold
    norm_rope_bwd  dx = r g - r³ mean(g x) x,   g = dy rotated back      the same, of x and dy

`rope.py` says what rotate is. Both are bound by HBM, like it.
"""

from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.abi import NormRope
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.rows import WARP, ceil_div

from .config import VECTOR, Config
from .rows import as_float, read, rotate, token, total, write


class NormRopeKernel(Kernel):
    """The norm and RoPE, or their gradient, with a warp a row."""

    @property
    def symbol(self) -> str:
        return "norm_rope_bwd" if self.config.gradient else "norm_rope"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # [rows, d]
        table: cute.Pointer,  # float32 [rows / heads, dims / 2, 2]: cos and sin
        dy: cute.Pointer,  # like x, for the gradient; else not read
        y: cute.Pointer,  # like x: the result
        rows: Int32,
        heads: Int32,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        ctas = ceil_div(rows, Int32(self.config.tile_m))
        self.launch(x, table, dy, y, rows, heads, eps, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        table: cute.Pointer,
        dy: cute.Pointer,
        y: cute.Pointer,
        rows: Int32,
        heads: Int32,
        eps: Float32,
    ):
        c, thread = self.config, cute.arch.thread_idx()[0]
        lane = thread % WARP
        row0 = (cute.arch.block_idx()[0] * c.at_once + cute.arch.make_warp_uniform(thread // WARP)) * c.tile_n
        first_lane = WARP - c.dims // VECTOR  # lanes whose last chunk is rotated
        direction = Float32(-1.0 if c.gradient else 1.0)
        shape = (VECTOR, c.chunks, c.tile_n)
        given, cotangent = (cute.make_rmem_tensor(shape, self.dtype) for _ in range(2))
        rotations = cute.make_rmem_tensor((VECTOR, c.tile_n), Float32)
        for i in cutlass.range_constexpr(c.tile_n):
            row = cutlass.min(row0 + i, rows - 1)
            for j in cutlass.range_constexpr(c.chunks):
                place = Int64(row) * c.d + (j * WARP + lane) * VECTOR
                read(x + place, given[None, j, i])
                if cutlass.const_expr(c.gradient):
                    read(dy + place, cotangent[None, j, i])
            read(table + (token(row, heads) * c.dims + cutlass.max(lane - first_lane, 0) * VECTOR), rotations[None, i])
        if lane < first_lane:
            for i in cutlass.range_constexpr(c.tile_n):
                for k in cutlass.range_constexpr(VECTOR):
                    rotations[k, i] = Float32((k + 1) % 2)  # cos 1, sin 0
        for i in cutlass.range_constexpr(c.tile_n):
            of_x = [as_float(given[None, j, i]) for j in range(c.chunks)]
            of_y = of_x
            squares = total([(v, v) for v in of_x])
            r = cute.math.rsqrt(squares * (1.0 / c.d) + eps, fastmath=True)
            if cutlass.const_expr(c.gradient):
                of_y = [as_float(cotangent[None, j, i]) for j in range(c.chunks)]
                rotate(of_y[-1], rotations[None, i], direction)
                along = r * r * r * total(list(zip(of_y, of_x, strict=True))) * (1.0 / c.d)
            for j in cutlass.range_constexpr(c.chunks):
                values = cute.make_rmem_tensor(VECTOR, Float32)
                for k in cutlass.range_constexpr(VECTOR):
                    if cutlass.const_expr(c.gradient):
                        values[k] = r * of_y[j][k] - along * of_x[j][k]
                    else:
                        values[k] = r * of_x[j][k]
                if cutlass.const_expr(not c.gradient and j == c.chunks - 1):
                    rotate(values, rotations[None, i], direction)
                if row0 + i < rows:
                    write(y + (Int64(row0 + i) * c.d + (j * WARP + lane) * VECTOR), values)

    def examples(self, variant: NormRope) -> tuple:
        return *pointers(variant.dtype, "x", "float32", "x", "x"), i32(), i32(), Float32(1e-6)


def compile(variant: NormRope, out_dir: Path) -> Compiled:
    config = Config(variant.dtype, variant.dims, variant.d, variant.op == "norm_rope_bwd")
    return NormRopeKernel(config).compile(variant, out_dir)
