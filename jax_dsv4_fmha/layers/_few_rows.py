"""A step's products: few rows with large matrices, by a kernel that reads a matrix once, where there is one.

On Hopper, products of more than MAX_ROWS rows, and of matrices in another dtype than x, are XLA's. A matrix may be a
`PackedMatrix`, which kernels read in FP8. For XLA's products it is unpacked in every call, with its rows first.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _check
from .._definitions import explicit_axes
from .._definitions.packed import quantize_rows
from .._definitions.packed_matrix import FORMAT, PackedMatrix, unpacked
from .._definitions.rope import normed_and_rotated, rotated_pairs
from .._definitions.slabs import BLOCK
from .._dispatch import unpack_matrix
from .._dispatch.autodiff import without_gradient
from .._dispatch.lowering import choose
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op
from .._dispatch.rope import normed_then_rotated, rotated
from .._dispatch.support import Support
from .._host import few_rows_product as raw
from .._host import library
from . import _operands
from ._products import product
from .hadamard import hadamard

MAX_ROWS = 128
"""of x: with more, XLA's products are faster"""

Matrix = jax.Array | PackedMatrix


class LowRank(NamedTuple):
    """A low-rank query, from which a product makes query heads."""

    query: jax.Array
    """`[b, s, k]`"""
    squares: jax.Array | None = None
    """None if it is normed. Else it is the query times the norm's weight, and its product has to be divided by the
    query's root mean square: these are sums of squares, float32 `[b, s, n]`"""


def array_of(w: Matrix, dtype: Any) -> jax.Array:
    """w in dtype."""
    return unpack_matrix.unpacked(w, dtype) if isinstance(w, PackedMatrix) else w.astype(dtype)


def product_of(sums: str, x: jax.Array, w: Matrix, **options: Any) -> jax.Array:
    """`jnp.einsum` of x and w, whose axes in `sums` are those of its columns, then those of its rows, in x's dtype. A
    packed matrix has these the other way round when it is unpacked.
    """
    if not isinstance(w, PackedMatrix):
        return jnp.einsum(sums, x, w.astype(x.dtype), **options)
    of_x, of_w, of_y = re.split(",|->", sums)
    several, columns, _ = map(len, w.parts())
    turned = of_w[:several] + of_w[several + columns :] + of_w[several : several + columns]
    return jnp.einsum(f"{of_x},{turned}->{of_y}", x, unpack_matrix.rows_first(w, x.dtype), **options)


def plain_product(x: jax.Array, w: Matrix, dtype: Any, kernel: bool) -> jax.Array:
    """x `[b, s, k]` w `[k, n]` in dtype, x's or float32; kernel: whether one may run, which has no gradient."""
    is_wide = jnp.dtype(dtype) == jnp.float32 != x.dtype
    call = _call(_PLAIN, x, w, *w.shape, to_float32=is_wide, dtype=jnp.dtype(dtype).name) if kernel else None
    if call is not None:
        return call(x, _operand(w))[0]
    if not is_wide:
        return product_of("bsk,kn->bsn", x, w)
    if isinstance(w, PackedMatrix):
        return product(x, unpack_matrix.rows_first(w, x.dtype), True)
    return product(x, w)


