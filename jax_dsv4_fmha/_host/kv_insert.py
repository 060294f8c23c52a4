"""The raw call that makes new entries of a cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call


def kv_insert(
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
    *,
    column: int = 0,
    ratio: int,
    eps: float,
    packing: str = "",
    hadamard: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The cache with the entries of new tokens, and the state with their rows: the first four operands anew, in place
    where XLA need not keep them.

    Args:
      cache: `[pages, page, d]`, bfloat16 or float16; with packing uint8 `[pages, page_bytes]`.
      state: float32 `[b, ring, width]`, the rows of the last tokens; ring is 0 where each token is an entry.
      sums: float32 `[b, 3, d]`, of a block's tokens before those: the greatest score, the sum of weights, and that
        of weights times kv; or `[b, 0, d]`, where the ring has all tokens that an entry pools.
      folded: int32 `[b, 1 or 0]`, how many tokens of the sequence they and earlier entries have.
      rows: float32 `[b, s, columns]`, of s tokens of each sequence: from `column` on, a multiple of 4, kv and score of
        one or two blocks, of `width` columns; or, where nothing is pooled, kv, of d.
      ape: float32 `[ratio, width / 2]`, or `[0, …]`; norm: float32 `[d]`, a weight.
      table: float32 `[b, n, 64]`, cos and sin of the position of each of the n entries that may be completed, the first
        of which pools the first row.
      bounds: int32 `[b, 1]`, tokens of a sequence, of which these are the last; or `[b, 2]`, and the position of the
        first one. Rows at later positions than the sequence has are padding.
      block_table: int32 `[b, pages of a sequence]`; None where page i belongs to sequence i.
      ratio, eps: tokens of a block; epsilon of the norm.
      packing: the layout of packed entries. hadamard: whether entries are transformed.
    """
    pages = jnp.zeros((rows.shape[0], 0), jnp.int32) if block_table is None else block_table
    kept = (cache, state, sums, folded)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept]
    operands = (*kept, rows, ape, norm, table, bounds, pages)
    attributes: dict[str, Any] = {"column": np.int64(column), "ratio": np.int64(ratio), "eps": np.float32(eps)}
    attributes |= {"hadamard": np.int64(hadamard), "packing": packing}
    cache, state, sums, folded = call("kv_insert", results, *operands, aliases={i: i for i in range(4)}, **attributes)
    return cache, state, sums, folded
