"""The lightning indexer's cases: kernels against the reference in float32, and that against float64 in NumPy."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Implementation
from .._definitions import indexer as definition
from .._definitions.cache import Cache
from .._definitions.packed import quantize_cache
from .._definitions.quantized import Quantized
from .._definitions.span import Span
from .._ops.indexer import indexer_blocks, lightning_indexer, quantize_indexer
from .._ops.indexer_keys import E4M3
from .._ops.indexer_training import indexer_scores
from .case import Case, Judgement, judgement

_D = 128
_BLOCK, _BLOCKS = 8, 12  # of a choice in two levels
_LIMITS = {"scores": 1e-5, "dq": 6e-3, "dk": 6e-3, "dweights": 1e-4}
"""The error that kernels may have, relative to the norm of the right result; gradients round their operands to 16
bits.
"""

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class IndexerCase(Case):
    """One call over s_c compressed entries, of which a query gets topk."""

    s_kv: ClassVar[int] = 0  # no keys of attention; a part of the name
    d: ClassVar[int] = _D

    b: int = 2
    h_q: int = 64
    topk: int
    s_c: int

    @property
    def work(self) -> int:
        return self.b * self.s_q * self.h_q * self.topk * self.d

    def operands(self) -> dict[str, Any]:
        """q, k, weights in the case's dtypes, and what the op takes beside them."""
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Any:
            return jnp.asarray(rng.standard_normal(shape, np.float32))

        q = normal(self.b, self.s_q, self.h_q, _D)
        return self._with_others(rng, q, normal(self.b, self.s_c, _D), normal(self.b, self.s_q, self.h_q))

    @abstractmethod
    def _with_others(self, rng: np.random.Generator, q: Any, k: Any, weights: Any) -> dict[str, Any]:
        """The operands, from those in float32."""

    def judge(self, implementation: Implementation) -> Judgement:
        return judgement(self.complaints(implementation), "what is chosen, scores or gradients within limits")

    @abstractmethod
    def complaints(self, implementation: Implementation) -> list[str]:
        """The errors of an implementation: kernels beside the reference, the reference beside NumPy in float64."""


