"""A DeepSeek-V4 attention layer: sliding window, compressed cache and sink under one softmax."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.cache import Cache
from .._definitions.span import Span, of_keys_from, shown_by_all
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
    sink: jax.Array | None = None,
    indices: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    ratio: int | None = None,
    window: int = 128,
    q_offset: int | jax.Array = 0,
    kv_offset: int | jax.Array = 0,
    window_lengths: jax.Array | None = None,
    span: Span | None = None,
    compressed_span: Span | None = None,
    scale: float | None = None,
    method: _check.Method | None = None,
    implementation: _check.Implementation | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    rope_table: jax.Array | None = None,
    norm_eps: float | None = None,
    o_groups: int = 1,
    products: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The attention of one DeepSeek-V4 layer: sliding window, compressed entries and sink under one softmax.

    Window entries and compressed entries are one latent head each, which is both K and V. Query i has position
    `p = q_offset + i`, entry j of the window `kv_offset + j`. Query i sees

      - the window entries whose positions are in `(p - window, p]` and not below 0,
      - and the compressed entries `w < (p + 1) // ratio`, where entry w stands for `ratio` positions; with indices,
        only those that they name.

    An entry that is seen both in the window and compressed counts twice, as in the model.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16; float16 and float32 only on the reference.
      window_kv: `[b, s_w, d]` in q's dtype.
      compressed_kv: `[b, s_c, d]` in q's dtype; None, or s_c = 0, makes a layer with a window alone. Or a `Cache`,
        paged or not, for a chunk of a prompt: s_c is its capacity, and an entry that it has no page for is absent. A
        packed Cache takes q in bfloat16 and "two_pass". There is no gradient over a Cache.
      sink: float32 `[h_q]`, as in `fmha`.
      indices: int32 `[b, s_q, topk]` into compressed_kv, for the layers of ratio 4; topk may be 0. An entry that is not
        past is absent; without ratio all indices count as they are. Absent entries are as in `sparse_fmha`.
      topk_length: int32 `[b, s_q]`, as in `sparse_fmha`.
      ratio: an int >= 1, needed with compressed_kv, unless there are indices or a compressed_span; 0 means None, a
        layer with a window alone.
      window: an int >= 1, the query's own position included.
      q_offset, kv_offset: int, or int32 `[b]`, traced or not.
      window_lengths: int32 `[b]`; window entries from there on are not seen.
      span, compressed_span: further limits on the window entries and the compressed entries that a row sees. For packed
        documents pass `span=Span.segments(ids)` and, without ratio,
        `compressed_span=Span.compressed_segments(ids, ratio)`.
      scale: a float > 0, `d**-0.5` if left out.
      method: "two_pass" merges a launch for the window with one for the compressed cache. "fused" is one launch, and
        rounds o once. None takes "fused" where there is such a kernel for the operands. A window alone is one launch of
        `fmha`.
      implementation: as in `fmha`, for every launch. "reference" is the definition, whatever the method.
      deterministic: as in `fmha`.
      batch_invariant: as in `fmha`, in one launch; a packed Cache is read by `dsv4_decode` alone.
      rope_table: float32 `[b, s_q, n]` or `[1, s_q, n]`, cos and sin of n / 2 pairs by turns, as `layers.Rope.table`
        makes them. q is then as it was before RoPE: the last n dimensions of its heads are rotated, in neighbouring
        pairs, and those of o are rotated back. Where there is a kernel for it, this is a part of attention; it rounds
        less than passes of their own. The reference alone has derivatives in the table; elsewhere to ask for one is an
        error.
      norm_eps: a float > 0, with a rope_table: q comes before the norm of its heads too, `q / sqrt(mean(q²) +
        norm_eps)`. None means no norm, for which there is no such kernel.
      o_groups: with a rope_table, in how many groups of heads a product takes o, as V4's output projection does.
        A kernel then reads the gradient of o as that product's gradient writes it. Results do not depend on it. It must
        divide h_q.
      products: "float8_e4m3fn" rounds q, entries and the softmax's weights to e4m3 for the products: faster, and some
        4 % off (docs/howto/fp8-products.md). q is bfloat16; a kernel has d 512. It is one launch, in any order of sums.
        The reference alone has a gradient, as if nothing were rounded. A Cache, packed in any layout or not, becomes
        codes sequence by sequence. "float8_e4m3fn_bf16_rope" leaves the last 64 dimensions, V4's RoPE, in bfloat16 for
        the scores: d is greater.

    Returns:
      o like q and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: "fused" or batch_invariant, and there is no such kernel for these operands; "cubin", and none
        is built in.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import dsv4_attention
      >>> q = jnp.ones((1, 8, 4, 512), jnp.bfloat16)
      >>> window_kv, compressed_kv = (jnp.ones((1, n, 512), jnp.bfloat16) for n in (8, 2))
      >>> o, lse = dsv4_attention(q, window_kv, compressed_kv, sink=jnp.zeros(4), ratio=4, window=3)
      >>> o.shape, lse.shape
      ((1, 8, 4, 512), (1, 8, 4))
    """
    op = "dsv4_attention"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    window_kv = _check.operand(op, "window_kv", window_kv, "b s_w d", dims, (q.dtype,))
    cache = compressed_kv if isinstance(compressed_kv, Cache) else None
    if getattr(compressed_kv, "shape", None) != (dims["b"], 0, dims["d"]):
        if cache is not None:
            cache.check(op, "compressed_kv", dims, (q.dtype,))
            if cache.is_packed and q.dtype != jnp.bfloat16:
                raise _check.error(ValueError, op, "q", q, "bfloat16, with a packed Cache")
            dims["s_c"] = cache.capacity
        elif compressed_kv is not None:
            compressed_kv = _check.operand(op, "compressed_kv", compressed_kv, "b s_c d", dims, (q.dtype,))
        ratio = _check.visible_of(op, "compressed_kv", compressed_kv, indices, ratio, compressed_span)
    else:  # a prompt that is shorter than a block
        if ratio is not None and ratio != 0:
            _check.positive(op, "ratio", ratio)
        ratio, compressed_kv = None, None
    for name, x in (("span", span), ("compressed_span", compressed_span)):
        if x is not None and not isinstance(x, Span):
            raise _check.error(TypeError, op, name, x, "a Span")
    indices, topk_length = _check.selection(op, indices, topk_length, dims)
    if window_lengths is not None:
        window_lengths = _check.operand(op, "window_lengths", window_lengths, "b", dims, _check.INT)
    _check.implementation(op, implementation)
    _check.flags(op, deterministic=deterministic)
    _check.batch_invariant(op, batch_invariant, implementation)
    _check.one_of(op, "method", method, (None, *get_args(_check.Method)))
    if batch_invariant and method == "two_pass":
        raise _check.error(ValueError, op, "method", method, "'fused' or None with batch_invariant=True")
    modes = [*canonical_order.wanted(batch_invariant), *fp8_products.wanted(op, products, q, batch_invariant)]
    if products is not None and method == "two_pass":
        raise _check.error(ValueError, op, "method", method, f"'fused' or None with products={products!r}")
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    positions: dict[str, Any] = {
        "window": _check.positive(op, "window", window),
        "q_offset": _check.offset(op, "q_offset", q_offset, dims),
        "kv_offset": _check.offset(op, "kv_offset", kv_offset, dims),
        "window_lengths": window_lengths,
    }
    rope = rotary.wanted(op, rope_table, norm_eps, o_groups, dims, implementation)
    if indices is not None and indices.shape[2] == 0:
        compressed_kv = indices = None
    b, s_q = dims["b"], dims["s_q"]
    near = window_span(s_q, **positions)
    near_bounds = shown_by_all(op, [near] if span is None else [near, span], b, s_q, dims["s_w"])
    rules = [] if ratio is None else [Span.compressed(s_q, ratio, positions["q_offset"])]
    rules += [] if compressed_span is None else [compressed_span]
    if compressed_kv is not None and rules:
        start, stop = shown_by_all(op, rules, b, s_q, dims["s_c"])
    alive = None
    if cache is not None and compressed_kv is not None and products is not None:
        alive = jnp.broadcast_to(jnp.arange(dims["s_c"], dtype=jnp.int32), (b, dims["s_c"]))
        if rules:  # entries that no query may see are not read
            may_be_seen = (start.min(1, keepdims=True) <= alive) & (alive < stop.max(1, keepdims=True))
            alive = jnp.where(may_be_seen, alive, -1)
    if cache is not None and compressed_kv is not None and (products is None or implementation == "reference"):
        if indices is None:
            dims["topk"] = dims["s_c"]
            indices = jnp.broadcast_to(jnp.arange(dims["s_c"], dtype=jnp.int32), (b, s_q, dims["s_c"]))
        slots = cache.slots(indices)
        compressed_kv = cache.pool()
        if implementation == "reference":
            compressed_kv, indices = cache.take(), jnp.where(slots < 0, -1, indices)
    if implementation == "reference":
        assert not isinstance(compressed_kv, Cache)
        selected: dict[str, Any] = {"indices": indices, "topk_length": topk_length, "ratio": ratio}
        spans: dict[str, Any] = {"span": span, "compressed_span": compressed_span}
        how: dict[str, Any] = {"sink": sink, "scale": scale, **selected, **spans, **positions}

        def definition(q: jax.Array) -> reference.Attention:
            return reference.dsv4_attention(q, window_kv, compressed_kv, products=products, **how)

        return defined(definition, rope)(q)
    of_queries = dims["s_w"] == s_q and all(isinstance(x, int) for x in (q_offset, kv_offset)) and q_offset == kv_offset
    near_source = SpanSource(
        window_kv, *near_bounds, names=_WINDOW, axis="s_w", reach=window - 1 if of_queries else None
    )
    sources: list[Source] = [near_source]
    if compressed_kv is not None:
        listed = None
        if indices is not None:
            named = slots if cache is not None and compressed_kv is not cache else indices
            if rules:
                named = jnp.where((start[..., None] <= indices) & (indices < stop[..., None]), named, -1)
            listed = named, jnp.full((b, s_q), dims["topk"], jnp.int32) if topk_length is None else topk_length
        if isinstance(compressed_kv, Cache):
            assert alive is not None
            seen = ("span", start, stop) if listed is None else ("selection", *listed)
            sources.append(CachedSource.of("compressed_kv", compressed_kv, compressed_kv.slots(alive), *seen))
        elif listed is not None:
            far = SelectionSource(compressed_kv, *listed, _SELECTED, "s_c")
            sources.append(far if cache is None else dataclasses.replace(far, layout=cache.layout))
        else:
            sources.append(SpanSource(compressed_kv, start, stop, names=_COMPRESSED, axis="s_c"))
    return attend(
        op, q, sources, sink=sink, scale=scale, implementation=implementation, modes=[*modes, *rope], method=method,
        differentiable=cache is None, deterministic=deterministic,
    )  # fmt: skip


def window_span(s_q: int, window: int, q_offset: Any, kv_offset: Any, window_lengths: jax.Array | None) -> Span:
    """The window entries that queries see: none at positions below 0."""
    span = of_keys_from(kv_offset, Span.sliding_window(s_q, window, q_offset))
    return span if window_lengths is None else span & Span.lengths(window_lengths)


_WINDOW = ("window_kv", "window start", "window stop")
_SELECTED = ("compressed_kv", "indices", "topk_length")
_COMPRESSED = ("compressed_kv", "compressed start", "compressed stop")
