"""Reads off the order in which a launch adds a query's keys, from its results alone.

All scores are equal and every value is 1, except for two keys in each column, whose values are 2^40 and -2^40. What is
added before these two have cancelled is lost in their rounding; the column's result counts the keys that are added
later. So it says how much has been summed when the two meet, as in FPRev (arXiv 2411.00442).
"""

import itertools
from collections.abc import Sequence

import numpy as np

BLOCK = 16  # keys that a WGMMA adds in one step
HUGE = 2.0**40


def pairs(blocks: int) -> list[tuple[int, int]]:
    """Every pair of blocks."""
    return list(itertools.combinations(range(blocks), 2))


def probing(blocks: Sequence[Sequence[int]], keys: int, d: int) -> np.ndarray:
    """Values `[keys, d]` of keys that stand in these blocks: in each half of the columns, one column for every pair."""
    v = np.ones((keys, d), np.dtype("bfloat16"))
    for half in (0, d // 2):
        for column, (i, j) in enumerate(pairs(len(blocks)), half):
            v[blocks[i][0], column], v[blocks[j][-1], column] = HUGE, -HUGE
    return v


def read_off(o: np.ndarray, blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns, for each half of the columns and each pair of blocks, how many keys are added after the two have met."""
    keys, n = sum(map(len, blocks)), len(pairs(len(blocks)))
    return [[round(float(x) * keys) for x in o[first : first + n]] for first in (0, o.size // 2)]


def in_turn(blocks: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Returns what is read off where one block after the other is added, in this order."""
    rank = {block: i for i, block in enumerate(order)}
    after = [sum(len(blocks[b]) for b in order[i + 1 :]) for i in range(len(order))]
    return [after[max(rank[i], rank[j])] for i, j in pairs(len(blocks))]


def blocks_of(lengths: Sequence[int], tile: int = 64) -> tuple[list[list[int]], list[list[int]]]:
    """Keys of sources of these lengths, in blocks, and the blocks of each tile: tiles count from a source's start."""
    blocks: list[list[int]] = []
    tiles: list[list[int]] = []
    first = 0
    for length in lengths:
        for t in range(0, length, tile):
            own = range(t, min(t + tile, length), BLOCK)
            tiles.append(list(range(len(blocks), len(blocks) + len(own))))
            blocks += [list(range(first + i, first + min(i + BLOCK, length))) for i in own]
        first += length
    return blocks, tiles


def canonical(tiles: Sequence[Sequence[int]], few_heads: bool) -> list[list[int]]:
    """The order of blocks in each half of the columns, as docs/bits.md has it."""
    one_by_one = [block for tile in tiles for block in tile]
    odd_first = [b for i in range(0, len(tiles), 2) for tile in reversed(tiles[i : i + 2]) for b in tile]
    return [one_by_one, one_by_one if few_heads else odd_first]
