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

    Key tile t starts at lo + t * tile_n, wherever lo is. Up to `most` keys behind a last pair of tiles are no
    tile but a tail.
    """

    operands: SpanOperands
    tile: RowTile
    tile_n: int
    lo: Int32
    hi: Int32
    lo_all: Int32
    hi_all: Int32
    most: int = 0

    @property
    def tiles(self) -> Int32:
        return (self.hi - self.lo - self.tail + self.tile_n - 1) // self.tile_n

    @property
    def tail(self) -> Int32:
        keys = self.hi - self.lo
        rest = keys % (2 * self.tile_n)
        return rest * Int32((rest <= self.most) & (keys > rest)) if self.most else Int32(0)

    def unseen_from(self, t: Int32) -> Int32:
        """The first row of key tile t that no query sees; at least tile_n if there is none."""
        return self.hi - self.lo - t * self.tile_n

    def needs_clearing(self, t: Int32) -> cutlass.Boolean:
        """Whether keys that no query sees are loaded with tile t. As values they would count 0 * NaN if they are NaN.

        Behind the last key of the array TMA fills zeros.
        """
        return (self.unseen_from(t) < self.tile_n) & (self.hi < self.operands.s_kv)

    def part(self, first: Int32, count: Int32) -> "Span":
        """The key tiles first .. first + count alone."""
        lo = cutlass.min(self.lo + first * self.tile_n, self.hi)
        hi = cutlass.min(
            self.hi, lo + count * self.tile_n + self.tail * Int32((count > 0) & (first + count == self.tiles))
        )
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

    def foresee(self, t: Int32) -> None:
        """Nothing to read ahead of `mask`."""

    @cute.jit
    def mask(self, scores: cute.Tensor, t: Int32):
        """-inf for every key of tile t that its row does not see."""
        span = self.span
        key0 = span.lo + t * span.tile_n
        if key0 < span.lo_all or key0 + span.tile_n > span.hi_all:
            s = by_row(scores)
            column0 = key0 + cute.arch.lane_idx() % 4 * 2
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(2):
                    seen = bits(self.start[r] - column0 - c, self.stop[r] - column0 - c)
                    for j in cutlass.range_constexpr(cute.size(s, mode=[1]) // 2):
                        if seen & (1 << j) == 0:
                            s[r, 2 * j + c] = -Float32.inf


def bits(first: Int32, last: Int32) -> Int32:
    """Bit j is set where first <= 8 j < last, j < 31.

    A register that is tested bit by bit costs one instruction for seven elements, two comparisons two for each.
    """
    low, high = (cutlass.min(cutlass.max((x + 7) >> 3, 0), 31) for x in (first, last))
    return (Int32(-1) << low) & ~(Int32(-1) << high)


def span_of(tile: RowTile, operands: SpanOperands, query: Int32, exists: cutlass.Boolean) -> tuple[Int32, Int32]:
    """Loaded whether the row exists or not: a branch would wait for each load in turn."""
    query = cutlass.min(query, tile.n.s_q - 1)
    start, stop = load_span(operands, tile, query)
    return start * Int32(exists), stop * Int32(exists)


@cute.jit
def ask_span(operands: SpanOperands, tile: RowTile, at_most: cutlass.Constexpr) -> tuple:
    """By a warp: start and stop of a tile's queries, of which there are at most so many.

    All loads are issued before the first is waited for. Behind the last query comes the last one again.
    """
    first, last = tile.first_query + cute.arch.lane_idx(), tile.last_query
    return tuple(load_span(operands, tile, cutlass.min(first + i, last)) for i in range(0, at_most, WARP))


def load_span(operands: SpanOperands, tile: RowTile, query: Int32) -> tuple[Int32, Int32]:
    return load(tile.at_query(operands.start, query)), load(tile.at_query(operands.stop, query))


@cute.jit
def open_span(
    operands: SpanOperands, tile: RowTile, tile_n: cutlass.Constexpr, asked: tuple, most: cutlass.Constexpr = 0
) -> Span:
    """By a warp, which has `ask_span`-ed."""
    lo, hi = Int32(2**31 - 1), Int32(0)
    lo_all, hi_all = Int32(0), Int32(2**31 - 1)
    for start, stop in asked:
        lo_all = cutlass.max(lo_all, start)
        hi_all = cutlass.min(hi_all, stop)
        if start < stop:
            lo = cutlass.min(lo, start)
            hi = cutlass.max(hi, stop)
    lo = cute.arch.warp_redux_sync(lo, "min")
    hi = cute.arch.warp_redux_sync(hi, "max")
    lo_all = cute.arch.warp_redux_sync(lo_all, "max")
    hi_all = cute.arch.warp_redux_sync(hi_all, "min")
    return Span(operands, tile, tile_n, cutlass.min(lo, hi), hi, lo_all, hi_all, most)


def read_span(operands: SpanOperands, tile: RowTile, tile_n: int, slot: cute.Tensor, most: int = 0) -> Span:
    return Span(operands, tile, tile_n, *(cute.arch.make_warp_uniform(slot[i]) for i in range(4)), most)
