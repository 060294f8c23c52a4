"""The slots of its caches that each query of a step sees, as attention's kernels want to know them."""

import dataclasses
import functools
from collections.abc import Sequence
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
) -> "list[SelectionSource | StepSource]":
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
    near = _selection("window", window_cache)
    sources = [near] if compressed_cache is None else [near, _selection("compressed", compressed_cache)]
    if is_causal and with_kernel and _have_one_pool(sources) and any(cache.block_table is None for cache in caches):
        return [StepSource(near, sources[1] if len(sources) > 1 else None, operands, tuple(sizes.items()))]
    if not is_causal:
        of_window = _of_drafts(window_cache, jnp.maximum(lengths, 0), position[:, :1], position, window)
        if compressed_cache is None:
            return [near.seen(*of_window)]
    found = _run(operands, sizes, with_kernel)
    slots = [found[:2] if is_causal else of_window, found[2:]]
    return [source.seen(*of) for source, of in zip(sources, slots, strict=False)]


def chosen_slots(
    source: SelectionSource, cache: Cache, lengths: jax.Array, indices: jax.Array, q_offset: jax.Array | None
) -> "SelectionSource | StepSource":
    """The entries that the queries of `mla_decode` choose of a cache, as slots of its pool, -1 for one that is after a
    query's position; source: of its keys.
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
        **cache.pages._asdict(),
    }
    if _have_one_pool([source]) and cache.block_table is None:
        return StepSource(None, source, operands, tuple(sizes.items()))
    return source.seen(*_run(operands, sizes, with_kernel=True)[2:])


def _have_one_pool(sources: Sequence[SelectionSource]) -> bool:
    """True if their kernel takes the keys of all sequences as one pool."""
    return len(sources) > 1 or sources[0].is_packed


def _positions(lengths: jax.Array, s_q: Any, q_offset: jax.Array | None) -> jax.Array:
    """The positions of a step's queries, int32 `[b, s_q]`."""
    first = jnp.maximum(lengths, 0) - s_q if q_offset is None else q_offset  # otherwise it might wrap around
    return jnp.arange(s_q, dtype=jnp.int32)[None] + first[:, None]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("near", "far", "operands"), meta_fields=("sizes",))
@dataclasses.dataclass(frozen=True)
class StepSource:
    """The sources of a step over caches that are not all in pages.

    To their kernel the keys of all sequences on a device are one pool. So slots are found where attention runs, and
    are counted through all of these sequences.

    Attributes:
      near, far: the sources, without slots: that of the window, and of compressed or of chosen entries. Or None.
      operands, sizes: of the op that finds slots.
    """

    near: SelectionSource | None
    far: SelectionSource | None
    operands: Arrays
    sizes: tuple[tuple[str, Any], ...]

    @property
    def _given(self) -> list[tuple[SelectionSource, str, slice]]:
        """The sources, each with the prefix of its sizes, and where its slots are in what is found."""
        every = (self.near, "window_", slice(0, 2)), (self.far, "", slice(2, 4))
        return [(source, prefix, at) for source, prefix, at in every if source is not None]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for source, *_ in self._given for kind in source.kinds)

    @property
    def description(self) -> tuple[str, ...]:
        return tuple(words for source, *_ in self._given for words in source.description)

    @property
    def d_v(self) -> int | None:
        return self._given[0][0].d_v

    @property
    def axes(self) -> tuple[Axes, ...]:
        return (*(source.axes[0] for source, *_ in self._given), *_OP.operands)

    def parts(self) -> list[SelectionSource]:
        found = _slots(*self.operands, **dict(self.sizes))
        return [source.seen(*found[at]) for source, _, at in self._given]

    def parts_of_kernel(self) -> list[SelectionSource]:
        """The sources for kernels: beside one cache of V4 there is another source, of which queries see nothing."""
        sizes = dict(self.sizes)
        for source, prefix, _ in self._given:
            if source.keys.shape[0] != 1:  # otherwise all sequences share it
                sizes[f"{prefix}stride"] = sizes[f"{prefix}room"]
        found = (_by_kernel if self.launched else _slots)(*self.operands, **sizes)
        made = []
        for source, prefix, at in self._given:
            page = sizes[f"{prefix}page"]
            is_counted = isinstance(page, int) and page == 0  # pages have no stride
            made.append(dataclasses.replace(source.seen(*found[at]), is_counted=is_counted))
        if len(made) == 1 and self.d_v is None:
            nothing = found[1 if self.near is None else 3]
            made.append(dataclasses.replace(made[0], indices=nothing[..., None], length=nothing, is_counted=True))
        return made

    @property
    def launched(self) -> tuple[str, ...]:
        return ("seen_slots",) if _are_known(self.operands, dict(self.sizes)) else ()


def _none(lengths: jax.Array, *shape: Any) -> jax.Array:
    return jnp.zeros((lengths.shape[0], *shape), jnp.int32)


def _run(operands: Arrays, sizes: dict[str, Any], with_kernel: bool) -> Arrays:
    support = Support("int32", ("seen_slots",), library.shipped_for("seen_slots"))
    use = KernelUse.NEVER
    if with_kernel and _are_known(operands, sizes):
        use = choose("seen_slots", None, support)
    if use == KernelUse.NEVER:
        return _slots(*operands, **sizes)
    return without_gradient(Call(_OP, use, tuple(sizes.items()), support), *operands)


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


def _selection(name: str, cache: Cache) -> SelectionSource:
    """The source of a cache, without slots."""
    names = (f"{name}_cache", f"{name} slots", f"{name} length")
    return SelectionSource(cache.pool(), None, None, names, f"{name}_rows", cache.layout)
