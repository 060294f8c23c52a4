"""The lightning indexer's scores for Hopper: k_scale[s] * sum over h of weights[t, h] * max(q[t, h] . k[s], 0).

The operands are swapped: the 64 rows of a product are keys, and its columns are the heads of a few queries. So the sum
over heads runs along a thread's own registers, whose weights it keeps, and needs two shuffles for every query.

    producer warp    Q of a block    K0  K1  K2 ...     TMA
    consumer WG 0    keys  0 .. 63, columns   0 .. 127   product | sum | product | sum | ...
    consumer WG 1    keys 64 .. 127, columns  0 .. 127             the same, each as it comes
    consumer WG 2    keys  0 .. 63, columns 128 .. 255
    consumer WG 3    keys 64 .. 127, columns 128 .. 255

112 registers hold an accumulator of 64 x 128 and the weights of 128 columns, so four consumers fit: while some sum up,
the others' products run. In 8 bits a product takes 256 clocks and its sum some 190 clocks of every scheduler, so a tile
takes 1024 clocks of the tensor cores and 760 of the schedulers.

With a cache a tile is 256 keys, 64 for each consumer, by the 128 columns of a block. What loads is that of all chips
(`kernels/lib/scores.py`).
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import IndexerScores
from kernels.aot import Compiled
from kernels.lib.indexer import KEYS, D, product
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import PipelineState
from kernels.lib.ptx import keep
from kernels.lib.rows import load, row_of
from kernels.lib.scores import HALF, PUBLISHED, Arrays, BlockScheduler, Extents
from kernels.lib.scores_hopper import Barriers, HopperScoresConfig, HopperScoresKernel, Shared
from kernels.lib.wgmma import multiply, operand_a, operand_b

from .sums import HeadSums


class IndexerScoresSm90(HopperScoresKernel):
    symbol = "indexer_scores_sm90"

    @cute.jit
    def consume(self, bar: Barriers, smem: Shared, arrays: Arrays, n: Extents):
        """One warpgroup scores its keys of every tile with its columns of every block of this CTA."""
        c, scheduler = self.config, BlockScheduler(n)
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        thread, mma = cute.arch.thread_idx()[0] % WARPGROUP, product(self.dtype, HALF)
        a = operand_a(mma, cute.local_tile(smem.k, (KEYS, D), (group % c.parts, 0, None)))
        b = operand_b(mma, cute.local_tile(smem.q, (HALF, D), (group // c.parts, 0, None)))
        sums = HeadSums.of(c, mma, group // c.parts, thread)
        key0, stage, parity = keep(group % c.parts * KEYS + key_of(thread)), Int32(0), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            q = bar.q.at(wave)
            q.wait_full()
            block, entry, first, last = (cute.arch.make_warp_uniform(smem.info[i, q.index]) for i in range(PUBLISHED))
            if first < last:
                query0 = ((n.first_block + block) - entry * n.blocks_of_entry) * c.queries
                sums.take_weights(arrays.weights, entry, query0, n)
                at = (first * c.tile_n + key0) // c.keys_of_score
                out = sums.place(arrays.scores + (Int64(block) * c.queries * n.stride + at), n)
                scales = arrays.keys + Int64(entry) * n.s_c
                for t in cutlass.range(first, last, unroll=1):
                    k = PipelineState(bar.k, stage, parity)
                    k.wait_full()
                    multiply(mma, sums.acc, a[None, None, None, stage], b[None, None, None, q.index], fresh=True)
                    scale = self.scale_of(smem, stage, scales, key0, t, n)
                    seen = sums.seen(arrays, entry, query0, t * c.tile_n + key0, n)
                    warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        k.arrive_empty()
                    sums.store(out, scale, seen, query0, n)
                    out, stage = out + c.tile_n // c.keys_of_score, stage + 1
                    if stage == c.stages_k:
                        stage, parity = Int32(0), parity ^ 1
            with cute.arch.elect_one():
                q.arrive_empty()

    @cute.jit
    def scale_of(self, smem: Shared, stage: Int32, scales: cute.Pointer, key0: Int32, t: Int32, n: Extents) -> Float32:
        scale = Float32(1.0)
        if cutlass.const_expr(self.config.scale_bytes):
            scale = smem.k_scale[key0, stage]
        elif cutlass.const_expr(self.config.scaled):
            scale = load(scales + cutlass.min(t * self.config.tile_n + key0, n.s_c - 1))
        return scale


def key_of(thread: Int32) -> Int32:
    """The key, among a warpgroup's, whose sums a lane ends up with: an even lane of a quad has the quad's first row."""
    return row_of(thread, 0) + thread % 2 * 8


def compile(variant: IndexerScores, out_dir: Path) -> Compiled:
    config = HopperScoresConfig(variant.heads, variant.dtype, variant.paged, variant.blocks)
    return IndexerScoresSm90(config).compile(variant, out_dir)
