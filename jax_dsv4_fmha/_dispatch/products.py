"""Attention by products of e4m3: what keys become, by definition and for a kernel."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import reference
from .._definitions import e4m3
from .._definitions.packed import LAYOUTS
from .._host import key_codes
from .cached import CachedSource
from .op import Arrays
from .sources import Part, Source
from .tables import BY_PRODUCTS, without_heads

DIFFERENTIATED = "products=None, or implementation='reference', which has the gradient as if nothing were rounded"


def definition(q: Any, sources: Sequence[Source], sink: Any, scale: float, products: str) -> Arrays:
    """Rounded q, keys and weights, in float32."""
    parts = [part for source in sources for part in source.parts()]
    q32, *keys = reference.rounded_for_products(products, q, *(without_heads(part.keys) for part in parts))
    parts = [dataclasses.replace(part, keys=k) for part, k in zip(parts, keys, strict=True)]
    o, lse = reference.merge([part.reference(q32, None, scale, products=products) for part in parts], sink)
    return o[..., : q.shape[-1]].astype(q.dtype), lse


def by_kernel(q: Any, sources: Sequence[Source], sink: Any, scale: float, products: str) -> Arrays:
    parts, units = _in_codes(sources, q.shape[0], rope=products == e4m3.BF16_ROPE)
    row = BY_PRODUCTS[products][tuple(kind for source in sources for kind in source.kinds)]
    return row.run(q, *row.operands(*parts), sink, units, scale=scale)


def _in_codes(sources: Sequence[Source], b: int, rope: bool) -> tuple[list[Part], jax.Array]:
    """Parts with codes as keys, and the unit of each batch entry's, float32 [b]; no key is in memory in between."""
    found = [_located(source) for source in sources]
    how = [(*_in_pool(pool, slots, packing), packing) for _, pool, slots, packing in found]
    of_all = min(slots.shape[0] for _, slots, _ in how)  # 1 where a pool is among them: all sequences have one unit
    top, first = jnp.zeros(of_all, jnp.int32), []
    for pool, slots, packing in how:
        codes, taken, top = key_codes.key_codes(pool, slots.reshape(of_all, -1), top, packing=packing, rope=rope)
        first.append((codes, taken))
    made = []
    for (part, *_), (pool, slots, packing), x in zip(found, how, first, strict=True):
        (codes,) = key_codes.key_codes_again(pool, slots.reshape(of_all, -1), top, *x, packing=packing)
        made.append(dataclasses.replace(part, keys=codes.reshape(*slots.shape, -1)))
    unit = e4m3.unit_of(jax.lax.bitcast_convert_type(top, jnp.float32)[:, None], axes=1)
    return made, jnp.broadcast_to(unit.reshape(-1), (b,))


def _located(source: Source) -> tuple[Part, jax.Array, jax.Array, str]:
    """A part without its keys, where these are, [b or 1, rows, d] or [b or 1, pages, page_bytes], the slots that they
    have there, and their layout; "" where they are not packed."""
    if isinstance(source, CachedSource):
        slots, part = source.located()
        return part, source.pool, slots, source.layout if source.is_packed else ""
    (part,) = source.parts()
    keys = without_heads(part.keys)
    return part, keys, jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape[:2]), ""


def _in_pool(pool: jax.Array, slots: jax.Array, packing: str) -> tuple[jax.Array, jax.Array]:
    """All of it as one pool, and slots of that."""
    entries = pool.shape[1] * (LAYOUTS[packing].page_entries(pool.shape[2]) if packing else 1)
    if pool.shape[0] != 1:
        first = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None] * entries
        slots = jnp.where(slots < 0, slots, first + slots)
    return pool.reshape(-1, pool.shape[2]), slots
