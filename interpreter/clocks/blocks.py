"""Straight-line code in the order in which an assembler would put it.

PTX says little about order: ptxas moves arithmetic to where its operands are there and its unit is free. Here a block
is scheduled once, as if its warp were alone: of what is ready, that goes first which has the longest way to the block's
end. Instructions that touch memory or other warps stay in their order. What a warp then meets in a run (units that
other warps use, loads that take longer) delays instructions, and does not reorder them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ..machine.decode import Code
from ..machine.fusion import Lanewise, Run
from ..machine.parser import is_jump
from ..machine.state import Step, Warp
from .costs import Cost


@dataclass(frozen=True)
class Block:
    order: Sequence[int]  # instructions, as they are issued
    end: int  # the instruction after the last
    groups: dict[int, Group]  # by place in the order: the arithmetic that begins there


@dataclass(eq=False)
class Group:
    """Arithmetic with nothing else between: what it computes is done at once, at the end."""

    numbers: Sequence[int]
    run: Run | None = None  # where all are without guards

    def execute(self, w: Warp, steps: Sequence[Step]) -> None:
        if self.run is not None and self.run.compiled is not None and w.scoreboard is None:
            w.pc = self.numbers[0]
            self.run.compiled(w)
            return
        for n in self.numbers:
            w.pc = n
            result = steps[n](w)
            assert result is None


class Blocks:
    """The blocks of a program, each made when it is first reached."""

    def __init__(self, code: Code, costs: Sequence[Cost], fences: Sequence[tuple[frozenset[int], frozenset[int]]]):
        """fences: for each instruction, more registers that it is to be taken to read and to write."""
        self.code, self.costs, self.fences = code, costs, fences
        program = code.program
        self.leaders = {*program.labels.values(), *program.join.values()}
        self.leaders |= {n + 1 for n, i in enumerate(program.code) if is_jump(i)}
        self.made: dict[int, Block] = {}

    def at(self, pc: int) -> Block:
        if pc not in self.made:
            end = pc + 1
            while end not in self.leaders and end < len(self.code.steps):
                end += 1
            self.made[pc] = self.make(pc, end)
        return self.made[pc]

    def make(self, first: int, end: int) -> Block:
        order = self.scheduled(first, end)
        groups, row, steps = dict[int, Group](), list[int](), self.code.steps

        def close(place: int) -> None:
            if row:
                plain = all(isinstance(steps[n], Lanewise) for n in row)
                run = Run(tuple(steps[n] for n in row), self.code.decoder.constants) if plain else None  # type: ignore[misc]
                if run is not None:
                    run.compiled = run.compile()
                groups[place - len(row)] = Group(tuple(row), run)
                row.clear()

        for place, n in enumerate(order):
            if self.costs[n].ordered:
                close(place)
            else:
                row.append(n)
        close(len(order))
        return Block(order, end, groups)

    def predecessors(self, first: int, end: int) -> list[dict[int, float]]:
        """Returns for each instruction of a block those before it, and how many clocks after their issue it may go."""
        before: list[dict[int, float]] = [{} for _ in range(first, end)]
        written: dict[int, int] = {}
        read: dict[int, list[int]] = {}
        last_ordered = -1
        for n in range(first, end):
            cost, (more_reads, more_writes) = self.costs[n], self.fences[n]
            mine = before[n - first]
            for slot in (*cost.reads, *more_reads):
                if slot in written:
                    by = written[slot]
                    mine[by] = max(mine.get(by, 0), self.costs[by].latency)
                read.setdefault(slot, []).append(n)
            for slot in (*cost.writes, *more_writes):
                for by in read.pop(slot, ()):
                    if by != n:
                        mine[by] = max(mine.get(by, 0), 0)
                if slot in written:
                    mine[written[slot]] = max(mine.get(written[slot], 0), 1)
                written[slot] = n
            if cost.ordered:
                if last_ordered >= 0:
                    mine[last_ordered] = max(mine.get(last_ordered, 0), 1)
                last_ordered = n
        if is_jump(self.code.program.code[end - 1]):
            for n in range(first, end - 1):
                before[-1].setdefault(n, 0)
        return before

    def scheduled(self, first: int, end: int) -> list[int]:
        before = self.predecessors(first, end)
        after: list[list[tuple[int, float]]] = [[] for _ in before]
        for k, mine in enumerate(before):
            for n, latency in mine.items():
                after[n - first].append((k, latency))
        way = [0.0] * len(before)
        for k in range(len(before) - 1, -1, -1):
            way[k] = max((way[x] + max(latency, self.costs[first + k].slots) for x, latency in after[k]), default=0.0)
        turn, ordered = [len(before)] * len(before), [k for k in range(len(before)) if self.costs[first + k].ordered]
        for k in reversed(ordered):
            wanted = [k]
            while wanted:
                turn[x := wanted.pop()] = k
                wanted += [n - first for n in before[x] if turn[n - first] != k and not self.costs[n].ordered]
        missing = [len(mine) for mine in before]
        ready = [0.0] * len(before)
        later = [(0.0, k) for k, count in enumerate(missing) if count == 0]
        heapq.heapify(later)
        able: list[tuple[int, float, int]] = []
        free: dict[str, float] = {}
        now, order = 0.0, list[int]()
        while able or later:
            while later and later[0][0] <= now:
                _, k = heapq.heappop(later)
                heapq.heappush(able, (turn[k], -way[k], k))
            passed, chosen = list[tuple[int, float, int]](), -1
            while able:
                entry = heapq.heappop(able)
                unit = self.costs[first + entry[2]].unit
                if free.get(unit, 0) <= now:
                    chosen = entry[2]
                    break
                passed.append(entry)
                if len(passed) > 8:
                    break
            for entry in passed:
                heapq.heappush(able, entry)
            if chosen < 0:
                soon = [free[self.costs[first + k].unit] for *_, k in passed] + [t for t, _ in later[:1]]
                now = max(min(soon), now + 1)
                continue
            cost = self.costs[first + chosen]
            order.append(first + chosen)
            if cost.unit:
                free[cost.unit] = now + cost.clocks
            for k, latency in after[chosen]:
                ready[k] = max(ready[k], now + max(latency, cost.slots))
                missing[k] -= 1
                if missing[k] == 0:
                    heapq.heappush(later, (ready[k], k))
            now += cost.slots
        return order
