"""Attention for Blackwell where one latent of 512 columns is both K and V.

    warps 0-3         | P0            | P1             | ...          softmax; a row has two threads
    warps 4-7    Q of the next tile of rows  | O of the last one      between memory and TMEM
    warps 8 ..   K0  K1  K2 ...                                       into a ring: TMA, or four warps that unpack
    the next     S0 S1 | S2, O = P0 V0 | S3, O += P1 V1 | ...         tcgen05.mma, all in TMEM

TMEM has 128 lanes x 512 columns of 32 bits. A CTA has 64 rows, and all of O is 64 x 512, so two lanes share a row: lane
i and lane 64 + i. Q lies in two rails, one above the other: the left half of its columns in the first 64 lanes, the
right half in the others. A product of such an operand gives two parts of the scores, each over 256 columns, and the
softmax adds them. So a tile of keys serves as twice as many keys of half the depth:

    lanes  0 .. 63     O[:, :256]    Q[:, :256]    Q[:, :256] K[:, :256]'
          64 .. 127    O[:, 256:]    Q[:, 256:]    Q[:, 256:] K[:, 256:]'      (`Config.column_of` for one CTA)

Where rows share their keys, or there are more than 64 heads, CTAs work in pairs. A pair has 128 rows, and each CTA
loads half of the columns of every key, once: products of both CTAs (`cta_group::2`) read one half of B from either.
That half is a rail of K, and half of V's columns. Otherwise one CTA has whole keys, and `.ws` products.

Warps are specialised, and CTAs persistent: one takes every gridDim-th tile of rows. O is rescaled only where a maximum
has risen by more than `RESCALED_ABOVE` since P was last measured from it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.blackwell import BlackwellKernel, Cta
from kernels.lib.forward import ForwardKernel, Source
from kernels.lib.launch import WARPGROUP, Shapes
from kernels.lib.packed import packed_operands
from kernels.lib.pipeline import PipelineState, wait_for
from kernels.lib.ptx import load_shared_four, store_shared_four, store_shared_words
from kernels.lib.row_softmax import RowSpan, exponentiate, mask, prefetch, raise_max, seen_by_row, shift_of
from kernels.lib.rows import WARP, BoxedRows, Extents, PlacedTile, RowTile, load, store
from kernels.lib.selections import GATHERED, gathered, open_selection, read_selection
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, exp2
from kernels.lib.spans import SpanOperands, open_span, prefetch_span, read_span
from kernels.lib.splits import on_source, own_part, total_tiles
from kernels.lib.tcgen05 import (
    K_STEP,
    ROW_BYTES,
    Collector,
    after_thread_sync,
    begin_load,
    commit,
    instruction,
    load_lanes,
    multiply,
    scale_lanes,
    slab_descriptor,
    store_lanes,
)
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import SLAB, round_pair, tma_atom, tma_tiles, zero_rows
from kernels.packings import PACKED

from .config import BUFFERS, RAILS, RESCALED_ABOVE, ROW_WARPS, SOFTMAX_WARPS, Config
from .gather import TOGETHER, gather_rows, gathering_atom
from .smem import allocate
from .unpack import unpack_tiles

CHUNK = 64  # columns of O that a thread holds at a time
OF_ROWS = 1  # the first of the named barriers of two warps that share rows


@dataclass(frozen=True)
class Row:
    """The row that a thread of four warps has a half of."""

    thread: Int32
    row: Int32
    part: Int32
    boxed: BoxedRows

    @staticmethod
    def of(c: Config, n: Extents, first_warp: int) -> "Row":
        thread = cute.arch.thread_idx()[0] - WARP * first_warp
        row = thread % c.tile_m
        return Row(thread, row, cute.arch.make_warp_uniform(thread // c.tile_m), BoxedRows.at(n, [row]))


class MlaFwdSm100(BlackwellKernel, ForwardKernel):
    symbol = "mla_fwd_sm100"

    @property
    def kinds(self) -> dict[str, type]:
        """Operands of gathered sources, by kind."""
        return {**GATHERED, **{kind: packed_operands(kind, self.config.lanes_a_key) for kind in PACKED}}

    @cute.kernel
    def kernel(self, q, o, sources: tuple, results: RowResults, scale_log2: Float32, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = self.start(warp, *allocate(c, self.dtype), n, followed=True)  # by `combine`, or not

        operands = tuple(x[-1] for x in sources)
        if cutlass.const_expr(c.gathers and not c.unpacks):  # places of keys are counted in rows of the array
            operands = tuple(x._replace(keys=Int64(0)) for x in operands)
        for_softmax, for_rows, for_loading, for_products = c.registers
        if warp < SOFTMAX_WARPS:
            self.take_registers(for_softmax)
            self.attend(cta, operands, results, scale_log2)
        elif warp < SOFTMAX_WARPS + ROW_WARPS:
            self.take_registers(for_rows)
            self.move_rows(cta, q, o, results.o_parts)
        elif warp < c.mma_warp:
            self.take_registers(for_loading)
            self.load(cta, tuple((*x[:-1], y) for x, y in zip(sources, operands, strict=True)))
            # A grid that began early ends after the grid before it, so that what follows waits for this one alone.
            cute.arch.griddepcontrol_wait()
        else:
            self.take_registers(for_products)
            if warp == c.mma_warp:
                self.multiply(cta, operands)

        self.end(warp, cta)

    def take_registers(self, count: int) -> None:
        """A warpgroup takes as many a thread, where they are shared out."""
        if count > self.config.registers_at_launch:
            cute.arch.setmaxregister_increase(count)
        elif 0 < count < self.config.registers_at_launch:
            cute.arch.setmaxregister_decrease(count)

    def rows(self, shapes: Shapes, q: cute.Pointer, o: cute.Pointer) -> tuple[Any, Any]:
        return q, o

    def source(self, kind: str, shapes: Shapes, x: Source) -> tuple:
        c = self.config
        if c.unpacks:
            return super().source(kind, shapes, x)
        if c.gathers:
            rows = cutlass.max(x.s_kv, x.s_batch * shapes.b)
            array = cute.make_tensor(x.k, cute.make_layout((rows, c.d), stride=(c.d, 1)))
            return gathering_atom(array, c.tile_n, c.cluster), gathered(self.kinds, kind, None, *x[2:])
        load = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO)
        tma = tma_atom(load, shapes.keys(x.k, x.s_kv), c.tile_n, c.columns_k)
        return (*tma, SpanOperands(x.first, x.second, x.s_kv))

    def scheduler(self, n: Extents) -> TileScheduler:
        return TileScheduler.of(n, cluster=self.config.cluster)

    # ---- loading

    @cute.jit
    def load(self, cta: Cta, sources: tuple):
        """For every tile of rows of this CTA it loads the spans or lists, and the tiles of keys."""
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        scheduler, fills0 = self.scheduler(n), Int32(0)
        thread = cute.arch.thread_idx()[0] - WARP * (SOFTMAX_WARPS + ROW_WARPS)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = own_part(tuple(self.open(cta, source[-1], tile) for source in sources), tile, 1)
            if thread < WARP:
                info = bar.info.at(wave)
                info.wait_empty()
                with cute.arch.elect_one():
                    for i, thing in enumerate((tile, *opened)):
                        thing.publish(smem.info[None, i, info.index])
                    info.arrive_full()
            if cutlass.const_expr(c.unpacks):
                self.unpack_tiles(cta, opened, fills0, thread)
            else:
                first = fills0
                for source, x in zip(sources, opened, strict=True):
                    if cutlass.const_expr(c.gathers):
                        self.gather_tiles(cta, source[0], x, first, thread)
                    else:
                        self.load_tiles(cta, source, x, tile, first)
                    first = first + x.tiles
            fills0 = fills0 + total_tiles(opened)
        # Nothing may arrive in the SMEM of a CTA that has ended. A team waits for its own fills: it knows of no others.
        if cutlass.const_expr(c.teams > 1):
            fills0 = fills0 + c.before_turn(fills0, thread)
        for i in cutlass.range_constexpr(0, c.stages, c.teams):
            bar.keys.at(fills0 + i).wait_empty()

    def open(self, cta: Cta, operands: Any, tile: RowTile) -> Any:
        """Opens a source: finds the keys of it that the rows of all CTAs see together."""
        c = self.config
        if isinstance(operands, SpanOperands):
            n = tile.n._replace(box_inner=c.cluster * tile.n.box_inner)
            shared = replace(tile, n=n, inner0=tile.inner0 - cta.rank * tile.n.box_inner)
            return open_span(operands, shared, c.tile_n, prefetch_span(operands, shared, c.cluster * c.tile_m))
        return open_selection(operands, tile, c.tile_n, 1)

    @cute.jit
    def unpack_tiles(self, cta: Cta, opened: tuple, fills0: Int32, thread: Int32):
        """This CTA's columns of all tiles of keys."""
        c = self.config
        given = (c, cta.bar.keys, cta.smem.keys.iterator.toint(), opened, fills0, thread)
        if cta.rank == 0:
            unpack_tiles(*given, c.slabs_of(0))
        elif cutlass.const_expr(c.cluster == 2):
            unpack_tiles(*given, c.slabs_of(1))

    @cute.jit
    def load_tiles(self, cta: Cta, source: tuple, opened: Any, tile: RowTile, fills0: Int32):
        """This CTA's columns of the tiles of a span; the leading CTA expects both CTAs' bytes."""
        c = self.config
        tma, array, _ = source
        gmem, smem = tma_tiles(
            tma, tile.keys(array, opened.lo, c.tile_n, c.columns_k)[None, None, None, cta.rank], cta.smem.keys
        )
        for t in cutlass.range(opened.tiles, unroll=1):
            state = cta.bar.keys.at(fills0 + t)
            state.wait_empty()
            self.expect_keys(cta, state)
            cute.copy(tma, gmem[None, t], smem[None, state.index], tma_bar_ptr=state.full)

    @cute.jit
    def gather_tiles(self, cta: Cta, atom: cute.CopyAtom, opened: Any, fills0: Int32, thread: Int32):
        """This CTA's columns of the tiles of a list, of which each lane has a key; it reads entries a tile ahead."""
        c = self.config
        entry = opened.read(thread)
        keys = cta.smem.keys.iterator.toint() + thread // WARP * (WARP * ROW_BYTES)
        for t in cutlass.range(opened.tiles, unroll=1):
            position, row = t * c.tile_n + thread, Int32(-1)
            if opened.is_present(position, entry):
                row = Int32(opened.keys) + entry
            entry = opened.read(position + c.tile_n)
            state = cta.bar.keys.at(fills0 + t)
            state.wait_empty()
            if thread < WARP:
                self.expect_keys(cta, state)
            for first in cutlass.range(0, WARP, TOGETHER, unroll=1):
                rows = tuple(cute.arch.shuffle_sync(row, first + i) for i in range(TOGETHER))
                place = keys + state.index * c.stage_bytes + first * ROW_BYTES
                with cute.arch.elect_one():
                    for slab in cutlass.range_constexpr(c.columns_k // SLAB):
                        column = cta.rank * c.columns_k + slab * SLAB
                        gather_rows(atom, place + c.slab_of(slab) * c.slab_bytes, column, rows, state.full, c.cluster)

    @cute.jit
    def expect_keys(self, cta: Cta, state: PipelineState):
        if cta.rank == 0:
            with cute.arch.elect_one():
                state.expect_full(self.config.cluster * self.config.stage_bytes)

    # ---- products

    @cute.jit
    def multiply(self, cta: Cta, operands: tuple):
        """One warp, one lane of which issues the products of every tile of rows, for both CTAs of a pair.

        Scores run ahead of P V, and may be of the next tiles of rows. Where there is room for the keys of two tiles
        ahead, both are issued by turns when P is there, so that shared memory is read evenly: scores leave more of its
        time to others.
        """
        c, bar = self.config, cta.bar
        fill, done = Int32(0), Int32(0)  # tiles of keys with scores, and with P V
        adds = Int32(0)  # a bit for each tile with scores, the last one's lowest: its P V adds to O
        finished, before = Int32(0), Int32(0)  # tiles of rows with P V; tiles of keys of the last one
        for wave in cutlass.range(self.scheduler(cta.n).waves, unroll=1):
            tiles = self.tiles_of(cta, operands, wave)
            if cta.rank == 0:
                # The warps that bring Q of these rows have to take O of those before the last away.
                for _ in cutlass.range(fill - done - cutlass.min(before, c.tiles_ahead), unroll=1):
                    finished = self.issue(cta, fill, done, adds, finished, False, True)
                    done = done + 1
                before = tiles
                wait_for(bar.q_full, wave)
                for t in cutlass.range(tiles, unroll=1):
                    left = fill - done == c.tiles_ahead
                    if cutlass.const_expr(c.tiles_ahead == 1):
                        self.issue(cta, fill, done, adds, finished, True, False)
                        if left:
                            finished = self.issue(cta, fill, done, adds, finished, False, True)
                    elif left:
                        finished = self.issue(cta, fill, done, adds, finished, True, True)
                    else:
                        self.issue(cta, fill, done, adds, finished, True, False)
                    fill, done, adds = fill + 1, done + Int32(left), adds << 1 | Int32(t > 0)
                commit(bar.q_empty, c.cluster)
            elif cutlass.const_expr(c.unpacks):
                for t in cutlass.range(tiles, unroll=1):
                    self.tell_of_keys(cta, fill + t)
                fill, done = fill + tiles, done + tiles
        for _ in cutlass.range(fill - done, unroll=1):
            finished = self.issue(cta, fill, done, adds, finished, False, True)
            done = done + 1

    @cute.jit
    def tell_of_keys(self, cta: Cta, fill: Int32):
        """In the CTA that does not lead: its columns of a tile are unpacked."""
        state = cta.bar.keys.at(fill)
        state.wait_full()
        cute.arch.fence_proxy("async.shared", space="cta")
        self.hand_over(cta.bar.peer_full + state.index)

    @cute.jit
    def tiles_of(self, cta: Cta, operands: tuple, wave: Int32) -> Int32:
        """The tiles of keys of a tile of rows."""
        info = cta.bar.info.at(wave)
        info.wait_full()
        tile = RowTile.read(cta.smem.info[None, 0, info.index], cta.n)
        tiles = total_tiles(self.reopen(cta, operands, tile, info.index))
        self.arrive(info.empty)
        return tiles

    def reopen(self, cta: Cta, operands: tuple, tile: PlacedTile, slot: Int32) -> tuple:
        c, info = self.config, cta.smem.info
        return tuple(
            read_span(x, tile, c.tile_n, info[None, 1 + i, slot])
            if isinstance(x, SpanOperands)
            else read_selection(x, tile, c.tile_n, 1, info[None, 1 + i, slot])
            for i, x in enumerate(operands)
        )

    @cute.jit
    def issue(
        self,
        cta: Cta,
        fill: Int32,
        done: Int32,
        adds: Int32,
        finished: Int32,
        scores: cutlass.Constexpr,
        output: cutlass.Constexpr,
    ) -> Int32:
        """Issues both parts of S <- Q K' of the ring's tile number `fill`, or O (+)= P V of `done`, or both.

        The first P V of a tile of rows does not add, and waits until O of those before is read. Returns how many tiles
        of rows that are with this one.
        """
        c, bar, smem = self.config, cta.bar, cta.smem
        keys, buffer = bar.keys.at(fill), fill % BUFFERS
        values, p = bar.keys.at(done), bar.p.at(done)
        adds = adds >> (fill - 1 - done) & 1 == 1
        if cutlass.const_expr(output):
            if not adds:
                if finished > 0:
                    wait_for(bar.o_empty, finished - 1)
                finished = finished + 1
            p.wait_full()
        if cutlass.const_expr(scores):
            keys.wait_full()  # and the last scores of this buffer are read: the warp has waited for their P
            if cutlass.const_expr(c.unpacks):
                cute.arch.fence_proxy("async.shared", space="cta")
                if cutlass.const_expr(c.cluster == 2):
                    cute.arch.mbarrier_wait(bar.peer_full + keys.index, keys.phase)
        after_thread_sync()
        ring, tmem = smem.keys.iterator.toint(), cta.tmem.toint()
        steps = c.columns_per_lane // K_STEP  # products of scores; those of P V are fewer
        turn = steps // (c.tile_n // K_STEP)
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(steps):
                if cutlass.const_expr(scores):
                    slab, column = divmod(step, SLAB // K_STEP)
                    k = ring + keys.index * c.stage_bytes + slab * c.slabs_together * c.slab_bytes
                    multiply(
                        tmem + c.scores_column + buffer * c.tile_n,
                        tmem + c.q_column + step * (K_STEP // 2),
                        slab_descriptor(k + column * 2 * K_STEP, 16),
                        instruction(self.dtype, c.cluster * c.tile_m, RAILS * c.tile_n, False),
                        step > 0,
                        c.cluster,
                    )
                if cutlass.const_expr(output and step % turn == 0):
                    rows = step // turn
                    for half, kept in enumerate((Collector.FILL, Collector.LASTUSE)):
                        v = ring + values.index * c.stage_bytes + half * c.half_bytes + rows * K_STEP * ROW_BYTES
                        multiply(
                            tmem + half * (c.columns_per_lane // 2),
                            slab_descriptor(smem.p.iterator.toint() + p.index * c.p_bytes + rows * 2 * K_STEP, 16),
                            slab_descriptor(v, c.slabs_together * c.slab_bytes),
                            instruction(self.dtype, c.cluster * c.tile_m, c.columns_per_lane, True),
                            True if rows else adds,
                            c.cluster,
                            kept,
                        )
        if cutlass.const_expr(scores):
            commit(bar.s_full + buffer, c.cluster)
        if cutlass.const_expr(output):
            commit(values.empty, c.cluster)
            commit(p.empty, c.cluster)
        return finished

    # ---- softmax

    @cute.jit
    def attend(self, cta: Cta, operands: tuple, results: RowResults, scale_log2: Float32):
        """Four warps, in which two threads share a row, of every tile of rows of this CTA."""
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        w = Row.of(c, n, 0)
        fill = Int32(0)
        for wave in cutlass.range(self.scheduler(n).waves, unroll=1):
            info = bar.info.at(wave)
            info.wait_full()
            tile = RowTile.read(smem.info[None, 0, info.index], n)
            sources = self.reopen(cta, operands, tile, info.index)
            self.arrive(info.empty)
            exists, query, head = tile.place(w.boxed, 0)
            seen = tuple(seen_by_row(source, tile, w.boxed) for source in sources)
            sink = load(results.sink + cutlass.min(head, n.group * n.h_kv - 1))
            sink = sink if n.splits == 1 else -Float32.inf  # a partial result has no sink
            tiles = total_tiles(sources)

            measured, row_sum = -Float32.inf, Float32(0.0)  # from where P is measured; the sum of this thread's part
            scores = cute.make_rmem_tensor(c.keys_per_thread, Float32)
            p = cute.make_rmem_tensor(c.keys_per_thread // 2, Uint32)
            for t in cutlass.range(tiles, unroll=1):
                on_source(seen, t, prefetch)
                self.read_scores(cta, w, fill, scores)
                on_source(seen, t, mask, scores, w.part)
                row_max = self.of_both(cta, w, raise_max(measured, scores), cute.arch.fmax)
                rises = cute.arch.vote_any_sync((row_max - measured) * scale_log2 > RESCALED_ABOVE)
                factor = Float32(1.0)
                if rises:
                    factor = exp2(measured * scale_log2 - shift_of(row_max, scale_log2))
                    measured = row_max
                shift = shift_of(measured, scale_log2)
                row_sum = exponentiate(row_sum * factor, shift, scale_log2, scores, p, self.dtype)
                if rises & (t > 0):
                    bar.p.at(fill + 1).wait_empty()  # the last P V
                    after_thread_sync()
                    scale_lanes(cta.tmem, c.columns_per_lane, factor, w.thread)
                state = bar.p.at(fill)
                state.wait_empty()
                self.write_p(cta, w, state.index, p)
                on_source(seen, t, self.clear_values, cta, w, fill)
                self.hand_over(state.full)
                fill = fill + 1

            self.meet_other(w)  # it has read this thread's last maximum
            row_sum = self.of_both(cta, w, row_sum, lambda a, b: a + b)
            factor, lse = Float32(0.0), -Float32.inf
            if exists & (row_sum != 0.0):
                shift = shift_of(measured, scale_log2)
                factor = 1.0 / (row_sum + exp2(sink * LOG2_E - shift))
                lse = (cute.math.log2(row_sum, fastmath=True) + measured * scale_log2) * LN_2
            finished = bar.factor.at(wave)
            finished.wait_empty()
            if w.part == 0:
                if exists:
                    store(results.lse + tile.row_index(query, head), lse)
                smem.factor[w.row] = factor
            if w.thread == 0:
                store(smem.tiles, tiles)
            self.arrive(finished.full)
        # Nothing may arrive in the SMEM of a CTA that has ended.
        for i in cutlass.range_constexpr(BUFFERS):
            bar.p.at(fill + i).wait_empty()

    @cute.jit
    def read_scores(self, cta: Cta, w: Row, fill: Int32, scores: cute.Tensor):
        """scores <- those of this thread's part of the tile's keys: each thread of a row gives the other one its rail's
        share of the rest."""
        c = self.config
        buffer = fill % BUFFERS
        cute.arch.mbarrier_wait(cta.bar.s_full + buffer, fill // BUFFERS & 1)
        after_thread_sync()
        keys = cute.size(scores)
        base = cta.tmem + (c.scores_column + buffer * c.tile_n)
        given = cute.make_rmem_tensor(keys, Float32)
        begin_load(base + (1 - w.part) * keys, given, w.thread)
        begin_load(base + w.part * keys, scores, w.thread)
        cute.arch.fence_view_async_tmem_load()
        here = cta.smem.exchange.toint() + w.thread * 16
        other = here + (1 - 2 * w.part) * (c.tile_m * 16)
        for i in cutlass.range_constexpr(keys // 4):
            store_shared_four(here + i * (WARPGROUP * 16), *(given[4 * i + j] for j in range(4)))
        self.meet_other(w)
        for i in cutlass.range_constexpr(keys // 4):
            for j, x in enumerate(load_shared_four(other + i * (WARPGROUP * 16))):
                scores[4 * i + j] = scores[4 * i + j] + x

    @cute.jit
    def meet_other(self, w: Row):
        """Meets the warp that has the other halves of this one's rows."""
        barrier = OF_ROWS + cute.arch.make_warp_uniform(w.thread // WARP % 2)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARP)

    @cute.jit
    def of_both(self, cta: Cta, w: Row, x: Float32, joined: cutlass.Constexpr) -> Float32:
        """Returns what both threads of a row have of something, joined."""
        c = self.config
        cta.smem.of_thread[w.thread] = x
        self.meet_other(w)
        return joined(x, cta.smem.of_thread[w.thread + (1 - 2 * w.part) * c.tile_m])

    @cute.jit
    def write_p(self, cta: Cta, w: Row, buffer: Int32, p: cute.Tensor):
        row = cta.smem.p.iterator.toint() + buffer * self.config.p_bytes + w.row * ROW_BYTES
        for i in cutlass.range_constexpr(cute.size(p) // 4):
            chunk = w.part * (cute.size(p) // 4) + i
            store_shared_words(row + (chunk ^ w.row % 8) * 16, tuple(p[4 * i + j] for j in range(4)))
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_values(self, seen: Any, t: Int32, cta: Cta, w: Row, fill: Int32):
        """Zeroes the rows of V's tile t that no query sees; gathered tiles have none."""
        if cutlass.const_expr(isinstance(seen, RowSpan)):  # noqa: SIM102, at compile time
            if seen.source.needs_clearing(t):
                tile = cta.smem.keys[None, None, cta.bar.keys.at(fill).index]
                zero_rows(tile, seen.source.unseen_from(t), w.thread, WARPGROUP)

    # ---- rows

    @cute.jit
    def move_rows(self, cta: Cta, q: cute.Pointer, o: cute.Pointer, parts: cute.Pointer):
        """Four warps: Q of a tile of rows into TMEM, then O of the one before into memory, or of its split."""
        c, bar, n = self.config, cta.bar, cta.n
        w, scheduler, fill = Row.of(c, n, SOFTMAX_WARPS), self.scheduler(n), Int32(0)
        values = cute.make_rmem_tensor(c.columns_per_lane // 2, Uint32)
        for wave in cutlass.range(scheduler.waves + 1, unroll=1):
            if wave < scheduler.waves:
                exists, row = self.row_of(w, scheduler.tile(wave))
                values.fill(0)
                if exists:
                    here = cute.recast_ptr(q + (row * c.d + w.part * c.columns_per_lane), dtype=Uint32).align(32)
                    cute.autovec_copy(cute.make_tensor(here, values.layout), values)
                if wave > 0:
                    wait_for(bar.q_empty, wave - 1)
                    after_thread_sync()
                store_lanes(cta.tmem + c.q_column, values, w.thread)
                self.hand_over(bar.q_full)
            if wave > 0:
                tile = scheduler.tile(wave - 1)
                exists, row = self.row_of(w, tile)
                factor, tiles = self.take_results(cta, w, wave - 1)
                fill = fill + tiles
                if tiles > 0:
                    bar.p.at(fill + 1).wait_empty()  # the last P V
                    after_thread_sync()
                if n.splits == 1:
                    self.write_o(cta, w, tiles, factor, exists, o + row * c.d)
                elif tiles > 0:  # otherwise lse says that there is no part
                    self.write_o(cta, w, tiles, factor, exists, parts + (row * n.splits + tile.split) * c.d)
                if tiles > 0:
                    self.hand_over(bar.o_empty)
        wait_for(bar.q_empty, scheduler.waves - 1)

    def row_of(self, w: Row, tile: RowTile) -> tuple:
        """(exists, its index among all rows of q)"""
        n = tile.n
        exists, query, head = PlacedTile(**vars(tile), query0=tile.first_query).place(w.boxed, 0)
        return exists, tile.at_query(Int64(head), query, n.group * n.h_kv)

    def take_results(self, cta: Cta, w: Row, wave: Int32) -> tuple:
        """(what O of this row is multiplied with, how many tiles of keys the rows have seen)"""
        finished = cta.bar.factor.at(wave)
        finished.wait_full()
        found = cta.smem.factor[w.row], cute.arch.make_warp_uniform(load(cta.smem.tiles))
        self.arrive(finished.empty)
        return found

    @cute.jit
    def write_o(self, cta: Cta, w: Row, tiles: Int32, factor: Float32, exists, target: cute.Pointer):
        """This row of the target <- factor O, rounded to its type; zeros where the rows have seen no tile of keys."""
        c, dtype = self.config, target.dtype
        chunk = cute.make_rmem_tensor(CHUNK, Float32)
        words = cute.recast_tensor(chunk, Uint32)
        if cutlass.const_expr(dtype is not Float32):
            words = cute.make_rmem_tensor(CHUNK // 2, Uint32)
        for i in cutlass.range(c.columns_per_lane // CHUNK, unroll=1):
            chunk.fill(0.0)
            if tiles > 0:
                load_lanes(cta.tmem + i * CHUNK, chunk, w.thread)
            for j in cutlass.range_constexpr(cute.size(words)):
                if cutlass.const_expr(dtype is Float32):
                    chunk[j] = chunk[j] * factor
                else:
                    words[j] = round_pair(chunk[2 * j] * factor, chunk[2 * j + 1] * factor, dtype)
            if exists:
                place = cute.recast_ptr(target + c.column_of(w.part, i * CHUNK), dtype=Uint32).align(32)
                cute.autovec_copy(words, cute.make_tensor(place, words.layout))


def compile(variant: Forward, out_dir: Path) -> Compiled:
    gathers_for_few = variant.gathers and variant.max_heads <= 64
    alone = gathers_for_few or variant.packing == "v4_fp4"  # whose two layouts need more registers than a pair has
    config = Config(variant.dtype, variant.sources, 1 if alone else 2)
    return MlaFwdSm100(config).compile(variant, out_dir, cluster=config.cluster)
