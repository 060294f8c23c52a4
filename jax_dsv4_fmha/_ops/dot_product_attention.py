"""`jax.nn.dot_product_attention`, over this library's `fmha`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check, reference
from .._definitions.span import Span
from .._dispatch.attend import attend
from .._dispatch.modes import canonical_order
from .._dispatch.sources import SpanSource

_OP = "dot_product_attention"
_MOST = 2**31 - 2  # the greatest number of keys on either side


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    sinks: jax.Array | None = None,
    implementation: _check.Implementation | None = None,
    return_residual: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Takes the arguments of `jax.nn.dot_product_attention`, and sinks.

    It differs where a query sees no key: this gives 0, `jax.nn` the mean of all values. Its residual is float32,
    differentiable, and -inf for such a query.

    In shapes, B is the batch, T queries, S keys, N query heads, K key heads and H head_dim.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`, bfloat16 or float16; float32 only on the reference.
      key: `[B, S, K, H]` or `[S, K, H]`; N is a multiple of K.
      value: like key. Where V is K, pass the very same array as key and value: kernels of head_dim 512 then read
        it once, and its gradient has one.
      bias: must be None.
      mask: bool, 4-D, broadcasts to `[B, N, T, S]`, the same for every head. A mask that hides keys from all queries
        alike (`[B or 1, 1, 1, S]`, as for padding) may hide any keys. Any other mask must show each query one
        interval of keys, or none. If it does not, a mask that is known while tracing is an error; of a traced mask,
        the queries to which it shows something else get NaN.
      scale: a float > 0, `H**-0.5` if left out.
      is_causal: query i sees the keys up to i, whatever T and S are.
      query_seq_lengths, key_value_seq_lengths: int32 `[B]`.
      local_window_size: (left, right), or an int for both: query i sees the keys in `[i - left, i + right]`.
      sinks: float32 `[N]`, as in `fmha`.
      implementation: as in `fmha`.
      return_residual: also return the log-sum-exp, float32 `[B, T, N]` or `[T, N]`, natural log, without sinks.
      deterministic, batch_invariant: as in `fmha`. A mask that is known while tracing counts as it is.

    Returns:
      o like query; with return_residual, also the log-sum-exp.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: a bias; a mask that is not such an interval; "cubin" or batch_invariant, and no such kernel
        is built for these operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import dot_product_attention
      >>> query, key = jnp.ones((1, 6, 4, 64), jnp.bfloat16), jnp.ones((1, 6, 2, 64), jnp.bfloat16)
      >>> dot_product_attention(query, key, key, is_causal=True, sinks=jnp.zeros(4)).shape
      (1, 6, 4, 64)
    """
    dims: dict[str, Any] = {}
    batched = getattr(query, "ndim", 4) != 3
    batch = "b " if batched else ""
    query = _check.operand(_OP, "query", query, f"{batch}t n h", dims, _check.FLOAT)
    is_shared = value is key
    key = _check.operand(_OP, "key", key, f"{batch}s k h", dims, (query.dtype,))
    value = _check.operand(_OP, "value", value, f"{batch}s k h", dims, (query.dtype,))
    _check.heads(_OP, dims["n"], dims["k"], dims["t"], dims["s"], ("query", "key"))
    if bias is not None:
        raise _check.error(NotImplementedError, _OP, "bias", bias, "None")
    _check.flags(_OP, is_causal=is_causal, return_residual=return_residual, deterministic=deterministic)
    if sinks is not None:
        sinks = _check.operand(_OP, "sinks", sinks, "n", dims, _check.FP32)
    dims.setdefault("b", 1)
    b, t, s = dims["b"], dims["t"], dims["s"]

    span = Span(0, jnp.int32(s))
    if is_causal:
        span &= Span.causal(t)
    if local_window_size is not None:
        left, right = _window(local_window_size)
        i = jnp.arange(t, dtype=jnp.int32)[None]
        last = jnp.minimum(i, _MOST - right) + right  # written so that nothing wraps around
        span &= Span(i - left, last + 1, width=left + 1 + (0 if is_causal else right))
    if query_seq_lengths is not None:
        lengths = _check.operand(_OP, "query_seq_lengths", query_seq_lengths, "b", dims, _check.INT)
        span &= Span(0, jnp.where(jnp.arange(t, dtype=jnp.int32)[None] < lengths[:, None], jnp.int32(s), 0))
    if key_value_seq_lengths is not None:
        lengths = _check.operand(_OP, "key_value_seq_lengths", key_value_seq_lengths, "b", dims, _check.INT)
        span &= Span.lengths(lengths)
    shown = broken = None
    if mask is not None:
        of_mask, shown, broken = _mask(mask, b, dims["n"], t, s)
        span &= of_mask

    _check.implementation(_OP, implementation)
    _check.batch_invariant(_OP, batch_invariant, implementation)
    scale = _check.scale(_OP, scale, dims["h"])
    start, stop = span.bounds(b, t, s, _OP)
    q, k, v = (x if batched else x[None] for x in (query, key, value))
    values = None if is_shared else v
    if shown is not None:
        k, values, start, stop = _shown_first(shown, k, values, start, stop)
    if implementation == "reference":
        o, lse = reference.fmha(q, k, values, span=Span(start, stop), sink=sinks, scale=scale)
    else:
        names = ("key", "mask start", "mask stop") if values is None else ("key", "value", "mask start", "mask stop")
        source = SpanSource(k, start, stop, values, names, width=span.width, from_first=span.is_from_first)
        o, lse = attend(
            _OP, q, [source], sink=sinks, scale=scale, implementation=implementation, deterministic=deterministic,
            modes=canonical_order.wanted(batch_invariant), names=("query", "sinks"),
        )  # fmt: skip
    if broken is not None:
        o, lse = jnp.where(broken[..., None, None], jnp.nan, o), jnp.where(broken[..., None], jnp.nan, lse)
    o, lse = (x if batched else x[0] for x in (o, lse))
    return (o, lse) if return_residual else o


