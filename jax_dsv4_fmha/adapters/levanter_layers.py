"""Levanter's `dot_product_attention` over named axes by this package's kernels, with its arguments.

Read and run with marin-levanter 0.2.227.
"""

from typing import Any

import jax.numpy as jnp

from .. import Span, _check, fmha
from ._seen import segments, within

try:
    import haliax as hax
    from levanter.layers import attention
except ImportError as e:
    raise ImportError(f"jax_dsv4_fmha.adapters.levanter_layers: {e}; pip install 'marin-levanter>=0.2.227.dev0'") from e

_OP = "levanter.dot_product_attention"


def dot_product_attention(
    QPos: Any, KPos: Any, Key: Any, query: Any, key: Any, value: Any, mask: Any = None, bias: Any = None,
    attention_dtype: Any = None, precision: Any = None, use_flash: Any = None, attn_backend: Any = None,
    flash_block_size: Any = None, dropout: float = 0.0, *, logits_soft_cap: Any = None, scaling_factor: Any = None,
    inference: bool = True, prng: Any = None, attn_sink: Any = None, implementation: Any = None,
) -> Any:  # fmt: skip
    """`levanter.layers.attention.dot_product_attention` by `fmha`, with sinks of heads.

    `attn_backend` must be None or "default", and mask an AttentionMask without an explicit mask and an offset. A query
    that sees no key, and padding (ids below 0), give 0. Traced ids whose tokens stand in several places give NaN.
    """
    inputs = {"bias": bias, "logits_soft_cap": logits_soft_cap, "dropout": dropout or None}
    inputs["attn_backend"] = None if attn_backend == "default" else attn_backend
    inputs["mask"] = None if isinstance(mask, attention.AttentionMask) else mask
    for name in ("explicit_mask", "causal_offset"):
        inputs[f"mask.{name}"] = getattr(mask, name, None)
    for name, x in inputs.items():
        if x is not None:
            raise _check.error(NotImplementedError, _OP, name, x, "none: not supported")
    of_q, of_k, of_v = attention._bin_and_group_axes_by_function(query, key, value, QPos, KPos, Key)
    pairs = ((query, of_q), (key, of_k), (value, of_v))
    q, k, v = (attention._reshape_axes_for_bshd_bins(x, of).array for x, of in pairs)
    dtype = attention_dtype or query.dtype
    span, scattered = (None, None) if mask is None else _span(mask, of_q, of_k, q.shape[1])
    sink = None if attn_sink is None else _flat(attn_sink, of_q["H"]).astype(jnp.float32)
    o, _ = fmha(
        *(x.astype(dtype) for x in (q, k, v)), span=span, sink=sink, scale=scaling_factor, implementation=implementation
    )
    o = o if scattered is None else o + jnp.where(scattered, jnp.nan, 0)
    named = attention._unflatten_bshd(hax.named(o.astype(query.dtype), ("B", "S", "H", "D")), of_q, of_v)
    return named.rearrange([*(ax for ax in query.axes if ax != of_q["D"][0]), of_v["D"][0]])


def _span(mask: Any, of_q: Any, of_k: Any, s_q: int) -> tuple[Span, Any]:
    """A mask's Span, and which batch entries have none."""
    window, radius = mask.sliding_window, mask.bidirectional_window
    left = None if window is None else _check.positive(_OP, "mask.sliding_window", window) - 1
    span = within(_OP, s_q, left, 0 if mask.is_causal or window is not None else None)
    span = span if radius is None else span & within(_OP, s_q, radius, radius)
    if mask.segment_ids is None:
        return span, None
    (q_pos,), (k_pos,) = of_q["S"], of_k["S"]
    q_ids, kv_ids = mask.segment_ids
    ids = q_ids, kv_ids.rename({q_pos.name: k_pos.name}) if q_pos.name in [ax.name for ax in kv_ids.axes] else kv_ids
    q_ids, k_ids = (_flat(x, of_q["B"], pos) for x, pos in zip(ids, (q_pos, k_pos), strict=True))
    of_ids, scattered = segments(q_ids, None if q_ids is k_ids else k_ids)
    return span & of_ids, scattered


def _flat(x: Any, axes: Any, *last: Any) -> Any:
    """A named array as `[all of axes, *last]`."""
    x = x.broadcast_to([*axes, *last])
    return x.rearrange([*axes, *last]).array.reshape([-1, *(ax.size for ax in last)])
