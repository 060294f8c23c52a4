"""New entries of a cache in a step of generation: from the rows of a product to where they belong, in one op.

    x = row                                a token's, each an entry
    x = Σ_t kv[t] · softmax_t(score[t])    a block's, whose earlier rows the state holds, when its last token comes
    entry = rope(norm(x)), or hadamard(rope(norm(x)))

Everything that depends on a token's own row alone is here, so that a step has one launch for each of its caches.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import Cache
from .._definitions import explicit_axes
from .._dispatch.autodiff import without_gradient
from .._dispatch.lowering import choose
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op
from .._dispatch.sharding import whole_sequences
from .._dispatch.support import Support
from .._host import kv_insert as raw
from .._host import library
from ._norm import rms_norm
from .hadamard import hadamard
from .pooling import completed, counted, of_places, pool_ring
from .rope import Rope, pairs_turned


class Entries(NamedTuple):
    """What makes a cache's entries of rows."""

    norm: jax.Array
    """`[d]`, the norm's weight"""
    rotation: Rope
    eps: float
    ratio: int = 1
    """tokens of a block; with ratio 1 nothing is pooled"""
    ape: jax.Array | None = None
    """`[ratio, channels]`, added to the scores by a token's place in its block"""
    is_transformed: bool = False
    """whether entries are multiplied by the Hadamard matrix, as an indexer's keys are"""


class Rows(NamedTuple):
    """Columns of a product: what a cache's entries are made of, or weights, or a query."""

    product: jax.Array
    """float32 `[b, s, columns]`"""
    column: int
    """the first one"""
    width: int

    def take(self) -> jax.Array:
        """`[b, s, width]`"""
        return self.product[..., self.column : self.column + self.width]


