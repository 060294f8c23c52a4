"""O from the accumulator's registers to memory, without SMEM: finished, or as the part of a split."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .rows import ROWS, BoxedRows, RowTile
from .softmax import Softmax, by_row
from .wgmma import round_pair

BLOCK = 8  # columns of which a quad's lanes hold two each: 16 bytes when rounded


@cute.jit
def store_output(
    acc: cute.Tensor,
    factor: cute.Tensor,
    o: cute.Pointer,
    tile: RowTile,
    boxed: BoxedRows,
    column0: Int32,
    thread: Int32,
    d: int,
):
    """o[row, column0:] <- factor * acc, rounded, for the rows that exist.

    A lane of a quad holds two columns of each block of eight. Four blocks at a time are transposed within the quad, so
    that each lane has a whole block, 16 bytes, to store, and the quad 64 bytes of a row. All of a row are rounded, then
    transposed, then stored: group by group, each would wait for its own shuffles.
    """
    lane = thread % 4
    odd, high = lane % 2 == 1, lane // 2 == 1
    rows = by_row(acc)
    groups = cute.size(rows, mode=[1]) // 8
    packed = cute.make_rmem_tensor((4, groups), Uint32)
    for r in cutlass.range_constexpr(ROWS):
        exists, query, head = tile.place(boxed, r)
        target = o + (tile.row_index(query, head) * d + column0 + lane * BLOCK)
        for i in cutlass.range_constexpr(4 * groups):
            packed[i] = round_pair(rows[r, 2 * i] * factor[r], rows[r, 2 * i + 1] * factor[r], o.dtype)
        for group in cutlass.range_constexpr(groups):
            transpose_in_quad(packed[None, group], odd, high)
        if exists:
            for group in cutlass.range_constexpr(groups):
                place = cute.make_tensor(
                    cute.recast_ptr(target + group * 4 * BLOCK, dtype=Uint32).align(16), cute.make_layout(4)
                )
                cute.autovec_copy(packed[None, group], place)


@cute.jit
def store_part(
    acc: cute.Tensor,
    softmax: Softmax,
    parts: cute.Pointer,
    tile: RowTile,
    boxed: BoxedRows,
    column0: Int32,
    thread: Int32,
    d: int,
):
    """As `store_output`, in fp32; nothing for a row that saw no key, whose lse says so.

    Of two blocks of eight columns at a time, lanes 0 and 2 of a quad take the first and lanes 1 and 3 the second.
    """
    lane = thread % 4
    odd = lane % 2 == 1
    rows = by_row(acc)
    values = cute.make_rmem_tensor(4, Float32)
    for r in cutlass.range_constexpr(ROWS):
        exists, query, head = tile.place(boxed, r)
        target = parts + (tile.row_index(query, head) * d + column0 + lane % 2 * BLOCK + lane // 2 * 4)
        exists = exists & (softmax.row_sum[r] != 0.0)
        for pair in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 4):
            for i in cutlass.range_constexpr(2):
                first, second = (rows[r, 4 * pair + 2 * block + i] * softmax.factor[r] for block in range(2))
                received = cute.arch.shuffle_sync_bfly(first if odd else second, offset=1)
                values[i], values[2 + i] = received if odd else first, second if odd else received
            if exists:
                cute.autovec_copy(values, cute.make_tensor((target + pair * 2 * BLOCK).align(16), cute.make_layout(4)))


@cute.jit
def transpose_in_quad(x: cute.Tensor, odd: cutlass.Boolean, high: cutlass.Boolean):
    """x[i] of lane j <-> x[j] of lane i, for the four lanes of a quad."""
    for bit, offset, pairs in ((odd, 1, ((0, 1), (2, 3))), (high, 2, ((0, 2), (1, 3)))):
        for i, j in pairs:
            received = cute.arch.shuffle_sync_bfly(x[i] if bit else x[j], offset=offset)
            x[i], x[j] = received if bit else x[i], x[j] if bit else received
