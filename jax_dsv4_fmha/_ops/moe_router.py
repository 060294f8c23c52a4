"""The router of a mixture of experts: which experts a token gets, and their weights."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions import router
from .._dispatch.autodiff import Differentiable, Function, Rule
from .._dispatch.lowering import choose
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, Op
from .._dispatch.support import Support
from .._host import library
from .._host import moe_router as raw


def moe_router(
    x: jax.Array,
    gate: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int | None = None,
    given: jax.Array | None = None,
    score: str = "sqrtsoftplus",
    temperature: float = 1.0,
    scale: float = 1.0,
    implementation: _check.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token, and weighs them.

        s = score(x gate / temperature)
        chosen[t] = the top_k experts with the greatest s[t] + bias, or given[t]
        weights[t, j] = scale · s[t, chosen[t, j]] / (Σ_j s[t, chosen[t, j]] + 1e-20)

    This is the router of DeepSeek-V4, and with a sigmoid that of V3. `fused_moe` takes its results. Products have the
    precision of float32. Of equal sums the expert with the lower number comes first, as in `jax.lax.top_k`; NaN comes
    before all numbers. A token's results do not depend on the other tokens.

    x and the gate get gradients through the weights. The bias has a say in the choice alone, and gets none.

    Args:
      x: `[b, s, k]`, bfloat16, float16 or float32.
      gate: float32 `[k, e]`: a checkpoint's, transposed.
      bias: float32 `[e]`, or None for none.
      top_k: how many experts a token gets, where they are not given.
      given: int32 `[b, s, c]`, the experts of each token, as a table of tokens says. The weights of a token with
        an expert that is not of `[0, e)` are NaN.
      score: "sqrtsoftplus" or "sigmoid".
      temperature: a float > 0.
      scale: a float > 0.
      implementation: as in `fmha`. Kernels take k in multiples of 64 from 512 on, up to 512 experts in multiples of
        16, and 32 experts of a token.

    Returns:
      weights, float32 `[b, s, c]`, and chosen, int32 `[b, s, c]`, in the order of the greatest sums.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import moe_router
      >>> weights, chosen = moe_router(jnp.ones((1, 1, 2)), jnp.array([[0.0, 2.0, 1.0]] * 2), top_k=2, scale=1.5)
      >>> chosen.tolist(), round(float(weights.sum()), 3)
      ([[[1, 2]]], 1.5)
    """
    op = "moe_router"
    dims: dict[str, Any] = {}
    x = _check.operand(op, "x", x, "b s k", dims, _check.FLOAT)
    gate = _check.operand(op, "gate", gate, "k e", dims, _check.FP32)
    if (top_k is None) == (given is None):
        got = "neither" if top_k is None else "both"
        raise _check.error(ValueError, op, "top_k and given", got, "one of them")
    if given is None:
        top_k = c = _check.positive(op, "top_k", top_k)
        if not c <= dims["e"]:
            raise _check.error(ValueError, op, "top_k", top_k, f"at most e={dims['e']}")
        bias = jnp.zeros(dims["e"], jnp.float32) if bias is None else bias
        of_choice = _check.operand(op, "bias", bias, "e", dims, _check.FP32)[None]
    else:
        of_choice = given = _check.operand(op, "given", given, "b s c", dims, _check.INT)
        c = dims["c"]
        if bias is not None:
            raise _check.error(ValueError, op, "bias", bias, "None where experts are given")
    _check.one_of(op, "score", score, tuple(router.SCORES))
    how: dict[str, Any] = {"score": score}
    for name, y in (("temperature", temperature), ("scale", scale)):
        how[name] = _check.number(op, name, y, "a float > 0", lambda y: y > 0)
    _check.implementation(op, implementation)
    if given is None:
        how["top_k"] = top_k
    operands = (x, gate[None], of_choice)
    if implementation == "reference":
        results = (_definition if given is None else _definition_of_given)(*operands, **how)
    else:
        support = _support(x, dims["e"], c)
        use = choose(op, implementation, support)
        forward = Call(_ROUTER if given is None else _ROUTER_OF_GIVEN, use, tuple(how.items()), support)
        backward = Function(_gradient, tuple((name, y) for name, y in how.items() if name != "top_k"))
        results = Differentiable(forward, backward, _ByChoice if given is None else _ByGiven)(*operands)
    return results[0], results[1] if given is None else given


