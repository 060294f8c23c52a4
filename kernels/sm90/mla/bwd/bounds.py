"""A bound of what a key's rows add to any number of its dKV, in any order:

    sum over rows of  |dS| max|q| + f P max|dO|

A tile's part is rounded upwards to a 64-bit integer, so that sums do not depend on their order. What is not finite sets
the highest bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.ptx import add_upwards
from kernels.lib.rows import ROWS
from kernels.lib.softmax import by_row

MOST_OF_P = 3  # the column of f max|dO| among a row's numbers
MARGIN = 1 + 2.0**-6  # of how P, dS and sums are rounded, here and where gradients are made
BYTES = 8  # of a bound


@cute.jit
def add_bounds(
    p: cute.Tensor,
    dp: cute.Tensor,
    numbers: cute.Tensor,
    scale: Float32,
    units: Float32,
    bound0: Int64,
    heads: Int32,
    listed: cute.Tensor,
):
    """Adds a tile's part of the bounds of its keys, each warp that of its rows.

    numbers: a row's sink_factor and delta are times its max|q| already.
    units: how many of the integers are 1.
    bound0, heads: the address of key 0's, and how many there are for a key.
    """
    p, dp = by_row(p), by_row(dp)
    count = cute.size(p, mode=[1])
    sums = cute.make_rmem_tensor(count, Float32)
    for i in cutlass.range_constexpr(count):
        sums[i] = Float32(0.0)
        for r in cutlass.range_constexpr(ROWS):
            x = dp[r, i] * (numbers[r, 1] * scale) - numbers[r, 2]
            sums[i] = sums[i] + p[r, i] * (cute.arch.fmax(x, -x) + numbers[r, MOST_OF_P])
    lane = cute.arch.lane_idx()
    for lanes in (16, 8, 4):  # that have other rows of the same keys: of either half of these the sums come together
        count //= 2
        upper = lane & lanes != 0
        for i in cutlass.range_constexpr(count):
            theirs = cute.arch.shuffle_sync_bfly(sums[i] if upper else sums[count + i], offset=lanes)
            sums[i] = (sums[count + i] if upper else sums[i]) + theirs
    for i in cutlass.range_constexpr(count):
        key = listed[lane * count + i]
        place = bound0 + Int64(cutlass.max(key, Int32(0))) * (heads * BYTES)
        add_upwards(place, key, sums[i] * (units * MARGIN))
