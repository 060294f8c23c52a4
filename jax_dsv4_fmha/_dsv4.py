"""A DeepSeek-V4 attention layer: sliding window, compressed cache and sink under one softmax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import _backward, _check, _ffi, reference
from ._fmha import fmha
from ._span import Span
from ._sparse import sparse_fmha
from ._transforms import RESULTS, SINK, Axes, Differentiable, Op, choose


def dsv4_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed_kv: jax.Array | None = None,
    *,
    sink: jax.Array | None = None,
    indices: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    ratio: int | None = None,
    window: int = 128,
    q_offset: int | jax.Array = 0,
    kv_offset: int | jax.Array = 0,
    swa_lens: jax.Array | None = None,
    scale: float | None = None,
    method: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The attention of one DeepSeek-V4 layer; every cache is one latent head that is both K and V.

    Query i stands at position `p = q_offset + i`, entry j of the window cache at `kv_offset + j`. Query i sees

      - the window entries whose positions are in `(p - window, p]`,
      - and of the compressed cache, whose entry w stands for `ratio` positions: the entries that `indices` names, or
        without indices those with `w < (p + 1) // ratio`.

    An entry that is seen both in the window and compressed counts twice, as in the model.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16; float32 on the reference alone.
      window_kv: `[b, s_w, d]` in q's dtype.
      compressed_kv: `[b, s_c, d]` in q's dtype; None, or s_c = 0, is a layer with a window alone.
      sink: float32 `[h_q]`, as in `fmha`.
      indices: int32 `[b, s_q, topk]` into compressed_kv, for the layers of ratio 4. They are taken as they stand: what
        is not past yet must not be named. Absent entries as in `sparse_fmha`.
      topk_length: int32 `[b, s_q]`, as in `sparse_fmha`.
      ratio: an int >= 1, needed with compressed_kv and without indices; with indices it has no effect.
      window: an int >= 1, the query's own position included.
      q_offset, kv_offset: int, or int32 `[b]`, traced or not.
      swa_lens: int32 `[b]`; window entries from there on are not seen.
      scale: a float > 0, `d**-0.5` if left out.
      method: "two_pass" merges a launch for the window with one for the compressed cache. "fused" is one launch, and
        rounds o once. None is "fused" where it is built for the operands. A window alone is one launch of `fmha`.
      implementation: as in `fmha`, for every launch.

    Returns:
      o like q and lse float32 `[b, s_q, h_q]`, as in `fmha`.

    Raises:
      ValueError, TypeError: operands that are not as said above.
      NotImplementedError: "fused" or "cubin", and no kernel is built for these operands.
    """
    op = "dsv4_attention"
    dims: dict[str, Any] = {}
    q = _check.operand(op, "q", q, "b s_q h_q d", dims, _check.FLOAT)
    window_kv = _check.operand(op, "window_kv", window_kv, "b s_w d", dims, (q.dtype,))
    if getattr(compressed_kv, "shape", None) != (dims["b"], 0, dims["d"]):
        if compressed_kv is not None:
            compressed_kv = _check.operand(op, "compressed_kv", compressed_kv, "b s_c d", dims, (q.dtype,))
        _check.visible_of(op, "compressed_kv", compressed_kv, indices, ratio)
    indices, topk_length = _check.selection(op, indices, topk_length, dims)
    if swa_lens is not None:
        swa_lens = _check.operand(op, "swa_lens", swa_lens, "b", dims, _check.INT)
    _check.implementation(op, implementation)
    _check.one_of(op, "method", method, (None, "two_pass", "fused"))
    sink = _check.sink(op, sink, dims)
    scale = _check.scale(op, scale, dims["d"])
    ratio = None if ratio is None else _check.positive(op, "ratio", ratio)
    positions: dict[str, Any] = {
        "window": _check.positive(op, "window", window),
        "q_offset": _check.offset(op, "q_offset", q_offset, dims),
        "kv_offset": _check.offset(op, "kv_offset", kv_offset, dims),
        "swa_lens": swa_lens,
    }
    selected: dict[str, Any] = {"indices": indices, "topk_length": topk_length, "ratio": ratio}
    if compressed_kv is None or compressed_kv.shape[1] == 0:
        target = "fwd"
    else:
        target = "dsv4_dense_fwd" if indices is None else "dsv4_sparse_fwd"
    built = _ffi.built_for(target, d=dims["d"], dtype=q.dtype.name, shared_kv=True)
    if method == "fused" and implementation == "reference":
        return reference.dsv4_attention(q, window_kv, compressed_kv, sink=sink, scale=scale, **selected, **positions)
    got = f"{q.dtype.name}, d={dims['d']}"
    if method == "fused" and not built:
        wanted = "'two_pass', or operands that a fused kernel is built for"
        raise _check.error(NotImplementedError, op, "method", f"'fused' for {got}", wanted)
    if method == "two_pass" or implementation == "reference" or not built or target == "fwd":
        return reference.two_pass(
            functools.partial(fmha, implementation=implementation),
            functools.partial(sparse_fmha, implementation=implementation),
            q,
            window_kv,
            compressed_kv,
            sink=sink,
            scale=scale,
            **selected,
            **positions,
        )
    assert compressed_kv is not None
    b, s_q = dims["b"], dims["s_q"]
    near = reference.window_span(s_q, **positions).bounds(b, s_q, dims["s_w"], op)
    call: dict[str, Any] = {"sink": sink, "scale": scale, "kernel": choose(op, implementation, built, got)}
    if indices is not None:
        if topk_length is None:
            topk_length = jnp.full((b, s_q), dims["topk"], jnp.int32)
        return _SPARSE(q, window_kv, *near, compressed_kv, indices, topk_length, **call)
    assert ratio is not None
    far = Span.compressed(s_q, ratio, positions["q_offset"]).bounds(b, s_q, dims["s_c"], op)
    return _DENSE(q, window_kv, *near, compressed_kv, *far, **call)


