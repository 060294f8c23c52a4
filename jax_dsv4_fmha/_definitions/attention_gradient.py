"""Gradients in plain `jnp`, for each kind of source, where no backward kernel runs; the formulas are with
`_dispatch.attention_op.gradient`.

They take queries in blocks and keys in tiles, and skip tiles that no row of a block sees, so memory is that of the
operands and a few blocks of logits. 16-bit operands are multiplied as the platform multiplies float32 by default (on a
GPU with 11 bits, which hold them exactly), float32 operands in full precision.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .query_blocks import scan_queries

_ROWS = 8192  # (batch entry, query, head) rows of a block
_QUERIES = 256  # at most this many queries in a block, or a block would see too much that each of its rows does not
_KEYS = 256  # keys of a tile
_GATHERED = 2**24  # gathered elements of a block, sparse

_FP32 = jnp.float32


def fmha(
    q: Any, k: Any, v: Any, start: Any, stop: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, *, scale: float
) -> tuple[jax.Array, ...]:
    """(dq, dk, dv), or (dq, dk + dv) if v is None, where V is as much of a key as do is wide; float32."""
    (b, _, h_q, d), d_v = q.shape, do.shape[-1]
    s_kv, h_kv = k.shape[1:3]
    tile = min(_KEYS, s_kv) if isinstance(s_kv, int) else _KEYS
    tiles = -(-s_kv // tile)
    einsum = _einsum_for(q.dtype)

    def keys(x: jax.Array) -> jax.Array:  # [b, h_kv, keys, d]; keys that no row sees may hold anything
        x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, tiles * tile - s_kv), (0, 0)))
        return jnp.where(jnp.isfinite(x), x, 0)

    xs = (keys(k),) if v is None else (keys(k), keys(v))

    def block(sums: Any, q: Any, start: Any, stop: Any, do: Any, lse: Any, sink_factor: Any, delta: Any) -> Any:
        seen = start < stop

        def rows(x: jax.Array) -> jax.Array:  # [b, h_kv, n, g, …]
            x = jnp.where(seen.reshape(*seen.shape, *[1] * (x.ndim - 2)), x, 0).astype(_FP32)
            return jnp.moveaxis(x.reshape(b, x.shape[1], h_kv, h_q // h_kv, *x.shape[3:]), 1, 2)

        q, do, lse, sink_factor, delta = map(rows, (q, do, lse, sink_factor, delta))

        def add(i: Any, carry: Any) -> Any:
            dq, sums = carry
            k, *rest = (lax.dynamic_slice_in_dim(x, i * tile, tile, 2).astype(_FP32) for x in xs)
            (v,) = rest or (k[..., :d_v],)
            j = (i * tile + jnp.arange(tile, dtype=jnp.int32))[None, None]
            visible = ((start[..., None] <= j) & (j < stop[..., None]))[:, None, :, None]
            s = scale * einsum("bhngd,bhkd->bhngk", q, k)
            p = jnp.where(visible, jnp.exp(s - lse[..., None]), 0)
            dp = einsum("bhngd,bhkd->bhngk", do, v)
            ds = jnp.where(visible, p * (sink_factor[..., None] * dp - delta[..., None]), 0)
            dk = scale * einsum("bhngk,bhngd->bhkd", ds, q)
            dv = einsum("bhngk,bhngd->bhkd", p * sink_factor[..., None], do)
            parts = (_of_both(dk, dv),) if len(sums) == 1 else (dk, dv)

            def put(whole: jax.Array, part: jax.Array) -> jax.Array:
                part += lax.dynamic_slice_in_dim(whole, i * tile, tile, 2)
                return lax.dynamic_update_slice_in_dim(whole, part, i * tile, 2)

            return dq + scale * einsum("bhngk,bhkd->bhngd", ds, k), tuple(map(put, sums, parts))

        first = jnp.min(jnp.where(seen, start, s_kv)) // tile
        last = (jnp.max(jnp.where(seen, stop, 0)) + tile - 1) // tile
        dq, sums = lax.fori_loop(first, last, add, (jnp.zeros_like(q), sums))
        return sums, (jnp.moveaxis(dq, 2, 1).reshape(b, -1, h_q, d),)

    sums = tuple(jnp.zeros_like(x, _FP32) for x in xs)
    size = max(1, min(_QUERIES, _ROWS // (h_q * b if isinstance(b, int) else h_q)))
    sums, (dq,) = scan_queries(block, sums, size, q, start, stop, do, lse, sink_factor, delta)
    return dq, *(x[:, :, :s_kv].swapaxes(1, 2) for x in sums)


def sparse_fmha(
    q: Any, kv: Any, indices: Any, length: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, *, scale: float
) -> tuple[jax.Array, ...]:
    """(dq, dkv); V is as much of a key as do is wide; float32."""
    (b, _, h_q, d), d_v = q.shape, do.shape[-1]
    s_kv, topk = kv.shape[1], indices.shape[2]
    einsum = _einsum_for(q.dtype)
    clean = jnp.where(jnp.isfinite(kv), kv, 0)

    def block(dkv: Any, q: Any, indices: Any, length: Any, do: Any, lse: Any, sink_factor: Any, delta: Any) -> Any:
        there = (indices >= 0) & (indices < s_kv) & (jnp.arange(topk, dtype=jnp.int32)[None, None] < length[..., None])
        seen = there.any(-1)

        def rows(x: jax.Array) -> jax.Array:
            return jnp.where(seen.reshape(*seen.shape, *[1] * (x.ndim - 2)), x, 0).astype(_FP32)

        q, do, lse, sink_factor, delta = map(rows, (q, do, lse, sink_factor, delta))
        keys = jax.vmap(lambda kv, i: kv[i])(clean, jnp.where(there, indices, 0)).astype(_FP32)
        s = scale * einsum("bnhd,bnkd->bnhk", q, keys)
        p = jnp.where(there[:, :, None], jnp.exp(s - lse[..., None]), 0)
        dp = einsum("bnhd,bnkd->bnhk", do, keys[..., :d_v])
        ds = jnp.where(there[:, :, None], p * (sink_factor[..., None] * dp - delta[..., None]), 0)
        dk = scale * einsum("bnhk,bnhd->bnkd", ds, q)
        parts = _of_both(dk, einsum("bnhk,bnhd->bnkd", p * sink_factor[..., None], do))
        indices = jnp.where(there, indices, s_kv)
        dkv = jax.vmap(lambda dkv, i, x: dkv.at[i].add(x, mode="drop"))(dkv, indices, parts)
        return dkv, (scale * einsum("bnhk,bnkd->bnhd", ds, keys),)

    gathered = math.prod(n for n in (b, topk, max(h_q, d)) if isinstance(n, int))
    operands = (q, indices, length, do, lse, sink_factor, delta)
    dkv, (dq,) = scan_queries(block, jnp.zeros_like(kv, _FP32), max(1, _GATHERED // gathered), *operands)
    return dq, dkv


def _of_both(dk: jax.Array, dv: jax.Array) -> jax.Array:
    """The gradient of keys whose first numbers are V too."""
    more = dk.shape[-1] - dv.shape[-1]
    return dk + (jnp.pad(dv, (*[(0, 0)] * (dv.ndim - 1), (0, more))) if more else dv)


def _einsum_for(dtype: Any) -> Callable[[str, jax.Array, jax.Array], jax.Array]:
    precision = lax.Precision.HIGHEST if dtype == _FP32 else None  # which is jax.default_matmul_precision
    return lambda equation, x, y: jnp.einsum(equation, x, y, precision=precision)
