"""DeepSeek-V4.1's choice in two levels: an indexer chooses blocks of entries, and later ones entries within them."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from .. import Span
from .._indexer_reference import best, over_queries, scores

_BLOCK = 2**24  # products of a query and a key, by head, that are alive at a time


def two_levels(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    *,
    topk: int,
    ratio: int,
    q_offset: int | jax.Array = 0,
    block: int,
    makes: int = 0,
    within: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`lightning_indexer` in two levels, in plain `jnp`.

    Args:
      q, k, weights, topk, ratio, q_offset: as in `lightning_indexer`.
      block: entries of a block.
      makes: how many blocks to choose for later layers: the newest that is visible, and those whose best entries have
        the greatest scores.
      within: int32 `[b, s_q, n]`: the blocks to choose entries from; -1 is none. None is all.

    Returns:
      indices as `lightning_indexer` does, and the blocks that were asked for, int32 `[b, s_q, makes]`, or None.
    """
    (b, s_q, h, _), s_c = q.shape, k.shape[1]
    q, k, weights = map(lax.stop_gradient, (q, k, weights))
    start, stop = Span.compressed(s_q, ratio, q_offset).bounds(b, s_q, s_c)
    n_blocks = -(-s_c // block)
    allowed = jnp.full((b, s_q, 1), -1, jnp.int32) if within is None else within

    def rows(
        q: jax.Array, weights: jax.Array, start: jax.Array, stop: jax.Array, allowed: jax.Array
    ) -> tuple[jax.Array, ...]:
        j = jnp.arange(s_c, dtype=jnp.int32)
        visible = (start[..., None] <= j) & (j < stop[..., None])
        i = scores(q, k, weights)
        blocks: tuple[jax.Array, ...] = ()
        if makes:
            padding = ((0, 0), (0, 0), (0, n_blocks * block - s_c))
            seen = jnp.pad(visible, padding).reshape(*visible.shape[:2], n_blocks, block)
            greatest = jnp.max(jnp.where(seen, jnp.pad(i, padding).reshape(seen.shape), -jnp.inf), -1)
            newest = (stop[..., None] - 1) // block
            greatest = jnp.where(jnp.arange(n_blocks) == newest, jnp.inf, greatest)
            blocks = best(greatest, seen.any(-1), makes)[:1]
        if within is not None:
            none = jnp.zeros(n_blocks, bool)
            mark = jax.vmap(jax.vmap(lambda i: none.at[i].set(True, mode="drop")))
            visible &= jnp.repeat(mark(jnp.where(allowed < 0, n_blocks, allowed)), block, -1)[..., :s_c]
        return best(i, visible, topk)[0], *blocks

    size = max(1, _BLOCK // math.prod((b, h, s_c)))
    indices, *blocks = over_queries(rows, size, q, weights, start, stop, allowed)
    return indices, blocks[0] if blocks else None
