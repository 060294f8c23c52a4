"""The gradient of attention for Blackwell over a latent that is both K and V, head dimension 512.

With P = exp(S - lse), the factor f that the sink leaves of a row (query, head), and its delta:

    dS = scale P * (f dO K' - delta)        dQ = dS K        dKV += dS' Q + (f P)' dO

A pair of CTAs takes 128 rows and their keys, 64 at a time, and shares out the columns: each CTA loads half of the
columns of Q, dO and every key, once. Over these it has a part of S and of dP for all rows. For the 64 rows that are its
peer's it sends the parts there, and for its own 64 rows it adds what the peer sends, finishes P and dS, and sends them
back. Then dQ and dKV in its columns are wholly its own. TMEM holds, in 128 lanes x 512 columns of 32 bits:

    lane: a row       dQ  256 columns,   S  64 keys,   dP  64 keys,   half of Q  128 columns of 16 bits
    lane: a column    dKV'  64 keys, for one half of the CTA's columns and then the other

    warps 0-7     | S dP: half give away, half finish P dS |         ...      a thread has a row, for 32 keys
    warps 8-11                 | dKV0 of the last tile | dKV1 |      ...      from TMEM to memory, by reductions
    warps 12, 13  Q dO K0 | K1 ...                                            by cp.async
    warp 14       S dP | dKV1 of the last tile | dQ dKV0 | S dP ...           tcgen05.mma, all in TMEM

K has one stage: it is read for S and dP and last for dQ, and the next tile's comes in under the first half of dKV. The
second half's products run while P and dS of the next tile are made. So a half of dKV has been taken out of TMEM long
before the other one comes. Half of Q is in TMEM too, where the scores' products need no shared memory for it.

The loader lists every tile of keys in SMEM: where each key is, or that it is absent. Zeros replace an absent key, its
P is 0, and nothing is added for it. Zeros also replace rows that do not exist, or that see no key.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import tcgen05

from kernels.abi import MlaBackward
from kernels.aot import Compiled
from kernels.lib.blackwell import BlackwellKernel, Cta
from kernels.lib.cluster import Peer
from kernels.lib.launch import WARPGROUP
from kernels.lib.mla_backward import MlaBackwardKernel, RowOperands, Source
from kernels.lib.pipeline import wait_for
from kernels.lib.ptx import copy_or_zero, load_shared_four, store_shared_words
from kernels.lib.rows import WARP, BoxedRows, Extents, PlacedTile, RowTile, load
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection, with_keys
from kernels.lib.softmax import LOG2_E, exp2
from kernels.lib.spans import Span, span_of
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.tcgen05 import (
    A_MN_MAJOR,
    K_STEP,
    LANES,
    ROW_BYTES,
    after_thread_sync,
    commit,
    instruction,
    load_lanes,
    multiply,
    slab_descriptor,
    store_lanes,
)
from kernels.lib.wgmma import SLAB, round_pair

from .config import ADDING_WARPS, HALVES, LOADER_WARPS, SCORE_WARPS, Config
from .smem import allocate

LOADERS = WARP * LOADER_WARPS  # threads
STORED = 32  # columns of dQ that a thread stores at a time
PARTS = tuple((half, which) for half in range(HALVES) for which in range(2))  # of dKV: of P, and of dS
UNDER_KEYS = 2  # parts that run while keys come in; the others while P and dS of the next tile are made
TOGETHER = 16  # keys that a warp adds to one after the other, once it knows where they are


@dataclass(frozen=True)
class Row:
    """The row of a thread that has scores, and which of a tile's keys."""

    thread: Int32  # its lane of TMEM: the row among both CTAs'
    part: Int32  # of the keys
    place: Int32  # among the threads of the CTA that finishes the row
    owner: Int32  # its rank
    boxed: BoxedRows

    @staticmethod
    def of(c: Config, n: Extents) -> "Row":
        thread = cute.arch.thread_idx()[0]
        part, row = cute.arch.make_warp_uniform(thread // c.rows), thread % c.tile_m
        owner = cute.arch.make_warp_uniform(thread % c.rows // c.tile_m)
        return Row(thread % c.rows, part, part * c.tile_m + row, owner, BoxedRows.at(n, [row]))


@dataclass(frozen=True)
class Numbers:
    """The numbers that a row's P and dS are made with; a row that sees nothing gets 0 for both."""

    lse: Float32  # in units of log2
    factor: Float32  # the sink's
    scaled: Float32  # factor, times the scale
    delta: Float32  # times the scale
    spans: tuple[tuple[Int32, Int32], ...]  # where rows see different keys


class MlaBwdSm100(BlackwellKernel, MlaBackwardKernel):
    symbol = "mla_bwd_sm100"
    paired = False

    @cute.kernel
    def kernel(self, rows: RowOperands, sources: tuple, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = self.start(warp, *allocate(c, self.dtype), n)

        if warp < SCORE_WARPS:
            self.score(cta, rows, sources)
        elif warp < SCORE_WARPS + ADDING_WARPS:
            self.add(cta, sources)
        elif warp < SCORE_WARPS + ADDING_WARPS + LOADER_WARPS:
            self.load(cta, rows, sources)
        else:
            self.multiply(cta)

        self.end(warp, cta)

    # ---- loading

    @cute.jit
    def load(self, cta: Cta, rows: RowOperands, sources: tuple):
        """For every tile of rows of this CTA: opens the sources, and loads its keys, Q and dO."""
        c, bar = self.config, cta.bar
        thread = cute.arch.thread_idx()[0] - WARP * (SCORE_WARPS + ADDING_WARPS)
        scheduler, fills, turns = self.tile_scheduler(cta.n), Int32(0), Int32(0)
        wanted = cute.make_rmem_tensor(c.tile_n // (LOADERS // LANES_A_ROW), Int32)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = tuple(self.open(kind, source, tile) for kind, source in zip(c.sources, sources, strict=True))
            lists = tuple(self.columns_of(cta, x, source, tile) for x, source in zip(opened, sources, strict=True))
            tiles = total_tiles(lists)
            on_source(lists, 0, Selection.prefetch_indices, wanted, thread, LOADERS)
            if thread < WARP:
                info = bar.info.at(wave)
                info.wait_empty()
                with cute.arch.elect_one():
                    tile.publish(cta.smem.info[None, 0, info.index])
                    for i, (found, keys) in enumerate(zip(opened, lists, strict=True)):
                        slot = cta.smem.info[None, 1 + i, info.index]
                        slot[0] = keys.tiles
                        if cutlass.const_expr(isinstance(found, Span)):
                            slot[1], slot[2] = found.lo_all, found.hi_all
                    info.arrive_full()
            for t in cutlass.range(tiles, unroll=1):
                on_source(lists, t, Selection.mark_absent, wanted, thread, LOADERS)
                self.gather(cta, with_keys(lists, t), wanted, fills + t, thread)
                on_source(lists, t + 1, Selection.prefetch_indices, wanted, thread, LOADERS)
                if t == 0:
                    self.load_rows(cta, rows, tile, turns, thread)
            fills, turns = fills + tiles, turns + Int32(tiles > 0)
        # Nothing may arrive in the SMEM of a CTA that has ended.
        bar.keys(0).at(fills).wait_empty()
        bar.rows(0).at(turns).wait_empty()

    def columns_of(self, cta: Cta, opened: Any, source: Source, tile: RowTile) -> Selection:
        """An opened source as something to gather this CTA's columns from."""
        keys = self.listed_keys(opened, source, tile)
        return replace(keys, keys=keys.keys + cta.rank * self.config.columns)

    @cute.jit
    def gather(self, cta: Cta, keys: Selection, wanted: cute.Tensor, fill: Int32, thread: Int32):
        """Gathers the CTA's tile of keys of this number, half by half, and lists where its keys are."""
        c = self.config
        slabs = c.half // SLAB
        cta.bar.keys(0).at(fill).wait_empty()
        listed = cta.bar.listed.at(fill)  # the list three tiles before is read: dQ of the last tile is made
        if thread % LANES_A_ROW == 0:
            for i in cutlass.range_constexpr(cute.size(wanted)):
                row = i * (LOADERS // LANES_A_ROW) + thread // LANES_A_ROW
                cta.smem.keys[row, listed.index] = wanted[i]
        listed.arrive_full()
        for half in cutlass.range_constexpr(HALVES):
            keys.gather(cta.smem.k, wanted, thread, range(half * slabs, (half + 1) * slabs), LOADERS)
            cta.bar.keys(half).at(fill).copy_full()

    @cute.jit
    def load_rows(self, cta: Cta, rows: RowOperands, tile: RowTile, turn: Int32, thread: Int32):
        """Loads Q and dO of both CTAs' rows, with zeros for a row that sees nothing."""
        c = self.config
        at_once, row0, chunk = LOADERS // LANES_A_ROW, thread // LANES_A_ROW, thread % LANES_A_ROW
        count = c.tile_m // at_once
        boxed = BoxedRows.at(tile.n, [row0 + i * at_once for i in range(count)])
        offsets = cute.make_rmem_tensor(c.cluster * count, Int64)
        sizes = cute.make_rmem_tensor(c.cluster * count, Int32)
        for owner in cutlass.range_constexpr(c.cluster):
            placed = self.rows_of(cta, tile, Int32(owner))
            for i in cutlass.range_constexpr(count):
                exists, query, head = placed.place(boxed, i)
                row = placed.row_index(query, head) * Int64(exists)
                sees = exists & (load(rows.lse + row) != -Float32.inf)
                offsets[owner * count + i] = row * c.d + cta.rank * c.columns + chunk * CHUNK
                sizes[owner * count + i] = Int32(sees) * 16
        cta.bar.rows(0).at(turn).wait_empty()
        offset0 = row0 * ROW_BYTES + (chunk ^ row0 % 8) * 16
        for which, source in enumerate((rows.q, rows.do)):
            target0 = cta.smem.rows[which].iterator.toint() + offset0
            for slab in range(c.columns // SLAB):
                for i in range(c.cluster * count):
                    place = target0 + slab * c.row_slab_bytes + i * at_once * ROW_BYTES
                    copy_or_zero(place, (source + (offsets[i] + slab * SLAB)).toint(), sizes[i])
            cta.bar.rows(which).at(turn).copy_full()

    def rows_of(self, cta: Cta, tile: RowTile, owner: Int32) -> PlacedTile:
        """The rows that a CTA of the pair finishes."""
        tile = replace(tile, inner0=tile.inner0 + (owner - cta.rank) * tile.n.box_inner)
        return PlacedTile(**vars(tile) | {"query0": tile.first_query})

    # ---- products

    @cute.jit
    def multiply(self, cta: Cta):
        """One warp, one lane of which issues the products of every tile of rows."""
        bar = cta.bar
        fill, turns = Int32(0), Int32(0)
        for wave in cutlass.range(self.tile_scheduler(cta.n).waves, unroll=1):
            info = bar.info.at(wave)
            info.wait_full()
            counts = self.counts(cta, info.index)
            self.hand_over(info.empty)
            tiles = sum(counts[1:], counts[0])
            for t in cutlass.range(tiles, unroll=1):
                self.issue_scores(cta, fill, t == 0, turns)
                if t > 0:
                    self.issue_dkv(cta, fill - 1, PARTS[UNDER_KEYS:])
                self.issue_dq(cta, fill, t == 0)
                self.issue_dkv(cta, fill, PARTS[:UNDER_KEYS])
                fill = fill + 1
            if tiles > 0:
                self.issue_dkv(cta, fill - 1, PARTS[UNDER_KEYS:])
                commit(bar.rows_empty)
                commit(bar.dq_full)
                turns = turns + 1

    @cute.jit
    def issue_scores(self, cta: Cta, fill: Int32, first: cutlass.Boolean, turn: Int32):
        """S <- Q K', and dP <- dO K', over this CTA's columns."""
        c, bar, smem = self.config, cta.bar, cta.smem
        steps = c.half // K_STEP
        for which in cutlass.range_constexpr(2):
            if first:
                bar.rows(which).at(turn).wait_full()
                if cutlass.const_expr(which == 0):
                    wait_for(bar.q_full, turn)
            if cutlass.const_expr(which == 0):
                bar.scores(0).at(fill).wait_empty()
            for half in cutlass.range_constexpr(HALVES):
                if cutlass.const_expr(which == 0):
                    bar.keys(half).at(fill).wait_full()
                cute.arch.fence_proxy("async.shared", space="cta")  # the loader wrote through the generic proxy
                after_thread_sync()
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(steps):
                        slab, column = divmod(half * steps + i, SLAB // K_STEP)
                        row = smem.rows[which].iterator.toint() + slab * c.row_slab_bytes
                        left = slab_descriptor(row + column * 2 * K_STEP, 16)
                        if cutlass.const_expr(which + half == 0):
                            left = cta.tmem.toint() + c.q_column + i * (K_STEP // 2)
                        key = smem.k.iterator.toint() + slab * c.key_slab_bytes
                        multiply(
                            cta.tmem.toint() + (c.s_column, c.dp_column)[which],
                            left,
                            slab_descriptor(key + column * 2 * K_STEP, 16),
                            instruction(self.dtype, c.rows, c.tile_n, False),
                            half + i > 0,
                            cluster=1,
                            rows=LANES,
                        )
            commit(bar.scores_full + which)

    @cute.jit
    def issue_dq(self, cta: Cta, fill: Int32, first: cutlass.Boolean):
        """dQ (+)= dS K, in this CTA's columns; with Q came word that dQ of the rows before is read."""
        c, bar, smem = self.config, cta.bar, cta.smem
        for which in cutlass.range_constexpr(2):
            bar.p(which).at(fill).wait_full()
        cute.arch.fence_proxy("async.shared", space="cta")  # threads of both CTAs wrote through the generic proxy
        after_thread_sync()
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(c.tile_n // K_STEP):
                multiply(
                    cta.tmem.toint(),
                    slab_descriptor(smem.p[1].iterator.toint() + i * 2 * K_STEP, 16),
                    slab_descriptor(smem.k.iterator.toint() + i * K_STEP * ROW_BYTES, c.key_slab_bytes),
                    instruction(self.dtype, c.rows, c.columns, True),
                    True if i else not first,
                    cluster=1,
                    rows=LANES,
                )
        commit(bar.key_empty)

    @cute.jit
    def issue_dkv(self, cta: Cta, fill: Int32, parts: cutlass.Constexpr):
        """Parts of dKV' <- dO' P + Q' dS. With the last one that reads P, or dS, both CTAs hear when it is done."""
        c, bar, smem = self.config, cta.bar, cta.smem
        for half, which in parts:
            state = bar.dkv.at(HALVES * fill + half)
            if cutlass.const_expr(which == 0):
                state.wait_empty()
                after_thread_sync()
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.rows // K_STEP):
                    row = smem.rows[1 - which].iterator.toint() + half * (c.half // SLAB) * c.row_slab_bytes
                    multiply(
                        cta.tmem.toint() + c.dkv_column,
                        slab_descriptor(row + i * K_STEP * ROW_BYTES, c.row_slab_bytes),
                        slab_descriptor(smem.p[which].iterator.toint() + i * K_STEP * ROW_BYTES, 16),
                        instruction(self.dtype, c.half, c.tile_n, True) | A_MN_MAJOR,
                        which + i > 0,
                        cluster=1,
                        rows=LANES,
                    )
            if cutlass.const_expr(which == 1):
                commit(state.full)
            if cutlass.const_expr(half == HALVES - 1):
                with cute.arch.elect_one():
                    tcgen05.commit(bar.p(which).empty, 0b11, tcgen05.CtaGroup.ONE)

    def counts(self, cta: Cta, slot: Int32) -> tuple[Int32, ...]:
        """Returns the number of tiles of keys that a tile of rows has of each source."""
        return tuple(
            cute.arch.make_warp_uniform(cta.smem.info[0, 1 + i, slot]) for i in range(len(self.config.sources))
        )

    # ---- P and dS

    @cute.jit
    def score(self, cta: Cta, rows: RowOperands, sources: tuple):
        """Eight warps: from partial S and dP to P and dS, and in the end dQ to memory."""
        c, bar, n = self.config, cta.bar, cta.n
        w, peer = Row.of(c, n), Peer.of(bar.info.full)
        fill, turns = Int32(0), Int32(0)
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            info = bar.info.at(wave)
            info.wait_full()
            tile = self.rows_of(cta, RowTile.read(cta.smem.info[None, 0, info.index], n), w.owner)
            counts = self.counts(cta, info.index)
            seen_by_all = tuple(
                (cta.smem.info[1, 1 + i, info.index], cta.smem.info[2, 1 + i, info.index])
                for i in range(0 if c.gathers else len(c.sources))
            )
            self.hand_over(info.empty)
            exists, query, head = tile.place(w.boxed, 0)
            row = tile.row_index(query, head) * Int64(exists)
            numbers = self.numbers(rows, sources, tile, exists, query, row)
            tiles = sum(counts[1:], counts[0])
            if tiles > 0:
                self.copy_q(cta, w, turns)
            for t in cutlass.range(tiles, unroll=1):
                if w.owner == cta.rank:
                    self.finish(cta, w, peer, numbers, seen_by_all, t < counts[0], fill, rows.scale * LOG2_E)
                else:
                    self.give(cta, w, peer, fill)
                fill = fill + 1
            turns = self.store_dq(cta, w, rows, exists, row, tiles, turns)
        # Nothing may arrive in the SMEM of a CTA that has ended.
        for which in cutlass.range_constexpr(2):
            bar.p(which).at(fill).wait_empty()
        bar.given(0).at(fill).wait_empty()

    @cute.jit
    def numbers(
        self, rows: RowOperands, sources: tuple, tile: PlacedTile, exists: cutlass.Boolean, query: Int32, row: Int64
    ) -> Numbers:
        lse, factor, delta = (load(x + row) for x in (rows.lse, rows.sink_factor, rows.delta))
        spans = ()
        if cutlass.const_expr(not self.config.gathers):
            spans = tuple(span_of(tile, source.operands("span", False), query, exists) for source in sources)
        shift, of_p, of_ds = Float32.inf, Float32(0.0), Float32(0.0)
        if exists & (lse != -Float32.inf):
            shift, of_p, of_ds = lse * LOG2_E, factor, delta * rows.scale
        return Numbers(shift, of_p, of_p * rows.scale, of_ds, spans)

    @cute.jit
    def copy_q(self, cta: Cta, w: Row, turn: Int32):
        """The first half of Q into TMEM; the scores of the rows before are made, and their dQ is stored. Here a part is
        one of columns."""
        c, bar = self.config, cta.bar
        values, row = cute.make_rmem_tensor(SLAB // 2, Float32), w.thread
        bar.rows(0).at(turn).wait_full()
        first = cta.smem.rows[0].iterator.toint() + w.part * c.row_slab_bytes + row * ROW_BYTES
        for i in cutlass.range_constexpr(cute.size(values) // 4):
            for j, x in enumerate(load_shared_four(first + (i ^ row % 8) * 16)):
                values[4 * i + j] = x
        store_lanes(cta.tmem + (c.q_column + w.part * (SLAB // 2)), values, w.thread)
        self.hand_over(bar.q_full)

    @cute.jit
    def read_scores(self, cta: Cta, w: Row, which: cutlass.Constexpr, fill: Int32, values: cute.Tensor):
        """values <- this thread's part of S, or of dP, over this CTA's columns."""
        c = self.config
        cta.bar.scores(which).at(fill).wait_full()
        after_thread_sync()
        column = (c.s_column, c.dp_column)[which]
        load_lanes(cta.tmem + (column + w.part * c.keys_per_thread), values, w.thread)

    def place_given(self, cta: Cta, w: Row, which: int, i: int) -> Int32:
        """Returns the address of four of the numbers that a thread gives or is given, in SMEM of the row's owner."""
        return cta.smem.given.toint() + which * self.config.partial_bytes + i * (WARPGROUP * 16) + w.place * 16

    @cute.jit
    def give(self, cta: Cta, w: Row, peer: Peer, fill: Int32):
        """Sends this CTA's part of S and dP to the row's owner."""
        c, bar = self.config, cta.bar
        values = cute.make_rmem_tensor(c.keys_per_thread, Float32)
        words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Uint32), values.layout)
        for which in cutlass.range_constexpr(2):
            self.read_scores(cta, w, which, fill, values)
            given = bar.given(which).at(fill)
            given.wait_empty()
            for i in cutlass.range_constexpr(c.keys_per_thread // 4):
                peer.send(self.place_given(cta, w, which, i), tuple(words[4 * i + j] for j in range(4)), given.full)
        self.hand_over(bar.scores_empty)

    @cute.jit
    def finish(
        self,
        cta: Cta,
        w: Row,
        peer: Peer,
        numbers: Numbers,
        seen_by_all: tuple,
        of_first: cutlass.Boolean,
        fill: Int32,
        scale_log2: Float32,
    ):
        """P and dS of this thread's row, for both CTAs."""
        c, bar = self.config, cta.bar
        if w.place == 0:
            for which in cutlass.range_constexpr(2):
                bar.given(which).at(fill).expect_full(c.partial_bytes)
        listed = bar.listed.at(fill)
        listed.wait_full()
        s, dp = (cute.make_rmem_tensor(c.keys_per_thread, Float32) for _ in range(2))
        self.read_scores(cta, w, 0, fill, s)
        self.add_given(cta, w, 0, fill, s)
        if cutlass.const_expr(c.gathers):
            self.mask_absent(cta, w, listed.index, s)
        else:
            self.mask_unseen(cta, w, listed.index, numbers, seen_by_all, of_first, s)
        for i in cutlass.range_constexpr(c.keys_per_thread):
            s[i] = exp2(s[i] * scale_log2 - numbers.lse)
        rounded = cute.make_rmem_tensor(c.keys_per_thread // 2, Uint32)
        for i in cutlass.range_constexpr(cute.size(rounded)):
            rounded[i] = round_pair(*(s[2 * i + j] * numbers.factor for j in range(2)), self.dtype)
        self.write_finished(cta, w, peer, 0, fill, rounded)

        self.read_scores(cta, w, 1, fill, dp)
        self.hand_over(bar.scores_empty)
        self.add_given(cta, w, 1, fill, dp)
        cute.arch.sync_warp()
        peer.arrive(bar.given_empty)
        for i in cutlass.range_constexpr(c.keys_per_thread):
            dp[i] = s[i] * (dp[i] * numbers.scaled - numbers.delta)
        for i in cutlass.range_constexpr(cute.size(rounded)):
            rounded[i] = round_pair(dp[2 * i], dp[2 * i + 1], self.dtype)
        self.write_finished(cta, w, peer, 1, fill, rounded)

    @cute.jit
    def write_finished(self, cta: Cta, w: Row, peer: Peer, which: cutlass.Constexpr, fill: Int32, values: cute.Tensor):
        """Writes this thread's part of P, or of dS, to both CTAs."""
        c = self.config
        state, row = cta.bar.p(which).at(fill), w.place % c.tile_m
        first = cta.smem.p[which].iterator.toint() + cta.rank * c.finished_bytes + row * ROW_BYTES
        state.wait_empty()
        for i in cutlass.range_constexpr(cute.size(values) // 4):
            place = first + (w.part * (cute.size(values) // 4) + i ^ row % 8) * 16
            words = tuple(values[4 * i + j] for j in range(4))
            store_shared_words(place, words)
            peer.send(place, words, state.full)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if w.place < WARP:
                state.expect_full(c.finished_bytes)
            else:
                state.arrive_full()

    @cute.jit
    def add_given(self, cta: Cta, w: Row, which: cutlass.Constexpr, fill: Int32, values: cute.Tensor):
        """Adds the peer's part."""
        cta.bar.given(which).at(fill).wait_full()
        for i in cutlass.range_constexpr(cute.size(values) // 4):
            for j, x in enumerate(load_shared_four(self.place_given(cta, w, which, i))):
                values[4 * i + j] = values[4 * i + j] + x

    @cute.jit
    def mask_absent(self, cta: Cta, w: Row, slot: Int32, scores: cute.Tensor):
        """-inf for every absent key; a thread has those of a warp's word."""
        key = cta.smem.keys[w.part * WARP + cute.arch.lane_idx(), slot]
        absent = Uint32(cute.arch.vote_ballot_sync(key < 0))
        if absent != Uint32(0):
            for i in cutlass.range_constexpr(cute.size(scores)):
                if absent & Uint32(1 << i) != Uint32(0):
                    scores[i] = -Float32.inf

    @cute.jit
    def mask_unseen(
        self,
        cta: Cta,
        w: Row,
        slot: Int32,
        numbers: Numbers,
        seen_by_all: tuple,
        of_first: cutlass.Boolean,
        scores: cute.Tensor,
    ):
        """-inf for every key that the row does not see; keys of a tile follow one another."""
        c = self.config
        (start, stop), (lo, hi) = numbers.spans[-1], seen_by_all[-1]
        if cutlass.const_expr(len(numbers.spans) == 2):
            start, stop, lo, hi = (
                a if of_first else b
                for a, b in zip((*numbers.spans[0], *seen_by_all[0]), (start, stop, lo, hi), strict=True)
            )
        key0 = cta.smem.keys[0, slot]
        if (key0 < lo) | (key0 + c.tile_n > hi):
            column0 = key0 + w.part * c.keys_per_thread
            first, last = start - column0, stop - column0
            for i in cutlass.range_constexpr(cute.size(scores)):
                if (i < first) | (i >= last):
                    scores[i] = -Float32.inf

    @cute.jit
    def store_dq(
        self,
        cta: Cta,
        w: Row,
        rows: RowOperands,
        exists: cutlass.Boolean,
        row: Int64,
        tiles: Int32,
        turn: Int32,
    ) -> Int32:
        """dq <- dQ, rounded; without any key there is none. Returns how many tiles of rows had one."""
        c, bar = self.config, cta.bar
        if tiles > 0:
            wait_for(bar.dq_full, turn)
            after_thread_sync()
        values = cute.make_rmem_tensor(STORED, Float32)
        packed = cute.make_rmem_tensor(STORED // 2, Uint32)
        column0 = w.part * c.half
        for i in cutlass.range(c.half // STORED, unroll=1):
            values.fill(0.0)
            if tiles > 0:
                load_lanes(cta.tmem + (column0 + i * STORED), values, w.thread)
            for j in cutlass.range_constexpr(cute.size(packed)):
                packed[j] = round_pair(values[2 * j], values[2 * j + 1], self.dtype)
            if exists:
                place = rows.dq + (row * c.d + cta.rank * c.columns + column0 + i * STORED)
                place = cute.recast_ptr(place, dtype=Uint32).align(32)
                cute.autovec_copy(packed, cute.make_tensor(place, packed.layout))
        return turn + Int32(tiles > 0)

    # ---- dKV

    @cute.jit
    def add(self, cta: Cta, sources: tuple):
        """Four warps: dKV of every tile of keys from TMEM to memory; a lane has a column."""
        c, bar, smem, n = self.config, cta.bar, cta.smem, cta.n
        thread, fill = cute.arch.thread_idx()[0] % WARPGROUP, Int32(0)
        step = (Int32(1) if c.gathers else n.h_kv) * (c.d * 4)  # gathered keys have one head
        values, keys = cute.make_rmem_tensor(c.tile_n, Float32), cute.make_rmem_tensor(TOGETHER, Int32)
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            info = bar.info.at(wave)
            info.wait_full()
            tile, counts = RowTile.read(smem.info[None, 0, info.index], n), self.counts(cta, info.index)
            self.hand_over(info.empty)
            firsts = tuple(
                (x.dkv + (Int64(tile.batch) * x.s_batch * n.h_kv + tile.kv_head) * c.d).toint() for x in sources
            )
            for t in cutlass.range(sum(counts[1:], counts[0]), unroll=1):
                first = firsts[-1]
                if cutlass.const_expr(len(sources) == 2):
                    first = firsts[0] if t < counts[0] else first
                listed = bar.listed.at(fill)
                listed.wait_full()
                lists = tuple(smem.keys[i * WARP + cute.arch.lane_idx(), listed.index] for i in range(c.tile_n // WARP))
                for half in cutlass.range_constexpr(HALVES):
                    state = bar.dkv.at(HALVES * fill + half)
                    state.wait_full()
                    after_thread_sync()
                    place = first + place_in_memory(cta.rank * c.columns + half * c.half + thread) * 4
                    load_lanes(cta.tmem + c.dkv_column, values, thread)
                    self.hand_over(state.empty)
                    for i in cutlass.range_constexpr(0, c.tile_n, TOGETHER):
                        for j in cutlass.range_constexpr(TOGETHER):
                            keys[j] = cute.arch.shuffle_sync(lists[i // WARP], i % WARP + j)
                        for j in cutlass.range_constexpr(TOGETHER):
                            if keys[j] >= 0:
                                add_one(place + Int64(keys[j]) * step, values[i + j])
                fill = fill + 1


def place_in_memory(column: Int32) -> Int32:
    """Maps a column of dKV to its place: the order of `jax_dsv4_fmha/_host/gradients.py`, as in Hopper's registers."""
    return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2


def add_one(address: Int64, value: Float32) -> None:
    place = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    cute.arch.red(place, value, op="add", dtype="f32", sem="relaxed", scope="gpu")


def compile(variant: MlaBackward, out_dir: Path) -> Compiled:
    config = Config(variant.dtype, variant.sources)
    return MlaBwdSm100(config).compile(variant, out_dir, cluster=config.cluster)
