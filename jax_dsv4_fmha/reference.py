"""The definition of every op, in plain `jnp`: fp32 inside, differentiable both ways, and bounded in memory.

It decides by itself what each query sees: no code that prepares a call for a kernel runs here.

    S   = scale * q·k             over the keys that the query may see
    lse = log Σ exp(S)            natural log, without the sink; -inf where the query sees no key
    o   = Σ exp(S - lse) v        0 where the query sees no key; then times exp(lse - logaddexp(lse, sink))

The reference takes queries in blocks, and dense keys in tiles, so that only a few blocks of logits exist at a time, in
the gradient too. It skips a tile that no row of a block sees. A key that a row does not see cannot reach it, not even
as NaN. The ops of the package check the operands first.

Examples:
  >>> import jax.numpy as jnp
  >>> from jax_dsv4_fmha import reference
  >>> q, k = jnp.ones((1, 6, 4, 20)), jnp.ones((1, 6, 1, 20))  # any head dimension
  >>> o, lse = reference.fmha(q, k)
  >>> o.shape, lse.shape
  ((1, 6, 4, 20), (1, 6, 4))
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._definitions import e4m3
from ._definitions.cache import Cache
from ._definitions.indexer import indexer_blocks, indexer_loss, indexer_scores, lightning_indexer
from ._definitions.log_space import finite, logsumexp, sigmoid
from ._definitions.packed import dequantize_cache
from ._definitions.query_blocks import over_queries
from ._definitions.span import Span

__all__ = [
    "dsv4_attention",
    "dsv4_decode",
    "fmha",
    "gqa_decode",
    "indexer_blocks",
    "indexer_loss",
    "indexer_scores",
    "lightning_indexer",
    "merge",
    "mla_decode",
    "sparse_fmha",
]

Attention = tuple[jax.Array, jax.Array]
"""(o [b, s_q, h_q, d or d_v], lse [b, s_q, h_q] fp32)"""

_ROWS = 8192  # (batch entry, query, head) rows of a block
_QUERIES = 256  # at most this many queries in a block, or few heads would make skipping coarse
_KEYS = 256  # keys of a tile
_GATHERED = 2**24  # gathered elements of a block, sparse

_FP32 = jnp.float32
_INF = float("inf")
_LN_2 = math.log(2)


@functools.partial(jax.jit, static_argnames=("d_v", "scale", "products"))
def fmha(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None = None,
    *,
    d_v: int | None = None,
    span: Span | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    products: str | None = None,
) -> Attention:
    """Attention over one interval of keys for every query; see `jax_dsv4_fmha.fmha`. With products of e4m3, q and the
    keys are rounded already."""
    b, s_q, h_q, d = q.shape
    s_kv, h_kv = k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    start, stop = (Span(0, s_kv) if span is None else span).bounds(b, s_q, s_kv)
    tile = min(_KEYS, s_kv) if isinstance(s_kv, int) else _KEYS
    k_tiles = _tiles(k, tile)
    d_v = d if d_v is None else d_v
    v_tiles = None if v is None else _tiles(v, tile)
    first = jnp.arange(k_tiles.shape[0], dtype=jnp.int32) * tile

    def block(q: jax.Array, start: jax.Array, stop: jax.Array) -> Attention:
        n = q.shape[1]
        q32 = jnp.where((start < stop)[..., None, None], q, 0).astype(_FP32)
        q32 = jnp.moveaxis(q32.reshape(b, n, h_kv, h_q // h_kv, d), 1, 2)  # [b, h_kv, n, g, d]

        def is_seen(first: jax.Array) -> jax.Array:
            return jnp.any((start < stop) & (start < first + tile) & (first < stop))

        def logits(first: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            j = (first + jnp.arange(tile, dtype=jnp.int32))[None, None]
            visible = ((start[..., None] <= j) & (j < stop[..., None]))[:, None, :, None]  # [b, 1, n, 1, tile]
            return jnp.where(visible, scale * _contract(q32, k, 3, visible), -_INF), visible

        nothing = jnp.full_like(q32[..., 0], -_INF)

        def units(k: jax.Array) -> jax.Array:
            return e4m3.log2_of_unit(k)[:, :, None, None]

        def total(of: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
            """logsumexp over the keys of all tiles; of: what is summed of logits and keys."""

            @jax.checkpoint
            def of_tile(operands: Any) -> jax.Array:
                first, k = operands
                sums: jax.Array = lax.cond(
                    is_seen(first), lambda: logsumexp(of(logits(first, k)[0], k), -1), lambda: nothing
                )
                return sums

            return logsumexp(lax.map(of_tile, (first, k_tiles)), 0)

        lse = total(lambda s, k: s)
        size = None if products is None else total(lambda s, k: s + _LN_2 * units(k))

        @jax.checkpoint
        def tile_o(first: jax.Array, k: jax.Array, v: jax.Array | None) -> jax.Array:
            s, visible = logits(first, k)
            p = _weights(s, lse) if size is None else e4m3.weights(s, finite(lse), units(k), finite(size))
            return _contract(p, k[..., :d_v] if v is None else v, 2, visible)

        def add(o: jax.Array, tile: Any) -> tuple[jax.Array, None]:
            return lax.cond(is_seen(tile[0]), lambda o: o + tile_o(*tile), lambda o: o, o), None

        o, _ = lax.scan(add, jnp.zeros_like(q32[..., :d_v]), (first, k_tiles, v_tiles))
        o = jnp.moveaxis(o, 2, 1).reshape(*q.shape[:-1], d_v)
        lse = jnp.moveaxis(lse, 2, 1).reshape(q.shape[:-1])
        return _add_sink(o, lse, sink).astype(q.dtype), lse

    rows = h_q * b if isinstance(b, int) else h_q
    o, lse = over_queries(jax.checkpoint(block), max(1, min(_QUERIES, _ROWS // rows)), q, start, stop)
    return o, lse


@functools.partial(jax.jit, static_argnames=("d_v", "scale", "products"))
def sparse_fmha(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    d_v: int | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    products: str | None = None,
) -> Attention:
    """Attention over the keys that `indices` names, each as often as it is named; see `jax_dsv4_fmha.sparse_fmha`.
    products: as in `fmha`."""
    if kv.ndim == 2:  # sequences share the pool, so the queries of all are those of one
        flat_q, flat_indices = (x.reshape(1, -1, *x.shape[2:]) for x in (q, indices))
        how: dict[str, Any] = {"d_v": d_v, "sink": sink, "scale": scale, "products": products}
        o, lse = sparse_fmha(flat_q, kv[None], flat_indices, **how)
        return o.reshape(*q.shape[:-1], o.shape[-1]), lse.reshape(q.shape[:-1])
    b, _, h_q, d = q.shape
    s_kv, topk = kv.shape[1], indices.shape[2]
    scale = d**-0.5 if scale is None else scale
    there = (indices >= 0) & (indices < s_kv)
    indices = jnp.where(there, indices, 0)
    kv32 = kv.astype(_FP32)

    def block(q: jax.Array, indices: jax.Array, there: jax.Array) -> Attention:
        q32 = jnp.where(there.any(-1)[..., None, None], q, 0).astype(_FP32)
        keys = jax.vmap(lambda kv, indices: kv[indices])(kv32, indices)
        keys = jnp.where(there[..., None], keys, 0)
        s = jnp.where(there[:, :, None], scale * _einsum("bnhd,bnkd->bnhk", q32, keys), -_INF)
        lse = logsumexp(s, -1)
        if products is None:
            p = _weights(s, lse)
        else:
            units = e4m3.log2_of_unit(keys)[:, :, None]
            p = e4m3.weights(s, finite(lse), units, finite(logsumexp(s + _LN_2 * units, -1)))
        o = _einsum("bnhk,bnkd->bnhd", p, keys[..., :d_v])
        return _add_sink(o, lse, sink).astype(q.dtype), lse

    gathered = math.prod(n for n in (b, topk, max(h_q, d)) if isinstance(n, int))
    o, lse = over_queries(jax.checkpoint(block), max(1, _GATHERED // gathered), q, indices, there)
    return o, lse


def merge(parts: Sequence[Attention], sink: jax.Array | None = None) -> Attention:
    """Attention over the union of disjoint key sets, from the attention over each; see `jax_dsv4_fmha.merge`."""
    o_parts = jnp.stack([o.astype(_FP32) for o, _ in parts])
    lse_parts = jnp.stack([lse for _, lse in parts])
    lse = logsumexp(lse_parts, 0)
    shares = jnp.exp(lse_parts - finite(lse)[None])[..., None]
    o = jnp.sum(shares * jnp.where(lse_parts[..., None] == -_INF, 0, o_parts), axis=0)
    return _add_sink(o, lse, sink).astype(parts[0][0].dtype), lse


def dsv4_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed_kv: jax.Array | None = None,
    *,
    window: int | Span = 128,
    ratio: int | Span | None = None,
    indices: jax.Array | None = None,
    q_offset: Any = 0,
    sink: jax.Array | None = None,
    precision: str | None = None,
    scale: float | None = None,
) -> Attention:
    """Window and compressed entries and the sink under one softmax; see `jax_dsv4_fmha.dsv4_attention`."""
    near, far = (x if isinstance(x, Span) else None for x in (window, ratio))
    sizes = {"window": None if near is not None else window, "ratio": None if far is not None else ratio}
    how: dict[str, Any] = {"q_offset": q_offset, "sink": sink, "scale": scale, "products": precision}
    o, lse = _dsv4_attention(q, window_kv, compressed_kv, near, far, indices, **sizes, **how)
    return o, lse


@functools.partial(jax.jit, static_argnames=("ratio", "window", "scale", "products"))
def _dsv4_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed_kv: jax.Array | None,
    near: Span | None,
    far: Span | None,
    indices: jax.Array | None,
    *,
    window: int | None,
    ratio: int | None,
    q_offset: Any,
    sink: jax.Array | None,
    scale: float | None,
    products: str | None,
) -> Attention:
    """Spans, or `window` and `ratio`, say what queries see of the window and of the entries."""
    s_q, d, q32 = q.shape[1], q.shape[3], q.astype(_FP32)
    scale = d**-0.5 if scale is None else scale
    if products is not None:
        q32, window_kv, compressed_kv = rounded_for_products(products, q, window_kv, compressed_kv)
    own = _positions(s_q, jnp.asarray(q_offset, jnp.int32))
    if near is None:
        assert window is not None
        near = Span(jnp.maximum(own, window - 1) - (window - 1), own + 1)
    parts = [fmha(q32, window_kv[:, :, None], span=near, scale=scale, products=products)]
    if compressed_kv is not None and compressed_kv.shape[1] > 0:
        if far is None:
            far = Span(0, 2**31 - 1 if ratio is None else (own + 1) // ratio)
        if indices is None:
            parts.append(fmha(q32, compressed_kv[:, :, None], span=far, scale=scale, products=products))
        else:
            first, end = (x[..., None] for x in far.bounds(q.shape[0], s_q, compressed_kv.shape[1]))
            indices = jnp.where((first <= indices) & (indices < end), indices, -1)
            parts.append(sparse_fmha(q32, compressed_kv, indices, scale=scale, products=products))
    o, lse = merge(parts, sink)
    return o[..., :d].astype(q.dtype), lse


def rounded_for_products(products: str, q: jax.Array, *keys: jax.Array | None) -> tuple[Any, ...]:
    """q and keys [.., d], of which some may be None, as products of e4m3 take them: float32 numbers that are rounded in
    a unit for each row of q, and one for each key.

    Where RoPE stays in bfloat16, both have 64 dimensions more, and the first d of o are its.
    """
    of_rope = products == e4m3.BF16_ROPE

    def of_keys(x: jax.Array) -> jax.Array:
        values = e4m3.rounded(x, e4m3.unit_of_key(x))
        return e4m3.keys_beside_rope(values, x) if of_rope else values

    rounded = e4m3.rounded(q, e4m3.unit_of(q))
    rounded = e4m3.queries_beside_rope(rounded, q) if of_rope else rounded
    return rounded, *(None if x is None else of_keys(x) for x in keys)


@functools.partial(jax.jit, static_argnames=("ratio", "window", "is_causal", "scale", "precision"))
def dsv4_decode(
    q: jax.Array,
    window_cache: Cache,
    compressed_cache: Cache | None = None,
    *,
    lengths: Any,
    sink: jax.Array | None = None,
    indices: jax.Array | None = None,
    ratio: int | None = None,
    window: int = 128,
    q_offset: Any = None,
    is_causal: bool = True,
    scale: float | None = None,
    precision: str | None = None,
) -> Attention:
    """Attention over what caches hold, after dequantisation; see `jax_dsv4_fmha.dsv4_decode`."""
    (b, s_q, _, d), q32 = q.shape, q.astype(_FP32)
    scale = d**-0.5 if scale is None else scale
    lengths = jnp.maximum(jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), b), 0)[:, None]
    first = lengths - s_q if q_offset is None else jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), b)[:, None]
    position = first + jnp.arange(s_q, dtype=jnp.int32)[None]
    is_query = (position >= 0) & (position < lengths)

    end = jnp.minimum(first + s_q, lengths)
    oldest, newest = (position - window + 1, position) if is_causal else (first - window, end - 1)
    caches = [window_cache] if compressed_cache is None else [window_cache, compressed_cache]
    held = [_entries(cache) for cache in caches]
    if precision is not None:
        q32, *rounded = rounded_for_products(precision, q, *(x for x, _ in held))
        held = [(x, there) for x, (_, there) in zip(rounded, held, strict=True)]

    def over(held: tuple[jax.Array, jax.Array], seen: jax.Array, ring: bool) -> Attention:
        """Attention over the entries `seen` [b, s_q, n] of each sequence, absent where they are below 0."""
        entries, held_there = held
        room = held_there.shape[1]
        at = jnp.where(seen < 0, -1, seen % room) if ring else seen
        there = (at >= 0) & (at < room) & is_query[..., None]
        there &= jax.vmap(lambda held, at: held[at])(held_there, jnp.where(there, at, 0))
        return sparse_fmha(q32, entries, jnp.where(there, at, -1), scale=scale, products=precision)

    near = (end - 1)[..., None] - jnp.arange(window + s_q, dtype=jnp.int32)[None, None]
    seen = (near >= oldest[..., None]) & (near <= newest[..., None])
    parts = [over(held[0], jnp.where(seen, near, -1), ring=True)]
    if compressed_cache is not None:
        if indices is None:
            assert ratio is not None
            room = compressed_cache.capacity
            entry = jnp.maximum(lengths // ratio - room, 0) + jnp.arange(room, dtype=jnp.int32)[None]  # still held
            seen = jnp.where(entry[:, None] < (position[..., None] + 1) // ratio, entry[:, None], -1)
        else:
            listed = indices >= 0
            if ratio is not None:
                listed &= indices < ((position + 1) // ratio)[..., None]
            seen = jnp.where(listed, indices, -1)
        parts.append(over(held[1], seen, ring=indices is None))
    o, lse = merge(parts, sink)
    return o[..., :d].astype(q.dtype), lse


@functools.partial(jax.jit, static_argnames=("d_v", "scale"))
def mla_decode(
    q: jax.Array,
    cache: Cache,
    lengths: Any,
    indices: jax.Array | None = None,
    *,
    d_v: int | None = None,
    sink: jax.Array | None = None,
    q_offset: Any = None,
    scale: float | None = None,
) -> Attention:
    """Attention over what one cache holds, after dequantisation; see `jax_dsv4_fmha.mla_decode`."""
    b, s_q, _, _ = q.shape
    lengths = jnp.maximum(jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), b), 0)[:, None]
    first = lengths - s_q if q_offset is None else jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), b)[:, None]
    position = (first + jnp.arange(s_q, dtype=jnp.int32)[None])[..., None]
    entries, held = _entries(cache)
    if indices is None:
        indices = jnp.arange(held.shape[1], dtype=jnp.int32)[None, None]
    there = (indices >= 0) & (indices <= position) & (indices < held.shape[1])
    there &= (position >= 0) & (position < lengths[..., None])
    indices = jnp.broadcast_to(indices, there.shape)
    there &= jax.vmap(lambda held, at: held[at])(held, jnp.where(there, indices, 0))
    o, lse = sparse_fmha(q, entries, jnp.where(there, indices, -1), d_v=d_v, sink=sink, scale=scale)
    return o, lse


@functools.partial(jax.jit, static_argnames=("window", "scale"))
def gqa_decode(
    q: jax.Array,
    k_cache: Cache,
    v_cache: Cache,
    lengths: Any,
    *,
    window: int | None = None,
    sink: jax.Array | None = None,
    q_offset: Any = None,
    scale: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Attention:
    """Attention over what caches of K and of V hold; see `jax_dsv4_fmha.gqa_decode`."""
    b, s_q, _, d = q.shape
    lengths = jnp.maximum(jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), b), 0)[:, None]
    first = lengths - s_q if q_offset is None else jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), b)[:, None]
    position = first + jnp.arange(s_q, dtype=jnp.int32)[None]
    (k, held), (v, also_held) = map(_entries, (k_cache, v_cache))
    held, room = held & also_held, held.shape[1]
    start = jnp.zeros_like(position) if window is None else jnp.clip(position - (window - 1), 0, room)
    lost = jnp.arange(room, dtype=jnp.int32)[None, None]
    lost = jnp.where(held[:, None] | (lost < start[..., None]), room, lost).min(-1)  # the first entry that is not there
    is_query = (position >= 0) & (position < lengths)
    stop = jnp.where(is_query, jnp.minimum(position + 1, lost), 0)
    k, v = (x.reshape(b, room, -1, d) for x in (k, v))
    if k.dtype == jnp.float8_e4m3fn:
        scales = (1.0 if x is None else jnp.reshape(x, (-1, 1)) for x in (k_scale, v_scale))
        k, v = (x.astype(_FP32) * scale for x, scale in zip((k, v), scales, strict=True))
    o, lse = fmha(q, k, v, span=Span(start, stop), sink=sink, scale=scale)
    return o, lse


def _entries(cache: Cache) -> tuple[jax.Array, jax.Array]:
    """The entries of each sequence, [b, room, d], one after the other; and whether each exists, [b, room]."""
    pages = dequantize_cache(cache.entries, cache.layout) if cache.is_packed else cache.entries
    if cache.block_table is None:
        return pages, jnp.ones(pages.shape[:2], bool)
    known = (cache.block_table >= 0) & (cache.block_table < pages.shape[0])
    entries = pages[jnp.where(known, cache.block_table, 0)]
    held = jnp.broadcast_to(known[..., None], (*known.shape, pages.shape[1]))
    return entries.reshape(known.shape[0], -1, pages.shape[2]), held.reshape(known.shape[0], -1)


def _positions(s_q: Any, offset: jax.Array) -> jax.Array:
    """The positions of the queries, [1, s_q] or [b, s_q], from `offset` on; at most 2**31 - 2."""
    i = jnp.arange(s_q, dtype=jnp.int32)[None]
    return i + jnp.minimum(jnp.reshape(offset, (-1, 1)), 2**31 - 2 - i)


def _weights(logits: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(logits - lse)"""
    return jnp.exp(logits - finite(lse)[..., None])


