"""Attention for Hopper over a latent that is both K and V, head dimension 512, by products of e4m3.

Keys come as codes of e4m3, 512 bytes each, in one unit for all keys of a batch entry, and are gathered as they are. q
is bfloat16, and is rounded here, in a unit for each row.

    producer   q and keys, with cp.async: a ring of places of 64 keys, or of 32 rows of q
                   | k full                                            ^ k empty
    scores     q rounded; S = Q K', the next tile's under the softmax of this one; P to SMEM
                   | p full, with factors for the sums before          ^ p empty
    products   O' += V' P', a half of the columns each

So a softmax never waits for products of P, nor these for it, until a ring is full.

**O transposed.** A product of e4m3 takes operands whose neighbouring bytes are neighbouring keys, and keys in SMEM have
neighbouring columns there. `ldmatrix` of pairs of bytes, transposed, and a permutation of bytes make a part of V' in
registers, the left operand. Its keys come in the order that they have in an accumulator of S, so P is stored by words.

**Sums.** A sum of e4m3 products keeps some 14 bits, so those of a tile are summed apart, and added in float32.

**P** is rounded in units of powers of two. The reference of a row is an integer exponent, and rises only when P would
leave the range of e4m3. So a factor is mostly 1, and always exact.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp as cute_warp
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.columns import by_column, column_of
from kernels.lib.forward import ForwardKernel
from kernels.lib.launch import WARP, WARPGROUP, Shapes
from kernels.lib.ptx import (
    arrive_if,
    bits_of,
    copy_or_zero,
    keep,
    max_abs,
    permute_bytes,
    power_of_two,
    to_e4m3,
    warp_max_u32,
)
from kernels.lib.rows import ROWS, BoxedRows, Extents, PlacedTile, RowTile, load, row_of, store
from kernels.lib.selections import (
    LANES_A_ROW,
    SelectedRows,
    Selection,
    open_selection,
    read_selection,
    with_keys,
)
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, by_row, exp2
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import K_MAJOR, accumulator, multiply, operand_a, operand_b, round_pair

from .config import Config
from .smem import WARPS, Barriers, Shared

SCORES_MET = 1  # a named barrier: all threads that make scores have come
LEAST = -1e30  # a reference before any key was seen
HEAD, LIMIT = 5, 8.5  # P is about 2^HEAD at most when a reference is set, and 2^LIMIT before it is set anew
TO_INTEGER = 12582912.0  # 1.5 2^23: added and subtracted, it rounds to an integer
TOP = 134  # the biased exponent of the greatest number of a row of q in its unit: below 256, of e4m3's 448
COLUMNS = 64  # of O, of a product
Q_TILES = 2  # places of keys that a tile of q takes
AT_A_TIME = 4  # rows of q of which a warp has loads under way
LOWEST = 8  # the biased exponent that a row of q has at least, so that its unit is a number
SLAB_BYTES = 128  # of a row
LOW, HIGH = 0x6420, 0x7531  # permutations: the even bytes, the odd ones


class Units(NamedTuple):
    """What scores are multiplied with, besides the unit of a row of q."""

    scale_log2: Float32
    of_keys: cute.Pointer  # float32 [b]


def product(n: int, source: Any) -> cute.TiledMma:
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (64, n, 32), source, K_MAJOR, K_MAJOR)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


@dataclass(frozen=True)
class Scores:
    """State that a thread of the scores keeps."""

    thread: Int32
    qk: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor  # (.., stage)
    scores: cute.Tensor  # of every other tile
    scale: cute.Tensor  # of each row
    ref: cute.Tensor  # the exponent that P is relative to
    sum: cute.Tensor  # of this thread's columns
    factor: cute.Tensor

    @staticmethod
    def of(smem: Shared) -> "Scores":
        qk = product(64, warpgroup.OperandSource.SMEM)
        rows = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(4))
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        return Scores(thread, qk, operand_a(qk, smem.q), operand_b(qk, smem.k), accumulator(qk, 64), *rows)

    def others(self) -> cute.Tensor:
        """Those of the tiles between: made anew for each, so that nothing of the last one is kept."""
        return accumulator(self.qk, 64)

    @property
    def warp(self) -> Int32:
        return cute.arch.make_warp_uniform(self.thread // WARP)


class MlaFwdE4m3Sm90(ForwardKernel):
    symbol = "mla_fwd_e4m3_sm90"

    def rows(self, shapes: Shapes, q: cute.Pointer, o: cute.Pointer) -> tuple[Any, Any]:
        return q, o

    def scaling(self, scale_log2: Float32, table: cute.Pointer, eps: Float32) -> Units:
        return Units(scale_log2, table)

    @cute.kernel
    def kernel(self, q: cute.Pointer, o: cute.Pointer, sources: tuple, results: RowResults, units: Units, n: Extents):
        c = self.config
        operands = tuple(source[-1] for source in sources)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = Shared.allocate(c)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        producer, scores, products = c.registers
        if warp < WARPS:
            cute.arch.setmaxregister_decrease(producer)
            self.produce(bar, smem, q, operands, n)
        elif warp < 2 * WARPS:
            cute.arch.setmaxregister_decrease(scores)
            self.score(bar, smem, operands, results, units, n)
        else:
            cute.arch.setmaxregister_increase(products)
            self.multiply(bar, smem, o, n)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, q: cute.Pointer, operands: tuple, n: Extents):
        """Loads the keys of every row tile of this CTA, and says what they are."""
        c, thread = self.config, cute.arch.thread_idx()[0]
        wanted = cute.make_rmem_tensor((c.tile_n // (WARPGROUP // LANES_A_ROW), 2), Int32)
        now, after = wanted[None, 0], wanted[None, 1]
        scheduler, fill = self.tile_scheduler(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = tuple(open_selection(x, tile, c.tile_n, c.words) for x in operands)
            info = bar.info.at(wave)
            info.wait_empty()
            if thread == 0:
                for which, x in enumerate((tile, *opened)):
                    x.publish(smem.info[None, which, wave & 1])
                smem.tiles[wave & 1] = total_tiles(opened)
                info.arrive_full()
            tiles = total_tiles(opened)
            self.prefetch_indices(opened, after, Int32(0), thread)
            self.load_q(bar, smem, q, tile, fill, thread)
            fill = fill + Q_TILES
            for t in cutlass.range(tiles, unroll=1):
                now.store(after.load())
                on_source(opened, t, Selection.mark_absent, now, thread, WARPGROUP)
                self.prefetch_indices(opened, after, t + 1, thread)
                state = bar.k.at(fill + t)
                state.wait_empty()
                keys = cute.make_tensor(smem.k.iterator + state.index * (c.tile_n * c.d), cute.make_layout(1))
                with_keys(opened, t).gather(keys, now, thread, range(c.d // SLAB_BYTES), WARPGROUP)
                state.copy_full()
            fill = fill + tiles

    @cute.jit
    def load_q(self, bar: Barriers, smem: Shared, q: cute.Pointer, tile: RowTile, fill: Int32, thread: Int32):
        """Loads a tile of q into places of keys, as it lies in memory, with zeros for rows that do not exist."""
        c = self.config
        first, rows = rows_of(tile)
        each = c.tile_n * c.d  # bytes of a place
        for part in cutlass.range_constexpr(Q_TILES):
            state = bar.k.at(fill + part)
            state.wait_empty()
            target = smem.k.iterator.toint() + state.index * each
            source, there = (q + first * c.d).toint() + part * each, rows * (2 * c.d) - part * each
            for i in cutlass.range_constexpr(each // (16 * WARPGROUP)):
                at = thread * 16 + i * 16 * WARPGROUP
                present = Int32(16) if at < there else Int32(0)
                copy_or_zero(target + at, source + (at if at < there else Int32(0)), present)
            state.copy_full()

    def prefetch_indices(self, opened: tuple, wanted: cute.Tensor, t: Int32, thread: Int32) -> None:
        on_source(opened, t, Selection.prefetch_indices, wanted, thread, WARPGROUP)

    def tile_scheduler(self, n: Extents) -> TileScheduler:
        """Heads of one query follow one another, so that they share the keys in L2."""
        return TileScheduler.of(n, Int32(1), 1)

    def reopen(self, operands: tuple, smem: Shared, wave: Int32, n: Extents) -> tuple[PlacedTile, tuple]:
        c = self.config
        slots = [smem.info[None, which, wave & 1] for which in range(1 + len(operands))]
        tile = RowTile.read(slots[0], n)
        return tile, tuple(
            read_selection(x, tile, c.tile_n, c.words, slot) for x, slot in zip(operands, slots[1:], strict=True)
        )

    # ---- scores

    @cute.jit
    def score(self, bar: Barriers, smem: Shared, operands: tuple, results: RowResults, units: Units, n: Extents):
        s = Scores.of(smem)
        boxed = BoxedRows.of(n, 0, s.thread, True)
        fill, made = Int32(0), Int32(0)  # places of the ring of keys, tiles of P, by the row tiles before
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            info = bar.info.at(wave)
            info.wait_full()
            tile, opened = self.reopen(operands, smem, wave, n)
            arrive_if(info.empty, Int32(cute.arch.lane_idx() == 0))
            tiles, seen = total_tiles(opened), SelectedRows.of(opened)
            of_keys = load(units.of_keys + tile.batch)
            if tiles > 0:
                seen.prefetch(Int32(0))
            self.round_q(s, bar, smem, fill)
            fill = fill + Q_TILES
            s.ref.fill(LEAST)
            s.sum.fill(0.0)
            for r in cutlass.range_constexpr(ROWS):
                s.scale[r] = s.scale[r] * (units.scale_log2 * of_keys)
            if tiles > 0:
                self.issue(s, bar, s.scores, fill)
                self.receive(bar, seen, s.scores, fill, Int32(0))
                for pair in cutlass.range((tiles - 1) // 2, unroll=1):
                    t, others = 2 * pair, s.others()
                    self.issue(s, bar, others, fill + t + 1)
                    self.hand_over(s, bar, smem, s.scores, made + t)
                    self.receive(bar, seen, others, fill + t + 1, t + 1)
                    self.issue(s, bar, s.scores, fill + t + 2)
                    self.hand_over(s, bar, smem, others, made + t + 1)
                    self.receive(bar, seen, s.scores, fill + t + 2, t + 2)
                if tiles % 2 == 0:
                    others = s.others()
                    self.issue(s, bar, others, fill + tiles - 1)
                    self.hand_over(s, bar, smem, s.scores, made + tiles - 2)
                    self.receive(bar, seen, others, fill + tiles - 1, tiles - 1)
                    self.hand_over(s, bar, smem, others, made + tiles - 1)
                else:
                    self.hand_over(s, bar, smem, s.scores, made + tiles - 1)
            self.finish(s, bar, smem, wave, tile, boxed, results, of_keys)
            fill, made = fill + tiles, made + tiles

    @cute.jit
    def round_q(self, s: Scores, bar: Barriers, smem: Shared, fill: Int32):
        """Rounds a tile of q to e4m3, in a power of two for each row, which is then in scale. A warp has 16 rows."""
        c, lane = self.config, cute.arch.lane_idx()
        cute.arch.barrier(barrier_id=SCORES_MET, number_of_threads=WARPGROUP)  # the last scores of all warps are made
        places = [bar.k.at(fill + part) for part in range(Q_TILES)]
        for place in places:
            place.wait_full()
        stage = places[0].index if s.warp < WARPS // 2 else places[1].index
        source = smem.k.iterator.toint() + stage * (c.tile_n * c.d) + s.warp % 2 * (16 * 2 * c.d) + lane * 16
        words = cute.make_rmem_tensor((4, 2, AT_A_TIME), Uint32)
        for part in cutlass.range_constexpr(16 // AT_A_TIME):
            for i in cutlass.range_constexpr(AT_A_TIME):
                for half in cutlass.range_constexpr(2):
                    at = source + (part * AT_A_TIME + i) * (2 * c.d) + half * c.d
                    cute.autovec_copy(shared_words(at, 4), words[None, half, i])
            for i in cutlass.range_constexpr(AT_A_TIME):
                here = part * AT_A_TIME + i
                x = cute.make_rmem_tensor(16, Float32)
                given = cute.make_tensor(words[None, None, i].iterator, cute.make_layout(8))
                x.store(cute.recast_tensor(given, BFloat16).load().to(Float32))
                most = Float32(0.0)
                for j in cutlass.range_constexpr(16):
                    most = max_abs(most, x[j])
                exponent = cutlass.max(Int32(warp_max_u32(Uint32(bits_of(most))) >> Uint32(23)), Int32(LOWEST))
                up, unit = power_of_two(127 + TOP - exponent), power_of_two(127 - TOP + exponent)
                s.scale[here // 8] = unit if lane // 4 == here % 8 else s.scale[here // 8]
                target = smem.q.iterator.toint() + (lane // 16 * c.tile_m + s.warp * 16 + here) * SLAB_BYTES
                target = target + (lane % 16 // 2 ^ here % 8) * 16 + lane % 2 * 8
                for half in cutlass.range_constexpr(2):
                    codes = cute.make_rmem_tensor(2, Uint32)
                    for j in cutlass.range_constexpr(2):
                        codes[j] = to_e4m3(*(x[8 * half + 4 * j + k] * up for k in range(4)))
                    cute.autovec_copy(codes, shared_words(target + half * (2 * c.tile_m * SLAB_BYTES), 2))
        cute.arch.sync_warp()
        for place in places:
            arrive_if(place.empty, Int32(lane == 0))
        cute.arch.barrier(barrier_id=SCORES_MET, number_of_threads=WARPGROUP)  # whose threads fence before products

    @cute.jit
    def issue(self, s: Scores, bar: Barriers, scores: cute.Tensor, fill: Int32):
        """Issues the scores of a tile."""
        state = bar.k.at(fill)
        state.wait_full()
        cute.arch.fence_proxy("async.shared", space="cta")  # keys and q came through the generic proxy
        in_own_registers(scores)
        multiply(s.qk, scores, s.a, s.b[None, None, None, state.index], fresh=True)

    @cute.jit
    def receive(self, bar: Barriers, seen: SelectedRows, scores: cute.Tensor, fill: Int32, t: Int32):
        """Waits for the scores of tile t, so that nothing is under way, and masks them."""
        warpgroup.wait_group(0)
        arrive_if(bar.k.at(fill).empty, Int32(cute.arch.lane_idx() == 0))
        seen.mask(scores, t)
        seen.prefetch(t + 1)

    @cute.jit
    def hand_over(self, s: Scores, bar: Barriers, smem: Shared, scores: cute.Tensor, fill: Int32):
        """Scores -> P in SMEM, and factors of what was summed before."""
        lane, scores = cute.arch.lane_idx(), by_row(scores)
        rose = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            a, b = scores[r, 0], scores[r, 1]
            for i in cutlass.range_constexpr(2, cute.size(scores, mode=[1]), 2):
                a, b = cute.arch.fmax(a, scores[r, i]), cute.arch.fmax(b, scores[r, i + 1])
            top = cute.arch.warp_reduction_max(cute.arch.fmax(a, b), threads_in_group=4) * s.scale[r]
            is_above = top > s.ref[r] + LIMIT
            ref = (top + TO_INTEGER) - (TO_INTEGER + HEAD) if is_above else s.ref[r]
            rose = rose | Int32(is_above)
            s.factor[r] = exp2(s.ref[r] - ref)
            s.ref[r] = ref
            a, b = s.sum[r] * s.factor[r], Float32(0.0)
            for i in cutlass.range_constexpr(0, cute.size(scores, mode=[1]), 2):
                scores[r, i] = exp2(scores[r, i] * s.scale[r] - ref)
                scores[r, i + 1] = exp2(scores[r, i + 1] * s.scale[r] - ref)
                a, b = a + scores[r, i], b + scores[r, i + 1]
            s.sum[r] = a + b
        place = bar.p.at(fill)
        place.wait_empty()
        smem.rose[s.warp, place.index] = Int32(cute.arch.vote_any_sync(rose != 0))
        target = smem.p.iterator.toint() + place.index * (64 * 64)
        words = cute.make_rmem_tensor((4, ROWS), Uint32)
        for r in cutlass.range_constexpr(ROWS):
            row = row_of(s.thread, r)
            smem.factor[row, place.index] = s.factor[r]
            for j in cutlass.range_constexpr(4):
                words[j, r] = to_e4m3(*(scores[r, 4 * j + k] for k in range(4)))
            for j in cutlass.range_constexpr(4):
                at = target + row * 64 + (j ^ (row // 2 % 4)) * 16 + lane % 4 * 4
                shared_words(at, 1)[0] = words[j, r]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        arrive_if(place.full, Int32(lane == 0))

    @cute.jit
    def finish(
        self,
        s: Scores,
        bar: Barriers,
        smem: Shared,
        wave: Int32,
        tile: PlacedTile,
        boxed: BoxedRows,
        results: RowResults,
        of_keys: Float32,
    ):
        """What O is multiplied with, with the sink; lse, without it, goes to memory. Without keys: 0 and -inf."""
        state = bar.sums.at(wave)
        state.wait_empty()
        for r in cutlass.range_constexpr(ROWS):
            total = cute.arch.warp_reduction_sum(s.sum[r], threads_in_group=4)
            exists, query, head = tile.place(boxed, r)
            sees = total != 0.0
            whole = total + exp2((load(results.sink + head) - s.ref[r] * LN_2) * LOG2_E)
            factor = cute.arch.rcp_approx(whole) * of_keys if sees else Float32(0.0)
            lse = (cute.math.log2(total, fastmath=True) + s.ref[r]) * LN_2
            if s.thread % 4 == 0:
                smem.sums[row_of(s.thread, r), wave & 1] = factor
            if exists & (s.thread % 4 == 0):
                store(results.lse + tile.row_index(query, head), lse if sees else -Float32.inf)
        cute.arch.sync_warp()
        arrive_if(state.full, Int32(cute.arch.lane_idx() == 0))

    # ---- products

    @cute.jit
    def multiply(self, bar: Barriers, smem: Shared, o: cute.Pointer, n: Extents):
        """A half of O's columns."""
        c, lane = self.config, cute.arch.lane_idx()
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp = cute.arch.make_warp_uniform(thread // WARP)
        side = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 2
        pv = product(64, warpgroup.OperandSource.RMEM)
        p = operand_b(pv, smem.p)
        a = cute.make_rmem_tensor(pv.partition_shape_A((64, c.tile_n)), Float8E4M3FN)
        part, out = accumulator(pv, 64), tuple(accumulator(pv, 64) for _ in range(c.half // COLUMNS))
        factor = cute.make_rmem_tensor(16, Float32)
        # where this lane's row is, of matrices of 32 keys and a warp's 16 columns; 64 columns on, bit 6 flips
        here = smem.k.iterator.toint() + side * (c.half // 128 * c.tile_n * 128) + lane * 128 + (warp ^ lane % 8) * 16
        fill, taken = Int32(0), Int32(0)  # places of the ring of keys, tiles of P, by the row tiles before
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            bar.info.at(wave).wait_full()
            tiles = cute.arch.make_warp_uniform(smem.tiles[wave & 1])
            for i in cutlass.range_constexpr(Q_TILES):  # which the scores alone read
                bar.k.at(fill + i).wait_full()
                arrive_if(bar.k.at(fill + i).empty, Int32(lane == 0))
            fill = fill + Q_TILES
            for m in cutlass.range_constexpr(len(out)):
                out[m].fill(0.0)
            for t in cutlass.range(tiles, unroll=1):
                k, of_p = bar.k.at(fill + t), bar.p.at(taken + t)
                of_p.wait_full()
                k.wait_full()
                self.rescale(smem, of_p.index, out, factor, thread)
                for m in cutlass.range_constexpr(len(out)):
                    at = here + k.index * (c.tile_n * c.d) + m // 2 * (c.tile_n * 128)
                    load_values(a, at ^ (m % 2 * 64))
                    multiply(pv, part, a, p[None, None, None, of_p.index], fresh=True)
                    warpgroup.wait_group(0)
                    for i in cutlass.range_constexpr(cute.size(part)):
                        out[m][i] = out[m][i] + part[i]
                arrive_if(k.empty, Int32(lane == 0))
                arrive_if(of_p.empty, Int32(lane == 0))
            fill, taken = fill + tiles, taken + tiles
            tile = RowTile.read(smem.info[None, 0, wave & 1], n)
            arrive_if(bar.info.at(wave).empty, Int32(lane == 0))
            self.store_out(bar, smem, wave, o, tile, out, side * c.half + warp * 16, thread)

    @cute.jit
    def rescale(self, smem: Shared, stage: Int32, out: tuple, factor: cute.Tensor, thread: Int32):
        """Multiplies what was summed before, where a reference rose."""
        rose = Int32(0)
        for i in cutlass.range_constexpr(WARPS):
            rose = rose | smem.rose[i, stage]
        if rose != 0:
            for i in cutlass.range_constexpr(cute.size(factor)):
                factor[i] = smem.factor[column_of(thread, i), stage]
            for m in cutlass.range_constexpr(len(out)):
                x = by_column(out[m])
                for i in cutlass.range_constexpr(cute.size(factor)):
                    for r in cutlass.range_constexpr(ROWS):
                        x[i, r] = x[i, r] * factor[i]

    @cute.jit
    def store_out(
        self,
        bar: Barriers,
        smem: Shared,
        wave: Int32,
        o: cute.Pointer,
        tile: PlacedTile,
        out: tuple,
        column0: Int32,
        thread: Int32,
    ):
        """o <- O, rounded. A lane has two neighbouring columns of a head, and eight lanes have 32 bytes."""
        c, lane = self.config, cute.arch.lane_idx()
        state = bar.sums.at(wave)
        state.wait_full()
        first, rows = rows_of(tile)
        for i in cutlass.range_constexpr(16):
            head = column_of(thread, i)
            factor = smem.sums[head, wave & 1]
            if head < rows:
                place = o + ((first + head) * c.d + column0 + lane // 4 * 2)
                target = cute.make_tensor(
                    cute.recast_ptr(place.align(4), dtype=Uint32), cute.make_layout(len(out), stride=COLUMNS // 2)
                )
                for m in cutlass.range_constexpr(len(out)):
                    x = by_column(out[m])
                    target[m] = round_pair(x[i, 0] * factor, x[i, 1] * factor, o.dtype)
        arrive_if(state.empty, Int32(lane == 0))


def in_own_registers(acc: cute.Tensor) -> None:
    """What acc held is moved to its registers now: LLVM would do it between a fence and the first product."""
    words = cute.recast_tensor(cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc))), Int32)
    for i in range(cute.size(words)):
        words[i] = keep(words[i])


def rows_of(tile: RowTile) -> tuple[Int64, Int32]:
    """The first of a tile's rows, which are heads of a query, and how many there are."""
    return tile.row_index(tile.outer0, tile.inner0), cutlass.min(tile.n.box_inner, tile.n.inner - tile.inner0)


def shared_words(address: Int32, count: int) -> cute.Tensor:
    place = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(place, cute.make_layout(count))


def load_values(a: cute.Tensor, address: Int32) -> None:
    """a <- 64 columns of V' by 64 keys, of which each warp has 16; its rows are even columns, then odd ones."""
    atom = cute.make_copy_atom(cute_warp.LdMatrix8x8x16bOp(True, 4), BFloat16)
    words = cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(cute.size(a))), Uint32)
    for step in range(2):
        pairs = cute.make_rmem_tensor(8, BFloat16)
        place = cute.make_ptr(BFloat16, address + step * (32 * 128), cute.AddressSpace.smem, assumed_align=16)
        layout = cute.make_layout(((8,), 1))
        cute.copy(atom, cute.make_tensor(place, layout), cute.make_tensor(pairs.iterator, layout))
        x = cute.recast_tensor(pairs, Uint32)
        for i, (first, order) in enumerate(((0, LOW), (0, HIGH), (2, LOW), (2, HIGH))):
            words[4 * step + i] = permute_bytes(x[first], x[first + 1], Uint32(order))


def compile(variant: Forward, out_dir: Path) -> Compiled:
    return MlaFwdE4m3Sm90(Config(variant.d, variant.dtype, variant.sources)).compile(variant, out_dir)
