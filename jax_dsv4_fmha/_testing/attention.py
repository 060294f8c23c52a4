"""Cases of attention: each op's own fields and operands, and (o, lse) by the op, the reference and float64."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import dsv4_attention, dsv4_decode, fmha, gqa_decode, mla_decode, reference, sparse_fmha
from .._check import Implementation
from .._definitions.cache import Cache
from .._definitions.e4m3 import BF16_ROPE
from .._definitions.e4m3 import E4M3 as E4M3_PRODUCTS
from .._definitions.packed import LAYOUTS, quantize_cache
from .._definitions.span import Span
from . import float64
from .case import Case, Judgement, normal, poison
from .compare import E4M3, FP32, FP32_LARGE, KERNEL, compare, differing

_INT32 = np.iinfo(np.int32)
ABSENT = (_INT32.min, -1, "s_kv", _INT32.max)  # every kind of index that names no key

# the absolute tolerance of a kernel is made for |v| < 1; a larger q makes up for it, so logits are about normal
KV_STD = 0.125
Q_STD = 8.0
_LARGE = 64.0

_BYTES_PER_ELEMENT = 32  # of q, at the peak: q and two results in 16 bits, the reference and the comparison in fp32

LAYOUTS_OF = {
    "fp8": ("v4_fp8", "v4_fp8"),
    "v4_fp4": ("v4_fp8", "v4_fp4"),
    "v41_fp8": ("v41_fp8", "v41_fp8"),
    "v41_fp4": ("v41_fp8", "v41_fp4"),
}
"""The layouts of a decode case's window cache and compressed cache, by its feature; other features have no packed
caches.
"""

Operands = tuple[tuple[Any, ...], dict[str, Any]]
"""positional and keyword operands, as NumPy arrays"""


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """One call of an op whose results are (o, lse)."""

    function: ClassVar[Callable[..., Any]]

    s_kv: int = 64
    d: int = 64
    sink: str = "none"  # "none", "normal", "-inf", "+inf", or "mixed": all of these
    features: tuple[str, ...] = ()
    # "nan": keys that nobody can see hold NaN: in fmha beyond every row's stop, in sparse ops where no row points
    # "large": logits of some hundreds
    # "absent": indices that name no key, of every kind, and rows with nothing else
    # "lengths": rows with fewer indices, sequences with fewer keys of the window; steps: idle sequences
    # "ragged": steps: sequences with different numbers of new tokens
    # "drafts": dsv4_decode: new tokens see each other
    # "fp8", "v4_fp4", "v41_fp8", "v41_fp4": dsv4_decode: packed caches, as `LAYOUTS_OF` has them
    # "v32_fp8": mla_decode: a packed cache
    # "pages": dsv4_decode: the window's pages have another size
    # "e4m3": products of e4m3, whose definition tests/test_fp8_products.py compares with float64
    # "bf16_rope": with these, RoPE's part of scores is of bfloat16

    @property
    @abstractmethod
    def keys(self) -> int:
        """About how many keys a row sees."""

    @property
    def work(self) -> int:
        return self.b * self.s_q * self.h_q * self.keys * self.d

    @property
    def d_v(self) -> int:
        """Numbers of a head's o."""
        return self.d

    @property
    def device_bytes(self) -> int:
        return self.b * self.s_q * self.h_q * self.d * _BYTES_PER_ELEMENT

    @property
    def has_large_q(self) -> bool:
        return "large" in self.features

    @property
    def by_e4m3(self) -> bool:
        return "e4m3" in self.features

    @property
    def is_small(self) -> bool:
        return super().is_small and not self.by_e4m3

    def operands(self) -> Operands:
        rng = self.rng()
        q = normal(rng, (self.b, self.s_q, self.h_q, self.d), Q_STD, self.dtype)
        kwargs = {} if self.sink == "none" else {"sink": self._sink(rng)}
        if self.has_large_q:
            q = (q.astype(np.float32) * _LARGE).astype(q.dtype)
        args, others = self._others(rng)
        chosen = BF16_ROPE if "bf16_rope" in self.features else E4M3_PRODUCTS
        precision = {"precision": chosen} if self.by_e4m3 else {}
        return (q, *args), kwargs | others | precision

    @abstractmethod
    def _others(self, rng: np.random.Generator) -> Operands:
        """The operands beside q and the sink."""

    def _sink(self, rng: np.random.Generator) -> Any:
        sink = rng.standard_normal(self.h_q).astype(np.float32)
        if self.sink == "mixed":
            sink[::3], sink[1::3] = -np.inf, np.inf
        elif self.sink != "normal":
            sink[:] = float(self.sink)
        return sink

    def run_float64(self) -> tuple[Any, Any]:
        args, kwargs = self.operands()
        o, lse = getattr(float64, self.op)(*args, **kwargs)
        return o, lse

    def judge(self, implementation: Implementation) -> Judgement:
        if implementation == "reference":
            tolerances = FP32_LARGE if "large" in self.features else FP32
            verdicts = compare(run_reference(self), run_float64(self), tolerances)
            changed = 0
        else:
            got, again = run_into(self, (0.0, np.nan), implementation=implementation)
            changed = sum(differing(a, b) for a, b in zip(got, again, strict=True))
            del again
            verdicts = compare(got, run_reference(self), E4M3 if self.by_e4m3 else KERNEL)
        if changed:
            return False, "; ".join([*map(str, verdicts), f"{changed} elements differ in the second run"])
        if not all(v.passed for v in verdicts):
            return False, "; ".join(map(str, verdicts))
        return True, ", ".join(f"{v.name} within {v.max_abs:.1e}" for v in verdicts)


