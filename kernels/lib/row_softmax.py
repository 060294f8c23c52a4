"""Online softmax where a thread has a row of the scores, or a part of it.

As in lib/softmax.py the maximum is kept unscaled, and scale * log2(e) enters only in exp2.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .rows import BoxedRows, PlacedTile
from .selections import SelectedRows
from .softmax import exp2
from .spans import Span, span_of
from .wgmma import round_pair


@dataclass(frozen=True)
class RowSpan:
    """The interval of keys that a row sees."""

    source: Span
    start: Int32
    stop: Int32

    @property
    def tiles(self) -> Int32:
        return self.source.tiles

    def prefetch(self, t: Int32) -> None:
        """Nothing to read ahead of `mask`."""

    def is_cut(self, t: Int32) -> cutlass.Boolean:
        """Tells whether some row of the tile of rows does not see all keys of tile t."""
        span = self.source
        key0 = span.lo + t * span.tile_n
        return (key0 < span.lo_all) | (key0 + span.tile_n > span.hi_all)

    @cute.jit
    def mask(self, scores: cute.Tensor, t: Int32, part: Int32):
        """-inf for every key of tile t that the row does not see."""
        span = self.source
        key0 = span.lo + t * span.tile_n
        if self.is_cut(t):
            column0 = key0 + part * cute.size(scores)
            first, last = self.start - column0, self.stop - column0
            for i in cutlass.range_constexpr(cute.size(scores)):
                if i < first or i >= last:
                    scores[i] = -Float32.inf


@dataclass(frozen=True)
class RowSelection:
    """The selected keys, the same for all rows of a tile."""

    source: Any  # Selection
    rows: SelectedRows

    @property
    def tiles(self) -> Int32:
        return self.source.tiles

    def prefetch(self, t: Int32) -> None:
        self.rows.prefetch(t)

    @cute.jit
    def mask(self, scores: cute.Tensor, t: Int32, part: Int32):
        """-inf for every absent key of tile t; a part has 32 keys."""
        absent = self.rows.absent(t)
        bits = absent[0]
        if part == 1:
            bits = absent[1]
        if bits != Uint32(0):
            for i in cutlass.range_constexpr(cute.size(scores)):
                if bits & Uint32(1 << i) != Uint32(0):
                    scores[i] = -Float32.inf


def seen_by_row(source: Any, tile: PlacedTile, boxed: BoxedRows) -> RowSpan | RowSelection:
    if isinstance(source, Span):
        exists, query, _ = tile.place(boxed, 0)
        return RowSpan(source, *span_of(tile, source.operands, query, exists))
    return RowSelection(source, SelectedRows.of((source,)))


def prefetch(seen: Any, t: Int32) -> None:
    seen.prefetch(t)


def mask(seen: Any, t: Int32, scores: cute.Tensor, part: Int32) -> None:
    seen.mask(scores, t, part)


@cute.jit
def raise_max(row_max: Float32, scores: cute.Tensor) -> Float32:
    """The maximum of row_max and these scores."""
    a, b = row_max, scores[0]  # two chains have half the latency of one
    for i in cutlass.range_constexpr(1, cute.size(scores) - 1, 2):
        a, b = cute.arch.fmax(a, scores[i]), cute.arch.fmax(b, scores[i + 1])
    return cute.arch.fmax(cute.arch.fmax(a, b), scores[cute.size(scores) - 1])


@cute.jit
def shift_of(row_max: Float32, scale_log2: Float32) -> Float32:
    """The number to subtract in the exponent; 0 for a row without keys, whose exponentials are exp2(-inf) = 0."""
    return Float32(0.0) if row_max == -Float32.inf else row_max * scale_log2


@cute.jit
def exponentiate(
    row_sum: Float32, shift: Float32, scale_log2: Float32, scores: cute.Tensor, p: cute.Tensor, dtype
) -> Float32:
    """p <- exp(scale (scores - max)), rounded to pairs; the sum adds them up unrounded."""
    a, b = row_sum, Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(p)):
        low, high = (exp2(scores[2 * i + j] * scale_log2 - shift) for j in range(2))
        a, b = a + low, b + high
        p[i] = round_pair(low, high, dtype)
    return a + b
