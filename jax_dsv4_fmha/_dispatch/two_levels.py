"""DeepSeek-V4.1's choice in two levels, by kernels: the indexer's scores or those at entries, and top-k.

A block of queries at a time, so that no more than `WORKSPACE` bytes of scores exist at once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.packed import LAYOUTS, layout_of_keys
from .._definitions.query_blocks import Arrays, over_queries
from .._definitions.ranks import number_of, rank_of
from .._host import indexer as raw
from .._host import library

BLOCKS = (1, 2, 4, 8, 16, 32)
"""Sizes of a block: a tile of scores is a multiple of four blocks."""


def has_kernel(block: int, from_start: bool, **choices: Any) -> bool:
    """True if every device here has a kernel of scores that judges blocks of that size."""
    return block == raw.BLOCK and not from_start and for_all("indexer_scores", **choices, blocks=True)


def greatest_blocks(*operands: jax.Array, count: int, block: int, from_start: bool) -> Arrays:
    """Works as `_definitions.indexer.greatest_blocks`, whose last block is always that of the newest entry: `count - 1`
    of those before it are chosen by their greatest scores, for which it needs no score of its own."""
    q, weights, k, k_scale, start, stop = operands
    if has_kernel(block, from_start, heads=q.shape[2], dtype=q.dtype.name, paged=False):
        best = functools.partial(raw.indexer_blocks, q, weights, k, k_scale, start, stop)
        return _with_newest(best, jnp.zeros_like(start), start, stop, count, block)

    def rows(q: jax.Array, weights: jax.Array, start: jax.Array, stop: jax.Array) -> Arrays:
        before = start if from_start else jnp.zeros_like(start)

        def best(oldest: jax.Array, newest: jax.Array, count: int) -> jax.Array:
            # A query that sees more than count + 1 blocks sees more than block * count entries.
            scores = raw.indexer_scores(q, weights, k, k_scale, start, stop, skip=block * count)
            if from_start:  # the scores of a query from its first entry on
                at = start[..., None] + jnp.arange(scores.shape[2], dtype=jnp.int32)
                scores = jnp.take_along_axis(scores, jnp.minimum(at, scores.shape[2] - 1), -1)
            return raw.indexer_topk(_greatest(scores, start - before, block), oldest, newest, topk=count)[0]

        return _with_newest(best, before, start, stop, count, block)

    words = (q.shape[0], k.shape[1], 1 + from_start)
    return over_queries(rows, _at_a_time(*words), q, weights, start, stop)


def choose_of_pages(*operands: jax.Array, topk: int, return_scores: bool) -> Arrays:
    """Does what `_definitions.indexer.select_of_pages` does, by kernels."""
    q, _, pool, *_ = operands
    return raw.paged_lightning_indexer(*operands, **_pages(q, pool), topk=topk, return_scores=return_scores)


def _pages(q: jax.Array, pool: jax.Array) -> dict[str, Any]:
    """The arguments of raw calls about a pool: the keys of a page, and their layout if q's dtype does not tell."""
    if pool.dtype != jnp.uint8:
        return {"page": pool.shape[2], "packing": ""}
    layout = layout_of_keys(q.dtype)
    return {"page": LAYOUTS[layout].page_entries(pool.shape[2]), "packing": packing_of(layout)}


def packing_of(layout: str) -> str:
    """The choice `packing` of a kernel that reads this layout of keys: e4m3 has one alone."""
    return layout if layout == "index_fp4" else ""


def greatest_blocks_of_pages(*operands: jax.Array, count: int, block: int, from_start: bool) -> Arrays:
    """Works as `_definitions.indexer.greatest_blocks_of_pages`, for blocks that a kernel judges."""
    q, _, pool, _, start, stop = operands
    best = functools.partial(raw.paged_indexer_blocks, *operands, **_pages(q, pool))
    return _with_newest(best, jnp.zeros_like(start), start, stop, count, block)


def _with_newest(
    best: Callable[..., jax.Array], before: jax.Array, start: jax.Array, stop: jax.Array, count: int, block: int
) -> Arrays:
    """`count - 1` of the blocks before the newest, which `best(oldest, newest, count=…)` chooses, and then that;
    blocks are counted from the entry `before`."""
    oldest, newest = (start - before) // block, (stop - 1 - before) // block
    there = jnp.where(stop > start, newest + 1 - oldest, 0)
    chosen = jnp.full((*start.shape, 1), -1, jnp.int32)
    if count > 1:
        chosen = jnp.concatenate([best(oldest, newest, count=count - 1), chosen], -1)
    last = jnp.minimum(there, count)[..., None] - 1
    return (jnp.where(jnp.arange(count, dtype=jnp.int32) == last, newest[..., None], chosen),)


