"""Products of e4m3: how q, keys and the softmax's weights are rounded for them.

e4m3 has 4 significant bits between 2**-6 and 448. So a unit that is a power of two, and of which the greatest number is
between 128 and 256, loses nothing but what is below 2**-14 of that number, or of 2**-12 of a weight.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .rounding import straight_through

E4M3 = "float8_e4m3fn"
BF16_ROPE = "float8_e4m3fn_bf16_rope"
"""the same, but for scores' products of RoPE's dimensions, which are of bfloat16"""
PRODUCTS = (E4M3, BF16_ROPE)
ROPE = 64  # dimensions, the last ones, as in V4
_TOP = 7  # log2 of the least that the greatest number is in its unit
_LEAST_EXPONENT = -119  # of a greatest number, so that all units are numbers
_HEAD = 5  # log2 of the greatest weight, about


def unit_of(*xs: jax.Array, axes: Any) -> jax.Array:
    """A power of two, float32, for all finite numbers along these axes, which stay, with size 1. It has no gradient."""
    xs = jax.lax.stop_gradient(xs)
    most = [jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x.astype(jnp.float32)), 0), axes, keepdims=True) for x in xs]
    _, exponent = jnp.frexp(jnp.max(jnp.stack(most), 0))  # most = m 2**exponent, with 0.5 <= m < 1
    return jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, _LEAST_EXPONENT) - _TOP)


def codes(x: jax.Array, unit: jax.Array) -> jax.Array:
    """x / unit as e4m3; beyond 448 it is 448, and infinities are NaN."""
    return _as_codes(_in_range(x, unit))


def rounded(x: jax.Array, unit: jax.Array) -> jax.Array:
    """x as its codes mean it, in float32, with the derivative of x."""
    return _as_e4m3(_in_range(x, unit)) * unit


def _in_range(x: jax.Array, unit: jax.Array) -> jax.Array:
    scaled = x.astype(jnp.float32) / unit
    return jnp.where(jnp.isfinite(scaled), jnp.clip(scaled, -448, 448), jnp.nan)


def _as_codes(x: jax.Array) -> jax.Array:
    """x.astype(E4M3). XLA would leave out a conversion there and back."""
    return jax.lax.optimization_barrier(x.astype(E4M3))


@straight_through()
def _as_e4m3(x: jax.Array) -> jax.Array:
    """x, float32, rounded to e4m3."""
    return _as_codes(x).astype(jnp.float32)


def queries_beside_rope(q: jax.Array, given: jax.Array) -> jax.Array:
    """Rounded queries [..., d] for keys of `keys_beside_rope`: [..., d + ROPE]."""
    return jnp.concatenate([q[..., :-ROPE], jnp.zeros_like(q[..., -ROPE:]), _rope_of(given)], -1)


def keys_beside_rope(keys: jax.Array, given: jax.Array) -> jax.Array:
    """Rounded keys [..., d] as values, and after them RoPE's dimensions as they were: [..., d + ROPE]."""
    return jnp.concatenate([keys, _rope_of(given)], -1)


def _rope_of(x: jax.Array) -> jax.Array:
    """As `codes`, NaN where it is infinite."""
    rope = x[..., -ROPE:].astype(jnp.float32)
    return jnp.where(jnp.isfinite(rope), rope, jnp.nan)


def weights(logits: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(logits - lse), rounded in a power of two for each row, with the derivative of exp(logits - lse)."""
    log2_e = 1.4426950408889634
    shift = jnp.round(lse * log2_e) - _HEAD
    p = jnp.exp2(logits * log2_e - shift[..., None])
    return _as_e4m3(p) * jnp.exp2(shift - lse * log2_e)[..., None]
