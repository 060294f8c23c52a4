"""The norm that all parts of a layer use."""

import functools

import jax
import jax.numpy as jnp


@jax.named_scope("norm")
def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps), times the weight if there is one; computed in float32, returned in x's dtype."""
    y = _normalized(x, eps)
    if weight is not None:
        y *= jnp.expand_dims(weight.astype(jnp.float32), range(y.ndim - 1))
    return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _normalized(x: jax.Array, eps: float) -> jax.Array:
    """In float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


def _forward(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    return _normalized(x, eps), x  # x alone: if 1 / norm were kept, XLA would need two passes instead of one


def _backward(eps: float, given: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    """dx = r (dy - r² mean(dy x) x); one pass computes the sums over x and dy."""
    x = given.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)
    return ((r * dy - r**3 * jnp.mean(dy * x, -1, keepdims=True) * x).astype(given.dtype),)


_normalized.defvjp(_forward, _backward)
