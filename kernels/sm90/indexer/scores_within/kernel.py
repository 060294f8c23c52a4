"""The lightning indexer's scores of the keys in listed blocks, for Hopper; one CTA a query, or a part of its list.

    scores = k_scale * sum over heads of weights * max(K Q', 0)      64 keys, of 8 blocks, x heads

A CTA is one warpgroup, which gathers a tile of keys by cp.async while it works on the previous one. An SM has several
CTAs, so that the others' products run under one's sums. A block's keys lie side by side, in an array or in a page: so a
list, and a table of pages, is read once for eight keys. Keys of 4 bits are decoded to bf16 operands in registers, as in
`indexer_scores_fp4_sm90`.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import INDEX_BLOCK, IndexerScoresWithin
from kernels.aot import Compiled
from kernels.lib.index_fp4 import decode_rows, reorder_queries
from kernels.lib.indexer import BLOCK, KEYS, D, product
from kernels.lib.launch import i32, pointers
from kernels.lib.ptx import relu
from kernels.lib.rows import ceil_div, load, row_of, store
from kernels.lib.scores_at import THREADS, ScoresAtKernel, copied
from kernels.lib.wgmma import K_MAJOR, accumulator, multiply, operand_a, operand_b, register_operand, tiled_mma

from .config import BLOCKS, Config
from .listed import ListedBlocks, Pages
from .smem import Shared, allocate

QUERIES = 1  # the named barrier of the threads that reorder queries


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    s_q: Int32
    s_c: Int32
    first_query: Int32  # of this launch, counted over all batch entries
    count: Int32  # blocks of a query's list
    splits: Int32  # CTAs of a query
    from_start: Int32  # 1 where block 0 begins with the first entry that a query sees, else 0


class Arrays(NamedTuple):
    q: cute.Pointer  # [b, s_q, heads, D]
    k: cute.Pointer  # [b, s_c, D], or pages: [pages, page, D], with 8 or 4 bits [pages, bytes], scales last
    weights: cute.Pointer  # float32 [b, s_q, heads]
    k_scale: cute.Pointer | None  # float32 [b, s_c], of 8-bit keys in an array
    blocks: cute.Pointer  # int32 [b, s_q, count]
    start: cute.Pointer  # int32 [b, s_q]
    scores: cute.Pointer  # float32 [queries of this launch, count * INDEX_BLOCK]


class IndexerScoresWithinSm90(ScoresAtKernel):
    symbol = "indexer_scores_within_sm90"

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        weights: cute.Pointer,
        k_scale: cute.Pointer,  # read where 8-bit keys are in an array
        table: cute.Pointer,  # this, width, pages and page are read where keys are in pages
        blocks: cute.Pointer,
        start: cute.Pointer,
        scores: cute.Pointer,
        s_q: Int32,
        s_c: Int32,
        first_query: Int32,
        count: Int32,
        splits: Int32,
        from_start: Int32,
        width: Int32,
        pages: Int32,
        page: Int32,
        queries: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        scales = k_scale if cutlass.const_expr(c.scaled and not c.paged) else None
        where = Pages(table, width, pages, page) if cutlass.const_expr(c.paged) else None
        n = Extents(s_q, s_c, first_query, count, splits, from_start)
        self.launch(
            Arrays(q, k, weights, scales, blocks, start, scores), n, where, ctas=queries * splits, stream=stream
        )

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents, pages: Pages | None):
        c, smem = self.config, allocate(self.config, self.dtype)
        thread = cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()  # a kernel may still read the scores of the previous launch
        cute.arch.griddepcontrol_launch_dependents()  # the choice that follows waits for this grid itself
        line, split = cute.arch.block_idx()[0] // n.splits, cute.arch.block_idx()[0] % n.splits
        row = Int64(n.first_query) + line
        entry = Int32(row // n.s_q)
        self.copy_q(copied(arrays.q) + row * (c.heads * c.slabs * 64), smem.q, thread)
        tiles = ceil_div(n.count, Int32(BLOCKS))
        first, last = tiles * split // n.splits, tiles * (split + 1) // n.splits
        listed = self.listed(arrays, n, pages, row, entry, last)
        listed.begin(first)
        for i in cutlass.range_constexpr(c.stages - 1):
            listed.gather(smem, first + i, Int32(i), thread)
        self.score(smem, listed, arrays.weights + row * c.heads, arrays.scores + Int64(line) * n.count * INDEX_BLOCK,
                   first, thread)  # fmt: skip

    def listed(
        self, arrays: Arrays, n: Extents, pages: Pages | None, row: Int64, entry: Int32, last: Int32
    ) -> ListedBlocks:
        c, base = self.config, load(arrays.start + row) * n.from_start
        keys, scales = arrays.k.toint(), Int64(0)
        if c.paged:
            pages = pages._replace(table=pages.table + Int64(entry) * pages.width)
        else:
            keys += Int64(entry) * n.s_c * c.key_bytes
            if c.scaled:
                scales = (arrays.k_scale + Int64(entry) * n.s_c).toint()
        read, page = (cute.make_rmem_tensor(size, Int32) for size in (2, 1))
        return ListedBlocks(
            c, keys, scales, n.s_c, pages, arrays.blocks + row * n.count, n.count, base, last, read, page
        )

    @cute.jit
    def score(
        self,
        smem: Shared,
        listed: ListedBlocks,
        weights: cute.Pointer,
        scores: cute.Pointer,
        first: Int32,
        thread: Int32,
    ):
        c, mma = self.config, product(self.dtype, self.config.heads)
        if cutlass.const_expr(c.of_4_bits):
            mma = tiled_mma(self.dtype, c.heads, K_MAJOR, warpgroup.OperandSource.RMEM)
            self.await_tile()  # so Q is there
            reorder_queries(smem.q, thread, THREADS, QUERIES)
        taken = self.take_weights(weights, thread)
        a = register_operand(mma, D, self.dtype) if cutlass.const_expr(c.of_4_bits) else operand_a(mma, smem.k)
        b, acc = operand_b(mma, smem.q), accumulator(mma, c.heads)
        s = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, c.heads // BLOCK)))  # (c, r, j): row r of two
        own = row_of(thread, 0) + thread % 2 * 8  # whose sum this thread ends up with
        stage, next_stage = Int32(0), Int32(c.stages - 1)
        for t in cutlass.range(first, listed.last, unroll=1):
            self.await_tile()
            listed.gather(smem, t + c.stages - 1, next_stage, thread)  # in the place of the one before
            scale = Float32(1.0)
            if cutlass.const_expr(c.of_4_bits):
                row, lane = row_of(thread, 0), thread % 4
                whole = decode_rows(a, smem.k[None, None, stage], smem.scale[None, stage], row, lane)
                scale = whole[1] if lane % 2 == 1 else whole[0]
                multiply(mma, acc, a, b, fresh=True)
            else:
                multiply(mma, acc, a[None, None, None, stage], b, fresh=True)
                if cutlass.const_expr(c.scaled):
                    scale = smem.scale[own, stage]
            warpgroup.wait_group(0)
            sums = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                total = Float32(0.0)
                for j in cutlass.range_constexpr(c.heads // BLOCK):
                    for i in cutlass.range_constexpr(2):
                        total += taken[i, j] * relu(s[i, r, j])
                sums[r] = total
            odd = thread % 2 == 1
            other = cute.arch.shuffle_sync_bfly(sums[0] if odd else sums[1], 1)
            total = (sums[1] if odd else sums[0]) + other
            total += cute.arch.shuffle_sync_bfly(total, 2)
            position = t * KEYS + own
            if (thread % 4 < 2) & (position < listed.count * INDEX_BLOCK):
                store(scores + position, total * scale)
            stage = stage + 1 if stage + 1 < c.stages else Int32(0)
            next_stage = next_stage + 1 if next_stage + 1 < c.stages else Int32(0)

    @cute.jit
    def take_weights(self, weights: cute.Pointer, thread: Int32) -> cute.Tensor:
        """The weights (c, j) of column 8 j + 2 (lane % 4) + c."""
        taken = cute.make_rmem_tensor((2, self.config.heads // BLOCK), Float32)
        for j in cutlass.range_constexpr(self.config.heads // BLOCK):
            pair = cute.make_tensor((weights + (thread % 4 * 2 + j * BLOCK)).align(8), cute.make_layout(2))
            cute.autovec_copy(pair, taken[None, j])
        return taken

    def examples(self, variant: IndexerScoresWithin) -> tuple:
        arrays = ("q", "k", "float32", "float32", "int32", "int32", "int32", "float32")
        return *pointers(variant.dtype, *arrays), *(i32() for _ in range(10))


def compile(variant: IndexerScoresWithin, out_dir: Path) -> Compiled:
    config = Config(variant.heads, variant.dtype, variant.paged, variant.packing)
    return IndexerScoresWithinSm90(config).compile(variant, out_dir, ctas=config.ctas)