def step_product(x: jax.Array, w: Matrix, *, dtype: Any = None) -> jax.Array:
    """x `[b, s, k]` times w `[k, n]`, as a step's projections are multiplied: up to 128 rows by a kernel that reads w
    once, where there is one. More rows, and other dtypes, are XLA's.

    A row has the same bits in every batch of up to 128 rows.

    Args:
      x: bfloat16, float16 or float32.
      w: an array, or a `PackedMatrix` of k columns and n rows, which is unpacked for XLA.
      dtype: of the result: x's, which is the default, or float32. Sums are float32.

    Returns:
      `[b, s, n]`. On a kernel it has no gradient.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import pack_matrix
      >>> from jax_dsv4_fmha.layers import step_product
      >>> w = pack_matrix(jnp.ones((256, 128), jnp.float8_e4m3fn), jnp.full((2, 1), 0.5))
      >>> step_product(jnp.ones((1, 1, 128)), w)[0, 0, :3].tolist()
      [64.0, 64.0, 64.0]
    """
    op = "step_product"
    if isinstance(w, PackedMatrix):
        if w.data.ndim != 3:
            raise _check.error(ValueError, op, "w", f"{len(w.data)} packed matrices", "one")
        _operands.packed_data(op, "w", w)
        w = w.reshape(w.columns, w.rows)
    else:
        w = _check.array(op, "w", w, "floats[k, n]", lambda w: w.ndim == 2 and jnp.issubdtype(w.dtype, jnp.floating))
    x = _operands.hidden(op, "x", x, w.shape[0])
    dtypes = tuple(dict.fromkeys((x.dtype, jnp.dtype(jnp.float32))))
    dtype = x.dtype if dtype is None else _check.dtype(op, "dtype", dtype, dtypes, " or ".join(map(str, dtypes)))
    return plain_product(x, w, dtype, True)


def leaves_norm(x: jax.Array, w: Matrix, rank: int, *takers: bool) -> bool:
    """Returns whether `product_and_low_rank` makes a query of this rank of x `[b, s, k]` and w `[k, n]`, if all takers
    do its norm themselves.
    """
    fits = rank % raw.SQUARED == 0 and rank <= raw.SQUARED * raw.SQUARES
    return all(takers) and fits and _low_rank_call(x, w, rank) is not None


def product_and_low_rank(x: jax.Array, w: Matrix, gain: jax.Array) -> tuple[jax.Array, LowRank]:
    """`plain_product` in float32, where `leaves_norm`; and its first columns as a low-rank query whose norm has the
    weight gain `[columns]`.
    """
    run = _low_rank_call(x, w, gain.shape[0])
    assert run is not None
    y, query, squares = run(x, _operand(w), gain.astype(jnp.float32)[None])
    return y, LowRank(query, squares)


def makes_heads(x: jax.Array, w: Matrix, dims: int, eps: float | None) -> bool:
    """Returns whether a kernel makes query heads of a query with the batch and dtype of x, and does its norm."""
    return _heads_call(x, w, dims, eps) is not None


def query_heads(c: LowRank, w: Matrix, table: jax.Array, eps: float | None, kernel: bool) -> jax.Array:
    """c times w `[k, h, d]`, its heads normed, unless eps is None, and rotated by a table `[b or 1, s, n]`."""
    x = c.query
    run = _heads_call(x, w, table.shape[2], eps) if kernel else None
    if run is not None:
        return run(x, _operand(w, w.shape[1]), table, _squares(c))[0]
    assert c.squares is None
    q = product_of("bsr,rhd->bshd", x, w)
    return rotated(q, table, 1) if eps is None else normed_then_rotated(q, table, eps)


def makes_index_query(x: jax.Array, w: Matrix, dims: int, to_fp8: bool) -> bool:
    """Returns whether `index_query` makes an indexer's queries of a query with the batch and dtype of x."""
    return _index_call(x, w, dims, to_fp8) is not None


def index_query(
    c: LowRank, w: Matrix, table: jax.Array, given: jax.Array, to_fp8: bool, **params: Any
) -> tuple[jax.Array, jax.Array]:
    """c times w `[k, h, 128]`, its heads rotated by a table `[b or 1, s, 64]` and multiplied by the Hadamard matrix, in
    float8_e4m3fn as `quantize_indexer` does it, or in c's dtype; and the heads' weights, with the scales of those.

    Args:
      given: float32 `[b, s, columns]`, with the heads' weights from `column` on; each is multiplied by scale.
      **params: column, scale, and eps, that of c's norm.
    """
    run = _index_call(c.query, w, table.shape[2], to_fp8, **params)
    assert run is not None
    q, weights = run(c.query, _operand(w, w.shape[1]), table, _squares(c), given)
    return q, weights


