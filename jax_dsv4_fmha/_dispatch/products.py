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
    row = BY_PRODUCTS[products][tuple(kind for source in sources for kind in source.kinds)]
    parts = [_in_codes(source, rope=products == e4m3.BF16_ROPE) for source in sources]
    return row.run(q, *row.operands(*parts), sink, scale=scale)


def _in_codes(source: Source, rope: bool) -> Part:
    """A part with codes as keys; no key is in memory in between."""
    part, pool, slots, packing = _located(source)
    return dataclasses.replace(
        part, keys=key_codes.key_codes(*_in_pool(pool, slots, packing), packing=packing, rope=rope)
    )


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
