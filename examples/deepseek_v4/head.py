"""The loss of the next token, for which the logits of some tokens at a time are in memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .layout import ALL, TOKENS, gather, gathered, scatter

COUNT = 1024
"""tokens of a device whose logits are in memory at a time"""


@jax.custom_vjp
def loss(x: jax.Array, head: jax.Array, following: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of the cross-entropies of the tokens `following`, times weights; float32, in a mesh like the model's.

    Gradients are made with the loss, so no logits are kept or computed anew. The head's is summed in float32.

    Args:
      x: `[b, s, hidden]`, normed. Products are of this dtype.
      head: `[hidden, vocabulary]`.
      following, weights: `[b, s]`, the latter without a gradient.
    """
    return _of_devices(x, head, following, weights, has_gradient=False)[0]


def _forward(x: jax.Array, head: jax.Array, following: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    total, dx, dhead = _of_devices(x, head, following, weights, has_gradient=True)
    return total, (dx, dhead.astype(head.dtype))


def _backward(kept: Any, of_loss: jax.Array) -> tuple[Any, ...]:
    dx, dhead = (x * of_loss.astype(x.dtype) for x in kept)
    return dx, dhead, None, None


loss.defvjp(_forward, _backward)


def _of_devices(
    x: jax.Array, head: jax.Array, following: jax.Array, weights: jax.Array, has_gradient: bool
) -> tuple[jax.Array, ...]:
    """The loss, and its gradients by x and, in float32, by head. A device has its part of the vocabulary for all tokens
    of its group.
    """

    def of_own(x: jax.Array, head: jax.Array, following: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        n = following.size
        count = -(-n // COUNT)
        size = -(-n // count)
        parts = (x.reshape(n, -1), following.reshape(n), weights.reshape(n))
        parts = (jnp.pad(a, ((0, count * size - n), *[(0, 0)] * (a.ndim - 1))) for a in parts)  # of weight 0
        parts = tuple(a.reshape(count, size, *a.shape[1:]) for a in parts)
        token = jnp.arange(head.shape[1]) + jax.lax.axis_index(ALL) * head.shape[1]

        def chunk(sums: tuple[jax.Array, ...], part: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], Any]:
            x, following, weights = gather(part)
            x = jax.lax.pcast(x, "tensor", to="varying")
            logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)
            is_it = token == following[:, None]
            most, its = logits.max(-1), jnp.where(is_it, logits, 0).sum(-1)
            numbers = jnp.stack([most, jnp.exp(logits - most[:, None]).sum(-1), its])  # of this device's columns
            most, total, its = jnp.moveaxis(gather(numbers[None], ALL), 1, 0)
            lse = jax.nn.logsumexp(most, 0, b=total)
            of_part = (weights * (lse - its.sum(0))).sum()
            if not has_gradient:
                return (sums[0] + of_part,), None
            slope = (weights[:, None] * (jnp.exp(logits - lse[:, None]) - is_it)).astype(x.dtype)
            dx = jax.lax.psum(jnp.matmul(slope, head.T, preferred_element_type=jnp.float32), "tensor")
            of_head = jnp.matmul(x.T, slope, preferred_element_type=jnp.float32)
            return (sums[0] + of_part, sums[1] + of_head), scatter(dx)

        zeros = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))[: 1 + has_gradient]
        zeros = jax.lax.pcast(zeros, (every := ("data", *ALL)), to="varying")
        sums, dx = jax.lax.scan(chunk, zeros, parts)
        total = jax.lax.psum(sums[0], every) / jax.lax.axis_size(ALL)  # all devices but those of "data" have its sum
        if not has_gradient:
            return (total,)
        dx = dx.reshape(count * size, -1)[:n].reshape(x.shape)
        return total, dx.astype(x.dtype), jax.lax.psum(sums[1], "data")

    columns = P(None, ALL)
    out = (P(), TOKENS, columns) if has_gradient else (P(),)
    run = jax.shard_map(of_own, in_specs=(TOKENS, columns, TOKENS, TOKENS), out_specs=out)
    return run(x, gathered(x.dtype, columns, head), following, weights)
