"""The same attention over keys and values in pages, which a table names: a step of generation.

The producer warp loads a tile of keys as boxes, whose keys are of one page each. Its lanes know where the next 32 boxes
are. A tile begins with the first box that some row sees, so it may hold keys before the first one that is seen, and
after the last one other sequences' keys: their values become 0.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.launch import Shapes, i32, pointers
from kernels.lib.rows import WARP, RowTile, extents, load
from kernels.lib.softmax import RowResults
from kernels.lib.spans import Span, open_span, read_span
from kernels.lib.wgmma import tma_atom, tma_tiles, zero_rows

from .config import BOX, CLEARERS, LARGEST_BOX, Config
from .kernel import MhaFwdSm90, key_tiles
from .smem import Barriers, Shared

BOX_BITS = BOX.bit_length() - 1


class PagedOperands(NamedTuple):
    """Query i sees the keys start[i] <= j < stop[i] of s_kv; key j is in page pages[j // page]."""

    start: cute.Pointer  # int32 [b, s_q]
    stop: cute.Pointer  # int32 [b, s_q]
    s_kv: Int32  # width * page
    k_pages: cute.Pointer  # int32 [b, width]
    v_pages: cute.Pointer  # int32 [b, width]
    width: Int32  # pages of a sequence
    page: Int32  # keys of a page
    box: Int32  # keys of one load: a power of two, which divides a page
    others: tuple  # of codes: scales, float32 [b, h_kv, 2], of K and of V; of a window: pages of the pool, its keys


@dataclass(frozen=True)
class PagedSpan(Span):
    """A span whose lo is the first key of a box."""

    seen_from: Int32 | None = None  # the first key that a row sees

    @staticmethod
    def of(span: Span, lo: Int32, seen_from: Int32) -> "PagedSpan":
        rest = span.hi, span.lo_all, span.hi_all
        return PagedSpan(span.operands, span.tile, span.tile_n, lo, *rest, seen_from=seen_from)

    def publish(self, slot: cute.Tensor) -> None:
        super().publish(slot)
        slot[4] = self.seen_from


class MhaFwdPagedSm90(MhaFwdSm90):
    symbol = "mha_fwd_paged_sm90"

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        o: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        o_parts: cute.Pointer,
        scale_log2: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        splits: Int32,
        ctas: Int32,  # at most, that is how many run at a time
        k0: cute.Pointer,  # [pages, page, h_kv, d]
        v0: cute.Pointer,
        from0: cute.Pointer,
        to0: cute.Pointer,
        k_pages0: cute.Pointer,
        v_pages0: cute.Pointer,
        s_kv0: Int32,
        page: Int32,
        pages: Int32,
        window: Int32,
        scales0: cute.Pointer,  # of codes
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, c.gathers, b, s_q, h_q, h_kv, splits, ctas, c.cluster)
        rows, output = self.rows(Shapes(c.d, b, n), q, o)
        of_pages = Shapes(c.d, pages, n)
        tma = (y for array in (k0, v0) for y in self.boxes(of_pages.keys(array, page)))
        largest_box, others = min(c.tile_n & -c.tile_n, LARGEST_BOX), self.others(pages, window, scales0)
        box = cutlass.min(page & (0 - page), largest_box)
        operands = PagedOperands(from0, to0, s_kv0, k_pages0, v_pages0, s_kv0 // page, page, box, others)
        results = RowResults(sink, lse, o_parts)
        self.launch_persistent(rows, output, ((*tma, operands),), results, scale_log2, n=n, ctas=ctas, stream=stream)

    def others(self, pages: Int32, window: Int32, scales: cute.Pointer) -> tuple:
        """Those that this kernel takes."""
        return ()

    def boxes(self, pool: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The copies of a pool's boxes."""
        return tma_atom(cpasync.CopyBulkTensorTileG2SOp(), pool, BOX, self.config.d)

    def examples(self, variant: Forward) -> tuple:
        arrays = ("q", "o", "float32", "float32", "float32")
        numbers = (i32() for _ in range(10))
        return (
            *pointers(variant.dtype, *arrays),
            Float32(1.0),
            *(next(numbers) for _ in range(6)),
            *self.pools(variant),
            *pointers(variant.dtype, "int32", "int32", "int32", "int32"),
            *numbers,
            *pointers(variant.dtype, "float32"),
        )

    def pools(self, variant: Forward) -> tuple:
        """Example pointers to K's and V's."""
        return pointers(variant.dtype, "keys", "keys")

    def open(self, operands: PagedOperands, tile: RowTile, bounds: tuple) -> PagedSpan:
        span = open_span(operands, tile, self.config.tile_n, bounds)
        return PagedSpan.of(span, span.lo & (0 - operands.box), span.lo)

    def read(self, operands: PagedOperands, tile: RowTile, slot: cute.Tensor) -> PagedSpan:
        span = read_span(operands, tile, self.config.tile_n, slot)
        return PagedSpan.of(span, span.lo, cute.arch.make_warp_uniform(slot[4]))

    @cute.jit
    def load_keys(
        self, bar: Barriers, smem: Shared, keys: tuple, values: tuple, tile: RowTile, span: PagedSpan, fills0: Int32
    ):
        """Box by box; what comes after the last key that a row sees is zeros, as TMA makes them of a page below 0."""
        c, x, lane = self.config, span.operands, cute.arch.lane_idx()
        boxes, table = c.tile_n // x.box, Int64(tile.batch) * x.width
        k_page, v_page, row = Int32(-1), Int32(-1), Int32(0)
        for t in cutlass.range(key_tiles(span), unroll=1):
            first = t * boxes % WARP
            if first == 0:
                key = span.first_key(t) + lane * x.box
                which = key // x.page
                k_page, v_page, row = Int32(-1), Int32(-1), (key - which * x.page) >> BOX_BITS
                if key < span.hi:
                    k_page, v_page = load(x.k_pages + (table + which)), load(x.v_pages + (table + which))
            of_k, of_v = self.landings(bar, smem, fills0 + t)
            self.load_tile(keys, *of_k, tile, k_page, row, first, boxes, x.box >> BOX_BITS)
            self.load_tile(values, *of_v, tile, v_page, row, first, boxes, x.box >> BOX_BITS)

    def landings(self, bar: Barriers, smem: Shared, fill: Int32) -> tuple[tuple, tuple]:
        """The places where TMA puts a tile of K, and one of V."""
        return (smem.k, bar.k.at(fill)), (smem.v, bar.v_landed.at(fill))

    @cute.jit
    def load_tile(self, pool, tiles, state, tile, page, row, first, boxes, step):
        """One tile of K or of V: boxes whose places lanes from `first` on know; rows and steps are of BOX keys."""
        c, (atom, m) = self.config, pool
        state.wait_empty()
        with cute.arch.elect_one():
            state.expect_full(c.key_tile_bytes)
        of_boxes, at = cute.local_tile(tiles, (BOX, c.d), (None, 0, None)), Int32(0)
        for i in cutlass.range(first, first + boxes, unroll=1):
            its_page, its_row = (cute.arch.shuffle_sync(place, i) for place in (page, row))
            rows = cute.local_tile(m[None, None, tile.kv_head, its_page], (BOX, c.d), (None, 0))
            g, s = tma_tiles(atom, rows, of_boxes)
            cute.copy(atom, g[None, its_row], s[None, at, state.index], tma_bar_ptr=state.full)
            at += step

    @cute.jit
    def clear_unseen(self, values: cute.Tensor, stage: Int32, span: PagedSpan, t: Int32, thread: Int32):
        before, after = span.seen_from - span.first_key(t), span.unseen_from(t)
        if before > 0:
            zero_rows(values[None, None, stage], Int32(0), thread, CLEARERS, before)
        if after < self.config.tile_n:
            zero_rows(values[None, None, stage], after, thread, CLEARERS)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources)
    return MhaFwdPagedSm90(config).compile(variant, out_dir, ctas=config.ctas)
