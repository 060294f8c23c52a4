"""The norm that all parts of a layer use."""

import jax
import jax.numpy as jnp

from .._dispatch.rope import normed


@jax.named_scope("norm")
def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps), times the weight if there is one; computed in float32, returned in x's dtype."""
    y = normed(x, eps)
    if weight is not None:
        y *= jnp.expand_dims(weight.astype(jnp.float32), range(y.ndim - 1))
    return y.astype(x.dtype)


@jax.named_scope("norm")
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean(x)) / sqrt(var(x) + eps) times the weight, and the bias; as `rms_norm` computes."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    return (rms_norm(centred, weight, eps) + bias.astype(jnp.float32)).astype(x.dtype)
