"""The raw calls of a router."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call

UNIT, LEAST_K, BLOCK = 64, 512, 16
"""k is a multiple of UNIT, and at least LEAST_K; the number of experts is a multiple of BLOCK"""
MOST_K, MOST_EXPERTS, MOST_CHOSEN = 32768, 512, 32


def moe_router(
    x: jax.Array, gate: jax.Array, bias: jax.Array, *, top_k: int, score: str, unit: float, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The weights of each token's experts, float32 `[b, s_q, top_k]`, and the experts, int32 of the same shape.

    Args:
      x: `[b, s_q, k]`, bfloat16.
      gate: float32 `[k, e]`.
      bias: float32 `[e]`, added to scores in the choice alone.
      top_k: how many experts a token gets.
      score: "sqrtsoftplus" or "sigmoid".
      unit: that logits are multiplied by.
      scale: the sum of a token's weights.
    """
    shape = (*x.shape[:2], top_k)
    results = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32))
    how: dict[str, Any] = {"unit": np.float32(unit), "scale": np.float32(scale), "score": score}
    weights, chosen = call("moe_router", results, x, gate, bias, **how)
    return weights, chosen


def moe_router_of_given(
    x: jax.Array, gate: jax.Array, given: jax.Array, *, score: str, unit: float, scale: float
) -> tuple[jax.Array]:
    """The weights of experts that are given, int32 `[b, s_q, n_chosen]`; all else is as in `moe_router`."""
    result = jax.ShapeDtypeStruct(given.shape, jnp.float32)
    how: dict[str, Any] = {"unit": np.float32(unit), "scale": np.float32(scale), "score": score}
    (weights,) = call("moe_router_of_given", (result,), x, gate, given, **how)
    return (weights,)