def insert(
    cache: Cache, state: Cache | None, rows: Rows, entries: Entries, lengths: jax.Array, dtype: Any, kernel: bool
) -> tuple[Cache, Cache | None]:
    """The cache with the entries that a step's tokens complete, and the state with their rows.

    Args:
      cache: the cache of entries.
      state: a ring of the rows of the last tokens, where blocks are pooled. It has room for all tokens that an entry
        pools, and the other tokens of a step.
      rows: of the last s tokens of each sequence: kv, d columns; or, where blocks are pooled, kv and then scores.
      lengths: int32 `[b]`, with the new tokens.
      dtype: x's, to which an entry is rounded after every step.
      kernel: whether a kernel may run; the reference has a gradient.
    """
    rows = rows._replace(product=whole_sequences(rows.product))
    b, s = rows.product.shape[:2]
    first = lengths - s
    n = -(-s // entries.ratio)
    table = entries.rotation.table(counted(first // entries.ratio, 0, n) * entries.ratio)
    ring = jnp.zeros((b, 0, rows.width), jnp.float32) if state is None else state.entries
    ape = jnp.zeros((0, rows.width // 2), jnp.float32) if entries.ape is None else entries.ape.astype(jnp.float32)
    layout = cache.layout if cache.is_packed else ""
    params: dict[str, Any] = {"column": rows.column, "ratio": entries.ratio, "eps": entries.eps}
    params |= {"packing": layout, "transforms": entries.is_transformed, "dtype": jnp.dtype(dtype).name}
    operands = [cache.entries, ring, rows.product, ape[None], entries.norm.astype(jnp.float32)[None], table, lengths]
    paged = cache.block_table is not None
    if paged:  # a pool belongs to all sequences: one batch entry, which no device splits
        operands = [x if x is operands[3] or x is operands[4] else x[None] for x in operands] + [
            cache.block_table[None]
        ]
    op, support = (_PAGED if paged else _OWN)[cache.is_packed], _support(cache, entries, params, state is not None)
    reach = rows.width // (2 * entries.norm.shape[0]) * entries.ratio
    kernel = (
        kernel
        and not (paged and explicit_axes.entries(lengths)[0])
        and _fits(rows, table, state, reach, cache.capacity)
    )
    use = choose("kv_insert", None, support) if kernel else KernelUse.NEVER
    if use == KernelUse.NEVER:
        new, ring = op.reference(*operands, **params)
    else:
        new, ring = without_gradient(Call(op, use, tuple(params.items()), support), *operands)
    new, ring = (x[0] if paged else x for x in (new, ring))
    return dataclasses.replace(cache, entries=new), None if state is None else Cache(ring)


def _fits(rows: Rows, table: jax.Array, state: Cache | None, reach: int, capacity: Any) -> bool:
    """Whether a kernel takes arrays of these sizes."""
    b, s, columns = rows.product.shape
    n = table.shape[1]
    ring = reach + s - 1 if state is None else state.capacity
    if not all(isinstance(x, int) for x in (b, s, n, capacity, ring)):
        return False
    sizes_fit = min(b, s) > 0 and capacity >= n and ring >= reach + s - 1
    return bool(sizes_fit and table.shape[2] == _DIMS and columns % 4 == rows.column % 4 == 0)


def _support(cache: Cache, entries: Entries, params: dict[str, Any], pooled: bool) -> Support:
    choices = {"d": entries.norm.shape[0], "dtype": params["dtype"], "packing": params["packing"], "pooled": pooled}
    choices["hadamard"] = entries.is_transformed
    got = ", ".join(f"{name}={x}" for name, x in choices.items())
    held = params["packing"] or cache.entries.dtype == params["dtype"]
    return Support(got, ("kv_insert",), library.built_for("kv_insert", **choices) if held else ())


def _inserted(
    pages: jax.Array,
    ring: jax.Array,
    rows: jax.Array,
    ape: jax.Array,
    norm: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    block_table: jax.Array | None = None,
    *,
    column: int,
    ratio: int,
    eps: float,
    packing: str,
    transforms: bool,
    dtype: str,
) -> Arrays:
    """The definition, where each sequence has its own page."""
    cache = Cache(pages, block_table, packing) if packing else Cache(pages, block_table)
    s, pooled = rows.shape[1], ring.shape[1] > 0
    rows = Rows(rows, column, ring.shape[2] if pooled else norm.shape[1]).take()
    index = counted(lengths - s, 0, s)
    x = rows.astype(dtype)
    if pooled:
        if ape.shape[1]:
            zeros = jnp.zeros_like(ape[0])
            rows += of_places(jnp.concatenate([zeros, ape[0]], -1), index)
        ring = Cache(ring).append(rows, index).entries
        index = completed(lengths - s, lengths, s, ratio)
        x = pool_ring(ring, index, norm.shape[1], ratio).astype(dtype)
    x = pairs_turned(rms_norm(x, norm[0], eps)[:, :, None], table, direction=1)[0][:, :, 0]
    return cache.append(hadamard(x) if transforms else x, index).entries, ring


def _inserted_in_pool(*operands: jax.Array, **params: Any) -> Arrays:
    """The same in a pool: with a batch axis of one for all."""
    pages, ring, rows, ape, norm, *rest = operands
    new, ring = _inserted(pages[0], ring[0], rows[0], ape, norm, *(x[0] for x in rest), **params)
    return new[None], ring[None]


def _kernel(
    pages: jax.Array, ring: jax.Array, rows: jax.Array, ape: jax.Array, norm: jax.Array, *rest: jax.Array, dtype: str,
    transforms: bool, **params: Any,
) -> Arrays:  # fmt: skip
    """Weights come broadcast to the batch, whose entries have the same."""
    del dtype  # the cache's, or bfloat16
    return raw.kv_insert(pages, ring, rows, ape[0], norm[0], *rest, hadamard=transforms, **params)


def _kernel_of_pool(*operands: jax.Array, **params: Any) -> Arrays:
    pages, ring, rows, ape, norm, *rest = operands
    new, ring = _kernel(pages[0], ring[0], rows[0], ape, norm, *(x[0] for x in rest), **params)
    return new[None], ring[None]


def _op(of_cache: str, paged: bool) -> Op:
    """Packed or not, in a pool or not: the axes differ. Those of a pool's sequences no mesh may split."""
    b = "b n_b" if paged else "b"
    cache, state = Axes("cache", f"b {of_cache}"), Axes("state", f"{b} ring width")
    operands = (
        *(cache, state, Axes("rows", f"{b} s columns"), Axes("ape", f"{ONE_OR_B} n_ape channels")),
        *(Axes("norm", f"{ONE_OR_B} d"), Axes("table", f"{b} n dims"), Axes("lengths", b)),
        *([Axes("block_table", f"{b} table_width")] if paged else []),
    )
    reference, kernel = (_inserted_in_pool, _kernel_of_pool) if paged else (_inserted, _kernel)
    return Op("kv_insert", operands, (cache, state), reference, kernel, is_mapped=False)


_DIMS = 64  # numbers of an entry that a kernel turns
_OWN = {False: _op("page d", False), True: _op("page_bytes", False)}
_PAGED = {False: _op("pages page d", True), True: _op("pages page_bytes", True)}
