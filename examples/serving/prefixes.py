"""The beginnings of prompts that were read before, from which later prompts go on.

A prefix is whole pages of tokens. Its entries stay in their pages, which nobody writes to again. All that a model keeps
besides, such as the rings of windows, is copied to a slot on the device when the last of its tokens has been read. A
prompt that begins with the same tokens shares the pages, gets a copy of the slot, and is read from there on.

Hashes find a prefix, each of them made of the one before it and of a page of tokens. Then the tokens are compared.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np

from .pages import Pages
from .request import Request


class Prefix(NamedTuple):
    """Tokens that were read, and what is kept of them."""

    tokens: np.ndarray
    """int32 `[n]`"""
    pages: np.ndarray
    """int32 `[n / page]`"""
    slot: int
    """the row of all else on the device"""


class Prefixes:
    """At most `most` prefixes. The one that was not taken for longest leaves first.

    No method takes longer with more requests: each takes as long as one prompt has pages, or as there are prefixes.
    """

    def __init__(self, most: int, pages: Pages) -> None:
        self.pages, self.slots = pages, list(range(most))
        self.kept = OrderedDict[tuple[int, int], Prefix]()
        """by the number of pages and the hash of the tokens; those that were taken last are last"""
        self.sizes = Counter[int]()
        """how many have a number of pages"""

    def longest(self, request: Request, beyond: int = 0) -> Prefix | None:
        """The longest prefix of a request that has more than `beyond` tokens, and leaves one to be read."""
        page, most = self.pages.page, (len(request) - 1) // self.pages.page
        chain = chained(request, page)
        for n in sorted(self.sizes, reverse=True):
            if beyond < n * page <= most * page:
                found = self.kept.get((n, chain[n - 1]))
                if found and np.array_equal(found.tokens, request.part(0, n * page)):
                    self.kept.move_to_end((n, chain[n - 1]))
                    return found
        return None

    def keep(self, request: Request, pages: np.ndarray) -> int:
        """Keeps the first tokens of a request, those in these pages. Returns the slot that is to be written, or -1."""
        n = len(pages)
        key = n, chained(request, self.pages.page)[n - 1]
        if key in self.kept:
            self.kept.move_to_end(key)
            return -1
        if not self.slots:
            self._let_go(next(iter(self.kept)))
        self.kept[key] = Prefix(request.part(0, n * self.pages.page), pages.copy(), self.slots.pop())
        self.sizes[n] += 1
        self.pages.keep(pages)
        return self.kept[key].slot

    def make_room(self, pages: int) -> None:
        """Lets prefixes go until so many pages are free, if there are as many that no place has."""
        if len(self.pages.free) < pages <= len(self.pages.free) + self.pages.idle:
            for key, prefix in list(self.kept.items()):
                if len(self.pages.free) >= pages:
                    break
                if (self.pages.owners[prefix.pages] == 0).any():
                    self._let_go(key)

    def _let_go(self, key: tuple[int, int]) -> None:
        prefix = self.kept.pop(key)
        self.slots.append(prefix.slot)
        self.sizes -= Counter([len(prefix.pages)])  # which leaves out what is 0
        self.pages.let_go(prefix.pages)


def chained(request: Request, page: int) -> list[int]:
    """The hashes of the first page of a request's tokens, of the first two, and so on; it adds those of new tokens."""
    chain = request.chain
    for n in range(len(chain), len(request) // page):
        tokens = request.part(n * page, (n + 1) * page)
        chain.append(hash((chain[-1] if chain else 0, tokens.tobytes())))
    return chain
