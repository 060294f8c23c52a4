"""Warps that fill the ring of `mla_fwd_sm100` with packed keys: in bfloat16, for scores and values alike.

What a thread has of a tile waits in registers for its place, and is unpacked into it. It comes in portions, some slabs
of a key; as soon as one is unpacked, its registers are loaded again, for the next tile. So packed bytes need no shared
memory, and their latency is that of a tile. Teams of warps take tiles by turns: a CTA of a pair unpacks half of each
key, and has two teams, so that a thread holds as much as where one team has whole keys.

Writers issue no proxy fence, which might wait for the loads that a thread has under way. The warp that multiplies does
so when they have arrived, and in the other CTA of a pair the same warp, which has nothing else to do there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels.lib.packed import Format, Held, PackedSelection, Places
from kernels.lib.ptx import keep, store_shared_words
from kernels.lib.selections import with_keys
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.tcgen05 import ATOM_ROWS, ROW_BYTES
from kernels.lib.wgmma import SLAB

from .config import Config


@dataclass(frozen=True)
class StagePart:
    """A thread's part of every key of a tile in the ring, of the slabs that this CTA has."""

    config: Config
    stage: Int32  # the address of the tile
    part: Int32  # of a row of a slab
    row0: Int32

    def put(self, slab: int, key: int, chunk: Int32, words: tuple[Uint32, ...]) -> None:
        c = self.config
        row = self.row0 + key * (c.team // c.lanes_a_key)
        place = c.slab_of(slab % (c.columns_k // SLAB)) * c.slab_bytes + row * ROW_BYTES
        store_shared_words(self.stage + place + (chunk ^ self.row0 % ATOM_ROWS) * 16, words)


@dataclass(frozen=True)
class Unpacking:
    """A thread's state while its team unpacks the keys of a tile of rows."""

    config: Config
    ring: Any  # Ring of key tiles
    keys: Int32  # where the first stage is
    sources: tuple[PackedSelection, ...]
    fills0: Int32  # of the ring, before these tiles
    thread: Int32  # of the team
    wanted: cute.Tensor  # int32 [keys]: entries of the lists
    places: Places
    held: tuple[Held, ...]  # for each range of slabs
    slabs: tuple[range, ...]

    @staticmethod
    def of(
        c: Config, ring: Any, keys: Int32, sources: tuple, fills0: Int32, thread: Int32, slabs: tuple
    ) -> "Unpacking":
        count = c.tile_n * c.lanes_a_key // c.team
        formats = tuple(dict.fromkeys(source.format for source in sources))
        held = tuple(Held.of(formats, [x], count) for x in slabs)
        wanted = cute.make_rmem_tensor((count,), Int32)
        return Unpacking(c, ring, keys, sources, fills0, thread % c.team, wanted, Places.of(count), held, slabs)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The sources' formats, each once."""
        return tuple(dict.fromkeys(source.format for source in self.sources))

    def on_format(self, t: Int32, action: Callable, *arguments: Any) -> None:
        """Runs `action` for the source of a tile, with a branch only where formats differ."""
        if len(self.formats) > 1:
            on_source(self.sources, t, action, *arguments)
        else:
            action(with_keys(self.sources, t), t, *arguments)

    def prefetch_indices(self, t: Int32) -> None:
        """Reads which keys of a tile this thread has."""
        on_source(self.sources, t, PackedSelection.prefetch_indices, self.wanted, self.thread, self.config.team)

    def locate(self, t: Int32) -> None:
        """Finds the places of the keys that were looked up."""
        on_source(self.sources, t, PackedSelection.locate, self.places, self.wanted, self.thread, self.config.team)

    def portions(self) -> list[tuple[int, int]]:
        """(range of slabs, key) of all that this thread has of a tile."""
        return [(half, key) for half in range(len(self.slabs)) for key in range(cute.size(self.wanted))]

    def fetch(self, t: Int32, half: int, key: int) -> None:
        """Loads a portion of tile t."""
        part = self.thread % self.config.lanes_a_key

        def load(source: PackedSelection, _: Int32) -> None:
            source.fetch_key(self.held[half], self.places, self.slabs[half], part, key)

        self.on_format(t, load)

    def unpack(self, t: Int32, half: int, key: int, place: StagePart) -> None:
        """Moves a portion of tile t, which was loaded, to where it belongs."""

        def convert(source: PackedSelection, _: Int32) -> None:
            source.unpack_key(self.held[half], self.places, self.slabs[half], place, key)

        self.on_format(t, convert)

    def replace(self, t: Int32, half: int, key: int, place: StagePart) -> None:
        """A portion of tile t to its place, and that of the team's next tile in its stead."""
        self.unpack(t, half, key, place)
        self.fetch(t + self.config.teams, half, key)

    @cute.jit
    def fill(self, first: Int32):
        """Fills the tiles first, first + teams, ..."""
        c, teams, lanes = self.config, self.config.teams, self.config.lanes_a_key
        self.prefetch_indices(first)
        self.locate(first)
        for portion in self.portions():
            self.fetch(first, *portion)
        self.prefetch_indices(first + teams)
        for t in cutlass.range(first, total_tiles(self.sources), teams, unroll=1):
            self.locate(t + teams)
            self.prefetch_indices(t + 2 * teams)
            state = self.ring.at(self.fills0 + t)
            state.wait_empty()
            stage = self.keys + state.index * c.stage_bytes
            place = StagePart(c, stage, self.thread % lanes, self.thread // lanes)
            for i in cutlass.range_constexpr(len(self.portions())):
                if always(t, i):
                    self.replace(t, *self.portions()[i], place)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                state.arrive_full()


def always(t: Int32, i: int) -> cutlass.Boolean:
    """True, which no compiler knows, nor from what it knows for lower i. ptxas would convert all portions at once, for
    which registers do not suffice, and ask for the next tile after them; it moves neither over a branch."""
    return keep(t) < 2**30 - i


@cute.jit
def unpack_tiles(
    c: cutlass.Constexpr,
    ring: Any,
    keys: Int32,
    sources: tuple,
    fills0: Int32,
    thread: Int32,
    slabs: cutlass.Constexpr,
):
    """This thread's share of all key tiles of a tile of rows."""
    first = cute.arch.make_warp_uniform(c.before_turn(fills0, thread))
    Unpacking.of(c, ring, keys, sources, fills0, thread, slabs).fill(first)
