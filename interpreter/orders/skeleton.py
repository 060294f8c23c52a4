"""Records the synchronisation of a run: the events of each warp, and of each operation that was issued."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from ..machine import scheduler
from ..machine.hazards import Misuse
from ..machine.parser import Instruction, Program
from ..machine.state import AsyncOp, Machine, MBarrier, Step, Wait, Warp


class Kind(Enum):
    WAITS = "waits for"
    ARRIVES = "arrives at"
    EXPECTS = "expects bytes at"
    BRINGS = "brings bytes to"
    ISSUES = "issues"


class Event(NamedTuple):
    kind: Kind
    barrier: int  # its number; of an issue, the operation's
    phase: int = 0  # of the barrier in the run: what a wait waits for, what everything else counts in
    amount: int = 0
    line: int = 0  # of the PTX


class Barrier(NamedTuple):
    name: str
    arrivals: int | None  # in a phase; None: what the run had in each, as of named barriers
    parity: bool  # waits for it know their phase by its parity alone
    numbered: bool = False  # who arrives knows the phase: warps of a warpgroup at their n-th product


class Entry(NamedTuple):
    """One thing that happened in the run: an event, or the end of a barrier's phase."""

    warp: int  # -1: an operation
    operation: int
    event: Event | None  # None: a phase of the barrier is complete
    barrier: int


@dataclass
class Skeleton:
    names: list[str]  # of warps
    warps: list[list[Event]]
    operations: list[list[Event]]  # what each arrives at and brings, when it happens
    issuers: list[tuple[int, str]]  # of operations: the warp, and what they are
    barriers: list[Barrier]
    log: list[Entry]
    left_out: frozenset[str] = frozenset()
    """names of barriers that nobody waits for in the run: they order nothing, and no event here is of them"""

    @property
    def size(self) -> int:
        return sum(map(len, self.warps)) + sum(map(len, self.operations))

    def comparable(self) -> tuple[object, ...]:
        """Returns what all runs of a launch share if what a warp does does not depend on the order of events."""
        seen: dict[int, str] = {n: bar.name for n, bar in enumerate(self.barriers)}

        def of(events: Sequence[Event]) -> list[object]:
            return [
                sorted(map(repr, of(self.operations[e.barrier])))
                if e.kind is Kind.ISSUES
                else (e.kind.name, seen[e.barrier], e.phase % 2 if e.kind is Kind.WAITS else e.phase, e.amount, e.line)
                for e in events
            ]

        return tuple(tuple(map(repr, of(events))) for events in self.warps)


SILENT = ("wgmma", "tcgen05.mma", "tcgen05.ld", "tcgen05.st", "tcgen05.cp")
"""Kinds of operations that arrive nowhere: they happen, and nobody but who issued them waits."""


ASKS = ("mbarrier.try_wait", "mbarrier.test_wait")


def goes_to(program: Program, i: Instruction, index: int) -> bool:
    """True if it is a branch to the instruction at `index`, or to one of the two right before it."""
    return i.opcode.startswith("bra") and index - 2 <= program.target_of(str(i.args[0]), i) <= index


