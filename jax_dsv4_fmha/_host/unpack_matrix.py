"""The raw call that writes matrices in FP8 as arrays."""

import jax
import jax.numpy as jnp

from .call import call

AT_ONCE = 8
"""columns that the kernel writes at once: it takes multiples of it"""


def unpack_matrix(data: jax.Array, *, rows: int, columns: int) -> jax.Array:
    """bfloat16 `[m, rows, columns]`: the numbers of matrices in tiles of 64 rows and slabs of 64 columns.

    Args:
      data: uint8 `[m, tiles, slabs, 4112]`, as `pack_matrix` makes it.
      rows, columns: as many as the tiles and slabs have, or fewer.
    """
    result = jax.ShapeDtypeStruct((data.shape[0], rows, columns), jnp.bfloat16)
    (w,) = call("unpack_matrix", (result,), data)
    return w
