"""Arrivals that the DSL does not offer."""

import cutlass.cute as cute
from cutlass import Int32

from .ptx import ptx


def arrive_if(barrier: cute.Pointer, condition: Int32) -> None:
    """Arrives without a branch, in assembly, because products may be under way."""
    ptx(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        barrier.toint(),
        Int32(condition),
    )