def _window(size: Any) -> tuple[int, int]:
    sides = size if isinstance(size, tuple | list) else (size, size)
    wanted = "an int >= 0 or two of them, known while tracing"
    if len(sides) != 2 or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in sides):
        raise _check.error(TypeError, _OP, "local_window_size", size, wanted)
    if min(sides) < 0:
        raise _check.error(ValueError, _OP, "local_window_size", size, wanted)
    return min(int(sides[0]), _MOST), min(int(sides[1]), _MOST)


def _mask(mask: Any, b: Any, n: Any, t: int, s: int) -> tuple[Span, jax.Array | None, jax.Array | None]:
    """A mask as a Span; bool `[b or 1, s]` in its place if the mask hides keys from all queries alike; and bool
    `[b or 1, t]`, of which queries a traced mask is no Span.
    """
    everything = Span(0, jnp.int32(s))
    wanted = f"a 4-D bool array that broadcasts to [b={b}, n={n}, t={t}, s={s}]"
    if not isinstance(mask, jax.Array | np.ndarray):
        raise _check.error(TypeError, _OP, "mask", mask, wanted)
    fits = mask.ndim == 4 and all(x == 1 or x == y for x, y in zip(mask.shape, (b, n, t, s), strict=True))
    if mask.dtype != bool or not fits:
        raise _check.error(ValueError, _OP, "mask", mask, wanted)
    if mask.shape[1] != 1:
        raise _check.error(NotImplementedError, _OP, "mask", mask, "one mask for all heads")
    if mask.shape[3] == 1:
        return Span(0, jnp.where(mask[:, 0, :, 0], jnp.int32(s), 0)), None, None
    if isinstance(mask, jax.core.Tracer):
        if mask.shape[2] == 1:
            return everything, mask[:, 0, 0], None
        start, stop, broken = _intervals(jnp, mask[:, 0])
        return Span(start, stop), None, broken
    start, stop, broken = _intervals(np, np.asarray(mask)[:, 0])
    if not broken.any():
        return Span(start, stop), None, None
    if mask.shape[2] == 1:
        return everything, jnp.asarray(mask[:, 0, 0]), None
    raise _check.error(NotImplementedError, _OP, "mask", mask, "one interval of keys for every query")


def _intervals(xp: Any, rows: Any) -> tuple[Any, Any, Any]:
    """The interval `[start, stop)` of the keys that rows `[…, s]` show, and whether they show something else."""
    i, s = xp.arange(rows.shape[-1], dtype=xp.int32), rows.shape[-1]
    count = rows.sum(-1, dtype=xp.int32)
    start, last = xp.where(rows, i, s).min(-1), xp.where(rows, i, -1).max(-1)
    return start, start + count, (count > 0) & (last - start >= count)


def _shown_first(
    shown: jax.Array, k: jax.Array, v: jax.Array | None, start: jax.Array, stop: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Moves the shown keys and values (shown: bool `[b or 1, s]`) to the front, and gives the queries' bounds among
    them.

    Attention does not depend on the order of keys, so an interval of all keys is an interval of the shown keys too.
    """
    order = jnp.argsort(~shown, axis=1, stable=True)[..., None, None]
    k, v = jnp.take_along_axis(k, order, 1), None if v is None else jnp.take_along_axis(v, order, 1)
    before = jnp.pad(jnp.cumsum(shown, 1, dtype=jnp.int32), ((0, 0), (1, 0)))
    start, stop = (jnp.take_along_axis(before, x, 1) for x in (start, stop))
    return k, v, start, stop
