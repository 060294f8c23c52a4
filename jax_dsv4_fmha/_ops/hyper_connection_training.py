"""Hyper-connections in training: the forward pass, which keeps a few sums of each token, and its gradient. Kernels make
what is a token's or a channel's; the gradient of fn is a product of all tokens, and the rest are sums of what kernels
leave.
"""

import functools

import jax
import jax.numpy as jnp

from .._definitions.hyper_connection import NUMBERS, STREAMS
from .._dispatch.op import Arrays
from .._host import hyper_connection as raw

PARTS = 3
"""numbers in bfloat16 whose sum is one in float32"""


def forward(*operands: jax.Array, iterations: int, eps: float, hc_eps: float) -> Arrays:
    """The results; then what is kept: the streams again, and sums of theirs, of products with fn and of squares."""
    given = *operands[:5], *(a[0] for a in operands[5:])
    *results, totals, squares = raw.hyper_connection(*given, iterations=iterations, eps=eps, hc_eps=hc_eps)
    return *results, results[0], totals, squares


def gradient(*operands: jax.Array, iterations: int, eps: float, hc_eps: float) -> Arrays:
    """The gradients of the operands, from these, from what is kept, and from the results' cotangents."""
    given, rest = (*operands[:5], *(a[0] for a in operands[5:9])), operands[9:]
    made = raw.hyper_connection_bwd(*given, *rest, iterations=iterations, eps=eps, hc_eps=hc_eps)
    new_x, totals, *_ = rest
    return joined(new_x, totals, operands[6][0], *made)


def joined(
    x: jax.Array,
    totals: jax.Array,
    scale: jax.Array,
    dx: jax.Array,
    dy: jax.Array,
    dtaken: jax.Array,
    numbers: jax.Array,
    shares: jax.Array,
    dnorm: jax.Array,
) -> Arrays:
    """The gradients of the operands, by those of kernels and the parts of others that these leave.

    Args:
      x, totals: what the forward pass kept.
      others: as `raw.hyper_connection_bwd` has them.
    """
    of_post, of_mix = jnp.split(functools.reduce(jnp.add, shares), [STREAMS], -1)  # in one order, for any tokens
    of_mix = of_mix.reshape(*of_mix.shape[:2], STREAMS, STREAMS)
    of_logits, inverse = numbers[..., :NUMBERS], numbers[..., -1:]
    of_rates = (of_logits * totals * inverse).sum((0, 1))
    dscale = jnp.stack([part.sum() for part in jnp.split(of_rates, [STREAMS, 2 * STREAMS])])
    rates = jnp.concatenate([jnp.broadcast_to(scale[i], n) for i, n in enumerate((STREAMS, STREAMS, STREAMS**2))])
    dfn = _outer_product(of_logits * rates * inverse, x)
    whole = (dfn, dscale, of_logits.sum((0, 1)), dnorm.sum(0))
    return dx, dy, of_post, of_mix, dtaken, *(a[None] for a in whole)


def _outer_product(a: jax.Array, x: jax.Array) -> jax.Array:
    """float32 `[24, 4, hidden]`: the sum over tokens of a `[b, s, 24]` in float32 times x in bfloat16, exact but for
    the order of sums, at the rate of bfloat16: a is the sum of three such numbers.
    """
    parts = []
    for _ in range(PARTS):
        part = jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)  # XLA may leave out a cast there and back
        parts.append(part.astype(x.dtype))
        a = a - part
    of_parts = jnp.einsum("pbsc,bsjh->pcjh", jnp.stack(parts), x, preferred_element_type=jnp.float32)
    return of_parts.sum(0)
