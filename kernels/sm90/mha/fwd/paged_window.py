"""A window of a step over keys in pages: each sequence has one query, which sees its last keys.

The kernel finds these itself. A sequence has `stop` tokens, of which `start` are up to the query's own. A window has at
most 32 boxes, so each lane of the producer warp looks up one of them, and says whether its page is there: what comes
from a missing one on is not seen. A step's CTAs have a tile or two each, of few keys, so its time is that of the way to
the first ones. The producer asks how many tokens the next sequence has before it loads the keys of this one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.rows import ROWS, WARP, BoxedRows, Extents, RowTile, count, divide, load
from kernels.lib.softmax import RowResults, Softmax
from kernels.lib.spans import RowSpans, load_span
from kernels.lib.splits import own_part
from kernels.lib.wgmma import tma_tiles

from .config import Config
from .kernel import Consumer, MhaFwdSm90, RoundedSoftmax, key_tiles
from .paged import BOX_BITS, MhaFwdPagedSm90, PagedOperands, PagedSpan
from .smem import Barriers, Shared


@dataclass(frozen=True)
class WindowConfig(Config):
    """128 keys, which begin and end anywhere, are nine boxes: of one tile, or of three where they come as codes."""

    @property
    def tile_n(self) -> int:
        return {64: 144, 128: 48 if super().stages_of_codes else 144}.get(self.d, super().tile_n)

    @property
    def stages(self) -> int:
        return 1 if self.d == 128 and not super().stages_of_codes else 2

    @property
    def stages_of_codes(self) -> int:
        return {64: 3, 128: 6, 256: 2}[self.d] if super().stages_of_codes else 0


class Boxes(NamedTuple):
    """The places of the window's boxes of keys, of which each lane knows one."""

    k_page: Int32  # -1: nowhere, and its keys are zeros
    v_page: Int32
    row: Int32  # of its page, in units of BOX


@dataclass(frozen=True)
class WindowSpan(PagedSpan):
    opened: Int32 | None = None  # lo, before a split took its part
    boxes: Boxes | None = None  # from there on

    @cute.jit
    def of_rows(self, rows: BoxedRows) -> RowSpans:
        start, stop = cute.make_rmem_tensor(ROWS, Int32), cute.make_rmem_tensor(ROWS, Int32)
        for r in cutlass.range_constexpr(ROWS):
            exists, _, _ = self.tile.place(rows, r)
            start[r], stop[r] = self.seen_from * Int32(exists), self.hi * Int32(exists)
        return RowSpans(self, start, stop)


@dataclass(frozen=True)
class WindowScheduler:
    """Tiles of one query, in order: CTA c of g takes c, g + c, ..."""

    n: Extents
    waves: Int32  # in which this CTA has a tile

    @staticmethod
    def of(n: Extents) -> "WindowScheduler":
        return WindowScheduler(n, count(n.work - cute.arch.block_idx()[0], cute.arch.grid_dim()[0]))

    def tile(self, wave: Int32) -> RowTile:
        n, i = self.n, wave * cute.arch.grid_dim()[0] + cute.arch.block_idx()[0]
        i, split = divide(i, n.splits)
        pair, tile = divide(i, n.tiles_of_pair)
        batch, head = divide(pair, n.h_kv)
        return RowTile(n, split, batch, head, tile * n.box_inner, Int32(0))


@dataclass(frozen=True)
class EarlySinks(RoundedSoftmax):
    """Sinks are asked for before the first product: there are few after it that could hide the wait."""

    def read_sinks(self, tile: RowTile, boxed: BoxedRows, results: RowResults) -> None:
        """`ask` has."""

    def ask(self, tile: RowTile, boxed: BoxedRows, results: RowResults) -> None:
        RoundedSoftmax.read_sinks(self, tile, boxed, results)


