"""A router after its product: scores of all experts, the choice, and the weights of those that are chosen."""

import jax
import jax.numpy as jnp
from jax import lax

from . import explicit_axes

SCORES = {"sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)), "sigmoid": jax.nn.sigmoid}
"""functions of logits, by their names in configs"""
LEAST = 1e-20
"""added to the sum of a token's scores"""


def scores(logits: jax.Array, *, score: str, temperature: float) -> jax.Array:
    """float32 `[b, s, e]` of logits `[b, s, parts, e]`, whose last parts are added first."""
    *parts, total = (logits[:, :, i] for i in range(logits.shape[2]))
    for part in reversed(parts):
        total = part + total
    found: jax.Array = SCORES[score](total / temperature)
    return found


def chosen_by(scores: jax.Array, bias: jax.Array, top_k: int) -> jax.Array:
    """int32 `[b, s, top_k]`: the greatest sums of score and bias, and of equal ones the first; NaN, of either sign, is
    before all others.
    """
    sums = lax.stop_gradient(scores + bias)
    found: jax.Array = lax.top_k(jnp.where(jnp.isnan(sums), jnp.nan, sums), top_k)[1]
    return found


def found_in(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """int32 `[b, s, c]`: a row of the table `[v, c]` for each token; for one that has none, the row nearest to it."""
    there = explicit_axes.sharding(tokens, *explicit_axes.entries(tokens), None)
    return table.at[jnp.clip(tokens, 0, len(table) - 1)].get(out_sharding=there)


def weights_of(scores: jax.Array, chosen: jax.Array, *, scale: float) -> jax.Array:
    """float32 `[b, s, c]`: scores of the chosen experts over their sum; NaN where there is no such expert."""
    exists = (chosen >= 0) & (chosen < scores.shape[-1])
    found = jnp.where(exists, jnp.take_along_axis(scores, jnp.where(exists, chosen, 0), -1), jnp.nan)
    return scale * found / (found.sum(-1, keepdims=True) + LEAST)
