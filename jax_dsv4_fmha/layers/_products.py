"""Products with x that are XLA's, with the gradients that XLA should compute."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, w: jax.Array, is_turned: bool = False) -> jax.Array:
    """x @ w, or x @ w.T, in float32, w in x's dtype. The cotangent is rounded to x's dtype, as for other products.

    It is a product of its own, because XLA merges products of one x, and then copies their weights side by side in
    every call.
    """
    x, w = jax.lax.optimization_barrier((x, w.astype(x.dtype)))
    return _product(x, w, is_turned, jnp.float32)


def _product(x: jax.Array, w: jax.Array, is_turned: bool, dtype: Any) -> jax.Array:
    return jnp.einsum("...k,nk->...n" if is_turned else "...k,kn->...n", x, w, preferred_element_type=dtype)


def _product_forward(x: jax.Array, w: jax.Array, is_turned: bool) -> tuple[jax.Array, Any]:
    return product(x, w, is_turned), (x, w)


def _product_backward(is_turned: bool, operands: Any, dy: jax.Array) -> Any:
    _, vjp = jax.vjp(lambda x, w: _product(x, w.astype(x.dtype), is_turned, x.dtype), *operands)
    return vjp(dy.astype(operands[0].dtype))


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def two_products(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x a and x b, each a product of its own, as `product` is. Their gradient in x is one, where XLA would make two and
    add them up.
    """
    return x @ a, jax.lax.optimization_barrier(x) @ b


def _both_gradients(operands: tuple[jax.Array, ...], given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    def one_product(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = x @ jnp.concatenate([a, b], 1)
        return both[..., : a.shape[1]], both[..., a.shape[1] :]

    return jax.vjp(one_product, *operands)[1](given)


two_products.defvjp(lambda *operands: (two_products(*operands), operands), _both_gradients)
