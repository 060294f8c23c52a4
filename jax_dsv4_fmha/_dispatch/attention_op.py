"""Attention's gradient as an op, and the rule by which it serves attention."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.log_space import sink_factor
from .autodiff import Rule
from .op import Arrays, Axes, Op

O, LSE = "dsv4_fmha_o", "dsv4_fmha_lse"
"""The names of attention's results under jax.checkpoint"""


def gradient(
    op: Op,
    reference: Callable[..., Arrays],
    kernel: Callable[..., Arrays] | None,
    launches: Callable[..., Sequence[str]],
) -> Op:
    """The op of the gradient of attention `op`, (…, sink) -> (o, lse), with the sink last:

        (…, o, do, lse, sink_factor, dlse) -> (dq, gradients of all other operands whose last axis is d, rowsum(o∘do))

    With P = exp(S - lse) and delta = sink_factor·rowsum(o∘do) - dlse,

        dS = P∘(sink_factor · do·v - delta);  dq = scale·dS k;  dk = scale·dSᵀ q;  dv = Pᵀ (sink_factor · do)

    A sink enters only as sink_factor = exp(lse - logaddexp(lse, sink)), a cotangent of lse only as dlse. Gradients of
    keys come in float32, so that devices can sum them.
    """
    rows = (*_alike(op.results[0].axes, "o", "do"), *_alike("b s_q h_q", "lse", "sink_factor", "dlse"))
    gradients = (Axes(f"d{name}", axes) for name, axes in op.operands if axes.endswith(" d"))
    results = (*gradients, *_alike("b s_q h_q", "rowsum"))
    operands = (*op.operands[:-1], *rows)
    return Op(op.name, operands, results, reference, kernel, "gradient", launches=launches, halo=op.halo)


def _alike(axes: str, *names: str) -> tuple[Axes, ...]:
    return tuple(Axes(name, axes) for name in names)


def rowsum(o: jax.Array, do: jax.Array) -> jax.Array:
    """rowsum(o∘do) in float32, where no kernel makes it."""
    return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1)


class ByGradient(Rule):
    """Attention's gradient by the op that `gradient` makes."""

    names = (O, LSE)

    @staticmethod
    def residuals(operands: Arrays, results: Arrays) -> Any:
        return operands, results

    @staticmethod
    def operands(residuals: Any, cotangents: Arrays) -> Arrays:
        (*operands, sink), (o, lse) = residuals
        do, dlse = cotangents
        return *operands, o, do, lse, sink_factor(lse, sink[:, None]), dlse

    @staticmethod
    def cotangents(residuals: Any, gradients: Arrays) -> Sequence[jax.Array | None]:
        (*operands, sink), (_, lse) = residuals
        *given, of_rows = gradients
        of_sink = jax.nn.sigmoid(sink[:, None] - jnp.where(jnp.isinf(lse), 0, lse))  # 1 - sink_factor, to all digits
        dsink = -jnp.sum(jnp.where(jnp.isinf(lse) | jnp.isinf(sink[:, None]), 0, of_sink * of_rows), (0, 1))[None]
        left = iter(given)
        of_floats = (next(left, None) if jnp.issubdtype(x.dtype, jnp.floating) else None for x in operands)
        of_operands = (g if g is None else g.astype(x.dtype) for g, x in zip(of_floats, operands, strict=True))
        return *of_operands, dsink
