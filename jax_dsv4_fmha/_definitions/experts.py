"""Matrices of experts in MXFP4 or FP8, laid out for products, and what a layer's experts compute with any."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check
from . import slabs
from .pytree import public_pytree
from .slabs import BLOCK, SLAB, TILE, in_tiles

Array = jax.Array
STATIC = {"static": True}

GROUP = 32
"""numbers of a row in MXFP4 that share a scale"""
CODES, SLAB_BYTES = 2048, 2176
"""bytes of a slab of a tile in MXFP4: its codes, then also its scales"""
BYTES = SLAB_BYTES, slabs.SLAB_BYTES
"""those of a slab in either format"""
UNIT = 256
"""rows and columns of a matrix that is packed are multiples of it"""
MXFP4, E4M3 = "mxfp4", "e4m3"
"""what packed matrices are in, as kernels name it"""
FIELDS = ((6, 15), (3, 12), (0, 14), (9, 13))
"""where in either half of a word the bits of a code are, of each of four: e e m from here on, and the sign"""
GREATEST_SCALE = 128
"""the code of the greatest power of two, 2, by which a number of MXFP4 becomes bfloat16 without a factor"""


@public_pytree
@dataclass(frozen=True)
class PackedExperts:
    """The matrices of a layer's experts in MXFP4 or FP8, as `fused_moe` takes them; `pack_experts` makes them.

    Attributes:
      data: uint8 `[e, rows / 64, columns / 64, 2176]`, in FP8 `[…, 4112]`: in tiles of 64 rows and slabs of 64 columns,
        codes and scales.
      factor: float32 `[e]`, that an expert's matrix is multiplied by: a power of two.
      gated: whether rows are pairs of a gate and what it lets through.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import pack_experts
      >>> w = pack_experts(jnp.full((4, 2, 256, 128), 0x22, jnp.uint8), jnp.full((4, 2, 256, 8), 127, jnp.uint8))
      >>> w.experts, w.rows, w.columns, w.gated, w.data.shape
      (4, 512, 256, True, (4, 8, 4, 2176))
    """

    data: Array
    factor: Array
    gated: bool = field(metadata=STATIC)

    @property
    def format(self) -> str:
        """ "mxfp4" or "e4m3"."""
        return E4M3 if self.data.shape[-1] == slabs.SLAB_BYTES else MXFP4

    @property
    def experts(self) -> int:
        """The number of experts whose matrices these are."""
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        """The channels that a product makes; of a gated matrix, gates and what they let through."""
        return self.data.shape[1] * TILE

    @property
    def columns(self) -> int:
        """The channels that a product takes."""
        return self.data.shape[2] * SLAB

    def unpacked(self, dtype: Any = jnp.float32) -> Array:
        """The matrices `[e, rows, columns]`, gated ones `[e, 2, rows / 2, columns]`: gates first."""
        x = slabs.unpacked(self.data) if self.format == E4M3 else _of_mxfp4(self.data)
        x = (x * self.factor.reshape(-1, 1, 1, 1, 1, 1)).astype(dtype)
        if self.gated:
            return x.transpose(0, 3, 1, 2, 4, 5).reshape(self.experts, 2, self.rows // 2, self.columns)
        return x.transpose(0, 1, 2, 4, 3, 5).reshape(self.experts, self.rows, self.columns)


def _of_mxfp4(data: Array) -> Array:
    """float32 `[e, tiles, 4, 2, 8, columns]`, as `in_tiles` has rows: what data in MXFP4 stand for."""
    e, tiles, n, _ = data.shape
    words = jax.lax.bitcast_convert_type(data[..., :CODES].reshape(e, tiles, n, *_WORDS, 4), jnp.uint32)
    codes = jnp.stack([_field(words, *field) for field in FIELDS], -2)  # e tile slab | warp g t step | j | half
    codes = codes.reshape(*codes.shape[:7], 2, 2, 2).transpose(0, 1, 3, 8, 4, 2, 6, 7, 5, 9)
    scales = data[..., CODES:].reshape(e, tiles, n, 4, 8, 2, 2).transpose(0, 1, 3, 5, 4, 2, 6)
    scales = jnp.where(scales == 255, jnp.nan, jnp.ldexp(jnp.float32(1), scales.astype(jnp.int32) - 253))
    x = _value_of(codes).reshape(e, tiles, 4, 2, 8, -1, GROUP) * scales.reshape(e, tiles, 4, 2, 8, -1, 1)
    return x.reshape(e, tiles, 4, 2, 8, n * SLAB)


_WORDS = (4, 8, 4, 4)  # of a slab: of each warp, row of 8, lane of a quad, and 16 of k


def _field(words: Array, low: int, sign: int) -> Array:
    """The codes at these bits of the halves of words, `[…, half]`."""
    halves = jnp.stack([words, words >> 16], -1)
    return (halves >> low & 7 | (halves >> sign & 1) << 3).astype(jnp.int32)


def _value_of(codes: Array) -> Array:
    """The numbers in float32 that codes of e2m1 stand for."""
    exponent, odd = codes >> 1 & 3, codes & 1
    size = jnp.where(exponent == 0, 2 * odd, (2 + odd) << exponent).astype(jnp.float32) / 4
    return jnp.where(codes >= 8, -size, size)


def pack_experts(codes: Array, scales: Array) -> PackedExperts:
    """Lays matrices of experts in MXFP4 or FP8 out for `fused_moe`: once, when a checkpoint is loaded.

    A number below 2^-133 of its expert's greatest scale counts as 0; all others are kept exactly, but for scales of FP8
    that are no powers of two: these are rounded to bfloat16, and so is a code times its scale. A code of FP8 that is
    not a number makes the 64 x 64 numbers around it NaN; of a gated matrix, 32 x 64 gates or what they let through.

    Args:
      codes: uint8 `[e, rows, columns / 2]`, two of e2m1, the first in the lower bits; or `[e, 2, rows, columns / 2]`
        for gated products, gates first. In FP8 float8_e4m3fn `[…, columns]`. e is at most 1024, rows and columns are
        multiples of 256.
      scales: powers of two, float8_e8m0fnu or uint8 with its bits: for 32 numbers of a row, `[…, columns / 32]`; in FP8
        for each block of 128 x 128, `[…, rows / 128, columns / 128]`, also any numbers above 0 in float32 or bfloat16;
        one below 2^-126 counts as 0.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import pack_experts
      >>> codes, scales = jnp.full((4, 256, 128), 0x22, jnp.uint8), jnp.full((4, 256, 8), 127, jnp.uint8)
      >>> pack_experts(codes, scales).unpacked()[0, 0, :3].tolist()
      [1.0, 1.0, 1.0]
      >>> codes, scales = jnp.ones((4, 256, 256), jnp.float8_e4m3fn), jnp.full((4, 2, 2), 0.5)
      >>> pack_experts(codes, scales).unpacked()[0, 0, :3].tolist()
      [0.5, 0.5, 0.5]
    """
    op, dims = "pack_experts", {}
    gated = getattr(codes, "ndim", 3) == 4
    in_fp8 = getattr(codes, "dtype", None) == jnp.float8_e4m3fn
    axes = "e gates rows " if gated else "e rows "
    if gated:
        dims["gates"] = 2
    accepted = (jnp.dtype("uint8"), jnp.dtype("float8_e4m3fn"))
    codes = _check.operand(op, "codes", codes, axes + ("columns" if in_fp8 else "bytes"), dims, accepted)
    rows, columns = dims["rows"], dims["columns"] if in_fp8 else 2 * dims["bytes"]
    for name, n in (("rows", rows), ("columns", columns)):
        if n % UNIT or n == 0:
            raise _check.error(ValueError, op, "codes", codes, f"{name} in multiples of {UNIT}")
    if in_fp8:
        dims |= {"row_blocks": rows // BLOCK, "column_blocks": columns // BLOCK}
        axes = axes.replace("rows", "row_blocks column_blocks")
        scales = _check.operand(op, "scales", scales, axes, dims, slabs.SCALES)
        if scales.dtype not in slabs.POWERS:
            slabs.check_scales(op, scales, float(jnp.finfo(jnp.float32).max))
        codes, scales = jax.lax.bitcast_convert_type(codes, jnp.uint8), slabs.kept(scales)
    else:
        dims["groups"] = columns // GROUP
        scales = slabs.codes_of(_check.operand(op, "scales", scales, axes + "groups", dims, slabs.POWERS))
    data, factor = _packed(codes, scales, gated=gated, in_fp8=in_fp8)
    return PackedExperts(data, factor, gated)


@functools.partial(jax.jit, static_argnames=("gated", "in_fp8"))
def _packed(codes: Array, scales: Array, gated: bool, in_fp8: bool) -> tuple[Array, Array]:
    """Expert by expert, so that what is between takes no more memory than one of them."""
    e, n = codes.shape[0], codes.shape[-1]
    pack = _packed_fp8 if in_fp8 else _packed_mxfp4

    def one(of_expert: tuple[Array, Array]) -> tuple[Array, Array]:
        return pack(*of_expert, gated)

    return jax.lax.map(one, (codes.reshape(e, -1, n), scales.reshape(e, -1, scales.shape[-1])))


def _packed_fp8(codes: Array, scales: Array, gated: bool) -> tuple[Array, Array]:
    """Codes `[rows, columns]` and scales `[rows / 128, columns / 128]` of an expert, gates before the rest."""
    exponents = scales >> 7
    above = jnp.maximum(jnp.where(exponents < 255, exponents, 0).max() - slabs.GREATEST_SCALE, 0)
    kept = jnp.where(exponents < 255, scales - (above << 7), scales)
    return slabs.packed(codes[None], kept[None], gated)[0], jnp.ldexp(jnp.float32(1), above)


def _packed_mxfp4(codes: Array, scales: Array, gated: bool) -> tuple[Array, Array]:
    columns = codes.shape[-1] * 2
    # tile warp upper g | slab step khi t: a byte has the two codes of a pair, in the halves of a word
    x = in_tiles(codes[None], gated).reshape(-1, 4, 2, 8, columns // SLAB, 4, 2, 4)
    x = x.transpose(0, 4, 1, 3, 7, 5, 6, 2).reshape(-1, columns // SLAB, *_WORDS, 4).astype(jnp.uint32)
    words = jnp.zeros(x.shape[:-1], jnp.uint32)
    for j, (low, sign) in enumerate(FIELDS):
        for half in (0, 1):
            code = x[..., j] >> 4 * half & 15
            words |= ((code & 7) << low | code >> 3 << sign) << 16 * half
    of_codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:2], CODES)
    # a scale is kept as the exponent of 2^126 times it: raw numbers are 2^-126 of what they stand for
    greatest = scales.max().astype(jnp.int32)
    above = jnp.where(greatest == 255, 0, jnp.maximum(greatest - GREATEST_SCALE, 0))
    kept = jnp.clip(scales.astype(jnp.int32) + 126 - above, 0, 254)
    kept = jnp.where(scales == 255, 255, kept).astype(jnp.uint8)
    s = in_tiles(kept[None], gated).reshape(-1, 4, 2, 8, columns // SLAB, 2).transpose(0, 4, 1, 3, 2, 5)
    data = jnp.concatenate([of_codes, s.reshape(*of_codes.shape[:2], SLAB_BYTES - CODES)], -1)
    return data, jnp.ldexp(jnp.float32(1), above)


Experts = PackedExperts | Array
"""The matrices of a layer's experts: packed, or `[e, rows, columns]`, gated ones `[e, 2, rows, columns]`"""


