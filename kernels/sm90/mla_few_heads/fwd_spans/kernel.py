"""Attention for Hopper over one span of a latent, for few heads, with the bits of `mla_few_heads_fwd_sm90`.

There a query has tiles of keys that begin with the first that it sees. Here a group of neighbouring queries, which have
64 rows of (query, head) pairs, shares what SMEM has: a place has 72 keys, and for O a product reads the 64 of a query
from whichever row on they begin, for the swizzle goes by the address. So a window's keys are loaded once for a group,
by TMA, one product has the scores of all its rows, and each query's sums are the same.

    warp 0      Q of a group, and what its queries see
    warp 1      keys: a ring of pieces, each some columns of 72 keys
    warps 2, 3  O to memory, from where the last keys lay
    scorer      a warpgroup: S = Q K' of 64 rows and 72 keys, softmax of each row over its query's 64 keys, P to SMEM
    adders      two warpgroups, each with half of the columns of O' = V' P', for one query after the other, or for all
                at once where all begin with the same key

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
from kernels.lib.column_softmax import scale_columns
from kernels.lib.cut_keys import cut_keys, first_keys
from kernels.lib.forward import ForwardKernel, Source
from kernels.lib.launch import WARPGROUP, Shapes
from kernels.lib.ptx import keep
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

from .config import ADDERS, Config
from .smem import WARPS, Barriers, Shared
from .softmax import QuerySoftmax

TILES, PASSES, TIED, LAST, OFFSETS, SEEING, LENGTHS = range(PUBLISHED, PUBLISHED + 7)  # places of published numbers
FAR = 2**30


@dataclass(frozen=True)
class Group:
    """The keys that the queries of a group see, as one warp knows them: a lane has a query."""

    start: Int32
    tiles: Int32  # of its own
    length: Int32
    lo: Int32
    hi: Int32
    tiles_of_pass: Int32  # where there is one
    passes: Int32
    tied: cutlass.Boolean  # all begin with the same key
    all_tiles: Int32  # of all passes
    offsets: Int32  # by how many keys each begins later than a pass, in four bits
    seeing: Int32  # a bit for each that sees a key

    @cute.jit
    def of_pass(self, p: Int32) -> tuple[Int32, Int32, Int32]:
        """(first key, the one after the last, tiles) of a pass."""
        start, length, own = (cute.arch.shuffle_sync(x, p) for x in (self.start, self.length, self.tiles))
        lo, hi, tiles = self.lo, self.hi, self.tiles_of_pass
        if self.passes > 1:
            lo, hi, tiles = start, start + length, own
        return lo, hi, tiles


@dataclass(frozen=True)
class Seen:
    """The same as the scorer and the adders read it."""

    info: cute.Tensor
    tile: RowTile
    tiles_of_pass: Int32
    passes: Int32
    tied: cutlass.Boolean
    offsets: Int32
    seeing: Int32

    @staticmethod
    def read(info: cute.Tensor, n: Extents) -> "Seen":
        places = (TILES, PASSES, TIED, OFFSETS, SEEING)
        tiles, passes, tied, *of_queries = (cute.arch.make_warp_uniform(info[i]) for i in places)
        return Seen(info, RowTile.read(info, n), tiles, passes, tied != 0, *of_queries)

    def length(self, query: Int32) -> Int32:
        return cute.arch.make_warp_uniform(self.info[LENGTHS + query])

    @cute.jit
    def tiles(self, p: Int32) -> Int32:
        """Counts the tiles of a pass."""
        tiles = self.tiles_of_pass
        if self.passes > 1:
            tiles = ceil_div(self.length(p), Int32(SLAB))
        return tiles

    def offset(self, query: Int32 | int) -> Int32:
        """Returns by how many keys a query begins later than a pass."""
        return self.offsets >> 4 * query & 15

    def is_fresh(self, query: int, p: Int32) -> cutlass.Boolean:
        """Tells whether a query has seen no key before this pass."""
        return (self.passes == 1) | (p <= query) | (self.seeing >> query & 1 == 0)

    @cute.jit
    def length_in_pass(self, query: Int32, p: Int32) -> Int32:
        return self.length(query) if (self.passes == 1) | (p == query) else Int32(0)


@dataclass(frozen=True)
class Adder:
    """State that a thread which adds keeps from group to group."""

    bar: Barriers
    smem: Shared
    side: Int32
    thread: Int32
    pv: tuple[cute.TiledMma, ...]  # of a query, and of all
    out: tuple[cute.Tensor, ...]  # by slab of its half of d: 64 rows of d and the columns of all queries

    def columns(self, slab: int, query: int, queries: int) -> cute.Tensor:
        """A query's, of an accumulator."""
        x = self.out[slab]
        size = cute.size(x) // queries
        return cute.make_tensor(x.iterator + query * size, cute.make_layout(size))


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
                first, stop = query * c.tile_m + n.box_inner, Int32((query + 1) * c.tile_m)
                zero_rows(smem.q[None, None, i], first, cute.arch.thread_idx()[0], c.threads, stop)
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                self.load_queries(bar, smem, rows_of_q, sources[0], n)
            elif warp == 1:
                self.load_keys(bar, smem, sources[0], n)
            else:
                self.store(bar, smem, warp - 2, output, n)
        elif warp < 8:
            cute.arch.setmaxregister_decrease(c.registers[1])
            self.score(bar, smem, results, scale_log2, n)
        else:
            cute.arch.setmaxregister_increase(c.registers[2])
            self.add(bar, smem, n)

    def groups(self, n: Extents) -> TileScheduler:
        """Schedules tiles that are groups of queries."""
        c = self.config
        return TileScheduler.of(n._replace(tiles_outer=ceil_div(n.outer, Int32(c.group)), box_outer=Int32(c.group)))

    @cute.jit
    def arrive_as_warp(self, barrier: cute.Pointer):
        """Arrives after everything that all lanes did."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    # ---- loads and stores

    @cute.jit
    def open(self, operands: SpanOperands, tile: RowTile) -> Group:
        """Finds what the queries of a group see. If none sees a key there is a tile of keys of which none is seen."""
        c, lane = self.config, cute.arch.lane_idx()
        query = tile.outer0 + lane
        start, stop = clip(operands, load_span(operands, tile, cutlass.min(query, tile.n.s_q - 1)))
        length = cutlass.max(stop - start, 0) if (lane < c.group) & (query < tile.n.s_q) else Int32(0)
        sees, tiles = length > 0, ceil_div(length, Int32(c.keys))
        first = cute.arch.warp_redux_sync(start if sees else Int32(FAR), "min")
        last = cute.arch.warp_redux_sync(start if sees else Int32(0), "max")
        hi = cute.arch.warp_redux_sync(start + length if sees else Int32(0), "max")
        most = cutlass.max(cute.arch.warp_redux_sync(tiles, "max"), 1)
        after = cute.arch.warp_redux_sync(lane + 1 if sees else Int32(0), "max")
        lo = cutlass.min(first, hi)
        passes = Int32(1) if last - lo <= c.spare else after
        all_tiles = most if passes == 1 else cute.arch.warp_redux_sync(tiles, "add")
        offset = start - lo if sees & (passes == 1) else Int32(0)
        offsets = cute.arch.warp_redux_sync(offset << 4 * (lane & 7), "or")
        seeing = cute.arch.vote_ballot_sync(sees)
        return Group(start, tiles, length, lo, hi, most, passes, last <= lo, all_tiles, offsets, seeing)

    @cute.jit
    def load_queries(self, bar: Barriers, smem: Shared, row_source: tuple, source: tuple, n: Extents):
        """A warp: for every group of this CTA Q of its queries, and what they see."""
        c, (tma_q, mQ), lane = self.config, row_source, cute.arch.lane_idx()
        scheduler, before = self.groups(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            group = self.open(source[-1], tile)
            before = before + group.all_tiles
            state = bar.info.at(wave)
            info = smem.info[None, state.index]
            state.wait_empty()
            if lane == 0:
                tile.publish(info)
                info[TILES], info[PASSES], info[TIED] = group.tiles_of_pass, group.passes, Int32(group.tied)
                info[LAST], info[OFFSETS], info[SEEING] = before - 1, group.offsets, group.seeing
            if lane < c.group:
                info[LENGTHS + lane] = group.length
            state.arrive_full()
            q = bar.q.at(wave)
            q.wait_empty()
            with cute.arch.elect_one():
                q.expect_full(c.group * n.box_inner * c.row_bytes)
            for i in cutlass.range(c.group, unroll=1):
                of_query = replace(tile, outer0=tile.outer0 + i)
                place = cute.local_tile(smem.q, (c.tile_m, SLAB, 1), (i, None, None))
                gQ, sQ = tma_tiles(tma_q, of_query.of(mQ, c.tile_m, SLAB), place[None, None, 0, None, None])
                for slab in cutlass.range_constexpr(c.d // SLAB):
                    at = sQ[None, slab % (c.piece // SLAB), slab // (c.piece // SLAB)]
                    cute.copy(tma_q, gQ[None, slab], at, tma_bar_ptr=q.full)

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

    @cute.jit
    def store(self, bar: Barriers, smem: Shared, side: Int32, output: tuple, n: Extents):
        """A warp: for every group an adder's half of O, by TMA, which leaves out heads and queries that do not exist;
        then it hands back the place for keys.
        """
        for which in cutlass.range_constexpr(ADDERS):
            if side == which:
                self.store_half(bar, smem, which, output, n)

    @cute.jit
    def store_half(self, bar: Barriers, smem: Shared, side: cutlass.Constexpr, output: tuple, n: Extents):
        c, (tma_o, mO) = self.config, output
        for wave in cutlass.range(self.groups(n).waves, unroll=1):
            state = bar.info.at(wave)
            state.wait_full()
            info = smem.info[None, state.index]
            tile, last = RowTile.read(info, n), cute.arch.make_warp_uniform(info[LAST])
            self.arrive_as_warp(state.empty)
            o = bar.o[side].at(wave)
            o.wait_full()
            pieces = [bar.k.at(last * c.pieces + side * c.pieces_of_adder + i) for i in range(c.pieces_of_adder)]
            for i, piece in enumerate(pieces):
                for j in cutlass.range_constexpr(c.piece // SLAB):
                    half = self.half_of_o(smem, piece.index, j)
                    rows = cute.local_tile(half, (c.tile_m, SLAB), (None, 0))
                    slab = (side * c.pieces_of_adder + i) * (c.piece // SLAB) + j
                    for query in cutlass.range(cutlass.min(n.outer - tile.outer0, c.group), unroll=1):
                        of_query = replace(tile, outer0=tile.outer0 + query)
                        gO, sO = tma_tiles(tma_o, of_query.of(mO, c.tile_m, SLAB), rows)
                        with cute.arch.elect_one():
                            cute.copy(tma_o, sO[None, query], gO[None, slab])
                cute.arch.cp_async_bulk_commit_group()
            for i, piece in enumerate(pieces):
                cute.arch.cp_async_bulk_wait_group(c.pieces_of_adder - 1 - i, read=True)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() < WARPS:
                    piece.arrive_empty()
            self.arrive_as_warp(o.empty)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def half_of_o(self, smem: Shared, stage: Int32, slab: int) -> cute.Tensor:
        """(rows of all queries, 64 columns) of O on its way out, in the place of a slab of a piece of keys."""
        c = self.config
        first = cute.assume(stage * (c.tile_n * c.piece) + slab * (c.tile_n * SLAB), divby=8 * SLAB)
        layout = cute.make_layout(((8, c.rows // 8), (SLAB, 1)), stride=((SLAB, 8 * SLAB), (1, c.rows * SLAB)))
        return cute.make_tensor(smem.k.iterator + first, layout)

    # ---- scores

    @cute.jit
    def score(self, bar: Barriers, smem: Shared, results: RowResults, scale_log2: Float32, n: Extents):
        """A warpgroup: for every group of this CTA the scores of all rows, P, and lse."""
        c, thread = self.config, cute.arch.thread_idx()[0] % WARPGROUP
        qk = tiled_mma(self.dtype, c.tile_n, K_MAJOR)
        q, keys, scores = operand_a(qk, smem.q), operand_b(qk, smem.k), accumulator(qk, c.tile_n)
        softmax = QuerySoftmax.of(scale_log2, thread)
        rows = [row_of(thread, r) for r in range(ROWS)]
        numbers = [cute.arch.make_warp_uniform(row // c.tile_m) for row in rows]  # of queries
        heads = [row % c.tile_m for row in rows]
        softmax.read_sinks(heads, n, results)
        before = Int32(0)  # tiles of keys
        for wave in cutlass.range(self.groups(n).waves, unroll=1):
            state, of_q = bar.info.at(wave), bar.q.at(wave)
            state.wait_full()
            seen = Seen.read(smem.info[None, state.index], n)
            of_q.wait_full()
            softmax.reset()
            for p in cutlass.range(seen.passes, unroll=1):
                tiles = seen.tiles(p)
                offsets = [seen.offset(number) for number in numbers]
                lengths = [seen.length_in_pass(number, p) for number in numbers]
                for t in cutlass.range(tiles, unroll=1):
                    k = before + t
                    for i in cutlass.range_constexpr(c.pieces):
                        piece = bar.k.at(k * c.pieces + i)
                        piece.wait_full()
                        b = keys[None, None, None, piece.index]
                        multiply(qk, scores, q[None, None, None, i], b, fresh=i == 0)
                    warpgroup.wait_group(0)
                    for i in cutlass.range_constexpr(c.pieces):
                        self.arrive_as_warp(bar.k.at(k * c.pieces + i).empty)
                    if (p == seen.passes - 1) & (t == tiles - 1):
                        self.arrive_as_warp(of_q.empty)
                    softmax.take(scores, offsets, [length - t * c.keys for length in lengths])
                    softmax.step(scores)
                    self.share(bar, smem, softmax, scores, offsets, k)
                before = before + tiles
            tile = seen.tile
            queries = [tile.outer0 + number for number in numbers]
            exist = [
                (head < n.box_inner) & (tile.inner0 + head < n.inner) & (query < n.outer)
                for head, query in zip(heads, queries, strict=True)
            ]
            of_rows = zip(heads, queries, strict=True)
            softmax.finish([tile.row_index(query, tile.inner0 + head) for head, query in of_rows], exist, results)
            self.arrive_as_warp(state.empty)
            last = bar.last.at(wave)
            last.wait_empty()
            self.share_factors(softmax, smem.last)
            last.arrive_full()

    @cute.jit
    def share(self, bar: Barriers, smem: Shared, softmax: QuerySoftmax, scores: cute.Tensor, offsets: list, k: Int32):
        """P and the factors of this CTA's k-th tile of keys, for the adders."""
        state = bar.p.at(k)
        state.wait_empty()
        softmax.share(scores, offsets, smem.p[None, None, state.index])
        self.share_factors(softmax, smem.factors[None, state.index])
        cute.arch.fence_proxy("async.shared", space="cta")
        state.arrive_full()

    @cute.jit
    def share_factors(self, softmax: QuerySoftmax, place: cute.Tensor):
        for r in cutlass.range_constexpr(ROWS):
            if softmax.thread % 4 == 0:
                place[row_of(softmax.thread, r)] = softmax.factor[r]

    # ---- O

    @cute.jit
    def add(self, bar: Barriers, smem: Shared, n: Extents):
        """One of two warpgroups: for every group of this CTA half of the columns of O."""
        c = self.config
        w = self.adder(bar, smem)
        before = Int32(0)  # tiles of keys
        for wave in cutlass.range(self.groups(n).waves, unroll=1):
            state = bar.info.at(wave)
            state.wait_full()
            seen = Seen.read(smem.info[None, state.index], n)
            for p in cutlass.range(seen.passes, unroll=1):
                tiles = seen.tiles(p)
                for t in cutlass.range(tiles, unroll=1):
                    is_last = (p == seen.passes - 1) & (t == tiles - 1)
                    offsets = [seen.offset(query) for query in range(c.group)]
                    fresh = [(t == 0) & seen.is_fresh(query, p) for query in range(c.group)]
                    self.add_tile(w, before + t, offsets, fresh, seen.tied, is_last)
                before = before + tiles
            self.arrive_as_warp(state.empty)
            last = bar.last.at(wave)
            last.wait_full()
            for query in cutlass.range_constexpr(c.group):
                self.scale(w, query, self.factors_of(w, smem.last, query))
            self.arrive_as_warp(last.empty)
            self.hand_over(w, wave, before - 1)

    def adder(self, bar: Barriers, smem: Shared) -> Adder:
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        side = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 2
        pv = tuple(tiled_mma(self.dtype, columns, K_MAJOR, a_major=MN_MAJOR) for columns in (c.tile_m, c.rows))
        out = tuple(accumulator(pv[1], c.rows) for _ in range(c.d // SLAB // ADDERS))
        return Adder(bar, smem, side, thread, pv, out)

    @cute.jit
    def factors_of(self, w: Adder, place: cute.Tensor, query: cutlass.Constexpr) -> cute.Tensor:
        """Those of a thread's columns of a query."""
        factors = cute.make_rmem_tensor(self.config.tile_m // 4, Float32)
        for j in cutlass.range_constexpr(cute.size(factors) // 2):
            pair = (place.iterator + (query * self.config.tile_m + 8 * j + w.thread % 4 * 2)).align(8)
            of_pair = cute.make_tensor(factors.iterator + 2 * j, cute.make_layout(2))
            cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), of_pair)
        return factors

    @cute.jit
    def scale(self, w: Adder, query: cutlass.Constexpr, factors: cute.Tensor):
        for slab in cutlass.range_constexpr(len(w.out)):
            scale_columns(w.columns(slab, query, self.config.group), factors)

    @cute.jit
    def add_tile(
        self,
        w: Adder,
        k: Int32,
        offsets: list,
        fresh: list,
        tied: cutlass.Boolean,
        is_last: cutlass.Boolean,
    ):
        """This CTA's k-th tile of keys, from each query's first one on."""
        c, p = self.config, w.bar.p.at(k)
        p.wait_full()
        for query in cutlass.range_constexpr(c.group):
            self.rescale(w, query, self.factors_of(w, w.smem.factors[None, p.index], query), fresh[query])
        for i in cutlass.range_constexpr(c.pieces_of_adder):
            self.piece(w, k, i).wait_full()
        weights = w.smem.p[None, None, p.index]
        if tied:
            self.multiply_values(w, k, weights, offsets[:1], fresh[:1], is_last)
        else:
            self.multiply_values(w, k, weights, offsets, fresh, is_last)
        self.arrive_as_warp(p.empty)

    def piece(self, w: Adder, k: Int32, i: int):
        c = self.config
        return w.bar.k.at(k * c.pieces + w.side * c.pieces_of_adder + i)

    @cute.jit
    def rescale(self, w: Adder, query: cutlass.Constexpr, factors: cute.Tensor, fresh: cutlass.Boolean):
        """O' in units of the new maxima. Where no column of the warp rose, the factors are exactly 1."""
        rises = factors[0] != 1.0
        for i in cutlass.range_constexpr(1, cute.size(factors)):
            rises = rises | (factors[i] != 1.0)
        if not_(fresh) & cute.arch.vote_any_sync(rises):
            self.scale(w, query, factors)

    def values(self, w: Adder, stage: Int32, row: Int32, slab: int) -> cute.Tensor:
        """(64 keys, 64 columns) from this row of a piece on. Rows are 128 bytes apart, so a product may begin with any:
        the swizzle goes by the address.
        """
        c = self.config
        first = w.smem.k.iterator + (stage * (c.tile_n * c.piece) + slab * (c.tile_n * SLAB) + row * SLAB)
        layout = cute.make_layout(((8, c.keys // 8), (SLAB, 1)), stride=((SLAB, 8 * SLAB), (1, c.tile_n * SLAB)))
        return cute.make_tensor(first, layout)

    @cute.jit
    def multiply_values(
        self, w: Adder, k: Int32, weights: cute.Tensor, offsets: list, fresh: list, is_last: cutlass.Boolean
    ):
        """O' += V' P', for each of so many equal parts of the rows, piece by piece of d. It hands a piece back while
        the next one is read, but for a group's last ones, whose place O takes.
        """
        c, parts = self.config, len(offsets)
        slabs, columns = c.piece // SLAB, c.rows // len(offsets)
        pv = cute.make_tiled_mma(cute.make_mma_atom(w.pv[0 if parts > 1 else 1].op))
        shape = accumulator(pv, columns).layout
        warpgroup.fence()
        for i in cutlass.range_constexpr(c.pieces_of_adder):
            state = self.piece(w, k, i)
            for part in cutlass.range_constexpr(parts):
                # of eight queries ptxas would have all descriptors at once, and serialise the products
                row = keep(offsets[part]) if parts > 4 else offsets[part]
                b = operand_b(pv, cute.local_tile(weights, (columns, SLAB), (part, 0)))
                for j in cutlass.range_constexpr(slabs):
                    acc = w.out[i * slabs + j]
                    out = cute.make_tensor(acc.iterator + part * (cute.size(acc) // parts), shape)
                    a = operand_a(pv, transposed(self.values(w, state.index, row, j)))
                    for block in cutlass.range_constexpr(c.keys // 16):
                        pv.set(warpgroup.Field.ACCUMULATE, True if block else not_(fresh[part]))
                        cute.gemm(pv, out, a[None, None, block], b[None, None, block], out)
            warpgroup.commit_group()
            if cutlass.const_expr(i > 0):
                warpgroup.wait_group(1)
                self.hand_back(w, k, i - 1, is_last)
        warpgroup.wait_group(0)
        self.hand_back(w, k, c.pieces_of_adder - 1, is_last)

    @cute.jit
    def hand_back(self, w: Adder, k: Int32, i: cutlass.Constexpr, is_last: cutlass.Boolean):
        if not_(is_last):
            self.arrive_as_warp(self.piece(w, k, i).empty)

    @cute.jit
    def hand_over(self, w: Adder, wave: Int32, k: Int32):
        """O, rounded, to where its last keys, the k-th tile, lay; for the warp that stores it."""
        c = self.config
        for side in cutlass.range_constexpr(ADDERS):
            if w.side == side:
                o = w.bar.o[side].at(wave)
                o.wait_empty()
                for slab, acc in enumerate(w.out):
                    stage = self.piece(w, k, slab * SLAB // c.piece).index
                    half = self.half_of_o(w.smem, stage, slab % (c.piece // SLAB))
                    store_columns(w.pv[1], acc, half, w.thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                self.arrive_as_warp(o.full)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    return MlaFewHeadsSpansSm90(Config(variant.d, variant.dtype, variant.sources, variant.max_heads)).compile(
        variant, out_dir
    )