def _sparse_kernel(*operands: Any, scale: float) -> Any:
    return _ffi.dsv4_sparse_fwd(*operands, scale=scale)


def _dense_kernel(*operands: Any, scale: float) -> Any:
    return _ffi.dsv4_dense_fwd(*operands, scale=scale)


def _sparse_reference(
    q: Any, window_kv: Any, start: Any, stop: Any, kv: Any, indices: Any, length: Any, sink: Any, *, scale: float
) -> Any:
    far = functools.partial(reference.sparse_fmha, kv=kv, indices=indices, topk_length=length)
    return _with_window(q, window_kv, start, stop, far, sink, scale)


def _dense_reference(
    q: Any, window_kv: Any, start: Any, stop: Any, kv: Any, start2: Any, stop2: Any, sink: Any, *, scale: float
) -> Any:
    far = functools.partial(reference.fmha, k=kv[:, :, None], span=Span(start2, stop2))
    return _with_window(q, window_kv, start, stop, far, sink, scale)


def _with_window(q: Any, window_kv: Any, start: Any, stop: Any, far: Any, sink: Any, scale: float) -> Any:
    """One softmax over the window and what `far` attends to, rounded once."""
    q32 = q.astype(jnp.float32)
    near = reference.fmha(q32, window_kv[:, :, None], span=Span(start, stop), scale=scale)
    o, lse = reference.merge([near, far(q32, scale=scale)], sink)
    return o.astype(q.dtype), lse


_WINDOW = (
    Axes("q", "b s_q h_q d"),
    Axes("window_kv", "b s_w d"),
    Axes("window start", "b s_q"),
    Axes("window stop", "b s_q"),
    Axes("compressed_kv", "b s_c d"),
)
_INDICES = (Axes("indices", "b s_q topk"), Axes("topk_length", "b s_q"))
_SPAN = (Axes("compressed start", "b s_q"), Axes("compressed stop", "b s_q"))
_SPARSE = Differentiable.of(
    Op("dsv4_attention", (*_WINDOW, *_INDICES, SINK), RESULTS, _sparse_reference, _sparse_kernel),
    _backward.dsv4_sparse,
)
_DENSE = Differentiable.of(
    Op("dsv4_attention", (*_WINDOW, *_SPAN, SINK), RESULTS, _dense_reference, _dense_kernel),
    _backward.dsv4_dense,
)
