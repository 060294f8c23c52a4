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

With a cache, a table names the pages of keys, and queries are few. A tile is then 256 keys, 64 for each consumer, by
the 128 columns of a block, so that fewer products are wasted. Boxes that divide a page and a tile load a page's keys,
and in 8 bits their scales, which follow all keys of a page.

The kernel loads only key tiles that some query of the block sees; a query that takes all it sees needs none. Scores
that a query does not see may be anything: their reader knows what the query sees. CTAs are persistent: one takes every
gridDim-th block, forth and back, from the last on, so that under a causal mask all have the same work. Blocks may be
split by their key tiles.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import IndexerScores
from kernels.aot import Compiled
from kernels.lib.indexer import KEYS, D, product
from kernels.lib.launch import WARP, WARPGROUP, Kernel, i32, pointers
from kernels.lib.pipeline import PipelineState
from kernels.lib.ptx import keep
from kernels.lib.rows import ceil_div, load, row_of
from kernels.lib.wgmma import multiply, operand_a, operand_b, tma_atom, tma_tiles

from .config import BOX, CONSUMERS, HALF, PUBLISHED, Config
from .operands import Arrays, Extents, Pages
from .smem import Barriers, Shared, allocate
from .sums import HeadSums


@dataclass(frozen=True)
class BlockScheduler:
    """The blocks that one CTA works on, in order. Each split of a block is one."""

    n: Extents

    @property
    def waves(self) -> Int32:
        ctas, work = cute.arch.grid_dim()[0], self.n.blocks * self.n.splits
        rounds = (work - 1) // ctas
        return rounds + Int32(self.place(rounds) < work - rounds * ctas)

    def place(self, wave: Int32) -> Int32:
        """Every other round goes backwards: if lengths fall steadily, all CTAs get the same sum."""
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        return cta + (wave % 2) * (ctas - 1 - 2 * cta)

    def at(self, wave: Int32) -> tuple[Int32, Int32]:
        """(block, counted within the launch, and split)"""
        i = wave * cute.arch.grid_dim()[0] + self.place(wave)
        return self.n.blocks - 1 - i // self.n.splits, i % self.n.splits


