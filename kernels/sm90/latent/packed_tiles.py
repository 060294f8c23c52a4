"""How the producer of `latent_sm90` fills its key tiles with packed keys.

The halves of a pair of tiles come free in the middle of its work and at its end, two and two, and what comes free last
is waited for. So what goes there is loaded into registers before it has a place, as far as these suffice.

By itself, a CTA has registers for one half. The early ones are gathered and unpacked in place, under the products of
the pair before; of the late ones one is gathered while the other is unpacked.

In a cluster, two CTAs with heads of the same query read the same keys. Each unpacks one half of the keys of every tile,
for itself and for its peer (FlashMLA's crossover), and has registers for the two halves of tiles that are next. Places
must be free in both CTAs; what a peer sends is counted in bytes where a CTA's own keys are announced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.lib.launch import WARPGROUP
from kernels.lib.selections import with_keys
from kernels.lib.splits import on_source, total_tiles

from .cluster import CLUSTER
from .key_tiles import REFILL_ORDER, Barriers, KeyTiles, Work
from .packed import LANES_A_KEY, Format, Held, PackedSelection, Places

*EARLY, LATE, HELD = REFILL_ORDER
MOST, FEWER = 32, 24  # registers to unpack in place with: all of a half; what is left while one is held
AHEAD = 2  # halves of tiles that a CTA of a cluster has in registers


@dataclass(frozen=True)
class PackedTiles:
    """What a thread knows while it fills the key tiles of one row tile."""

    config: Any
    bar: Barriers
    tiles: tuple  # of a pair: (tile_n, d)
    work: Work
    thread: Int32  # of all that fill a tile, in both CTAs of a cluster
    wanted: cute.Tensor  # int32 [keys, tile of the pair]: entries of the list
    places: tuple[Places, Places]

    @staticmethod
    def of(config: Any, bar: Barriers, tiles: tuple, work: Work) -> "PackedTiles":
        thread = cute.arch.thread_idx()[0]
        if config.cluster > 1:
            thread = thread + (1 - bar.peer.rank) * WARPGROUP
        keys = config.tile_n * LANES_A_KEY // (config.cluster * WARPGROUP)
        places = (Places.of(keys), Places.of(keys))
        return PackedTiles(config, bar, tiles, work, thread, cute.make_rmem_tensor((keys, 2), Int32), places)

    @property
    def threads(self) -> int:
        return self.config.cluster * WARPGROUP

    def look_up(self, which: int, pair: Int32) -> None:
        """Read which keys of a tile this thread will copy."""
        wanted = self.wanted[None, which]
        on_source(self.work.sources, 2 * pair + which, PackedSelection.look_up, wanted, self.thread, self.threads)

    def look_up_both(self, pair: Int32) -> None:
        for which in range(2):
            self.look_up(which, pair)

    def locate(self, which: int, pair: Int32) -> None:
        """Find out where the keys are that were looked up."""
        found = (self.places[which], self.wanted[None, which])
        on_source(self.work.sources, 2 * pair + which, PackedSelection.locate, *found, self.thread, self.threads)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Of the sources, each once."""
        return tuple(dict.fromkeys(source.format for source in self.work.sources))

    def on_format(self, which: int, pair: Int32, action: Callable, *arguments: Any) -> None:
        """`action` of the source of a tile's keys: a branch only where formats differ."""
        t = 2 * pair + which
        if len(self.formats) > 1:
            on_source(self.work.sources, t, action, *arguments)
        else:
            action(with_keys(self.work.sources, t), t, *arguments)

    def is_there(self, which: int, pair: Int32) -> cutlass.Boolean:
        return 2 * pair + which < total_tiles(self.work.sources)

    def slabs(self, half: int) -> range:
        return KeyTiles(self.config).slabs(half)

    def target(self, which: int) -> tuple:
        """Where a thread of how many puts its keys."""
        return self.tiles[which], self.thread, self.threads

    def await_place(self, which: int, half: int, pair: Int32) -> None:
        fills = pair + (self.work.evens0, self.work.odds0)[which]
        cute.arch.mbarrier_wait(self.bar.empty + 2 * which + half, (fills & 1) ^ 1)

    @property
    def keys(self) -> int:
        """Of a tile, that a thread copies."""
        return cute.size(self.wanted, mode=[0])

    def held(self, half: int) -> Held:
        """Registers for what this thread has of a half."""
        return Held.of(self.formats, self.slabs(half), self.keys)

    def fetch(self, held: Held, which: int, half: int, pair: Int32) -> None:
        self.on_format(which, pair, PackedSelection.fetch, held, self.places[which], self.slabs(half), self.thread)

    @cute.jit
    def gather(self, which: cutlass.Constexpr, half: cutlass.Constexpr, pair: Int32):
        """Into its place, as it is."""
        if self.is_there(which, pair):
            self.await_place(which, half, pair)
            found = (self.places[which], self.slabs(half), *self.target(which))
            self.on_format(which, pair, PackedSelection.gather, *found)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def unpack(
        self,
        which: cutlass.Constexpr,
        half: cutlass.Constexpr,
        pair: Int32,
        under_way: cutlass.Constexpr,
        registers: cutlass.Constexpr,
    ):
        """What was gathered, when no more than so many halves are still under way."""
        cute.arch.cp_async_wait_group(under_way)
        if self.is_there(which, pair):
            self.on_format(which, pair, PackedSelection.unpack, self.slabs(half), *self.target(which), registers)
            cute.arch.mbarrier_arrive(self.bar.full + 2 * which + half)

    @cute.jit
    def pass_on(self, held: Held, which: cutlass.Constexpr, half: cutlass.Constexpr, pair: Int32):
        """What is held, unpacked, to where it belongs."""
        full, peer = self.bar.full + 2 * which + half, self.bar.peer
        if self.is_there(which, pair):
            self.await_place(which, half, pair)
            whole = (held, self.slabs(half), *self.target(which), full, peer)
            self.on_format(which, pair, PackedSelection.pass_on, *whole)
            if cutlass.const_expr(peer is None):
                cute.arch.mbarrier_arrive(full)
            else:  # each thread has as much to send as one of the peer's has to send here
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.config.half_tile_bytes // self.threads)

    @cute.jit
    def load_alone(self):
        """Who reads them issues the proxy fence, for it waits for all loads that a thread has under way."""
        held = self.held(HELD[1])
        apart = any(form.packing.apart for form in self.formats)  # then there is a register less
        self.look_up_both(0)
        for pair in cutlass.range(self.work.evens, unroll=1):
            for which in cutlass.range_constexpr(2):
                self.locate(which, pair)
            for which, half in EARLY:
                self.gather(which, half, pair)
            if cutlass.const_expr(not apart):
                self.look_up_both(pair + 1)
            for i, (which, half) in enumerate(EARLY):
                self.unpack(which, half, pair, len(EARLY) - 1 - i, (MOST, FEWER)[i])
                if cutlass.const_expr(i == 0):  # later, for want of registers
                    self.fetch(held, *HELD, pair)
            self.gather(*LATE, pair)
            self.pass_on(held, *HELD, pair)
            if cutlass.const_expr(apart):
                self.look_up_both(pair + 1)
            self.unpack(*LATE, pair, 0, MOST)

    @cute.jit
    def load_paired(self):
        held = tuple(self.held(half) for _, half in REFILL_ORDER)
        for which in cutlass.range_constexpr(2):
            self.look_up(which, 0)
        for which in cutlass.range_constexpr(2):
            self.locate(which, 0)
            self.look_up(which, 1)
        for i, (which, half) in enumerate(REFILL_ORDER[:AHEAD]):
            self.fetch(held[i], which, half, 0)
        for pair in cutlass.range(self.work.evens, unroll=1):
            for i, (which, half) in enumerate(REFILL_ORDER):
                self.pass_on(held[i], which, half, pair)
                after, its_pair = (i + AHEAD) % len(REFILL_ORDER), pair
                which, half = REFILL_ORDER[after]
                if cutlass.const_expr(after < AHEAD):  # the first of the next pair, and this tile has no other to come
                    its_pair = pair + 1
                    self.locate(which, its_pair)
                    self.look_up(which, pair + 2)
                self.fetch(held[after], which, half, its_pair)


def load_packed(config: Any, bar: Barriers, tiles: tuple, work: Work) -> None:
    """Fill the halves of all key tiles, in the order in which they come free."""
    mine = PackedTiles.of(config, bar, tiles, work)
    if config.cluster == CLUSTER:
        mine.load_paired()
    else:
        mine.load_alone()
