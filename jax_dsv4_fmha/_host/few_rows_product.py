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
PARTS = range(1, 9)
"""numbers of parts that k is cut into"""
SLAB = 64
"""of k that a CTA takes at once; of a packed matrix twice as much"""
_COLUMNS, _CTAS = 128, 132
_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)  # of 1 to 8 CTAs that an H200 takes at once, one CTA an SM
_TILE = 64  # columns of a packed matrix that lie together


def parts(k: int, n: int, groups: int, at_once: int = SLAB) -> int:
    """The number of parts that such a product cuts k into, whatever the rows: as many as CTAs of a Hopper GPU take, of
    at least `at_once` of k. Of a packed matrix an SM has one CTA, and all run at once.
    """
    tiles, most = groups * -(-n // _COLUMNS), min(PARTS[-1], max(1, k // at_once))
    if at_once > SLAB:
        return next(p for p in range(most, 0, -1) if p == 1 or tiles <= _CLUSTERS[p - 1])
    return 1 << (min(most, max(1, _CTAS // tiles)).bit_length() - 1)


def few_rows_product(x: jax.Array, w: jax.Array, *, dtype: Any, parts: int, n: int | None = None) -> tuple[jax.Array]:
    """x `[b, s, g, k]` w `[g, k, n]`, for each g: `[b, s, g, n]` in dtype, x's or float32. k and n are multiples of 8.

    Args:
      w: or packed, uint8 `[g, tiles, slabs, slab_bytes]`, as `_definitions.packed_matrix` lays matrices out: for x in
        bfloat16. So may w be in what follows, without the axis g where there is none, and with an n where there is one.
      parts: 1 to 8, into which k is cut. The products of a part are added in turn, and then the parts in turn.
      n: columns of a packed w.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:3], _columns(w, n)), dtype)
    (y,) = call("few_rows_product", (result,), x, w, parts=np.int64(parts))
    return (y,)


def _columns(w: jax.Array, n: int | None) -> int:
    return w.shape[2] if n is None else n


def few_rows_product_and_low_rank(
    x: jax.Array, w: jax.Array, gain: jax.Array, *, parts: int, n: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`few_rows_product` in float32 for one matrix `w [1, k, n]`; and of its first columns, a low-rank query that is
    left to be normed: these times gain, in x's dtype `[b, s, columns]`, and the sums of squares of every `SQUARED` of
    them, float32 `[b, s, columns / SQUARED]`.

    Args:
      gain: float32 `[columns]`, a multiple of `SQUARED`.
    """
    (b, s), columns = x.shape[:2], gain.shape[0]
    results = (
        jax.ShapeDtypeStruct((*x.shape[:3], _columns(w, n)), jnp.float32),
        jax.ShapeDtypeStruct((b, s, columns), x.dtype),
        jax.ShapeDtypeStruct((b, s, columns // SQUARED), jnp.float32),
    )
    y, low, squares = call("few_rows_product_and_low_rank", results, x, w, gain, parts=np.int64(parts))
    return y, low, squares


def few_rows_product_of_turned(
    x: jax.Array, w: jax.Array, table: jax.Array, *, parts: int, n: int | None = None
) -> tuple[jax.Array]:
    """`few_rows_product` in x's dtype, after RoPE back of x's heads of 512: k is a multiple of that.

    Args:
      table: float32 `[b, s, 64]`: cos and sin of each pair of a head's last numbers, by turns.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:3], _columns(w, n)), x.dtype)
    (y,) = call("few_rows_product_of_turned", (result,), x, w, table, parts=np.int64(parts))
    return (y,)


def _heads(w: jax.Array, d: int) -> tuple[int, int]:
    return (w.shape[0] * _TILE // d if w.dtype == jnp.uint8 else w.shape[1], d)


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
    result = jax.ShapeDtypeStruct((*x.shape[:2], *_heads(w, HEAD)), x.dtype)
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
    shape = (*x.shape[:2], *_heads(w, INDEX_D))
    results = (
        jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn if to_fp8 else x.dtype),
        jax.ShapeDtypeStruct(shape[:3], jnp.float32),
    )
    attributes: dict[str, Any] = {"parts": np.int64(parts), "column": np.int64(column)}
    attributes |= {"scale": np.float32(scale), "eps": np.float32(eps)}
    q, weights = call("few_rows_product_index_query", results, x, w, table, squares, given, **attributes)
    return q, weights
