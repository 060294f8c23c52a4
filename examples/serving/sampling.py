"""Chooses tokens by logits: the likeliest, or by chance with a temperature and among the likeliest of a probability."""

import jax
import jax.numpy as jnp

COLDEST = 1e-5
"""the least temperature that is not 0"""


def choose(logits: jax.Array, after: jax.Array, temperature: jax.Array, top_p: jax.Array, seed: jax.Array) -> jax.Array:
    """The next tokens int32 `[b, s]` by logits float32 `[b, s, vocabulary]`.

    Args:
      after: int32 `[b, s]`: after how many tokens of its sequence each one comes.
      temperature, top_p: float32 `[b]`: 0 is the likeliest token.
      seed: uint32 `[b]`. With its number in the sequence it is all that chance depends on: not on the batch, and not on
        how tokens came, one by one or as drafts.
    """
    likeliest = logits.argmax(-1).astype(jnp.int32)

    def by_chance() -> jax.Array:
        t = temperature[:, None, None]
        scores = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(t, COLDEST)
        scores = jax.lax.cond((top_p < 1).any(), among_likeliest, lambda scores, _: scores, scores, top_p)

        def noise(seed: jax.Array, after: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), after)
            return jax.random.gumbel(key, logits.shape[-1:])

        noise = jax.vmap(jax.vmap(noise, (None, 0)))(seed, after)
        return jnp.where(temperature[:, None] > 0, (scores + noise).argmax(-1).astype(jnp.int32), likeliest)

    return jax.lax.cond((temperature > 0).any(), by_chance, lambda: likeliest)


def among_likeliest(scores: jax.Array, top_p: jax.Array) -> jax.Array:
    """The scores, -inf beyond the likeliest tokens whose probabilities first add up to top_p `[b]`."""
    p = jax.nn.softmax(scores)
    sorted_p = -jnp.sort(-p)
    before = jnp.cumsum(sorted_p, -1) - sorted_p
    top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)  # in float32 less is 0, which leaves no token
    least = jnp.where(before < top_p[:, None, None], sorted_p, jnp.inf).min(-1, keepdims=True)
    return jnp.where(p >= least, scores, -jnp.inf)