def _squares(c: LowRank) -> jax.Array:
    return jnp.zeros((*c.query.shape[:2], 0), jnp.float32) if c.squares is None else c.squares


def _operand(w: Matrix, heads: int = 0) -> jax.Array:
    """w as an operand of an op, which has a batch axis: `[1, …]`, and where columns are heads, an axis of these."""
    if isinstance(w, PackedMatrix):
        return (w.data.reshape(heads, -1, *w.data.shape[1:]) if heads else w.data)[None]
    return w[None]


def _low_rank_call(x: jax.Array, w: Matrix, rank: int) -> Callable[..., Arrays] | None:
    return _call(_LOW_RANK, x, w, *w.shape, to_float32=True, n_squares=rank // raw.SQUARED)


def _heads_call(x: jax.Array, w: Matrix, dims: int, eps: float | None) -> Callable[..., Arrays] | None:
    fits = eps is not None and w.shape[2] == raw.HEAD and dims == raw.DIMS
    return _call(_HEADS, x, w, w.shape[0], w.shape[1] * w.shape[2], eps=eps) if fits else None


def _index_call(x: jax.Array, w: Matrix, dims: int, to_fp8: bool, **params: Any) -> Callable[..., Arrays] | None:
    fits = w.shape[2] == raw.INDEX_D and dims == raw.DIMS
    return _call(_INDEX, x, w, w.shape[0], w.shape[1] * w.shape[2], to_fp8=to_fp8, **params) if fits else None


def projected_back(o: jax.Array, w_a: Matrix, w_b: Matrix, table: jax.Array | None, kernel: bool) -> jax.Array:
    """y `[b, s, n]` of o `[b, s, h, d]`, with w_a `[g, h / g, d, k]` and w_b `[g, k, n]`; o is first rotated back by a
    table, if any.
    """
    return summed_product(grouped_product(o, w_a.reshape(w_a.shape[0], -1, w_a.shape[3]), table, kernel), w_b, kernel)


def grouped_product(x: jax.Array, w: Matrix, table: jax.Array | None, kernel: bool) -> jax.Array:
    """x `[b, s, h, d]` w `[g, h / g d, n]`, group by group of heads, which a table, if there is one, first rotates
    back.
    """

    def in_groups(x: jax.Array) -> jax.Array:
        """One axis for the heads of a group: of two, XLA transposes the weights for the gradient."""
        return x.reshape(*x.shape[:2], w.shape[0], -1, x.shape[3]).reshape(*x.shape[:2], w.shape[0], -1)

    fits = table is not None and x.shape[3] == raw.HEAD and table.shape[2] == raw.DIMS
    call = _call(_GROUPED, x, w, *w.shape[1:], groups=w.shape[0]) if kernel and fits else None
    if call is not None:
        return call(in_groups(x), _operand(w), table)[0]
    x = x if table is None else rotated(x, table, -1)
    return product_of("bsgk,gkr->bsgr", in_groups(x), w)


def summed_product(x: jax.Array, w: Matrix, kernel: bool) -> jax.Array:
    """x `[b, s, g, k]` w `[g, k, n]`, summed over the groups."""
    in_blocks = not isinstance(w, PackedMatrix) or w.shape[1] % BLOCK == 0
    call = _call(_SUMMED, x, w, w.shape[0] * w.shape[1], w.shape[2]) if kernel and in_blocks else None
    if call is not None:
        return call(x, _by_group(w))[0]
    b, s, _, _ = explicit_axes.entries(x)
    summed = explicit_axes.sharding(x, b, s, None)  # over Explicit axes JAX sums where it is told to
    if isinstance(w, PackedMatrix):
        return product_of("bsgr,grm->bsm", x, w, out_sharding=summed)
    x, w = x.reshape(*x.shape[:2], -1), w.reshape(-1, w.shape[2])  # of two axes, XLA makes the gradient turned over
    return product_of("bsk,km->bsm", x, w, out_sharding=summed)


def _by_group(w: Matrix) -> jax.Array:
    """`_operand` of a matrix that sums over groups, in which these have an axis that devices may share."""
    if not isinstance(w, PackedMatrix):
        return w[None]
    tiles, _, size = w.data.shape
    return w.data.reshape(tiles, w.shape[0], -1, size)[None]


def _call(
    op: Op, x: jax.Array, w: Matrix, k: int, n: int, *, groups: int = 1, to_float32: bool = False, **params: Any
) -> Callable[..., Arrays] | None:
    """Returns a function that runs the op with its kernel; None if no kernel takes the operands."""
    b, s = x.shape[:2]
    if not (isinstance(b, int) and isinstance(s, int) and 0 < b * s <= MAX_ROWS and k % 8 == n % 8 == 0):
        return None
    is_packed, fits = isinstance(w, PackedMatrix), isinstance(w, PackedMatrix) or w.dtype == x.dtype
    choices: dict[str, Any] = {"dtype": x.dtype.name, "to_float32": to_float32, "weights": FORMAT * is_packed}
    choices["to_fp8"] = params.get("to_fp8", False)
    if op is not _HEADS:
        choices["parts"] = params["parts"] = _parts(op, k, n, groups, BLOCK if is_packed else raw.SLAB, **choices)
    support = Support(f"{x.dtype.name} of {b * s} rows", (op.name,), library.shipped_for(op.name, **choices))
    use = choose(op.name, None, support) if fits else KernelUse.NEVER
    if is_packed:
        params[op.results[0].axes.split()[-1]] = w.shape[-1]
        op = _PACKED[op]
    if use == KernelUse.NEVER:
        return None
    return lambda *operands: without_gradient(Call(op, use, tuple(params.items()), support), *operands)


def _parts(op: Op, k: int, n: int, groups: int, at_once: int, **choices: Any) -> int:
    """The number of parts that suits the matrix; if no kernel has it, the nearest that one has, fewer before more. The
    matrix alone chooses it, so a row's bits do not depend on the batch.
    """
    best = raw.parts(k, n, groups, at_once)
    others = sorted((p for p in raw.PARTS if p <= max(1, k // at_once)), key=lambda p: (p > best, abs(p - best)))
    return next((p for p in others if library.shipped_for(op.name, **choices, parts=p)), best)


def _plain(x: jax.Array, w: jax.Array, *, parts: int, dtype: str) -> Arrays:
    return (jnp.einsum("bsk,ckn->bsn", x, w, preferred_element_type=jnp.dtype(dtype)),)


def _low_rank(x: jax.Array, w: jax.Array, gain: jax.Array, *, parts: int, n_squares: int) -> Arrays:
    (y,) = _plain(x, w, parts=parts, dtype="float32")
    low = y[..., : gain.shape[1]]
    squares = jnp.sum(jnp.square(low).reshape(*low.shape[:2], n_squares, -1), -1)
    return y, (low * gain[0]).astype(x.dtype), squares


def _of_normed(x: jax.Array, w: jax.Array, squares: jax.Array, eps: float) -> jax.Array:
    """x times the heads of w, where squares tell how x is left to be normed."""
    if squares.shape[2] == 0:
        return jnp.einsum("bsk,ckhd->bshd", x, w)
    y = jnp.einsum("bsk,ckhd->bshd", x, w, preferred_element_type=jnp.float32)
    factor = lax.rsqrt(jnp.sum(squares, -1) / x.shape[2] + eps)
    return (y * factor[..., None, None]).astype(x.dtype)


def _heads(x: jax.Array, w: jax.Array, table: jax.Array, squares: jax.Array, *, eps: float) -> Arrays:
    return normed_and_rotated(_of_normed(x, w, squares, eps), table, eps=eps)


def _index(
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
) -> Arrays:
    q = hadamard(rotated_pairs(_of_normed(x, w, squares, eps), table, direction=1)[0])
    weights = given[..., column : column + w.shape[2]] * scale
    if not to_fp8:
        return q, weights
    codes, scales = quantize_rows(q)
    return codes, weights * scales


def _grouped(x: jax.Array, w: jax.Array, table: jax.Array, *, parts: int) -> Arrays:
    (heads,) = rotated_pairs(x.reshape(*x.shape[:2], -1, raw.HEAD), table, direction=-1)
    return (jnp.einsum("bsgk,cgkn->bsgn", heads.reshape(x.shape), w),)


def _summed(x: jax.Array, w: jax.Array, *, parts: int) -> Arrays:
    return (jnp.einsum("bsgk,cgkn->bsn", x, w),)


def _plain_kernel(x: jax.Array, w: jax.Array, *, dtype: str, **params: int) -> Arrays:
    (y,) = raw.few_rows_product(x[:, :, None], w, dtype=jnp.dtype(dtype), **params)
    return (y[:, :, 0],)


def _low_rank_kernel(x: jax.Array, w: jax.Array, gain: jax.Array, *, n_squares: int, **params: int) -> Arrays:
    del n_squares  # which gain tells
    y, low, squares = raw.few_rows_product_and_low_rank(x[:, :, None], w, gain[0], **params)
    return y[:, :, 0], low, squares


def _heads_kernel(x: jax.Array, w: jax.Array, table: jax.Array, squares: jax.Array, *, eps: float) -> Arrays:
    return raw.few_rows_product_norm_rope(x, w[0], _of_batch(table, x), squares, eps=eps)


def _index_kernel(x: jax.Array, w: jax.Array, table: jax.Array, *others: jax.Array, **params: Any) -> Arrays:
    return raw.few_rows_product_index_query(x, w[0], _of_batch(table, x), *others, **params)


def _of_batch(table: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(table, (x.shape[0], *table.shape[1:]))


def _grouped_kernel(x: jax.Array, w: jax.Array, table: jax.Array, **params: int) -> Arrays:
    return raw.few_rows_product_of_turned(x, w[0], _of_batch(table, x), **params)


def _summed_kernel(x: jax.Array, w: jax.Array, *, parts: int) -> Arrays:
    b, s = x.shape[:2]
    flat, matrix = x.reshape(b, s, 1, -1), w.reshape(1, -1, w.shape[-1])
    _, k, n = matrix.shape
    parts = min(parts, raw.parts(k, n, 1))  # of devices that share the groups each has fewer of k
    (y,) = raw.few_rows_product(flat, matrix, dtype=x.dtype, parts=parts)
    return (y[:, :, 0],)


_TABLE = Axes("table", f"{ONE_OR_B} s_q dims")
_SQUARES = Axes("squares", "b s_q n_squares")
_op = functools.partial(Op, is_mapped=False)
_PLAIN = _op(
    "few_rows_product",
    (Axes("x", "b s_q k"), Axes("w", f"{ONE_OR_B} k n")),
    (Axes("y", "b s_q n"),),
    _plain,
    _plain_kernel,
)
_LOW_RANK = _op(
    "few_rows_product",
    (Axes("x", "b s_q k"), Axes("w", f"{ONE_OR_B} k n"), Axes("gain", f"{ONE_OR_B} rank")),
    (Axes("y", "b s_q n"), Axes("low", "b s_q rank"), _SQUARES),
    _low_rank,
    _low_rank_kernel,
)
_HEADS = _op(
    "few_rows_product_norm_rope",
    (Axes("x", "b s_q k"), Axes("w", f"{ONE_OR_B} k h_q d"), _TABLE, _SQUARES),
    (Axes("y", "b s_q h_q d"),),
    _heads,
    _heads_kernel,
)
_INDEX = _op(
    "few_rows_product_index_query",
    (
        *(Axes("x", "b s_q k"), Axes("w", f"{ONE_OR_B} k heads d"), _TABLE, _SQUARES),
        Axes("given", "b s_q columns"),
    ),
    (Axes("q", "b s_q heads d"), Axes("weights", "b s_q heads")),
    _index,
    _index_kernel,
)
_GROUPED = _op(
    "few_rows_product_of_turned",
    (Axes("x", "b s_q h_q k"), Axes("w", f"{ONE_OR_B} h_q k n"), _TABLE),  # h_q: groups of heads
    (Axes("y", "b s_q h_q n"),),
    _grouped,
    _grouped_kernel,
)
_SUMMED = _op(
    "few_rows_product",
    (Axes("x", "b s_q h_q k"), Axes("w", f"{ONE_OR_B} h_q k n")),
    (Axes("y", "b s_q n"),),
    _summed,
    _summed_kernel,
)


def _of_packed(op: Op, axes: str) -> Op:
    """The same op with a packed matrix of these axes, which is unpacked in `jnp` where no kernel runs."""
    size = op.results[0].axes.split()[-1]  # of the matrix's last axis, a parameter

    def reference(x: jax.Array, w: jax.Array, *others: jax.Array, **params: Any) -> Arrays:
        return op.reference(x, _matrix(op, x, w, params.pop(size)), *others, **params)

    def kernel(x: jax.Array, w: jax.Array, *others: jax.Array, **params: Any) -> Arrays:
        assert op.kernel is not None
        if op is _SUMMED:
            return _summed_packed_kernel(x, w, **params)
        if op in (_HEADS, _INDEX):
            w, params = _whole(w), {name: value for name, value in params.items() if name != size}
        return op.kernel(x, w, *others, **params)

    operands = tuple(Axes("w", f"{ONE_OR_B} {axes}") if own.name == "w" else own for own in op.operands)
    return dataclasses.replace(op, operands=operands, reference=reference, kernel=kernel)


def _whole(w: jax.Array) -> jax.Array:
    """Data of heads' tiles `[c, h, tiles, slabs, slab_bytes]` as that of one matrix."""
    return w.reshape(w.shape[0], -1, *w.shape[3:])


def _matrix(op: Op, x: jax.Array, w: jax.Array, last: int) -> jax.Array:
    """A packed operand as the array in x's dtype that the op has otherwise, whose last axis is so long."""
    k = x.shape[-1]
    if op in (_HEADS, _INDEX):
        n = w.shape[1] * last
        return jnp.swapaxes(unpacked(_whole(w), n, k, x.dtype), -1, -2).reshape(w.shape[0], k, -1, last)
    if op is _SUMMED:
        flat = w.reshape(*w.shape[:2], -1, w.shape[-1])
        found = unpacked(flat, last, x.shape[2] * k, x.dtype)
        return jnp.swapaxes(found, -1, -2).reshape(w.shape[0], x.shape[2], k, last)
    return jnp.swapaxes(unpacked(w, last, k, x.dtype), -1, -2)


def _summed_packed_kernel(x: jax.Array, w: jax.Array, *, parts: int, n: int) -> Arrays:
    flat = x.reshape(*x.shape[:2], 1, -1)
    parts = min(parts, raw.parts(flat.shape[-1], n, 1, BLOCK))
    matrix = w.reshape(*w.shape[:2], -1, w.shape[-1])
    (y,) = raw.few_rows_product(flat, matrix, dtype=x.dtype, parts=parts, n=n)
    return (y[:, :, 0],)


_TILES = "tiles slabs slab_bytes"
_PACKED = {
    _PLAIN: _of_packed(_PLAIN, _TILES),
    _LOW_RANK: _of_packed(_LOW_RANK, _TILES),
    _HEADS: _of_packed(_HEADS, f"h_q {_TILES}"),
    _INDEX: _of_packed(_INDEX, f"heads {_TILES}"),
    _GROUPED: _of_packed(_GROUPED, f"h_q {_TILES}"),
    _SUMMED: _of_packed(_SUMMED, "tiles h_q slabs slab_bytes"),
}
