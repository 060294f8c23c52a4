"""What a thread does with its elements of an accumulator, a row of which is a key, and a column a head."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.indexer import BLOCK
from kernels.lib.ptx import ptx


def columns_of(acc: cute.Tensor, columns: int) -> cute.Tensor:
    """An accumulator as (c, r, j): column 8 j + 2 (lane % 4) + c, row r of a thread's two."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, columns // BLOCK)))


def relu(x: Float32) -> Float32:
    """NaN stays NaN."""
    return ptx("max.NaN.f32 $0, $1, 0f00000000;", Float32(x), gives=(Float32,), pure=True)[0]


def greater(a: Float32, b: Float32) -> Float32:
    """The greater of a, which is nonnegative, and |b|."""
    text = "{ .reg .f32 x; abs.f32 x, $2; max.f32 $0, $1, x; }"
    return ptx(text, Float32(a), Float32(b), gives=(Float32,), pure=True)[0]


@dataclass(frozen=True)
class Scale:
    """A power of two, and its inverse."""

    by: Float32
    back: Float32

    @staticmethod
    def of(greatest: Float32) -> "Scale":
        """The scale that brings this nonnegative number into [1, 2)."""
        exponent = ptx("mov.b32 $0, $1;", Float32(greatest), gives=(Int32,), pure=True)[0] >> 23
        exponent = cutlass.max(cutlass.min(exponent, Int32(253)), Int32(1))
        text = "{ .reg .b32 x; shl.b32 x, $1, 23; mov.b32 $0, x; }"
        back = ptx(text, Int32(exponent), gives=(Float32,), pure=True)[0]
        return Scale(ptx(text, Int32(254 - exponent), gives=(Float32,), pure=True)[0], back)


def add_pair(to: Int64, there: Int32, offset: int, x: Float32, y: Float32) -> None:
    """Adds to two numbers in memory, `offset` bytes after `to`, unless `there` is negative. It has no branch, because
    products are under way."""
    ptx(
        f"{{ .reg .pred p; setp.ge.s32 p, $1, 0; @p red.relaxed.gpu.global.add.v2.f32 [$0+{offset}], {{$2, $3}}; }}",
        Int64(to),
        Int32(there),
        Float32(x),
        Float32(y),
    )
