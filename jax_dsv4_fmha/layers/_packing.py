"""Which of a layer's matrices are packed in FP8, where these lie, and matrices that are rounded to FP8."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from .._definitions import explicit_axes
from .._definitions.packed_matrix import PackedMatrix, pack_matrix
from .._definitions.slabs import BLOCK, GREATEST_SCALE, SLAB, SLAB_BYTES, TILE
from ._operands import PACKED, extents, packed_spec

GREATEST = 448.0
"""the greatest number in e4m3"""


def sharding_of_data(leaf: str, sharding: Sharding | None) -> Sharding | None:
    """The sharding of a packed matrix's data, where the matrix has this one."""
    if isinstance(sharding, NamedSharding):
        spec = packed_spec(leaf, sharding.spec)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def may_be_packed(leaf: str, shape: tuple[int, ...], sharding: Sharding | None) -> bool:
    """Returns whether a layer takes it packed: groups are whole blocks, and devices' parts are whole tiles."""
    if leaf.rpartition(".")[2] not in PACKED:
        return False
    several, rows, columns = extents(leaf, shape)
    if math.prod(several) > 1 and rows % BLOCK:
        return False
    of_data = sharding_of_data(leaf, sharding)
    tiles = *several, rows // TILE, columns // SLAB, SLAB_BYTES  # that are not filled up
    filled_up = *several, 2 * -(-rows // BLOCK), 2 * -(-columns // BLOCK), SLAB_BYTES
    return divides(of_data, tiles) and divides(of_data, filled_up)


def divides(sharding: Sharding | None, shape: tuple[int, ...]) -> bool:
    """Returns whether devices have equal parts of an array of this shape."""
    try:
        return sharding is None or bool(sharding.shard_shape(shape))
    except ValueError:
        return False


def packed(params: Any, shardings: Any, prefix: str = "") -> dict[str, Any]:
    """These parameters with the matrices in FP8 that may be."""
    found = dict[str, Any]()
    for name, x in params.items():
        leaf, own = prefix + name, shardings[name] if isinstance(shardings, dict) else shardings
        if isinstance(x, dict):
            found[name] = packed(x, own, f"{leaf}.")
            continue
        is_packed = isinstance(x, PackedMatrix)
        of_type = None if is_packed else explicit_axes.sharding(x, *explicit_axes.entries(x))
        if is_packed or not may_be_packed(leaf, x.shape, of_type or own):
            found[name] = x
        else:
            found[name] = in_fp8(x, *extents(leaf, x.shape), sharding_of_data(leaf, of_type))
    return found


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def in_fp8(
    w: jax.Array, several: tuple[int, ...], rows: int, columns: int, of_data: Sharding | None = None
) -> PackedMatrix:
    """A matrix of this many rows and columns rounded to FP8, with the least scales that its numbers fit in.

    of_data: the sharding of its data, where Explicit axes of a mesh shard the matrix.
    """
    make = functools.partial(_data_in_fp8, several=several, rows=rows, columns=columns)
    if of_data is None:
        return PackedMatrix(make(w), rows, columns, w.shape)
    with jax.sharding.use_abstract_mesh(jax.typeof(w).sharding.mesh):
        return PackedMatrix(jax.sharding.auto_axes(make, out_sharding=of_data)(w), rows, columns, w.shape)


def _data_in_fp8(w: jax.Array, several: tuple[int, ...], rows: int, columns: int) -> jax.Array:
    x = jnp.swapaxes(w.reshape(*several, columns, rows), -1, -2).astype(jnp.float32)
    more = [(0, 0)] * len(several) + [(0, -n % BLOCK) for n in (rows, columns)]
    blocks = jnp.pad(x, more).reshape(*several, -(-rows // BLOCK), BLOCK, -1, BLOCK)
    mantissa, exponent = jnp.frexp(jnp.abs(blocks).max((-3, -1)) / GREATEST)
    codes = jnp.clip(exponent - (mantissa == 0.5) + 127, 0, GREATEST_SCALE)
    whole = jnp.repeat(jnp.repeat(codes, BLOCK, -2), BLOCK, -1)[..., :rows, :columns]
    numbers = jnp.ldexp(x, 127 - whole).astype(jnp.float8_e4m3fn)
    return pack_matrix(numbers, codes.astype(jnp.uint8)).data
