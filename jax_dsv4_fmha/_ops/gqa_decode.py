"""One step of generation over caches of K and of V: a few new queries for each sequence."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.cache import Cache
from .._dispatch.attend import attend
from .._dispatch.sources import PagedSource, SpanSource, in_reach

E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def gqa_decode(
    q: jax.Array,
    k_cache: Cache,
    v_cache: Cache,
    lengths: int | jax.Array,
    *,
    window: int | None = None,
    sink: jax.Array | None = None,
    q_offset: int | jax.Array | None = None,
    scale: float | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    implementation: _check.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A step of generation with grouped-query attention (GQA, MHA, MQA): `fmha` of the last tokens of every sequence,
    over a cache of its keys and one of its values.

    Sequence n has `lengths[n]` tokens. These include the new ones, whose entries are in the caches already. Query i has
    position `p = q_offset[n] + i`; without q_offset, `lengths[n] - s_q + i`. It sees the entries at positions up to p,
    of a layer with a window the last `window` of these. A query with p < 0 or p >= lengths[n] is padding: it sees
    nothing, its o is 0 and its lse -inf. So `lengths[n] <= 0` marks an idle place.

    An entry has the numbers of all KV heads, one head after the other: new ones are
    `k_cache.append(k.reshape(b, s_q, h_kv * d), positions)`. A query sees no entry after one without room or without a
    page. So pages before a window may be gone; a cache is no ring here. On a mesh heads may be sharded, those of caches
    on Auto axes.

    Caches in FP8 have entries of float8_e4m3fn, as vLLM and SGLang keep them with `kv_cache_dtype=fp8_e4m3`: a key is
    its codes times k_scale, a value its codes times v_scale, each a number for all KV heads or one for each. New codes
    are `jnp.clip(k / k_scale, -448, 448).astype(jnp.float8_e4m3fn)`, k_scale repeated d times where heads differ. In
    scores and values nothing else is rounded. No code that a query sees may be NaN.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16; float32 only on the reference.
      k_cache: a `Cache` of entries of h_kv * d numbers in q's dtype, or float8_e4m3fn, not packed; h_q is a multiple of
        h_kv. Entry p is position p.
      v_cache: a `Cache` like k_cache, with pages of its own.
      lengths: an int, or int32 `[b]`.
      window: an int >= 1, known while tracing: how many tokens a query sees at most, its own included. None means all.
      sink: float32 `[h_q]`, as in `fmha`.
      q_offset: an int, or int32 `[b]`: the position of the first new token. None means `lengths - s_q`.
      scale: a float > 0, `d**-0.5` if left out.
      k_scale, v_scale: of caches in FP8, a number, a float32 scalar or float32 `[h_kv]`; None means 1.
      implementation: as in `fmha`. Only "reference" has a gradient.

    Returns:
      o like q, and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "cubin", and no such kernel is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Cache, gqa_decode
      >>> table = jnp.array([[2, 0], [3, 1]])  # of two sequences, two pages of 64 entries each
      >>> k_cache, v_cache = (Cache.zeros(4, 64, 8 * 64, block_table=table) for _ in range(2))
      >>> new, positions = jnp.ones((2, 5, 8 * 64), jnp.bfloat16), jnp.array([range(5)] * 2)
      >>> k_cache, v_cache = (cache.append(new, positions) for cache in (k_cache, v_cache))
      >>> q = jnp.ones((2, 1, 64, 64), jnp.bfloat16)  # 64 query heads, 8 KV heads
      >>> o, lse = gqa_decode(q, k_cache, v_cache, jnp.array([5, 3]), window=128)
      >>> o.shape, lse.shape
      ((2, 1, 64, 64), (2, 1, 64))
    """
    op = "gqa_decode"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    b, s_q, h_q, d = (dims[name] for name in ("b", "s_q", "h_q", "d"))
    h_kv = _check_caches(op, q, k_cache, v_cache, dims)
    _check.heads(op, h_q, h_kv, s_q, k_cache.capacity, ("q", "k_cache"))
    lengths = jnp.broadcast_to(_check.offset(op, "lengths", lengths, dims), (b,))
    if q_offset is not None:
        q_offset = jnp.broadcast_to(_check.offset(op, "q_offset", q_offset, dims), (b,))
    window = None if window is None else _check.positive(op, "window", window, ", or None")
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, d)
    scales = _check_scales(op, k_cache, {"k_scale": k_scale, "v_scale": v_scale}, dims | {"h_kv": h_kv})
    _check.implementation(op, implementation)
    if implementation == "reference":
        how: dict[str, Any] = {"window": window, "sink": sink, "q_offset": q_offset, "scale": scale, **scales}
        return reference.gqa_decode(q, k_cache, v_cache, lengths, **how)
    source = _seen(k_cache, v_cache, (h_kv, d), s_q, lengths, window, q_offset, scales)
    return attend(
        op, q, [source], sink=sink, scale=scale, implementation=implementation, differentiable=False
    )  # fmt: skip


