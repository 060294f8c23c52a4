"""Attention of every query over one interval of keys: check -> seam -> kernel or reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from . import _check, _ffi, reference
from .span import Span

Operands = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array, jax.Array]
"""q, k, v or None, start, stop, sink: what a kernel reads"""


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
        built for the device, and the reference elsewhere; its gradient is the reference's.

    Returns:
      o like q, 0 where a query sees no key; lse float32 `[b, s_q, h_q]`, natural log, without the sink, -inf there.

    Raises:
      ValueError, TypeError: operands that are not as said above.
      NotImplementedError: "cubin", and it is not built for these operands, or a gradient is asked of it.
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
        span = Span(0, dims["s_kv"])
    if not isinstance(span, Span):
        raise _check.error(TypeError, op, "span", span, "a Span or None")
    start, stop = span.bounds(dims["b"], dims["s_q"], dims["s_kv"], op)
    if sink is None:
        sink = jnp.full((dims["h_q"],), -jnp.inf, jnp.float32)
    return _forward((q, k, v, start, stop, sink), scale, implementation)


def _forward(operands: Operands, scale: float, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    """The seam: the one way to the kernel, and the one choice between it and the reference."""
    if implementation == "reference":
        return _reference(*operands, scale)
    q, _, v, *_ = operands
    d, dtype, shared_kv = q.shape[-1], q.dtype.name, v is None
    archs = _ffi.built_for("fwd", d=d, dtype=dtype, shared_kv=shared_kv)
    if not archs and shared_kv:  # a kernel that reads K and V apart serves too
        archs = _ffi.built_for("fwd", d=d, dtype=dtype, shared_kv=False)
        if archs:
            operands = (q, operands[1], operands[1], *operands[3:])
    if implementation is None:
        if not archs or any(a not in archs for a in _ffi.local_architectures()):
            return _reference(*operands, scale)
    elif not archs:
        got = f"'cubin' for {dtype}, d={d}, {'V=K' if shared_kv else 'V apart from K'}"
        raise _check.error(NotImplementedError, "fmha", "implementation", got, "operands that a kernel is built for")
    return _kernel_call(scale, implementation == "cubin", *operands)


def _reference(q: Any, k: Any, v: Any, start: Any, stop: Any, sink: Any, scale: float) -> tuple[jax.Array, jax.Array]:
    return reference.fmha(q, k, v, span=Span(start, stop), sink=sink, scale=scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_kernel(scale: float, insist: bool, *operands: Any) -> tuple[jax.Array, jax.Array]:
    """The kernel on CUDA; elsewhere the reference, or an error where the caller insists."""
    on_cuda = functools.partial(_ffi.fwd, scale=scale)
    elsewhere = functools.partial(_refuse if insist else _reference, scale=scale)

    def dispatch(*operands: Any) -> Any:
        return lax.platform_dependent(*operands, cuda=on_cuda, default=elsewhere)

    o, lse = jax.custom_batching.sequential_vmap(dispatch)(*operands)
    return o, lse


def _with_kernel_fwd(scale: float, insist: bool, *operands: Any) -> Any:
    if insist:
        wanted = "implementation=None or 'reference' under a gradient: no backward kernel is built"
        raise _check.error(NotImplementedError, "fmha", "implementation", "'cubin' under a gradient", wanted)
    return _with_kernel(scale, insist, *operands), operands


def _with_kernel_bwd(scale: float, insist: bool, operands: Any, cotangents: Any) -> Any:
    q, k, v, start, stop, sink = operands
    _, vjp = jax.vjp(lambda q, k, v, sink: _reference(q, k, v, start, stop, sink, scale), q, k, v, sink)
    dq, dk, dv, dsink = vjp(cotangents)
    return dq, dk, dv, None, None, dsink


_with_kernel.defvjp(_with_kernel_fwd, _with_kernel_bwd)
_kernel_call = jax.jit(_with_kernel, static_argnums=(0, 1))  # so that a call outside of jit compiles but once


# For which platform a call is lowered is known only then: jax.export lowers for CUDA on a machine without it. So what
# stands for the kernel on other platforms is a primitive that raises when it is lowered.
_not_cuda = Primitive("dsv4_fmha_not_cuda")
_not_cuda.multiple_results = True
_not_cuda.def_abstract_eval(lambda q: [q, q.update(shape=q.shape[:-1], dtype=jnp.dtype("float32"))])


def _refuse(q: jax.Array, *_: Any, scale: float) -> tuple[jax.Array, jax.Array]:
    o, lse = _not_cuda.bind(q)
    return o, lse


def _lower_refusal(ctx: Any, *_: Any) -> Any:
    platforms = " or ".join(ctx.module_context.platforms)
    raise _check.error(ValueError, "fmha", "implementation", f"'cubin' on platform {platforms}", "platform cuda")


mlir.register_lowering(_not_cuda, _lower_refusal)
