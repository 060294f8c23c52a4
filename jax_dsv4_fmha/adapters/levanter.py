"""Levanter's attention by this package's kernels: grug's `attention`, with its arguments.

Read and run with marin-levanter 0.2.227. It needs neither Levanter's extra `gpu` nor torch.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .. import Span, _check, dot_product_attention, fmha
from ._seen import known, segments, within

try:
    from levanter.grug.attention import AttentionMask
except ImportError as e:
    raise ImportError(f"jax_dsv4_fmha.adapters.levanter: {e}; pip install 'marin-levanter>=0.2.227.dev0'") from e

_OP = "levanter.attention"


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: AttentionMask | jax.Array | None,
    *,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """`levanter.grug.attention.attention` by `fmha`.

    A query that sees no key gives 0, Levanter's reference the mean of all values. So does padding: tokens whose segment
    id is below 0, or that `fa4_bounds` calls not valid.

    Args:
      q: `[b, s_q, h_q, d]`. k, v: `[b, s_kv, h_kv, d]`, where h_q is a multiple of h_kv.
      mask: an AttentionMask, a bool array `[b or 1, s_q, s_kv]` or `[s_q, s_kv]` that shows each query one interval of
        keys, or None. As in Levanter's FA4, `fa4_bounds` count instead of window and segment ids.
      implementation: "cubin", "reference" or None, as in `fmha`; not one of Levanter's.

    Raises:
      ValueError, TypeError: operands that differ from the above, or known segment ids whose tokens stand in several
        places. Where they are traced, their batch entries get NaN.
      NotImplementedError: a mask of numbers to add, or one that shows a query more than one interval of keys.
    """
    _check.implementation(_OP, implementation)
    if mask is not None and not isinstance(mask, AttentionMask):
        if not hasattr(mask, "dtype") or mask.dtype != bool:
            raise _check.error(NotImplementedError, _OP, "mask", mask, "an AttentionMask, a bool array or None")
        rows = known(mask)[None, None] if mask.ndim == 2 else known(mask)[:, None]
        o = dot_product_attention(q, k, v, mask=rows, implementation=implementation)
        assert isinstance(o, jax.Array)  # because no residual is asked for
        return o
    span, scattered = (None, None) if mask is None else _span(mask, q.shape[1], k.shape[1])
    o, _ = fmha(q, k, v, span=span, implementation=implementation)
    return o if scattered is None else o + jnp.where(scattered, jnp.nan, 0)


def _span(mask: AttentionMask, s_q: int, s_kv: int) -> tuple[Span, Any]:
    """A mask's Span, and which batch entries have none."""
    if mask.fa4_bounds is not None:
        if not mask.is_causal or s_q != s_kv:
            raise _check.error(ValueError, _OP, "mask.fa4_bounds", f"s_q={s_q}, s_kv={s_kv}", "causal self-attention")
        start, valid = (jnp.asarray(x) for x in mask.fa4_bounds)
        return Span(start.astype(jnp.int32), jnp.where(valid, jnp.arange(1, s_q + 1, dtype=jnp.int32), 0)), None
    window = mask.sliding_window
    left = None if window is None else _check.positive(_OP, "mask.sliding_window", window) - 1
    span = within(_OP, s_q, left, 0 if mask.is_causal else None)
    if mask.segment_ids is None:
        return span, None
    q_ids, kv_ids = (known(ids)[None] if ids.ndim == 1 else ids for ids in mask.segment_ids)
    of_ids, scattered = segments(q_ids, None if mask.segment_ids[0] is mask.segment_ids[1] else kv_ids)
    return span & of_ids, scattered
