"""Rows of e4m3 with a float32 scale each, as an indexer's queries and keys are quantized."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .ptx import bits_of, float_of, to_e4m3

GREATEST = 448.0  # of e4m3
LEAST = 1e-4  # the least amax of a row
INFINITY, NAN = 0x7F800000, 0x7FC00000  # bits of a float32
NANS = 0x7F7F7F7F  # four codes


def amax(numbers: cute.Tensor, lanes: int) -> Int32:
    """The bits of the greatest |x| of so many neighbouring lanes; NaN is greater than all numbers."""
    most = Int32(0)
    for j in range(cute.size(numbers)):
        most = cutlass.max(most, bits_of(numbers[j]) & 0x7FFFFFFF)
    offset = 1
    while offset < lanes:
        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
        offset *= 2
    return most


@cute.jit
def quantized(
    numbers: cute.Tensor,
    lanes: cutlass.Constexpr,
    least: cutlass.Constexpr = LEAST,
    is_nan_for_all: cutlass.Constexpr = False,
) -> tuple[cute.Tensor, Float32]:
    """A lane's codes, four in a word, and the scale of the row that so many lanes have.

    is_nan_for_all: whether one number that is not finite makes the row NaN.
    """
    bits = amax(numbers, lanes)
    if cutlass.const_expr(is_nan_for_all):
        bits = bits if bits < INFINITY else Int32(NAN)
    most = float_of(bits)
    scale = (Float32(least) if most < least else most) * (1 / GREATEST)
    words = cute.make_rmem_tensor(cute.size(numbers) // 4, Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = to_e4m3(*(numbers[4 * i + j] / scale for j in range(4)))
        if cutlass.const_expr(is_nan_for_all):
            words[i] = words[i] if bits < INFINITY else Uint32(NANS)
    return words, scale


def write_words(words: cute.Tensor, target: cute.Pointer, count: int) -> None:
    """The first so many words of a lane."""
    aligned = cute.recast_ptr(target.align(min(4 * count, 16)), dtype=Uint32)
    place = cute.make_tensor(aligned, cute.make_layout(count))
    cute.autovec_copy(cute.make_tensor(words.iterator, cute.make_layout(count)), place)
