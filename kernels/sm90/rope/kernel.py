"""RoPE of rows, in place; the norm of query heads and then RoPE, in one pass; and that pass's gradient.

    rope           x[-dims:] = turn(x[-dims:])                           dims / 8 lanes a row, nothing else is touched
    norm_rope      y = turn(x r),           r = rsqrt(mean(x²) + eps)    a warp a row, which registers hold
    norm_rope_bwd  dx = r g - r³ mean(g x) x,   g = turned back dy       the same, of x and dy

turn: (x[2i], x[2i+1]) -> (x[2i] cos - x[2i+1] sin, x[2i] sin + x[2i+1] cos), by a table of cos and sin for each token.

All are bound by HBM: they read a number once and write it once. A lane loads 16 bytes of each of several rows, and asks
for all of them before it needs the first. Rows are (token, head); a token's row of the table comes from L1.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.abi import NormRope, Rope
from kernels.aot import Compiled, compile_ahead
from kernels.lib.launch import element_type, i32, launch_facts, pointers
from kernels.lib.rows import WARP, ceil_div
from kernels.lib.wgmma import round_pair

VECTOR = 8  # numbers of 16 bits in a load


@dataclass(frozen=True)
class Config:
    dtype: str
    dims: int  # the last numbers of a row, which are rotated
    d: int = 0  # numbers of a normalised row; without a norm, known when the kernel runs
    gradient: bool = False
    threads: int = 256
    smem_bytes: int = 0

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return WARP if self.d else self.dims // VECTOR

    @property
    def at_once(self) -> int:
        """Rows that a CTA has at a time."""
        return self.threads // self.lanes

    @property
    def tile_n(self) -> int:
        """Rows of a lane."""
        return 2 if self.gradient else 4

    @property
    def tile_m(self) -> int:
        """Rows of a CTA."""
        return self.at_once * self.tile_n

    @property
    def chunks(self) -> int:
        """Chunks of a normalised row that a lane has."""
        return self.d // (WARP * VECTOR)

    def __post_init__(self):
        if self.dims % (2 * VECTOR) or self.dims > WARP * VECTOR or WARP % (self.dims // VECTOR):
            raise ValueError(f"dims must divide {WARP * VECTOR} and be a multiple of {2 * VECTOR}, got {self.dims}")
        if self.d % (WARP * VECTOR):
            raise ValueError(f"d must be a multiple of {WARP * VECTOR}, got {self.d}")


class RopeSm90:
    """RoPE in place."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = element_type(config.dtype)

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
        c = self.config
        self.kernel(x, table, rows, heads, d, direction).launch(
            grid=(ceil_div(rows, Int32(c.tile_m)), 1, 1), block=(c.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, table: cute.Pointer, rows: Int32, heads: Int32, d: Int32, direction: Float32):
        c, thread = self.config, cute.arch.thread_idx()[0]
        column = thread % c.lanes * VECTOR
        row0 = cute.arch.block_idx()[0] * c.tile_m + thread // c.lanes
        given = cute.make_rmem_tensor((VECTOR, c.tile_n), self.dtype)
        turns = cute.make_rmem_tensor((VECTOR, c.tile_n), Float32)
        if row0 < rows:
            for i in cutlass.range_constexpr(c.tile_n):
                row = row0 + i * c.at_once
                row = row if row < rows else row0  # without a branch, so that all loads are under way at a time
                read(x + (Int64(row) * d + (d - c.dims + column)), given[None, i])
                read(table + (token(row, heads) * c.dims + column), turns[None, i])
            for i in cutlass.range_constexpr(c.tile_n):
                row = row0 + i * c.at_once
                values = as_float(given[None, i])
                turn(values, turns[None, i], direction)
                if row < rows:
                    write(x + (Int64(row) * d + (d - c.dims + column)), values)


class NormRopeSm90:
    """The norm and RoPE, or their gradient, with a warp a row."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = element_type(config.dtype)

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
        c = self.config
        self.kernel(x, table, dy, y, rows, heads, eps).launch(
            grid=(ceil_div(rows, Int32(c.tile_m)), 1, 1), block=(c.threads, 1, 1), stream=stream
        )

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
        turns = cute.make_rmem_tensor((VECTOR, c.tile_n), Float32)
        for i in cutlass.range_constexpr(c.tile_n):
            row = cutlass.min(row0 + i, rows - 1)
            for j in cutlass.range_constexpr(c.chunks):
                place = Int64(row) * c.d + (j * WARP + lane) * VECTOR
                read(x + place, given[None, j, i])
                if cutlass.const_expr(c.gradient):
                    read(dy + place, cotangent[None, j, i])
            read(table + (token(row, heads) * c.dims + cutlass.max(lane - first_lane, 0) * VECTOR), turns[None, i])
        if lane < first_lane:
            for i in cutlass.range_constexpr(c.tile_n):
                for k in cutlass.range_constexpr(VECTOR):
                    turns[k, i] = Float32((k + 1) % 2)  # cos 1, sin 0
        for i in cutlass.range_constexpr(c.tile_n):
            of_x = [as_float(given[None, j, i]) for j in range(c.chunks)]
            of_y = of_x
            squares = total([(v, v) for v in of_x])
            r = cute.math.rsqrt(squares * (1.0 / c.d) + eps, fastmath=True)
            if cutlass.const_expr(c.gradient):
                of_y = [as_float(cotangent[None, j, i]) for j in range(c.chunks)]
                turn(of_y[-1], turns[None, i], direction)
                along = r * r * r * total(list(zip(of_y, of_x, strict=True))) * (1.0 / c.d)
            for j in cutlass.range_constexpr(c.chunks):
                values = cute.make_rmem_tensor(VECTOR, Float32)
                for k in cutlass.range_constexpr(VECTOR):
                    if cutlass.const_expr(c.gradient):
                        values[k] = r * of_y[j][k] - along * of_x[j][k]
                    else:
                        values[k] = r * of_x[j][k]
                if cutlass.const_expr(not c.gradient and j == c.chunks - 1):
                    turn(values, turns[None, i], direction)
                if row0 + i < rows:
                    write(y + (Int64(row0 + i) * c.d + (j * WARP + lane) * VECTOR), values)


def token(row: Int32, heads: Int32) -> Int64:
    return Int64(Uint32(row) // Uint32(heads))


def read(source: cute.Pointer, target: cute.Tensor) -> None:
    cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(VECTOR)), target)


def write(target: cute.Pointer, values: cute.Tensor) -> None:
    """Writes rounded numbers."""
    packed = cute.make_rmem_tensor(VECTOR // 2, Uint32)
    for k in range(VECTOR // 2):
        packed[k] = round_pair(values[2 * k], values[2 * k + 1], target.dtype)
    place = cute.recast_ptr(target, dtype=Uint32).align(16)
    cute.autovec_copy(packed, cute.make_tensor(place, cute.make_layout(VECTOR // 2)))


def as_float(x: cute.Tensor) -> cute.Tensor:
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.store(x.load().to(Float32))
    return values


def turn(values: cute.Tensor, turns: cute.Tensor, direction: Float32) -> None:
    """Rotates pair by pair; turns has cos and sin of each pair."""
    for k in range(VECTOR // 2):
        a, b, cos, sin = values[2 * k], values[2 * k + 1], turns[2 * k], turns[2 * k + 1] * direction
        values[2 * k], values[2 * k + 1] = a * cos - b * sin, a * sin + b * cos


def total(products: list[tuple[cute.Tensor, cute.Tensor]]) -> Float32:
    """The sum of the products of pairs of chunks, over the warp."""
    found = Float32(0.0)
    for a, b in products:
        for k in range(VECTOR):
            found = found + a[k] * b[k]
    for offset in (16, 8, 4, 2, 1):
        found = found + cute.arch.shuffle_sync_bfly(found, offset=offset)
    return found


def compile(variant: Rope | NormRope, out_dir: Path) -> Compiled:
    if isinstance(variant, Rope):
        config = Config(variant.dtype, variant.dims)
        entry, of_rows, numbers = RopeSm90(config), ("x", "float32"), (i32(), i32(), i32(), Float32(1.0))
    else:
        config = Config(variant.dtype, variant.dims, variant.d, variant.op == "norm_rope_bwd")
        entry, of_rows, numbers = NormRopeSm90(config), ("x", "float32", "x", "x"), (i32(), i32(), Float32(1e-6))
    return compile_ahead(
        entry,
        type(entry).kernel,
        *pointers(variant.dtype, *of_rows),
        *numbers,
        name=variant.op,
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(config),
    )
