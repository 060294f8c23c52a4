"""Operands of the backward kernels in NumPy, and in float64 what they should answer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_dsv4_fmha._host import gradients as raw
from kernels.abi import Forward, MlaBackward
from kernels.variants import VARIANTS

from ..machine.state import Array
from . import native
from .attention import Keys, answer, any_query, normed, turned
from .attention import Operands as Attention
from .attention import operands as operands_of_attention

FUNCTIONS = {
    v.name: functools.partial(raw.mla_bwd, v.op, native.raw_mode(v), eps=native.EPS if v.turns else None)
    for v in VARIANTS
    if isinstance(v, MlaBackward) and not v.bounds
}
"""The raw calls of gradients, by the names of their targets"""


@dataclass(frozen=True)
class Operands:
    """Attention, a cotangent of o, and what belongs to a row: float32 `[b, s_q, h_q]`."""

    attention: Attention
    do: Array
    lse: Array
    sink_factor: Array
    delta: Array

    def arguments(self) -> tuple[Array | None, ...]:
        """The arguments as the raw call of the op takes them."""
        a = self.attention
        has_key_heads = a.op == "mla_span_bwd"
        if a.op in ("mha_fwd", "mla_span_fwd"):
            (x,) = a.sources
            values = None if x.v is x.k else x.v
            return a.q, self.do, self.lse, self.sink_factor, self.delta, x.k, values, x.seen_from, x.seen_to
        keys = ((x.k if has_key_heads else x.k[:, :, 0], x.seen_from, x.seen_to) for x in a.sources)
        table = () if a.table is None else (a.table,)
        return a.q, self.given_do, self.lse, self.sink_factor, self.delta, *(x for y in keys for x in y), *table

    @property
    def given_do(self) -> Array:
        """do as the kernel takes it: in groups of heads where it turns q."""
        if self.attention.table is None:
            return self.do
        b, s_q, h_q, d = self.do.shape
        heads = native.group_heads(h_q)
        return np.ascontiguousarray(self.do.reshape(b, s_q, h_q // heads, heads, d).transpose(2, 0, 1, 3, 4))


def operands(variant: MlaBackward | Forward, *, width: int | None = 90, **extents: int) -> Operands:
    """Those of `attention.operands`, with cotangents of o and of lse; NaN where no key is seen."""
    return of_attention(operands_of_attention(variant, width=width, **extents), variant.d**-0.5)


def of_attention(a: Attention, scale: float) -> Operands:
    rng = np.random.default_rng(1)
    o, lse = answer(a, scale)
    do, dlse = (np.asarray(rng.standard_normal(like.shape)) for like in (o, lse))
    do = do.astype(a.q.dtype)
    with np.errstate(invalid="ignore"):  # no key, and no sink either
        sink_factor = np.exp(lse - np.logaddexp(lse, a.sink.astype(np.float64)))
    delta = sink_factor * np.sum(o * do.astype(np.float64), -1) - dlse
    nothing = np.isneginf(lse)
    q = a.q.copy()
    for array in (q, do, sink_factor, delta):
        array[nothing] = np.nan
    return Operands(replace(a, q=q), do, *(x.astype(np.float32) for x in (lse, sink_factor, delta)))


def gradient(x: Operands, scale: float) -> tuple[Array, ...]:
    """dq, and for every source dkv like its keys, or dk and dv of the only one, in float64, from how often each query
    sees each key."""
    return _gradient(x, scale)[0]


def _gradient(x: Operands, scale: float) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The same, and for each element the root of the sum of the squares that its terms are."""
    a = x.attention
    if a.table is not None:
        return _through_norm_and_rope(x, scale)
    b, s_q, _, d = a.q.shape
    p, ds, q, do, k = _products(x, scale)
    h_kv = k.shape[1]

    def split(dq: Array, dk: Array, dv: Array) -> tuple[Array, ...]:
        dq = dq.reshape(b, h_kv, s_q, -1, d).swapaxes(1, 2).reshape(a.q.shape)
        if a.has_separate_values:
            return dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2)
        dk[..., : dv.shape[-1]] += dv
        return dq, *of_sources(a, dk)

    with np.errstate(under="ignore"):
        squares = (
            np.square(ds) @ np.square(k),
            transposed(np.square(ds)) @ np.square(q),
            transposed(np.square(p)) @ np.square(do),
        )
    return split(ds @ k, transposed(ds) @ q, transposed(p) @ do), tuple(map(np.sqrt, split(*squares)))


