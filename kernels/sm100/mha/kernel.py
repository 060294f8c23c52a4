"""Attention for Blackwell with separate K and V, of head dimensions up to 256.

    warp 13      Q  K0 V0  K1 V1  K2 V2 ...                                      into a ring: TMA
    warp 12      S0 S1 | S0 | O0 += P0 V0 | S1 | O1 += P1 V1 | S0 | ...          tcgen05.mma, all in TMEM
    warps 0-3          | P0             | P0              | ...                  softmax of one tile of rows
    warps 4-7               | P1             | P1              | ...             and of the other
    warps 8-11           O0, O1 times factors, where a maximum has risen ...     and in the end to memory

A CTA has two tiles of 128 rows, which see the same keys: the softmax of one runs beside the products of the other. At
d 256 it has one, and CTAs work in pairs: each loads half of every tile of keys, and half of the columns of values, and
products of both CTAs (`cta_group::2`) read either half. Two P take turns there.

TMEM has 128 lanes x 512 columns of 32 bits, and a lane is a row, which a thread has of S and P, and another of O. The
scores of the next tile of keys are issued before P V of this one, and take the place of scores that have been read: at
d 128 both tiles of rows have one buffer for them by turns.

        columns   O          S          P
        d 64      2 x 64     2 x 128    2 x 64
        d 128     2 x 128    128        2 x 64
        d 256     256        128        2 x 64

P is measured from a maximum that is not the greatest so far, but at most a factor of 2^8 from it, so that O is rescaled
seldom. The softmax tells the correcting warps with what factor, and in the end with what to normalise O. P is given to
the products in two parts, of which the first lets them begin. Some exponentials are polynomials.

Warps are specialised, and CTAs persistent: one takes every gridDim-th tile of rows, and TMA runs ahead into the next.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib import blackwell
from kernels.lib.blackwell import BlackwellKernel
from kernels.lib.forward import ForwardKernel, Source
from kernels.lib.launch import WARPGROUP, Shapes
from kernels.lib.pipeline import PipelineState, wait_for
from kernels.lib.row_softmax import RowSpan, seen_by_row, shift_of
from kernels.lib.rows import BoxedRows, Extents, RowTile, ceil_div, load, store
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, exp2
from kernels.lib.spans import Span, SpanOperands, open_span, prefetch_span, read_span
from kernels.lib.tcgen05 import (
    K_STEP,
    LANES,
    ROW_BYTES,
    Slabs,
    after_thread_sync,
    begin_load,
    instruction,
    load_lanes,
    multiply,
    scale_lanes,
    store_lanes,
)
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import SLAB, round_pair, tma_atom, tma_tiles, zero_rows

from .config import P_BUFFERS, RESCALED_ABOVE, WARPS, Config
from .exponentials import exponentiate, raise_max
from .smem import allocate

TOGETHER = 64  # scores that a thread loads at a time
CHUNK = 32  # columns of O that a thread holds at a time


@dataclass(frozen=True)
class Cta(blackwell.Cta):
    """State that all warps share."""

    both: cutlass.Boolean  # whether a CTA has rows for a second tile of them


class MhaFwdSm100(BlackwellKernel, ForwardKernel):
    symbol = "mha_fwd_sm100"

    @cute.kernel
    def kernel(
        self,
        rows_of_q: tuple,
        output: cute.Pointer,
        sources: tuple,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = self.start(warp, *allocate(c, self.dtype), n)
        cta = Cta(cta.bar, cta.smem, cta.tmem, n, cta.rank, n.box_inner * n.box_outer > LANES)

        ((*tma, operands),) = sources
        correction, others = WARPS * c.row_tiles, WARPS * (c.row_tiles + 1)
        if warp < correction:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.attend(cta, operands, results, scale_log2)
        elif warp < others:
            cute.arch.setmaxregister_decrease(c.registers[1])
            self.correct(cta, operands, output)
        else:
            cute.arch.setmaxregister_decrease(c.registers[2])
            if warp == others:
                with cute.arch.elect_one():
                    self.multiply(cta, operands)
            elif warp == others + 1:
                self.load(cta, rows_of_q, tuple(tma), operands)

        self.end(warp, cta)

    def rows(self, shapes: Shapes, q: cute.Pointer, o: cute.Pointer) -> tuple[Any, Any]:
        return tuple(tma_atom(self.tma, shapes.rows(q), self.config.tile_m, self.config.d)), o

    def source(self, kind: str, shapes: Shapes, x: Source) -> tuple:
        c = self.config
        arrays = (x.k, c.d), (x.v, c.columns_v)
        tma = (y for array, d in arrays for y in tma_atom(self.tma, shapes.keys(array, x.s_kv), c.tile_n, d))
        return (*tma, SpanOperands(x.first, x.second, x.s_kv))

    @property
    def tma(self) -> cpasync.CopyBulkTensorTileG2SOp:
        return cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO if self.config.cluster == 2 else CtaGroup.ONE)

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrives at a barrier when the products that this thread issued are done, in both CTAs of a pair."""
        if self.config.cluster == 2:
            tcgen05.commit(barrier, 0b11, CtaGroup.TWO)
        else:
            tcgen05.commit(barrier)

    @cute.jit
    def rows_of(self, cta: Cta, operands: SpanOperands, wave: Int32) -> tuple:
        """(a tile of rows, its span), as the loader found them."""
        info = cta.bar.info.at(wave)
        info.wait_full()
        tile = RowTile.read(cta.smem.info[None, 0, info.index], cta.n)
        span = read_span(operands, tile, self.config.keys, cta.smem.info[None, 1, info.index])
        self.arrive(info.empty)
        return tile, span

    @cute.jit
    def span_of(self, cta: Cta, operands: SpanOperands, wave: Int32) -> Span:
        """`rows_of`, for one thread alone."""
        info = cta.bar.info.at(wave)
        info.wait_full()
        span = Span(operands, None, self.config.keys, *(cta.smem.info[i, 1, info.index] for i in range(4)))
        info.arrive_empty()
        return span

    def buffer_of(self, i: Int32 | int, fill: Int32) -> tuple:
        """(the buffer of a row tile's P of a tile of keys, the parity of its phase)"""
        if self.config.row_tiles == P_BUFFERS:
            return i, fill & 1
        return fill % P_BUFFERS, fill // P_BUFFERS & 1

    def scores_column(self, i: Int32 | int) -> Int32 | int:
        c = self.config
        return c.scores_column + (i * c.keys if c.score_buffers > 1 else 0)

    def p_column(self, buffer: Int32 | int) -> Int32 | int:
        return self.config.p_column + buffer * (self.config.keys // 2)

    @cute.jit
    def wait_output(self, cta: Cta, i: Int32, fill: Int32):
        """Waits until P V of a row tile and a tile of keys is done."""
        buffer, phase = self.buffer_of(i, fill)
        cute.arch.mbarrier_wait(cta.bar.p_empty + buffer, phase)
        after_thread_sync()

    # ---- loading

    def scheduler(self, n: Extents) -> TileScheduler:
        """A pair takes two tiles of heads; or of queries, where there is one head."""
        if self.config.cluster == 2:
            n = n._replace(tiles_outer=ceil_div(n.tiles_outer, 1 + Int32(self.takes_queries(n))))
        return TileScheduler.of(n, cluster=self.config.cluster)

    def takes_queries(self, n: Extents) -> cutlass.Boolean:
        return (n.group == 1) & (n.h_kv > 1)

    def tiles(self, cta: Cta, tile: RowTile) -> tuple[RowTile, RowTile]:
        """(this CTA's tile of rows, that of all CTAs together), where the scheduler has given one."""
        if self.config.cluster == 1:
            return tile, tile
        n, along = cta.n, Int32(self.takes_queries(cta.n))
        tile = replace(
            tile,
            n=n,
            inner0=tile.inner0 * (1 - along),
            outer0=tile.outer0 * (1 + along) + cta.rank * along * n.box_outer,
        )
        both = n._replace(box_inner=n.box_inner * (2 - along), box_outer=n.box_outer * (1 + along))
        first = cta.rank * (1 - along) * n.box_inner, cta.rank * along * n.box_outer
        return tile, replace(tile, n=both, inner0=tile.inner0 - first[0], outer0=tile.outer0 - first[1])

    @cute.jit
    def load(self, cta: Cta, rows: tuple, arrays: tuple, operands: SpanOperands):
        """One warp: for every tile of rows of this CTA it loads Q, the spans, and the tiles of keys and values."""
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        tma_q, mQ = rows
        scheduler, fills0 = self.scheduler(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile, shared = self.tiles(cta, scheduler.tile(wave))
            span = open_span(operands, shared, c.keys, prefetch_span(operands, shared, c.cluster * c.tile_m))
            info = bar.info.at(wave)
            info.wait_empty()
            with cute.arch.elect_one():
                for i, thing in enumerate((tile, span)):
                    thing.publish(smem.info[None, i, info.index])
                info.arrive_full()
            q = bar.q.at(wave)
            q.wait_empty()
            self.expect(cta, q, n.box_inner * n.box_outer * c.d * 2)
            gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
            cute.copy(tma_q, gQ, sQ, tma_bar_ptr=q.full)
            self.load_keys(cta, arrays, span, tile, fills0)
            fills0 = fills0 + span.tiles
        # Nothing may arrive in the SMEM of a CTA that has ended.
        bar.q.at(scheduler.waves).wait_empty()
        for i in cutlass.range_constexpr(c.stages):
            bar.keys.at(2 * fills0 + i).wait_empty()

    @cute.jit
    def load_keys(self, cta: Cta, arrays: tuple, span: Span, tile: RowTile, fills0: Int32):
        """Loads this CTA's part of all tiles of keys and values of a tile of rows, by turns."""
        c, smem = self.config, cta.smem
        tma_k, mK, tma_v, mV = arrays
        first_key = span.lo + cta.rank * c.tile_n
        gK, sK = tma_tiles(tma_k, tile.keys(mK, first_key, c.tile_n, c.d)[None, None, None, 0], smem.keys)
        gV, sV = tma_tiles(
            tma_v, tile.keys(mV, span.lo, c.tile_n, c.columns_v)[None, None, None, cta.rank], smem.values
        )
        for t in cutlass.range(span.tiles, unroll=1):
            keys, values = (cta.bar.keys.at(2 * (fills0 + t) + i) for i in range(2))
            keys.wait_empty()
            self.expect(cta, keys, c.stage_bytes)
            cute.copy(tma_k, gK[None, c.cluster * t], sK[None, keys.index], tma_bar_ptr=keys.full)
            values.wait_empty()
            self.expect(cta, values, c.stage_bytes)
            for i in cutlass.range_constexpr(c.cluster):
                cute.copy(tma_v, gV[None, c.cluster * t + i], sV[None, i, values.index], tma_bar_ptr=values.full)

    @cute.jit
    def expect(self, cta: Cta, state: PipelineState, size: Int32 | int):
        """The leading CTA expects so many bytes of each."""
        if cta.rank == 0:
            with cute.arch.elect_one():
                state.expect_full(self.config.cluster * size)

    # ---- products

    @cute.jit
    def multiply(self, cta: Cta, operands: SpanOperands):
        """One thread issues the products of every tile of rows, for both CTAs of a pair."""
        fills0 = Int32(0)
        for wave in cutlass.range(self.scheduler(cta.n).waves, unroll=1):
            span = self.span_of(cta, operands, wave)
            if cta.rank == 0:
                self.multiply_rows(cta, span, wave, fills0)
            fills0 = fills0 + span.tiles

    @cute.jit
    def multiply_rows(self, cta: Cta, span: Span, wave: Int32, fills0: Int32):
        c, bar, tiles = self.config, cta.bar, span.tiles
        bar.q.at(wave).wait_full()
        if tiles > 0:
            bar.keys.at(2 * fills0).wait_full()
            for i in cutlass.range_constexpr(c.row_tiles):
                if i == 0 or cta.both:
                    self.issue_scores(cta, i, fills0)
            self.commit(bar.keys.at(2 * fills0).empty)
        if tiles <= 1:
            self.commit(bar.q.empty)
        for t in cutlass.range(tiles, unroll=1):
            fill = fills0 + t
            keys, values = bar.keys.at(2 * fill + 2), bar.keys.at(2 * fill + 1)
            for i in cutlass.range_constexpr(c.row_tiles):
                if i == 0 or cta.both:
                    if t + 1 < tiles:
                        if cutlass.const_expr(i == 0):
                            keys.wait_full()
                        self.issue_scores(cta, i, fill + 1)
                    if cutlass.const_expr(i == 0):
                        values.wait_full()
                        if span.needs_clearing(t):
                            self.commit(bar.v_full)
                    self.issue_output(cta, i, fill, t > 0)
            if t + 1 < tiles:
                self.commit(keys.empty)
            if t + 2 == tiles:
                self.commit(bar.q.empty)
            self.commit(values.empty)

    @cute.jit
    def issue_scores(self, cta: Cta, i: cutlass.Constexpr, fill: Int32):
        """S <- Q K' of a row tile and of a tile of keys, which is there."""
        c, bar = self.config, cta.bar
        q = Slabs.of(cta.smem.q.iterator.toint() + i * LANES * ROW_BYTES)
        k = Slabs.of(cta.smem.keys.iterator.toint() + bar.keys.at(2 * fill).index * c.stage_bytes)
        if cutlass.const_expr(c.score_buffers == c.row_tiles):
            self.await_scores_read(cta, i, fill - 1)
        elif cutlass.const_expr(i > 0):
            self.await_scores_read(cta, 0, fill)
        elif cta.both:
            self.await_scores_read(cta, 1, fill - 1)
        else:
            self.await_scores_read(cta, 0, fill - 1)
        for step in cutlass.range_constexpr(c.d // K_STEP):
            slab, column = divmod(step, SLAB // K_STEP)
            multiply(
                cta.tmem.toint() + self.scores_column(i),
                q.at(slab * c.tile_m * ROW_BYTES + column * 2 * K_STEP),
                k.at(slab * c.tile_n * ROW_BYTES + column * 2 * K_STEP),
                instruction(self.dtype, c.cluster * LANES, c.keys, False),
                step > 0,
                c.cluster,
                rows=LANES,
            )
        self.commit(bar.s_full + i)

    @cute.jit
    def await_scores_read(self, cta: Cta, i: cutlass.Constexpr, fill: Int32):
        if fill >= 0:
            wait_for(cta.bar.s_empty + i, fill)
            after_thread_sync()

    @cute.jit
    def issue_output(self, cta: Cta, i: cutlass.Constexpr, fill: Int32, adds: cutlass.Boolean):
        """O (+)= P V of a row tile and of a tile of values, part by part; the first tile does not add."""
        c, bar = self.config, cta.bar
        state = bar.keys.at(2 * fill + 1)
        buffer, phase = self.buffer_of(i, fill)
        v = Slabs.of(cta.smem.values.iterator.toint() + state.index * c.stage_bytes, c.tile_n * ROW_BYTES)
        for part in cutlass.range_constexpr(len(c.parts)):
            barrier = bar.p_full + buffer
            if cutlass.const_expr(part > 0):
                barrier = bar.p_more + (len(c.parts) - 1) * buffer + (part - 1)
            cute.arch.mbarrier_wait(barrier, phase)
            after_thread_sync()
            for step in cutlass.range_constexpr(sum(c.parts[:part]) // K_STEP, sum(c.parts[: part + 1]) // K_STEP):
                box, row = divmod(step * K_STEP, c.tile_n)
                multiply(
                    cta.tmem.toint() + i * c.d,
                    cta.tmem.toint() + self.p_column(buffer) + step * (K_STEP // 2),
                    v.at(box * c.box_bytes + row * ROW_BYTES),
                    instruction(self.dtype, c.cluster * LANES, c.d, True),
                    True if step else adds,
                    c.cluster,
                    rows=LANES,
                )
        self.commit(bar.p_empty + buffer)

    # ---- softmax

    @cute.jit
    def attend(self, cta: Cta, operands: SpanOperands, results: RowResults, scale_log2: Float32):
        """Four warps a row tile, in which a thread has a row, of every tile of rows of this CTA."""
        n = cta.n
        row = cute.arch.thread_idx()[0]
        i, boxed = cute.arch.make_warp_uniform(row // LANES), BoxedRows.at(n, [row])
        fills0, sent = Int32(0), Int32(0)
        for wave in cutlass.range(self.scheduler(n).waves, unroll=1):
            tile, span = self.rows_of(cta, operands, wave)
            if i == 0 or cta.both:
                sent = self.attend_rows(cta, i, row, boxed, tile, span, fills0, sent, results, scale_log2)
            fills0 = fills0 + span.tiles

    @cute.jit
    def attend_rows(
        self,
        cta: Cta,
        i: Int32,
        row: Int32,
        boxed: BoxedRows,
        tile: Any,
        span: Span,
        fills0: Int32,
        sent: Int32,
        results: RowResults,
        scale_log2: Float32,
    ) -> Int32:
        """Returns how many factors this row tile's correction has been sent."""
        c, bar, n = self.config, cta.bar, cta.n
        lane = row % LANES
        exists, query, head = tile.place(boxed, 0)
        seen = seen_by_row(span, tile, boxed)
        sink = load(results.sink + cutlass.min(head, n.group * n.h_kv - 1))
        factors = bar.factor_of(i)

        measured = -Float32.inf  # from where P is measured
        sums = Float32(0.0), Float32(0.0)
        scores = tuple(cute.make_rmem_tensor(TOGETHER, Float32) for _ in range(c.keys // TOGETHER))
        for t in cutlass.range(span.tiles, unroll=1):
            fill = fills0 + t
            wait_for(bar.s_full + i, fill)
            after_thread_sync()
            row_max = self.read_scores(cta, i, lane, seen, t, measured, scores)
            rises = (row_max - measured) * scale_log2 > RESCALED_ABOVE
            factor = exp2(measured * scale_log2 - shift_of(row_max, scale_log2)) if rises else Float32(1.0)
            measured = row_max if rises else measured
            if t > 0:
                self.tell(cta, factors, sent, row, factor)
                sent = sent + 1
            shift = shift_of(measured, scale_log2)
            sums = sums[0] * factor, sums[1] * factor
            buffer, _ = self.buffer_of(i, fill)
            p = cta.tmem + self.p_column(buffer)
            for part in cutlass.range_constexpr(len(c.parts)):
                first, keys = sum(c.parts[:part]), c.parts[part]
                rounded = cute.make_rmem_tensor(keys // 2, Uint32)
                numbers = [scores[k // TOGETHER][k % TOGETHER] for k in range(first, first + keys)]
                sums = exponentiate(sums, shift, scale_log2, numbers, rounded, self.dtype, c.emulated)
                if cutlass.const_expr(part == 0):  # noqa: SIM102, at compile time
                    if fill >= P_BUFFERS // c.row_tiles:
                        self.wait_output(cta, i, fill - P_BUFFERS // c.row_tiles)
                store_lanes(p + first // 2, rounded, lane)
                barrier = bar.p_full + buffer
                if cutlass.const_expr(part > 0):
                    barrier = bar.p_more + (len(c.parts) - 1) * buffer + (part - 1)
                self.hand_over(barrier)

        row_sum = sums[0] + sums[1]
        factor, lse = Float32(0.0), -Float32.inf
        if exists:
            if row_sum != 0.0:
                shift = shift_of(measured, scale_log2)
                factor = 1.0 / (row_sum + exp2(sink * LOG2_E - shift))
                lse = (cute.math.log2(row_sum, fastmath=True) + measured * scale_log2) * LN_2
            store(results.lse + tile.row_index(query, head), lse)
        self.tell(cta, factors, sent, row, factor)
        return sent + 1

    @cute.jit
    def read_scores(
        self, cta: Cta, i: Int32, lane: Int32, seen: RowSpan, t: Int32, row_max: Float32, scores: tuple
    ) -> Float32:
        """scores <- those of a row, without the keys that it does not see; returns the maximum of row_max and them.

        The maximum of a part is found while the next one is under way, and again where keys are taken away.
        """
        column, before = cta.tmem + self.scores_column(i), row_max
        begin_load(column, scores[0], lane)
        for part in cutlass.range_constexpr(len(scores)):
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(part + 1 < len(scores)):
                begin_load(column + (part + 1) * TOGETHER, scores[part + 1], lane)
            else:
                self.hand_over(cta.bar.s_empty + i)
            row_max = raise_max(row_max, scores[part])
        if seen.is_cut(t):
            row_max = before
            for part in cutlass.range_constexpr(len(scores)):
                seen.mask(scores[part], t, part)
                row_max = raise_max(row_max, scores[part])
        return row_max

    @cute.jit
    def tell(self, cta: Cta, factors: Any, sent: Int32, row: Int32, factor: Float32):
        """Tells the correction what to multiply this row of O with."""
        state = factors.at(sent)
        state.wait_empty()
        cta.smem.factor[row] = factor
        self.arrive(state.full)

    # ---- correction

    @cute.jit
    def correct(self, cta: Cta, operands: SpanOperands, o: cute.Pointer):
        """Four warps: O of every row tile of this CTA is rescaled where a maximum has risen, and in the end written."""
        c, bar, n = self.config, cta.bar, cta.n
        lane = cute.arch.thread_idx()[0] % LANES
        boxed = tuple(BoxedRows.at(n, [lane + i * LANES]) for i in range(c.row_tiles))
        fills0, sent, cleared = Int32(0), Int32(0), Int32(0)
        for wave in cutlass.range(self.scheduler(n).waves, unroll=1):
            tile, span = self.rows_of(cta, operands, wave)
            for t in cutlass.range(span.tiles, unroll=1):
                fill = fills0 + t
                if span.needs_clearing(t):
                    wait_for(bar.v_full, cleared)
                    self.clear_values(cta, lane, fill, span.unseen_from(t))
                    cleared = cleared + 1
                for i in cutlass.range_constexpr(c.row_tiles):
                    if i == 0 or cta.both:
                        if t > 0:
                            factor = self.hear(cta, i, sent, lane)
                            # or a warp might tell of this tile before another one has of the last
                            self.wait_output(cta, i, fill - 1)
                            if cute.arch.vote_any_sync(factor != 1.0):
                                scale_lanes(cta.tmem + i * c.d, c.d, factor, lane, CHUNK)
                        buffer, _ = self.buffer_of(i, fill)
                        self.hand_over(bar.p_full + buffer)
                sent = sent + Int32(t > 0)
            fills0 = fills0 + span.tiles
            for i in cutlass.range_constexpr(c.row_tiles):
                if i == 0 or cta.both:
                    factor = self.hear(cta, i, sent, lane)
                    if span.tiles > 0:
                        self.wait_output(cta, i, fills0 - 1)
                    exists, query, head = tile.place(boxed[i], 0)
                    self.write_output(
                        cta, i, lane, span.tiles > 0, factor, exists, o + tile.row_index(query, head) * c.d
                    )
            sent = sent + 1

    @cute.jit
    def hear(self, cta: Cta, i: cutlass.Constexpr, sent: Int32, lane: Int32) -> Float32:
        """Waits for what this row of O is to be multiplied with, and returns it."""
        state = cta.bar.factor_of(i).at(sent)
        state.wait_full()
        factor = cta.smem.factor[i * LANES + lane]
        self.arrive(state.empty)
        return factor

    @cute.jit
    def clear_values(self, cta: Cta, lane: Int32, fill: Int32, first: Int32):
        """Zeroes the rows of V's tile from `first` on, which no query sees."""
        c, stage = self.config, cta.bar.keys.at(2 * fill + 1).index
        for i in cutlass.range_constexpr(c.cluster):
            first_of_box = cutlass.max(first - i * c.tile_n, 0)
            zero_rows(cta.smem.values[None, None, i, stage], first_of_box, lane, WARPGROUP)

    @cute.jit
    def write_output(
        self, cta: Cta, i: cutlass.Constexpr, lane: Int32, any_key, factor: Float32, exists, row: cute.Pointer
    ):
        """o <- factor O, rounded; without any key there is no O."""
        c = self.config
        chunk = cute.make_rmem_tensor(CHUNK, Float32)
        packed = cute.make_rmem_tensor(CHUNK // 2, Uint32)
        for k in cutlass.range(c.d // CHUNK, unroll=1):
            chunk.fill(0.0)
            if any_key:
                load_lanes(cta.tmem + (i * c.d + k * CHUNK), chunk, lane)
            for j in cutlass.range_constexpr(cute.size(packed)):
                packed[j] = round_pair(chunk[2 * j] * factor, chunk[2 * j + 1] * factor, self.dtype)
            if exists:
                place = cute.recast_ptr(row + k * CHUNK, dtype=Uint32).align(32)
                cute.autovec_copy(packed, cute.make_tensor(place, packed.layout))


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype)
    return MhaFwdSm100(config).compile(variant, out_dir, cluster=config.cluster)
