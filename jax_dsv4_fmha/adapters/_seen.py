"""Which keys a query sees, as the code bases say it: by segment ids, by how far it looks, and by masks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Span, _check

_MOST = 2**31 - 2  # the greatest position


def within(op: str, s_q: int, left: Any = None, right: Any = None) -> Span:
    """Query i sees the keys in `[i - left, i + right]`, ints that are known while tracing; None is no bound."""
    left, right = (None if x is None else min(_check.integer(op, "window", x, 0), _MOST) for x in (left, right))
    if right == 0:
        return Span.causal(s_q) if left is None else Span.sliding_window(s_q, left + 1)
    i = jnp.arange(s_q, dtype=jnp.int32)[None]
    start = jnp.zeros_like(i) if left is None else i - left
    stop = jnp.full_like(i, _MOST) if right is None else jnp.minimum(i, _MOST - right) + right + 1
    width = None if left is None or right is None else left + right + 1
    return Span(start, stop, width=width, from_first=left is None)


def segments(q_ids: Any, kv_ids: Any = None) -> tuple[Span, jax.Array]:
    """Queries see the keys with their id, and with an id below 0 none.

    Also returns bool `[b, 1, 1, 1]`: an id of this batch entry has keys in several places, which is no Span. Where ids
    are known while tracing, that is a ValueError.
    """
    q_ids = known(q_ids)
    keys = q_ids if kv_ids is None else known(kv_ids)
    xp = np if isinstance(q_ids, np.ndarray) and isinstance(keys, np.ndarray) else jnp
    alone = -2 - np.arange(keys.shape[1], dtype=keys.dtype)  # of padding, whose tokens may stand anywhere
    keys = xp.where(keys < 0, alone, keys)
    own = Span.segments(keys)
    scattered = jnp.asarray(own.start >= own.stop).any(1)
    return Span.segments(xp.where(q_ids < 0, -1, q_ids).astype(q_ids.dtype), keys), scattered[:, None, None, None]


def known(x: Any) -> Any:
    """An array whose values are known as NumPy's, which they stay while JAX traces."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)