def _products(x: Operands, scale: float) -> tuple[Array, ...]:
    """P times the sink's factor, dS, q, do and the keys, [b, h_kv, rows or keys, ...]."""
    a = x.attention
    b, s_q, h_q, _ = a.q.shape
    counts = np.concatenate([keys.counts for keys in a.sources], axis=-1)
    seen = any_query(counts)[..., None, None]
    h_kv, sees = a.sources[0].k.shape[2], counts.any(-1)
    k, v = (  # [b, h_kv, s_kv, d]
        np.where(seen, np.concatenate([getattr(x, name) for x in a.sources], axis=1), 0)
        .astype(np.float64)
        .transpose(0, 2, 1, 3)
        for name in ("k", "v")
    )

    def rows(y: Array) -> Array:  # [b, h_kv, s_q * group, n or 1]
        y = np.where(sees.reshape(b, s_q, *[1] * (y.ndim - 2)), y, 0).astype(np.float64)
        width = y.shape[3] if y.ndim == 4 else 1
        return y.reshape(b, s_q, h_kv, -1, width).swapaxes(1, 2).reshape(b, h_kv, -1, width)

    q, do, lse, sink_factor, delta = map(rows, (a.q, x.do, x.lse, x.sink_factor, x.delta))
    often = np.repeat(counts[:, None], h_q // h_kv, axis=2).reshape(b, 1, -1, counts.shape[-1])
    p = often * np.exp(np.where(often > 0, scale * q @ k.swapaxes(-1, -2) - lse, -np.inf))
    ds = scale * p * (sink_factor * (do @ v.swapaxes(-1, -2)) - delta)
    return sink_factor * p, ds, q, do, k


def bounds(x: Operands, scale: float) -> list[Array]:
    """Returns for every source [b, s_kv, h_kv, 1] what all rows add to any number of a key at most, in any order."""
    a = x.attention
    p, ds, q, do, _ = _products(x, scale)
    tops = (np.abs(y).max(-1, keepdims=True) for y in (q, do))
    of_q, of_p = (transposed(np.abs(y)) @ top for y, top in zip((ds, p), tops, strict=True))
    return of_sources(a, of_q + of_p)


def of_sources(a: Attention, x: Array) -> list[Array]:
    """An array of all keys, [b, h_kv, s_kv, n], as each source has its own."""
    ends = np.cumsum([keys.k.shape[1] for keys in a.sources])[:-1]
    return np.split(x.swapaxes(1, 2), ends, axis=1)


def _through_norm_and_rope(x: Operands, scale: float) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """`_gradient` where q and do are turned, which rounds them, and q is normed; dq is of q before."""
    a = x.attention
    assert a.table is not None
    sees = np.asarray(np.concatenate([keys.counts for keys in a.sources], axis=-1).any(-1))[..., None, None]
    q, do = (np.where(sees, y, 0).astype(y.dtype) for y in (a.q, x.do))
    rotated, back = turned(q, a.table), a.table * np.resize([1, -1], a.table.shape[-1])
    y = normed(rotated, q, native.EPS)
    inner = replace(x, attention=replace(a, q=y, table=None), do=turned(do, a.table))
    (dy, *of_keys), (noise, *noise_of_keys) = _gradient(inner, scale)
    r = 1 / np.sqrt(np.mean(np.square(q.astype(np.float64)), -1, keepdims=True) + native.EPS)
    dq = turned(r * (dy - y * np.mean(y * dy, -1, keepdims=True)), back)
    of_norm = np.abs(y) * np.sqrt(np.sum(np.square(y * noise), -1, keepdims=True)) / a.shape.d
    noise = np.square(r) * (np.square(noise) + np.square(of_norm))
    pairs = np.square(a.table.astype(np.float64)).reshape(*a.table.shape[:2], 1, -1, 2)
    last = noise[..., -a.table.shape[-1] :].reshape(*noise.shape[:-1], -1, 2)
    mixed = last * pairs[..., :1] + last[..., ::-1] * pairs[..., 1:]
    noise = np.concatenate([noise[..., : -a.table.shape[-1]], mixed.reshape(*noise.shape[:-1], -1)], -1)
    return (dq, *of_keys), (np.sqrt(noise), *noise_of_keys)


def without_norm(x: Operands) -> Array:
    """dq where a row's scale does not depend on the row: the error of a kernel that forgets this part."""
    a, scale = x.attention, x.attention.shape.d**-0.5
    assert a.table is not None
    q = np.where(np.isnan(a.q), 0, a.q).astype(a.q.dtype)
    y = normed(turned(q, a.table), q, native.EPS)
    inner = replace(x, attention=replace(a, q=y, table=None), do=turned(x.do, a.table))
    r = 1 / np.sqrt(np.mean(np.square(q.astype(np.float64)), -1, keepdims=True) + native.EPS)
    return turned(r * gradient(inner, scale)[0], a.table * np.resize([1, -1], a.table.shape[-1]))


def row_of(x: Operands, row: tuple[int, ...]) -> Operands:
    """A row (batch entry, query, head of q) alone."""
    b, query, head = row
    a = x.attention
    of_keys = head // (a.shape.h_q // a.shape.h_kv)
    sources = []
    for keys in a.sources:
        k, v = (y[b : b + 1, :, of_keys : of_keys + 1] for y in (keys.k, keys.v))
        seen_from, seen_to, counts = (
            y[b : b + 1, query : query + 1] for y in (keys.seen_from, keys.seen_to, keys.counts)
        )
        sources.append(Keys(k, k if keys.v is keys.k else v, seen_from, seen_to, counts))
    at = (slice(b, b + 1), slice(query, query + 1), slice(head, head + 1))
    shape = a.shape._replace(b=1, s_q=1, h_q=1, h_kv=1)
    table = None if a.table is None else a.table[at[:2]]
    alone = Attention(a.op, shape, a.q[at], tuple(sources), a.sink[at[2]], table, mode=a.mode)
    return Operands(alone, *(y[at].copy() for y in (x.do, x.lse, x.sink_factor, x.delta)))


def transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def wrong(got: Sequence[Array], x: Operands, scale: float) -> list[tuple[str, Array, Array, Array]]:
    """Returns for every result (its name, its error, the result, the expected one), in float64.

    P and dS are rounded to q's dtype before they are multiplied, and dq is rounded in the end: each term of a sum
    is off by half a unit in its last place at most, by chance this way or that. Three times what they come to is
    allowed.
    """
    unit, least = {"bfloat16": (2.0**-8, 1e-30), "float16": (2.0**-11, 2.0**-25)}[x.attention.q.dtype.name]
    results, (wanted, terms) = [], _gradient(x, scale)
    separate = x.attention.has_separate_values
    names = ("dq", "dk", "dv") if separate else ("dq", *(f"dkv{i}" for i in range(len(wanted) - 1)))
    for name, g, want, noise in zip(names, got, wanted, terms, strict=True):
        rounded = g.dtype == x.attention.q.dtype
        g = g.astype(np.float64).reshape(want.shape)
        bound = 3 * unit * noise + 1.01 * unit * np.abs(want) * rounded
        bound += (
            2e-6 * np.abs(want) + least * 64 + 1e-6 * noise
        )  # float32's own, and float16's below its normal numbers
        with np.errstate(invalid="ignore"):
            results.append((name, ~(np.abs(g - want) <= bound), g, want))
    return results


def assert_right(got: Sequence[Array], x: Operands, scale: float) -> None:
    for name, bad, g, want in wrong(got, x, scale):
        first = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else ()
        assert not bad.any(), (
            f"{name}: {bad.sum()} of {bad.size} wrong, first at {first}: {g[first]}, not {want[first]}"
        )
        cos_diff = np.sum((g - want) ** 2) / max(np.sum(g**2 + want**2), 1e-300)
        assert cos_diff < 1e-5, (name, cos_diff)
