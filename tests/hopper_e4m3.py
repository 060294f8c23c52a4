"""Computes in `jnp` what `mla_fwd_e4m3_sm90` does: sums as Hopper's tensor cores make them, its tiles and references.

**A product of e4m3** (`wgmma` of k 32) adds 32 products of codes, and what the accumulator holds, at once. All 33
numbers are cut, toward zero, to multiples of u = 2**(E - 13), where E is the greatest of their exponents; of a product
it is the sum of both codes' exponents, which are -6 at least. Then the numbers are added exactly, and the sum is cut to
14 significant bits. A product of two codes has 8 bits, so only one below 2**(E - 5) may lose some. `in_place` is that,
to the bit: of 20480 sums of 512 products that an H100 made, of numbers of ten kinds, it gives every one
(tests/data/hopper_e4m3.npz has 320). With another width, number of products at once or exponent of a product, or
rounded down, fewer are right. `lost_at_most` follows: for normal numbers sums are up to a fifth of it off, since cuts
of positive and negative numbers cancel.

**The bound** of a kernel's o and lse follows. Sums are what they are here, and what is left is the rounding of float32
and `ex2.approx`, `lg2.approx` and `rcp.approx`. For lse that is the bound of kernels by bfloat16. A weight is off by
2**-22 for its exponential, and by half a unit in the last place of its logit and of its reference. It is multiplied
with the unit of its key, a power of two; the reference is of such products. Before it is rounded
to e4m3 that is nothing, unless a tie is so near. Then the weight may be a step, an eighth at most, to the other side.
So `numbers` gives an interval for each number of o, which is wide only where there is such a weight, and the kernel's o
is an end of it, rounded, or between them.

Products of RoPE in bfloat16 are added to these sums 16 at a time. How many bits they keep is not known. A logit may be
off by what four such products cut at most with 23 bits after the leading one; where that is more than a weight's
rounding, nothing is shown. The sum of weights is off by as much of each weight, and o with it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from interpreter.kernels import attention
from jax_dsv4_fmha._definitions.e4m3 import ROPE
from jax_dsv4_fmha._testing.compare import KERNEL
from kernels.abi import UNIT_BYTES, name_of
from tests import helpers

BITS = 13  # after the leading one, of what is added at once
DEPTH = 32  # products of codes that are added at once
LEAST = -6  # exponent of a code: those below it have fewer bits
TILE = 64  # keys
HEAD, LIMIT = 5, 8.5  # a reference is so far below a row's maximum; it is set anew when one is so far above it
LOG2_E = 1.4426950408889634
NEVER = -(2**20)  # an exponent of nothing
LOST_OF_ROPE = 4 * (16 + 2) * 2.0**-23  # of the greatest number: four products of k 16, each of which cuts 18 numbers

Sums = Callable[[jax.Array, jax.Array], jax.Array]
"""The products a b' [.., m, n] of codes a [.., m, k] and b [.., n, k], in float32"""
Added = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""c + a b' of sums c, and of RoPE's numbers a and b in bfloat16"""


def in_place(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums of products of 32 numbers of each, one after the other into the same accumulator."""
    return _in_place(a, b)[0]


def lost_at_most(a: jax.Array, b: jax.Array) -> jax.Array:
    """Bounds how far `in_place` is from exact sums: u for each number that a product cuts, and for its sum's cut."""
    return _in_place(a, b)[1]


def _in_place(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    def product(before: Any, ab: Any) -> tuple[Any, None]:
        (c, lost), x, y = before, ab[0][..., :, None, :], ab[1][..., None, :, :]
        terms, exponents = x * y, jnp.maximum(_exponent(x), LEAST) + jnp.maximum(_exponent(y), LEAST)
        greatest = jnp.max(jnp.where(terms != 0, exponents, NEVER), -1)
        greatest = jnp.maximum(greatest, jnp.where(c != 0, _exponent(c), NEVER))
        per_unit = _power(BITS - greatest)
        in_units, c_in_units = terms * per_unit[..., None], c * per_unit
        whole, c_whole = jnp.trunc(in_units), jnp.trunc(c_in_units)
        units = jnp.sum(whole, -1) + c_whole  # below 2**24, so exact
        cut = jnp.sum(whole != in_units, -1) + (c_whole != c_in_units) + jnp.abs(units - _cut(units))
        return (_cut(units) * _power(greatest - BITS), lost + cut * _power(greatest - BITS)), None

    parts = [jnp.moveaxis(x.reshape(*x.shape[:-1], -1, DEPTH), -2, 0) for x in (a, b)]
    nothing = jnp.zeros((*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2]), jnp.float32)
    return jax.lax.scan(product, (nothing, nothing), parts)[0]


