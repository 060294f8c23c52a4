"""Additions into global memory, in no fixed order."""

from cutlass import Float32, Int32, Int64

from .ptx import ptx


def add_four(target: Int64, there: Int32, offset: int, *values: Float32) -> None:
    """Adds to four numbers in memory, `offset` bytes after target, unless `there` is negative."""
    ptx(
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; "
        f"@p red.relaxed.gpu.global.add.v4.f32 [$0+{offset}], {{$2, $3, $4, $5}}; }}",
        Int64(target),
        Int32(there),
        *map(Float32, values),
    )
