"""The lightning indexer: the choice of the compressed entries that a query attends to, and its training."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _check
from .._definitions import indexer as definition
from .._definitions.cache import Cache
from .._definitions.log_space import denominator
from .._definitions.packed import quantize_rows
from .._definitions.span import Span, shown_by_all
from .._dispatch import two_levels
from .._dispatch.autodiff import Differentiable, Function, without_gradient
from .._dispatch.lowering import choose, choose_backward
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op
from .._dispatch.support import Support, not_built
from .._host import indexer as raw
from .._host import library
from .probabilities import head_summed_probabilities

E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def lightning_indexer(
    q: jax.Array,
    k: jax.Array | Cache,
    weights: jax.Array,
    *,
    topk: int,
    ratio: int | None = None,
    q_offset: Any = 0,
    lengths: jax.Array | None = None,
    span: Span | None = None,
    k_scale: jax.Array | None = None,
    blocks: jax.Array | None = None,
    block: int = 8,
    from_start: bool = False,
    return_scores: bool = False,
    implementation: _check.Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Chooses, for each query, the `topk` entries that score highest among those it may see.

        I[t, s] = k_scale[s] · Σ_h weights[t, h] · ReLU(q[t, h] · k[s])    fp32 (DeepSeek-V3.2's report, §2.1)

    Query i has position `t = q_offset + i`. It may see entry s if `s < (t + 1) // ratio`, `s < lengths`, and `span`
    shows it. The choice is exact for the scores as the implementation computes them: the greatest win, the lower entry
    wins a tie, NaN comes last. Indices are in ascending order, then -1, and the same on every run. `dsv4_attention` and
    `sparse_fmha` take them as `indices`.

    The result has no gradient; `indexer_scores` has.

    In generation, k is a `Cache` that already holds the new entries, and the s_q new queries of a sequence of n tokens
    begin at `q_offset = n - s_q`. A query at a position below 0 sees nothing. A chunk of a prompt may be given in the
    same way.

    Args:
      q: `[b, s_q, h, d]`, bfloat16, float16 or float8_e4m3fn; float32 only on the reference.
      k: `[b, s_c, d]` in q's dtype. With s_c = 0 every index is -1. Or a `Cache` in q's dtype, or in the layout
        "index_fp8" where q is float8_e4m3fn; s_c is then its capacity. It must not have run over, and an entry without
        a page counts as zeros. Or one in "index_fp4", which XLA unpacks into an array.
      weights: float32 `[b, s_q, h]`, of any sign; they include the scales of a quantized q (see `quantize_indexer`).
      topk: an int >= 1; it may exceed s_c.
      ratio: tokens of an entry, an int >= 1; None where `span` alone says what is visible.
      q_offset: the position of the first query: an int, an int32 scalar or int32 `[b]`.
      lengths: int32 `[b]`, the number of entries.
      span: the entries that a query may see, for example those of its own segment in packed sequences.
      k_scale: float32 `[b, s_c]`, not negative; with float8_e4m3fn, and only then. A cache has its own.
      blocks: int32 `[b, s_q, n]`, as `indexer_blocks` returns them, ascending and none twice, then -1 for those that
        are absent: only entries in these blocks of `block` entries are chosen. Blocks in another order are an error
        where they are known, and undefined where they are traced. Kernels compute scores of these entries alone. Of a
        `Cache` they read these keys where they are: for blocks of 8 in pages of whole blocks, with 32 or 64 heads,
        bfloat16 or float8_e4m3fn; else what XLA gathers into an array of all its keys.
      from_start: as in `indexer_blocks`.
      return_scores: whether the scores at the indices are returned too.
      implementation: None takes the kernel where there is one, else the reference; "cubin" or "reference" insist.

    Returns:
      indices int32 `[b, s_q, topk]`; with return_scores, also float32 scores `[b, s_q, topk]`, -inf where the index
      is -1.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import lightning_indexer
      >>> q, k = jnp.ones((1, 8, 2, 128), jnp.bfloat16), jnp.ones((1, 2, 128), jnp.bfloat16)
      >>> weights = jnp.ones((1, 8, 2))
      >>> indices = lightning_indexer(q, k, weights, topk=2, ratio=4)
      >>> indices[0, [2, 3, 7]].tolist()  # of the queries at positions 2, 3 and 7
      [[-1, -1], [0, -1], [0, 1]]
    """
    op = "lightning_indexer"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h d", dims, (*_check.FLOAT, E4M3))
    topk = _check.positive(op, "topk", topk)
    if not isinstance(return_scores, bool):
        raise _check.error(TypeError, op, "return_scores", return_scores, "a bool")
    weights = _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)
    if getattr(k, "shape", None) == (dims["b"], 0, dims["d"]):
        indices = jnp.full((dims["b"], dims["s_q"], topk), -1, jnp.int32)
        return (indices, jnp.full(indices.shape, -jnp.inf, jnp.float32)) if return_scores else indices
    block = _check.positive(op, "block", block)
    of_q = {"heads": dims["h"], "dtype": q.dtype.name}

    def judged(paged: bool) -> bool:
        return two_levels.has_kernel_within(block, bool(from_start), **of_q, paged=paged)

    keys = _keys(op, k, k_scale, q.dtype, dims, as_array=blocks is not None and not (_fit(k) and judged(paged=True)))
    _check.implementation(op, implementation)
    start, stop = _visible(op, dims, ratio, q_offset, lengths, span)
    if blocks is not None:
        blocks = _check.operand(op, "blocks", blocks, "b s_q n", dims, _check.INT)
        how = {"topk": topk, "block": block, "from_start": bool(from_start)}
        _ascending(op, blocks)
        kernel, choices = "indexer_scores_at", of_q
        if judged(keys.paged):
            kernel, choices = "indexer_scores_within", of_q | {"paged": keys.paged}
        archs = _shipped_for_both(kernel, topk, dims, **choices)
        call = _call(op, keys.ops.within, implementation, kernel, archs, q, dims, keys.got, "", **how)
        inputs = (*map(lax.stop_gradient, (q, weights, *keys.operands)), blocks, start, stop)
        indices, scores = without_gradient(call, *inputs)
        return (indices, scores) if return_scores else indices
    archs = _shipped_for_both("indexer_scores", topk, dims, **of_q, paged=keys.paged) if keys.fits else ()
    choose = keys.ops.choose_and_score if return_scores else keys.ops.choose
    call = _call(op, choose, implementation, "indexer_scores", archs, q, dims, keys.got, keys.wanted, topk=topk)
    results = without_gradient(call, *map(lax.stop_gradient, (q, weights, *keys.operands)), start, stop)
    return (results[0], results[1]) if return_scores else results[0]


