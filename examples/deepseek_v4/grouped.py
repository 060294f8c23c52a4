"""Products of rows with the matrices of their experts, in blocks of rows that have one expert.

`jax.lax.ragged_dot` is this, too. On GPUs XLA's default makes it a product of every row with every expert: for 4096
tokens of V4-Flash that are 50 TB of operands. Here each block reads its expert's matrix alone: by a Pallas kernel on
NVIDIA GPUs, elsewhere, and where experts are packed, in a loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .packed import Packed, whole

try:  # JAX 0.11 says that a later version will not have it; the loop needs nothing
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

COLUMNS, DEPTH, WARPS, STAGES = 256, 64, 8, 3
"""of a kernel's tile, at most: the best of five on an H200, for a step of 64 tokens and for a prompt of 4096"""


class Blocks(NamedTuple):
    """The places of rows sorted by expert, each expert's from the beginning of a block on."""

    source: jax.Array
    """int32 `[n, size]`: the row in each place, or the number of rows where there is none"""
    place: jax.Array
    """int32 `[rows]`: where each row is in the blocks laid end to end, or their end for rows without an expert"""
    expert: jax.Array
    """int32 `[n]`"""
    begin: jax.Array
    """int32 `[experts + 1]`: the first block of each expert, then how many of the n blocks there are"""


def blocks(expert: jax.Array, experts: int) -> Blocks:
    """Sorts rows with these experts `[rows]` into blocks; a number that is not below `experts` is none."""
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
        jnp.pad(ends, (1, 0)),
    )


@jax.custom_vjp
def products(x: jax.Array, w: jax.Array | Packed, at: Blocks) -> jax.Array:
    """x `[n, size, k]` of each block times the matrix of its expert: `[n, size, c]`, zeros where no block is.

    w: `[experts, k, c]`, or packed, then with any axes that make c, and without a gradient.
    """
    return _products(x, w, at)


def _forward(x: jax.Array, w: Any, at: Blocks) -> tuple[jax.Array, Any]:
    return _products(x, w, at), (x, w, at)


def _backward(kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, w, at = kept
    return _products(dy, w, at, transposed=True), None if isinstance(w, Packed) else _sums(x, dy, at, w), None


products.defvjp(_forward, _backward)


def _products(x: jax.Array, w: Any, at: Blocks, transposed: bool = False) -> jax.Array:
    """The products with each expert's matrix, or with its transpose."""

    def matrix(w: Any, expert: Any) -> jax.Array:
        found = whole(jax.tree.map(lambda x: x[expert], w), x.dtype)
        found = found.reshape(len(found), -1)
        return found.T if transposed else found

    (n, size, k), (_, c) = x.shape, jax.eval_shape(matrix, w, 0).shape

    def loop(x: jax.Array, w: Any, at: Blocks) -> jax.Array:
        def block(i: Any, y: jax.Array) -> jax.Array:
            return y.at[i].set(x[i] @ matrix(w, at.expert[i]))

        return jax.lax.fori_loop(0, at.begin[-1], block, _zeros((n, size, c), x.dtype, at))

    depth, columns = _part(k, DEPTH), _part(c, COLUMNS)

    def kernel(x: Any, w: Any, expert: Any, begin: Any, y: Any) -> None:
        i, of_c = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)
        is_block = i < begin[begin.shape[0] - 1]

        def step(t: Any, y: jax.Array) -> jax.Array:
            of_k = pl.ds(t * depth, depth)
            tile = w[expert[i], of_c, of_k] if transposed else w[expert[i], of_k, of_c]
            return y + triton.dot(x[i, :, of_k], tile, trans_b=transposed)

        @pl.when(is_block)
        def _() -> None:
            y[...] = jax.lax.fori_loop(0, k // depth, step, jnp.zeros(y.shape, jnp.float32)).astype(y.dtype)

        @pl.when(~is_block)
        def _() -> None:
            y[...] = jnp.zeros(y.shape, y.dtype)

    if isinstance(w, Packed) or not _is_tiled(depth, columns, x.dtype):
        return loop(x, w, at)
    out = pl.BlockSpec((None, size, columns), lambda i, j: (i, 0, j))
    launched = _launched(kernel, (n, c // columns), out, (n, size, c), x.dtype)
    return jax.lax.platform_dependent(x, w, at, cuda=launched, default=loop)


def _sums(x: jax.Array, dy: jax.Array, at: Blocks, w: jax.Array) -> jax.Array:
    """The gradient `[experts, k, c]` of products' w: the sum of xᵀ dy over each expert's blocks, in float32."""

    def loop(x: jax.Array, dy: jax.Array, at: Blocks) -> jax.Array:
        def block(i: Any, dw: jax.Array) -> jax.Array:
            return dw.at[at.expert[i]].add(jnp.matmul(x[i].T, dy[i], preferred_element_type=jnp.float32))

        return jax.lax.fori_loop(0, at.begin[-1], block, _zeros(w.shape, jnp.float32, at)).astype(w.dtype)

    experts, k, c = w.shape
    rows, columns = _part(k, 128), _part(c, 128)

    def kernel(x: Any, dy: Any, expert: Any, begin: Any, dw: Any) -> None:
        e, of_k, of_c = pl.program_id(0), pl.program_id(1) * rows, pl.program_id(2) * columns

        def block(i: Any, dw: jax.Array) -> jax.Array:
            return dw + triton.dot(x[i, :, pl.ds(of_k, rows)], dy[i, :, pl.ds(of_c, columns)], trans_a=True)

        zeros = jnp.zeros((rows, columns), jnp.float32)
        dw[...] = jax.lax.fori_loop(begin[e], begin[e + 1], block, zeros).astype(dw.dtype)

    if not _is_tiled(rows, columns, x.dtype):
        return loop(x, dy, at)
    out = pl.BlockSpec((None, rows, columns), lambda e, i, j: (e, i, j))
    launched = _launched(kernel, (experts, k // rows, c // columns), out, w.shape, w.dtype)
    return jax.lax.platform_dependent(x, dy, at, cuda=launched, default=loop)


def _launched(kernel: Callable[..., None], grid: tuple[int, ...], out: Any, shape: Any, dtype: Any) -> Callable:
    """A function of two arrays and of blocks that runs a Pallas kernel of theirs."""

    def run(x: jax.Array, y: jax.Array, at: Blocks) -> jax.Array:
        operands = (x, y, at.expert, at.begin)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[pl.BlockSpec(a.shape, lambda *_, axes=a.ndim: (0,) * axes) for a in operands],
            out_specs=out,
            out_shape=jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        )(*operands)

    return run


def _is_tiled(rows: int, columns: int, dtype: Any) -> bool:
    """True if Triton is installed, and has a kernel for such tiles."""
    return triton is not None and min(rows, columns) >= 16 and dtype != jnp.float32


def _part(extent: int, most: int) -> int:
    """The greatest power of two that divides the extent, or the most that a tile has."""
    return min(extent & -extent, most)


def _zeros(shape: tuple[int, ...], dtype: Any, at: Blocks) -> jax.Array:
    """Zeros which, in a shard_map, vary over the mesh as blocks do, and so as what a loop makes of them."""
    return jnp.zeros(shape, dtype) + (0 * at.expert[0]).astype(dtype)
