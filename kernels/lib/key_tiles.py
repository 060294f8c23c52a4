"""How the producer of `latent_sm90` fills its key tiles: by TMA, or by `cp.async`; packed keys are `packed_tiles`'.

Two tiles of keys stand in SMEM, the even and the odd one of a pair. A tile is refilled by halves of its columns, each
as soon as it is read for the last time.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .cluster import Peer
from .launch import WARP, WARPGROUP
from .rows import RowTile
from .selections import Selection
from .spans import Span
from .splits import total_tiles
from .wgmma import SLAB, slab_layout, tma_tiles

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
    peer: Peer | None  # the other CTA of a cluster, which fills the same key tiles

    COUNTS = (1, 1, 4, 4, 2, 2, 1, 1, 1)  # in that order

    @staticmethod
    def at(first: cute.Pointer, cluster: int) -> "Barriers":
        places = (sum(Barriers.COUNTS[:i]) for i in range(len(Barriers.COUNTS)))
        return Barriers(*(first + place for place in places), Peer.of(first) if cluster > 1 else None)

    def initialise(self, loaders: int) -> None:
        """By one thread."""
        consumers, readers = 2 * WARPGROUP, WARPGROUP  # a warpgroup reads a half as V
        if self.peer is not None:
            readers += WARPGROUP // WARP  # whose warps tell of it once
        arrivals = (1, consumers, loaders, readers, WARPGROUP, WARPGROUP, consumers, WARP, consumers)
        firsts = (getattr(self, field.name) for field in fields(self))
        for first, count, arriving in zip(firsts, self.COUNTS, arrivals, strict=False):
            for i in range(count):
                cute.arch.mbarrier_init(first + i, arriving)

    def await_readers(self, evens: Int32, odds: Int32) -> None:
        """Until all that was ever filled has been read."""
        for which, half in REFILL_ORDER:
            cute.arch.mbarrier_wait(self.empty + 2 * which + half, ((evens, odds)[which] & 1) ^ 1)

    def hand_back(self, i: int) -> None:
        """A half of a key tile has been read for the last time."""
        cute.arch.mbarrier_arrive(self.empty + i)
        if self.peer is not None:
            self.peer.tell(self.empty + i)


@dataclass(frozen=True)
class Work:
    """One row tile."""

    sources: tuple
    rows: tuple  # per source: what this thread's rows see of it
    evens0: Int32  # pairs whose even, odd tile came before: the fill counts of the two key buffers
    odds0: Int32
    tails0: Int32 | int = 0  # row tiles with a tail that came before

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

    def copies(self, sources: tuple, opened: tuple, tile: RowTile, sK: cute.Tensor) -> tuple:
        """TMA from each span into sK's bytes seen as (tile_n, half, half of d, tile of the pair)."""
        c = self.config
        halves = cute.make_tensor(sK.iterator, slab_layout(self.dtype, c.tile_n, c.half, 2, 2).outer)
        return tuple(
            (source[0], *tma_tiles(source[0], tile.keys(source[1], span.lo, c.tile_n, c.half), halves))
            if kind == "span"
            else None
            for kind, source, span in zip(c.sources, sources, opened, strict=True)
        )

    @cute.jit
    def load(self, bar: Barriers, sK: cute.Tensor, work: Work, copies: tuple):
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
                    for kind, source, copy in zip(c.sources, work.sources, copies, strict=True):
                        if t >= first and t < first + source.tiles:
                            if cutlass.const_expr(kind == "span"):
                                self.load_span(copy, t - first, which, half, full + i, thread)
                            else:
                                tile, keys = sK[None, None, which], wanted[None, which]
                                source.gather(tile, keys, thread, self.slabs(half), WARPGROUP)
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

    def slabs(self, half: int) -> range:
        """Of a half of the columns."""
        slabs = self.config.half // SLAB
        return range(half * slabs, (half + 1) * slabs)

    @cute.jit
    def load_span(self, copy, t: Int32, which: cutlass.Constexpr, half: cutlass.Constexpr, full, thread: Int32):
        c = self.config
        atom, gK, sK = copy
        if thread // 32 == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, c.half_tile_bytes)
            cute.copy(atom, gK[None, t, half], sK[None, half, which], tma_bar_ptr=full)
        if cutlass.const_expr(c.loaders == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
        else:
            cute.arch.sync_warp()  # the bytes are expected before the lane's warp arrives
            cute.arch.mbarrier_arrive(full)
