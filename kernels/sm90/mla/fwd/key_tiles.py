"""How the producer of `latent_sm90` fills its key tiles: by TMA, or by `cp.async`; `packed_tiles` has packed keys.

SMEM holds two tiles of keys, the even and the odd one of a pair. The producer refills a tile by halves of its columns,
each as soon as it has been read for the last time. The odd tile may be longer, by keys that a separate warp copies.
"""

from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.lib.cluster import Peer
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.ptx import copy_or_zero
from kernels.lib.rows import RowTile
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection, with_keys
from kernels.lib.spans import Span
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.wgmma import SLAB, not_, tma_tiles

EVEN, ODD = 0, 1  # the tiles of a pair
LEFT, RIGHT = 0, 1  # a warpgroup, which computes the scores of even, of odd tiles; and its half of the columns
REFILL_ORDER = ((EVEN, LEFT), (ODD, RIGHT), (EVEN, RIGHT), (ODD, LEFT))  # as they are read last


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce. Every thread of a consumer arrives, and `loaders` of the producer."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    full: cute.Pointer  # 4, indexed by 2 * (EVEN or ODD) + half, and so is
    empty: cute.Pointer
    max_shared: cute.Pointer  # 2, by side: its running maximum is in SMEM
    weights_shared: cute.Pointer  # 2, by side: its weights are in SMEM, with the last ones its sum
    all_read: cute.Pointer  # nothing of a row tile's weights and sums is still to be read
    peer: Peer | None  # the other CTA of a cluster, which fills the same key tiles

    COUNTS = (1, 1, 4, 4, 2, 2, 1)  # in that order

    @staticmethod
    def at(first: cute.Pointer, cluster: int) -> "Barriers":
        places = (first + sum(Barriers.COUNTS[:i]) for i in range(len(Barriers.COUNTS)))
        return Barriers(*places, Peer.of(first) if cluster > 1 else None)

    def initialise(self, loaders: int, more: int) -> None:
        """One thread initialises them, for the numbers of threads that load a tile, and an odd one."""
        consumers, readers = 2 * WARPGROUP, WARPGROUP  # a warpgroup reads a half as V
        if self.peer is not None:
            readers += WARPGROUP // WARP  # warps of the peer, which each arrive once
        arrivals = (1, consumers, loaders, readers, WARPGROUP, WARPGROUP, consumers)
        firsts = (getattr(self, field.name) for field in fields(self))
        for first, count, arriving in zip(firsts, self.COUNTS, arrivals, strict=False):
            for i in range(count):
                cute.arch.mbarrier_init(first + i, arriving + (more if first is self.full and i >= 2 * ODD else 0))

    def release(self, which: int, half: int) -> None:
        """A half of a key tile, EVEN or ODD, has been read for the last time; the peer, which fills it too, is told."""
        empty = self.empty + (2 * which + half)
        cute.arch.mbarrier_arrive(empty)
        if self.peer is not None:
            self.peer.tell(empty)

    def await_readers(self, evens: Int32, odds: Int32) -> None:
        """Waits until all that was ever filled has been read, here and at the peer's."""
        for which, half in REFILL_ORDER:
            cute.arch.mbarrier_wait(self.empty + 2 * which + half, ((evens, odds)[which] & 1) ^ 1)


@dataclass(frozen=True)
class Work:
    """One row tile."""

    sources: tuple
    rows: tuple  # per source: the keys that this thread's rows see
    evens0: Int32  # pairs whose even, odd tile came before: the fill counts of the two key buffers
    odds0: Int32
    again: cutlass.Boolean | bool = False  # its keys, one pair of tiles, are those of the row tile before

    @property
    def evens(self) -> Int32:
        return (total_tiles(self.sources) + 1) // 2

    @property
    def odds(self) -> Int32:
        return total_tiles(self.sources) // 2


