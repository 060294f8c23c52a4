"""A DeepSeek-V4 attention layer: sliding window, compressed cache and sink under one softmax."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.cache import Cache
from .._definitions.packed import ALL_V
from .._definitions.query_rope import QueryRope
from .._definitions.span import Span
from .._dispatch.attend import attend
from .._dispatch.cached import CachedSource
from .._dispatch.modes import canonical_order, fp8_products, rotary
from .._dispatch.modes.base import defined
from .._dispatch.sources import SelectionSource, Source, SpanSource


def dsv4_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed_kv: jax.Array | Cache | None = None,
    *,
    window: int | Span = 128,
    ratio: int | Span | None = None,
    indices: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    sink: jax.Array | None = None,
    rope: QueryRope | None = None,
    precision: str | None = None,
    scale: float | None = None,
    implementation: _check.Implementation | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The attention of one DeepSeek-V4 layer: sliding window, compressed entries and sink under one softmax.

    Window entries and compressed entries are one latent head each, which is both K and V. Query i has position
    `p = q_offset + i`, entry j of the window position j. Query i sees

      - the window entries at positions `(p - window, p]`,
      - and the compressed entries `w < (p + 1) // ratio`, where entry w stands for `ratio` positions; with indices,
        only those that they name.

    In place of either number a `Span` says what is seen. An entry that is seen both in the window and compressed counts
    twice, as in the model.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16; float16 and float32 only on the reference.
      window_kv: `[b, s_w, d]` in q's dtype.
      compressed_kv: `[b, s_c, d]` in q's dtype; None, or s_c = 0, makes a layer with a window alone. Or a `Cache`,
        paged or not, for a chunk of a prompt: s_c is its capacity, and an entry that it has no page for is absent. A
        packed Cache takes q in bfloat16, and the window is a launch of its own. There is no gradient over a Cache.
      window: an int >= 1, the query's own position included. Or the Span of window entries that a query sees, for
        packed documents `Span.sliding_window(s, window) & Span.segments(ids)`.
      ratio: an int >= 1, or the Span of compressed entries that a query may see, for packed documents
        `Span.compressed_segments(ids, ratio)`. Needed with compressed_kv, unless there are indices; 0 means None, a
        layer with a window alone.
      indices: int32 `[b, s_q, topk]` into compressed_kv, for the layers of ratio 4; topk may be 0. An entry that ratio
        does not show is absent; without ratio all indices count as they are. Absent entries are as in `sparse_fmha`.
      q_offset: int, or int32 `[b]`, traced or not; 0 where Spans alone say what is seen.
      sink: float32 `[h_q]`, as in `fmha`.
      rope: RoPE of q's heads, and the norm before it, if q comes before these; o is then rotated back. Where there is a
        kernel for it, this is a part of attention; it rounds less than passes of their own. Without a norm there is no
        such kernel. The reference alone has derivatives in the table; elsewhere to ask for one is an error.
      precision: "float8_e4m3fn" rounds q, entries and the softmax's weights to e4m3 for the products: faster, and some
        4 % off (docs/howto/fp8-products.md). q is bfloat16; a kernel has d 512. It is one launch, in any order of sums.
        The reference alone has a gradient, as if nothing were rounded. A Cache, packed in any layout or not, becomes
        codes sequence by sequence. "float8_e4m3fn_bf16_rope" leaves the last 64 dimensions, V4's RoPE, in bfloat16 for
        the scores: d is greater.
      scale: a float > 0, `d**-0.5` if left out.
      implementation: as in `fmha`, for every launch. One launch attends to window and entries, and rounds o once, where
        there is such a kernel for the operands; elsewhere there is one for each, and `merge` of both. A window alone is
        one launch of `fmha`.
      deterministic: as in `fmha`.
      batch_invariant: as in `fmha`, in one launch; a packed Cache is read by `dsv4_decode` alone.

    Returns:
      o like q and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: batch_invariant, and there is no such kernel for these operands; "cubin", and none is built
        in.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Span, dsv4_attention
      >>> q = jnp.ones((1, 8, 4, 512), jnp.bfloat16)
      >>> window_kv, compressed_kv = (jnp.ones((1, n, 512), jnp.bfloat16) for n in (8, 2))
      >>> o, lse = dsv4_attention(q, window_kv, compressed_kv, window=3, ratio=4, sink=jnp.zeros(4))
      >>> o.shape, lse.shape
      ((1, 8, 4, 512), (1, 8, 4))

      A chunk of a prompt, queries 100 to 107, whose window entries begin with the 2 before it:

      >>> window = Span.sliding_window(8, 3, offset=100).keys_from(98)
      >>> o, lse = dsv4_attention(q, jnp.ones((1, 10, 512), jnp.bfloat16), window=window)
      >>> o.shape
      (1, 8, 4, 512)
    """
    op = "dsv4_attention"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    window_kv = _check.operand(op, "window_kv", window_kv, "b s_w d", dims, (q.dtype,))
    cache = compressed_kv if isinstance(compressed_kv, Cache) else None
    is_empty = getattr(compressed_kv, "shape", None) == (dims["b"], 0, dims["d"])  # a prompt shorter than a block
    if is_empty:
        compressed_kv = None
    elif cache is not None:
        cache.check(op, "compressed_kv", dims, (q.dtype,), ALL_V)
        if cache.is_packed and q.dtype != jnp.bfloat16:
            raise _check.error(ValueError, op, "q", q, "bfloat16, with a packed Cache")
        dims["s_c"] = cache.capacity
    elif compressed_kv is not None:
        compressed_kv = _check.operand(op, "compressed_kv", compressed_kv, "b s_c d", dims, (q.dtype,))
    indices = _check.selection(op, indices, dims)
    first = _check.offset(op, "q_offset", q_offset, dims)
    if isinstance(window, Span) and (ratio is None or isinstance(ratio, Span)) and not _is_zero(q_offset):
        raise _check.error(ValueError, op, "q_offset", q_offset, "0 where Spans alone say what is seen")
    window = window if isinstance(window, Span) else _check.positive(op, "window", window, _OR_SPAN)
    ratio = _ratio(op, ratio, compressed_kv, indices, is_empty)
    _check.implementation(op, implementation)
    _check.flags(op, deterministic=deterministic)
    _check.batch_invariant(op, batch_invariant, implementation)
    modes = [*canonical_order.wanted(batch_invariant), *fp8_products.wanted(op, precision, q, batch_invariant)]
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    rotations = rotary.wanted(op, rope, dims, implementation)
    if indices is not None and indices.shape[2] == 0:
        compressed_kv = indices = None
    b, s_q = dims["b"], dims["s_q"]
    at = q_offset if isinstance(q_offset, int) else first
    near = window if isinstance(window, Span) else Span.sliding_window(s_q, window, at)
    near_bounds = near.bounds(b, s_q, dims["s_w"], op, "window")
    far = ratio if ratio is None or isinstance(ratio, Span) else Span.compressed(s_q, ratio, at)
    if compressed_kv is not None and far is not None:
        start, stop = far.bounds(b, s_q, dims["s_c"], op, "ratio")
    alive = None
    if cache is not None and compressed_kv is not None and precision is not None:
        alive = jnp.broadcast_to(jnp.arange(dims["s_c"], dtype=jnp.int32), (b, dims["s_c"]))
        if far is not None:  # entries that no query may see are not read
            may_be_seen = (start.min(1, keepdims=True) <= alive) & (alive < stop.max(1, keepdims=True))
            alive = jnp.where(may_be_seen, alive, -1)
    if cache is not None and compressed_kv is not None and (precision is None or implementation == "reference"):
        if indices is None:
            dims["topk"] = dims["s_c"]
            indices = jnp.broadcast_to(jnp.arange(dims["s_c"], dtype=jnp.int32), (b, s_q, dims["s_c"]))
        slots = cache.slots(indices)
        compressed_kv = cache.pool()
        if implementation == "reference":
            compressed_kv, indices = cache.take(), jnp.where(slots < 0, -1, indices)
    if implementation == "reference":
        assert not isinstance(compressed_kv, Cache)
        seen: dict[str, Any] = {"window": window, "ratio": ratio, "indices": indices, "q_offset": first}
        how: dict[str, Any] = {"sink": sink, "precision": precision, "scale": scale, **seen}

        def definition(q: jax.Array) -> reference.Attention:
            return reference.dsv4_attention(q, window_kv, compressed_kv, **how)

        return defined(definition, rotations)(q)
    reach = near.reach if dims["s_w"] == s_q else None
    sources: list[Source] = [SpanSource(window_kv, *near_bounds, names=_WINDOW, axis="s_w", reach=reach)]
    if compressed_kv is not None:
        listed = None
        if indices is not None:
            named = slots if cache is not None and compressed_kv is not cache else indices
            if far is not None:
                named = jnp.where((start[..., None] <= indices) & (indices < stop[..., None]), named, -1)
            listed = named, jnp.full((b, s_q), dims["topk"], jnp.int32)
        if isinstance(compressed_kv, Cache):
            assert alive is not None
            counted = ("span", start, stop) if listed is None else ("selection", *listed)
            sources.append(CachedSource.of("compressed_kv", compressed_kv, compressed_kv.slots(alive), *counted))
        elif listed is not None:
            selection = SelectionSource(compressed_kv, *listed, _SELECTED, "s_c")
            sources.append(selection if cache is None else dataclasses.replace(selection, layout=cache.layout))
        else:
            sources.append(SpanSource(compressed_kv, start, stop, names=_COMPRESSED, axis="s_c"))
    return attend(
        op, q, sources, sink=sink, scale=scale, implementation=implementation, modes=[*modes, *rotations],
        differentiable=cache is None, deterministic=deterministic,
    )  # fmt: skip


def _ratio(op: str, ratio: Any, compressed_kv: Any, indices: Any, is_empty: bool) -> Any:
    """The ratio, a Span or None; without compressed entries there must be none, unless there just are none yet."""
    if isinstance(ratio, Span):
        if compressed_kv is None and not is_empty:
            raise _check.error(ValueError, op, "ratio", ratio, "None without compressed_kv")
        return None if is_empty else ratio
    if not is_empty:
        return _check.ratio(op, "compressed_kv", compressed_kv, indices, ratio, _OR_SPAN)
    if ratio is not None and not _is_zero(ratio):
        _check.positive(op, "ratio", ratio, _OR_SPAN)
    return None


def _is_zero(x: Any) -> bool:
    return type(x) is int and x == 0


_OR_SPAN = ", or a Span"
_WINDOW = ("window_kv", "window start", "window stop")
_SELECTED = ("compressed_kv", "indices", "length")
_COMPRESSED = ("compressed_kv", "compressed start", "compressed stop")