def choose_within(*operands: jax.Array, topk: int, block: int, from_start: bool) -> Arrays:
    """Works as `_definitions.indexer.select_within`, for ascending blocks, of which a query sees contiguous entries."""
    q, weights, k, k_scale, blocks, start, stop = operands
    b, s_c = k.shape[:2]
    if has_kernel_within(block, from_start, heads=q.shape[2], dtype=q.dtype.name, paged=False):
        best = functools.partial(raw.indexer_within, q, weights, k, k_scale, topk=topk, from_start=from_start)
        return _entries(best, blocks, start, stop, s_c, from_start)
    fill = -blocks.shape[2] % 4  # top-k wants columns in fours
    blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, fill)), constant_values=-1)

    def rows(q: jax.Array, weights: jax.Array, blocks: jax.Array, start: jax.Array, stop: jax.Array) -> Arrays:
        is_block = (blocks >= 0) & (blocks < -(-s_c // block))
        entries = jnp.where(is_block, blocks, s_c)[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        entries += start[..., None, None] if from_start else 0
        before = is_block[..., None] & (entries < start[..., None, None])
        seen = is_block[..., None] & ~before & (entries < stop[..., None, None])
        first = jnp.sum(before, (2, 3), dtype=jnp.int32)
        last = first + jnp.sum(seen, (2, 3), dtype=jnp.int32)
        named = jnp.where(seen, entries, -1).reshape(*start.shape, -1)
        (scores,) = raw.indexer_scores_at(q, k, weights, named)
        if q.dtype == jnp.float8_e4m3fn:
            scores = scores * jax.vmap(lambda scale, i: scale[i])(k_scale, jnp.maximum(named, 0))
        where, values = raw.indexer_topk(scores, first, last, topk=topk, return_scores=True)
        indices = jnp.take_along_axis(named, jnp.maximum(where, 0), -1)
        return jnp.where(where < 0, -1, indices), values

    indices, values = over_queries(rows, _at_a_time(b, blocks.shape[2], 2 * block), q, weights, blocks, start, stop)
    return indices, values


def has_kernel_within(block: int, from_start: bool, **choices: Any) -> bool:
    """True if every device here has a kernel of the scores of such blocks' entries."""
    aligned = not (from_start and choices["paged"])  # a block's entries are in one page
    return block == raw.BLOCK and aligned and for_all("indexer_scores_within", **choices)


def for_all(op: str, **choices: Any) -> bool:
    """A program that is made where no device is runs on all architectures."""
    wanted = library.local_architectures() or library.architectures() or {v.arch for v in library.SHIPPED}
    return set(wanted) <= set(library.shipped_for(op, **choices))


def choose_within_pages(*operands: jax.Array, topk: int, block: int, from_start: bool) -> Arrays:
    """Works as `_definitions.indexer.select_within_pages`, for blocks whose entries a kernel scores."""
    *of_keys, blocks, start, stop = operands
    return _entries(
        functools.partial(raw.paged_indexer_within, *of_keys, topk=topk), blocks, start, stop, 2**31 - 1, False
    )


def _entries(
    best: Callable[..., tuple[jax.Array, jax.Array]],
    blocks: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    s_c: Any,
    from_start: bool,
) -> Arrays:
    """The entries at the places in lists of blocks that `best(blocks, start, first, last)` chooses, and their scores.

    Blocks ascend, so a query sees contiguous places of its list.
    """
    base = start if from_start else jnp.zeros_like(start)
    begin = blocks * raw.BLOCK + base[..., None]
    there = (blocks >= 0) & (blocks < -(-s_c // raw.BLOCK))

    def before(bound: jax.Array) -> jax.Array:
        """The number of entries of the list before a bound."""
        return jnp.sum(jnp.where(there, jnp.clip(bound[..., None] - begin, 0, raw.BLOCK), 0), -1, dtype=jnp.int32)

    where, values = best(jnp.where(there, blocks, -1), start, before(start), before(stop))
    block = jnp.take_along_axis(begin, jnp.maximum(where, 0) // raw.BLOCK, -1)
    return jnp.where(where < 0, -1, block + where % raw.BLOCK), values


def _greatest(scores: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """float32 `[b, n, blocks]`: the greatest score of every block, from `start` on; NaN where a block has no other."""
    b, n, s = scores.shape
    j = jnp.arange(s, dtype=jnp.int32)
    ranks = rank_of(jnp.where(j >= start[..., None], scores, jnp.nan)).reshape(b, n, s // block, block)
    rank = functools.reduce(jnp.maximum, (ranks[..., i] for i in range(block)))  # faster in XLA than its reductions
    return number_of(rank)


def _at_a_time(*words: Any) -> int:
    """The number of queries, each with so many words of scores, that fit in `WORKSPACE`; at least 1."""
    return max(1, raw.WORKSPACE // (4 * math.prod(n for n in words if isinstance(n, int))))
