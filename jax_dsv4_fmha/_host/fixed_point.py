"""Sums that are the same in any order: integers of 32 bits, with a unit for each key.

A first kernel bounds what all rows can add to any number of a key, in any order:

    sum over rows of  |dS| max|q| + f P max|do|

The bounds are sums of integers of 64 bits themselves, each part rounded upwards, with one unit for the call, which
follows from maxima. A key's unit is the power of two of which its bound has 2^29 to 2^30. A sum is off by half a unit
at most for each time that the key is added to, which leaves room for 2^31 of them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BITS_OF_BOUND, _BITS = 61, 30  # of a sum, less room for rounding
_BIAS, _MANTISSA = 127, 23  # of float32
_ROUNDING = 2.0**-20  # of dO K' - delta, relative to delta: kernels may round it in different ways


class Rows(NamedTuple):
    """The numbers of a row for the kernel of bounds, by which |dS| max|q| + f P max|do| is P (|dS / P| + most_of_p)."""

    sink_factor: jax.Array
    delta: jax.Array
    most_of_p: jax.Array


def of_rows(
    q: jax.Array, do: jax.Array, lse: jax.Array, sink_factor: jax.Array, delta: jax.Array, keys: Sequence[jax.Array],
    scale: float,
) -> tuple[Rows, jax.Array]:  # fmt: skip
    """The rows' numbers, and how many units of a bound are 1: float32 [1].

    With P <= 1, f = sink_factor <= 1 and R rows, a bound is at most R (scale (d max|do| max|k| + max|delta|) max|q| +
    max|do|). This leaves out what is not finite: keys that no query sees may hold anything, and the kernel marks the
    others.
    """
    # maxima of rows first, because XLA makes those of do in the pass that makes delta
    q_top, do_top = (jnp.max(jnp.abs(x.astype(jnp.float32)), -1, initial=0) for x in (q, do))
    most_of_p = sink_factor * do_top + jnp.float32(_ROUNDING * scale) * jnp.abs(delta) * q_top

    def greatest(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where((lse != -jnp.inf) & jnp.isfinite(x), jnp.abs(x), 0), initial=0)

    def finite(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0).astype(jnp.float32), initial=0)

    k = jnp.max(jnp.stack([finite(x) for x in keys]))
    rows = jnp.asarray(math.prod(lse.shape), jnp.float32)
    ds = scale * (q.shape[-1] * greatest(do_top) * k + greatest(delta))
    bound = rows * (ds * greatest(q_top) + greatest(do_top))
    return Rows(sink_factor * q_top, delta * q_top, most_of_p), _units(bound, _BITS_OF_BOUND)[None]


def resolution(bounds: jax.Array, of_bounds: jax.Array) -> jax.Array:
    """The number of units that make up 1, for every key; NaN where what is added to it is not finite.

    bounds: uint32 `[..., 2]`, low words first.
    """
    low, high = bounds[..., 0], bounds[..., 1]
    # the next float32 above the number, and above what its rounding took off
    words = (high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)) * (1 + 2.0**-21)
    return jnp.where(high >> 31 != 0, jnp.nan, _units(words / of_bounds[0], _BITS))


def to_float32(sums: jax.Array, resolution: jax.Array) -> jax.Array:
    """The float32 values of sums, uint32 `[..., d]`, with the units of their keys."""
    return lax.bitcast_convert_type(sums, jnp.int32).astype(jnp.float32) * (1 / resolution[..., None])


def _units(bound: jax.Array, bits: int) -> jax.Array:
    """The power of two by which a bound is at most 2^bits."""
    exponent = (lax.bitcast_convert_type(bound, jnp.int32) >> _MANTISSA) - _BIAS + 1  # bound < 2^exponent
    exponent = jnp.clip(bits - exponent, -_BIAS + 1, _BIAS - 1)
    return lax.bitcast_convert_type(exponent + _BIAS << _MANTISSA, jnp.float32)
