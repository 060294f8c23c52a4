"""Attention for Hopper over one span of a latent, for few heads, with the bits of `mla_few_heads_fwd_sm90`.

There a query has tiles of keys that begin with the first that it sees. Here neighbouring queries share what SMEM has: a
place has 72 keys, and a product reads the 64 of a query from whichever row on they begin, for the swizzle goes by the
address. So a window's keys are loaded once for a group of queries, by TMA, and each query's sums are the same.

    warp 0      Q of a consumer's queries, and what they see
    warp 1      keys: a ring of pieces, each some columns of 72 keys
    consumers   two warpgroups, each with one query of 32 heads, or two of fewer. For each query S', softmax over the
                keys of each column, P' to SMEM, O'. One query's softmax runs under another's products.

Where the queries of a group begin further apart, each has a pass of its own over its keys. In the others' passes a
query sees nothing: its P is 0, and its factor 1.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.column_softmax import ColumnSoftmax, scale_columns
from kernels.lib.columns import by_column
from kernels.lib.cut_keys import cut_keys, first_keys
from kernels.lib.forward import ForwardKernel, Source
from kernels.lib.launch import WARPGROUP, Shapes
from kernels.lib.rows import PUBLISHED, ROWS, Extents, RowTile, ceil_div, row_of
from kernels.lib.softmax import RowResults
from kernels.lib.spans import SpanOperands, clip, load_span
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    not_,
    operand_a,
    operand_b,
    store_columns,
    tiled_mma,
    tma_atom,
    tma_tiles,
    transposed,
    zero_rows,
)

from .config import CONSUMERS, Config
from .smem import Barriers, Shared

MET = 1  # the first of named barriers: all threads of a consumer have arrived
LO, TILES, PASSES, OF_QUERIES = range(PUBLISHED, PUBLISHED + 4)  # places of published numbers
FAR = 2**30


@dataclass(frozen=True)
class Group:
    """What the queries of a group see, as one warp knows it: a lane has a query."""

    start: Int32
    tiles: Int32  # of its own
    length: Int32
    lo: Int32
    hi: Int32
    tiles_of_pass: Int32  # where there is one
    passes: Int32

    @cute.jit
    def of_pass(self, p: Int32) -> tuple[Int32, Int32, Int32]:
        """(first key, the one after the last, tiles) of a pass."""
        start, length, own = (cute.arch.shuffle_sync(x, p) for x in (self.start, self.length, self.tiles))
        lo, hi, tiles = self.lo, self.hi, self.tiles_of_pass
        if self.passes > 1:
            lo, hi, tiles = start, start + length, own
        return lo, hi, tiles


@dataclass(frozen=True)
class Query:
    """State that a consumer keeps for one of its queries."""

    number: Int32  # in its group
    start: Int32
    length: Int32
    q: cute.Tensor  # (.., piece of d)
    p: cute.Tensor
    scores: cute.Tensor
    out: tuple[cute.Tensor, ...]  # by slab of d
    softmax: ColumnSoftmax


@dataclass(frozen=True)
class Consumer:
    """State that a consumer thread keeps from group to group."""

    bar: Barriers
    smem: Shared
    side: Int32
    thread: Int32
    qk: cute.TiledMma
    pv: cute.TiledMma
    p: cute.Tensor  # (heads, keys, place)

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=MET + self.side, number_of_threads=WARPGROUP)


class MlaFewHeadsSpansSm90(ForwardKernel):
    symbol = "mla_few_heads_spans_sm90"

    def source(self, kind: str, shapes: Shapes, x: Source) -> tuple:
        c = self.config
        tma = tma_atom(cpasync.CopyBulkTensorTileG2SOp(), cut_keys(shapes, x, c.tile_n), c.tile_n, c.piece)
        return (*tma, SpanOperands(x.first, x.second, x.s_kv))

    @cute.kernel
    def kernel(
        self,
        rows_of_q: tuple,
        output: tuple,
        sources: tuple,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = Shared.allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        for query in cutlass.range_constexpr(c.group):
            for i in cutlass.range_constexpr(c.pieces):  # the kernel also computes heads that do not exist
                zero_rows(smem.q[None, None, i, query], n.box_inner, cute.arch.thread_idx()[0], c.threads)
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                self.load_queries(bar, smem, rows_of_q, sources[0], n)
            elif warp == 1:
                self.load_keys(bar, smem, sources[0], n)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, output, results, scale_log2, n)

    def groups(self, n: Extents) -> TileScheduler:
        """Of tiles that are groups of queries."""
        c = self.config
        return TileScheduler.of(n._replace(tiles_outer=ceil_div(n.outer, Int32(c.group)), box_outer=Int32(c.group)))

    # ---- producers

    @cute.jit
    def open(self, operands: SpanOperands, tile: RowTile) -> Group:
        c, lane = self.config, cute.arch.lane_idx()
        query = tile.outer0 + lane
        start, stop = clip(operands, load_span(operands, tile, cutlass.min(query, tile.n.s_q - 1)))
        length = cutlass.max(stop - start, 0) if (lane < c.group) & (query < tile.n.s_q) else Int32(0)
        sees, tiles = length > 0, ceil_div(length, Int32(c.keys))
        lo = cute.arch.warp_redux_sync(start if sees else Int32(FAR), "min")
        last = cute.arch.warp_redux_sync(start if sees else Int32(0), "max")
        hi = cute.arch.warp_redux_sync(start + length if sees else Int32(0), "max")
        most = cute.arch.warp_redux_sync(tiles, "max")
        after = cute.arch.warp_redux_sync(lane + 1 if sees else Int32(0), "max")
        passes = Int32(1) if last - lo <= c.spare else after
        return Group(start, tiles, length, lo, hi, most, passes)

    @cute.jit
    def load_queries(self, bar: Barriers, smem: Shared, row_source: tuple, source: tuple, n: Extents):
        """A warp: for every group of this CTA Q of its queries, and what they see."""
        c, (tma_q, mQ), lane = self.config, row_source, cute.arch.lane_idx()
        scheduler = self.groups(n)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            group = self.open(source[-1], tile)
            for side in cutlass.range_constexpr(CONSUMERS):
                q, info = bar.of_queries(side).at(wave), smem.info[None, side]
                q.wait_empty()
                if lane == 0:
                    tile.publish(info)
                    info[LO], info[TILES], info[PASSES] = group.lo, group.tiles_of_pass, group.passes
                if lane < c.group:
                    info[OF_QUERIES + lane] = group.start
                    info[OF_QUERIES + c.group + lane] = group.length
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    q.expect_full(c.queries * n.box_inner * c.row_bytes)
                for i in cutlass.range_constexpr(c.queries):
                    number = side * c.queries + i
                    of_query = replace(tile, outer0=tile.outer0 + number)
                    gQ, sQ = tma_tiles(tma_q, of_query.of(mQ, c.tile_m, c.piece), smem.q[None, None, None, number])
                    for piece in cutlass.range_constexpr(c.pieces):
                        cute.copy(tma_q, gQ[None, piece], sQ[None, piece], tma_bar_ptr=q.full)

    @cute.jit
    def load_keys(self, bar: Barriers, smem: Shared, source: tuple, n: Extents):
        """A warp: for every group of this CTA its keys, pass by pass, with zeros after the last that a query sees."""
        c, (atom, keys, operands) = self.config, source
        scheduler, before = self.groups(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            group = self.open(operands, tile)
            for p in cutlass.range(group.passes, unroll=1):
                lo, hi, tiles = group.of_pass(p)
                for t in cutlass.range(tiles, unroll=1):
                    first = lo + t * c.keys
                    gK = first_keys(tile, keys, first, cutlass.min(hi - first, c.tile_n), c.tile_n, c.piece)
                    gK, sK = tma_tiles(atom, gK, smem.k)
                    for i in cutlass.range_constexpr(c.pieces):
                        state = bar.k.at((before + t) * c.pieces + i)
                        state.wait_empty()
                        with cute.arch.elect_one():
                            state.expect_full(c.piece_bytes)
                        cute.copy(atom, gK[None, 0, i], sK[None, state.index], tma_bar_ptr=state.full)
                before = before + tiles

    # ---- consumers

    @cute.jit
    def consume(self, bar: Barriers, smem: Shared, output: tuple, results: RowResults, scale_log2: Float32, n: Extents):
        """One of two warpgroups: for every group of this CTA, O and lse of its queries."""
        c = self.config
        w, queries = self.consumer(bar, smem, scale_log2)
        for x in queries:
            x.softmax.read_sinks(n, results)
        before = Int32(0)  # tiles of keys
        scheduler = self.groups(n)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            q, info = bar.of_queries(w.side).at(wave), smem.info[None, w.side]
            q.wait_full()
            tile = RowTile.read(info, n)
            lo, tiles_of_pass, passes = (cute.arch.make_warp_uniform(info[i]) for i in (LO, TILES, PASSES))
            seeing = [replace(x, **self.seen(info, x)) for x in queries]
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # all warps meet before anything else takes O's place
            for x in queries:
                x.softmax.reset()
            if tiles_of_pass == 0:
                q.arrive_empty()
                for x in queries:
                    for acc in x.out:
                        acc.fill(0.0)
            for p in cutlass.range(passes, unroll=1):
                tiles = tiles_of_pass
                if passes > 1:
                    length = cute.arch.make_warp_uniform(info[OF_QUERIES + c.group + p])
                    tiles = ceil_div(length, Int32(c.keys))
                offsets, lengths, unseen = [], [], []
                for x in seeing:
                    is_its = (passes == 1) | (p == x.number)
                    offsets.append(x.start - lo if (passes == 1) & (x.length > 0) else Int32(0))
                    lengths.append(x.length if is_its else Int32(0))
                    unseen.append((passes == 1) | (p <= x.number) | (x.length == 0))
                for t in cutlass.range(tiles, unroll=1):
                    fresh = [(t == 0) & x for x in unseen]
                    is_last = (p == passes - 1) & (t == tiles - 1)
                    self.add_tile(w, seeing, before + t, offsets, [x - t * c.keys for x in lengths], fresh, q, is_last)
                before = before + tiles
            for x in seeing:
                query = tile.outer0 + x.number
                heads = n.inner * Int32(query < n.outer)  # none, where the group is longer than the queries
                self.finish(x, replace(tile, n=n._replace(inner=heads), outer0=query), results)
            self.store(w, seeing, tile, output)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def seen(self, info: cute.Tensor, x: Query) -> dict[str, Int32]:
        start, length = (OF_QUERIES + first + x.number for first in (0, self.config.group))
        return {name: cute.arch.make_warp_uniform(info[i]) for name, i in (("start", start), ("length", length))}

    def consumer(self, bar: Barriers, smem: Shared, scale_log2: Float32) -> tuple[Consumer, list[Query]]:
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        side = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        qk, pv = tiled_mma(self.dtype, c.tile_m, K_MAJOR), tiled_mma(self.dtype, c.tile_m, K_MAJOR, a_major=MN_MAJOR)
        w = Consumer(
            bar,
            smem,
            side,
            thread,
            qk,
            pv,
            p=smem.p[None, None, None, side],
        )
        queries = []
        for i in range(c.queries):
            number = side * c.queries + i
            queries.append(
                Query(
                    number,
                    Int32(0),
                    Int32(0),
                    q=operand_b(qk, smem.q[None, None, None, number]),
                    p=operand_b(pv, w.p[None, None, i]),
                    scores=accumulator(qk, c.tile_m),
                    out=tuple(accumulator(pv, c.tile_m) for _ in range(c.d // SLAB)),
                    softmax=ColumnSoftmax.of(scale_log2, thread, MET + side, smem.found[None, None, number]),
                )
            )
        return w, queries

    def tile_of_query(self, w: Consumer, stage: Int32, row: Int32, columns: int, slab: int = 0) -> cute.Tensor:
        """(keys, columns) from this row of a piece on. Rows are 128 bytes apart, so a product may begin with any: the
        swizzle goes by the address.
        """
        c, of_slab = self.config, self.config.tile_n * SLAB
        first = w.smem.k.iterator + (stage * (c.tile_n * c.piece) + slab * of_slab + row * SLAB)
        shape, stride = ((8, c.keys // 8), (SLAB, columns // SLAB)), ((SLAB, 8 * SLAB), (1, of_slab))
        return cute.make_tensor(first, cute.make_layout(shape, stride=stride))

    @cute.jit
    def add_tile(
        self,
        w: Consumer,
        queries: list,
        k: Int32,
        offsets: list,
        seen: list,
        fresh: list,
        q,
        is_last: cutlass.Boolean,
    ):
        """Each query's tile of keys in this CTA's k-th place; `seen`: how many of them it sees."""
        c, count = self.config, self.config.queries
        for i in cutlass.range_constexpr(c.pieces):
            state = w.bar.k.at(k * c.pieces + i)
            state.wait_full()
            for x, offset in zip(queries, offsets, strict=True):
                a = operand_a(w.qk, self.tile_of_query(w, state.index, offset, c.piece))
                multiply(w.qk, x.scores, a, x.q[None, None, None, i], fresh=i == 0)
        for j, x in enumerate(queries):
            # after its scores come the last pieces of later queries' scores, and a group of each query's before it
            warpgroup.wait_group(count - 1)
            if cutlass.const_expr(j == count - 1):  # noqa: SIM102, at compile time
                if is_last:
                    q.arrive_empty()
            self.mask(x, seen[j], w.thread)
            x.softmax.step(x.scores)
            self.share_p(w, x, j, fresh[j])
            self.multiply_values(w, x, k, offsets[j], fresh[j], releases=j == count - 1)

    @cute.jit
    def mask(self, x: Query, seen: Int32, thread: Int32):
        """-inf for every key that the query does not see."""
        if seen < self.config.keys:
            s = by_column(x.scores)
            for r in cutlass.range_constexpr(ROWS):
                here = row_of(thread, r) < seen
                for i in cutlass.range_constexpr(cute.size(s, mode=[0])):
                    s[i, r] = s[i, r] if here else -Float32.inf

    @cute.jit
    def share_p(self, w: Consumer, x: Query, place: cutlass.Constexpr, fresh: cutlass.Boolean):
        """All warps' products with the query's previous P are done, because the warps have met in the softmax.

        O is rescaled while P goes to SMEM; the fence waits for them.
        """
        store_columns(w.qk, x.scores, w.p[None, None, place], w.thread)
        self.rescale(x, fresh)
        cute.arch.fence_proxy("async.shared", space="cta")
        w.meet()

    @cute.jit
    def rescale(self, x: Query, fresh: cutlass.Boolean):
        """O' in units of the new maxima. Where no column of the warp rose, the factors are exactly 1."""
        factor = x.softmax.factor
        rises = factor[0] != 1.0
        for i in cutlass.range_constexpr(1, cute.size(factor)):
            rises = rises | (factor[i] != 1.0)
        if not_(fresh) & cute.arch.vote_any_sync(rises):
            for acc in x.out:
                scale_columns(acc, factor)

    @cute.jit
    def multiply_values(
        self,
        w: Consumer,
        x: Query,
        k: Int32,
        offset: Int32,
        fresh: cutlass.Boolean,
        releases: cutlass.Constexpr,
    ):
        """O' += V' P', piece by piece of d, as one group; the last query hands each piece back while the next is
        read.
        """
        c = self.config
        slabs, pv = c.piece // SLAB, cute.make_tiled_mma(cute.make_mma_atom(w.pv.op))
        warpgroup.fence()
        for i in cutlass.range_constexpr(c.pieces):
            state = w.bar.k.at(k * c.pieces + i)
            for j in cutlass.range_constexpr(slabs):
                tile, out = self.tile_of_query(w, state.index, offset, SLAB, slab=j), x.out[i * slabs + j]
                a = operand_a(pv, transposed(tile))
                for block in cutlass.range_constexpr(c.keys // 16):
                    pv.set(warpgroup.Field.ACCUMULATE, True if block else not_(fresh))
                    cute.gemm(pv, out, a[None, None, block], x.p[None, None, block], out)
            if cutlass.const_expr(releases):
                warpgroup.commit_group()
                if cutlass.const_expr(i > 0):
                    warpgroup.wait_group(1)
                    w.bar.k.at(k * c.pieces + i - 1).arrive_empty()
        if cutlass.const_expr(releases):
            warpgroup.wait_group(0)
            w.bar.k.at((k + 1) * c.pieces - 1).arrive_empty()
        else:
            warpgroup.commit_group()

    @cute.jit
    def finish(self, x: Query, tile: RowTile, results: RowResults):
        x.softmax.finish(tile, results)
        for acc in x.out:
            scale_columns(acc, x.softmax.factor)

    @cute.jit
    def store(self, w: Consumer, queries: list, tile: RowTile, output: tuple):
        """Stores O through SMEM, and by TMA to memory, which leaves out heads and queries that do not exist."""
        c, (tma_o, mO) = self.config, output
        targets = []
        for x in queries:
            gO, sO = tma_tiles(tma_o, replace(tile, outer0=tile.outer0 + x.number).of(mO, c.tile_m, SLAB), w.p)
            targets += [(x, gO, sO, slab) for slab in range(c.d // SLAB)]
        for first in cutlass.range_constexpr(0, len(targets), c.places):
            if cutlass.const_expr(first > 0):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                w.meet()
            some = targets[first : first + c.places]
            for i, (x, _, _, slab) in enumerate(some):
                store_columns(w.pv, x.out[slab], w.p[None, None, i], w.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            w.meet()
            if cute.arch.make_warp_uniform(w.thread // 32) == 0:
                with cute.arch.elect_one():
                    for i, (_, gO, sO, slab) in enumerate(some):
                        cute.copy(tma_o, sO[None, i], gO[None, slab])
                    cute.arch.cp_async_bulk_commit_group()


def compile(variant: Forward, out_dir: Path) -> Compiled:
    return MlaFewHeadsSpansSm90(Config(variant.d, variant.dtype, variant.sources, variant.max_heads)).compile(
        variant, out_dir
    )
