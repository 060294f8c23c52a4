"""A request for tokens, the ranges of what it may ask for, and the check of tokens that come from outside."""

import argparse
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HOTTEST = 2.0
"""the greatest temperature"""


class TooLong(ValueError):
    """A request that could never fit."""


@dataclass(eq=False)
class Request:
    """A request of a `Server`.

    Raises:
      ValueError: a number out of its range.
    """

    prompt: np.ndarray
    """int32 `[n]`, at least one token"""
    wanted: int
    """how many tokens to say, at most; at least 1"""
    temperature: float = 0.0
    """0: the likeliest token; up to 2: by chance, and the higher the more evenly. Less than 1e-5 counts as 1e-5."""
    heard: Callable[[int], None] = lambda token: None
    """called with each token as it is said, by the thread that works"""
    end: int | Collection[int] = ()
    """the token, or any of the tokens, after which it says no more; one below 0 is none"""
    top_p: float = 1.0
    """in (0, 1]: by chance only among the likeliest tokens that have this probability together"""
    seed: int | None = None
    """64 bits: with equal ones, equal requests say the same, whatever else is served; None is any"""
    said: list[int] = field(default_factory=list, init=False)
    error: Exception | None = field(default=None, init=False)
    """of `heard`, which ended this request and no other"""
    shared: int = field(default=0, init=False)
    """tokens that were not read since its last place was given to it: an earlier request had read them"""
    chain: list[int] = field(default_factory=list, init=False, repr=False)
    """the hashes of its first page, its first two pages, … : see `prefixes.chained`"""
    gone: bool = field(default=False, init=False)
    """whether nobody listens any more: see `Server.forget`"""

    def __post_init__(self) -> None:
        self.check()
        ends = (self.end,) if isinstance(self.end, int) else self.end
        self.end = frozenset(integer("end", x) for x in ends)

    def check(self) -> None:
        """Raises ValueError if a number is out of its range."""
        integer("wanted", self.wanted, 1, 2**31 - 1)
        number("temperature", self.temperature, 0, HOTTEST)
        number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p: got 0, wanted more")
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)

    def __len__(self) -> int:
        """Counts the request's tokens: the prompt's, and those that it has said."""
        return len(self.prompt) + len(self.said)

    @property
    def tokens(self) -> np.ndarray:
        """int32: a copy of all of them."""
        return np.array(self.part(0))

    def part(self, start: int, stop: int | None = None) -> np.ndarray:
        """int32: the tokens from start to stop, or to the end. Those of the prompt alone are a view."""
        n, stop = len(self.prompt), len(self) if stop is None else stop
        if stop <= n:
            return self.prompt[start:stop]
        said = np.asarray(self.said[max(start - n, 0) : max(stop - n, 0)], np.int32)
        return np.concatenate([self.prompt[start:stop], said])

    def hears(self, tokens: list[int]) -> bool:
        """Says these tokens, up to one that ends it. Returns whether it is done."""
        try:
            for token in tokens:
                self.said.append(token)
                self.heard(token)
                if token in self.end:
                    return True
        except Exception as e:  # whoever listens is this request's alone
            self.error = e
            return True
        return len(self.said) >= self.wanted


def integer(name: str, x: Any, least: int | None = None, most: int | None = None) -> int:
    """x as an int; raises ValueError, which says what is wanted, if it is none or out of range."""
    span = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    is_one = isinstance(x, int | np.integer) and not isinstance(x, bool)
    if not is_one or (least is not None and x < least) or (most is not None and x > most):
        raise ValueError(f"{name}: got {short(x)}, wanted an integer{span}")
    return int(x)


def option(least: int, text: str) -> int:
    """The integer of a command line's option, for argparse, which says what this raises."""
    try:
        return integer("it", int(text), least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer of at least {least}") from None


def number(name: str, x: Any, least: float, most: float) -> float:
    """x as a float; raises ValueError if it is no number or out of range. NaN is out of every range."""
    is_one = isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
    if not is_one or not least <= x <= most or not math.isfinite(x):
        raise ValueError(f"{name}: got {short(x)}, wanted a number from {least} to {most}")
    return float(x)


def checked_tokens(name: str, given: Any, vocabulary: int) -> np.ndarray:
    """The tokens in `given` as int32 `[n]`, n at least 1.

    Raises:
      ValueError: no line of integers, or one that is not below `vocabulary`. Nothing is rounded or wrapped.
    """
    wanted = f"integers from 0 to {vocabulary - 1}"
    try:
        x = np.asarray(given)
    except (ValueError, OverflowError):  # lists of different lengths
        raise ValueError(f"{name}: got {short(given)}, wanted one line of {wanted}") from None
    if x.ndim == 1 and not len(x):
        raise ValueError(f"{name}: got no tokens, wanted at least one")
    if x.ndim != 1 or x.dtype.kind not in "iu":
        got = short(given) if isinstance(given, list | tuple) else f"{x.dtype}{list(x.shape)}"
        raise ValueError(f"{name}: got {got}, wanted one line of {wanted}")
    wrong = np.flatnonzero((x < 0) | (x >= vocabulary))
    if len(wrong):
        raise ValueError(f"{name}: got {x[wrong[0]]} as token number {wrong[0]}, wanted {wanted}")
    return x.astype(np.int32)


def short(x: Any, length: int = 80) -> str:
    """Returns what an error shows of x: its repr, cut off at `length` characters; no digits of a huge number."""
    if isinstance(x, int) and abs(x) >= 10**length:
        return "a number of many digits"  # which Python does not write if they are 4300 or more
    text = repr(x)
    return text if len(text) <= length else text[: length - 1] + "…"
