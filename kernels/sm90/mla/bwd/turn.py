"""The norm and RoPE of q, the RoPE of dO, and the gradient of both, inside of `mla_bwd`.

The forward pass takes q as a product makes it, and o is turned back (`kernels.lib.turned`). With

    x = rotate(q),  dO' = rotate(dO),  r = rsqrt(mean(q²) + eps)

a row's logits are (scale r) x K', and its normed query is r x. So dS times r, rounded, serves both gradients: dKV takes
its rows from x, and with z = (r dS) K

    dq = rotate back(z - x (r² / d) rowsum(x z))

The producer turns the last slab of Q and dO, which come first, while there is no room for the others yet; each thread
those chunks of 16 bytes that it has loaded itself. Right sums Q's squares while left makes S; that the last slab is
turned and rounded by then moves r by some 2e-5 of itself. Left has rowsum(x z) where it makes P and dS, for
x z' = S (r dS)'. Left and right store dq with the last tile of keys, while Q is still there. No product sees its
accumulator changed, for which ptxas would give up on it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.mla_backward import RowOperands, Turning
from kernels.lib.output import BLOCK, store_output
from kernels.lib.ptx import (
    bits_of,
    keep,
    load_four_if,
    load_matrices,
    load_shared,
    load_shared_four,
    round_pair,
    store_shared_words,
)
from kernels.lib.rows import ROWS, BoxedRows, PlacedTile, row_of
from kernels.lib.selections import CHUNK, LANES_A_ROW
from kernels.lib.softmax import by_row
from kernels.lib.turned import as_float, turned
from kernels.lib.wgmma import K_MAJOR, SLAB, accumulator, tiled_mma

from .smem import RIGHT

SCALE, SUM = 3, 4  # the columns of a row's r and of its rowsum(x z) among its numbers
LEAST = 2.0**-126  # of a mean of squares: the scale of a row of zeros is finite, whatever eps is
AT_ONCE = WARPGROUP // LANES_A_ROW  # rows of which a producer's threads have a chunk each
ROW_BYTES = 2 * SLAB  # of a slab
BLOCKS = SLAB // BLOCK
BOTH_SIDES = 1  # the number of a barrier: right knows r of all rows
STORED = 32  # columns at a time


def do_row(turning: Turning, tile: PlacedTile, query: Int32, head: Int32) -> Int64:
    """The number of a row of dO, which lies in groups of heads."""
    heads = keep(turning.do_heads)  # nothing that is computed of it stays in registers
    group = head // heads
    first = Int64(group) * keep(turning.do_queries) + (tile.batch * tile.n.s_q + query)
    return first * heads + (head - group * heads)


@cute.jit
def turn_rows(q: cute.Tensor, do: cute.Tensor, turning: Turning, tile: PlacedTile, queries: cute.Tensor, thread: Int32):
    """A producer's part of a row tile: waits for what it has copied, and turns the last slab.

    queries: of the thread's rows.
    """
    of_chunk, slab = chunk_of(thread), cute.size(q, mode=[1]) // SLAB - 1
    rotations = cute.make_rmem_tensor(CHUNK, Float32)
    cute.arch.cp_async_commit_group()
    for i in cutlass.range_constexpr(cute.size(queries)):
        read_rotations(rotations, turning, tile, queries[i], thread % LANES_A_ROW)
        if cutlass.const_expr(i == 0):
            cute.arch.cp_async_wait_group(0)
        for x in (q, do):
            turn_chunk(x, of_chunk, slab, i, rotations)
            cute.arch.sync_warp()  # or ptxas mixes it with the next one, for which there are no registers


@cute.jit
def add_squares(
    squares: cute.Tensor,
    q: cute.Tensor,
    piece: cutlass.Constexpr,
    fresh: cutlass.Constexpr,
    c: cutlass.Constexpr,
    thread: Int32,
):
    """Right's: sums the squares of a piece of the columns, in chunks of 16 bytes; fresh: it is the first one."""
    of_chunk = chunk_of(thread)
    if cutlass.const_expr(fresh):
        squares.fill(0.0)
    for slab in cutlass.range_constexpr(piece * c.slabs_of_piece, (piece + 1) * c.slabs_of_piece):
        for i in cutlass.range_constexpr(cute.size(squares)):
            squares[i] = squares[i] + sum_of_squares(load_chunk(q, of_chunk, slab, i))


