"""The tile scheduler: which tiles of rows a persistent CTA works on, in what order."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .rows import Extents, RowTile, count, divide


@dataclass(frozen=True)
class TileScheduler:
    """The tiles that one CTA works on, one in each wave of all CTAs. Each split of a tile of rows is a tile here.

    The last queries of all (batch, KV head) pairs come first, because under a causal mask they see most keys. CTA c of
    g takes the tiles c, 2 g - 1 - c, 2 g + c, ...: if lengths fall steadily, all CTAs get the same sum.

    Pairs may come in sections instead, so that L2 holds the keys of a section. The last section begins with the last
    queries of its pairs, the section before it ends with them, and so on. Lengths then fall and rise, and with the
    tiles c, g + c, 2 g + c, ... all CTAs get the same sum again.

    A CTA may take `run` tiles in a row, which share keys, as long as every CTA gets as many.
    """

    n: Extents
    section: Int32  # pairs
    sections: Int32
    waves: Int32  # in which this CTA has a tile
    run: int = 1
    cluster: int = 1  # CTAs that take neighbouring tiles

    @staticmethod
    def of(n: Extents, s_kv: Int32 | None = None, keys: int = 0, run: int = 1, cluster: int = 1) -> "TileScheduler":
        """Sections of at most this many keys, where a pair has s_kv."""
        (section, sections), ctas = (n.pairs, Int32(1)), cute.arch.grid_dim()[0] // cluster
        if s_kv is not None:
            section, sections = sections_of(n.pairs, s_kv, keys)
        full = count(n.work, ctas) - 1  # waves, and a last one, in which some may have nothing to do
        mine = place_in_wave(full, sections, cluster) < n.work - full * ctas
        return TileScheduler(n, section, sections, full + Int32(mine), run, cluster)

    @cute.jit
    def index(self, wave: Int32) -> Int32:
        """The index of this CTA's tile among all work."""
        ctas = cute.arch.grid_dim()[0] // self.cluster
        i = wave * ctas + place_in_wave(wave, self.sections, self.cluster)
        if cutlass.const_expr(self.run > 1):
            first = wave - wave % self.run
            if (first + self.run) * ctas <= self.n.work:
                place = place_in_wave(wave // self.run, self.sections, self.cluster)
                i = first * ctas + place * self.run + wave % self.run
        return i

    def tile(self, wave: Int32) -> RowTile:
        n = self.n
        i, split = divide(self.index(wave), n.splits)
        section, place = divide(i, self.section * n.tiles_of_pair)
        tile, pair = divide(place, cutlass.min(self.section, n.pairs - section * self.section))
        tile = mirrored(tile, n.tiles_of_pair, (self.sections - section) % 2 == 1)
        outer, inner = divide(tile, n.tiles_inner)
        inner = inner * self.cluster + cute.arch.block_idx()[0] % self.cluster
        batch, head = divide(section * self.section + pair, n.h_kv)
        return RowTile(n, split, batch, head, inner * n.box_inner, outer * n.box_outer)


@cute.jit
def sections_of(pairs: Int32, s_kv: Int32, keys: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """(pairs of a section, sections): an even number of sections where there is more than one pair."""
    section, sections = (pairs + 1) // 2, 1 + Int32(pairs > 1)
    if Int64(section) * s_kv > keys:
        at_most = cutlass.max(divide(Int32(keys), s_kv)[0], 1)
        section = count(pairs, 2 * count(pairs, 2 * at_most))
        sections = count(pairs, section)
    return section, sections


def place_in_wave(wave: Int32, sections: Int32, cluster: int) -> Int32:
    """In a single section every other wave goes backwards."""
    place, places = cute.arch.block_idx()[0] // cluster, cute.arch.grid_dim()[0] // cluster
    return mirrored(place, places, (wave % 2 == 1) & (sections == 1))


@cute.jit
def mirrored(i: Int32, count: Int32, backwards: cutlass.Boolean) -> Int32:
    if backwards:
        i = count - 1 - i
    return i
