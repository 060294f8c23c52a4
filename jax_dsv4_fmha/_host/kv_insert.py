"""The raw call that makes new entries of a cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call


def kv_insert(
    cache: jax.Array,
    state: jax.Array,
    rows: jax.Array,
    ape: jax.Array,
    norm: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    block_table: jax.Array | None = None,
    *,
    column: int = 0,
    ratio: int,
    eps: float,
    packing: str = "",
    hadamard: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The cache with the entries of new tokens, and the state with their rows; in place, where XLA need not keep them.

    Args:
      cache: `[pages, page, d]`, bfloat16 or float16; with packing uint8 `[pages, page_bytes]`.
      state: float32 `[b, ring, width]`, the rows of the last tokens that are pooled; ring is 0 where each is an entry.
      rows: float32 `[b, s, columns]`, of the last s tokens of each sequence: from `column` on, a multiple of 4, kv and
        score of one or two blocks, of `width` columns; or, where nothing is pooled, kv, of d.
      ape: float32 `[ratio, width / 2]`, or `[0, …]`; norm: float32 `[d]`, a weight.
      table: float32 `[b, n, 64]`, cos and sin of the position of each of the n entries that may be completed, the first
        of which is `(lengths - s) // ratio`.
      lengths: int32 `[b]`, with the new tokens.
      block_table: int32 `[b, pages of a sequence]`; None where page i belongs to sequence i.
      ratio, eps: tokens of a block; epsilon of the norm.
      packing: the layout of packed entries. hadamard: whether entries are transformed.
    """
    pages = jnp.zeros((rows.shape[0], 0), jnp.int32) if block_table is None else block_table
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (cache, state)]
    operands = (cache, state, rows, ape, norm, table, lengths, pages)
    attributes: dict[str, Any] = {"column": np.int64(column), "ratio": np.int64(ratio), "eps": np.float32(eps)}
    attributes |= {"hadamard": np.int64(hadamard), "packing": packing}
    cache, state = call("kv_insert", results, *operands, aliases={0: 0, 1: 1}, **attributes)
    return cache, state
