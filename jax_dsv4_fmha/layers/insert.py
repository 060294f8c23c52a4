"""New entries of a cache in a step of generation: from the rows of a product to where they belong, in one op.

    x = row                                a token's, each an entry
    x = Σ_t kv[t] · softmax_t(score[t])    a block's, whose earlier rows the state holds, when its last token comes
    entry = rope(norm(x)), or hadamard(rope(norm(x))), or [norm(x), rope(x')], where x' follows x in a token's row

Everything that depends on a token's own row alone is here, so that a step has one launch for each of its caches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import Cache
from .._definitions import explicit_axes
from .._definitions.rope import rotated_pairs
from .._dispatch.autodiff import without_gradient
from .._dispatch.lowering import choose
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op
from .._dispatch.sequences import whole_sequences
from .._dispatch.support import Support
from .._host import kv_insert as raw
from .._host import library
from .._host.attention import ROPE
from ._norm import rms_norm
from ._rounding import Rounding, rounded
from .hadamard import hadamard
from .pooling import RunningSums, completed, counted, of_places, pool_ring, pool_step
from .rope import Rope

State = Cache | RunningSums | None
"""of a compressor, as `Compressor.state` makes it"""


class Entries(NamedTuple):
    """The form of a cache's entries, which rows make."""

    norm: jax.Array
    """`[d]`, the norm's weight: of an entry's numbers; or of all but RoPE's, which follow them, without a norm"""
    rotation: Rope
    eps: float
    ratio: int = 1
    """tokens of a block; with ratio 1 nothing is pooled"""
    ape: jax.Array | None = None
    """`[ratio, channels]`, added to the scores by a token's place in its block"""
    is_transformed: bool = False
    """whether entries are multiplied by the Hadamard matrix, as an indexer's keys are"""
    rounding: Rounding = None
    """of the entries of a cache that is not packed"""


class Rows(NamedTuple):
    """Columns of a product: what a cache's entries are made of, or weights, or a query."""

    product: jax.Array
    """`[b, s, columns]`, float32 in steps and else in x's dtype"""
    column: int
    """the first one"""
    width: int

    def take(self) -> jax.Array:
        """`[b, s, width]`"""
        return self.product[..., self.column : self.column + self.width]


