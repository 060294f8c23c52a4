"""Gradients: a function whose gradient another one computes, in reverse mode."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _check
from .batching import batched
from .op import Arrays, Call, Params
from .sharding import aligned


class Function(NamedTuple):
    """A function in `jnp`, with parameters that it gets as keywords. Its gradient may be differentiated again."""

    run: Callable[..., Arrays]
    params: Params = ()


class Rule:
    """A way to compute a gradient: by a function of the operands and the cotangents of the results. It gives the
    gradients of the first operands; the others have none.
    """

    names: tuple[str, ...] = ()
    """the names under jax.checkpoint, if any, of the results, or of what is kept besides operands: with a policy that
    saves them, nothing runs twice"""

    @staticmethod
    def residuals(operands: Arrays, results: Arrays) -> Any:
        return operands

    @staticmethod
    def operands(residuals: Any, cotangents: Arrays) -> Arrays:
        """The operands of the gradient's function."""
        return *residuals, *cotangents

    @staticmethod
    def cotangents(residuals: Any, gradients: Arrays) -> Sequence[jax.Array | None]:
        """The cotangents of all operands, from the results of the gradient's function; None where there is none."""
        trained = zip(gradients, residuals, strict=False)
        return *(g.astype(x.dtype) for g, x in trained), *(None for _ in residuals[len(gradients) :])


class Keeping(Rule):
    """A rule that hands what the forward pass keeps to the gradient's function, besides operands and cotangents."""

    @staticmethod
    def residuals(operands: Arrays, results: Arrays) -> Any:
        return operands, results

    @staticmethod
    def operands(residuals: Any, cotangents: Arrays) -> Arrays:
        operands, kept = residuals
        return *operands, *kept, *cotangents

    @staticmethod
    def cotangents(residuals: Any, gradients: Arrays) -> Sequence[jax.Array | None]:
        return Rule.cotangents(residuals[0], gradients)


class Differentiable(NamedTuple):
    """A call, or a function, whose gradient another one computes by a rule. A call has first derivatives in reverse
    mode alone; without a `backward` it has none, and asking for one raises an error.
    """

    forward: Call | Function
    backward: Call | Function | None
    rule: type[Rule] = Rule
    keeping: Call | None = None
    """with the rule `Keeping`, what runs instead of `forward` where there is a gradient: after its results come those
    that are kept"""

    def __call__(self, *operands: jax.Array) -> Arrays:
        results: Arrays = _call(self, *operands)
        return results


def without_gradient(call: Call, *operands: jax.Array) -> Arrays:
    """The results of a call; asking for a gradient raises an error."""
    return Differentiable(call, None)(*operands)


def constant(x: jax.Array, op: str, name: str) -> jax.Array:
    """x, an operand of `op` by this name; asking for a derivative in it raises an error, in either mode."""
    same: jax.Array = _constant.bind(x, op=op, name=name)
    return same


@functools.partial(jax.jit, static_argnums=0)  # so that a call outside of jit compiles only once
def _call(f: Differentiable, *operands: jax.Array) -> Arrays:
    if isinstance(f.forward, Call):
        operands = _in_reverse(f.forward, operands)
    results: Arrays = _differentiable(f, *operands)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(f: Differentiable, *operands: jax.Array) -> Arrays:
    return _run(f.forward, *operands)


def _forward(f: Differentiable, *operands: jax.Array) -> tuple[Arrays, Any]:
    if f.backward is None:
        assert isinstance(f.forward, Call)
        wanted = f"stop_gradient around it, or {f.forward.op.differentiated}"
        raise _check.error(NotImplementedError, f.forward.op.name, "gradient", "a call to differentiate", wanted)
    if f.keeping is not None:
        assert isinstance(f.forward, Call)
        results = _run(f.keeping, *operands)
        n = len(f.forward.op.results)
        return results[:n], f.rule.residuals(operands, _named(f.rule, results[n:]))
    results = _named(f.rule, _run(f.forward, *operands))
    return results, f.rule.residuals(operands, results)


def _named(rule: type[Rule], arrays: Arrays) -> Arrays:
    return tuple(map(checkpoint_name, arrays, rule.names)) if rule.names else arrays


def _backward(f: Differentiable, residuals: Any, cotangents: Arrays) -> tuple[Any, ...]:
    assert f.backward is not None
    gradients = _run(f.backward, *f.rule.operands(residuals, cotangents))
    return tuple(f.rule.cotangents(residuals, gradients))


_differentiable.defvjp(_forward, _backward)


def _run(f: Call | Function, *operands: jax.Array) -> Arrays:
    return _once(f, *operands) if isinstance(f, Call) else f.run(*operands, **dict(f.params))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(call: Call, *operands: jax.Array) -> Arrays:
    return batched(call, *operands)


@_once.defjvp
def _twice(call: Call, *_: Any) -> Any:
    raise _no_derivative(call.op.name)


# Forward-mode derivatives, which a custom_vjp does not have


def _in_reverse(call: Call, operands: Arrays) -> Arrays:
    """The operands, `aligned`, for an op that is differentiated in reverse mode only."""
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    placed = zip(aligned(call, operands), floats, strict=True)
    return tuple(_reverse_only.bind(x, op=call.op.name) if is_float else x for x, is_float in placed)


def _no_tangent(*_: Any, op: str, **__: Any) -> Any:
    raise _no_derivative(op)


def _jvp_in_reverse(primals: tuple[jax.Array], tangents: tuple[Any], *, op: str) -> tuple[jax.Array, Any]:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _tangent.bind(t, op=op)


def _identity(name: str, jvp: Callable[..., Any]) -> Primitive:
    """The primitive that gives its operand, and has this rule for tangents."""
    made = Primitive(name)
    made.def_abstract_eval(lambda x, **_: x)
    made.def_impl(lambda x, **_: x)
    ad.primitive_jvps[made] = jvp
    batching.primitive_batchers[made] = lambda xs, axes, **of: (made.bind(*xs, **of), *axes)
    mlir.register_lowering(made, lambda _, x, **__: [x])
    return made


# x, whose tangents raise our error where somebody asks for them, before JAX's own; cotangents pass
_reverse_only = _identity("dsv4_fmha_in_reverse", _jvp_in_reverse)

# its tangent: reverse mode transposes it, and nothing else may use it
_tangent = Primitive("dsv4_fmha_tangent")
_tangent.def_abstract_eval(lambda x, **_: x)
_tangent.def_impl(_no_tangent)
ad.deflinear2(_tangent, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[_tangent] = _no_tangent
mlir.register_lowering(_tangent, _no_tangent, cacheable=False)


def _jvp_of_constant(primals: tuple[jax.Array], tangents: tuple[Any], *, op: str, name: str) -> Any:
    (x,), (t,) = primals, tangents
    if not isinstance(t, ad.Zero):
        wanted = f"jax.lax.stop_gradient({name}), or implementation='reference', which has all derivatives"
        raise _check.error(NotImplementedError, op, "gradient", f"a derivative in {name}", wanted)
    return x, t


_constant = _identity("dsv4_fmha_constant", _jvp_of_constant)


def _no_derivative(op: str) -> Exception:
    """The error for a derivative that is not a first one in reverse mode."""
    others = "implementation='reference', which has all of them but of the indexer's scores and loss"
    wanted = f"jax.grad or jax.vjp, once, or {others}"
    return _check.error(NotImplementedError, op, "gradient", "a second derivative, or one forward", wanted)