class IndexerScoresSm90(Kernel):
    symbol = "indexer_scores_sm90"

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,  # [b, s_c, D], or pages: [pages, page, D], with 8 bits [pages, page * (D + 4)], scales last
        k_scale: cute.Pointer,  # of an array's keys, or of the first page's, as float32
        weights: cute.Pointer,
        table: cute.Pointer,  # this, pages, width, page and box are read where keys are in pages
        start: cute.Pointer,
        stop: cute.Pointer,
        scores: cute.Pointer,
        b: Int32,
        s_q: Int32,
        s_c: Int32,
        first_block: Int32,
        blocks: Int32,
        splits: Int32,
        stride: Int32,
        skip: Int32,
        pages: Int32,
        width: Int32,
        page: Int32,
        box: Int32,
        ctas: Int32,  # at most, that is how many run at a time
        stream: cuda.CUstream,
    ):
        c = self.config
        n = Extents(s_q, s_c, ceil_div(s_q, Int32(c.queries)), first_block, blocks, splits, stride, skip)
        of_keys = (k, k_scale, page, pages) if cutlass.const_expr(c.paged) else (k, k_scale, s_c, b)
        arrays = Arrays(weights, table if cutlass.const_expr(c.paged) else k_scale, start, stop, scores)
        where = Pages(width, page, box) if cutlass.const_expr(c.paged) else None
        maps = (*self.map_of_q(q, b * s_q), *self.maps_of_keys(*of_keys))
        self.launch(*maps, arrays, n, where, ctas=cutlass.min(n.blocks * n.splits, ctas), stream=stream)

    def map_of_q(self, q: cute.Pointer, queries: Int32) -> tuple[cute.CopyAtom, cute.Tensor]:
        rows = cute.make_tensor(q, cute.make_layout((queries * self.config.heads, D), stride=(D, 1)))
        return tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, self.config.columns, D)

    def maps_of_keys(self, k: cute.Pointer, k_scale: cute.Pointer, length: Int32, count: Int32) -> tuple:
        """TMA of keys [count, length, D], and of the scales that follow each page's."""
        c, op = self.config, cpasync.CopyBulkTensorTileG2SOp()
        step = (D + 4 * (c.paged and c.scaled)) * Int64(length)  # elements
        keys = cute.make_tensor(k, cute.make_layout((length, D, count), stride=(D, 1, step)))
        maps = tma_atom(op, keys, BOX if c.paged else c.tile_n, D)
        if not c.scale_bytes:
            return *maps, None, None
        scales = cute.make_tensor(k_scale, cute.make_layout((length, count), stride=(1, step // 4)))
        return *maps, *cpasync.make_tiled_tma_atom(op, scales, cute.make_layout((BOX, 1)), (BOX, 1))

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_scale: cute.CopyAtom | None,
        mScale: cute.Tensor | None,
        arrays: Arrays,
        n: Extents,
        pages: Pages | None,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = allocate(c, self.dtype)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            if cutlass.const_expr(tma_scale is not None):
                cpasync.prefetch_descriptor(tma_scale)
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # the choice that follows waits for this grid itself

        if warp * WARP >= CONSUMERS:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp * WARP == CONSUMERS:
                self.produce(bar, smem, (tma_q, mQ), (tma_k, mK), (tma_scale, mScale), arrays, n, pages)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, arrays, n)

    @cute.jit
    def produce(
        self,
        bar: Barriers,
        smem: Shared,
        rows: tuple,
        keys: tuple,
        scales: tuple,
        arrays: Arrays,
        n: Extents,
        pages: Pages | None,
    ):
        """One warp, for every block of this CTA: it finds the key tiles to see, and loads Q and these tiles."""
        c, scheduler, fills = self.config, BlockScheduler(n), Int32(0)
        (tma_q, mQ), (tma_k, mK) = rows, keys
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_wait()  # a kernel may still read the scores of the previous launch
        for wave in cutlass.range(scheduler.waves, unroll=1):
            block, split = scheduler.at(wave)
            entry, query0 = (n.first_block + block) // n.blocks_of_entry, (n.first_block + block) % n.blocks_of_entry
            query0 = query0 * c.queries
            at = Int64(entry) * n.s_q + cutlass.min(query0 + cutlass.min(lane, c.queries - 1), n.s_q - 1)
            start, stop = load(arrays.start + at), load(arrays.stop + at)
            scored = stop - start > n.skip
            lo = cute.arch.warp_redux_sync(start if scored else n.s_c, "min") // c.tile_n
            hi = ceil_div(cute.arch.warp_redux_sync(stop if scored else Int32(0), "max"), Int32(c.tile_n))
            tiles = cutlass.max(hi - lo, 0)
            first, last = lo + tiles * split // n.splits, lo + tiles * (split + 1) // n.splits
            q = bar.q.at(wave)
            q.wait_empty()
            if first < last:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_expect_tx(q.full, c.q_bytes)
                there = cute.domain_offset(((entry * n.s_q + query0) * c.heads, 0), mQ)
                gQ, sQ = tma_tiles(tma_q, cute.local_tile(there, (c.columns, D), (0, 0)), smem.q)
                cute.copy(tma_q, gQ, sQ[None, q.index], tma_bar_ptr=q.full)
            with cute.arch.elect_one():
                for i, x in enumerate((block, entry, first, last)):
                    smem.info[i, q.index] = x
                q.arrive_full()
            if cutlass.const_expr(c.paged):
                fills = self.load_pages(bar, smem, keys, scales, arrays.keys + entry * pages.width, pages, first, last,
                                        fills)  # fmt: skip
            else:
                gK, sK = tma_tiles(tma_k, cute.local_tile(mK[None, None, entry], (c.tile_n, D), (None, 0)), smem.k)
                for t in cutlass.range(first, last, unroll=1):
                    stage = self.begin_fill(bar, fills)
                    cute.copy(tma_k, gK[None, t], sK[None, stage], tma_bar_ptr=bar.k.full + stage)
                    fills += 1

    @cute.jit
    def begin_fill(self, bar: Barriers, fills: Int32) -> Int32:
        """The stage of this fill of the ring of keys, once it is free, with its bytes announced."""
        k = bar.k.at(fills)
        k.wait_empty()
        with cute.arch.elect_one():
            k.expect_full(self.config.k_bytes)
        return k.index

    @cute.jit
    def load_pages(
        self,
        bar: Barriers,
        smem: Shared,
        keys: tuple,
        scales: tuple,
        table: cute.Pointer,
        pages: Pages,
        first: Int32,
        last: Int32,
        fills: Int32,
    ) -> Int32:
        """Loads the key tiles from first to last, box by box, and their scales; returns the fills after them.

        A lane knows where one of the next 32 boxes is. Keys without a page, or after a page's end, are 0.
        """
        c, lane = self.config, cute.arch.lane_idx()
        (tma_k, mK), (tma_scale, mScale) = keys, scales
        boxes = c.tile_n // pages.box
        sK = cute.local_tile(smem.k, (BOX, D), (None, 0, None))
        page, row = Int32(-1), Int32(0)
        for t in cutlass.range(first, last, unroll=1):
            before = (t - first) * boxes % WARP
            if before == 0:
                key = t * c.tile_n + lane * pages.box
                which = key // pages.page
                page, row = Int32(-1), key % pages.page
                if which < pages.width:
                    page = load(table + which)
            stage = self.begin_fill(bar, fills)
            for i in cutlass.range(boxes, unroll=1):
                its_page, its_row = (cute.arch.shuffle_sync(x, before + i) for x in (page, row))
                at = i * pages.box
                g, s = tma_tiles(tma_k, cute.local_tile(mK[None, None, its_page], (BOX, D), (None, 0)), sK)
                cute.copy(tma_k, g[None, its_row // BOX], s[None, at // BOX, stage], tma_bar_ptr=bar.k.full + stage)
                if cutlass.const_expr(c.scale_bytes):
                    g, s = tma_tiles(
                        tma_scale,
                        cute.local_tile(mScale, (BOX, 1), (None, None)),
                        cute.local_tile(smem.k_scale, (BOX, 1), (None, None)),
                    )
                    cute.copy(tma_scale, g[None, its_row // BOX, its_page], s[None, at // BOX, stage],
                              tma_bar_ptr=bar.k.full + stage)  # fmt: skip
            fills += 1
        return fills

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
                out = sums.place(arrays.scores + (Int64(block) * c.queries * n.stride + first * c.tile_n + key0), n)
                scales = arrays.keys + Int64(entry) * n.s_c
                for t in cutlass.range(first, last, unroll=1):
                    k = PipelineState(bar.k, stage, parity)
                    k.wait_full()
                    multiply(mma, sums.acc, a[None, None, None, stage], b[None, None, None, q.index], fresh=True)
                    scale = self.scale_of(smem, stage, scales, key0, t, n)
                    warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        k.arrive_empty()
                    sums.store(out, scale, query0, n)
                    out, stage = out + c.tile_n, stage + 1
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

    def examples(self, variant: IndexerScores) -> tuple:
        arrays = ("q", "k", "float32", "float32", "int32", "int32", "int32", "float32")
        return *pointers(variant.dtype, *arrays), *(i32() for _ in range(13))


def key_of(thread: Int32) -> Int32:
    """The key, among a warpgroup's, whose sums a lane ends up with: an even lane of a quad has the quad's first row."""
    return row_of(thread, 0) + thread % 2 * 8


def compile(variant: IndexerScores, out_dir: Path) -> Compiled:
    return IndexerScoresSm90(Config(variant.heads, variant.dtype, variant.paged)).compile(variant, out_dir)
