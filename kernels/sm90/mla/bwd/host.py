"""The host side that the kernels of this gradient share: their entry, and the arguments that they are compiled for.

The entry takes plain arrays and numbers, the same for all kernels, and passes each kernel the same bundles of them.
Flattened, these are the parameters of `kernels.abi.MlaBackward`, in their order.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.abi import MlaBackward
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.rows import extents
from kernels.lib.selections import RunOperands, SelectionOperands
from kernels.lib.spans import SpanOperands


class RowOperands(NamedTuple):
    """The arrays of rows: [b, s_q, h_q, d], and float32 [b, s_q, h_q]."""

    q: cute.Pointer
    do: cute.Pointer
    dq: cute.Pointer
    lse: cute.Pointer
    sink_factor: cute.Pointer
    delta: cute.Pointer
    resolution: cute.Pointer  # float32: the unit of fixed point; not read where sums are in floating point
    scale: Float32


class Source(NamedTuple):
    """Some keys, who sees them, and where their gradient goes."""

    keys: cute.Pointer  # [b, s_kv, h_kv, d], or a pool [s_kv, d]
    dkv: cute.Pointer  # like keys, but float32 or 64-bit fixed point: the kernel adds to it
    seen_from: cute.Pointer  # int32: start of a span, indices of a selection
    seen_to: cute.Pointer  # int32: stop of a span, lengths of a selection
    s_kv: Int32
    s_batch: Int32  # distance between batch entries in keys: s_kv, or 0 where all share a pool
    topk: Int32  # entries of a selection

    def operands(self, kind: str, gathers: bool) -> Any:
        if kind == "selection":
            return SelectionOperands(self.keys, self.seen_from, self.seen_to, self.s_kv, self.s_batch, self.topk)
        if gathers:
            return RunOperands(self.keys, self.seen_from, self.seen_to, self.s_kv)
        return SpanOperands(self.seen_from, self.seen_to, self.s_kv)


class MlaBackwardKernel(Kernel):
    """A kernel is a class with the method `kernel(rows, sources, n)`: RowOperands, a Source for each source, Extents.

    Its config also has `sources`, `gathers` and `cluster`.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        do: cute.Pointer,
        dq: cute.Pointer,
        lse: cute.Pointer,
        sink_factor: cute.Pointer,
        delta: cute.Pointer,
        resolution: cute.Pointer,
        scale: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        keys0: cute.Pointer,
        from0: cute.Pointer,  # start of a span, indices of a selection
        to0: cute.Pointer,  # stop of a span, lengths of a selection
        dkv0: cute.Pointer,
        s_kv0: Int32,
        s_batch0: Int32,
        topk0: Int32,
        keys1: cute.Pointer,
        from1: cute.Pointer,
        to1: cute.Pointer,
        dkv1: cute.Pointer,
        s_kv1: Int32,
        s_batch1: Int32,
        topk1: Int32,
        ctas: Int32,  # at most, that is how many run at a time
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, c.gathers, b, s_q, h_q, h_kv, Int32(1), ctas, c.cluster)
        sources = (
            Source(keys0, dkv0, from0, to0, s_kv0, s_batch0, topk0),
            Source(keys1, dkv1, from1, to1, s_kv1, s_batch1, topk1),
        )[: len(c.sources)]
        rows = RowOperands(q, do, dq, lse, sink_factor, delta, resolution, scale)
        self.launch_persistent(rows, sources, n=n, ctas=ctas, stream=stream)

    def examples(self, variant: MlaBackward) -> tuple:
        """A second source that the variant lacks is like the first."""
        source = (*pointers(variant.dtype, "keys", "int32", "int32", "float32"), i32(), i32(), i32())
        return (
            *pointers(variant.dtype, "q", "do", "dq", "float32", "float32", "float32", "float32"),
            Float32(1.0),
            *(i32() for _ in range(4)),
            *source,
            *source,
            i32(),
        )
