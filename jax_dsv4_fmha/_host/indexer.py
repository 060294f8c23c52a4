"""Raw calls of the lightning indexer and its training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import library
from .call import call

WORKSPACE = 2**29
"""bytes of scores that exist at a time, unless a block of queries has more"""
BLOCK = 8
"""entries of a block that kernels choose as a whole: `kIndexBlock` in C++"""


def lightning_indexer(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    topk: int,
    return_scores: bool,
) -> tuple[jax.Array, jax.Array]:
    """The `topk` entries with the greatest scores, ascending, then -1; and their scores, -inf at -1.

    Args:
      q: `[b, s_q, h, 128]`, bfloat16, float16 or float8_e4m3fn; k: `[b, s_c, 128]`, like q.
      weights: float32 `[b, s_q, h]`; k_scale: float32 `[b, s_c]`, read only with float8_e4m3fn.
      start, stop: int32 `[b, s_q]` within `[0, s_c]`: query i sees the entries `start <= j < stop`.

    Returns:
      int32 and float32 `[b, s_q, topk]`; without return_scores the second is `[b, s_q, 0]`.
    """
    results = _chosen(q, k.shape[1], _ARRAY, topk, return_scores)
    indices, values, _ = call("lightning_indexer", results, q, k, weights, k_scale, start, stop)
    return indices, values


def paged_lightning_indexer(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    page: Any,
    packing: str,
    topk: int,
    return_scores: bool,
) -> tuple[jax.Array, jax.Array]:
    """`lightning_indexer` with keys in pages: entry j of a batch entry is number j % page of page table[j // page].

    Args:
      pool: `[1, pages, page, 128]`, like q; or with float8_e4m3fn uint8 `[1, pages, page * 132]`: the page's keys, then
        their scales, float32; or with bfloat16 uint8 `[1, pages, page * 68]`, in "index_fp4". Where sequences have
        several pages, page is a multiple of 8, with scales of 32; where they have one, with scales of 4. Or `[b, …]`, a
        pool for each batch entry.
      page: how many keys a page holds.
      packing: the layout of packed keys that q's dtype does not tell: "index_fp4", or "".
      table: int32 `[b, width]`. An entry on no page of the pool counts as a key of zeros.
      start, stop: within `[0, width * page]`.
    """
    pool, table = _of_one_pool(pool, table, stop)
    results = _chosen(q, page * table.shape[1], _in_pages(packing), topk, return_scores)
    indices, values, _ = call("paged_lightning_indexer", results, q, pool, weights, table, start, stop)
    return indices, values


def indexer_blocks(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    oldest: jax.Array,
    newest: jax.Array,
    *,
    count: int,
) -> jax.Array:
    """The `count` blocks of `BLOCK` entries with the greatest scores of what a query sees, int32 `[b, s_q, count]`,
    ascending, then -1.

    Args:
      q, weights, k, k_scale, start, stop: as in `lightning_indexer`.
      oldest, newest: int32 `[b, s_q]`: the blocks oldest <= j < newest are judged, whose entries all are before stop.
    """
    results = _chosen(q, k.shape[1], _ARRAY, count, False, BLOCK)
    return call("indexer_blocks", results, q, k, weights, k_scale, start, stop, oldest, newest)[0]


def paged_indexer_blocks(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    oldest: jax.Array,
    newest: jax.Array,
    *,
    page: Any,
    packing: str,
    count: int,
) -> jax.Array:
    """`indexer_blocks` with keys in pages, as in `paged_lightning_indexer`."""
    pool, table = _of_one_pool(pool, table, stop)
    results = _chosen(q, page * table.shape[1], _in_pages(packing), count, False, BLOCK)
    return call("paged_indexer_blocks", results, q, pool, weights, table, start, stop, oldest, newest)[0]


def indexer_within(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    blocks: jax.Array,
    start: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    topk: int,
    from_start: bool,
) -> tuple[jax.Array, jax.Array]:
    """The `topk` greatest scores among the entries of listed blocks of `BLOCK`: where they are in a query's list, the
    block of a place times `BLOCK` and more; ascending, then -1. And the scores, -inf at -1.

    Args:
      q, weights, k, k_scale: as in `lightning_indexer`.
      blocks: int32 `[b, s_q, n]`; an absent one is below 0.
      start: int32 `[b, s_q]`, the entry with which block 0 begins, with from_start.
      first, last: int32 `[b, s_q]`: of its list's places, a query sees first <= j < last.
    """
    results = _listed(q, blocks, topk)
    given = (q, k, weights, k_scale, blocks, start, first, last)
    indices, values, _ = call("indexer_within", results, *given, from_start=np.int64(from_start))
    return indices, values


def paged_indexer_within(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    blocks: jax.Array,
    start: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    topk: int,
) -> tuple[jax.Array, jax.Array]:
    """`indexer_within` with keys in pages of whole blocks, as in `paged_lightning_indexer`."""
    pool, table = _of_one_pool(pool, table, last)
    results = _listed(q, blocks, topk)
    given = (q, pool, weights, table, blocks, start, first, last)
    indices, values, _ = call("paged_indexer_within", results, *given, from_start=np.int64(0))
    return indices, values


def _listed(q: jax.Array, blocks: jax.Array, topk: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The results of a choice within blocks, and its workspace of scores."""
    (b, s_q), listed = q.shape[:2], BLOCK * blocks.shape[2]
    rows = 4096
    if isinstance(listed, int):
        rows = max(1, WORKSPACE // (4 * listed))
    if isinstance(b, int) and isinstance(s_q, int):
        rows = max(1, -(-b * s_q // -(-b * s_q // rows)))  # the same number of queries each time
    chosen = (jax.ShapeDtypeStruct((b, s_q, topk), dtype) for dtype in (jnp.int32, jnp.float32))
    return (*chosen, jax.ShapeDtypeStruct((rows, listed), jnp.float32))


def _of_one_pool(pool: jax.Array, table: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A pool without its axis of batch entries, and the table into it. `seen`: numbers `[b, s_q]`, none below 0, beside
    which XLA makes the table in one kernel, where each batch entry has one page and one query.
    """
    pools, pages, *_ = pool.shape
    if pools != 1:
        first = jnp.arange(pools, dtype=jnp.int32)[:, None] * pages + jnp.minimum(seen[:, :1], 0)
        table = jnp.where((table >= 0) & (table < pages), first + table, -1)
    return pool.reshape(-1, *pool.shape[2:]), table


def _chosen(
    q: jax.Array, s_c: Any, keys: dict[str, Any], topk: int, return_scores: bool, block: int = 1
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The results of an indexer's call, and its workspace of scores, one for a block of so many entries."""
    b, s_q, h, _ = q.shape
    queries, tile = _score_block(h, q.dtype, block > 1, **keys)
    stride, blocks = -(-s_c // tile) * tile // block, 256
    if isinstance(s_c, int):
        blocks = max(1, WORKSPACE // (4 * stride * queries))
    if isinstance(b, int) and isinstance(s_q, int):
        wanted = b * -(-s_q // queries)
        blocks = -(-wanted // -(-wanted // blocks))  # the same number of queries each time
    return (
        jax.ShapeDtypeStruct((b, s_q, topk), jnp.int32),
        jax.ShapeDtypeStruct((b, s_q, topk if return_scores else 0), jnp.float32),
        jax.ShapeDtypeStruct((blocks * queries, stride), jnp.float32),
    )


_ARRAY = {"paged": False, "packing": ""}
"""The choices of a kernel whose keys are in an array"""


def _in_pages(packing: str) -> dict[str, Any]:
    """The choices of a kernel whose keys are in pages, packed in this way."""
    return {"paged": True, "packing": packing}


def _score_block(h: int, dtype: Any, blocks: bool, **keys: Any) -> tuple[int, int]:
    """The queries that a CTA scores at a time, and the entries; without a kernel the call says so when it runs."""
    for v in library.variants_for("indexer_scores", heads=h, dtype=dtype.name, blocks=blocks, **keys):
        return v.tile_m // h, v.tile_n
    return 1, 1


def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    skip: int,
) -> jax.Array:
    """The scores that `lightning_indexer` chooses by: float32 `[b, s_q, s]`, s_c made up to whole tiles of 128.

    What a query does not see has a score of any kind; of a query that sees `skip` entries or fewer, skip >= 1, all do.
    """
    b, s_q, h, _ = q.shape
    queries, tile = _score_block(h, q.dtype, False, **_ARRAY)
    rows, stride = -(-s_q // queries) * queries, -(-k.shape[1] // tile) * tile
    result = jax.ShapeDtypeStruct((b * rows, stride), jnp.float32)
    (scores,) = call("indexer_scores", (result,), q, k, weights, k_scale, start, stop, skip=np.int64(skip))
    return scores.reshape(b, rows, stride)[:, :s_q]


def indexer_topk(
    scores: jax.Array, start: jax.Array, stop: jax.Array, *, topk: int, return_scores: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The choice of `lightning_indexer` from given scores float32 `[b, s_q, s]`, where s is a multiple of 4."""
    shape = scores.shape[:2]
    results = (
        jax.ShapeDtypeStruct((*shape, topk), jnp.int32),
        jax.ShapeDtypeStruct((*shape, topk if return_scores else 0), jnp.float32),
    )
    indices, values = call("indexer_topk", results, scores, start, stop)
    return indices, values


def head_summed_probabilities(
    q: jax.Array, k: jax.Array, lse: jax.Array, indices: jax.Array, *, scale: float
) -> jax.Array:
    """Σ_h exp(scale q·k - lse) at given keys, float32 `[b, s_q, topk]`.

    Args:
      q: `[b, s_q, h_q, 512]`, bfloat16 or float16; k: `[b, s_kv, 512]`, like q.
      lse: float32 `[b, s_q, h_q]`, with the sink; a head with ±inf adds nothing.
      indices: int32 `[b, s_q, topk]`; the result is 0 at an index outside of `[0, s_kv)`.
    """
    result = jax.ShapeDtypeStruct(indices.shape, jnp.float32)
    (p,) = call("head_summed_probabilities", (result,), q, k, lse, indices, scale=np.float32(scale))
    return p


def indexer_scores_at(q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array) -> tuple[jax.Array]:
    """The indexer's scores at given entries: float32 `[b, s_q, topk]`, -inf at absent ones.

    Args:
      q, k, weights: as in `lightning_indexer`; the scores of float8_e4m3fn are without k's scales.
      indices: int32 `[b, s_q, topk]`; an index outside of `[0, s_c)` is absent.
    """
    results = (jax.ShapeDtypeStruct(indices.shape, jnp.float32),)
    (scores,) = call("indexer_scores_at", results, q, k, weights, indices)
    return (scores,)


def indexer_scores_at_bwd(
    q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array, dscores: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of `indexer_scores_at` for the cotangent dscores, float32 `[b, s_q, topk]`, which is ignored at absent
    entries: dq like q, dk in float32, a sum in no fixed order, and dweights.
    """
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k, weights)),
    )
    return tuple(call("indexer_scores_at_bwd", results, q, k, weights, indices, dscores))
