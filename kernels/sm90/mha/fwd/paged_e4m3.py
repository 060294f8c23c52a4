"""The same attention over codes of e4m3 in pages, with a scale for each KV head of K and one of V.

    producer warp       K0 V0 K1 V1 ...         TMA brings codes as they lie, into a ring that K and V share
    converting warps       K0 V0 K1 V1 ...      they write the same numbers as products take them
    consumer WG               S0 | S1 + P0 V0 | ...

The warps that clear V elsewhere convert here. All bits are numbers then, so what no query sees needs no clearing: a
code of NaN counts as 480. The scale of K is part of that of logits, and the one of V multiplies a whole row of O.

A step has few rows, often 8 of the 64 that a warpgroup has. A warp without rows leaves out the softmax: converting
warps take its place on the SM.
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.launch import WARP, pointers
from kernels.lib.ptx import ptx, store_shared_words, thread_id_again
from kernels.lib.rows import ROWS, BoxedRows, Extents, RowTile, load
from kernels.lib.softmax import RowResults, Softmax
from kernels.lib.spans import RowSpans
from kernels.lib.wgmma import SLAB

from .config import BOX, CLEARERS, Config
from .kernel import Consumer, RoundedSoftmax, Scores, key_tiles
from .paged import MhaFwdPagedSm90, PagedOperands
from .smem import Barriers, Shared

UNIT = {BFloat16: 1.0, Float16: 2.0**-8}  # of numbers that products take, which scales make up for
PIECE = 8  # codes that a thread converts at a time: 16 bytes of a swizzled row
AT_ONCE = 6  # pieces that it loads before it converts the first


@dataclass(frozen=True)
class SoftmaxOfCodes(RoundedSoftmax):
    """The softmax of keys with a scale, and values with another; a warp without rows leaves out what takes long."""

    has_rows: Boolean
    given_scale: Float32  # of logits in units of K's scale
    of_values: cute.Tensor  # V's scale

    @staticmethod
    def of_rows(scale_log2: Float32, has_rows: Boolean) -> "SoftmaxOfCodes":
        of_rows = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(5))
        of_keys, of_values = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        return SoftmaxOfCodes(of_keys, *of_rows, has_rows, scale_log2, of_values)

    def scale(self, r: int) -> Float32:
        return self.scale_log2[0]

    def set_scales(self, of_keys: Float32, of_values: Float32) -> None:
        self.of_values[0] = of_values
        self.scale_log2[0] = self.given_scale * of_keys
        self.factor.fill(1.0)

    @cute.jit
    def raise_max(self, scores: cute.Tensor):
        if self.has_rows:
            RoundedSoftmax.raise_max(self, scores)

    @cute.jit
    def decay(self):
        if self.has_rows:
            RoundedSoftmax.decay(self)

    @cute.jit
    def exponentiate(self, scores: cute.Tensor):
        if self.has_rows:
            RoundedSoftmax.exponentiate(self, scores)

    @cute.jit
    def finish(
        self, tile: RowTile, boxed: BoxedRows, thread: Int32, results: RowResults, writes_lse: cutlass.Constexpr
    ):
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

    def landings(self, bar: Barriers, smem: Shared, fill: Int32) -> tuple[tuple, tuple]:
        return tuple((smem.codes, bar.codes.at(2 * fill + i)) for i in range(2))

    def softmax(self, scale_log2: Float32, group: Int32, n: Extents) -> Softmax:
        first = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4) * (ROWS * PIECE)  # of this warp's sixteen rows
        return SoftmaxOfCodes.of_rows(scale_log2, first < n.box_inner * n.box_outer)

    @cute.jit
    def issue_first(
        self, w: Consumer, scores: Scores, span: PagedOperands, boxed: BoxedRows, wave: Int32, fill: Int32
    ) -> RowSpans:
        tile = span.tile
        place = span.operands.scales[0] + (tile.batch * tile.n.h_kv + tile.kv_head) * 2
        of_keys, of_values = load(place), load(place + 1)
        rows = MhaFwdPagedSm90.issue_first(self, w, scores, span, boxed, wave, fill)
        w.softmax.set_scales(*(x * (1 / UNIT[self.dtype]) for x in (of_keys, of_values)))
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
                    self.convert(smem.codes[None, None, landed.index], tiles[None, None, place.index])
                    cute.arch.fence_proxy("async.shared", space="cta")
                    place.arrive_full()
                    landed.arrive_empty()
            fills0 = fills0 + key_tiles(span)

    @cute.jit
    def convert(self, codes: cute.Tensor, tile: cute.Tensor):
        """tile <- codes. A thread has the same columns of every row that it converts, PIECE of them."""
        c, thread = self.config, thread_id_again() - WARP  # places of all its pieces would not fit into registers
        pieces_of_row, pieces = c.d // PIECE, c.tile_n * c.d // PIECE
        rows = CLEARERS // pieces_of_row  # from one of its rows to the next
        row, column = thread // pieces_of_row, thread % pieces_of_row
        source = codes.iterator.toint() + thread * PIECE
        slab = tile.iterator.toint() + column // PIECE * (c.tile_n * 2 * SLAB)
        words = cute.make_rmem_tensor((2, AT_ONCE), Uint32)
        rounds = -(-pieces // CLEARERS)
        for first in cutlass.range_constexpr(0, rounds, AT_ONCE):
            these = range(first, min(first + AT_ONCE, rounds))
            for i in these:
                if cutlass.const_expr((i + 1) * CLEARERS <= pieces):  # noqa: SIM114, at compile time
                    words[0, i - first], words[1, i - first] = load_two_words(source + i * CLEARERS * PIECE)
                elif thread + i * CLEARERS < pieces:
                    words[0, i - first], words[1, i - first] = load_two_words(source + i * CLEARERS * PIECE)
            for i in these:
                its_row = row + i * rows
                place = slab + its_row * (2 * SLAB) + ((column ^ its_row) & (PIECE - 1)) * 16
                if cutlass.const_expr((i + 1) * CLEARERS <= pieces):  # noqa: SIM114, at compile time
                    self.store(place, words[0, i - first], words[1, i - first])
                elif thread + i * CLEARERS < pieces:
                    self.store(place, words[0, i - first], words[1, i - first])

    def store(self, place: Int32, first: Uint32, last: Uint32) -> None:
        store_shared_words(place, (*numbers_of(first, self.dtype), *numbers_of(last, self.dtype)))


def load_two_words(address: Int32) -> tuple[Uint32, Uint32]:
    return ptx("ld.shared.v2.b32 {$0, $1}, [$2];", Int32(address), gives=(Uint32, Uint32))


def numbers_of(codes: Uint32, dtype) -> tuple[Uint32, Uint32]:
    """Four e4m3 as pairs of bfloat16, or as pairs of float16 that are `UNIT` times as great, exactly.

    A code's exponent and mantissa, shifted to those of the wider type, are its number times a power of two, subnormal
    numbers among them. Its sign is put right by adding it some times before the shift.
    """
    times, shift, factor = (15, 4, "mov.b32 y, 0x7B807B80; mul.rn.bf16x2 x, x, y;") if dtype is BFloat16 else (1, 7, "")
    one = f"""
        prmt.b32 x, $2, 0, {{order}};
        and.b32 sign, x, 0x00800080;
        mad.lo.u32 x, sign, {times}, x;
        shl.b32 x, x, {shift};
        {factor}
        mov.b32 {{result}}, x;"""
    pairs = "".join(one.format(order=order, result=f"${i}") for i, order in enumerate(("0x4140", "0x4342")))
    return ptx(f"{{ .reg .b32 x, y, sign;{pairs}\n}}", codes, gives=(Uint32, Uint32), early=True, pure=True)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources)
    return MhaFwdPagedE4m3Sm90(config).compile(variant, out_dir, ctas=config.ctas)
