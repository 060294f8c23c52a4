"""Sources of keys: one or two, which queries attend to under one softmax.

A source says which keys every query sees. Its kind determines the axes of its operands, its meaning and its gradient;
a tuple of kinds determines which kernel runs (`tables.py`). `attend.py` is all attention over them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from .. import reference
from .._definitions import attention_gradient
from .._definitions.packed import LAYOUTS, V4_FP8, dequantize_cache
from .._definitions.span import Span
from .op import ONE_OR_B, Arrays, Axes, Halo

ROWS = "b s_q"

BOX, LARGEST_BOX = 8, 64
"""keys that a kernel loads at a time, from a page; pages have whole ones of at least these"""
BOXES, BOX_OF_WINDOW = 32, {64: 16, 128: 16}
"""so many places a kernel finds together; of windows, by d, the largest box"""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "start", "stop"),
    meta_fields=("names", "axis", "width", "reach", "from_first", "d_v"),
)
@dataclasses.dataclass(frozen=True)
class SpanSource:
    """One interval of keys for every query.

    Attributes:
      keys: `[b, s, h_kv, d]`, or `[b, s, d]` for a single head, the form that a source beside another has.
      start, stop: int32 `[b, s_q]` within `[0, s]`: query i sees the keys `start <= j < stop`.
      values: like keys; None where V is K.
      names: the caller's names of keys, values if any, start and stop.
      axis: the caller's name of s.
      width: the most keys that a query sees, as far as they are known while tracing.
      reach: where keys stand in the places of queries, and none is seen by queries before it: how far the first key
        that a query sees may be from it.
      from_first: whether it is known while tracing that what a query sees begins with the first key.
      d_v: where V is the first numbers of K, how many; None where it is all of them, or an array of its own.
    """

    keys: jax.Array
    start: jax.Array
    stop: jax.Array
    values: jax.Array | None = None
    names: tuple[str, ...] = ("keys", "start", "stop")
    axis: str = "s_kv"
    width: int | None = None
    reach: int | None = None
    from_first: bool = False
    d_v: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return (_of_d_v("span", self.d_v) if self.values is None else "separate_kv",)

    def parts(self) -> "Sequence[Part]":
        return [self]

    parts_of_kernel = parts

    @property
    def launched(self) -> tuple[str, ...]:
        return ()

    @property
    def description(self) -> tuple[str, ...]:
        """The words by which an error describes the source, besides dtype and d."""
        if self.d_v is not None:
            return (f"d_v={self.d_v}",)
        return () if self.keys.ndim == 3 else ("V=K" if self.values is None else "separate K and V",)

    @property
    def halo(self) -> Halo | None:
        return None if self.reach is None else Halo(self.axis, self.reach, self.names[-2:])

    @property
    def axes(self) -> tuple[Axes, ...]:
        keys = f"b {self.axis} d" if self.keys.ndim == 3 else f"b {self.axis} h_kv d"
        held = (keys,) if self.values is None else (keys, keys)
        return tuple(map(Axes, self.names, (*held, ROWS, ROWS)))

    def reference(
        self, q: jax.Array, sink: jax.Array | None, scale: float, products: str | None = None
    ) -> reference.Attention:
        keys = self.keys[:, :, None] if self.keys.ndim == 3 else self.keys
        span = Span(self.start, self.stop)
        how: dict[str, Any] = {"d_v": self.d_v, "sink": sink, "scale": scale, "products": products}
        o, lse = reference.fmha(q, keys, self.values, span=span, **how)
        return o, lse

    def gradient(self, q: jax.Array, *rows: jax.Array, scale: float) -> Arrays:
        """float32 (dq, dkeys), or (dq, dkeys, dvalues); rows: do, lse, sink_factor, delta (`attention_op.gradient`)."""
        keys = self.keys[:, :, None] if self.keys.ndim == 3 else self.keys
        dq, *of_keys = attention_gradient.fmha(q, keys, self.values, self.start, self.stop, *rows, scale=scale)
        return dq, *(x[:, :, 0] if self.keys.ndim == 3 else x for x in of_keys)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "indices", "length"),
    meta_fields=("names", "axis", "layout", "is_counted", "d_v", "lists_all"),
)
@dataclasses.dataclass(frozen=True)
class SelectionSource:
    """The keys that a row of indices names, for every query. Each key is both K and V, and counts as often as it is
    named.

    Attributes:
      keys: `[b, s, d]`; with b = 1 a pool that all batch entries share. Or packed: uint8 `[b, pages, page_bytes]`,
        where index i means entry i % n of page i // n, and n entries make a page.
      indices: int32 `[b, s_q, n]`; an index outside of `[0, s)` is absent.
      length: int32 `[b, s_q]`, any value: indices from there on are absent too. Both are None until `seen` gives them.
      names: the caller's names of keys, indices and length.
      axis: the caller's name of s.
      layout: the layout of packed keys.
      is_counted: whether indices count through the keys of all batch entries, as those of `flat` do.
      d_v: as in `SpanSource`.
      lists_all: whether the caller named no keys, and each row has all slots of a cache.
    """

    keys: jax.Array
    indices: Any
    length: Any
    names: tuple[str, ...] = ("keys", "indices", "length")
    axis: str = "s_kv"
    layout: str = V4_FP8
    is_counted: bool = False
    d_v: int | None = None
    lists_all: bool = False

    @property
    def is_packed(self) -> bool:
        return bool(self.keys.dtype == jnp.uint8)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The layout of packed keys, or that they are none."""
        return (_of_d_v(self.layout if self.is_packed else "selection", self.d_v),)

    def parts(self) -> "Sequence[SelectionSource]":
        return [self]

    parts_of_kernel = parts

    @property
    def launched(self) -> tuple[str, ...]:
        return ()

    @property
    def description(self) -> tuple[str, ...]:
        words = {
            f"d_v={self.d_v}": self.d_v is not None,
            f"{self.layout} caches": self.is_packed,
            "all slots of a cache as indices": self.lists_all,
        }
        return tuple(text for text, holds in words.items() if holds)

    @property
    def axes(self) -> tuple[Axes, ...]:
        width = f"{self.axis}_bytes" if self.is_packed else "d"
        return tuple(map(Axes, self.names, (f"{ONE_OR_B} {self.axis} {width}", f"b s_q {self.axis}_named", ROWS)))

    def reference(
        self, q: jax.Array, sink: jax.Array | None, scale: float, products: str | None = None
    ) -> reference.Attention:
        keys = self.keys
        if self.is_packed:
            keys = dequantize_cache(keys, self.layout)
            keys = keys.reshape(keys.shape[0], -1, keys.shape[-1])
        keys = keys[0] if keys.shape[0] == 1 and q.shape[0] != 1 else keys
        places = jnp.arange(self.indices.shape[2], dtype=jnp.int32)[None, None]
        indices = jnp.where(places < self.length[..., None], self.indices, -1)
        how: dict[str, Any] = {"d_v": self.d_v, "sink": sink, "scale": scale, "products": products}
        o, lse = reference.sparse_fmha(q, keys, indices, **how)
        return o, lse

    def gradient(self, q: jax.Array, *rows: jax.Array, scale: float) -> Arrays:
        """float32 (dq, dkeys), as in `SpanSource`."""
        return attention_gradient.sparse_fmha(q, self.keys, self.indices, self.length, *rows, scale=scale)

    def seen(self, indices: jax.Array, length: jax.Array) -> "SelectionSource":
        """The same keys, with what each query sees of them."""
        return dataclasses.replace(self, indices=indices, length=length)

    def flat(self) -> "SelectionSource":
        """All keys as one pool, `[s, d]` or `[pages, page_bytes]`, as cache kernels take them."""
        entries = self.keys.shape[1]
        if self.is_packed:
            entries *= LAYOUTS[self.layout].page_entries(self.keys.shape[2])
        indices = self.indices
        if self.keys.shape[0] != 1 and not self.is_counted:
            first = jnp.arange(self.keys.shape[0], dtype=jnp.int32)[:, None, None] * entries
            indices = jnp.where(indices < 0, indices, first + indices)
        return dataclasses.replace(self, keys=self.keys.reshape(-1, self.keys.shape[2]), indices=indices)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "start", "stop", "key_pages", "value_pages", "scales"),
    meta_fields=("names", "width", "window"),
)
@dataclasses.dataclass(frozen=True)
class PagedSource:
    """One interval of keys for every query, which has a page for each of them.

    Attributes:
      keys, values: `[b, pages, page, h_kv, d]`; with b = 1 pools that all batch entries share.
      start, stop: int32 `[b, s_q]` within `[0, width * page]`: query i sees the keys `start <= j < stop`.
      key_pages, value_pages: int32 `[b, width]`: key j is in page `key_pages[j // page]`. A number outside of the pool
        stands for a page that no query sees.
      scales: of codes of e4m3, float32 `[b or 1, h_kv, 2]`: by what those of keys and those of values are multiplied.
        None where keys have q's dtype.
      names: the caller's names of keys and values.
      width: the most keys that the queries of a batch entry see, as far as they are known while tracing.
      window: that of a step of one query: then `stop` is how many tokens a sequence has, and `start` how many up to the
        query's own. It sees the last `window` of these, as far as they have room; but nothing from a page on that is
        not there, and nothing if the sequence has no such token.
    """

    keys: jax.Array
    values: jax.Array
    start: jax.Array
    stop: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array
    scales: jax.Array | None = None
    names: tuple[str, str] = ("k_cache", "v_cache")
    width: int | None = None
    window: int | None = None
    d_v: ClassVar[None] = None

    @property
    def kinds(self) -> tuple[str, ...]:
        page, form = self.keys.shape[-3], "" if self.scales is None else "_e4m3"
        form += "" if self.window is None else "_window"
        return (f"paged_kv{form}" if isinstance(page, int) and page % BOX == 0 else f"paged_kv{form}_in_any_pages",)

    @property
    def description(self) -> tuple[str, ...]:
        codes = "" if self.scales is None else " in e4m3"
        return (f"separate K and V{codes} in pages of {self.keys.shape[-3]}",)

    @property
    def launched(self) -> tuple[str, ...]:
        return ()

    @property
    def axes(self) -> tuple[Axes, ...]:
        k, v = self.names
        pool = f"{ONE_OR_B} pages page h_kv d"
        tables = (Axes(f"{x}.block_table", "b width") for x in self.names)
        scales = [] if self.scales is None else [Axes("k_scale or v_scale", f"{ONE_OR_B} h_kv k_and_v")]
        return Axes(k, pool), Axes(v, pool), Axes("start", ROWS), Axes("stop", ROWS), *tables, *scales

    def parts(self) -> "Sequence[PagedSource]":
        return [self]

    parts_of_kernel = parts

    def flat(self) -> "PagedSource":
        """All pages as one pool, `[pages, page, h_kv, d]`, and scales for each batch entry."""
        pools, pages = (self.keys, self.values), self.keys.shape[1]
        b = next((x.shape[0] for x in pools if x.shape[0] != 1), 1)  # jax.vmap may have mapped one of them
        keys, values = (jnp.broadcast_to(x, (b, *x.shape[1:])).reshape(-1, *x.shape[2:]) for x in pools)
        first = jnp.arange(b, dtype=jnp.int32)[:, None] * pages

        def counted(table: jax.Array) -> jax.Array:
            return table if b == 1 else jnp.where((table >= 0) & (table < pages), first + table, -1)

        of_keys, of_values = counted(self.key_pages), counted(self.value_pages)
        scales = self.scales
        if scales is not None:
            scales = jnp.broadcast_to(scales, (self.start.shape[0], *scales.shape[1:]))
        made: dict[str, Any] = {"keys": keys, "values": values, "key_pages": of_keys, "value_pages": of_values}
        return dataclasses.replace(self, scales=scales, **made)

    def opened(self) -> "PagedSource":
        """The same keys without a window: with the bounds that it has."""
        if self.window is None:
            return self
        end, length, room = self.start, self.stop, self.key_pages.shape[1] * self.keys.shape[-3]
        stop = jnp.where((end > 0) & (end <= length), jnp.minimum(end, room), 0)
        start = jnp.minimum(jnp.maximum(end - self.window, 0), stop)
        return dataclasses.replace(self, start=start, stop=stop, window=None).until_a_page_is_missing()

    def until_a_page_is_missing(self) -> "PagedSource":
        """The same keys up to the first page that is not there."""
        page, pages = self.keys.shape[-3], self.keys.shape[-4]
        tables = self.key_pages, self.value_pages
        held = [(x >= 0) & (x < pages) for x in tables]
        begins = jnp.arange(tables[0].shape[1], dtype=jnp.int32) * page
        ends_it = ~(held[0] & held[1])[:, None] & (begins + page > self.start[..., None])
        # the least of all in one pass, in which XLA makes start too
        start, stop = jnp.broadcast_arrays(self.start[..., None], self.stop[..., None], ends_it)[:2]
        start, stop = _least(start, jnp.where(ends_it, jnp.clip(begins, start, stop), stop))
        return dataclasses.replace(self, start=start, stop=stop)

    def reference(
        self, q: jax.Array, sink: jax.Array | None, scale: float, products: str | None = None
    ) -> reference.Attention:
        x = self.opened().flat()

        def read(pool: jax.Array, pages: jax.Array, which: int) -> jax.Array:
            there = (pages >= 0) & (pages < pool.shape[0])
            held = pool.at[jnp.where(there, pages, pool.shape[0])].get(mode="fill", fill_value=0)
            held = held.reshape(held.shape[0], -1, *held.shape[3:])
            return held if x.scales is None else held.astype(jnp.float32) * x.scales[:, None, :, which, None]

        k, v = read(x.keys, x.key_pages, 0), read(x.values, x.value_pages, 1)
        o, lse = reference.fmha(q, k, v, span=Span(x.start, x.stop), sink=sink, scale=scale, products=products)
        return o, lse


