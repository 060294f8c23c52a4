"""DeepSeek-V4.1's choice in two levels: one indexer chooses blocks of entries, and later ones choose entries within
them.
"""

from typing import Any

import jax

from .. import indexer_blocks, lightning_indexer


def two_levels(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    *,
    topk: int,
    ratio: int,
    q_offset: int | jax.Array = 0,
    block: int,
    makes: int = 0,
    within: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The indices of `lightning_indexer` within the given blocks, and the blocks for later layers.

    Args:
      q, k, weights, topk, ratio, q_offset: as in `lightning_indexer`; block: as in `indexer_blocks`.
      makes: how many blocks to choose for later layers.
      within: int32 `[b, s_q, n]`: the blocks to choose entries from; None means all entries.
    """
    seen: dict[str, Any] = {"ratio": ratio, "q_offset": q_offset, "block": block}
    indices = lightning_indexer(q, k, weights, topk=topk, blocks=within, **seen)
    assert isinstance(indices, jax.Array)  # because no scores are asked for
    return indices, indexer_blocks(q, k, weights, count=makes, **seen) if makes else None
