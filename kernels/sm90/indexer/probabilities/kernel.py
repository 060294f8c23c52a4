"""Attention's probabilities at selected keys, summed over heads, for Hopper: sum of exp(scale q[h] . k - lse[h]).

The operands are swapped, as for the indexer's scores: the 64 rows of a product are keys, and its columns are a query's
heads. So the sum over heads runs along a thread's own registers, and needs two shuffles.

    producer       Q of a query, piece by piece    K0  K1  K2 ...     64 keys each, a quarter of the columns at a time
    consumer WG 0    K0 | sum | K2 | sum | ...
    consumer WG 1         K1 | sum | K3 | sum | ...

A key comes from L2 once for 128 heads. The 64 KiB of a tile take some 2700 clocks, its product 2048, and its sum 600
clocks of every scheduler. Keys come in pieces of 16 KiB, six of which fit into SMEM beside Q, so loads never stop.

What loads is that of all chips (`kernels/lib/probabilities.py`).
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import Probabilities
from kernels.aot import Compiled
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import PipelineState
from kernels.lib.probabilities import Arrays, Extents, ProbabilitiesKernel
from kernels.lib.ptx import arrive_if
from kernels.lib.rows import ceil_div, load, row_of, store
from kernels.lib.softmax import LOG2_E, ROWS, exp2
from kernels.lib.wgmma import K_MAJOR, accumulator, multiply, operand_a, operand_b, tiled_mma

from .config import CONSUMERS, Config
from .smem import Barriers, Shared, allocate

WARPGROUP_MET = 1  # named barriers, one for each warpgroup of consumers
BLOCK = 8  # columns of an accumulator; a quad's lanes hold two of each eight


class ProbabilitiesSm90(ProbabilitiesKernel):
    symbol = "probabilities_sm90"

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
