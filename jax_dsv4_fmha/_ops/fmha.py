"""Attention of every query over one interval of keys."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.span import Span
from .._dispatch.attend import attend
from .._dispatch.modes import canonical_order
from .._dispatch.sources import SpanSource


def fmha(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None = None,
    *,
    d_v: int | None = None,
    span: Span | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    implementation: _check.Implementation | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Fused multi-head attention with a sink; each query attends to the keys that a Span shows.

        S = scale * q·k;  lse = log Σ exp(S);  o = Σ exp(S - logaddexp(lse, sink)) v

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16; float32 only on the reference.
      k: `[b, s_kv, h_kv, d]` in q's dtype; h_q is a multiple of h_kv.
      v: like k; None means that V is K, as in DeepSeek-V4's latent attention.
      d_v: where V is K, an int of 1 to d: V is the first d_v numbers of K, and None means all of them. Latents of 512
        dimensions and 64 for RoPE, as DeepSeek-V3 has them, are d = 576 with d_v = 512, for which Hopper has kernels.
      span: which keys a query sees; None means all.
      sink: float32 `[h_q]`, natural logits that are not scaled and add to the denominator only. -inf has no effect,
        +inf gives `o = 0`.
      scale: a float > 0, `d**-0.5` if left out.
      implementation: "cubin" and "reference" insist. None takes the kernel where the platform is CUDA and the kernel is
        built for the device, and the reference elsewhere. "reference" is plain `jnp`, with derivatives of every order
        and mode; the others have reverse mode once, and keep to their devices under any mesh (docs/transforms.md).
      deterministic: whether gradients are to have the same bits every time, which costs time where a kernel adds to
        memory: at d 512 to the gradients of keys, at d 64 and 128 to those of q where queries may see more than 512
        keys (docs/performance.md). The forward pass always has them.
      batch_invariant: whether the bits of a query's o and lse are to depend on its own operands alone, whatever the
        batch, the chunk of a prompt and the pages (docs/bits.md says which). It insists on a
        kernel that sums in the canonical order: on sm_90a there are such for d = 512 where V is K, and for d up to 256
        where all queries see keys from the first one on, as `Span.causal` and `Span.lengths` show them.

    Returns:
      o like q, with d_v numbers of each head where that is given, 0 where a query sees no key; lse float32
      `[b, s_q, h_q]`, natural log, without the sink, -inf there.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin" or batch_invariant, and no such kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Span, fmha
      >>> q, k = jnp.ones((1, 6, 4, 64), jnp.bfloat16), jnp.ones((1, 6, 2, 64), jnp.bfloat16)
      >>> o, lse = fmha(q, k, k, span=Span.causal(6))
      >>> o.shape, lse.shape
      ((1, 6, 4, 64), (1, 6, 4))
    """
    op = "fmha"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    k = _check.operand(op, "k", k, "b s_kv h_kv d", dims, (q.dtype,))
    _check.heads(op, *(dims[name] for name in ("h_q", "h_kv", "s_q", "s_kv")))
    if v is not None:
        v = _check.operand(op, "v", v, "b s_kv h_kv d", dims, (q.dtype,))
    d_v = _check.d_v(op, d_v, dims["d"], v)
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    _check.implementation(op, implementation)
    _check.flags(op, deterministic=deterministic)
    _check.batch_invariant(op, batch_invariant, implementation)
    if span is None:
        span = Span(0, jnp.int32(dims["s_kv"]))
    if not isinstance(span, Span):
        raise _check.error(TypeError, op, "span", span, "a Span or None")
    start, stop = span.bounds(dims["b"], dims["s_q"], dims["s_kv"], op)
    if implementation == "reference":
        return reference.fmha(q, k, v, d_v=d_v, span=Span(start, stop), sink=sink, scale=scale)
    names = ("k", "span.start", "span.stop") if v is None else ("k", "v", "span.start", "span.stop")
    source = SpanSource(k, start, stop, v, names, d_v=d_v, width=span.width, from_first=span.is_from_first)
    return attend(
        op, q, [source], sink=sink, scale=scale, implementation=implementation, deterministic=deterministic,
        modes=canonical_order.wanted(batch_invariant),
    )  # fmt: skip
