"""A layer's experts: the gated product, the product after it, and the sum over those that a token chose."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions import experts
from .._definitions.experts import UNIT, Experts, PackedExperts
from .._dispatch.autodiff import Differentiable, Function, Keeping, constant
from .._dispatch.lowering import choose, choose_backward
from .._dispatch.manual_axes import vary, varying
from .._dispatch.op import Arrays, Axes, Call, KernelUse, Op, Params
from .._dispatch.support import Support
from .._host import fused_moe as raw
from .._host import library
from . import fused_moe_training

ROWS = "bfloat16"
"""what matrices are in that are not packed"""


class _Gates(Keeping):
    """The rule that keeps what gates and up projections make, by its name."""

    names = ("dsv4_fmha_gates",)


def fused_moe(
    x: jax.Array,
    w13: PackedExperts | jax.Array,
    w2: PackedExperts | jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    *,
    limit: float | None = None,
    num_experts: int | None = None,
    implementation: _check.Implementation | None = None,
) -> jax.Array:
    """Sums the results of the experts that each token chose, from weights in MXFP4, FP8, bfloat16 or float32.

        y[t] = Σ_j w2[chosen[t, j]] (weights[t, j] · silu(min(gate, limit)) · clip(up, ±limit))
        gate, up = w13[chosen[t, j]] x[t]

    This is the feed-forward layer of DeepSeek-V4 and of other mixtures of experts (vLLM and tokamax call it by this
    name). Rows are sorted by expert, and each expert's matrices are read once; numbers of 4 or 8 bits become bfloat16
    in registers, and sums are float32. The channels inside of an expert are rounded to x's dtype, and so is what it
    makes of a token, before these are summed. A token's result does not depend on the other tokens.

    On a mesh, call it in `jax.shard_map`, with the experts of a device and `chosen` less the number of its first
    expert, and sum the results: a choice that is not of `[0, e)` adds nothing.

    Args:
      x: `[b, s, k]`, bfloat16 or float32.
      w13: gates and what they let through, `[e, 2, n, k]`: bfloat16, float32, or `pack_experts` of them.
      w2: `[e, k, n]`, in the same. Kernels take no float32, and k and n in multiples of 256.
      chosen: int32 `[b, s, c]`, the experts of each token.
      weights: float32 `[b, s, c]`, of these.
      limit: a float > 0 for V4's SwiGLU, or None for a plain one.
      num_experts: those among which tokens chose, on a mesh the experts of all devices; None: e. It says how many rows
        an expert has on average, by which a kernel is chosen, and results are the same.
      implementation: as in `fmha`.

    Returns:
      `[b, s, k]` in x's dtype. It has a gradient, in x, weights, w13 and w2, each in its own dtype; without a kernel it
      is the definition's, where every expert multiplies all tokens. From packed matrices it is that of x and weights
      alone, by the matrices in x's dtype, which it unpacks first. Under `jax.vmap` the definition runs. A policy of
      `jax.checkpoint` that saves the name "dsv4_fmha_gates" keeps what gates and up projections make of arrays,
      `[b, s, c, 2, n]`, so that kernels make no product twice.

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
    dtypes = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    x = _check.operand(op, "x", x, "b s k", dims, dtypes)
    if isinstance(w13, PackedExperts) or isinstance(w2, PackedExperts):
        e = _check_packed(op, w13, w2, dims["k"])
    else:
        dims["gates"] = 2
        w13 = _check.operand(op, "w13", w13, "e gates n k", dims, dtypes)
        w2 = _check.operand(op, "w2", w2, "e k n", dims, (w13.dtype,))
        e = dims["e"]
    chosen = _check.operand(op, "chosen", chosen, "b s c", dims, _check.INT)
    weights = _check.operand(op, "weights", weights, "b s c", dims, _check.FP32)
    asked = ("limit", limit), ("num_experts", num_experts), ("implementation", implementation)
    limit = math.inf if limit is None else _check.number(op, "limit", limit, "a float > 0", lambda y: y > 0)
    num_experts = e if num_experts is None else _check.integer(op, "num_experts", num_experts, e)
    _check.implementation(op, implementation)
    if implementation == "reference":
        return experts.of_experts(x, w13, w2, chosen, weights, limit=limit)
    support = _support(x, w13, e)
    use = choose(op, implementation, support)
    params = (("limit", limit),)
    of_all = (*params, ("num_experts", num_experts))
    arrays = [a[None] for a in jax.tree.leaves((w13, w2))]
    if isinstance(w13, PackedExperts):
        arrays[1::2] = (constant(a, op, f"{w}.factor") for a, w in zip(arrays[1::2], ("w13", "w2"), strict=True))
        run = Differentiable(Call(_OF_PACKED, use, of_all, support), Function(_unpacked_gradient, asked))
    else:
        run = _trained(Call(_OF_ROWS, use, of_all, support), params, support, x.dtype)
    (y,) = run(x, weights, *arrays, chosen)
    return y


