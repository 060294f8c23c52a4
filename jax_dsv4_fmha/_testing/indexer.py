"""The lightning indexer's cases: kernels against the reference in float32, and that against float64 in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._definitions import indexer as definition
from .._definitions.cache import Cache
from .._definitions.packed import quantize_cache
from .._ops.indexer import E4M3, indexer_blocks, indexer_scores, lightning_indexer, quantize_indexer
from .cases import Case

OPS = ("lightning_indexer", "indexer_scores", "indexer_blocks")
PASSES = "what is chosen, scores or gradients within limits"
_D = 128
_BLOCK, _BLOCKS = 8, 12  # of a choice in two levels
_LIMITS = {"scores": 1e-5, "dq": 6e-3, "dk": 6e-3, "dweights": 1e-4}
"""The error that kernels may have, relative to the norm of the right result; gradients round their operands to 16
bits.
"""


def _case(op: str, s_q: int, s_c: int, topk: int, **others: Any) -> Case:
    return Case(op, 2, s_q, 0, **{"h_q": 64, "d": _D, "s_c": s_c, "topk": topk, **others})


def _table() -> tuple[Case, ...]:
    choose, at, fp8 = "lightning_indexer", "indexer_scores", "float8_e4m3fn"
    return (
        *(_case(choose, 9, 300, 40, h_q=h, dtype=t) for h in (16, 32, 64) for t in ("bfloat16", "float16", fp8)),
        *(_case(choose, 29, 5000, 512, ratio=4, dtype=t) for t in ("bfloat16", fp8)),
        _case(choose, 5, 9000, 2048),
        *(_case(choose, s_q, 640, 64, dtype=t, page=64) for s_q in (2, 8) for t in ("bfloat16", "float16", fp8)),
        _case(choose, 3, 320, 700, h_q=16, dtype=fp8, page=32),
        *(_case("indexer_blocks", 9, 300, 40, h_q=32, dtype=t) for t in ("bfloat16", fp8)),
        *(_case(at, 9, 90, 130, h_q=h, dtype=t) for h in (16, 32, 64) for t in ("bfloat16", "float16")),
    )


CASES = _table()


def operands(c: Case) -> dict[str, Any]:
    """q, k, weights in the case's dtypes, and k_scale or indices and a cotangent."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    q, k, weights = normal(c.b, c.s_q, c.h_q, _D), normal(c.b, c.s_c, _D), normal(c.b, c.s_q, c.h_q)
    if c.op == "indexer_scores":
        indices = jnp.asarray(rng.integers(-9, c.s_c + 9, (c.b, c.s_q, c.topk)), jnp.int32)
        return {"q": q.astype(c.dtype), "k": k.astype(c.dtype), "weights": weights, "indices": indices,
                "cotangent": normal(*indices.shape)}  # fmt: skip
    if jnp.dtype(c.dtype) == E4M3:
        return dict(zip(("q", "k", "weights", "k_scale"), quantize_indexer(q, k, weights), strict=True)) | {"raw": k}
    return {"q": q.astype(c.dtype), "k": k.astype(c.dtype), "weights": weights, "k_scale": None}


def position(c: Case) -> np.ndarray[Any, Any]:
    """The position of each batch entry's first query: the first sees few entries, the second nearly all."""
    ratio = c.ratio or 1
    return np.array([3 * ratio, c.s_c * ratio - c.s_q - 2])


def visible(c: Case) -> np.ndarray[Any, Any]:
    """bool `[b, s_q, s_c]`."""
    stop = (position(c)[:, None] + np.arange(c.s_q) + 1) // (c.ratio or 1)
    return np.arange(c.s_c) < stop[..., None]


