"""Matrices in FP8, laid out for a step's products, and the numbers that they stand for."""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .. import _check
from . import explicit_axes, slabs
from .experts import STATIC
from .pytree import public_pytree
from .slabs import BLOCK, GREATEST_SCALE, SLAB, TILE

Array = jax.Array

FORMAT = "e4m3"
"""as kernels name it"""


@public_pytree
@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in FP8, or several of one shape, as a step's products take it; `pack_matrix` makes it.

    Attributes:
      data: uint8 `[…, rows / 64, columns / 64, 4112]`: in tiles of 64 rows and slabs of 64 columns, codes and a scale;
        rows and columns are filled up with zeros to multiples of 128.
      rows: the channels that a product makes.
      columns: the channels that a product takes.
      shape: the shape of the array that it stands for, whose last axes are the rows, and the axes before the columns.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import pack_matrix
      >>> w = pack_matrix(jnp.ones((256, 384), jnp.float8_e4m3fn), jnp.full((2, 3), 0.5))
      >>> w.rows, w.columns, w.shape, w.data.shape
      (256, 384, (384, 256), (4, 6, 4112))
    """

    data: Array
    rows: int = field(metadata=STATIC)
    columns: int = field(metadata=STATIC)
    shape: tuple[int, ...] = field(metadata=STATIC)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def unpacked(self, dtype: Any = jnp.float32) -> Array:
        """The array that it stands for, of this shape."""
        found = of_shards(unpacked, self.data, self.rows, self.columns, dtype)
        return jnp.swapaxes(found, -1, -2).reshape(self.shape)

    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shape cut into the axis of several matrices, if any, those of the columns and those of the rows."""
        several = math.prod(self.shape) // (self.rows * self.columns)
        first = int(several > 1)
        last = first + list(itertools.accumulate(self.shape[first:], operator.mul)).index(self.columns) + 1
        return self.shape[:first], self.shape[first:last], self.shape[last:]

    def reshape(self, *shape: int) -> "PackedMatrix":
        """The same matrix in another shape, one of whose extents may be -1.

        Raises:
          ValueError: an axis would have columns and rows, or there would be more numbers or fewer.
        """
        others = abs(math.prod(shape)) or 1
        found = tuple(math.prod(self.shape) // others if n == -1 else n for n in shape)
        if math.prod(found) != math.prod(self.shape) or not _fits(found, self.rows, self.columns):
            wanted = _wanted(self.rows, self.columns)
            raise _check.error(ValueError, "PackedMatrix.reshape", "shape", str(shape), wanted)
        return replace(self, shape=found)


def _fits(shape: tuple[Any, ...], rows: int, columns: int) -> bool:
    """True if axes have the columns, and those after them the rows; one before both has several matrices."""
    if not all(isinstance(n, int | np.integer) and n >= 1 for n in shape):
        return False
    several = math.prod(shape) // (rows * columns)
    return several * columns in itertools.accumulate(shape, operator.mul) and (several == 1 or shape[0] == several)


def _wanted(rows: int, columns: int) -> str:
    return f"axes of {columns} columns, then axes of {rows} rows, and before both one of several matrices"


@functools.partial(jax.jit, inline=True, static_argnums=(0, 2, 3, 4))
def of_shards(unpack: Callable[..., Array], data: Array, rows: int, columns: int, dtype: Any) -> Array:
    """`unpack`, which is `unpacked` or does the same, where Explicit axes of a mesh may shard the data: each device
    then unpacks its tiles and slabs.

    It is jitted because JAX outside of jit wants `jax.set_mesh` where Explicit axes shard an array.
    """
    spec = explicit_axes.entries(data)
    if not (names := {name for entry in spec for name in explicit_axes.names(entry)}):
        return unpack(data, rows, columns, dtype)

    def of_device(data: Array) -> Array:
        *_, tiles, n, _ = data.shape
        return unpack(data, tiles * TILE, n * SLAB, dtype)

    with jax.sharding.use_abstract_mesh(jax.typeof(data).sharding.mesh):
        found = jax.shard_map(of_device, in_specs=P(*spec), out_specs=P(*spec[:-1]), axis_names=names)(data)
    return found[..., :rows, :columns]


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2, 3))
def unpacked(data: Array, rows: int, columns: int, dtype: Any) -> Array:
    """The numbers of matrices whose data this is, `[…, rows, columns]` in dtype. It is traced once for each shape."""
    *several, tiles, n, _ = data.shape
    x = jnp.swapaxes(slabs.unpacked(data.reshape(-1, *data.shape[-3:])).astype(dtype), 3, 4)
    return x.reshape(*several, tiles * TILE, n * SLAB)[..., :rows, :columns]


def pack_matrix(codes: Array, scales: Array, shape: tuple[int, ...] | None = None) -> PackedMatrix:
    """Lays a matrix in FP8 out for a step's products: once, when a checkpoint is loaded.

    Codes times powers of two are kept exactly. Other scales are rounded to bfloat16, and so is a code times its scale.
    A code that is not a number makes the 64 x 64 numbers around it NaN.

    Args:
      codes: float8_e4m3fn `[…, rows, columns]`.
      scales: numbers above 0 and up to 128, one for each block of 128 x 128, `[…, rows / 128, columns / 128]`, rounded
        up: float32, bfloat16, float8_e8m0fnu or uint8 with its bits. Floats below 2^-126 count as 0. Inside of
        `jax.jit`, where scales have no values, one of 256 or more, or below 0, makes its block NaN.
      shape: of the array that it stands for in a layer: the columns, in some axes, then the rows; and before both the
        axis of several matrices, if any. By default `[…, columns, rows]`.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import pack_matrix
      >>> w = pack_matrix(jnp.ones((256, 384), jnp.float8_e4m3fn), jnp.full((2, 3), 0.5))
      >>> w.unpacked(jnp.bfloat16)[0, :3].tolist()
      [0.5, 0.5, 0.5]
    """
    several, dims = "m " * (getattr(codes, "ndim", 2) == 3), dict[str, Any]()
    codes = _check.operand(_OP, "codes", codes, f"{several}rows columns", dims, (jnp.dtype("float8_e4m3fn"),))
    *_, rows, columns = codes.shape
    dims |= {"row_blocks": -(-rows // BLOCK), "column_blocks": -(-columns // BLOCK)}
    scales = _check.operand(_OP, "scales", scales, f"{several}row_blocks column_blocks", dims, slabs.SCALES)
    slabs.check_scales(_OP, scales, 2.0 ** (GREATEST_SCALE - 127))
    shape = (*codes.shape[:-2], columns, rows) if shape is None else tuple(shape)
    if not _fits(shape, rows, columns) or math.prod(shape) != codes.size:
        raise _check.error(ValueError, _OP, "shape", str(shape), _wanted(rows, columns))
    return PackedMatrix(_packed(codes, slabs.kept(scales)), rows, columns, shape)


@jax.jit
def _packed(codes: Array, scales: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    *several, rows, columns = bits.shape
    more = [(0, -n % BLOCK) for n in (rows, columns)]
    bits = jnp.pad(bits.reshape(-1, rows, columns), [(0, 0), *more])
    data = slabs.packed(bits, scales.reshape(len(bits), *scales.shape[-2:]), gated=False)
    return data.reshape(*several, *data.shape[1:])


_OP = "pack_matrix"
