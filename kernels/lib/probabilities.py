"""The code that kernels of head-summed probabilities share on all chips: what the host hands over, and what loads.

CTAs are persistent: one takes every gridDim-th query. It takes more heads `tile_m` at a time, and adds them to the
result. Four warps load Q of a query and its keys, by pieces of columns, so that loads never stop.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.abi import Probabilities

from .launch import WARPGROUP, Kernel, i32, pointers
from .pipeline import PipelineState
from .rows import ceil_div
from .selections import CHUNK, LANES_A_ROW, Selection, SelectionOperands, copy_or_zero
from .wgmma import SLAB


class Arrays(NamedTuple):
    q: cute.Pointer  # [b, s_q, h_q, d]
    k: cute.Pointer  # [b, s_kv, d]
    lse: cute.Pointer  # float32 [b, s_q, h_q], with the sink
    indices: cute.Pointer  # int32 [b, s_q, topk]
    p: cute.Pointer  # float32 [b, s_q, topk]
    scale: Float32


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    queries: Int32  # queries of all batch entries
    s_q: Int32
    h_q: Int32
    s_kv: Int32
    topk: Int32


class ProbabilitiesKernel(Kernel):
    """The host side of such a kernel, and the warps that load."""

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        lse: cute.Pointer,
        indices: cute.Pointer,
        p: cute.Pointer,
        scale: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        s_kv: Int32,
        topk: Int32,
        ctas: Int32,  # at most, that is how many run at a time
        stream: cuda.CUstream,
    ):
        queries = b * s_q
        arrays, n = Arrays(q, k, lse, indices, p, scale), Extents(queries, s_q, h_q, s_kv, topk)
        self.launch(arrays, n, ctas=cutlass.min(queries, ctas), stream=stream)

    def waves(self, n: Extents) -> Int32:
        """The number of queries of this CTA; a query counts once for each tile of its heads."""
        queries = ceil_div(n.queries - cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
        return queries * ceil_div(n.h_q, Int32(self.config.tile_m))

    def at(self, wave: Int32, n: Extents) -> tuple[Int32, Int32]:
        """(query, counted over all batch entries, first head)"""
        groups = ceil_div(n.h_q, Int32(self.config.tile_m))
        query = cute.arch.block_idx()[0] + wave // groups * cute.arch.grid_dim()[0]
        return query, wave % groups * self.config.tile_m

    @cute.jit
    def produce(self, bar: Any, smem: Any, arrays: Arrays, n: Extents):
        """In every wave: loads its first keys, Q, and the other keys. If SMEM does not hold a tile of keys, Q comes in
        turns with the first ones."""
        c = self.config
        every = range(c.pieces)
        thread = cute.arch.thread_idx()[0]
        tiles = ceil_div(n.topk, Int32(c.tile_n))
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        for wave in cutlass.range(self.waves(n), unroll=1):
            query, head0 = self.at(wave, n)
            keys = self.selection(arrays, query, n)
            keys.prefetch_indices(Int32(0), wanted, thread, WARPGROUP)
            for t in cutlass.range(tiles, unroll=1):
                keys.mark_absent(t, wanted, thread, WARPGROUP)
                for pieces in (every,) if c.stages >= c.pieces else [every[i : i + 1] for i in every]:
                    if cutlass.const_expr(len(pieces) == 1):  # noqa: SIM102, at compile time
                        if t == 0:
                            self.load_heads(bar, smem, arrays, query, head0, n, wave, thread, pieces)
                    self.gather(bar, smem, keys, wanted, wave * tiles + t, thread, pieces)
                keys.prefetch_indices(t + 1, wanted, thread, WARPGROUP)
                if cutlass.const_expr(c.stages >= c.pieces):  # noqa: SIM102, at compile time
                    if t == 0:
                        self.load_heads(bar, smem, arrays, query, head0, n, wave, thread, every)

    def selection(self, arrays: Arrays, query: Int32, n: Extents) -> Selection:
        c = self.config
        operands = SelectionOperands(arrays.k, arrays.indices, arrays.indices, n.s_kv, n.s_kv, n.topk)
        keys = arrays.k + Int64(query // n.s_q) * n.s_kv * c.d
        indices = arrays.indices + Int64(query) * n.topk
        return Selection(operands, c.tile_n, c.d, keys, indices, Int32(0), n.topk)

    @cute.jit
    def gather(
        self,
        bar: Any,
        smem: Any,
        keys: Selection,
        wanted: cute.Tensor,
        k: Int32,
        thread: Int32,
        pieces: cutlass.Constexpr,
    ):
        """Gathers pieces of the CTA's k-th tile of keys, one by one."""
        c = self.config
        for piece in pieces:
            state = bar.k.at(k * c.pieces + piece)
            state.wait_empty()
            slabs = range(piece * c.slabs_of_piece, (piece + 1) * c.slabs_of_piece)
            keys.gather(smem.k[None, None, state.index], wanted, thread, slabs, WARPGROUP, slabs[0])
            state.copy_full()

    @cute.jit
    def load_heads(
        self,
        bar: Any,
        smem: Any,
        arrays: Arrays,
        query: Int32,
        head0: Int32,
        n: Extents,
        wave: Int32,
        thread: Int32,
        pieces: cutlass.Constexpr,
    ):
        """Loads pieces of Q of a query's heads, one by one, with zeros for heads that do not exist."""
        c = self.config
        at_once, row0, chunk = WARPGROUP // LANES_A_ROW, thread // LANES_A_ROW, thread % LANES_A_ROW
        target0 = smem.q.iterator.toint() + row0 * (SLAB * 2) + (chunk ^ row0 % 8) * 16
        first = Int64(query) * n.h_q
        for piece in pieces:
            state = PipelineState(bar.q, piece, wave & 1)
            state.wait_empty()
            for i in cutlass.range_constexpr(c.tile_m // at_once):
                head = head0 + row0 + i * at_once
                size = Int32(head < n.h_q) * 16
                source = arrays.q + ((first + cutlass.min(head, n.h_q - 1)) * c.d + chunk * CHUNK)
                for slab in range(piece * c.slabs_of_piece, (piece + 1) * c.slabs_of_piece):
                    place = target0 + (slab * c.tile_m + i * at_once) * SLAB * 2
                    copy_or_zero(place, (source + slab * SLAB).toint(), size)
            state.copy_full()

    def examples(self, variant: Probabilities) -> tuple:
        arrays = ("q", "k", "float32", "int32", "float32")
        return *pointers(variant.dtype, *arrays), Float32(1.0), *(i32() for _ in range(6))
