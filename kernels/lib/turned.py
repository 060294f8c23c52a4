"""The norm and RoPE of q, and RoPE back of o, inside of attention.

    q' = rotate(r q),  r = rsqrt(mean(q²) + eps)          no weight; rotate turns the last columns, by the row's query
    S  = scale q' k  = (scale r) (rotate(q) k)            so r is a part of a row's scale, and is never rounded
    o  = rotate back(P k)                                 before it is rounded

`kernels.plain.rope` makes the same in passes of their own. Two warpgroups share a tile of 64 rows of q in SMEM, in
slabs: each sums the squares of its half of the columns, and one turns the last slab. A thread takes chunks of
16 bytes of the two rows that it holds of an accumulator, so the numbers of rows are where softmax needs them. In an
accumulator it holds both numbers of a pair of columns.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .ptx import round_pair
from .rows import ROWS, BoxedRows, RowTile, row_of
from .softmax import by_row
from .wgmma import SLAB

CHUNK = 8  # numbers of 16 bytes
QUAD = 4  # lanes that hold a row
MINE = SLAB // CHUNK // QUAD  # chunks of a row's slab that a lane takes


class Turn(NamedTuple):
    """The operands that determine the norm and the rotation of rows."""

    scale_log2: Float32
    table: cute.Pointer  # float32 [b, s_q, SLAB]: cos and sin of each pair of the last columns, by turns
    eps: Float32

    def at(self, tile: RowTile, boxed: BoxedRows, r: int) -> cute.Pointer:
        """Returns where the rotations of a thread's row are; a row that does not exist has those of another one."""
        _, query, _ = tile.place(boxed, r)
        return tile.at_query(self.table, cutlass.min(query, tile.n.s_q - 1), SLAB)

    def scale(self, squares: Float32, d: int) -> Float32:
        """The scale of a row, in units of log2, from the sum of its squares."""
        return self.scale_log2 * cute.math.rsqrt(squares * (1.0 / d) + self.eps, fastmath=True)


@cute.jit
def prepare_rows(
    q: cute.Tensor,
    slabs: cutlass.Constexpr,
    squares: cute.Tensor,
    turn: Turn,
    tile: RowTile,
    boxed: BoxedRows,
    thread: Int32,
    turns: cutlass.Constexpr,
):
    """squares <- the sums over these slabs of q (rows, columns), of a thread's rows; then it turns the last slab, if
    wanted. The sums hide the latency of the table.

    Rows that a tile's box does not have are nowhere: nothing is read of them.
    """
    rotations = cute.make_rmem_tensor((MINE * CHUNK, ROWS), Float32)
    if cutlass.const_expr(turns):
        for r in cutlass.range_constexpr(ROWS):
            place = (turn.at(tile, boxed, r) + thread % QUAD * (MINE * CHUNK)).align(16)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(MINE * CHUNK)), rotations[None, r])
    for r in cutlass.range_constexpr(ROWS):
        row = row_of(thread, r)
        squares[r] = 0.0
        if row < tile.n.box_inner * tile.n.box_outer:
            chunks = [chunk_of(q, slab, row, thread, i) for slab in slabs for i in range(MINE)]
            squares[r] = sum_of_squares(chunks)
            if cutlass.const_expr(turns):
                for i in cutlass.range_constexpr(MINE):
                    turn_chunk(chunks[i - MINE], rotations[None, r], i * CHUNK)
        squares[r] = cute.arch.warp_reduction_sum(squares[r], threads_in_group=QUAD)


def sum_of_squares(chunks: list[cute.Tensor]) -> Float32:
    """Sums the squares of chunks in SMEM, all loaded first; four chains have a quarter of the latency of one."""
    sums, given = [Float32(0.0)] * 4, [loaded(chunk) for chunk in chunks]
    for x in given:
        for k, value in enumerate(as_float(x)):
            sums[k % 4] = sums[k % 4] + value * value
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def turn_chunk(chunk: cute.Tensor, rotations: cute.Tensor, first: int) -> None:
    """The rotations of its pairs begin with the `first` number."""
    given = loaded(chunk)
    values, words = as_float(given), cute.recast_tensor(given, Uint32)
    for k in range(0, CHUNK, 2):
        pair = turned(values[k], values[k + 1], rotations[first + k], rotations[first + k + 1])
        words[k // 2] = round_pair(*pair, chunk.element_type)
    cute.autovec_copy(given, chunk)


def chunk_of(q: cute.Tensor, slab: int, row: Int32, thread: Int32, i: int) -> cute.Tensor:
    """A lane's i-th chunk of a row's slab: the first lane of a quad has 0 and 1, and so on. So eight lanes, which have
    two rows of different parities, read from all banks.
    """
    words, chunk = cute.recast_ptr(q.iterator, dtype=Uint32), thread % QUAD * MINE + i
    at = (slab * cute.size(q, mode=[0]) + row) * SLAB + (chunk ^ (row % CHUNK)) * CHUNK
    return cute.recast_tensor(
        cute.make_tensor((words + at // 2).align(16), cute.make_layout(CHUNK // 2)), q.element_type
    )


def loaded(chunk: cute.Tensor) -> cute.Tensor:
    given = cute.make_rmem_tensor(CHUNK, chunk.element_type)
    cute.autovec_copy(chunk, given)
    return given


def turn_back(acc: cute.Tensor, turn: Turn, tile: RowTile, boxed: BoxedRows, thread: Int32) -> None:
    """Rotates an accumulator of the last slab back."""
    for r in range(ROWS):
        rotate_back(acc, acc, rotations_of(turn, tile, boxed, thread, r), r)


def rotations_of(turn: Turn, tile: RowTile, boxed: BoxedRows, thread: Int32, r: int) -> cute.Tensor:
    """The rotations of the pairs that a thread holds of a row of an accumulator of the last slab: (2, pair)."""
    blocks, here = SLAB // CHUNK, turn.at(tile, boxed, r) + thread % QUAD * 2
    rotations = cute.make_rmem_tensor((2, blocks), Float32)
    for j in range(blocks):
        place = (here + j * CHUNK).align(8)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), rotations[None, j])
    return rotations


def rotate_back(given: cute.Tensor, made: cute.Tensor, rotations: cute.Tensor, r: int) -> None:
    """A row of the one accumulator of the last slab, rotated back, becomes that of the other, which may be the same."""
    x, y = by_row(given), by_row(made)
    for j in range(SLAB // CHUNK):
        a, b = turned(x[r, 2 * j], x[r, 2 * j + 1], rotations[0, j], -rotations[1, j])
        y[r, 2 * j], y[r, 2 * j + 1] = a, b


def turned(a: Float32, b: Float32, cos: Float32, sin: Float32) -> tuple[Float32, Float32]:
    return a * cos - b * sin, a * sin + b * cos


def as_float(x: cute.Tensor) -> list[Float32]:
    values = cute.make_rmem_tensor(cute.size(x), Float32)
    values.store(x.load().to(Float32))
    return [values[k] for k in range(cute.size(values))]
