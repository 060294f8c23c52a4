"""How the producer of `latent_sm90` fills its key tiles: by TMA, or by `cp.async`, and unpacks them there.

Two tiles of keys stand in SMEM, the even and the odd one of a pair. A tile is refilled by halves of its columns, each
as soon as it is read for the last time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .launch import WARPGROUP
from .packed import LANES_A_KEY, Places, gather, unpack
from .rows import RowTile
from .selections import Selection
from .spans import Span
from .splits import total_tiles
from .wgmma import SLAB, not_, slab_layout, tma_tiles

LEFT, RIGHT = 0, 1  # a warpgroup, its half of the columns, and the tile of a pair whose scores it computes
REFILL_ORDER = ((0, LEFT), (1, RIGHT), (0, RIGHT), (1, LEFT))  # (tile of the pair, half): as they are read last


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce. Every thread of a consumer arrives, and `loaders` of the producer."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    full: cute.Pointer  # 4, indexed by 2 * (tile of the pair) + half, and so is
    empty: cute.Pointer
    max: cute.Pointer  # 2, by side: its running maximum stands in SMEM
    weights: cute.Pointer  # 2, by side: its weights stand in SMEM, with the last ones its sum
    done: cute.Pointer  # nothing of a row tile's weights and sums is still to be read
    tail_full: cute.Pointer
    tail_empty: cute.Pointer


@dataclass(frozen=True)
class Work:
    """One row tile."""

    sources: tuple
    rows: tuple  # per source: what this thread's rows see of it
    evens0: Int32  # pairs whose even, odd tile came before: the fill counts of the two key buffers
    odds0: Int32
    tails0: Int32 | int = 0  # row tiles with a tail that came before
    again: cutlass.Boolean | bool = False  # its keys, one pair of tiles, are those of the row tile before

    @property
    def evens(self) -> Int32:
        return (total_tiles(self.sources) + 1) // 2

    @property
    def odds(self) -> Int32:
        return total_tiles(self.sources) // 2

    @property
    def tail(self) -> Int32:
        """Keys behind the last pair of tiles that are no tile of their own."""
        return self.sources[0].tail if isinstance(self.sources[0], Span) else Int32(0)


@dataclass(frozen=True)
class KeyTiles:
    """The key tiles of a kernel, as its producer knows them."""

    config: Any
    dtype: Any

    @cute.jit
    def load(self, bar: Barriers, sK: cute.Tensor, work: Work, sources: tuple, tile: RowTile):
        """Fill the halves of all key tiles, in the order in which they come free."""
        c = self.config
        thread = cute.arch.thread_idx()[0]
        tiles, full, empty = total_tiles(work.sources), bar.full, bar.empty
        wanted = cute.make_rmem_tensor((c.tile_n // (WARPGROUP // 8), 2), Int32) if c.gathers else None
        if cutlass.const_expr(c.gathers):
            for which in cutlass.range_constexpr(2):
                self.look_up(work.sources, wanted[None, which], which, thread)
        for pair in cutlass.range(work.evens, unroll=1):
            if cutlass.const_expr(c.gathers):  # so that little is left to do when a place comes free
                for which in cutlass.range_constexpr(2):
                    self.settle(work.sources, wanted[None, which], 2 * pair + which, thread)
            for which, half in REFILL_ORDER:
                t, i = 2 * pair + which, 2 * which + half
                if t < tiles:
                    fills = pair + (work.evens0, work.odds0)[which]
                    cute.arch.mbarrier_wait(empty + i, (fills & 1) ^ 1)
                    first = Int32(0)
                    for kind, source, given in zip(c.sources, work.sources, sources, strict=True):
                        if t >= first and t < first + source.tiles:
                            if cutlass.const_expr(kind == "span"):
                                keys = tile.keys(given[1], source.begin(t - first), c.tile_n, c.half)
                                self.load_span(given[0], keys, sK, which, half, full + i, thread, work.again)
                            else:
                                place, keys = sK[None, None, which], wanted[None, which]
                                source.gather(place, keys, thread, self.slabs(half), WARPGROUP)
                                cute.arch.cp_async_mbarrier_arrive_noinc(full + i)
                        first = first + source.tiles
            if cutlass.const_expr(c.gathers):
                for which in cutlass.range_constexpr(2):
                    self.look_up(work.sources, wanted[None, which], 2 * pair + 2 + which, thread)

    @cute.jit
    def of_tile(
        self, sources: tuple, wanted: cute.Tensor, t: Int32, thread: Int32, action: cutlass.Constexpr[Callable]
    ):
        """action of the selection that tile t belongs to: of the last source, or of the first where that is one too."""
        first, last = sources[0], sources[-1]
        before = total_tiles(sources) - last.tiles
        if cutlass.const_expr(isinstance(first, Selection) and len(sources) == 2):
            if t < before:
                action(first, wanted, t, thread, WARPGROUP)
            else:
                action(last, wanted, t - before, thread, WARPGROUP)
        else:
            action(last, wanted, t - before, thread, WARPGROUP)

    def look_up(self, sources: tuple, wanted: cute.Tensor, t: Int32, thread: Int32) -> None:
        """Read which keys of tile t this thread will copy."""
        self.of_tile(sources, wanted, t, thread, Selection.look_up)

    def settle(self, sources: tuple, wanted: cute.Tensor, t: Int32, thread: Int32) -> None:
        """Judge which of them are there."""
        self.of_tile(sources, wanted, t, thread, Selection.settle)

    @cute.jit
    def load_packed(self, bar: Barriers, sK: cute.Tensor, work: Work):
        """As `load`, of packed keys: the halves of a pair of tiles are gathered, then they are unpacked one by one.

        Who reads them issues the proxy fence, for it waits for all loads that a thread has under way.
        """
        c = self.config
        thread = cute.arch.thread_idx()[0]
        tiles, full, empty = total_tiles(work.sources), bar.full, bar.empty
        keys = c.tile_n * LANES_A_KEY // WARPGROUP
        wanted, places = cute.make_rmem_tensor((keys, 2), Int32), tuple(Places.of(keys) for _ in range(2))
        for which in cutlass.range_constexpr(2):
            self.look_up(work.sources, wanted[None, which], which, thread)
        for pair in cutlass.range(work.evens, unroll=1):
            for which in cutlass.range_constexpr(2):
                self.locate(work.sources, places[which], wanted[None, which], 2 * pair + which, thread)
            for which, half in REFILL_ORDER:
                if 2 * pair + which < tiles:
                    fills = pair + (work.evens0, work.odds0)[which]
                    cute.arch.mbarrier_wait(empty + 2 * which + half, (fills & 1) ^ 1)
                    gather(sK[None, None, which], places[which], self.slabs(half), thread, WARPGROUP)
                cute.arch.cp_async_commit_group()
            for which in cutlass.range_constexpr(2):
                self.look_up(work.sources, wanted[None, which], 2 * pair + 2 + which, thread)
            for i, (which, half) in enumerate(REFILL_ORDER):
                cute.arch.cp_async_wait_group(len(REFILL_ORDER) - 1 - i)
                if 2 * pair + which < tiles:
                    unpack(sK[None, None, which], places[which], self.slabs(half), thread, WARPGROUP)
                    cute.arch.mbarrier_arrive(full + 2 * which + half)

    @cute.jit
    def locate(self, sources: tuple, places: Places, wanted: cute.Tensor, t: Int32, thread: Int32):
        """places <- where the keys are that were looked up for tile t."""
        first, last = sources
        if t < first.tiles:
            first.locate(places, wanted, t, thread, WARPGROUP)
        else:
            last.locate(places, wanted, t - first.tiles, thread, WARPGROUP)

    def slabs(self, half: int) -> range:
        """Of a half of the columns."""
        slabs = self.config.half // SLAB
        return range(half * slabs, (half + 1) * slabs)

    @cute.jit
    def load_span(
        self,
        atom: cute.CopyAtom,
        keys: cute.Tensor,
        sK: cute.Tensor,
        which: cutlass.Constexpr,
        half: cutlass.Constexpr,
        full: cute.Pointer,
        thread: Int32,
        again: cutlass.Boolean,
    ):
        """Half of `keys`' first tile by TMA, into sK's bytes seen as (tile_n, half, half of d, tile of the pair).

        `again`: it stands there already.
        """
        c = self.config
        halves = cute.make_tensor(sK.iterator, slab_layout(self.dtype, c.tile_n, c.half, 2, 2).outer)
        gK, sK = tma_tiles(atom, keys, halves)
        if (thread // 32 == 0) & not_(again):
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, c.half_tile_bytes)
            cute.copy(atom, gK[None, 0, half], sK[None, half, which], tma_bar_ptr=full)
        if cutlass.const_expr(c.loaders == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
        else:
            cute.arch.sync_warp()  # the bytes are expected before the lane's warp arrives
            cute.arch.mbarrier_arrive(full)
