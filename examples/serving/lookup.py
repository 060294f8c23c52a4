"""Drafts that cost nothing: what came after the same tokens, earlier in the same request."""

from array import array
from collections.abc import Iterable

SLOTS = 1 << 14


class Lookup:
    """The tokens of one request, and where the last three stood before, or the last two.

    The places are in tables of fixed size, in which a newer one overwrites an older one of the same hash. So a token
    is added, and drafts are found, in the same time however many tokens there are.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.after_two, self.after_three = (array("i", [0]) * SLOTS for _ in range(2))
        """by the hash of two or three tokens, how many tokens there were with them"""
        self.last = -1, -1, -1

    def extend(self, new: Iterable[int]) -> None:
        a, b, c = self.last
        for token in new:
            n = len(self.tokens)
            self.after_two[hash((b, c)) % SLOTS] = self.after_three[hash((a, b, c)) % SLOTS] = n
            self.tokens.append(token)
            a, b, c = b, c, token
        self.last = a, b, c

    def drafts(self, count: int) -> array:
        """At most `count` tokens that may come next."""
        tokens, (a, b, c) = self.tokens, self.last
        n = self.after_three[hash((a, b, c)) % SLOTS]
        if n >= 3 and tokens[n - 1] == c and tokens[n - 2] == b and tokens[n - 3] == a:
            return tokens[n : n + count]
        n = self.after_two[hash((b, c)) % SLOTS]
        if n >= 2 and tokens[n - 1] == c and tokens[n - 2] == b:
            return tokens[n : n + count]
        return array("i")
