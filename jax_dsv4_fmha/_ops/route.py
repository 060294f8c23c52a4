"""A mixture of experts' router after its product: which experts a token gets, and their weights."""

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
from .._host import route as raw


def route(
    logits: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int | None = None,
    table: jax.Array | None = None,
    tokens: jax.Array | None = None,
    score: str = "sqrtsoftplus",
    temperature: float = 1.0,
    scale: float = 1.0,
    implementation: _check.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token by their logits, or finds them in a table, and weighs them.

        s = score(logits / temperature)
        chosen[t] = the top_k experts with the greatest s[t] + bias, or table[tokens[t]]
        weights[t, j] = scale · s[t, chosen[t, j]] / (Σ_j s[t, chosen[t, j]] + 1e-20)

    This is the router of DeepSeek-V4 after the product with its gate, and with a sigmoid that of V3. `fused_moe` takes
    its results. Of equal sums the expert with the lower number comes first, as in `jax.lax.top_k`, and NaN comes before
    all numbers. A token's results do not depend on the other tokens.

    Logits have a gradient through the weights. The bias has a say in the choice alone, and has none.

    Args:
      logits: float32 `[b, s, e]`, or `[b, s, parts, e]`, whose sum over parts they are, the last ones added first: a
        product with a gate in float32 may be one with three numbers of bfloat16 for each of it.
      bias: float32 `[e]`, which balances the experts, or None for none.
      top_k: how many experts a token gets, where there is no table.
      table: int32 `[v, c]`, the experts of each word of a vocabulary. The weights of a token with an expert that is not
        of `[0, e)` are NaN.
      tokens: int32 `[b, s]`, rows of the table; of one that has none, the nearest row counts.
      score: "sqrtsoftplus" or "sigmoid".
      temperature: a float > 0.
      scale: a float > 0, the sum of a token's weights.
      implementation: as in `fmha`. The kernel takes up to 512 experts in multiples of 4, 32 of a token, and 3 parts.

    Returns:
      weights, float32 `[b, s, c]`, and chosen, int32 `[b, s, c]`, in the order of the greatest sums. The definition
      computes the gradient, and runs under `jax.vmap`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import route
      >>> weights, chosen = route(jnp.array([[[0.0, 2.0, 1.0]]]), top_k=2, scale=1.5)
      >>> chosen.tolist(), round(float(weights.sum()), 3)
      ([[[1, 2]]], 1.5)
    """
    op = "route"
    dims: dict[str, Any] = {}
    axes = "b s parts e" if jnp.ndim(logits) == 4 else "b s e"
    logits = _check.operand(op, "logits", logits, axes, dims, _check.FP32)
    logits = logits if logits.ndim == 4 else logits[:, :, None]
    if (top_k is None) == (table is None):
        raise _check.error(ValueError, op, "top_k and table", "neither" if table is None else "both", "one of them")
    operands: tuple[jax.Array, ...]
    if table is None:
        if tokens is not None:
            raise _check.error(ValueError, op, "tokens", tokens, "None without a table")
        top_k = c = _check.positive(op, "top_k", top_k)
        if not c <= dims["e"]:
            raise _check.error(ValueError, op, "top_k", top_k, f"at most e={dims['e']}")
        bias = jnp.zeros(dims["e"], jnp.float32) if bias is None else bias
        operands = (_check.operand(op, "bias", bias, "e", dims, _check.FP32)[None],)
    else:
        if bias is not None:
            raise _check.error(ValueError, op, "bias", bias, "None with a table")
        table = _check.operand(op, "table", table, "v c", dims, _check.INT)
        tokens = _check.operand(op, "tokens", tokens, "b s", dims, _check.INT)
        operands, c = (table[None], tokens), dims["c"]
    _check.one_of(op, "score", score, tuple(router.SCORES))
    how: dict[str, Any] = {"score": score}
    for name, y in (("temperature", temperature), ("scale", scale)):
        how[name] = _check.number(op, name, y, "a float > 0", lambda y: y > 0)
    _check.implementation(op, implementation)
    params = tuple((how if top_k is None else how | {"top_k": top_k}).items())
    made = _ROUTE if table is None else _BY_TABLE
    if implementation == "reference":
        weights, chosen = made.reference(logits, *operands, **dict(params))
        return weights, chosen
    support = _support(logits, c)
    call = Call(made, choose(op, implementation, support), params, support)
    weights, chosen = Differentiable(call, Function(_gradient, tuple(how.items())), _AtChoice)(logits, *operands)
    return weights, chosen


def _support(logits: jax.Array, c: int) -> Support:
    *_, parts, e = logits.shape
    fits = logits.size and e % 4 == 0 and e <= raw.MOST_EXPERTS and c <= raw.MOST_CHOSEN and parts <= raw.MOST_PARTS
    archs = library.shipped_for("route") if fits else ()
    wanted = f"up to {raw.MOST_EXPERTS} experts in multiples of 4, {raw.MOST_CHOSEN} of a token, {raw.MOST_PARTS} parts"
    return Support(f"{c} of {e} experts, {parts} parts", ("route",), archs, wanted)


def _by_bias(logits: jax.Array, bias: jax.Array, *, top_k: int, scale: float, **how: Any) -> Arrays:
    scores = router.scores(logits, **how)
    chosen = router.chosen_by(scores, bias[0], top_k)
    return router.weights_of(scores, chosen, scale=scale), chosen


def _by_table(logits: jax.Array, table: jax.Array, tokens: jax.Array, *, scale: float, **how: Any) -> Arrays:
    chosen = router.found_in(table[0], tokens)
    return router.weights_of(router.scores(logits, **how), chosen, scale=scale), chosen


def _gradient(logits: jax.Array, chosen: jax.Array, dweights: jax.Array, *, scale: float, **how: Any) -> Arrays:
    """The gradient in the logits, from that in the weights of these experts."""
    of = lambda logits: router.weights_of(router.scores(logits, **how), chosen, scale=scale)  # noqa: E731
    gradients: Arrays = jax.vjp(of, logits)[1](dweights)
    return gradients


class _AtChoice(Rule):
    """The gradient at the choice that the forward pass made."""

    @staticmethod
    def residuals(operands: Arrays, results: Arrays) -> Any:
        return operands, results[1]

    @staticmethod
    def operands(residuals: Any, cotangents: Arrays) -> Arrays:
        (logits, *_), chosen = residuals
        return logits, chosen, cotangents[0]

    @staticmethod
    def cotangents(residuals: Any, gradients: Arrays) -> Any:
        return Rule.cotangents(residuals[0], gradients)


def _kernel(logits: jax.Array, bias: jax.Array, *, top_k: int, score: str, temperature: float, scale: float) -> Arrays:
    return raw.route(logits, bias[0], top_k=top_k, score=score, unit=1 / temperature, scale=scale)


def _kernel_by_table(
    logits: jax.Array, table: jax.Array, tokens: jax.Array, *, score: str, temperature: float, scale: float
) -> Arrays:
    return raw.route_by_table(logits, table[0], tokens, score=score, unit=1 / temperature, scale=scale)


_LOGITS = Axes("logits", "b s_q parts e")
_ROUTE = Op(
    "route",
    (_LOGITS, Axes("bias", f"{ONE_OR_B} e")),
    (Axes("weights", "b s_q top_k"), Axes("chosen", "b s_q top_k")),
    _by_bias,
    _kernel,
    is_mapped=False,
)
_BY_TABLE = Op(
    "route",
    (_LOGITS, Axes("table", f"{ONE_OR_B} v c"), Axes("tokens", "b s_q")),
    (Axes("weights", "b s_q c"), Axes("chosen", "b s_q c")),
    _by_table,
    _kernel_by_table,
    is_mapped=False,
)
