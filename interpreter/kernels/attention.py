"""Operands of attention in NumPy, with everything that has gone wrong before, and the right answers in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_dsv4_fmha._definitions.e4m3 import ROPE
from jax_dsv4_fmha._testing.compare import compare
from kernels.abi import PLAIN, UNIT_BYTES, Forward, MlaBackward, Mode
from kernels.packings import PACKED
from kernels.params import PAGES, WINDOWS

from ..machine.state import Array
from . import native
from .native import Shape


@dataclass(frozen=True)
class Keys:
    """One source of keys."""

    k: Array  # [b, s_kv, h_kv, d]
    v: Array  # is k where they are one array, or its first columns
    seen_from: Array  # start of a span, indices of a selection
    seen_to: Array  # stop of a span, length of a selection
    counts: Array  # [b, s_q, s_kv]: how often a query sees a key
    pool: Array | None = None  # packed keys [pages, bytes], with k as their values; indices are then places in it
    codes: Array | None = None  # of e4m3 [b, s_kv, row], as `as_codes` makes them, with v as what they mean
    units: Array | None = None  # [b, s_kv]: of these codes
    paged: Paged | None = None  # the same keys and values in pages

    @property
    def given(self) -> Array:
        """The array that a kernel gets as k."""
        pages = None if self.paged is None else self.paged.k
        return next(x for x in (self.codes, self.pool, pages, self.k) if x is not None)


@dataclass(frozen=True)
class Paged:
    """Keys and values [pages, page, h_kv, d], and which pages a sequence has: int32 [b, width]."""

    k: Array
    v: Array
    k_pages: Array
    v_pages: Array
    scales: Array | None = None  # of codes of e4m3: float32 [b, h_kv, 2], of K and of V


@dataclass(frozen=True)
class Operands:
    op: str
    shape: Shape
    q: Array
    sources: tuple[Keys, ...]
    sink: Array
    table: Array | None = None  # [b, s_q, 64]: cos and sin by turns, where the kernel norms and turns q
    mode: Mode = PLAIN

    @property
    def d_v(self) -> int:
        """Columns of o."""
        return int(self.sources[0].v.shape[-1])

    @property
    def has_separate_values(self) -> bool:
        """True if keys and values are two arrays."""
        return self.mode.d_v == 0 and self.sources[0].k is not self.sources[0].v

    def named(self) -> dict[str, Array]:
        """Returns the arrays that a launch is handed, by the names of their addresses."""
        found = {"q": self.q, "sink": self.sink} | ({} if self.table is None else {"table": self.table})
        for i, keys in enumerate(self.sources):
            values = keys.v if self.mode.d_v == 0 else keys.k  # a kernel finds them there
            found |= {f"k{i}": keys.given, f"v{i}": values, f"from{i}": keys.seen_from, f"to{i}": keys.seen_to}
            if (x := keys.paged) is not None:
                found |= {f"v{i}": x.v, f"k_pages{i}": x.k_pages, f"v_pages{i}": x.v_pages}
                found |= {} if x.scales is None else {f"scales{i}": x.scales}
        return found

    def arguments(self) -> tuple[Array | None, ...]:
        """The arguments as the raw call of the op takes them."""
        table = () if self.table is None else (self.table,)
        if (pages := self.sources[0].paged) is not None:
            (x,) = self.sources
            scales = () if pages.scales is None else (pages.scales,)
            tables = pages.k_pages, pages.v_pages, *scales
            return self.q, pages.k, pages.v, x.seen_from, x.seen_to, *tables, self.sink
        if self.op in ("mha_fwd", "mla_span_fwd") and not self.mode.order:
            (x,) = self.sources
            keys_and_values = (x.k, x.v) if self.op == "mha_fwd" else (x.k,)
            return self.q, *keys_and_values, x.seen_from, x.seen_to, self.sink, *table
        keys = ((x.k[:, :, 0] if x.given is x.k else x.given, x.seen_from, x.seen_to) for x in self.sources)
        return self.q, *(x for source in keys for x in source), self.sink, *table


def values_of(k: Array, d_v: int) -> Array:
    """The values of keys that have them as their first columns, in the same memory."""
    return k if k.shape[-1] == d_v else k[..., :d_v]


def any_query(counts: Array) -> Array:
    """[b, s_kv]: whether any query sees a key."""
    return np.asarray(counts.any(1))


def operands(variant: Forward | MlaBackward, *, width: int | None = 90, seed: int = 0, **extents: int) -> Operands:
    """Operands of every kind for a variant: a query that sees nothing, absent entries, NaN where no query looks.

    `width` is how many keys a query sees at most of the first source, where that is a span; None: every span begins and
    ends where chance says, often where a tile does, and those that end before they begin show nothing.
    """
    given = {"b": 2, "s_q": 70, "s_kv": 150, "h_q": 8, "h_kv": 1, "s_kv1": 200, "topk": 100, "page": 64, **extents}
    if variant.sources[0] in WINDOWS:  # a query a sequence
        page, b, s_q, s_kv = (given[name] for name in ("page", "b", "s_q", "s_kv"))
        given = {"window": native.WINDOW, **given, "b": b * s_q, "s_q": 1, "s_kv": -(-s_kv // page) * page}
    shape, rng = Shape(d=variant.d, d_v=variant.mode.d_v, **given), np.random.default_rng(seed)
    b, s_q, _, h_q, h_kv, d, *_ = shape

    def normal(std: float, *shape: int) -> Array:
        return (std * rng.standard_normal(shape)).astype(np.dtype(variant.dtype))

    def span(s_kv: int, ratio: int, width: int | None) -> tuple[Array, Array, Array]:
        """The last `width` of one key for every `ratio` queries; the last query sees the last key."""
        if width is None:
            ends = rng.integers(0, s_kv + 1, (2, b, s_q), dtype=np.int32)
            start, stop = np.where(rng.random(ends.shape) < 0.3, ends // 64 * 64, ends)
        else:
            stop = np.clip(s_kv - (s_q - 1 - np.arange(s_q)) // ratio, 0, s_kv)
            stop = np.tile(stop.astype(np.int32), (b, 1))
            start = np.maximum(stop - width, 0)
        start[0, s_q // 2] = stop[0, s_q // 2]
        j = np.arange(s_kv)
        return start, stop, ((j >= start[..., None]) & (j < stop[..., None])).astype(np.int64)

    def step(s_kv: int) -> tuple[Array, Array, Array]:
        """The number of tokens up to the query's own, and in all: some without room, a query without its token,
        and keys from a page on that is missing.
        """
        end = rng.integers(1, s_kv + 1, (b, s_q), dtype=np.int32)
        end[0] = s_kv + 7
        length = end + rng.integers(0, 3, end.shape, dtype=np.int32)
        length[2::3] = end[2::3] - 1
        stop = np.where(end <= length, np.minimum(end, s_kv), 0)
        start = np.minimum(np.maximum(end - shape.window, 0), stop)
        stop[1::3] = np.maximum(stop[1::3] // shape.page * shape.page, start[1::3])
        j = np.arange(s_kv)
        return end, length, ((j >= start[..., None]) & (j < stop[..., None])).astype(np.int64)

    def selection(s_kv: int) -> tuple[Array, Array, Array]:
        absent = np.array([-1, s_kv, np.iinfo(np.int32).min, np.iinfo(np.int32).max])
        indices = rng.integers(0, s_kv, (b, s_q, shape.topk))
        indices = np.where(rng.random(indices.shape) < 0.1, rng.choice(absent, indices.shape), indices)
        length = rng.integers(shape.topk // 2, shape.topk + 9, (b, s_q))
        length[0, s_q // 2] = -5
        present = (np.arange(shape.topk) < length[..., None]) & (indices >= 0) & (indices < s_kv)
        counts = np.zeros((b, s_q, s_kv), np.int64)
        n, i, p = np.nonzero(present)
        np.add.at(counts, (n, i, indices[n, i, p]), 1)
        return indices.astype(np.int32), length.astype(np.int32), counts

    sources = []
    for which, kind in enumerate(variant.sources):
        s_kv = (shape.s_kv, shape.s_kv1)[which]
        in_order = kind in ("span", *PAGES)
        if kind in WINDOWS:
            seen = step(s_kv)
        else:
            seen = span(s_kv, *((1, width), (4, width and s_kv))[which]) if in_order else selection(s_kv)
        if kind in PACKED:
            sources.append(packed(rng, kind, s_kv, shape.page, *seen))
            continue
        k = normal(0.125, b, s_kv, h_kv, d)
        v = (
            values_of(k, variant.mode.d_v or d)
            if not variant.op.startswith("mha_fwd")
            else normal(0.125, b, s_kv, h_kv, d)
        )
        looked_at = any_query(seen[-1])
        if in_order:  # a tile of rows loads what is between them too (docs/semantics.md)
            looked_at = np.maximum.accumulate(looked_at, 1) & np.maximum.accumulate(looked_at[:, ::-1], 1)[:, ::-1]
        for array in (k, v):
            array[~looked_at] = np.nan
        keys = Keys(k, v, *seen)
        sources.append(in_pages(rng, kind, keys, shape.page) if kind in PAGES else keys)
    if variant.mode.is_e4m3:
        sources = [as_codes(of_many_sizes(x), variant.mode) for x in sources]
    sink = rng.standard_normal(h_q).astype(np.float32)
    sink[0], sink[h_q // 2] = np.inf, -np.inf
    slots = {
        name: x.pool.shape[0] * shape.page
        for name, x in zip(("s_kv", "s_kv1"), sources, strict=False)
        if x.pool is not None
    }
    if (pages := sources[0].paged) is not None:
        slots = {"s_kv": pages.k_pages.shape[1] * shape.page, "pages": len(pages.k)}
    q = normal(8, b, s_q, h_q, d)
    if variant.mode.is_e4m3:  # which has units of its own
        q = np.ldexp(q, -rng.integers(0, 5, (b, s_q, h_q, 1))).astype(q.dtype)
    table = None
    if variant.turns:
        angles = rng.uniform(-np.pi, np.pi, (b, s_q, 32)).astype(np.float32)
        table = np.stack([np.cos(angles), np.sin(angles)], -1).reshape(b, s_q, 64)
    return Operands(variant.op, shape._replace(**slots), q, tuple(sources), sink, table, variant.mode)


def as_codes(keys: Keys, mode: Mode) -> Keys:
    """The same keys rounded to codes of e4m3 in their units, with NaN where no query looks. Without units, each has one
    by which its greatest number is between 128 and 512, so that some numbers are beyond the range.
    """
    k, units = keys.k[:, :, 0].astype(np.float32), keys.units
    if units is None:
        exponents = np.floor(np.log2(np.abs(k).max(-1))) - 7 - np.arange(k.shape[1]) % 2
        units = np.exp2(np.where(np.isnan(exponents), 0, exponents)).astype(np.float32)
    codes = e4m3(k / units[..., None])
    v = codes.astype(np.float32) * units[..., None]
    rows, tail = [codes.view(np.uint8)], np.zeros((*units.shape, UNIT_BYTES), np.uint8)
    tail[..., :2] = units.astype(keys.k.dtype)[..., None].view(np.uint8)
    if mode.keeps_rope:
        rope = (k[..., -ROPE:] / units[..., None]).astype(keys.k.dtype)
        rows.append(rope.view(np.uint8))
        k = np.concatenate([v[..., :-ROPE], k[..., -ROPE:]], -1)
    else:
        k = v
    k, v = (x.astype(keys.k.dtype)[:, :, None] for x in (k, v))
    return replace(keys, k=k, v=v, codes=np.concatenate([*rows, tail], -1).view(codes.dtype), units=units)


def of_many_sizes(keys: Keys) -> Keys:
    """Keys of which some are much greater than others, or less."""
    exponents = np.resize([0, 0, 9, 0, -6, 0, 0, -20, 0, 1, 12], keys.k.shape[1])
    k = keys.k * np.exp2(exponents)[:, None, None].astype(keys.k.dtype)
    return replace(keys, k=k, v=k)


def e4m3(x: Array) -> Array:
    """x rounded; beyond 448 it is 448."""
    return np.clip(x, -448, 448).astype(np.dtype("float8_e4m3fn"))


def beyond(x: Operands) -> Operands:
    """The same, with spans that begin before the first key or end after the last where the given ones touch these."""
    sources = []
    for keys in x.sources:
        start, stop, s_kv = keys.seen_from, keys.seen_to, keys.k.shape[1]
        far = (np.where(start == 0, -1000, start), np.where(stop == s_kv, s_kv + 1000, stop))
        sources.append(replace(keys, seen_from=far[0].astype(np.int32), seen_to=far[1].astype(np.int32)))
    return replace(x, sources=tuple(sources))


def packed(
    rng: np.random.Generator, kind: str, s_kv: int, page: int, indices: Array, length: Array, counts: Array
) -> Keys:
    """Keys in pages of a pool, in any order: every number that their format has; all NaN where no query looks."""
    b, packing, bf16 = len(indices), PACKED[kind], np.dtype("bfloat16")
    pages = -(-b * s_kv // page) + 1
    pool = np.full((pages, -(-packing.entry * page // packing.multiple) * packing.multiple), 0xFF, np.uint8)
    if packing.separate_scales:
        entries = pool[:, : page * packing.values].reshape(pages, page, packing.values)
        scales = pool[:, page * packing.values : page * packing.entry].reshape(pages, page, packing.scales)
        after = entries[..., packing.values :]
    else:
        whole = pool.reshape(pages, page, packing.entry)
        entries, scales, after = np.split(whole, [packing.values, packing.values + packing.scales], axis=-1)
    groups = {"v4_fp8": 7, "v4_fp4": 14, "v41_fp8": 16, "v41_fp4": 32, "v32_fp8": 4}[kind]
    unpacked = 64 * (kind.startswith("v4_") or kind == "v32_fp8")
    data = packing.values + packing.after - 2 * unpacked
    if kind.endswith("fp4"):
        codes = rng.permutation(np.arange(b * s_kv * data, dtype=np.uint64) % 256).astype(np.uint8)
        codes = codes.reshape(b, s_kv, data)
        nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(b, s_kv, groups, -1)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * np.where(nibbles & 8, -1, 1)
        if kind == "v41_fp4":
            exponents = rng.integers(0x01, 0x21, (b, s_kv, groups)).astype(np.uint8)  # e4m3, from 2^-9 to 0.125
            sizes = exponents.view(np.dtype("float8_e4m3fn")).astype(np.float32)
        else:
            exponents = rng.integers(119, 125, (b, s_kv, groups)).astype(np.uint8)  # up to 2^-3
            sizes = np.exp2(exponents.astype(np.float32) - 127)
    else:
        codes = rng.permutation(np.arange(b * s_kv * data, dtype=np.uint64) % 254).astype(np.uint8)
        codes = (codes + (codes >= 0x7F)).reshape(b, s_kv, data)
        numbers = codes.view(np.dtype("float8_e4m3fn")).astype(np.float32).reshape(b, s_kv, groups, -1)
        exponents = rng.integers(115, 119, (b, s_kv, groups)).astype(np.uint8)
        sizes = np.exp2(exponents.astype(np.float32) - 127)
        if kind == "v32_fp8":  # scales that are no powers of two
            sizes *= rng.uniform(0.5, 1, sizes.shape).astype(np.float32)
            exponents = sizes.view(np.uint8)
    rope = (0.125 * rng.standard_normal((b, s_kv, unpacked))).astype(bf16)
    numbers = (numbers * sizes[..., None]).reshape(b, s_kv, -1).astype(bf16)
    k = np.concatenate([numbers, rope], axis=-1)
    place = rng.permutation(pages * page)[: b * s_kv].reshape(b, s_kv)
    seen = any_query(counts)
    k[~seen] = np.nan
    at = np.divmod(place[seen], page)
    numbers = np.concatenate([codes[seen], rope[seen].view(np.uint8)], -1)
    entries[*at], after[*at] = numbers[:, : packing.values], numbers[:, packing.values :]
    scales[*at, : exponents.shape[-1]] = exponents[seen]
    there = (indices >= 0) & (indices < s_kv)
    of_query = np.broadcast_to(place[:, None], (*indices.shape[:2], s_kv))
    places = np.take_along_axis(of_query, np.where(there, indices, 0), axis=-1)
    absent = np.where(indices == s_kv, pages * page, indices)
    k = k[:, :, None]
    return Keys(k, values_of(k, 512), np.where(there, places, absent).astype(np.int32), length, counts, pool)


def in_pages(rng: np.random.Generator, kind: str, keys: Keys, page: int) -> Keys:
    """The same keys and values in pages of pools, in any order and among others; NaN where there is none. Pages of
    which no query sees a key are not there. As codes, they are rounded.
    """
    b, s_kv, h_kv, d = keys.k.shape
    scales = None
    if "e4m3" in kind:
        scales = (0.125 * rng.uniform(0.01, 1, (b, h_kv, 2))).astype(np.float32)
        coded = [e4m3((x / s).astype(np.float32)) for x, s in zip((keys.k, keys.v), _of_keys(scales), strict=True)]
        meant = [x.astype(np.float64) * s for x, s in zip(coded, _of_keys(scales), strict=True)]
        keys = replace(keys, k=coded[0], v=coded[1])
    width = -(-s_kv // page)
    pages, seen = b * width + 3, np.zeros((b, width * page), bool)
    seen[:, :s_kv] = any_query(keys.counts)

    def pooled(x: Array) -> tuple[Array, Array]:
        whole = np.full((b, width * page, h_kv, d), np.nan, x.dtype)
        whole[:, :s_kv] = x
        pool = np.full((pages, page, h_kv, d), np.nan, x.dtype)
        table = rng.permutation(pages)[: b * width].reshape(b, width)
        pool[table] = whole.reshape(b, width, page, h_kv, d)
        absent = rng.choice(np.array([-1, pages, np.iinfo(np.int32).max]), table.shape)
        first, last = (np.argmax(x, 1)[:, None] for x in (seen, np.cumsum(seen, 1)))
        of_page = np.arange(width) * page
        there = seen.any(1, keepdims=True) & (of_page + page > first) & (of_page <= last)
        return pool, np.where(there, table, absent).astype(np.int32)

    (k, k_pages), (v, v_pages) = map(pooled, (keys.k, keys.v))
    if scales is not None:
        keys = replace(keys, k=meant[0], v=meant[1])
    return replace(keys, paged=Paged(k, v, k_pages, v_pages, scales))


def _of_keys(scales: Array) -> Array:
    """Scales of K and of V, each [b, 1, h_kv, 1]."""
    return np.moveaxis(scales, -1, 0)[:, :, None, :, None]


def answer(x: Operands, scale: float, eps: float = native.EPS) -> tuple[Array, Array]:
    """o and lse in float64, from how often each query sees each key; eps: of the norm, where q has none yet."""
    if x.table is not None:
        o, lse = answer(replace(x, q=normed(turned(x.q, x.table), x.q, eps), table=None), scale)
        return turned(o, x.table * np.resize([1, -1], 64)), lse
    if x.mode.is_e4m3:
        top = np.abs(x.q.astype(np.float64)).max(-1, keepdims=True)
        unit = np.exp2(np.floor(np.log2(top)) - 7)
        q = e4m3(x.q.astype(np.float32) / unit.astype(np.float32)).astype(np.float64) * unit
        if x.mode.keeps_rope:
            q[..., -ROPE:] = x.q[..., -ROPE:].astype(np.float64)
        x = replace(x, q=q)
    b, s_q, h_q, d = x.q.shape
    counts = np.concatenate([keys.counts for keys in x.sources], axis=-1)
    seen = any_query(counts)[..., None, None]
    k, v = (
        np.where(seen, np.concatenate([getattr(keys, name) for keys in x.sources], axis=1), 0).astype(np.float64)
        for name in ("k", "v")
    )
    h_kv = k.shape[2]
    q = x.q.astype(np.float64).reshape(b, s_q, h_kv, -1, d).transpose(0, 2, 1, 3, 4)  # [b, h_kv, s_q, group, d]
    logits = scale * q @ k.transpose(0, 2, 3, 1)[:, :, None]
    counts = counts[:, None, :, None]
    least = -1e300
    top = np.max(logits, axis=-1, where=counts > 0, initial=least)
    p = np.exp(np.minimum(logits - top[..., None], 0))
    with np.errstate(divide="ignore"):
        lse = top + np.log((counts * p).sum(-1))
    if x.mode.is_e4m3:
        units = np.concatenate([keys.units for keys in x.sources], axis=1)[:, None, None, None]
        p = rounded_weights(logits, units, top[..., None], counts)
    p = counts * p
    denominator = np.maximum(np.logaddexp(lse, x.sink.astype(np.float64).reshape(h_kv, 1, -1)), least)
    o = np.exp(top - denominator)[..., None] * (p @ v.transpose(0, 2, 1, 3)[:, :, None])
    return o.transpose(0, 2, 1, 3, 4).reshape(b, s_q, h_q, -1), lse.transpose(0, 2, 1, 3).reshape(b, s_q, h_q)


def rounded_weights(logits: Array, units: Array, top: Array, counts: Array) -> Array:
    """exp(logits - top), where counts are not 0: times units rounded to e4m3, in a power of two for each row."""
    in_units = logits * np.log2(np.e) + np.log2(units)
    greatest = np.max(in_units, axis=-1, where=counts > 0, initial=-1e300, keepdims=True)
    shift = np.round(greatest) - 5
    p = e4m3(np.exp2(np.minimum(in_units - shift, 9))).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(counts > 0, p * np.exp2(shift - np.log2(units) - top * np.log2(np.e)), 0)


def normed(turned: Array, q: Array, eps: float) -> Array:
    """The norm of q, of which this is turned."""
    squares = np.mean(np.square(q.astype(np.float64)), -1, keepdims=True)
    return np.asarray(turned.astype(np.float64) / np.sqrt(squares + eps))


def turned(x: Array, table: Array) -> Array:
    """x [b, s, h, d] with its last columns turned, in its dtype: the one rounding that q has."""
    n = table.shape[-1]
    wide = np.result_type(x.dtype, np.float32) if x.dtype != np.dtype("bfloat16") else np.dtype(np.float32)
    pairs = x[..., -n:].astype(wide).reshape(*x.shape[:-1], n // 2, 2)
    cos, sin = np.moveaxis(table.astype(wide).reshape(*table.shape[:2], 1, n // 2, 2), -1, 0)
    a, b = np.moveaxis(pairs, -1, 0)
    rotated = np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(*x.shape[:-1], n)
    return np.concatenate([x[..., :-n], rotated.astype(x.dtype)], -1)


def assert_right(got: Sequence[Array], x: Operands, scale: float) -> None:
    for verdict in compare(got, answer(x, scale)):
        assert verdict.passed, verdict
