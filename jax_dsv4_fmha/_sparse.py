"""Attention of every query over the keys that its row of indices names."""

from typing import Any

import jax
import jax.numpy as jnp

from . import _check, reference
from ._sources import SelectionSource, attend


def sparse_fmha(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    topk_length: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Top-k attention over one latent head that is both K and V.

    As `fmha`, over the keys that a row of `indices` names. A key named twice counts twice. Keys that a row does not
    name cannot reach it, whatever they hold.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16; float32 on the reference alone.
      kv: `[b, s_kv, d]` in q's dtype; or `[s_kv, d]`, a pool in which every sequence has its keys.
      indices: int32 `[b, s_q, topk]`; an entry below 0 or not below s_kv is absent.
      topk_length: int32 `[b, s_q]`; entries from there on are absent too.
      sink, scale, implementation: as in `fmha`.

    Returns:
      o like q and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that are not as said above.
      NotImplementedError: "cubin", and it is not built for these operands.
    """
    op = "sparse_fmha"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    is_pool = getattr(kv, "ndim", None) == 2
    kv = _check.operand(op, "kv", kv, "s_kv d" if is_pool else "b s_kv d", dims, (q.dtype,))
    indices = _check.operand(op, "indices", indices, "b s_q topk", dims, _check.INT)
    if topk_length is not None:
        topk_length = _check.operand(op, "topk_length", topk_length, "b s_q", dims, _check.INT)
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    _check.implementation(op, implementation)
    if implementation == "reference":
        return reference.sparse_fmha(q, kv, indices, topk_length=topk_length, sink=sink, scale=scale)
    if topk_length is None:
        topk_length = jnp.full(indices.shape[:2], indices.shape[2], jnp.int32)
    rows = q
    if is_pool:  # the queries of all sequences are those of one
        rows, indices, topk_length = (x.reshape(1, -1, *x.shape[2:]) for x in (q, indices, topk_length))
        kv = kv[None]
    source = SelectionSource(kv, indices, topk_length, ("kv", "indices", "topk_length"))
    o, lse = attend(op, rows, [source], sink=sink, scale=scale, implementation=implementation)
    return (o.reshape(q.shape), lse.reshape(q.shape[:-1])) if is_pool else (o, lse)
