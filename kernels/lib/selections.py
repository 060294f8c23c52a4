"""Keys that differ from query to query, gathered row by row: a list of indices per query, or a run of keys.

An index < 0 or >= s_kv is absent, and so is every index after the query's length. Zeros replace absent keys, which are
masked, so no part of a key that no query sees is ever read.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .ptx import copy_or_zero
from .rows import ROWS, RowTile, load
from .softmax import by_row
from .splits import on_source
from .wgmma import SLAB

CHUNK = 8  # elements of one 16-byte copy
LANES_A_ROW = SLAB // CHUNK  # neighbouring lanes copy one 128-byte row of a slab


class SelectionOperands(NamedTuple):
    """Query i sees the keys indices[i, :length[i]] of s_kv."""

    keys: cute.Pointer  # [b, s_kv, d], or a pool [s_kv, d]
    indices: cute.Pointer  # int32 [b, s_q, topk]
    length: cute.Pointer  # int32 [b, s_q], any value
    s_kv: Int32
    s_batch: Int32  # distance between batch entries in keys: s_kv, or 0 where all share a pool
    topk: Int32

    def of_query(self, tile: RowTile, tile_n: int, d: int, skipped: Int32, length: Int32) -> "Selection":
        keys = self.keys + Int64(tile.batch) * self.s_batch * d
        indices = tile.at_query(self.indices, tile.first_query, self.topk) + skipped
        return Selection(self, tile_n, d, keys, indices, skipped, length)


class RunOperands(NamedTuple):
    """Query i sees the keys start[i] <= j < stop[i] of s_kv: a span whose keys are gathered like selected ones."""

    keys: cute.Pointer  # [b, s_kv, d]
    start: cute.Pointer  # int32 [b, s_q]
    stop: cute.Pointer  # int32 [b, s_q]
    s_kv: Int32

    def of_query(self, tile: RowTile, tile_n: int, d: int, first: Int32, length: Int32) -> "Run":
        keys = self.keys + Int64(tile.batch) * self.s_kv * d
        return Run(self, tile_n, d, keys, first, first, length)


GATHERED = {"selection": SelectionOperands, "span": RunOperands}  # operands by the kind of a source


def gathered(kinds: dict, kind: str, *given: Any) -> Any:
    """The operands of a source; a run has fewer than others."""
    operands = kinds[kind]
    return operands(*given[: len(operands._fields)])


@dataclass(frozen=True)
class Selection:
    """The selected keys of the one query whose heads make up a tile."""

    operands: SelectionOperands
    tile_n: int
    d: int
    keys: cute.Pointer  # keys of this tile's batch entry
    indices: cute.Pointer | Int32  # entries of this query; `skipped` come before them
    skipped: Int32
    length: Int32

    @property
    def tiles(self) -> Int32:
        return (self.length + self.tile_n - 1) // self.tile_n

    @cute.jit
    def read(self, position: Int32) -> Int32:
        """Reads the list's entry at any position. `is_present` judges it later, where it is needed, so loads stay in
        flight.
        """
        return load(self.indices + cutlass.max(cutlass.min(position, self.length - 1), Int32(0)))

    def is_present(self, position: Int32, index: Int32) -> cutlass.Boolean:
        return (position < self.length) & (index >= 0) & (index < self.operands.s_kv)

    def publish(self, slot: cute.Tensor) -> None:
        """To SMEM, for `read_selection`."""
        slot[0], slot[1] = self.skipped, self.length

    def part(self, first: Int32, count: Int32) -> "Selection":
        """Keeps only the key tiles first .. first + count."""
        before = first * self.tile_n
        skipped = cutlass.max(cutlass.min(before, self.length - 1), Int32(0))
        length = cutlass.max(cutlass.min(self.length - before, count * self.tile_n), Int32(0))
        return replace(self, indices=self.indices + skipped, skipped=self.skipped + skipped, length=length)

    @cute.jit
    def prefetch_entries(self, t: Int32, entries: cute.Tensor):
        """A warp reads the entries of tile t ahead, one for each lane and 32 keys."""
        for word in cutlass.range_constexpr(cute.size(entries)):
            entries[word] = self.read(t * self.tile_n + word * 32 + cute.arch.lane_idx())

    @cute.jit
    def find_absent(self, t: Int32, entries: cute.Tensor, absent: cute.Tensor):
        """absent <- a bit for every key of tile t, whose entries were prefetched: whether it is absent."""
        for word in cutlass.range_constexpr(cute.size(entries)):
            position = t * self.tile_n + word * 32 + cute.arch.lane_idx()
            absent[word] = ~Uint32(cute.arch.vote_ballot_sync(self.is_present(position, entries[word])))

    @property
    def lanes_a_key(self) -> int:
        """Eight lanes copy a row of a slab, so a thread has every (threads / 8)th row and always the same swizzle."""
        return LANES_A_ROW

    def position(self, t: Int32, i: int, thread: Int32, threads: int) -> Int32:
        """The position of the i-th key of tile t that a thread copies."""
        return t * self.tile_n + i * (threads // self.lanes_a_key) + thread // self.lanes_a_key

    @cute.jit
    def prefetch_indices(self, t: Int32, wanted: cute.Tensor, thread: Int32, threads: cutlass.Constexpr):
        """wanted <- the entries for the keys of tile t that this thread will copy."""
        for i in cutlass.range_constexpr(cute.size(wanted)):
            wanted[i] = self.read(self.position(t, i, thread, threads))

    @cute.jit
    def mark_absent(self, t: Int32, wanted: cute.Tensor, thread: Int32, threads: cutlass.Constexpr):
        """Marks what is absent among the entries prefetched for tile t, by -1."""
        for i in cutlass.range_constexpr(cute.size(wanted)):
            wanted[i] = wanted[i] if self.is_present(self.position(t, i, thread, threads), wanted[i]) else Int32(-1)

    @cute.jit
    def gather(
        self,
        tile: cute.Tensor,
        wanted: cute.Tensor,
        thread: Int32,
        slabs: cutlass.Constexpr,
        threads: cutlass.Constexpr,
        first_slab: cutlass.Constexpr = 0,
    ):
        """Issues the copies of some slabs of keys into a slab tile of all columns, or of those from `first_slab` on,
        with zeros for absent keys."""
        chunk, row0 = thread % LANES_A_ROW, thread // LANES_A_ROW
        target0 = tile.iterator.toint() + row0 * (SLAB * 2) + (chunk ^ row0 % 8) * 16
        for i in cutlass.range_constexpr(cute.size(wanted)):
            key, size = cutlass.max(wanted[i], Int32(0)), Int32(16) if wanted[i] >= 0 else Int32(0)
            source = self.keys + (Int64(key) * self.d + chunk * CHUNK)
            for slab in slabs:
                offset = ((slab - first_slab) * self.tile_n + i * (threads // LANES_A_ROW)) * SLAB * 2
                copy_or_zero(target0 + offset, (source + slab * SLAB).toint(), size)


@dataclass(frozen=True)
class Run(Selection):
    """Consecutive keys: `indices` is the first of them."""

    def read(self, position: Int32) -> Int32:
        return self.indices + position

    def is_present(self, position: Int32, index: Int32) -> cutlass.Boolean:
        return position < self.length


@cute.jit
def with_keys(selections: tuple[Selection, ...], t: Int32) -> Selection:
    """A selection from the array that holds the keys of tile t, so gathering needs no branch."""
    keys = selections[-1].keys
    if cutlass.const_expr(len(selections) == 2):  # noqa: SIM102, at compile time
        if t < selections[0].tiles:
            keys = selections[0].keys
    return replace(selections[-1], keys=keys)


def present(here: list[cutlass.Boolean], thread: Int32) -> Uint32:
    """A word of a warp: whether the i-th key that a thread copies of a tile is there, as `present_at` finds it."""
    bits, keys = Int32(0), 32 // LANES_A_ROW
    for i, x in enumerate(here):
        bits = bits | Int32(x) << i * keys
    return Uint32(cute.arch.warp_redux_sync(bits << thread % 32 // LANES_A_ROW, "or"))


def present_at(row: Int32, threads: int) -> tuple[Int32, Int32]:
    """(warp, bit) of a row of a key tile."""
    keys, at_a_time = 32 // LANES_A_ROW, threads // LANES_A_ROW
    return row % at_a_time // keys, row // at_a_time * keys + row % keys


@dataclass(frozen=True)
class SelectedRows:
    """A consumer warp's view of a key tile of these selections: the list's entries, one for each lane and 32 keys."""

    selections: tuple[Selection, ...]
    entries: cute.Tensor  # int32 [tile_n / 32]

    @staticmethod
    def of(selections: tuple[Selection, ...]) -> "SelectedRows":
        return SelectedRows(selections, cute.make_rmem_tensor(selections[0].tile_n // 32, Int32))

    def prefetch(self, t: Int32) -> None:
        """Reads the entries of tile t, ahead of `mask`."""
        on_source(self.selections, t, Selection.prefetch_entries, self.entries)

    def absent(self, t: Int32) -> cute.Tensor:
        """A bit for every key of tile t: whether it is absent."""
        bits = cute.make_rmem_tensor(cute.size(self.entries), Uint32)
        on_source(self.selections, t, Selection.find_absent, self.entries, bits)
        return bits

    @cute.jit
    def mask(self, scores: cute.Tensor, t: Int32):
        """-inf for every absent key of tile t."""
        mask_absent(scores, self.absent(t))


@cute.jit
def mask_absent(scores: cute.Tensor, absent: cute.Tensor):
    """-inf for every key whose bit is set in these words."""
    lane, anything = cute.arch.lane_idx(), Uint32(0)
    for word in cutlass.range_constexpr(cute.size(absent)):
        anything = anything | absent[word]
    if anything != Uint32(0):
        s = by_row(scores)
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            column = i % 2 + i // 2 * 8
            bits = absent[column // 32] >> Uint32(lane % 4 * 2)
            if bits & Uint32(1 << column % 32) != Uint32(0):
                for r in cutlass.range_constexpr(ROWS):
                    s[r, i] = -Float32.inf


@cute.jit
def open_selection(operands: Any, tile: RowTile, tile_n: cutlass.Constexpr, d: cutlass.Constexpr) -> Selection:
    first = Int32(0)
    if cutlass.const_expr(isinstance(operands, RunOperands)):
        first = cutlass.max(of_query(operands.start, tile), first)
        length = cutlass.min(of_query(operands.stop, tile), operands.s_kv) - first
    else:
        length = cutlass.min(of_query(operands.length, tile), operands.topk)
    return operands.of_query(tile, tile_n, d, first, cutlass.max(length, Int32(0)))


def of_query(numbers: cute.Pointer, tile: RowTile) -> Int32:
    return cute.arch.make_warp_uniform(load(tile.at_query(numbers, tile.first_query)))


def read_selection(operands: SelectionOperands, tile: RowTile, tile_n: int, d: int, slot: cute.Tensor) -> Selection:
    return operands.of_query(tile, tile_n, d, *(cute.arch.make_warp_uniform(slot[i]) for i in range(2)))
