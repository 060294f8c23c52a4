"""Tiles of 64 rows and slabs of 64 columns, in which products in bfloat16 want a matrix, and matrices in FP8 there."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check

Array = jax.Array

TILE, SLAB = 64, 64
"""rows and columns of a matrix that lie together"""
BLOCK = 128
"""rows and columns of a matrix in FP8 that share a scale"""
CODES, SLAB_BYTES = 4096, 4112
"""bytes of a slab of a tile in FP8: its codes, then also its scales, two bfloat16 again and again"""
RAW = 120
"""A code's bits, where a bfloat16 has them, are 2^-120 times the number."""
GREATEST_SCALE = 127 + 7
"""the code of the greatest power of two in a scale, 2^7, since 2^120 times it is a bfloat16"""
NAN = 0x7F
"""the code that is not a number, with either sign"""
POWERS = jnp.dtype("float8_e8m0fnu"), jnp.dtype("uint8")
"""what powers of two are in: as exponents, or as the bits of these"""
SCALES = *POWERS, jnp.dtype("float32"), jnp.dtype("bfloat16")
"""what scales of FP8 are in"""
_WORDS = (2, 4, 8, 4, 2, 2)  # of a slab: of each 32 of k, warp, row of 8, lane of a quad, 16 of k, 8 of k


def in_tiles(rows: Array, gated: bool) -> Array:
    """Rows of matrices `[e, rows, …]` as tiles have them, `[e, tile, warp, 2, 8, …]`. A thread of a product has a gate
    and what it lets through, or two neighbouring channels.
    """
    e, n, *others = rows.shape
    if gated:
        return jnp.moveaxis(rows.reshape(e, 2, n // TILE, 4, 8, *others), 1, 3)
    return jnp.swapaxes(rows.reshape(e, n // TILE, 4, 8, 2, *others), 3, 4)


def codes_of(scales: Array) -> Array:
    """uint8: the codes of powers of two that are float8_e8m0fnu or such codes."""
    return scales if scales.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(scales, jnp.uint8)


def kept(scales: Array) -> Array:
    """int32: scales of FP8 as bits of bfloat16. Those in float32 are rounded. One below 2^-126, in either dtype,
    is made a number below 0, and `packed` makes 0 of it. Those in float8_e8m0fnu, or its codes, are exact.
    """
    if scales.dtype in POWERS:
        return codes_of(scales).astype(jnp.int32) << 7
    bits = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
    return jnp.where(bits < 1 << 7, -RAW << 7, bits)


def check_scales(op: str, scales: Array, greatest: float) -> None:
    """Raises ValueError for scales that have values, unless all are above 0 and at most this."""
    if isinstance(scales, jax.core.Tracer):
        return
    given = np.asarray(scales)
    numbers = (given.view(jnp.float8_e8m0fnu) if given.dtype == np.uint8 else given).astype(np.float32)
    if (bad := ~((numbers > 0) & (numbers <= greatest))).any():
        wanted = f"numbers above 0 and up to {greatest:g}"
        raise _check.error(ValueError, op, "scales", f"{numbers[bad][0]:g} among them", wanted)


def packed(codes: Array, scales: Array, gated: bool) -> Array:
    """uint8 `[m, tiles, slabs, SLAB_BYTES]`: matrices in FP8, of which a slab has a scale, or one of its gates and one
    of what these let through. A code that is not a number makes all with its scale NaN.

    Args:
      codes: uint8 `[m, rows, columns]`, in whole blocks.
      scales: `[m, rows / BLOCK, columns / BLOCK]`, as `kept` has them; NaN above what `GREATEST_SCALE` is the code of.
      gated: whether the first half of the rows are gates.
    """
    m, rows, columns = codes.shape
    tiles, slabs = rows // TILE, columns // SLAB
    # m tile warp row%2 g | slab step/2 step%2 k/8 t k%2, as a thread has them: a word has two pairs, of either row
    x = in_tiles(codes, gated).reshape(m, tiles, 4, 2, 8, slabs, 2, 2, 2, 4, 2)
    x = x.transpose(0, 1, 5, 6, 2, 4, 9, 7, 8, 10, 3).astype(jnp.uint32)
    first, second = x[..., 0], x[..., 1]
    halves = (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F
    words = halves[..., 0] | halves[..., 1] << 16
    of_codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(m, tiles, slabs, CODES)
    is_nan = (x & NAN == NAN).any(range(3, x.ndim - 1))
    if not gated:
        is_nan = is_nan.any(-1, keepdims=True)
    of_rows = in_tiles(jnp.repeat(jnp.repeat(scales, BLOCK, 1), BLOCK // SLAB, 2), gated)
    of_slabs = of_rows[:, :, 0, :, 0].transpose(0, 1, 3, 2)
    factor = jnp.where(is_nan | (of_slabs >> 7 > GREATEST_SCALE), 0x7FC0, (of_slabs + (RAW << 7)).clip(0))
    factor = jnp.tile(factor.astype(jnp.uint16), (SLAB_BYTES - CODES) // 4)
    of_scales = jax.lax.bitcast_convert_type(factor, jnp.uint8).reshape(m, tiles, slabs, -1)
    return jnp.concatenate([of_codes, of_scales], -1)


def unpacked(data: Array) -> Array:
    """float32 `[m, tiles, 4, 2, 8, columns]`, as `in_tiles` has rows: what data of `packed` stand for. All are numbers
    of bfloat16.
    """
    m, tiles, slabs, _ = data.shape
    words = jax.lax.bitcast_convert_type(data[..., :CODES].reshape(m, tiles, slabs, *_WORDS, 4), jnp.uint32)
    halves = jnp.stack([words, words >> 16], -1)  # m tile slab | step/2 warp g t step%2 k/8 | k%2
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
    codes = jnp.stack([first, second], -1).astype(jnp.uint8)  # … row%2
    x = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    low, high = (data[..., CODES + i : CODES + 4 : 2].astype(jnp.int32) for i in range(2))
    exponent, mantissa = low >> 7 | high << 1, 1 + (low & 127).astype(jnp.float32) / 128
    scales = jnp.where(exponent == 255, jnp.nan, jnp.ldexp(mantissa, exponent - 127 - RAW))
    x = jax.lax.reduce_precision(x * scales.reshape(m, tiles, slabs, *[1] * 7, 2), 8, 7)  # as kernels round it
    x = x.transpose(0, 1, 4, 10, 5, 2, 3, 7, 8, 6, 9)  # m tile warp row%2 g | slab step/2 step%2 k/8 t k%2
    return x.reshape(m, tiles, 4, 2, 8, slabs * SLAB)
