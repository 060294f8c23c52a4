"""The slots of its caches that each query of a step sees, as attention's kernels want to know them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.cache import Cache, Pages
from .._host import library
from .._host import seen_slots as raw
from .autodiff import without_gradient
from .lowering import choose
from .op import Arrays, Axes, Call, KernelUse, Op
from .sources import SelectionSource
from .support import Support


def seen_slots(
    s_q: Any,
    window_cache: Cache,
    compressed_cache: Cache | None,
    lengths: jax.Array,
    indices: jax.Array | None,
    ratio: int | None,
    window: int,
    q_offset: jax.Array | None = None,
    is_causal: bool = True,
    *,
    with_kernel: bool = True,
) -> "list[SelectionSource | PackedStepSource]":
    """The entries that the queries of `dsv4_decode` see of each cache, as slots of its pool."""
    position = _positions(lengths, s_q, q_offset)
    caches = [window_cache] if compressed_cache is None else [window_cache, compressed_cache]
    pools = [cache.pages for cache in caches] + [Pages()] * (2 - len(caches))
    tables = [_none(lengths, 0) if cache.block_table is None else cache.block_table for cache in caches]
    operands = (
        lengths,
        position[..., None],
        *[*tables, _none(lengths, 0)][:2],
        _none(lengths, s_q, 0) if indices is None else indices,
        _none(lengths, s_q, 0),  # all indices count
    )
    far = 0 if compressed_cache is None else compressed_cache.capacity if indices is None else indices.shape[2]
    sizes = {"window": window, "far": far, "ratio": ratio or 0 if compressed_cache is not None else 0}
    sizes |= {"last": s_q if q_offset is None else 0}
    sizes |= {f"window_{name}": n for name, n in pools[0]._asdict().items()} | pools[1]._asdict()
    if is_causal and with_kernel and any(cache.is_packed and cache.block_table is None for cache in caches):
        keys, layouts = tuple(cache.pool() for cache in caches), tuple(cache.layout for cache in caches)
        return [PackedStepSource(keys, operands, tuple(sizes.items()), layouts)]
    if not is_causal:
        of_window = _of_drafts(window_cache, jnp.maximum(lengths, 0), position[:, :1], position, window)
        if compressed_cache is None:
            return [_source("window", window_cache, *of_window)]
    seen, of_far = _run(operands, sizes, with_kernel)
    near = _source("window", window_cache, *(seen if is_causal else of_window))
    return [near] if compressed_cache is None else [near, _source("compressed", compressed_cache, *of_far)]


def chosen_slots(cache: Cache, lengths: jax.Array, indices: jax.Array, q_offset: jax.Array | None) -> Arrays:
    """The slots in one cache's pool of entries that the queries of `mla_decode` choose, -1 for one that is after a
    query's position, int32 `[b, s_q, topk]`; and how many of them count, `[b, s_q]`.
    """
    s_q = indices.shape[1]
    operands = (
        lengths,
        _positions(lengths, s_q, q_offset)[..., None],
        _none(lengths, 0),  # no window
        _none(lengths, 0) if cache.block_table is None else cache.block_table,
        indices,
        _none(lengths, s_q, 0),
    )
    sizes = {
        "window": 0,
        "far": indices.shape[2],
        "ratio": 1,
        "last": s_q if q_offset is None else 0,
        **{f"window_{n}": x for n, x in Pages()._asdict().items()},
    }
    return _run(operands, sizes | cache.pages._asdict(), with_kernel=True)[1]


def _positions(lengths: jax.Array, s_q: Any, q_offset: jax.Array | None) -> jax.Array:
    """The positions of a step's queries, int32 `[b, s_q]`."""
    first = jnp.maximum(lengths, 0) - s_q if q_offset is None else q_offset  # otherwise it might wrap around
    return jnp.arange(s_q, dtype=jnp.int32)[None] + first[:, None]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("keys", "operands"), meta_fields=("sizes", "layouts"))
@dataclasses.dataclass(frozen=True)
class PackedStepSource:
    """The sources of a step over packed caches, of which some has no block table.

    To their kernels all keys are one pool: that of the sequences on a device. So slots are found where attention runs,
    and are counted through all of these sequences.

    Attributes:
      keys: the pool of each cache.
      operands, sizes: of the op that finds slots.
      layouts: the layout of each cache.
    """

    keys: Arrays
    operands: Arrays
    sizes: tuple[tuple[str, Any], ...]
    layouts: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layouts

    @property
    def description(self) -> tuple[str, ...]:
        return tuple(x for source in self._sources((None,) * 4) for x in source.description)

    @property
    def axes(self) -> tuple[Axes, ...]:
        return (*(source.axes[0] for source in self._sources((None,) * 4)), *_OP.operands)

    def parts(self) -> list[SelectionSource]:
        return self._sources(_slots(*self.operands, **dict(self.sizes)))

    def parts_of_kernel(self) -> list[SelectionSource]:
        """The sources for kernels: beside one cache there is another source, of which queries see nothing."""
        sizes = dict(self.sizes)
        for prefix in ("window_", ""):
            sizes[f"{prefix}stride"] = sizes[f"{prefix}room"]
        find = _by_kernel if self.launched else _slots
        found = find(*self.operands, **sizes)
        sources = [dataclasses.replace(x, is_counted=True) for x in self._sources(found)]
        if len(sources) == 1:
            nothing = found[3]
            sources.append(dataclasses.replace(sources[0], indices=nothing[..., None], length=nothing))
        return sources

    @property
    def launched(self) -> tuple[str, ...]:
        return ("seen_slots",) if _are_known(self.operands, dict(self.sizes)) else ()

    def _sources(self, found: Any) -> list[SelectionSource]:
        names, slots = ("window", "compressed"), (found[:2], found[2:])
        each = zip(names, self.keys, self.layouts, slots, strict=False)
        return [_selection(name, keys, layout, *of) for name, keys, layout, of in each]


