"""The training of the lightning indexer: its scores at given entries, and the loss."""

from typing import Any

import jax
from jax import lax

from .. import _check
from .._definitions import indexer as definition
from .._definitions.log_space import denominator
from .._definitions.span import Span
from .._dispatch.autodiff import Differentiable, Function
from .._dispatch.lowering import choose, choose_backward
from .._dispatch.op import Arrays, Axes, Call, KernelUse, Op
from .._dispatch.support import Support, not_built
from .._host import indexer as raw
from .._host import library
from .indexer_keys import INDICES, SCORES_THERE, SPAN, TRAINED, WANTED, D, visible
from .probabilities import head_summed_probabilities


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
    indices: jax.Array | None = None,
    *,
    span: Span | None = None,
    sink: jax.Array | None = None,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """The loss that trains the indexer: KL(teacher ‖ student) for every query (DeepSeek-V3.2's report, §2.1).

    The teacher is attention itself: Σ_h exp(d_a^-½ · attention_q · kv - logaddexp(lse, sink)) at each entry, normalised
    to sum to 1 over the entries. lse may count more than these entries, such as a window. The student is the softmax of
    the indexer's scores over the same entries. These are the entries that `indices` names, each once, or without
    `indices`, as in the warm-up, all visible entries. Only q, k and weights get gradients.

    Args:
      q, k, weights: the indexer's, as in `indexer_scores`.
      attention_q: `[b, s_q, h_q, d_a]`, bfloat16, float16 or float32: the queries of attention.
      kv: `[b, s_c, d_a]` in the dtype of attention_q: the entries that attention reads.
      lse: float32 `[b, s_q, h_q]`, as `dsv4_attention` returns it.
      indices: int32 `[b, s_q, topk]`, as `lightning_indexer` returns them.
      span: what is visible, as in `lightning_indexer`; only without `indices`.
      sink: as in `dsv4_attention`, whose scale is the usual one.

    Returns:
      float32 `[b, s_q]`; 0 for a query that has no entry, or whose heads attend to none of them.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands; without indices there never is one.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Span, dsv4_attention, indexer_loss
      >>> q, k, weights = jnp.ones((1, 8, 2, 128)), jnp.ones((1, 2, 128)), jnp.ones((1, 8, 2))
      >>> attention_q, kv, window_kv = jnp.ones((1, 8, 4, 64)), jnp.ones((1, 2, 64)), jnp.ones((1, 8, 64))
      >>> o, lse = dsv4_attention(attention_q, window_kv, kv, ratio=4)
      >>> indexer_loss(q, k, weights, attention_q, kv, lse, span=Span.compressed(8, ratio=4)).shape
      (1, 8)
    """
    op = "indexer_loss"
    dims: dict[str, Any] = {}
    q, k, weights = _trained(op, q, k, weights, dims)
    attention_q = _check.operand(op, "attention_q", attention_q, "b s_q h_q d_a", dims, _check.FLOAT)
    kv = _check.operand(op, "kv", kv, "b s_c d_a", dims, (attention_q.dtype,))
    lse = _check.operand(op, "lse", lse, "b s_q h_q", dims, _check.FP32, "attention_q")
    sink = _check.sink(op, sink, dims, "attention_q")
    scale = _check.scale(op, None, dims["d_a"])
    _check.implementation(op, implementation)
    if indices is None:
        if implementation == "cubin":
            got, kernels = "'cubin' without indices", ("head_summed_probabilities", "indexer_scores_at")
            raise not_built(op, "implementation", got, "indices, or None or 'reference'", kernels)
        attention_q, kv, lse = map(lax.stop_gradient, (attention_q, kv, denominator(lse, sink)))
        start, stop = visible(op, dims, span)
        loss, gradient = (Call(op, KernelUse.NEVER, (("scale", scale),)) for op in (_DENSE_LOSS, _DENSE_LOSS_GRADIENT))
        return Differentiable(loss, gradient)(q, k, weights, attention_q, kv, lse, start, stop)[0]
    if span is not None:
        raise _check.error(ValueError, op, "span", span, "None with indices, which say what is visible")
    indices = _check.operand(op, "indices", indices, "b s_q topk", dims, _check.INT)
    target = head_summed_probabilities(
        attention_q, kv, lse, indices, sink=sink, scale=scale, implementation=implementation
    )
    there = (indices >= 0) & (indices < dims["s_c"])
    return _DIVERGENCE(_scores_at(op, implementation, q, k, weights, indices), target, there)[0]


# Operands


def _trained(op: str, q: Any, k: Any, weights: Any, dims: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    q = _check.operand(op, "q", q, "b s_q h d", dims, _check.FLOAT)
    k = _check.operand(op, "k", k, "b s_c d", dims, (q.dtype,))
    return q, k, _check.operand(op, "weights", weights, "b s_q h", dims, _check.FP32)


# The ops


_ATTENTION = (Axes("attention_q", "b s_q h_a d_a"), Axes("kv", "b s_c d_a"), Axes("lse", "b s_q h_a"))
_GRADIENTS = tuple(Axes(f"d{name}", axes) for name, axes in TRAINED)
_SCORES = Op("indexer_scores", (*TRAINED, INDICES), (SCORES_THERE,), definition.scores_at, raw.indexer_scores_at)
_SCORES_GRADIENT = Op(
    "indexer_scores",
    (*TRAINED, INDICES, Axes("dscores", "b s_q topk")),
    _GRADIENTS,
    definition.scores_at_gradient,
    raw.indexer_scores_at_bwd,
    part="gradient",
)
_LOSS = (*TRAINED, *_ATTENTION, *SPAN)
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
                library.shipped_for(kernel, heads=h, dtype=q.dtype.name) if d == D else (),
                WANTED,
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
