"""A mixture of experts' router: scores of all experts, the choice, and the weights of those that are chosen."""

import jax
import jax.numpy as jnp
from jax import lax

SCORES = {"sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)), "sigmoid": jax.nn.sigmoid}
"""functions of logits, by their names in configs"""
LEAST = 1e-20
"""added to the sum of a token's scores"""


def scores(x: jax.Array, gate: jax.Array, *, score: str, temperature: float) -> jax.Array:
    """float32 `[b, s, e]`"""
    logits = jnp.matmul(x.astype(jnp.float32), gate, precision="highest")
    found: jax.Array = SCORES[score](logits / temperature)
    return found


def chosen_by(scores: jax.Array, bias: jax.Array, top_k: int) -> jax.Array:
    """int32 `[b, s, top_k]`: the greatest sums of score and bias, and of equal ones the first."""
    found: jax.Array = lax.top_k(lax.stop_gradient(scores + bias), top_k)[1]
    return found


def weights_of(scores: jax.Array, chosen: jax.Array, *, scale: float) -> jax.Array:
    """float32 `[b, s, c]`: scores of the chosen experts over their sum; NaN where there is no such expert."""
    exists = (chosen >= 0) & (chosen < scores.shape[-1])
    found = jnp.where(exists, jnp.take_along_axis(scores, jnp.where(exists, chosen, 0), -1), jnp.nan)
    return scale * found / (found.sum(-1, keepdims=True) + LEAST)