def _support(x: jax.Array, e: int, c: int) -> Support:
    archs, k = library.shipped_for("moe_router", dtype=x.dtype.name), x.shape[2]
    fits = isinstance(k, int) and isinstance(e, int) and isinstance(c, int)
    fits = fits and raw.LEAST_K <= k <= raw.MOST_K and k % raw.UNIT == 0 and c <= raw.MOST_CHOSEN
    fits = fits and e % raw.BLOCK == 0 and e <= raw.MOST_EXPERTS
    wanted = "bfloat16, k a multiple of 64 from 512 on, up to 512 experts in multiples of 16, and 32 of a token"
    return Support(f"{x.dtype.name}, k={k}, {c} of {e} experts", ("moe_router",), archs if fits else (), wanted)


def _definition(
    x: jax.Array, gate: jax.Array, bias: jax.Array, *, top_k: int, score: str, temperature: float, scale: float
) -> Arrays:
    scores = router.scores(x, gate[0], score=score, temperature=temperature)
    chosen = router.chosen_by(scores, bias[0], top_k)
    return router.weights_of(scores, chosen, scale=scale), chosen


def _definition_of_given(
    x: jax.Array, gate: jax.Array, given: jax.Array, *, score: str, temperature: float, scale: float
) -> Arrays:
    scores = router.scores(x, gate[0], score=score, temperature=temperature)
    return (router.weights_of(scores, given, scale=scale),)


def _gradient(x: jax.Array, gate: jax.Array, chosen: jax.Array, dweights: jax.Array, **how: Any) -> Arrays:
    """The gradients in x and the gate, from those in the weights of these experts."""
    _, pull = jax.vjp(lambda x, gate: _definition_of_given(x, gate, chosen, **how)[0], x, gate)
    gradients: Arrays = pull(dweights)
    return gradients


class _ByChoice(Rule):
    """The gradient at the choice that the forward pass made."""

    @staticmethod
    def residuals(operands: Arrays, results: Arrays) -> Any:
        return *operands[:2], results[1]

    @staticmethod
    def operands(residuals: Any, cotangents: Arrays) -> Arrays:
        return *residuals, cotangents[0]


class _ByGiven(Rule):
    """The same at the experts that are given."""


def _kernel(
    x: jax.Array, gate: jax.Array, bias: jax.Array, *, top_k: int, score: str, temperature: float, scale: float
) -> Arrays:
    return raw.moe_router(x, gate[0], bias[0], top_k=top_k, score=score, unit=1 / temperature, scale=scale)


def _kernel_of_given(
    x: jax.Array, gate: jax.Array, given: jax.Array, *, score: str, temperature: float, scale: float
) -> Arrays:
    return raw.moe_router_of_given(x, gate[0], given, score=score, unit=1 / temperature, scale=scale)


_X, _GATE = Axes("x", "b s_q k"), Axes("gate", f"{ONE_OR_B} k e")
_ROUTER = Op(
    "moe_router",
    (_X, _GATE, Axes("bias", f"{ONE_OR_B} e")),
    (Axes("weights", "b s_q top_k"), Axes("chosen", "b s_q top_k")),
    _definition,
    _kernel,
    is_mapped=False,
)
_ROUTER_OF_GIVEN = Op(
    "moe_router",
    (_X, _GATE, Axes("given", "b s_q c")),
    (Axes("weights", "b s_q c"),),
    _definition_of_given,
    _kernel_of_given,
    is_mapped=False,
)
