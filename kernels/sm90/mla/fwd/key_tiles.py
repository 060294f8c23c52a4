"""The producer of `mla_fwd_sm90` fills its key tiles by TMA, or by `cp.async`; `packed_tiles` has packed keys.

SMEM holds two tiles of keys, the even and the odd one of a pair. The producer refills a tile by halves of its columns,
each as soon as it has been read for the last time. The odd tile may be longer, by keys that a separate warp copies.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.lib.cut_keys import first_keys
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.ptx import copy_or_zero
from kernels.lib.rows import RowTile
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection, with_keys
from kernels.lib.spans import Span
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.wgmma import SLAB, not_, tma_tiles

from .smem import EVEN, ODD, REFILL_ORDER, Barriers


@dataclass(frozen=True)
class Work:
    """One row tile."""

    sources: tuple
    rows: tuple  # per source: the keys that this thread's rows see
    fills: tuple[Int32, Int32]  # of the even and the odd tile, by the row tiles before
    again: cutlass.Boolean | bool = False  # its keys, one pair of tiles, are those of the row tile before

    @property
    def evens(self) -> Int32:
        return (total_tiles(self.sources) + 1) // 2

    @property
    def odds(self) -> Int32:
        return total_tiles(self.sources) // 2

    def fill(self, which: int, pair: Int32 | int) -> Int32:
        """The fill of the even or the odd tile that is its tile of a pair."""
        return pair + self.fills[which]

    def fills_after(self) -> tuple[Int32, Int32]:
        return self.fills[EVEN] + self.evens, self.fills[ODD] + self.odds


@dataclass(frozen=True)
class KeyTiles:
    """The key tiles of a kernel, as its producer sees them."""

    config: Any

    @cute.jit
    def load(self, bar: Barriers, sK: tuple, work: Work, sources: tuple, tile: RowTile):
        """Fills the halves of all key tiles, in the order in which they come free."""
        c = self.config
        tiles = total_tiles(work.sources)
        for pair in cutlass.range(work.evens, unroll=1):
            for which, half in REFILL_ORDER:
                t = 2 * pair + which
                if t < tiles:
                    state = bar.k(which, half).at(work.fill(which, pair))
                    state.wait_empty()
                    first = Int32(0)
                    for source, (atom, keys, *_) in zip(work.sources, sources, strict=True):
                        if t >= first and t < first + source.tiles:
                            key, count = source.first_key(t - first), source.unseen_from(t - first)
                            gK = first_keys(tile, keys, key, cutlass.min(count, c.tile_n), c.tile_n, c.columns_k)
                            self.load_span(atom, gK, sK[which], (which, half), state.full, work.again)
                        first = first + source.tiles

    @cute.jit
    def gather(self, bar: Barriers, sK: tuple, work: Work):
        """`load` for keys that differ from query to query."""
        c = self.config
        thread = cute.arch.thread_idx()[0]
        tiles = total_tiles(work.sources)
        wanted = cute.make_rmem_tensor((c.tile_n // (WARPGROUP // LANES_A_ROW), 2), Int32)
        for which in cutlass.range_constexpr(2):
            self.prefetch_indices(work.sources, wanted[None, which], which, thread)
        for pair in cutlass.range(work.evens, unroll=1):
            for which in cutlass.range_constexpr(2):  # so that little is left to do when a place comes free
                self.mark_absent(work.sources, wanted[None, which], 2 * pair + which, thread)
            for which, half in REFILL_ORDER:
                t = 2 * pair + which
                if t < tiles:
                    state = bar.k(which, half).at(work.fill(which, pair))
                    state.wait_empty()
                    source = with_keys(work.sources, t)
                    source.gather(sK[which], wanted[None, which], thread, c.slabs(which, half), WARPGROUP)
                    state.copy_full()
            for which in cutlass.range_constexpr(2):
                self.prefetch_indices(work.sources, wanted[None, which], 2 * pair + 2 + which, thread)

    def prefetch_indices(self, sources: tuple, wanted: cute.Tensor, t: Int32, thread: Int32) -> None:
        """Reads which keys of tile t this thread will copy."""
        on_source(sources, t, Selection.prefetch_indices, wanted, thread, WARPGROUP)

    def mark_absent(self, sources: tuple, wanted: cute.Tensor, t: Int32, thread: Int32) -> None:
        """Marks those that are absent."""
        on_source(sources, t, Selection.mark_absent, wanted, thread, WARPGROUP)

    @cute.jit
    def load_span(
        self,
        atom: cute.CopyAtom,
        gmem: cute.Tensor,
        sK: cute.Tensor,
        part: cutlass.Constexpr,
        full: cute.Pointer,
        again: cutlass.Boolean,
    ):
        """Loads a part of the columns of tile_n keys of gmem: (EVEN or ODD, half); none if SMEM has them already."""
        c = self.config
        gK, sK = tma_tiles(atom, gmem, cute.local_tile(sK, (c.tile_n, c.columns_k), (0, None)))
        if not_(again):
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, c.filled_bytes(*part))
            for column in c.slabs(*part) if c.rope else part[1:]:
                cute.copy(atom, gK[None, 0, column], sK[None, column], tma_bar_ptr=full)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def load_extra_keys(self, bar: Barriers, sK: cute.Tensor, span: Span, fills: Int32, place: tuple):
        """A warp loads the keys of odd tiles after those that `load` loads, with zeros for keys that no query sees.

        `fills` of the odd tile came before; `place` is that of the span's first key.
        """
        c, (first, step) = self.config, place
        chunks, at_once = SLAB // CHUNK, WARP * CHUNK // SLAB  # of a row of a slab; rows
        rows, lane = cute.size(sK, mode=[0]), cute.arch.lane_idx()
        mine, chunk = c.tile_n + lane // chunks, lane % chunks
        for pair in cutlass.range(span.tiles // 2, unroll=1):
            begin, seen = span.begin(2 * pair + 1), span.unseen_from(2 * pair + 1)
            for which, half in REFILL_ORDER:
                if cutlass.const_expr(which == ODD):
                    state = bar.k(ODD, half).at(fills + pair)
                    state.wait_empty()
                    for row in (mine + i for i in range(0, c.extra_keys, at_once)):
                        present = Int32(row < seen)
                        source = first + ((begin + row) * present * step + chunk * CHUNK)
                        target = sK.iterator.toint() + row * SLAB * 2 + (chunk ^ row % chunks) * CHUNK * 2
                        for slab in c.slabs(which, half):
                            copy_or_zero(target + slab * rows * SLAB * 2, (source + slab * SLAB).toint(), 16 * present)
                    state.copy_full()
