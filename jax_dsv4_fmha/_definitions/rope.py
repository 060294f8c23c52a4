"""The norm of heads, and RoPE by a table of cos and sin."""

import jax
import jax.numpy as jnp
from jax import lax

Arrays = tuple[jax.Array, ...]


def normalized(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps), in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


def normalized_gradient(given: jax.Array, dy: jax.Array, eps: float) -> jax.Array:
    """dx = r (dy - r² mean(dy x) x), from x alone: if 1 / norm were kept, XLA would need two passes instead of one."""
    x = given.astype(jnp.float32)
    r = lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)
    return r * dy - r**3 * jnp.mean(dy * x, -1, keepdims=True) * x


def rotated_pairs(x: jax.Array, table: jax.Array, *, direction: int) -> Arrays:
    """x `[b, s, h, d]` with its last n numbers rotated, in neighbouring pairs, by a table `[b, s, n]` of cos, sin."""
    n = table.shape[-1]
    pairs = x[..., -n:].astype(jnp.float32).reshape(*x.shape[:-1], n // 2, 2)
    rotations = table.reshape(*table.shape[:2], 1, n // 2, 2)
    sides = direction * (2 * jnp.arange(2, dtype=jnp.float32) - 1).reshape(1, 1, 1, 1, 2)
    rotated = pairs * rotations[..., :1] + pairs[..., ::-1] * (sides * rotations[..., 1:])
    rotated = rotated.reshape(*x.shape[:-1], n).astype(x.dtype)
    return (lax.platform_dependent(x, rotated, cuda=_put, default=_beside),)


def normed_and_rotated(x: jax.Array, table: jax.Array, *, eps: float) -> Arrays:
    """The norm of x, rounded to its dtype, and then RoPE."""
    return rotated_pairs(normalized(x, eps).astype(x.dtype), table, direction=1)


def normed_and_rotated_gradient(x: jax.Array, table: jax.Array, dy: jax.Array, *, eps: float) -> Arrays:
    (back,) = rotated_pairs(dy, table, direction=-1)
    return (normalized_gradient(x, back.astype(jnp.float32), eps).astype(x.dtype),)


def _put(x: jax.Array, rotated: jax.Array) -> jax.Array:
    """Writes in place, so that the dimensions before it need not be moved. A separate kernel rotates: one of XLA's that
    also wrote in place would overwrite numbers that it reads for two results.
    """
    return lax.dynamic_update_slice_in_dim(x, lax.optimization_barrier(rotated), x.shape[-1] - rotated.shape[-1], -1)


def _beside(x: jax.Array, rotated: jax.Array) -> jax.Array:
    """XLA's CPU compiler fuses the other form all the same, and returns wrong numbers (seen with jaxlib 0.10.2)."""
    return jnp.concatenate([x[..., : -rotated.shape[-1]], rotated], -1)
