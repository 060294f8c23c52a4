"""How a block's tokens become one: a softmax over them for each channel. Tokens have kv and then the scores."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._definitions import explicit_axes


def counted(first: jax.Array, begin: int, end: int) -> jax.Array:
    """int32 `[b, end - begin]`: the numbers from `first[n] + begin` to `first[n] + end - 1`, for first int32 `[b]`."""
    return first[:, None] + jnp.arange(begin, end, dtype=jnp.int32)[None]


def of_places(ape: jax.Array, positions: jax.Array) -> jax.Array:
    """ape `[ratio, channels]` at the places of tokens in their blocks, `[b, s, channels]`, for positions `[b, s]`."""
    positions = explicit_axes.whole(positions, 1)
    where = explicit_axes.sharding(positions, *explicit_axes.entries(positions), None)
    return ape.at[positions % ape.shape[0]].get(out_sharding=where)


def completed(start: jax.Array, lengths: jax.Array, s: int, ratio: int) -> jax.Array:
    """int32 `[b, ceil(s / ratio)]`: the entries whose last token is among the s tokens from `start` on and before
    `lengths`, both int32 `[b]`; -1 for an entry whose block is not complete.
    """
    entry = counted(start // ratio, 0, math.ceil(s / ratio))
    end = (entry + 1) * ratio
    return jnp.where((entry >= 0) & (end <= lengths[:, None]) & (end > start[:, None]), entry, -1)


def pool_ring(ring: jax.Array, entry: jax.Array, d: int, ratio: int) -> jax.Array:
    """Entries `[b, n]` before their norm, float32 `[b, n, d]`, from a ring `[b, capacity, …]` with all tokens that they
    pool.

    It takes the ring in place, by the age of each slot's token relative to the entry's last token. The order of
    pooled tokens does not matter, so nothing is moved. Entries come one by one: with an axis for them, XLA
    transposes the ring for its sums.
    """
    slots = jnp.arange(ring.shape[1], dtype=jnp.int32)[None]
    kv, score = jnp.split(ring, 2, -1)

    def pooled(there: jax.Array, of: slice) -> list[jax.Array]:
        some = score[..., of] + jnp.where(there, 0, -jnp.inf)[..., None]
        most = jnp.max(some, 1)
        weight = jnp.exp(some - jnp.maximum(most, -3e38)[:, None])
        return [most, jnp.sum(weight, 1), jnp.sum(weight * kv[..., of], 1)]

    def parts(entry: jax.Array) -> list[list[jax.Array]]:
        age = (((entry + 1) * ratio - 1)[:, None] - slots) % ring.shape[1]
        own = pooled(age < ratio, slice(-d, None))
        if kv.shape[2] == d:
            return [own]
        return [own, pooled((ratio <= age) & (age < 2 * ratio) & (entry > 0)[:, None], slice(d))]

    of_blocks = [parts(entry[:, i]) for i in range(entry.shape[1])]
    return joined(jax.tree.map(lambda *x: jnp.stack(x, 1), *of_blocks))


def joined(parts: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """What one or two blocks make: each has the greatest score, the sum of weights, and the sum of weights times kv."""
    most = functools.reduce(jnp.maximum, (part[0] for part in parts))
    scaled = [[jnp.exp(m - most) * x for x in sums] for m, *sums in parts]
    weights, pooled = (functools.reduce(jnp.add, sums) for sums in zip(*scaled, strict=True))
    return pooled / weights
