"""Keys that lie contiguously: one interval per query, start <= j < stop."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .rows import ROWS, WARP, BoxedRows, RowTile, load
from .softmax import by_row


class SpanOperands(NamedTuple):
    """Query i sees the keys start[i] <= j < stop[i] of s_kv."""

    start: cute.Pointer  # int32 [b, s_q]
    stop: cute.Pointer  # int32 [b, s_q]
    s_kv: Int32


@dataclass(frozen=True)
class Span:
    """The intervals of a tile's rows: [lo, hi) is their union, [lo_all, hi_all) what every row sees.

    Key tile t begins `begin(t)` keys after lo; every other tile has tile_n + `extra_keys`.
    """

    operands: SpanOperands
    tile: RowTile
    tile_n: int
    lo: Int32
    hi: Int32
    lo_all: Int32
    hi_all: Int32
    extra_keys: int = 0

    @property
    def tiles(self) -> Int32:
        keys = self.hi - self.lo
        if not self.extra_keys:
            return (keys + self.tile_n - 1) // self.tile_n
        pairs, rest = keys // self.begin(2), keys % self.begin(2)
        return 2 * pairs + Int32(rest > 0) + Int32(rest > self.tile_n)

    def begin(self, t: Int32 | int) -> Int32 | int:
        """The distance of key tile t from lo."""
        return t * self.tile_n + (t // 2 * self.extra_keys if self.extra_keys else 0)

    def first_key(self, t: Int32 | int) -> Int32:
        """The first key of tile t."""
        return self.lo + self.begin(t)

    def unseen_from(self, t: Int32) -> Int32:
        """The first row of key tile t that no query sees; at least tile_n if there is none."""
        return self.hi - self.first_key(t)

    def needs_clearing(self, t: Int32) -> cutlass.Boolean:
        """Tells whether tile t also loads keys that no query sees. As values they would add 0 * NaN if they are NaN.

        After the last key of the array TMA fills in zeros.
        """
        return (self.unseen_from(t) < self.tile_n) & (self.hi < self.operands.s_kv)

    def part(self, first: Int32, count: Int32) -> "Span":
        """Keeps only the key tiles first .. first + count."""
        lo = cutlass.min(self.lo + self.begin(first), self.hi)
        hi = cutlass.min(self.hi, self.lo + self.begin(first + count))
        return replace(self, lo=lo, hi=hi)

    def publish(self, slot: cute.Tensor) -> None:
        """To SMEM, for `read_span`."""
        for i, x in enumerate((self.lo, self.hi, self.lo_all, self.hi_all)):
            slot[i] = x

    def of_rows(self, rows: BoxedRows) -> "RowSpans":
        start, stop = cute.make_rmem_tensor(ROWS, Int32), cute.make_rmem_tensor(ROWS, Int32)
        for r in range(ROWS):
            exists, query, _ = self.tile.place(rows, r)
            start[r], stop[r] = span_of(self.tile, self.operands, query, exists)
        return RowSpans(self, start, stop)


@dataclass(frozen=True)
class RowSpans:
    """The intervals of the rows that a thread holds; a row that does not exist sees nothing."""

    span: Span
    start: cute.Tensor
    stop: cute.Tensor

    @property
    def tiles(self) -> Int32:
        return self.span.tiles

    @cute.jit
    def mask(self, scores: cute.Tensor, t: Int32):
        """-inf for every key of tile t that its row does not see."""
        s, span = by_row(scores), self.span
        key0, keys = span.first_key(t), 4 * cute.size(s, mode=[1])
        if key0 < span.lo_all or key0 + keys > span.hi_all:
            column0 = key0 + cute.arch.lane_idx() % 4 * 2
            for r in cutlass.range_constexpr(ROWS):
                mask_row(s, r, self.start[r] - column0, self.stop[r] - column0)


@cute.jit
def mask_row(s: cute.Tensor, r: cutlass.Constexpr, start: Int32, stop: Int32):
    """-inf for the keys of row r outside start <= j < stop, counted from the thread's first one."""
    for c in cutlass.range_constexpr(2):
        seen = bits(start - c, stop - c)
        for j in cutlass.range_constexpr(cute.size(s, mode=[1]) // 2):
            if seen & (1 << j) == 0:
                s[r, 2 * j + c] = -Float32.inf


def bits(first: Int32, last: Int32) -> Int32:
    """Bit j is set where first <= 8 j < last, j < 31.

    Testing a register bit by bit costs one instruction for seven elements; two comparisons cost two for each element.
    """
    low, high = (cutlass.min(cutlass.max((x + 7) >> 3, 0), 31) for x in (first, last))
    return (Int32(-1) << low) & ~(Int32(-1) << high)


def span_of(tile: RowTile, operands: SpanOperands, query: Int32, exists: cutlass.Boolean) -> tuple[Int32, Int32]:
    """Loads whether the row exists or not: a branch would wait for each load in turn."""
    query = cutlass.min(query, tile.n.s_q - 1)
    start, stop = clip(operands, load_span(operands, tile, query))
    return start * Int32(exists), stop * Int32(exists)


@cute.jit
def prefetch_span(operands: SpanOperands, tile: RowTile, at_most: cutlass.Constexpr) -> tuple:
    """A warp loads start and stop of a tile's queries, at most this many, for `open_span`.

    It issues all loads before it waits for the first. After the last query it repeats the last one.
    """
    first, last = tile.first_query + cute.arch.lane_idx(), tile.last_query
    return tuple(load_span(operands, tile, cutlass.min(first + i, last)) for i in range(0, at_most, WARP))


def load_span(operands: SpanOperands, tile: RowTile, query: Int32) -> tuple[Int32, Int32]:
    return load(tile.at_query(operands.start, query)), load(tile.at_query(operands.stop, query))


def clip(operands: SpanOperands, keys: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
    """Start and stop clipped to the keys of the array."""
    start, stop = keys
    return cutlass.max(start, 0), cutlass.min(stop, operands.s_kv)


@cute.jit
def open_span(
    operands: SpanOperands,
    tile: RowTile,
    tile_n: cutlass.Constexpr,
    bounds: tuple,
    extra_keys: cutlass.Constexpr = 0,
) -> Span:
    """A warp opens the span, after `prefetch_span`."""
    lo, hi = Int32(2**31 - 1), Int32(0)
    lo_all, hi_all = Int32(0), Int32(2**31 - 1)
    for keys in bounds:
        start, stop = clip(operands, keys)
        lo_all = cutlass.max(lo_all, start)
        hi_all = cutlass.min(hi_all, stop)
        if start < stop:
            lo = cutlass.min(lo, start)
            hi = cutlass.max(hi, stop)
    lo = cute.arch.warp_redux_sync(lo, "min")
    hi = cute.arch.warp_redux_sync(hi, "max")
    lo_all = cute.arch.warp_redux_sync(lo_all, "max")
    hi_all = cute.arch.warp_redux_sync(hi_all, "min")
    return Span(operands, tile, tile_n, cutlass.min(lo, hi), hi, lo_all, hi_all, extra_keys)


def read_span(operands: SpanOperands, tile: RowTile, tile_n: int, slot: cute.Tensor, extra_keys: int = 0) -> Span:
    return Span(operands, tile, tile_n, *(cute.arch.make_warp_uniform(slot[i]) for i in range(4)), extra_keys)
