"""The producers of a cluster of two CTAs fill their key tiles with packed keys, for one another.

The CTAs have heads of the same query, so they read the same keys. Each unpacks half of the keys of every tile, for
itself and for its peer: FlashMLA's crossover. Eight lanes have a key, so a warp sends whole lines of 128 bytes. A place
must be free in both CTAs. What the peer sends is counted in bytes, on the barrier where a CTA's own threads arrive.

A warpgroup fills one tile of each pair, so it never waits for loads of the other tile: ptxas counts all loads of a
warp by one scoreboard. A tile's first half is loaded right after its second half is written, long before it has a
place. The second half has a place soon after the first one, so a key's registers are loaded again as soon as they are
free, and nothing else is done in between.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.ptx import thread_id_again

from .key_tiles import Work
from .packed_tiles import PackedTiles
from .smem import EVEN, ODD, REFILL_ORDER, Barriers


@dataclass(frozen=True)
class PairedTiles(PackedTiles):
    """A thread's state while it fills one tile of each pair."""

    which: int  # EVEN or ODD

    @property
    def mine(self) -> tuple[int, ...]:
        return (self.which,)

    @property
    def thread_here(self) -> Int32:
        return of_pair(thread_id_again(), self.bar) if self.config.rope > 0 else self.thread

    def arrive_full(self, full: cute.Pointer, size: int) -> None:
        """Expects the peer's bytes too: each thread sends as much as one of the peer's sends here."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, size // self.threads)

    @cute.jit
    def load(self):
        held, which = self.held(), self.which
        first, second = (place for place in REFILL_ORDER if place[0] == which)
        self.prefetch_indices(0)
        self.locate(which, 0)
        self.fetch(held, *first, 0)
        self.prefetch_indices(1)
        for pair in cutlass.range(self.work.evens, unroll=1):
            if cutlass.const_expr(len(self.formats) == 1):
                self.unpack(held, *first, pair, then=self.config.slabs(*second))
            else:  # each format has code of its own, and registers do not suffice for that
                self.unpack(held, *first, pair)
                self.fetch(held, *second, pair)
            self.unpack(held, *second, pair)
            self.locate(which, pair + 1)
            self.fetch(held, *first, pair + 1)
            self.prefetch_indices(pair + 2)


def of_pair(thread: Int32, bar: Barriers) -> Int32:
    """The number of a thread among those of both CTAs that fill a tile."""
    return thread % WARPGROUP + (1 - bar.peer.rank) * WARPGROUP


@cute.jit
def load_paired(config: cutlass.Constexpr, bar: Barriers, tiles: tuple, work: Work):
    """Fills the halves of all key tiles, in the order in which they come free."""
    thread = of_pair(cute.arch.thread_idx()[0], bar)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPGROUP // WARP:
        PairedTiles.of(config, bar, tiles, work, thread, which=EVEN).load()
    else:
        PairedTiles.of(config, bar, tiles, work, thread, which=ODD).load()
