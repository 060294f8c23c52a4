"""One step of generation in a DeepSeek-V4 layer: a few new queries for each sequence, and its caches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _check, _ffi, _fp8, reference
from ._cache import Cache
from ._transforms import RESULTS, SINK, Axes, Op, choose, forward


def dsv4_decode(
    q: jax.Array,
    window_cache: Cache,
    compressed_cache: Cache | None = None,
    *,
    lengths: int | jax.Array,
    sink: jax.Array | None = None,
    indices: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    ratio: int | None = None,
    window: int = 128,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`dsv4_attention` for the last s_q tokens of every sequence, over caches that hold these and all before them.

    Sequence n has `lengths[n]` tokens, the s_q new ones included: query i stands at position
    `p = lengths[n] - s_q + i`. It sees

      - the window entries of the positions `(p - window, p]`, so not those of the new tokens behind it,
      - and of the compressed cache the entries that `indices` names, or without indices those with
        `w < (p + 1) // ratio`.

    A query with p < 0 sees nothing: `lengths[n] <= 0` is a slot of the batch that is idle.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16; bfloat16 alone, and d = 512, on FP8 caches; float32 on the reference.
      window_cache: a `Cache` of entries in q's dtype or in FP8; entry p is position p. It may be a ring, with room for
        `window + s_q - 1` entries at least.
      compressed_cache: a `Cache` like window_cache; entry w stands for positions `w ratio` to `w ratio + ratio - 1`. If
        it has run over, its last `capacity` entries of `lengths // ratio` are those that a query may see.
      lengths: an int, or int32 `[b]`.
      sink: float32 `[h_q]`, as in `fmha`.
      indices: int32 `[b, s_q, topk]`, entries of the compressed cache as the sequence counts them, not slots of a pool.
        They are taken as they stand: what is not past yet must not be named. One that is below 0, or that the cache
        has no room or no page for, is absent.
      topk_length: int32 `[b, s_q]`; indices from there on are absent too.
      ratio: an int >= 1, needed with compressed_cache and without indices; with indices it has no effect.
      window: an int >= 1, the query's own position included.
      scale: a float > 0, `d**-0.5` if left out.
      implementation: as in `fmha`. There is no gradient, but of "reference".

    Returns:
      o like q and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that are not as said above.
      NotImplementedError: "cubin", and it is not built for these operands.
    """
    op = "dsv4_decode"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    b, s_q, d = (dims[name] for name in ("b", "s_q", "d"))
    for name, cache in (("window_cache", window_cache), ("compressed_cache", compressed_cache)):
        if cache is not None or name == "window_cache":
            if not isinstance(cache, Cache):
                raise _check.error(TypeError, op, name, cache, "a Cache")
            cache.check(op, name, dims, (q.dtype,))
    is_fp8 = window_cache.is_fp8
    if is_fp8 and q.dtype != jnp.bfloat16:
        raise _check.error(ValueError, op, "q", q, "bfloat16, with FP8 caches")
    _check.visible_of(op, "compressed_cache", compressed_cache, indices, ratio)
    if compressed_cache is not None and compressed_cache.is_fp8 != is_fp8:
        wanted = f"entries {'in FP8' if is_fp8 else f'of {q.dtype}'}, as in window_cache"
        raise _check.error(ValueError, op, "compressed_cache.entries", compressed_cache.entries, wanted)
    indices, topk_length = _check.selection(op, indices, topk_length, dims)
    lengths = jnp.broadcast_to(_check.offset(op, "lengths", lengths, dims), (b,))
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, d)
    ratio = None if ratio is None else _check.positive(op, "ratio", ratio)
    window = _check.positive(op, "window", window)
    room = window_cache.capacity
    if isinstance(room, int) and isinstance(s_q, int) and room < window + s_q - 1:
        wanted = f"window + s_q - 1 = {window + s_q - 1} at least"
        raise _check.error(ValueError, op, "window_cache", f"room for {room} entries of a sequence", wanted)
    _check.implementation(op, implementation)

    sources = reference.seen_slots(s_q, window_cache, compressed_cache, lengths, indices, topk_length, ratio, window)
    if implementation == "reference":
        return reference.over_slots(q, *sources, sink=sink, scale=scale)
    built = _ffi.built_for(_target(len(sources), is_fp8), d=d, dtype=q.dtype.name, shared_kv=True)
    got = f"{q.dtype.name}, d={d}{', FP8 caches' if is_fp8 else ''}"
    kernel = choose(op, implementation, built, got)
    operands = [x for source in sources for x in source]
    o, lse = forward(_OPS[len(sources)], q, *operands, sink=sink, scale=scale, kernel=kernel)
    return o, lse


def _target(sources: int, is_fp8: bool) -> str:
    """The kernel for one or two caches."""
    return "dsv4_decode_fp8" if is_fp8 else "dsv4_decode" if sources == 2 else "sparse_fwd"


def _kernel(q: Any, *operands: Any, scale: float) -> Any:
    sources, sink = _sources(operands)
    sources = [_flat(*source) for source in sources]
    if len(sources) == 1 and sources[0][0].dtype == jnp.uint8:  # built for two: nothing is seen of the other
        nothing = jnp.zeros(q.shape[:2], jnp.int32)
        sources.append((sources[0][0], nothing[..., None], nothing))
    run: Any = _ffi.dsv4_decode if len(sources) == 2 else _ffi.sparse_fwd
    return run(q, *(x for source in sources for x in source), sink, scale=scale)


def _flat(pool: Any, slots: Any, length: Any) -> reference.Source:
    """The pools [b or 1, …] of a device as one, as kernels take it."""
    each = pool.shape[1]
    if pool.dtype == jnp.uint8:
        each *= _fp8.page_entries(pool.shape[2])
    if pool.shape[0] != 1:
        first = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None, None] * each
        slots = jnp.where(slots < 0, slots, first + slots)
    return pool.reshape(-1, pool.shape[2]), slots, length


def _reference(q: Any, *operands: Any, scale: float) -> Any:
    sources, sink = _sources(operands)
    return reference.over_slots(q, *sources, sink=sink, scale=scale)


def _sources(operands: Sequence[Any]) -> tuple[list[reference.Source], Any]:
    """The operands of _OPS behind q: by the source, and the sink."""
    return list(zip(operands[:-1:3], operands[1:-1:3], operands[2:-1:3], strict=True)), operands[-1]


def _source(name: str) -> tuple[Axes, ...]:
    pool = Axes(f"{name}_cache", f"b {name}_rows {name}_width")
    return pool, Axes(f"{name} slots", f"b s_q {name}_slots"), Axes(f"{name} length", "b s_q")


_Q, _WINDOW, _COMPRESSED = Axes("q", "b s_q h_q d"), _source("window"), _source("compressed")
_OPS = {
    1: Op("dsv4_decode", (_Q, *_WINDOW, SINK), RESULTS, _reference, _kernel),
    2: Op("dsv4_decode", (_Q, *_WINDOW, *_COMPRESSED, SINK), RESULTS, _reference, _kernel),
}
"""by the number of caches"""
