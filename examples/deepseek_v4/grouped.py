"""A function of rows and of the weights of each row's expert, in blocks of rows that have one expert.

`jax.lax.ragged_dot` is this for one product. On GPUs XLA's default makes it a product of every row with every expert:
for 4096 tokens of V4-Flash that are 50 TB of operands. Here a loop over blocks reads the weights of those experts alone
that have rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Blocks(NamedTuple):
    """Where rows go that are sorted by expert, each expert's from the beginning of a block on."""

    source: jax.Array
    """int32 `[n, size]`: the row in each place, or the number of rows where there is none"""
    place: jax.Array
    """int32 `[rows]`: where each row is in the blocks laid end to end, or their end for rows without an expert"""
    expert: jax.Array
    """int32 `[n]`"""
    count: jax.Array
    """how many of the n blocks there are"""


def blocks(expert: jax.Array, experts: int) -> Blocks:
    """Of rows with these experts `[rows]`; a number that is not below `experts` is none."""
    rows = len(expert)
    size = min(max(16, 1 << (rows // experts).bit_length()), 128)
    n = rows // size + experts
    sizes = jnp.bincount(expert, length=experts)
    of_expert = -(-sizes // size)
    ends, before = jnp.cumsum(of_expert), jnp.cumsum(sizes) - sizes
    order = jnp.argsort(expert, stable=True)
    its = jnp.minimum(expert[order], experts - 1)
    place = ((ends - of_expert) * size - before)[its] + jnp.arange(rows)
    place = jnp.where(expert[order] < experts, place, n * size).astype(jnp.int32)
    source = jnp.full(n * size, rows).at[place].set(order, mode="drop")
    of_block = jnp.searchsorted(ends, jnp.arange(n), side="right", method="compare_all")
    return Blocks(
        source.reshape(n, size),
        jnp.zeros_like(place).at[order].set(place),
        jnp.minimum(of_block, experts - 1),
        ends[-1],
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def over_blocks(f: Callable[..., jax.Array], rows: Any, weights: Any, expert: jax.Array, count: jax.Array) -> jax.Array:
    """f(rows of a block, weights of its expert) for the first `count` blocks; zeros for the others.

    f: has a result of the shape and dtype of the first of its rows.
    rows: a tuple of `[n, size, …]`; weights: a tuple of `[experts, …]`; expert: int32 `[n]`.
    """

    def block(i: Any, y: jax.Array) -> jax.Array:
        return y.at[i].set(f(_of(rows, i), _of(weights, expert[i])))

    return jax.lax.fori_loop(0, count, block, _zeros(rows[0].shape, rows[0].dtype, expert))


def _forward(f: Any, *operands: Any) -> tuple[jax.Array, Any]:
    return over_blocks(f, *operands), operands


def _backward(f: Any, operands: Any, dy: jax.Array) -> tuple[Any, ...]:
    """Computes each block anew. Gradients of weights are sums of blocks, in float32."""
    rows, weights, expert, count = operands

    def block(i: Any, grads: Any) -> Any:
        d_rows, d_weights = grads
        _, vjp = jax.vjp(f, _of(rows, i), _of(weights, expert[i]))
        of_rows, of_weights = vjp(dy[i])
        d_rows = jax.tree.map(lambda d, x: d.at[i].set(x), d_rows, of_rows)
        return d_rows, jax.tree.map(lambda d, x: d.at[expert[i]].add(x.astype(d.dtype)), d_weights, of_weights)

    zeros = (
        jax.tree.map(lambda x: _zeros(x.shape, x.dtype, expert), rows),
        jax.tree.map(lambda x: _zeros(x.shape, jnp.float32, expert), weights),
    )
    d_rows, d_weights = jax.lax.fori_loop(0, count, block, zeros)
    return d_rows, jax.tree.map(lambda d, x: d.astype(x.dtype), d_weights, weights), None, None


over_blocks.defvjp(_forward, _backward)


def _of(xs: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: x[i], xs)


def _zeros(shape: tuple[int, ...], dtype: Any, expert: jax.Array) -> jax.Array:
    """Zeros which, in a shard_map, vary over the mesh as expert does, and so as what the loop makes of it."""
    return jnp.zeros(shape, dtype) + (0 * expert[0]).astype(dtype)
