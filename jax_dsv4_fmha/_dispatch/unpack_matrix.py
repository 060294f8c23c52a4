"""The numbers of packed matrices as arrays, for products of many rows: by a kernel, where there is one."""

from typing import Any

import jax
import jax.numpy as jnp

from .._definitions import packed_matrix
from .._definitions.packed_matrix import PackedMatrix
from .._definitions.slabs import SLAB, TILE
from .._host import library
from .._host import unpack_matrix as raw
from .autodiff import without_gradient
from .lowering import choose
from .op import Arrays, Axes, Call, KernelUse, Op
from .support import Support


def rows_first(w: PackedMatrix, dtype: Any) -> jax.Array:
    """`w.unpacked` with the axes of its rows before those of its columns, and several matrices before both.

    In this order a kernel writes it, and XLA's products read it: they add up along the columns, whose numbers are
    neighbours then.
    """
    several, columns, rows = w.parts()
    return packed_matrix.of_shards(_unpacked, w.data, w.rows, w.columns, dtype).reshape(*several, *rows, *columns)


def unpacked(w: PackedMatrix, dtype: Any) -> jax.Array:
    """Returns `w.unpacked`; a kernel may write its transpose."""
    found = packed_matrix.of_shards(_unpacked, w.data, w.rows, w.columns, dtype)
    return jnp.swapaxes(found, -1, -2).reshape(w.shape)


def _unpacked(data: jax.Array, rows: int, columns: int, dtype: Any) -> jax.Array:
    """`packed_matrix.unpacked`. Where whole tiles are wanted, devices may share them."""
    *several, tiles, slabs, size = data.shape
    whole = (tiles * TILE, slabs * SLAB)
    is_cut = (rows, columns) != whole and columns % raw.AT_ONCE == 0
    support = Support("bfloat16", ("unpack_matrix",), library.shipped_for("unpack_matrix"))
    use = choose("unpack_matrix", None, support) if jnp.dtype(dtype) == jnp.bfloat16 else KernelUse.NEVER
    if use == KernelUse.NEVER:
        return packed_matrix.unpacked(data, rows, columns, dtype)
    op, params = (_CUT, {"rows": rows, "columns": columns}) if is_cut else (_WHOLE, {"row": TILE, "column": SLAB})
    call = Call(op, use, tuple(params.items()), support)
    (w,) = without_gradient(call, data.reshape(-1, tiles, slabs, size))
    return w.reshape(*several, *((rows, columns) if is_cut else whole))[..., :rows, :columns]


def _cut(data: jax.Array, *, rows: int, columns: int) -> Arrays:
    return (packed_matrix.unpacked(data, rows, columns, jnp.bfloat16),)


def _whole(data: jax.Array, *, row: int, column: int) -> Arrays:
    m, tiles, slabs, _ = data.shape
    (w,) = _cut(data, rows=tiles * row, columns=slabs * column)
    return (w.reshape(m, tiles, row, slabs, column),)


def _cut_kernel(data: jax.Array, *, rows: int, columns: int) -> Arrays:
    return (raw.unpack_matrix(data, rows=rows, columns=columns),)


def _whole_kernel(data: jax.Array, *, row: int, column: int) -> Arrays:
    m, tiles, slabs, _ = data.shape
    (w,) = _cut_kernel(data, rows=tiles * row, columns=slabs * column)
    return (w.reshape(m, tiles, row, slabs, column),)


_CUT = Op(
    "unpack_matrix", (Axes("data", "b tiles slabs slab_bytes"),), (Axes("w", "b rows columns"),), _cut, _cut_kernel
)
_WHOLE = Op(  # s_q: tiles, h_q: slabs
    "unpack_matrix",
    (Axes("data", "b s_q h_q slab_bytes"),),
    (Axes("w", "b s_q row h_q column"),),
    _whole,
    _whole_kernel,
)
