"""The lightning indexer's scores at given entries, and their gradients, for Hopper; one CTA a query.

    s = K Q'                               64 keys x heads, of the keys that the query's row of indices names
    scores = sum over heads of weights * max(s, 0)

    dweights = sum over keys of dscores * max(s, 0)
    dk       = dscores * (weights where s > 0) Q                added to memory, key by key
    dq       = weights * (dscores where s > 0)' K               transposed: 128 columns of q x heads

A CTA is one warpgroup, which gathers a tile of keys by cp.async while it works on the previous one. An SM has several
CTAs, so that the others' products run under one's sums. The kernels round weights and dscores to 16 bits. Before that
they divide them by a power of two, so that a query's greatest is in [1, 2); in float32 they multiply it back.
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import IndexerScoresAt
from kernels.aot import Compiled
from kernels.lib.indexer import BLOCK, KEYS, D, product
from kernels.lib.launch import WARP
from kernels.lib.ptx import add_pair, max_abs, relu
from kernels.lib.rows import load, row_of, store
from kernels.lib.scores_at import THREADS, Arrays, Extents, Gradients, ScoresAtKernel
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    round_pair,
    store_columns,
    tiled_mma,
    transposed,
)

from .config import WARPS, Config
from .elements import Scale, columns_of
from .smem import Shared, allocate


class IndexerScoresAtSm90(ScoresAtKernel):
    symbol = "indexer_scores_at_sm90"

    @cute.kernel
    def kernel(self, arrays: Arrays, to: Gradients | None, n: Extents):
        c, smem = self.config, allocate(self.config, self.dtype)
        thread = cute.arch.thread_idx()[0]
        row, entry, named = self.begin_query(arrays, n, smem.q, thread)
        weights = self.take_weights(arrays.weights + row * c.heads, thread)
        scores = arrays.scores + row * n.topk
        if cutlass.const_expr(to is None):
            self.score(smem, named, weights, scores, thread)
        else:
            dk = to.dk + Int64(entry) * n.s_c * D
            self.differentiate(smem, named, weights, scores, to.dq + row * (c.heads * D), dk,
                               to.dweights + row * c.heads, thread)  # fmt: skip

    @cute.jit
    def take_weights(self, weights: cute.Pointer, thread: Int32) -> cute.Tensor:
        """The weights (c, j) of column 8 j + 2 (lane % 4) + c."""
        taken = cute.make_rmem_tensor((2, self.config.heads // BLOCK), Float32)
        for j in cutlass.range_constexpr(self.config.heads // BLOCK):
            pair = cute.make_tensor((weights + (thread % 4 * 2 + j * BLOCK)).align(8), cute.make_layout(2))
            cute.autovec_copy(pair, taken[None, j])
        return taken

    # ---- the two kernels

    @cute.jit
    def score(self, smem: Shared, named: Selection, weights: cute.Tensor, scores: cute.Pointer, thread: Int32):
        c, mma = self.config, product(self.dtype, self.config.heads)
        a, b, acc = operand_a(mma, smem.k), operand_b(mma, smem.q), accumulator(mma, self.config.heads)
        s = columns_of(acc, c.heads)
        wanted = self.begin(smem.k, named, thread)
        for t in cutlass.range(named.tiles, unroll=1):
            position = t * KEYS + row_of(thread, 0) + thread % 2 * 8
            index = named.read(position)
            self.await_tile()
            self.gather(smem.k, named, t + c.stages - 1, wanted, thread)  # in the place of the one before
            multiply(mma, acc, a[None, None, None, t % c.stages], b, fresh=True)
            warpgroup.wait_group(0)
            sums = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                total = Float32(0.0)
                for j in cutlass.range_constexpr(c.heads // BLOCK):
                    for i in cutlass.range_constexpr(2):
                        total += weights[i, j] * relu(s[i, r, j])
                total += cute.arch.shuffle_sync_bfly(total, 1)
                sums[r] = total + cute.arch.shuffle_sync_bfly(total, 2)
            if (thread % 4 < 2) & (position < named.length):
                value = sums[1] if thread % 2 == 1 else sums[0]
                store(scores + position, value if named.is_present(position, index) else -Float32.inf)

    @cute.jit
    def differentiate(
        self,
        smem: Shared,
        named: Selection,
        weights: cute.Tensor,
        cotangent: cute.Pointer,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dweights: cute.Pointer,
        thread: Int32,
    ):
        c, heads = self.config, self.config.heads
        of_s = tiled_mma(self.dtype, heads, K_MAJOR)
        of_k = tiled_mma(self.dtype, D, MN_MAJOR, warpgroup.OperandSource.RMEM)
        of_q = tiled_mma(self.dtype, heads, K_MAJOR, a_major=MN_MAJOR)
        a, b = operand_a(of_s, smem.k), operand_b(of_s, smem.q)
        k_columns = tuple(
            operand_a(of_q, transposed(cute.local_tile(smem.k, (KEYS, SLAB), (0, i, None)))) for i in range(D // SLAB)
        )
        ds, q_rows = operand_b(of_q, smem.ds), operand_b(of_k, transposed(smem.q))
        signs = register_operand(of_k, heads, self.dtype)
        acc, acc_k = accumulator(of_s, heads), accumulator(of_k, D)
        acc_q = tuple(accumulator(of_q, heads) for _ in k_columns)
        s = columns_of(acc, heads)
        sums = cute.make_rmem_tensor((2, heads // BLOCK), Float32)
        sums.fill(0.0)
        for x in acc_q:
            x.fill(0.0)
        w = Scale.of(self.greatest_weight(weights))
        scaled = weights
        for i in cutlass.range_constexpr(cute.size(weights)):
            scaled[i] = weights[i] * w.by
        wanted = self.begin(smem.k, named, thread)
        di = Scale.of(self.greatest_cotangent(smem, named, cotangent, thread))
        first_lane = dk + thread % 4 * 2
        for t in cutlass.range(named.tiles, unroll=1):
            keys, given = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                position = t * KEYS + row_of(thread, 0) + r * 8
                keys[r] = named.read(position)
                given[r] = load(cotangent + cutlass.min(position, named.length - 1))
                if named.is_present(position, keys[r]) == Boolean(False):
                    keys[r], given[r] = Int32(-1), Float32(0.0)
            self.await_tile()
            self.gather(smem.k, named, t + c.stages - 1, wanted, thread)  # in the place of the one before
            multiply(of_s, acc, a[None, None, None, t % c.stages], b, fresh=True)
            warpgroup.wait_group(0)
            for j in cutlass.range_constexpr(heads // BLOCK):
                for i in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        sums[i, j] += given[r] * relu(s[i, r, j])
            pairs = cute.make_tensor(
                cute.recast_ptr(signs.iterator, dtype=Uint32), cute.make_layout((2, heads // BLOCK))
            )
            for j in cutlass.range_constexpr(heads // BLOCK):
                for r in cutlass.range_constexpr(2):
                    positive = tuple(s[i, r, j] > 0.0 for i in range(2))
                    two = tuple(scaled[i, j] if positive[i] else Float32(0.0) for i in range(2))
                    pairs[r, j] = round_pair(*two, self.dtype)
                    for i in cutlass.range_constexpr(2):
                        s[i, r, j] = given[r] * di.by if positive[i] else Float32(0.0)
            store_columns(of_s, acc, smem.ds, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            multiply(of_k, acc_k, signs, q_rows, fresh=True)
            for i in cutlass.range_constexpr(len(k_columns)):
                multiply(of_q, acc_q[i], k_columns[i][None, None, None, t % c.stages], ds)
            warpgroup.wait_group(len(k_columns))
            out = columns_of(acc_k, D)
            for r in cutlass.range_constexpr(2):
                to, factor = first_lane + Int64(cutlass.max(keys[r], Int32(0))) * D, given[r] * w.back
                for j in cutlass.range_constexpr(D // BLOCK):
                    add_pair(to.toint(), keys[r], j * BLOCK * 4, out[0, r, j] * factor, out[1, r, j] * factor)
            warpgroup.wait_group(0)
        self.store_dweights(smem, sums, dweights, thread)
        self.store_dq(of_q, acc_q, smem, scaled, w.back * di.back, dq, thread)

    # ---- numbers of a query

    @cute.jit
    def greatest_weight(self, weights: cute.Tensor) -> Float32:
        """The greatest of a query's weights, all of which every quad has."""
        greatest = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(weights)):
            greatest = max_abs(greatest, weights[i])
        for lanes in (1, 2):
            greatest = max_abs(greatest, cute.arch.shuffle_sync_bfly(greatest, lanes))
        return greatest

    @cute.jit
    def greatest_cotangent(self, smem: Shared, named: Selection, cotangent: cute.Pointer, thread: Int32) -> Float32:
        """The greatest cotangent whose entry is there."""
        greatest = Float32(0.0)
        for position in cutlass.range(thread, named.length, THREADS):
            x = load(cotangent + position)
            greatest = max_abs(greatest, x if named.is_present(position, named.read(position)) else Float32(0.0))
        for lanes in (1, 2, 4, 8, 16):
            greatest = max_abs(greatest, cute.arch.shuffle_sync_bfly(greatest, lanes))
        if thread % WARP == 0:
            smem.sums[0, thread // WARP] = greatest
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(WARPS):
            greatest = max_abs(greatest, smem.sums[0, i])
        return greatest

    @cute.jit
    def store_dweights(self, smem: Shared, sums: cute.Tensor, dweights: cute.Pointer, thread: Int32):
        """Adds up a thread's sums over all keys, and stores them."""
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(self.config.heads // BLOCK):
            for i in cutlass.range_constexpr(2):
                total = sums[i, j]
                for lanes in (4, 8, 16):
                    total += cute.arch.shuffle_sync_bfly(total, lanes)
                if thread % WARP < 4:
                    smem.sums[thread % 4 * 2 + (j * BLOCK + i), thread // WARP] = total
        cute.arch.sync_threads()
        if thread < self.config.heads:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(WARPS):
                total += smem.sums[thread, i]
            store(dweights + thread, total)

    @cute.jit
    def store_dq(
        self,
        mma: cute.TiledMma,
        acc: tuple[cute.Tensor, ...],
        smem: Shared,
        weights: cute.Tensor,
        factor: Float32,
        dq: cute.Pointer,
        thread: Int32,
    ):
        """Stores dq through Q's place in SMEM, whose rows are heads."""
        heads = self.config.heads
        for part in cutlass.range_constexpr(len(acc)):
            x = columns_of(acc[part], heads)
            for j in cutlass.range_constexpr(heads // BLOCK):
                for i in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        x[i, r, j] = x[i, r, j] * (weights[i, j] * factor)
            store_columns(mma, acc[part], cute.local_tile(smem.q, (heads, SLAB), (0, part)), thread)
        cute.arch.sync_threads()
        chunks = D // CHUNK
        for i in cutlass.range(thread, heads * chunks, THREADS, unroll=1):
            head, chunk = i // chunks, i % chunks
            slab, place = chunk // LANES_A_ROW, chunk % LANES_A_ROW ^ head % 8
            source = cute.recast_ptr(smem.q.iterator, dtype=Uint32) + ((slab * heads + head) * LANES_A_ROW + place) * 4
            to = cute.make_tensor(cute.recast_ptr(dq + i * CHUNK, dtype=Uint32).align(16), cute.make_layout(4))
            cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(4)), to)


def compile(variant: IndexerScoresAt, out_dir: Path) -> Compiled:
    config = Config(variant.heads, variant.dtype, variant.op.endswith("_bwd"))
    return IndexerScoresAtSm90(config).compile(variant, out_dir, ctas=config.ctas)
