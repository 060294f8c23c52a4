"""Attention over a union of key sets, from the attention over each."""

from collections.abc import Sequence
from typing import Any

import jax

from .. import _check
from .._dispatch.merge import merged


def merge(parts: Sequence[tuple[jax.Array, jax.Array]], sink: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint key sets; the sink enters here, once.

        lse = log Σᵢ exp(lseᵢ);  o = Σᵢ exp(lseᵢ - logaddexp(lse, sink)) oᵢ

    Merging is associative, differentiable in everything, and never NaN for ±inf sinks or empty parts: a part with
    `lse = -inf` adds nothing, whatever its `o` holds.

    Args:
      parts: one or more `(o [b, s_q, h_q, d], lse float32 [b, s_q, h_q])`, of one dtype, each made without a sink.
      sink: float32 `[h_q]`, as in `fmha`.

    Returns:
      o and lse like a part's; lse without the sink.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import fmha, merge
      >>> q, k = jnp.ones((1, 2, 4, 64)), jnp.ones((1, 8, 1, 64))
      >>> o, lse = merge([fmha(q, k[:, :4]), fmha(q, k[:, 4:])])
      >>> bool(jnp.allclose(lse, fmha(q, k)[1]))
      True
    """
    op = "merge"
    wanted = "one or more pairs (o, lse)"
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise _check.error(TypeError, op, "parts", parts, wanted)
    if not parts:
        raise _check.error(ValueError, op, "parts", parts, wanted)
    dims: dict[str, Any] = {}
    dtypes: tuple[Any, ...] = _check.FLOAT
    first = "parts[0] o"
    checked = []
    for i, part in enumerate(parts):
        if not (isinstance(part, tuple | list) and len(part) == 2):
            raise _check.error(TypeError, op, f"parts[{i}]", part, "a pair (o, lse)")
        o = _check.operand(op, f"parts[{i}] o", part[0], "b s_q h_q d", dims, dtypes, first)
        lse = _check.operand(op, f"parts[{i}] lse", part[1], "b s_q h_q", dims, _check.FP32, first)
        dtypes = (o.dtype,)
        checked.append((o, lse))
    return merged(checked, _check.sink(op, sink, dims, first))
