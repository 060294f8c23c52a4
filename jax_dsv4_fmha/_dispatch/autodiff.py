"""Gradients of ops: in reverse mode, once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _check
from .batching import batched
from .folding import sink_weight
from .op import Arrays, Axes, Call, Op
from .sharding import aligned

O, LSE = "dsv4_fmha_o", "dsv4_fmha_lse"
"""The names of a forward op's results under jax.checkpoint: with a policy that saves both, nothing runs twice."""

# Forward-mode derivatives, which a custom_vjp does not have


def in_reverse(call: Call, operands: Arrays) -> Arrays:
    """The operands, `aligned`, for an op that is differentiated in reverse mode only."""
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    placed = zip(aligned(call, operands), floats, strict=True)
    return tuple(_in_reverse.bind(x, op=call.op.name) if is_float else x for x, is_float in placed)


def _no_tangent(*_: Any, op: str, **__: Any) -> Any:
    raise no_derivative(op)


def _jvp_in_reverse(primals: tuple[jax.Array], tangents: tuple[Any], *, op: str) -> tuple[jax.Array, Any]:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _tangent.bind(t, op=op)


# x, whose tangents raise our error where somebody asks for them, before JAX's own; cotangents pass
_in_reverse = Primitive("dsv4_fmha_in_reverse")
_in_reverse.def_abstract_eval(lambda x, **_: x)
_in_reverse.def_impl(lambda x, **_: x)
ad.primitive_jvps[_in_reverse] = _jvp_in_reverse
batching.primitive_batchers[_in_reverse] = lambda xs, axes, **of: (_in_reverse.bind(*xs, **of), *axes)
mlir.register_lowering(_in_reverse, lambda _, x, **__: [x])

# its tangent: reverse mode transposes it, and nothing else may use it
_tangent = Primitive("dsv4_fmha_tangent")
_tangent.def_abstract_eval(lambda x, **_: x)
_tangent.def_impl(_no_tangent)
ad.deflinear2(_tangent, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[_tangent] = _no_tangent
mlir.register_lowering(_tangent, _no_tangent, cacheable=False)


def no_derivative(op: str) -> Exception:
    """The error for a derivative that is not a first one in reverse mode."""
    wanted = "jax.grad or jax.vjp, once, or attention with implementation='reference', which has all of them"
    return _check.error(NotImplementedError, op, "gradient", "a second derivative, or one forward", wanted)


# Without a gradient


@functools.partial(jax.jit, static_argnums=0)  # so that a call outside of jit compiles only once
def forward(call: Call, *operands: jax.Array) -> Arrays:
    """The results of an op without a gradient; asking for one raises an error."""
    return _opaque(call, *in_reverse(call, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _opaque(call: Call, *operands: jax.Array) -> Arrays:
    return batched(call, *operands)


def _no_gradient(call: Call, *_: Any) -> Any:
    wanted = "stop_gradient around it, or implementation='reference'"
    raise _check.error(NotImplementedError, call.op.name, "gradient", "a call to differentiate", wanted)


_opaque.defvjp(_no_gradient, _no_gradient)


# Gradients


def gradient(op: Op, reference: Callable[..., Arrays], kernel: Callable[..., Arrays] | None = None) -> Op:
    """The op of the gradient of attention `op`, (…, sink) -> (o, lse), with the sink last:

        (…, o, do, lse, weight, dlse) -> (dq, the gradients of all other operands whose last axis is d, rowsum(o∘do))

    With P = exp(S - lse) and delta = weight·rowsum(o∘do) - dlse,

        dS = P∘(weight · do·v - delta);  dq = scale·dS k;  dk = scale·dSᵀ q;  dv = Pᵀ (weight · do)

    A sink enters only as weight = exp(lse - logaddexp(lse, sink)), a cotangent of lse only as dlse. Gradients of keys
    come in float32, so that devices can sum them.
    """
    rows = (*each("b s_q h_q d", "o", "do"), *each("b s_q h_q", "lse", "weight", "dlse"))
    gradients = (Axes(f"d{name}", axes) for name, axes in op.operands if axes.endswith(" d"))
    results = (*gradients, *each("b s_q h_q", "rowsum"))
    return Op(op.name, (*op.operands[:-1], *rows), results, reference, kernel, "gradient")


def each(axes: str, *names: str) -> tuple[Axes, ...]:
    return tuple(Axes(name, axes) for name in names)


def rowsum(o: jax.Array, do: jax.Array) -> jax.Array:
    """rowsum(o∘do) in float32, where no kernel makes it."""
    return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1)


class Differentiable(NamedTuple):
    """Attention and its `gradient`: two calls, each with a kernel or without."""

    forward: Call
    backward: Call

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        """o and lse of the forward op."""
        o, lse = _call(self, *operands)
        return o, lse


@functools.partial(jax.jit, static_argnums=0)  # so that a call outside of jit compiles only once
def _call(calls: Differentiable, *operands: jax.Array) -> Arrays:
    return _differentiable(calls, *in_reverse(calls.forward, operands))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def once(call: Call, *operands: jax.Array) -> Arrays:
    return batched(call, *operands)


@once.defjvp
def _twice(call: Call, *_: Any) -> Any:
    raise no_derivative(call.op.name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(calls: Differentiable, *operands: jax.Array) -> Arrays:
    return once(calls.forward, *operands)


def _fwd(calls: Differentiable, *operands: jax.Array) -> tuple[Arrays, tuple[Arrays, Arrays]]:
    o, lse = once(calls.forward, *operands)
    results = checkpoint_name(o, O), checkpoint_name(lse, LSE)
    return results, (operands, results)


def _bwd(calls: Differentiable, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (*operands, sink), (o, lse) = residuals
    do, dlse = cotangents
    weight = sink_weight(lse, sink[:, None])
    *gradients, of_rows = once(calls.backward, *operands, o, do, lse, weight, dlse)
    of_sink = jax.nn.sigmoid(sink[:, None] - jnp.where(jnp.isinf(lse), 0, lse))  # 1 - weight, with all its digits
    dsink = -jnp.sum(jnp.where(jnp.isinf(lse) | jnp.isinf(sink[:, None]), 0, of_sink * of_rows), (0, 1))[None]
    given = iter(gradients)
    return *(next(given).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None for x in operands), dsink


_differentiable.defvjp(_fwd, _bwd)
