"""A second scheduler: warps and operations by clocks, where `machine.scheduler` goes by chance.

What happens is what happens there: the same steps and operations, checked in the same way. When it happens is decided
here. A warp issues its instructions in the order of `blocks.py`, as soon as its registers are there, and its quarter
and the unit are free. An operation goes to one of the SM's units, and happens when that is done with it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections.abc import Callable

import numpy as np

from ..machine.decode import Code
from ..machine.hazards import Fault
from ..machine.scheduler import MAX_STEPS, check_end, check_exit, deadlock, leave, rejoin
from ..machine.state import AsyncOp, Cta, Machine, Wait, Warp
from ..machine.timeline import barrier_of
from .architecture import constants_of
from .blocks import Block, Blocks, Group
from .costs import costs_of
from .runner import Cause, Runner, Waited
from .timing import Timing
from .units import Product, Sm, access, bytes_of, demand_of

WARPGROUP = 128  # threads
BACKLOG = 1500  # clocks of stores on their way out, until a warp that stores more waits


class Even(random.Random):
    """No chance: try_wait sleeps, and another cluster's work is there as long as there is any."""

    def random(self) -> float:
        return 0.99


def run(m: Machine, ctas: int = 1, *, cold: bool = False, alone: bool = False) -> Timing:
    """Runs a launch by clocks, and raises what is found, as the machine's `scheduler.run` does. `ctas`: how many share
    an SM; `cold`: whether what is loaded comes out of HBM, and not out of the L2 cache; `alone`: each warpgroup has an
    SM of its own, where nothing waits for a unit, so that only chains are left.
    """
    with np.errstate(all="ignore"):
        return Clockwork(m, ctas, cold, alone).run()


