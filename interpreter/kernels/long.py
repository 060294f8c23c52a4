"""Operands for clocks: a tile of rows or two that see many keys, all of them, on one processor."""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.abi import Forward, MlaBackward

from ..machine.state import Array
from . import attention


def operands(
    variant: Forward | MlaBackward,
    tile_m: int,
    keys: int | tuple[int, int],
    *,
    queries: int | None = None,
    heads: int | None = None,
) -> attention.Operands:
    """Every query sees `keys` keys of each source, or so many of the first and of the second. Without more: as
    many heads and queries as fill one tile of rows, or two queries with as many heads as fill one each."""
    dense = variant.op == "mha_fwd"
    heads = heads or (1 if dense else min(tile_m, variant.max_heads))
    queries = queries or (tile_m if dense else 2)
    seen = keys if isinstance(keys, tuple) else (keys, keys)
    tables = [n if kind == "span" else 4 * n for n, kind in zip(seen, variant.sources, strict=False)]
    s_kv, s_kv1 = (*tables, 64)[:2]
    extents = {"b": 1, "s_q": queries, "h_q": heads, "topk": max(seen) if variant.gathers else 0}
    x = attention.operands(variant, width=None, s_kv=s_kv, s_kv1=s_kv1, **extents)
    apart = x.has_separate_values
    sources = [all_seen(s, kind, n, apart) for s, kind, n in zip(x.sources, variant.sources, seen, strict=False)]
    if x.mode.is_e4m3:
        sources = [attention.as_codes(dataclasses.replace(s, units=None), x.mode) for s in sources]
    return dataclasses.replace(x, sources=tuple(sources))


def all_seen(x: attention.Keys, kind: str, seen: int, has_separate_values: bool) -> attention.Keys:
    """Every query sees the first `seen` of a span, or as many places of a table at random."""
    s_kv, rng = x.k.shape[1], np.random.default_rng(0)
    if kind == "span":
        k = filled(rng, x.k)
        v = filled(rng, x.v) if has_separate_values else attention.values_of(k, x.v.shape[-1])
        start, stop = np.zeros_like(x.seen_from), np.full_like(x.seen_to, s_kv)
        return dataclasses.replace(x, k=k, v=v, seen_from=start, seen_to=stop, counts=np.ones_like(x.counts))
    length = np.full_like(x.seen_to, seen)
    if x.pool is not None:  # entries lie anywhere in pages, and only those that some query sees are there
        indices, there = x.seen_from.copy(), x.seen_from[(x.seen_from >= 0) & (x.seen_from < x.pool.shape[0] * 64)]
        indices[...] = rng.choice(there, indices.shape)
        return dataclasses.replace(x, seen_from=indices, seen_to=length)
    indices = np.stack([rng.permutation(s_kv)[:seen] for _ in range(x.seen_from[..., 0].size)])
    places = np.full_like(x.seen_from, -1)
    places[..., :seen] = indices.reshape(*places.shape[:-1], seen)
    counts = np.zeros_like(x.counts)
    np.put_along_axis(counts, places[..., :seen].astype(np.int64), 1, axis=-1)
    k = filled(rng, x.k)
    v = attention.values_of(k, x.v.shape[-1])
    return dataclasses.replace(x, k=k, v=v, seen_from=places, seen_to=length, counts=counts)


def filled(rng: np.random.Generator, like: Array) -> Array:
    return np.asarray(0.125 * rng.standard_normal(like.shape)).astype(like.dtype)
