"""A layer's experts in training, from matrices in bfloat16: the forward pass, which keeps what gates and up projections
make, and its gradient, by products of rows by group.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._dispatch.op import Arrays
from .._host import expert_product as raw
from .._host import expert_rows as raw_rows


class Grouped(NamedTuple):
    """Choices of experts by expert, those of one in their order, and at the end those of no expert here. So sums over
    an expert's rows have the same bits every time.
    """

    list: jax.Array
    """int32 `[rows]`, the choice in each place"""
    own: jax.Array
    """int32 `[1]`, of choices that have an expert here"""
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
    return Grouped(_sorted(group, e), first[-1:] + sizes[-1:], first, sizes, tiles, ends[-1:])


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
    e = w2.shape[1]
    by = grouped(chosen, e)
    where = by.list, by.tiles, by.tile_count
    made, inner = raw.expert_product_gated(_rows(x, by), w13[0], *where, weights.reshape(-1), limit=limit)
    y = raw.expert_product(inner, w2[0], *where)
    return _summed(y, chosen, e, x), made.reshape(*chosen.shape, *made.shape[1:])


def gradient(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, made: Any, dy: Any, *, limit: float) -> Arrays:
    """The gradients of x, weights, w13 and w2; made: what `forward` keeps."""
    e, _, n, k = w13.shape[1:]
    by = grouped(chosen, e)
    where, groups = (by.list, by.tiles, by.tile_count), (by.first, by.sizes)
    rows, of_rows = _rows(x, by), _rows(dy, by)
    of_made, inner, of_weights = raw.expert_product_gated_back(
        of_rows, w2[0], made.reshape(-1, 2, n), *where, weights.reshape(-1), limit=limit
    )
    of_made = of_made.reshape(-1, 2 * n)
    of_w2 = raw.expert_outer_product(of_rows, inner, *groups)
    of_w13 = raw.expert_outer_product(of_made, rows, *groups)
    of_x = _summed(raw.expert_product(of_made, w13.reshape(e, 2 * n, k), *where, turned=True), chosen, e, x)
    is_here = (chosen >= 0) & (chosen < e)
    of_weights = jnp.where(is_here, of_weights.sum(1).reshape(chosen.shape), 0)
    return of_x, of_weights, of_w13.reshape(w13.shape), of_w2[None]


def _rows(x: jax.Array, by: Grouped) -> jax.Array:
    """Rows of x `[b, s, k]` by expert; those of no expert are not written."""
    return raw_rows.expert_rows_taken(x.reshape(-1, x.shape[-1]), by.list, by.own)


def _summed(y: jax.Array, chosen: jax.Array, e: int, like: jax.Array) -> jax.Array:
    """The sum of the rows `[b s c, k]` of each token's experts; rows of others may hold anything."""
    return raw_rows.expert_rows_summed(y, chosen.reshape(-1, chosen.shape[-1]), e).reshape(like.shape)
