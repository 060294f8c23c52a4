"""Products in float32 at the rate of bfloat16, where one operand is bfloat16.

A float32 number is the sum of three bfloat16 numbers of 8 bits each. A product of two bfloat16 numbers is exact in
float32, in which tensor cores add. So a matrix in float32 times one in bfloat16 is a product of bfloat16 with three
times as many rows. XLA would convert the other operand to float32, and multiply without tensor cores.
"""

import jax
import jax.numpy as jnp

PARTS = 3


@jax.custom_vjp
def exact_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """float32 x wᵀ, as in float32.

    Args:
      x: `[…, k]`, bfloat16; of another dtype XLA multiplies in float32.
      w: float32 `[n, k]`.
    """
    if x.dtype != jnp.bfloat16:
        return jnp.einsum("...k,nk->...n", x.astype(jnp.float32), w, precision="highest")
    y = jnp.einsum("...k,pnk->...pn", x, split(w), preferred_element_type=jnp.float32)
    return y.sum(-2)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return exact_product(x, w), (x, w)


def _backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dx = dy w, rounded to x's dtype. Where that is bfloat16, products below 2^-16 of the greatest are left out."""
    x, w = kept
    if x.dtype != jnp.bfloat16:
        dx = jnp.einsum("...n,nk->...k", dy, w, precision="highest")
        return dx.astype(x.dtype), jnp.einsum("...n,...k->nk", dy, x.astype(jnp.float32), precision="highest")
    of_dy, of_w = split(dy), split(w)
    left = jnp.concatenate([of_dy[0], of_dy[0], of_dy[1]], -1)
    right = jnp.concatenate([of_w[0], of_w[1], of_w[0]], 0)
    dx = jnp.einsum("...n,nk->...k", left, right, preferred_element_type=jnp.float32)
    dw = jnp.einsum("p...n,...k->pnk", of_dy, x, preferred_element_type=jnp.float32).sum(0)
    return dx.astype(x.dtype), dw


exact_product.defvjp(_forward, _backward)


def split(x: jax.Array) -> jax.Array:
    """bfloat16 `[3, …]`, whose sum over the first axis is float32 x, but for what is below 2^-24 of a number."""
    parts = []
    for _ in range(PARTS):
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may leave out a cast there and back
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack(parts)
