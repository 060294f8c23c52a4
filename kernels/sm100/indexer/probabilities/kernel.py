"""Attention's probabilities at selected keys, summed over heads, for Blackwell: sum of exp(scale q[h] . k - lse[h]).

    warps 0-3    Q of a query, piece by piece    K0  K1  K2 ...     128 keys each, 64 columns at a time: cp.async
    warp 12      K0 Q' | K1 Q' | K2 Q' ...                          tcgen05.mma into TMEM, four tiles
    warps 4-7          | sum of K0     | sum of K2 ...              a thread has a key
    warps 8-11                 | sum of K1     | ...

The operands are swapped, as for the indexer's scores: the 128 rows of a product are keys, and its columns are a query's
heads. A row is a lane of TMEM, so the sum over heads runs along one thread's registers, and needs no shuffles.

A tile of 128 keys takes 2048 clocks of the tensor pipe, 3072 of shared memory (2048 for operands, 1024 for its keys)
and 2700 of L2. What loads is that of all chips (`kernels/lib/probabilities.py`).
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05

from kernels.abi import Probabilities
from kernels.aot import Compiled
from kernels.lib.blackwell import BlackwellKernel, Cta
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import PipelineState
from kernels.lib.probabilities import Arrays, Extents, ProbabilitiesKernel
from kernels.lib.rows import ceil_div, load, store
from kernels.lib.softmax import LOG2_E, exp2
from kernels.lib.tcgen05 import (
    after_thread_sync,
    commit,
    load_lanes,
    tiled_mma,
)
from kernels.lib.wgmma import K_MAJOR, operand_a, operand_b

from .config import GROUPS, LOAD_WARPS, Config
from .smem import allocate

WARPGROUP_MET = 1  # named barriers, one for each warpgroup that sums up
CHUNK = 16  # columns of TMEM that a thread loads at a time


class ProbabilitiesSm100(BlackwellKernel, ProbabilitiesKernel):
    symbol = "probabilities_sm100"

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = self.start(warp, *allocate(c, self.dtype), n)
        bar = cta.bar

        if warp < LOAD_WARPS:
            cute.arch.setmaxregister_decrease(c.registers[0])
            self.produce(bar, cta.smem, arrays, n)
            # Nothing may arrive in the SMEM of a CTA that has ended.
            waves = self.waves(n)
            for ring, fills in ((bar.q, waves * c.pieces), (bar.k, waves * self.tiles(n) * c.pieces)):
                for i in cutlass.range_constexpr(ring.stages):
                    ring.at(fills + i).wait_empty()
        elif warp < (1 + GROUPS) * LOAD_WARPS:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.sum(cta, arrays, warp // LOAD_WARPS - 1)
        else:
            cute.arch.setmaxregister_decrease(c.registers[2])
            if warp == (1 + GROUPS) * LOAD_WARPS:
                self.multiply(cta)

        self.end(warp, cta)

    def tiles(self, n: Extents) -> Int32:
        """Counts the tiles of a query's keys."""
        return ceil_div(n.topk, Int32(self.config.tile_n))

    # ---- products

    @cute.jit
    def multiply(self, cta: Cta):
        """One warp, one lane of which issues the products of all tiles."""
        c, bar, smem = self.config, cta.bar, cta.smem
        mma = tiled_mma(self.dtype, c.tile_n, c.tile_m, K_MAJOR)
        a = operand_a(mma, smem.k)
        shape = mma.make_fragment_C(mma.partition_shape_C((c.tile_n, c.tile_m))).layout
        tiles, fill = self.tiles(cta.n), Int32(0)
        for wave in cutlass.range(self.waves(cta.n), unroll=1):
            for t in cutlass.range(tiles, unroll=1):
                s = bar.s.at(fill)
                s.wait_empty()
                after_thread_sync()
                d = cute.make_tensor(cta.tmem + s.index * c.tile_m, shape)
                for piece in cutlass.range_constexpr(c.pieces):
                    q, k = PipelineState(bar.q, piece, wave & 1), bar.k.at(fill * c.pieces + piece)
                    q.wait_full()
                    k.wait_full()
                    cute.arch.fence_proxy("async.shared", space="cta")  # they were written through the generic proxy
                    b = operand_b(mma, cute.local_tile(smem.q, (c.tile_m, c.piece), (0, piece)))
                    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
                        mma.set(tcgen05.Field.ACCUMULATE, piece + step > 0)
                        cute.gemm(mma, d, a[None, None, step, k.index], b[None, None, step], d)
                    commit(k.empty)
                    if t + 1 == tiles:
                        commit(q.empty)
                commit(s.full)
                fill += 1

    # ---- sums

    @cute.jit
    def sum(self, cta: Cta, arrays: Arrays, group: Int32):
        """One warpgroup takes every other tile of keys."""
        c, bar, n = self.config, cta.bar, cta.n
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        tiles, scale_log2 = self.tiles(n), arrays.scale * LOG2_E
        shifts = cute.make_rmem_tensor(c.tile_m, Float32)
        for wave in cutlass.range(self.waves(n), unroll=1):
            query, head0 = self.at(wave, n)
            self.read_shifts(cta, arrays, query, head0, group, thread)
            there = cta.smem.shift.iterator + group * c.tile_m
            cute.autovec_copy(cute.make_tensor(there.align(16), cute.make_layout(c.tile_m)), shifts)
            listed = Int64(query) * n.topk
            for t in cutlass.range(group, tiles, GROUPS, unroll=1):
                position = t * c.tile_n + thread
                entry = load(arrays.indices + (listed + cutlass.min(position, n.topk - 1)))
                s = bar.s.at(wave * tiles + t)
                s.wait_full()
                after_thread_sync()
                total = self.sum_over_heads(cta, s, scale_log2, shifts, thread)
                if position < n.topk:
                    place = arrays.p + (listed + position)
                    if entry < 0 or entry >= n.s_kv:
                        total = Float32(0.0)
                    if head0 > 0:
                        total = total + load(place)
                    store(place, total)

    @cute.jit
    def read_shifts(self, cta: Cta, arrays: Arrays, query: Int32, head0: Int32, group: Int32, thread: Int32):
        """Reads lse; a thread has one head."""
        n, head = cta.n, head0 + thread
        lse = load(arrays.lse + (Int64(query) * n.h_q + cutlass.min(head, n.h_q - 1)))
        adds = head < n.h_q and lse != -Float32.inf
        met = WARPGROUP_MET + group
        cute.arch.barrier(barrier_id=met, number_of_threads=WARPGROUP)  # all have read the previous ones
        cta.smem.shift[thread, group] = lse * LOG2_E if adds else Float32.inf
        cute.arch.barrier(barrier_id=met, number_of_threads=WARPGROUP)

    @cute.jit
    def sum_over_heads(
        self, cta: Cta, s: PipelineState, scale_log2: Float32, shifts: cute.Tensor, thread: Int32
    ) -> Float32:
        """The sum of a thread's key over heads, out of the products in TMEM, which are given back."""
        c, even, odd = self.config, Float32(0.0), Float32(0.0)
        products = cute.make_rmem_tensor(CHUNK, Float32)
        for column in cutlass.range_constexpr(0, c.tile_m, CHUNK):
            load_lanes(cta.tmem + (s.index * c.tile_m + column), products, thread)
            for i in cutlass.range_constexpr(0, CHUNK, 2):
                even = even + probability(products[i], scale_log2, shifts[column + i])
                odd = odd + probability(products[i + 1], scale_log2, shifts[column + i + 1])
        self.hand_over(s.empty)
        return even + odd


@cute.jit
def probability(product: Float32, scale_log2: Float32, shift: Float32) -> Float32:
    """Returns a head's probability; 0 for a head that adds nothing, whatever the product: the key may be NaN."""
    p = exp2(product * scale_log2 - shift)
    return p if shift != Float32.inf else Float32(0.0)


def compile(variant: Probabilities, out_dir: Path) -> Compiled:
    return ProbabilitiesSm100(Config(variant.d, variant.dtype)).compile(variant, out_dir)