@dataclass(frozen=True)
class KeyTiles:
    """The key tiles of a kernel, as its producer sees them."""

    config: Any

    @cute.jit
    def load(self, bar: Barriers, sK: tuple, work: Work, sources: tuple, tile: RowTile):
        """Fills the halves of all key tiles, in the order in which they come free."""
        c = self.config
        tiles, full, empty = total_tiles(work.sources), bar.full, bar.empty
        for pair in cutlass.range(work.evens, unroll=1):
            for which, half in REFILL_ORDER:
                t, i = 2 * pair + which, 2 * which + half
                if t < tiles:
                    fills = pair + (work.evens0, work.odds0)[which]
                    cute.arch.mbarrier_wait(empty + i, (fills & 1) ^ 1)
                    first = Int32(0)
                    for source, (atom, keys, *_) in zip(work.sources, sources, strict=True):
                        if t >= first and t < first + source.tiles:
                            gK = tile.keys(keys, source.first_key(t - first), c.tile_n, c.half)
                            self.load_span(atom, gK, sK[which], half, full + i, work.again)
                        first = first + source.tiles

    @cute.jit
    def gather(self, bar: Barriers, sK: tuple, work: Work):
        """`load` for keys that differ from query to query."""
        c = self.config
        thread = cute.arch.thread_idx()[0]
        tiles, full, empty = total_tiles(work.sources), bar.full, bar.empty
        wanted = cute.make_rmem_tensor((c.tile_n // (WARPGROUP // LANES_A_ROW), 2), Int32)
        for which in cutlass.range_constexpr(2):
            self.look_up(work.sources, wanted[None, which], which, thread)
        for pair in cutlass.range(work.evens, unroll=1):
            for which in cutlass.range_constexpr(2):  # so that little is left to do when a place comes free
                self.settle(work.sources, wanted[None, which], 2 * pair + which, thread)
            for which, half in REFILL_ORDER:
                t, i = 2 * pair + which, 2 * which + half
                if t < tiles:
                    fills = pair + (work.evens0, work.odds0)[which]
                    cute.arch.mbarrier_wait(empty + i, (fills & 1) ^ 1)
                    source = with_keys(work.sources, t)
                    source.gather(sK[which], wanted[None, which], thread, self.slabs(half), WARPGROUP)
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + i)
            for which in cutlass.range_constexpr(2):
                self.look_up(work.sources, wanted[None, which], 2 * pair + 2 + which, thread)

    def look_up(self, sources: tuple, wanted: cute.Tensor, t: Int32, thread: Int32) -> None:
        """Reads which keys of tile t this thread will copy."""
        on_source(sources, t, Selection.look_up, wanted, thread, WARPGROUP)

    def settle(self, sources: tuple, wanted: cute.Tensor, t: Int32, thread: Int32) -> None:
        """Judges which of them exist."""
        on_source(sources, t, Selection.settle, wanted, thread, WARPGROUP)

    def slabs(self, half: int) -> range:
        """Slabs of a half of the columns."""
        slabs = self.config.half // SLAB
        return range(half * slabs, (half + 1) * slabs)

    @cute.jit
    def load_span(
        self,
        atom: cute.CopyAtom,
        gmem: cute.Tensor,
        sK: cute.Tensor,
        half: cutlass.Constexpr,
        full: cute.Pointer,
        again: cutlass.Boolean,
    ):
        """Loads tile_n keys from gmem's first one on. `again`: SMEM has them already."""
        c = self.config
        gK, sK = tma_tiles(atom, gmem, cute.local_tile(sK, (c.tile_n, c.half), (0, None)))
        if not_(again):
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, c.half_tile_bytes)
            cute.copy(atom, gK[None, 0, half], sK[None, half], tma_bar_ptr=full)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def load_more(self, bar: Barriers, sK: cute.Tensor, span: Span, odds0: Int32, place: tuple):
        """A warp loads the keys of odd tiles after those that `load` loads, with zeros for keys that no query sees.

        `place` is that of the span's first key.
        """
        c, (first, step) = self.config, place
        chunks, at_once = SLAB // CHUNK, WARP * CHUNK // SLAB  # of a row of a slab; rows
        rows, lane = cute.size(sK, mode=[0]), cute.arch.lane_idx()
        mine, chunk = c.tile_n + lane // chunks, lane % chunks
        for pair in cutlass.range(span.tiles // 2, unroll=1):
            begin, seen = span.begin(2 * pair + 1), span.unseen_from(2 * pair + 1)
            for which, half in REFILL_ORDER:
                if cutlass.const_expr(which == ODD):
                    cute.arch.mbarrier_wait(bar.empty + 2 * ODD + half, ((odds0 + pair) & 1) ^ 1)
                    for row in (mine + i for i in range(0, c.more, at_once)):
                        present = Int32(row < seen)
                        source = first + ((begin + row) * present * step + chunk * CHUNK)
                        target = sK.iterator.toint() + row * SLAB * 2 + (chunk ^ row % chunks) * CHUNK * 2
                        for slab in self.slabs(half):
                            copy_or_zero(target + slab * rows * SLAB * 2, (source + slab * SLAB).toint(), 16 * present)
                    cute.arch.cp_async_mbarrier_arrive_noinc(bar.full + 2 * ODD + half)
