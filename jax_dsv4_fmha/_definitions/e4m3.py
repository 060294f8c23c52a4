"""Products of e4m3: how q, keys and the softmax's weights are rounded for them.

e4m3 has 4 significant bits between 2**-6 and 448. So a unit that is a power of two, and of which the greatest number is
between 128 and 256, loses nothing but what is below 2**-14 of that number, or of 2**-12 of a weight. Each row of q has
a unit of its own, and so has each key: what a query sees depends on no other key.
"""

import jax
import jax.numpy as jnp

from .packed import LAYOUTS, V4_FP8
from .rounding import straight_through

E4M3 = "float8_e4m3fn"
BF16_ROPE = "float8_e4m3fn_bf16_rope"
"""the same, but for scores' products of RoPE's dimensions, which are of bfloat16"""
PRODUCTS = (E4M3, BF16_ROPE)
ROPE = LAYOUTS[V4_FP8].d - LAYOUTS[V4_FP8].packed  # the last dimensions, which V4's caches keep in bfloat16 too
_TOP = 7  # log2 of the least that the greatest number is in its unit
_LEAST_EXPONENT = -119  # of a greatest number, so that all units are numbers
LEAST_UNIT, GREATEST_UNIT = -64, 48  # of keys, as exponents
_HEAD = 5  # log2 of the greatest weight, about
_LOG2_E = 1.4426950408889634


def unit_of(x: jax.Array) -> jax.Array:
    """A power of two, float32 `[…, 1]`, for the finite numbers of each row. It has no gradient."""
    x = jax.lax.stop_gradient(x)
    most = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x.astype(jnp.float32)), 0), -1, keepdims=True)
    _, exponent = jnp.frexp(jnp.maximum(most, 2.0**_LEAST_EXPONENT))  # most = m 2**exponent, with 0.5 <= m < 1
    return jnp.ldexp(jnp.float32(1), exponent - 1 - _TOP)


def unit_of_key(x: jax.Array) -> jax.Array:
    """`unit_of`, within bounds by which no two units are so far apart that float32 loses a sum over keys."""
    return jnp.clip(unit_of(x), 2.0**LEAST_UNIT, 2.0**GREATEST_UNIT)


def codes(x: jax.Array, unit: jax.Array) -> jax.Array:
    """x / unit as e4m3; beyond 448 it is NaN."""
    return _as_codes(_in_range(x, unit))


def rounded(x: jax.Array, unit: jax.Array) -> jax.Array:
    """x as its codes mean it, in float32, with the derivative of x."""
    return _as_e4m3(_in_range(x, unit)) * unit


def _in_range(x: jax.Array, unit: jax.Array) -> jax.Array:
    scaled = x.astype(jnp.float32) / unit
    return jnp.where(jnp.abs(scaled) <= 448, scaled, jnp.nan)


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
    """RoPE's dimensions in float32; as with `codes`, an infinite one becomes NaN."""
    rope = x[..., -ROPE:].astype(jnp.float32)
    return jnp.where(jnp.isfinite(rope), rope, jnp.nan)


def log2_of_unit(keys: jax.Array) -> jax.Array:
    """log2 of the units `[…]` of rounded keys `[…, d]`, or one more where rounding took a key's greatest number to the
    next power of two."""
    _, exponent = jnp.frexp(unit_of_key(keys)[..., 0])
    return (exponent - 1).astype(jnp.float32)


def weights(logits: jax.Array, lse: jax.Array, log2_units: jax.Array, size: jax.Array) -> jax.Array:
    """exp(logits - lse), with the derivative of that. exp(logits) times the unit of its key, log2_units, which
    broadcasts to logits, is rounded, in a power of two for each row: exp(size) is the sum of these products.
    """
    after_point = lse * _LOG2_E - jnp.round(lse * _LOG2_E)
    exponent = after_point + _HEAD - jnp.round((size - lse) * _LOG2_E + after_point)
    to_range = exponent[..., None] + log2_units
    p = jnp.exp(logits - lse[..., None]) * jnp.exp2(to_range)
    return _as_e4m3(jnp.minimum(p, 448)) * jnp.exp2(-to_range)
