"""The indexer suite of `bench`: scores and top-k of a prompt, and of a step of generation over pages, top-k of given
scores, scores at given entries with their gradients, the choice in two levels, a choice and the attention to what was
chosen, and XLA's way to each."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._definitions.cache import Cache
from .._definitions.packed import quantize_cache
from .._host.indexer import indexer_topk
from .._ops.dsv4 import dsv4_attention
from .._ops.indexer import E4M3, indexer_blocks, indexer_scores, lightning_indexer, quantize_indexer
from .._testing.cases import Case

OPS = ("lightning_indexer", "topk", "indexer_scores", "indexer_blocks", "within", "attended")
_D = 128
_AT_A_TIME = 256  # queries that XLA scores at a time
_BLOCK, _CANDIDATES = 8, 2048  # of DeepSeek-V4.1's choice in two levels
_WINDOW, _ATTENTION_D = 128, 512  # of the attention to what is chosen


def prompt(
    s_c: int, dtype: str, topk: int = 512, s_q: int = 4096, ratio: int = 0, h: int = 64, op: str = OPS[0]
) -> Case:
    """All entries are visible to all queries, or with a ratio what is past."""
    return Case(op, 1, s_q, 0, h, 1, _D, dtype, ratio=ratio, topk=topk, s_c=s_c)


def step(dtype: str, b: int = 64, s_q: int = 2, s_c: int = 16384) -> Case:
    """A row of generation: the last queries of every sequence, over all entries, in pages of 64."""
    return Case("lightning_indexer", b, s_q, 0, 64, 1, _D, dtype, topk=512, s_c=s_c, decode=True, page=64)


def choice(s_c: int, topk: int, b: int = 1, s_q: int = 4096) -> Case:
    """A row of top-k alone, of scores that are there."""
    return Case("topk", b, s_q, 0, 1, 1, 1, "float32", topk=topk, s_c=s_c)


def name(c: Case) -> str:
    what = "given scores" if c.op == "topk" else f"{c.dtype} h{c.h_q}"
    of = f"{c.s_c}{f' of ratio {c.ratio}' if c.ratio else ''}{' in pages' if c.page else ''}"
    chosen = {
        "indexer_scores": f"scores at {c.topk} of {of} and their gradients",
        "indexer_blocks": f"{c.topk} blocks of {_BLOCK} of {of}",
        "within": f"top-k {c.topk} within {_CANDIDATES} blocks of {_BLOCK} of {of}",
        "attended": f"top-k {c.topk} of {of}, and attention to a window of {_WINDOW} and these",
    }
    return f"{chosen.get(c.op, f'top-k {c.topk} of {of}')}, {what}, b{c.b} s{c.s_q}"


def work(c: Case) -> tuple[float, float]:
    """`bench.work`: the products of q and k; a choice alone only reads."""
    rows, chosen = c.b * c.s_q, 4.0 * c.b * c.s_q * c.topk
    if c.op == "topk":
        return 0.0, 4.0 * rows * c.s_c + chosen
    if c.op == "indexer_scores":  # that of scores, those of dq, dk and dweights' scores again
        return 4 * 2.0 * _D * c.h_q * rows * c.topk, 2.0 * _D * (3 * rows * c.h_q + 4 * c.b * c.s_c) + 3 * chosen
    if c.op == "within":
        size = _CANDIDATES * _BLOCK
        return 2.0 * _D * c.h_q * rows * size, rows * (2.0 * c.h_q * _D + 4 * _CANDIDATES) + chosen
    if c.op == "attended":
        flops, moved = work(replace(c, op=OPS[0]))
        read = rows * c.h_q * 2 + c.b * (c.s_q + _WINDOW - 1 + c.s_c)  # rows of queries and o, and of keys
        return flops + 4.0 * _ATTENTION_D * c.h_q * rows * (c.topk + _WINDOW), moved + 2.0 * _ATTENTION_D * read
    seen = sum(min((t + 1) // c.ratio, c.s_c) for t in range(c.s_q)) if c.ratio else c.s_q * c.s_c
    size = jnp.dtype(c.dtype).itemsize
    scales = 4.0 * c.b * c.s_c * (size == 1)
    return 2.0 * _D * c.h_q * c.b * seen, rows * c.h_q * (_D * size + 4) + c.b * c.s_c * _D * size + scales + chosen


def operands(c: Case, key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    if c.op == "topk":
        return {"scores": jax.random.normal(key, (c.b, c.s_q, c.s_c))}
    q = jax.random.normal(keys[0], (c.b, c.s_q, c.h_q, _D), jnp.bfloat16)
    k = jax.random.normal(keys[1], (c.b, c.s_c, _D), jnp.bfloat16)
    weights = jax.random.normal(keys[2], (c.b, c.s_q, c.h_q)) * (_D * c.h_q) ** -0.5
    if c.page:
        return {"k": _cache(c, k), **dict(zip(("q", "weights"), _of_step(c, q, weights), strict=True))}
    x: dict[str, Any] = {"q": q, "k": k, "weights": weights}
    if jnp.dtype(c.dtype) == E4M3:
        x = dict(zip((*x, "k_scale"), quantize_indexer(q, k, weights), strict=True))
    if c.op == "indexer_scores":
        x |= {"indices": _some(c, keys[0], c.topk, c.s_c), "cotangent": jax.random.normal(key, (c.b, c.s_q, c.topk))}
    if c.op == "within":
        x |= {"blocks": _some(c, keys[0], _CANDIDATES, c.s_c // _BLOCK)}
    if c.op == "attended":
        shapes = {"attention_q": (c.s_q, c.h_q), "window_kv": (c.s_q + _WINDOW - 1,), "compressed_kv": (c.s_c,)}
        for (what, shape), its in zip(shapes.items(), jax.random.split(key, 3), strict=True):
            x[what] = jax.random.normal(its, (c.b, *shape, _ATTENTION_D), jnp.bfloat16)
        x["sink"] = jnp.linspace(-1, 1, c.h_q, dtype=jnp.float32)
    return x


def _some(c: Case, key: jax.Array, count: int, of: int) -> jax.Array:
    """int32 `[b, s_q, count]`: for every query others, ascending."""

    def row(key: jax.Array) -> jax.Array:
        return jnp.sort(jnp.argsort(jax.random.bits(key, (of,)))[:count]).astype(jnp.int32)

    rows = lax.map(row, jax.random.split(key, c.b * c.s_q), batch_size=256)
    return rows.reshape(c.b, c.s_q, count)


def _of_step(c: Case, q: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    if jnp.dtype(c.dtype) != E4M3:
        return q, weights
    q, _, weights, _ = quantize_indexer(q, None, weights)
    return q, weights


def _cache(c: Case, k: jax.Array) -> Cache:
    """Pages in any order."""
    pages = c.b * c.s_c // c.page
    order = jax.random.permutation(jax.random.key(0), pages).astype(jnp.int32)
    entries = k.reshape(pages, c.page, _D)
    how: dict[str, Any] = {}
    if jnp.dtype(c.dtype) == E4M3:
        how = {"layout": "index_fp8"}
        entries = quantize_cache(entries, **how)
    return Cache(entries, order.reshape(c.b, -1), **how)


def call(c: Case, **operands: Any) -> Any:
    if c.op == "topk":
        start = jnp.zeros((c.b, c.s_q), jnp.int32)
        return indexer_topk(operands["scores"], start, start + c.s_c, topk=c.topk)[0]
    if c.op == "indexer_scores":
        return _there_and_back(functools.partial(indexer_scores, implementation="cubin"), **operands)
    if c.op == "attended":
        names = ("attention_q", "window_kv", "compressed_kv", "sink")
        q, window_kv, compressed_kv, sink = (operands.pop(name) for name in names)
        indices = call(replace(c, op=OPS[0]), **operands)
        how: dict[str, Any] = {"ratio": _RATIO, "window": _WINDOW, "implementation": "cubin", "method": "fused"}
        return dsv4_attention(q, window_kv, compressed_kv, indices=indices, sink=sink, **_at_the_end(c), **how)
    visible: dict[str, Any] = {"ratio": c.ratio} if c.ratio else {"ratio": 1, "q_offset": c.s_c}
    visible["implementation"] = "cubin"
    if c.op == "indexer_blocks":
        return indexer_blocks(**operands, **visible, count=c.topk, block=_BLOCK)
    return lightning_indexer(**operands, **visible, topk=c.topk, block=_BLOCK)


def _there_and_back(f: Callable[..., jax.Array], *, indices: jax.Array, cotangent: jax.Array, **x: jax.Array) -> Any:
    scores, back = jax.vjp(lambda q, k, weights: f(q, k, weights, indices), x["q"], x["k"], x["weights"])
    return scores, back(cotangent)


_RATIO = 4


def _at_the_end(c: Case) -> dict[str, Any]:
    """Where the queries and the window's first key are, so that all entries are visible."""
    return {"q_offset": c.s_c * _RATIO, "kv_offset": c.s_c * _RATIO - (_WINDOW - 1)}