def _ascending(op: str, blocks: jax.Array) -> None:
    """Raises where blocks are known and those of a query are not in order."""
    if isinstance(blocks, jax.core.Tracer) or not blocks.is_fully_addressable:
        return
    rows = np.asarray(blocks)
    before, after = rows[..., :-1], rows[..., 1:]
    wrong = np.argwhere((after >= 0) & ((before < 0) | (after <= before)))
    if len(wrong):
        n, i, j = wrong[0]
        got = f"{before[n, i, j]} before {after[n, i, j]} in row ({n}, {i})"
        raise _check.error(ValueError, op, "blocks", got, "ascending blocks, none twice, then -1")


def indexer_blocks(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    *,
    count: int,
    block: int = 8,
    from_start: bool = False,
    ratio: int | None = None,
    q_offset: Any = 0,
    lengths: jax.Array | None = None,
    span: Span | None = None,
    k_scale: jax.Array | None = None,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """The first of two levels of choice: blocks of entries that later indexers choose within (DeepSeek-V4.1).

    Block i has the entries from `i block` to `i block + block - 1`. The score of a block is the greatest score, as in
    `lightning_indexer`, of those of its entries that a query may see. The newest block, with the last entry that a
    query may see, is always chosen. The lower block wins a tie. The result has no gradient.

    Args:
      q, k, weights, ratio, q_offset, lengths, span, k_scale: as in `lightning_indexer`. XLA gathers a `Cache` in pages
        into an array, unless kernels take it, as `blocks` there says.
      count: an int >= 1: how many blocks to choose; DeepSeek-V4.1 takes 2048.
      block: an int >= 1; kernels take powers of two up to 32.
      from_start: whether block 0 of a query begins with the first entry that `span` shows it, and not with entry 0: so
        in a row of packed documents each has the blocks that it has alone.
      implementation: None: the kernels where there are some, else the reference; "cubin" or "reference" insist.

    Returns:
      int32 `[b, s_q, count]`, ascending, then -1 where a query sees fewer blocks.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and it is not built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import indexer_blocks, lightning_indexer
      >>> q, k = jnp.ones((1, 4, 2, 128), jnp.bfloat16), jnp.ones((1, 32, 128), jnp.bfloat16)
      >>> weights = jnp.ones((1, 4, 2))
      >>> blocks = indexer_blocks(q, k, weights, count=2, ratio=1, q_offset=28)
      >>> blocks[0, -1].tolist()  # of the last query: the newest block, and the lowest of the others
      [0, 3]
      >>> indices = lightning_indexer(q, k, weights, topk=3, ratio=1, q_offset=28, blocks=blocks)
      >>> indices.shape
      (1, 4, 3)
    """
    op = "indexer_blocks"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h d", dims, (*_check.FLOAT, E4M3))
    weights = _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)
    count, block = _check.positive(op, "count", count), _check.positive(op, "block", block)
    how = {"count": count, "block": block, "from_start": bool(from_start)}
    of_q = {"heads": dims["h"], "dtype": q.dtype.name}
    in_pages = _fit(k) and two_levels.has_kernel(block, bool(from_start), **of_q, paged=True)
    keys = _keys(op, k, k_scale, q.dtype, dims, as_array=not in_pages)
    _check.implementation(op, implementation)
    start, stop = _visible(op, dims, ratio, q_offset, lengths, span)
    archs = _shipped_for_both("indexer_scores", count - 1, dims, **of_q, paged=keys.paged)
    archs = archs if block in two_levels.BLOCKS else ()
    got = ", ".join(filter(None, [f"blocks of {block}", keys.got]))
    wanted = f"blocks of {' or '.join(map(str, two_levels.BLOCKS))}"
    call = _call(op, keys.ops.blocks, implementation, "indexer_scores", archs, q, dims, got, wanted, **how)
    (blocks,) = without_gradient(call, *map(lax.stop_gradient, (q, weights, *keys.operands)), start, stop)
    return blocks


