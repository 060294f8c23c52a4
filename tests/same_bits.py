"""Random pairs of calls that have queries in common, whose bits must be equal. On a Hopper GPU:

    python -m tests.same_bits --seconds 60            another --seed draws other pairs
    python -m tests.same_bits --seconds 20 --default  without batch_invariant: it finds differences, and says by what
    python -m tests.same_bits --kinds causal all      of queries that see such keys alone

Every sequence is computed alone once, as a prompt. Then random calls compute some of its tokens again: in a batch, in
chunks, in steps over pages. Where bits differ, the call is repeated with one axis after the other as the plain call has
it, and those that make the difference are named. The exit status is 1 if any query differs.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha import (
    Cache,
    Span,
    dequantize_cache,
    dsv4_attention,
    dsv4_decode,
    fmha,
    head_summed_probabilities,
    lightning_indexer,
    merge,
    quantize_cache,
    sparse_fmha,
)

SEQUENCES, TOKENS, WINDOW = 4, 320, 128
KINDS = {
    "window": 0,
    "list": 4,
    "all": 2,
    "sparse": 1,
    "causal": 0,
    "dense": 0,
    "gradient": 1,
    "indexer": 1,
    "probabilities": 1,
    "merge": 0,
}
"""what queries see, and the tokens of an entry; "dense" has separate K and V of fewer dimensions, "gradient" is that of
"sparse" in q. The last three are `lightning_indexer`, with its scores, `head_summed_probabilities` and `merge`, which
have no mode"""
LISTS = ("list", "sparse", "gradient", "indexer", "probabilities")
CACHES = {
    "rows": (None, None),
    "v4_fp8": ("v4_fp8",) * 2,
    "v4_fp4": ("v4_fp8", "v4_fp4"),
    "v41_fp8": ("v41_fp8",) * 2,
    "v41_fp4": ("v41_fp8", "v41_fp4"),
}
FEW_HEADS = 32
"""at most so many have another order where keys are packed"""


@dataclass(frozen=True)
class World:
    """Sequences, of which every query is computed again and again."""

    kind: str
    caches: str
    heads: int
    dtype: str
    topk: int
    seed: int
    d: int = 512
    exact: bool = True
    """whether the bits must agree; otherwise the numbers, of the reference"""
    invariant: bool = True

    def __str__(self) -> str:
        sizes = f"d {self.d}, {self.heads} heads, {self.dtype}, {self.caches}, top-k {self.topk}"
        return f"{self.kind}, {sizes}, seed {self.seed}"

    @property
    def how(self) -> dict[str, Any]:
        if not self.exact:
            return {"implementation": "reference"}
        return {"batch_invariant": True} if self.invariant else {"implementation": "cubin"}

    @property
    def alike(self) -> dict[str, Any]:
        """`how` of an op without the mode."""
        return {"implementation": "cubin" if self.exact else "reference"}

    @property
    def ratio(self) -> int:
        return KINDS[self.kind]

    @property
    def entries(self) -> int:
        return TOKENS // max(self.ratio, 1)

    @property
    def has_steps(self) -> bool:
        return self.kind in ("window", "list", "all")

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """q, near and far keys as rows, indices, a sink; keys of growing size, so that maxima rise."""
        rng, n, h, t = np.random.default_rng(self.seed), SEQUENCES, self.heads, TOKENS
        dtype = jnp.dtype(self.dtype)

        def keys(length: int, layout: str | None) -> np.ndarray:
            rows = rng.standard_normal((n, length, 512)) * np.geomspace(0.2, 1.5, length)[:, None]
            rows = jnp.asarray(rows, dtype)
            if layout is not None:
                rows = dequantize_cache(quantize_cache(rows, layout), layout)
            return np.asarray(rows)

        near, far = CACHES[self.caches]
        width = self.topk or 1
        past = (np.arange(t) + 1) // max(self.ratio, 1)
        indices = np.floor(rng.random((n, t, width)) * past[:, None]).astype(np.int32)
        indices[rng.random(indices.shape) < 0.1] = -1
        indices = np.where(past[:, None] > 0, indices, -1)
        of_tokens, of_heads = (rng.standard_normal(x, np.float32) for x in ((n, t, 1, 512), (h, 512)))
        return {
            "q": (2 * of_tokens * of_heads).astype(dtype),  # drawn one by one, they would take most of the time
            "near": keys(t, near),
            "far": keys(self.entries, far),
            "indices": indices,
            "sink": rng.standard_normal(h).astype(np.float32),
            "rows": rng.standard_normal((n, t, h), np.float32) + 6,  # weights of index queries, or lse
        }

    @functools.cached_property
    def alone(self) -> tuple[np.ndarray, ...]:
        """The results for every token, each sequence alone: as a prompt; where that is another order, as one step."""
        stepped = self.caches != "rows" and self.heads <= FEW_HEADS
        calls = [
            Step((i,), (TOKENS,), TOKENS, page=64, ring=TOKENS + WINDOW) if stepped else Prompt((i,), 0, TOKENS)
            for i in range(SEQUENCES)
        ]
        return tuple(np.concatenate(x) for x in zip(*(call.run(self) for call in calls), strict=True))


@dataclass(frozen=True)
class Prompt:
    """Tokens first .. first + count of some sequences, in a batch in this order."""

    sequences: tuple[int, ...]
    first: int
    count: int
    before: int = 0
    """window rows further in front than any query sees"""
    room: int = 0
    """entries after the last, of which nothing is seen, and absent places of a list"""
    pool: bool = False
    """whether the keys that a list names are a pool of all sequences"""

    PLAIN = {"before": 0, "room": 0, "pool": False}  # noqa: RUF012

    def without(self) -> Iterator[tuple[str, "Prompt"]]:
        """This call with one axis as the plain call has it, by its name."""
        for name, value in self.PLAIN.items():
            yield name, dataclasses.replace(self, **{name: value})
        yield "batch", dataclasses.replace(self, sequences=self.sequences[:1])
        yield "chunk", dataclasses.replace(self, first=0, count=self.first + self.count)

    def tokens(self) -> list[tuple[int, int]]:
        """Returns the sequence and the position of each row of the result."""
        return [(i, self.first + t) for i in self.sequences for t in range(self.count)]

    def run(self, w: World) -> Any:
        x, at = w.arrays, (list(self.sequences), slice(self.first, self.first + self.count))
        q, sink, first = x["q"][at], x["sink"], self.first
        if w.kind in ("causal", "dense"):
            near = np.pad(x["near"][at[0], : first + self.count], ((0, 0), (0, self.room), (0, 0)), constant_values=1)
            q, kv = q[..., : w.d], (near[:, :, None, : w.d], near[:, :, None, -w.d :])
            return _causal(q, kv[: 1 + (w.d < 512)], sink, np.int32(first), **w.how)
        far = np.pad(x["far"][at[0]], ((0, 0), (0, self.room), (0, 0)), constant_values=1)
        listed = x["indices"][at]
        if w.kind in ("list", "sparse", "gradient"):
            listed = np.pad(listed, ((0, 0), (0, 0), (0, self.room)), constant_values=-1)
        if w.kind == "indexer":
            return _indexer(q[..., :128], far[..., :128], x["rows"][at], np.int32(first), w.topk, **w.alike)
        if w.kind == "merge":
            rows = x["rows"][at]
            return merge([(q, rows), (q[..., ::-1], 12 - rows)], sink)
        if w.kind == "gradient":
            return (_gradient(q, far, listed, sink, **w.how),)
        if w.kind == "probabilities":
            return (_probabilities(q, far, x["rows"][at], listed, **w.alike),)
        if w.kind == "sparse":
            if self.pool:
                listed = np.where(listed < 0, -1, listed + np.arange(len(far))[:, None, None] * far.shape[1])
                far = far.reshape(-1, 512)
            return _sparse(q, far, listed, sink, **w.how)
        begin = max(first - (WINDOW - 1) - self.before, 0)
        near = x["near"][at[0], begin : first + self.count]
        offsets = np.int32(first), np.int32(begin)
        if w.kind == "window":
            return _layer(q, near, None, None, sink, offsets, 0, **w.how)
        return _layer(q, near, far, listed if w.kind == "list" else None, sink, offsets, w.ratio, **w.how)


@dataclass(frozen=True)
class Step:
    """The last `new` tokens of some sequences of these lengths, over pages in random order."""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    new: int
    page: int
    ring: int
    """room of the window cache"""
    room: int = 0
    shuffled: int = 0

    PLAIN = {"page": 64, "ring": 1024, "room": 0, "shuffled": 0}  # noqa: RUF012

    def without(self) -> Iterator[tuple[str, "Step"]]:
        for name, value in self.PLAIN.items():
            yield name, dataclasses.replace(self, **{name: value})
        yield "batch", dataclasses.replace(self, sequences=self.sequences[:1], lengths=self.lengths[:1])
        yield "s_q", dataclasses.replace(self, new=1)

    def tokens(self) -> list[tuple[int, int]]:
        """Position -1 is padding."""
        return [
            (i, n - self.new + t) for i, n in zip(self.sequences, self.lengths, strict=True) for t in range(self.new)
        ]

    def run(self, w: World) -> Any:
        x, rng = w.arrays, np.random.default_rng(self.shuffled)
        where = np.array(self.lengths)[:, None] - self.new + np.arange(self.new)
        at = (np.array(self.sequences)[:, None], np.maximum(where, 0))
        near, far = CACHES[w.caches]
        pages = -(-self.ring // self.page)
        room = pages * self.page
        ring = np.ones((len(self.sequences), room, 512), x["near"].dtype)
        for row, i, n in zip(ring, self.sequences, self.lengths, strict=True):
            held = np.arange(max(n - room, 0), n)
            row[held % room] = x["near"][i, held]
        caches = [_paged(ring, self.page, near, rng)]
        if w.kind != "window":
            size = -(-(w.entries + self.room) // self.page) * self.page
            rows = np.ones((len(self.sequences), size, 512), x["far"].dtype)
            rows[:, : w.entries] = x["far"][list(self.sequences)]
            caches.append(_paged(rows, self.page, far, rng))
        listed = x["indices"][at] if w.kind == "list" else None
        lengths = np.array(self.lengths, np.int32)
        return _step(x["q"][at], caches, lengths, listed, x["sink"], w.ratio, **w.how)


def _paged(rows: np.ndarray, page: int, layout: str | None, rng: np.random.Generator) -> Cache:
    """Rows `[b, n, d]` in pages of a pool, in random order."""
    b, n = len(rows), rows.shape[1] // page
    table = rng.permutation(b * n + 3)[: b * n].astype(np.int32).reshape(b, n)
    pool = np.ones((b * n + 3, page, 512), rows.dtype)
    pool[table] = rows.reshape(b, n, page, 512)
    if layout is None:
        return Cache(jnp.asarray(pool), jnp.asarray(table))
    return Cache(_quantized(pool, layout), jnp.asarray(table), layout)


_HOW = ("batch_invariant", "implementation")
_quantized = jax.jit(quantize_cache, static_argnums=1)


@functools.partial(jax.jit, static_argnames=_HOW)
def _causal(q: Any, kv: Any, sink: Any, first: Any, **how: Any) -> Any:
    return fmha(q, *kv, span=Span.causal(q.shape[1], first), sink=sink, **how)


@functools.partial(jax.jit, static_argnames=_HOW)
def _sparse(q: Any, kv: Any, listed: Any, sink: Any, **how: Any) -> Any:
    return sparse_fmha(q, kv, listed, sink=sink, **how)


@functools.partial(jax.jit, static_argnames=_HOW)
def _gradient(q: Any, kv: Any, listed: Any, sink: Any, **how: Any) -> Any:
    cotangent = q[..., ::-1]
    _, transposed = jax.vjp(lambda q: sparse_fmha(q, kv, listed, sink=sink, deterministic=True, **how)[0], q)
    return transposed(cotangent)[0]


@functools.partial(jax.jit, static_argnames="implementation", static_argnums=4)
def _indexer(q: Any, k: Any, weights: Any, first: Any, topk: int, **how: Any) -> Any:
    span = Span.compressed(q.shape[1], 1, first)
    return lightning_indexer(q, k, weights, topk=topk, span=span, return_scores=True, **how)


@functools.partial(jax.jit, static_argnames="implementation")
def _probabilities(q: Any, kv: Any, lse: Any, listed: Any, **how: Any) -> Any:
    return head_summed_probabilities(q, kv, lse, listed, **how)


@functools.partial(jax.jit, static_argnames=("ratio", *_HOW), static_argnums=6)
def _layer(q: Any, near: Any, far: Any, listed: Any, sink: Any, offsets: Any, ratio: int, **how: Any) -> Any:
    first, begin = offsets
    window = Span.sliding_window(q.shape[1], WINDOW, first).keys_from(begin)
    past = Span.compressed(q.shape[1], ratio, first) if ratio else None
    return dsv4_attention(q, near, far, indices=listed, window=window, ratio=past, sink=sink, **how)


@functools.partial(jax.jit, static_argnames=_HOW, static_argnums=5)
def _step(q: Any, caches: Any, lengths: Any, listed: Any, sink: Any, ratio: int, **how: Any) -> Any:
    return dsv4_decode(
        q, *caches, lengths=lengths, indices=listed, ratio=ratio or None, window=WINDOW, sink=sink, **how
    )


Call = Prompt | Step


def draw(rng: np.random.Generator, w: World) -> Call:
    """A call of any shape."""
    b = int(rng.choice([1, 2, 3, 7, 20, 67]))
    of = tuple(int(i) for i in rng.integers(0, SEQUENCES, b))
    if (w.has_steps and rng.random() < 0.6) or (w.caches != "rows" and w.heads <= FEW_HEADS):
        new = int(rng.choice([1, 2, 3, 5, 8, 64]))
        new = min(new, 512 // b + 1)
        lengths = tuple(int(n) for n in rng.integers(0, TOKENS + 1, b))
        ring = WINDOW + new - 1 + int(rng.choice([0, 1, 37, 512]))
        page = int(rng.choice([8, 16, 64]))
        return Step(of, lengths, new, page, ring, room=int(rng.choice([0, 5, 700])), shuffled=int(rng.integers(1, 99)))
    count = int(rng.choice([1, 5, 16, 63, 64, 200]))
    count = min(count, 1000 // b + 1)
    first = int(rng.integers(0, TOKENS - count + 1))
    return Prompt(of, first, count, int(rng.choice([0, 3, 64])), int(rng.choice([0, 1, 130])), bool(rng.integers(2)))


def differing(w: World, call: Call) -> tuple[int, int]:
    """(queries that were compared, those that differ)"""
    results = [np.asarray(x) for x in call.run(w)]
    tokens = np.array(call.tokens())
    there = tokens[:, 1] >= 0
    wrong = np.zeros(there.sum(), bool)
    for got, alone in zip(results, w.alone, strict=True):
        got = got.reshape(len(tokens), -1)[there]
        wanted = alone[tuple(tokens[there].T)].reshape(got.shape)
        if w.exact:
            bits = f"u{got.itemsize}"
            wrong |= (got.view(bits) != wanted.view(bits)).any(1)
        else:
            near = np.isclose(*(x.astype(np.float32) for x in (got, wanted)), rtol=0.02, atol=0.02)
            wrong |= ~near.all(1)
    return len(wrong), int(wrong.sum())


def guilty(w: World, call: Call) -> list[str]:
    """The axes of a call without which its queries have the bits that they have alone."""
    return [name for name, other in call.without() if other != call and differing(w, other)[1] == 0]


def worlds(seed: int, kinds: Sequence[str] = tuple(KINDS), **how: Any) -> Iterator[World]:
    rng = np.random.default_rng(seed)
    for i in range(10**9):
        kind = kinds[i % len(kinds)]
        caches = str(rng.choice(list(CACHES))) if kind in ("window", "list", "all") else "rows"
        caches = CACHES[caches][0] if kind == "window" and caches != "rows" else caches
        heads = int(rng.choice([64, 128, 16, 5, 100]))
        dtype = str(rng.choice(["bfloat16", "float16"])) if kind == "dense" else "bfloat16"
        heads = int(rng.choice([32, 64])) if kind == "indexer" else heads
        topk = int(rng.choice([64, 100, 256])) if kind in LISTS else 0
        d = int(rng.choice([64, 128, 256])) if kind == "dense" else 512
        yield World(kind, caches, heads, dtype, topk, int(rng.integers(2**31)), d, **how)


def fuzz(seconds: float, seed: int = 0, calls: int = 8, **how: Any) -> tuple[Counter[str], list[str]]:
    """Compares calls for so many seconds; returns how many queries, by what they see, and calls, and what differs."""
    end, compared, found = time.monotonic() + seconds, Counter[str](), []
    rng = np.random.default_rng(seed)
    for w in worlds(seed, **how):
        for _ in range(calls):
            if time.monotonic() > end:
                return compared, found
            call = draw(rng, w)
            n, wrong = differing(w, call)
            compared.update({w.kind: n, "all queries": n, "calls": 1})
            if wrong:
                found.append(
                    f"{w}: {wrong} of {n} queries differ, by {guilty(w, call) or 'more than one axis'}: {call}"
                )
                print(found[-1], flush=True)
    raise AssertionError("there is no last world")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what queries see")
    parser.add_argument("--default", action="store_true", help="without batch_invariant")
    parser.add_argument("--reference", action="store_true", help="numbers of the reference, to try this program")
    args = parser.parse_args()
    compared, found = fuzz(
        args.seconds, args.seed, kinds=args.kinds, exact=not args.reference, invariant=not args.default
    )
    print(f"{compared.pop('all queries')} pairs of queries in {compared.pop('calls')} calls, {len(found)} calls differ")
    print(", ".join(f"{kind} {n}" for kind, n in compared.items()))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