def in_float32(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum("...mk,...nk->...mn", a, b, precision=jax.lax.Precision.HIGHEST)


def in_float32_after(c: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return c + in_float32(a, b)


def cut_after(c: jax.Array, a: jax.Array, b: jax.Array, bits: int) -> jax.Array:
    """c + a b' by products of 16 numbers, each of which cuts these and c toward zero, to so many bits after the leading
    one of the greatest, and adds them exactly: by float64, for which JAX must have 64 bits.
    """
    terms = a[..., :, None, :] * b[..., None, :, :]
    for first in range(0, ROPE, 16):
        part = jnp.concatenate([terms[..., first : first + 16], c[..., None]], -1).astype(jnp.float64)
        per_unit = jnp.exp2(bits - jnp.floor(jnp.log2(jnp.max(jnp.abs(part), -1, keepdims=True))))
        c = (jnp.trunc(part * per_unit) / per_unit).sum(-1).astype(jnp.float32)
    return c


def _cut(x: jax.Array) -> jax.Array:
    """x with 14 significant bits, toward zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFFFFF << (23 - BITS) & 0xFFFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _exponent(x: jax.Array) -> jax.Array:
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23 & 255) - 127


def _power(n: jax.Array) -> jax.Array:
    """2**n, as a float32 that is not subnormal."""
    return jax.lax.bitcast_convert_type((jnp.clip(n, -126, 127) + 127) << 23, jnp.float32)


# ---- the kernel


class Listed(NamedTuple):
    """Keys, and of each query the list of those that it sees, in the order in which the kernel takes them."""

    codes: jax.Array  # float8_e4m3fn [b, n, d + 16], or [b, n, d + 2 ROPE + 16], as `_host/key_codes.py` says
    entries: jax.Array  # int32 [b, s_q, m], below 0 where a place of the list names no key

    @staticmethod
    def of_span(codes: jax.Array, start: jax.Array, stop: jax.Array) -> "Listed":
        n = codes.shape[1]
        entries = jnp.maximum(start, 0)[..., None] + jnp.arange(n, dtype=jnp.int32)
        return Listed(codes, jnp.where(entries < jnp.minimum(stop, n)[..., None], entries, -1))

    @staticmethod
    def of_list(codes: jax.Array, indices: jax.Array, length: jax.Array) -> "Listed":
        there = (indices >= 0) & (indices < codes.shape[1]) & (jnp.arange(indices.shape[2]) < length[..., None])
        return Listed(codes, jnp.where(there, indices, -1))

    def tiles(self) -> tuple[jax.Array, jax.Array]:
        """[tiles, b, s_q, 64, codes], zeros where a key is absent, and which are there."""
        b, s_q, m = self.entries.shape
        entries = jnp.pad(self.entries, ((0, 0), (0, 0), (0, -m % TILE)), constant_values=-1)
        entries = jnp.moveaxis(entries.reshape(b, s_q, -1, TILE), 2, 0)
        keys = jax.vmap(lambda codes, at: codes[at], (0, 1), 1)(self.codes, jnp.maximum(entries, 0))
        there = entries >= 0
        return jnp.where(there[..., None], keys, jnp.zeros_like(keys)), there


class Numbers(NamedTuple):
    o: jax.Array  # float32 [b, s_q, h, d]
    lse: jax.Array  # [b, s_q, h]
    slack: jax.Array  # like o: half of the interval, before o is rounded


def numbers(
    q: jax.Array,
    sources: Sequence[Listed],
    sink: jax.Array,
    scale: float,
    sums: Sums = in_place,
    added: Added = in_float32_after,
) -> Numbers:
    """o and lse as the kernel has them; added: how products of RoPE are added to sums.

    Where a weight may fall to either side, sums of its tile may be cut elsewhere too: `slack` has what two products
    cut at most then; and what the sum of weights and the factor 1 / sum are off.
    """
    x = q.astype(jnp.float32)
    unit_of_q = _power(jnp.maximum(_exponent(jnp.max(jnp.abs(x), -1)), -119) - 7)  # [b, s_q, h]
    in_units = x / unit_of_q[..., None]
    codes_of_q = _rounded(in_units)
    of_row, d = unit_of_q * jnp.float32(scale * LOG2_E), q.shape[-1]

    def tile(before: Any, tile: Any) -> tuple[Any, None]:
        (ref, total, wrong, out, slack), (keys, there) = before, tile
        codes, rope, units = keys[..., :d].astype(jnp.float32), _bfloat16(keys[..., d:-UNIT_BYTES]), units_of(keys)
        units = jnp.where(there, units, 1)[:, :, None]
        there, values = there[:, :, None], jnp.swapaxes(codes, -1, -2)
        if not rope.size:
            scores, unsure = sums(codes_of_q, codes), jnp.float32(0)
        else:  # products of bfloat16 come last
            q_rope, scores = in_units[..., -ROPE:], sums(codes_of_q[..., :-ROPE], codes[..., :-ROPE])
            greatest = jnp.max(jnp.abs(q_rope), -1)[..., None] * jnp.max(jnp.abs(rope), -1)[:, :, None]
            unsure = LOST_OF_ROPE * jnp.maximum(greatest, jnp.abs(scores)) * units * of_row[..., None]
            scores = added(scores, q_rope, rope)
        logits = jnp.where(there, scores * units * of_row[..., None], -jnp.inf)
        top = jnp.max(logits + _exponent(units), -1)
        after = jnp.where(top > ref + LIMIT, jnp.round(top) - HEAD, ref)
        factor, weights = jnp.exp2(ref - after), jnp.exp2(logits - after[..., None])
        off = jnp.where(there, 2.0**-22 + 2.0**-24 * (jnp.abs(logits) + jnp.abs(after)[..., None]) + unsure, 0)
        given = weights * units
        p, step = _rounded(given), _rounded(given * (1 + off)) - _rounded(given * (1 - off))
        cut = jnp.where(jnp.any(step > 0, -1, keepdims=True), 4 * (DEPTH + 2) * 2.0**-BITS, 2.0**-20)
        out = out * factor[..., None] + sums(p, values)
        slack = slack * factor[..., None] + in_float32(step + cut * p, jnp.abs(values))
        wrong = wrong * factor + jnp.sum(weights * off, -1)
        return (after, total * factor + jnp.sum(weights, -1), wrong, out, slack), None

    tiles = [jnp.concatenate(xs) for xs in zip(*(source.tiles() for source in sources), strict=True)]
    nothing = jnp.full(of_row.shape, -1e30), *(jnp.zeros(x.shape) for x in (of_row, of_row, q, q))
    (ref, total, wrong, out, slack), _ = jax.lax.scan(tile, nothing, tuple(tiles))
    whole = total + jnp.exp2((sink - ref / LOG2_E) * LOG2_E)
    last = jnp.where(total > 0, 1 / whole, 0)[..., None]
    slack = slack + jnp.abs(out) * (2.0**-22 + wrong / whole)[..., None]
    return Numbers(out * last, jnp.where(total > 0, (jnp.log2(total) + ref) / LOG2_E, -jnp.inf), slack * last)


def units_of(keys: jax.Array) -> jax.Array:
    """The units of keys `[…, row]`, float32 `[…]`."""
    return _bfloat16(keys[..., -UNIT_BYTES:])[..., 0]


def _bfloat16(x: jax.Array) -> jax.Array:
    """Numbers of two bytes each, in float32."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)


def _rounded(x: jax.Array) -> jax.Array:
    """x as e4m3 has it, in float32; beyond 448 it is 448. XLA would leave out a conversion there and back."""
    codes = jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn)
    return jax.lax.optimization_barrier(codes).astype(jnp.float32)


def csa_fwd_e4m3(
    q: Any, near: Any, start: Any, stop: Any, far: Any, indices: Any, length: Any, sink: Any, **how: Any
) -> Numbers:
    """Takes the operands of the kernel's call (`jax_dsv4_fmha/_host/attention.py`)."""
    return numbers(q, (Listed.of_span(near, start, stop), Listed.of_list(far, indices, length)), sink, **how)


def hca_fwd_e4m3(
    q: Any, near: Any, start: Any, stop: Any, far: Any, start2: Any, stop2: Any, sink: Any, **how: Any
) -> Numbers:
    return numbers(q, (Listed.of_span(near, start, stop), Listed.of_span(far, start2, stop2)), sink, **how)


OF_OP = {f"{f.__name__}{rope}": f for f in (csa_fwd_e4m3, hca_fwd_e4m3) for rope in ("", "_bf16_rope")}


# ---- whether a GPU is right


def assert_within(got: Any, made: Numbers) -> None:
    """Every number of o, and lse by the bound of kernels by bfloat16."""
    o, lse = got
    low, high = ((made.o + x * made.slack).astype(o.dtype) for x in (-1, 1))
    outside = (o < low) | (o > high) | jnp.isnan(o)
    assert not outside.any(), f"{outside.sum()} of {o.size}"
    helpers.assert_right((lse,), (made.lse,), {"lse": KERNEL["lse"]})


def assert_right(got: Any, x: attention.Operands, scale: float) -> None:
    """Judges what a GPU answers: by its sums where products are of e4m3, and otherwise by `attention.assert_right`."""
    if not x.mode.is_e4m3:
        attention.assert_right(got, x, scale)
    else:
        assert_within(map(jnp.asarray, got), of_operands(x, scale))


def of_operands(x: attention.Operands, scale: float, **how: Sums | Added) -> Numbers:
    run = functools.partial(OF_OP[name_of(x.op, x.mode)], scale=scale, **how)
    return jax.jit(run)(*map(jnp.asarray, x.arguments()))
