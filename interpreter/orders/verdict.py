"""Decides whether a launch ends in every order, and finds what an order does that the run did not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..machine import scheduler
from ..machine.hazards import Fault, Misuse
from ..machine.state import Machine
from .causality import Deviation, finding
from .skeleton import Recorder, Skeleton, recorded
from .world import World

Making = Callable[[int], Machine]
"""A machine that has not run, of a launch that is always the same, by a seed."""
SEEDS = 2  # whose skeletons must agree


@dataclass
class Other:
    """An order that does what the run did not."""

    deviation: Deviation
    stuck: Sequence[str]  # who waits for what for ever
    wrong: Sequence[str]  # what happens in other phases
    raised: str | None  # by the interpreter in that order; "": nothing; None: it could not be made to take it

    @property
    def harmful(self) -> bool:
        return bool(self.stuck) or self.raised != ""

    def lines(self) -> list[str]:
        found = [f"{self.deviation.kind}: {self.deviation.says}"]
        if self.stuck:
            found += ["  then nothing can go on:", *(f"    {text}" for text in self.stuck)]
        raised = "it could not be made to take it" if self.raised is None else self.raised
        return [*found, f"  the interpreter in this order: {raised or 'nothing to complain about'}"]


@dataclass
class Verdict:
    skeleton: Skeleton
    others: list[Other]  # one for each line and kind
    loose: int  # waits that may pass in several phases, where all else is as in the run
    proved: bool  # every order ends
    seconds: float  # without runs
    run_seconds: float

    @property
    def right(self) -> bool:
        return self.proved and not any(other.harmful for other in self.others)

    def lines(self) -> list[str]:
        x = self.skeleton
        text = (
            f"{x.size} events of {len(x.warps)} warps and {len(x.operations)} operations, {len(x.barriers)} barriers: "
        )
        if not self.others:
            text += "every order does the same and ends"
        elif self.proved:
            text += f"every order ends; {self.loose} waits may pass in several phases"
        else:
            text += "not every order does the same"
        return [text, *(line for other in self.others for line in other.lines())]


def verdict(make: Making) -> Verdict:
    start = time.monotonic()
    skeletons = []
    for seed in range(SEEDS):
        machine = make(seed)
        skeletons.append(recorded(machine))
    first = skeletons[0]
    if any(x.comparable() != first.comparable() for x in skeletons):
        raise Misuse("what warps wait for depends on the order of events: one run does not stand for others")
    run_seconds, start = time.monotonic() - start, time.monotonic()
    found = finding(first)
    seconds = time.monotonic() - start
    world, others = World(first), dict[tuple[str, int], Other]()
    for d in found.deviations:
        if (d.kind, d.event.line) not in others:
            last, wrong = world.outcome(d)
            stuck = [] if world.ended(last) else world.stuck(last)
            others[d.kind, d.event.line] = Other(d, stuck, wrong, replayed(make, first, d))
    return Verdict(first, [*others.values()], len(found.loose), found.ends, seconds, run_seconds)


def replayed(make: Making, skeleton: Skeleton, d: Deviation) -> str | None:
    """Returns what the interpreter raises in an order that does it: nobody goes further than it needs until it is done.

    It is "" if nothing is raised, and None if the order cannot be made to do it.
    """
    machine = make(0)
    tape, name = Recorder(machine, skeleton.left_out), skeleton.barriers[d.event.barrier].name
    warps, phases = tape.skeleton.warps, int(d.before[len(skeleton.warps) + d.event.barrier])
    limits = [int(n) for n in d.before[: len(warps)]]
    if d.kind == "early":
        limits[d.warp] = d.place + 1
    reached = False

    def done() -> bool:
        nonlocal reached
        if not reached and d.kind == "early":
            reached = len(warps[d.warp]) > d.place
        elif not reached:
            reached = any(
                x.name == name and n >= phases for x, n in zip(tape.skeleton.barriers, tape.done, strict=True)
            )
        return reached

    def held(warp: int) -> bool:
        return len(warps[warp]) >= limits[warp] and (warp == d.warp or d.kind == "early") and not done()

    tape.held = held
    try:
        scheduler.run(machine, scheduler.Policy(1, 0.0, [1.0] * machine.warp_count))
    except Fault as fault:
        return f"{type(fault).__name__}: {fault}" if reached else None
    return "" if reached else None