@dataclass(frozen=True, kw_only=True)
class ChoiceCase(IndexerCase):
    """The entries with the greatest scores."""

    op = "lightning_indexer"

    ratio: int = 0
    page: int = 0

    def _with_others(self, rng: np.random.Generator, q: Any, k: Any, weights: Any) -> dict[str, Any]:
        if jnp.dtype(self.dtype) == E4M3:
            return dict(zip(("q", "k", "weights"), quantize_indexer(q, k, weights), strict=True)) | {"raw": k}
        return {"q": q.astype(self.dtype), "k": k.astype(self.dtype), "weights": weights}

    def position(self) -> Numbers:
        """The position of each batch entry's first query: the first sees few entries, the second nearly all."""
        ratio = self.ratio or 1
        return np.array([3 * ratio, self.s_c * ratio - self.s_q - 2])

    def visible(self) -> Numbers:
        """bool `[b, s_q, s_c]`."""
        stop = (self.position()[:, None] + np.arange(self.s_q) + 1) // (self.ratio or 1)
        return np.arange(self.s_c) < stop[..., None]

    def shown(self) -> Span:
        """The Span of the entries that are `visible`."""
        return Span.compressed(self.s_q, self.ratio or 1, jnp.asarray(self.position(), jnp.int32))

    def keys(self, x: dict[str, Any]) -> Any:
        if not self.page:
            return x["k"]
        pages = jnp.asarray(np.random.default_rng(1).permutation(self.b * self.s_c // self.page), jnp.int32)
        packed = jnp.dtype(self.dtype) == E4M3
        entries = (x["raw"] if packed else x["k"]).reshape(-1, self.page, _D)
        entries = quantize_cache(entries, "index_fp8") if packed else entries
        where = jnp.zeros_like(entries).at[pages].set(entries)
        return Cache(where, pages.reshape(self.b, -1), "index_fp8")

    def choose(self, x: dict[str, Any], implementation: Implementation) -> tuple[Numbers, Numbers]:
        """The entries and their scores."""
        indices, scores = lightning_indexer(
            x["q"], self.keys(x), x["weights"], topk=self.topk, span=self.shown(), blocks=x.get("blocks"), block=_BLOCK,
            return_scores=True, implementation=implementation,
        )  # fmt: skip
        return np.asarray(indices), np.asarray(scores)

    def complaints(self, implementation: Implementation) -> list[str]:
        x, exact = self.operands(), implementation == "reference"
        scores = scores_float64(x) if exact else _all_scores(x)
        limit = np.abs(scores).max() * (1e-5 if exact or jnp.dtype(self.dtype) != E4M3 else 1e-3)
        return self._complaints(x, self.visible(), scores, limit, implementation)

    def _complaints(
        self, x: dict[str, Any], seen: Numbers, scores: Numbers, limit: float, implementation: Implementation
    ) -> list[str]:
        """Complains unless those of the `seen` entries that have the greatest `scores` are chosen, up to the limit."""
        (indices, values), again = self.choose(x, implementation), self.choose(x, implementation)
        wrong = [] if np.array_equal(indices, again[0]) else ["other entries in the second run"]
        for n, i in np.ndindex(*indices.shape[:2]):
            entries = indices[n, i][indices[n, i] >= 0]
            row, count = np.where(seen[n, i], scores[n, i], -np.inf), int(min(seen[n, i].sum(), self.topk))
            if len(entries) != count or (np.diff(entries) <= 0).any() or not seen[n, i, entries].all():
                wrong.append(
                    f"query {i} of batch entry {n} chose {len(entries)} entries, not {count} that it sees, in order"
                )
            elif not np.abs(values[n, i, :count] - row[entries]).max(initial=0.0) <= limit:
                wrong.append(f"query {i} of batch entry {n} has wrong scores")
            elif count and (np.sort(row)[::-1][:count] > row[entries].min() + 2 * limit).sum() > count - 1:
                wrong.append(f"query {i} of batch entry {n} left out an entry with a greater score")
        return wrong


@dataclass(frozen=True, kw_only=True)
class BlocksCase(ChoiceCase):
    """A choice in two levels: blocks with the greatest scores, then entries of these."""

    op = "indexer_blocks"

    def choose_blocks(self, x: dict[str, Any], implementation: Implementation) -> Numbers:
        blocks = indexer_blocks(
            x["q"], self.keys(x), x["weights"], count=_BLOCKS, block=_BLOCK, span=self.shown(),
            implementation=implementation,
        )  # fmt: skip
        return np.asarray(blocks)

    def _complaints(
        self, x: dict[str, Any], seen: Numbers, scores: Numbers, limit: float, implementation: Implementation
    ) -> list[str]:
        blocks = self.choose_blocks(x, implementation)
        inside = seen & (blocks[..., None] == np.arange(self.s_c) // _BLOCK).any(2)
        wrong = _complaints_of_blocks(blocks, seen, scores, limit)
        return wrong + super()._complaints(x | {"blocks": blocks}, inside, scores, limit, implementation)


def _complaints_of_blocks(blocks: Any, seen: Any, scores: Any, limit: float) -> list[str]:
    wrong = []
    for n, i in np.ndindex(*blocks.shape[:2]):
        row = np.where(seen[n, i], scores[n, i], -np.inf)
        greatest = np.pad(row, (0, -len(row) % _BLOCK), constant_values=-np.inf).reshape(-1, _BLOCK).max(1)
        there = int(np.isfinite(greatest).sum())
        greatest[max(there - 1, 0)] = np.inf  # the newest
        chosen, count = blocks[n, i][blocks[n, i] >= 0], min(there, blocks.shape[2])
        if len(chosen) != count or (np.diff(chosen) <= 0).any() or not (chosen < there).all():
            wrong.append(f"query {i} of batch entry {n} chose {len(chosen)} blocks, not {count} that it sees, in order")
        elif count and (np.sort(greatest)[::-1][:count] > greatest[chosen].min() + 2 * limit).sum() > count - 1:
            wrong.append(f"query {i} of batch entry {n} left out a block with a greater score, or the newest")
    return wrong


@dataclass(frozen=True, kw_only=True)
class ScoresCase(IndexerCase):
    """Scores at topk given entries, and their gradients."""

    op = "indexer_scores"

    def _with_others(self, rng: np.random.Generator, q: Any, k: Any, weights: Any) -> dict[str, Any]:
        indices = jnp.asarray(rng.integers(-9, self.s_c + 9, (self.b, self.s_q, self.topk)), jnp.int32)
        cotangent = jnp.asarray(rng.standard_normal(indices.shape, np.float32))
        return {"q": q.astype(self.dtype), "k": k.astype(self.dtype), "weights": weights, "indices": indices,
                "cotangent": cotangent}  # fmt: skip

    def results(self, x: dict[str, Any], implementation: Implementation) -> dict[str, Any]:
        """The results by the names of `_LIMITS`; absent entries have score 0."""
        there = (x["indices"] >= 0) & (x["indices"] < x["k"].shape[1])

        def f(q: Any, k: Any, weights: Any) -> Any:
            return indexer_scores(q, k, weights, x["indices"], implementation=implementation)

        scores, back = jax.vjp(f, *(x[name] for name in ("q", "k", "weights")))
        return dict(zip(_LIMITS, (jnp.where(there, scores, 0), *back(x["cotangent"])), strict=True))

    def complaints(self, implementation: Implementation) -> list[str]:
        x, exact = self.operands(), implementation == "reference"
        got, second = self.results(x, implementation), self.results(x, implementation)
        wanted = scored_float64(x) if exact else self.results(x, "reference")
        limits = _LIMITS | ({"dq": 5e-3, "dk": 5e-3} if exact else {})  # rounded to the operands' dtype
        off = {name: _distance(got[name], wanted[name]) for name in _LIMITS}
        wrong = [f"{name} off by {part:.1e}" for name, part in off.items() if not part <= limits[name]]
        same = all(np.array_equal(got[n], second[n]) for n in ("scores", "dq", "dweights"))
        return wrong + ([] if same else ["other bits in the second run"])


def _all_scores(x: dict[str, Any]) -> Numbers:
    k, scales = _codes_and_scales(x["k"])
    return np.asarray(definition.scores(x["q"], k, x["weights"]) * scales)


def _codes_and_scales(k: Any) -> tuple[Any, Any]:
    """Keys without scales, and what scores are multiplied by."""
    return (k.codes, k.scales[:, None]) if isinstance(k, Quantized) else (k, 1)


def _distance(got: Any, wanted: Any) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted)) / max(float(np.linalg.norm(wanted)), 1e-30)


# In float64, one query at a time


def scores_float64(x: dict[str, Any]) -> Numbers:
    """I `[b, s_q, s_c]`."""
    k, scales = (np.asarray(part, np.float64) for part in _codes_and_scales(x["k"]))
    q, weights = (np.asarray(x[name], np.float64) for name in ("q", "weights"))
    scores = np.zeros((*q.shape[:2], k.shape[1]))
    for n, i in np.ndindex(*q.shape[:2]):
        scores[n, i] = np.maximum(k[n] @ q[n, i].T, 0) @ weights[n, i]
    return scores * scales


def scored_float64(x: dict[str, Any]) -> dict[str, Numbers]:
    """I at the entries, 0 at absent ones, and the gradients of their sum with the cotangent."""
    q, k, weights, di = (np.asarray(x[name], np.float64) for name in ("q", "k", "weights", "cotangent"))
    indices = np.asarray(x["indices"])
    out = {"scores": np.zeros(indices.shape), "dq": np.zeros(q.shape), "dk": np.zeros(k.shape),
           "dweights": np.zeros(weights.shape)}  # fmt: skip
    for n, i in np.ndindex(*q.shape[:2]):
        there = np.flatnonzero((indices[n, i] >= 0) & (indices[n, i] < k.shape[1]))
        named = indices[n, i, there]
        products = k[n, named] @ q[n, i].T
        ds = di[n, i, there, None] * weights[n, i] * (products > 0)
        out["scores"][n, i, there] = np.maximum(products, 0) @ weights[n, i]
        out["dq"][n, i] = ds.T @ k[n, named]
        np.add.at(out["dk"][n], named, ds @ q[n, i])
        out["dweights"][n, i] = di[n, i, there] @ np.maximum(products, 0)
    return out
