"""The lightning indexer's scores for Blackwell: k_scale[s] * sum over h of weights[t, h] * max(q[t, h] . k[s], 0).

    warp 9       Q of a block    K0  K1  K2 ...                          TMA
    warp 8       K0 Q' | K1 Q' | K2 Q' ...                               tcgen05.mma into TMEM, two tiles
    warps 0-3    columns   0 .. 127    sum of 0 | sum of 1 | ...         a thread has a key
    warps 4-7    columns 128 .. 255    sum of 0 | sum of 1 | ...

The operands are swapped: the 128 rows of a product are keys, and its columns are the heads of a few queries. A row of
the accumulator is a lane of TMEM, and a thread reads all its columns. So the sum over heads runs along one thread's
registers, which keep the weights of 128 columns, and a key's scale is multiplied once in the end. Of pages a tile is
two products of 128 keys by 128 columns, one for each group of warps.

In 8 bits a tile takes 512 clocks of the tensor pipe, and its sums some 380 of the schedulers' busier unit (`HeadSums`).
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05

from kernels.abi import IndexerScores
from kernels.aot import Compiled
from kernels.lib.blackwell import BlackwellKernel, Cta
from kernels.lib.indexer import D
from kernels.lib.indexer_blackwell import product
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import PipelineState
from kernels.lib.rows import load
from kernels.lib.scores import HALF, PUBLISHED, Arrays, BlockScheduler, Extents, Pages, ScoresKernel, prefetch_maps
from kernels.lib.tcgen05 import (
    LANES,
    after_thread_sync,
    commit,
    load_lanes,
)
from kernels.lib.wgmma import operand_a, operand_b

from .config import CHUNK, SUM_WARPS, Config
from .smem import allocate
from .sums import HeadSums


class IndexerScoresSm100(BlackwellKernel, ScoresKernel):
    symbol = "indexer_scores_sm100"

    @cute.kernel
    def kernel(self, maps: tuple, arrays: Arrays, n: Extents, pages: Pages | None):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = allocate(c, self.dtype)
        if warp == 0:
            prefetch_maps(maps)
        cta = self.start(warp, bar, smem, n, followed=True)  # by the choice

        if warp < SUM_WARPS:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.sum(cta, arrays)
        else:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == SUM_WARPS:
                self.multiply(cta)
            elif warp == SUM_WARPS + 1:
                self.load(cta, maps, arrays, pages)

        self.end(warp, cta)

    @cute.jit
    def published(self, cta: Cta, wave: Int32) -> tuple:
        """(Q's place in its ring; block, batch entry, first and last tile of keys), for the warps that do not load."""
        q = cta.bar.q.at(wave)
        q.wait_full()
        info = tuple(cute.arch.make_warp_uniform(cta.smem.info[i, q.index]) for i in range(PUBLISHED))
        self.arrive(q.empty)
        return q, *info

    @cute.jit
    def load(self, cta: Cta, maps: tuple, arrays: Arrays, pages: Pages | None):
        bar, n = cta.bar, cta.n
        tiles = self.produce(bar, cta.smem, maps, arrays, n, pages)
        # Nothing may arrive in the SMEM of a CTA that has ended.
        for ring, fills in ((bar.q, BlockScheduler(n).waves), (bar.k, tiles)):
            for i in cutlass.range_constexpr(ring.stages):
                ring.at(fills + i).wait_empty()

    @cute.jit
    def multiply(self, cta: Cta):
        """One warp, one lane of which issues the products of all tiles."""
        c, bar, smem, fill = self.config, cta.bar, cta.smem, Int32(0)
        mma = product(self.dtype, c.columns)
        b = operand_b(mma, smem.q)
        shape = mma.make_fragment_C(mma.partition_shape_C((LANES, c.columns))).layout
        for wave in cutlass.range(BlockScheduler(cta.n).waves, unroll=1):
            q, _, _, first, last = self.published(cta, wave)
            for _ in cutlass.range(first, last, unroll=1):
                k, s = bar.k.at(fill), bar.s.at(fill)
                k.wait_full()
                s.wait_empty()
                after_thread_sync()
                for part in cutlass.range_constexpr(c.parts):
                    a = operand_a(mma, cute.local_tile(smem.k, (LANES, D), (part, 0, None)))
                    d = cute.make_tensor(cta.tmem + (s.index * c.buffer_columns + part * c.columns), shape)
                    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
                        mma.set(tcgen05.Field.ACCUMULATE, step > 0)
                        cute.gemm(mma, d, a[None, None, step, k.index], b[None, None, step, q.index], d)
                commit(k.empty)
                commit(s.full)
                fill += 1
            commit(q.empty)

    @cute.jit
    def sum(self, cta: Cta, arrays: Arrays):
        """Four warps sum up their half of every tile's products."""
        c, bar, n, fill = self.config, cta.bar, cta.n, Int32(0)
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        part, half = (group, Int32(0)) if cutlass.const_expr(c.paged) else (Int32(0), group)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        key0, sums = part * LANES + thread, HeadSums.of(c, half)
        products = cute.make_rmem_tensor(CHUNK, Float32)
        for wave in cutlass.range(BlockScheduler(n).waves, unroll=1):
            _, block, entry, first, last = self.published(cta, wave)
            if first < last:
                query0 = ((n.first_block + block) - entry * n.blocks_of_entry) * c.queries
                sums.take_weights(arrays.weights, entry, query0, n)
                key = first * c.tile_n + key0
                out = arrays.scores + (Int64(block) * c.queries * n.stride + key // c.keys_of_score)
                scales = arrays.keys + (Int64(entry) * n.s_c + key)
                for _ in cutlass.range(first, last, unroll=1):
                    scale = self.scale_of(cta, scales, key, key0, fill)
                    s = PipelineState(bar.s, fill & 1, fill >> 1 & 1)  # `bar.s.at(fill)`, in fewer instructions
                    s.wait_full()
                    after_thread_sync()
                    base = cta.tmem + (s.index * c.buffer_columns + group * HALF)
                    for column in cutlass.range_constexpr(0, HALF, CHUNK):
                        load_lanes(base + column, products, thread)
                        if cutlass.const_expr(column + CHUNK == HALF):
                            self.hand_over(s.empty)
                        sums.add(products, column)
                        if cutlass.const_expr((column + CHUNK) % c.heads == 0):
                            u = column // c.heads
                            sums.store(out, scale, sums.seen(arrays, entry, u, query0, key, n), u, query0, n)
                    out = out + c.tile_n // c.keys_of_score
                    scales, key, fill = scales + c.tile_n, key + c.tile_n, fill + 1

    @cute.jit
    def scale_of(self, cta: Cta, scales: cute.Pointer, key: Int32, key0: Int32, fill: Int32) -> Float32:
        """The scale of this thread's key, if that exists."""
        scale = Float32(1.0)
        if cutlass.const_expr(self.config.scale_bytes):
            k = cta.bar.k.at(fill)
            k.wait_full()
            scale = cta.smem.k_scale[key0, k.index]
            self.arrive(k.empty)
        elif cutlass.const_expr(self.config.scaled):  # noqa: SIM102, at compile time
            if key < cta.n.s_c:
                scale = load(scales)
        return scale


def compile(variant: IndexerScores, out_dir: Path) -> Compiled:
    config = Config(variant.heads, variant.dtype, variant.paged, variant.blocks)
    return IndexerScoresSm100(config).compile(variant, out_dir)
