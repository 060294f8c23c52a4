"""P and dS out of the accumulators of S and dP, in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.lib.ptx import round_pair
from kernels.lib.rows import ROWS, WARP, row_of
from kernels.lib.softmax import LOG2_E, by_row, exp2
from kernels.lib.spans import mask_row

from .turn import add_to_sums, read_numbers

LEAST = -3.0e38  # of a score


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


def part_like(acc: cute.Tensor, whole: cute.Tensor, i: int) -> cute.Tensor:
    """The i-th part of the keys of an accumulator or an operand, as large as this accumulator."""
    return cute.make_tensor(whole.iterator + i * cute.size(acc), acc.layout)


@cute.jit
def exponentiate(scores: cute.Tensor, numbers: cute.Tensor, scale_log2: Float32):
    """P <- exp(scale S - lse)."""
    s = by_row(scores)
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            s[r, i] = exp2(s[r, i] * scale_log2 - numbers[r, 0])


@cute.jit
def differentiate(p: cute.Tensor, dp: cute.Tensor, numbers: cute.Tensor, scale: Float32):
    """dP <- scale P (f dP - delta), where f is the sink's factor, and delta is scaled already; P <- f P."""
    p, dp = by_row(p), by_row(dp)
    for r in cutlass.range_constexpr(ROWS):
        sink_factor, delta = numbers[r, 1], numbers[r, 2]
        factor = sink_factor * scale
        for i in cutlass.range_constexpr(cute.size(p, mode=[1])):
            dp[r, i] = p[r, i] * (dp[r, i] * factor - delta)
            p[r, i] = p[r, i] * sink_factor


@cute.jit
def differentiate_normed(
    p: cute.Tensor,
    ds: cute.Tensor,
    scores: cute.Tensor,
    dp: cute.Tensor,
    numbers: cute.Tensor,
    scale: Float32,
    thread: Int32,
):
    """`exponentiate`, `differentiate` and `round_to` at once, where a row has more numbers (`turn.py`): p <- f P,
    ds <- r dS, and to a row's sum it adds rowsum(S r dS), which is rowsum(x r dS K).

    numbers: in SMEM, for there are no registers for those of two rows.
    """
    s, dp, of_p, of_ds = by_row(scores), by_row(dp), words_of(p), words_of(ds)
    sums = cute.make_rmem_tensor(ROWS, Float32)
    sums.fill(0.0)
    for row in cutlass.range_constexpr(ROWS):
        shift, sink_factor, delta, r = read_numbers(numbers, row_of(thread, row), 4)
        of_row = scale * r
        scale_log2, factor, delta = of_row * LOG2_E, of_row * sink_factor, delta * r
        for j in cutlass.range_constexpr(cute.size(s, mode=[1]) // 2):
            x = tuple(exp2(s[row, i] * scale_log2 - shift) for i in (2 * j, 2 * j + 1))
            y = tuple(x[i] * (dp[row, 2 * j + i] * factor - delta) for i in range(2))
            for i in cutlass.range_constexpr(2):  # no score is -inf, for that times 0 is NaN
                sums[row] = sums[row] + y[i] * cute.arch.fmax(s[row, 2 * j + i], Float32(LEAST))
            of_p[row + ROWS * j] = round_pair(x[0] * sink_factor, x[1] * sink_factor, p.element_type)
            of_ds[row + ROWS * j] = round_pair(*y, ds.element_type)
    add_to_sums(sums, numbers, thread)


def words_of(operand: cute.Tensor) -> cute.Tensor:
    """An operand in registers, two numbers a word, in the order of `round_to`."""
    words = cute.recast_ptr(operand.iterator, dtype=Uint32)
    return cute.make_tensor(words, cute.make_layout(cute.size(operand) // 2))
