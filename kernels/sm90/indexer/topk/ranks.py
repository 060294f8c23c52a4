"""Ranks: unsigned numbers that order as scores do."""

import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels.lib.ptx import ptx

from .config import VECTOR


def rank_of(bits: Uint32) -> Uint32:
    """The rank of a score, by its bits."""
    text = (
        "{ .reg .pred p; .reg .b32 x, s; setp.eq.u32 p, $1, 0x80000000; selp.b32 x, 0, $1, p;"
        " shr.s32 s, x, 31; or.b32 s, s, 0x80000000; xor.b32 s, s, x;"
        " and.b32 x, x, 0x7fffffff; setp.gt.u32 p, x, 0x7f800000; selp.b32 $0, 1, s, p; }"
    )
    return ptx(text, Uint32(bits), gives=(Uint32,), pure=True)[0]


def bit_length(x: Uint32) -> Int32:
    return 32 - ptx("clz.b32 $0, $1;", Uint32(x), gives=(Int32,), pure=True)[0]


def smaller(a: Uint32, b: Uint32) -> Uint32:
    return ptx("min.u32 $0, $1, $2;", Uint32(a), Uint32(b), gives=(Uint32,), pure=True)[0]


def greater(a: Uint32, b: Uint32) -> Uint32:
    return ptx("max.u32 $0, $1, $2;", Uint32(a), Uint32(b), gives=(Uint32,), pure=True)[0]


def count_one(bins: cute.Tensor, place: Int32) -> None:
    ptx("red.shared.add.u32 [$0], 1;", Int32((bins.iterator + place).toint()))


def load_vector(p: cute.Pointer, to: cute.Tensor) -> None:
    cute.autovec_copy(cute.make_tensor(p.align(4 * VECTOR), cute.make_layout(VECTOR)), to)
