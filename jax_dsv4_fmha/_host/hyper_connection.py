"""The raw calls of hyper-connections, and of their gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call

PARTS, WALKS = 16, 8
"""devices' CTAs that share out the channels, and the tokens: each leaves a part of a sum"""
MOST_ITERATIONS = 32
"""that the gradient walks back"""


def hyper_connection(
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    mix: jax.Array,
    *others: jax.Array,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> tuple[jax.Array, ...]:
    """The streams `[b, s, 4, hidden]` after a sublayer, `[b, s, hidden]` that the next one is given, its pre, post and
    mix, float32 `[b, s, 4]` twice and `[b, s, 4, 4]`; and float32 `[b, s, 24]` and `[b, s]`: fn times the streams, and
    the sum of the streams' squares.

    Args:
      x, y: `[b, s, 4, hidden]` and `[b, s, hidden]`, bfloat16.
      post, mix: float32, as the results are.
      *others: float32: taken `[b, s, 4]`, or `[b, s, 0]` for the new pre; then fn `[24, 4, hidden]`, scale `[3]`,
        base `[24]` and norm `[hidden]`.
    """
    results = (*_like(x, y, post, post, mix), _float32(*y.shape[:2], 24), _float32(*y.shape[:2]))
    attributes = _attributes(iterations, eps, hc_eps)
    return tuple(call("hyper_connection", results, x, y, post, mix, *others, **attributes))


def hyper_connection_bwd(
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    mix: jax.Array,
    taken: jax.Array,
    *others: jax.Array,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> tuple[jax.Array, ...]:
    """The gradients of x, y and taken, like these; and float32 `[b, s, 32]`: the gradients of fn's 24 logits, what z
    took the streams by, three numbers, and 1 / rms of all streams; `[PARTS, b, s, 20]`, whose sum
    is the gradient of post and then of mix; and `[WALKS, hidden]`, whose sum is the gradient of norm.

    Args:
      x, y, post, mix, taken: as the forward pass has them; iterations is at most `MOST_ITERATIONS`.
      *others: its other operands; then the first and the last two of its results; then the cotangents of the first
        five, in their order.
    """
    b, s, _, hidden = x.shape
    parts = (_float32(b, s, 32), _float32(PARTS, b, s, 20), _float32(WALKS, hidden))
    attributes = _attributes(iterations, eps, hc_eps)
    operands = x, y, post, mix, taken, *others
    return tuple(call("hyper_connection_bwd", (*_like(x, y, taken), *parts), *operands, **attributes))


def _like(*arrays: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)


def _float32(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _attributes(iterations: int, eps: float, hc_eps: float) -> dict[str, Any]:
    return {"iterations": np.int64(iterations), "eps": np.float32(eps), "hc_eps": np.float32(hc_eps)}
