"""One step of generation in a DeepSeek-V4 layer: a few new queries for each sequence, and its caches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.cache import Cache
from .._definitions.packed import ALL_V
from .._dispatch.attend import attend
from .._dispatch.cached import of_chunk
from .._dispatch.modes import canonical_order, fp8_products
from .._dispatch.seen_slots import seen_slots
from .._dispatch.sources import Source

FEWEST_QUERIES = 64
"""with products of e4m3"""


def dsv4_decode(
    q: jax.Array,
    window_cache: Cache,
    compressed_cache: Cache | None = None,
    *,
    lengths: int | jax.Array,
    sink: jax.Array | None = None,
    indices: jax.Array | None = None,
    ratio: int | None = None,
    window: int = 128,
    q_offset: int | jax.Array | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    implementation: _check.Implementation | None = None,
    batch_invariant: bool = False,
    precision: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A step of generation: `dsv4_attention` of the last tokens of every sequence, over their KV caches.

    Sequence n has `lengths[n]` tokens. These include the new ones, whose entries are in the caches already. Query i has
    position `p = q_offset[n] + i`; without q_offset, `lengths[n] - s_q + i`. It sees

      - the window entries at positions `(p - window, p]`, and so no token after it,
      - the entries of the compressed cache that `indices` names; without indices, those with
        `w < (p + 1) // ratio`.

    A query with p < 0 or p >= lengths[n] is padding: it sees nothing, its o is 0 and its lse -inf. So sequences of a
    batch may have different numbers of new tokens, and `lengths[n] <= 0` marks an idle place.

    With is_causal=False the new tokens see each other, as a block of drafts does: each query sees all of them, and the
    `window` tokens before the first. This is the mask of DSpark, DeepSeek's way to draft: `get_dspark_topk_idxs` in its
    inference code, `_compute_dspark_noncausal_swa_indices_kernel` in vLLM. DSpark's draft layers have a window alone;
    compressed entries, if there are any, are seen as above.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16; float16 and float32 only on the reference, and not with packed caches, whose d
        is 512.
      window_cache: a `Cache` of entries in q's dtype, or packed; entry p is position p. It may be a ring, with room for
        `window + s_q - 1` entries at least, one more if it is not causal.
      compressed_cache: a `Cache`, packed if window_cache is, in any layout of d 512; entry w stands for positions
        `w ratio` to `w ratio + ratio - 1`. If it has run over, a query may see its last `capacity` entries of
        `lengths // ratio`.
      lengths: an int, or int32 `[b]`.
      sink: float32 `[h_q]`, as in `fmha`.
      indices: int32 `[b, s_q, topk]`, entries of the compressed cache as the sequence counts them, not slots of a pool.
        An entry that is not past yet, is below 0, or has no room or no page in the cache, is absent; without ratio all
        indices count as they are. topk may be 0.
      ratio: an int >= 1, needed with compressed_cache and without indices; 0 means None, a layer with a window alone.
      window: an int >= 1, the query's own position included.
      q_offset: an int, or int32 `[b]`: the position of the first new token. None means `lengths - s_q`.
      is_causal: whether a query sees no token after it; if not, it sees all new ones.
      scale: a float > 0, `d**-0.5` if left out.
      implementation: as in `fmha`. Only "reference" has a gradient.
      batch_invariant: as in `fmha`. The bits are then those of `dsv4_attention` over the same keys; with packed caches
        and at most 32 heads they are those of packed caches alone.
      precision: for a chunk of a prompt, of 64 queries at least: as in `dsv4_attention`, straight from
        the bytes of caches in any layout, or from bfloat16. Steps of fewer queries wait for keys, not for products:
        they take None.

    Returns:
      o like q and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin" or batch_invariant, and no such kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Cache, dsv4_decode
      >>> cache = Cache.zeros(2, 16, 512)  # room for 16 entries of each of two sequences
      >>> cache = cache.append(jnp.ones((2, 5, 512), jnp.bfloat16), jnp.array([range(5)] * 2))
      >>> o, lse = dsv4_decode(jnp.ones((2, 1, 4, 512), jnp.bfloat16), cache, lengths=5, window=8)
      >>> o.shape, lse.shape
      ((2, 1, 4, 512), (2, 1, 4))

      One new token of the first sequence and three of the second, in one call:

      >>> lengths, first = jnp.array([3, 5]), jnp.array([2, 2])
      >>> o, lse = dsv4_decode(jnp.ones((2, 3, 4, 512), jnp.bfloat16), cache, lengths=lengths, q_offset=first, window=8)
      >>> jnp.isfinite(lse[:, :, 0]).tolist()
      [[True, False, False], [True, True, True]]
    """
    op = "dsv4_decode"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    b, s_q, d = (dims[name] for name in ("b", "s_q", "d"))
    for name, cache in (("window_cache", window_cache), ("compressed_cache", compressed_cache)):
        if cache is not None or name == "window_cache":
            if not isinstance(cache, Cache):
                raise _check.error(TypeError, op, name, cache, "a Cache")
            cache.check(op, name, dims, (q.dtype,), ALL_V)
    packed = window_cache.is_packed
    if packed and q.dtype != jnp.bfloat16:
        raise _check.error(ValueError, op, "q", q, "bfloat16, with packed caches")
    ratio = _check.ratio(op, "compressed_cache", compressed_cache, indices, ratio)
    if compressed_cache is not None and compressed_cache.is_packed != packed:
        wanted = f"entries {'that are packed' if packed else f'of {q.dtype}'}, as in window_cache"
        raise _check.error(ValueError, op, "compressed_cache.entries", compressed_cache.entries, wanted)
    indices = _check.selection(op, indices, dims)
    lengths = jnp.broadcast_to(_check.offset(op, "lengths", lengths, dims), (b,))
    if q_offset is not None:
        q_offset = jnp.broadcast_to(_check.offset(op, "q_offset", q_offset, dims), (b,))
    _check.flags(op, is_causal=is_causal)
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, d)
    window = _check.positive(op, "window", window)
    room = window_cache.capacity
    least = window + s_q - 1 if is_causal else window + s_q
    if isinstance(room, int) and isinstance(s_q, int) and room < least:
        wanted = f"window + s_q{' - 1' * is_causal} = {least} at least"
        raise _check.error(ValueError, op, "window_cache", f"room for {room} entries of a sequence", wanted)
    _check.implementation(op, implementation)
    _check.batch_invariant(op, batch_invariant, implementation)
    modes = [*canonical_order.wanted(batch_invariant), *fp8_products.wanted(op, precision, q, batch_invariant)]
    if precision is not None and isinstance(s_q, int) and s_q < FEWEST_QUERIES:
        wanted = f"None with fewer than {FEWEST_QUERIES} queries, whose time is that of reading keys"
        raise _check.error(ValueError, op, "precision", f"{precision} with s_q={s_q}", wanted)

    if indices is not None and indices.shape[2] == 0:
        compressed_cache = indices = None
    if implementation == "reference":
        return reference.dsv4_decode(
            q, window_cache, compressed_cache, lengths=lengths, sink=sink, indices=indices, ratio=ratio, window=window,
            q_offset=q_offset, is_causal=is_causal, scale=scale, precision=precision,
        )  # fmt: skip
    seen = seen_slots if precision is None else of_chunk
    sources: Sequence[Source] = seen(
        s_q, window_cache, compressed_cache, lengths, indices, ratio, window, q_offset, is_causal
    )
    return attend(
        op, q, sources, sink=sink, scale=scale, implementation=implementation, modes=modes, differentiable=False,
    )  # fmt: skip
