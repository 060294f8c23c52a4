"""Attention for Blackwell with separate K and V, of head dimensions up to 256.

    warp 5       Q K0 V0  K1 V1  K2 V2 ...                              into rings: TMA
    warp 4       S0   | S1 | O = P0 V0 | S2 | O += P1 V1 | ... Pn Vn     tcgen05.mma, all in TMEM
    warps 0-3         | P0             | P1              | ...      O    softmax; O to memory

Q K' of tile t + 1 is issued before P V of tile t, so both run under the softmax of t and t + 1. The scores have two
buffers. TMEM has 128 lanes x 512 columns of 32 bits, and a lane is a row. A thread of warps 0 to 3 holds one row of the
scores, and the same lane of O: before P of a tile is given to the products, in TMEM, the thread rescales its row of O
where the maximum has risen.

Warps are specialised, and CTAs persistent: one takes every gridDim-th tile of rows, and TMA runs ahead into the next.
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import tcgen05

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.forward import ForwardKernel
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import wait_for
from kernels.lib.row_softmax import exponentiate, raise_max, seen_by_row, shift_of
from kernels.lib.rows import BoxedRows, Extents, RowTile, load, store
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, exp2
from kernels.lib.spans import Span, SpanOperands, open_span, prefetch_span, read_span
from kernels.lib.tcgen05 import (
    COLUMNS,
    after_thread_sync,
    before_thread_sync,
    commit,
    load_lanes,
    scale_lanes,
    store_lanes,
    sync_with_tmem,
    tiled_mma,
)
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    operand_a,
    operand_b,
    round_pair,
    tma_tiles,
    transposed,
    zero_rows,
)

from .config import SCORE_BUFFERS, SOFTMAX_WARPS, Config
from .smem import Barriers, Shared, allocate


@dataclass(frozen=True)
class Cta:
    """State that all warps share."""

    bar: Barriers
    smem: Shared
    tmem: cute.Pointer
    n: Extents


@dataclass(frozen=True)
class Row:
    """The row of scores and of O that a softmax thread holds."""

    thread: Int32
    boxed: BoxedRows

    @staticmethod
    def of(n: Extents) -> "Row":
        thread = cute.arch.thread_idx()[0]
        return Row(thread, BoxedRows.at(n, [thread]))


class MhaFwdSm100(ForwardKernel):
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
        bar, smem = allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise(c)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(COLUMNS, smem.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
        sync_with_tmem()
        cta = Cta(bar, smem, cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem), n)

        ((*tma, operands),) = sources
        if warp < SOFTMAX_WARPS:
            self.attend(cta, operands, output, results, scale_log2)
        elif warp == SOFTMAX_WARPS:
            self.multiply(cta, operands)
        else:
            self.load(cta, rows_of_q, tuple(tma), operands)

        sync_with_tmem()
        if warp == 0:
            cute.arch.dealloc_tmem(cta.tmem, COLUMNS)

    # ---- loading

    @cute.jit
    def load(self, cta: Cta, rows: tuple, arrays: tuple, operands: SpanOperands):
        """One warp: for every row tile of this CTA it loads Q, the spans, and the tiles of keys and values."""
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        tma_q, mQ = rows
        scheduler, fills0 = TileScheduler.of(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            span = open_span(operands, tile, c.tile_n, prefetch_span(operands, tile, c.tile_m))
            q = bar.q.at(wave)
            q.wait_empty()
            with cute.arch.elect_one():
                for i, thing in enumerate((tile, span)):
                    thing.publish(smem.info[None, i])
                q.expect_full(n.box_inner * n.box_outer * c.d * 2)
            gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
            cute.copy(tma_q, gQ, sQ, tma_bar_ptr=q.full)
            self.load_keys(cta, arrays, span, tile, fills0)
            fills0 = fills0 + span.tiles
        # Nothing may arrive in the SMEM of a CTA that has ended.
        bar.q.at(scheduler.waves).wait_empty()
        for i in cutlass.range_constexpr(c.stages):
            for ring in (bar.keys, bar.values):
                ring.at(fills0 + i).wait_empty()

    @cute.jit
    def load_keys(self, cta: Cta, arrays: tuple, span: Span, tile: RowTile, fills0: Int32):
        """Loads all tiles of keys and values of one row tile."""
        c, bar = self.config, cta.bar
        copies = tuple(
            (ring, arrays[2 * i], *self.tiles_of(arrays[2 * i], arrays[2 * i + 1], cta, span, tile, i))
            for i, ring in enumerate((bar.keys, bar.values))
        )
        for t in cutlass.range(span.tiles, unroll=1):
            for ring, atom, gmem, tiles in copies:
                state = ring.at(fills0 + t)
                state.wait_empty()
                with cute.arch.elect_one():
                    state.expect_full(c.ring_tile_bytes)
                cute.copy(atom, gmem[None, t], tiles[None, state.index], tma_bar_ptr=state.full)

    def tiles_of(self, atom, array: cute.Tensor, cta: Cta, span: Span, tile: RowTile, which: int) -> tuple:
        """Tiles of an array in memory, and their stages."""
        c = self.config
        gmem = tile.keys(array, span.lo, c.tile_n, c.d)[None, None, None, 0]
        return tma_tiles(atom, gmem, cta.smem.rings[None, None, which, None])

    # ---- MMA

    @cute.jit
    def multiply(self, cta: Cta, operands: SpanOperands):
        """One warp, one lane of which issues the products of every row tile of this CTA."""
        bar, smem, n = cta.bar, cta.smem, cta.n
        fills0 = Int32(0)
        for wave in cutlass.range(TileScheduler.of(n).waves, unroll=1):
            bar.q.at(wave).wait_full()
            tile = RowTile.read(smem.info[None, 0], n)
            tiles = read_span(operands, tile, self.config.tile_n, smem.info[None, 1]).tiles
            cute.arch.mbarrier_arrive(bar.q.empty)
            if tiles == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bar.q.empty)
            else:
                self.issue_scores(cta, fills0, tiles == 1)
                for t in cutlass.range(tiles, unroll=1):
                    if t + 1 < tiles:
                        self.issue_scores(cta, fills0 + t + 1, t + 2 == tiles)
                    self.issue_output(cta, fills0 + t, t > 0)
            fills0 = fills0 + tiles

    @cute.jit
    def issue_scores(self, cta: Cta, fill: Int32, last: cutlass.Boolean):
        """S <- Q K' of the rings' tile number `fill`, the last of its row tile or not.

        The scores of two tiles before, in the same buffer, have been read: the warp has waited for P of that tile.
        """
        c, bar, smem = self.config, cta.bar, cta.smem
        buffer = fill % SCORE_BUFFERS
        mma, a, s = self.score_operands(cta)
        state = bar.keys.at(fill)
        state.wait_full()
        b = operand_b(mma, smem.rings[None, None, 0, None])
        for k in range(c.d // 16):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            cute.gemm(
                mma,
                s[None, None, None, buffer],
                a[None, None, k],
                b[None, None, k, state.index],
                s[None, None, None, buffer],
            )
        commit(state.empty)
        commit(bar.s_full + buffer)
        if last:
            commit(bar.q.empty)

    def score_operands(self, cta: Cta) -> tuple[cute.TiledMma, cute.Tensor, cute.Tensor]:
        """(mma, Q, both score buffers)"""
        c = self.config
        mma = tiled_mma(self.dtype, c.tile_m, c.tile_n, K_MAJOR)
        s = mma.make_fragment_C(cute.append(mma.partition_shape_C((c.tile_m, c.tile_n)), SCORE_BUFFERS))
        return mma, operand_a(mma, cta.smem.q), cute.make_tensor(cta.tmem + c.scores_column, s.layout)

    @cute.jit
    def issue_output(self, cta: Cta, fill: Int32, adds: cutlass.Boolean):
        """O (+)= P V of the rings' tile number `fill`; the first of its row tile does not add."""
        c, bar, smem = self.config, cta.bar, cta.smem
        mma, p, o = self.output_operands(cta)
        wait_for(bar.p_full, fill)
        after_thread_sync()
        state = bar.values.at(fill)
        state.wait_full()
        b = operand_b(mma, transposed(smem.rings[None, None, 1, None]))
        for k in range(c.tile_n // 16):
            mma.set(tcgen05.Field.ACCUMULATE, True if k else adds)
            cute.gemm(mma, o, p[None, None, k], b[None, None, k, state.index], o)
        commit(state.empty)
        commit(bar.o_full)

    def output_operands(self, cta: Cta) -> tuple[cute.TiledMma, cute.Tensor, cute.Tensor]:
        """(mma, P, O)"""
        c = self.config
        mma = tiled_mma(self.dtype, c.tile_m, c.d, MN_MAJOR, tcgen05.OperandSource.TMEM)
        o = mma.make_fragment_C(mma.partition_shape_C((c.tile_m, c.d)))
        layout = mma.make_fragment_A(mma.partition_shape_A((c.tile_m, c.tile_n))).layout
        p = cute.make_tensor(cute.recast_ptr(cta.tmem + c.p_column, dtype=self.dtype), layout)
        return mma, p, cute.make_tensor(cta.tmem, o.layout)

    # ---- softmax

    @cute.jit
    def attend(self, cta: Cta, operands: SpanOperands, o: cute.Pointer, results: RowResults, scale_log2: Float32):
        """Four warps, in which a thread has a row, of every row tile of this CTA."""
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        w = Row.of(n)
        fills0 = Int32(0)
        for wave in cutlass.range(TileScheduler.of(n).waves, unroll=1):
            bar.q.at(wave).wait_full()
            tile = RowTile.read(smem.info[None, 0], n)
            span = read_span(operands, tile, c.tile_n, smem.info[None, 1])
            cute.arch.mbarrier_arrive(bar.q.empty)
            exists, query, head = tile.place(w.boxed, 0)
            seen = seen_by_row(span, tile, w.boxed)
            sink = load(results.sink + head)

            row_max, row_sum = -Float32.inf, Float32(0.0)
            scores = cute.make_rmem_tensor(c.tile_n, Float32)
            p = cute.make_rmem_tensor(c.tile_n // 2, Uint32)
            for t in cutlass.range(span.tiles, unroll=1):
                fill = fills0 + t
                self.read_scores(cta, w, fill, scores)
                seen.mask(scores, t, 0)
                old_max = row_max
                row_max = raise_max(row_max, scores)
                shift = shift_of(row_max, scale_log2)
                factor = exp2(old_max * scale_log2 - shift)
                row_sum = exponentiate(row_sum * factor, shift, scale_log2, scores, p, self.dtype)
                if t > 0:
                    wait_for(bar.o_full, fill - 1)
                    after_thread_sync()
                    if cute.arch.vote_any_sync(factor != 1.0):
                        scale_lanes(cta.tmem, c.d, factor, w.thread)
                store_lanes(cta.tmem + c.p_column, p, w.thread)
                if span.needs_clearing(t):
                    self.clear_values(cta, w, fill, span.unseen_from(t))
                before_thread_sync()
                cute.arch.mbarrier_arrive(bar.p_full)

            factor, lse = Float32(0.0), -Float32.inf
            if exists:
                if row_sum != 0.0:
                    shift = shift_of(row_max, scale_log2)
                    factor = 1.0 / (row_sum + exp2(sink * LOG2_E - shift))
                    lse = (cute.math.log2(row_sum, fastmath=True) + row_max * scale_log2) * LN_2
                store(results.lse + tile.row_index(query, head), lse)
            if span.tiles > 0:
                wait_for(bar.o_full, fills0 + span.tiles - 1)
                after_thread_sync()
            self.write_output(cta, w, span.tiles > 0, factor, exists, o + tile.row_index(query, head) * c.d)
            fills0 = fills0 + span.tiles

    @cute.jit
    def read_scores(self, cta: Cta, w: Row, fill: Int32, scores: cute.Tensor):
        c = self.config
        buffer = fill % SCORE_BUFFERS
        cute.arch.mbarrier_wait(cta.bar.s_full + buffer, fill // SCORE_BUFFERS & 1)
        after_thread_sync()
        load_lanes(cta.tmem + c.scores_column + buffer * c.tile_n, scores, w.thread)

    @cute.jit
    def clear_values(self, cta: Cta, w: Row, fill: Int32, first: Int32):
        """Zeroes the rows of V's tile from `first` on, which no query sees."""
        state = cta.bar.values.at(fill)
        state.wait_full()
        zero_rows(cta.smem.rings[None, None, 1, state.index], first, w.thread, WARPGROUP)

    @cute.jit
    def write_output(self, cta: Cta, w: Row, any_key, factor: Float32, exists, row: cute.Pointer):
        """o <- factor O, rounded; without any key there is no O."""
        c = self.config
        chunk = cute.make_rmem_tensor(SLAB, Float32)
        packed = cute.make_rmem_tensor(SLAB // 2, Uint32)
        for i in cutlass.range(c.d // SLAB, unroll=1):
            chunk.fill(0.0)
            if any_key:
                load_lanes(cta.tmem + i * SLAB, chunk, w.thread)
            for j in cutlass.range_constexpr(cute.size(packed)):
                packed[j] = round_pair(chunk[2 * j] * factor, chunk[2 * j + 1] * factor, self.dtype)
            if exists:
                place = cute.recast_ptr(row + i * SLAB, dtype=Uint32).align(16)
                cute.autovec_copy(packed, cute.make_tensor(place, packed.layout))


def compile(variant: Forward, out_dir: Path) -> Compiled:
    return MhaFwdSm100(Config(variant.d, variant.dtype)).compile(variant, out_dir)
