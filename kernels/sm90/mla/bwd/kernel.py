"""The gradient of attention for Hopper over a latent that is both K and V, head dimension 512.

With P = exp(S - lse), the factor f that the sink leaves of a row (query, head), and its delta:

    dS = scale P * (f dO K' - delta)        dQ = dS K        dKV += dS' Q + (f P)' dO

A CTA keeps 64 rows of Q and dO in SMEM and takes the keys of the sources, 64 at a time, as the forward pass does.
dQ, 64 x 512 in fp32, stays in the registers of two warpgroups, 256 columns each. A tile's contribution to dKV goes out
to memory by reductions, 32 columns at a time (dkv.py). The roles share the products:

    producer    K of the next tile, gathered with cp.async as soon as both halves of dQ have read this one's;
                Q and dO of the next rows, as the last chunks of dKV free them
                    | k_full[piece of columns]                       ^ k_empty[half]
    left        S = Q K',  dP = dO K',  P and dS to SMEM,  dQ_l += dS K_l,  the last quarter of dKV while K comes in
                    | p_ds_full                                      ^ p_ds_empty
    right       dQ_r += dS K_r,  the rest of dKV: two chunks under way while the previous one goes out

So right's products and reductions of one tile run while left makes the P and dS of the next one. Both copy P' and dS'
from SMEM into registers at once, as the first operand of all their chunks, so one stage of them is enough.

A tile adds 128 KiB to dKV, some 4.6 us at the 28 bytes a ns and SM that reductions reach, and twice that where dKV does
not fit into L2; the tensor cores have 2.9 us of work. Where two tiles of rows have the same keys (heads of one query,
or neighbouring rows of a span), a cluster of two CTAs takes them. From each pair of right's chunks a CTA keeps one and
sends the other to its peer through distributed shared memory; to the one it keeps it adds what the peer sends.

Where RoPE's numbers follow those that are values, Q and K have a slab more. It takes 16 KiB, so chunks have no place
in SMEM: single CTAs add out of registers, or in fixed point through P's place. dQ's 64 columns more are 16 registers
on each side. For these left makes dP of half a tile's keys at a time, and right, which makes all chunks, reads dS' from
SMEM; so P and dS are written for the next tile when the last chunk of this one is made.

The producer lists every tile of keys in SMEM: where each key is, or that it is absent. Zeros replace an absent key, its
P is 0, and nothing is added for it. Zeros also replace rows that do not exist, or that see no key.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import MlaBackward
from kernels.aot import Compiled
from kernels.lib.cluster import CLUSTER, arrive, await_others
from kernels.lib.launch import WARPGROUP
from kernels.lib.mla_backward import MlaBackwardKernel, RowOperands, Source
from kernels.lib.pipeline import wait_for
from kernels.lib.ptx import arrive_if, copy_or_zero, keep
from kernels.lib.rows import BoxedRows, Extents, PlacedTile, RowTile, load, row_of
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection, mask_absent, with_keys
from kernels.lib.softmax import LOG2_E, ROWS
from kernels.lib.spans import Span, span_of
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.wgmma import (
    K_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    round_to,
    store_rows,
    tiled_mma,
)

from .bounds import MOST_OF_P, add_bounds
from .config import Config
from .dkv import Consecutive, Destination, KvGradient, place_of_absent, thread_again
from .dq import QGradient
from .p_ds import differentiate, differentiate_normed, exponentiate, find_absent, mask_span, part_like
from .prefetch import prefetch_sums
from .smem import LEFT, RIGHT, STAGES, Barriers, Shared
from .turn import AT_ONCE, BOTH_SIDES, SUM, add_squares, do_row, store_gradient, store_zeros, turn_rows, write_scales

LOADED = 2  # the number of a barrier: right has P of a tile in registers


class MlaBwdSm90(MlaBackwardKernel):
    @property
    def symbol(self) -> str:
        return "mla_bounds_sm90" if self.bounds else "mla_bwd_sm90"

    @property
    def turns(self) -> bool:
        return self.config.turns

    @property
    def bounds(self) -> bool:
        return self.config.bounds

    @cute.kernel
    def kernel(self, rows: RowOperands, sources: tuple, n: Extents):
        c = self.config
        if cutlass.const_expr(c.turns):
            n = n._replace(splits=Int32(1))  # as always; said here, it takes no register
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = Shared.allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise(c.consumers, 2 if c.chunks_of_left else 1)
            cute.arch.mbarrier_init_fence()
        arrive(c.cluster)
        await_others(c.cluster)

        if cutlass.const_expr(c.bounds):
            if warp < 4:
                self.produce(bar, smem, rows, sources, n)
            else:
                self.bound(bar, smem, rows, sources, n)
        elif warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            self.produce(bar, smem, rows, sources, n)
        else:
            if warp < 8:
                cute.arch.setmaxregister_increase(c.registers[1])
                self.left(bar, smem, rows, sources, n)
            else:
                cute.arch.setmaxregister_increase(c.registers[2])
                self.right(bar, smem, rows, sources, n)
        if cutlass.const_expr(c.cluster > 1):  # no CTA ends while its peer may still access it
            arrive(c.cluster)
            await_others(c.cluster)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """For every row tile of this CTA: loads its first keys, opens the sources, loads Q and dO, and the other
        keys.
        """
        c = self.config
        thread = cute.arch.thread_idx()[0]
        scheduler, before = self.tile_scheduler(n), Int32(0)
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = tuple(self.open(kind, source, tile) for kind, source in zip(c.sources, sources, strict=True))
            lists = tuple(self.listed_keys(x, source, tile) for x, source in zip(opened, sources, strict=True))
            tiles = total_tiles(lists)
            on_source(lists, 0, Selection.prefetch_indices, wanted, thread, WARPGROUP)
            for t in cutlass.range(cutlass.max(tiles, 1), unroll=1):
                if t < tiles:
                    on_source(lists, t, Selection.mark_absent, wanted, thread, WARPGROUP)
                    self.gather(bar, smem, with_keys(lists, t), wanted, sources, before + t, thread)
                    if cutlass.const_expr(c.prefetches):
                        prefetch_sums(sources, lists[0].tiles, tile, wanted, t, thread, 4 * c.key_words)
                    on_source(lists, t + 1, Selection.prefetch_indices, wanted, thread, WARPGROUP)
                if t == 0:
                    self.load_rows(bar, smem, rows, tile, opened, lists, wave, thread)
            before = before + tiles

    @cute.jit
    def gather(
        self,
        bar: Barriers,
        smem: Shared,
        keys: Selection,
        wanted: cute.Tensor,
        sources: tuple,
        k: Int32,
        thread: Int32,
    ):
        """Gathers the CTA's k-th tile of keys, piece by piece, and lists where its keys are."""
        c = self.config
        for piece in cutlass.range_constexpr(c.pieces):
            state = bar.k(piece).at(k)
            if cutlass.const_expr(piece % (c.pieces // 2) == 0):
                state.wait_empty()
            keys.gather(smem.k, wanted, thread, c.slabs(piece), WARPGROUP)
            state.copy_full()
        if cutlass.const_expr(c.consecutive):
            if thread == 0:
                smem.keys[0, k % STAGES] = wanted[0]
        elif thread % LANES_A_ROW == 0:
            absent = place_of_absent(sources, c.cluster) if c.deterministic else Int32(-1)
            for i in cutlass.range_constexpr(cute.size(wanted)):
                key = wanted[i]
                if cutlass.const_expr(c.deterministic):
                    key = key if key >= 0 else absent
                smem.keys[i * (WARPGROUP // LANES_A_ROW) + thread // LANES_A_ROW, k % STAGES] = key
        cute.arch.mbarrier_arrive(bar.listed)

    @cute.jit
    def load_rows(
        self,
        bar: Barriers,
        smem: Shared,
        rows: RowOperands,
        tile: RowTile,
        opened: tuple,
        lists: tuple,
        wave: Int32,
        thread: Int32,
    ):
        """Publishes a row tile, and loads its Q and dO, piece by piece, with zeros for a row that sees nothing."""
        c = self.config
        at_once, row0, chunk = WARPGROUP // LANES_A_ROW, thread // LANES_A_ROW, thread % LANES_A_ROW
        count = c.tile_m // at_once
        boxed = BoxedRows.at(tile.n, [row0 + i * at_once for i in range(count)])
        placed = PlacedTile(*(getattr(tile, name) for name in RowTile.__dataclass_fields__), tile.first_query)
        placed = replace(placed, n=self.again(tile.n))
        offsets = cute.make_rmem_tensor(count, Int64)
        of_do = cute.make_rmem_tensor(count, Int64) if c.turns or c.rope else offsets
        sizes, queries = cute.make_rmem_tensor(count, Int32), cute.make_rmem_tensor(count, Int32)
        for i in cutlass.range_constexpr(count):
            exists, query, head = placed.place(boxed, i)
            row = placed.row_index(query, head) * Int64(exists)
            sees = exists & (load(rows.lse + row) != -Float32.inf)
            offsets[i], sizes[i] = row * c.d + chunk * CHUNK, Int32(sees) * 16
            if cutlass.const_expr(c.turns):
                row = do_row(rows.turning, placed, query, head) * Int64(exists)
                of_do[i], queries[i] = row * c.d + chunk * CHUNK, cutlass.min(query, placed.n.s_q - 1)
            elif cutlass.const_expr(c.rope):
                of_do[i] = row * c.d_v + chunk * CHUNK
        offset0 = row0 * (SLAB * 2) + (chunk ^ row0 % 8) * 16
        for step, piece in enumerate(c.pieces_in_order):
            state = bar.q(piece).at(wave)
            state.wait_empty()
            if cutlass.const_expr(step == 0):  # noqa: SIM102, at compile time
                if thread == 0:
                    tile.publish(smem.info[None, 0, wave & 1])
                    for which, (found, keys) in enumerate(zip(opened, lists, strict=True)):
                        slot = smem.info[None, 1 + which, wave & 1]
                        slot[0] = keys.tiles
                        if cutlass.const_expr(isinstance(found, Span)):
                            slot[1], slot[2] = found.lo_all, found.hi_all
                            if cutlass.const_expr(c.consecutive):
                                slot[3] = found.hi
                    cute.arch.mbarrier_arrive(bar.published)
            for source, target, places, d in ((rows.q, smem.q, offsets, c.d), (rows.do, smem.do, of_do, c.d_v)):
                target0 = target.iterator.toint() + offset0
                slabs = c.slabs(piece, d)
                for slab in range(slabs.start, slabs.stop):
                    for i in range(count):
                        place = target0 + (slab * c.tile_m + i * at_once) * SLAB * 2
                        copy_or_zero(place, (source + (places[i] + slab * SLAB)).toint(), sizes[i])
            if cutlass.const_expr(c.turns and step == 0):  # the last slab's, and the first to come
                turn_rows(smem.q, smem.do, rows.turning, placed, queries, thread_again())
                state.arrive_full()
            else:
                state.copy_full()

    # ---- consumers

    def counts(self, smem: Shared, wave: Int32) -> tuple[Int32, ...]:
        """Returns the number of tiles of keys that a row tile has of each source."""
        return tuple(
            cute.arch.make_warp_uniform(smem.info[0, 1 + i, wave & 1]) for i in range(len(self.config.sources))
        )

    @cute.jit
    def left(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """Makes P and dS, and the left half of dQ."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        qk = tiled_mma(self.dtype, c.tile_n, K_MAJOR)
        a_q, a_do, b_k = operand_a(qk, smem.q), operand_a(qk, smem.do), operand_b(qk, smem.k)
        dok = tiled_mma(self.dtype, c.keys_of_dp, K_MAJOR)
        parts = [cute.local_tile(smem.k, (c.keys_of_dp, c.d), (i, 0)) for i in range(c.tile_n // c.keys_of_dp)]
        b_dp = [operand_b(dok, part) for part in parts]
        s, dp = accumulator(qk, c.tile_n), accumulator(dok, c.keys_of_dp)
        dq = QGradient.of(c, LEFT, smem.k, warpgroup.OperandSource.RMEM)
        p, ds = (register_operand(dq.mma[0], c.tile_n, self.dtype) for _ in range(2))
        dkv = KvGradient.of(c, LEFT, self.dtype, smem)
        numbers = cute.make_rmem_tensor((ROWS, 3), Float32)
        before = Int32(0)
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            wait_for(bar.published, wave)
            counts = self.counts(smem, wave)
            tiles = sum(counts[1:], counts[0])
            self.read_rows(smem, rows, sources, self.placed(smem, wave, n), thread)
            for t in cutlass.range(tiles, unroll=1):
                k, last = before + t, Int32(t == tiles - 1)
                if cutlass.const_expr(not c.turns):  # there are no registers for more of them
                    for r in cutlass.range_constexpr(ROWS):  # now: loads queue up with right's additions to memory
                        for i in cutlass.range_constexpr(3):
                            numbers[r, i] = smem.numbers[row_of(thread, r), i]
                self.start_scores(bar, wave, k, (qk, s, a_q, b_k), (dok, dp, a_do, b_dp[0]))
                wait_for(bar.listed, k)
                if cutlass.const_expr(c.chunks_of_left and not c.turns):
                    to = self.destination(dkv, smem, t < counts[0], k % STAGES, rows, sources, wave, n)
                warpgroup.wait_group(1)
                self.mask(s, smem, t, k % STAGES, wave & 1, thread)
                if cutlass.const_expr(not c.turns):
                    exponentiate(s, numbers, rows.scale * LOG2_E)
                    for i in cutlass.range_constexpr(len(b_dp)):
                        if cutlass.const_expr(i > 0):
                            multiply(dok, dp, a_do, b_dp[i], True)
                        warpgroup.wait_group(0)
                        if cutlass.const_expr(i == len(b_dp) - 1):
                            dkv.release_unread(bar, last)
                        of_p = part_like(dp, s, i)
                        differentiate(of_p, dp, numbers, rows.scale)
                        round_to(part_like(dp, p, i), of_p)
                        round_to(part_like(dp, ds, i), dp)
                else:
                    warpgroup.wait_group(0)
                    if t == 0:
                        cute.arch.barrier(barrier_id=BOTH_SIDES, number_of_threads=2 * WARPGROUP)
                    differentiate_normed(p, ds, s, dp, smem.numbers, rows.scale, thread)
                p_ds = bar.p_ds.at(k)
                p_ds.wait_empty()
                store_rows(qk, s, p, smem.p, thread)
                store_rows(qk, s, ds, smem.ds, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                p_ds.arrive_full()
                dq.add(ds, t == 0)
                if cutlass.const_expr(c.chunks_of_left == 0):
                    warpgroup.wait_group(0)
                    bar.release_k(LEFT)
                else:
                    p_ds.wait_full()
                    warpgroup.wait_group(0)
                    bar.release_k(LEFT)
                    if cutlass.const_expr(c.turns):
                        self.store_if_last(last, dq.acc[0], smem, rows, wave, n, LEFT)
                        dkv.release_unread(bar, last)
                        of_first = t < self.counts(smem, wave)[0]
                        to = self.destination(dkv, smem, of_first, k % STAGES, rows, sources, wave, n)
                    dkv.load(smem)
                    p_ds.arrive_empty()
                    dkv.start()
                    dkv.finish(bar, given(to), k, last)
            if tiles == 0:
                self.skip_rows(bar, wave)
                if cutlass.const_expr(c.turns):
                    store_zeros(rows, self.placed(smem, wave, n), thread_again(), LEFT, c)
                else:
                    dq.clear()
            if cutlass.const_expr(not c.turns):
                self.store(dq, smem, rows, wave, n)
            before = before + tiles

    def start_scores(self, bar: Barriers, wave: Int32, k: Int32, *products: tuple) -> None:
        """Starts S and dP, each a product, an accumulator and the operands of rows and keys, piece by piece as these
        come.
        """
        c = self.config
        for piece in range(c.pieces):
            bar.q(piece).at(wave).wait_full()
            bar.k(piece).at(k).wait_full()
            cute.arch.fence_proxy("async.shared", space="cta")  # the producer wrote through the generic proxy
            here = [slab * SLAB // 16 + i for slab in c.slabs(piece) for i in range(SLAB // 16)]
            for mma, acc, a, b in products:
                multiply(mma, acc, a, b, piece == 0, [i for i in here if i < cute.size(a, mode=[2])])

    @cute.jit
    def bound(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """Adds up, for every key, how much its rows may add to a number of dKV at most, and no gradients."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        qk = tiled_mma(self.dtype, c.tile_n, K_MAJOR)
        a_q, a_do, b_k = operand_a(qk, smem.q), operand_a(qk, smem.do), operand_b(qk, smem.k)
        s, dp = (accumulator(qk, c.tile_n) for _ in range(2))
        numbers = cute.make_rmem_tensor((ROWS, c.numbers), Float32)
        units = load(rows.resolution)
        before = Int32(0)
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            wait_for(bar.published, wave)
            counts = self.counts(smem, wave)
            tiles = sum(counts[1:], counts[0])
            self.read_rows(smem, rows, sources, self.placed(smem, wave, n), thread)
            for r in cutlass.range_constexpr(ROWS):
                for i in cutlass.range_constexpr(c.numbers):
                    numbers[r, i] = smem.numbers[row_of(thread, r), i]
            for t in cutlass.range(tiles, unroll=1):
                k, last = before + t, Int32(t == tiles - 1)
                self.start_scores(bar, wave, k, (qk, s, a_q, b_k), (qk, dp, a_do, b_k))
                wait_for(bar.listed, k)
                for half in cutlass.range_constexpr(2):
                    warpgroup.wait_group(c.pieces * (1 - half))
                    bar.release_k(half)
                for piece in cutlass.range_constexpr(c.pieces):
                    arrive_if(bar.q(piece).empty, last)
                self.mask(s, smem, t, k % STAGES, wave & 1, thread)
                exponentiate(s, numbers, rows.scale * LOG2_E)
                bound0, _, _ = self.find_gradient(smem, t < counts[0], rows, sources, wave, n)
                heads = Int32(1) if c.gathers else n.h_kv
                add_bounds(s, dp, numbers, rows.scale, units, bound0, heads, smem.keys[None, k % STAGES])
            if tiles == 0:
                self.skip_rows(bar, wave)
            before = before + tiles

    @cute.jit
    def mask(self, scores: cute.Tensor, smem: Shared, t: Int32, stage: Int32, parity: Int32, thread: Int32):
        if cutlass.const_expr(self.config.gathers):
            mask_absent(scores, find_absent(smem.keys[None, stage]))
        else:
            self.mask_rows(scores, smem, t, stage, parity, thread)

    @cute.jit
    def mask_rows(self, scores: cute.Tensor, smem: Shared, t: Int32, stage: Int32, parity: Int32, thread: Int32):
        key0 = smem.keys[0, stage]
        if cutlass.const_expr(self.config.spans == 1) or t < smem.info[0, 1, parity]:
            mask_span(scores, smem.spans[None, None, 0], smem.info[None, 1, parity], key0, thread)
        else:
            mask_span(scores, smem.spans[None, None, 1], smem.info[None, 2, parity], key0, thread)

    @cute.jit
    def read_rows(self, smem: Shared, rows: RowOperands, sources: tuple, tile: PlacedTile, thread: Int32):
        """Writes the numbers of the tile's rows to SMEM; a row that sees nothing gets P = 0 and dS = 0."""
        boxed = BoxedRows.of(tile.n, 0, thread, self.config.gathers)
        cute.arch.sync_warp()  # a warp has its own rows
        for r in cutlass.range_constexpr(ROWS):
            exists, query, head = tile.place(boxed, r)
            row = tile.row_index(query, head) * Int64(exists)
            lse, sink_factor, delta = (load(x + row) for x in (rows.lse, rows.sink_factor, rows.delta))
            most_of_p = load(rows.most_of_p + row) if self.config.bounds else None
            sees, i = exists & (lse != -Float32.inf), row_of(thread, r)
            bounds = [
                span_of(tile, source.operands("span", False), query, exists) for source in sources[: self.config.spans]
            ]
            if thread % 4 == 0:
                smem.numbers[i, 0] = lse * LOG2_E if sees else Float32.inf
                smem.numbers[i, 1] = sink_factor if sees else Float32(0.0)
                smem.numbers[i, 2] = delta * rows.scale if sees else Float32(0.0)
                if cutlass.const_expr(self.config.turns):
                    smem.numbers[i, SUM] = Float32(0.0)
                if cutlass.const_expr(self.config.bounds):
                    smem.numbers[i, MOST_OF_P] = most_of_p if sees else Float32(0.0)
                for which, (start, stop) in enumerate(bounds):
                    smem.spans[i, 0, which], smem.spans[i, 1, which] = start, stop
        cute.arch.sync_warp()

    @cute.jit
    def skip_rows(self, bar: Barriers, wave: Int32):
        """Skips a tile in which no row sees a key: its dQ is 0."""
        for piece in cutlass.range_constexpr(self.config.pieces):
            state = bar.q(piece).at(wave)
            state.wait_full()
            state.arrive_empty()

    @cute.jit
    def right(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """Makes the right half of dQ, and dKV."""
        c = self.config
        dq = QGradient.of(c, RIGHT, smem.k)
        a_ds = operand_a(dq.mma[0], smem.ds)
        dkv = KvGradient.of(c, RIGHT, self.dtype, smem)
        squares = cute.make_rmem_tensor(c.tile_m // AT_ONCE, Float32)
        before = Int32(0)

        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            wait_for(bar.published, wave)
            counts = self.counts(smem, wave)
            tiles = sum(counts[1:], counts[0])
            if tiles > 0:
                for piece in c.pieces_in_order:
                    bar.q(piece).at(wave).wait_full()
                    if cutlass.const_expr(c.turns):
                        add_squares(squares, smem.q, piece, piece == c.pieces_in_order[0], c, thread_again())
                if cutlass.const_expr(c.turns):
                    write_scales(squares, smem.numbers, rows.turning, c, thread_again())
                    cute.arch.barrier(barrier_id=BOTH_SIDES, number_of_threads=2 * WARPGROUP)
            for t in cutlass.range(tiles, unroll=1):
                k = before + t
                stage, last = k % STAGES, Int32(t == tiles - 1)
                wait_for(bar.listed, k)
                places = functools.partial(self.destination, dkv, smem, t < counts[0], stage, rows, sources, wave, n)
                if cutlass.const_expr(not (c.turns or c.finds_places_late)):
                    places = given(places())
                p_ds = bar.p_ds.at(k)
                p_ds.wait_full()
                dq.add(a_ds, t == 0)
                if cutlass.const_expr(c.turns):  # before, dq's way out has no registers for places in memory
                    self.store_if_last(last, dq.acc[0], smem, rows, wave, n, RIGHT)
                    of_first = t < self.counts(smem, wave)[0]
                    places = given(self.destination(dkv, smem, of_first, stage, rows, sources, wave, n))
                dkv.load(smem)
                if cutlass.const_expr(c.stages_over_p):
                    cute.arch.barrier(barrier_id=LOADED, number_of_threads=WARPGROUP)
                dkv.start()
                warpgroup.wait_group(dkv.groups(range(c.under_way)))
                bar.release_k(RIGHT)
                if cutlass.const_expr(not c.reads_ds):
                    p_ds.arrive_empty()
                dkv.release_unread(bar, last)
                dkv.finish(bar, places, k, last)
                if cutlass.const_expr(c.reads_ds):
                    p_ds.arrive_empty()
            if tiles == 0:
                self.skip_rows(bar, wave)
                if cutlass.const_expr(c.turns):
                    store_zeros(rows, self.placed(smem, wave, n), thread_again(), RIGHT, c)
                else:
                    dq.clear()
            if cutlass.const_expr(not c.turns):
                self.store(dq, smem, rows, wave, n)
            before = before + tiles

    def destination(
        self,
        dkv: KvGradient,
        smem: Shared,
        of_first: cutlass.Boolean,
        stage: Int32,
        rows: RowOperands,
        sources: tuple,
        wave: Int32,
        n: Extents,
    ) -> Destination | Consecutive:
        gradient, stop, units = self.find_gradient(smem, of_first, rows, sources, wave, n)
        return dkv.destination(gradient, smem.keys[None, stage], stop, n, units)

    @cute.jit
    def find_gradient(
        self, smem: Shared, of_first: cutlass.Boolean, rows: RowOperands, sources: tuple, wave: Int32, n: Extents
    ) -> tuple:
        """Finds where the gradient of this batch entry's and KV head's keys begins, in the source of a tile; where its
        span's keys end; and where the units of its keys begin, which lie one source after the other."""
        c = self.config
        base, stop, units = self.gradient_of(sources[-1], smem, wave, n), Int32(0), Int64(0)
        if cutlass.const_expr(c.consecutive):
            stop = cute.arch.make_warp_uniform(smem.info[3, len(sources), wave & 1])
        if cutlass.const_expr(c.deterministic):
            before = (sum(Int64(x.s_batch) for x in sources[:-1]) * n.pairs) if len(sources) > 1 else Int64(0)
            units = (rows.resolution + (before + self.first_key(sources[-1], smem, wave, n))).toint()
        if cutlass.const_expr(len(sources) == 2):  # noqa: SIM102, at compile time
            if of_first:
                base = self.gradient_of(sources[0], smem, wave, n)
                if cutlass.const_expr(c.consecutive):
                    stop = cute.arch.make_warp_uniform(smem.info[3, 1, wave & 1])
                if cutlass.const_expr(c.deterministic):
                    units = (rows.resolution + self.first_key(sources[0], smem, wave, n)).toint()
        return base, stop, units

    def gradient_of(self, source: Source, smem: Shared, wave: Int32, n: Extents) -> Int64:
        return (source.dkv + self.first_key(source, smem, wave, n) * self.config.key_words).toint()

    def first_key(self, source: Source, smem: Shared, wave: Int32, n: Extents) -> Int64:
        """The number of the first key of this batch entry and KV head."""
        batch, kv_head = (cute.arch.make_warp_uniform(smem.info[i, 0, wave & 1]) for i in (1, 2))
        return Int64(batch) * source.s_batch * self.again(n).h_kv + kv_head

    @cute.jit
    def store_if_last(
        self,
        last: Int32,
        dq: cute.Tensor,
        smem: Shared,
        rows: RowOperands,
        wave: Int32,
        n: Extents,
        side: cutlass.Constexpr,
    ):
        """With the last tile of keys: stores half of dQ, through the norm and RoPE of q."""
        if last != 0:
            warpgroup.wait_group(0)
            tile = self.placed(smem, wave, n)
            store_gradient(dq, smem.q, smem.numbers, rows, tile, thread_again(), side, self.config)

    def placed(self, smem: Shared, wave: Int32, n: Extents) -> PlacedTile:
        """A row tile. Where q is turned, nothing computed of extents stays in registers."""
        return RowTile.read(smem.info[None, 0, wave & 1], self.again(n))

    def again(self, n: Extents) -> Extents:
        if not self.config.turns:
            return n
        return n._replace(s_q=keep(n.s_q), group=keep(n.group), h_kv=keep(n.h_kv))

    def store(self, dq: QGradient, smem: Shared, rows: RowOperands, wave: Int32, n: Extents) -> None:
        """Stores half of dQ."""
        tile, thread = self.placed(smem, wave, n), thread_again()
        boxed = BoxedRows.of(n, 0, thread, self.config.gathers)
        dq.store(rows.dq, tile, boxed, thread, self.config.d)


def given(x: Any) -> Callable[[], Any]:
    return lambda: x


def compile(variant: MlaBackward, out_dir: Path) -> Compiled:
    rope = variant.d - variant.d_v  # with these columns SMEM has no room for sums of a cluster
    one_tile = variant.max_heads <= 64  # a tile of rows has all heads of one query, whose keys no other tile has
    config = Config(
        variant.d,
        variant.dtype,
        variant.sources,
        # integers take four times as many instructions, for which left has no registers; where RoPE's columns are
        # apart, right makes all chunks
        chunks_of_left=0 if variant.deterministic or rope else Config.chunks_of_left,
        deterministic=variant.deterministic and not variant.bounds,
        bounds=variant.bounds,
        cluster=1 if one_tile or variant.bounds or rope else CLUSTER,
        turns=variant.turns,
        rope=rope,
    )
    return MlaBwdSm90(config).compile(variant, out_dir, cluster=config.cluster)
