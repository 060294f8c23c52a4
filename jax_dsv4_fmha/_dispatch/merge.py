"""The merge of attention over disjoint key sets, on any devices."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._definitions.log_space import finite, logsumexp, sigmoid
from .op import RESULTS, Arrays, Axes, Call, KernelUse, Op, Sink
from .sharding import aligned


def merged(
    parts: Sequence[tuple[jax.Array, jax.Array]], sink: jax.Array | None = None, op: str = "merge"
) -> tuple[jax.Array, jax.Array]:
    """`merge` of checked operands, which an Explicit mesh gets placed alike; `op` is the caller's name, for errors."""
    axes = [Axes(f"parts[{i}] {x.name}", x.axes) for i in range(len(parts)) for x in RESULTS]
    operands = [x for part in parts for x in part]
    if sink is not None:
        axes, operands = [*axes, Sink()], [*operands, sink[None]]
    placed = aligned(Call(Op(op, tuple(axes), RESULTS, _merged), KernelUse.NEVER), tuple(operands))
    o, lse = _merged(*placed)
    return o, lse


def _merged(*operands: jax.Array) -> Arrays:
    """Merges parts. The operands are o and lse of each in turn, and last a sink `[1, h_q]`, if there is one."""
    sink = operands[-1][0] if len(operands) % 2 else None
    count = len(operands) // 2 * 2
    o_parts = jnp.stack([o.astype(jnp.float32) for o in operands[:count:2]])
    lse_parts = jnp.stack(operands[1:count:2])
    lse = logsumexp(lse_parts, 0)
    shares = jnp.exp(lse_parts - finite(lse)[None])[..., None]
    o = jnp.sum(shares * jnp.where(lse_parts[..., None] == -jnp.inf, 0, o_parts), axis=0)
    if sink is not None:
        o = o * sigmoid(finite(lse) - sink[None, None])[..., None]
    return o.astype(operands[0].dtype), lse
