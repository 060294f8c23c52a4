"""The norm that all of a layer's parts share."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps), times the weight if there is one; computed in float32, returned in x's dtype."""
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
    return (y if weight is None else y * weight.astype(jnp.float32)).astype(x.dtype)
