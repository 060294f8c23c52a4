"""Happens-before (PTX ISA 8, Memory consistency model; 8.4 and 9.7.9.25 on proxies), and the faults that break it.

An *event* is an access of memory by an actor: a warp at some epoch of its own, or an asynchronous operation. A clock
says which events an actor knows to have happened before: of every warp up to which epoch, and which operations. A warp
begins a new epoch with everything that it tells to others, so that what it does afterwards is not known to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

FEW = 6
Words = np.ndarray[Any, Any] | slice  # numbers of words, of 4 bytes each


class Fault(Exception):
    """A mistake of the kernel, found."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message, self.placed = message, False

    def at_line(self, line: int, text: str, who: str = "") -> Fault:
        """Says where, once."""
        if not self.placed:
            self.placed = True
            self.args = (f"{who}{': ' if who else ''}line {line}: {shorten(text)}\n    {self.message}",)
        return self


class Unsupported(Fault):
    """PTX that this interpreter does not know."""


class Deadlock(Fault):
    """Nothing can happen any more."""


class Race(Fault):
    """Two accesses with nothing that orders them."""


class Undefined(Fault):
    """A value that nobody wrote decides about something."""


class OutOfBounds(Fault):
    """An address outside of everything, or not aligned."""


class Misuse(Fault):
    """A rule of an instruction is broken."""


class Leak(Fault):
    """Something is left over when the kernel ends."""


def shorten(text: str, limit: int = 150) -> str:
    return text if len(text) <= limit else text[: limit - 4] + " ..."


class Clock:
    """The knowledge of a warp or an operation. Row 0: to have happened; row 1: to be visible to the async proxy as
    well.

    Row 2: mbarriers that were made before a fence.mbarrier_init, which a relaxed arrival tells of too. A warp begins
    with epoch 2, and with 1 there: whoever has that of it knows that it runs. Row 3: how many products of its warpgroup
    a warp has waited for; a product has a part for each of four warps, which wait for their own.
    """

    __slots__ = ("fenced_ops", "ops", "seen")

    def __init__(self, warps: int):
        self.seen = np.zeros((4, warps), np.int64)
        self.ops = 0  # bit n: asynchronous operation n
        self.fenced_ops = 0

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.seen, clock.ops, clock.fenced_ops = self.seen.copy(), self.ops, self.fenced_ops
        return clock

    def join(self, other: Clock) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        self.ops |= other.ops
        self.fenced_ops |= other.fenced_ops

    def meet(self, other: Clock) -> None:
        """Only what both know."""
        np.minimum(self.seen, other.seen, out=self.seen)
        self.ops &= other.ops
        self.fenced_ops &= other.fenced_ops

    def forget(self, warp: int) -> None:
        """Forgets a warp's own actions, but neither what it was told nor that it runs."""
        self.seen[:3, warp] = 0, 0, 1

    def fence_proxy(self) -> None:
        np.maximum(self.seen[1], self.seen[0], out=self.seen[1])
        self.fenced_ops |= self.ops

    def knows(self, event: Event, fenced: bool = False) -> bool:
        if event.product is not None:
            warps, count = event.product
            return bool((self.seen[3, warps] >= count).all())
        if event.op is not None:
            return bool((self.fenced_ops if fenced else self.ops) >> event.op & 1)
        return bool(self.seen[int(fenced), event.warp] >= event.epoch)


@dataclass(frozen=True)
class Event:
    warp: int  # the issuer
    epoch: int  # the warp's epoch, for its own access
    op: int | None  # number of the asynchronous operation
    proxy: str  # "generic" or "async"
    who: str
    line: int
    text: str
    atomic: bool = False
    product: tuple[slice, int] | None = None  # a warpgroup's: its warps that read so, and how many it has with this one

    def __str__(self) -> str:
        return f"{self.who} (line {self.line}: {shorten(self.text, 100)})"


HOST = Event(0, 0, None, "async", "the host", 0, "")


