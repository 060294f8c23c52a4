"""The raw calls of products of rows by group, as the gradient of a layer's experts has them."""

import jax
import jax.numpy as jnp
import numpy as np

from .call import call

TILE = 128
"""rows of a tile at most"""
COLUMNS = 256
"""its columns"""


def expert_product(
    a: jax.Array, b: jax.Array, to: jax.Array, tiles: jax.Array, count: jax.Array, *, turned: bool = False
) -> jax.Array:
    """The products of rows with their group's matrix: `[rows, n]` in a's dtype, where row `to[r]` is b[g] a[r]. What no
    tile has is not written.

    Args:
      a: `[rows, m]`, bfloat16, rows of a group one after the other; m is a multiple of 64.
      b: `[groups, n, m]` in a's dtype, or `[groups, m, n]` if `turned`; n is a multiple of 256.
      to: int32 `[rows]`.
      tiles: int32 `[most, 4]`: a group, its first row, the number of rows, at most `TILE`, and 0.
      count: int32 `[1]`, of tiles.
    """
    n = b.shape[2 if turned else 1]
    (y,) = call(
        "expert_product_turned" if turned else "expert_product",
        (jax.ShapeDtypeStruct((a.shape[0], n), a.dtype),),
        *(a, b, to, tiles, count),
    )
    return y


def expert_product_gated(
    a: jax.Array,
    b: jax.Array,
    to: jax.Array,
    tiles: jax.Array,
    count: jax.Array,
    weights: jax.Array,
    *,
    limit: float,
) -> tuple[jax.Array, jax.Array]:
    """The products of rows with gates and up projections `[rows, 2, n]`, where row `to[r]` is of a[r], and the channels
    `[rows, n]` that these let through, times `weights[to[r]]`, where row r is of a[r]. Both are in a's dtype.

    Args:
      a, to, tiles, count: as in `expert_product`.
      b: `[groups, 2, n, m]` in a's dtype, gates first; n is a multiple of 128.
      weights: float32 `[rows]`.
      limit: of gates from above, and of up projections.
    """
    rows, n = a.shape[0], b.shape[2]
    made, inner = call(
        "expert_product_gated",
        (jax.ShapeDtypeStruct((rows, 2, n), a.dtype), jax.ShapeDtypeStruct((rows, n), a.dtype)),
        *(a, b, to, tiles, count, weights),
        limit=np.float32(limit),
    )
    return made, inner


def expert_product_gated_back(
    a: jax.Array,
    b: jax.Array,
    made: jax.Array,
    to: jax.Array,
    tiles: jax.Array,
    count: jax.Array,
    weights: jax.Array,
    *,
    limit: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of gates and up projections `[rows, 2, n]`, from those of what experts make, a; and the channels
    `[rows, n]` as `expert_product_gated` makes them. In both row r is of a[r], in a's dtype. The third is float32
    `[rows, parts]`, whose sum over parts is the gradient of `weights[to[r]]`, in row `to[r]`.

    Args:
      a, to, tiles, count: as in `expert_product`.
      b: `[groups, m, n]` in a's dtype, the matrices by which channels were multiplied; n is a multiple of 256.
      made: `[rows, 2, n]` in a's dtype, as `expert_product_gated` makes it.
      weights, limit: as there.
    """
    rows, n = a.shape[0], b.shape[2]
    of_made, inner, of_weights = call(
        "expert_product_gated_back",
        (
            jax.ShapeDtypeStruct((rows, 2, n), a.dtype),
            jax.ShapeDtypeStruct((rows, n), a.dtype),
            jax.ShapeDtypeStruct((rows, n // COLUMNS), jnp.float32),
        ),
        *(a, b, made, to, tiles, count, weights),
        limit=np.float32(limit),
    )
    return of_made, inner, of_weights


def expert_outer_product(a: jax.Array, b: jax.Array, first: jax.Array, sizes: jax.Array) -> jax.Array:
    """The sum over each group's rows of a[r] b[r]': `[groups, m, n]` in a's dtype, zeros for an empty group.

    Args:
      a: `[rows, m]`, bfloat16; m is a multiple of 128.
      b: `[rows, n]` in a's dtype; n is a multiple of 256.
      first: int32 `[groups]`, the first row of each group.
      sizes: int32 `[groups]`, the number of its rows.
    """
    shape = first.shape[0], a.shape[1], b.shape[1]
    (y,) = call("expert_outer_product", (jax.ShapeDtypeStruct(shape, a.dtype),), a, b, first, sizes)
    return y


def room_for_tiles(rows: int, groups: int) -> int:
    """The most tiles that so many rows can make up."""
    return groups + rows // TILE
