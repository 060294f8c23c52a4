"""A layer's experts in training, from matrices in bfloat16: the forward pass, which keeps what gates and up projections
make, and its gradient, by products of rows by group.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._dispatch.op import Arrays
from .._host import expert_product as raw


class Grouped(NamedTuple):
    """Choices of experts by expert, those of one in their order, and at the end those of no expert here. So sums over
    an expert's rows have the same bits every time.
    """

    list: jax.Array
    """int32 `[rows]`, the choice in each place"""
    source: jax.Array
    """the same, and 0 for those of no expert: to gather one row again and again takes no time"""
    first: jax.Array
    """int32 `[e]`, the first place of each expert"""
    sizes: jax.Array
    """int32 `[e]`, its rows"""
    tiles: jax.Array
    """int32 `[most, 4]`, as `raw.expert_product` takes them"""
    tile_count: jax.Array
    """int32 `[1]`, of tiles"""


def grouped(chosen: jax.Array, e: int) -> Grouped:
    """Sorts choices `[b, s, c]` by expert."""
    group = chosen.reshape(-1)
    group = jnp.where((group >= 0) & (group < e), group, e)
    sizes = (group == jnp.arange(e, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    first = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    parts = (sizes + (raw.TILE - 1)) // raw.TILE
    ends = jnp.cumsum(parts, dtype=jnp.int32)
    tile = jnp.arange(raw.room_for_tiles(group.shape[0], e), dtype=jnp.int32)
    its = jnp.minimum((ends <= tile[:, None]).sum(1, dtype=jnp.int32), e - 1)
    past = (tile - (ends - parts)[its]) * raw.TILE  # rows of the expert in tiles before
    tiles = jnp.stack([its, first[its] + past, jnp.minimum(sizes[its] - past, raw.TILE), jnp.zeros_like(its)], 1)
    places = _sorted(group, e)
    source = jnp.where(jnp.arange(group.shape[0], dtype=jnp.int32) < first[-1] + sizes[-1], places, 0)
    return Grouped(places, source, first, sizes, tiles, ends[-1:])


def _sorted(group: jax.Array, e: int) -> jax.Array:
    """The places of numbers up to e in their order, equal ones as they came: by one key each, if that has room."""
    rows = group.shape[0]
    bits = max(rows - 1, 1).bit_length() if isinstance(rows, int) else 32
    if (e + 1) << bits > 1 << 32:
        return jnp.argsort(group, stable=True).astype(jnp.int32)
    keys = group.astype(jnp.uint32) << bits | jnp.arange(rows, dtype=jnp.uint32)
    return (jnp.sort(keys) & ((1 << bits) - 1)).astype(jnp.int32)


def forward(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, *, limit: float) -> Arrays:
    """The sum over each token's experts, and `[b, s, c, 2, n]` in x's dtype: what gates and up projections make."""
    (e, _, n, k), c = w13.shape[1:], chosen.shape[2]
    by = grouped(chosen, e)
    rows = jnp.take(x.reshape(-1, k), by.source // c, 0, mode="clip")
    where = by.list, by.tiles, by.tile_count
    made = raw.expert_product(rows, w13.reshape(e, 2 * n, k), *where)
    inner = _inner(jnp.take(made, by.source, 0, mode="clip"), jnp.take(weights.reshape(-1), by.source), limit)
    y = raw.expert_product(inner.astype(x.dtype), w2[0], *where)
    return _summed(y, chosen, e, x), made.reshape(*chosen.shape, 2, n)


def gradient(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, made: Any, dy: Any, *, limit: float) -> Arrays:
    """The gradients of x, weights, w13 and w2; made: what `forward` keeps."""
    (e, _, n, k), c = w13.shape[1:], chosen.shape[2]
    by = grouped(chosen, e)
    where = by.list, by.tiles, by.tile_count
    rows, of_rows = (jnp.take(a.reshape(-1, k), by.source // c, 0, mode="clip") for a in (x, dy))
    given, weight = (
        jnp.take(made.reshape(-1, 2 * n), by.source, 0, mode="clip"),
        jnp.take(weights.reshape(-1), by.source),
    )
    of_inner = jnp.take(raw.expert_product(of_rows, w2[0], *where, turned=True), by.source, 0, mode="clip")
    inner, back = jax.vjp(lambda made, weight: _inner(made, weight, limit), given.astype(jnp.float32), weight)
    of_given, of_weight = back(of_inner.astype(jnp.float32))
    inner, of_given = inner.astype(x.dtype), of_given.astype(x.dtype)
    groups = by.first, by.sizes
    of_w2 = raw.expert_outer_product(of_rows, inner, *groups)
    of_w13 = raw.expert_outer_product(of_given, rows, *groups)
    of_x = _summed(raw.expert_product(of_given, w13.reshape(e, 2 * n, k), *where, turned=True), chosen, e, x)
    of_weights = jnp.zeros(chosen.size, jnp.float32).at[by.list].set(of_weight, unique_indices=True)
    of_weights = jnp.where(_here(chosen, e), of_weights.reshape(chosen.shape), 0)
    return of_x, of_weights, of_w13.reshape(w13.shape), of_w2[None]


def _inner(made: jax.Array, weight: jax.Array, limit: float) -> jax.Array:
    """float32 `[rows, n]`: what gates let through, times each row's weight."""
    gate, up = jnp.split(made.astype(jnp.float32), 2, 1)
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit) * weight[:, None]


def _here(chosen: jax.Array, e: int) -> jax.Array:
    return (chosen >= 0) & (chosen < e)


def _summed(y: jax.Array, chosen: jax.Array, e: int, like: jax.Array) -> jax.Array:
    """The sum of the rows `[b s c, k]` of each token's experts; rows of others may hold anything."""
    parts = jnp.where(_here(chosen, e)[..., None], y.reshape(*chosen.shape, -1), 0)
    return parts.astype(jnp.float32).sum(2).astype(like.dtype)