@dataclass(frozen=True, kw_only=True)
class FmhaCase(AttentionCase):
    """Each row sees a span of keys."""

    op = "fmha"
    function = staticmethod(fmha)

    h_kv: int = 1
    shared_kv: bool = False  # V is K
    span: str = "full"  # a key of SPANS
    window: int = 128
    ratio: int = 0

    @property
    def keys(self) -> int:
        return min(self.s_kv, self.window * 2) if self.span == "window" else self.s_kv

    @property
    def has_large_q(self) -> bool:
        return super().has_large_q and self.shared_kv

    def _others(self, rng: np.random.Generator) -> Operands:
        std = KV_STD * (_LARGE if "large" in self.features and not self.shared_kv else 1)
        k = normal(rng, (self.b, self.s_kv, self.h_kv, self.d), std, self.dtype)
        v = None if self.shared_kv else normal(rng, k.shape, KV_STD, self.dtype)
        span = SPANS[self.span](rng, self)
        if span is None:
            return (k, v), {}
        if "nan" in self.features:
            _, stop = span.bounds(self.b, self.s_q, self.s_kv)
            for x in (k,) if v is None else (k, v):
                poison(x, np.arange(self.s_kv) >= np.asarray(stop).max(1, keepdims=True))
        return (k, v), {"span": span}

    def run_float64(self) -> tuple[Any, Any]:
        args, kwargs = self.operands()
        span = kwargs.pop("span", Span(0, self.s_kv))
        return float64.fmha(*args, *map(np.asarray, span.bounds(self.b, self.s_q, self.s_kv)), **kwargs)


