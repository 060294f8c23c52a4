"""Attention of every query over one interval of keys."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import _backward, _check, _ffi, reference
from ._span import Span
from ._transforms import RESULTS, SINK, Axes, Differentiable, Op, choose


def fmha(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None = None,
    *,
    span: Span | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention with a sink, over the keys that a Span shows.

        S = scale * q·k;  lse = log Σ exp(S);  o = Σ exp(S - logaddexp(lse, sink)) v

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16; float32 on the reference alone.
      k: `[b, s_kv, h_kv, d]` in q's dtype; h_q is a multiple of h_kv.
      v: like k; None means that V is K, as in DeepSeek-V4's latent attention.
      span: which keys a query sees; None means all.
      sink: float32 `[h_q]`, natural logits that are not scaled and add to the denominator only. -inf has no effect,
        +inf gives `o = 0`.
      scale: a float > 0, `d**-0.5` if left out.
      implementation: "cubin" and "reference" insist. None takes the kernel where the platform is CUDA and the kernel is
        built for the device, and the reference elsewhere. "reference" is plain `jnp`, with derivatives of every order
        and mode; the others have reverse mode once, and keep to their devices under any mesh (docs/transforms.md).

    Returns:
      o like q, 0 where a query sees no key; lse float32 `[b, s_q, h_q]`, natural log, without the sink, -inf there.

    Raises:
      ValueError, TypeError: operands that are not as said above.
      NotImplementedError: "cubin", and it is not built for these operands.
    """
    op = "fmha"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    k = _check.operand(op, "k", k, "b s_kv h_kv d", dims, (q.dtype,))
    _check.heads(op, dims["h_q"], dims["h_kv"])
    if v is not None:
        v = _check.operand(op, "v", v, "b s_kv h_kv d", dims, (q.dtype,))
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    _check.implementation(op, implementation)
    if span is None:
        span = Span(0, jnp.int32(dims["s_kv"]))
    if not isinstance(span, Span):
        raise _check.error(TypeError, op, "span", span, "a Span or None")
    start, stop = span.bounds(dims["b"], dims["s_q"], dims["s_kv"], op)
    if implementation == "reference":
        return reference.fmha(q, k, v, span=Span(start, stop), sink=sink, scale=scale)
    d, dtype = dims["d"], q.dtype.name
    got = f"{dtype}, d={d}, {'V=K' if v is None else 'V apart from K'}"
    kernel = choose(op, implementation, _built_for(d, dtype, v is None), got)
    if v is None:
        return _SHARED(q, k, start, stop, sink=sink, scale=scale, kernel=kernel)
    return _APART(q, k, v, start, stop, sink=sink, scale=scale, kernel=kernel)


def _built_for(d: int, dtype: str, shared_kv: bool) -> tuple[str, ...]:
    """As `_ffi.built_for`; a kernel that reads K and V apart serves where they are one."""
    built = _ffi.built_for("fwd", d=d, dtype=dtype, shared_kv=shared_kv)
    return built or _ffi.built_for("fwd", d=d, dtype=dtype, shared_kv=False)


def _kernel(q: Any, k: Any, v: Any, start: Any, stop: Any, sink: Any, *, scale: float) -> Any:
    if v is None and not _ffi.built_for("fwd", d=q.shape[-1], dtype=q.dtype.name, shared_kv=True):
        v = k
    return _ffi.fwd(q, k, v, start, stop, sink, scale=scale)


def _reference(q: Any, k: Any, v: Any, start: Any, stop: Any, sink: Any, *, scale: float) -> Any:
    return reference.fmha(q, k, v, span=Span(start, stop), sink=sink, scale=scale)


def _without_v(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, *rest, scale: f(q, k, None, *rest, scale=scale)


_Q, _K, _V = Axes("q", "b s_q h_q d"), Axes("k", "b s_kv h_kv d"), Axes("v", "b s_kv h_kv d")
_SPAN = (Axes("span.start", "b s_q"), Axes("span.stop", "b s_q"))
_APART = Differentiable.of(Op("fmha", (_Q, _K, _V, *_SPAN, SINK), RESULTS, _reference, _kernel), _backward.fmha)
_SHARED = Differentiable.of(
    Op("fmha", (_Q, _K, *_SPAN, SINK), RESULTS, _without_v(_reference), _without_v(_kernel)),
    _without_v(_backward.fmha),
)
