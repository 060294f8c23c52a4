"""Which slots of its caches each query of a step sees, as attention's kernels want to know it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._definitions.cache import Cache, Pages
from .._host import library
from .._host import seen_slots as raw
from .autodiff import without_gradient
from .lowering import choose
from .op import Arrays, Axes, Call, KernelUse, Op
from .sharding import mesh_of
from .sources import SelectionSource
from .support import Support


def seen_slots(
    s_q: Any,
    window_cache: Cache,
    compressed_cache: Cache | None,
    lengths: jax.Array,
    indices: jax.Array | None,
    topk_length: jax.Array | None,
    ratio: int | None,
    window: int,
    q_offset: jax.Array | None = None,
    is_causal: bool = True,
    *,
    with_kernel: bool = True,
) -> list[SelectionSource]:
    """The entries that the queries of `dsv4_decode` see of each cache, as slots of its pool."""
    b = lengths.shape[0]

    def none(*shape: Any) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    caches = [window_cache] if compressed_cache is None else [window_cache, compressed_cache]
    pools = [cache.pages for cache in caches] + [Pages()] * (2 - len(caches))
    tables = [cache.block_table if cache.block_table is not None else none(b, 0) for cache in caches]
    operands = (
        lengths,
        none(b, 0) if q_offset is None else q_offset[:, None],
        *[*tables, none(b, 0)][:2],
        none(b, s_q, 0) if indices is None else indices,
        none(b, s_q, 0) if topk_length is None else topk_length[..., None],
    )
    far = 0 if compressed_cache is None else compressed_cache.capacity if indices is None else indices.shape[2]
    sizes = {"near": window if is_causal else window + s_q, "far": far, "window": window, "is_causal": int(is_causal)}
    sizes["ratio"] = ratio or 0 if compressed_cache is not None else 0
    sizes |= {f"window_{name}": n for name, n in pools[0]._asdict().items()} | pools[1]._asdict()
    near, near_length, far_slots, far_length = _run(operands, tuple(sizes.items()), with_kernel)
    sources = [_source("window", caches[0], near, near_length)]
    return sources if compressed_cache is None else [*sources, _source("compressed", caches[1], far_slots, far_length)]


def _run(operands: Arrays, sizes: tuple[tuple[str, Any], ...], with_kernel: bool) -> Arrays:
    support = Support("int32", ("seen_slots",), library.shipped_for("seen_slots"))
    use = choose("seen_slots", None, support)
    # Positions count all new tokens, so the kernel wants them together; and sizes that are numbers.
    known = all(isinstance(n, int) for n in (*dict(sizes).values(), *operands[4].shape, *operands[0].shape))
    if not with_kernel or not known or AxisType.Explicit in mesh_of(operands).axis_types:
        use = KernelUse.NEVER
    if use == KernelUse.NEVER:
        return _slots(*operands, **dict(sizes))
    return without_gradient(Call(_OP, use, sizes, support), *operands)


def _slots(
    lengths: jax.Array,
    first: jax.Array,
    window_table: jax.Array,
    table: jax.Array,
    indices: jax.Array,
    topk_length: jax.Array,
    *,
    near: Any,
    far: Any,
    window: int,
    ratio: int,
    is_causal: int,
    window_room: Any,
    window_page: Any,
    window_pages: Any,
    room: Any,
    page: Any,
    pages: Any,
) -> Arrays:
    s_q = indices.shape[1]
    lengths = jnp.maximum(lengths, 0)  # otherwise the subtraction might wrap around
    first = first if first.shape[1] else (lengths - s_q)[:, None]
    position = jnp.arange(s_q, dtype=jnp.int32)[None] + first
    there = (position >= 0) & (position < lengths[:, None])
    if is_causal:
        newest, seen = position, jnp.clip(position + 1, 0, window)
    else:
        end = jnp.minimum(lengths[:, None], first + s_q)
        newest = jnp.broadcast_to(end - 1, position.shape)
        seen = newest + 1 - jnp.maximum(first - window, 0)
    past = newest[..., None] - jnp.arange(near, dtype=jnp.int32)[None, None]
    of_window, compressed = Pages(window_room, window_page, window_pages), Pages(room, page, pages)
    near_slots = of_window.slots(window_table, jnp.where(past >= 0, past % window_room, -1))
    near_length = jnp.where(there, seen, 0)
    if isinstance(far, int) and far == 0:
        return near_slots, near_length, jnp.zeros((*position.shape, 0), jnp.int32), jnp.zeros_like(near_length)
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
    return near_slots, near_length, slots, jnp.where(there, seen, 0)


_OP = Op(
    "seen_slots",
    (
        *(Axes("lengths", "b"), Axes("first", "b n_first")),
        *(Axes("window_table", "b window_width"), Axes("table", "b width")),
        *(Axes("indices", "b new topk"), Axes("topk_length", "b new n_topk_length")),
    ),
    (
        *(Axes("window slots", "b new near"), Axes("window length", "b new")),
        *(Axes("compressed slots", "b new far"), Axes("compressed length", "b new")),
    ),
    _slots,
    raw.seen_slots,
)  # fmt: skip


def _source(name: str, cache: Cache, slots: jax.Array, length: jax.Array) -> SelectionSource:
    names = (f"{name}_cache", f"{name} slots", f"{name} length")
    return SelectionSource(cache.pool(), slots, length, names, f"{name}_rows", cache.layout)
