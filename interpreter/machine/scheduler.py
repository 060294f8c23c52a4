"""The scheduler, driven by a seed: it picks steps of one warp, or one asynchronous operation.

Nothing here knows about time. A seed also picks a policy: how long a warp runs before another may, how soon what was
issued happens (at once, at any time, or only when no warp can go on), and whether some warps are slower than others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .hazards import Clock, Deadlock, Fault, Leak, Race
from .rules import Rule
from .state import Branching, Machine, Side, Wait, Warp, names

MAX_STEPS = 50_000_000
LATE = 0.002  # how likely a cluster that has not begun does so


@dataclass
class Policy:
    quantum: int
    eagerness: float  # how likely an operation goes first where a warp could
    pace: list[float]  # for each warp, how likely it takes its turn

    @staticmethod
    def even(m: Machine) -> Policy:
        """Everybody in turn: the most like a chip."""
        return Policy(8, 0.2, [1.0] * m.warp_count)

    @staticmethod
    def of(m: Machine) -> Policy:
        rng = m.rng
        return Policy(
            quantum=rng.choice([8, 64, 400]),
            eagerness=rng.choice([0.0, 0.2, 0.9]),
            pace=rng.choices([1.0, 0.05], [0.7, 0.3], k=m.warp_count),
        )


def run(m: Machine, policy: Policy | None = None) -> None:
    """Runs a launch to its end; raises the first fault that is found. policy: by the machine's seed, without one."""
    with np.errstate(all="ignore"):  # infinities and NaN are as good as any number here
        _run(m, policy or Policy.of(m))


def _run(m: Machine, policy: Policy) -> None:
    chance = m.rng.random
    pending, pace = m.pending, policy.pace
    able, blocked = [w for w in m.warps if not any(w.cta in cluster for cluster in m.late)], list[Warp]()
    while able or blocked or pending or m.late:
        if m.news or not (able or pending):
            m.news, still = False, list[Warp]()
            for w in blocked:
                (able if w.waiting is None or w.waiting.ready() else still).append(w)
            blocked = still
            if not able and not pending:
                if not m.late:
                    raise deadlock(m)
                able = m.begin_late()
        elif m.late and chance() < LATE:
            able += m.begin_late()
        if pending and (not able or chance() < policy.eagerness):
            op = pending[int(chance() * len(pending))]
            while (before := next((x for x in op.after if not x.done), None)) is not None:
                op = before
            pending.remove(op)
            m.time += 1
            try:
                op.run(op)
            except Fault as fault:
                i = op.instruction
                raise fault.at_line(i.line, i.text, f"{op.kind} issued by {op.warp.name}") from None
            op.done = m.news = True
            m.log("complete", op.warp, op.what, op)
            continue
        w = able[int(chance() * len(able))]
        if pace[w.index] < 1 and chance() >= pace[w.index]:
            continue
        if w.waiting is not None and not w.waiting.ready():  # again: it slept through a phase
            able.remove(w)
            blocked.append(w)
            continue
        advance(w, 1 + int(chance() * policy.quantum))
        if m.time > MAX_STEPS:
            raise Deadlock(f"no end after {MAX_STEPS} steps; {w.name} is at line {w.instruction.line}")
        if w.exited:
            m.log("exit", w, "")
            able.remove(w)
            m.news = True
            check_exit(w)
        elif w.waiting is not None:
            able.remove(w)
            blocked.append(w)
    check_end(m)


def advance(w: Warp, quantum: int) -> None:
    """Run a warp until it blocks, ends, or has had its turn."""
    steps, m = w.steps, w.machine
    if w.waiting is not None:
        w.waiting = None
        m.log("go", w, "")
    pc = w.pc
    try:
        for _ in range(quantum):
            while pc == w.join:
                pc = rejoin(w)
            w.pc = pc
            m.time += 1
            if w.scoreboard is None:
                result = steps[pc](w)
            elif (result := w.scoreboard.before(w, pc)) is None:
                result = m.single[pc](w)
            if result is None:
                pc += 1
            elif isinstance(result, int):
                pc = result
                if pc < 0 and (pc := leave(w)) < 0:
                    w.exited = True
                    return
            elif w.stack and (other := another_side(w, pc, result)) is not None:
                pc = other
            else:
                w.waiting = result if not w.stack else any_side(w, result)
                if m.moments is not None:
                    m.log("wait", w, result.why())
                return
        w.pc = pc
    except Fault as fault:
        raise fault.at_line(w.instruction.line, w.instruction.text, w.name) from None


# ---- divergence (PTX ISA 9.7.13.1 bra; lanes meet again at the immediate post-dominator)


def branch(w: Warp, taken: int, target: int, fall: int, join: int) -> int:
    """The next pc after a branch that `taken` of the active lanes take."""
    rest = w.active & ~taken
    if rest == 0:
        return target
    if taken == 0:
        return fall
    w.stack.append(Branching(join, [Side(rest, fall)], 0))
    w.join = join
    w.set_active(taken)
    return target


