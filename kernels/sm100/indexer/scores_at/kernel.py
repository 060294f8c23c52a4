"""The lightning indexer's scores at given entries, for Blackwell; one CTA a query.

    K0    K1          K2          K3 ...      128 keys each, of those that the query's row of indices names: cp.async
    | K0 Q'     | K1 Q'     | K2 Q' ...       tcgen05.mma into TMEM, by the first warp
          | sum       | sum       | ...       over heads of weights * max(product, 0): a thread has a key

The operands are swapped, as for scores of all keys: the 128 rows of a product are keys, its columns a query's heads. So
a sum runs along one thread's registers. A CTA does one thing after the other while the next keys come; those of an SM
fill one another's gaps.

A tile of 64 heads in 16 bits takes 256 clocks of the tensor pipe, 640 of shared memory and 670 of L2 for its keys, in
8 bits half as many of the two. What loads is that of all chips (`kernels/lib/scores_at.py`).
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from kernels.abi import IndexerScoresAt
from kernels.aot import Compiled
from kernels.lib.blackwell import BlackwellKernel, Cta
from kernels.lib.indexer_blackwell import product
from kernels.lib.pipeline import wait_for
from kernels.lib.ptx import relu
from kernels.lib.rows import store
from kernels.lib.scores_at import Arrays, Extents, ScoresAtKernel
from kernels.lib.selections import Selection
from kernels.lib.tcgen05 import LANES, after_thread_sync, before_thread_sync, commit, load_lanes
from kernels.lib.wgmma import operand_a, operand_b

from .config import Config
from .smem import allocate


class IndexerScoresAtSm100(BlackwellKernel, ScoresAtKernel):
    symbol = "indexer_scores_at_sm100"

    @property
    def columns(self) -> int:
        return self.config.columns

    @cute.kernel
    def kernel(self, arrays: Arrays, to: None, n: Extents):
        thread, warp = cute.arch.thread_idx()[0], cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = self.start(warp, *allocate(self.config, self.dtype), n)
        row, _, named = self.begin_query(arrays, n, cta.smem.q, thread)
        weights = self.take_weights(arrays.weights + row * self.config.heads)
        self.score(cta, named, weights, arrays.scores + row * n.topk, warp, thread)
        self.end(warp, cta)

    @cute.jit
    def take_weights(self, weights: cute.Pointer) -> cute.Tensor:
        """The query's, all in each thread."""
        taken = cute.make_rmem_tensor(self.config.heads, Float32)
        for i in cutlass.range_constexpr(0, cute.size(taken), 4):
            four = cute.make_tensor((weights + i).align(16), cute.make_layout(4))
            cute.autovec_copy(four, cute.make_tensor(taken.iterator + i, cute.make_layout(4)))
        return taken

    @cute.jit
    def score(self, cta: Cta, named: Selection, weights: cute.Tensor, scores: cute.Pointer, warp: Int32, thread: Int32):
        c = self.config
        products = cute.make_rmem_tensor(c.heads, Float32)
        wanted = self.begin(cta.smem.k, named, thread)
        for t in cutlass.range(named.tiles, unroll=1):
            position = t * c.tile_n + thread
            index = named.read(position)
            before_thread_sync()  # all have read the products of the tile before
            self.await_tile()
            if warp == 0:
                after_thread_sync()
                self.multiply(cta, t % c.stages)
            self.gather(cta.smem.k, named, t + c.stages - 1, wanted, thread)  # in the place of the one before
            wait_for(cta.bar.made, t)
            after_thread_sync()
            load_lanes(cta.tmem, products, thread)
            total = sum_over_heads(products, weights, c.element_bytes == 1)
            if position < named.length:
                store(scores + position, total if named.is_present(position, index) else -Float32.inf)

    @cute.jit
    def multiply(self, cta: Cta, stage: Int32):
        """One warp, one lane of which issues the products of a tile."""
        c = self.config
        mma = product(self.dtype, c.heads)
        a, b = operand_a(mma, cta.smem.k), operand_b(mma, cta.smem.q)
        d = cute.make_tensor(cta.tmem, mma.make_fragment_C(mma.partition_shape_C((LANES, c.heads))).layout)
        for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, step > 0)
            cute.gemm(mma, d, a[None, None, step, stage], b[None, None, step], d)
        commit(cta.bar.made)


@cute.jit
def sum_over_heads(products: cute.Tensor, weights: cute.Tensor, small: cutlass.Constexpr) -> Float32:
    """Sums up a key's weighted products after ReLU; packed, even heads and odd ones apart.

    Maxima have half the rate of sums, and the unit that copies' addresses are made in. Where products are so small that
    x + |x| does not overflow, that is twice their ReLU exactly, and packed.
    """
    sums = (Float32(0.0), Float32(0.0))
    for i in cutlass.range_constexpr(0, cute.size(products), 2):
        x = products[i], products[i + 1]
        if cutlass.const_expr(small):
            cut = cute.arch.add_packed_f32x2(x, (abs(x[0]), abs(x[1])))
        else:
            cut = relu(x[0]), relu(x[1])
        sums = cute.arch.fma_packed_f32x2(cut, (weights[i], weights[i + 1]), sums)
    return (sums[0] + sums[1]) * (0.5 if small else 1.0)


def compile(variant: IndexerScoresAt, out_dir: Path) -> Compiled:
    config = Config(variant.heads, variant.dtype)
    return IndexerScoresAtSm100(config).compile(variant, out_dir, ctas=config.ctas)