def _random_span(rng: np.random.Generator, c: FmhaCase) -> Span:
    """Any start and stop: outside the keys, the wrong way round, and every tenth row empty."""
    start, stop = (rng.integers(-c.s_kv // 2, c.s_kv * 3 // 2, (c.b, c.s_q), np.int32) for _ in range(2))
    stop[:, ::10] = start[:, ::10]
    return Span(start, stop)


def _segment_ids(rng: np.random.Generator, c: FmhaCase, s: int) -> Any:
    return np.sort(rng.integers(0, 5, (c.b, s), np.int32), axis=1)


SPANS: dict[str, Callable[[np.random.Generator, FmhaCase], Span | None]] = {
    "full": lambda rng, c: None,
    "causal": lambda rng, c: Span.causal(c.s_q, c.s_kv - c.s_q),
    "window": lambda rng, c: _window(c),
    "compressed": lambda rng, c: Span.compressed(c.s_q, c.ratio),
    "lengths": lambda rng, c: _lengths(c),
    "window+lengths": lambda rng, c: _window(c) & _lengths(c),
    "segments": lambda rng, c: Span.segments(_segment_ids(rng, c, c.s_q), _segment_ids(rng, c, c.s_kv)),
    "causal+segments": lambda rng, c: Span.segments(_segment_ids(rng, c, c.s_q)) & Span.causal(c.s_q),
    "random": _random_span,
}


def _window(c: FmhaCase) -> Span:
    return Span.sliding_window(c.s_q, c.window, c.s_kv - c.s_q)


def _lengths(c: FmhaCase) -> Span:
    return Span.lengths(np.linspace(c.s_kv - 1, 0, c.b, dtype=np.int32))


@dataclass(frozen=True, kw_only=True)
class LatentCase(AttentionCase):
    """The keys of one latent head are the values too, and rows may select some of them."""

    shared_kv: ClassVar[bool] = True
    topk: int = 0

    @property
    def has_kernel(self) -> bool:
        return self.topk == 0 or self.d in (512, 576)

    def _indices(self, rng: np.random.Generator, kv: Any) -> dict[str, Any]:
        s_kv = kv.shape[1]
        some = rng.permutation(s_kv)[: max(1, s_kv * 2 // 3)]  # so that there are keys that nobody names
        indices = rng.choice(some, (self.b, self.s_q, self.topk)).astype(np.int32)
        if "absent" in self.features:
            indices = _with_absent(rng, indices, s_kv)
        if "lengths" in self.features:
            indices = _with_fewer(rng, indices)
        if "nan" in self.features:
            for n in range(self.b):
                poison(kv[n : n + 1], ~np.isin(np.arange(s_kv), some)[None])
        return {"indices": indices}


def _with_fewer(rng: np.random.Generator, indices: Any) -> Any:
    """These indices, of which a row has any number, and then -1."""
    topk = indices.shape[2]
    length = rng.integers(0, topk + 2, indices.shape[:2], np.int32)
    return np.where(np.arange(topk) < length[..., None], indices, -1)


def _with_absent(rng: np.random.Generator, indices: Any, s_kv: int) -> Any:
    """These indices, with a third of them and the last row of every batch entry absent."""
    kinds = np.array([s_kv if x == "s_kv" else x for x in ABSENT], np.int32)
    absent = rng.random(indices.shape) < 0.3
    absent[:, -1] = True
    return np.where(absent, rng.choice(kinds, indices.shape), indices)


@dataclass(frozen=True, kw_only=True)
class SparseCase(LatentCase):
    """Each query sees the keys that its indices name. Of keys of 576 numbers the first 512 are values."""

    op = "sparse_fmha"
    function = staticmethod(sparse_fmha)

    @property
    def d_v(self) -> int:
        return 512 if self.d == 576 else self.d

    @property
    def keys(self) -> int:
        return self.topk

    def _others(self, rng: np.random.Generator) -> Operands:
        kv = normal(rng, (self.b, self.s_kv, self.d), KV_STD, self.dtype)
        kwargs = self._indices(rng, kv)
        return (kv, kwargs.pop("indices")), kwargs | ({} if self.d_v == self.d else {"d_v": self.d_v})


@dataclass(frozen=True, kw_only=True)
class LayerCase(LatentCase):
    """Each query sees a window of s_kv keys, and s_c compressed entries or some of them."""

    op = "dsv4_attention"
    function = staticmethod(dsv4_attention)

    window: int = 128
    ratio: int = 0
    s_c: int = 0
    decode: bool = False  # queries at the end of a context, at other offsets in each batch entry

    @property
    def keys(self) -> int:
        return self.topk or self.s_kv

    @property
    def ends(self) -> Any:
        """One past the last query's position, of each batch entry."""
        if not self.decode:
            return np.full(self.b, self.s_q, np.int32)
        return (max(self.s_c * self.ratio, self.s_kv) - 3 * np.arange(self.b)).astype(np.int32)

    @property
    def lengths(self) -> Any:
        """The numbers of keys of the window, by batch entry; None where all have the same."""
        return np.linspace(self.s_kv, 0, self.b, dtype=np.int32) if "lengths" in self.features else None

    def _window(self) -> int | Span:
        if not self.decode and self.lengths is None:
            return self.window
        span = Span.sliding_window(self.s_q, self.window, self.ends - self.s_q if self.decode else 0)
        span = span.keys_from(self.ends - self.s_kv) if self.decode else span
        return span if self.lengths is None else span & Span.lengths(self.lengths)

    def _others(self, rng: np.random.Generator) -> Operands:
        window_kv = normal(rng, (self.b, self.s_kv, self.d), KV_STD, self.dtype)
        kwargs: dict[str, Any] = {"window": self._window()}
        if "nan" in self.features and self.lengths is not None:
            poison(window_kv, np.arange(self.s_kv) >= self.lengths[:, None])
        if not self.s_c:
            return (window_kv,), kwargs
        compressed_kv = normal(rng, (self.b, self.s_c, self.d), KV_STD, self.dtype)
        kwargs |= {"ratio": self.ratio} | ({"q_offset": self.ends - self.s_q} if self.decode else {})
        if self.topk:
            kwargs |= self._indices(rng, compressed_kv)
        elif "nan" in self.features:
            poison(compressed_kv, np.arange(self.s_c) >= (self.ends // self.ratio)[:, None])
        return (window_kv, compressed_kv), kwargs

    def run_float64(self) -> tuple[Any, Any]:
        """The results in float64, by positions and not by Spans."""
        args, kwargs = self.operands()
        kwargs |= {"window": self.window, "lengths": self.lengths}
        kwargs |= {"q_offset": self.ends - self.s_q, "first_key": self.ends - self.s_kv} if self.decode else {}
        return float64.dsv4_attention(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class DecodeCase(LatentCase):
    """A step of generation over caches. The longest sequence has s_kv tokens."""

    op = "dsv4_decode"
    function: ClassVar[Callable[..., Any]] = staticmethod(dsv4_decode)

    s_q: int = 1
    window: int = 128
    ratio: int = 0
    page: int = 0  # entries of a page; 0 means a contiguous cache

    @property
    def keys(self) -> int:
        return self.window + (self.topk or (self.s_kv // self.ratio if self.ratio else 0))

    @property
    def entry(self) -> int:
        """Numbers of an entry of a cache."""
        return self.d

    @property
    def layouts(self) -> tuple[str | None, str | None]:
        """The layouts of the window cache and of the compressed one, where they are packed."""
        return next((LAYOUTS_OF[x] for x in self.features if x in LAYOUTS_OF), (None, None))

    def _others(self, rng: np.random.Generator) -> Operands:
        """The caches: a ring for the window, and all compressed entries."""
        lengths = rng.integers(1, self.s_kv + 1, self.b, np.int32)
        lengths[0] = self.s_kv
        if "lengths" in self.features:
            lengths[1::3] = 0
        kwargs: dict[str, Any] = {"lengths": lengths, "window": self.window}
        first = lengths - self.s_q
        if "ragged" in self.features:
            kwargs["q_offset"] = first = np.maximum(lengths - rng.integers(0, self.s_q + 1, self.b, np.int32), 0)
        if "drafts" in self.features:
            kwargs["is_causal"] = False
        entries = self.window + self.s_q - ("drafts" not in self.features)
        window_layout, layout = self.layouts
        page = 2 * self.page + 1 if "pages" in self.features else self.page
        seen = [np.arange(max(0, n - entries), n) for n in lengths]
        window_cache = self._cache(rng, page, window_layout, entries, seen)
        if not self.ratio:
            return (window_cache,), kwargs
        kwargs["ratio"], entries = self.ratio, max(1, self.s_kv // self.ratio)
        position = first[:, None] + np.arange(self.s_q)
        past = np.where((position >= 0) & (position < lengths[:, None]), (position + 1) // self.ratio, 0)
        if self.topk:
            kwargs |= self._selection(rng, past, entries)
            seen = _named(kwargs["indices"], entries)
        else:
            seen = [np.arange(n) for n in past.max(1)]
        return (window_cache, self._cache(rng, self.page, layout, entries, seen)), kwargs

    def _selection(self, rng: np.random.Generator, past: Any, entries: int) -> dict[str, Any]:
        """Indices of entries in the past, and how many of them count."""
        indices = rng.integers(0, np.maximum(past, 1)[..., None], (self.b, self.s_q, self.topk), np.int32)
        indices[past == 0] = -1
        if "absent" in self.features:
            indices = _with_absent(rng, indices, _capacity(self.page, entries))
        return {"indices": _with_fewer(rng, indices) if "lengths" in self.features else indices}

    def _cache(
        self, rng: np.random.Generator, in_page: int, layout: str | None, entries: int, seen: Sequence[Any]
    ) -> Cache:
        """A cache for that many entries of each sequence; only those that are `seen` have meaning."""
        capacity, page = _capacity(in_page, entries), in_page or entries
        pages = self.b * capacity // page + (3 if in_page else 0)
        order = rng.permutation(pages) if in_page else np.arange(pages)
        table = order[: self.b * capacity // page].reshape(self.b, -1).astype(np.int32)
        pool = normal(rng, (pages, page, self.entry), KV_STD, self.dtype)
        unseen = np.ones((pages, page), bool)
        for row, named in zip(table, seen, strict=True):
            unseen[row[named % capacity // page], named % page] = False
        if layout is not None:
            pool = np.array(quantize_cache(pool, layout))
            if "nan" in self.features:
                _poison_packed(pool, layout, unseen)
        elif "nan" in self.features:
            poison(pool, unseen)
        unused = unseen[table].all(-1)
        table[unused] = rng.choice(np.array([-1, pages, _INT32.max, _INT32.min], np.int32), np.count_nonzero(unused))
        where = table if in_page else None
        return Cache(pool, where) if layout is None else Cache(pool, where, layout)


@dataclass(frozen=True, kw_only=True)
class LatentStepCase(DecodeCase):
    """A step of generation over one cache of latents, all of them or some. The longest sequence has s_kv tokens."""

    op = "mla_decode"
    function = staticmethod(mla_decode)

    @property
    def d_v(self) -> int:
        return {576: 512, 512: 512}.get(self.d, self.d * 3 // 4)

    @property
    def keys(self) -> int:
        return self.topk or self.s_kv

    @property
    def layouts(self) -> tuple[str | None, str | None]:
        return ("v32_fp8" if "v32_fp8" in self.features else None), None

    def _others(self, rng: np.random.Generator) -> Operands:
        lengths = rng.integers(1, self.s_kv + 1, self.b, np.int32)
        lengths[0] = self.s_kv
        if "lengths" in self.features:
            lengths[1::3] = 0
        kwargs: dict[str, Any] = {"lengths": lengths, "d_v": self.d_v}
        first = lengths - self.s_q
        if "ragged" in self.features:
            kwargs["q_offset"] = first = np.maximum(lengths - rng.integers(0, self.s_q + 1, self.b, np.int32), 0)
        position = first[:, None] + np.arange(self.s_q)
        past = np.where((position >= 0) & (position < lengths[:, None]), position + 1, 0)
        seen = [np.arange(n) for n in past.max(1)]
        if self.topk:
            kwargs |= self._selection(rng, past, self.s_kv)
            named = _named(kwargs["indices"], self.s_kv)
            seen = [x[x < n] for x, n in zip(named, past.max(1), strict=True)]
        return (self._cache(rng, self.page, self.layouts[0], self.s_kv, seen),), kwargs


@dataclass(frozen=True, kw_only=True)
class HeadsStepCase(DecodeCase):
    """A step of generation over a cache of keys and one of values. The longest sequence has s_kv tokens."""

    op = "gqa_decode"
    function = staticmethod(gqa_decode)

    h_kv: int = 1
    span: str = "full"  # or "window"
    shared_kv: ClassVar[bool] = False

    @property
    def entry(self) -> int:
        return self.h_kv * self.d

    @property
    def has_kernel(self) -> bool:
        return self.page % 8 == 0

    @property
    def keys(self) -> int:
        return min(self.s_kv, self.window) if self.span == "window" else self.s_kv

    def _others(self, rng: np.random.Generator) -> Operands:
        lengths = rng.integers(1, self.s_kv + 1, self.b, np.int32)
        lengths[0] = self.s_kv
        if "lengths" in self.features:
            lengths[1::3] = 0
        kwargs: dict[str, Any] = {"lengths": lengths} | ({"window": self.window} if self.span == "window" else {})
        first = lengths - self.s_q
        if "ragged" in self.features:
            kwargs["q_offset"] = first = np.maximum(lengths - rng.integers(0, self.s_q + 1, self.b, np.int32), 0)
        oldest = first - self.window + 1 if self.span == "window" else 0 * first
        ends = zip(np.maximum(oldest, 0), np.clip(first + self.s_q, 0, lengths), strict=True)
        seen = [np.arange(*pair) for pair in ends]
        caches = tuple(self._cache(rng, self.page, None, self.s_kv, seen) for _ in range(2))
        if "e4m3_caches" in self.features:
            scales = {name: rng.uniform(0.01, 0.1, self.h_kv).astype(np.float32) for name in ("k_scale", "v_scale")}
            caches = tuple(map(self._as_codes, caches, scales.values()))
            kwargs |= scales
        return caches, kwargs

    def _as_codes(self, cache: Cache, scales: Any) -> Cache:
        codes = np.clip(cache.entries.astype(np.float32) / np.repeat(scales, self.d), -448, 448)
        return replace(cache, entries=codes.astype(ml_dtypes.float8_e4m3fn))


def _capacity(page: int, entries: int) -> int:
    """The number of entries in the pages for so many entries; without pages there are no more."""
    return -(-entries // page) * page if page else entries


def _named(indices: Any, entries: int) -> list[Any]:
    """The entries that some query of a sequence selects."""
    named = (indices >= 0) & (indices < entries)
    return [row[there] for row, there in zip(indices, named, strict=True)]


def _poison_packed(pool: Any, layout: str, where: Any) -> None:
    """NaN, whatever the bytes are read as: in these entries and between pages."""
    pages, page = where.shape
    form = LAYOUTS[layout]
    for start, size in zip(form.starts(0, page), form.parts, strict=True):
        pool[:, start : start + page * size].reshape(pages, page, size)[where] = 255
    pool[:, page * form.entry :] = 255


def run(case: AttentionCase, implementation: Implementation | None = None) -> tuple[Any, Any]:
    """(o, lse) of the op, under `jax.jit`."""
    args, kwargs = case.operands()
    return _call(functools.partial(case.function, implementation=implementation), args, kwargs)


def run_into(case: AttentionCase, fills: Sequence[float], **choices: Any) -> list[tuple[Any, Any]]:
    """(o, lse) of the op with its `choices`, once for each of `fills`.

    The results go into buffers that hold the fill, where the platform can donate them, so an element that is never
    written shows. Operands and compiled op are the same every time.
    """
    args, kwargs = case.operands()
    numbers, arrays = split(kwargs)
    op = functools.partial(case.function, **choices, **numbers)
    call = jax.jit(lambda into, args, arrays: op(*args, **arrays), donate_argnums=0, keep_unused=True)
    q = args[0]
    shape = (*q.shape[:-1], case.d_v)
    args, arrays = jax.device_put((args, arrays))
    return [call((jnp.full(shape, x, q.dtype), jnp.full(q.shape[:-1], x)), args, arrays) for x in fills]


def run_reference(case: AttentionCase) -> tuple[Any, Any]:
    """(o, lse) by the reference in float32, from the very same 16-bit operands."""
    (q, *args), kwargs = case.operands()
    op = getattr(reference, case.op)
    fp32 = lambda q, *args, **kwargs: op(q.astype(jnp.float32), *args, **kwargs)  # noqa: E731
    # called only once, so it should compile fast rather than run fast
    return _call(fp32, (q, *args), kwargs, compiler_options={"xla_gpu_autotune_level": "0"})


def run_float64(case: AttentionCase) -> tuple[Any, Any]:
    """(o, lse) by the loops in float64."""
    return case.run_float64()


def _call(op: Any, args: Any, kwargs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    numbers, arrays = split(kwargs)
    o, lse = jax.jit(lambda args, arrays: op(*args, **arrays, **numbers), **options)(args, arrays)
    return o, lse


def split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands that are known while tracing, and the others."""
    numbers = {name: x for name, x in kwargs.items() if isinstance(x, int | str)}
    return numbers, {name: x for name, x in kwargs.items() if name not in numbers}
