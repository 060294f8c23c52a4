"""One step of generation over one cache of latents: a few new queries for each sequence."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.cache import Cache
from .._definitions.packed import LATENTS
from .._dispatch.attend import attend
from .._dispatch.modes import canonical_order
from .._dispatch.seen_slots import chosen_slots
from .._dispatch.sources import SelectionSource, Source, SpanSource


def mla_decode(
    q: jax.Array,
    cache: Cache,
    lengths: int | jax.Array,
    indices: jax.Array | None = None,
    *,
    d_v: int | None = 512,
    sink: jax.Array | None = None,
    q_offset: int | jax.Array | None = None,
    scale: float | None = None,
    implementation: _check.Implementation | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A step of generation with multi-head latent attention (MLA): `fmha` or `sparse_fmha` of the last tokens of every
    sequence, over one cache of its latents.

    Sequence n has `lengths[n]` tokens. These include the new ones, whose entries are in the cache already. Query i has
    position `p = q_offset[n] + i`; without q_offset, `lengths[n] - s_q + i`. It sees the entries at positions up to p,
    all of them or those that `indices` names. A query with p < 0 or p >= lengths[n] is padding: it sees nothing, its o
    is 0 and its lse -inf. So `lengths[n] <= 0` marks an idle place.

    An entry without room or without a page in the cache is absent: a cache is no ring here.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16; float16 and float32 only on the reference, and not with a packed cache.
      cache: a `Cache` of entries in q's dtype, or packed: in "v32_fp8" d is 576, in V4's layouts 512. Entry p is
        position p.
      lengths: an int, or int32 `[b]`.
      indices: int32 `[b, s_q, topk]`, positions in the sequence, not slots of a pool. One that is after p or below 0 is
        absent; topk may be 0. None means all positions.
      d_v: V is the first d_v numbers of an entry, as in `fmha`; None means all of them.
      sink: float32 `[h_q]`, as in `fmha`.
      q_offset: an int, or int32 `[b]`: the position of the first new token. None means `lengths - s_q`.
      scale: a float > 0, `d**-0.5` if left out. Models with MLA have another one: that of a head's q before `w_uk`.
      implementation: as in `fmha`. Only "reference" has a gradient.
      batch_invariant: as in `fmha`.

    Without indices a kernel reads a contiguous cache that is not packed as a span. Of pages, and of packed entries,
    every query gets a list of all slots of its sequence, for the kernel of selections: `[b, s_q, capacity]` numbers,
    and queries share no keys that they read; `explain` says so. That is for steps: a chunk of a prompt takes `fmha`
    over `Cache.take`.

    Returns:
      o `[b, s_q, h_q, d_v]` in q's dtype, and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin" or batch_invariant, and no such kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Cache, mla_decode
      >>> table = jnp.array([[2, 0], [3, 1]])  # of two sequences, two pages of 64 entries each
      >>> cache = Cache.zeros(4, 64, block_table=table, layout="v32_fp8")
      >>> cache = cache.append(jnp.ones((2, 5, 576), jnp.bfloat16), jnp.array([range(5)] * 2))
      >>> o, lse = mla_decode(jnp.ones((2, 1, 16, 576), jnp.bfloat16), cache, jnp.array([5, 3]))
      >>> o.shape, lse.shape
      ((2, 1, 16, 512), (2, 1, 16))

      Over chosen positions:

      >>> o, lse = mla_decode(jnp.ones((2, 1, 16, 576), jnp.bfloat16), cache, 5, jnp.array([[[0, 3, -1]]] * 2))
      >>> lse[:, 0, 0].round(3).tolist()  # of two keys: 24 + log(2)
      [24.69300079345703, 24.69300079345703]
    """
    op = "mla_decode"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    b, s_q, d = (dims[name] for name in ("b", "s_q", "d"))
    if not isinstance(cache, Cache):
        raise _check.error(TypeError, op, "cache", cache, "a Cache")
    cache.check(op, "cache", dims, (q.dtype,), LATENTS)
    if cache.is_packed and q.dtype != jnp.bfloat16:
        raise _check.error(ValueError, op, "q", q, "bfloat16, with a packed cache")
    lengths = jnp.broadcast_to(_check.offset(op, "lengths", lengths, dims), (b,))
    if q_offset is not None:
        q_offset = jnp.broadcast_to(_check.offset(op, "q_offset", q_offset, dims), (b,))
    indices = _check.selection(op, indices, dims)
    d_v = _check.d_v(op, d_v, d)
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, d)
    _check.implementation(op, implementation)
    _check.batch_invariant(op, batch_invariant, implementation)
    if indices is not None and indices.shape[2] == 0:
        indices = jnp.pad(indices, ((0, 0), (0, 0), (0, 1)), constant_values=-1)
    if implementation == "reference":
        return reference.mla_decode(
            q, cache, lengths, indices, d_v=d_v, sink=sink, q_offset=q_offset, scale=scale
        )  # fmt: skip
    source = _seen(cache, s_q, lengths, indices, q_offset, d_v)
    return attend(
        op, q, [source], sink=sink, scale=scale, implementation=implementation, differentiable=False,
        modes=canonical_order.wanted(batch_invariant),
    )  # fmt: skip


def _seen(
    cache: Cache, s_q: Any, lengths: jax.Array, indices: jax.Array | None, q_offset: jax.Array | None, d_v: int | None
) -> Source:
    """The entries that each query sees."""
    names = ("cache", "slots", "length")
    how: dict[str, Any] = {"layout": cache.layout, "d_v": d_v, "lists_all": indices is None}
    source = SelectionSource(cache.pool(), None, None, names, "cache_rows", **how)
    if indices is not None:
        return chosen_slots(source, cache, lengths, indices, q_offset)
    lengths = jnp.maximum(lengths, 0)[:, None]  # otherwise a subtraction might wrap around
    first = lengths - s_q if q_offset is None else q_offset[:, None]
    position = first + jnp.arange(s_q, dtype=jnp.int32)[None]
    there = (position >= 0) & (position < lengths)
    count = jnp.where(there, jnp.minimum(position + 1, cache.capacity), 0)
    if cache.block_table is None and not cache.is_packed:
        names = ("cache", "start", "stop")
        return SpanSource(cache.entries, 0 * count, count, None, names, "cache_rows", from_first=True, d_v=d_v)
    entries = 0 * lengths + jnp.arange(cache.capacity, dtype=jnp.int32)[None]
    slots = jnp.broadcast_to(cache.slots(entries)[:, None], (*position.shape, cache.capacity))
    return source.seen(slots, count)