def _trained(call: Call, params: Params, support: Support, dtype: Any) -> Differentiable:
    """The call over matrices in bfloat16, with its gradient."""
    archs = library.shipped_for("expert_product", dtype=dtype.name)
    of_gradient = Support(support.got, ("expert_product",), archs if support.shipped else ())
    use = choose_backward(call.use, of_gradient.built)
    if use == KernelUse.NEVER:
        return Differentiable(call, Function(_gradient, params))
    keeping, backward = (Call(op, use, params, of_gradient) for op in (_KEEPING, _BACKWARD))
    return Differentiable(call, backward, _Gates, keeping)


def _check_packed(op: str, w13: Any, w2: Any, k: Any) -> int:
    """Returns the number of experts whose matrices fit together, and x of k channels."""
    for name, w, gated in (("w13", w13, True), ("w2", w2, False)):
        if not isinstance(w, PackedExperts):
            raise _check.error(TypeError, op, name, w, "PackedExperts, as pack_experts makes them, as the other one is")
        dims: dict[str, Any] = {}
        _check.operand(op, f"{name}.data", w.data, "e tiles slabs bytes", dims, (jnp.dtype(jnp.uint8),))
        if dims["bytes"] not in experts.BYTES:
            wanted = f"{' or '.join(map(str, experts.BYTES))}, as pack_experts makes them"
            raise _check.error(ValueError, op, f"{name}.data", f"slabs of {dims['bytes']} bytes", wanted)
        _check.operand(op, f"{name}.factor", w.factor, "e", dims, _check.FP32)
        if w.gated != gated:
            got, wanted = ("a gated matrix", "a plain one") if w.gated else ("a plain matrix", "a gated one")
            raise _check.error(ValueError, op, name, got, wanted)
    if w13.columns != k:
        raise _check.error(ValueError, op, "w13", f"{w13.columns} columns", f"k={k}, as x has")
    if w2.format != w13.format:
        raise _check.error(ValueError, op, "w2", f"matrices in {w2.format}", f"{w13.format}, as w13 has")
    e, inner = w13.experts, w13.rows // 2
    if (w2.experts, w2.rows, w2.columns) != (e, k, inner):
        got = f"{w2.experts} experts of {w2.rows} x {w2.columns}"
        raise _check.error(ValueError, op, "w2", got, f"{e} of {k} x {inner}, as w13 and x have")
    return e


def _support(x: jax.Array, w13: Experts, e: int) -> Support:
    if isinstance(w13, PackedExperts):  # in multiples of UNIT
        format, rows, columns, of = w13.format, UNIT, UNIT, ""
    else:
        format, (rows, columns) = w13.dtype.name, w13.shape[2:]
        of = f" of {rows} x {columns}"
    fits = e <= raw.MOST_EXPERTS and x.size and rows % UNIT == 0 and columns % UNIT == 0
    archs = library.shipped_for("grouped_product", dtype=x.dtype.name, weights=format)
    got = f"{x.dtype.name}, {format}, {e} experts{of}"
    return Support(got, ("group_rows", "grouped_product"), archs if fits else ())


def _of_packed(x: Any, weights: Any, *operands: Any, limit: float, num_experts: int) -> Arrays:
    *arrays, chosen = operands
    data13, factor13, data2, factor2 = (w[0] for w in arrays)
    w13, w2 = PackedExperts(data13, factor13, gated=True), PackedExperts(data2, factor2, gated=False)
    return (experts.of_experts(x, w13, w2, chosen, weights, limit=limit),)


