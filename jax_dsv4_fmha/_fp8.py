"""DeepSeek-V4's FP8 cache: 584 bytes an entry of 512 values, in pages; docs/semantics.md draws one byte by byte.

page of n entries   n × 576 bytes   448 e4m3 values, then 64 bfloat16 (the dimensions that RoPE turns)
                    n × 8 bytes     7 scales, one for 64 of the 448, as biased exponents (ue8m0); one byte of 0
                    zeros           up to a multiple of 576 bytes

scale = 2^ceil(log2(max(amax / 448, 1e-4)));  value = e4m3 · scale, which bfloat16 holds exactly
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import _check

D, ROPE, GROUP = 512, 64, 64
VALUES = D - ROPE
DATA = VALUES + 2 * ROPE
"""bytes of an entry without its scales"""
SCALES = VALUES // GROUP + 1
ENTRY = DATA + SCALES

_MAX = 448.0  # of e4m3: 7/8 of a power of two
_LEAST = 2.0**-13  # the least scale: what 1e-4 is rounded up to
_BIAS, _NAN = 127, 255  # of ue8m0


def page_bytes(entries: int) -> int:
    """The size of a page of that many entries."""
    return -(-entries * ENTRY // DATA) * DATA


def page_entries(size: int) -> int:
    """How many entries a page of this size has; what it is padded with is less than one."""
    return size // ENTRY


def quantize_cache(entries: jax.Array) -> jax.Array:
    """Pages of FP8 entries.

    Args:
      entries: `[…, n, 512]`, bfloat16, float16 or float32; the last 64 dimensions are kept as bfloat16. n is the size
        of a page.

    Returns:
      uint8 `[…, page_bytes(n)]`. NaN or inf among 64 values makes them all NaN, by the scale 255.

    Raises:
      ValueError, TypeError: entries that are not as said above.
    """

    def fits(x: jax.Array) -> bool:
        return x.dtype in _check.FLOAT and x.ndim >= 2 and x.shape[-2] >= 1 and x.shape[-1] == D

    wanted = f"bfloat16, float16 or float32[..., n, {D}], n >= 1"
    entries = _check.array("quantize_cache", "entries", entries, wanted, fits)
    *batch, n, _ = entries.shape
    data, scales = encode(entries)
    parts = [x.reshape(*batch, -1) for x in (data, scales)]
    padding = jnp.zeros((*batch, page_bytes(n) - n * ENTRY), jnp.uint8)
    return jnp.concatenate([*parts, padding], -1)


def dequantize_cache(pages: jax.Array) -> jax.Array:
    """bfloat16 entries `[…, n, 512]` of FP8 pages, uint8 `[…, page_bytes(n)]`; exact, what is padding is not read.

    Raises:
      ValueError, TypeError: pages that are not as said above.
    """

    def fits(x: jax.Array) -> bool:
        return x.dtype == jnp.uint8 and x.ndim >= 1 and is_page(x.shape[-1])

    pages = _check.array("dequantize_cache", "pages", pages, "uint8[..., page_bytes(n)], n >= 1", fits)
    *batch, size = pages.shape
    n = page_entries(size)
    data = pages[..., : n * DATA].reshape(*batch, n, DATA)
    scales = pages[..., n * DATA : n * ENTRY].reshape(*batch, n, SCALES)
    return decode(data, scales)


def is_page(size: int) -> bool:
    """Whether a page may have this size in bytes."""
    return bool(size >= ENTRY and size == page_bytes(page_entries(size)))


def encode(entries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint8 `[…, 576]` and `[…, 8]` of entries `[…, 512]`."""
    batch = entries.shape[:-1]
    values = entries[..., :VALUES].astype(jnp.float32).reshape(*batch, -1, GROUP)
    finite = jnp.isfinite(values).all(-1)
    amax = jnp.where(finite, jnp.max(jnp.abs(values), -1), 0)
    part, exponent = jnp.frexp(jnp.maximum(amax, _MAX * _LEAST))  # part in [1/2, 1)
    exponent = exponent - jnp.where(part > 7 / 8, 8, 9)  # exact, where a quotient and a logarithm would be rounded
    values = jnp.where(finite[..., None], jnp.ldexp(values, -exponent[..., None]), 0)
    most = jnp.where(exponent < 120, _MAX, 240)[..., None]  # or 2^128 is what the greatest are rounded to
    values = jnp.clip(values, -most, most).astype(jnp.float8_e4m3fn).reshape(*batch, VALUES)
    rope = lax.bitcast_convert_type(entries[..., VALUES:].astype(jnp.bfloat16), jnp.uint16)
    rope = jnp.stack([rope & 255, rope >> 8], -1).astype(jnp.uint8)  # what is bitcast keeps its shape, for jax.export
    values = lax.optimization_barrier(lax.bitcast_convert_type(values, jnp.uint8))  # or XLA may undo the rounding
    data = jnp.concatenate([values, rope.reshape(*batch, 2 * ROPE)], -1)
    scales = jnp.where(finite, exponent + _BIAS, _NAN).astype(jnp.uint8)
    return data, jnp.concatenate([scales, jnp.zeros((*batch, 1), jnp.uint8)], -1)


def decode(data: jax.Array, scales: jax.Array) -> jax.Array:
    """bfloat16 entries `[…, 512]` of uint8 `[…, 576]` and `[…, 8]`."""
    batch = data.shape[:-1]
    values = lax.bitcast_convert_type(data[..., :VALUES], jnp.float8_e4m3fn).astype(jnp.float32)
    scales = scales[..., : SCALES - 1, None].astype(jnp.int32)
    values = jnp.ldexp(values.reshape(*batch, -1, GROUP), scales - _BIAS)
    values = jnp.where(scales == _NAN, jnp.nan, values).reshape(*batch, VALUES)
    rope = data[..., VALUES:].reshape(*batch, ROPE, 2).astype(jnp.uint16)
    rope = lax.bitcast_convert_type(rope[..., 0] | rope[..., 1] << 8, jnp.bfloat16)
    return jnp.concatenate([values.astype(jnp.bfloat16), rope], -1)
