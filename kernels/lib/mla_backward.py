"""Code that kernels of the gradient over a latent share: their entry, the arguments that they are compiled for, and how
they open their sources.

The entry takes plain arrays and numbers, the same for all kernels, and passes each kernel the same bundles of them.
Flattened, these are the parameters of `kernels.abi.MlaBackward`, in their order.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.abi import MlaBackward

from .launch import Kernel, i32, pointers
from .rows import Extents, RowTile, extents
from .selections import Run, RunOperands, Selection, SelectionOperands, open_selection
from .spans import SpanOperands, open_span, prefetch_span
from .tile_scheduler import TileScheduler


class Turning(NamedTuple):
    """The operands that determine the norm and RoPE of q, and the place of dO of its rows."""

    table: cute.Pointer  # float32 [b, s_q, 64]: cos and sin of each pair of the last columns, by turns
    eps: Float32
    do_heads: (
        Int32  # of a group: dO is [h_q / do_heads, b, s_q, do_heads, d], as a product over groups of heads makes it
    )
    do_queries: Int32  # b * s_q


class RowOperands(NamedTuple):
    """The arrays of rows: [b, s_q, h_q, d], and float32 [b, s_q, h_q]."""

    q: cute.Pointer
    do: cute.Pointer
    dq: cute.Pointer | tuple[()]  # of a kernel of bounds there is none
    lse: cute.Pointer
    sink_factor: cute.Pointer
    delta: cute.Pointer
    resolution: cute.Pointer  # float32: the units of fixed point; not read where sums are in floating point
    scale: Float32
    turning: Turning | tuple[()] = ()  # where the kernel norms and turns q
    most_of_p: cute.Pointer | tuple[()] = ()  # float32, of a kernel of bounds: f max|dO|


class Source(NamedTuple):
    """Some keys, who sees them, and where their gradient goes."""

    keys: cute.Pointer  # [b, s_kv, h_kv, d], or a pool [s_kv, d]
    dkv: cute.Pointer  # like keys, but float32 or fixed point of 32 bits; or 64 bits a key: the kernel adds to it
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

    turns = False  # whether it norms q, and turns q and dO
    bounds = False  # whether it bounds gradients of keys, and makes none

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
        table: cute.Pointer,  # operands of q's norm and RoPE, which not every kernel does; or `most_of_p`
        eps: Float32,
        do_heads: Int32,
        do_queries: Int32,
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
        turning = Turning(table, eps, do_heads, do_queries) if self.turns else ()
        of_bounds = (table,) if self.bounds else ()
        rows = RowOperands(
            q, do, () if self.bounds else dq, lse, sink_factor, delta, resolution, scale, turning, *of_bounds
        )
        self.launch_persistent(rows, sources, n=n, ctas=ctas, stream=stream)

    def examples(self, variant: MlaBackward) -> tuple:
        """A second source that the variant lacks is like the first."""
        source = (*pointers(variant.dtype, "keys", "int32", "int32", "float32"), i32(), i32(), i32())
        return (
            *pointers(variant.dtype, "q", "do", "dq", "float32", "float32", "float32", "float32"),
            Float32(1.0),
            *pointers(variant.dtype, "float32"),
            Float32(1e-6),
            *(i32() for _ in range(6)),
            *source,
            *source,
            i32(),
        )

    # ---- on the device, where rows of a cluster have the same keys

    def tile_scheduler(self, n: Extents) -> TileScheduler:
        """Schedules tiles: where keys are gathered, heads of a query follow one another and share keys in L2."""
        c = self.config
        sections = (Int32(1), 1) if c.gathers else ()
        return TileScheduler.of(n, *sections, cluster=c.cluster)

    def open(self, kind: str, source: Source, tile: RowTile) -> Any:
        c = self.config
        operands = source.operands(kind, c.gathers)
        if isinstance(operands, SpanOperands):
            both = self.of_cluster(tile)
            return open_span(operands, both, c.tile_n, prefetch_span(operands, both, c.cluster * c.tile_m))
        return open_selection(operands, tile, c.tile_n, c.d)

    def of_cluster(self, tile: RowTile) -> RowTile:
        """The rows of all CTAs of the cluster, which take the same keys."""
        cluster = self.config.cluster
        if cluster == 1:
            return tile
        n = tile.n._replace(box_inner=cluster * tile.n.box_inner)
        return replace(tile, n=n, inner0=tile.inner0 - cute.arch.block_idx()[0] % cluster * tile.n.box_inner)

    def listed_keys(self, opened: Any, source: Source, tile: RowTile) -> Selection:
        """An opened source as something to gather from: for a span the union of its rows' intervals."""
        if isinstance(opened, Selection):
            return opened
        place, step = tile.key(source.keys, opened.operands.s_kv, Int32(0), self.config.d)
        return Run(opened.operands, opened.tile_n, step, place, opened.lo, opened.lo, opened.hi - opened.lo)