class Clockwork:
    def __init__(self, m: Machine, ctas: int, cold: bool, alone: bool):
        self.m, m.rng = m, Even(0)
        constants = constants_of(m.program.target)
        self.c = {name: x.value for name, x in constants.items()}
        if cold:
            self.c["l2"] = self.c["hbm"]
            for name in ("l2 latency", "tma latency", "gather latency"):
                self.c[name] += self.c["hbm latency"]
        self.code = Code.of(m.program)
        self.costs = costs_of(self.code, self.c)
        self.blocks = Blocks(self.code, self.costs, fences_of(self.code))
        size = m.cluster_size
        if alone:
            ctas, self.groups = 1, -(-m.threads // WARPGROUP)
        else:
            self.groups = 1
        count = -(-m.grid_size // (size * ctas)) * size
        self.sms = [Sm(self.c, queues=not alone) for _ in range(count * self.groups)]
        self.place = [n // (size * ctas) * size + n % size for n in range(m.grid_size)]  # a CTA's
        late = {w.index for cluster in m.late for cta in cluster for w in cta.warps}
        self.runners = [Runner(w, self.sm_of(w.cta, w)) for w in m.warps]
        self.blocked: list[Runner] = []
        self.count = itertools.count()
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []
        self.seen = 0  # operations
        self.missing: dict[int, int] = {}  # operation -> how many that come before it are not done
        self.then: dict[int, list[AsyncOp]] = {}  # operation -> those that it comes before
        self.issued: dict[int, float] = {}
        self.now = 0.0
        self.timing = Timing(m, self.sms, self.c)
        self.memory = [self.memory_access(n) for n in range(len(m.program.code))]
        for r in self.runners:
            if r.warp.index not in late:
                self.later(0.0, self.going(r))

    def sm_of(self, cta: Cta, warp: Warp) -> Sm:
        """Returns a CTA's SM; if its warpgroups have one each, that of this warp's."""
        return self.sms[self.place[cta.number] * self.groups + warp.number // 4 % self.groups]

    def later(self, t: float, does: Callable[[float], None]) -> None:
        heapq.heappush(self.heap, (t, next(self.count), does))

    def going(self, r: Runner) -> Callable[[float], None]:
        return lambda now: self.go(r, now)

    def run(self) -> Timing:
        m = self.m
        while self.heap:
            t, _, does = heapq.heappop(self.heap)
            self.now = max(self.now, t)
            does(t)
        if self.blocked or m.pending:
            raise deadlock(m)
        for cluster in m.late:  # which begin after these on the same SM: the next turn, the same again
            for cta in cluster:
                for w in cta.warps:
                    w.exited = True
        if not m.late:
            check_end(m)
        self.timing.end(self.now, self.runners)
        return self.timing

    # ---- warps

    def go(self, r: Runner, now: float) -> None:
        """Issue what can be issued until something else comes first."""
        w, m, heap, costs = r.warp, self.m, self.heap, self.costs
        quarter = r.sm.quarters[w.number % 4]
        ready, free, own, busy = r.ready, quarter.free, r.own, quarter.busy
        pace, beside, pipe, slots = self.c["pace"], self.c["beside products"], r.sm.pipe, r.sm.slots
        try:
            while True:
                if r.block is None:
                    pc = w.pc
                    while pc == w.join:
                        pc = rejoin(w)
                    w.pc = pc
                    r.block, r.place = self.blocks.at(pc), 0
                block = r.block
                order, place = block.order, r.place
                while place < len(order):
                    n = order[place]
                    cost = costs[n]
                    t = r.at
                    for slot in cost.reads:
                        if ready.get(slot, 0.0) > t:
                            t = ready[slot]
                    if w.scoreboard is not None:
                        w.pc = n
                        if (wait := w.scoreboard.before(w, n)) is not None:
                            r.place = place
                            return self.block(r, wait, t)
                    if cost.slots:
                        t = max(t, quarter.issue, free[cost.unit], own[cost.unit])
                    if heap and heap[0][0] < t:
                        r.place = place
                        return self.later(t, self.going(r))
                    if cost.ordered:
                        w.pc = n
                        m.time += 1
                        if m.time > MAX_STEPS:
                            raise deadlock(m)
                        result = m.single[n](w)
                        if isinstance(result, Wait):
                            r.place = place
                            return self.block(r, result, t)
                        quarter.issue = r.at = t + cost.slots
                        busy["issue"] += 1
                        slots[w.number] += 1
                        finish = self.memory[n](r, t)
                        for slot in cost.writes:
                            ready[slot] = finish
                        self.absorb(r, t)
                        if m.news:
                            m.news = False
                            self.wake(t, Cause(r, None, t, r.cause))
                        place += 1
                        if isinstance(result, int):
                            w.pc = result
                            r.at = t + (self.c["branch"] if result != n + 1 else 1)
                            if result < 0 and (after := leave(w)) < 0:
                                return self.exit(r, t)
                            w.pc = result if result >= 0 else after
                            break
                        continue
                    if cost.slots:
                        factor = 1 if pipe.current is None else beside
                        quarter.issue = t + factor * cost.slots
                        r.at = max(r.at, t + pace * factor * cost.slots)
                        busy["issue"] += cost.slots
                        slots[w.number] += cost.slots
                        if cost.unit:
                            free[cost.unit] = t + factor * cost.clocks
                            own[cost.unit] = t + pace * factor * cost.clocks
                            busy[cost.unit] += cost.clocks
                    for slot in cost.writes:
                        ready[slot] = t + cost.latency
                    place += 1
                    if place == len(order) or costs[order[place]].ordered:
                        self.group(block, place).execute(w, self.code.steps)
                else:
                    w.pc = block.end
                r.block = None
        except Fault as fault:
            raise fault.at_line(w.instruction.line, w.instruction.text, w.name) from None

    def group(self, block: Block, end: int) -> Group:
        """The arithmetic that ends at a place in a block's order."""
        first = end - 1
        while first not in block.groups:
            first -= 1
        return block.groups[first]

    def block(self, r: Runner, wait: Wait, t: float) -> None:
        r.warp.waiting, r.since, r.what = wait, t, barrier_of(wait.why()).split(" +")[0]
        self.blocked.append(r)

    def wake(self, t: float, cause: Cause) -> None:
        """Something has happened that a warp may wait for."""
        still = []
        for r in self.blocked:
            wait = r.warp.waiting
            assert wait is not None
            if not wait.ready():
                still.append(r)
                continue
            opcode = r.warp.instruction.opcode
            delay = self.c["barrier" if opcode.startswith("bar") else "tensor end" if "wgmma" in opcode else "wake"]
            if opcode.startswith("tcgen05"):
                delay = 0
            r.at = max(r.since, t + delay)
            r.waits.append(Waited(r.since, r.at, r.what, r.warp.instruction.line, cause))
            r.cause = cause
            r.warp.waiting = None
            self.later(r.at, self.going(r))
        self.blocked = still

    def exit(self, r: Runner, t: float) -> None:
        r.warp.exited, self.now = True, max(self.now, t)
        check_exit(r.warp)
        self.wake(t, Cause(r, None, t, r.cause))

    # ---- what an instruction of a warp takes beside its slot

    def memory_access(self, n: int) -> Callable[[Runner, float], float]:
        """Makes what tells when the registers of instruction n are there, by the warp and the time of its issue."""
        i, c = self.m.program.code[n], self.c
        opcode, latency = i.opcode.replace(".volatile", ""), self.costs[n].latency
        decoder = self.code.decoder
        if opcode.startswith(("ld.shared", "st.shared", "ldmatrix", "stmatrix", "atom.shared", "red.shared")):
            writes = opcode.startswith(("st", "red"))
            address = i.args[0 if writes else 1]
            slot, offset = decoder.address(address)
            remote = "shared::cluster" in opcode

            def shared(r: Runner, t: float) -> float:
                if remote:
                    return r.sm.peer.move(t, bytes_of(i) * r.warp.active.bit_count())[1] + latency
                end = r.sm.smem.access(t, access(r.warp, i, slot, offset), "st.shared" if writes else "ld.shared")
                r.at = max(r.at, end - 32)
                return end + latency

            return shared
        if opcode.startswith(("ld.", "atom.")) and ".param" not in opcode:
            return lambda r, t: r.sm.l2.move(t, bytes_of(i) * r.warp.active.bit_count())[1] + latency
        if opcode.startswith(("st.global", "red.global", "red.relaxed", "red.gpu")):
            factor = 2 if opcode.startswith("red") else 1

            def out(r: Runner, t: float) -> float:
                end = r.sm.out.move(t, factor * bytes_of(i) * r.warp.active.bit_count())[1]
                r.at = max(r.at, end - BACKLOG)
                return end

            return out
        if opcode.startswith(("shfl", "redux")):
            return lambda r, t: r.sm.smem.shuffle(t, c["shuffle"]) + latency
        if opcode.startswith(("fence.proxy", "fence.acq", "fence.sc", "membar")):

            def fence(r: Runner, t: float) -> float:
                r.at = t + c["fence"]
                return r.at

            return fence
        return lambda r, t: t + latency

    # ---- operations

    def absorb(self, r: Runner, t: float) -> None:
        log = self.m.ops_log
        while self.seen < len(log):
            op = log[self.seen]
            self.seen += 1
            self.issued[op.number] = t
            self.timing.issuer[op.number] = r, r.cause
            if op.kind in ("wgmma", "tcgen05.mma", "tcgen05.cp"):
                start = t + self.c["tensor start"]
                key = op.cta.number, op.warp.number // (4 if op.kind == "wgmma" else 1)
                r.sm.pipe.put(key, Product(op, demand_of(op, self.c), t, start))
                self.later(start, lambda now, sm=r.sm: self.feed(sm, now))  # type: ignore[misc]
                continue
            before = [x for x in op.after if not x.done]
            if before:
                self.missing[op.number] = len(before)
                for x in before:
                    self.then.setdefault(x.number, []).append(op)
            else:
                self.begin(op, t)

    def begin(self, op: AsyncOp, t: float) -> None:
        """All that comes before it is done."""
        end = self.duration(op, t)
        self.later(end, lambda now: self.complete(op, now))

    def complete(self, op: AsyncOp, now: float) -> None:
        m = self.m
        m.pending.remove(op)
        m.time += 1
        try:
            op.run(op)
        except Fault as fault:
            i = op.instruction
            raise fault.at_line(i.line, i.text, f"{op.kind} issued by {op.warp.name}") from None
        op.done, m.news = True, False
        for later in self.then.pop(op.number, ()):
            self.missing[later.number] -= 1
            if self.missing[later.number] == 0:
                self.begin(later, now)
        r, why = self.timing.issuer[op.number]
        self.wake(now, Cause(r, op, now, why, self.issued[op.number]))

    def duration(self, op: AsyncOp, t: float) -> float:
        """Returns when an operation that may begin now is done."""
        c, sm, opcode = self.c, self.sm_of(op.cta, op.warp), op.instruction.opcode
        if op.kind == "tcgen05.commit":
            return t + c["commit"]
        if op.kind in ("tcgen05.ld", "tcgen05.st"):
            registers = op.instruction.args[0 if op.kind == "tcgen05.ld" else -1]
            count = len(registers) if isinstance(registers, tuple) else 1
            return sm.tmem[op.warp.number % 4].move(t, 128 * count)[1] + c["tmem latency"]
        if op.kind == "cp.async arrival":
            return t
        size = size_of(op)
        if op.kind == "st.async" or "shared::cluster.shared::cta" in opcode:
            start, end = sm.peer.move(t, size)
            sm.smem.flow(start, end, size, "to a peer")
            for cta in op.ctas:
                if cta is not op.cta:
                    self.sm_of(cta, op.warp).smem.flow(start, end + 1e-6, size, "from a peer")
            return end + c["peer latency"]
        if op.kind == "cp.async":
            start, end = sm.l2.move(t, size)
            sm.smem.flow(start + c["gather latency"], end + c["gather latency"], size, "copies")
            return end + c["gather latency"]
        assert op.kind == "tma", op.kind
        if "global.shared::cta" in opcode:
            adds = "reduce" in opcode
            start, end = sm.out.move(t + 50, size * (1 + adds))
            sm.smem.flow(start, end, size, "stores")
            return end
        if not size:  # launch control
            return t + c["tma latency"]
        last = t
        for cta in op.ctas:
            target = self.sm_of(cta, op.warp)
            start, end = target.l2.move(t, size)
            target.smem.flow(start + c["tma latency"], end + c["tma latency"], size, "copies")
            last = max(last, end)
        return last + c["tma latency"]

    # ---- the tensor pipe

    def feed(self, sm: Sm, now: float) -> None:
        pipe = sm.pipe
        if pipe.current is not None:
            return
        found = pipe.next(now)
        if isinstance(found, float):
            return  # an event is there for it
        if found is None:
            return
        found.before = pipe.done[-1] if pipe.done else None
        found.start, pipe.current, found.busy, found.asked = now, found, sm.busy(now), sm.asked()
        pipe.taken = [x.smem.taken_until(now) for x in self.sms_of(found.op)]
        self.later(now + max(found.demand.tensor, found.demand.smem), lambda t: self.multiplied(sm, t))

    def sms_of(self, op: AsyncOp) -> list[Sm]:
        cta = op.cta
        pair = (
            [cta, *(x for x in cta.cluster if x.rank == cta.rank ^ 1)]
            if "cta_group::2" in op.instruction.opcode
            else [cta]
        )
        return [self.sm_of(x, op.warp) for x in pair]

    def multiplied(self, sm: Sm, now: float) -> None:
        pipe = sm.pipe
        x = pipe.current
        assert x is not None
        sms = self.sms_of(x.op)
        others = max(s.smem.taken_until(now) - taken for s, taken in zip(sms, pipe.taken, strict=True))
        end = x.start + max(x.demand.tensor, x.demand.smem + others)
        if end > now + 0.5:
            self.later(end, lambda t: self.multiplied(sm, t))
            return
        x.end, pipe.current = now, None
        pipe.done.append(x)
        for s in sms:
            s.smem.busy["products"] += x.demand.smem
        self.complete(x.op, now)
        self.feed(sm, now)


def size_of(op: AsyncOp) -> int:
    """Bytes that an operation moves."""
    if found := re.search(r"(\d+) x (\d+) bytes", op.what):
        return int(found[1]) * int(found[2])
    found = re.search(r"(\d+) bytes", op.what)
    return int(found[1]) if found else 0


def fences_of(code: Code) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Returns for each instruction the registers of products and loads that it orders."""
    of_products = frozenset(code.decoder.fenced)
    costs_writes = frozenset(
        code.decoder.slots[name, ""]
        for i in code.program.code
        if i.opcode.startswith("tcgen05.ld")
        for name in (i.args[0] if isinstance(i.args[0], tuple) else (i.args[0],))
        if isinstance(name, str) and (name, "") in code.decoder.slots
    )
    nothing = frozenset[int](), frozenset[int]()
    orders = {"wgmma.fence": of_products, "wgmma.wait_group": of_products, "tcgen05.wait::ld": costs_writes}
    found = []
    for i in code.program.code:
        slots = next((x for name, x in orders.items() if i.opcode.startswith(name)), None)
        found.append(nothing if slots is None else (slots, slots))
    return found
