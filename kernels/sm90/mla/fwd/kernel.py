"""Attention for Hopper over a latent that is both K and V, head dimension 512, or 576 of which V is the first 512.

O of 64 rows is 64 x 512 in fp32, half the register file, so two warpgroups own 256 columns each and every key tile is
read by both. Key tiles of 64 go two by two: "left" computes the scores of the even one, "right" of the odd one, and
each multiplies P of both with its own half of the columns, its own P from registers, the other's from SMEM. Left and
right pass the maximum of a row to and fro, and keep all sums under the newest one. Where a tile of rows has heads of
several queries, which together see a window and a few keys more, odd tiles are longer.

    left    S0 = Q K0'  max0 > P0  O_l += P0 K0_l      > P0 *= f -> SMEM   O_l += P1 K1_l   S0 of the next pair
                             \\                        /              \\     /
    right   S1 = Q K1'        > max1 > P1  O_r += P1 K1_r   P1 -> SMEM   > O_r += P0 K0_r   S1 of the next pair

So one's softmax runs under the other's products: FlashMLA's seesaw schedule. With its last P a side hands over
the sums of its rows. A tile is refilled by halves of its columns, each as soon as it is read for the last time. Warps
are specialised and CTAs persistent: one takes every gridDim-th tile of rows, and the producer runs ahead into the next
one. Q's SMEM is free after the last scores, because O goes through P's SMEM, slab by slab, and TMA stores it
during the work on the next tile. Where q comes without its norm and RoPE, both sides do that under left's first
products, and right turns o back.

The keys come from one or more sources, taken one after the other as one sequence of tiles under one softmax: spans
(contiguous: a window, a dense cache) and selections (by index), which may be packed. Spans alone are loaded by TMA;
with a selection among them all are gathered with cp.async. Packed keys are unpacked by two producer warpgroups, or by
those of a cluster of two CTAs, each of which does half of the keys for both.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import ANY, Forward
from kernels.aot import Compiled
from kernels.lib.cluster import CLUSTER, arrive, await_others
from kernels.lib.cut_keys import cut_keys
from kernels.lib.forward import ForwardKernel, Source
from kernels.lib.launch import WARP, WARPGROUP, Shapes
from kernels.lib.output import store_output, store_part
from kernels.lib.packed import packed_operands
from kernels.lib.pipeline import wait_for
from kernels.lib.rows import BoxedRows, Extents, RowTile
from kernels.lib.selections import GATHERED, SelectedRows, open_selection, read_selection
from kernels.lib.softmax import ROWS, RowResults, rescale_rows, scale_rows
from kernels.lib.spans import SpanOperands, open_span, prefetch_span, read_span
from kernels.lib.splits import on_source, own_part
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.turned import Turn, prepare_rows, turn_back
from kernels.lib.wgmma import (
    K_MAJOR,
    SLAB,
    multiply,
    round_to,
    store_rows,
    tiled_mma,
    tma_atom,
    tma_tiles,
)
from kernels.packings import PACKED

from .config import Config
from .consumer import BOTH_MET, WARPGROUP_MET, Consumer, Rows, hand_over, take_over
from .key_tiles import KeyTiles, Work
from .packed_tiles import load_packed
from .paired_tiles import load_paired
from .smem import EVEN, LEFT, ODD, RIGHT, Barriers, Shared

EXTRA_KEYS = 16  # keys: a step of K in a WGMMA


class MlaFwdSm90(ForwardKernel):
    symbol = "mla_fwd_sm90"

    @property
    def kinds(self) -> dict[str, type]:
        """Operands of selections, by the kind of a source."""
        c = self.config
        return {**GATHERED, **{kind: packed_operands(kind, c.lanes_a_key, c.is_short) for kind in PACKED}}

    @property
    def moves_o(self) -> bool:
        return self.config.moves_o

    def allocate(self) -> tuple[Barriers, Shared]:
        return Shared.allocate(self.config, self.dtype)

    def scaling(self, scale_log2: Float32, table: cute.Pointer, eps: Float32) -> Float32 | Turn:
        return Turn(scale_log2, table, eps) if self.config.turns else scale_log2

    def source(self, kind: str, shapes: Shapes, x: Source) -> tuple:
        c = self.config
        if c.gathers:
            return super().source(kind, shapes, x)
        tma = tma_atom(cpasync.CopyBulkTensorTileG2SOp(), cut_keys(shapes, x, c.tile_n), c.tile_n, c.columns_k)
        here = (x.k,) if c.sources == ("span",) else ()  # some may be loaded without TMA
        return (*tma, *here, SpanOperands(x.first, x.second, x.s_kv))

    @cute.kernel
    def kernel(
        self,
        rows_of_q: tuple,
        output: Any,
        sources: tuple,
        results: RowResults,
        scaling: Float32 | Turn,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise(c.fillers, WARP if c.extra_keys else 0)
            cute.arch.mbarrier_init_fence()
        arrive(c.cluster)
        cute.arch.griddepcontrol_launch_dependents()  # `combine`, where it follows, waits for this grid itself

        if warp < 4 * c.producers:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp * 32 < c.loaders:
                self.produce(bar, smem, rows_of_q, sources, n)
                # A grid that began early ends after the grid before it, so that what follows waits for this one alone.
                cute.arch.griddepcontrol_wait()
            elif cutlass.const_expr(c.extra_keys > 0):  # noqa: SIM102, at compile time
                if warp == 1:
                    self.produce_extra_keys(bar, smem, sources[0], n)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            await_others(c.cluster)
            operands = tuple(source[-1] for source in sources)
            if warp < 4 * c.producers + 4:
                self.consume(LEFT, bar, smem, operands, output, results, scaling, n)
            else:
                self.consume(RIGHT, bar, smem, operands, output, results, scaling, n)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, row_source: tuple, sources: tuple, n: Extents):
        """For every row tile of this CTA: loads Q, opens the sources, and loads the keys."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tma_q, mQ = row_source
        keys = KeyTiles(c)
        scheduler, fills = self.tile_scheduler(n, sources[0][-1]), (Int32(0), Int32(0))
        before = (Int32(-1),) * 4
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = own_part(tuple(self.open(source[-1], tile) for source in sources), tile, c.unit)
            if warp == 0:
                q = bar.q.at(wave)
                q.wait_empty()
                with cute.arch.elect_one():
                    for which, x in enumerate((tile, *opened)):
                        x.publish(smem.info[None, which, wave & 1])
                    q.expect_full(n.box_inner * n.box_outer * c.row_bytes)
                gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
                cute.copy(tma_q, gQ, sQ, tma_bar_ptr=q.full)
            again = cutlass.Boolean(False)
            if cutlass.const_expr(c.run > 1):
                now = (tile.batch, tile.kv_head, opened[0].lo, opened[0].hi)
                again = opened[0].tiles <= 2
                for x, y in zip(now, before, strict=True):
                    again = again & (x == y)
                before = now
            work = Work(opened, (), fills, again=again)
            if cutlass.const_expr(c.cluster > 1):
                if wave == 0:
                    await_others(c.cluster)
                load_paired(c, bar, smem.k, work)
            elif cutlass.const_expr(c.unpacks):
                load_packed(c, bar, smem.k, work)
            elif cutlass.const_expr(c.gathers):
                keys.gather(bar, smem.k, work)
            else:
                keys.load(bar, smem.k, work, sources, tile)
            fills = work.fills_after()
        if cutlass.const_expr(c.cluster > 1):  # no CTA ends while its peer may still access it
            bar.await_readers(fills)

    @cute.jit
    def produce_extra_keys(self, bar: Barriers, smem: Shared, source: tuple, n: Extents):
        """A separate warp loads the last keys of odd tiles."""
        c = self.config
        scheduler, fills = self.tile_scheduler(n, source[-1]), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            (span,) = own_part((self.open(source[-1], tile),), tile, c.unit)
            place = tile.key(source[2], span.operands.s_kv, span.lo, c.d)
            KeyTiles(c).load_extra_keys(bar, smem.k[ODD], span, fills, place)
            fills = fills + span.tiles // 2

    def tile_scheduler(self, n: Extents, operands: Any) -> TileScheduler:
        """Schedules tiles: where keys are gathered, heads of a query follow one another and share keys in L2."""
        c = self.config
        return TileScheduler.of(n, Int32(1), 1, cluster=c.cluster) if c.gathers else TileScheduler.of(n, run=c.run)

    def open(self, operands: Any, tile: RowTile) -> Any:
        c = self.config
        if isinstance(operands, SpanOperands):
            bounds = prefetch_span(operands, tile, c.tile_m)
            return open_span(operands, tile, c.tile_n, bounds, c.extra_keys)
        return open_selection(operands, tile, c.tile_n, c.d)

    # ---- consumers

    @cute.jit
    def consume(
        self,
        side: cutlass.Constexpr,
        bar: Barriers,
        smem: Shared,
        operands: tuple,
        output: Any,
        results: RowResults,
        scaling: Float32 | Turn,
        n: Extents,
    ):
        """One warpgroup: its half of O's columns, of every row tile of this CTA."""
        c = self.config
        w = self.consumer(side, bar, smem, output, scaling)
        fills = (Int32(0), Int32(0))
        boxed = BoxedRows.of(n, 0, w.thread, c.gathers)
        for wave in cutlass.range(self.tile_scheduler(n, operands[0]).waves, unroll=1):
            bar.q.at(wave).wait_full()
            tile = RowTile.read(smem.info[None, 0, wave & 1], n)
            sources = tuple(
                self.reopen(x, tile, smem.info[None, 1 + which, wave & 1]) for which, x in enumerate(operands)
            )
            work, rows = Work(sources, (None,) * len(sources), fills), Rows(tile, boxed, results)
            self.attend(side, w, work, rows)
            cute.arch.mbarrier_arrive(bar.all_read)
            if n.splits > 1:
                wait_for(bar.all_read, wave)
            if n.splits == 1:
                if cutlass.const_expr(c.moves_o):
                    self.store_directly(side, w, output, rows)
                else:
                    self.store(side, w, wave, tile.of(output[1], c.tile_m, SLAB), rows)
            else:
                self.store_part(side, w, rows)
            fills = work.fills_after()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def consumer(self, side: int, bar: Barriers, smem: Shared, output: Any, scaling: Float32 | Turn) -> Consumer:
        return Consumer.of(self.config, self.dtype, side, bar, smem, output, scaling)

    def reopen(self, operands: Any, tile: RowTile, slot: cute.Tensor) -> Any:
        c = self.config
        if isinstance(operands, SpanOperands):
            return read_span(operands, tile, c.tile_n, slot, c.extra_keys)
        return read_selection(operands, tile, c.tile_n, c.d, slot)

    @cute.jit
    def attend(self, side: cutlass.Constexpr, w: Consumer, work: Work, rows: Rows):
        """Takes all key tiles of one row tile; returns the normalising factors of its output, and stores lse."""
        if work.evens == 0:
            self.prepare(side, w, work, rows)
            cute.arch.mbarrier_arrive(w.bar.q_empty)
            w.out.fill(0.0)
            w.softmax.finish(*rows[:2], w.thread, rows.results, writes_lse=side == LEFT)
        elif cutlass.const_expr(side == LEFT):
            self.attend_left(w, work, rows)
        else:
            self.attend_right(w, work, rows)

    def prepare(self, side: int, w: Consumer, work: Work, rows: Rows) -> Work:
        """Prepares what is not needed before the first scores."""
        w.softmax.start(*rows)
        if self.config.gathers:
            seen = (SelectedRows.of(work.sources),)
            seen[0].prefetch(side)
        else:
            seen = tuple(source.of_rows(rows.boxed) for source in work.sources)
        if w.stores is not None:
            w.stores.await_reads()
        return replace(work, rows=seen)

    @cute.jit
    def turn(self, side: cutlass.Constexpr, w: Consumer, rows: Rows):
        """The scale of each row; and Q turned, for which left waits under products of the columns that are not."""
        c, s = self.config, w.softmax
        slabs = range(side * c.half // SLAB, (side + 1) * c.half // SLAB)
        prepare_rows(w.smem.q, slabs, s.row_sum, w.turn, *rows[:2], w.thread, turns=side == RIGHT)
        hand_over(w.smem.squares, side, s.row_sum, w.thread)
        if cutlass.const_expr(side == RIGHT):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BOTH_MET, number_of_threads=2 * WARPGROUP)
        take_over(w.smem.squares, 1 - side, s.factor, w.thread)
        for r in cutlass.range_constexpr(ROWS):
            s.scale_log2[r] = w.turn.scale(s.row_sum[r] + s.factor[r], c.d)

    @cute.jit
    def attend_left(self, w: Consumer, work: Work, rows: Rows):
        evens, odds = work.evens, work.odds
        self.issue_scores(LEFT, w, work, 0, LEFT, fresh=True)
        if cutlass.const_expr(self.config.turns):
            self.turn(LEFT, w, rows)
        self.issue_scores(LEFT, w, work, 0, RIGHT, fresh=False)
        work = self.prepare(LEFT, w, work, rows)
        self.await_scores(LEFT, w, evens == 1)
        if odds > 0:
            self.left_pair(w, work, 0, first=True)
            for pair in cutlass.range(1, odds, unroll=1):
                self.next_scores(w, work, pair)
                self.left_pair(w, work, pair)
            if odds < evens:
                self.next_scores(w, work, odds)
            else:
                self.finish(LEFT, w, rows)
                warpgroup.wait_group(0)
                w.bar.release(ODD, LEFT)
        if odds < evens:
            self.left_pair(w, work, odds, has_odd=False)
            self.finish(LEFT, w, rows)
            warpgroup.wait_group(0)
            w.bar.release(EVEN, LEFT)

    @cute.jit
    def attend_right(self, w: Consumer, work: Work, rows: Rows):
        evens, odds = work.evens, work.odds
        if cutlass.const_expr(self.config.turns):
            self.turn(RIGHT, w, rows)
        if odds == 0:
            self.prepare(RIGHT, w, work, rows)
            cute.arch.mbarrier_arrive(w.bar.q_empty)
        else:
            self.issue_scores(RIGHT, w, work, 0, RIGHT, fresh=True)
            self.issue_scores(RIGHT, w, work, 0, LEFT, fresh=False)
            seen = self.prepare(RIGHT, w, work, rows)
            self.await_scores(RIGHT, w, odds == 1)
            self.right_pair(w, seen, 0, rows, first=True)
            for pair in cutlass.range(1, odds, unroll=1):
                self.issue_scores(RIGHT, w, seen, pair, RIGHT, fresh=True)
                self.issue_scores(RIGHT, w, seen, pair, LEFT, fresh=False)
                self.await_scores(RIGHT, w, pair == odds - 1)
                self.right_pair(w, seen, pair, rows)
        if odds < evens:
            self.right_without_odd(w, work)
            self.finish(RIGHT, w, rows)
            warpgroup.wait_group(0)
            w.bar.release(EVEN, RIGHT)

    def finish(self, side: int, w: Consumer, rows: Rows) -> None:
        """The normalising factors of the output; stores lse."""
        s = w.softmax
        take_over(w.smem.max, side, s.factor, w.thread)
        s.row_sum.store(s.row_sum.load() + s.factor.load())
        s.finish(*rows[:2], w.thread, rows.results, writes_lse=side == LEFT)

    @cute.jit
    def store(self, side: cutlass.Constexpr, w: Consumer, wave: Int32, target: cute.Tensor, rows: Rows):
        """Stores this side's half of O, normalised, slab by slab; turned back in registers that are free now, since
        ptxas gives up on products whose accumulator others change.
        """
        c, mma = self.config, tiled_mma(self.dtype, SLAB, K_MAJOR)
        slabs, slab = c.half // SLAB, cute.make_tensor(w.scores.iterator, mma.partition_shape_C((c.tile_m, SLAB)))
        for i in cutlass.range_constexpr(slabs):
            if cutlass.const_expr(i == c.slabs_of_o):
                wait_for(w.bar.all_read, wave)  # the other side no longer reads this one's P
            for x in cutlass.range_constexpr(cute.size(slab)):
                slab[x] = w.out[i * cute.size(slab) + x] * w.softmax.factor[x // 2 % ROWS]
            if cutlass.const_expr(c.turns and side == RIGHT and i == slabs - 1):
                turn_back(slab, w.turn, *rows[:2], w.thread)
            w.stores.store(i, mma, slab, w.p, target[None, None, side * slabs + i])

    def store_directly(self, side: int, w: Consumer, o: cute.Pointer, rows: Rows) -> None:
        """Stores this side's half of O, normalised, out of registers; a slab at a time takes fewer of them."""
        c, mma = self.config, tiled_mma(self.dtype, SLAB, K_MAJOR)
        for i in range(c.half // SLAB):
            first = w.out.iterator + i * cute.size(w.out) // (c.half // SLAB)
            slab = cute.make_tensor(first, mma.partition_shape_C((c.tile_m, SLAB)))
            store_output(slab, w.softmax.factor, o, *rows[:2], side * c.half + i * SLAB, w.thread, c.d_v)

    @cute.jit
    def store_part(self, side: cutlass.Constexpr, w: Consumer, rows: Rows):
        """Stores this side's half of a partial result, which is turned back as O is."""
        c, whole, column0 = self.config, w.out, side * self.config.half
        place = (rows.results.o_parts, *rows[:2])
        if cutlass.const_expr(c.turns and side == RIGHT):
            last, before = (
                cute.make_tensor(x.iterator, tiled_mma(self.dtype, n, K_MAJOR).partition_shape_C((c.tile_m, n)))
                for x, n in ((w.scores, SLAB), (w.out, c.half - SLAB))
            )
            for x in cutlass.range_constexpr(cute.size(last)):
                last[x] = w.out[cute.size(before) + x]
            turn_back(last, w.turn, *rows[:2], w.thread)
            store_part(last, w.softmax, *place, c.d - SLAB, w.thread, c.d)
            whole = before
        store_part(whole, w.softmax, *place, column0, w.thread, c.d_v)

    @cute.jit
    def issue_scores(
        self,
        side: cutlass.Constexpr,
        w: Consumer,
        work: Work,
        pair: Int32,
        half: cutlass.Constexpr,
        fresh: cutlass.Constexpr,
    ):
        """Issues Q K' of this side's tile over one half of d."""
        c = self.config
        w.bar.k(side, half).at(work.fill(side, pair)).wait_full()
        if cutlass.const_expr(c.gathers or (c.extra_keys > 0 and side == RIGHT)):
            cute.arch.fence_proxy("async.shared", space="cta")  # the producer wrote through the generic proxy
        multiply(w.qk, w.scores, w.a, w.b_own, fresh, c.blocks(side, half))

    @cute.jit
    def await_scores(self, side: cutlass.Constexpr, w: Consumer, last: cutlass.Boolean):
        warpgroup.wait_group(0)
        self.release_scored(side, w)
        if last:
            cute.arch.mbarrier_arrive(w.bar.q_empty)

    def release_scored(self, side: int, w: Consumer) -> None:
        """This side's scores are complete; its keys are still to be read as values."""

    def values(self, w: Consumer, which: int, fill: Int32) -> cute.Tensor:
        """This side's columns of a tile's values, which are there since its scores are."""
        return w.b_value[which]

    @cute.jit
    def next_scores(self, w: Consumer, work: Work, pair: Int32):
        """Issues the scores of the next even tile, the first half of them under the products of the previous pair."""
        self.issue_scores(LEFT, w, work, pair, LEFT, fresh=True)
        warpgroup.wait_group(1)
        w.bar.release(ODD, LEFT)
        self.issue_scores(LEFT, w, work, pair, RIGHT, fresh=False)
        self.await_scores(LEFT, w, pair == work.evens - 1)

    def mask(self, w: Consumer, work: Work, t: Int32 | int) -> None:
        on_source(work.rows, t, mask, w.scores)
        if self.config.gathers:
            work.rows[0].prefetch(t + 2)  # long before the next fence, which waits for loads as well

    @cute.jit
    def left_pair(
        self,
        w: Consumer,
        work: Work,
        pair: Int32 | int,
        first: cutlass.Constexpr = False,
        has_odd: cutlass.Constexpr = True,
    ):
        """Takes left from scores of the even tile to products of both tiles, the last of them still in flight."""
        s = w.softmax
        self.mask(w, work, 2 * pair)
        s.remember_max()
        s.raise_max(w.scores)
        hand_over(w.smem.max, LEFT, s.row_max, w.thread)
        cute.arch.mbarrier_arrive(w.bar.max_shared + LEFT)
        s.decay()
        s.exponentiate(w.scores)
        round_to(w.p, w.scores)
        if cutlass.const_expr(not has_odd):
            self.share_p(w, LEFT, True, met=False)
        fresh = first if has_odd else pair == 0
        rescale_rows(w.out, s.factor, fresh)
        multiply(w.pv, w.products, w.p, self.values(w, EVEN, work.fill(EVEN, pair)), fresh)
        if cutlass.const_expr(has_odd):
            warpgroup.wait_group(0)
            w.bar.release(EVEN, LEFT)
            self.adopt_max(w, RIGHT, work.fill(ODD, pair))
            scale_rows(w.scores, s.factor)
            round_to(w.p, w.scores)
            self.share_p(w, LEFT, pair == work.evens - 1, met=True)
            rescale_rows(w.out, s.factor)
        wait_for(w.bar.p_shared + RIGHT, work.fill(EVEN, pair))
        if cutlass.const_expr(has_odd):
            multiply(w.pv_other, w.products, w.a_other, self.values(w, ODD, work.fill(ODD, pair)))

    @cute.jit
    def right_pair(self, w: Consumer, work: Work, pair: Int32 | int, rows: Rows, first: cutlass.Constexpr = False):
        """`left_pair` for the odd tile, until the products are complete."""
        s = w.softmax
        self.mask(w, work, 2 * pair + 1)
        s.remember_max()
        wait_for(w.bar.max_shared + LEFT, work.fill(EVEN, pair))
        take_over(w.smem.max, LEFT, s.row_max, w.thread)
        s.raise_max(w.scores)
        hand_over(w.smem.max, RIGHT, s.row_max, w.thread)
        cute.arch.mbarrier_arrive(w.bar.max_shared + RIGHT)
        s.decay()
        s.exponentiate(w.scores)
        round_to(w.p, w.scores)
        rescale_rows(w.out, s.factor, first)
        multiply(w.pv, w.products, w.p, self.values(w, ODD, work.fill(ODD, pair)), first)
        self.share_p(w, RIGHT, pair == work.evens - 1, met=False)
        if cutlass.const_expr(self.config.unpacks):  # whose producer has keys in registers, and waits for a place
            warpgroup.wait_group(0)
            w.bar.release(ODD, RIGHT)
        wait_for(w.bar.p_shared + LEFT, work.fill(EVEN, pair))
        multiply(w.pv_other, w.products, w.a_other, self.values(w, EVEN, work.fill(EVEN, pair)))
        if pair == work.evens - 1:
            self.finish(RIGHT, w, rows)
        if cutlass.const_expr(not self.config.unpacks):
            warpgroup.wait_group(1)
            w.bar.release(ODD, RIGHT)
        warpgroup.wait_group(0)
        w.bar.release(EVEN, RIGHT)

    @cute.jit
    def right_without_odd(self, w: Consumer, work: Work):
        """The last pair has only an even tile: its product stays in flight. Left gets this side's sum."""
        fill = work.fill(EVEN, work.odds)
        self.adopt_max(w, LEFT, fill)
        self.share_sum(w, RIGHT)
        cute.arch.mbarrier_arrive(w.bar.p_shared + RIGHT)
        rescale_rows(w.out, w.softmax.factor)
        wait_for(w.bar.p_shared + LEFT, fill)
        multiply(w.pv_other, w.products, w.a_other, self.values(w, EVEN, fill), fresh=work.odds == 0)

    @cute.jit
    def adopt_max(self, w: Consumer, other: cutlass.Constexpr, fill: Int32):
        """The other side's maximum, which is at least as large, becomes this side's."""
        w.softmax.remember_max()
        wait_for(w.bar.max_shared + other, fill)
        take_over(w.smem.max, other, w.softmax.row_max, w.thread)
        w.softmax.decay()

    @cute.jit
    def share_p(self, w: Consumer, side: cutlass.Constexpr, last: bool | cutlass.Boolean, met: cutlass.Constexpr[bool]):
        """P to SMEM. met: all of this side have handed over a maximum that it has waited for since, and so the scores
        are complete whose keys stood where P goes, if RoPE's numbers are apart."""
        if cutlass.const_expr(self.config.rope > 0 and not met):
            cute.arch.barrier(barrier_id=WARPGROUP_MET + side, number_of_threads=WARPGROUP)
        store_rows(w.qk, w.scores, w.p, w.smem.p[side], w.thread)
        if last:
            self.share_sum(w, side)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(w.bar.p_shared + side)

    def share_sum(self, w: Consumer, side: int) -> None:
        """Writes the sum for the other side, where that put its maximum for this one."""
        w.softmax.sum_columns()
        cute.arch.sync_warp()  # a lane of a quad writes what all four have read
        hand_over(w.smem.max, 1 - side, w.softmax.row_sum, w.thread)


def mask(rows: Any, t: Int32, scores: cute.Tensor) -> None:
    rows.mask(scores, t)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    few = variant.max_heads < ANY
    packed = variant.sources[0] in PACKED
    choice = {"cluster": 1 if few else CLUSTER} if packed else {"extra_keys": EXTRA_KEYS if few else 0}
    choice |= {"turns": variant.turns, "rope": variant.d - variant.d_v}
    config = Config(variant.d, variant.dtype, variant.sources, **choice)
    return MlaFwdSm90(config).compile(variant, out_dir, cluster=config.cluster, unit=config.unit)