def insert(
    cache: Cache,
    state: State,
    rows: Rows,
    entries: Entries,
    lengths: jax.Array,
    dtype: Any,
    kernel: bool,
    start: jax.Array | None = None,
) -> tuple[Cache, State]:
    """The cache with the entries that a step's tokens complete, and the state with their rows.

    Args:
      cache: the cache of entries.
      state: where blocks are pooled, a ring of the rows of the last tokens: of all that an entry pools, and the other
        tokens of a step. Or running sums, with a ring of the tokens of a step.
      rows: of the s tokens of each sequence from `start` on: kv, a column for each number of an entry; or, where blocks
        are pooled, kv and then scores.
      lengths: int32 `[b]`, with the new tokens; rows at `lengths` or later are padding and leave no trace.
      dtype: x's, to which an entry is rounded after every step.
      kernel: whether a kernel may run; the reference has a gradient.
      start: int32 `[b]`, or None, which means `lengths - s`.
    """
    rows = rows._replace(product=whole_sequences(rows.product))
    s = rows.product.shape[1]
    first = lengths - s if start is None else start
    n = -(-s // entries.ratio)
    table = entries.rotation.table(counted(first // entries.ratio, 0, n) * entries.ratio)
    kept = (cache.entries, *_arrays(state))
    ape = jnp.zeros((0, rows.width // 2), jnp.float32) if entries.ape is None else entries.ape.astype(jnp.float32)
    weights = [entries.norm.astype(jnp.float32), *([] if state is None else [ape])]
    layout = cache.layout if cache.is_packed else ""
    params: dict[str, Any] = {"column": rows.column, "ratio": entries.ratio, "eps": entries.eps}
    params |= {"packing": layout, "transforms": entries.is_transformed, "dtype": jnp.dtype(dtype).name}
    params["rope"] = state is None and rows.width == entries.norm.shape[0] + entries.rotation.dims
    bounds = lengths[:, None] if start is None else jnp.stack([lengths, start], 1)
    of_batch = [*kept, rows.product, table, bounds]
    paged = cache.block_table is not None
    if paged:  # a pool belongs to all sequences: one batch entry, which no device splits
        of_batch = [x[None] for x in (*of_batch, cache.block_table)]
    operands = (*(x[None] for x in weights), *of_batch)
    rounding = None if cache.is_packed else entries.rounding
    op, support = _op(len(kept), cache.is_packed, paged), _support(cache, entries, params, state)
    kernel = kernel and not (paged and explicit_axes.entries(lengths)[0])
    kernel = kernel and rounding is None and _fits(rows, table, state, entries, cache.capacity)
    use = choose("kv_insert", None, support) if kernel else KernelUse.NEVER
    if use == KernelUse.NEVER:
        results = op.reference(*operands, **params, rounding=rounding)
    else:
        results = without_gradient(Call(op, use, tuple(params.items()), support), *operands)
    new, *of_state = (x[0] if paged else x for x in results)
    cache = dataclasses.replace(cache, entries=new)
    if isinstance(state, RunningSums):
        return cache, RunningSums(*of_state)
    return cache, None if state is None else Cache(of_state[0])


def _arrays(state: State) -> Arrays:
    """A ring of rows, if there is one; with running sums these too, and how many tokens they have."""
    if isinstance(state, RunningSums):
        return state.tokens, state.sums, state.folded
    return () if state is None else (state.entries,)


def _fits(rows: Rows, table: jax.Array, state: State, entries: Entries, capacity: Any) -> bool:
    """Returns whether a kernel takes arrays of these sizes."""
    b, s, columns = rows.product.shape
    n, kept = table.shape[1], s if state is None else state.capacity
    if not all(isinstance(x, int) for x in (b, s, n, capacity, kept)):
        return False
    blocks = rows.width // (2 * entries.norm.shape[0])
    least = s if state is None or isinstance(state, RunningSums) else blocks * entries.ratio + s - 1
    sizes_fit = min(b, s) > 0 and capacity >= n and kept >= least
    return bool(sizes_fit and table.shape[2] == ROPE and columns % 4 == rows.column % 4 == 0)


def _support(cache: Cache, entries: Entries, params: dict[str, Any], state: State) -> Support:
    choices = {"d": entries.norm.shape[0], "dtype": params["dtype"], "packing": params["packing"]}
    choices |= {"pooled": state is not None, "running": isinstance(state, RunningSums)}
    choices |= {"hadamard": entries.is_transformed, "rope": params["rope"]}
    got = ", ".join(f"{name}={x}" for name, x in choices.items())
    held = params["packing"] or cache.entries.dtype == params["dtype"]
    return Support(got, ("kv_insert",), library.shipped_for("kv_insert", **choices) if held else ())


def _parts(kept: int, operands: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    """The weights, norm and perhaps ape; what is kept, so many arrays; and the others."""
    weights = 1 + (kept > 1)
    return operands[:weights], operands[weights : weights + kept], operands[weights + kept :]


def _inserted(
    number_kept: int,
    *operands: jax.Array,
    column: int,
    ratio: int,
    eps: float,
    packing: str,
    transforms: bool,
    dtype: str,
    rope: bool,
    rounding: Rounding = None,
) -> Arrays:
    """The definition, where each sequence has its own page."""
    (norm, *ape), (pages, *state), (rows, table, bounds, *block_table) = _parts(number_kept, operands)
    table_of_pages = block_table[0] if block_table else None
    cache = Cache(pages, table_of_pages, packing) if packing else Cache(pages, table_of_pages)
    s, d = rows.shape[1], norm.shape[1]
    width = state[0].shape[2] if state else d + rope * table.shape[2]
    rows, made = Rows(rows, column, width).take(), tuple(state)
    lengths = bounds[:, 0]
    first = bounds[:, 1] if bounds.shape[1] > 1 else lengths - s
    positions = counted(first, 0, s)
    index = jnp.where(positions < lengths[:, None], positions, -1)
    x = rows.astype(dtype)
    if state:
        if ape[0].shape[1]:
            rows += of_places(jnp.concatenate([jnp.zeros_like(ape[0][0]), ape[0][0]], -1), positions)
        positions, index = index, completed(first, lengths, s, ratio)
        if len(state) > 1:
            entry, sums = pool_step(RunningSums(*state), rows, first, lengths, ratio)
            made = sums.tokens, sums.sums, sums.folded
        else:
            ring = Cache(state[0]).append(rows, positions).entries
            entry, made = pool_ring(ring, index, d, ratio), (ring,)
        x = entry.astype(dtype)
    normed = rms_norm(x[..., :d], norm[0], eps)
    normed = jnp.concatenate([normed, x[..., d:]], -1) if rope else normed
    x = rotated_pairs(normed[:, :, None], table, direction=1)[0][:, :, 0]
    x = hadamard(x) if transforms else x
    return cache.append(rounded(x, rounding), index).entries, *made


def _kernel(number_kept: int, *operands: jax.Array, dtype: str, transforms: bool, **params: Any) -> Arrays:
    """Weights come broadcast to the batch, whose entries have the same."""
    del dtype  # the cache's, or bfloat16
    (norm, *ape), kept, (rows, *others) = _parts(number_kept, operands)
    weights = (x[0] for x in (*ape, norm))
    return _RAW[number_kept](*kept, rows, *weights, *others, hadamard=transforms, **params)


def _in_pool(f: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """The same for a pool: with a batch axis of one for all."""

    def in_pool(number_kept: int, *operands: jax.Array, **params: Any) -> Arrays:
        weights, kept, others = _parts(number_kept, operands)
        return tuple(x[None] for x in f(number_kept, *weights, *(x[0] for x in (*kept, *others)), **params))

    return in_pool


@functools.cache
def _op(number_kept: int, packed: bool, paged: bool) -> Op:
    """The op that keeps so many arrays: a cache; with a state; with sums and their numbers. The axes of packed caches
    and of pools differ; no mesh may split those of a pool's sequences.
    """
    b, of_cache = "b n_b" if paged else "b", "page_bytes" if packed else "page d"
    kept = (
        *(Axes("cache", f"b {'pages ' * paged}{of_cache}"), Axes("state", f"{b} ring width")),
        *(Axes("sums", f"{b} n_sums d"), Axes("folded", f"{b} n_folded")),
    )[:number_kept]
    operands = (
        Axes("norm", f"{ONE_OR_B} d"),
        *([Axes("ape", f"{ONE_OR_B} n_ape channels")] if number_kept > 1 else []),
        *(*kept, Axes("rows", f"{b} s columns"), Axes("table", f"{b} n dims"), Axes("bounds", f"{b} n_bounds")),
        *([Axes("block_table", f"{b} table_width")] if paged else []),
    )
    reference, kernel = (functools.partial(_in_pool(f) if paged else f, number_kept) for f in (_inserted, _kernel))
    return Op("kv_insert", operands, kept, reference, kernel, is_mapped=False)


_RAW: dict[int, Callable[..., Arrays]] = {
    1: raw.kv_insert,
    2: raw.kv_insert_pooled,
    4: raw.kv_insert_running,
}  # by how many arrays are kept