def xla(c: Case, **operands: Any) -> Any:
    """The usual way in jnp: products, ReLU and the sum in blocks of queries, then lax.top_k."""
    if c.op == "topk":
        return lax.top_k(operands["scores"], c.topk)[1]
    if c.op == "indexer_scores":
        return _there_and_back(_xla_scores, **operands)
    k = operands["k"][0]

    def block(rows: Any) -> Any:
        q, weights, position, *attended = rows
        products = jnp.einsum("nhd,sd->nhs", q, k, preferred_element_type=jnp.float32)
        scores = jnp.einsum("nhs,nh->ns", jax.nn.relu(products), weights)
        if c.ratio:
            scores = jnp.where(jnp.arange(c.s_c) < ((position + 1) // c.ratio)[:, None], scores, -jnp.inf)
        indices = lax.top_k(scores, c.topk)[1]
        return _xla_attention(indices, position, *attended, *keys) if attended else indices

    rows = [operands["q"][0], operands["weights"][0], jnp.arange(c.s_q, dtype=jnp.int32)]
    keys = [operands[name] for name in ("window_kv", "compressed_kv", "sink") if name in operands]
    if c.op == "attended":
        rows.append(operands["attention_q"][0])
    blocks = tuple(x.reshape(-1, _AT_A_TIME, *x.shape[1:]) for x in rows)
    results = lax.map(block, blocks)
    return results.reshape(1, c.s_q, *results.shape[2:])


def _xla_scores(q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array) -> jax.Array:
    keys = jax.vmap(lambda k, i: k[i])(k, indices)
    products = jnp.einsum("bnhd,bntd->bnht", q, keys, preferred_element_type=jnp.float32)
    return jnp.einsum("bnht,bnh->bnt", jax.nn.relu(products), weights)


def _xla_attention(
    indices: jax.Array,
    position: jax.Array,
    q: jax.Array,
    window_kv: jax.Array,
    compressed_kv: jax.Array,
    sink: jax.Array,
) -> jax.Array:
    """o `[n, h, d]` of a block of queries, each with a softmax over its window, the entries and a sink."""
    near = window_kv[0][position[:, None] + jnp.arange(_WINDOW)]
    keys = jnp.concatenate([near, compressed_kv[0][indices]], 1)
    logits = jnp.einsum("nhd,ntd->nht", q, keys, preferred_element_type=jnp.float32) * _ATTENTION_D**-0.5
    sinks = jnp.broadcast_to(sink[:, None], (*logits.shape[:2], 1))
    p = jax.nn.softmax(jnp.concatenate([logits, sinks], -1))[..., :-1]
    return jnp.einsum("nht,ntd->nhd", p.astype(q.dtype), keys, preferred_element_type=jnp.float32).astype(q.dtype)
