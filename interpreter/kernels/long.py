"""Operands for clocks: a tile of rows or two that see many keys, all of them, on one processor."""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.abi import Forward
from kernels.packings import PACKED

from ..machine.state import Array
from . import attention


def operands(
    variant: Forward, tile_m: int, keys: int, *, queries: int | None = None, heads: int | None = None
) -> attention.Operands:
    """Every query sees `keys` keys of each source. Without more: as many heads and queries as fill one tile of rows, or
    two queries with as many heads as fill one each."""
    dense = variant.op == "mha_fwd"
    heads = heads or (1 if dense else min(tile_m, variant.max_heads))
    queries = queries or (tile_m if dense else 2)
    packed = variant.sources[0] in PACKED
    extents = {"b": 1, "s_q": queries, "h_q": heads, "topk": keys}
    s_kv = keys if variant.sources[0] == "span" else 4 * keys
    x = attention.operands(variant, width=None, s_kv=s_kv, s_kv1=s_kv, **extents)
    return x if packed else dataclasses.replace(x, sources=tuple(map(all_seen, x.sources, variant.sources)))


def all_seen(x: attention.Keys, kind: str) -> attention.Keys:
    s_kv, rng = x.k.shape[1], np.random.default_rng(0)
    k, v = (filled(rng, array) for array in (x.k, x.v))
    v = k if x.v is x.k else v
    counts = np.ones_like(x.counts)
    if kind == "span":
        return dataclasses.replace(
            x, k=k, v=v, seen_from=np.zeros_like(x.seen_from), seen_to=np.full_like(x.seen_to, s_kv), counts=counts
        )
    topk = x.seen_from.shape[-1]
    indices = np.stack([rng.permutation(s_kv)[:topk] for _ in range(x.seen_from[..., 0].size)])
    indices = indices.reshape(x.seen_from.shape).astype(np.int32)
    counts = np.zeros_like(x.counts)
    np.put_along_axis(counts, indices.astype(np.int64), 1, axis=-1)
    return dataclasses.replace(
        x, k=k, v=v, seen_from=indices, seen_to=np.full_like(x.seen_to, topk), counts=counts
    )


def filled(rng: np.random.Generator, like: Array) -> Array:
    return (0.125 * rng.standard_normal(like.shape)).astype(like.dtype)
