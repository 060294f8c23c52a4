"""The producer of `mla_fwd_sm90` fills its key tiles with packed keys.

What a thread has of a half of a tile waits in registers for its place, becomes bf16 there, and makes room for the half
that comes next. These loads find their keys in L2: as soon as all of a tile has been fetched, the keys of the tile
after next, which will take its place, are prefetched.

Entries of the list are read only where the producer would wait anyway, for the first place of the next pair: ptxas
counts all loads by one scoreboard, so whoever waits for a half also waits for all that was asked for after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.lib.packed import Format, Held, PackedSelection, Part, Places
from kernels.lib.ptx import thread_id_again
from kernels.lib.selections import with_keys
from kernels.lib.splits import on_source, total_tiles

from .key_tiles import Work
from .smem import EVEN, ODD, REFILL_ORDER, RIGHT, Barriers


@dataclass(frozen=True)
class PackedTiles:
    """A thread's state while it fills the key tiles of one row tile."""

    config: Any
    bar: Barriers
    tiles: tuple  # of a pair: (tile_n, d)
    work: Work
    thread: Int32  # of `loaders`, which fill a tile together
    wanted: cute.Tensor  # int32 [keys, tile of the pair]: entries of the list
    places: tuple[Places, Places]

    @classmethod
    def of(cls, config: Any, bar: Barriers, tiles: tuple, work: Work, thread: Int32, **fields: Any) -> Self:
        keys = config.tile_n * config.lanes_a_key // config.loaders
        places = tuple(Places.of(keys, with_scales=not config.is_short) for _ in (EVEN, ODD))
        wanted = cute.make_rmem_tensor((keys, 2), Int32)
        return cls(config, bar, tiles, work, thread, wanted, places, **fields)

    @property
    def mine(self) -> tuple[int, ...]:
        """The tiles of a pair that this thread fills."""
        return EVEN, ODD

    @property
    def threads(self) -> int:
        return self.config.loaders

    @property
    def thread_here(self) -> Int32:
        """`thread`, where nothing that follows from it may stay in registers; a pair of CTAs has one more of these."""
        return thread_id_again() if self.config.is_short and self.config.cluster == 1 else self.thread

    def prefetch_indices(self, pair: Int32) -> None:
        """Reads which keys of a pair of tiles this thread will copy."""
        for which in self.mine:
            wanted = self.wanted[None, which]
            on_source(
                self.work.sources, 2 * pair + which, PackedSelection.prefetch_indices, wanted, self.thread, self.threads
            )

    def locate(self, which: int, pair: Int32) -> None:
        """Finds the places of the keys whose indices were prefetched."""
        found = (self.places[which], self.wanted[None, which])
        on_source(self.work.sources, 2 * pair + which, PackedSelection.locate, *found, self.thread, self.threads)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The sources' formats, each once."""
        return tuple(dict.fromkeys(source.format for source in self.work.sources))

    def on_format(self, which: int, pair: Int32, action: Callable, *arguments: Any) -> None:
        """Runs `action` for the source of a tile's keys, with a branch only where formats differ."""
        t = 2 * pair + which
        if len(self.formats) > 1:
            on_source(self.work.sources, t, action, *arguments)
        else:
            action(with_keys(self.work.sources, t), t, *arguments)

    def is_there(self, which: int, pair: Int32) -> cutlass.Boolean:
        return 2 * pair + which < total_tiles(self.work.sources)

    def await_place(self, which: int, half: int, pair: Int32) -> None:
        self.bar.k(which, half).at(self.work.fill(which, pair)).wait_empty()

    def held(self) -> Held:
        """Registers for this thread's part of a half."""
        keys = cute.size(self.wanted, mode=[0])
        return Held.of(self.formats, [self.config.slabs(*place) for place in REFILL_ORDER], keys)

    def fetch(self, held: Held, which: int, half: int, pair: Int32) -> None:
        slabs = self.config.slabs(which, half)
        self.on_format(which, pair, PackedSelection.fetch, held, self.places[which], slabs, self.thread_here)

    @cute.jit
    def unpack(
        self,
        held: Held,
        which: cutlass.Constexpr,
        half: cutlass.Constexpr,
        pair: Int32,
        then: cutlass.Constexpr = (),
    ):
        """Moves what is held to where it belongs; its registers get the slabs `then` of the same tile, if any."""
        if self.is_there(which, pair):
            self.await_place(which, half, pair)
            full = self.bar.k(which, half).full
            part = Part.of(
                self.tiles[which], self.config.lanes_a_key, self.thread_here, self.threads, full, self.bar.peer
            )
            slabs = self.config.slabs(which, half)
            self.on_format(which, pair, PackedSelection.unpack, held, slabs, part, self.places[which], then)
            self.arrive_full(full, self.config.filled_bytes(which, half))

    def arrive_full(self, full: cute.Pointer, size: int) -> None:
        """This thread's part of a half, which has so many bytes, is there."""
        cute.arch.mbarrier_arrive(full)

    def prepare(self, which: int, pair: Int32) -> None:
        """Finds the keys of a tile, whose indices were prefetched, and has them brought into L2."""
        self.locate(which, pair)
        self.on_format(which, pair, PackedSelection.prefetch_keys, self.places[which], self.thread_here)

    def loads_late(self, place: tuple[int, int]) -> bool:
        """Tells whether keys are still looked for when this half is unpacked: numbers in bf16 are in right halves."""
        return self.config.is_short and place[1] == RIGHT

    @cute.jit
    def load(self):
        """The readers issue the proxy fence, because it waits for all loads that a thread has under way."""
        held = self.held()
        self.prefetch_indices(0)
        for which in (EVEN, ODD):
            self.prepare(which, 0)
        self.fetch(held, *REFILL_ORDER[0], 0)
        self.prefetch_indices(1)
        for pair in cutlass.range(self.work.evens, unroll=1):
            for i, place in enumerate(REFILL_ORDER):
                self.unpack(held, *place, pair)
                if cutlass.const_expr(i >= len(self.tiles) and self.loads_late(place)):
                    self.prepare(place[0], pair + 1)
                after, its_pair = (i + 1) % len(REFILL_ORDER), pair + (i + 1) // len(REFILL_ORDER)
                which, half = REFILL_ORDER[after]
                self.fetch(held, which, half, its_pair)
                fetched = after >= len(self.tiles)  # the other half of the tile went before
                if cutlass.const_expr(fetched and not self.loads_late(REFILL_ORDER[after])):
                    self.prepare(which, pair + 1)
            self.prefetch_indices(pair + 2)


def load_packed(config: Any, bar: Barriers, tiles: tuple, work: Work) -> None:
    """Fills the halves of all key tiles, in the order in which they come free."""
    PackedTiles.of(config, bar, tiles, work, cute.arch.thread_idx()[0]).load()
