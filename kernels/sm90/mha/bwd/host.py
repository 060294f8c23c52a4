"""The host side that the kernels of this gradient share: their entry.

The entry takes plain arrays and numbers, the same for all kernels, and hands a kernel those of them that `kernels.abi`
names. Flattened, what it hands over is the kernel's parameters, in their order.
"""

from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from kernels.abi import MHA_BACKWARD_OPS, MhaBackward
from kernels.lib.launch import Kernel, Shapes, i32, pointers
from kernels.lib.rows import Extents, extents
from kernels.lib.wgmma import tma_atom


class RowOperands(NamedTuple):
    """The arrays of rows: float32 [b, s_q, h_q], and int32 [b, s_q]."""

    lse: cute.Pointer
    sink_factor: cute.Pointer
    delta: cute.Pointer
    start: cute.Pointer
    stop: cute.Pointer
    seen: cute.Pointer | None  # int32 [b, row tile, 2]: the results of `tile_spans`


class Results(NamedTuple):
    """The arrays that a kernel writes, None for each that another kernel writes."""

    dk: cute.Pointer | None  # [b, s_kv, h_kv, d]
    dv: cute.Pointer | None
    sums: cute.Pointer | None  # float32 [b, s_q, h_q, d]: to what dQ / scale is added
    dq: cute.Pointer | None  # [b, s_q, h_q, d]
    shared_kv: Int32 | None  # whether K is V: then dk gets the sum of both, and dv is unused
    s_kv: Int32


class MhaBackwardKernel(Kernel):
    """A kernel is a class with the method `kernel(rows, keys, operands, results, scale, n)`:

    rows  TMA and array, for q and dout each
    keys  the same for k and v

    and with `ctas`, how many CTAs a launch has.
    """

    op: ClassVar[str]

    @property
    def symbol(self) -> str:
        return f"{self.op}_sm90"

    def ctas(self, n: Extents, s_kv: Int32, at_a_time: Int32) -> Int32:
        raise NotImplementedError

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        dout: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        lse: cute.Pointer,
        sink_factor: cute.Pointer,
        delta: cute.Pointer,
        start: cute.Pointer,
        stop: cute.Pointer,
        seen: cute.Pointer,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        sums: cute.Pointer,
        shared_kv: Int32,
        s_kv: Int32,
        scale: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        at_a_time: Int32,  # CTAs, at most
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, False, b, s_q, h_q, h_kv, Int32(1), Int32(1))
        shapes, load = Shapes(c.d, b, n), cpasync.CopyBulkTensorTileG2SOp()
        results = self.taken(dk=dk, dv=dv, sums=sums, dq=dq, shared_kv=shared_kv)
        self.launch(
            tuple(tma_atom(load, shapes.rows(x), c.tile_m, c.row_columns) for x in (q, dout)),
            tuple(tma_atom(load, shapes.keys(x, s_kv), c.tile_n, c.key_columns) for x in (k, v)),
            RowOperands(lse, sink_factor, delta, start, stop, *self.taken(seen=seen)),
            Results(*results, s_kv),
            scale,
            n,
            ctas=self.ctas(n, s_kv, at_a_time),
            stream=stream,
            cluster=getattr(c, "cluster", 1),
        )

    def taken(self, **given: Any) -> tuple[Any, ...]:
        """None in place of what the op is not handed."""
        names = [p.name for p in MHA_BACKWARD_OPS[self.op]]
        return tuple(x if name in names else None for name, x in given.items())

    def examples(self, variant: MhaBackward) -> tuple:
        return (
            *pointers(variant.dtype, "q", "dout", "k", "v", "float32", "float32", "float32", "int32", "int32", "int32"),
            *pointers(variant.dtype, "dq", "dk", "dv", "float32"),
            i32(),
            i32(),
            Float32(1.0),
            *(i32() for _ in range(5)),
        )