def _unpacked_gradient(x: Any, weights: Any, *operands: Any, **how: Any) -> Arrays:
    """The gradients of x and weights, by the matrices in x's dtype; XLA leaves out what is for those of matrices."""
    data13, factor13, data2, factor2, chosen, dy = operands

    def unpacked(data: jax.Array, factor: jax.Array, gated: bool) -> jax.Array:
        """Expert by expert, so that what is between takes no more memory than one of them."""
        one = lambda w: PackedExperts(w[0][None], w[1][None], gated).unpacked(x.dtype)[0]  # noqa: E731
        return jax.lax.map(one, (data[0], factor[0]))

    w13, w2 = unpacked(data13, factor13, True), unpacked(data2, factor2, False)
    _, back = jax.vjp(lambda x, of: fused_moe(x, w13, w2, chosen, of, **how), x, weights)
    gradients: Arrays = back(dy)
    return gradients


def _of_rows(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, *, limit: float, num_experts: int = 0) -> Arrays:
    return (experts.of_experts(x, w13[0], w2[0], chosen, weights, limit=limit),)


def _gradient(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, dy: Any, *, limit: float) -> Arrays:
    """The gradients of all operands but the choices, by the definition."""
    _, back = jax.vjp(lambda x, of, *w: _of_rows(x, of, w[0], w[1], chosen, limit=limit), x, weights, w13, w2)
    gradients: Arrays = back((dy,))
    return gradients


def _keeping(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, *, limit: float) -> Arrays:
    """The definition keeps nothing: its gradient begins anew."""
    operands = x, weights, w13, w2, chosen
    kept = vary((jnp.zeros((*chosen.shape, *w13.shape[2:4]), x.dtype),), varying(operands))
    return *_of_rows(*operands, limit=limit), *kept


def _backward(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, _: Any, dy: Any, *, limit: float) -> Arrays:
    return _gradient(x, weights, w13, w2, chosen, dy, limit=limit)


def _packed_by_kernels(x: Any, weights: Any, *operands: Any, **params: Any) -> Arrays:
    *arrays, chosen = operands
    arrays = [w[0] for w in arrays]
    w2 = PackedExperts(arrays[2], arrays[3], gated=False)
    return _summed(x, *raw.fused_moe(x, chosen, weights, *arrays, inner=w2.columns, format=w2.format, **params))


def _rows_by_kernels(x: Any, weights: Any, w13: Any, w2: Any, chosen: Any, **params: Any) -> Arrays:
    none = jnp.zeros(0, jnp.float32)  # factors
    arrays = (w13[0], none, w2[0], none)
    return _summed(x, *raw.fused_moe(x, chosen, weights, *arrays, inner=w2.shape[3], format=ROWS, **params))


def _summed(x: Any, y: Any, places: Any) -> Arrays:
    """The sum of the rows y of each token's experts."""
    there = jnp.where(places < 0, y.shape[0], places)
    parts = jnp.take(y, there, 0, mode="fill", fill_value=0)
    return (parts.astype(jnp.float32).sum(2).astype(x.dtype),)


def _op(definition: Any, kernel: Any, *matrices: Axes) -> Op:
    operands = (*_ROWS, *matrices, _CHOSEN)
    return Op("fused_moe", operands, (_Y,), definition, kernel, is_mapped=False)


_ROWS, _CHOSEN, _Y = (Axes("x", "b s_q k"), Axes("weights", "b s_q c")), Axes("chosen", "b s_q c"), Axes("y", "b s_q k")
_MATRICES = (Axes("w13", "b* e gates rows13 columns13"), Axes("w2", "b* e rows2 columns2"))
_KEPT = Axes("made", "b s_q c gates rows13")
"""what gates and up projections make, of each choice"""

_OF_PACKED = _op(
    *(_of_packed, _packed_by_kernels),
    *(Axes("w13", "b* e tiles13 slabs13 bytes"), Axes("factor13", "b* e")),
    *(Axes("w2", "b* e tiles2 slabs2 bytes"), Axes("factor2", "b* e")),
)
_OF_ROWS = _op(_of_rows, _rows_by_kernels, *_MATRICES)
_KEEPING = Op(
    "fused_moe_training",
    (*_ROWS, *_MATRICES, _CHOSEN),
    (_Y, _KEPT),
    _keeping,
    fused_moe_training.forward,
    is_mapped=False,
)
_BACKWARD = Op(
    "fused_moe",
    (*_ROWS, *_MATRICES, _CHOSEN, _KEPT, _Y._replace(name="dy")),
    (*_ROWS, *_MATRICES),
    _backward,
    fused_moe_training.gradient,
    part="gradient",
    is_mapped=False,
)
