"""A layer's experts: the gated product, the product after it, and the sum over those that a token chose."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions import experts
from .._definitions.experts import PackedExperts
from .._dispatch.autodiff import without_gradient
from .._dispatch.lowering import choose
from .._dispatch.op import Arrays, Axes, Call, Op
from .._dispatch.support import Support
from .._host import fused_moe as raw
from .._host import library

FORMAT = "mxfp4"


def fused_moe(
    x: jax.Array,
    w13: PackedExperts,
    w2: PackedExperts,
    chosen: jax.Array,
    weights: jax.Array,
    *,
    limit: float | None = None,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """Sums the results of the experts that each token chose, from weights in MXFP4.

        y[t] = Σ_j w2[chosen[t, j]] (weights[t, j] · silu(min(gate, limit)) · clip(up, ±limit))
        gate, up = w13[chosen[t, j]] x[t]

    This is the feed-forward layer of DeepSeek-V4 and of other mixtures of experts (vLLM and tokamax call it by this
    name). Rows are sorted by expert, and each expert's matrices are read once, in 4 bits; numbers become bfloat16 in
    registers, and sums are float32. The channels inside of an expert are rounded to x's dtype, and so is what it makes
    of a token, before these are summed. A token's result does not depend on the other tokens.

    On a mesh, call it in `jax.shard_map`, with the experts of a device and `chosen` less the number of its first
    expert, and sum the results: a choice that is not of `[0, e)` adds nothing.

    Args:
      x: `[b, s, k]`, bfloat16 or float32.
      w13: `pack_experts` of gates and what they let through, `[e, 2, n, k]`.
      w2: `pack_experts` of `[e, k, n]`.
      chosen: int32 `[b, s, c]`, the experts of each token.
      weights: float32 `[b, s, c]`, of these.
      limit: a float > 0 for V4's SwiGLU, or None for a plain one.
      implementation: as in `fmha`.

    Returns:
      `[b, s, k]` in x's dtype. On a kernel it has no gradient. Under `jax.vmap` the definition runs.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import fused_moe, pack_experts
      >>> one = jnp.full((2, 2, 256, 128), 0x22, jnp.uint8), jnp.full((2, 2, 256, 8), 119, jnp.uint8)  # 2^-8
      >>> w13, w2 = pack_experts(*one), pack_experts(one[0][:, 0], one[1][:, 0])
      >>> x, chosen = jnp.ones((1, 1, 256)), jnp.array([[[0, 1]]])
      >>> round(float(fused_moe(x, w13, w2, chosen, jnp.full((1, 1, 2), 0.5))[0, 0, 0]), 3)
      0.731
    """
    op = "fused_moe"
    dims: dict[str, Any] = {}
    x = _check.operand(op, "x", x, "b s k", dims, (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)))
    for name, w, gated in (("w13", w13, True), ("w2", w2, False)):
        if not isinstance(w, PackedExperts):
            raise _check.error(TypeError, op, name, w, "PackedExperts, as pack_experts makes them")
        if w.gated != gated:
            got, wanted = ("a gated matrix", "a plain one") if w.gated else ("a plain matrix", "a gated one")
            raise _check.error(ValueError, op, name, got, wanted)
    if w13.columns != dims["k"]:
        raise _check.error(ValueError, op, "w13", f"{w13.columns} columns", f"k={dims['k']}, as x has")
    e, inner = w13.experts, w13.rows // 2
    if (w2.experts, w2.rows, w2.columns) != (e, dims["k"], inner):
        got = f"{w2.experts} experts of {w2.rows} x {w2.columns}"
        raise _check.error(ValueError, op, "w2", got, f"{e} of {dims['k']} x {inner}, as w13 and x have")
    chosen = _check.operand(op, "chosen", chosen, "b s c", dims, _check.INT)
    weights = _check.operand(op, "weights", weights, "b s c", dims, _check.FP32)
    limit = math.inf if limit is None else _check.number(op, "limit", limit, "a float > 0", lambda y: y > 0)
    _check.implementation(op, implementation)
    if implementation == "reference":
        return experts.of_experts(x, w13, w2, chosen, weights, limit=limit)
    support = _support(x, e)
    use = choose(op, implementation, support)
    params = (("limit", limit),)
    arrays = (x, chosen, weights, *(a[None] for w in (w13, w2) for a in (w.data, w.factor)))
    (y,) = without_gradient(Call(_FUSED_MOE, use, params, support), *arrays)
    return y


def _support(x: jax.Array, e: int) -> Support:
    archs = library.shipped_for("grouped_product", dtype=x.dtype.name, weights=FORMAT)
    fits = e <= raw.MOST_EXPERTS and x.size
    got = f"{x.dtype.name}, {FORMAT}, {e} experts"
    return Support(got, ("group_rows", "grouped_product"), archs if fits else ())


def _definition(x: Any, chosen: Any, weights: Any, *ws: Any, limit: float) -> Arrays:
    data13, factor13, data2, factor2 = (w[0] for w in ws)
    w13, w2 = PackedExperts(data13, factor13, gated=True), PackedExperts(data2, factor2, gated=False)
    return (experts.of_experts(x, w13, w2, chosen, weights, limit=limit),)


def _kernel(x: Any, chosen: Any, weights: Any, *ws: Any, limit: float) -> Arrays:
    arrays = [w[0] for w in ws]
    inner = PackedExperts(arrays[2], arrays[3], gated=False).columns
    y, places = raw.fused_moe(x, chosen, weights, *arrays, inner=inner, limit=limit, format=FORMAT)
    there = jnp.where(places < 0, y.shape[0], places)
    parts = jnp.take(y, there, 0, mode="fill", fill_value=0)
    return (parts.astype(jnp.float32).sum(2).astype(x.dtype),)


_FUSED_MOE = Op(
    "fused_moe",
    (
        *(Axes("x", "b s_q k"), Axes("chosen", "b s_q c"), Axes("weights", "b s_q c")),
        *(Axes("w13", "b* e tiles13 slabs13 bytes"), Axes("factor13", "b* e")),
        *(Axes("w2", "b* e tiles2 slabs2 bytes"), Axes("factor2", "b* e")),
    ),
    (Axes("y", "b s_q k"),),
    _definition,
    _kernel,
    is_mapped=False,
)