def _check_caches(op: str, q: jax.Array, k_cache: Any, v_cache: Any, dims: dict[str, Any]) -> Any:
    """The number of KV heads; an error unless these are caches of them, alike."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, Cache):
            raise _check.error(TypeError, op, name, cache, "a Cache")
        width = getattr(cache.entries, "shape", (0,))[-1]
        if getattr(cache.entries, "dtype", None) == jnp.uint8:
            raise _check.error(
                ValueError, op, f"{name}.entries", cache.entries, f"{q.dtype}: entries that are packed are latents"
            )
        if width % dims["d"] != 0:
            wanted = f"entries of h_kv * d numbers, d={dims['d']} for each KV head"
            raise _check.error(ValueError, op, f"{name}.entries", cache.entries, wanted)
        dtypes = (q.dtype, E4M3) if cache is k_cache else (k_cache.entries.dtype,)
        cache.check(op, name, {"b": dims["b"], "d": width}, dtypes)
    for part in ("entries", "block_table"):
        k, v = getattr(k_cache, part), getattr(v_cache, part)
        if getattr(k, "shape", None) != getattr(v, "shape", None):
            raise _check.error(ValueError, op, f"v_cache.{part}", v, f"{_check.describe(k)} like k_cache's")
    return k_cache.entries.shape[-1] // dims["d"]


def _check_scales(op: str, k_cache: Cache, given: dict[str, Any], dims: dict[str, Any]) -> dict[str, jax.Array]:
    """The scales of caches in FP8, float32 [h_kv] each; others have none."""
    if k_cache.entries.dtype != E4M3:
        for name, x in given.items():
            if x is not None:
                raise _check.error(ValueError, op, name, x, f"None, or caches of {E4M3}, not {k_cache.entries.dtype}")
        return {}
    scales = {name: _scale(op, name, 1.0 if x is None else x, dims) for name, x in given.items()}
    return {name: jnp.broadcast_to(x, (dims["h_kv"],)) for name, x in scales.items()}


def _scale(op: str, name: str, x: Any, dims: dict[str, Any]) -> Any:
    if getattr(x, "shape", None) == () and x.dtype in _check.FP32:
        return x
    if not hasattr(x, "shape"):
        return jnp.float32(_check.number(op, name, x, "a number, a float32 scalar or float32[h_kv]", lambda _: True))
    return _check.operand(op, name, x, "h_kv", dims, _check.FP32)


def _seen(
    k_cache: Cache,
    v_cache: Cache,
    heads: tuple[Any, Any],
    s_q: Any,
    lengths: jax.Array,
    window: int | None,
    q_offset: jax.Array | None,
    scales: dict[str, jax.Array],
) -> SpanSource | PagedSource:
    """The entries that each query sees."""
    k, v = (x.entries.reshape(*x.entries.shape[:2], *heads) for x in (k_cache, v_cache))
    in_pages, lengths = k_cache.block_table is not None, lengths[:, None]
    of_window = window if in_pages and in_reach(window, s_q, k.shape[1], k.shape[-1]) else None
    start, stop = lengths if q_offset is None else q_offset[:, None] + 1, lengths
    if of_window is None:
        lengths = jnp.maximum(lengths, 0)  # otherwise a subtraction might wrap around
        first = lengths - s_q if q_offset is None else q_offset[:, None]
        position = first + jnp.arange(s_q, dtype=jnp.int32)[None]
        there = (position >= 0) & (position < lengths)
        stop = jnp.where(there, jnp.minimum(position + 1, k_cache.capacity), 0)
        start = 0 * stop if window is None else jnp.minimum(jnp.maximum(position - (window - 1), 0), stop)
    if not in_pages and not scales:
        names = ("k_cache", "v_cache", "start", "stop")
        return SpanSource(k, start, stop, v, names, "cache_rows", width=window, from_first=window is None)
    how: dict[str, Any] = {"scales": jnp.stack([*scales.values()], -1)[None] if scales else None}
    how |= {"width": window + s_q - 1 if window is not None and isinstance(s_q, int) else None, "window": of_window}
    if not in_pages:  # a pool of one page for each sequence
        tables = (0 * lengths,) * 2
        return PagedSource(k[:, None], v[:, None], start, stop, *tables, **how)
    source = PagedSource(k[None], v[None], start, stop, k_cache.block_table, v_cache.block_table, **how)
    return source.until_a_page_is_missing() if of_window is None else source