class Actor(Protocol):
    """A Warp or an AsyncOp."""

    clock: Clock
    proxy: str
    reader: int  # number of its column of Shadow.readers
    atomic: bool  # whether the present access is, which needs no order to others that are

    def event(self) -> int:
        """The number of the event that the present access belongs to."""
        ...


class Shadow:
    """A record for every word of a memory: who wrote it last and who has read it since, as numbers of events."""

    def __init__(self, name: str, words: int, readers: int, events: list[Event]):
        self.name, self.events = name, events
        self.writer = np.zeros(words, np.int32)
        self.defined = np.zeros(words, bool)
        self.columns: dict[int, int] | None = {} if readers else None  # of `readers`, by an actor's number
        self.readers = np.zeros((words, 4 if readers else 0), np.int32)

    def read(self, actor: Actor, words: Words, partial: bool = False) -> np.ndarray[Any, Any]:
        """Says which words are defined. Undefined if one was not written; with `partial`, only ordering is checked."""
        writers = self.after_writers(actor, words, "reads")
        if not partial and not writers.all():
            raise Undefined(f"reads {self.describe(words, writers == 0)}, which nobody wrote")
        if self.columns is not None:
            if (column := self.columns.get(actor.reader)) is None:
                column = self.new_column(actor.reader)
            self.readers[words, column] = actor.event()
        return self.defined[words]

    def new_column(self, reader: int) -> int:
        """Few read most memories, so there are columns for those alone."""
        assert self.columns is not None
        column = self.columns[reader] = len(self.columns)
        if column == self.readers.shape[1]:
            self.readers = np.concatenate([self.readers, np.zeros_like(self.readers)], 1)
        return column

    def write(self, actor: Actor, words: Words, defined: np.ndarray[Any, Any] | bool = True) -> None:
        self.after_writers(actor, words, "overwrites")
        if self.columns:
            readers = self.readers[words]
            for number in distinct(readers):
                event = self.events[number]
                if not actor.clock.knows(event) and not (actor.atomic and event.atomic):
                    where = (readers == number).any(-1)
                    raise Race(
                        f"overwrites {self.describe(words, where)} while nothing orders this and the read by {event}"
                        f"{self.missing(actor, event)}"
                    )
        self.writer[words] = actor.event()
        self.defined[words] = defined

    def after_writers(self, actor: Actor, words: Words, does: str) -> np.ndarray[Any, Any]:
        """Says who wrote the words last, 0 for nobody. Race unless the actor comes after them all, and may see it."""
        writers = self.writer[words]
        for number in distinct(writers):
            event = self.events[number]
            if actor.atomic and event.atomic:
                continue
            if not actor.clock.knows(event):
                raise Race(
                    f"{does} {self.describe(words, writers == number)} while nothing orders this and the write by "
                    f"{event}{self.missing(actor, event)}"
                )
            if actor.proxy == "async" and event.proxy == "generic" and not actor.clock.knows(event, fenced=True):
                raise Race(
                    f"{does} {self.describe(words, writers == number)} through the async proxy: no fence.proxy.async "
                    f"after the generic write by {event}"
                )
        return writers

    def missing(self, actor: Actor, event: Event) -> str:
        """The missing order between them, where it is known."""
        return ""

    def describe(self, words: Words, where: np.ndarray[Any, Any]) -> str:
        """The bytes meant, as a range."""
        index = np.arange(len(self.writer))[words] if isinstance(words, slice) else words
        index = index[where]
        return f"{self.name} bytes {4 * int(index.min())}..{4 * int(index.max()) + 3}"


def distinct(numbers: np.ndarray[Any, Any]) -> list[int]:
    """The different numbers, except 0. Most often there are few."""
    rest = numbers[numbers != 0]
    found: list[int] = []
    while rest.size:
        if len(found) == FEW:
            return [*found, *np.unique(rest).tolist()]
        found.append(int(rest[0]))
        rest = rest[rest != rest[0]]
    return found