class WindowSteps:
    """The part of a kernel over keys in pages by which it finds a window."""

    def others(self, pages: Int32, window: Int32, scales: cute.Pointer) -> tuple:
        return (pages, window, *super().others(pages, window, scales))

    def scheduler(self, operands: PagedOperands, n: Extents) -> WindowScheduler:
        return WindowScheduler.of(n)

    @cute.jit
    def produce(
        self, bar: Barriers, smem: Shared, rows: tuple, keys: tuple, values: tuple, operands: PagedOperands, n: Extents
    ):
        """It loads the first keys as soon as it knows where they are. Then it asks where the next ones are, for
        an answer is late while keys are on their way.
        """
        c, (tma_q, mQ) = self.config, rows
        scheduler, fills0 = self.scheduler(operands, n), Int32(0)
        split, batch, head, inner, end, length = self.known(operands, scheduler, Int32(0))
        lo, hi, k_page, v_page = self.look(operands, batch, end, length, Int32(0))
        for wave in cutlass.range(scheduler.waves, unroll=1):
            of_tile = (cute.arch.shuffle_sync(x, wave % WARP) for x in (split, batch, head, inner))
            tile, q, slot = RowTile(n, *of_tile, Int32(0)), bar.q.at(wave), wave % c.slots
            q.wait_empty()
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(q.full, n.box_inner * n.box_outer * c.row_bytes)
            gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
            cute.copy(tma_q, gQ, sQ[None, q.index], tma_bar_ptr=q.full)
            with cute.arch.elect_one():
                tile.publish(smem.info[None, 0, slot])
            (span,) = own_part((self.found(operands, tile, lo, hi, k_page, v_page),), tile, 1)
            of_keys = bar, smem, keys, values, tile, span, fills0
            self.load_at(*of_keys, Int32(0))
            with cute.arch.elect_one():
                span.publish(smem.info[None, 1, slot])
                q.arrive_full()
            if wave + 1 < scheduler.waves:
                if (wave + 1) % WARP == 0:
                    split, batch, head, inner, end, length = self.known(operands, scheduler, wave + 1)
                lo, hi, k_page, v_page = self.look(operands, batch, end, length, (wave + 1) % WARP)
            for t in cutlass.range(1, key_tiles(span), unroll=1):
                self.load_at(*of_keys, t)
            fills0 = fills0 + key_tiles(span)

    @cute.jit
    def known(self, x: PagedOperands, scheduler: WindowScheduler, first: Int32) -> tuple[Int32, ...]:
        """The places of this CTA's tiles from `first` on, of which each lane knows one, and their sequences' tokens."""
        tile = scheduler.tile(cutlass.min(first + cute.arch.lane_idx(), scheduler.waves - 1))
        return tile.split, tile.batch, tile.kv_head, tile.inner0, *load_span(x, tile, Int32(0))

    @cute.jit
    def look(self, x: PagedOperands, batches: Int32, ends: Int32, lengths: Int32, place: Int32) -> tuple[Int32, ...]:
        """The window [lo, hi), if all of its pages are there, of the tile that the lane at `place` knows, and the pages
        of this lane's box: loads, for `found`.
        """
        _, window, *_ = x.others
        batch, end, length = (cute.arch.shuffle_sync(y, place) for y in (batches, ends, lengths))
        hi, k_page, v_page = Int32(0), Int32(-1), Int32(-1)
        if (end > 0) & (end <= length):
            hi = cutlass.min(end, x.s_kv)
        lo = cutlass.min(cutlass.max(end - window, 0), hi)
        key, which = self.box(x, lo)
        if key < hi:
            at = Int64(batch) * x.width + which
            k_page, v_page = load(x.k_pages + at), load(x.v_pages + at)
        return lo, hi, k_page, v_page

    @cute.jit
    def box(self, x: PagedOperands, lo: Int32) -> tuple[Int32, Int32]:
        """The first key of this lane's box, and which page of its sequence that is."""
        key = (lo & (0 - x.box)) + cute.arch.lane_idx() * x.box
        which = key >> cute.arch.popc(x.page - 1)
        if x.page & (x.page - 1) != 0:
            which = Int32(Uint32(key) // Uint32(x.page))
        return key, which

    @cute.jit
    def found(self, x: PagedOperands, tile: RowTile, lo: Int32, hi: Int32, k_page: Int32, v_page: Int32) -> WindowSpan:
        """The window that `look` looked at, up to the first page that is not there."""
        pages, *_ = x.others
        key, which = self.box(x, lo)
        if (key < hi) & ((Uint32(k_page) >= Uint32(pages)) | (Uint32(v_page) >= Uint32(pages))):
            hi = cutlass.max(key, lo)
        hi = cute.arch.warp_redux_sync(hi, "min")
        if key >= hi:
            k_page, v_page = Int32(-1), Int32(-1)
        boxes = Boxes(k_page, v_page, (key - which * x.page) >> BOX_BITS)
        opened = lo & (0 - x.box)
        return WindowSpan(x, tile, self.config.tile_n, opened, hi, lo, hi, 0, lo, opened, boxes)

    @cute.jit
    def load_at(
        self,
        bar: Barriers,
        smem: Shared,
        keys: tuple,
        values: tuple,
        tile: RowTile,
        span: WindowSpan,
        fills0: Int32,
        t: Int32,
    ):
        """Tile t of K and of V, box by box, as lanes know them."""
        x, (k_page, v_page, row) = span.operands, span.boxes
        boxes = self.config.tile_n >> cute.arch.popc(x.box - 1)
        before = (span.lo - span.opened) // self.config.tile_n
        first, of_k, of_v = (before + t) * boxes % WARP, *self.landings(bar, smem, fills0 + t)
        self.load_tile(keys, *of_k, tile, k_page, row, first, boxes, x.box >> BOX_BITS)
        self.load_tile(values, *of_v, tile, v_page, row, first, boxes, x.box >> BOX_BITS)

    def read(self, operands: PagedOperands, tile: RowTile, slot: cute.Tensor) -> WindowSpan:
        span = super().read(operands, tile, slot)
        return WindowSpan(*(getattr(span, name) for name in PagedSpan.__dataclass_fields__))


class MhaFwdPagedWindowSm90(WindowSteps, MhaFwdPagedSm90):
    symbol = "mha_fwd_paged_window_sm90"

    def softmax(self, scale_log2: Float32, group: Int32, n: Extents) -> Softmax:
        return EarlySinks(scale_log2, *(cute.make_rmem_tensor(ROWS, Float32) for _ in range(5)))

    @cute.jit
    def attend(
        self,
        w: Consumer,
        span: WindowSpan,
        boxed: BoxedRows,
        o: cute.Pointer,
        results: RowResults,
        wave: Int32,
        fills0: Int32,
    ):
        w.softmax.ask(span.tile, boxed, results)
        MhaFwdSm90.attend(self, w, span, boxed, o, results, wave, fills0)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = WindowConfig(variant.d, variant.dtype, variant.sources)
    return MhaFwdPagedWindowSm90(config).compile(variant, out_dir, ctas=config.ctas)
