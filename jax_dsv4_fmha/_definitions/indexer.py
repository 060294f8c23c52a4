"""The lightning indexer in plain `jnp`: the definition of its ops, fp32 inside, a block of queries at a time.

    I[t, s] = Σ_h w[t, h] · ReLU(q[t, h] · k[s])      fp32; times the scale of k[s] where keys are codes

The ops of the package check the operands first. A key that a query does not see cannot reach it, not even as NaN. The
gradients are written out so that they keep no scores: both passes compute a block anew.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .log_space import denominator
from .packed import LAYOUTS, index_keys, layout_of_keys
from .quantized import Quantized
from .query_blocks import Arrays, over_queries, scan_queries
from .ranks import rank_of
from .span import Span

_BLOCK = 2**24  # products of a query and a key, by head, that exist at a time
_FP32 = jnp.float32
_INF = float("inf")
_NEVER = -(2**31)  # the rank of an entry that a query does not see
_NEWEST = 2**31 - 1  # greater than that of any number


# Functions with the names of the package's ops


def lightning_indexer(
    q: jax.Array, k: jax.Array | Quantized, weights: jax.Array, topk: int, *, span: Span, return_scores: bool = False
) -> Any:  # fmt: skip
    """`jax_dsv4_fmha.lightning_indexer` over keys that are an array, or codes."""
    codes, scale = _codes_and_scales(k)
    results = select(q, weights, codes, scale, *_bounds(q, codes, span), topk=topk)
    return results if return_scores else results[0]


def indexer_scores(q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array) -> jax.Array:
    """`jax_dsv4_fmha.indexer_scores`; JAX differentiates it."""
    (scores,) = scores_at(q, k, weights, indices)
    return scores


def indexer_blocks(
    q: jax.Array, k: jax.Array | Quantized, weights: jax.Array, count: int, block: int = 8, *, span: Span
) -> jax.Array:  # fmt: skip
    """`jax_dsv4_fmha.indexer_blocks`."""
    codes, scale = _codes_and_scales(k)
    how = {"count": count, "block": block, "from_start": begins_blocks(span)}
    (blocks,) = greatest_blocks(q, weights, codes, scale, *_bounds(q, codes, span), **how)
    return blocks


def indexer_loss(
    q: jax.Array, k: jax.Array, weights: jax.Array, attention_q: jax.Array, kv: jax.Array, lse: jax.Array,
    indices: jax.Array | None = None, *, span: Span | None = None, sink: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """`jax_dsv4_fmha.indexer_loss`; JAX differentiates it, for which it keeps what a block of queries computes."""
    attention_q, kv, lse = map(lax.stop_gradient, (attention_q, kv, denominator(lse, sink)))
    scale = attention_q.shape[-1] ** -0.5
    if indices is None:
        assert span is not None
        (loss,) = dense_loss(q, k, weights, attention_q, kv, lse, *_bounds(q, k, span), scale=scale)
        return loss
    (target,) = attention_at(attention_q, kv, lse, indices, scale=scale)
    (scores,) = scores_at(q, k, weights, indices)
    return divergence(scores, target, (indices >= 0) & (indices < k.shape[1]))


def begins_blocks(span: Span) -> bool:
    """True if blocks are counted from the first entry that a query sees, which is that of its own packed sequence."""
    return "compressed_segments" in span.rules


def _codes_and_scales(k: jax.Array | Quantized) -> tuple[jax.Array, jax.Array]:
    return (k.codes, k.scales) if isinstance(k, Quantized) else (k, jnp.ones(k.shape[:2], _FP32))


def _bounds(q: jax.Array, k: jax.Array, span: Span) -> Arrays:
    return span.bounds(q.shape[0], q.shape[1], k.shape[1])


# Choosing entries


@functools.partial(jax.jit, static_argnames="topk")
def select(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    topk: int,
) -> Arrays:
    """Chooses among the entries start <= s < stop (both int32 `[b, s_q]`): indices int32 and their scores,
    `[b, s_q, topk]`.
    """
    s_c = k.shape[1]
    k32 = k.astype(_FP32)

    def block(q: jax.Array, weights: jax.Array, start: jax.Array, stop: jax.Array) -> Arrays:
        s = scores(q, k32, weights) * k_scale[:, None]
        j = jnp.arange(s_c, dtype=jnp.int32)[None, None]
        return best(s, (start[..., None] <= j) & (j < stop[..., None]), topk)

    b, _, h, _ = q.shape
    size = _queries(b, h, s_c)
    indices, values = over_queries(block, size, q, weights, start, stop)
    return indices, values


@functools.partial(jax.jit, static_argnames=("topk", "block", "from_start"))
def select_within(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    blocks: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    topk: int,
    block: int,
    from_start: bool,
) -> Arrays:
    """`select` among the entries that are in one of the blocks `[b, s_q, n]` of `block` entries, from entry 0 or from
    `start` on.
    """
    s_c = k.shape[1]
    k32, count = k.astype(_FP32), -(-s_c // block)

    def rows(q: jax.Array, weights: jax.Array, blocks: jax.Array, start: jax.Array, stop: jax.Array) -> Arrays:
        none = jnp.zeros(count, bool)
        where = jnp.where(blocks < 0, count, blocks)
        named = jax.vmap(jax.vmap(lambda i: none.at[i].set(True, mode="drop")))(where)
        j = jnp.arange(s_c, dtype=jnp.int32)[None, None]
        named = jnp.repeat(named, block, -1)
        if from_start:
            named = jnp.take_along_axis(named, jnp.maximum(j - start[..., None], 0), -1)
        seen = (start[..., None] <= j) & (j < stop[..., None]) & named[..., :s_c]
        return best(scores(q, k32, weights) * k_scale[:, None], seen, topk)

    b, _, h, _ = q.shape
    indices, values = over_queries(rows, _queries(b, h, s_c), q, weights, blocks, start, stop)
    return indices, values


@functools.partial(jax.jit, static_argnames=("count", "block", "from_start"))
def greatest_blocks(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    count: int,
    block: int,
    from_start: bool,
) -> Arrays:
    """(int32 `[b, s_q, count]`,): the blocks of `block` entries, from entry 0 or from `start` on, with the greatest
    scores of entries start <= s < stop; the last of these blocks is always among them.
    """
    s_c = k.shape[1]
    k32, blocks = k.astype(_FP32), -(-s_c // block)

    def rows(q: jax.Array, weights: jax.Array, start: jax.Array, stop: jax.Array) -> Arrays:
        j = jnp.arange(blocks * block, dtype=jnp.int32)[None, None]
        s = jnp.pad(scores(q, k32, weights) * k_scale[:, None], ((0, 0), (0, 0), (0, blocks * block - s_c)))
        if from_start:
            s = jnp.take_along_axis(s, jnp.minimum(j + start[..., None], s_c - 1), -1)
            start, stop = jnp.zeros_like(start), stop - start
        seen = (start[..., None] <= j) & (j < stop[..., None])
        rank = jnp.where(seen, rank_of(s), _NEVER).reshape(*s.shape[:2], blocks, block)
        newest = jnp.arange(blocks, dtype=jnp.int32)[None, None] == (stop[..., None] - 1) // block
        greatest = jnp.where(newest, _NEWEST, rank.max(-1))
        return (chosen(greatest, rank.max(-1) != _NEVER, count),)

    b, _, h, _ = q.shape
    return over_queries(rows, _queries(b, h, s_c), q, weights, start, stop)


def over_pages(choose: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """`choose` among keys in pages of a pool, `[1 or b, pages, page, d]` or packed `[1 or b, pages, page_bytes]`, which
    the table `[b, n]` names; an entry without a page counts as zeros.
    """

    @functools.partial(jax.jit, static_argnames=("topk", "count", "block", "from_start"))
    def chosen(
        q: jax.Array, weights: jax.Array, pool: jax.Array, table: jax.Array, *rows: jax.Array, **how: Any
    ) -> Arrays:
        def of_sequence(x: Arrays) -> Arrays:
            q, weights, which, table, *rows = x
            there = ((table >= 0) & (table < pool.shape[1])).reshape(-1, *[1] * (pool.ndim - 2))
            pages = jnp.where(there, pool[which][jnp.where(there.ravel(), table, 0)], 0)
            k, k_scale = _keys_of(pages, q.dtype)
            return tuple(a[0] for a in choose(*(a[None] for a in (q, weights, k, k_scale, *rows)), **how))

        b = q.shape[0]
        which = jnp.arange(b, dtype=jnp.int32) if pool.shape[0] != 1 else jnp.zeros(b, jnp.int32)
        sequences = (q, weights, which, table, *rows)
        if not isinstance(b, int):  # of jax.export: not one after the other, then
            return jax.vmap(lambda *x: of_sequence(x))(*sequences)
        found: Arrays = lax.map(of_sequence, sequences)
        return found

    return chosen


def _keys_of(pages: jax.Array, dtype: Any) -> Arrays:
    """Keys `[n, d]` in pages, for queries of this dtype, and their scales `[n]`."""
    if pages.dtype != jnp.uint8:
        k = pages.reshape(-1, pages.shape[2])
        return k, jnp.ones(k.shape[:1], _FP32)
    how = LAYOUTS[layout := layout_of_keys(dtype)]
    n = how.page_entries(pages.shape[1])
    places = zip(how.starts(0, n), how.parts, strict=True)
    parts = (pages[:, start : start + n * width].reshape(-1, width) for start, width in places)
    if layout == "index_fp8":
        return index_keys(*parts)
    k = how.decode(*parts).astype(dtype)
    return k, jnp.ones(k.shape[:1], _FP32)


select_of_pages, select_within_pages, greatest_blocks_of_pages = map(
    over_pages, (select, select_within, greatest_blocks)
)


def scores(q: jax.Array, k: jax.Array, weights: jax.Array) -> jax.Array:
    """I, fp32 `[b, n, s]`, from q `[b, n, h, d]`, k `[b, s, d]` and weights `[b, n, h]`."""
    return _weighted(_relu(_einsum("bnhd,bsd->bnhs", q.astype(_FP32), k.astype(_FP32))), weights)


def best(scores: jax.Array, visible: jax.Array, topk: int) -> Arrays:
    """The entries with the `topk` greatest scores, ascending, and these scores; -1 and -inf where fewer are visible.

    Among equal scores the lower entry wins; -0 equals 0. NaN is less than any number.
    """
    indices = chosen(rank_of(scores), visible, topk)
    there = indices >= 0
    values = jnp.take_along_axis(scores, jnp.where(there, indices, 0), -1)
    return indices, jnp.where(there, values, -_INF)


def chosen(rank: jax.Array, visible: jax.Array, topk: int) -> jax.Array:
    """The places of the `topk` greatest int32 ranks, ascending, then -1; among equal ranks the lower entry wins."""
    n = rank.shape[-1]
    short = max(topk - n, 0) if isinstance(n, int) else topk  # the greatest number of entries to choose from
    padding = [(0, 0)] * (rank.ndim - 1) + [(0, short)]
    greatest, where = lax.top_k(jnp.pad(jnp.where(visible, rank, _NEVER), padding, constant_values=_NEVER), topk)
    indices = jnp.sort(jnp.where(greatest == _NEVER, n, where).astype(jnp.int32), -1)
    return jnp.where(indices < n, indices, -1)


# Scores at given entries


@jax.jit
def scores_at(q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array) -> Arrays:
    """(I at the entries that indices `[b, s_q, topk]` name,), -inf where they name none."""
    k32 = k.astype(_FP32)

    def block(q: jax.Array, weights: jax.Array, indices: jax.Array) -> Arrays:
        keys, there = _named(k32, indices)
        s = _weighted(_relu(_einsum("bnhd,bntd->bnht", q.astype(_FP32), keys)), weights)
        return (jnp.where(there, s, -_INF),)

    return over_queries(block, _gathered(q, indices), q, weights, indices)


@jax.jit
def scores_at_gradient(q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array, di: jax.Array) -> Arrays:
    """(dq like q, dk and dweights in fp32) for the cotangent di `[b, s_q, topk]`, where entries exist."""
    k32 = k.astype(_FP32)

    def block(dk: jax.Array, q: jax.Array, weights: jax.Array, indices: jax.Array, di: jax.Array) -> Any:
        keys, there = _named(k32, indices)
        q32 = _of_rows(q, there)
        s = _einsum("bnhd,bntd->bnht", q32, keys)
        di = jnp.where(there, di, 0)
        ds = jnp.where(s > 0, weights[..., None] * di[:, :, None], 0)
        dkeys = _einsum("bnht,bnhd->bntd", ds, q32)
        dk = jax.vmap(lambda dk, i, x: dk.at[i].add(x))(dk, jnp.where(there, indices, 0), dkeys)
        return dk, (_einsum("bnht,bntd->bnhd", ds, keys), _einsum("bnht,bnt->bnh", _relu(s), di))

    dk, (dq, dweights) = scan_queries(block, jnp.zeros_like(k32), _gathered(q, indices), q, weights, indices, di)
    return dq.astype(q.dtype), dk, dweights


# Training: the teacher, and the loss over all visible entries


@functools.partial(jax.jit, static_argnames="scale")
def attention_at(q: jax.Array, kv: jax.Array, lse: jax.Array, indices: jax.Array, *, scale: float) -> Arrays:
    """(Σ_h exp(scale · q·kv - lse) at the entries that indices name,), 0 where they name none."""
    kv32 = kv.astype(_FP32)

    def block(q: jax.Array, lse: jax.Array, indices: jax.Array) -> Arrays:
        keys, there = _named(kv32, indices)
        p = _probabilities(_einsum("bnhd,bntd->bnht", q.astype(_FP32), keys), lse, scale)
        return (jnp.where(there, p, 0),)

    return over_queries(block, _gathered(q, indices), q, lse, indices)


@functools.partial(jax.jit, static_argnames="scale")
def dense_loss(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    attention_q: jax.Array,
    kv: jax.Array,
    lse: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
) -> Arrays:
    """(KL(teacher ‖ student) over the entries start <= s < stop `[b, s_q]`,); lse `[b, s_q, h]` includes the sink."""
    both = _Both(q, k, kv, scale)

    def block(*rows: jax.Array) -> Arrays:
        i, target, visible = both.at(*rows)
        return (divergence(i, target, visible),)

    return over_queries(block, both.size(attention_q), q, weights, attention_q, lse, start, stop)


@functools.partial(jax.jit, static_argnames="scale")
def dense_loss_gradient(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    attention_q: jax.Array,
    kv: jax.Array,
    lse: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    cotangent: jax.Array,
    *,
    scale: float,
) -> Arrays:
    """(dq, dk, dweights), fp32, for the cotangent of `dense_loss`, `[b, s_q]`."""
    both = _Both(q, k, kv, scale)

    def block(dk: jax.Array, cotangent: jax.Array, *rows: jax.Array) -> Any:
        q, weights = rows[:2]
        i, target, visible = both.at(*rows)
        di = divergence_gradient(i, target, visible) * cotangent[..., None]
        q32 = _of_rows(q, visible)
        s = _einsum("bnhd,bsd->bnhs", q32, both.k)
        ds = jnp.where((s > 0) & visible[:, :, None], weights[..., None] * di[:, :, None], 0)
        dweights = _einsum("bnhs,bns->bnh", jnp.where(visible[:, :, None], _relu(s), 0), di)
        return dk + _einsum("bnhs,bnhd->bsd", ds, q32), (_einsum("bnhs,bsd->bnhd", ds, both.finite_k), dweights)

    rows = (cotangent, q, weights, attention_q, lse, start, stop)
    dk, (dq, dweights) = scan_queries(block, jnp.zeros(k.shape, _FP32), both.size(attention_q), *rows)
    return dq, dk, dweights


class _Both:
    """The scores and the teacher of a block of queries, over all entries."""

    def __init__(self, q: jax.Array, k: jax.Array, kv: jax.Array, scale: float) -> None:
        self.k, self.kv, self.scale, self.heads = k.astype(_FP32), kv.astype(_FP32), scale, q.shape[2]
        self.finite_k = jnp.where(jnp.isfinite(self.k), self.k, 0)  # or 0 times NaN would be NaN

    def size(self, attention_q: jax.Array) -> int:
        b, _, h, _ = attention_q.shape
        return _queries(b, h + self.heads, self.k.shape[1])

    def at(self, q: Any, weights: Any, attention_q: Any, lse: Any, start: Any, stop: Any) -> Arrays:
        j = jnp.arange(self.k.shape[1], dtype=jnp.int32)[None, None]
        visible = (start[..., None] <= j) & (j < stop[..., None])
        logits = _einsum("bnhd,bsd->bnhs", attention_q.astype(_FP32), self.kv)
        target = jnp.where(visible, _probabilities(logits, lse, self.scale), 0)
        return jnp.where(visible, scores(q, self.k, weights), -_INF), target, visible


def divergence(scores: jax.Array, target: jax.Array, there: jax.Array) -> jax.Array:
    """KL(p ‖ softmax(scores)) over the last axis where `there`, with p = target / Σ target; 0 without a target."""
    p = _normalised(target, there)
    some = p > 0
    log_p = jnp.log(jnp.where(some, p, 1))
    return jnp.sum(jnp.where(some, p * (log_p - _log_softmax(scores, there)), 0), -1)


def divergence_gradient(scores: jax.Array, target: jax.Array, there: jax.Array) -> jax.Array:
    """The gradient of `divergence` in the scores: softmax(scores) - p."""
    p = _normalised(target, there)
    student = jnp.where(there, jnp.exp(_log_softmax(scores, there)), 0)
    return jnp.where(jnp.any(p > 0, -1, keepdims=True), student - p, 0)


def _normalised(target: jax.Array, there: jax.Array) -> jax.Array:
    target = jnp.where(there, target, 0)
    total = jnp.sum(target, -1, keepdims=True)
    return target / jnp.where(total > 0, total, 1)


def _log_softmax(scores: jax.Array, there: jax.Array) -> jax.Array:
    """The log-softmax over the last axis where `there`, 0 elsewhere."""
    kept = jnp.where(there, scores, -_INF)
    top = jnp.max(kept, -1, keepdims=True)
    shifted = jnp.where(there, scores - jnp.where(there.any(-1, keepdims=True), top, 0), -_INF)
    total = jnp.sum(jnp.exp(shifted), -1, keepdims=True)
    return jnp.where(there, shifted - jnp.log(jnp.where(total > 0, total, 1)), 0)


def _probabilities(logits: jax.Array, lse: jax.Array, scale: float) -> jax.Array:
    """Σ_h exp(scale · logits - lse), from logits `[b, n, h, s]`; a head that saw only its sink adds nothing."""
    lse = lse[..., None]
    return jnp.sum(jnp.where(jnp.isinf(lse), 0, jnp.exp(scale * logits - lse)), 2)


def _of_rows(q: jax.Array, seen: jax.Array) -> jax.Array:
    """q in float32, with 0 in rows that see no entry. They may hold NaN: in a sum over rows it would reach all keys."""
    return jnp.where(seen.any(-1)[..., None, None], q, 0).astype(_FP32)


def _weighted(x: jax.Array, weights: jax.Array) -> jax.Array:
    return _einsum("bnhs,bnh->bns", x, weights)


def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


def _einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, precision=lax.Precision.HIGHEST)


def _named(keys: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows `[b, n, t, d]` of keys `[b, s, d]` that indices `[b, n, t]` name, 0 for absent ones; and which are
    there.
    """
    there = (indices >= 0) & (indices < keys.shape[1])
    rows = jax.vmap(lambda keys, indices: keys[indices])(keys, jnp.where(there, indices, 0))
    return jnp.where(there[..., None], rows, 0), there


# Blocks of queries


def _queries(b: Any, heads: Any, keys: Any) -> int:
    """The number of queries in a block, whose products with all keys are at most `_BLOCK`; at least 1."""
    return max(1, _BLOCK // math.prod(n for n in (b, heads, keys) if isinstance(n, int)))


def _gathered(q: jax.Array, indices: jax.Array) -> int:
    b, _, h, d = q.shape
    return _queries(b, max(h, d), indices.shape[2])
