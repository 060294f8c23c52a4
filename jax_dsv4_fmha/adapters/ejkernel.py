"""ejkernel's `flash_attention`, and so EasyDeL's, by this package's kernels: an entry of its registry, without a patch.

Read and run with ejkernel 0.0.80.3.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, dot_product_attention, fmha
from ._seen import known, segments, within

try:
    from ejkernel.kernels import kernel_registry
except ImportError as e:
    raise ImportError(f"jax_dsv4_fmha.adapters.ejkernel: {e}; pip install 'ejkernel>=0.0.80'") from e

_OP = "ejkernel.flash_attention"
_TUNING = {"fwd_params", "bwd_params", "dropout_seed", "precision"}  # they do not change what is computed here


def register(
    platform: str = "cuda", backend: str = "gpu", priority: int = 100, sink_per_head: bool = False,
    implementation: _check.Implementation | None = None,
) -> None:  # fmt: skip
    """Registers this package's attention as ejkernel's `flash_attention`, ahead of those with a lower priority.

    Args:
      platform, backend, priority: as in ejkernel's registry. `flash_attention(..., platform="cuda")` insists on it;
        ejkernel's autotuner times it beside the other platforms, and leaves out what raises.
      sink_per_head: whether `softmax_aux` of one axis has a sink for each head, as in gpt-oss; ejkernel's own kernels
        count all its numbers for every head. `[num_heads, num_sinks]` is the same in both cases.
      implementation: as in `fmha`.
    """
    signature = inspect.signature(kernel_registry.get("flash_attention", "xla", "any"))

    def flash_attention(*args: Any, **kwargs: Any) -> jax.Array:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {name: x for name, x in bound.arguments.items() if name not in _TUNING}
        for name in given.keys() - _attend.__annotations__.keys():
            x, default = given.pop(name), signature.parameters[name].default
            if x is not default and (isinstance(x, jax.Array) or x != default):
                raise _check.error(NotImplementedError, _OP, name, x, f"{default}, more is not supported")
        return _attend(**given, sink_per_head=sink_per_head, implementation=implementation)

    flash_attention.__signature__ = signature  # type: ignore[attr-defined]
    kernel_registry.register("flash_attention", platform, backend, priority)(flash_attention)


def _attend(
    query: Any, key: Any, value: Any, attention_mask: Any, softmax_scale: Any, causal: bool, sliding_window: Any,
    softmax_aux: Any, q_segment_ids: Any, kv_segment_ids: Any, sink_per_head: bool, implementation: Any,
) -> jax.Array:  # fmt: skip
    s_q, s_kv, sink = query.shape[1], key.shape[1], None
    if softmax_aux is not None:  # several sinks of a head are one: the log of the sum of their exponentials
        each = softmax_aux[:, None] if softmax_aux.ndim == 1 and sink_per_head else softmax_aux
        sink = jnp.broadcast_to(jax.nn.logsumexp(each.astype(jnp.float32), axis=-1), query.shape[2:3])
    if s_q != s_kv and (causal or sliding_window is not None):  # ejkernel's kernels differ in what that means
        raise _check.error(NotImplementedError, _OP, "query", f"{s_q} queries, {s_kv} keys", "as many queries as keys")
    sides: Any = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    if q_segment_ids is None and kv_segment_ids is not None:
        raise _check.error(ValueError, _OP, "kv_segment_ids", kv_segment_ids, "None without q_segment_ids")
    if attention_mask is not None:
        mask = known(attention_mask) != 0
        if q_segment_ids is not None:
            ids, keys = q_segment_ids[:, None, :, None], q_segment_ids if kv_segment_ids is None else kv_segment_ids
            mask = mask & (ids == keys[:, None, None]) & (ids >= 0)
        return dot_product_attention(
            query, key, value, mask=mask, scale=softmax_scale, is_causal=causal, sinks=sink,
            local_window_size=None if sliding_window is None else tuple(sides), implementation=implementation,
        )  # type: ignore[return-value]  # fmt: skip
    span, scattered = within(_OP, s_q, sides[0], 0 if causal else sides[1]), None
    if q_segment_ids is not None:
        of_ids, scattered = segments(q_segment_ids, kv_segment_ids)
        span &= of_ids
    o, _ = fmha(query, key, value, span=span, sink=sink, scale=softmax_scale, implementation=implementation)
    return o if scattered is None else o + jnp.where(scattered, jnp.nan, 0)
