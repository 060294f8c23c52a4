"""Sums that are the same in any order: 64-bit fixed point, in which a power of two is 1.

No sum of a call can overflow. The unit follows from a bound of all sums of the call, and the bound from maxima, which
are the same in any order themselves. A sum keeps 2^-61 of that bound.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

_BITS = 61  # the bits of a sum, less room for rounding
_BIAS, _MANTISSA = 127, 23  # of float32


def resolution(
    q: jax.Array, do: jax.Array, lse: jax.Array, delta: jax.Array, keys: Sequence[jax.Array], scale: float
) -> jax.Array:
    """How many units are 1, for gradients of keys: float32 [1].

    With P <= 1, f = sink_factor <= 1 and R rows, dkv = Σ_rows dS q + f P do, dS = scale P (f do·k - delta), is at most
    R (scale (d max|do| max|k| + max|delta|) max|q| + max|do|). The bound leaves out keys that are not finite: keys
    that no query sees may hold anything, and dq shows the effect of the others.
    """
    sees = lse != -jnp.inf

    def greatest(x: jax.Array) -> jax.Array:
        x = jnp.abs(x.astype(jnp.float32))
        # maxima of rows first, because XLA makes those of do in the pass that makes delta
        of_rows = x if x.ndim == 3 else jnp.max(x, -1, initial=0)
        return jnp.max(jnp.where(sees, of_rows, 0), initial=0)

    def finite(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0).astype(jnp.float32), initial=0)

    k = jnp.max(jnp.stack([finite(x) for x in keys]))
    rows = jnp.asarray(math.prod(lse.shape), jnp.float32)
    ds = scale * (q.shape[-1] * greatest(do) * k + greatest(delta))
    bound = rows * (ds * greatest(q) + greatest(do))
    exponent = (lax.bitcast_convert_type(bound, jnp.int32) >> _MANTISSA) - _BIAS + 1  # bound < 2^exponent
    return _power_of_two(jnp.minimum(_BITS - exponent, _BIAS - 1))[None]


def to_float32(sums: jax.Array, resolution: jax.Array, dq: jax.Array) -> jax.Array:
    """The float32 values of sums, uint32 `[..., 2]`, low words first; all NaN where any dq is not finite."""
    low, high = sums[..., 0], sums[..., 1]
    negative = high >> 31 != 0
    low, high = (jnp.where(negative, ~x, x) for x in (low, high))  # a negative one is 1 too small, which is a unit
    magnitude = high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)
    unit = 1 / resolution[0]  # a power of two
    finite = jnp.where(jnp.all(jnp.isfinite(dq)), unit, jnp.nan)
    return jnp.where(negative, -magnitude, magnitude) * finite


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(exponent + _BIAS << _MANTISSA, jnp.float32)
