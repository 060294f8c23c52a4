"""The raw call that says which slots of its caches each query of a step sees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import call


def seen_slots(
    lengths: jax.Array,
    position: jax.Array,
    window_table: jax.Array,
    table: jax.Array,
    indices: jax.Array,
    topk_length: jax.Array,
    *,
    window: int,
    far: int,
    **attributes: Any,
) -> tuple[jax.Array, ...]:
    """Slots of `window` entries of the window and of `far` others for every query, int32 `[b, s_q, window]` and
    `[b, s_q, far]`, each followed by how many of them count, `[b, s_q]`.

    Args:
      lengths: int32 `[b]`.
      position: int32 `[b, s_q, 1]`, or `[b, s_q, 0]` for `lengths - s_q` and those that follow.
      window_table, table: int32 `[b, n]`; n is 0 where entries are slots.
      indices: int32 `[b, s_q, far]`, or `[b, s_q, 0]` for all past entries.
      topk_length: int32 `[b, s_q, 1]`, or `[b, s_q, 0]` where all indices count.
      ratio: as in `dsv4_decode`; 0 where all indices count as they are.
      window_room, window_page, window_pages, room, page, pages: entries of a sequence, of a page and pages of a pool;
        page is 0 without a block table.
      window_stride, stride: without a block table, slots from the first one of a sequence to that of the next; 0 where
        those of each sequence are counted.
    """
    b, s_q, _ = indices.shape
    shapes = (b, s_q, window), (b, s_q), (b, s_q, far), (b, s_q)
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    attributes = {name: np.int64(x) for name, x in attributes.items()}
    return tuple(
        call("seen_slots", results, lengths, position, window_table, table, indices, topk_length, **attributes)
    )
