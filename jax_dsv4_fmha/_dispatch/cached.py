"""A source of keys that a cache holds, which is read for each sequence on its own, where attention runs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._definitions.cache import Cache, read_slots
from .op import ONE_OR_B, Axes
from .sources import ROWS, Part, SelectionSource, SpanSource


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("pool", "slots", "seen"),
    meta_fields=("name", "kind", "layout", "may_lack"),
)
@dataclasses.dataclass(frozen=True)
class CachedSource:
    """The entries of a cache in some slots, which a span or a selection then counts.

    Products of e4m3 take them: entries become codes, of each sequence's own, and no other entry of a pool is read.

    Attributes:
      pool: as `Cache.pool` makes it.
      slots: int32 `[b, n]`: where a sequence has its n entries, in its pool; -1 for one that does not exist, or that no
        query may see.
      seen: of a span int32 `[b, s_q]` twice, start and stop, within `[0, n]`; of a selection int32 `[b, s_q, topk]` and
        `[b, s_q]`, indices and length, as in `SelectionSource`.
      name: the caller's name of the cache.
      kind: "span" or "selection".
      layout: the layout of a packed pool.
      may_lack: whether an entry that `seen` counts may have no slot; it is absent then.
    """

    pool: jax.Array
    slots: jax.Array
    seen: tuple[jax.Array, jax.Array]
    name: str
    kind: str
    layout: str
    may_lack: bool
    d_v: ClassVar[None] = None

    @staticmethod
    def of(name: str, cache: Cache, slots: jax.Array, kind: str, *seen: jax.Array) -> "CachedSource":
        first, second = seen
        return CachedSource(
            cache.pool(), slots, (first, second), name, kind, cache.layout, cache.block_table is not None
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def is_packed(self) -> bool:
        return bool(self.pool.dtype == jnp.uint8)

    @property
    def description(self) -> tuple[str, ...]:
        return (f"{self.layout} caches",) if self.is_packed else ()

    @property
    def axes(self) -> tuple[Axes, ...]:
        width = f"{self.name}_bytes" if self.is_packed else "d"
        first = f"b s_q {self.name}_named" if self.kind == "selection" else ROWS
        numbers = ("indices", "length") if self.kind == "selection" else ("start", "stop")
        return (
            Axes(self.name, f"{ONE_OR_B} {self.name}_rows {width}"),
            Axes(f"{self.name} slots", f"b {self.name}_entries"),
            *(Axes(f"{self.name} {x}", axes) for x, axes in zip(numbers, (first, ROWS), strict=True)),
        )

    def located(self) -> tuple[jax.Array, Part]:
        """The slots of keys, and a part without keys, which counts these."""
        slots, (first, second) = self.slots, self.seen
        if self.kind == "selection":
            if self.may_lack:
                n = slots.shape[1]
                there = (first >= 0) & (first < n)
                where = jnp.where(there, first, 0).reshape(first.shape[0], -1)
                found = jnp.take_along_axis(slots, where, 1).reshape(first.shape)
                first = jnp.where(there & (found >= 0), first, -1)
            return slots, SelectionSource(self.pool, first, second)
        if self.may_lack:
            slots, first, second = _together(slots, first, second)
        return slots, SpanSource(self.pool, first, second)

    def parts(self) -> "Sequence[Part]":
        slots, part = self.located()
        return [dataclasses.replace(part, keys=read_slots(self.pool, slots, self.layout))]

    parts_of_kernel = parts

    @property
    def launched(self) -> tuple[str, ...]:
        return ()


def _together(slots: jax.Array, start: jax.Array, stop: jax.Array) -> Any:
    """The slots that exist, one after the other, and spans of these."""
    there = slots >= 0
    before = jnp.cumsum(jnp.pad(there, ((0, 0), (1, 0))), 1, dtype=jnp.int32)
    place = jnp.where(there, before[:, :-1], slots.shape[1])
    moved = jax.vmap(lambda place, slots: jnp.full_like(slots, -1).at[place].set(slots, mode="drop"))(place, slots)
    return moved, *(jnp.take_along_axis(before, x, 1) for x in (start, stop))


def of_chunk(
    s_q: Any,
    window_cache: Cache,
    compressed_cache: Cache | None,
    lengths: jax.Array,
    indices: jax.Array | None,
    ratio: int | None,
    window: int,
    q_offset: jax.Array | None,
    is_causal: bool,
) -> list[CachedSource]:
    """The keys that the queries of `dsv4_decode` see of each cache: of the window a span of the positions that any of
    them sees, of compressed entries those that are past for the last one."""
    lengths = jnp.maximum(lengths, 0)[:, None]
    first = lengths - s_q if q_offset is None else q_offset[:, None]
    position = first + jnp.arange(s_q, dtype=jnp.int32)[None]
    there, end = (position >= 0) & (position < lengths), jnp.clip(first + s_q, 0, lengths)

    def counted(x: jax.Array, n: Any) -> jax.Array:
        return jnp.where(there, jnp.clip(x, 0, n), 0)

    n = window + s_q - is_causal
    oldest = first - window + is_causal
    positions = oldest + jnp.arange(n, dtype=jnp.int32)[None]
    is_alive = (positions >= 0) & (positions < end)
    slots = window_cache.slots(jnp.where(is_alive, positions % window_cache.capacity, -1))
    bounds = (position - window + 1, position + 1) if is_causal else (oldest, jnp.broadcast_to(end, position.shape))
    start, stop = (counted(jnp.maximum(x, 0) - oldest, n) for x in bounds)
    sources = [CachedSource.of("window_cache", window_cache, slots, "span", start, stop)]
    if compressed_cache is None:
        return sources
    room = compressed_cache.capacity
    entries = jnp.arange(room, dtype=jnp.int32)[None]
    past, every = (jnp.int32(2**31 - 1),) * 2 if ratio is None else (end // ratio, (position + 1) // ratio)
    if indices is None:
        assert ratio is not None
        left = jnp.maximum(lengths // ratio - room, 0)  # of a cache that has run over
        slots = compressed_cache.slots(jnp.where(left + entries < past, (left + entries) % room, -1))
        stop = counted(every - left, room)
        return [*sources, CachedSource.of("compressed_cache", compressed_cache, slots, "span", 0 * stop, stop)]
    slots = compressed_cache.slots(jnp.broadcast_to(jnp.where(entries < past, entries, -1), (lengths.shape[0], room)))
    indices = jnp.where(indices < every[..., None], indices, -1)
    selection = (indices, jnp.where(there, indices.shape[2], 0))
    return [*sources, CachedSource.of("compressed_cache", compressed_cache, slots, "selection", *selection)]
