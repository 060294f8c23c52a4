"""Matrices in FP8, laid out for a step's products, and the numbers that they stand for."""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .. import _check
from . import explicit_axes
from .experts import SLAB, STATIC, TILE, in_tiles
from .pytree import public_pytree

Array = jax.Array

FORMAT = "e4m3"
"""as kernels name it"""
BLOCK = 128
"""rows and columns that share a scale; a matrix is laid out in whole blocks"""
CODES, SLAB_BYTES = 4096, 4112
"""bytes of a slab of a tile: its codes, then also its scale, a bfloat16 again and again"""
RAW = 120
"""A code's bits, where a bfloat16 has them, are 2^-120 times the number."""
GREATEST_SCALE = 127 + 7
"""the code of the greatest scale, 2^7, since 2^120 times it is a bfloat16"""
NAN = 0x7F
"""the code that is not a number, with either sign"""


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
        return jnp.swapaxes(_of_shards(self.data, self.rows, self.columns, dtype), -1, -2).reshape(self.shape)

    def reshape(self, *shape: int) -> "PackedMatrix":
        """The same matrix in another shape, one of whose extents may be -1."""
        others = -math.prod(shape)
        known = math.prod(self.shape)
        return replace(self, shape=tuple(known // others if n == -1 else n for n in shape))


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2, 3))
def _of_shards(data: Array, rows: int, columns: int, dtype: Any) -> Array:
    """`unpacked`, where Explicit axes of a mesh may shard the data: each device then unpacks its tiles and slabs.

    It is jitted because JAX outside of jit wants `jax.set_mesh` where Explicit axes shard an array.
    """
    spec = explicit_axes.entries(data)
    if not (names := {name for entry in spec for name in explicit_axes.names(entry)}):
        return unpacked(data, rows, columns, dtype)

    def of_device(data: Array) -> Array:
        *_, tiles, slabs, _ = data.shape
        return unpacked(data, tiles * TILE, slabs * SLAB, dtype)

    with jax.sharding.use_abstract_mesh(jax.typeof(data).sharding.mesh):
        found = jax.shard_map(of_device, in_specs=P(*spec), out_specs=P(*spec[:-1]), axis_names=names)(data)
    return found[..., :rows, :columns]


def unpacked(data: Array, rows: int, columns: int, dtype: Any) -> Array:
    """The numbers of matrices whose data this is, `[…, rows, columns]` in dtype."""
    *several, tiles, slabs, _ = data.shape
    words = data[..., :CODES].reshape(-1, tiles, slabs, *_WORDS, 4)  # m tile slab | step/2 warp g t step%2 k/8
    words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    halves = jnp.stack([words, words >> 16], -1)
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
    codes = jnp.stack([first, second], -1).astype(jnp.uint8)  # … k%2 row%2
    x = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    low, high = (data[..., CODES + i].reshape(-1, tiles, slabs).astype(jnp.int32) for i in range(2))
    exponent = low >> 7 | high << 1
    scales = jnp.where(exponent == 255, jnp.nan, jnp.ldexp(1.0, exponent - 127 - RAW))
    x = (x * scales.reshape(*scales.shape, *[1] * 8)).astype(dtype)
    x = x.transpose(0, 1, 4, 5, 10, 2, 3, 7, 8, 6, 9)  # m tile warp g row%2 | slab step/2 step%2 k/8 t k%2
    return x.reshape(*several, tiles * TILE, slabs * SLAB)[..., :rows, :columns]


_WORDS = (2, 4, 8, 4, 2, 2)  # of a slab: of each 32 of k, warp, row of 8, lane of a quad, 16 of k, 8 of k


