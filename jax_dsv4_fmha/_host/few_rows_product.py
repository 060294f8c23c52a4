"""Raw calls of products of few rows with a matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call, extent

HEAD = extent("few_rows_product_norm_rope", "y")
INDEX_D = extent("few_rows_product_index_query", "y")
DIMS = extent("few_rows_product_norm_rope", "table")
"""numbers of a query head that is normed, and of an indexer's; and the last of either, which are rotated"""
SQUARED, SQUARES = 128, 32
"""columns of a low-rank query whose squares have a sum, and the most such sums of a row"""
PARTS = (1, 2, 4, 8)
"""numbers of parts that k is cut into"""
_COLUMNS, _CTAS = 128, 132


def parts(k: int, n: int, groups: int) -> int:
    """The number of parts that such a product cuts k into, whatever the rows: as many as CTAs of a Hopper GPU take."""
    tiles = groups * -(-n // _COLUMNS)
    most = min(PARTS[-1], max(1, _CTAS // tiles), max(1, k // 64))
    return 1 << (most.bit_length() - 1)


def few_rows_product(x: jax.Array, w: jax.Array, *, dtype: Any, parts: int) -> tuple[jax.Array]:
    """x `[b, s, g, k]` w `[g, k, n]`, for each g: `[b, s, g, n]` in dtype, x's or float32. k and n are multiples of 8.

    Args:
      parts: 1, 2, 4 or 8, into which k is cut. The products of a part are added in turn, and then the parts in turn.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:3], w.shape[2]), dtype)
    (y,) = call("few_rows_product", (result,), x, w, parts=np.int64(parts))
    return (y,)


def few_rows_product_and_low_rank(
    x: jax.Array, w: jax.Array, gain: jax.Array, *, parts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`few_rows_product` in float32 for one matrix `w [1, k, n]`; and of its first columns, a low-rank query that is
    left to be normed: these times gain, in x's dtype `[b, s, columns]`, and the sums of squares of every `SQUARED` of
    them, float32 `[b, s, columns / SQUARED]`.

    Args:
      gain: float32 `[columns]`, a multiple of `SQUARED`.
    """
    (b, s), columns = x.shape[:2], gain.shape[0]
    results = (
        jax.ShapeDtypeStruct((*x.shape[:3], w.shape[2]), jnp.float32),
        jax.ShapeDtypeStruct((b, s, columns), x.dtype),
        jax.ShapeDtypeStruct((b, s, columns // SQUARED), jnp.float32),
    )
    y, low, squares = call("few_rows_product_and_low_rank", results, x, w, gain, parts=np.int64(parts))
    return y, low, squares


def few_rows_product_of_turned(x: jax.Array, w: jax.Array, table: jax.Array, *, parts: int) -> tuple[jax.Array]:
    """`few_rows_product` in x's dtype, after RoPE back of x's heads of 512: k is a multiple of that.

    Args:
      table: float32 `[b, s, 64]`: cos and sin of each pair of a head's last numbers, by turns.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:3], w.shape[2]), x.dtype)
    (y,) = call("few_rows_product_of_turned", (result,), x, w, table, parts=np.int64(parts))
    return (y,)


def few_rows_product_norm_rope(
    x: jax.Array, w: jax.Array, table: jax.Array, squares: jax.Array, *, eps: float
) -> tuple[jax.Array]:
    """x `[b, s, k]` w `[k, h, 512]`, each head divided by sqrt(mean of squares + eps), and its last 64 numbers rotated
    in pairs: `[b, s, h, 512]`.

    Args:
      table: float32 `[b, s, 64]`: cos and sin of each pair, by turns.
      squares: float32 `[b, s, k / SQUARED]`, whose sum is that of squares of k numbers, by whose root mean square, with
        eps, each row of the product is divided first; or `[b, s, 0]`.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:2], *w.shape[1:]), x.dtype)
    (y,) = call("few_rows_product_norm_rope", (result,), x, w, table, squares, eps=np.float32(eps))
    return (y,)


def few_rows_product_index_query(
    x: jax.Array,
    w: jax.Array,
    table: jax.Array,
    squares: jax.Array,
    given: jax.Array,
    *,
    parts: int,
    column: int,
    scale: float,
    eps: float,
    to_fp8: bool,
) -> tuple[jax.Array, jax.Array]:
    """x `[b, s, k]` w `[k, h, 128]`, each head rotated and multiplied by the Hadamard matrix: `[b, s, h, 128]` in x's
    dtype, or in float8_e4m3fn; and the heads' weights, float32 `[b, s, h]`, with the scales of float8_e4m3fn.

    Args:
      table, squares, eps: as in `few_rows_product_norm_rope`.
      given: float32 `[b, s, columns]`, weights before they are multiplied by scale, of the first head at `column`.
      parts: 2.
    """
    shape = (*x.shape[:2], *w.shape[1:])
    results = (
        jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn if to_fp8 else x.dtype),
        jax.ShapeDtypeStruct(shape[:3], jnp.float32),
    )
    attributes: dict[str, Any] = {"parts": np.int64(parts), "column": np.int64(column)}
    attributes |= {"scale": np.float32(scale), "eps": np.float32(eps)}
    q, weights = call("few_rows_product_index_query", results, x, w, table, squares, given, **attributes)
    return q, weights