def _einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, precision=lax.Precision.HIGHEST)


def _contract(x: jax.Array, y: jax.Array, axis: int, visible: jax.Array) -> jax.Array:
    """Contracts the last axis of rows x [b, h, n, g, …] with `axis` of keys y [b, h, k, d]. No key touches a row that
    does not see it (visible [b, 1, n, 1, k]).

    A probability of 0 ensures that, unless the key holds NaN or inf (0·NaN is NaN). Only then does each row that sees
    such a key get its own keys. The others have the bits that they have without it.
    """
    finite_y = jnp.isfinite(y)

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, (((x.ndim - 1,), (axis,)), ((0, 1), (0, 1))), precision=lax.Precision.HIGHEST)

    def row(operands: Any) -> jax.Array:
        x, visible = operands
        return dot(x, jnp.where(jnp.moveaxis(visible, -1, -2), y, 0))

    def row_by_row() -> jax.Array:
        rows = jnp.moveaxis(lax.map(row, (jnp.moveaxis(x, 2, 0), jnp.moveaxis(visible, 2, 0))), 0, 2)
        sees = jnp.any(visible & ~finite_y.all(-1)[:, :, None, None], -1, keepdims=True)
        return jnp.where(sees, rows, dot(x, jnp.where(finite_y, y, 0)))

    clean = jnp.all(finite_y)
    contracted: jax.Array = lax.cond(clean, lambda: dot(x, jnp.where(clean, y, 0)), row_by_row)
    return contracted


def _add_sink(o: jax.Array, lse: jax.Array, sink: jax.Array | None) -> jax.Array:
    """o · exp(lse - logaddexp(lse, sink)), which is o · sigmoid(lse - sink)."""
    return o if sink is None else o * sigmoid(finite(lse) - sink[None, None])[..., None]


def _tiles(x: jax.Array, tile: int) -> jax.Array:
    """[b, s_kv, h, d] -> fp32 [tiles, b, h, tile, d]; zeros fill up the last tile"""
    b, s_kv, h, d = x.shape
    n = -(-s_kv // tile)
    x = jnp.pad(x.astype(_FP32), ((0, 0), (0, n * tile - s_kv), (0, 0), (0, 0)))
    return x.reshape(b, n, tile, h, d).transpose(1, 0, 3, 2, 4)
