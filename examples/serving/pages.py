"""The allocator of a cache's pages: on the host, an integer for each page."""

from typing import Any

import numpy as np


class Pages:
    """The pages of the caches' pools, each of `page` tokens: `table[i]` are those of place i, and -1 is none.

    One table serves all layers. Places may share pages, and pages may be kept for places to come. One is free when
    nobody has it and it is not kept. No method takes longer with more places or pages: each takes as long as one place
    has pages.
    """

    def __init__(self, places: int, room: int, page: int, count: int) -> None:
        self.page, self.free = page, list(range(count))
        self.owners, self.keepers = np.zeros((2, count), np.int32)
        """how many places have a page; how often it is kept"""
        self.idle = 0
        """how many pages are kept and nothing else"""
        self.table = np.full((places, self.needed(room)), -1, np.int32)
        self.counts = np.zeros(places, np.int32)
        """pages of each place"""

    def needed(self, tokens: Any) -> Any:
        """Counts the pages of so many tokens, an int or an array of them."""
        return -(-tokens // self.page)

    @property
    def room(self) -> np.ndarray:
        """int32 `[places]`: the tokens for which each place has pages."""
        return self.counts * self.page

    def grow(self, place: int, tokens: int) -> bool:
        """Gives a place pages for this many tokens; False if there are too few."""
        there = int(self.counts[place])
        more = max(self.needed(tokens) - there, 0)
        if more > len(self.free):
            return False
        new = self.free[len(self.free) - more :]
        del self.free[len(self.free) - more :]
        self.owners[new] = 1
        self.table[place, there : there + more] = new
        self.counts[place] += more
        return True

    def share(self, place: int, pages: np.ndarray) -> None:
        """Gives a place these kept pages, all of them full, as its first, in place of those that it has there."""
        n, there = len(pages), int(self.counts[place])
        self.idle -= int((self.owners[pages] == 0).sum())
        self.owners[pages] += 1
        self._left(self.table[place, : min(n, there)].copy())
        self.table[place, :n] = pages
        self.counts[place] = max(n, there)

    def leave(self, place: int) -> None:
        """Takes a place's pages back."""
        gone = self.table[place, : self.counts[place]].copy()
        self.table[place, : self.counts[place]] = -1
        self.counts[place] = 0
        self._left(gone)

    def _left(self, gone: np.ndarray) -> None:
        self.owners[gone] -= 1
        gone = gone[self.owners[gone] == 0]
        is_kept = self.keepers[gone] > 0
        self.idle += int(is_kept.sum())
        self.free += gone[~is_kept].tolist()

    def keep(self, pages: np.ndarray) -> None:
        """Keeps pages, which a place has."""
        self.keepers[pages] += 1

    def let_go(self, pages: np.ndarray) -> None:
        """Keeps pages once less."""
        self.keepers[pages] -= 1
        gone = pages[(self.keepers[pages] == 0) & (self.owners[pages] == 0)]
        self.idle -= len(gone)
        self.free += gone.tolist()

    def holding(self, places: np.ndarray, start: np.ndarray, tokens: int) -> np.ndarray:
        """int32 `[k, n]`: the pages of so many tokens of places `[k]` from position `start` `[k]` on; -1: none is."""
        n = -(-(tokens - 1) // self.page) + 1  # tokens may begin anywhere in a page
        which = start[:, None] // self.page + np.arange(n)
        found = self.table[places[:, None], np.minimum(which, self.table.shape[1] - 1)]
        return np.where(which < self.table.shape[1], found, -1)
