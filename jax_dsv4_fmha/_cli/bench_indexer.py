"""The indexer suite of `bench`: scores and top-k for a prompt, and for a step of generation over pages, top-k of given
scores, and XLA's way for a prompt.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _ffi
from .._cache import Cache
from .._indexer import E4M3, lightning_indexer, quantize_indexer
from .._packed import quantize_cache
from .._testing.cases import Case

OPS = ("lightning_indexer", "topk")
_D = 128
_AT_A_TIME = 256  # queries that XLA scores at a time


def prompt(s_c: int, dtype: str, topk: int = 512, s_q: int = 4096, ratio: int = 0) -> Case:
    """All queries see all entries, or with a ratio the past ones."""
    return Case("lightning_indexer", 1, s_q, 0, 64, 1, _D, dtype, ratio=ratio, topk=topk, s_c=s_c)


def step(dtype: str, b: int = 64, s_q: int = 2, s_c: int = 16384) -> Case:
    """A row of generation: the last queries of every sequence, over all entries, in pages of 64."""
    return Case("lightning_indexer", b, s_q, 0, 64, 1, _D, dtype, topk=512, s_c=s_c, decode=True, page=64)


def choice(s_c: int, topk: int) -> Case:
    """A row of top-k alone, from given scores."""
    return Case("topk", 1, 4096, 0, 1, 1, 1, "float32", topk=topk, s_c=s_c)


def name(c: Case) -> str:
    what = "given scores" if c.op == "topk" else f"{c.dtype} h{c.h_q}"
    of = f"{c.s_c}{f' of ratio {c.ratio}' if c.ratio else ''}{' in pages' if c.page else ''}"
    return f"top-k {c.topk} of {of}, {what}, b{c.b} s{c.s_q}"


def work(c: Case) -> tuple[float, float]:
    """`bench.work`: the products of q and k; a choice alone only reads."""
    rows, chosen = c.b * c.s_q, 4.0 * c.b * c.s_q * c.topk
    if c.op == "topk":
        return 0.0, 4.0 * rows * c.s_c + chosen
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
    if jnp.dtype(c.dtype) == E4M3:
        return dict(zip(("q", "k", "weights", "k_scale"), quantize_indexer(q, k, weights), strict=True))
    return {"q": q, "k": k, "weights": weights}


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
        return _ffi.topk(operands["scores"], start, start + c.s_c, topk=c.topk)[0]
    visible: dict[str, Any] = {"ratio": c.ratio} if c.ratio else {"ratio": 1, "q_offset": c.s_c}
    return lightning_indexer(**operands, **visible, topk=c.topk, implementation="cubin")


def xla(c: Case, **operands: Any) -> Any:
    """The usual way in jnp: products, ReLU and the sum in blocks of queries, then lax.top_k."""
    if c.op == "topk":
        return lax.top_k(operands["scores"], c.topk)[1]
    k = operands["k"][0]

    def block(rows: Any) -> Any:
        q, weights, position = rows
        products = jnp.einsum("nhd,sd->nhs", q, k, preferred_element_type=jnp.float32)
        scores = jnp.einsum("nhs,nh->ns", jax.nn.relu(products), weights)
        if c.ratio:
            scores = jnp.where(jnp.arange(c.s_c) < ((position + 1) // c.ratio)[:, None], scores, -jnp.inf)
        return lax.top_k(scores, c.topk)[1]

    rows = (operands["q"][0], operands["weights"][0], jnp.arange(c.s_q, dtype=jnp.int32))
    blocks = [x.reshape(-1, _AT_A_TIME, *x.shape[1:]) for x in rows]
    return lax.map(block, tuple(blocks)).reshape(1, c.s_q, c.topk)
