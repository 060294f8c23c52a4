"""The allocator of a cache's pages: on the host, an integer for each page."""

from typing import Any

import numpy as np


class Pages:
    """The pages of the caches' pools, each of `page` tokens: `table[i]` are those of place i, and -1 is none.

    One table serves all layers. Places may share pages; a page is free when nobody has it. No method takes longer with
    more places or pages: `grow`, `share` and `leave` take as long as one place has pages.
    """

    def __init__(self, places: int, room: int, page: int, count: int) -> None:
        self.page, self.free, self.owners = page, list(range(count)), np.zeros(count, np.int32)
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

    def share(self, source: int, target: int) -> None:
        """Gives a place without pages those of another, which has no page that is not full."""
        n = self.counts[target] = self.counts[source]
        self.table[target, :n] = self.table[source, :n]
        self.owners[self.table[source, :n]] += 1

    def leave(self, place: int) -> None:
        """Takes a place's pages back."""
        gone = self.table[place, : self.counts[place]].copy()
        self.owners[gone] -= 1
        self.free += gone[self.owners[gone] == 0].tolist()
        self.table[place, : self.counts[place]] = -1
        self.counts[place] = 0

    def holding(self, places: np.ndarray, start: np.ndarray, tokens: int) -> np.ndarray:
        """int32 `[k, n]`: the pages of so many tokens of places `[k]` from position `start` `[k]` on; -1: none is."""
        n = -(-(tokens - 1) // self.page) + 1  # tokens may begin anywhere in a page
        which = start[:, None] // self.page + np.arange(n)
        found = self.table[places[:, None], np.minimum(which, self.table.shape[1] - 1)]
        return np.where(which < self.table.shape[1], found, -1)