def of_experts(x: Array, w13: Experts, w2: Experts, chosen: Array, weights: Array, *, limit: float) -> Array:
    """Sums the results of the experts that tokens x `[b, s, k]` chose, expert by expert, in float32. An expert reaches
    no token that did not choose it, not even as NaN, nor does it in a gradient. That of an expert's matrices is 0 where
    nobody chose it.
    """
    tokens = x.astype(jnp.float32)
    e = jax.tree.leaves(w13)[0].shape[0]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # a gradient keeps no matrices in float32
    def add(y: Array, of_expert: tuple[Array, Experts, Experts]) -> tuple[Array, None]:
        i, w13, w2 = of_expert
        mine = (chosen == i).any(-1)
        made = jnp.einsum("gnk,bsk->gnbs", _in_float32(w13), jnp.where(mine[..., None], tokens, 0))
        gate, up = jnp.where(mine, made, 0)
        weight = jnp.sum(jnp.where(chosen == i, weights, 0), -1)
        inner = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit) * weight
        inner = inner.astype(x.dtype).astype(jnp.float32)
        return y + jnp.where(mine[..., None], jnp.einsum("kn,nbs->bsk", _in_float32(w2), inner), 0), None

    y, _ = jax.lax.scan(add, jnp.zeros_like(tokens), (jnp.arange(e), w13, w2))
    return y.astype(x.dtype)


def _in_float32(w: Experts) -> Array:
    """The matrix of one expert, of arrays without the axis of experts."""
    if isinstance(w, PackedExperts):
        return PackedExperts(w.data[None], w.factor[None], w.gated).unpacked()[0]
    return w.astype(jnp.float32)