def indexer_scores(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    *,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """The indexer's scores at given entries, with gradients in q, k and weights.

    Args:
      q, k, weights: as in `lightning_indexer`, without float8_e4m3fn.
      indices: int32 `[b, s_q, topk]`; one below 0 or not below s_c is absent.

    Returns:
      float32 `[b, s_q, topk]`, -inf where an index is absent, with gradient 0 there. Kernels round the operands of
      gradients to 16 bits, as attention's do, and add up the gradient of k in no fixed order.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import indexer_scores
      >>> q, k = jnp.ones((1, 8, 2, 128), jnp.bfloat16), jnp.ones((1, 2, 128), jnp.bfloat16)
      >>> weights = jnp.ones((1, 8, 2))
      >>> indices = jnp.zeros((1, 8, 1), jnp.int32)
      >>> indexer_scores(q, k, weights, indices)[0, 0].tolist()  # 2 heads, each with a product of 128
      [256.0]
    """
    op = "indexer_scores"
    dims: dict[str, Any] = {}
    q, k, weights = _trained(op, q, k, weights, dims)
    indices = _check.operand(op, "indices", indices, "b s_q topk", dims, _check.INT)
    _check.implementation(op, implementation)
    return _scores_at(op, implementation, q, k, weights, indices)


def indexer_loss(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    attention_q: jax.Array,
    kv: jax.Array,
    lse: jax.Array,
    *,
    indices: jax.Array | None = None,
    ratio: int | None = None,
    q_offset: Any = 0,
    lengths: jax.Array | None = None,
    span: Span | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """The loss that trains the indexer: KL(teacher ‖ student) for every query (DeepSeek-V3.2's report, §2.1).

    The teacher is attention itself: Σ_h exp(scale · attention_q · kv - logaddexp(lse, sink)) at each entry, normalised
    to sum to 1 over the entries. lse may count more than these entries, such as a window. The student is the softmax of
    the indexer's scores over the same entries. These are the entries that `indices` names, each once, or without
    `indices`, as in the warm-up, all visible entries. Only q, k and weights get gradients.

    Args:
      q, k, weights: the indexer's, as in `indexer_scores`.
      attention_q: `[b, s_q, h_q, d_a]`, bfloat16, float16 or float32: the queries of attention.
      kv: `[b, s_c, d_a]` in the dtype of attention_q: the entries that attention reads.
      lse: float32 `[b, s_q, h_q]`, as `dsv4_attention` returns it.
      indices: int32 `[b, s_q, topk]`, as `lightning_indexer` returns them.
      ratio, q_offset, lengths, span: what is visible, as in `lightning_indexer`; only without `indices`.
      sink, scale: as in `dsv4_attention`.

    Returns:
      float32 `[b, s_q]`; 0 for a query that has no entry, or whose heads attend to none of them.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands; without indices there never is one.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import dsv4_attention, indexer_loss
      >>> q, k, weights = jnp.ones((1, 8, 2, 128)), jnp.ones((1, 2, 128)), jnp.ones((1, 8, 2))
      >>> attention_q, kv, window_kv = jnp.ones((1, 8, 4, 64)), jnp.ones((1, 2, 64)), jnp.ones((1, 8, 64))
      >>> o, lse = dsv4_attention(attention_q, window_kv, kv, ratio=4)
      >>> indexer_loss(q, k, weights, attention_q, kv, lse, ratio=4).shape
      (1, 8)
    """
    op = "indexer_loss"
    dims: dict[str, Any] = {}
    q, k, weights = _trained(op, q, k, weights, dims)
    attention_q = _check.operand(op, "attention_q", attention_q, "b s_q h_q d_a", dims, _check.FLOAT)
    kv = _check.operand(op, "kv", kv, "b s_c d_a", dims, (attention_q.dtype,))
    lse = _check.operand(op, "lse", lse, "b s_q h_q", dims, _check.FP32, "attention_q")
    sink = _check.sink(op, sink, dims, "attention_q")
    scale = _check.scale(op, scale, dims["d_a"])
    _check.implementation(op, implementation)
    if indices is None:
        if implementation == "cubin":
            got, kernels = "'cubin' without indices", ("head_summed_probabilities", "indexer_scores_at")
            raise not_built(op, "implementation", got, "indices, or None or 'reference'", kernels)
        attention_q, kv, lse = map(lax.stop_gradient, (attention_q, kv, denominator(lse, sink)))
        start, stop = _visible(op, dims, ratio, q_offset, lengths, span)
        loss, gradient = (Call(op, KernelUse.NEVER, (("scale", scale),)) for op in (_DENSE_LOSS, _DENSE_LOSS_GRADIENT))
        return Differentiable(loss, gradient)(q, k, weights, attention_q, kv, lse, start, stop)[0]
    for name, x in (("ratio", ratio), ("lengths", lengths), ("span", span)):
        if x is not None:
            raise _check.error(ValueError, op, name, x, "None with indices")
    if not (isinstance(q_offset, int) and q_offset == 0):
        raise _check.error(ValueError, op, "q_offset", q_offset, "0 with indices, which say what is visible")
    indices = _check.operand(op, "indices", indices, "b s_q topk", dims, _check.INT)
    target = head_summed_probabilities(
        attention_q, kv, lse, indices, sink=sink, scale=scale, implementation=implementation
    )
    there = (indices >= 0) & (indices < dims["s_c"])
    return _DIVERGENCE(_scores_at(op, implementation, q, k, weights, indices), target, there)[0]


def quantize_indexer(
    q: jax.Array, k: jax.Array | None, weights: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None]:
    """Quantizes operands of `lightning_indexer` to 8 bits: (q, k, weights, k_scale) with the same scores I.

    Each row is divided by scale = max(max |row|, 1e-4) / 448 and rounded to float8_e4m3fn. The scales of q, one for
    each query and head, are multiplied into weights; they are positive, so they pass through ReLU. The scales of k are
    k_scale. Multiply the rows of q and k by a Hadamard matrix first, as DeepSeek-V4 does: it spreads outliers over all
    of d.

    Args:
      q: `[b, s_q, h, d]`, bfloat16, float16 or float32.
      k: `[b, s_c, d]`, bfloat16, float16 or float32; or None: a `Cache` of the layout "index_fp8" quantizes what is
        appended to it in the same way.
      weights: float32 `[b, s_q, h]`.

    Returns:
      q and k as float8_e4m3fn, weights float32 `[b, s_q, h]`, k_scale float32 `[b, s_c]`; k and k_scale None without k.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import quantize_indexer
      >>> q, k = jnp.ones((1, 8, 2, 128), jnp.bfloat16), jnp.ones((1, 2, 128), jnp.bfloat16)
      >>> weights = jnp.ones((1, 8, 2))
      >>> q, k, weights, k_scale = quantize_indexer(q, k, weights)
      >>> q.dtype, k_scale.shape
      (dtype(float8_e4m3fn), (1, 2))
    """
    op = "quantize_indexer"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h d", dims, _check.FLOAT)
    k_scale = None
    if k is not None:
        k, k_scale = quantize_rows(_check.operand(op, "k", k, "b s_c d", dims, _check.FLOAT))
    weights = _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)
    q, q_scale = quantize_rows(q)
    return q, k, weights * q_scale, k_scale


# Operands


def _trained(op: str, q: Any, k: Any, weights: Any, dims: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    q = _check.operand(op, "q", q, "b s_q h d", dims, _check.FLOAT)
    k = _check.operand(op, "k", k, "b s_c d", dims, (q.dtype,))
    return q, k, _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)


class _Ops(NamedTuple):
    """The ops that choose from keys of a kind."""

    choose: Op
    choose_and_score: Op
    blocks: Op
    within: Op


class _Keys(NamedTuple):
    """Where entries are chosen from: ops, and their operands after q and weights."""

    ops: _Ops
    operands: Arrays
    got: str = ""
    wanted: str = ""
    """what is given of them, and what kernels want of them, for errors"""
    paged: bool = False
    fits: bool = True
    """whether kernels take such pages"""


def _keys(op: str, k: Any, k_scale: Any, dtype: Any, dims: dict[str, Any], as_array: bool = False) -> _Keys:
    """as_array: also of a `Cache`, which XLA gathers."""
    got = ""
    if isinstance(k, Cache):
        _check_cached(op, k, k_scale, dtype, dims)
        if not (as_array or (k.is_packed and k.layout == _INDEX_FP4)):
            return _cached_keys(k, dtype == E4M3, dims)
        k, k_scale = k.index_keys() if dtype == E4M3 else (k.take().astype(dtype), None)
        got = "keys of a Cache as XLA gathers them"
    k = _check.operand(op, "k", k, "b s_c d", dims, (dtype,))
    if dtype == E4M3:
        k_scale = _check.operand(op, "k_scale", k_scale, "b s_c", dims, _check.FP32)
    elif k_scale is not None:
        raise _check.error(ValueError, op, "k_scale", k_scale, f"None with {dtype}: only float8_e4m3fn has scales")
    else:
        k_scale = jnp.ones((dims["b"], dims["s_c"]), jnp.float32)
    return _Keys(_OF_ARRAYS, (k, k_scale), got)


def _check_cached(op: str, cache: Cache, k_scale: Any, dtype: Any, dims: dict[str, Any]) -> None:
    """Raises unless a cache holds keys for queries of this dtype."""
    if k_scale is not None:
        raise _check.error(ValueError, op, "k_scale", k_scale, "None with a Cache, which has its own")
    layout = cache.layout if cache.is_packed else None
    if layout not in ((_INDEX_FP8,) if dtype == E4M3 else (None, _INDEX_FP4)):
        got = layout or cache.entries.dtype
        wanted = _INDEX_FP8 if dtype == E4M3 else f"{dtype} or {_INDEX_FP4}"
        raise _check.error(ValueError, op, "k", f"a Cache of {got}", f"one of {wanted}, as q is {dtype}")
    cache.check(op, "k", dims, (dtype,))
    dims["s_c"] = cache.capacity


def _cached_keys(cache: Cache, packed: bool, dims: dict[str, Any]) -> _Keys:
    """Keys in pages, which kernels read where they are."""
    several = cache.block_table is not None
    table = cache.block_table if several else jnp.zeros((dims["b"], 1), jnp.int32)
    pool = cache.entries[None] if several else cache.entries[:, None]
    wanted = f"pages of a multiple of {_unit(cache)}"
    return _Keys(_OF_PAGES[packed], (pool, table), f"pages of {cache.page}", wanted, True, _fit(cache))


def _unit(cache: Cache) -> int:
    return page_unit(cache.block_table is not None and cache.block_table.shape[1] != 1, cache.is_packed)


def _fit(k: Any) -> bool:
    """Whether these are keys in pages as kernels take them."""
    return isinstance(k, Cache) and isinstance(k.page, int) and k.page % _unit(k) == 0


def page_unit(several: bool, packed: bool) -> int:
    """Kernels take pages of a multiple of this, one or several to a sequence: `IndexPageUnit` in C++."""
    return (32 if packed else 8) if several else (4 if packed else 1)


def _visible(
    op: str, dims: dict[str, Any], ratio: Any, q_offset: Any, lengths: Any, span: Any
) -> tuple[jax.Array, jax.Array]:
    """start and stop, int32 `[b, s_q]`, of the entries that queries see."""
    b, s_q, s_c = dims["b"], dims["s_q"], dims["s_c"]
    if ratio is None and span is None:
        raise _check.error(ValueError, op, "ratio", ratio, "an int >= 1, or a span")
    if span is not None and not isinstance(span, Span):
        raise _check.error(TypeError, op, "span", span, "a Span")
    rules = [] if span is None else [span]
    offset = _check.offset(op, "q_offset", q_offset, dims)
    if ratio is not None:
        rules.append(Span.compressed(s_q, _check.positive(op, "ratio", ratio), offset))
    if lengths is not None:
        rules.append(Span.lengths(_check.operand(op, "lengths", lengths, "b", dims, _check.INT)))
    return shown_by_all(op, rules, b, s_q, s_c)


# The ops


_TRAINED = (Axes("q", "b s_q h d"), Axes("k", "b s_c d"), Axes("weights", "b s_q h"))
_SPAN = (Axes("start", "b s_q"), Axes("stop", "b s_q"))
_INDICES = Axes("indices", "b s_q topk")
_ATTENTION = (Axes("attention_q", "b s_q h_a d_a"), Axes("kv", "b s_c d_a"), Axes("lse", "b s_q h_a"))
_GRADIENTS = tuple(Axes(f"d{name}", axes) for name, axes in _TRAINED)
_SCORES_THERE = Axes("scores", "b s_q topk")


def _shipped_for_both(scores: str, topk: int, dims: dict[str, Any], **choices: Any) -> tuple[str, ...]:
    """The architectures that have a kernel of `scores` with these choices, and one that chooses so many."""
    if dims["d"] != _D:
        return ()
    chooses = {v.arch for v in library.SHIPPED if v.op == "indexer_topk" and topk <= v.choices["max_topk"]}
    return tuple(arch for arch in library.shipped_for(scores, **choices) if arch in chooses)


def _call(
    op: str,
    of: Op,
    implementation: _check.Implementation | None,
    scores: str,
    archs: tuple[str, ...],
    q: jax.Array,
    dims: dict[str, Any],
    got: str = "",
    wanted: str = "",
    **params: int,
) -> Call:
    """The call of an op that chooses by the kernels of `scores` and of top-k, shipped for these architectures. `got`
    and `wanted` are for errors: what else is given, and what kernels want of it.
    """
    if implementation == "reference":
        return Call(of, KernelUse.NEVER, tuple(params.items()))
    sizes = [f"{name}={params[name]}" for name in ("topk", "count") if name in params]
    got = ", ".join(filter(None, [f"{q.dtype.name}, h={dims['h']}, d={dims['d']}", *sizes, got]))
    support = Support(got, (scores, "indexer_topk"), archs, ", ".join(filter(None, [wanted, _WANTED])))
    return Call(of, choose(op, implementation, support), tuple(params.items()), support)


_D = 128  # of a kernel
_WANTED = f"d={_D}, and operands that a kernel is built for"
_INDEX_FP8, _INDEX_FP4 = "index_fp8", "index_fp4"


def _choosing(
    keys: tuple[Axes, ...],
    reference: Callable[..., Arrays],
    kernel: Callable[..., Arrays],
    blocks: tuple[Callable[..., Arrays], Callable[..., Arrays]],
    within: tuple[Callable[..., Arrays], Callable[..., Arrays]],
) -> _Ops:
    """Ops of (q, weights, *keys, start, stop): one chooses entries, another also gives their scores; and those of a
    choice in two levels, each with its reference and its kernel."""
    given = (_TRAINED[0], _TRAINED[2], *keys)
    operands = (*given, *_SPAN)

    def choose(*operands: jax.Array, topk: int) -> Arrays:
        return kernel(*operands, topk=topk, return_scores=False)[:1]

    return _Ops(
        Op("lightning_indexer", operands, (_INDICES,), lambda *x, topk: reference(*x, topk=topk)[:1], choose),
        Op(
            "lightning_indexer",
            operands,
            (_INDICES, _SCORES_THERE),
            reference,
            functools.partial(kernel, return_scores=True),
        ),
        Op("indexer_blocks", operands, (Axes("blocks", "b s_q count"),), *blocks),
        Op(
            "lightning_indexer",
            (*given, Axes("blocks", "b s_q n"), *_SPAN),
            (_INDICES, _SCORES_THERE),
            *within,
        ),
    )


_OF_ARRAYS = _choosing(
    (_TRAINED[1], Axes("k_scale", "b s_c")),
    definition.select,
    raw.lightning_indexer,
    (definition.greatest_blocks, two_levels.greatest_blocks),
    (definition.select_within, two_levels.choose_within),
)
_OF_PAGES = {
    packed: _choosing(
        (Axes("k", f"{ONE_OR_B} pages {width}"), Axes("k.block_table", "b table")),
        definition.select_of_pages,
        raw.paged_lightning_indexer,
        (definition.greatest_blocks_of_pages, two_levels.greatest_blocks_of_pages),
        (definition.select_within_pages, two_levels.choose_within_pages),
    )
    for packed, width in ((False, "page d"), (True, "page_bytes"))
}
_SCORES = Op("indexer_scores", (*_TRAINED, _INDICES), (_SCORES_THERE,), definition.scores_at, raw.indexer_scores_at)
_SCORES_GRADIENT = Op(
    "indexer_scores",
    (*_TRAINED, _INDICES, Axes("dscores", "b s_q topk")),
    _GRADIENTS,
    definition.scores_at_gradient,
    raw.indexer_scores_at_bwd,
    part="gradient",
)
_LOSS = (*_TRAINED, *_ATTENTION, *_SPAN)
_DENSE_LOSS = Op("indexer_loss", _LOSS, (Axes("loss", "b s_q"),), definition.dense_loss)
_DENSE_LOSS_GRADIENT = Op(
    "indexer_loss",
    (*_LOSS, Axes("dloss", "b s_q")),
    _GRADIENTS,
    definition.dense_loss_gradient,
    part="gradient",
)


# Gradients


def _scores_at(op: str, implementation: Any, q: jax.Array, *others: jax.Array) -> jax.Array:
    """`indexer_scores` of checked operands, for `op`."""
    h, d = q.shape[2:]
    if implementation == "reference":
        scores = Differentiable(Call(_SCORES, KernelUse.NEVER), Call(_SCORES_GRADIENT, KernelUse.NEVER))
    else:
        support, of_gradient = (
            Support(
                f"{q.dtype.name}, h={h}, d={d}",
                (kernel,),
                library.shipped_for(kernel, heads=h, dtype=q.dtype.name) if d == _D else (),
                _WANTED,
            )
            for kernel in ("indexer_scores_at", "indexer_scores_at_bwd")
        )
        use = choose(op, implementation, support)
        use_backward = choose_backward(use, of_gradient.built)
        scores = Differentiable(Call(_SCORES, use, (), support), Call(_SCORES_GRADIENT, use_backward, (), of_gradient))
    return scores(q, *others)[0]


def _divergence(*operands: jax.Array) -> Arrays:
    return (definition.divergence(*operands),)


def _divergence_gradient(*operands: jax.Array) -> Arrays:
    *operands_of_loss, cotangent = operands
    return (definition.divergence_gradient(*operands_of_loss) * cotangent[..., None],)


_DIVERGENCE = Differentiable(Function(_divergence), Function(_divergence_gradient))
