"""Hyper-connections: a residual of several streams, between two sublayers of a model."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions import hyper_connection as definition
from .._definitions.hyper_connection import NUMBERS, STREAMS
from .._definitions.pytree import public_pytree
from .._dispatch.autodiff import Differentiable, Function, Keeping
from .._dispatch.lowering import choose, choose_backward
from .._dispatch.manual_axes import vary, varying
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op, Params
from .._dispatch.support import Support
from .._host import hyper_connection as raw
from .._host import library
from . import hyper_connection_training


@public_pytree
class HyperConnection(NamedTuple):
    """The results of `hyper_connection`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import HyperConnection
      >>> x, z = jnp.zeros((1, 2, 4, 8)), jnp.zeros((1, 2, 8))
      >>> HyperConnection(x, z, x[..., 0], x[..., 0], x[..., :4]).mix.shape
      (1, 2, 4, 4)
    """

    x: jax.Array
    """the streams `[b, s, 4, hidden]` after the former sublayer"""
    z: jax.Array
    """`[b, s, hidden]`, what the next sublayer is given"""
    pre: jax.Array
    """float32 `[b, s, 4]`: how z takes in the streams, without `taken`"""
    post: jax.Array
    """float32 `[b, s, 4]`: how much of the next sublayer's result each stream gets"""
    mix: jax.Array
    """float32 `[b, s, 4, 4]`: how much of stream i goes to stream j past that sublayer, doubly stochastic"""


def hyper_connection(
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    mix: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    norm: jax.Array,
    *,
    taken: jax.Array | None = None,
    iterations: int = 20,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
    implementation: _check.Implementation | None = None,
) -> HyperConnection:
    """Computes all that stands between two sublayers of a model with manifold-constrained hyper-connections.

        x'       = mixᵀ x + post y
        n        = fn x' / sqrt(mean(x'²) + eps), all streams side by side
        pre      = sigmoid(scale[0] n[:4] + base[:4]) + hc_eps
        post'    = 2 sigmoid(scale[1] n[4:8] + base[4:8])
        mix'     = Sinkhorn(softmax(scale[2] n[8:] + base[8:]) + hc_eps)
        z        = norm · u / sqrt(mean(u²) + eps),  u = Σ pre[i] x'[i]

    This is DeepSeek-V4's residual, as its technical report has it ("mHC"). A call for each sublayer takes the place of
    eight to ten kernels of XLA. x', and u before its norm, are rounded to x's dtype. What a token gets does not depend
    on the others. Before the first layer x is 0, y is the embedding, post is 1, and mix is 0.

    Args:
      x: `[b, s, 4, hidden]`, bfloat16 or float32: the streams before the former sublayer.
      y: `[b, s, hidden]` like x: what that sublayer made.
      post, mix: float32 `[b, s, 4]` and `[b, s, 4, 4]`: results of the call before that sublayer.
      fn: float32 `[24, 4 * hidden]`, as a checkpoint has it.
      scale, base: float32 `[3]` and `[24]`.
      norm: float32 `[hidden]`, the weight of the norm before the next sublayer.
      taken: float32 `[b, s, 4]`: z takes in the streams by it, as in V4.1, where it is the pre of the call before.
      iterations: an int >= 1, Sinkhorn's.
      eps, hc_eps: floats >= 0, of the norms; of pre, and of Sinkhorn's sums.
      implementation: as in `fmha`.

    Returns:
      `HyperConnection`. All arrays have gradients, first ones in reverse mode, by kernels where x and y have one and
      iterations are at most 32. Those of x' and u go past their rounding. Under `jax.vmap` the definition runs.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no kernel is built for these operands; there is one for hidden 4096.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import hyper_connection
      >>> x, y = jnp.zeros((1, 2, 4, 8)), jnp.ones((1, 2, 8))
      >>> post, mix = jnp.ones((1, 2, 4)), jnp.zeros((1, 2, 4, 4))
      >>> of = hyper_connection(x, y, post, mix, jnp.zeros((24, 32)), jnp.ones(3), jnp.zeros(24), jnp.ones(8))
      >>> of.x[0, 0, :, 0].tolist(), round(float(of.z[0, 0, 0]), 3), round(float(of.mix[0, 0, 0, 0]), 3)
      ([1.0, 1.0, 1.0, 1.0], 1.0, 0.25)
    """
    op = "hyper_connection"
    dims: dict[str, Any] = {"streams": STREAMS, "goes_to": STREAMS, "numbers": NUMBERS, "parts": 3}
    dtypes = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    x = _check.operand(op, "x", x, "b s streams hidden", dims, dtypes)
    y = _check.operand(op, "y", y, "b s hidden", dims, (x.dtype,))
    post = _check.operand(op, "post", post, "b s streams", dims, _check.FP32)
    mix = _check.operand(op, "mix", mix, "b s streams goes_to", dims, _check.FP32)
    dims["columns"] = STREAMS * dims["hidden"]
    fn = _check.operand(op, "fn", fn, "numbers columns", dims, _check.FP32)
    scale = _check.operand(op, "scale", scale, "parts", dims, _check.FP32)
    base = _check.operand(op, "base", base, "numbers", dims, _check.FP32)
    norm = _check.operand(op, "norm", norm, "hidden", dims, _check.FP32)
    if taken is not None:
        taken = _check.operand(op, "taken", taken, "b s streams", dims, _check.FP32)
    _check.integer(op, "iterations", iterations, 1)
    eps, hc_eps = (
        _check.number(op, name, number, "a float >= 0", lambda number: number >= 0)
        for name, number in (("eps", eps), ("hc_eps", hc_eps))
    )
    _check.implementation(op, implementation)
    taken = jnp.zeros((*y.shape[:2], 0), jnp.float32) if taken is None else taken
    fn = fn.reshape(NUMBERS, STREAMS, -1)
    params: Params = (("iterations", iterations), ("eps", eps), ("hc_eps", hc_eps))
    if implementation == "reference":
        made = definition.hyper_connection(x, y, post, mix, taken, fn, scale, base, norm, **dict(params))
        return HyperConnection(*made)
    support = _support(x)
    run = _trained(Call(_OP, choose(op, implementation, support), params, support), x, iterations)
    return HyperConnection(*run(x, y, post, mix, taken, *(a[None] for a in (fn, scale, base, norm))))


