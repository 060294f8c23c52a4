"""The lightning indexer: the choice of the compressed entries that a query attends to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _check
from .._definitions.cache import Cache
from .._definitions.indexer import begins_blocks
from .._definitions.packed import quantize_rows
from .._definitions.quantized import Quantized
from .._definitions.span import Span
from .._dispatch import two_levels
from .._dispatch.autodiff import without_gradient
from .indexer_keys import E4M3, call, choices_of, fit, keys_of, shipped_for_both, visible


def lightning_indexer(
    q: jax.Array,
    k: jax.Array | Quantized | Cache,
    weights: jax.Array,
    topk: int,
    *,
    span: Span,
    blocks: jax.Array | None = None,
    block: int = 8,
    return_scores: bool = False,
    implementation: _check.Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Chooses, for each query, the `topk` entries that score highest among those it may see.

        I[t, s] = Σ_h weights[t, h] · ReLU(q[t, h] · k[s])    fp32 (DeepSeek-V3.2's report, §2.1)

    A query may see the entries that `span` shows it: the past ones, as `Span.compressed(s_q, ratio, offset)` has them,
    where entry s stands for `ratio` tokens and the first query has position `offset`. The choice is exact for the
    scores as the implementation computes them: the greatest win, the lower entry wins a tie, NaN comes last. Indices
    are in ascending order, then -1, and the same on every run. `dsv4_attention` and `sparse_fmha` take them as
    `indices`.

    The result has no gradient; `indexer_scores` has.

    In generation, k is a `Cache` that already holds the new entries, and the s_q new queries of a sequence of n tokens
    begin at position `n - s_q`. A query at a position below 0 sees nothing. A chunk of a prompt may be given in the
    same way.

    Args:
      q: `[b, s_q, h, d]`, bfloat16 or float8_e4m3fn; float16, float32, and h other than 32 and 64, only on the
        reference.
      k: `[b, s_c, d]` in q's dtype. With s_c = 0 every index is -1. Where q is float8_e4m3fn, a `Quantized`, codes in
        q's dtype with scales `[b, s_c]`, by which scores are multiplied. Or a `Cache` in q's dtype, or in the layout
        "index_fp8" where q is float8_e4m3fn, else also in "index_fp4"; s_c is then its capacity. It must not have run
        over, and an entry without a page counts as zeros. Hopper's kernels read "index_fp4" for 32 or 64 heads in
        bfloat16; else XLA unpacks it into an array.
      weights: float32 `[b, s_q, h]`, of any sign; they include the scales of a quantized q (see `quantize_indexer`).
      topk: an int >= 1; it may exceed s_c.
      span: the entries that a query may see: `Span.compressed(s_q, ratio, offset)`, with `& Span.lengths(n)` if a
        sequence has n entries; for packed documents `Span.compressed_segments(ids, ratio)`.
      blocks: int32 `[b, s_q, n]`, as `indexer_blocks` returns them, ascending and none twice, then -1 for those that
        are absent: only entries in these blocks of `block` entries are chosen. Blocks in another order are an error
        where they are known, and undefined where they are traced. Kernels compute scores of these entries alone. Of a
        `Cache` they read these keys where they are: for blocks of 8 in pages of whole blocks, with 32 heads,
        bfloat16 or float8_e4m3fn; else what XLA gathers into an array of all its keys.
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
      >>> from jax_dsv4_fmha import Span, lightning_indexer
      >>> q, k = jnp.ones((1, 8, 2, 128), jnp.bfloat16), jnp.ones((1, 2, 128), jnp.bfloat16)
      >>> weights = jnp.ones((1, 8, 2))
      >>> indices = lightning_indexer(q, k, weights, topk=2, span=Span.compressed(8, ratio=4))
      >>> indices[0, [2, 3, 7]].tolist()  # of the queries at positions 2, 3 and 7
      [[-1, -1], [0, -1], [0, 1]]
    """
    op = "lightning_indexer"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h d", dims, (*_check.FLOAT, E4M3))
    topk, block = _check.positive(op, "topk", topk), _check.positive(op, "block", block)
    _check.flags(op, return_scores=return_scores)
    _check.implementation(op, implementation)
    weights = _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)
    if blocks is not None:
        blocks = _check.operand(op, "blocks", blocks, "b s_q n", dims, _check.INT)
        _ascending(op, blocks)
    if getattr(k.codes if isinstance(k, Quantized) else k, "shape", None) == (dims["b"], 0, dims["d"]):
        visible(op, dims | {"s_c": 0}, span)
        indices = jnp.full((dims["b"], dims["s_q"], topk), -1, jnp.int32)
        return (indices, jnp.full(indices.shape, -jnp.inf, jnp.float32)) if return_scores else indices
    chosen_by = {"heads": dims["h"], "dtype": q.dtype.name, **choices_of(k)}
    from_start = isinstance(span, Span) and begins_blocks(span)

    def judged() -> bool:
        """True if every device here has a kernel that scores the entries of such blocks."""
        return two_levels.has_kernel_within(block, from_start, **chosen_by)

    if blocks is None:
        in_pages = not chosen_by["packing"] or (fit(k) and two_levels.for_all("indexer_scores", **chosen_by))
    else:
        in_pages = fit(k) and judged()
    keys = keys_of(op, k, q.dtype, dims, in_pages)
    chosen_by = chosen_by if in_pages else chosen_by | choices_of(None)
    start, stop = visible(op, dims, span)
    if blocks is not None:
        how = {"topk": topk, "block": block, "from_start": from_start}
        kernel = "indexer_scores_within"
        if not judged():
            kernel, chosen_by = "indexer_scores_at", {"heads": dims["h"], "dtype": q.dtype.name}
        archs = shipped_for_both(kernel, topk, dims, **chosen_by)
        its_call = call(op, keys.ops.within, implementation, kernel, archs, q, dims, keys.got, "", **how)
        inputs = (*map(lax.stop_gradient, (q, weights, *keys.operands)), blocks, start, stop)
        indices, scores = without_gradient(its_call, *inputs)
        return (indices, scores) if return_scores else indices
    archs = shipped_for_both("indexer_scores", topk, dims, **chosen_by) if keys.fits else ()
    choose = keys.ops.choose_and_score if return_scores else keys.ops.choose
    its_call = call(op, choose, implementation, "indexer_scores", archs, q, dims, keys.got, keys.wanted, topk=topk)
    results = without_gradient(its_call, *map(lax.stop_gradient, (q, weights, *keys.operands)), start, stop)
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
    k: jax.Array | Quantized | Cache,
    weights: jax.Array,
    count: int,
    block: int = 8,
    *,
    span: Span,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """The first of two levels of choice: blocks of entries that later indexers choose within (DeepSeek-V4.1).

    Block i has the entries from `i block` to `i block + block - 1`. With a span of `Span.compressed_segments` entries
    are counted from the first one that it shows a query: so in a row of packed documents each has the blocks that it
    has alone, and `lightning_indexer` counts them in the same way. The score of a block is the greatest score, as in
    `lightning_indexer`, of those of its entries that a query may see. The newest block, with the last entry that a
    query may see, is always chosen. The lower block wins a tie. The result has no gradient.

    Args:
      q, k, weights, span: as in `lightning_indexer`. XLA gathers a `Cache` in pages into an array, unless kernels take
        it, as `blocks` there says.
      count: an int >= 1: how many blocks to choose; DeepSeek-V4.1 takes 2048.
      block: an int >= 1; kernels take powers of two up to 32.
      implementation: None: the kernels where there are some, else the reference; "cubin" or "reference" insist.

    Returns:
      int32 `[b, s_q, count]`, ascending, then -1 where a query sees fewer blocks.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and it is not built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Span, indexer_blocks, lightning_indexer
      >>> q, k = jnp.ones((1, 4, 2, 128), jnp.bfloat16), jnp.ones((1, 32, 128), jnp.bfloat16)
      >>> weights = jnp.ones((1, 4, 2))
      >>> span = Span.compressed(4, ratio=1, offset=28)
      >>> blocks = indexer_blocks(q, k, weights, count=2, span=span)
      >>> blocks[0, -1].tolist()  # of the last query: the newest block, and the lowest of the others
      [0, 3]
      >>> indices = lightning_indexer(q, k, weights, topk=3, span=span, blocks=blocks)
      >>> indices.shape
      (1, 4, 3)
    """
    op = "indexer_blocks"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h d", dims, (*_check.FLOAT, E4M3))
    weights = _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)
    count, block = _check.positive(op, "count", count), _check.positive(op, "block", block)
    _check.implementation(op, implementation)
    from_start = isinstance(span, Span) and begins_blocks(span)
    how = {"count": count, "block": block, "from_start": from_start}
    chosen_by = {"heads": dims["h"], "dtype": q.dtype.name, **choices_of(k)}
    in_pages = fit(k) and two_levels.has_kernel(block, from_start, **chosen_by)
    keys = keys_of(op, k, q.dtype, dims, in_pages)
    chosen_by = chosen_by if in_pages else chosen_by | choices_of(None)
    start, stop = visible(op, dims, span)
    archs = shipped_for_both("indexer_scores", count - 1, dims, **chosen_by)
    archs = archs if block in two_levels.BLOCKS else ()
    got = ", ".join(filter(None, [f"blocks of {block}", keys.got]))
    wanted = f"blocks of {' or '.join(map(str, two_levels.BLOCKS))}"
    its_call = call(op, keys.ops.blocks, implementation, "indexer_scores", archs, q, dims, got, wanted, **how)
    (blocks,) = without_gradient(its_call, *map(lax.stop_gradient, (q, weights, *keys.operands)), start, stop)
    return blocks


