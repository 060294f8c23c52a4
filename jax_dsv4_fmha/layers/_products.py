"""Products with x that are XLA's, with the gradients that XLA should compute."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in float32, w in x's dtype. The cotangent is rounded to x's dtype, as for other products.

    It is a product of its own, because XLA merges products of one x, and then copies their weights side by side in
    every call.
    """
    x, w = jax.lax.optimization_barrier((x, w.astype(x.dtype)))
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def _product_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return product(x, w), (x, w)


def _product_backward(operands: Any, dy: jax.Array) -> Any:
    _, vjp = jax.vjp(lambda x, w: jnp.matmul(x, w.astype(x.dtype)), *operands)
    return vjp(dy.astype(operands[0].dtype))


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def two_products(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x a and x b. Their gradient in x is one product, where XLA would make two and add them up."""
    return x @ a, x @ b


def _both_gradients(operands: tuple[jax.Array, ...], given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    def one_product(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = x @ jnp.concatenate([a, b], 1)
        return both[..., : a.shape[1]], both[..., a.shape[1] :]

    return jax.vjp(one_product, *operands)[1](given)


two_products.defvjp(lambda *operands: (two_products(*operands), operands), _both_gradients)
