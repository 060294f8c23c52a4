"""A small engine's loop over paged caches: requests come, read a prompt in chunks, say tokens, and go. Pages are shared
between requests with a common beginning, freed, poisoned with NaN, and used again.

In every step what `dsv4_decode` gives is held against `reference.dsv4_attention` over copies of the entries that know
nothing of pages. No page of a request is anyone's afterwards, and no memory.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Cache, dequantize_cache, dsv4_decode, quantize_cache, reference
from jax_dsv4_fmha._host import attention
from jax_dsv4_fmha._testing.compare import FP32, KERNEL, Tolerance
from tests.helpers import assert_right, kernels_in_graphs

PAIR = ("v41_fp8", "v41_fp4")
GRAPHS = {"xla_gpu_graph_min_graph_size": "1"}  # CUDA graphs of whatever there is


@dataclasses.dataclass(frozen=True)
class Config:
    places: int
    room: int  # tokens of a request
    chunk: int  # tokens of a prompt that are read at once
    heads: int
    d: int
    window: int
    ratio: int
    topk: int
    page: int  # entries, of either cache
    layouts: tuple[Any, Any]  # of the window cache and the compressed one; None is `dtype`
    dtype: Any = jnp.bfloat16
    ahead: int = 2  # tokens that are said in a step, of which all except the first may turn out wrong

    @property
    def unit(self) -> int:
        """Tokens that fill a page of the compressed cache: what requests share is so many whole ones."""
        return self.page * self.ratio

    def pools(self) -> tuple[int, int]:
        """Pages, of the window's entries and of the compressed ones: some fewer than all places at their ends need."""
        near = -(-(self.window + self.chunk + 2 * self.unit) // self.page) + 1
        return self.places * min(near, self.room // self.page), self.places * (self.room // self.unit)


class Pages:
    """Which pages of a pool are whose."""

    def __init__(self, pages: int):
        self.owners = np.zeros(pages, int)  # how many requests have it

    def left(self) -> int:
        return int((self.owners == 0).sum())

    def new(self, rng: np.random.Generator) -> int:
        page = int(rng.choice(np.flatnonzero(self.owners == 0)))
        self.owners[page] = 1
        return page

    def share(self, pages: Any) -> None:
        self.owners[[page for page in pages if page >= 0]] += 1

    def give_back(self, pages: Any) -> list[int]:
        """Those that nobody has any more."""
        mine = [page for page in pages if page >= 0]
        self.owners[mine] -= 1
        return [page for page in mine if self.owners[page] == 0]


@dataclasses.dataclass
class Request:
    prompt: int  # tokens
    wanted: int  # tokens in all
    tables: tuple[np.ndarray, np.ndarray]  # pages of either cache, -1 where there is none
    tokens: int = 0  # in the caches


class Engine:
    def __init__(self, c: Config, seed: int, implementation: Any, tolerances: dict[str, Tolerance], options: Any):
        self.c, self.rng = c, np.random.default_rng(seed)
        self.pools = tuple(Pages(n) for n in c.pools())
        self.requests: list[Request | None] = [None] * c.places
        self.freed: tuple[list[int], list[int]] = ([], [])
        self.served = self.shared = self.moved_on = 0
        self.in_use: list[int] = []  # bytes of the device's memory, every 100 steps
        self.pages = tuple(
            Cache.zeros(n, c.page, c.d, c.dtype, layout=layout).entries
            for n, layout in zip(c.pools(), c.layouts, strict=True)
        )
        self.pages = tuple(map(_poisoned, self.pages, (jnp.arange(n) for n in c.pools())))
        self.kept = tuple(jnp.zeros((c.places, n, c.d), c.dtype) for n in (c.room, c.room // c.ratio))
        self.worst = jnp.zeros(2)  # elements that are wrong, and how many were looked at
        jit = functools.partial(jax.jit, compiler_options=options)
        self.poison = jit(_poisoned, donate_argnums=0)
        self.step = jit(functools.partial(_step, c, implementation), static_argnums=0, donate_argnums=1)
        check = functools.partial(_check, c, tolerances)
        self.check = jax.jit(check, donate_argnums=(0, 1), compiler_options={"xla_gpu_autotune_level": "0"})

    def admit(self, place: int) -> None:
        """A new request, which may begin as another has begun."""
        c, rng = self.c, self.rng
        wanted = int(rng.integers(2, c.room + 1))
        tables = (np.full(c.room // c.page, -1), np.full(c.room // c.unit, -1))
        request = Request(int(rng.integers(1, wanted)), wanted, tables)
        parents = [i for i, r in enumerate(self.requests) if r is not None and c.unit <= r.tokens < wanted]
        if parents and rng.random() < 0.7:
            parent = self.requests[int(rng.choice(parents))]
            request.tokens = parent.tokens // c.unit * c.unit
            for pool, mine, theirs, tokens in zip(self.pools, tables, parent.tables, (c.page, c.unit), strict=True):
                mine[: request.tokens // tokens] = theirs[: request.tokens // tokens]
                pool.share(mine)
            source = np.arange(c.places)
            source[place] = self.requests.index(parent)
            self.kept = tuple(_rows(x, source) for x in self.kept)
            request.prompt = max(request.prompt, request.tokens)
            self.shared += 1
        self.requests[place] = request
        self.served += 1

    def has_room(self) -> bool:
        """Whether every request there is, and one more, may go on to its end."""
        c = self.c
        needed = c.pools()[0] // c.places, c.room // c.unit
        count = sum(r is not None for r in self.requests) + 1
        return all(count * n <= len(pool.owners) for n, pool in zip(needed, self.pools, strict=True))

    def grow(self, request: Request, tokens: int) -> None:
        """Pages for so many tokens."""
        for pool, table, each in zip(self.pools, request.tables, (self.c.page, self.c.unit), strict=True):
            for i in range(request.tokens // each, -(-tokens // each)):
                if table[i] < 0:
                    table[i] = pool.new(self.rng)

    def leave_behind(self, request: Request) -> None:
        """The window's pages that neither this request nor one that begins as it did will look at."""
        first = max(request.tokens // self.c.unit * self.c.unit - self.c.window, 0) // self.c.page
        gone = request.tables[0][:first]
        self.moved_on += int((gone >= 0).sum())
        self.freed[0].extend(self.pools[0].give_back(gone))
        gone[:] = -1

    def release(self, place: int) -> None:
        for freed, pool, table in zip(self.freed, self.pools, self.requests[place].tables, strict=True):
            freed.extend(pool.give_back(table))
        self.requests[place] = None

    def clear(self) -> None:
        """Poison what was given back: a whole number of times the same call."""
        pages = []
        for entries, freed in zip(self.pages, self.freed, strict=True):
            while freed:
                some = [freed.pop() for _ in range(min(8, len(freed)))]
                entries = self.poison(entries, np.resize(some, 8))
            pages.append(entries)
        self.pages = tuple(pages)

    def work(self, key: jax.Array) -> None:
        """One call: a chunk for all places that still read, if there are any, else a step for all that say."""
        c, rng = self.c, self.rng
        for place in np.flatnonzero([r is None for r in self.requests]):
            if self.has_room() and rng.random() < 0.7:
                self.admit(place)
        reads = [r is not None and r.tokens < r.prompt for r in self.requests]
        lengths, start = np.zeros(c.places, np.int32), np.zeros(c.places, np.int32)
        for i, r in enumerate(self.requests):
            if r is not None and reads[i] == any(reads):
                start[i] = r.tokens
                lengths[i] = min(r.tokens + c.chunk, r.prompt) if reads[i] else min(r.tokens + c.ahead, r.wanted)
                self.grow(r, lengths[i])
        tables = [
            np.stack([np.full_like(self._no_pages(which), -1) if r is None else r.tables[which] for r in self.requests])
            for which in range(2)
        ]
        s_q = c.chunk if any(reads) else c.ahead
        tables = [table.astype(np.int32) for table in tables]
        self.pages, new, results = self.step(s_q, self.pages, tables, start, lengths, key)
        self.kept, self.worst = self.check(self.kept, self.worst, new, results, start, lengths)
        for i, r in enumerate(self.requests):
            if r is None or lengths[i] == 0:
                continue
            r.tokens = int(lengths[i])
            if not reads[i] and r.tokens < r.wanted:  # what was guessed wrong is written anew
                r.tokens = max(int(start[i]) + 1, r.tokens - int(rng.integers(0, c.ahead)))
            if r.tokens == r.wanted or rng.random() < 0.01:
                self.release(i)
            else:
                self.leave_behind(r)
        self.clear()

    def _no_pages(self, which: int) -> np.ndarray:
        return np.empty(self.c.room // (self.c.page, self.c.unit)[which], int)


def _poisoned(entries: jax.Array, pages: Any) -> jax.Array:
    return entries.at[pages].set(0xFF if entries.dtype == jnp.uint8 else jnp.nan)


@functools.partial(jax.jit, donate_argnums=0)
def _rows(x: jax.Array, source: Any) -> jax.Array:
    return x[source]


def _step(c: Config, implementation: Any, s_q: int, pages: Any, tables: Any, start: Any, lengths: Any, key: Any) -> Any:
    """Append what is new, and attend: (pages, (entries, positions) of either cache, (q, indices, o, lse))."""
    caches = [
        Cache(x, jnp.asarray(t), layout or "v4_fp8") for x, t, layout in zip(pages, tables, c.layouts, strict=True)
    ]
    keys = jax.random.split(key, 4)
    entries = [0.1 * jax.random.normal(k, (c.places, s_q, c.d), c.dtype) for k in keys[:2]]
    position = start[:, None] + jnp.arange(s_q, dtype=jnp.int32)
    position = jnp.where(position < lengths[:, None], position, -1)
    whole = jnp.where((position >= 0) & (position % c.ratio == c.ratio - 1), position // c.ratio, -1)
    near, far = (x.append(y, at) for x, y, at in zip(caches, entries, (position, whole), strict=True))
    q = 8 * jax.random.normal(keys[2], (c.places, s_q, c.heads, c.d), c.dtype)
    past = jnp.maximum(lengths // c.ratio, 1)[:, None, None]
    indices = jax.random.randint(keys[3], (c.places, s_q, c.topk), -2, past + 2)
    o, lse = dsv4_decode(
        q, near, far, lengths=lengths, indices=indices, ratio=c.ratio, window=c.window, implementation=implementation
    )
    held = [(x.as_held(y), at) for x, y, at in zip(caches, entries, (position, whole), strict=True)]
    return (near.entries, far.entries), held, (q, indices, o, lse)


def _check(c: Config, tolerances: Any, kept: Any, worst: Any, new: Any, results: Any, start: Any, lengths: Any) -> Any:
    """The copies with what is new in them, and what is wrong of the results so far."""

    def write(kept: jax.Array, entries: jax.Array, at: jax.Array) -> jax.Array:
        return kept.at[jnp.where(at < 0, kept.shape[0], at)].set(entries.astype(kept.dtype), mode="drop")

    window, entries = (jax.vmap(write)(x, *y) for x, y in zip(kept, new, strict=True))
    q, indices, *got = results
    want = reference.dsv4_attention(
        q.astype(jnp.float32), window, entries, q_offset=lengths - q.shape[1], indices=indices, ratio=c.ratio,
        window=c.window,
    )  # fmt: skip
    position = lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1])
    there = (position >= 0) & (lengths > 0)[:, None]
    asked = ~there | (position >= start[:, None])  # what an earlier token sees may be gone
    wrong = jnp.zeros(())
    for x, y, t, nothing in zip(got, want, tolerances.values(), (0, -jnp.inf), strict=True):
        there, asked = (m.reshape(*position.shape, *[1] * (x.ndim - 2)) for m in (there, asked))
        y, x = jnp.where(there, y, nothing), x.astype(jnp.float32)
        off = jnp.abs(x - y)
        wrong += (asked & (x != y) & ~(off <= t.abs) & ~(off <= t.rel * jnp.abs(y))).sum()
    return (window, entries), worst + jnp.stack([wrong, there.sum().astype(jnp.float32)])


def serve(c: Config, steps: int, implementation: Any, tolerances: Any, options: Any = None) -> Engine:
    """So many steps, then none that is new, until all have gone."""
    engine, key = Engine(c, 0, implementation, tolerances, options), jax.random.key(1)
    for i in range(steps):
        engine.work(jax.random.fold_in(key, i))
        if i % 100 == 99:
            assert engine.worst[0] == 0, f"{engine.worst[0]} elements are wrong by step {i}"
            jax.block_until_ready((engine.pages, engine.kept))
            engine.in_use.append((engine.worst.device.memory_stats() or {}).get("bytes_in_use", 0))
    for place, request in enumerate(engine.requests):
        if request is not None:
            engine.release(place)
    engine.clear()
    return engine


def assert_all_is_well(engine: Engine) -> None:
    wrong, looked_at = np.asarray(engine.worst)
    assert wrong == 0 and looked_at > 0
    assert engine.served > 3 and engine.shared > 0 and engine.moved_on > 0, "too little has happened"
    for pool, entries, layout in zip(engine.pools, engine.pages, engine.c.layouts, strict=True):
        assert pool.left() == len(pool.owners), "pages are still someone's"
        value = np.asarray(entries)
        assert (value == 0xFF).all() if layout else np.isnan(value.astype(np.float32)).all(), "a page was not freed"


SMALL = Config(3, 48, 3, 2, 16, 5, 2, 4, 2, (None, None), jnp.float32, ahead=3)  # which compiles each function once
LARGE = Config(24, 1024, 64, 64, 512, 128, 4, 96, 16, (None, None))


def test_an_engine_s_loop():
    """Sixty steps of it, in jnp; the GPU has 2000."""
    assert_all_is_well(serve(SMALL, 60, None, FP32))


@pytest.mark.gpu
@pytest.mark.parametrize("heads, s_q, layouts", [(128, 1, (None, None)), (16, 2, (None, None)), (64, 2, PAIR)], ids=str)
def test_lengths_from_none_to_a_million(cuda, heads, s_q, layouts):
    """512 places, some idle, of sequences that share most pages with others; some of them against NumPy."""
    b, ratio, page, topk, window, pages = 512, 4, 64, 96, 128, 700
    rng = np.random.default_rng(0)
    lengths = rng.choice([0, 1, 5, 130, 4_000, 65_536, 1_000_000], b)
    lengths[:7] = [0, 1, 5, 130, 4_000, 65_536, 1_000_000]
    tables = [rng.integers(0, pages, (b, -(-1_000_000 // n // page))).astype(np.int32) for n in (1, ratio)]
    held = (0.125 * rng.standard_normal((2, pages, page, 512))).astype(jnp.bfloat16)
    with jax.default_device(cuda):
        packed = [
            jnp.asarray(x) if how is None else quantize_cache(x, how) for x, how in zip(held, layouts, strict=True)
        ]
        near, far = (
            Cache(x, jnp.asarray(t), how or "v4_fp8") for x, t, how in zip(packed, tables, layouts, strict=True)
        )
        q = (8 * rng.standard_normal((b, s_q, heads, 512))).astype(jnp.bfloat16)
        indices = rng.integers(-1, np.maximum(lengths // ratio, 1)[:, None, None] + 1, (b, s_q, topk)).astype(np.int32)
        f = jax.jit(functools.partial(dsv4_decode, ratio=ratio, window=window, implementation="cubin"))
        got = f(q, near, far, lengths=jnp.asarray(lengths, jnp.int32), indices=indices)
        held = [
            np.asarray(x if how is None else dequantize_cache(x, how), np.float64)
            for x, how in zip(packed, layouts, strict=True)
        ]
    o, lse = np.zeros((7, s_q, heads, 512)), np.full((7, s_q, heads), -np.inf)
    for n, i in itertools.product(range(7), range(s_q)):
        p = lengths[n] - s_q + i
        if p < 0:
            continue
        listed = indices[n, i][(indices[n, i] >= 0) & (indices[n, i] < (p + 1) // ratio)]
        seen = (np.arange(max(p - window + 1, 0), p + 1), listed)
        keys = np.concatenate([x[t[n, at // page], at % page] for x, t, at in zip(held, tables, seen, strict=True)])
        logits = q[n, i].astype(np.float64) @ keys.T * 512**-0.5
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        lse[n, i] = (top + np.log(weights.sum(-1, keepdims=True)))[:, 0]
        o[n, i] = weights @ keys / weights.sum(-1, keepdims=True)
    assert_right([np.asarray(x[:7], np.float64) for x in got], (o, lse))
    idle = lengths == 0
    assert (
        (got[0][idle] == 0).all()
        and np.isneginf(got[1][idle]).all()
        and np.isfinite(np.asarray(got[0], np.float32)).all()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", [(None, None), ("v4_fp8", "v4_fp8"), PAIR], ids=str)
def test_soak(cuda, layouts, monkeypatch):
    """2000 steps under CUDA graphs, in which no device memory is lost. Each makes every launch that a call may make:
    for queries with whole keys, for the last eight, whose keys are split, and for the merge.
    """
    monkeypatch.setattr(attention, "_whole", lambda _, q, __: q.shape[0] * q.shape[1] - 8)
    monkeypatch.setattr(attention, "split_count", lambda *_: 3)
    c = dataclasses.replace(LARGE, layouts=layouts)
    with jax.default_device(cuda):
        engine = serve(c, 2000, "cubin", KERNEL, GRAPHS)
        assert_all_is_well(engine)
        found = kernels_in_graphs(lambda: engine.work(jax.random.key(2)) or engine.kept)
    assert all(is_graph for name, is_graph in found.items() if name.startswith("mla_")), found
    assert any(name.startswith("mla_") for name in found)
    assert engine.in_use[-1] <= max(engine.in_use[2:4]), engine.in_use
