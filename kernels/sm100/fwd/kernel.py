"""Attention for Blackwell: head dimensions up to 256 with separate K and V, 512 with one latent that is both.

    warp 5, ..   Q K0 V0  K1 V1  K2 V2 ...                              into rings: TMA, or cp.async where selected
    warp 4       S0   | S1 | O = P0 V0 | S2 | O += P1 V1 | ... Pn Vn     tcgen05.mma, all in TMEM
    warps 0-3         | P0             | P1              | ...      O    softmax; O to memory

Q K' of tile t + 1 is issued before P V of tile t, so both run under the softmax of t and t + 1. The scores have two
buffers. A thread of warps 0 to 3 holds one row of the scores, or half of one, and the same lanes of O: before P of a
tile is given to the products, the thread rescales its part of O where the maximum of a row has risen.

TMEM has 128 lanes x 512 columns of 32 bits. With 128 rows a lane is a row. At d = 512, 128 rows of O would fill all of
it, so a tile has 64 rows there: an accumulator of 64 rows takes 16 lanes of each warp's 32, and two of them, the two
halves of O's columns or the two buffers of the scores, lie side by side in the same columns:

    lanes of warp w     0 .. 15: rows 16 w ..    O[:, :256]    S, even tiles
                       16 .. 31: the same rows   O[:, 256:]    S, odd tiles

P goes to TMEM where a lane is a row. Otherwise it goes to SMEM, because an operand in TMEM would have to lie in the
lanes of the accumulator, and O occupies both halves of them.

Warps are specialised, and CTAs persistent: one takes every gridDim-th tile of rows, and TMA runs ahead into the next.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import tcgen05

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.forward import ForwardKernel
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import wait_for
from kernels.lib.rows import BoxedRows, Extents, RowTile, load, store
from kernels.lib.selections import LANES_A_ROW, open_selection, read_selection
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, exp2
from kernels.lib.spans import SpanOperands, open_span, prefetch_span, read_span
from kernels.lib.splits import on_source, total_tiles
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
from .row_softmax import RowSpan, exponentiate, mask, prefetch, raise_max, seen_by_row, shift_of
from .smem import Barriers, Shared, allocate
from .tcgen05 import (
    COLUMNS,
    after_thread_sync,
    before_thread_sync,
    commit,
    load_half_lanes,
    load_lanes,
    scale_lanes,
    store_lanes,
    sync_with_tmem,
    tiled_mma,
    write_row,
)

SOFTMAX_MET = 1  # a named barrier: all softmax warps have arrived


@dataclass(frozen=True)
class Cta:
    """State that all warps share."""

    bar: Barriers
    smem: Shared
    tmem: cute.Pointer
    n: Extents


@dataclass(frozen=True)
class Row:
    """The row of scores and of O that a softmax thread holds, or its part of it."""

    thread: Int32
    row: Int32
    part: Int32  # 0 unless two threads share a row: then the half of the columns
    boxed: BoxedRows

    @staticmethod
    def of(c: Config, n: Extents) -> "Row":
        thread = cute.arch.thread_idx()[0]
        rows_per_warp = 32 // c.lanes_per_row
        row = thread // 32 * rows_per_warp + thread % rows_per_warp
        return Row(thread, row, thread % 32 // rows_per_warp, BoxedRows.at(n, [row]))


class FwdSm100(ForwardKernel):
    symbol = "fwd_sm100"

    @cute.kernel
    def kernel(
        self,
        rows_of_q: tuple,
        output: Any,  # TMA to o where K is V, else a pointer
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

        operands = tuple(source[-1] for source in sources)
        if warp < SOFTMAX_WARPS:
            self.attend(cta, operands, output, results, scale_log2)
        elif warp == SOFTMAX_WARPS:
            self.multiply(cta, operands)
        else:
            self.load(cta, rows_of_q, sources)

        sync_with_tmem()
        if warp == 0:
            cute.arch.dealloc_tmem(cta.tmem, COLUMNS)

    # ---- loading

    @cute.jit
    def load(self, cta: Cta, rows: tuple, sources: tuple):
        """One warp, or four that gather: for every row tile of this CTA it loads Q, the spans or lists, and the tiles
        of keys.
        """
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        thread = cute.arch.thread_idx()[0] - 32 * (SOFTMAX_WARPS + 1)
        first_warp = cute.arch.make_warp_uniform(thread // 32) == 0
        tma_q, mQ = rows
        scheduler, fills0 = TileScheduler.of(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = tuple(self.open(source[-1], tile) for source in sources)
            if first_warp:
                q = bar.q.at(wave)
                q.wait_empty()
                with cute.arch.elect_one():
                    for i, thing in enumerate((tile, *opened)):
                        thing.publish(smem.info[None, i])
                    q.expect_full(n.box_inner * n.box_outer * c.d * 2)
                gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
                cute.copy(tma_q, gQ, sQ, tma_bar_ptr=q.full)
            self.load_keys(cta, sources, opened, tile, fills0, thread)
            fills0 = fills0 + total_tiles(opened)
        # Nothing may arrive in the SMEM of a CTA that has ended.
        if first_warp:
            bar.q.at(scheduler.waves).wait_empty()
        for i in cutlass.range_constexpr(c.stages):
            for ring in bar.rings:
                ring.at(fills0 + i).wait_empty()

    def open(self, operands: Any, tile: RowTile) -> Any:
        c = self.config
        if isinstance(operands, SpanOperands):
            return open_span(operands, tile, c.tile_n, prefetch_span(operands, tile, c.tile_m))
        return open_selection(operands, tile, c.tile_n, c.d)

    @cute.jit
    def load_keys(self, cta: Cta, sources: tuple, opened: tuple, tile: RowTile, fills0: Int32, thread: Int32):
        """Loads all key tiles of one row tile, source after source. Entries of a selection are read a tile ahead."""
        c, smem = self.config, cta.smem
        bar_full, bar_empty = cta.bar.rings[0].full, cta.bar.rings[0].empty
        wanted, copies = None, (None,) * len(opened)
        if cutlass.const_expr(c.gathers):
            wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        else:
            copies = tuple(self.ring_copies(cta, x, tile, source) for x, source in zip(sources, opened, strict=True))
        first = Int32(0)
        for source, copy in zip(opened, copies, strict=True):
            if cutlass.const_expr(c.gathers):
                source.prefetch_indices(0, wanted, thread, WARPGROUP)
            for t in cutlass.range(source.tiles, unroll=1):
                fill = fills0 + first + t
                stage, phase = fill % c.stages, fill // c.stages & 1
                if cutlass.const_expr(c.gathers):
                    source.mark_absent(t, wanted, thread, WARPGROUP)
                for ring in cutlass.range_constexpr(2):
                    full = bar_full + ring * c.stages + stage
                    cute.arch.mbarrier_wait(bar_empty + ring * c.stages + stage, phase ^ 1)
                    if cutlass.const_expr(c.gathers):
                        slabs = range(ring * c.ring_d // SLAB, (ring + 1) * c.ring_d // SLAB)
                        source.gather(smem.rings[None, None, 0, stage], wanted, thread, slabs, WARPGROUP)
                        cute.arch.cp_async_mbarrier_arrive_noinc(full)
                    else:
                        atom, gmem, tiles = copy[ring]
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full, c.ring_tile_bytes)
                        cute.copy(atom, gmem[None, t], tiles[None, stage], tma_bar_ptr=full)
                if cutlass.const_expr(c.gathers):
                    source.prefetch_indices(t + 1, wanted, thread, WARPGROUP)
            first = first + source.tiles

    def ring_copies(self, cta: Cta, source: tuple, tile: RowTile, opened: Any) -> tuple:
        """For each ring (atom, its tiles in memory, its stages)."""
        c = self.config
        *tma, _ = source
        arrays = ((*tma[:2], 0), (*tma[:2], 1)) if c.shared_kv else ((*tma[:2], 0), (*tma[2:], 0))
        return tuple(
            (
                atom,
                *tma_tiles(
                    atom,
                    tile.keys(array, opened.lo, c.tile_n, c.ring_d)[None, None, None, half],
                    cta.smem.rings[None, None, ring, None],
                ),
            )
            for ring, (atom, array, half) in enumerate(arrays)
        )

    # ---- MMA

    @cute.jit
    def multiply(self, cta: Cta, operands: tuple):
        """One warp, one lane of which issues the products of every row tile of this CTA."""
        bar, smem, n = cta.bar, cta.smem, cta.n
        fills0 = Int32(0)
        for wave in cutlass.range(TileScheduler.of(n).waves, unroll=1):
            bar.q.at(wave).wait_full()
            tile = RowTile.read(smem.info[None, 0], n)
            tiles = total_tiles(self.reopen(cta, operands, tile))
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

    def reopen(self, cta: Cta, operands: tuple, tile: RowTile) -> tuple:
        c, info = self.config, cta.smem.info
        return tuple(
            read_span(x, tile, c.tile_n, info[None, 1 + i])
            if isinstance(x, SpanOperands)
            else read_selection(x, tile, c.tile_n, c.d, info[None, 1 + i])
            for i, x in enumerate(operands)
        )

    @cute.jit
    def issue_scores(self, cta: Cta, fill: Int32, last: cutlass.Boolean):
        """S <- Q K' of the rings' tile number `fill`, the last of its row tile or not.

        The scores of two tiles before, in the same buffer, have been read: the warp has waited for P of that tile.
        """
        c, bar, smem = self.config, cta.bar, cta.smem
        buffer = fill % SCORE_BUFFERS
        mma, a, s = self.score_operands(cta)
        blocks = c.ring_d // 16
        for i, ring in enumerate(c.key_rings):
            state = bar.rings[ring].at(fill)
            state.wait_full()
            if cutlass.const_expr(c.gathers):
                cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote through the generic proxy
            b = operand_b(mma, smem.rings[None, None, ring, None])
            for k in range(blocks):
                mma.set(tcgen05.Field.ACCUMULATE, i + k > 0)
                cute.gemm(
                    mma,
                    s[None, None, None, buffer],
                    a[None, None, i * blocks + k],
                    b[None, None, k, state.index],
                    s[None, None, None, buffer],
                )
            if ring not in c.value_rings:
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
        values = tuple((ring, bar.rings[ring].at(fill)) for ring in c.value_rings)
        mma, p, o = self.output_operands(cta)
        wait_for(bar.p_full, fill)
        after_thread_sync()
        for i, (ring, state) in enumerate(values):
            state.wait_full()
            b = operand_b(mma, transposed(smem.rings[None, None, ring, None]))
            for k in range(c.tile_n // 16):
                mma.set(tcgen05.Field.ACCUMULATE, True if k else adds)
                cute.gemm(
                    mma, o[None, None, None, i], p[None, None, k], b[None, None, k, state.index], o[None, None, None, i]
                )
            commit(state.empty)
        commit(bar.o_full)

    def output_operands(self, cta: Cta) -> tuple[cute.TiledMma, cute.Tensor, cute.Tensor]:
        """(mma, P, O with one mode more for the value rings)"""
        c = self.config
        source = tcgen05.OperandSource.TMEM if c.p_in_tmem else tcgen05.OperandSource.SMEM
        mma = tiled_mma(self.dtype, c.tile_m, c.ring_d, MN_MAJOR, source)
        o = mma.make_fragment_C(cute.append(mma.partition_shape_C((c.tile_m, c.ring_d)), len(c.value_rings)))
        if c.p_in_tmem:
            layout = mma.make_fragment_A(mma.partition_shape_A((c.tile_m, c.tile_n))).layout
            p = cute.make_tensor(cute.recast_ptr(cta.tmem + c.p_column, dtype=self.dtype), layout)
        else:
            p = operand_a(mma, cta.smem.p)
        return mma, p, cute.make_tensor(cta.tmem, o.layout)

    # ---- softmax

    @cute.jit
    def attend(self, cta: Cta, operands: tuple, output: Any, results: RowResults, scale_log2: Float32):
        """Four warps, in which a thread has a row or half of one, of every row tile of this CTA."""
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        w = Row.of(c, n)
        fills0 = Int32(0)
        for wave in cutlass.range(TileScheduler.of(n).waves, unroll=1):
            bar.q.at(wave).wait_full()
            tile = RowTile.read(smem.info[None, 0], n)
            sources = self.reopen(cta, operands, tile)
            cute.arch.mbarrier_arrive(bar.q.empty)
            exists, query, head = tile.place(w.boxed, 0)
            seen = tuple(seen_by_row(source, tile, w.boxed) for source in sources)
            sink = load(results.sink + head)
            tiles = total_tiles(sources)

            row_max, row_sum = -Float32.inf, Float32(0.0)
            scores = cute.make_rmem_tensor(c.scores_per_thread, Float32)
            p = cute.make_rmem_tensor(c.scores_per_thread // 2, Uint32)
            for t in cutlass.range(tiles, unroll=1):
                fill = fills0 + t
                on_source(seen, t, prefetch)
                self.read_scores(cta, w, fill, scores)
                on_source(seen, t, mask, scores, w.part)
                old_max = row_max
                row_max = raise_max(row_max, scores, c.lanes_per_row)
                shift = shift_of(row_max, scale_log2)
                factor = exp2(old_max * scale_log2 - shift)
                row_sum = exponentiate(row_sum * factor, shift, scale_log2, scores, p, self.dtype)
                if t > 0:
                    wait_for(bar.o_full, fill - 1)
                    after_thread_sync()
                    if cute.arch.vote_any_sync(factor != 1.0):
                        scale_lanes(cta.tmem, c.outputs_per_thread, factor, w.thread)
                self.write_p(cta, w, p)
                on_source(seen, t, self.clear_values, cta, w, fill)
                before_thread_sync()
                cute.arch.mbarrier_arrive(bar.p_full)

            if cutlass.const_expr(c.lanes_per_row == 2):
                row_sum = row_sum + cute.arch.shuffle_sync_bfly(row_sum, offset=16)
            factor, lse = Float32(0.0), -Float32.inf
            if exists:
                if row_sum != 0.0:
                    shift = shift_of(row_max, scale_log2)
                    factor = 1.0 / (row_sum + exp2(sink * LOG2_E - shift))
                    lse = (cute.math.log2(row_sum, fastmath=True) + row_max * scale_log2) * LN_2
                if w.part == 0:
                    store(results.lse + tile.row_index(query, head), lse)
            if tiles > 0:
                wait_for(bar.o_full, fills0 + tiles - 1)
                after_thread_sync()
            self.write_output(cta, w, tiles > 0, factor, tile, exists, tile.row_index(query, head), output)
            fills0 = fills0 + tiles
        if cutlass.const_expr(c.shared_kv):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def read_scores(self, cta: Cta, w: Row, fill: Int32, scores: cute.Tensor):
        c = self.config
        buffer = fill % SCORE_BUFFERS
        cute.arch.mbarrier_wait(cta.bar.s_full + buffer, fill // SCORE_BUFFERS & 1)
        after_thread_sync()
        if cutlass.const_expr(c.lanes_per_row == 1):
            load_lanes(cta.tmem + c.scores_column + buffer * c.tile_n, scores, w.thread)
        else:
            _, _, s = self.score_operands(cta)
            load_half_lanes(s[(None, None), 0, 0, buffer], scores, w.thread)

    @cute.jit
    def write_p(self, cta: Cta, w: Row, p: cute.Tensor):
        c = self.config
        if cutlass.const_expr(c.p_in_tmem):
            store_lanes(cta.tmem + c.p_column, p, w.thread)
        else:
            write_row(cta.smem.p, w.row, w.part * c.scores_per_thread, p)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_values(self, seen: Any, t: Int32, cta: Cta, w: Row, fill: Int32):
        """Zeroes the rows of V's tile t that no query sees; gathered tiles have none."""
        c = self.config
        if cutlass.const_expr(isinstance(seen, RowSpan)):  # noqa: SIM102, at compile time
            if seen.source.needs_clearing(t):
                for ring in c.value_rings:
                    state = cta.bar.rings[ring].at(fill)
                    state.wait_full()
                    tile = cta.smem.rings[None, None, ring, state.index]
                    zero_rows(tile, seen.source.unseen_from(t), w.thread, WARPGROUP)

    @cute.jit
    def write_output(self, cta: Cta, w: Row, any_key, factor: Float32, tile: RowTile, exists, row: Int64, to: Any):
        """o <- factor O, rounded; without any key there is no O."""
        c = self.config
        chunk = cute.make_rmem_tensor(SLAB, Float32)
        packed = cute.make_rmem_tensor(SLAB // 2, Uint32)
        for i in cutlass.range(c.outputs_per_thread // SLAB, unroll=1):
            chunk.fill(0.0)
            if any_key:
                load_lanes(cta.tmem + i * SLAB, chunk, w.thread)
            for j in cutlass.range_constexpr(cute.size(packed)):
                packed[j] = round_pair(chunk[2 * j] * factor, chunk[2 * j + 1] * factor, self.dtype)
            if cutlass.const_expr(c.shared_kv):
                self.store_slabs(cta, w, tile, i, packed, to)
            elif exists:
                target = to + (row * c.d + i * SLAB)
                place = cute.recast_ptr(target, dtype=Uint32).align(16)
                cute.autovec_copy(packed, cute.make_tensor(place, packed.layout))

    @cute.jit
    def store_slabs(self, cta: Cta, w: Row, tile: RowTile, i: Int32, packed: cute.Tensor, output: tuple):
        """Stores the i-th slab of every part of the rows, through SMEM. TMA leaves out rows that do not exist."""
        c, smem = self.config, cta.smem
        tma_o, mO = output
        if w.thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=SOFTMAX_MET, number_of_threads=WARPGROUP)
        write_row(smem.o[None, None, w.part], w.row, 0, packed)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=SOFTMAX_MET, number_of_threads=WARPGROUP)
        if w.thread == 0:  # every lane that reaches a copy to memory issues it
            for part in cutlass.range_constexpr(c.lanes_per_row):
                slab = part * c.outputs_per_thread // SLAB + i
                gO, sO = tma_tiles(tma_o, tile.of(mO, c.tile_m, SLAB)[None, None, slab], smem.o[None, None, part])
                cute.copy(tma_o, sO, gO)
            cute.arch.cp_async_bulk_commit_group()


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources, variant.shared_kv)
    return FwdSm100(config).compile(variant, out_dir)
