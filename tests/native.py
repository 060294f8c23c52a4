"""The native library's plain C functions (ffi/introspect.cc), and operands and results of its kernels in NumPy."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from jax_dsv4_fmha import _ffi
from jax_dsv4_fmha._testing.compare import compare
from kernels.abi import FORWARD_OPS, Backward, DenseBackward, Forward, Variant
from kernels.variants import VARIANTS

SOURCES = FORWARD_OPS
KINDS = ("span", "selection", "packed")  # as ffi/rows.h counts them
TYPES = {"float8_e4m3fn": 0, "float16": 6, "bfloat16": 9}  # of a tensor map's elements, as the driver counts them
Array = np.ndarray[Any, Any]
T = TypeVar("T", bound=Variant)


def function(op: str) -> Any:
    """The raw call that runs an op's kernels: keys of either kind are decoded by one."""
    return getattr(_ffi, op.removesuffix("_fp8"))


def variant_of(key: str) -> Any:
    """Of whatever family."""
    return next(v for v in VARIANTS if v.key == key)


def built(family: type[T]) -> list[T]:
    """The variants of a family that the library holds."""
    keys = {v.key for v in _ffi.variants()}
    return [v for v in VARIANTS if isinstance(v, family) and v.key in keys]


def fewer_heads(variant: Forward | Backward) -> int:
    """The most heads with which a call like this variant's gets another one, which is made for fewer."""
    calls = {**variant.choices, "max_heads": 0}
    others = (v for v in VARIANTS if isinstance(v, type(variant)) and (v.op, v.arch) == (variant.op, variant.arch))
    limits = (v.max_heads for v in others if {**v.choices, "max_heads": 0} == calls)
    return max((limit for limit in limits if limit < variant.max_heads), default=0)


def heads_for(variant: Forward | Backward, h_q: int) -> int:
    """The number of heads nearest to h_q with which a call gets this variant, not one for more or fewer."""
    return min(max(h_q, fewer_heads(variant) + 1), variant.max_heads)


class Shape(NamedTuple):
    """The extents of a launch. s_kv is of the first source of keys and s_kv1 of the second, where there is one."""

    b: int
    s_q: int
    s_kv: int
    h_q: int
    h_kv: int
    d: int
    s_kv1: int = 0
    topk: int = 0
    splits: int = 1
    page: int = 64  # entries, of packed keys


