"""Brings sums of dKV to L2 before the kernel adds to them.

Where L2 cannot hold all sums, a reduction fetches what it adds to from memory, 128 bytes at a time. A bulk copy fetches
a key's whole row at once, while the tensor cores make its products.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.lib.ptx import prefetch_bulk
from kernels.lib.rows import RowTile
from kernels.lib.selections import LANES_A_ROW

L2_HOLDS = 32 << 20  # bytes of sums


@cute.jit
def prefetch_sums(
    sources: tuple,
    tiles_of_first: Int32,
    tile: RowTile,
    keys: cute.Tensor,
    t: Int32,
    thread: Int32,
    row_bytes: cutlass.Constexpr,
):
    """Prefetches the sums of the keys that this thread gathers, in tile t of all sources."""
    if cutlass.const_expr(len(sources) == 1):
        prefetch_of(sources[0], tile, keys, thread, row_bytes)
    else:
        if t < tiles_of_first:
            prefetch_of(sources[0], tile, keys, thread, row_bytes)
        else:
            prefetch_of(sources[1], tile, keys, thread, row_bytes)


@cute.jit
def prefetch_of(source: Any, tile: RowTile, keys: cute.Tensor, thread: Int32, row_bytes: cutlass.Constexpr):
    n = tile.n
    if (Int64(source.s_kv) * n.pairs * row_bytes > L2_HOLDS) & (thread % LANES_A_ROW == 0):
        first = source.dkv.toint() + (Int64(tile.batch) * source.s_batch * n.h_kv + tile.kv_head) * row_bytes
        for i in cutlass.range_constexpr(cute.size(keys)):
            if keys[i] >= 0:
                prefetch_bulk(first + Int64(keys[i]) * (n.h_kv * row_bytes), row_bytes)
