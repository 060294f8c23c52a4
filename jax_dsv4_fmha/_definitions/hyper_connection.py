"""Hyper-connections between two sublayers, in `jnp`."""

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]

STREAMS = 4
"""residual streams of a token"""
NUMBERS = (2 + STREAMS) * STREAMS
"""that say of a token how its streams go into a sublayer, out of it, and past it"""


def hyper_connection(
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    mix: jax.Array,
    taken: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    norm: jax.Array,
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> Arrays:
    """The streams after a sublayer that made y, what the next one is given, and pre, post and mix of that one.

    All but x `[b, s, STREAMS, hidden]` and y have the shapes that `_ops.hyper_connection` says; taken is `[b, s, 0]`
    where z takes the streams by the new pre.
    """
    b, s, n, _ = x.shape
    past = (mix[..., None] * x[:, :, :, None]).sum(2)  # not a product: its matrices would have n rows
    x = (past + post[..., None] * y[:, :, None]).astype(x.dtype)
    flat = x.reshape(b, s, -1).astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(flat), -1, keepdims=True) + eps)
    numbers = jnp.einsum("bsk,ck->bsc", flat, fn.reshape(len(fn), -1), precision="highest") * factor
    given = [numbers[..., :n], numbers[..., n : 2 * n], numbers[..., 2 * n :]]
    bases = [base[:n], base[n : 2 * n], base[2 * n :]]
    pre, post, mix = (a * scale[i] + c for i, (a, c) in enumerate(zip(given, bases, strict=True)))
    pre, post = jax.nn.sigmoid(pre) + hc_eps, 2 * jax.nn.sigmoid(post)
    mix = doubly_stochastic(mix.reshape(b, s, n, n), iterations, hc_eps)
    z = ((taken if taken.shape[2] else pre)[..., None] * x).sum(2).astype(x.dtype).astype(jnp.float32)
    z = z * jax.lax.rsqrt(jnp.mean(jnp.square(z), -1, keepdims=True) + eps) * norm
    return x, z.astype(x.dtype), pre, post, mix


def doubly_stochastic(x: jax.Array, iterations: int, eps: float) -> jax.Array:
    """The matrices `[…, n, n]` of logits x by Sinkhorn's iterations: softmax of each row, then columns are divided by
    their sums, then rows and columns in turn.
    """

    def divided(y: jax.Array, axis: int) -> jax.Array:
        return y / (y.sum(axis, keepdims=True) + eps)

    first = divided(jax.nn.softmax(x, -1) + eps, -2)
    made: jax.Array = jax.lax.fori_loop(0, iterations - 1, lambda _, y: divided(divided(y, -1), -2), first)
    return made
