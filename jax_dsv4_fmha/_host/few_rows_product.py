"""Raw calls of products of few rows with a matrix."""

from typing import Any

import jax
import numpy as np

from .call import call

HEAD, DIMS = 512, 64
"""numbers of a query head that is normed, and the last of them, which are turned"""
_COLUMNS, _CTAS, _MOST = 128, 132, 8


def parts(k: int, n: int, groups: int) -> int:
    """Into how many parts a product of these sizes cuts k, whatever the rows: as many as CTAs of a Hopper GPU take."""
    tiles = groups * -(-n // _COLUMNS)
    most = min(_MOST, max(1, _CTAS // tiles), max(1, k // 64))
    return 1 << (most.bit_length() - 1)


def few_rows_product(x: jax.Array, w: jax.Array, *, dtype: Any, parts: int) -> tuple[jax.Array]:
    """x `[b, s, g, k]` w `[g, k, n]`, for each g: `[b, s, g, n]` in dtype, x's or float32. k and n are multiples of 8.

    Args:
      parts: 1, 2, 4 or 8, into which k is cut. The products of a part are added in turn, and then the parts in turn.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:3], w.shape[2]), dtype)
    (y,) = call("few_rows_product", (result,), x, w, parts=np.int64(parts))
    return (y,)


def few_rows_product_of_turned(x: jax.Array, w: jax.Array, table: jax.Array, *, parts: int) -> tuple[jax.Array]:
    """`few_rows_product` in x's dtype, after RoPE back of x's heads of 512: k is a multiple of that.

    Args:
      table: float32 `[b, s, 64]`: cos and sin of each pair of a head's last numbers, by turns.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:3], w.shape[2]), x.dtype)
    (y,) = call("few_rows_product_of_turned", (result,), x, w, table, parts=np.int64(parts))
    return (y,)


def few_rows_product_norm_rope(x: jax.Array, w: jax.Array, table: jax.Array, *, eps: float) -> tuple[jax.Array]:
    """x `[b, s, k]` w `[k, h, 512]`, each head divided by sqrt(mean of squares + eps), and its last 64 numbers turned
    in pairs: `[b, s, h, 512]`.

    Args:
      table: float32 `[b, s, 64]`: cos and sin of each pair, by turns.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:2], *w.shape[1:]), x.dtype)
    (y,) = call("few_rows_product_norm_rope", (result,), x, w, table, eps=np.float32(eps))
    return (y,)