def _trained(call: Call, x: jax.Array, iterations: int) -> Differentiable:
    """The call with its gradient."""
    assert call.support is not None
    is_there = call.support.shipped and iterations <= raw.MOST_ITERATIONS
    archs = library.shipped_for("hyper_connection_bwd", dtype=x.dtype.name, hidden=x.shape[3]) if is_there else ()
    support = Support(call.support.got, ("hyper_connection_bwd",), archs)
    use = choose_backward(call.use, support.built)
    if use == KernelUse.NEVER:
        return Differentiable(call, Function(_gradient, call.params))
    keeping = Call(_KEEPING, use, call.params, call.support)
    return Differentiable(call, Call(_BACKWARD, use, call.params, support), Keeping, keeping)


def _support(x: jax.Array) -> Support:
    hidden = x.shape[3]
    archs = library.shipped_for("hyper_connection", dtype=x.dtype.name, hidden=hidden) if x.size else ()
    return Support(f"{x.dtype.name}, hidden={hidden}", ("hyper_connection",), archs)


def _definition(*operands: jax.Array, **params: Any) -> Arrays:
    return definition.hyper_connection(*operands[:5], *(a[0] for a in operands[5:]), **params)


def _kernel(*operands: jax.Array, **params: Any) -> Arrays:
    return raw.hyper_connection(*operands[:5], *(a[0] for a in operands[5:]), **params)[:5]


def _gradient(*operands: jax.Array, **params: Any) -> Arrays:
    given, cotangents = operands[:9], operands[9:]
    gradients: Arrays = jax.vjp(lambda *given: _definition(*given, **params), *given)[1](tuple(cotangents))
    return gradients


def _keeping(*operands: jax.Array, **params: Any) -> Arrays:
    """The definition keeps nothing: its gradient begins anew."""
    made = _definition(*operands, **params)
    b, s = made[2].shape[:2]
    zeros = jnp.zeros((b, s, NUMBERS), jnp.float32), jnp.zeros((b, s), jnp.float32)
    return *made, made[0], *vary(zeros, varying(operands))


def _backward(*operands: jax.Array, **params: Any) -> Arrays:
    return _gradient(*operands[:9], *operands[9 + len(_KEPT) :], **params)


_OPERANDS = (
    *(Axes("x", "b s_q streams hidden"), Axes("y", "b s_q hidden"), Axes("post", "b s_q streams")),
    *(Axes("mix", "b s_q streams goes_to"), Axes("taken", "b s_q n_taken")),
    *(Axes("fn", f"{ONE_OR_B} numbers streams hidden"), Axes("scale", f"{ONE_OR_B} parts")),
    *(Axes("base", f"{ONE_OR_B} numbers"), Axes("norm", f"{ONE_OR_B} hidden")),
)
_RESULTS = (
    *(Axes("x", "b s_q streams hidden"), Axes("z", "b s_q hidden"), Axes("pre", "b s_q streams")),
    *(Axes("post", "b s_q streams"), Axes("mix", "b s_q streams goes_to")),
)
_KEPT = (Axes("new_x", "b s_q streams hidden"), Axes("totals", "b s_q numbers"), Axes("squares", "b s_q"))
_OP = Op("hyper_connection", _OPERANDS, _RESULTS, _definition, _kernel, is_mapped=False)
_KEEPING = Op(
    "hyper_connection",
    _OPERANDS,
    (*_RESULTS, *_KEPT),
    _keeping,
    hyper_connection_training.forward,
    is_mapped=False,
)
_BACKWARD = Op(
    "hyper_connection",
    (*_OPERANDS, *_KEPT, *(axes._replace(name=f"d{axes.name}") for axes in _RESULTS)),
    _OPERANDS,
    _backward,
    hyper_connection_training.gradient,
    part="gradient",
    is_mapped=False,
)
