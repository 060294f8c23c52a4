"""A source of keys and values of several heads, in pages of pools that all sequences share."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import reference
from .._definitions.span import Span
from .op import ONE_OR_B, Axes
from .sources import ROWS, Part

BOX = 8
"""keys that a kernel loads at a time, at least; pages have whole ones"""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "start", "stop", "key_pages", "value_pages"),
    meta_fields=("names",),
)
@dataclasses.dataclass(frozen=True)
class PagedSource:
    """One interval of keys for every query, which has a page for each of them.

    Attributes:
      keys, values: `[b, pages, page, h_kv, d]`; with b = 1 pools that all batch entries share.
      start, stop: int32 `[b, s_q]` within `[0, width * page]`: query i sees the keys `start <= j < stop`.
      key_pages, value_pages: int32 `[b, width]`: key j is in page `key_pages[j // page]`. A number outside of the pool
        stands for a page that no query sees.
      names: the caller's names of keys and values.
    """

    keys: jax.Array
    values: jax.Array
    start: jax.Array
    stop: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array
    names: tuple[str, str] = ("k_cache", "v_cache")

    @property
    def kinds(self) -> tuple[str, ...]:
        page = self.keys.shape[-3]
        return ("paged_kv" if isinstance(page, int) and page % BOX == 0 else "paged_kv_in_any_pages",)

    @property
    def description(self) -> tuple[str, ...]:
        return (f"separate K and V in pages of {self.keys.shape[-3]}",)

    @property
    def launched(self) -> tuple[str, ...]:
        return ()

    @property
    def axes(self) -> tuple[Axes, ...]:
        k, v = self.names
        pool = f"{ONE_OR_B} pages page h_kv d"
        tables = (Axes(f"{x}.block_table", "b width") for x in self.names)
        return Axes(k, pool), Axes(v, pool), Axes("start", ROWS), Axes("stop", ROWS), *tables

    def parts(self) -> "Sequence[Part]":
        return [self]

    parts_of_kernel = parts

    def flat(self) -> "PagedSource":
        """All pages as one pool, `[pages, page, h_kv, d]`."""
        b, pages = self.keys.shape[:2]
        tables = self.key_pages, self.value_pages
        if b != 1:
            first = jnp.arange(b, dtype=jnp.int32)[:, None] * pages
            tables = (*(jnp.where((x >= 0) & (x < pages), first + x, -1) for x in tables),)
        pools = (x.reshape(-1, *x.shape[2:]) for x in (self.keys, self.values))
        return PagedSource(*pools, self.start, self.stop, *tables, self.names)

    def reference(
        self, q: jax.Array, sink: jax.Array | None, scale: float, products: str | None = None
    ) -> reference.Attention:
        x = self.flat()

        def read(pool: jax.Array, pages: jax.Array) -> jax.Array:
            there = (pages >= 0) & (pages < pool.shape[0])
            held = pool.at[jnp.where(there, pages, pool.shape[0])].get(mode="fill", fill_value=0)
            return held.reshape(held.shape[0], -1, *held.shape[3:])

        k, v = read(x.keys, x.key_pages), read(x.values, x.value_pages)
        o, lse = reference.fmha(q, k, v, span=Span(x.start, x.stop), sink=sink, scale=scale, products=products)
        return o, lse