class TensorMapSpec(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("extents", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
    )


def _int64s(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


class _RowShape(ctypes.Structure):
    _fields_ = _int64s("b", "s_q", "h_q", "h_kv", "d", "splits", "type")


class _SourceShape(ctypes.Structure):
    _fields_ = _int64s("kind", "s_kv", "s_batch", "topk")


class _AttentionShape(ctypes.Structure):
    _fields_ = (("rows", _RowShape), *_int64s("source_count"), ("sources", _SourceShape * 2))


class _Tiles(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("tile_m", "tile_n", "processors", "cluster", "gathers"))


class _ShownLaunch(ctypes.Structure):
    _params = max(len(v.params) for v in VARIANTS)
    _fields_ = (
        ("grid", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("names", ctypes.c_char_p * _params),
        ("sizes", ctypes.c_uint32 * _params),
        ("bytes", ctypes.c_char * 128 * _params),
        ("maps", TensorMapSpec * _params),
    )


_OF_SOURCES = tuple(f"{name}{i}" for i in range(2) for name in ("k", "v", "from", "to"))
ADDRESSES = {
    "forward": ("q", "o", "sink", "lse", "o_parts", "lse_parts", *_OF_SOURCES),
    "backward": ("q", "dout", "dq", "lse", "weight", "delta", "resolution", *_OF_SOURCES, "dkv0", "dkv1"),
    "dense_backward": (*("q", "dout", "k", "v", "lse", "weight", "delta", "start", "stop", "seen", "dq", "dk", "dv"),),
}
"""What a launch of a family points to: from and to are start and stop of a span, indices and length of a selection"""


class IndexShape(ctypes.Structure):
    _fields_ = _int64s("b", "s_q", "s_c", "heads", "topk", "type", "queries", "stride", "wants_values",
                       "pages", "page", "width")  # fmt: skip


class ProbabilitiesShape(ctypes.Structure):
    _fields_ = _int64s("b", "s_q", "h_q", "s_kv", "topk")


PROBABILITIES_ADDRESSES = ("q", "k", "lse", "indices", "p")


class IndexAtShape(ctypes.Structure):
    _fields_ = _int64s("b", "s_q", "s_c", "heads", "topk")


INDEX_AT_ADDRESSES = ("q", "k", "weights", "indices", "scores", "dq", "dk", "dweights")
INDEX_ADDRESSES = ("q", "k", "weights", "k_scale", "table", "start", "stop", "scores", "indices", "values")


@dataclass(frozen=True)
class Plan:
    """A launch, as our own launcher plans it."""

    grid: int
    params: dict[str, bytes]  # by name, in order, as the kernel receives them; of a tensor map, the address
    maps: dict[str, TensorMapSpec]  # what else a tensor map says

    def __getitem__(self, name: str) -> int:
        """The value of a parameter that is an integer or an address."""
        return int.from_bytes(self.params[name], "little")


def library() -> ctypes.CDLL:
    native = _ffi.library()
    if native is None:
        pytest.skip("no native library")
    return native


def plan(
    variant: Forward | Backward | str,
    shape: Shape,
    scale: float = 1.0,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    processors: int = 132,
    cluster: int = 1,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """What a variant's family launches for `shape`, or any variant of an op; ValueError where it refuses.

    The variant is asked for the order of its parameters alone, for what is tested of tiles has nothing to do with it.
    """
    if isinstance(variant, str):
        variant = next(v for v in VARIANTS if isinstance(v, Forward | Backward) and v.op == variant and v.d == 512)
    sources = [
        _SourceShape(KINDS.index(kind), s_kv, shape.page if kind == "packed" else s_kv, shape.topk)
        for kind, s_kv in zip(variant.sources, (shape.s_kv, shape.s_kv1), strict=False)
    ]
    given = _AttentionShape(_row_shape(shape, TYPES[variant.dtype]), len(sources), (_SourceShape * 2)(*sources))
    return _planned(
        variant.family,
        variant.layout.encode(),
        ctypes.byref(given),
        ctypes.c_float(scale),
        ctypes.byref(_Tiles(tile_m, tile_n, processors, cluster, variant.gathers)),
        _addresses(addresses, variant.family),
    )


def plan_combine(shape: Shape, *, threads: int = 128, tile_n: int = 4, addresses: dict[str, int] | None = None) -> Plan:
    """What it launches after that where keys are split."""
    out = _ShownLaunch()
    library().dsv4_fmha_plan_combine(
        ctypes.byref(_row_shape(shape, 0)),
        ctypes.c_int32(threads),
        ctypes.c_int32(tile_n),
        _addresses(addresses),
        ctypes.byref(out),
    )
    return _shown(out)


def plan_dense_backward(
    variant: DenseBackward,
    shape: Shape,
    scale: float = 1.0,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    processors: int = 132,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """What it launches; without dv K is V."""
    source = _SourceShape(KINDS.index("span"), shape.s_kv, shape.s_kv, 0)
    given = _AttentionShape(_row_shape(shape, TYPES[variant.dtype]), 1, (_SourceShape * 2)(source))
    return _planned(
        "dense_backward",
        variant.layout.encode(),
        ctypes.byref(given),
        ctypes.c_float(scale),
        ctypes.c_bool(variant.op == "key_gradients"),
        ctypes.byref(_Tiles(tile_m, tile_n, processors, 1, False)),
        _addresses(addresses, "dense_backward"),
    )


def plan_row_spans(shape: Shape, *, tile_m: int = 64, tile_n: int = 4, addresses: dict[str, int] | None = None) -> Plan:
    """What it launches before: for tiles of tile_m rows, of which a CTA takes tile_n."""
    return _planned(
        "row_spans",
        ctypes.byref(_row_shape(shape, 0)),
        ctypes.c_int32(tile_m),
        ctypes.c_int32(tile_n),
        _addresses(addresses, "dense_backward"),
    )


def plan_indexer(
    shape: IndexShape,
    *,
    tile_m: int = 256,
    tile_n: int = 128,
    processors: int = 132,
    first: int = 0,
    count: int = 1,
    addresses: dict[str, int] | None = None,
) -> tuple[Plan, Plan]:
    """What the lightning indexer launches for `count` blocks of queries from `first` on: scores, then their choice."""
    scores, choice = _ShownLaunch(), _ShownLaunch()
    library().dsv4_fmha_plan_indexer(
        ctypes.byref(shape),
        ctypes.byref(_Tiles(tile_m, tile_n, processors, 1, 0)),
        ctypes.c_int64(first),
        ctypes.c_int64(count),
        _at(addresses, INDEX_ADDRESSES),
        ctypes.byref(scores),
        ctypes.byref(choice),
    )
    return _shown(scores), _shown(choice)


def plan_probabilities(
    shape: ProbabilitiesShape, scale: float = 1.0, *, processors: int = 132, addresses: dict[str, int] | None = None
) -> Plan:
    """What head-summed probabilities launch; ValueError where they are refused."""
    return _planned(
        "probabilities",
        ctypes.byref(shape),
        ctypes.c_float(scale),
        ctypes.c_int64(processors),
        _at(addresses, PROBABILITIES_ADDRESSES),
    )


def plan_index_at(shape: IndexAtShape, *, gradient: bool, addresses: dict[str, int] | None = None) -> Plan:
    """What scores at given entries are launched with, or their gradients."""
    out = _ShownLaunch()
    at = _at(addresses, INDEX_AT_ADDRESSES)
    library().dsv4_fmha_plan_index_at(ctypes.byref(shape), ctypes.c_bool(gradient), at, ctypes.byref(out))
    return _shown(out)


def _row_shape(shape: Shape, of_type: int) -> _RowShape:
    return _RowShape(shape.b, shape.s_q, shape.h_q, shape.h_kv, shape.d, shape.splits, of_type)


def _addresses(at: dict[str, int] | None, family: str = "forward") -> ctypes.Array[ctypes.c_void_p]:
    return _at(at, ADDRESSES[family])


def _at(addresses: dict[str, int] | None, names: Sequence[str]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses by these names, in this order; null where there is none."""
    return (ctypes.c_void_p * len(names))(*((addresses or {}).get(name) for name in names))


def _planned(what: str, *arguments: Any) -> Plan:
    """What the library's plan of this name shows; ValueError where it refuses."""
    out, error = _ShownLaunch(), ctypes.create_string_buffer(512)
    status = library()[f"dsv4_fmha_plan_{what}"](*arguments, ctypes.byref(out), error, ctypes.c_size_t(len(error)))
    if status != 0:
        raise ValueError(error.value.decode())
    return _shown(out)


def _shown(out: _ShownLaunch) -> Plan:
    names = [name.decode() for name in out.names[: out.count]]
    params = {name: out.bytes[i].raw[: out.sizes[i]] for i, name in enumerate(names)}
    assert len(params) == out.count, names
    return Plan(out.grid, params, {name: spec for name, spec in zip(names, out.maps, strict=False) if spec.rank})


def cubin(key: str) -> bytes:
    """The bytes that are embedded for a variant."""
    native, size = library(), ctypes.c_size_t()
    native.dsv4_fmha_cubin.restype = ctypes.c_void_p
    address = native.dsv4_fmha_cubin(key.encode(), ctypes.byref(size))
    assert address is not None, key
    return ctypes.string_at(address, size.value)


def called(key: str, h_q: int) -> str | None:
    """Which variant a call with so many heads gets, where all else is as in this one."""
    native = library()
    native.dsv4_fmha_called.restype = ctypes.c_char_p
    name: bytes | None = native.dsv4_fmha_called(key.encode(), ctypes.c_int64(h_q))
    return None if name is None else name.decode()


@dataclass(frozen=True)
class Keys:
    """One source of keys."""

    k: Array  # [b, s_kv, h_kv, d]
    v: Array  # is k where they are one array
    seen_from: Array  # start of a span, indices of a selection
    seen_to: Array  # stop of a span, length of a selection
    counts: Array  # [b, s_q, s_kv]: how often a query sees a key
    pool: Array | None = None  # of packed keys [pages, bytes], of which k are the values; then indices are places in it

    @property
    def given(self) -> Array:
        """What a kernel is given as k."""
        return self.k if self.pool is None else self.pool


@dataclass(frozen=True)
class Operands:
    op: str
    shape: Shape
    q: Array
    sources: tuple[Keys, ...]
    sink: Array

    def arguments(self) -> tuple[Array | None, ...]:
        """As the function of `_ffi` that is called like the op takes them."""
        if self.op == "fwd":
            (x,) = self.sources
            return self.q, x.k, None if x.v is x.k else x.v, x.seen_from, x.seen_to, self.sink
        keys = ((x.k[:, :, 0] if x.pool is None else x.pool, x.seen_from, x.seen_to) for x in self.sources)
        return self.q, *(x for source in keys for x in source), self.sink


def operands(variant: Forward, *, width: int | None = 90, seed: int = 0, **extents: int) -> Operands:
    """Operands of every kind for a variant: a query that sees nothing, absent entries, NaN where no query looks.

    `width` is how many keys a query sees at most of the first source, where that is a span; None: every span begins and
    ends where chance says, often where a tile does, and those that end before they begin show nothing.
    """
    given = {"b": 2, "s_q": 70, "s_kv": 150, "h_q": 8, "h_kv": 1, "s_kv1": 200, "topk": 100, **extents}
    shape, rng = Shape(d=variant.d, **given), np.random.default_rng(seed)
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
        seen = span(s_kv, *((1, width), (4, width and s_kv))[which]) if kind == "span" else selection(s_kv)
        if kind == "packed":
            sources.append(packed(rng, s_kv, shape.page, *seen))
            continue
        k = normal(0.125, b, s_kv, h_kv, d)
        v = k if variant.shared_kv else normal(0.125, b, s_kv, h_kv, d)
        looked_at = seen[-1].any(1)
        if kind == "span":  # a tile of rows loads what is between them too (docs/semantics.md)
            looked_at = np.maximum.accumulate(looked_at, 1) & np.maximum.accumulate(looked_at[:, ::-1], 1)[:, ::-1]
        for array in (k, v):
            array[~looked_at] = np.nan
        sources.append(Keys(k, v, *seen))
    sink = rng.standard_normal(h_q).astype(np.float32)
    sink[0], sink[h_q // 2] = np.inf, -np.inf
    slots = {
        name: x.pool.shape[0] * shape.page
        for name, x in zip(("s_kv", "s_kv1"), sources, strict=False)
        if x.pool is not None
    }
    return Operands(variant.op, shape._replace(**slots), normal(8, b, s_q, h_q, d), tuple(sources), sink)


def beyond(x: Operands) -> Operands:
    """The same, with spans that begin before the first key, and end behind the last, where they did with these."""
    sources = []
    for keys in x.sources:
        start, stop, s_kv = keys.seen_from, keys.seen_to, keys.k.shape[1]
        far = (np.where(start == 0, -1000, start), np.where(stop == s_kv, s_kv + 1000, stop))
        sources.append(replace(keys, seen_from=far[0].astype(np.int32), seen_to=far[1].astype(np.int32)))
    return replace(x, sources=tuple(sources))


def packed(rng: np.random.Generator, s_kv: int, page: int, indices: Array, length: Array, counts: Array) -> Keys:
    """Keys in pages of a pool, in any order: every number that e4m3 has; all NaN where no query looks."""
    b, bf16 = len(indices), np.dtype("bfloat16")
    page_bytes = -(-584 * page // 576) * 576
    pages = -(-b * s_kv // page) + 1
    pool = np.full((pages, page_bytes), 0xFF, np.uint8)
    entries = pool[:, : page * 576].reshape(pages, page, 576)
    scales = pool[:, page * 576 : page * 584].reshape(pages, page, 8)
    codes = rng.permutation(np.arange(b * s_kv * 448, dtype=np.uint64) % 254).astype(np.uint8)
    codes = (codes + (codes >= 0x7F)).reshape(b, s_kv, 448)
    exponents = rng.integers(115, 119, (b, s_kv, 7)).astype(np.uint8)
    rope = (0.125 * rng.standard_normal((b, s_kv, 64))).astype(bf16)
    numbers = codes.view(np.dtype("float8_e4m3fn")).astype(np.float32).reshape(b, s_kv, 7, 64)
    numbers = numbers * np.exp2(exponents.astype(np.float32) - 127)[..., None]
    k = np.concatenate([numbers.reshape(b, s_kv, 448).astype(bf16), rope], axis=-1)
    place = rng.permutation(pages * page)[: b * s_kv].reshape(b, s_kv)
    seen = counts.any(1)
    k[~seen] = np.nan
    at = np.divmod(place[seen], page)
    entries[*at, :448], entries[*at, 448:] = codes[seen], rope[seen].view(np.uint8)
    scales[*at, :7] = exponents[seen]
    there = (indices >= 0) & (indices < s_kv)
    of_query = np.broadcast_to(place[:, None], (*indices.shape[:2], s_kv))
    places = np.take_along_axis(of_query, np.where(there, indices, 0), axis=-1)
    absent = np.where(indices == s_kv, pages * page, indices)
    k = k[:, :, None]
    return Keys(k, k, np.where(there, places, absent).astype(np.int32), length, counts, pool)


def attention(x: Operands, scale: float) -> tuple[Array, Array]:
    """o and lse in float64, from how often each query sees each key."""
    b, s_q, h_q, d = x.q.shape
    counts = np.concatenate([keys.counts for keys in x.sources], axis=-1)
    seen = counts.any(1)[..., None, None]
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
    weights = counts * np.exp(np.minimum(logits - top[..., None], 0))
    with np.errstate(divide="ignore"):
        lse = top + np.log(weights.sum(-1))
    denominator = np.maximum(np.logaddexp(lse, x.sink.astype(np.float64).reshape(h_kv, 1, -1)), least)
    o = np.exp(top - denominator)[..., None] * (weights @ v.transpose(0, 2, 1, 3)[:, :, None])
    return o.transpose(0, 2, 1, 3, 4).reshape(x.q.shape), lse.transpose(0, 2, 1, 3).reshape(b, s_q, h_q)


def assert_right(got: tuple[Any, Any], x: Operands, scale: float) -> None:
    for verdict in compare(got, attention(x, scale)):
        assert verdict.passed, verdict