def quantize_indexer(
    q: jax.Array, k: jax.Array | None, weights: jax.Array
) -> tuple[jax.Array, Quantized | None, jax.Array]:
    """Quantizes operands of `lightning_indexer` to 8 bits: (q, k, weights) with the same scores I.

    Each row is divided by scale = max(max |row|, 1e-4) / 448 and rounded to float8_e4m3fn. The scales of q, one for
    each query and head, are multiplied into weights; they are positive, so they pass through ReLU. Multiply the rows of
    q and k by a Hadamard matrix first, as DeepSeek-V4 does: it spreads outliers over all of d. Codes and scales have no
    gradient, as the choice has none.

    Args:
      q: `[b, s_q, h, d]`, bfloat16, float16 or float32.
      k: `[b, s_c, d]`, bfloat16, float16 or float32; or None: a `Cache` of the layout "index_fp8" quantizes what is
        appended to it in the same way.
      weights: float32 `[b, s_q, h]`.

    Returns:
      q in float8_e4m3fn; a `Quantized` of k, codes `[b, s_c, d]` and scales `[b, s_c]`, or None without k; weights
      float32 `[b, s_q, h]`.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import quantize_indexer
      >>> q, k = jnp.ones((1, 8, 2, 128), jnp.bfloat16), jnp.ones((1, 2, 128), jnp.bfloat16)
      >>> weights = jnp.ones((1, 8, 2))
      >>> q, k, weights = quantize_indexer(q, k, weights)
      >>> q.dtype, k.scales.shape
      (dtype(float8_e4m3fn), (1, 2))
    """
    op = "quantize_indexer"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h d", dims, _check.FLOAT)
    keys = None
    if k is not None:
        keys = Quantized(*quantize_rows(_check.operand(op, "k", k, "b s_c d", dims, _check.FLOAT)))
    weights = _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)
    q, q_scale = quantize_rows(q)
    return q, keys, weights * q_scale
