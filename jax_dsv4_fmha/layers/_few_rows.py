"""A step's products: few rows with large matrices, by a kernel that reads a matrix once, where there is one.

On Hopper, products of more than MAX_ROWS rows, and of matrices in another dtype than x, are XLA's.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions import explicit_axes
from .._definitions.rope import normed_and_turned, pairs_turned
from .._dispatch.autodiff import without_gradient
from .._dispatch.lowering import choose
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op
from .._dispatch.support import Support
from .._host import few_rows_product as raw
from .._host import library
from .._ops.rope import normed_then_turned, turned
from .compressor import product

MAX_ROWS = 128
"""of x: with more, XLA's products are faster"""


def plain_product(x: jax.Array, w: jax.Array, dtype: Any, kernel: bool) -> jax.Array:
    """x `[b, s, k]` w `[k, n]` in dtype, x's or float32; kernel: whether one may run, which has no gradient."""
    is_wide = jnp.dtype(dtype) == jnp.float32 != x.dtype
    call = _call(_PLAIN, x, w, *w.shape, to_float32=is_wide, dtype=jnp.dtype(dtype).name) if kernel else None
    if call is not None:
        return call(x, w[None])
    return product(x, w) if is_wide else jnp.einsum("bsk,kn->bsn", x, w.astype(x.dtype))


def query_heads(x: jax.Array, w: jax.Array, table: jax.Array, eps: float | None, kernel: bool) -> jax.Array:
    """x `[b, s, k]` w `[k, h, d]`, its heads normed, unless eps is None, and turned by a table `[b or 1, s, n]`."""
    fits = eps is not None and w.shape[2] == raw.HEAD and table.shape[2] == raw.DIMS
    call = _call(_HEADS, x, w, w.shape[0], w.shape[1] * w.shape[2], eps=eps) if kernel and fits else None
    if call is not None:
        return call(x, w[None], table)
    q = jnp.einsum("bsr,rhd->bshd", x, w.astype(x.dtype))
    return turned(q, table, 1) if eps is None else normed_then_turned(q, table, eps)


def grouped_product(x: jax.Array, w: jax.Array, table: jax.Array | None, kernel: bool) -> jax.Array:
    """x `[b, s, h, d]` w `[g, h / g d, n]`, group by group of heads, which are first turned back by a table, if any."""

    def in_groups(x: jax.Array) -> jax.Array:
        """One axis for the heads of a group: of two, XLA transposes the weights for the gradient."""
        return x.reshape(*x.shape[:2], w.shape[0], -1, x.shape[3]).reshape(*x.shape[:2], w.shape[0], -1)

    fits = table is not None and x.shape[3] == raw.HEAD and table.shape[2] == raw.DIMS
    call = _call(_GROUPED, x, w, *w.shape[1:], groups=w.shape[0]) if kernel and fits else None
    if call is not None:
        return call(in_groups(x), w[None], table)
    x = x if table is None else turned(x, table, -1)
    return jnp.einsum("bsgk,gkr->bsgr", in_groups(x), w.astype(x.dtype))


def summed_product(x: jax.Array, w: jax.Array, kernel: bool) -> jax.Array:
    """x `[b, s, g, k]` w `[g, k, n]`, summed over the groups."""
    call = _call(_SUMMED, x, w, w.shape[0] * w.shape[1], w.shape[2]) if kernel else None
    if call is not None:
        return call(x, w[None])
    b, s, _, _ = explicit_axes.entries(x)
    summed = explicit_axes.sharding(x, b, s, None)  # over Explicit axes JAX sums where it is told to
    return jnp.einsum("bsgr,grm->bsm", x, w.astype(x.dtype), out_sharding=summed)


def _call(
    op: Op, x: jax.Array, w: jax.Array, k: int, n: int, *, groups: int = 1, to_float32: bool = False, **params: Any
) -> Callable[..., jax.Array] | None:
    """What runs the op with its kernel; None where none takes the operands."""
    b, s = x.shape[:2]
    if not (isinstance(b, int) and isinstance(s, int) and 0 < b * s <= MAX_ROWS and k % 8 == n % 8 == 0):
        return None
    choices: dict[str, Any] = {"dtype": x.dtype.name, "to_float32": to_float32}
    if op is not _HEADS:
        choices["parts"] = params["parts"] = raw.parts(k, n, groups)
    support = Support(f"{x.dtype.name} of {b * s} rows", (op.name,), library.shipped_for(op.name, **choices))
    use = choose(op.name, None, support) if x.dtype == w.dtype else KernelUse.NEVER
    if use == KernelUse.NEVER:
        return None
    return lambda *operands: without_gradient(Call(op, use, tuple(params.items()), support), *operands)[0]


def _plain(x: jax.Array, w: jax.Array, *, parts: int, dtype: str) -> Arrays:
    return (jnp.einsum("bsk,ckn->bsn", x, w, preferred_element_type=jnp.dtype(dtype)),)


def _heads(x: jax.Array, w: jax.Array, table: jax.Array, *, eps: float) -> Arrays:
    return normed_and_turned(jnp.einsum("bsk,ckhd->bshd", x, w), table, eps=eps)


def _grouped(x: jax.Array, w: jax.Array, table: jax.Array, *, parts: int) -> Arrays:
    (heads,) = pairs_turned(x.reshape(*x.shape[:2], -1, raw.HEAD), table, direction=-1)
    return (jnp.einsum("bsgk,cgkn->bsgn", heads.reshape(x.shape), w),)


def _summed(x: jax.Array, w: jax.Array, *, parts: int) -> Arrays:
    return (jnp.einsum("bsgk,cgkn->bsn", x, w),)


def _plain_kernel(x: jax.Array, w: jax.Array, *, parts: int, dtype: str) -> Arrays:
    (y,) = raw.few_rows_product(x[:, :, None], w, dtype=jnp.dtype(dtype), parts=parts)
    return (y[:, :, 0],)


def _heads_kernel(x: jax.Array, w: jax.Array, table: jax.Array, *, eps: float) -> Arrays:
    return raw.few_rows_product_norm_rope(x, w[0], _of_batch(table, x), eps=eps)


def _of_batch(table: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(table, (x.shape[0], *table.shape[1:]))


def _grouped_kernel(x: jax.Array, w: jax.Array, table: jax.Array, *, parts: int) -> Arrays:
    return raw.few_rows_product_of_turned(x, w[0], _of_batch(table, x), parts=parts)


def _summed_kernel(x: jax.Array, w: jax.Array, *, parts: int) -> Arrays:
    b, s = x.shape[:2]
    flat, matrix = x.reshape(b, s, 1, -1), w.reshape(1, -1, w.shape[-1])
    (y,) = raw.few_rows_product(flat, matrix, dtype=x.dtype, parts=parts)
    return (y[:, :, 0],)


_TABLE = Axes("table", f"{ONE_OR_B} s_q dims")
_op = functools.partial(Op, is_mapped=False)
_PLAIN = _op(
    "few_rows_product",
    (Axes("x", "b s_q k"), Axes("w", f"{ONE_OR_B} k n")),
    (Axes("y", "b s_q n"),),
    _plain,
    _plain_kernel,
)
_HEADS = _op(
    "few_rows_product_norm_rope",
    (Axes("x", "b s_q k"), Axes("w", f"{ONE_OR_B} k h_q d"), _TABLE),
    (Axes("y", "b s_q h_q d"),),
    _heads,
    _heads_kernel,
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
