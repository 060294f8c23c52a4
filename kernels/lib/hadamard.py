"""Rows that a few lanes hold in registers: rounding, and the Hadamard transform."""

import cutlass.cute as cute
from cutlass import Float32, Int32


def rounded(values: cute.Tensor, dtype) -> None:
    """Rounds in place."""
    values.store(values.load().to(dtype).to(Float32))


def hadamard(values: cute.Tensor, lane: Int32, d: int) -> None:
    """Sylvester's matrix over √d times a row of d numbers, of which each of some lanes has as many neighbours."""
    count = cute.size(values)
    for level in range(count.bit_length() - 1):
        for j in range(count):
            if not j >> level & 1:
                a, b = values[j], values[j + (1 << level)]
                values[j], values[j + (1 << level)] = a + b, a - b
    for level in range((d // count).bit_length() - 1):
        sign = Float32(1 - (lane >> level) % 2 * 2)
        for j in range(count):
            values[j] = cute.arch.shuffle_sync_bfly(values[j], offset=1 << level) + sign * values[j]
    for j in range(count):
        values[j] = values[j] * d**-0.5
