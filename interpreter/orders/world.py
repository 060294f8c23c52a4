"""A skeleton that goes on step by step, by the numbers and parities that its barriers have, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .causality import Deviation
from .skeleton import Event, Kind, Skeleton, counts

MANY = 1 << 30


class State(NamedTuple):
    at: tuple[int, ...]  # by warp: how many of its events have happened
    flying: frozenset[int]  # operations that are issued and have not happened
    barriers: tuple[tuple[int, int, int], ...]  # phases that are complete; arrivals that are missing; bytes that are


@dataclass
class Search:
    whole: bool  # whether it has been in all states
    ends: list[State]  # in which nothing can go on
    wrong: list[str]  # what somebody did in another phase than in the run


class World:
    def __init__(self, skeleton: Skeleton):
        self.skeleton, self.counts = skeleton, counts(skeleton)

    def start(self) -> State:
        return State(
            (0,) * len(self.skeleton.warps),
            frozenset(),
            tuple((0, self.count(n, 0), 0) for n in range(len(self.skeleton.barriers))),
        )

    def count(self, barrier: int, phase: int) -> int:
        bar = self.skeleton.barriers[barrier]
        return self.counts.get((barrier, phase), MANY) if bar.arrivals is None else bar.arrivals

    # ---- moves: a warp's number, or -1 - an operation's

    def moves(self, s: State) -> Iterator[int]:
        for warp, events in enumerate(self.skeleton.warps):
            if s.at[warp] < len(events) and self.possible(s, events[s.at[warp]]):
                yield warp
        yield from (-1 - n for n in sorted(s.flying))

    def possible(self, s: State, e: Event) -> bool:
        if e.kind is not Kind.WAITS:
            return True
        phases = s.barriers[e.barrier][0]
        if self.skeleton.barriers[e.barrier].parity:
            return (phases - e.phase) % 2 == 1
        return phases > e.phase

    def after(self, s: State, move: int) -> tuple[State, list[str]]:
        """And what of it was otherwise in the run."""
        at, flying, bars, wrong = list(s.at), s.flying, list(s.barriers), list[str]()
        if move < 0:
            who, events = self.skeleton.issuers[-1 - move][1], self.skeleton.operations[-1 - move]
            flying = flying - {-1 - move}
        else:
            who, events = self.skeleton.names[move], [self.skeleton.warps[move][at[move]]]
            at[move] += 1
        for e in events:
            if e.kind is Kind.ISSUES:
                flying = flying | {e.barrier} if self.skeleton.operations[e.barrier] else flying
                continue
            phases, missing, size = bars[e.barrier]
            bar = self.skeleton.barriers[e.barrier]
            counted = (bar.parity or e.kind is not Kind.WAITS) and not bar.numbered
            if counted and phases != e.phase + (e.kind is Kind.WAITS):
                wrong.append(f"{who}, line {e.line}: {e.kind.value} {bar.name} in phase {phases}, not {e.phase}")
            if e.kind is Kind.WAITS:
                continue
            missing -= e.amount if e.kind is Kind.ARRIVES else 0
            size += {Kind.EXPECTS: e.amount, Kind.BRINGS: -e.amount}.get(e.kind, 0)
            if missing < 0:
                wrong.append(f"{who}, line {e.line}: an arrival too many at {bar.name} in phase {phases}")
                missing = 0
            if missing == 0 and size == 0:
                phases += 1
                missing = self.count(e.barrier, phases)
            bars[e.barrier] = phases, missing, size
        return State(tuple(at), flying, tuple(bars)), wrong

    # ----

    def search(self) -> Search:
        """All states, or the first 100 000."""
        first = self.start()
        seen, ahead, ends, wrong = {first}, [first], list[State](), dict[str, None]()
        while ahead and len(seen) < 100_000:
            s, stuck = ahead.pop(), True
            for move in self.moves(s):
                stuck = False
                new, says = self.after(s, move)
                wrong |= dict.fromkeys(says)
                if new not in seen:
                    seen.add(new)
                    ahead.append(new)
            if stuck:
                ends.append(s)
        return Search(not ahead, ends, list(wrong))

    def until(self, d: Deviation) -> State:
        """The state in which all has happened that a deviation needs, and nothing else."""
        s, warps = self.start(), len(self.skeleton.warps)
        while True:
            allowed = (m for m in self.moves(s) if (s.at[m] < d.before[m] if m >= 0 else self.needed(-1 - m, d, warps)))
            if (move := next(allowed, None)) is None:
                return s
            s, _ = self.after(s, move)

    def needed(self, operation: int, d: Deviation, warps: int) -> bool:
        return any(d.before[warps + e.barrier] > e.phase for e in self.skeleton.operations[operation])

    def outcome(self, d: Deviation) -> tuple[State, list[str]]:
        """The last state of an order that does it: who deviates goes first where that is early, last otherwise."""
        s, wrong = self.until(d), list[str]()
        own = d.warp if d.operation < 0 else -1 - d.operation
        if d.kind == "early" and own in self.moves(s):
            s, wrong = self.after(s, own)
        while moves := sorted(self.moves(s), key=lambda move: move == own):
            s, says = self.after(s, moves[0])
            wrong += says
        return s, wrong

    def ended(self, s: State) -> bool:
        return all(n == len(events) for n, events in zip(s.at, self.skeleton.warps, strict=True))

    def stuck(self, s: State) -> Sequence[str]:
        """Says who waits for what in a state in which nothing can go on."""
        found: dict[str, list[str]] = {}
        for name, n, events in zip(self.skeleton.names, s.at, self.skeleton.warps, strict=True):
            if n < len(events):
                e = events[n]
                phases, missing, size = s.barriers[e.barrier]
                bar = self.skeleton.barriers[e.barrier].name
                text = f"line {e.line}, phase {e.phase} of {bar}, which is in phase {phases}: "
                text += f"{missing if missing < MANY else 'all'} arrivals and {size} bytes are missing"
                found.setdefault(text, []).append(name)
        return [f"{', '.join(who)}: {text}" for text, who in found.items()]
