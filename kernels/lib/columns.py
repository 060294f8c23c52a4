"""Which columns of a 64-row WGMMA accumulator a thread holds, where a row is a key and a column a head.

A thread of the warpgroup holds the rows r = 0 and 1 (`row_of`) of the columns 8 j + 2 (lane % 4) + c. An accumulator is
indexed (c, r, j).
"""

import cutlass.cute as cute
from cutlass import Int32

from .rows import ROWS


def column_of(thread: Int32, i: int) -> Int32:
    """The column that element i of a thread's column state belongs to."""
    return i // 2 * 8 + thread % 4 * 2 + i % 2


def by_column(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator (c, r, j) seen as ((c, j), r); with eight columns it has no j."""
    columns = cute.size(acc) // ROWS
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, columns // 2), ROWS), stride=((1, 2 * ROWS), 2)))