def rejoin(w: Warp) -> int:
    """The active lanes have reached the join on top of the stack. Where to go on."""
    top = w.stack[-1]
    top.arrived |= w.active
    if top.pending:
        return go_on(w, top.pending.pop())
    w.stack.pop()
    w.set_active(top.arrived)
    w.join = w.stack[-1].join if w.stack else -2
    return top.join


def go_on(w: Warp, side: Side) -> int:
    w.set_active(side.lanes)
    return side.pc


def another_side(w: Warp, pc: int, waits: Wait) -> int | None:
    """The active lanes wait at `pc`. Where lanes go on that took another way and need not wait: each thread of a warp
    makes progress of its own. Only the ways of the last branch count."""
    sides = w.stack[-1].pending
    free = next((n for n, x in enumerate(sides) if x.waits is None or x.waits.ready()), None)
    if free is None:
        return None
    other = sides.pop(free)
    sides.insert(0, Side(w.active, pc, waits))
    return go_on(w, other)


def any_side(w: Warp, waits: Wait) -> Wait:
    """Waits until the active lanes can go on, or those of another way of the last branch."""
    all_waits = [waits, *(x.waits for x in w.stack[-1].pending if x.waits is not None)]
    if len(all_waits) == 1:
        return waits
    return Wait(
        lambda: any(x.ready() for x in all_waits), lambda: "; other lanes wait for ".join(x.why() for x in all_waits)
    )


def leave(w: Warp) -> int:
    """The active lanes have ended. Where the others go on; -1 if there are none."""
    w.alive &= ~w.active
    while w.stack:
        top = w.stack[-1]
        if top.pending:
            return go_on(w, top.pending.pop())
        w.stack.pop()
        w.join = w.stack[-1].join if w.stack else -2
        if top.arrived:
            w.set_active(top.arrived)
            return top.join
    return -1


# ---- ends


def deadlock(m: Machine) -> Deadlock:
    """Makes the error that says which warps wait for what, at which line."""
    alike: dict[tuple[int, str], list[str]] = {}
    for w in m.warps:
        if not w.exited:
            assert isinstance(w.waiting, Wait)
            alike.setdefault((w.instruction.line, w.waiting.why()), []).append(w.name)
    lines = [
        f"  {names(who)} at line {line} {'waits' if len(who) == 1 else 'wait'} for {why}"
        for (line, why), who in alike.items()
    ]
    done = [w.name for w in m.warps if w.exited]
    ended = [f"  ended: {names(done)}"] if done else []
    return Deadlock("nothing can go on\n" + "\n".join(lines + ended))


def remark(m: Machine, rule: Rule, fault: Fault) -> None:
    """Raises it, unless it breaks a rule that is not checked."""
    if rule in m.rules:
        raise fault
    m.remarks.add(str(fault))


def check_exit(w: Warp) -> None:
    """A warp has ended: what it started must have, too, before its CTA's memory and registers go."""
    if w.held:
        op, _ = next(iter(w.held.values()))
        raise Leak(f"{w.name} ends while {op} is in flight: nothing waited for it")
    stores = [*itertools.chain.from_iterable(w.extra.get("bulk groups", [])), *w.extra.get("bulk open", [])]
    if stores:
        text = f"{w.name} ends while TMA may still read shared memory: nothing waited for {stores[0]}"
        remark(w.machine, Rule.LAST_STORES, Leak(text))
        for op in stores:
            op.left = True


def check_end(m: Machine) -> None:
    """Everything has ended: what must not be left over."""
    for cta in m.ctas:
        known = Clock(m.warp_count)
        for w in cta.warps:
            known.join(w.clock)
        for op in m.ops_log:
            if (
                cta in op.ctas
                and not op.left
                and op.kind in ("tma", "cp.async", "st.async")
                and not known.ops >> op.number & 1
            ):
                raise Leak(f"CTA {cta.number} ends while a copy may be in flight: nobody waited for {op}")
        known.join(cta.survived)
        for number, does in cta.visits.items():
            event = m.events[number]
            if not known.knows(event):
                raise Race(f"CTA {cta.number} ends while nothing orders that after {event}, who {does} its memory")
        for bar in cta.barriers.values():
            if bar.tx:
                text = (
                    f"{bar} ends with {bar.tx} transaction bytes outstanding: "
                    "what was expected and what was copied do not add up"
                )
                if bar.tx < 0:
                    raise Leak(text)
                remark(m, Rule.EXPECTED_BYTES, Leak(text))
        for number, named in cta.named.items():
            if named.arrived:
                text = f"named barrier {number} ends with {named.arrived} of {named.count} threads arrived"
                remark(m, Rule.NAMED_BARRIERS, Leak(text))
    for check in m.exit_checks:
        check()
