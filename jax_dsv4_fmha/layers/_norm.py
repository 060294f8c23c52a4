"""The norm that all parts of a layer use."""

import jax
import jax.numpy as jnp

from .._dispatch.autodiff import Differentiable, Function
from .._dispatch.op import Arrays


@jax.named_scope("norm")
def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps), times the weight if there is one; computed in float32, returned in x's dtype."""
    params = (("eps", eps),)
    (y,) = Differentiable(Function(_normalized, params), Function(_normalized_gradient, params))(x)
    if weight is not None:
        y *= jnp.expand_dims(weight.astype(jnp.float32), range(y.ndim - 1))
    return y.astype(x.dtype)


def _normalized(x: jax.Array, *, eps: float) -> Arrays:
    """In float32."""
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps),)


def _normalized_gradient(given: jax.Array, dy: jax.Array, *, eps: float) -> Arrays:
    """dx = r (dy - r² mean(dy x) x), from x alone: if 1 / norm were kept, XLA would need two passes instead of one."""
    x = given.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)
    return (r * dy - r**3 * jnp.mean(dy * x, -1, keepdims=True) * x,)
