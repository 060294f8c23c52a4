"""Drafts that cost nothing: what came after the same tokens, earlier in the same request."""

import numpy as np

SLOTS = 1 << 14
FACTORS = np.array([[0, 0x9E3779B1, 0x85EBCA77], [0xC2B2AE3D, 0x9E3779B1, 0x85EBCA77]], np.int64)


class Lookup:
    """The tokens of the request in each place, and where the last three stood before, or the last two.

    Where they stood is in tables of fixed size, in which a newer one overwrites an older one of the same hash. So it
    takes as long to add tokens, and to find drafts, however many there are. All places are looked at at once.
    """

    def __init__(self, places: int, room: int) -> None:
        self.tokens, self.count = np.full((places, 3 + room), -1, np.int32), np.zeros(places, np.int32)
        """of each place its tokens, after three that are none; and how many it has"""
        self.after = np.zeros((2, places, SLOTS), np.int32)
        """by the hash of two or three tokens, how many tokens there were with them"""

    def clear(self, place: int) -> None:
        """Forgets a place's tokens. Its tables may say where they stood, but not what they were."""
        self.count[place] = 0

    def read(self, place: int, new: np.ndarray) -> None:
        """Adds tokens of a prompt to those of a place."""
        there, n = int(self.count[place]), len(new)
        line = self.tokens[place, there : there + 3 + n]
        line[3:] = new
        two, three = slots(np.stack([line[i : i + n] for i in range(3)], 1))
        self.after[0, place, two] = self.after[1, place, three] = np.arange(there, there + n)  # of equal slots the last
        self.count[place] += n

    def add(self, places: np.ndarray, new: np.ndarray, count: np.ndarray) -> None:
        """Adds the first `count` `[k]` tokens of `new` `[k, s]` to those of places `[k]`."""
        for i in range(int(count.max(initial=0))):
            some, there = places[i < count], self.count[places[i < count]]
            two, three = slots(self._three(some, there))
            self.after[0, some, two] = self.after[1, some, three] = there
            self.tokens[some, there + 3] = new[i < count, i]
            self.count[some] += 1

    def drafts(self, places: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 `[k, most]` that may come next in places `[k]`, and how many there are int32 `[k]`."""
        there = self.count[places]
        last = self._three(places, there)
        two, three = (after[places, at] for after, at in zip(self.after, slots(last), strict=True))
        is_two = (two >= 2) & (two < there) & (self._three(places, two) == last)[:, 1:].all(1)
        is_three = (three >= 3) & (three < there) & (self._three(places, three) == last).all(1)
        found = np.where(is_three, three, np.where(is_two, two, there))
        which = np.minimum(found[:, None] + 3 + np.arange(most), self.tokens.shape[1] - 1)
        return self.tokens[places[:, None], which], np.minimum(there - found, most)

    def _three(self, places: np.ndarray, there: np.ndarray) -> np.ndarray:
        """int32 `[k, 3]`: the last of the first `there` `[k]` tokens."""
        return self.tokens[places[:, None], there[:, None] + np.arange(3)]


def slots(three: np.ndarray) -> np.ndarray:
    """int64 `[2, k]`: the slots of the last two of `three` `[k, 3]`, and of all."""
    return (FACTORS @ three.T.astype(np.int64) >> 24) % SLOTS
