"""Attention for Hopper over a latent that is both K and V, head dimension 512, by products of e4m3.

Keys come as codes of e4m3, 512 bytes each, and are gathered as they are. Each has a unit of its own, a power of two in
bfloat16, in 16 bytes at the end of its row. q is bfloat16, and is rounded here, in a unit for each row. Where RoPE is
kept, its 64 numbers follow a key's codes in bfloat16, in the same unit, and those of q are as exact: their products are
added to the scores last.

    two warps  q rounded, up to two row tiles ahead
                   | q full                                            ^ q empty
    two warps  keys, with cp.async, and which of them are absent: a ring of tiles of 64
                   | k full                                            ^ k empty
    scores     S = Q K', the next tile's under the softmax of this one; P, in the units of its keys, to SMEM
                   | p full, with factors for the sums before          ^ k empty
    products   O' += V' P', a half of the columns each

So a softmax never waits for products of P, nor these for it, until a ring is full.

**O transposed.** A product of e4m3 takes operands whose neighbouring bytes are neighbouring keys, and keys in SMEM have
neighbouring columns there. `ldmatrix` of pairs of bytes, transposed, and a permutation of bytes make a part of V' in
registers, the left operand. Its keys come in the order that they have in an accumulator of S, so P is stored by words.

**Sums.** A sum of e4m3 products keeps some 14 bits, so those of a tile are summed apart, and added in float32.

**P** is multiplied with the unit of its key, since O is a sum over codes, and rounded. The reference of a row is an
integer exponent, and rises only when such a product would leave the range of e4m3. So a factor is mostly 1, and always
exact. The sum that the softmax divides by is of P without units.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.nvgpu import warp as cute_warp
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.columns import by_column, column_of
from kernels.lib.forward import ForwardKernel
from kernels.lib.launch import WARP, WARPGROUP, Shapes
from kernels.lib.ptx import (
    arrive_if,
    copy_once_or_zero,
    copy_or_zero,
    float_of,
    fma_bf16x2,
    keep,
    load_shared_words,
    max_abs_bf16x2,
    max_u32,
    permute_bytes,
    power_of_two,
    to_e4m3,
    warp_max_u32,
)
from kernels.lib.rows import ROWS, BoxedRows, Extents, PlacedTile, RowTile, load, row_of, store
from kernels.lib.selections import (
    LANES_A_ROW,
    Selection,
    mask_absent,
    open_selection,
    with_keys,
)
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, by_row, exp2
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import K_MAJOR, SLAB, accumulator, multiply, operand_a, operand_b, round_pair, tiled_mma

from .config import Config
from .smem import WARPS, Barriers, Shared, filled

LEAST = -1e30  # a reference before any key was seen
HEAD, LIMIT = 5, 8.5  # P is about 2^HEAD at most when a reference is set, and 2^LIMIT before it is set anew
TO_INTEGER = 12582912.0  # 1.5 2^23: added and subtracted, it rounds to an integer
TOP = 134  # the biased exponent of the greatest number of a row of q in its unit: below 256, of e4m3's 448
COLUMNS = 64  # of O, of a product
DEPTH = 32  # of a product
PAIR = 2  # rows that a warp rounds at a time, so that neither waits for its own results
NAN, MINUS_ZERO = 0x7FFF7FFF, 0x80008000  # pairs of bfloat16
LOWEST = 8  # the biased exponent that a row of q has at least, so that its unit is a number
SLAB_BYTES = 128  # of a row
LOW, HIGH = 0x6420, 0x7531  # permutations: the even bytes, the odd ones
ONE = 0x3F80  # as bfloat16
OF_INTEGER = 0x4B000000  # the bits of 2^23, to which 16 bits are added; of bfloat16, 128 times the biased exponent


def product(n: int, source: Any) -> cute.TiledMma:
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (64, n, DEPTH), source, K_MAJOR, K_MAJOR)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


@dataclass(frozen=True)
class Scores:
    """State that a thread of the scores keeps."""

    thread: Int32
    row_of_p: Int32  # bytes from a tile of P to this thread's first word
    qk: cute.TiledMma
    a: cute.Tensor  # (.., row tile & 1)
    b: cute.Tensor  # (.., stage)
    of_rope: tuple[cute.TiledMma, cute.Tensor, cute.Tensor] | None  # the same of RoPE, where it is kept
    scores: cute.Tensor  # of every other tile
    scale: cute.Tensor  # of each row
    ref: cute.Tensor  # the exponent that P is relative to
    top: cute.Tensor  # the greatest log of P in the units of keys, of this thread's columns of a tile
    sum: cute.Tensor  # of this thread's columns
    factor: cute.Tensor

    @staticmethod
    def of(smem: Shared) -> "Scores":
        qk = product(64, warpgroup.OperandSource.SMEM)
        of_rope = None
        if smem.q_rope is not None:
            mma = tiled_mma(BFloat16, 64, K_MAJOR)
            of_rope = mma, operand_a(mma, smem.q_rope), operand_b(mma, smem.k_rope)
        rows = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(5))
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row = row_of(thread, 0)
        row_of_p = keep(row * 64 + row // 2 % 4 * 16 + thread % 4 * 4)
        a, b = operand_a(qk, smem.q), operand_b(qk, smem.k)
        return Scores(thread, row_of_p, qk, a, b, of_rope, accumulator(qk, 64), *rows)

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

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, o: cute.Pointer, sources: tuple, results: RowResults, scale_log2: Float32, n: Extents
    ):
        c = self.config
        operands = tuple(source[-1] for source in sources)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = Shared.allocate(c)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise(c.warps_of_q)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        producer, scores, products = c.registers
        if warp < WARPS:
            cute.arch.setmaxregister_decrease(producer)
            if warp < WARPS - c.warps_of_q:
                self.gather(bar, smem, operands, n)
            else:
                self.round_queries(bar, smem, q, scale_log2, n)
        elif warp < 2 * WARPS:
            cute.arch.setmaxregister_decrease(scores)
            self.score(bar, smem, results, n)
        else:
            cute.arch.setmaxregister_increase(products)
            self.multiply(bar, smem, o, n)

    # ---- producers

    @cute.jit
    def gather(self, bar: Barriers, smem: Shared, operands: tuple, n: Extents):
        """Loads the keys of every row tile of this CTA, and says what they are. A warp has 32 keys of a tile."""
        c, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        entries = cute.make_rmem_tensor((1, 2), Int32)
        now, after = entries[None, 0], entries[None, 1]
        scheduler, fill = self.tile_scheduler(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = tuple(open_selection(x, tile, c.tile_n, c.words) for x in operands)
            tiles = total_tiles(opened)
            self.prefetch_entry(opened, after, Int32(0), warp)
            if warp == 0:
                info = filled(bar.info, wave)
                info.wait_empty()
                with cute.arch.elect_one():
                    tile.publish(smem.info[None, wave & 1])
                    smem.tiles[wave & 1] = tiles
                    info.arrive_full()
            for t in cutlass.range(tiles, unroll=1):
                now.store(after.load())
                on_source(opened, t, mark_absent, now, warp)
                self.prefetch_entry(opened, after, t + 1, warp)
                keys, state = with_keys(opened, t).keys, filled(bar.k, fill + t)
                unit = self.unit_of(keys, now[0])
                state.wait_empty()
                self.copy_keys(smem, keys, now[0], state.index, warp)
                state.copy_full()
                absent = Uint32(cute.arch.vote_ballot_sync(now[0] < 0))
                smem.units[lane % 2, lane // 2 % 4, warp * 4 + lane // 8, state.index] = Uint16(unit)
                if lane == 0:
                    smem.absent[warp, state.index] = absent
                cute.arch.sync_warp()
                arrive_if(state.full, Int32(lane == 0))
            fill = fill + tiles

    def prefetch_entry(self, opened: tuple, entry: cute.Tensor, t: Int32, warp: Int32) -> None:
        """entry <- the list's entry for this lane's key of tile t."""
        on_source(opened, t, read_entry, entry, warp)

    @cute.jit
    def unit_of(self, keys: cute.Pointer, index: Int32) -> Int32:
        """The bits of a key's unit in bfloat16, which is 1 where the index is negative."""
        unit = Int32(ONE)
        if index >= 0:
            place = keys + (Int64(index) * self.config.words + self.config.unit)
            unit = Int32(load(cute.recast_ptr(place, dtype=Uint16)))
        return unit

    @cute.jit
    def copy_keys(self, smem: Shared, keys: cute.Pointer, index: Int32, stage: Int32, warp: Int32):
        """Issues the copies of a warp's 32 keys, one for each lane: zeros for those whose index is negative."""
        c, lane = self.config, cute.arch.lane_idx()
        chunk, row0 = lane % LANES_A_ROW, lane // LANES_A_ROW
        each = WARP // LANES_A_ROW  # keys at a time
        of_warp = warp * (WARP * SLAB_BYTES) + row0 * SLAB_BYTES
        target0 = smem.k.iterator.toint() + stage * (c.tile_n * c.d) + of_warp
        for i in cutlass.range_constexpr(WARP // each):
            key = cute.arch.shuffle_sync(index, i * each + row0)
            source = keys.toint() + Int64(cutlass.max(key, Int32(0))) * c.key_bytes + chunk * 16
            size = Int32(16) if key >= 0 else Int32(0)
            of_chunk = i * (each * SLAB_BYTES) + (chunk ^ row0 ^ i * each % 8) * 16
            for slab in cutlass.range_constexpr(c.d // SLAB_BYTES):
                copy_or_zero(target0 + of_chunk + slab * (c.tile_n * SLAB_BYTES), source + slab * SLAB_BYTES, size)
            if cutlass.const_expr(c.rope):
                rope = smem.k_rope.iterator.toint() + stage * (c.tile_n * SLAB_BYTES) + of_warp
                copy_or_zero(rope + of_chunk, source + c.d, size)

    @cute.jit
    def round_queries(self, bar: Barriers, smem: Shared, q: cute.Pointer, scale_log2: Float32, n: Extents):
        """Rounds q of every row tile of this CTA, ahead of its use."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - (WARPS - c.warps_of_q)
        scheduler = self.tile_scheduler(n)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile, state = scheduler.tile(wave), filled(bar.q, wave)
            state.wait_empty()
            self.round_q(smem, q, tile, scale_log2, state.index, warp)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            arrive_if(state.full, Int32(cute.arch.lane_idx() == 0))

    @cute.jit
    def round_q(self, smem: Shared, q: cute.Pointer, tile: RowTile, scale: Float32, stage: Int32, warp: Int32):
        """Rounds a tile of q to e4m3, in a power of two for each row, and zeros for rows that do not exist.

        Some rows of a warp are under way. A lane reads only what it copied itself.
        """
        c, lane = self.config, cute.arch.lane_idx()
        each = c.tile_m // c.warps_of_q
        first, rows = rows_of(tile)
        rows = rows - warp * each
        source = (q + (first + warp * each) * c.d).toint() + lane * 16
        staged = smem.given.iterator.toint() + warp * (2 * c.d * c.staged) + lane * 16
        codes = smem.q.iterator.toint() + stage * (c.tile_m * c.d) + warp * (each * SLAB_BYTES)
        codes += lane // 16 * (c.tile_m * SLAB_BYTES) + lane % 16 * 8
        for i in cutlass.range_constexpr(0, c.staged, PAIR):
            self.copy_rows(source, staged, i, Int32(0), rows)
            cute.arch.cp_async_commit_group()
        words = cute.make_rmem_tensor((4, 2, PAIR), Uint32)
        tops = cute.make_rmem_tensor(PAIR, Uint32)
        rope = Int32(0)
        if cutlass.const_expr(c.rope):  # the last lanes have its chunks
            rope = smem.q_rope.iterator.toint() + (stage * c.tile_m + warp * each) * SLAB_BYTES
            rope += (lane - (WARP - c.rope // 8)) * 16
        for done in cutlass.range(0, each, c.staged, unroll=1):
            of_done = done % 8 * 16 if cutlass.const_expr(c.staged % 8) else Int32(0)
            for i in cutlass.range_constexpr(0, c.staged, PAIR):
                cute.arch.cp_async_wait_group(c.staged // PAIR - 1)
                for k in cutlass.range_constexpr(PAIR):
                    for half in cutlass.range_constexpr(2):
                        given = shared_words(staged + (i + k) * (2 * c.d) + half * c.d, 4)
                        cute.autovec_copy(given, words[None, half, k])
                for k in cutlass.range_constexpr(PAIR):
                    tops[k] = size_of(words[None, None, k])
                for k in cutlass.range_constexpr(PAIR):
                    tops[k] = warp_max_u32(tops[k])
                for k in cutlass.range_constexpr(PAIR):
                    up, unit = units_of(tops[k])
                    place = (i + k) % 8 * 16 if cutlass.const_expr(c.staged % 8 == 0) else of_done ^ (i + k) * 16
                    target = (codes + done * SLAB_BYTES ^ place) + (i + k) * SLAB_BYTES
                    for half in cutlass.range_constexpr(2):
                        eight = cute.make_rmem_tensor(2, Uint32)
                        for j in cutlass.range_constexpr(2):
                            eight[j] = rounded(
                                *(fma_bf16x2(words[2 * j + x, half, k], up, Uint32(MINUS_ZERO)) for x in range(2))
                            )
                        cute.autovec_copy(eight, shared_words(target + half * (2 * c.tile_m * SLAB_BYTES), 2))
                    if cutlass.const_expr(c.rope):  # noqa: SIM102, at compile time
                        if lane >= WARP - c.rope // 8:
                            exact = cute.make_rmem_tensor(4, Uint32)
                            for j in cutlass.range_constexpr(4):
                                exact[j] = fma_bf16x2(words[j, 1, k], up, Uint32(MINUS_ZERO))
                            here = (rope + done * SLAB_BYTES ^ place) + (i + k) * SLAB_BYTES
                            cute.autovec_copy(exact, shared_words(here, 4))
                    if lane == 0:
                        smem.scale[warp * each + done + i + k, stage] = unit * scale
                if done + c.staged < each:
                    self.copy_rows(source, staged, i, done + c.staged, rows)
                cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_rows(self, source: Int64, staged: Int32, i: cutlass.Constexpr, before: Int32, rows: Int32):
        """Begins to load a pair of a warp's rows, or of zeros where there is none, in the places i and i + 1."""
        c = self.config
        for k in cutlass.range_constexpr(PAIR):
            there = before + i + k < rows
            at = source + (before + i + k if there else Int32(0)) * (2 * c.d)
            for half in cutlass.range_constexpr(2):
                place = staged + (i + k) * (2 * c.d) + half * c.d
                copy_once_or_zero(place, at + half * c.d, Int32(16) if there else Int32(0))

    def tile_scheduler(self, n: Extents) -> TileScheduler:
        """Heads of one query follow one another, so that they share the keys in L2."""
        return TileScheduler.of(n, Int32(1), 1)

    # ---- scores

    @cute.jit
    def score(self, bar: Barriers, smem: Shared, results: RowResults, n: Extents):
        s, lane = Scores.of(smem), cute.arch.lane_idx()
        fill = Int32(0)  # tiles of keys and of P, by the row tiles before
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            filled(bar.info, wave).wait_full()
            tiles, q = cute.arch.make_warp_uniform(smem.tiles[wave & 1]), filled(bar.q, wave)
            q.wait_full()
            for r in cutlass.range_constexpr(ROWS):
                s.scale[r] = smem.scale[row_of(s.thread, r), wave & 1]
            s.ref.fill(LEAST)
            s.sum.fill(0.0)
            if tiles > 0:
                first = s.others()
                self.issue(s, bar, first, wave, fill)
                self.receive(s, bar, smem, first, fill)
                s.scores.store(first.load())
                for pair in cutlass.range((tiles - 1) // 2, unroll=1):
                    others, after, t = s.others(), s.others(), fill + 2 * pair
                    units = self.units(s, bar, smem, t)
                    self.issue(s, bar, others, wave, t + 1)
                    self.hand_over(s, bar, smem, s.scores, units, t)
                    self.receive(s, bar, smem, others, t + 1)
                    units = self.units(s, bar, smem, t + 1)
                    self.issue(s, bar, after, wave, t + 2)
                    self.hand_over(s, bar, smem, others, units, t + 1)
                    self.receive(s, bar, smem, after, t + 2)
                    s.scores.store(after.load())
                fill = fill + tiles
                if tiles % 2 == 0:
                    others, units = s.others(), self.units(s, bar, smem, fill - 2)
                    self.issue(s, bar, others, wave, fill - 1)
                    self.hand_over(s, bar, smem, s.scores, units, fill - 2)
                    self.receive(s, bar, smem, others, fill - 1)
                    self.hand_over(s, bar, smem, others, self.units(s, bar, smem, fill - 1), fill - 1)
                else:
                    self.hand_over(s, bar, smem, s.scores, self.units(s, bar, smem, fill - 1), fill - 1)
            cute.arch.sync_warp()
            arrive_if(q.empty, Int32(lane == 0))
            self.finish(s, bar, smem, wave, results, n)

    @cute.jit
    def issue(self, s: Scores, bar: Barriers, scores: cute.Tensor, wave: Int32, fill: Int32):
        """Issues the scores of a tile."""
        state = filled(bar.k, fill)
        state.wait_full()
        cute.arch.fence_proxy("async.shared", space="cta")  # keys came through the generic proxy
        in_own_registers(scores)
        q, keys = s.a[None, None, None, wave & 1], s.b[None, None, None, state.index]
        blocks = None if s.of_rope is None else range((self.config.d - self.config.rope) // DEPTH)
        multiply(s.qk, scores, q, keys, fresh=True, blocks=blocks)
        if cutlass.const_expr(s.of_rope is not None):
            mma, q, keys = s.of_rope
            multiply(mma, scores, q[None, None, None, wave & 1], keys[None, None, None, state.index])

    @cute.jit
    def receive(self, s: Scores, bar: Barriers, smem: Shared, scores: cute.Tensor, fill: Int32):
        """Waits for the scores of a tile, so that nothing is under way, and multiplies them with the units of keys;
        -inf for absent keys. Finds the greatest log of P in these units, to the base 2."""
        state, absent = filled(bar.k, fill), cute.make_rmem_tensor(self.config.tile_n // WARP, Uint32)
        cute.autovec_copy(smem.absent[None, state.index], absent)
        warpgroup.wait_group(0)
        arrive_if(state.empty, Int32(cute.arch.lane_idx() == 0))
        x, units = by_row(scores), self.units(s, bar, smem, fill)
        for i in cutlass.range_constexpr(cute.size(x, mode=[1])):
            for r in cutlass.range_constexpr(ROWS):
                x[r, i] = x[r, i] * unit_of(units, i)
        mask_absent(scores, absent)
        s.top.fill(-Float32.inf)
        for i in cutlass.range_constexpr(cute.size(x, mode=[1])):
            for r in cutlass.range_constexpr(ROWS):
                s.top[r] = cute.arch.fmax(s.top[r], x[r, i] * s.scale[r] + exponent_of(units, i))

    def units(self, s: Scores, bar: Barriers, smem: Shared, fill: Int32) -> tuple[Uint32, ...]:
        """The units of a thread's keys in a tile, in bfloat16, two in a word. Their place is not filled anew before P
        of these keys has been read, so they are read again and not kept."""
        stage = filled(bar.k, fill).index
        place = smem.units.iterator.toint() + (stage * self.config.tile_n + s.thread % 4 * 16) * 2
        return *load_shared_words(place), *load_shared_words(place + 16)

    @cute.jit
    def hand_over(self, s: Scores, bar: Barriers, smem: Shared, scores: cute.Tensor, units: tuple, fill: Int32):
        """Scores -> P in SMEM, and factors of what was summed before."""
        lane, scores = cute.arch.lane_idx(), by_row(scores)
        place = filled(bar.p, fill)  # free, as the keys of these scores came in the place of those that it was of
        rose = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            top = cute.arch.warp_reduction_max(s.top[r], threads_in_group=4)
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
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(ROWS):
                scores[r, i] = scores[r, i] * unit_of(units, i)
        words = cute.make_rmem_tensor((4, ROWS), Uint32)
        for r in cutlass.range_constexpr(ROWS):
            for j in cutlass.range_constexpr(4):
                words[j, r] = Uint32(keep(Int32(to_e4m3(*(scores[r, 4 * j + k] for k in range(4))))))
        smem.rose[s.warp, place.index] = Int32(cute.arch.vote_any_sync(rose != 0))
        row = row_of(s.thread, 0)
        target = smem.p.iterator.toint() + place.index * (64 * 64) + s.row_of_p
        for r in cutlass.range_constexpr(ROWS):
            smem.factor[row + 8 * r, place.index] = s.factor[r]
            for j in cutlass.range_constexpr(4):
                shared_words((target ^ j * 16) + r * (8 * 64), 1)[0] = words[j, r]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        arrive_if(place.full, Int32(lane == 0))

    @cute.jit
    def finish(self, s: Scores, bar: Barriers, smem: Shared, wave: Int32, results: RowResults, n: Extents):
        """Makes what O is multiplied with, with the sink; lse, without it, goes to memory. Without keys: 0 and -inf."""
        state, boxed = filled(bar.sums, wave), BoxedRows.of(n, 0, s.thread, True)
        tile = RowTile.read(smem.info[None, wave & 1], n)
        state.wait_empty()
        for r in cutlass.range_constexpr(ROWS):
            total = cute.arch.warp_reduction_sum(s.sum[r], threads_in_group=4)
            exists, query, head = tile.place(boxed, r)
            sees = total != 0.0
            whole = total + exp2((load(results.sink + head) - s.ref[r] * LN_2) * LOG2_E)
            factor = cute.arch.rcp_approx(whole) if sees else Float32(0.0)
            lse = (cute.math.log2(total, fastmath=True) + s.ref[r]) * LN_2
            if s.thread % 4 == 0:
                smem.sums[row_of(s.thread, r), wave & 1] = factor
            if exists & (s.thread % 4 == 0):
                store(results.lse + tile.row_index(query, head), lse if sees else -Float32.inf)
        cute.arch.sync_warp()
        arrive_if(state.full, Int32(cute.arch.lane_idx() == 0))
        arrive_if(filled(bar.info, wave).empty, Int32(cute.arch.lane_idx() == 0))

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
        a = [cute.make_rmem_tensor(pv.partition_shape_A((64, c.tile_n)), Float8E4M3FN) for _ in range(2)]
        part, out = accumulator(pv, 64), tuple(accumulator(pv, 64) for _ in range(c.half // COLUMNS))
        factor = cute.make_rmem_tensor(16, Float32)
        # of a place, this lane's row of matrices of 32 keys and a warp's first 16 columns of 64
        slab = side * (c.half // SLAB_BYTES) + warp // 2
        here = smem.k.iterator.toint() + (slab * c.tile_n + lane) * SLAB_BYTES + (warp % 2 * 4 ^ lane % 8) * 16
        fill = Int32(0)  # tiles of keys and of P, by the row tiles before
        for wave in cutlass.range(self.tile_scheduler(n).waves, unroll=1):
            filled(bar.info, wave).wait_full()
            tiles = cute.arch.make_warp_uniform(smem.tiles[wave & 1])
            for m in cutlass.range_constexpr(len(out)):
                out[m].fill(0.0)
            for t in cutlass.range(tiles, unroll=1):
                k, of_p = filled(bar.k, fill + t), filled(bar.p, fill + t)
                of_p.wait_full()
                k.wait_full()
                self.rescale(smem, of_p.index, out, factor, thread)
                at = here + k.index * (c.tile_n * c.d)
                load_values(a[0], at)
                for m in cutlass.range_constexpr(len(out)):
                    multiply(pv, part, a[m % 2], p[None, None, None, of_p.index], fresh=True)
                    if cutlass.const_expr(m + 1 < len(out)):
                        load_values(a[(m + 1) % 2], at ^ (m + 1) * 16)
                    warpgroup.wait_group(0)
                    for i in cutlass.range_constexpr(cute.size(part)):
                        out[m][i] = out[m][i] + part[i]
                arrive_if(k.empty, Int32(lane == 0))
            fill = fill + tiles
            tile = RowTile.read(smem.info[None, wave & 1], n)
            arrive_if(filled(bar.info, wave).empty, Int32(lane == 0))
            self.store_out(bar, smem, wave, o, tile, out, side * c.half + warp * COLUMNS, thread)

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
        state = filled(bar.sums, wave)
        state.wait_full()
        first, rows = rows_of(tile)
        for i in cutlass.range_constexpr(16):
            head = column_of(thread, i)
            factor = smem.sums[head, wave & 1]
            if head < rows:
                place = o + ((first + head) * c.d + column0 + lane // 4 * 2)
                target = cute.make_tensor(
                    cute.recast_ptr(place.align(4), dtype=Uint32), cute.make_layout(len(out), stride=16 // 2)
                )
                for m in cutlass.range_constexpr(len(out)):
                    x = by_column(out[m])
                    target[m] = round_pair(x[i, 0] * factor, x[i, 1] * factor, o.dtype)
        cute.arch.sync_warp()  # lanes part where there are fewer heads: all have read their factors
        arrive_if(state.empty, Int32(lane == 0))


def in_own_registers(acc: cute.Tensor) -> None:
    """Moves what acc held to its registers now: LLVM would do it between a fence and the first product."""
    words = cute.recast_tensor(cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc))), Int32)
    for i in range(cute.size(words)):
        words[i] = keep(words[i])


def unit_of(units: tuple[Uint32, ...], i: int) -> Float32:
    """The unit of a thread's i-th key."""
    word = units[i // 2]
    return float_of(Int32(word & Uint32(0xFFFF0000) if i % 2 else word << Uint32(16)))


def exponent_of(units: tuple[Uint32, ...], i: int) -> Float32:
    """Its log to the base 2."""
    integer = permute_bytes(units[i // 2], Uint32(OF_INTEGER), Uint32(0x7632 if i % 2 else 0x7610))
    return float_of(Int32(integer)) * 2.0**-7 - (2.0**16 + 127)


def read_entry(x: Selection, t: Int32, entry: cute.Tensor, warp: Int32) -> None:
    """entry <- what a list has for this lane's key of its tile t."""
    entry[0] = x.read(t * x.tile_n + warp * WARP + cute.arch.lane_idx())


@cute.jit
def mark_absent(x: Selection, t: Int32, entry: cute.Tensor, warp: Int32):
    """-1 in place of an entry that names no key."""
    position = t * x.tile_n + warp * WARP + cute.arch.lane_idx()
    entry[0] = entry[0] if x.is_present(position, entry[0]) else Int32(-1)


def size_of(words: cute.Tensor) -> Uint32:
    """The bits of the greatest |x| of pairs of bfloat16, as a float32."""
    most = words[0]
    for i in range(1, cute.size(words)):
        most = max_abs_bf16x2(most, words[i])
    return max_u32(Uint32(most & Uint32(0x7FFF0000)), Uint32(most << Uint32(16)) & Uint32(0x7FFF0000))


def rounded(*pairs: Uint32) -> Uint32:
    """Two pairs of bfloat16 as e4m3."""
    halves = ((x << Uint32(16), x & Uint32(0xFFFF0000)) for x in pairs)
    return to_e4m3(*(float_of(Int32(x)) for pair in halves for x in pair))


@cute.jit
def units_of(top: Uint32) -> tuple[Uint32, Float32]:
    """Returns what a row is multiplied with to be rounded, as a pair of bfloat16, and its inverse. The first is NaN
    where a number of the row is infinite."""
    exponent = cutlass.max(Int32(top >> Uint32(23)), Int32(LOWEST))
    up = (127 + TOP - exponent) * 0x00800080 if exponent < 255 else Int32(NAN)
    return Uint32(up), power_of_two(127 - TOP + exponent)


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
    config = Config(variant.d, variant.dtype, variant.sources, rope=SLAB * variant.mode.keeps_rope)
    return MlaFwdE4m3Sm90(config).compile(variant, out_dir)
