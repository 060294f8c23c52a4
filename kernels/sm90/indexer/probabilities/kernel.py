"""Attention's probabilities at selected keys, summed over heads, for Hopper: sum of exp(scale q[h] . k - lse[h]).

The operands are swapped, as for the indexer's scores: the 64 rows of a product are keys, and its columns are a query's
heads. So the sum over heads runs along a thread's own registers, and needs two shuffles.

    producer       Q of a query, piece by piece    K0  K1  K2 ...     64 keys each, a quarter of the columns at a time
    consumer WG 0    K0 | sum | K2 | sum | ...
    consumer WG 1         K1 | sum | K3 | sum | ...

A key comes from L2 once for 128 heads. The 64 KiB of a tile take some 2700 clocks, its product 2048, and its sum 600
clocks of every scheduler. Keys come in pieces of 16 KiB, six of which fit into SMEM beside Q, so loads never stop.

CTAs are persistent: one takes every gridDim-th query. It takes more heads 128 at a time, and adds
them to the result.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import Probabilities
from kernels.aot import Compiled
from kernels.lib.launch import WARPGROUP, Kernel, i32, pointers
from kernels.lib.pipeline import PipelineState
from kernels.lib.ptx import arrive_if
from kernels.lib.rows import ceil_div, load, row_of, store
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection, SelectionOperands, copy_or_zero
from kernels.lib.softmax import LOG2_E, ROWS, exp2
from kernels.lib.wgmma import K_MAJOR, SLAB, accumulator, multiply, operand_a, operand_b, tiled_mma

from .config import CONSUMERS, Config
from .smem import Barriers, Shared, allocate

WARPGROUP_MET = 1  # named barriers, one for each warpgroup of consumers
BLOCK = 8  # columns of an accumulator; a quad's lanes hold two of each eight


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


class ProbabilitiesSm90(Kernel):
    symbol = "probabilities_sm90"

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

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            self.produce(bar, smem, arrays, n)
        else:
            self.consume(bar, smem, arrays, n, warp // 4 - 1)

    def waves(self, n: Extents) -> Int32:
        """The number of queries of this CTA; a query counts once for each tile of its heads."""
        queries = ceil_div(n.queries - cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
        return queries * ceil_div(n.h_q, Int32(self.config.tile_m))

    def at(self, wave: Int32, n: Extents) -> tuple[Int32, Int32]:
        """(query, counted over all batch entries, first head)"""
        groups = ceil_div(n.h_q, Int32(self.config.tile_m))
        query = cute.arch.block_idx()[0] + wave // groups * cute.arch.grid_dim()[0]
        return query, wave % groups * self.config.tile_m

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, arrays: Arrays, n: Extents):
        """In every wave: loads its first keys, Q, and the other keys."""
        c = self.config
        thread = cute.arch.thread_idx()[0]
        tiles = ceil_div(n.topk, Int32(c.tile_n))
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        for wave in cutlass.range(self.waves(n), unroll=1):
            query, head0 = self.at(wave, n)
            keys = self.selection(arrays, query, n)
            keys.prefetch_indices(Int32(0), wanted, thread, WARPGROUP)
            for t in cutlass.range(tiles, unroll=1):
                keys.mark_absent(t, wanted, thread, WARPGROUP)
                self.gather(bar, smem, keys, wanted, wave * tiles + t, thread)
                keys.prefetch_indices(t + 1, wanted, thread, WARPGROUP)
                if t == 0:
                    self.load_heads(bar, smem, arrays, query, head0, n, wave, thread)

    def selection(self, arrays: Arrays, query: Int32, n: Extents) -> Selection:
        c = self.config
        operands = SelectionOperands(arrays.k, arrays.indices, arrays.indices, n.s_kv, n.s_kv, n.topk)
        keys = arrays.k + Int64(query // n.s_q) * n.s_kv * c.d
        indices = arrays.indices + Int64(query) * n.topk
        return Selection(operands, c.tile_n, c.d, keys, indices, Int32(0), n.topk)

    @cute.jit
    def gather(self, bar: Barriers, smem: Shared, keys: Selection, wanted: cute.Tensor, k: Int32, thread: Int32):
        """Gathers the CTA's k-th tile of keys, piece by piece."""
        c = self.config
        for piece in cutlass.range_constexpr(c.pieces):
            state = bar.k.at(k * c.pieces + piece)
            state.wait_empty()
            slabs = range(piece * c.slabs_of_piece, (piece + 1) * c.slabs_of_piece)
            keys.gather(smem.k[None, None, state.index], wanted, thread, slabs, WARPGROUP, slabs[0])
            state.copy_full()

    @cute.jit
    def load_heads(
        self,
        bar: Barriers,
        smem: Shared,
        arrays: Arrays,
        query: Int32,
        head0: Int32,
        n: Extents,
        wave: Int32,
        thread: Int32,
    ):
        """Loads Q of a query's heads, piece by piece, with zeros for heads that do not exist."""
        c = self.config
        at_once, row0, chunk = WARPGROUP // LANES_A_ROW, thread // LANES_A_ROW, thread % LANES_A_ROW
        target0 = smem.q.iterator.toint() + row0 * (SLAB * 2) + (chunk ^ row0 % 8) * 16
        first = Int64(query) * n.h_q
        for piece in cutlass.range_constexpr(c.pieces):
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

    # ---- consumers

    @cute.jit
    def consume(self, bar: Barriers, smem: Shared, arrays: Arrays, n: Extents, group: Int32):
        """One warpgroup takes every other tile of keys."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        mma = tiled_mma(self.dtype, c.tile_m, K_MAJOR)
        a = operand_a(mma, smem.k)
        b = tuple(operand_b(mma, cute.local_tile(smem.q, (c.tile_m, c.piece), (0, i))) for i in range(c.pieces))
        acc = accumulator(mma, c.tile_m)
        tiles, scale_log2 = ceil_div(n.topk, Int32(c.tile_n)), arrays.scale * LOG2_E
        for wave in cutlass.range(self.waves(n), unroll=1):
            query, head0 = self.at(wave, n)
            self.read_shifts(smem, arrays, query, head0, n, group, thread)
            listed = Int64(query) * n.topk
            for t in cutlass.range(group, tiles, CONSUMERS, unroll=1):
                k, last = wave * tiles + t, Int32(t + CONSUMERS >= tiles)
                entries = cute.make_rmem_tensor(ROWS, Int32)
                for r in cutlass.range_constexpr(ROWS):
                    position = t * c.tile_n + row_of(thread, r)
                    entries[r] = load(arrays.indices + (listed + cutlass.min(position, n.topk - 1)))
                for piece in cutlass.range_constexpr(c.pieces):
                    fill = k * c.pieces + piece
                    PipelineState(bar.q, piece, wave & 1).wait_full()
                    state = bar.k.at(fill)
                    state.wait_full()
                    cute.arch.fence_proxy("async.shared", space="cta")  # the producer wrote through the generic proxy
                    multiply(mma, acc, a[None, None, None, state.index], b[piece], piece == 0)
                    if cutlass.const_expr(piece > 0):
                        warpgroup.wait_group(1)
                        self.release(bar, fill - 1, piece - 1, last)
                warpgroup.wait_group(0)
                self.release(bar, k * c.pieces + c.pieces - 1, c.pieces - 1, last)
                sums = sum_over_heads(acc, smem.shift[None, group], scale_log2)
                for r in cutlass.range_constexpr(ROWS):
                    position = t * c.tile_n + row_of(thread, r)
                    if thread % 4 == 0 and position < n.topk:
                        place = arrays.p + (listed + position)
                        total = sums[r] if entries[r] >= 0 and entries[r] < n.s_kv else Float32(0.0)
                        if head0 > 0:
                            total = total + load(place)
                        store(place, total)
            if group >= tiles:  # this warpgroup has nothing to do
                for piece in cutlass.range_constexpr(c.pieces):
                    state = PipelineState(bar.q, piece, wave & 1)
                    state.wait_full()
                    state.arrive_empty()

    def release(self, bar: Barriers, fill: Int32, piece: int, last: Int32) -> None:
        """Releases a piece of keys; with the last keys that need a piece of Q, that piece too."""
        bar.k.at(fill).arrive_empty()
        arrive_if(bar.q.empty + piece, last)

    @cute.jit
    def read_shifts(
        self, smem: Shared, arrays: Arrays, query: Int32, head0: Int32, n: Extents, group: Int32, thread: Int32
    ):
        """Reads lse; a thread has one head."""
        head = head0 + thread
        lse = load(arrays.lse + (Int64(query) * n.h_q + cutlass.min(head, n.h_q - 1)))
        adds = head < n.h_q and lse != -Float32.inf
        cute.arch.barrier(
            barrier_id=WARPGROUP_MET + group, number_of_threads=WARPGROUP
        )  # all have read the previous ones
        smem.shift[thread, group] = lse * LOG2_E if adds else Float32.inf
        cute.arch.barrier(barrier_id=WARPGROUP_MET + group, number_of_threads=WARPGROUP)

    def examples(self, variant: Probabilities) -> tuple:
        arrays = ("q", "k", "float32", "int32", "float32")
        return *pointers(variant.dtype, *arrays), Float32(1.0), *(i32() for _ in range(6))


@cute.jit
def sum_over_heads(acc: cute.Tensor, shift: cute.Tensor, scale_log2: Float32) -> cute.Tensor:
    """The sums over heads, for each of a thread's keys."""
    products = cute.make_tensor(acc.iterator, cute.make_layout((2, ROWS, cute.size(acc) // 2 // ROWS)))
    sums = cute.make_rmem_tensor(ROWS, Float32)
    sums.fill(0.0)
    for j in cutlass.range_constexpr(cute.size(products, mode=[2])):
        for c in cutlass.range_constexpr(2):
            of_head = shift[j * BLOCK + cute.arch.lane_idx() % 4 * 2 + c]
            for r in cutlass.range_constexpr(ROWS):
                p = exp2(products[c, r, j] * scale_log2 - of_head)
                sums[r] = sums[r] + (p if of_head != Float32.inf else Float32(0.0))  # also NaN from a key
    for r in cutlass.range_constexpr(ROWS):
        for offset in (1, 2):
            sums[r] = sums[r] + cute.arch.shuffle_sync_bfly(sums[r], offset=offset)
    return sums


def compile(variant: Probabilities, out_dir: Path) -> Compiled:
    return ProbabilitiesSm90(Config(variant.d, variant.dtype)).compile(variant, out_dir)
