"""The raw calls that move rows of tokens to a layer's experts, and sum what experts make of them."""

import jax
import numpy as np

from .call import call


def expert_rows_taken(x: jax.Array, list: jax.Array, count: jax.Array) -> jax.Array:
    """The rows of tokens by expert, `[rows, k]`: row r is that of token `list[r] // c`, for r below `count`. All others
    are not written.

    Args:
      x: `[tokens, k]`, bfloat16; k is a multiple of 256.
      list: int32 `[tokens c]`, choices of tokens.
      count: int32 `[1]`.
    """
    (y,) = call("expert_rows_taken", (jax.ShapeDtypeStruct((*list.shape, x.shape[1]), x.dtype),), x, list, count)
    return y


def expert_rows_summed(x: jax.Array, chosen: jax.Array, experts: int) -> jax.Array:
    """The sums of rows over each token's choices that are of `[0, experts)`, in float32: `[tokens, k]` in x's dtype.

    Args:
      x: `[tokens c, k]`, bfloat16, a row for each choice; k is a multiple of 256.
      chosen: int32 `[tokens, c]`.
    """
    result = jax.ShapeDtypeStruct((chosen.shape[0], x.shape[1]), x.dtype)
    (y,) = call("expert_rows_summed", (result,), x, chosen, experts=np.int64(experts))
    return y
