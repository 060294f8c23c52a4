"""The raw calls that make new entries of a cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call


def kv_insert(
    cache: jax.Array,
    rows: jax.Array,
    norm: jax.Array,
    table: jax.Array,
    bounds: jax.Array,
    block_table: jax.Array | None = None,
    **params: Any,
) -> tuple[jax.Array, ...]:
    """The cache with the entries of new tokens, in place, where XLA need not keep the operand.

    Args:
      cache: `[pages, page, d]`, bfloat16 or float16; with packing uint8 `[pages, page_bytes]`.
      rows: float32 `[b, s, columns]`, of s tokens of each sequence: from `column` on, a multiple of 4, kv, of d
        columns.
      norm: float32 `[d]`, a weight; with `rope` of fewer numbers, before the last 64.
      table: float32 `[b, n, 64]`, cos and sin of the position of each of the n entries that may be completed, the first
        of which pools the first row.
      bounds: int32 `[b, 1]`, tokens of a sequence, of which these are the last; or `[b, 2]`, and the position of the
        first one. Rows at later positions than the sequence has are padding.
      block_table: int32 `[b, pages of a sequence]`; None where page i belongs to sequence i.
      **params: column, by default 0; ratio, eps: tokens of a block, epsilon of the norm; packing: the layout of packed
        entries, by default ""; hadamard: whether entries are transformed, by default False; rope: whether the norm
        leaves out RoPE's numbers, by default False.
    """
    return _call("kv_insert", (cache,), rows, norm, table, bounds, block_table, **params)


def kv_insert_pooled(
    cache: jax.Array,
    state: jax.Array,
    rows: jax.Array,
    ape: jax.Array,
    norm: jax.Array,
    table: jax.Array,
    bounds: jax.Array,
    block_table: jax.Array | None = None,
    **params: Any,
) -> tuple[jax.Array, ...]:
    """`kv_insert` of entries that pool a block's rows: the cache, and the state with the new rows.

    Args:
      state: float32 `[b, ring, width]`, the rows of the last tokens: of all that an entry pools.
      rows: of `width` columns: kv and score of one or two blocks.
      ape: float32 `[ratio, width / 2]`, or `[0, …]`.
    """
    return _call("kv_insert_pooled", (cache, state), rows, ape, norm, table, bounds, block_table, **params)


def kv_insert_running(
    cache: jax.Array,
    state: jax.Array,
    sums: jax.Array,
    folded: jax.Array,
    rows: jax.Array,
    ape: jax.Array,
    norm: jax.Array,
    table: jax.Array,
    bounds: jax.Array,
    block_table: jax.Array | None = None,
    **params: Any,
) -> tuple[jax.Array, ...]:
    """`kv_insert_pooled` where the state has fewer rows than a block, and sums of those before: all four anew.

    Args:
      sums: float32 `[b, 3, d]`, of a block's tokens before those in the state: the greatest score, the sum of weights,
        and that of weights times kv.
      folded: int32 `[b, 1]`, how many tokens of the sequence they and earlier entries have.
    """
    kept = (cache, state, sums, folded)
    return _call("kv_insert_running", kept, rows, ape, norm, table, bounds, block_table, **params)


def _call(
    target: str,
    kept: tuple[jax.Array, ...],
    *operands: Any,
    column: int = 0,
    ratio: int,
    eps: float,
    packing: str = "",
    hadamard: bool = False,
    rope: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs the custom call and returns the kept arrays anew. The last operand is the block table, or None."""
    *given, block_table = operands
    pages = jnp.zeros((given[0].shape[0], 0), jnp.int32) if block_table is None else block_table
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept]
    attributes: dict[str, Any] = {"column": np.int64(column), "ratio": np.int64(ratio), "eps": np.float32(eps)}
    attributes |= {"hadamard": np.int64(hadamard), "rope": np.int64(rope), "packing": packing}
    return tuple(call(target, results, *kept, *given, pages, aliases={i: i for i in range(len(kept))}, **attributes))
