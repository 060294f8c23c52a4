"""The host side that every forward kernel shares: its entry, and the arguments that it is compiled for.

The entry takes plain arrays and numbers, the same for all kernels, and passes each kernel the same bundles of them.
Flattened, these are the parameters of the family in `kernels.abi`, in their order.
"""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from kernels.abi import Forward
from kernels.packings import PACKED

from .launch import Kernel, Shapes, i32, pointers
from .rows import extents
from .selections import GATHERED, gathered
from .softmax import RowResults
from .spans import SpanOperands
from .wgmma import SLAB, tma_atom


class Source(NamedTuple):
    """One source of keys, of either kind."""

    k: cute.Pointer
    v: cute.Pointer  # unused where K is V
    first: cute.Pointer  # start of a span, indices of a selection
    second: cute.Pointer  # stop of a span, lengths of a selection
    s_kv: Int32
    s_batch: Int32
    topk: Int32


class ForwardKernel(Kernel):
    """A forward kernel is a class with the method `kernel(q, o, sources, results, scaling, n)`:

    q        (TMA, array), or what `rows` says
    o        the same, or a pointer where it `moves_o`
    sources  for each a tuple: TMA of its arrays and pointers to them, as `source` says; last, its operands
    results  RowResults
    scaling  scale_log2, or what `scaling` says
    n        Extents

    Its config also has `columns_q` and, for K and V apart, `columns_k`, how many of d a TMA loads at a time; `gathers`,
    `shared_kv` and `cluster`.
    """

    kinds: ClassVar[dict[str, Any]] = GATHERED  # operands of gathered sources, by kind

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        o: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        o_parts: cute.Pointer,
        scale_log2: Float32,
        table: cute.Pointer,  # operands of q's norm and RoPE, which not every kernel does
        eps: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        splits: Int32,
        ctas: Int32,  # at most, that is how many run at a time
        k0: cute.Pointer,
        v0: cute.Pointer,
        from0: cute.Pointer,
        to0: cute.Pointer,
        s_kv0: Int32,
        s_batch0: Int32,
        topk0: Int32,
        k1: cute.Pointer,  # operands of a second source, which not every kernel has
        v1: cute.Pointer,
        from1: cute.Pointer,
        to1: cute.Pointer,
        s_kv1: Int32,
        s_batch1: Int32,
        topk1: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, c.gathers, b, s_q, h_q, h_kv, splits, ctas, c.cluster)
        shapes = Shapes(c.d, b, n)
        rows, output = self.rows(shapes, q, o)
        given = (
            Source(k0, v0, from0, to0, s_kv0, s_batch0, topk0),
            Source(k1, v1, from1, to1, s_kv1, s_batch1, topk1),
        )
        sources = tuple(self.source(kind, shapes, x) for kind, x in zip(c.sources, given, strict=False))
        results = RowResults(sink, lse, o_parts)
        scaling = self.scaling(scale_log2, table, eps)
        self.launch_persistent(rows, output, sources, results, scaling, n=n, ctas=ctas, stream=stream)

    @property
    def d_v(self) -> int:
        """Numbers of a value, and of o, where K is V."""
        return self.config.d

    @property
    def moves_o(self) -> bool:
        """True if threads store o, and TMA does not."""
        return not self.config.shared_kv

    def scaling(self, scale_log2: Float32, table: cute.Pointer, eps: Float32) -> Any:
        """Returns what determines the scale of a row's logits, as the kernel takes it: here `scale_log2` alone."""
        return scale_log2

    def rows(self, shapes: Shapes, q: cute.Pointer, o: cute.Pointer) -> tuple[Any, Any]:
        """q and o as the kernel takes them."""
        c, output = self.config, o
        if not self.moves_o:
            output = tuple(
                tma_atom(cpasync.CopyBulkTensorTileS2GOp(), replace(shapes, d=self.d_v).rows(o), c.tile_m, SLAB)
            )
        return tuple(tma_atom(cpasync.CopyBulkTensorTileG2SOp(), shapes.rows(q), c.tile_m, c.columns_q)), output

    def source(self, kind: str, shapes: Shapes, x: Source) -> tuple:
        c = self.config
        if c.gathers:
            return (gathered(self.kinds, kind, x.k, *x[2:]),)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma = (y for array in (x.k, x.v) for y in tma_atom(load, shapes.keys(array, x.s_kv), c.tile_n, c.columns_k))
        return (*tma, SpanOperands(x.first, x.second, x.s_kv))

    def examples(self, variant: Forward) -> tuple:
        """A second source that the variant lacks is like the first."""
        sources = [
            (*pointers(variant.dtype, keys, keys, "int32", "int32"), i32(), i32(), i32())
            for kind in (variant.sources[0], variant.sources[-1])
            for keys in ("bytes" if kind in PACKED else "keys",)
        ]
        return (
            *pointers(variant.dtype, "q", "o", "float32", "float32", "float32"),
            Float32(1.0),
            *pointers(variant.dtype, "float32"),
            Float32(1e-6),
            *(i32() for _ in range(6)),
            *sources[0],
            *sources[1],
        )
