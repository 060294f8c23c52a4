"""The same attention over codes of e4m3 in pages, with a scale for each KV head of K and one of V.

    producer warp       K0 V0 K1 V1 ...         TMA brings codes as they lie, into a ring that K and V share
    converting warps       K0 V0 K1 V1 ...      they write the same numbers as products take them
    consumer WG               S0 | S1 + P0 V0 | ...

The warps that clear V elsewhere convert here, to float16 where a warpgroup's registers hold Q: an instruction makes two
numbers of two codes. Rows of Q in bfloat16 become float16 in a unit of their own, which is part of the scale of their
logits, as that of K is. The scale of V multiplies a whole row of O.

A step has few rows, often 8 of the 64 that a warpgroup has. The others are left out of the softmax: converting warps
take their place on the SM.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.launch import WARP, pointers
from kernels.lib.ptx import (
    bits_of,
    float_of,
    keep,
    load_matrices,
    max_abs,
    multiply_by_half,
    permute_bytes,
    power_of_two,
    round_pair,
    store_shared_words,
    thread_id_again,
)
from kernels.lib.rows import ROWS, ROWS_OF_WARPGROUP, BoxedRows, Extents, RowTile, load
from kernels.lib.softmax import RowResults, Softmax, by_row, exp2
from kernels.lib.spans import RowSpans
from kernels.lib.wgmma import K_MAJOR, SLAB, register_operand, tiled_mma

from .config import BOX, CLEARERS, Config
from .kernel import Consumer, RoundedSoftmax, Scores, key_tiles
from .paged import MhaFwdPagedSm90, PagedOperands
from .smem import Barriers, Shared

PIECE = 8  # codes that a thread converts at a time: 16 bytes of a swizzled row
NEXT_ROW = 8  # from a thread's first row to its second
RAISED = 15  # exponents of P, so that float16 has what is 2^-39 of the greatest
AT_ONCE = 6  # pieces that it loads before it converts the first


@dataclass(frozen=True)
class SoftmaxOfCodes(RoundedSoftmax):
    """The softmax over keys with a scale, and values with another. Warps leave out rows that do not exist: of a step
    with eight, half of the first warp's and all of the others'.
    """

    rows: Int32  # that exist, from this warp's first one on
    given_scale: Float32  # of logits in units of K's scale
    of_values: cute.Tensor  # V's scale

    @staticmethod
    def of_rows(scale_log2: Float32, rows: Int32) -> "SoftmaxOfCodes":
        scales, *of_rows = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(6))
        return SoftmaxOfCodes(scales, *of_rows, rows, scale_log2, cute.make_rmem_tensor(1, Float32))

    def set_scales(self, of_keys: Float32, of_values: Float32) -> None:
        """Takes the scales of codes, once `scale_log2` has the units of the rows of Q."""
        self.of_values[0] = of_values * 2.0**-RAISED
        for r in range(ROWS):
            self.scale_log2[r] = self.scale_log2[r] * (self.given_scale * of_keys)
        self.factor.fill(1.0)

    def has(self, r: int) -> Boolean:
        return self.rows > r * NEXT_ROW

    @cute.jit
    def raise_max(self, scores: cute.Tensor):
        s = by_row(scores)
        for r in cutlass.range_constexpr(ROWS):
            if self.has(r):
                a, b = self.row_max[r], s[r, 0]
                for i in cutlass.range_constexpr(1, cute.size(s, mode=[1]) - 1, 2):
                    a, b = cute.arch.fmax(a, s[r, i]), cute.arch.fmax(b, s[r, i + 1])
                a = cute.arch.fmax(cute.arch.fmax(a, b), s[r, cute.size(s, mode=[1]) - 1])
                self.row_max[r] = cute.arch.warp_reduction_max(a, threads_in_group=4)

    @cute.jit
    def decay(self):
        for r in cutlass.range_constexpr(ROWS):
            if self.has(r):
                self.factor[r] = self.factor_of(r)
                self.row_sum[r] = self.row_sum[r] * self.factor[r]

    @cute.jit
    def exponentiate(self, scores: cute.Tensor):
        s = by_row(scores)
        for r in cutlass.range_constexpr(ROWS):
            if self.has(r):
                scale, shift = self.scale(r), self.shift(r) - RAISED
                a, b = self.row_sum[r], Float32(0.0)
                for i in cutlass.range_constexpr(0, cute.size(s, mode=[1]), 2):
                    s[r, i] = exp2(s[r, i] * scale - shift)
                    s[r, i + 1] = exp2(s[r, i + 1] * scale - shift)
                    a, b = a + s[r, i], b + s[r, i + 1]
                self.row_sum[r] = a + b

    @cute.jit
    def finish(
        self, tile: RowTile, boxed: BoxedRows, thread: Int32, results: RowResults, writes_lse: cutlass.Constexpr
    ):
        for r in cutlass.range_constexpr(ROWS):
            self.row_sum[r] = self.row_sum[r] * 2.0**-RAISED
        RoundedSoftmax.finish(self, tile, boxed, thread, results, writes_lse=writes_lse)
        for r in cutlass.range_constexpr(ROWS):
            self.factor[r] = self.factor[r] * self.of_values[0]


class MhaFwdPagedE4m3Sm90(MhaFwdPagedSm90):
    symbol = "mha_fwd_paged_e4m3_sm90"

    def boxes(self, pool: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        of_box = cute.make_ordered_layout((BOX, self.config.d), order=(1, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), pool, of_box, (BOX, self.config.d))

    def pools(self, variant: Forward) -> tuple:
        return pointers(variant.dtype, "bytes", "bytes")

    def others(self, pages: Int32, window: Int32, scales: cute.Pointer) -> tuple:
        return (scales,)

    def landings(self, bar: Barriers, smem: Shared, fill: Int32) -> tuple[tuple, tuple]:
        return tuple((smem.codes, bar.codes.at(2 * fill + i)) for i in range(2))

    def softmax(self, scale_log2: Float32, group: Int32, n: Extents) -> Softmax:
        first = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4) * (ROWS * NEXT_ROW)  # of this warp's rows
        return SoftmaxOfCodes.of_rows(scale_log2, n.box_inner * n.box_outer - first)

    @property
    def products(self):
        return Float16 if self.config.q_in_registers else self.dtype

    def queries(self, smem: Shared, group: Int32) -> tuple[cute.TiledMma, cute.Tensor]:
        c = self.config
        if not c.q_in_registers:
            return MhaFwdPagedSm90.queries(self, smem, group)
        qk = tiled_mma(self.products, c.tile_n, K_MAJOR, warpgroup.OperandSource.RMEM)
        q = register_operand(qk, c.d, self.products)
        one_stage = cute.make_layout((*q.shape, 1), stride=(*q.stride, 0))
        return qk, cute.make_tensor(q.iterator, one_stage)

    @cute.jit
    def load_q(self, w: Consumer):
        """Registers of this thread's rows of Q <- SMEM."""
        c, lane = self.config, cute.arch.lane_idx()
        row = w.group * ROWS_OF_WARPGROUP + w.thread // WARP * 16 + lane % 16
        place = w.smem.q.iterator.toint() + row * (2 * SLAB)
        words = cute.make_tensor(cute.recast_ptr(w.a.iterator, dtype=Uint32), cute.make_layout(c.d // 4))
        for k in cutlass.range_constexpr(c.d // 16):
            chunk = (2 * k % PIECE + lane // 16) ^ (row & (PIECE - 1))
            found = load_matrices(place + k // 4 * (c.tile_m * 2 * SLAB) + chunk * 16)
            for i in cutlass.range_constexpr(4):
                words[4 * k + i] = Uint32(found[i])
        if cutlass.const_expr(self.dtype is not self.products):
            for r in cutlass.range_constexpr(ROWS):
                w.softmax.scale_log2[r] = to_float16(words, r)

    @cute.jit
    def issue_first(
        self, w: Consumer, scores: Scores, span: PagedOperands, boxed: BoxedRows, wave: Int32, fill: Int32
    ) -> RowSpans:
        tile = span.tile
        place = span.operands.others[-1] + (tile.batch * tile.n.h_kv + tile.kv_head) * 2
        of_keys, of_values = load(place), load(place + 1)
        w.softmax.scale_log2.fill(1.0)
        if cutlass.const_expr(self.config.q_in_registers):
            self.load_q(w)
        rows = MhaFwdPagedSm90.issue_first(self, w, scores, span, boxed, wave, fill)
        w.softmax.set_scales(of_keys, of_values)
        return rows

    @cute.jit
    def clear(self, bar: Barriers, smem: Shared, operands: PagedOperands, n: Extents):
        """Three warps, for every row tile of this CTA: they make K and V of their codes."""
        fills0 = Int32(0)
        for wave in cutlass.range(self.scheduler(operands, n).waves, unroll=1):
            _, span = self.receive(bar, smem, operands, n, wave)
            bar.q.at(wave).arrive_empty()
            for t in cutlass.range(key_tiles(span), unroll=1):
                for i, (tiles, ring) in enumerate(((smem.k, bar.k), (smem.v, bar.v))):
                    landed, place = bar.codes.at(2 * (fills0 + t) + i), ring.at(fills0 + t)
                    landed.wait_full()
                    place.wait_empty()
                    seen = (span.seen_from - span.first_key(t), span.unseen_from(t)) if i else None
                    self.convert(smem.codes[None, None, landed.index], tiles[None, None, place.index], seen)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    place.arrive_full()
                    landed.arrive_empty()
            fills0 = fills0 + key_tiles(span)

    @cute.jit
    def convert(self, codes: cute.Tensor, tile: cute.Tensor, seen: tuple[Int32, Int32] | None):
        """tile <- codes, zeros in rows that are not seen. A thread has the same columns of every row that it converts,
        PIECE of them.
        """
        c, thread = self.config, thread_id_again() - WARP  # places of all its pieces would not fit into registers
        pieces_of_row, pieces = c.d // PIECE, c.tile_n * c.d // PIECE
        rows = CLEARERS // pieces_of_row  # from one of its rows to the next
        row, column = thread >> pieces_of_row.bit_length() - 1, thread & (pieces_of_row - 1)
        source = codes.iterator + thread * PIECE
        slab = tile.iterator.toint() + (column >> 3) * (c.tile_n * 2 * SLAB) + row * (2 * SLAB)
        first_rows = [  # after so many of its rows, chunks are swizzled as before
            slab + ((column ^ row + i * rows) & (PIECE - 1)) * 16 for i in range(PIECE // math.gcd(rows, PIECE))
        ]
        words = cute.make_rmem_tensor((2, AT_ONCE), Uint32)
        factor = Uint32(keep(0x7B807B80)) if self.products is BFloat16 else None  # 2^120 in bfloat16
        rounds = -(-pieces // CLEARERS)
        for first in cutlass.range_constexpr(0, rounds, AT_ONCE):
            these = range(first, min(first + AT_ONCE, rounds))
            for i in these:
                if (i + 1) * CLEARERS <= pieces or thread + i * CLEARERS < pieces:
                    cute.autovec_copy(words_at(source + i * CLEARERS * PIECE), words[None, i - first])
            if cutlass.const_expr(seen is not None):
                since, until = seen
                if (since > 0) | (until < c.tile_n):
                    for i in these:
                        its_row = row + i * rows
                        if (its_row < since) | (its_row >= until):
                            words[None, i - first].fill(0)
            for i in these:
                place = first_rows[i % len(first_rows)] + i * rows * (2 * SLAB)
                if (i + 1) * CLEARERS <= pieces or thread + i * CLEARERS < pieces:
                    store_shared_words(place, numbers_of(words[None, i - first], self.products, factor))


def words_at(place: cute.Pointer) -> cute.Tensor:
    """Two words of codes."""
    return cute.make_tensor(cute.recast_ptr(place, dtype=Uint32).align(PIECE), cute.make_layout(2))


def numbers_of(codes: cute.Tensor, dtype, factor: Uint32 | None) -> tuple[Uint32, ...]:
    """Eight e4m3 as pairs of float16 or bfloat16, exactly.

    For bfloat16: a code as an integer of 16 bits has its sign in front, too. Shifted, its exponent and mantissa are
    those of the wider type, of the number times 2^-120, subnormal numbers among them; more signs than one are cut out.
    """
    if dtype is BFloat16:
        wide = (permute_bytes(codes[j], Uint32(0), Uint32(order)) for j in range(2) for order in (0x9180, 0xB3A2))
        return tuple(multiply_by_half(x * 16 & Uint32(0x87F087F0), factor, 0) for x in wide)
    numbers = cute.make_rmem_tensor(PIECE, Float16)
    numbers.store(cute.make_tensor(cute.recast_ptr(codes.iterator, dtype=Float8E4M3FN), PIECE).load().to(Float16))
    pairs = cute.make_tensor(cute.recast_ptr(numbers.iterator, dtype=Uint32), PIECE // 2)
    return tuple(pairs[i] for i in range(PIECE // 2))


def to_float16(words: cute.Tensor, r: int) -> Float32:
    """Row r of an operand's pairs of bfloat16 becomes one of float16, in the unit that is returned: a power of two that
    makes the greatest number 2^15 or more, so that what is lost is less than 2^-39 of it.
    """
    of_row = range(r, cute.size(words), ROWS)
    pairs = [(float_of(words[i] << 16), float_of(words[i] & Uint32(0xFFFF0000))) for i in of_row]
    most = Float32(0.0)
    for low, high in pairs:
        most = max_abs(max_abs(most, low), high)
    most = cute.arch.warp_reduction_max(most, threads_in_group=4)
    exponent = cutlass.min(269 - (bits_of(most) >> 23), 253)
    for i, (low, high) in zip(of_row, pairs, strict=True):
        factor = power_of_two(exponent)
        words[i] = round_pair(low * factor, high * factor, Float16)
    return power_of_two(254 - exponent)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources)
    return MhaFwdPagedE4m3Sm90(config).compile(variant, out_dir, ctas=config.ctas)
