"""Attention's probabilities at given entries, summed over heads: the teacher of an indexer."""

from typing import Any

import jax
from jax import lax

from .. import _check
from .._definitions import indexer as definition
from .._definitions.log_space import denominator
from .._dispatch.autodiff import without_gradient
from .._dispatch.lowering import choose
from .._dispatch.op import Arrays, Axes, Call, KernelUse, Op
from .._dispatch.support import Support
from .._host import indexer as raw
from .._host import library


def head_summed_probabilities(
    q: jax.Array,
    kv: jax.Array,
    lse: jax.Array,
    indices: jax.Array,
    *,
    sink: jax.Array | None = None,
    scale: float | None = None,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """Attention's probabilities at the entries that a query's row of `indices` names, summed over its heads.

        p[t, j] = Σ_h exp(scale · q[t, h] · kv[indices[t, j]] - logaddexp(lse[t, h], sink[h]))

    This is the teacher of an indexer (DeepSeek-V3.2's report, §2.1), before it is normalised to a sum of 1. `lse` may
    cover more than these entries, such as a window. An entry that is named twice has its value at both places. The
    result has no gradient.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16, float16 or float32: the queries of attention. The kernel takes bfloat16.
      kv: `[b, s_c, d]` in q's dtype: the entries that attention reads.
      lse: float32 `[b, s_q, h_q]`, as `dsv4_attention` and `sparse_fmha` return it. A head with ±inf adds nothing.
      indices: int32 `[b, s_q, topk]`; an entry below 0 or not below s_c is absent.
      sink, scale, implementation: as in `dsv4_attention`.

    Returns:
      float32 `[b, s_q, topk]`, 0 where an entry is absent.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import head_summed_probabilities, sparse_fmha
      >>> q, kv, indices = jnp.ones((1, 2, 4, 64)), jnp.ones((1, 16, 64)), jnp.array([[[0, 3], [5, -1]]])
      >>> o, lse = sparse_fmha(q, kv, indices)
      >>> head_summed_probabilities(q, kv, lse, indices).round(3).tolist()  # each query's sum to its 4 heads
      [[[2.0, 2.0], [4.0, 0.0]]]
    """
    op = "head_summed_probabilities"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    kv = _check.operand(op, "kv", kv, "b s_c d", dims, (q.dtype,))
    lse = _check.operand(op, "lse", lse, "b s_q h_q", dims, _check.FP32)
    indices = _check.operand(op, "indices", indices, "b s_q topk", dims, _check.INT)
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    _check.implementation(op, implementation)
    use, support = KernelUse.NEVER, None
    if implementation != "reference":
        archs = library.shipped_for(op, d=dims["d"], dtype=q.dtype.name)
        support = Support(f"{q.dtype.name}, d={dims['d']}", (op,), archs)
        use = choose(op, implementation, support)
    operands = map(lax.stop_gradient, (q, kv, denominator(lse, sink), indices))
    (p,) = without_gradient(Call(_PROBABILITIES, use, (("scale", scale),), support), *operands)
    return p


def _kernel(*operands: jax.Array, scale: float) -> Arrays:
    return (raw.head_summed_probabilities(*operands, scale=scale),)


_PROBABILITIES = Op(
    "head_summed_probabilities",
    (Axes("q", "b s_q h_q d"), Axes("kv", "b s_c d"), Axes("lse", "b s_q h_q"), Axes("indices", "b s_q topk")),
    (Axes("p", "b s_q topk"),),
    definition.attention_at,
    _kernel,
)
