"""The Hadamard transform, which makes the values of a row similar in size."""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _check


def hadamard(x: jax.Array) -> jax.Array:
    """x `[…, d]` times Sylvester's matrix over √d, which is orthogonal; d is a power of two. Computed in float32,
    returned in x's dtype.

    Entry (i, j) of the matrix is `(-1)^popcount(i & j)`.

    Raises:
      ValueError, TypeError: x is not an array of floats, or d not a power of two.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import hadamard
      >>> hadamard(jnp.array([0.0, 1.0, 0.0, 0.0])).tolist()
      [0.5, -0.5, 0.5, -0.5]
    """
    wanted = f"{' or '.join(map(str, _check.FLOAT))}[..., d], d a power of two"
    x = _check.array("hadamard", "x", x, wanted, lambda x: x.dtype in _check.FLOAT and x.ndim and is_power(x.shape[-1]))
    d = x.shape[-1]
    i = jnp.arange(d, dtype=jnp.int32)  # no constant, which JAX's custom partitioning does not take
    signs = (1 - 2 * (lax.population_count(i[:, None] & i[None]) % 2)).astype(x.dtype)
    y = jnp.matmul(x, signs, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
    return (y * d**-0.5).astype(x.dtype)


def is_power(n: int) -> bool:
    """Returns whether n is a power of two."""
    return n > 0 and not n & (n - 1)
