"""The mask: one interval of keys for every query row."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check
from .pytree import public_pytree

_STATIC = {"static": True}


@public_pytree
@dataclasses.dataclass(frozen=True)
class Span:
    """A mask: query i of batch entry n sees the keys `start[n, i] <= j < stop[n, i]`, one interval.

    start and stop are ints, or int32 arrays (NumPy's too) that broadcast to `[b, s_q]`. An op clips them to
    `[0, s_kv]`. A query with `start >= stop` sees nothing. `a & b` shows the keys that both show.

    In the constructors, `offset` is an int or int32 `[b]`, traced or not: query i has position `i + offset`, and the
    first key has position 0. Positions above 2**31 - 2 count as 2**31 - 2.

    Examples:
      >>> from jax_dsv4_fmha import Span
      >>> span = Span.causal(4) & Span.sliding_window(4, window=2)
      >>> span.start.tolist(), span.stop.tolist()
      ([[0, 0, 1, 2]], [[1, 2, 3, 4]])
    """

    start: Any
    stop: Any
    rules: frozenset[str] = dataclasses.field(default=frozenset(), metadata=_STATIC)
    """which constructors made it, of `segments`, `compressed` and `compressed_segments`: `&` refuses to combine the
    first two, and by the last one blocks of an indexer begin with the first key that a query sees"""
    width: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """the most keys that a query sees, as far as they are known while tracing; kernels of gradients are chosen by it"""
    from_first: bool = dataclasses.field(default=False, metadata=_STATIC)
    """whether its constructor says that queries see keys from the first one on; `is_from_first` looks at `start` too"""
    reach: int | None = dataclasses.field(default=None, metadata=_STATIC)
    """how far before key i query i sees at most, where it sees none after it: devices that share a sequence then send
    each other so many keys; None where that is not known while tracing"""

    @property
    def is_from_first(self) -> bool:
        """True if it is known while tracing that what a query sees begins with the first key."""
        known = isinstance(self.start, int | np.ndarray | np.generic)
        return self.from_first or (known and bool(np.all(np.asarray(self.start) <= 0)))

    @classmethod
    def causal(cls, s_q: int, offset: Any = 0) -> "Span":
        """Keys up to and with the query's own position."""
        p = _positions("Span.causal", s_q, offset)
        return cls(_front(), p + 1, from_first=True)

    @classmethod
    def sliding_window(cls, s_q: int, window: int, offset: Any = 0) -> "Span":
        """The last `window` keys, the query's own position included."""
        window = _check.positive("Span.sliding_window", "window", window)
        p = _positions("Span.sliding_window", s_q, offset)
        start = _numpy_of(p).maximum(p, window - 1) - (window - 1)  # written so that nothing wraps around
        is_at_keys = isinstance(offset, int | np.integer) and offset == 0
        return cls(start, p + 1, width=window, reach=window - 1 if is_at_keys else None)

    @classmethod
    def compressed(cls, s_q: int, ratio: int, offset: Any = 0) -> "Span":
        """Entries of a cache with one entry for `ratio` positions: those whose positions are all past.

        For packed sequences see `compressed_segments`.
        """
        ratio = _check.positive("Span.compressed", "ratio", ratio)
        p = _positions("Span.compressed", s_q, offset)
        return cls(_front(), (p + 1) // ratio, frozenset({"compressed"}), from_first=True)

    @classmethod
    def lengths(cls, lengths: Any) -> "Span":
        """The first `lengths[n]` keys of batch entry n; int32 `[b]`."""
        stop = _check.operand("Span.lengths", "lengths", lengths, "b", {}, _check.INT)[:, None]
        return cls(_front(), stop, from_first=True)

    @classmethod
    def segments(cls, q_ids: Any, kv_ids: Any = None) -> "Span":
        """Packed sequences: a query sees the keys with its segment id.

        q_ids int32 `[b, s_q]`; kv_ids int32 `[b, s_kv]`, the same array if left out. The keys of a segment stand side
        by side; the segments may come in any order. A query whose id no key has sees nothing. Nor does one whose keys
        stand in several places, which is a ValueError where kv_ids is known while tracing. Packed causal self-attention
        is `Span.segments(ids) & Span.causal(s)`; from cumulative lengths, `ids = searchsorted(cu_seqlens, arange(s),
        "right")`.
        """
        dims: dict[str, Any] = {}
        q_ids = _check.operand("Span.segments", "q_ids", q_ids, "b s_q", dims, _check.INT)
        kv_ids = q_ids if kv_ids is None else kv_ids
        kv_ids = _check.operand("Span.segments", "kv_ids", kv_ids, "b s_kv", dims, _check.INT)
        _side_by_side(kv_ids)
        order = jnp.argsort(kv_ids, axis=1, stable=True).astype(jnp.int32)
        ids = jnp.take_along_axis(kv_ids, order, 1)
        first, end = (_search(ids, q_ids, side) for side in ("left", "right"))
        start, last = (jnp.take_along_axis(order, jnp.maximum(i, 0), 1, mode="clip") for i in (first, end - 1))
        stop = jnp.where((first < end) & (last - start < end - first), last + 1, 0)
        return cls(start, stop, frozenset({"segments"}))

    @classmethod
    def compressed_segments(cls, ids: Any, ratio: int) -> "Span":
        """Entries of packed sequences, one for `ratio` tokens: a query sees the past entries of its own sequence.

        ids int32 `[b, s]`, of the tokens. Each run of equal ids is a sequence, whose blocks begin with its first token.
        A sequence of n tokens has `n // ratio` entries, and the entries stand one sequence after the other.
        `Span.compressed` counts from the row's first token, which is wrong for a sequence that begins elsewhere than at
        a multiple of ratio, so combining it with `Span.segments` is an error.
        """
        op = "Span.compressed_segments"
        ids = _check.operand(op, "ids", ids, "b s", {}, _check.INT)
        ratio = _check.positive(op, "ratio", ratio)
        past = (positions_of(ids) + 1) // ratio
        stop = jnp.cumsum((positions_of(ids) + 1) % ratio == 0, axis=1, dtype=jnp.int32)
        return cls(stop - past, stop, frozenset({"compressed_segments"}))

    def keys_from(self, first: Any) -> "Span":
        """This span for keys of which the first has position `first`, an int or int32 `[b]`, and not position 0.

        For a chunk of a prompt whose keys begin with the `window - 1` tokens before it, that is
        `Span.sliding_window(s_q, window, offset).keys_from(offset - (window - 1))`: keys at positions below 0 are not
        seen.
        """
        traced = _check.offset("Span.keys_from", "first", first, {})
        return _of_keys_from(first if isinstance(first, int | np.integer) else traced, self)

    def __and__(self, other: "Span") -> "Span":
        if not isinstance(other, Span):
            return NotImplemented
        rules = self.rules | other.rules
        if {"segments", "compressed"} <= rules:
            got = "Span.segments and Span.compressed, which counts from the row's first token"
            raise _check.error(
                ValueError, "Span", "&", got, "Span.compressed_segments(ids, ratio) for packed sequences"
            )
        bounds = tuple(map(_in_32_bits, (self.start, self.stop, other.start, other.stop)))
        try:
            jnp.broadcast_shapes(*map(jnp.shape, bounds))
        except ValueError as e:
            raise _check.error(ValueError, "Span", "&", f"{self} and {other}", "shapes that broadcast") from e
        width, reach = (
            min((n for n in both if n is not None), default=None)
            for both in ((self.width, other.width), (self.reach, other.reach))
        )
        xp = _numpy_of(*bounds)
        from_first = self.is_from_first and other.is_from_first
        return Span(xp.maximum(bounds[0], bounds[2]), xp.minimum(bounds[1], bounds[3]), rules, width, from_first, reach)

    def __str__(self) -> str:
        return f"Span({_check.describe(self.start)}, {_check.describe(self.stop)})"

    def bounds(self, b: Any, s_q: Any, s_kv: Any, op: str = "Span", name: str = "span") -> tuple[jax.Array, jax.Array]:
        """start and stop, each int32 `[b, s_q]` within `[0, s_kv]`. `op` and `name` are for errors: the caller's
        name, and its name of this.
        """
        start = _bound(op, f"{name}.start", self.start, b, s_q, s_kv)
        return start, _bound(op, f"{name}.stop", self.stop, b, s_q, s_kv)


def _of_keys_from(first: Any, span: Span) -> Span:
    """`Span.keys_from`.

    No bound is negated, because ptxas may lose the minus in a maximum of three bounds (docs/verification.md).
    """
    first = (np if isinstance(first, int | np.integer) else jnp).asarray(first, np.int32).reshape(-1, 1)

    def at(position: Any) -> Any:
        xp = _numpy_of(position, first)
        position = xp.maximum(position, 0)
        return position - xp.maximum(first, position - (2**31 - 1))  # written so that nothing wraps around

    return dataclasses.replace(span, start=at(span.start), stop=at(span.stop), from_first=False, reach=None)


def positions_of(ids: jax.Array) -> jax.Array:
    """int32 `[b, s]`: how far each token is from the first of its run of equal ids."""
    i = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return i - jax.lax.cummax(jnp.where(begins, i, 0), axis=1)


def _bound(op: str, name: str, x: Any, b: Any, s_q: Any, s_kv: Any) -> jax.Array:
    wanted = f"int32 that broadcasts to [b={b}, s_q={s_q}]"
    x = _in_32_bits(x)
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise _check.error(TypeError, op, name, x, wanted)
    shape = x.shape
    fits = len(shape) <= 2 and all(n == 1 or n == m for n, m in zip(shape[::-1], (s_q, b), strict=False))
    if x.dtype not in _check.INT or not fits:
        raise _check.error(ValueError, op, name, x, wanted)
    if isinstance(x, jax.Array) or _is_traced() or not all(isinstance(n, int) for n in (b, s_q, s_kv)):
        return jnp.broadcast_to(jnp.clip(jnp.asarray(x), 0, s_kv), (b, s_q))
    return jax.device_put(np.broadcast_to(np.clip(x, 0, s_kv), (b, s_q)))


def _front() -> Any:
    """A start at the first key; unlike an array that may be sharded, it needs no mesh to be set outside of jit."""
    return jnp.zeros((1, 1), jnp.int32) if _is_traced() else np.zeros((1, 1), np.int32)


def _in_32_bits(x: Any) -> Any:
    """An int bound as int32; any other bound unchanged."""
    if isinstance(x, int) and not isinstance(x, bool):
        return np.int32(min(max(x, -(2**31)), 2**31 - 1))
    return _check.narrow(x)


def _positions(op: str, s_q: Any, offset: Any) -> Any:
    """int32 [1, s_q] or [b, s_q], at most 2**31 - 2. Outside of a trace NumPy makes what is known, because JAX would
    compile each operation for each s_q.
    """
    s_q = _check.positive(op, "s_q", s_q)
    first = _check.offset(op, "offset", offset, {})
    if isinstance(s_q, int) and isinstance(offset, int | np.integer) and not _is_traced():
        return np.minimum(np.arange(s_q, dtype=np.int64) + int(offset), 2**31 - 2).astype(np.int32)[None]
    i = jnp.arange(s_q, dtype=jnp.int32)[None]
    return i + jnp.minimum(first[:, None], 2**31 - 2 - i)


def _is_traced() -> bool:
    """True while a program is being traced, which should have an iota and not its numbers."""
    return isinstance(jnp.zeros((), jnp.int32), jax.core.Tracer)


def _numpy_of(*x: Any) -> Any:
    """NumPy where all are its arrays, otherwise JAX's."""
    return np if all(isinstance(a, np.ndarray | np.generic) for a in x) else jnp


@functools.partial(jax.jit, static_argnames="side", inline=True)
def _search(ids: jax.Array, x: jax.Array, side: str) -> jax.Array:
    """`jnp.searchsorted`, row by row, for any number of ids that int32 counts, known while tracing or not.

    A step finds five bits of the result, in one or two launches on a GPU.
    """
    count, known = jnp.zeros_like(x), isinstance(ids.shape[1], int)
    for shift in range(30, -1, -5):
        if known and ids.shape[1] >> shift == 0:
            continue
        more = count[..., None] + (jnp.arange(1, 32 if shift < 30 else 2, dtype=jnp.int32)[None, None] << shift)
        at = jax.vmap(lambda row, i: jnp.take(row, i - 1, mode="clip"))(ids, more)
        passed = (more <= ids.shape[1]) & ((at < x[..., None]) if side == "left" else (at <= x[..., None]))
        count = count + (passed.sum(-1, dtype=jnp.int32) << shift)
    return count


def _side_by_side(ids: jax.Array) -> None:
    """Raises where ids are known and equal ids of a row are not neighbours."""
    if isinstance(ids, jax.core.Tracer) or not ids.is_fully_addressable:
        return
    for i, row in enumerate(np.asarray(ids)):
        runs, counts = np.unique(row[np.r_[True, row[1:] != row[:-1]]], return_counts=True)
        if (counts > 1).any():
            got = f"{runs[counts > 1][0]} in several places of row {i}"
            raise _check.error(ValueError, "Span.segments", "kv_ids", got, "the keys of a segment side by side")