def _chosen(c: Case, x: dict[str, Any], implementation: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    keys, k_scale = x["k"], x["k_scale"]
    if c.page:
        pages = jnp.asarray(np.random.default_rng(1).permutation(c.b * c.s_c // c.page), jnp.int32)
        packed = jnp.dtype(c.dtype) == E4M3
        entries = (x["raw"] if packed else keys).reshape(-1, c.page, _D)
        entries = quantize_cache(entries, "index_fp8") if packed else entries
        where = jnp.zeros_like(entries).at[pages].set(entries)
        keys, k_scale = Cache(where, pages.reshape(c.b, -1), "index_fp8"), None
    indices, scores = lightning_indexer(
        x["q"], keys, x["weights"], topk=c.topk, ratio=c.ratio or 1, q_offset=jnp.asarray(position(c), jnp.int32),
        k_scale=k_scale, blocks=x.get("blocks"), block=_BLOCK, return_scores=True, implementation=implementation,
    )  # fmt: skip
    return np.asarray(indices), np.asarray(scores)


def _blocks(c: Case, x: dict[str, Any], implementation: Any) -> np.ndarray[Any, Any]:
    blocks = indexer_blocks(
        x["q"], x["k"], x["weights"], count=_BLOCKS, block=_BLOCK, ratio=c.ratio or 1, k_scale=x["k_scale"],
        q_offset=jnp.asarray(position(c), jnp.int32), implementation=implementation,
    )  # fmt: skip
    return np.asarray(blocks)


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


def _scored(x: dict[str, Any], implementation: Any) -> dict[str, Any]:
    there = (x["indices"] >= 0) & (x["indices"] < x["k"].shape[1])

    def f(q: Any, k: Any, weights: Any) -> Any:
        return indexer_scores(q, k, weights, x["indices"], implementation=implementation)

    scores, back = jax.vjp(f, *(x[name] for name in ("q", "k", "weights")))
    return dict(zip(_LIMITS, (jnp.where(there, scores, 0), *back(x["cotangent"])), strict=True))


def complaints(c: Case, implementation: str) -> list[str]:
    """The errors of an implementation: kernels beside the reference, the reference beside NumPy in float64."""
    x, exact = operands(c), implementation == "reference"
    if c.op == "indexer_scores":
        got, second = _scored(x, implementation), _scored(x, implementation)
        wanted = scored_float64(x) if exact else _scored(x, "reference")
        limits = _LIMITS | ({"dq": 5e-3, "dk": 5e-3} if exact else {})  # rounded to the operands' dtype
        off = {name: _distance(got[name], wanted[name]) for name in _LIMITS}
        wrong = [f"{name} off by {part:.1e}" for name, part in off.items() if not part <= limits[name]]
        same = all(np.array_equal(got[n], second[n]) for n in ("scores", "dq", "dweights"))
        return wrong + ([] if same else ["other bits in the second run"])
    seen, scores = visible(c), scores_float64(x) if exact else _all_scores(x)
    limit = np.abs(scores).max() * (1e-5 if exact or jnp.dtype(c.dtype) != E4M3 else 1e-3)
    found: list[str] = []
    if c.op == "indexer_blocks":
        x["blocks"] = _blocks(c, x, implementation)
        found = _complaints_of_blocks(x["blocks"], seen, scores, limit)
        seen &= (x["blocks"][..., None] == np.arange(c.s_c) // _BLOCK).any(2)
    (indices, values), again = _chosen(c, x, implementation), _chosen(c, x, implementation)
    wrong = found + ([] if np.array_equal(indices, again[0]) else ["other entries in the second run"])
    for n, i in np.ndindex(*indices.shape[:2]):
        entries = indices[n, i][indices[n, i] >= 0]
        row, count = np.where(seen[n, i], scores[n, i], -np.inf), int(min(seen[n, i].sum(), c.topk))
        if len(entries) != count or (np.diff(entries) <= 0).any() or not seen[n, i, entries].all():
            wrong.append(
                f"query {i} of batch entry {n} chose {len(entries)} entries, not {count} that it sees, in order"
            )
        elif not np.abs(values[n, i, :count] - row[entries]).max(initial=0.0) <= limit:
            wrong.append(f"query {i} of batch entry {n} has wrong scores")
        elif count and (np.sort(row)[::-1][:count] > row[entries].min() + 2 * limit).sum() > count - 1:
            wrong.append(f"query {i} of batch entry {n} left out an entry with a greater score")
    return wrong


def _all_scores(x: dict[str, Any]) -> np.ndarray[Any, Any]:
    scores = definition.scores(x["q"], x["k"], x["weights"])
    return np.asarray(scores if x["k_scale"] is None else scores * x["k_scale"][:, None])


def _distance(got: Any, wanted: Any) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted)) / max(float(np.linalg.norm(wanted)), 1e-30)


# In float64, one query at a time


def scores_float64(x: dict[str, Any]) -> np.ndarray[Any, Any]:
    """I `[b, s_q, s_c]`."""
    q, k, weights = (np.asarray(x[name], np.float64) for name in ("q", "k", "weights"))
    scores = np.zeros((*q.shape[:2], k.shape[1]))
    for n, i in np.ndindex(*q.shape[:2]):
        scores[n, i] = np.maximum(k[n] @ q[n, i].T, 0) @ weights[n, i]
    return scores if x.get("k_scale") is None else scores * np.asarray(x["k_scale"], np.float64)[:, None]


def scored_float64(x: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
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
