"""The packed caches of DeepSeek's models: 512 or 576 values an entry, in pages of bytes; docs/layouts.md draws each
layout. Also the caches of an indexer's keys, with 128 values an entry.

layout    an entry has                                        scales                   bytes, in a page of n entries
v4_fp8    448 e4m3, 64 bfloat16 (the dimensions of RoPE)      7 ue8m0, for 64; one 0   n × 576, then n × 8, then padding
v4_fp4    448 e2m1 in pairs as below; 64 bfloat16 at the end  14 ue8m0, for 32; two 0  n × 368
v41_fp8   512 e4m3                                            16 ue8m0, for 32         n × 528
v41_fp4   512 e2m1, the even one of a pair in the low nibble  32 e4m3, for 16          n × 288
v32_fp8   512 e4m3; 64 bfloat16 at the end (RoPE's)           4 float32, for 128       n × 656
index_fp8 128 e4m3                                            1 float32                n × 128, then n × 4
index_fp4 128 e2m1, in pairs as above                         4 ue8m0, for 32          n × 64, then n × 4

ue8m0   2^ceil(log2(amax / 448)), or of e2m1 amax / 6, as its biased exponent, and not below the layout's minimum; of
        e2m1 not above 2^121
e4m3    amax / 6, rounded to the nearest, and not below 2^-9, the least above 0 that e4m3 has
float32 amax times 1 / 448, which is rounded first; amax is 1e-4 at least in index_fp8, 2^-100 in v32_fp8

A value is its code times its scale, which bfloat16 holds exactly. With a scale in float32 it is rounded: in index_fp8
to float32, in v32_fp8 to float32 and then to bfloat16.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _check
from . import explicit_axes
from .rounding import packable, straight_through

D = 512

_E4M3_MAX, _E4M3_NAN = 448.0, 0x7F  # 7/8 of a power of two
_E4M3_LEAST = 2.0**-9
_BIAS, _NAN, _LEAST_EXPONENT = 127, 255, -126  # of ue8m0; below 2^-126 float32 is not normal
_GREATEST_EXPONENT = 121  # of e2m1's scales: kernels multiply 192 by half a scale in bfloat16
_INDEX_LEAST = 1e-4  # the least amax, which scales a row of zeros
_MOST = float(jnp.finfo(jnp.bfloat16).max)
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; a value in the middle goes to the even code"""

