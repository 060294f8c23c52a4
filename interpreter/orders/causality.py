"""Derives what an event of a skeleton needs, and whether an order may do something else than the run did."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from .skeleton import Event, Kind, Skeleton

Past = np.ndarray[Any, Any]
"""An event's past, itself included: how many events of each warp, and how many phases of each barrier."""


Place = tuple[int, int]
"""An event's place: its warp, and which of the warp's events it is."""


@dataclass(frozen=True)
class Deviation:
    """Something that the run did not do, and an order can."""

    kind: str  # "early", "slept", "late bytes"
    warp: int  # whose event it is, or the issuer's
    operation: int  # -1: the warp's own event
    place: int  # of the event among its warp's; of an operation, of its issue
    event: Event
    before: Past  # what happens first: all that is needed for it, and nothing that would prevent it
    says: str

    @property
    def is_of_a_wait(self) -> bool:
        return self.operation < 0 and self.event.kind is Kind.WAITS


class Order:
    """The partial order of a skeleton, event by event of its run."""

    def __init__(self, skeleton: Skeleton, loose: Collection[Place] = ()):
        """`loose`: waits, by warp and place, that may pass in several phases, and tell nothing certain."""
        x, self.loose = skeleton, frozenset(loose)
        self.skeleton = x
        self.warps = len(x.warps)
        self.size = self.warps + len(x.barriers)
        self.known = [self.nothing() for _ in x.warps]
        self.told = [self.nothing() for _ in x.operations]  # what the issuer knew
        self.issued_at = [0] * len(x.operations)
        self.complete = [0] * len(x.barriers)  # how many phases
        self.ends: dict[tuple[int, int], Past] = {}  # by barrier and phase: what its completion tells
        self.arrived: dict[tuple[int, int], Past] = {}  # the same of arrivals alone, so far
        self.brought: dict[tuple[int, int], Past] = {}
        self.by_operations: set[tuple[int, int]] = set()
        self.waits: dict[tuple[int, int], list[Place]] = {}
        self.expected: dict[tuple[int, int], list[tuple[int, int, Event]]] = {}
        self.found: list[Deviation] = []
        for entry in x.log:
            if entry.event is None:
                self.completes(entry.barrier)
            elif entry.operation < 0:
                warp = entry.warp
                self.happens(entry.event, warp, -1, int(self.known[warp][warp]), self.known[warp])
            else:
                n = entry.operation
                self.happens(entry.event, x.issuers[n][0], n, self.issued_at[n], self.told[n])
        self.check_loose()

    def nothing(self) -> Past:
        return np.zeros(self.size, np.int32)

    def happens(self, e: Event, warp: int, operation: int, place: int, past: Past) -> None:
        """An event at a place of its warp's, which knows a past until now; of an operation, that of its issue."""
        before = past.copy()
        if operation < 0:
            past[warp] += 1
        if e.kind is Kind.ISSUES:
            self.told[e.barrier], self.issued_at[e.barrier] = past.copy(), place
            return
        if operation < 0 and (warp, place) in self.loose:
            return
        bar, key, phases = self.skeleton.barriers[e.barrier], (e.barrier, e.phase), self.warps + e.barrier
        counted = (bar.parity or e.kind is not Kind.WAITS) and not bar.numbered  # in whatever phase is the present one
        while counted and past[phases] < e.phase and self.follows(past, e.barrier, int(past[phases])):
            np.maximum(past, self.ends[e.barrier, int(past[phases])], out=past)
        if counted and past[phases] < e.phase:
            says = f"while nothing tells it that phase {e.phase - 1} is complete"
            self.deviates("early", warp, operation, place, e, before, says)
            past[phases] = e.phase  # said once
        if e.kind is Kind.WAITS:
            self.waits.setdefault(key, []).append((warp, place))
            if e.phase >= 0:
                np.maximum(past, self.ends[key], out=past)
        elif e.kind is Kind.EXPECTS:
            self.expected.setdefault(key, []).append((warp, place, e))
        else:
            if operation >= 0:
                self.by_operations.add(key)
            so_far = self.arrived if e.kind is Kind.ARRIVES else self.brought
            np.maximum(so_far.setdefault(key, self.nothing()), past, out=so_far[key])

    def follows(self, past: Past, barrier: int, phase: int) -> bool:
        """True if a past shows that a phase is complete: all who arrived in it are warps, and have done so."""
        arrived = self.ends[barrier, phase][: self.warps] <= past[: self.warps]
        return (barrier, phase) not in self.by_operations and bool(arrived.all())

    def check_loose(self) -> None:
        """Checks that the loose waits pass in the end.

        The barrier's last phase must have their parity, and need none that does not pass.
        """
        left = {}
        for warp, place in self.loose:
            e = self.skeleton.warps[warp][place]
            last = self.complete[e.barrier] - 1
            left[warp, place] = e, last, self.ends.get((e.barrier, last), self.nothing())
        passing = [*left]
        while passing:
            passing = [
                at
                for at, (e, last, ends) in left.items()
                if (last - e.phase) % 2 == 0 and all(ends[warp] <= place for warp, place in left)
            ]
            for at in passing:
                del left[at]
        for (warp, place), (e, last, ends) in left.items():
            self.deviates("slept", warp, -1, place, e, ends, f"when phase {last} may be complete, too")

    def completes(self, barrier: int) -> None:
        """The next phase of a barrier."""
        number, phases = self.complete[barrier], self.warps + barrier
        key, before = (barrier, number), self.ends.get((barrier, number - 1), self.nothing())
        arrived = np.maximum(self.arrived.pop(key, before), before)
        for warp, place, e in self.expected.pop(key, []):
            if arrived[warp] <= place:
                self.deviates("late bytes", warp, -1, place, e, arrived, "after the phase may be complete")
        ends = np.maximum(arrived, self.brought.pop(key, before))
        ends[phases] = number + 1
        if self.skeleton.barriers[barrier].parity:
            for warp, place in self.waits.pop((barrier, number - 1), []):
                if ends[warp] <= place:
                    e = self.skeleton.warps[warp][place]
                    self.deviates("slept", warp, -1, place, e, ends, f"when phase {number} may be complete, too")
        self.complete[barrier] = number + 1
        self.ends[key] = ends

    def deviates(self, kind: str, warp: int, operation: int, place: int, e: Event, before: Past, says: str) -> None:
        x = self.skeleton
        who = x.names[warp] if operation < 0 else x.issuers[operation][1]
        text = f"{who}, line {e.line}: {e.kind.value} {x.barriers[e.barrier].name}, phase {e.phase}, {says}"
        self.found.append(Deviation(kind, warp, operation, place, e, before.copy(), text))


@dataclass(frozen=True)
class Finding:
    deviations: list[Deviation]
    loose: frozenset[Place]  # waits that may pass in several phases, where nothing else deviates
    ends: bool  # every order


def finding(skeleton: Skeleton) -> Finding:
    """A wait that deviates may do no harm: if all else holds of what is known without it, every order ends."""
    found, loose = Order(skeleton).found, frozenset[Place]()
    now = found
    while now and all(d.is_of_a_wait and (d.warp, d.place) not in loose for d in now):
        loose |= {(d.warp, d.place) for d in now}
        now = Order(skeleton, loose).found
        found = [*found, *now]
    return Finding(found, frozenset() if now else loose, not now)
