"""From the accumulators of S and dP to P and dS, in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.lib.rows import ROWS, WARP, row_of
from kernels.lib.softmax import by_row, exp2
from kernels.lib.spans import mask_row

from .turn import SCALE


@cute.jit
def mask_span(scores: cute.Tensor, spans: cute.Tensor, slot: cute.Tensor, key0: Int32, thread: Int32):
    """-inf for every key that its row does not see, in the tile that begins with key0."""
    s = by_row(scores)
    keys = 4 * cute.size(s, mode=[1])
    if key0 < slot[1] or key0 + keys > slot[2]:
        column0 = key0 + cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(ROWS):
            start, stop = (spans[row_of(thread, r), i] for i in range(2))
            mask_row(s, r, start - column0, stop - column0)


@cute.jit
def find_absent(keys: cute.Tensor) -> cute.Tensor:
    """A bit for every key of a tile: whether it is absent."""
    absent = cute.make_rmem_tensor(cute.size(keys) // WARP, Uint32)
    for word in cutlass.range_constexpr(cute.size(absent)):
        absent[word] = Uint32(cute.arch.vote_ballot_sync(keys[word * WARP + cute.arch.lane_idx()] < 0))
    return absent


@cute.jit
def exponentiate(scores: cute.Tensor, numbers: cute.Tensor, scale_log2: Float32):
    """P <- exp(scale S - lse)."""
    s = by_row(scores)
    for r in cutlass.range_constexpr(ROWS):
        shift, scale = numbers[r, 0], of_row(scale_log2, numbers, r)
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            s[r, i] = exp2(s[r, i] * scale - shift)


@cute.jit
def differentiate(p: cute.Tensor, dp: cute.Tensor, numbers: cute.Tensor, scale: Float32):
    """dP <- scale P (f dP - delta), where f is the sink's factor, and delta is scaled already; P <- f P."""
    p, dp = by_row(p), by_row(dp)
    for r in cutlass.range_constexpr(ROWS):
        sink_factor, delta = numbers[r, 1], of_row(numbers[r, 2], numbers, r)
        factor = sink_factor * of_row(scale, numbers, r)
        for i in cutlass.range_constexpr(cute.size(p, mode=[1])):
            dp[r, i] = p[r, i] * (dp[r, i] * factor - delta)
            p[r, i] = p[r, i] * sink_factor


def of_row(x: Float32, numbers: cute.Tensor, r: int) -> Float32:
    """x, times the norm's scale of a row where that is among its numbers (`turn.py`)."""
    return x * numbers[r, SCALE] if cute.size(numbers, mode=[1]) > SCALE else x
