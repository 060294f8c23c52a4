"""Chooses tokens by logits: the likeliest, or by chance with a temperature and among the likeliest of a probability."""

import jax
import jax.numpy as jnp

COLDEST = 1e-5
"""the least temperature that is not 0"""


def choose(logits: jax.Array, after: jax.Array, temperature: jax.Array, top_p: jax.Array, seed: jax.Array) -> jax.Array:
    """The next tokens int32 `[b, s]` by logits float32 `[b, s, vocabulary]`.

    All rows compute the same, whatever they ask for. Where a branch by what is asked for is not part of a CUDA graph,
    the host waits for the device, because it has to know which kernels come next: after a chunk that was so.

    Args:
      after: int32 `[b, s]`: after how many tokens of its sequence each one comes.
      temperature, top_p: float32 `[b]`: 0 is the likeliest token.
      seed: uint32 `[b]`. With its number in the sequence it is all that chance depends on: not on the batch, and not on
        how tokens came, one by one or as drafts.
    """
    t = temperature[:, None, None]
    scores = (logits - logits.max(-1, keepdims=True)) / jnp.where(t > 0, jnp.maximum(t, COLDEST), 1)

    def noise(seed: jax.Array, after: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), after)
        return jax.random.gumbel(key, logits.shape[-1:])

    noise = jnp.where(t > 0, jax.vmap(jax.vmap(noise, (None, 0)))(seed, after), 0)
    return (among_likeliest(scores, top_p) + noise).argmax(-1).astype(jnp.int32)


BITS, AT_ONCE = 20, 4
"""of a float from 0 to 1, after the first two, which are 0: those that `among_likeliest` looks at, and in one pass"""


def among_likeliest(scores: jax.Array, top_p: jax.Array) -> jax.Array:
    """The scores `[b, s, vocabulary]`, at most 0, -inf beyond the likeliest tokens, whose probabilities first add up to
    top_p `[b]`. A token that is less likely than the last of these by under 2^-13 of it counts, too.

    A bound of the probabilities is found by its bits, from the first: as integers, floats that are not negative have
    the same order. Five sums for 15 bounds each take the place of a sort.
    """
    weights = jnp.exp(scores)
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    asked = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)[:, None] * weights.sum(-1)
    bound = jnp.zeros(asked.shape, jnp.int32)
    for shift in range(30 - AT_ONCE, 29 - BITS, -AT_ONCE):
        tried = [bound + (i << shift) for i in range(1, 1 << AT_ONCE)]
        sums = added(*(jnp.where(bits >= x[..., None], weights, 0) for x in tried))
        bound += sum((x >= asked).astype(jnp.int32) for x in sums) << shift
    return jnp.where((bits >= bound[..., None]) | (top_p >= 1)[:, None, None], scores, -jnp.inf)


def added(*x: jax.Array) -> tuple[jax.Array, ...]:
    """The sums of arrays over their last axis, all in one pass."""
    zeros = (jnp.zeros((), jnp.float32),) * len(x)
    return jax.lax.reduce(x, zeros, lambda a, b: [p + q for p, q in zip(a, b, strict=True)], (x[0].ndim - 1,))
