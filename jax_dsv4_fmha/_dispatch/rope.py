"""RoPE of rows by a table of cos and sin, alone and after the norm of heads; where there is a kernel, in one pass."""

from collections.abc import Sequence
from typing import Any

import jax

from .._definitions.rope import (
    normalized,
    normalized_gradient,
    normed_and_rotated,
    normed_and_rotated_gradient,
    rotated_pairs,
)
from .._host import library
from .._host import rope as raw
from .autodiff import Differentiable, Function, Rule
from .lowering import choose
from .op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op
from .support import Support

X, TABLE, Y = Axes("x", "b s_q h_q d"), Axes("table", f"{ONE_OR_B} s_q n"), Axes("y", "b s_q h_q d")


@jax.named_scope("rope")
def rotated(x: jax.Array, table: jax.Array, direction: int) -> jax.Array:
    """x `[b, s, h, d]` with its last n numbers rotated by a table float32 `[b, s, n]` or `[1, s, n]`: forward in
    direction 1, back in direction -1.
    """
    support = support_for("rope", x, dims=table.shape[-1])
    use = choose("rope", None, support) if x.shape[-1] % _VECTOR == 0 else KernelUse.NEVER

    def rotated_by(direction: int) -> Call | Function:
        params = (("direction", direction),)
        return Function(rotated_pairs, params) if use == KernelUse.NEVER else Call(_ROPE, use, params, support)

    return Differentiable(rotated_by(direction), rotated_by(-direction), RotatesBack)(x, table)[0]


def normed_then_rotated(x: jax.Array, table: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps), rounded to its dtype where no kernel makes it, and rotated."""
    support = support_for("norm_rope", x, d=x.shape[-1], dims=table.shape[-1])
    use = choose("norm_rope", None, support)
    if use == KernelUse.NEVER:
        return rotated(normed(x, eps).astype(x.dtype), table, 1)
    with jax.named_scope("norm"):
        call, gradient = (Call(op, use, (("eps", eps),), support) for op in (_NORM_ROPE, _NORM_ROPE_GRADIENT))
        return Differentiable(call, gradient)(x, table)[0]


@jax.named_scope("norm")
def normed(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) in float32, whose gradient is made of x alone."""
    params = (("eps", eps),)
    return Differentiable(Function(_normalized, params), Function(_normalized_gradient, params))(x)[0]


def support_for(op: str, x: jax.Array, **sizes: int) -> Support:
    """The kernel of an op for rows of x; that of its gradient is shipped for the same."""
    got = f"{x.dtype.name}, " + ", ".join(f"{name}={n}" for name, n in sizes.items())
    return Support(got, (op,), library.shipped_for(op, dtype=x.dtype.name, **sizes))


class RotatesBack(Rule):
    """A rotation's gradient rotates back, and needs no x."""

    @staticmethod
    def residuals(operands: Arrays, results: Arrays) -> Any:
        _, table = operands
        return table

    @staticmethod
    def operands(residuals: Any, cotangents: Arrays) -> Arrays:
        return *cotangents, residuals

    @staticmethod
    def cotangents(residuals: Any, gradients: Arrays) -> Sequence[jax.Array | None]:
        return *gradients, None


def _normalized(x: jax.Array, *, eps: float) -> Arrays:
    return (normalized(x, eps),)


def _normalized_gradient(x: jax.Array, dy: jax.Array, *, eps: float) -> Arrays:
    return (normalized_gradient(x, dy, eps),)


_VECTOR = 8  # numbers of 16 bits that a kernel loads at once
_ROPE = Op("rope", (X, TABLE), (Y,), rotated_pairs, raw.rope)
_NORM_ROPE = Op("norm_rope", (X, TABLE), (Y,), normed_and_rotated, raw.norm_rope)
_NORM_ROPE_GRADIENT = Op(
    "norm_rope",
    (X, TABLE, Axes("dy", "b s_q h_q d")),
    (Axes("dx", "b s_q h_q d"),),
    normed_and_rotated_gradient,
    raw.norm_rope_bwd,
    part="gradient",
)