def _none(lengths: jax.Array, *shape: Any) -> jax.Array:
    return jnp.zeros((lengths.shape[0], *shape), jnp.int32)


def _run(operands: Arrays, sizes: dict[str, Any], with_kernel: bool) -> tuple[Arrays, Arrays]:
    support = Support("int32", ("seen_slots",), library.shipped_for("seen_slots"))
    use = KernelUse.NEVER
    if with_kernel and _are_known(operands, sizes):
        use = choose("seen_slots", None, support)
    if use == KernelUse.NEVER:
        found = _slots(*operands, **sizes)
    else:
        found = without_gradient(Call(_OP, use, tuple(sizes.items()), support), *operands)
    return found[:2], found[2:]


def _are_known(operands: Arrays, sizes: dict[str, Any]) -> bool:
    return all(isinstance(n, int) for n in (*sizes.values(), *(n for x in operands for n in x.shape)))


def _of_drafts(cache: Cache, lengths: jax.Array, first: jax.Array, position: jax.Array, window: int) -> Arrays:
    """The window's slots that new tokens see, where they see each other and the window's tokens before the first of
    them; and the number of slots for each one.
    """
    s_q = position.shape[1]
    begin, end = jnp.maximum(first - window, 0), jnp.minimum(lengths[:, None], first + s_q)
    positions = begin[..., None] + jnp.arange(window + s_q, dtype=jnp.int32)[None, None]
    slots = cache.slots(jnp.broadcast_to(positions % cache.capacity, (*position.shape, window + s_q)))
    return slots, jnp.where((position >= 0) & (position < lengths[:, None]), end - begin, 0)


def _slots(
    lengths: jax.Array,
    position: jax.Array,
    window_table: jax.Array,
    table: jax.Array,
    indices: jax.Array,
    topk_length: jax.Array,
    *,
    window: int,
    far: Any,
    ratio: int,
    last: Any,  # for the kernel
    window_room: Any,
    window_page: Any,
    window_pages: Any,
    window_stride: Any,
    room: Any,
    page: Any,
    pages: Any,
    stride: Any,
) -> Arrays:
    lengths = jnp.maximum(lengths, 0)
    position = position[..., 0]
    there = (position >= 0) & (position < lengths[:, None])
    begin, end = jnp.maximum(position + 1 - window, 0), jnp.maximum(position + 1, 0)
    positions = begin[..., None] + jnp.arange(window, dtype=jnp.int32)[None, None]  # ascending, as a span has them
    near = Pages(window_room, window_page, window_pages, window_stride).slots(window_table, positions % window_room)
    of_window = near, jnp.where(there, end - begin, 0)
    if isinstance(far, int) and far == 0:
        return *of_window, _none(lengths, position.shape[1], 0), jnp.zeros_like(position)
    compressed = Pages(room, page, pages, stride)
    if indices.shape[2] == 0:
        oldest = jnp.maximum(lengths // ratio - room, 0)  # of a cache that has run over, what is left
        entries = (oldest[:, None] + jnp.arange(room, dtype=jnp.int32)[None]) % room
        slots = jnp.broadcast_to(compressed.slots(table, entries)[:, None], (*position.shape, room))
        seen = (position + 1) // ratio - oldest[:, None]
    else:
        if ratio:
            indices = jnp.where(indices < ((position + 1) // ratio)[..., None], indices, -1)
        slots = compressed.slots(table, indices)
        seen = topk_length[..., 0] if topk_length.shape[2] else jnp.full_like(position, far)
    return *of_window, slots, jnp.where(there, seen, 0)


def _by_kernel(lengths: jax.Array, position: jax.Array, *operands: jax.Array, last: int, **sizes: Any) -> Arrays:
    """The kernel knows the positions of a sequence's `last` tokens by itself, so XLA need not make them. A device that
    has some of these queries alone is told.
    """
    position = position[..., :0] if position.shape[1] == last else position
    return raw.seen_slots(lengths, position, *operands, **sizes)


_OP = Op(
    "seen_slots",
    (
        *(Axes("lengths", "b"), Axes("position", "b s_q n_position")),
        *(Axes("window_table", "b window_width"), Axes("table", "b width")),
        *(Axes("indices", "b s_q topk"), Axes("topk_length", "b s_q n_topk_length")),
    ),
    (
        *(Axes("window slots", "b s_q window"), Axes("window length", "b s_q")),
        *(Axes("compressed slots", "b s_q far"), Axes("compressed length", "b s_q")),
    ),
    _slots,
    _by_kernel,
)


def _source(name: str, cache: Cache, slots: jax.Array, length: jax.Array) -> SelectionSource:
    return _selection(name, cache.pool(), cache.layout, slots, length)


def _selection(name: str, keys: jax.Array, layout: str, slots: Any, length: Any) -> SelectionSource:
    names = (f"{name}_cache", f"{name} slots", f"{name} length")
    return SelectionSource(keys, slots, length, names, f"{name}_rows", layout)
