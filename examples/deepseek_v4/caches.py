"""The caches of a whole model, of which each sequence has a row or pages."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_dsv4_fmha import Cache
from jax_dsv4_fmha.layers import LayerCache

from .engram import History


class Caches(NamedTuple):
    """The caches that a model keeps of its sequences. All have the same places and the same table of pages."""

    layers: Sequence[LayerCache]
    history: History | None = None
    """of words, for engrams"""
    drafts: Sequence[LayerCache] = ()
    """of the layers for drafts (drafts.py)"""

    def with_block_table(self, table: jax.Array) -> "Caches":
        return self._each(lambda cache: cache.with_block_table(table))

    def rings(self) -> "Caches":
        """The caches without those in pages: see `LayerCache.rings`."""
        return self._each(lambda cache: cache.rings())

    def pools(self) -> list[jax.Array]:
        """The arrays of the caches in pages."""
        return [x.entries for x in jax.tree.leaves(self, is_leaf=is_pool) if is_pool(x)]

    def with_pools(self, pools: Sequence[Any]) -> "Caches":
        """The caches with these in place of those, which no program need be given."""
        new = iter(pools)
        replaced = lambda x: dataclasses.replace(x, entries=next(new)) if is_pool(x) else x  # noqa: E731
        return jax.tree.map(replaced, self, is_leaf=is_pool)

    def take(self, places: jax.Array) -> "Caches":
        """The caches of some places alone: see `LayerCache.take`."""
        return self._each(lambda cache: cache.take(places))

    def put(self, places: jax.Array, taken: "Caches") -> "Caches":
        """The caches of all places with what came of those."""
        is_one = lambda x: isinstance(x, LayerCache | History)  # noqa: E731
        return jax.tree.map(lambda cache, new: cache.put(places, new), self, taken, is_leaf=is_one)

    def _each(self, f: Callable[[Any], Any]) -> "Caches":
        return jax.tree.map(f, self, is_leaf=lambda x: isinstance(x, LayerCache | History))


def is_pool(x: Any) -> bool:
    return isinstance(x, Cache) and x.block_table is not None
