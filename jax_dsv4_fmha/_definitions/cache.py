"""The caches of one latent head, as a model keeps them between steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .. import _check
from . import explicit_axes
from .packed import LAYOUTS, V4_FP8, D, Layout, index_keys, layout_of, read_pages
from .pytree import public_pytree


class Pages(NamedTuple):
    """The numbers that say where in a pool a sequence has its entries."""

    room: Any = 1
    """for how many of them"""
    page: Any = 0
    """how many are in a page; 0 without a block table, where entries are slots"""
    pages: Any = 0
    """how many the pool has"""
    stride: Any = 0
    """without a block table: slots from the first one of a sequence to that of the next; 0 counts those of each"""

    def slots(self, block_table: jax.Array | None, entries: jax.Array) -> jax.Array:
        """The slots of these entries `[b or 1, …]` of a sequence; -1 for an entry that does not exist."""
        if isinstance(self.page, int) and self.page == 0:
            there = (entries >= 0) & (entries < self.room)
            if not (isinstance(self.stride, int) and self.stride == 0):
                first = jnp.arange(entries.shape[0], dtype=jnp.int32) * self.stride
                entries = first.reshape(-1, *[1] * (entries.ndim - 1)) + entries
            return jnp.where(there, entries, -1)
        assert block_table is not None
        # one row for every sequence, on the devices that hold its table
        entries += (0 * block_table[:, 0]).reshape(-1, *[1] * (entries.ndim - 1))
        there = (entries >= 0) & (entries < self.room)
        which = jnp.where(there, entries // self.page, 0)
        pages = explicit_axes.taken(block_table, which.reshape(which.shape[0], -1)).reshape(which.shape)
        there &= (pages >= 0) & (pages < self.pages)
        return jnp.where(there, pages * self.page + entries % self.page, -1)


@public_pytree
@dataclasses.dataclass(frozen=True)
class Cache:
    """A KV cache of one latent head: entries that are both K and V, contiguous or paged.

      - contiguous: entries `[b, s_max, d]`, no block_table;
      - paged: entries `[pages, page, d]`, a pool of all sequences; page i of sequence n is `block_table[n, i]`.

    Entries are bfloat16, float16 or float32, for `gqa_decode` also float8_e4m3fn; or packed: uint8 `[b or pages,
    page_bytes]` in one of the layouts of `quantize_cache`, with its d. Index keys are entries too: `lightning_indexer`
    takes a cache of them.

    Entry p of a sequence lies in slot `p % capacity`. A cache with less room than the sequence is long is therefore a
    ring of its last entries, which is how to keep a sliding window.

    A cache is a pytree. It may be an argument or a result of a jitted function, be donated, or be the carry of a
    scan. Caches that share a block_table cannot each donate it: donate their entries, and make the caches inside.

    Attributes:
      entries: as above.
      block_table: int32 `[b, n]`, or None. A number outside of the pool means that there is no
        page: nothing is read or kept there.
      layout: the layout of packed entries, as in `quantize_cache`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Cache
      >>> ring = Cache.zeros(1, 4, 1, jnp.float32)  # the last 4 entries of one sequence
      >>> ring = ring.append(jnp.arange(6.0).reshape(1, 6, 1), positions=jnp.arange(6)[None])
      >>> ring.take(jnp.array([[2, 5]])).tolist()
      [[[2.0], [5.0]]]
    """

    entries: Any
    block_table: Any = None
    layout: str = dataclasses.field(default=V4_FP8, metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        pages: int,
        page: int,
        d: int | None = None,
        dtype: Any = jnp.bfloat16,
        block_table: jax.Array | None = None,
        *,
        layout: str | None = None,
    ) -> "Cache":
        """An empty cache of `pages` pages (a contiguous one: sequences) of `page` entries.

        Args:
          pages, page, d: ints >= 1; d is the dimensions of an entry, by default 512, or the layout's.
          dtype: bfloat16, float16 or float32, of entries that are not packed; float8_e4m3fn stands for the layout
            "v4_fp8".
          layout: layout of packed entries; None for entries that are not packed.

        Raises:
          ValueError, TypeError: sizes or a dtype that differ from the above, an unknown layout, or a d that it does
            not have.
        """
        op = "Cache.zeros"
        pages, page = _check.positive(op, "pages", pages), _check.positive(op, "page", page)
        fp8 = jnp.dtype(jnp.float8_e4m3fn)
        wanted = "bfloat16, float16, float32, or float8_e4m3fn for the layout v4_fp8"
        if layout is None and _check.dtype(op, "dtype", dtype, (*_check.FLOAT, fp8), wanted) == fp8:
            layout = V4_FP8
        if layout is None:
            d = _check.positive(op, "d", D if d is None else d)
            return cls(jnp.zeros((pages, page, d), dtype), block_table)
        how = layout_of(op, layout)
        if d not in (None, how.d):
            raise _check.error(ValueError, op, "d", d, f"{how.d} for {layout}")
        return cls(jnp.zeros((pages, how.page_bytes(page)), jnp.uint8), block_table, layout)

    @property
    def is_packed(self) -> bool:
        """True if entries are bytes in one of the layouts of `quantize_cache`."""
        return bool(self.entries.dtype == jnp.uint8)

    @property
    def packing(self) -> Layout:
        """The layout of a packed cache."""
        return LAYOUTS[self.layout]

    @property
    def page(self) -> Any:
        """Entries in a page; without pages, entries of a sequence."""
        return self.packing.page_entries(self.entries.shape[1]) if self.is_packed else self.entries.shape[1]

    @property
    def capacity(self) -> Any:
        """The number of entries of one sequence that there is room for."""
        return self.page if self.block_table is None else self.page * self.block_table.shape[1]

    @property
    def rows(self) -> Any:
        """The array that has a row for each sequence."""
        return self.entries if self.block_table is None else self.block_table

    def pool(self) -> jax.Array:
        """The array that kernels read: `[b or 1, slots, d]`, or packed `[b or 1, pages, page_bytes]`.

        Without a block table, each sequence has its own pool of one page.
        """
        if self.is_packed:
            return self.entries[:, None] if self.block_table is None else self.entries[None]
        return self.entries if self.block_table is None else self.entries[None].reshape(1, -1, self.entries.shape[2])

    @property
    def pages(self) -> Pages:
        """The numbers that say where in its pool a sequence has its entries."""
        if self.block_table is None:
            return Pages(self.capacity)
        return Pages(self.capacity, self.page, self.entries.shape[0])

    def slots(self, entries: jax.Array) -> jax.Array:
        """The slots in its pool of these entries `[b or 1, …]` of a sequence; -1 for an entry that does not exist."""
        return self.pages.slots(self.block_table, entries)

    @jax.named_scope("append")
    def append(self, entries: jax.Array, positions: jax.Array) -> "Cache":
        """Writes new entries and returns the new cache; in place where the cache is donated or carried by a loop.

        Args:
          entries: `[b, n, d]`, n may be 0, in the cache's type; bfloat16, float16 or float32 for a packed cache.
          positions: int32 `[b, n]`, each entry's position in its sequence, all different. An entry at a position below
            0 is dropped. So is one that is `capacity` or more below the greatest here: a ring has no room for it.

        Raises:
          ValueError, TypeError: operands that differ from the above.
        """
        op = "Cache.append"
        if getattr(entries, "shape", ())[1:2] == (0,) and getattr(positions, "shape", ())[1:] == (0,):
            return self
        dims: dict[str, Any] = {}
        held = getattr(self.entries, "dtype", jnp.uint8)
        dtypes = _check.FLOAT if held == jnp.uint8 else (held,)
        entries = _check.operand(op, "entries", entries, "b n d", dims, dtypes)
        positions = _check.operand(op, "positions", positions, "b n", dims, _check.INT)
        self.check(op, "cache", dims, dtypes)
        cache, entries, positions = self._with_batch(op, entries=entries, positions=positions)
        return cache._append(entries, positions)

    def _append(self, entries: jax.Array, positions: jax.Array) -> "Cache":
        lost = (positions < 0) | (positions <= positions.max(1, keepdims=True) - self.capacity)
        slots = self.slots(jnp.where(lost, -1, positions % self.capacity))
        pages, at = slots // self.page, slots % self.page  # -1 is on no page
        if self.is_packed:
            rows = list(zip(self.packing.starts(at, self.page), self.packing.encode(entries), strict=True))
        else:
            rows = [(at * entries.shape[2], entries)]
        whole = self.entries.reshape(self.entries.shape[0], -1)
        for start, row in rows:
            if self.block_table is None:
                whole = jax.vmap(_write)(whole[:, None], pages, start, row)[:, 0]
            else:  # every device that has the pool writes the entries of all sequences
                of_all = (explicit_axes.whole(x, 0) for x in (pages, start, row))
                whole = _write(whole, *(x.reshape(-1, *x.shape[2:]) for x in of_all))
        return dataclasses.replace(self, entries=whole.reshape(self.entries.shape))

    def take(self, positions: jax.Array | None = None) -> jax.Array:
        """Reads entries `[b, n, d]`, in the cache's dtype; packed ones as bfloat16, "index_fp8" as float32.

        Args:
          positions: int32 `[b, n]`, n may be 0, the entries of each sequence to read. A position below 0 or without a
            page reads as 0. In a ring, a position reads what its slot holds, from any round. None reads all slots in
            order, `[b, capacity, d]`, which copies nothing where the cache is contiguous and not packed.

        Raises:
          ValueError, TypeError: positions, or a cache, that differ from what is documented.
        """
        op, dims = "Cache.take", self._sizes("Cache.take")
        self.check(op, "cache", dims, (*_check.FLOAT, jnp.dtype(jnp.float8_e4m3fn)))
        if positions is None:
            if self.block_table is None and not self.is_packed:
                return self.entries
            positions = jnp.broadcast_to(jnp.arange(self.capacity, dtype=jnp.int32)[None], (dims["b"], self.capacity))
        if getattr(positions, "shape", ())[1:] == (0,):
            return jnp.zeros((dims["b"], 0, dims["d"]), self.packing.decoded if self.is_packed else self.entries.dtype)
        positions = _check.operand(op, "positions", positions, "b n", dims, _check.INT)
        cache, positions = self._with_batch(op, positions=positions)
        decode = cache.packing.decode if cache.is_packed else None
        return cache._take(positions, decode)

    def index_keys(self) -> tuple[jax.Array, jax.Array]:
        """All keys of a cache in "index_fp8", in order: float8_e4m3fn `[b, capacity, d]` and float32 scales
        `[b, capacity]`. A key without a page is zeros.
        """
        every = jnp.broadcast_to(jnp.arange(self.capacity, dtype=jnp.int32)[None], (self.rows.shape[0], self.capacity))
        cache, every = self._with_batch("Cache.index_keys", positions=every)

        def decode(*parts: jax.Array) -> tuple[jax.Array, jax.Array]:
            codes, scales = index_keys(*parts)
            return codes, scales[..., None]  # with as many axes as an entry has

        codes, scales = cache._take(every, decode)
        return codes, scales[..., 0]

    def _take(self, positions: jax.Array, decode: Callable[..., Any] | None) -> Any:
        """Entries `[b, n, d]`, or what `decode` makes of the parts of packed ones, with three axes."""
        slots = self.slots(jnp.where(positions < 0, -1, positions % self.capacity))
        pages, at = slots // self.page, jnp.maximum(slots, 0) % self.page
        whole = self.entries.reshape(self.entries.shape[0], -1)

        def read(whole: jax.Array, pages: jax.Array, at: jax.Array) -> Any:
            if decode is not None:
                return decode(*self.packing.read(whole, pages, at))
            return read_pages(whole, pages, at * self.entries.shape[2], self.entries.shape[2])

        if self.block_table is None:  # a page for each sequence: XLA reads it where it is
            return jax.vmap(read)(whole[:, None], pages, at)
        where = explicit_axes.entries(pages)
        if any(where):
            read = jax.sharding.auto_axes(read, out_sharding=explicit_axes.sharding(pages, *where, None))
        return read(whole, pages, at)

    def _with_batch(self, op: str, **xs: jax.Array) -> tuple[Any, ...]:
        """The cache, and arrays `[b, n, …]` with all of n where Explicit axes of a mesh put the cache's sequences."""
        *others, rows = explicit_axes.with_one_batch(op, **xs, cache=self.rows)
        changed: dict[str, Any] = {"entries" if self.block_table is None else "block_table": rows}
        return dataclasses.replace(self, **changed), *(explicit_axes.whole(x, 1, 2) for x in others)

    def _sizes(self, op: str) -> dict[str, Any]:
        """b and d, as the arrays say."""
        table = {} if self.block_table is None else {"block_table": self.block_table}
        for name, x in {"entries": self.entries, **table}.items():
            if getattr(x, "ndim", 0) < 2:
                raise _check.error(TypeError, op, f"cache.{name}", x, "an array")
        d = layout_of(op, self.layout).d if self.is_packed else self.entries.shape[-1]
        return {"b": self.rows.shape[0], "d": d}

    def as_held(self, entries: jax.Array) -> jax.Array:
        """These entries `[…, d]` as a cache like this returns them: bfloat16 if it is packed, else unchanged."""
        return self.packing.decode(*self.packing.encode(entries)) if self.is_packed else entries

    def check(
        self, op: str, name: str, dims: dict[str, Any], dtypes: tuple[Any, ...], layouts: Sequence[str] = tuple(LAYOUTS)
    ) -> None:
        """Raises unless this is a cache for b sequences of `dims`, packed in one of these layouts, or with entries of
        one of these dtypes.
        """
        sizes, pages = {"d": dims["d"]}, "pages"
        if self.block_table is None:
            pages, sizes["b"] = "b", dims["b"]
        else:
            _check.operand(op, f"{name}.block_table", self.block_table, "b n", {"b": dims["b"]}, _check.INT)
        if getattr(self.entries, "dtype", None) == jnp.uint8:
            how = layout_of(op, self.layout)
            if self.layout not in layouts:
                raise _check.error(ValueError, op, f"{name}.layout", self.layout, " or ".join(layouts))
            _check.operand(op, f"{name}.entries", self.entries, f"{pages} page_bytes", sizes, (self.entries.dtype,))
            if dims["d"] != how.d or not how.is_page(self.entries.shape[1]):
                got = f"{_check.describe(self.entries)} with d = {dims['d']}"
                wanted = f"d = {how.d} and pages of n entries in {how.page_rule}, as {self.layout} has them"
                raise _check.error(ValueError, op, f"{name}.entries", got, wanted)
        else:
            _check.operand(op, f"{name}.entries", self.entries, f"{pages} page d", sizes, dtypes)
        for x in filter(lambda x: x is not None, (self.entries, self.block_table)):
            sharded = explicit_axes.entries(x)
            if any(sharded[1:] if x is self.rows else sharded):
                wanted = "only the batch sharded" if x is self.rows else "a pool of pages whole on every device"
                got = f"{_check.describe(x)} sharded as {PartitionSpec(*sharded)}"
                raise _check.error(
                    ValueError, op, f"{name}.{'entries' if x is self.entries else 'block_table'}", got, wanted
                )
        counts = (self.entries.shape[0] * self.page, math.prod(self.entries.shape[1:]))
        if any(isinstance(n, int) and n >= 2**31 for n in counts):
            wanted = "fewer than 2**31 entries, and less than 2**31 numbers in a page"
            raise _check.error(ValueError, op, f"{name}.entries", self.entries, wanted)


def _write(pages: jax.Array, page: jax.Array, start: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes rows [n, w] into pages [pages, width], each from `start` [n] of its page [n] on; drops rows without a
    page.
    """
    windows = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(pages, jnp.stack([page, start], -1), rows, windows, mode="drop")


def read_slots(pool: jax.Array, slots: jax.Array, layout: str) -> jax.Array:
    """Entries `[b, n, d]` in slots `[b, n]` of pools as `Cache.pool` makes them; 0 where a slot is below 0."""

    def read(pool: jax.Array, slots: jax.Array) -> jax.Array:
        if pool.dtype != jnp.uint8:
            return pool.at[jnp.where(slots < 0, pool.shape[0], slots)].get(mode="fill", fill_value=0)
        form = LAYOUTS[layout]
        page = form.page_entries(pool.shape[1])
        return form.decode(*form.read(pool, slots // page, jnp.maximum(slots, 0) % page))

    return read(pool[0], slots) if pool.shape[0] == 1 else jax.vmap(read)(pool, slots)
