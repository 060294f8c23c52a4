"""Index keys that stand for several tokens each, as GLM-5.3-Flash has them, and the tokens that are chosen by them.

    key of a pool = Σ softmax(gate x + ape) · k_norm(wk x)                 over its tokens, for each number of a key

A query sees the tokens of the pools that it chose, and those of its own pool, if that is not whole.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .. import Cache
from .indexer import Indexer
from .outputs import LayerCache
from .pooling import counted


def states(indexer: Indexer, params: Any, x: jax.Array) -> jax.Array:
    """The key and the gate of each token, `[b, s, 2 d]`."""
    keys = indexer.keys(params, x, jnp.zeros((1, x.shape[1]), jnp.int32), None)
    return jnp.concatenate([keys, x @ params["gate"].astype(x.dtype)], -1)


def of_prompt(indexer: Indexer, params: Any, x: jax.Array) -> jax.Array:
    """The keys `[b, n, d]` of the whole pools of sequences."""
    b, s, _ = x.shape
    n = s // indexer.pool
    rows = states(indexer, params, x[:, : n * indexer.pool]).reshape(b, n, indexer.pool, 2 * indexer.d)
    return _pooled(indexer, params, rows)


def extended(
    indexer: Indexer,
    params: Any,
    x: jax.Array,
    cache: LayerCache,
    kept: jax.Array,
    first: jax.Array,
    lengths: jax.Array,
) -> LayerCache:
    """The cache with new tokens from `first` on, kept at these positions, and the pools that become whole by them."""
    assert cache.keys is not None and isinstance(cache.key_tokens, Cache)
    pool, s, new = indexer.pool, x.shape[1], states(indexer, params, x)
    earlier = cache.key_tokens.take(counted(first, 1 - pool, 0))
    every = jnp.concatenate([earlier, new], 1)
    which = first[:, None] // pool + jnp.arange(s // pool + 1, dtype=jnp.int32)[None]
    places = (which * pool - first[:, None] + pool - 1)[..., None] + jnp.arange(pool, dtype=jnp.int32)
    end = jnp.minimum(first + s, lengths)[:, None]
    is_whole = (places[..., -1] >= pool - 1) & ((which + 1) * pool <= end)
    rows = jax.vmap(lambda x, i: x[i])(every, jnp.clip(places, 0, every.shape[1] - 1))
    keys = cache.keys.append(_pooled(indexer, params, rows), jnp.where(is_whole, which, -1))
    return cache._replace(keys=keys, key_tokens=cache.key_tokens.append(new, kept))


def tokens(indexer: Indexer, pools: jax.Array, positions: jax.Array) -> jax.Array:
    """int32 `[b, s, n pool + pool - 1]`: the tokens of pools `[b, s, n]`, and those of a query's own, if not whole."""
    pool = indexer.pool
    inside = jnp.arange(pool, dtype=jnp.int32)
    chosen = jnp.where(pools[..., None] < 0, -1, pools[..., None] * pool + inside).reshape(*pools.shape[:2], -1)
    own = ((positions + 1) // pool * pool)[..., None] + inside[:-1]
    own = jnp.where(own <= positions[..., None], own, -1)
    return jnp.concatenate([chosen, jnp.broadcast_to(own, (*pools.shape[:2], pool - 1))], -1)


def _pooled(indexer: Indexer, params: Any, rows: jax.Array) -> jax.Array:
    """Keys `[b, n, d]` of the states of their tokens, `[b, n, pool, 2 d]`."""
    keys, gates = jnp.split(rows, 2, -1)
    weights = jax.nn.softmax(gates.astype(jnp.float32) + params["ape"].astype(jnp.float32)[None, None], 2)
    return jnp.sum(weights.astype(keys.dtype) * keys, 2)
