"""The raw calls of a router after its product."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call

MOST_EXPERTS, MOST_CHOSEN, MOST_PARTS = 512, 32, 3
"""that the kernel takes"""


def route(
    logits: jax.Array, bias: jax.Array, *, top_k: int, score: str, unit: float, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The weights of each token's experts, float32 `[b, s_q, top_k]`, and the experts, int32 of the same shape.

    Args:
      logits: float32 `[b, s_q, n_parts, e]`: parts that add up to them, the last ones first.
      bias: float32 `[e]`, added to scores in the choice alone.
      top_k: how many experts a token gets.
      score: "sqrtsoftplus" or "sigmoid".
      unit: that logits are multiplied by.
      scale: the sum of a token's weights.
    """
    return _routed("route", (*logits.shape[:2], top_k), logits, bias, score=score, unit=unit, scale=scale)


def route_by_table(
    logits: jax.Array, table: jax.Array, tokens: jax.Array, *, score: str, unit: float, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The same of the experts in row `tokens[b, s_q]` of an int32 table `[vocabulary, n_chosen]`."""
    shape = (*tokens.shape, table.shape[1])
    return _routed("route_by_table", shape, logits, table, tokens, score=score, unit=unit, scale=scale)


def _routed(
    target: str, shape: tuple[int, ...], *operands: jax.Array, score: str, unit: float, scale: float
) -> tuple[jax.Array, jax.Array]:
    results = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32))
    how: dict[str, Any] = {"unit": np.float32(unit), "scale": np.float32(scale), "score": score}
    weights, chosen = call(target, results, *operands, **how)
    return weights, chosen
