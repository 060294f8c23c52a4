"""Attention of every query over the keys that its row of indices names."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._dispatch.attend import attend
from .._dispatch.modes import canonical_order
from .._dispatch.sources import SelectionSource


def sparse_fmha(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    d_v: int | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    implementation: _check.Implementation | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Sparse (top-k) attention: each query attends to the keys that its row of `indices` names.

    The keys are one latent head that is both K and V. A key that is named twice counts twice. A key that a row does not
    name has no influence on it, not even as NaN.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16; float16 and float32 only on the reference.
      kv: `[b, s_kv, d]` in q's dtype; or `[s_kv, d]`, a pool that all sequences share.
      indices: int32 `[b, s_q, topk]`; an entry below 0 or not below s_kv is absent.
      d_v, sink, scale, implementation, deterministic, batch_invariant: as in `fmha`.

    Returns:
      o like q, or with d_v numbers for each head, and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin" or batch_invariant, and no such kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import sparse_fmha
      >>> q, kv = jnp.ones((1, 2, 4, 512), jnp.bfloat16), jnp.ones((1, 16, 512), jnp.bfloat16)
      >>> indices = jnp.array([[[0, 3, -1], [5, 6, 7]]])  # the first query sees two keys, the second three
      >>> o, lse = sparse_fmha(q, kv, indices)
      >>> o.shape, lse.shape
      ((1, 2, 4, 512), (1, 2, 4))
    """
    op = "sparse_fmha"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    is_pool = getattr(kv, "ndim", None) == 2
    kv = _check.operand(op, "kv", kv, "s_kv d" if is_pool else "b s_kv d", dims, (q.dtype,))
    indices = _check.operand(op, "indices", indices, "b s_q topk", dims, _check.INT)
    d_v = _check.d_v(op, d_v, dims["d"])
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    _check.implementation(op, implementation)
    _check.flags(op, deterministic=deterministic)
    _check.batch_invariant(op, batch_invariant, implementation)
    if implementation == "reference":
        return reference.sparse_fmha(q, kv, indices, d_v=d_v, sink=sink, scale=scale)
    length = jnp.full(indices.shape[:2], indices.shape[2], jnp.int32)
    kv = kv[None] if is_pool else kv
    source = SelectionSource(kv, indices, length, ("kv", "indices", "length"), d_v=d_v)
    return attend(
        op, q, [source], sink=sink, scale=scale, implementation=implementation, deterministic=deterministic,
        modes=canonical_order.wanted(batch_invariant),
    )  # fmt: skip