class Recorder:
    """The tape of a machine that has not run, but for some barriers. A warp does not go on while it is `held`."""

    def __init__(self, machine: Machine, left_out: Collection[str] = ()):
        if machine.late:
            raise Misuse("launch control: which CTA does what depends on the order of events")
        code = machine.program.code
        for n, i in enumerate(code):
            if i.opcode.startswith(ASKS) and not any(goes_to(machine.program, x, n) for x in code[n + 1 : n + 4]):
                says = "asks a barrier, and goes on: what it does then depends on the order of events"
                raise Misuse(says).at_line(i.line, i.text)
        self.machine, self.left_out = machine, left_out
        self.held: Callable[[int], bool] | None = None
        self.actor: Warp | AsyncOp | None = None
        self.numbers: dict[Hashable, int] = {}  # of barriers
        self.places: dict[int, int] = {}  # of operations, by their number in the machine
        self.done: list[int] = []  # by barrier: phases that are complete
        names = [w.name for w in machine.warps]
        self.skeleton = Skeleton(names, [[] for _ in names], [], [], [], [])
        machine.tape = self
        machine.single = list(map(self.watched, machine.single))
        machine.steps = list(map(self.watched, machine.steps))
        for w in machine.warps:
            w.steps = machine.steps

    def watched(self, step: Step) -> Step:
        def watched(w: Warp) -> int | Wait | None:
            if (held := self.held) is not None and held(w.index):
                return Wait(lambda: not held(w.index), lambda: "its turn in this order")
            self.actor = w
            return step(w)

        return watched

    # ---- of machine.state.Tape

    def issued(self, op: AsyncOp) -> None:
        if op.kind in SILENT:
            return
        run = op.run

        def watched(op: AsyncOp) -> None:
            self.actor = op
            run(op)

        op.run = watched
        place = self.places[op.number] = len(self.places)
        self.skeleton.operations.append([])
        self.skeleton.issuers.append((op.warp.index, f"{op} of {op.warp.name}"))
        self.add(op.warp, Event(Kind.ISSUES, place, line=op.instruction.line))

    def arrives(self, bar: Hashable, count: int = 1, phase: int | None = None) -> None:
        self.note(Kind.ARRIVES, bar, count, phase)

    def expects(self, bar: Hashable, size: int) -> None:
        self.note(Kind.EXPECTS, bar, size)

    def brings(self, bar: Hashable, size: int) -> None:
        self.note(Kind.BRINGS, bar, size)

    def completes(self, bar: Hashable) -> None:
        number = self.number(bar)
        self.done[number] += 1
        if self.skeleton.barriers[number].name not in self.left_out:
            self.skeleton.log.append(Entry(-1, -1, None, number))

    def passes(self, bar: Hashable, phase: int | None = None) -> None:
        self.note(Kind.WAITS, bar, 0, self.done[self.number(bar)] - 1 if phase is None else phase)

    # ----

    def number(self, bar: Hashable) -> int:
        if bar not in self.numbers:
            self.numbers[bar] = len(self.done)
            self.done.append(0)
            mbarrier = isinstance(bar, MBarrier)
            numbered = isinstance(bar, str) and bar.startswith("wgmma")
            count = bar.count if isinstance(bar, MBarrier) else None
            self.skeleton.barriers.append(Barrier(self.name(bar), count, mbarrier, numbered))
        return self.numbers[bar]

    def name(self, bar: Hashable) -> str:
        text = str(bar)
        if isinstance(bar, MBarrier) and len(bar.cta.cluster) == 1 < self.machine.grid_size:
            text = text.replace(" (", f" of CTA {bar.cta.number} (", 1)
        return text

    def note(self, kind: Kind, bar: Hashable, amount: int, phase: int | None = None) -> None:
        number, actor = self.number(bar), self.actor
        assert actor is not None
        if self.skeleton.barriers[number].name not in self.left_out:
            phase = self.done[number] if phase is None else phase
            self.add(actor, Event(kind, number, phase, amount, actor.instruction.line))

    def add(self, actor: Warp | AsyncOp, event: Event) -> None:
        if isinstance(actor, AsyncOp):
            place = self.places[actor.number]
            self.skeleton.operations[place].append(event)
            self.skeleton.log.append(Entry(-1, place, event, event.barrier))
        else:
            self.skeleton.warps[actor.index].append(event)
            self.skeleton.log.append(Entry(actor.index, -1, event, event.barrier))


def counts(skeleton: Skeleton) -> Mapping[tuple[int, int], int]:
    """The arrivals that each phase of each barrier had in the run."""
    found: dict[tuple[int, int], int] = {}
    for events in (*skeleton.warps, *skeleton.operations):
        for e in events:
            if e.kind is Kind.ARRIVES:
                found[e.barrier, e.phase] = found.get((e.barrier, e.phase), 0) + e.amount
    return found


def recorded(machine: Machine) -> Skeleton:
    """Runs a machine that has not run; raises what it finds."""
    tape = Recorder(machine)
    scheduler.run(machine)
    return waited_for(tape.skeleton)


def waited_for(x: Skeleton) -> Skeleton:
    """The same without events at barriers that nobody waits for."""
    events = [e for of in (*x.warps, *x.operations) for e in of]
    waited = {e.barrier for e in events if e.kind is Kind.WAITS}
    if len(waited) == len(x.barriers):
        return x

    def stays(e: Event | None, barrier: int) -> bool:
        return barrier in waited or (e is not None and e.kind is Kind.ISSUES)

    def kept(lists: list[list[Event]]) -> list[list[Event]]:
        return [[e for e in of if stays(e, e.barrier)] for of in lists]

    left_out = frozenset(bar.name for n, bar in enumerate(x.barriers) if n not in waited)
    log = [entry for entry in x.log if stays(entry.event, entry.barrier)]
    return replace(x, warps=kept(x.warps), operations=kept(x.operations), log=log, left_out=left_out)
