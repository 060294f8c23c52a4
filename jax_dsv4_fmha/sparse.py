"""Attention of every query over the keys that its row of indices names."""

from typing import Any

import jax

from . import _check, reference


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
      q: `[b, s_q, h_q, d]`, bfloat16, float16 or float32.
      kv: `[b, s_kv, d]` in q's dtype.
      indices: int32 `[b, s_q, topk]`; an entry below 0 or not below s_kv is absent.
      topk_length: int32 `[b, s_q]`; entries from there on are absent too.
      sink, scale: as in `fmha`.
      implementation: None or "reference". "cubin" insists on a kernel, and none is built yet.

    Returns:
      o like q and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that are not as said above.
      NotImplementedError: "cubin".
    """
    op = "sparse_fmha"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    kv = _check.operand(op, "kv", kv, "b s_kv d", dims, (q.dtype,))
    indices = _check.operand(op, "indices", indices, "b s_q topk", dims, _check.INT)
    if topk_length is not None:
        topk_length = _check.operand(op, "topk_length", topk_length, "b s_q", dims, _check.INT)
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    _check.implementation(op, implementation)
    if implementation == "cubin":
        raise _check.error(NotImplementedError, op, "implementation", "'cubin'", "None or 'reference'")
    return reference.sparse_fmha(q, kv, indices, topk_length=topk_length, sink=sink, scale=scale)
