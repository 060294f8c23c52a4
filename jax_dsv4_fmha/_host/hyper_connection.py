"""The raw call of hyper-connections."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call


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
    """The streams `[b, s, 4, hidden]` after a sublayer, `[b, s, hidden]` that the next one is given, and its pre, post
    and mix, float32 `[b, s, 4]` twice and `[b, s, 4, 4]`.

    Args:
      x, y: `[b, s, 4, hidden]` and `[b, s, hidden]`, bfloat16.
      post, mix: float32, as the results are.
      *others: float32: taken `[b, s, 4]`, or `[b, s, 0]` for the new pre; then fn `[24, 4, hidden]`, scale `[3]`,
        base `[24]` and norm `[hidden]`.
    """
    numbers = tuple(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (post, post, mix))
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(y.shape, y.dtype), *numbers)
    attributes: dict[str, Any] = {
        "iterations": np.int64(iterations),
        "eps": np.float32(eps),
        "hc_eps": np.float32(hc_eps),
    }
    return tuple(call("hyper_connection", results, x, y, post, mix, *others, **attributes))
