"""One table of cases, for the tests, `python -m jax_dsv4_fmha check` and `bench`.

The table is in the package and not under tests/, because `check` also runs from an installed wheel. A case determines
its operands, on every machine.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import _check, dsv4_attention, dsv4_decode, fmha, reference, sparse_fmha
from .._definitions.cache import Cache
from .._definitions.packed import LAYOUTS, quantize_cache
from .._definitions.span import Span
from . import float64

_INT32 = np.iinfo(np.int32)
ABSENT = (_INT32.min, -1, "s_kv", _INT32.max)  # every kind of index that names no key

# the absolute tolerance of a kernel is made for |v| < 1; a larger q makes up for it, so logits are about normal
KV_STD = 0.125
Q_STD = 8.0
_LARGE = 64.0

LAYOUTS_OF = {"fp8": ("v4_fp8", "v4_fp8"), "v41_fp8": ("v41_fp8", "v41_fp8"), "v41_fp4": ("v41_fp8", "v41_fp4")}
"""The layouts of a decode case's window cache and compressed cache, by its feature; other features have no packed
caches.
"""


@dataclass(frozen=True)
class Case:
    """One call of one op.

    For dsv4_attention s_kv is the window cache's length and s_c the compressed one's. For dsv4_decode s_kv is the
    number of tokens of the longest sequence.
    """

    op: str  # "fmha", "sparse_fmha", "dsv4_attention", "dsv4_decode"
    b: int = 1
    s_q: int = 64
    s_kv: int = 64
    h_q: int = 1
    h_kv: int = 1
    d: int = 64
    dtype: str = "bfloat16"
    shared_kv: bool = False  # V is K; always true, except in fmha
    span: str = "full"  # a key of SPANS; fmha only
    sink: str = "none"  # "none", "normal", "-inf", "+inf", or "mixed": all of these
    window: int = 128
    ratio: int = 0
    topk: int = 0
    s_c: int = 0
    decode: bool = False  # dsv4_attention: queries at the end of a context, at other offsets in each batch entry
    page: int = 0  # dsv4_decode: entries of a page; 0 means a contiguous cache
    features: tuple[str, ...] = ()
    # "nan": keys that nobody can see hold NaN: in fmha beyond every row's stop, in sparse ops where no row points
    # "large": logits of some hundreds
    # "absent": indices that name no key, of every kind, and rows with nothing else
    # "lengths": topk_length, window_lengths; dsv4_decode: idle sequences
    # "fp8", "v41_fp8", "v41_fp4": dsv4_decode: packed caches, as `LAYOUTS_OF` has them
    # "pages": dsv4_decode: the window's pages have another size

    @property
    def name(self) -> str:
        """Unique and readable: the op, and everything that is not the default."""
        words = [self.op]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                flat = "+".join(value) if isinstance(value, tuple) else str(value)
                words.append(
                    flat
                    if isinstance(value, str | tuple)
                    else f"{field.name}{flat}"
                    if value is not True
                    else field.name
                )
        return "-".join(words)

    @property
    def layouts(self) -> tuple[str | None, str | None]:
        """dsv4_decode: the layouts of the window cache and of the compressed one, where they are packed."""
        return next((LAYOUTS_OF[x] for x in self.features if x in LAYOUTS_OF), (None, None))

    @property
    def has_kernel(self) -> bool:
        """Whether every pass of the op can run on a kernel, so that a test may insist on it."""
        return self.topk == 0 or self.d == 512

    @property
    def is_small(self) -> bool:
        """Quick enough for a CPU, including the float64 loop."""
        return self.b * self.s_q * self.h_q <= 80_000 and self.work <= 2**31

    @property
    def work(self) -> int:
        """About how many products of numbers the visible scores take."""
        keys = self.topk or min(self.s_kv, self.window * 2 if self.span == "window" else self.s_kv)
        if self.op == "dsv4_decode":
            keys = self.window + (self.topk or (self.s_kv // self.ratio if self.ratio else 0))
        return self.b * self.s_q * self.h_q * keys * self.d


def operands(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword operands of the op, as NumPy arrays."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    c = case
    q = _normal(rng, (c.b, c.s_q, c.h_q, c.d), Q_STD, c.dtype)
    kwargs: dict[str, Any] = {}
    if c.sink != "none":
        kwargs["sink"] = _sink(rng, c)
    if "large" in c.features and (c.shared_kv or c.op != "fmha"):
        q = (q.astype(np.float32) * _LARGE).astype(q.dtype)
    if c.op == "fmha":
        k = _normal(
            rng,
            (c.b, c.s_kv, c.h_kv, c.d),
            KV_STD * (_LARGE if "large" in c.features and not c.shared_kv else 1),
            c.dtype,
        )
        v = None if c.shared_kv else _normal(rng, k.shape, KV_STD, c.dtype)
        span = SPANS[c.span](rng, c)
        if span is not None:
            kwargs["span"] = span
            if "nan" in c.features:
                _, stop = span.bounds(c.b, c.s_q, c.s_kv)
                for x in (k,) if v is None else (k, v):
                    _poison(x, np.arange(c.s_kv) >= np.asarray(stop).max(1, keepdims=True))
        return (q, k, v), kwargs
    if c.op == "dsv4_decode":
        return (q, *_decode(rng, c, kwargs)), kwargs
    kv = _normal(rng, (c.b, c.s_kv, c.d), KV_STD, c.dtype)
    if c.op == "sparse_fmha":
        return (q, kv, _indices(rng, c, kv, kwargs)), kwargs
    return (q, kv, *_dsv4(rng, c, kv, kwargs)), kwargs


def _dsv4(rng: np.random.Generator, c: Case, window_kv: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    kwargs["window"] = c.window
    last = np.full(c.b, c.s_q, np.int32)  # one past the last query's position
    if c.decode:
        last = (max(c.s_c * c.ratio, c.s_kv) - 3 * np.arange(c.b)).astype(np.int32)
        kwargs["q_offset"], kwargs["kv_offset"] = last - c.s_q, last - c.s_kv
    if "lengths" in c.features:
        kwargs["window_lengths"] = np.linspace(c.s_kv, 0, c.b, dtype=np.int32)
        if "nan" in c.features:
            _poison(window_kv, np.arange(c.s_kv) >= kwargs["window_lengths"][:, None])
    if not c.s_c:
        return ()
    compressed_kv = _normal(rng, (c.b, c.s_c, c.d), KV_STD, c.dtype)
    kwargs["ratio"] = c.ratio
    if c.topk:
        kwargs["indices"] = _indices(rng, c, compressed_kv, kwargs)
    elif "nan" in c.features:
        _poison(compressed_kv, np.arange(c.s_c) >= (last // c.ratio)[:, None])
    return (compressed_kv,)


def _decode(rng: np.random.Generator, c: Case, kwargs: dict[str, Any]) -> list[Cache]:
    """The caches: a ring for the window, and room for all compressed entries."""
    lengths = rng.integers(1, c.s_kv + 1, c.b, np.int32)
    lengths[0] = c.s_kv
    if "lengths" in c.features:
        lengths[1::3] = 0
    kwargs["lengths"], kwargs["window"] = lengths, c.window
    room = c.window + c.s_q - 1
    near, far = c.layouts
    page = 2 * c.page + 1 if "pages" in c.features else c.page
    caches = [_cache(rng, c, page, near, room, [np.arange(max(0, n - room), n) for n in lengths])]
    if not c.ratio:
        return caches
    kwargs["ratio"], room = c.ratio, max(1, c.s_kv // c.ratio)
    past = np.maximum(lengths[:, None] - np.arange(c.s_q)[::-1], 0) // c.ratio
    if not c.topk:
        return [*caches, _cache(rng, c, c.page, far, room, [np.arange(n) for n in past[:, -1]])]
    indices = rng.integers(0, np.maximum(past, 1)[..., None], (c.b, c.s_q, c.topk), np.int32)
    indices[past == 0] = -1
    if "absent" in c.features:
        indices = _with_absent(rng, indices, _room(c.page, room))
    seen = np.ones(indices.shape, bool)
    if "lengths" in c.features:
        kwargs["topk_length"] = rng.integers(0, c.topk + 2, past.shape, np.int32)
        seen = np.arange(c.topk) < kwargs["topk_length"][..., None]
    kwargs["indices"] = indices
    seen &= (indices >= 0) & (indices < room)
    named = [row[there] for row, there in zip(indices, seen, strict=True)]
    return [*caches, _cache(rng, c, c.page, far, room, named)]


def _room(page: int, entries: int) -> int:
    """How many entries there must be room for."""
    return -(-entries // page) * page if page else entries


def _cache(
    rng: np.random.Generator, c: Case, in_page: int, layout: str | None, entries: int, seen: Sequence[Any]
) -> Cache:
    """A cache with that much room for a sequence's entries, of which these are `seen`."""
    room, page = _room(in_page, entries), in_page or entries
    pages = c.b * room // page + (3 if in_page else 0)
    order = rng.permutation(pages) if in_page else np.arange(pages)
    table = order[: c.b * room // page].reshape(c.b, -1).astype(np.int32)
    pool = _normal(rng, (pages, page, c.d), KV_STD, c.dtype)
    unseen = np.ones((pages, page), bool)
    for row, named in zip(table, seen, strict=True):
        unseen[row[named % room // page], named % page] = False
    if layout is not None:
        pool, how = np.array(quantize_cache(pool, layout)), LAYOUTS[layout]
        if "nan" in c.features:  # whatever the bytes are read as
            for start, size in zip(how.starts(0, page), how.parts, strict=True):
                pool[:, start : start + page * size].reshape(pages, page, size)[unseen] = 255
            pool[:, page * how.entry :] = 255
    elif "nan" in c.features:
        _poison(pool, unseen)
    unused = unseen[table].all(-1)
    table[unused] = rng.choice(np.array([-1, pages, _INT32.max, _INT32.min], np.int32), np.count_nonzero(unused))
    where = table if in_page else None
    return Cache(pool, where) if layout is None else Cache(pool, where, layout)


def _indices(rng: np.random.Generator, c: Case, kv: Any, kwargs: dict[str, Any]) -> Any:
    s_kv = kv.shape[1]
    some = rng.permutation(s_kv)[: max(1, s_kv * 2 // 3)]  # so that there are keys that nobody names
    indices = rng.choice(some, (c.b, c.s_q, c.topk)).astype(np.int32)
    if "absent" in c.features:
        indices = _with_absent(rng, indices, s_kv)
    if "lengths" in c.features:
        kwargs["topk_length"] = rng.integers(0, c.topk + 2, (c.b, c.s_q), np.int32)
    if "nan" in c.features:
        for n in range(c.b):
            _poison(kv[n : n + 1], ~np.isin(np.arange(s_kv), some)[None])
    return indices


def _with_absent(rng: np.random.Generator, indices: Any, s_kv: int) -> Any:
    """These indices, with a third of them and the last row of every batch entry absent."""
    kinds = np.array([s_kv if x == "s_kv" else x for x in ABSENT], np.int32)
    absent = rng.random(indices.shape) < 0.3
    absent[:, -1] = True
    return np.where(absent, rng.choice(kinds, indices.shape), indices)


def _sink(rng: np.random.Generator, c: Case) -> Any:
    sink = rng.standard_normal(c.h_q).astype(np.float32)
    if c.sink == "mixed":
        sink[::3], sink[1::3] = -np.inf, np.inf
    elif c.sink != "normal":
        sink[:] = float(c.sink)
    return sink


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float, dtype: str) -> Any:
    """Normal values; a large array repeats with a prime period, which divides no row length."""
    size = min(int(np.prod(shape)), 4_194_301)
    x = (std * rng.standard_normal(size, np.float32)).astype(getattr(ml_dtypes, dtype, dtype))
    return np.resize(x, shape)


def _poison(x: Any, where: Any) -> None:
    x[np.broadcast_to(where, x.shape[:2])] = np.nan


def _random_span(rng: np.random.Generator, c: Case) -> Span:
    """Any start and stop: outside the keys, the wrong way round, and every tenth row empty."""
    start, stop = (rng.integers(-c.s_kv // 2, c.s_kv * 3 // 2, (c.b, c.s_q), np.int32) for _ in range(2))
    stop[:, ::10] = start[:, ::10]
    return Span(start, stop)


def _segment_ids(rng: np.random.Generator, c: Case, s: int) -> Any:
    return np.sort(rng.integers(0, 5, (c.b, s), np.int32), axis=1)


SPANS: dict[str, Any] = {
    "full": lambda rng, c: None,
    "causal": lambda rng, c: Span.causal(c.s_q, c.s_kv - c.s_q),
    "window": lambda rng, c: Span.sliding_window(c.s_q, c.window, c.s_kv - c.s_q),
    "compressed": lambda rng, c: Span.compressed(c.s_q, c.ratio),
    "lengths": lambda rng, c: Span.lengths(np.linspace(c.s_kv - 1, 0, c.b, dtype=np.int32)),
    "window+lengths": lambda rng, c: SPANS["window"](rng, c) & SPANS["lengths"](rng, c),
    "segments": lambda rng, c: Span.segments(_segment_ids(rng, c, c.s_q), _segment_ids(rng, c, c.s_kv)),
    "causal+segments": lambda rng, c: Span.segments(_segment_ids(rng, c, c.s_q)) & Span.causal(c.s_q),
    "random": _random_span,
}


OPS: dict[str, Any] = {
    "fmha": fmha,
    "sparse_fmha": sparse_fmha,
    "dsv4_attention": dsv4_attention,
    "dsv4_decode": dsv4_decode,
}


def run(case: Case, implementation: _check.Implementation | None = None) -> tuple[Any, Any]:
    """(o, lse) of the op, under `jax.jit`."""
    args, kwargs = operands(case)
    return _call(functools.partial(OPS[case.op], implementation=implementation), args, kwargs)


def run_into(case: Case, fills: Sequence[float], **choices: Any) -> list[tuple[Any, Any]]:
    """(o, lse) of the op with its `choices` (implementation, method), once for each of `fills`.

    The results go into buffers that hold the fill, where the platform can donate them, so an element that is never
    written shows. Operands and compiled op are the same every time.
    """
    args, kwargs = operands(case)
    numbers, arrays = _split(kwargs)
    op = functools.partial(OPS[case.op], **choices, **numbers)
    call = jax.jit(lambda into, args, arrays: op(*args, **arrays), donate_argnums=0, keep_unused=True)
    q = args[0]
    args, arrays = jax.device_put((args, arrays))
    return [call((jnp.full(q.shape, x, q.dtype), jnp.full(q.shape[:-1], x)), args, arrays) for x in fills]


def run_reference(case: Case) -> tuple[Any, Any]:
    """(o, lse) by the reference in float32, from the very same 16-bit operands."""
    (q, *args), kwargs = operands(case)
    op = getattr(reference, case.op)
    fp32 = lambda q, *args, **kwargs: op(q.astype(jnp.float32), *args, **kwargs)  # noqa: E731
    # called only once, so it should compile fast rather than run fast
    return _call(fp32, (q, *args), kwargs, compiler_options={"xla_gpu_autotune_level": "0"})


def _call(op: Any, args: Any, kwargs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    numbers, arrays = _split(kwargs)
    o, lse = jax.jit(lambda args, arrays: op(*args, **arrays, **numbers), **options)(args, arrays)
    return o, lse


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands that are known while tracing, and the others."""
    numbers = {name: x for name, x in kwargs.items() if isinstance(x, int)}
    return numbers, {name: x for name, x in kwargs.items() if name not in numbers}


def run_float64(case: Case) -> tuple[Any, Any]:
    """(o, lse) by the loops in float64."""
    args, kwargs = operands(case)
    if case.op == "fmha":
        span = kwargs.pop("span", Span(0, case.s_kv))
        args = (*args, *map(np.asarray, span.bounds(case.b, case.s_q, case.s_kv)))
    o, lse = getattr(float64, case.op)(*args, **kwargs)
    return o, lse


def _table() -> tuple[Case, ...]:
    def separate(d: int, **kwargs: Any) -> Case:
        return Case("fmha", d=d, **kwargs)

    def latent(h_q: int, **kwargs: Any) -> Case:
        return Case("fmha", h_q=h_q, **{"d": 512, "shared_kv": True, **kwargs})

    def sparse(h_q: int, **kwargs: Any) -> Case:
        return Case("sparse_fmha", h_q=h_q, **{"d": 512, "s_kv": 300, "shared_kv": True, **kwargs})

    def dsv4(h_q: int, **kwargs: Any) -> Case:
        return Case("dsv4_attention", h_q=h_q, **{"d": 512, "shared_kv": True, **kwargs})

    def decode(h_q: int, **kwargs: Any) -> Case:
        return Case("dsv4_decode", h_q=h_q, **{"s_q": 1, "d": 512, "shared_kv": True, **kwargs})

    every_d = [
        case
        for d in (64, 128, 256)
        for case in (
            separate(d, b=2, s_q=200, s_kv=200, h_q=2, h_kv=2, span="causal"),
            separate(d, s_q=130, s_kv=257, h_q=14, h_kv=2, span="window", window=33, sink="normal"),  # groups of 7
            separate(d, s_q=33, s_kv=129, h_q=16, sink="mixed"),
            separate(d, b=3, s_q=65, s_kv=190, h_q=8, h_kv=2, span="lengths", features=("nan",)),
            separate(d, b=2, s_q=150, s_kv=150, h_q=4, h_kv=2, span="causal+segments", sink="normal"),
            separate(d, b=2, s_q=100, s_kv=180, h_q=3, h_kv=3, span="random", sink="normal"),
            separate(d, s_q=190, s_kv=190, h_q=6, h_kv=2, span="causal", dtype="float16", sink="normal"),
            separate(d, s_q=70, s_kv=300, h_q=12, span="window", dtype="float16"),
        )
    ]
    return (
        *every_d,
        # the smallest, one key, one query, ragged tails
        separate(64, s_q=1, s_kv=1),
        separate(128, s_q=1, s_kv=1000, h_q=7, sink="normal"),
        separate(256, b=3, s_q=1, s_kv=63, h_q=4, h_kv=4),
        separate(128, s_q=300, s_kv=1, h_q=2),
        separate(64, s_q=129, s_kv=65, h_q=5, h_kv=5),
        separate(128, s_q=257, s_kv=383, h_q=9, h_kv=3, span="causal"),
        separate(64, s_q=96, s_kv=64, h_q=4, span="causal"),  # the first 32 rows are empty
        separate(128, b=2, s_q=130, s_kv=77, h_q=4, h_kv=2, span="segments"),
        separate(128, b=4, s_q=90, s_kv=150, h_q=2, span="window+lengths", window=17, features=("nan",)),
        separate(64, s_q=128, s_kv=128, h_q=128),
        # sinks at their ends, large logits, V is K where the kernel reads them apart
        separate(128, s_q=70, s_kv=70, h_q=4, span="causal", sink="+inf"),
        separate(128, s_q=70, s_kv=70, h_q=4, span="causal", sink="-inf"),
        separate(64, s_q=100, s_kv=150, h_q=4, h_kv=2, sink="normal", features=("large",)),
        separate(256, s_q=100, s_kv=150, h_q=4, span="causal", dtype="float16", features=("large",)),
        separate(128, s_q=100, s_kv=150, h_q=4, h_kv=2, shared_kv=True, span="causal", sink="mixed"),
        # 16-bit and 31-bit counts of rows and of elements
        separate(64, s_q=70_000, s_kv=70_000, span="window"),
        separate(128, b=2, s_q=2048, s_kv=2048, h_q=16, h_kv=4, span="causal", sink="normal"),
        separate(128, b=2, s_q=2048, s_kv=2048, h_q=16, span="window", sink="normal"),  # few keys, many tiles of them
        latent(8, s_q=70_000, s_kv=70_000, span="window", sink="normal"),
        latent(64, s_q=70_000, s_kv=70_000, span="window", sink="normal"),  # 2**31 elements and more
        # one latent head, with every number of query heads that a rank may have
        latent(1, s_q=150, s_kv=150, span="causal"),
        latent(7, s_q=50, s_kv=200, span="window", sink="normal"),
        latent(8, b=2, s_q=33, s_kv=130, sink="mixed"),
        latent(16, s_q=64, s_kv=64, span="causal", sink="normal"),
        latent(32, s_q=40, s_kv=190, span="window"),
        latent(64, s_q=30, s_kv=64, span="causal", sink="normal"),
        latent(96, s_q=20, s_kv=97, span="window", window=40),
        latent(128, s_q=20, s_kv=130, span="window", sink="normal"),
        latent(128, s_q=1, s_kv=500, sink="normal"),
        latent(8, s_q=1, s_kv=1),
        latent(8, h_kv=2, s_q=70, s_kv=100, span="causal", sink="normal"),
        latent(21, h_kv=3, s_q=40, s_kv=140, span="random", sink="mixed"),
        latent(16, b=3, s_q=40, s_kv=140, span="lengths", features=("nan",)),
        latent(16, b=3, s_q=40, s_kv=140, span="window+lengths", sink="normal", features=("nan",)),
        latent(8, b=2, s_q=120, s_kv=120, span="causal+segments"),
        latent(8, s_q=300, s_kv=75, span="compressed", ratio=4, sink="normal"),
        latent(64, s_q=160, s_kv=4, span="compressed", ratio=128),  # entries that nobody sees, and rows without entries
        latent(32, s_q=50, s_kv=110, span="causal", sink="normal", features=("large",)),
        latent(16, s_q=64, s_kv=150, span="causal", dtype="float16", sink="normal"),
        latent(128, s_q=16, s_kv=140, span="window", dtype="float16", features=("large",)),
        latent(64, s_q=1024, s_kv=1024, span="causal", sink="normal"),
        latent(128, s_q=2048, s_kv=2048, span="window", sink="normal"),
        # top-k
        sparse(8, s_q=20, topk=64),
        sparse(64, b=2, s_q=9, topk=192, sink="normal", features=("absent", "nan")),
        sparse(128, s_q=5, topk=70, sink="mixed", features=("absent", "lengths", "nan")),
        sparse(1, s_q=30, topk=1, features=("absent",)),
        sparse(7, s_q=30, s_kv=1, topk=5, features=("absent",)),
        sparse(4, b=3, s_q=40, d=64, topk=33, dtype="float16", sink="normal", features=("lengths", "nan")),
        sparse(16, s_q=20, topk=400, sink="+inf"),
        sparse(16, s_q=20, topk=48, sink="-inf", features=("large", "absent")),
        sparse(64, s_q=256, s_kv=4096, topk=1152, sink="normal"),
        # whole layers; a prefill sees some positions both in the window and compressed
        dsv4(8, b=2, s_q=150, s_kv=150, sink="normal"),
        dsv4(64, s_q=24, s_kv=24, sink="mixed", window=8),
        dsv4(16, b=3, s_q=40, s_kv=140, decode=True, sink="normal", features=("lengths", "nan")),
        dsv4(8, s_q=300, s_kv=300, s_c=3, ratio=128, sink="normal", features=("nan",)),
        dsv4(8, b=2, s_q=120, s_kv=120, s_c=30, ratio=4, sink="normal"),
        dsv4(128, s_q=2, s_kv=128, s_c=60, ratio=128, decode=True, sink="mixed"),
        dsv4(8, b=3, s_q=4, s_kv=150, s_c=40, ratio=128, decode=True, sink="normal", features=("lengths", "nan")),
        dsv4(8, b=2, s_q=60, s_kv=60, s_c=15, ratio=4, topk=12, sink="normal", features=("absent",)),
        dsv4(64, s_q=3, s_kv=128, s_c=700, ratio=4, topk=512, decode=True, sink="normal", features=("absent", "nan")),
        dsv4(16, b=2, s_q=30, s_kv=30, s_c=8, ratio=4, topk=6, dtype="float16", features=("absent", "lengths", "nan")),
        dsv4(16, s_q=64, s_kv=64, s_c=16, ratio=4, sink="normal", features=("large",)),
        dsv4(128, s_q=1024, s_kv=1024, s_c=8, ratio=128, sink="normal"),
        # steps of generation: contiguous and paged, in 16 bits and in FP8
        decode(64, s_kv=1),
        decode(8, b=4, s_kv=300, sink="normal"),
        decode(128, s_q=2, s_kv=4608, page=64, ratio=4, topk=1024, sink="normal"),
        decode(16, b=2, s_kv=900, page=64, ratio=4, topk=48, dtype="float16", sink="mixed"),
        decode(128, s_kv=9000, ratio=1, sink="normal"),  # one query of many keys
        *(
            case
            for fp8 in ((), ("fp8",))
            for case in (
                decode(16, b=4, s_q=8, s_kv=500, page=64, sink="mixed", features=("lengths", "nan", *fp8)),
                decode(128, b=4, s_q=3, s_kv=9000, page=2, ratio=128, sink="normal", features=("lengths", "nan", *fp8)),
                decode(7, b=3, s_q=2, s_kv=3000, ratio=4, topk=1, features=("absent", "lengths", "nan", *fp8)),
                decode(64, b=4, s_kv=4000, page=61, ratio=4, topk=512, features=("absent", "nan", *fp8)),
                decode(96, b=4, s_q=5, s_kv=1500, page=576, ratio=4, topk=192, sink="normal", features=fp8),
                decode(
                    8, b=74, s_q=2, s_kv=600, page=69, ratio=4, topk=64, features=("absent", "lengths", "nan", *fp8)
                ),
                decode(
                    64, b=321, s_kv=800, page=256, ratio=4, topk=130, sink="normal", features=("lengths", "nan", *fp8)
                ),
                decode(32, b=2, s_q=2, s_kv=2000, ratio=4, topk=70, features=("large", *fp8)),
            )
        ),
        # DeepSeek-V4.1's: window FP8, compressed FP8 or FP4, of ratios 1 and 2
        decode(64, b=3, s_q=2, s_kv=1300, page=64, ratio=1, topk=512, sink="normal", features=("v41_fp4", "nan")),
        decode(64, b=4, s_kv=2000, page=61, ratio=2, topk=512, features=("v41_fp8", "pages", "absent", "nan")),
        decode(16, b=4, s_q=8, s_kv=500, page=32, ratio=2, sink="mixed", features=("v41_fp4", "pages", "lengths")),
        decode(128, b=2, s_q=2, s_kv=900, page=2, ratio=1, topk=320, features=("v41_fp4", "lengths", "nan")),
        decode(96, b=2, s_q=3, s_kv=700, ratio=128, sink="normal", features=("v41_fp8",)),
        decode(8, b=3, s_q=2, s_kv=300, page=16, sink="normal", features=("v41_fp8", "lengths")),
    )


CASES = _table()