@cute.jit
def write_scales(squares: cute.Tensor, numbers: cute.Tensor, turning: Turning, c: cutlass.Constexpr, thread: Int32):
    """Right writes r of a row tile."""
    for i in cutlass.range_constexpr(cute.size(squares)):
        of_row = cute.arch.warp_reduction_sum(squares[i], threads_in_group=LANES_A_ROW)
        if thread % LANES_A_ROW == 0:
            mean = of_row * (1.0 / c.d) + turning.eps
            row = thread // LANES_A_ROW + i * AT_ONCE
            numbers[row, SCALE] = cute.math.rsqrt(cutlass.max(mean, Float32(LEAST)), fastmath=True)


def chunk_of(thread: Int32) -> Int32:
    """The place of a thread's chunk of a slab, of its first row."""
    row0, chunk = thread // LANES_A_ROW, thread % LANES_A_ROW
    return row0 * ROW_BYTES + (chunk ^ row0 % 8) * 16


def read_numbers(numbers: cute.Tensor, row: Int32, count: int) -> tuple[Float32, ...]:
    """The first numbers of a row, loaded where this stands."""
    rows = cute.size(numbers, mode=[0])
    return tuple(load_shared(numbers.iterator.toint() + (i * rows + row) * 4) for i in range(count))


def place_of(x: cute.Tensor, of_chunk: Int32, slab: int, i: int) -> Int32:
    """The address of a chunk of a thread's i-th row."""
    return x.iterator.toint() + of_chunk + (slab * cute.size(x, mode=[0]) + i * AT_ONCE) * ROW_BYTES


def load_chunk(x: cute.Tensor, of_chunk: Int32, slab: int, i: int) -> list[Float32]:
    """The numbers of a chunk, loaded where this stands: a producer has no registers for several."""
    return unpacked(load_shared_four(place_of(x, of_chunk, slab, i)), x.element_type)


def sum_of_squares(x: list[Float32]) -> Float32:
    sums = [x[0] * x[0], x[1] * x[1]]
    for i, value in enumerate(x[2:]):
        sums[i % 2] = sums[i % 2] + value * value
    return sums[0] + sums[1]


def turn_chunk(x: cute.Tensor, of_chunk: Int32, slab: int, i: int, rotations: cute.Tensor) -> None:
    given = load_chunk(x, of_chunk, slab, i)
    pairs = (turned(*given[k : k + 2], *(rotations[k + j] for j in range(2))) for k in range(0, CHUNK, 2))
    words = tuple(round_pair(*pair, x.element_type) for pair in pairs)
    store_shared_words(place_of(x, of_chunk, slab, i), words)


def read_rotations(rotations: cute.Tensor, turning: Turning, tile: PlacedTile, query: Int32, chunk: Int32) -> None:
    """Reads the rotations of a chunk of a row."""
    place = (tile.at_query(turning.table, query, SLAB) + chunk * CHUNK).toint()
    for half in range(2):
        for i, x in enumerate(load_four_if(place + half * 16, Int32(1))):
            rotations[half * 4 + i] = x


def unpacked(words: tuple[Float32, ...], dtype: Any) -> list[Float32]:
    """The two numbers of each 32-bit word."""
    given = cute.make_rmem_tensor(len(words), Uint32)
    for i, word in enumerate(words):
        given[i] = Uint32(bits_of(word))
    return as_float(cute.make_tensor(cute.recast_ptr(given.iterator, dtype=dtype), cute.make_layout(2 * len(words))))


