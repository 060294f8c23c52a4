"""The work of a thread on its elements of an accumulator, a row of which is a key, and a column a head."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.indexer import BLOCK
from kernels.lib.ptx import bits_of, power_of_two


def columns_of(acc: cute.Tensor, columns: int) -> cute.Tensor:
    """An accumulator as (c, r, j): column 8 j + 2 (lane % 4) + c, row r of a thread's two."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, columns // BLOCK)))


@dataclass(frozen=True)
class Scale:
    """A power of two, and its inverse."""

    by: Float32
    back: Float32

    @staticmethod
    def of(greatest: Float32) -> "Scale":
        """The scale that brings this nonnegative number into [1, 2)."""
        exponent = cutlass.max(cutlass.min(bits_of(greatest) >> 23, Int32(253)), Int32(1))
        back = power_of_two(exponent)
        return Scale(power_of_two(254 - exponent), back)