def pack_matrix(codes: Array, scales: Array, shape: tuple[int, ...] | None = None) -> PackedMatrix:
    """Lays a matrix in FP8 out for a step's products: once, when a checkpoint is loaded.

    All numbers are kept exactly. A code that is not a number makes the 64 x 64 numbers around it NaN.

    Args:
      codes: float8_e4m3fn `[…, rows, columns]`.
      scales: powers of two up to 128, one for each block of 128 x 128, `[…, rows / 128, columns / 128]`, rounded up:
        float8_e8m0fnu, uint8 with its bits, or float32, which has values, so not inside of `jax.jit`. Without values a
        scale above 128 makes its block NaN.
      shape: of the array that it stands for in a layer: the columns, in some axes, then the rows; and before both the
        axis of several matrices, if any. By default `[…, columns, rows]`.

    Raises:
      ValueError, TypeError: operands that differ from the above, among them scales that are no powers of two.

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
    wanted = tuple(jnp.dtype(x) for x in ("float8_e8m0fnu", "uint8", "float32"))
    scales = _check.operand(_OP, "scales", scales, f"{several}row_blocks column_blocks", dims, wanted)
    scales = _exponents(scales)
    shape = (*codes.shape[:-2], columns, rows) if shape is None else tuple(shape)
    if math.prod(shape) != codes.size:
        raise _check.error(ValueError, _OP, "shape", str(shape), f"one of {codes.size} numbers")
    return PackedMatrix(_packed(codes, scales), rows, columns, shape)


def _exponents(scales: Array) -> Array:
    """uint8, the codes of scales as powers of two."""
    is_known = not isinstance(scales, jax.core.Tracer)
    if scales.dtype == jnp.float32:
        if not is_known:
            wanted = "float8_e8m0fnu inside of jax.jit, since float32 may be no powers of two"
            raise _check.error(TypeError, _OP, "scales", scales, wanted)
        numbers = np.asarray(scales)
        mantissa, exponent = np.frexp(np.where(np.isfinite(numbers), numbers, 0.0))
        if (bad := mantissa != 0.5).any():
            got = f"{float(numbers[bad][0]):g} among them"
            raise _check.error(ValueError, _OP, "scales", got, "powers of two, as float8_e8m0fnu has them")
        scales = jnp.asarray(exponent - 1 + 127).clip(0, 255).astype(jnp.uint8)
    elif scales.dtype != jnp.uint8:
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    if is_known and (bad := (found := np.asarray(scales)) > GREATEST_SCALE).any():
        code = int(found[bad][0])
        got = "NaN among them" if code == 255 else f"2^{code - 127} among them"
        raise _check.error(ValueError, _OP, "scales", got, "powers of two up to 128")
    return scales


@jax.jit
def _packed(codes: Array, scales: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    *several, rows, columns = bits.shape
    more = [(0, -n % BLOCK) for n in (rows, columns)]
    bits = jnp.pad(bits.reshape(-1, rows, columns), [(0, 0), *more])
    m, rows, columns = bits.shape
    tiles, slabs = rows // TILE, columns // SLAB
    # m tile warp row%2 g | slab step/2 step%2 k/8 t k%2, as a thread has them: a word has two pairs, of either row
    x = in_tiles(bits, gated=False).reshape(m, tiles, 4, 2, 8, slabs, 2, 2, 2, 4, 2)
    x = x.transpose(0, 1, 5, 6, 2, 4, 9, 7, 8, 10, 3).astype(jnp.uint32)
    first, second = x[..., 0], x[..., 1]
    halves = (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F
    words = halves[..., 0] | halves[..., 1] << 16
    of_codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(m, tiles, slabs, CODES)
    is_nan = (x & NAN == NAN).any(range(3, x.ndim))
    scales = jnp.repeat(jnp.repeat(scales.reshape(m, rows // BLOCK, -1), 2, 1), 2, 2).astype(jnp.int32)
    factor = jnp.where(is_nan | (scales > GREATEST_SCALE), 0x7FC0, (scales + RAW) << 7).astype(jnp.uint16)
    of_scale = jax.lax.bitcast_convert_type(jnp.repeat(factor[..., None], (SLAB_BYTES - CODES) // 2, -1), jnp.uint8)
    data = jnp.concatenate([of_codes, of_scale.reshape(m, tiles, slabs, -1)], -1)
    return data.reshape(*several, *data.shape[1:])


_OP = "pack_matrix"
