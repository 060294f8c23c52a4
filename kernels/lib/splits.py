"""Split-KV: several CTAs share the keys of one row tile, and `kernels.plain.combine` merges their partial results.

Each split has an even share of the key tiles that the rows see, so sequences of different lengths stay balanced. A
share may be empty.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .rows import RowTile, ceil_div, divide


def total_tiles(sources: tuple) -> Int32:
    return sum((source.tiles for source in sources[1:]), sources[0].tiles)


@cute.jit
def on_source(sources: tuple, t: Int32, action: cutlass.Constexpr[Callable], *arguments):
    """action(source, its tile number, ...) for the source that has tile t of all tiles."""
    if cutlass.const_expr(len(sources) == 1):
        action(sources[0], t, *arguments)
    else:
        first = sources[0].tiles
        if t < first:
            action(sources[0], t, *arguments)
        else:
            action(sources[1], t - first, *arguments)


def own_part(sources: tuple, tile: RowTile, unit: int) -> tuple:
    """Narrows the opened sources to this tile's split, in whole units of so many key tiles."""
    share, rest = divide(ceil_div(total_tiles(sources), Int32(unit)), tile.n.splits)
    begin, end = ((share * i + cutlass.min(rest, i)) * unit for i in (tile.split, tile.split + 1))
    parts, before = [], Int32(0)
    for source in sources:
        first, last = (cutlass.max(cutlass.min(t - before, source.tiles), Int32(0)) for t in (begin, end))
        parts.append(source.part(first, last - first))
        before = before + source.tiles
    return tuple(parts)