Parts = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A way to write an entry as bytes, and to place them in a page. An entry has codes, bfloat16 values, scales and
    padding.

    Attributes:
      d: dimensions.
      packed: dimensions that are codes; the others, after them, are bfloat16.
      bits: bits of a code.
      group: dimensions that share a scale.
      parts: widths in bytes of the parts of an entry. A page has the first part of all its entries, then the second.
      multiple: the size of a page is a multiple of this many bytes.
      encode_groups: float32 `[…, groups, group]` -> uint8 codes `[…, bytes]` and scales `[…, groups * scale_bytes]`.
      decode_groups: the inverse.
      scale_bytes: bytes of a scale.
      decoded: the dtype of decoded values.
      order: in which an entry has these four.
    """

    d: int
    packed: int
    bits: int
    group: int
    parts: tuple[int, ...]
    multiple: int
    encode_groups: Callable[[jax.Array], Parts]
    decode_groups: Callable[[jax.Array, jax.Array], jax.Array]
    scale_bytes: int = 1
    decoded: Any = jnp.bfloat16
    order: tuple[str, ...] = ("codes", "plain", "scales", "padding")

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return sum(self.parts)

    @property
    def page_rule(self) -> str:
        """The size of a page, in words."""
        size = f"{self.entry} n bytes"
        return size if self.multiple == 1 else f"ceil({self.entry} n / {self.multiple}) {self.multiple} bytes"

    def page_bytes(self, entries: Any) -> Any:
        """The size of a page of that many entries."""
        return -(-entries * self.entry // self.multiple) * self.multiple

    def page_entries(self, size: Any) -> Any:
        """The number of entries in a page of this size; its padding is shorter than an entry."""
        return size // self.entry

    def is_page(self, size: Any) -> bool:
        """True if a page may have this size in bytes."""
        return bool(size >= self.entry and size == self.page_bytes(self.page_entries(size)))

    @property
    def _widths(self) -> dict[str, int]:
        """Bytes of an entry's codes, bfloat16 values, scales and padding."""
        codes, plain = self.packed * self.bits // 8, 2 * (self.d - self.packed)
        scales = self.packed // self.group * self.scale_bytes
        return {"codes": codes, "plain": plain, "scales": scales, "padding": self.entry - codes - plain - scales}

    def starts(self, at: Any, page: Any) -> tuple[Any, ...]:
        """The offsets in bytes, within a page of `page` entries, at which the parts of the entries `at` begin."""
        before = (page * sum(self.parts[:i]) for i in range(len(self.parts)))
        return tuple(first + at * width for first, width in zip(before, self.parts, strict=True))

    @functools.partial(jax.jit, static_argnums=0, inline=True)  # one program where it is called outside of any
    def encode(self, entries: jax.Array) -> Parts:
        """The parts, uint8 `[…, width]`, of entries `[…, d]`."""
        batch, entries = entries.shape[:-1], packable(entries)
        values = _as_rounded(entries[..., : self.packed])
        codes, scales = self.encode_groups(values.reshape(*batch, self.packed // self.group, self.group))
        rest = lax.bitcast_convert_type(entries[..., self.packed :].astype(jnp.bfloat16), jnp.uint16)
        rest = jnp.stack([rest & 255, rest >> 8], -1).astype(jnp.uint8)  # a bitcast keeps its shape, for jax.export
        fields = {"codes": codes, "plain": rest, "scales": scales}  # on Explicit axes JAX reshapes no empty array
        fields = {name: x.reshape(*batch, self._widths[name]) for name, x in fields.items() if self._widths[name]}
        fields["padding"] = jnp.zeros_like(fields["codes"][..., : self._widths["padding"]])
        whole = [fields[name] for name in self.order if name in fields]
        return tuple(_cut(jnp.concatenate(whole, -1), self.parts))

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def decode(self, *parts: jax.Array) -> jax.Array:
        """The entries `[…, d]` that these parts encode."""
        batch, plain = parts[0].shape[:-1], self.d - self.packed
        whole = _cut(jnp.concatenate(parts, -1), tuple(self._widths[name] for name in self.order))
        fields = dict(zip(self.order, whole, strict=True))
        values = self.decode_groups(fields["codes"], fields["scales"])
        values = values.reshape(*batch, self.packed).astype(self.decoded)
        if plain == 0:
            return values
        others = fields["plain"].reshape(*batch, plain, 2).astype(jnp.uint16)
        others = lax.bitcast_convert_type(others[..., 0] | others[..., 1] << 8, jnp.bfloat16)
        return jnp.concatenate([values, others], -1)

    def read(self, pages: jax.Array, page: jax.Array, at: jax.Array) -> Parts:
        """The parts of the entries `at` […] of pages number `page` […], from `pages [pages, page_bytes]`: […, width], 0
        where page < 0.
        """
        starts = self.starts(at, self.page_entries(pages.shape[1]))
        parts = zip(starts, self.parts, strict=True)
        return tuple(read_pages(pages, page, start, width) for start, width in parts)


def _as_rounded(x: jax.Array) -> jax.Array:
    """x in float32, with the numbers that x has in its own dtype.

    On GPUs XLA leaves out a rounding to 16 bits if the next operation converts back. Codes would then be those of
    numbers that x does not hold.
    """
    kind = jnp.finfo(x.dtype)
    x = x.astype(jnp.float32)
    return x if kind.bits == 32 else lax.reduce_precision(x, kind.nexp, kind.nmant)


def read_pages(pages: jax.Array, page: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """Reads `width` bytes from `start` […] of page […] on, from `pages [pages, page_bytes]`: […, width]; 0 where page <
    0.
    """
    windows = lax.GatherDimensionNumbers(offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    where = jnp.stack([page, start], -1)
    return lax.gather(pages, where, windows, (1, width), mode="fill", fill_value=0)


def _cut(x: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]


def _encode_e4m3(values: jax.Array, least: int) -> Parts:
    """e4m3 codes with ue8m0 scales of at least 2^least."""
    finite = jnp.isfinite(values).all(-1)
    amax = jnp.where(finite, jnp.max(jnp.abs(values), -1), 0)
    part, exponent = jnp.frexp(jnp.maximum(amax, _E4M3_MAX * 2.0**least))  # part in [1/2, 1)
    exponent = exponent - jnp.where(part > 7 / 8, 8, 9)  # exact, where a quotient and a logarithm would be rounded
    values = jnp.where(finite[..., None], jnp.ldexp(values, -exponent[..., None]), 0)
    most = jnp.where(exponent < 120, _E4M3_MAX, 240)[..., None]  # or the greatest would round to 2^128
    values = jnp.clip(values, -most, most).astype(jnp.float8_e4m3fn)
    codes = lax.optimization_barrier(lax.bitcast_convert_type(values, jnp.uint8))  # or XLA may undo the rounding
    return codes, jnp.where(finite, exponent + _BIAS, _NAN).astype(jnp.uint8)


def _decode_e4m3(codes: jax.Array, scales: jax.Array) -> jax.Array:
    values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return _times_ue8m0(values.reshape(*scales.shape, codes.shape[-1] // scales.shape[-1]), scales)


def _times_ue8m0(values: jax.Array, scales: jax.Array) -> jax.Array:
    scales = scales[..., None].astype(jnp.int32)
    return jnp.where(scales == _NAN, jnp.nan, jnp.ldexp(values, scales - _BIAS))


def quantize_rows(x: jax.Array, least: float = _INDEX_LEAST) -> tuple[jax.Array, jax.Array]:
    """float8_e4m3fn like x, and a float32 scale for each row: max(max |row|, least) times 1 / 448. They have no
    gradient, as the choice that is made by them.
    """
    x = lax.stop_gradient(_as_rounded(x))
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1), least) * (1 / _E4M3_MAX)  # as XLA divides by a constant
    codes = jnp.clip(x / scale[..., None], -_E4M3_MAX, _E4M3_MAX)  # or rounding may take a quotient above the greatest
    return codes.astype(jnp.float8_e4m3fn), scale


def layout_of_keys(dtype: Any) -> str:
    """The layout of packed index keys that queries of this dtype are multiplied by."""
    return "index_fp8" if dtype == jnp.float8_e4m3fn else "index_fp4"


def index_keys(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads "index_fp8", uint8 `[…, 128]` and `[…, 4]`: float8_e4m3fn codes and float32 `[…]` scales."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), _float32_of(scales)


def _float32_of(x: jax.Array) -> jax.Array:
    """float32 `[…]` of its bytes `[…, 4]`."""
    word = functools.reduce(jnp.bitwise_or, (x[..., i].astype(jnp.uint32) << 8 * i for i in range(4)))
    return lax.bitcast_convert_type(word, jnp.float32)


def _encode_index(values: jax.Array, least: float = _INDEX_LEAST) -> Parts:
    """e4m3 codes with float32 scales."""
    codes, scale = quantize_rows(values, least)
    codes = lax.optimization_barrier(lax.bitcast_convert_type(codes, jnp.uint8))  # or XLA may undo the rounding
    word = lax.bitcast_convert_type(scale, jnp.uint32)
    scales = jnp.stack([(word >> 8 * i & 255).astype(jnp.uint8) for i in range(4)], -1)
    return codes, scales.reshape(*scale.shape[:-1], 4 * scale.shape[-1])


def _encode_v32(values: jax.Array) -> Parts:
    """The same, of numbers that bfloat16 has; one that is not finite makes its group NaN."""
    finite = jnp.isfinite(values).all(-1, keepdims=True)
    values = jnp.where(finite, jnp.clip(values, -_MOST, _MOST), jnp.nan)
    return _encode_index(values, 2.0**-100)


def _decode_index(codes: jax.Array, scales: jax.Array) -> jax.Array:
    scales = _float32_of(scales.reshape(*scales.shape[:-1], scales.shape[-1] // 4, 4))
    values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return values.reshape(*scales.shape, codes.shape[-1] // scales.shape[-1]) * scales[..., None]


def _decode_v32(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return lax.reduce_precision(_decode_index(codes, scales), 8, 7)  # as bfloat16, which XLA may not leave out


def _encode_e2m1(values: jax.Array, sixth: Callable[[jax.Array], Parts], nan: int) -> Parts:
    """e2m1 codes with the scales that `sixth` makes of each group's greatest magnitude: numbers, and their codes."""
    finite = jnp.isfinite(values).all(-1)
    scale, scales = sixth(jnp.where(finite, jnp.max(jnp.abs(values), -1), 0))
    magnitudes = jnp.where(finite[..., None], jnp.abs(values), 0)
    codes, some = jnp.signbit(values).astype(jnp.uint8) << 3, magnitudes > 0  # a limit may be flushed to 0
    for i, middle in enumerate(_E2M1_MIDDLES):  # exact, where a quotient would be rounded
        limit = middle * scale[..., None]
        codes += (some & (magnitudes >= limit if i % 2 else magnitudes > limit)).astype(jnp.uint8)
    codes = codes.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    return codes[..., 0] | codes[..., 1] << 4, jnp.where(finite, scales, nan).astype(jnp.uint8)


def _sixth_in_ue8m0(x: jax.Array) -> Parts:
    """The least power of two that is at least x / 6 and 2^-126, but at most 2^121, float32; and its code."""
    part, exponent = jnp.frexp(jnp.clip(x, 6 * 2.0**_LEAST_EXPONENT, 6 * 2.0**_GREATEST_EXPONENT))
    exponent = exponent - jnp.where(part > 3 / 4, 2, 3)
    return jnp.ldexp(jnp.ones_like(x), exponent), (exponent + _BIAS).astype(jnp.uint8)


def _sixth_in_e4m3(x: jax.Array) -> Parts:
    """x / 6 rounded to the nearest e4m3 number, ties to even, from 2^-9 to 448, float32; and its code.

    It finds e4m3's step and an exact remainder, because the rounding of a quotient would depend on the device.
    """
    x = jnp.maximum(x, 6 * _E4M3_LEAST)
    part, exponent = jnp.frexp(x)
    step = jnp.maximum(exponent - jnp.where(part >= 0.75, 3, 4), -6) - 3  # of x / 6 in [8, 16) 2^step, or less
    steps = jnp.ldexp(x, -step)
    count = jnp.round(steps / 6)
    over = steps - 6 * count
    odd = count % 2 == 1
    count += jnp.where((over > 3) | ((over == 3) & odd), 1, 0) - jnp.where((over < -3) | ((over == -3) & odd), 1, 0)
    scale = jnp.minimum(jnp.ldexp(count, step), _E4M3_MAX)
    return scale, lax.bitcast_convert_type(scale.astype(jnp.float8_e4m3fn), jnp.uint8)


def _times_e4m3(values: jax.Array, scales: jax.Array) -> jax.Array:
    return values * lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)[..., None]


def _decode_e2m1(codes: jax.Array, scales: jax.Array, times: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    group = 2 * codes.shape[-1] // scales.shape[-1]
    codes = codes.reshape(*scales.shape, group // 2)
    codes = jnp.stack([codes & 15, codes >> 4], -1).astype(jnp.float32).reshape(*scales.shape, group)
    size = jnp.where(codes < 8, codes, codes - 8)
    size = jnp.where(size < 4, size / 2, jnp.where(size < 6, size - 2, 2 * size - 8))
    return times(jnp.where(codes < 8, size, -size), scales)


_NVFP4 = (
    functools.partial(_encode_e2m1, sixth=_sixth_in_e4m3, nan=_E4M3_NAN),
    functools.partial(_decode_e2m1, times=_times_e4m3),
)
_MXFP4 = (
    functools.partial(_encode_e2m1, sixth=_sixth_in_ue8m0, nan=_NAN),
    functools.partial(_decode_e2m1, times=_times_ue8m0),
)
_SCALES_FIRST = ("codes", "scales", "padding", "plain")
LAYOUTS = {
    "v4_fp8": Layout(D, 448, 8, 64, (576, 8), 576, functools.partial(_encode_e4m3, least=-13), _decode_e4m3),
    "v4_fp4": Layout(D, 448, 4, 32, (368,), 1, *_MXFP4, order=_SCALES_FIRST),
    "v41_fp8": Layout(D, 512, 8, 32, (528,), 1, functools.partial(_encode_e4m3, least=-22), _decode_e4m3),
    "v41_fp4": Layout(D, 512, 4, 16, (288,), 1, *_NVFP4),
    "v32_fp8": Layout(D + 64, D, 8, 128, (656,), 1, _encode_v32, _decode_v32, 4, order=_SCALES_FIRST),
    "index_fp8": Layout(128, 128, 8, 128, (128, 4), 1, _encode_index, _decode_index, 4, jnp.float32),
    "index_fp4": Layout(128, 128, 4, 32, (64, 4), 1, *_MXFP4),
}
"""The least scale of V4 is 1e-4 rounded up, that of V4.1 is 1e-4 / 448 rounded up."""

V4_FP8 = "v4_fp8"
ALL_V = tuple(name for name, how in LAYOUTS.items() if how.d == D)
"""The layouts of V4's entries, all of whose numbers are V too"""
LATENTS = (*ALL_V, "v32_fp8")
"""Those of entries that attention reads; others are an indexer's keys."""


@straight_through(1, 2)
def rounded(x: jax.Array, layout: str, plain: int = 0) -> jax.Array:
    """x `[…, n]` with the numbers that its codes and scales have in a layout, in x's dtype; the gradient passes.

    n may be another than the layout's d. The last `plain` of them stay as they are, the others are a multiple of the
    layout's group.
    """
    how, batch, n = LAYOUTS[layout], x.shape[:-1], x.shape[-1] - plain
    values = how.decode_groups(*codes_of(x[..., :n], layout)).reshape(*batch, n).astype(x.dtype)
    return jnp.concatenate([values, x[..., n:]], -1) if plain else values


def codes_of(x: jax.Array, layout: str) -> Parts:
    """The codes and scales of x `[…, n]` in a layout, uint8, n a multiple of its group."""
    how, (*batch, n) = LAYOUTS[layout], x.shape
    codes, scales = how.encode_groups(_as_rounded(x).reshape(*batch, n // how.group, how.group))
    return codes.reshape(*batch, n * how.bits // 8), scales


def layout_of(op: str, name: Any) -> Layout:
    """The layout of that name.

    Raises:
      ValueError: there is none.
    """
    _check.one_of(op, "layout", name, tuple(LAYOUTS))
    return LAYOUTS[name]


def quantize_cache(entries: jax.Array, layout: str = V4_FP8) -> jax.Array:
    """Pages of packed entries.

    Args:
      entries: `[…, n, d]`, bfloat16, float16 or float32; d is 512, in "v32_fp8" 576, of index keys 128. A page has n
        entries.
      layout: "v4_fp8", DeepSeek-V4's: 584 bytes an entry, with the last 64 dimensions in bfloat16; "v4_fp4", its MXFP4
        form in SGLang: 368 bytes. "v41_fp8" and "v41_fp4", DeepSeek-V4.1's: 528 and 288 bytes. "v32_fp8",
        DeepSeek-V3.2's: 656 bytes, with the last 64 of 576 dimensions in bfloat16. "index_fp8" and "index_fp4", for the
        lightning indexer's keys: 132 and 68 bytes.

    Returns:
      uint8 `[…, page_bytes]`. NaN or inf among values that share a scale makes all of them NaN.

    Raises:
      ValueError, TypeError: entries or a layout that differ from the above.
      NotImplementedError: a derivative in the entries. So does whatever packs entries, such as `Cache.append`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import quantize_cache
      >>> quantize_cache(jnp.ones((3, 64, 512)), "v41_fp8").shape  # 3 pages of 64 entries
      (3, 33792)
    """
    how = layout_of("quantize_cache", layout)

    def fits(x: jax.Array) -> bool:
        return x.dtype in _check.FLOAT and x.ndim >= 2 and x.shape[-2] >= 1 and x.shape[-1] == how.d

    wanted = f"bfloat16, float16 or float32[..., n, {how.d}], n >= 1"
    entries = _check.array("quantize_cache", "entries", entries, wanted, fits)
    *batch, n, _ = entries.shape
    entries = explicit_axes.whole(entries, len(batch), len(batch) + 1)  # of a page
    parts = [x.reshape(*batch, n * x.shape[-1]) for x in how.encode(entries)]
    if how.multiple > 1:
        parts.append(jnp.zeros_like(parts[0][..., : how.page_bytes(n) - n * how.entry]))
    return jnp.concatenate(parts, -1)


def dequantize_cache(pages: jax.Array, layout: str = V4_FP8) -> jax.Array:
    """Unpacks pages, uint8 `[…, page_bytes]`, into bfloat16 entries `[…, n, d]`, exactly; it does not read padding.

    "v32_fp8" rounds to bfloat16, and "index_fp8" gives float32, rounded.

    Args:
      layout: as in `quantize_cache`.

    Raises:
      ValueError, TypeError: pages or a layout that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import dequantize_cache, quantize_cache
      >>> pages = quantize_cache(jnp.ones((3, 64, 512)), "v41_fp8")
      >>> dequantize_cache(pages, "v41_fp8").shape
      (3, 64, 512)
    """
    how = layout_of("dequantize_cache", layout)

    def fits(x: jax.Array) -> bool:
        return x.dtype == jnp.uint8 and x.ndim >= 1 and how.is_page(x.shape[-1])

    wanted = f"uint8[..., {how.page_rule}], n >= 1"
    pages = _check.array("dequantize_cache", "pages", pages, wanted, fits)
    *batch, size = pages.shape
    pages = explicit_axes.whole(pages, len(batch))
    n = how.page_entries(size)
    parts = _cut(pages, tuple(n * width for width in how.parts))
    return how.decode(*(x.reshape(*batch, n, width) for x, width in zip(parts, how.parts, strict=True)))