def _least(*xs: jax.Array) -> Sequence[jax.Array]:
    """The least of each array's last axis, all by one kernel."""
    least = lambda x, y: tuple(map(jnp.minimum, x, y))  # noqa: E731
    most = (jnp.int32(2**31 - 1),) * len(xs)
    made: Sequence[jax.Array] = jax.lax.reduce(xs, most, least, (xs[0].ndim - 1,))
    return made


def in_reach(window: int | None, s_q: Any, page: Any, d: int) -> bool:
    """True if a kernel finds itself what a step with this window sees, from pages of so many tokens."""
    if window is None or not isinstance(page, int) or not isinstance(s_q, int) or s_q != 1:
        return False
    return page % BOX == 0 and window <= (BOXES - 1) * min(page & -page, BOX_OF_WINDOW.get(d, LARGEST_BOX)) + 1


Part = SpanSource | SelectionSource | PagedSource


def _of_d_v(kind: str, d_v: int | None) -> str:
    """The kind of a source whose V is so much of K: kernels are made for one width of V."""
    return kind if d_v is None else f"{kind}_v{d_v}"


class Source(Protocol):
    """An operand of `attend`: a part, or what makes parts of its arrays where attention runs."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its parts, of which a key of `tables.FORWARD` is made"""

    @property
    def description(self) -> tuple[str, ...]: ...

    @property
    def d_v(self) -> int | None: ...

    @property
    def axes(self) -> tuple[Axes, ...]:
        """The axes of its arrays, in the order of its leaves"""

    def parts(self) -> Sequence[Part]:
        """The parts as the definition takes them"""

    def parts_of_kernel(self) -> Sequence[Part]:
        """The parts as the row of `tables.FORWARD` takes them"""

    @property
    def launched(self) -> tuple[str, ...]:
        """The kernels that `parts_of_kernel` launches, by their names in the manifest"""
