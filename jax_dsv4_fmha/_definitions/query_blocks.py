"""Functions of rows of queries, run for a block of queries at a time, so that what one block needs fits in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Arrays = tuple[jax.Array, ...]


def over_queries(block: Callable[..., Arrays], size: Any, *rows: jax.Array) -> Arrays:
    """block(*rows) over rows `[b, s_q, …]`, `size` queries at a time; zeros fill up the last block."""
    _, results = scan_queries(lambda nothing, *rows: (nothing, block(*rows)), None, size, *rows)
    return results


def scan_queries(
    block: Callable[..., tuple[Any, Arrays]], carry: Any, size: Any, *rows: jax.Array
) -> tuple[Any, Arrays]:
    """carry, results = block(carry, *rows), block after block."""
    s_q = rows[0].shape[1]
    if isinstance(s_q, int) and s_q <= size:
        return block(carry, *rows)
    n = -(-s_q // size)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, n * size - s_q)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], n, size, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], n * size, *x.shape[3:])[:, :s_q]

    carry, results = lax.scan(lambda carry, rows: block(carry, *rows), carry, tuple(map(split, rows)))
    return carry, tuple(map(join, results))
