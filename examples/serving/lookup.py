"""Drafts that cost nothing: what came after the same tokens, earlier in the same request."""

from array import array
from collections.abc import Iterable

LENGTHS = (3, 2)
"""how many of the last tokens must have stood before: three, else two"""
SLOTS = 1 << 14


class Lookup:
    """The tokens of one request, and where threes and twos of them stood last.

    The places are in a table of fixed size, in which a newer one overwrites an older one of the same hash. So a token
    is added, and drafts are found, in the same time however many tokens there are.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.ends = {n: array("i", [0]) * SLOTS for n in LENGTHS}
        """by the hash of n tokens, where they ended"""

    def extend(self, new: Iterable[int]) -> None:
        for token in new:
            for n, ends in self.ends.items():
                ends[hash(tuple(self.tokens[-n:])) % SLOTS] = len(self.tokens)
            self.tokens.append(token)

    def drafts(self, count: int) -> list[int]:
        """At most `count` tokens that may come next."""
        for n, ends in self.ends.items():
            last = self.tokens[-n:]
            end = ends[hash(tuple(last)) % SLOTS]
            if end >= n and self.tokens[end - n : end] == last:
                return self.tokens[end : end + count].tolist()
        return []