@cute.jit
def store_gradient(
    z: cute.Tensor,
    q: cute.Tensor,
    numbers: cute.Tensor,
    rows: RowOperands,
    tile: PlacedTile,
    thread: Int32,
    side: cutlass.Constexpr,
    c: cutlass.Constexpr,
):
    """dq <- this side's half of z, through the norm and RoPE."""
    slabs = c.half // SLAB
    first, turns = side * slabs, side == RIGHT
    boxed = BoxedRows.of(tile.n, 0, thread, c.gathers)
    of_z = by_row(z)
    rotations = cute.make_rmem_tensor((2, BLOCKS, ROWS), Float32)
    if cutlass.const_expr(turns):
        for r in cutlass.range_constexpr(ROWS):
            _, query, _ = tile.place(boxed, r)
            here = tile.at_query(rows.turning.table, cutlass.min(query, tile.n.s_q - 1), SLAB) + thread % 4 * 2
            for j in cutlass.range_constexpr(BLOCKS):
                pair = cute.make_tensor((here + j * BLOCK).align(8), cute.make_layout(2))
                cute.autovec_copy(pair, rotations[None, j, r])

    factor = cute.make_rmem_tensor(ROWS, Float32)
    for r in cutlass.range_constexpr(ROWS):
        row = row_of(thread, r)
        scale = numbers[row, SCALE]
        factor[r] = numbers[row, SUM] * (scale * scale * (-1.0 / c.d))

    ones = cute.make_rmem_tensor(ROWS, Float32)
    ones.fill(1.0)
    out = accumulator(tiled_mma(q.element_type, STORED, K_MAJOR), STORED)
    of_out = by_row(out)
    for block0 in cutlass.range_constexpr(0, slabs * BLOCKS, STORED // BLOCK):
        slab = block0 // BLOCKS
        of_q = tuple(load_rows(q, first + slab, block0 % BLOCKS + i, thread) for i in range(0, STORED // BLOCK, 2))
        for r in cutlass.range_constexpr(ROWS):
            for i in cutlass.range_constexpr(STORED // BLOCK):
                j, at = block0 % BLOCKS + i, 2 * (block0 + i)
                x, y = of_q[i // 2][i % 2][r]
                a, b = of_z[r, at] + factor[r] * x, of_z[r, at + 1] + factor[r] * y
                if cutlass.const_expr(turns and slab == slabs - 1):
                    a, b = turned(a, b, rotations[0, j, r], -rotations[1, j, r])
                of_out[r, 2 * i], of_out[r, 2 * i + 1] = a, b
        store_output(out, ones, rows.dq, tile, boxed, first * SLAB + block0 * BLOCK, thread, c.d)


@cute.jit
def store_zeros(rows: RowOperands, tile: PlacedTile, thread: Int32, side: cutlass.Constexpr, c: cutlass.Constexpr):
    """dq <- 0, this side's half of a tile in which no row sees a key."""
    boxed, ones = BoxedRows.of(tile.n, 0, thread, c.gathers), cute.make_rmem_tensor(ROWS, Float32)
    ones.fill(1.0)
    zeros = accumulator(tiled_mma(rows.q.dtype, STORED, K_MAJOR), STORED)
    zeros.fill(0.0)
    for column in cutlass.range_constexpr(side * c.half, (side + 1) * c.half, STORED):
        store_output(zeros, ones, rows.dq, tile, boxed, column, thread, c.d)


def load_rows(q: cute.Tensor, slab: int, block: int, thread: Int32) -> tuple:
    """Loads, of this block of 8 columns and the next one, two numbers for each of a thread's rows, as an accumulator
    has them; tiles begin at a multiple of 1024 bytes."""
    lane = thread % WARP
    row = thread // WARP * 16 + lane % 16  # of two matrices of 8 rows
    of_lane = q.iterator.toint() + row * ROW_BYTES + (lane // 16 ^ row % 8) * 16
    words = load_matrices((of_lane ^ (block * 16)) + slab * cute.size(q, mode=[0]) * ROW_BYTES)
    given = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        given[i] = word
    x = as_float(cute.make_tensor(cute.recast_ptr(given.iterator, dtype=q.element_type), cute.make_layout(8)))
    return (x[0:2], x[2:4]), (x[4:6], x[6:8])


@cute.jit
def add_to_sums(sums: cute.Tensor, numbers: cute.Tensor, thread: Int32):
    """Left adds what it has of its rows' sums, of a tile of keys."""
    odd = thread % 2 == 1
    of_row = cute.arch.shuffle_sync_bfly(sums[0] if odd else sums[1], offset=1) + (sums[1] if odd else sums[0])
    of_row = of_row + cute.arch.shuffle_sync_bfly(of_row, offset=2)
    if thread % 4 < ROWS:
        row = row_of(thread, 0) + thread % 2 * (row_of(thread, 1) - row_of(thread, 0))
        numbers[row, SUM] = numbers[row, SUM] + of_row
