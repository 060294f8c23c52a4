"""Numbers as integers in the same order, so that choices by score agree everywhere on -0 and NaN."""

import jax
import jax.numpy as jnp
from jax import lax


def rank_of(x: jax.Array) -> jax.Array:
    """int32 in the order of the fp32 numbers x: -0 equals 0, NaN comes before -inf; no rank is the least int32."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.int32)
    return jnp.where(jnp.isnan(x), 1 - 2**31, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def number_of(rank: jax.Array) -> jax.Array:
    """The number whose rank this is."""
    return lax.bitcast_convert_type(rank ^ ((rank >> 31) & 0x7FFFFFFF), jnp.float32)
