"""Rows that a device takes from the devices before it, where they share an axis. All functions run on one device: mesh
axes have names, and an array is the device's shard.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def halo(n: int, reach: int, shards: int) -> int:
    """The number of rows that `with_halo` adds to a shard of n: `reach`, or all that other shards have."""
    return min(reach, (shards - 1) * n)


def with_halo(x: jax.Array, axis: int, reach: int, mesh_axes: tuple[str, ...], shards: int) -> jax.Array:
    """x after the `halo` of rows before it along an axis; on the first device zeros stand there. Where a halo is longer
    than a shard it comes from several devices.
    """
    n = x.shape[axis]
    wanted, parts = halo(n, reach, shards), [x]
    for hop in range(1, -(-wanted // n) + 1):
        rows = min(n, wanted - (hop - 1) * n)
        parts.insert(0, sent(lax.slice_in_dim(x, n - rows, n, axis=axis), hop, mesh_axes, shards))
    return lax.concatenate(parts, axis)


def without_halo(x: jax.Array, axis: int, reach: int, mesh_axes: tuple[str, ...], shards: int, n: int) -> jax.Array:
    """The transpose of `with_halo` for a shard of n rows: rows of a halo are added where they came from."""
    own = jax.ShapeDtypeStruct((*x.shape[:axis], n, *x.shape[axis + 1 :]), x.dtype)
    transposed = jax.linear_transpose(lambda own: with_halo(own, axis, reach, mesh_axes, shards), own)
    (added,) = transposed(x)
    return jnp.asarray(added)


def sent(x: jax.Array, hop: int, mesh_axes: tuple[str, ...], shards: int) -> jax.Array:
    """The x of the device `hop` places before this one, or after it if hop is negative; zeros where there is none."""
    to = [(i, i + hop) for i in range(shards) if 0 <= i + hop < shards]
    return as_bits(lambda x: lax.ppermute(x, mesh_axes, to), x)


def mirrored(x: jax.Array, mesh_axes: tuple[str, ...], shards: int) -> jax.Array:
    """The x of the device that is as far from the last one as this one is from the first."""
    return as_bits(lambda x: lax.ppermute(x, mesh_axes, [(i, shards - 1 - i) for i in range(shards)]), x)


def as_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """move(x), which only moves x. Floats of 16 and 8 bits travel as integers: XLA may widen floats first, and move
    more.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return move(x)
    bits = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, bits)), x.dtype)
