"""Blackwell's tensor memory (PTX ISA 9.7.16.2, 9.7.16.7): who has which columns, and who knows what of them.

TMEM has 128 lanes x 512 columns of 32 bits, for each CTA its own. Only these order accesses to it (9.7.16.6):

    products of one thread on the same accumulator happen in order, and after its copies to TMEM
    tcgen05.wait::ld, ::st       what the warp loaded or stored is done, for the warp itself
    tcgen05.commit               arrives at an mbarrier when all earlier products of the thread are done
    fence::before_thread_sync    what the warp knows to be done goes with what it tells from now on
    fence::after_thread_sync     what the warp was told holds for what it does to TMEM from now on

So a warp has a clock of its own for TMEM: it takes over the warp's clock at fence::after, and gives to it at
fence::before. A missing fence, wait or commit is then a Race like any other. Without some of the rules of `rules.py`
the fences do nothing, registers of a load come by themselves, and all products, copies and commits of a thread are in
order.

With .cta_group::2 a pair of CTAs, whose ranks in the cluster differ in the last bit, allocates and frees together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from .decode import Decoder, Step, instruction
from .hazards import Actor, Clock, Event, Leak, Misuse, Shadow, Words
from .parser import Instruction, Program
from .rules import Rule
from .state import FULL, Array, AsyncOp, Cta, Machine, Wait, Warp, learn, mask_of

GROUP = re.compile(r"cta_group::(\d)")

DATAPATHS, COLUMNS = 128, 512


class TmemShadow(Shadow):
    def describe(self, words: Words, where: Array) -> str:
        assert not isinstance(words, slice)
        lanes, columns = np.divmod(words[where], COLUMNS)
        return f"{self.name} lanes {lanes.min()}..{lanes.max()}, columns {columns.min()}..{columns.max()}"

    def missing(self, actor: Actor, event: Event) -> str:
        """The missing order, for an actor whom the other's warp told something after the other's access was issued."""
        if event.op is None or not isinstance(actor, Access):
            return ""
        told, other = actor.by.clock, actor.machine.ops_log[event.op]
        if told.knows(event):
            return ", of which it was told: no tcgen05.fence::after_thread_sync"
        if (
            other.kind not in ("tcgen05.ld", "tcgen05.st")
            or told.seen[0, event.warp] <= other.clock.seen[0, event.warp]
        ):
            return ""
        waited = issuer(other.warp).own >> event.op & 1
        return (
            f", whose warp told it: no tcgen05.{'fence::before_thread_sync' if waited else f'wait::{other.kind[-2:]}'}"
        )


@dataclass(eq=False)
class Tmem:
    """A CTA's TMEM; the CTA is the only one on its SM."""

    name: str
    words32: Array  # [lanes * columns]
    shadow: TmemShadow
    allocated: Array  # bool [columns]
    allocations: dict[int, tuple[int, int]] = field(default_factory=dict)  # first column -> (columns, line)
    relinquished: int | None = None  # in which line
    collectors: dict[str, object] = field(default_factory=dict)  # of its tensor core: what each keeps

    def check(self, columns: range, what: str) -> None:
        if columns.stop > COLUMNS or not self.allocated[columns.start : columns.stop].all():
            raise Misuse(f"{what} TMEM columns {columns.start}..{columns.stop - 1}, which are not allocated")


def tmem_of(cta: Cta) -> Tmem:
    if (tmem := cta.extra.get("tmem")) is None:
        name, size = cta.smem.shadow.name.replace("SMEM", "TMEM"), DATAPATHS * COLUMNS
        shadow = TmemShadow(name, size, 3 * cta.warp_total, cta.machine.events)
        words = np.full(size, 0xFFFFFFFF, np.uint32)
        tmem = cta.extra["tmem"] = Tmem(name, words, shadow, np.zeros(COLUMNS, bool))
        cta.machine.at_exit(lambda: check_freed(tmem))
    return tmem


def check_freed(tmem: Tmem) -> None:
    for first, (columns, line) in tmem.allocations.items():
        raise Leak(f"{tmem.name} columns {first}..{first + columns - 1}, allocated in line {line}, are never freed")


Chain = tuple[int, tuple[int, ...] | None]
"""Operations of a thread that happen in order: its lane, and an accumulator, or None for copies."""


Load = tuple[AsyncOp, list[int], dict[str, Array]]
"""The slots of its registers, and once it is done their values and where they are defined."""


@dataclass(eq=False)
class Issuer:
    """The TMEM operations of one warp."""

    warp: Warp
    known: Clock  # for what it does to TMEM
    own: int = 0  # bits of its operations that it has waited for
    loads: list[Load] = field(default_factory=list)  # not waited for
    used: list[AsyncOp] = field(default_factory=list)  # loads that it has not waited for, but for their registers
    stores: list[AsyncOp] = field(default_factory=list)
    products: dict[int, list[AsyncOp]] = field(default_factory=dict)  # by lane, not known to be done
    product_bits: dict[int, int] = field(default_factory=dict)  # by lane, of all
    chains: dict[Chain, tuple[AsyncOp, int]] = field(default_factory=dict)  # those in order: the last, bits of all

    def clock(self) -> Clock:
        clock = self.known.copy()
        if Rule.TMEM_FENCES not in self.warp.machine.rules:
            clock.join(self.warp.clock)
        clock.ops |= self.own
        return clock

    def waited(self, op: AsyncOp) -> None:
        """The warp has waited for a load or a store of its own."""
        self.own |= 1 << op.number
        if Rule.TMEM_FENCES not in self.warp.machine.rules:
            learn(self.warp.clock, op)

    def deliver(self, load: Load, waited: bool = True) -> None:
        """The registers of a load that is done. If they are only used, an arrival may tell nothing of the load."""
        op, slots, result = load
        if waited or Rule.LD_ORDER not in self.warp.machine.rules:
            self.waited(op)
        else:
            self.used.append(op)
        self.warp.release(slots, op)
        for slot, values, defined in zip(slots, result["values"], result["defined"], strict=True):
            self.warp.put(slot, values, FULL if defined.all() else mask_of(defined))

    def before(self, w: Warp, pc: int) -> Wait | None:
        """Acts as a scoreboard: an instruction that names a register of a load waits for that and all loads before."""
        named = w.code.registers_at(pc)
        last = max((n for n, (_, slots, _) in enumerate(self.loads) if not named.isdisjoint(slots)), default=-1)
        wanted = self.loads[: last + 1]
        if not all(op.done for op, _, _ in wanted):
            return Wait(lambda: all(op.done for op, _, _ in wanted), lambda: "registers of its loads from TMEM")
        active = w.active
        w.set_active(FULL)
        for load in wanted:
            self.deliver(load, waited=False)
        w.set_active(active)
        del self.loads[: last + 1]
        w.scoreboard = self if self.loads else None
        return None

    def following(self, lane: int, accumulator: tuple[int, ...] | None) -> tuple[Chain, tuple[AsyncOp, ...], Clock]:
        """The chain of a product that a thread is about to issue, or of a copy (without an accumulator); after what it
        happens; what it knows to have happened.

        A product comes after the thread's products on the same accumulator, and after its copies (9.7.16.6.2).
        """
        chain, clock = (lane, accumulator), self.clock()
        before: list[AsyncOp] = []
        in_order = Rule.PRODUCT_ORDER not in self.warp.machine.rules
        if in_order:
            chain = (lane, None)
        for earlier in {chain, (lane, None)} if accumulator or in_order else ():
            if earlier in self.chains:
                last, bits = self.chains[earlier]
                before.append(last)
                clock.ops |= bits
        return chain, tuple(before), clock

    def committed(self, lane: int, op: AsyncOp) -> None:
        """A commit of a thread: what it commits later comes after it."""
        if Rule.COMMIT_ORDER not in self.warp.machine.rules:
            self.products.setdefault(lane, []).append(op)
            self.product_bits[lane] = self.product_bits.get(lane, 0) | 1 << op.number

    def issued(self, lane: int, op: AsyncOp, chain: Chain) -> None:
        """A product or a copy of a thread, the last of its chain."""
        bit = 1 << op.number
        self.chains[chain] = op, self.chains.get(chain, (op, 0))[1] | bit
        self.products.setdefault(lane, []).append(op)
        self.product_bits[lane] = self.product_bits.get(lane, 0) | bit


def issuer(w: Warp) -> Issuer:
    if (mine := w.extra.get("tcgen05")) is None:
        mine = w.extra["tcgen05"] = Issuer(w, w.clock.copy())
    return mine


@dataclass(eq=False)
class Access:
    """Somebody as TMEM sees him."""

    clock: Clock
    reader: int
    by: AsyncOp | Warp
    proxy: str = "async"
    atomic: bool = False

    @property
    def machine(self) -> Machine:
        return (self.by.warp if isinstance(self.by, AsyncOp) else self.by).machine

    def event(self) -> int:
        return self.by.event()


# ---- allocation (9.7.16.5 Issue granularity, 9.7.16.7.1)


@lru_cache(maxsize=2)
def groups_in(program: Program) -> set[str]:
    return {x for y in program.code if y.opcode.startswith("tcgen05.") for x in re.findall(GROUP, y.opcode)}


def group_of(i: Instruction, d: Decoder) -> int:
    """1 or 2 CTAs, which must be the same in all of a kernel."""
    if len(groups_in(d.program)) > 1:
        raise Misuse("a kernel with tcgen05 instructions of .cta_group::1 and of .cta_group::2").at_line(i.line, i.text)
    return int(re.findall(GROUP, i.opcode)[0])


def members(cta: Cta, group: int) -> list[Cta]:
    """The CTAs that take part in what one does: itself, or the two whose ranks differ in the last bit."""
    if group == 1:
        return [cta]
    even = cta.rank & ~1
    if even + 1 >= len(cta.cluster):
        raise Misuse(f".cta_group::2 in a cluster of {len(cta.cluster)}: CTA {cta.number} has no peer")
    return cta.cluster[even : even + 2]


@dataclass(eq=False)
class Meeting:
    """Two warps, one of each CTA of a pair, that do something together."""

    first: Warp
    wanted: int
    second: Warp | None = None
    result: int | None = None


def together(
    w: Warp, group: int, what: str, wanted: int, possible: Callable[[], bool], act: Callable[[], int]
) -> int | Wait:
    """The result of act(), once it is possible and, in a group of 2, a warp of the peer CTA has arrived for the same.

    The manual says that the first to come may be blocked; here it always is.
    """
    later = Wait(possible, lambda: f"{wanted} columns of TMEM; allocated are {tmem_of(w.cta).allocations}")
    if group == 1:
        if not possible():
            return later
        w.machine.news = True
        return act()
    (even, odd), key = members(w.cta, 2), f"to {what}"
    name = f"CTAs {even.number} and {odd.number} that {what}"
    if key not in w.extra:
        meeting = even.extra.pop(key, None) or even.extra.setdefault(key, Meeting(w, wanted))
        if meeting.first is not w:
            if meeting.first.cta is w.cta:
                raise Misuse(f"two warps of CTA {w.cta.number} {what} at once")
            if meeting.wanted != wanted:
                raise Misuse(f"the CTAs of a pair {what} differently: {meeting.wanted} columns and {wanted}")
            meeting.second = w
        w.extra[key] = meeting
        if w.machine.tape is not None:
            w.machine.tape.arrives(name)
    found: Meeting = w.extra[key]
    if found.second is w:
        if not possible():
            return later
        found.result, w.machine.news = act(), True
        if w.machine.tape is not None:
            w.machine.tape.completes(name)
    elif found.result is None:
        peer = odd if w.cta is even else even
        return Wait(lambda: found.result is not None, lambda: f"a warp of CTA {peer.number} to {what} as well")
    del w.extra[key]
    assert found.result is not None
    if w.machine.tape is not None:
        w.machine.tape.passes(name)
    return found.result


@instruction("tcgen05.alloc")
def allocate(i: Instruction, d: Decoder) -> Step:
    """Writes the address of the first of the columns, which begin at a multiple of their number, to shared memory."""
    i.only("cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32")
    group = group_of(i, d)
    base, offset = d.address(i.args[0])
    count = d.slot(i.args[1], "u32")

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        tmems, columns = [tmem_of(cta) for cta in members(w.cta, group)], size_of(w, count)
        if (line := tmem_of(w.cta).relinquished) is not None:
            raise Misuse(f"allocates TMEM after the right to was given up in line {line}")

        def free() -> list[int]:
            starts = range(0, COLUMNS, columns)
            return [x for x in starts if not any(t.allocated[x : x + columns].any() for t in tmems)]

        def act() -> int:
            (first, *_) = free()
            for tmem in tmems:
                tmem.allocated[first : first + columns] = True
                tmem.allocations[first] = columns, i.line
            return first

        first = together(w, group, "allocate TMEM", columns, lambda: bool(free()), act)
        if isinstance(first, Wait):
            return first
        cta, at = w.cta.at(w.uniform(base, np.uint32, "an address") + offset)
        if cta is not w.cta:
            raise Misuse(f"an address in shared memory of CTA {cta.number}, wanted one of this CTA's own")
        words = cta.smem_span(at, 4, 4, "writes")
        cta.smem.shadow.write(w, words)
        cta.smem.words32[words] = first
        return None

    return step


def size_of(w: Warp, slot: int) -> int:
    columns = w.uniform(slot, np.uint32, "a number of columns")
    if columns not in (32, 64, 128, 256, 512):
        raise Misuse(f"{columns} columns of TMEM, wanted a power of two from 32 to 512")
    return columns


@instruction("tcgen05.dealloc")
def free(i: Instruction, d: Decoder) -> Step:
    """Each warp answers for what is done to its own CTA's columns; they are free when both have come."""
    i.only("cta_group::1", "cta_group::2", "sync", "aligned", "b32")
    group = group_of(i, d)
    where, count = d.slot(i.args[0], "u32"), d.slot(i.args[1], "u32")

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        tmem, columns = tmem_of(w.cta), size_of(w, count)
        tmems = [tmem_of(cta) for cta in members(w.cta, group)]
        first = w.uniform(where, np.uint32, "an address in TMEM")
        words = (np.arange(DATAPATHS)[:, None] * COLUMNS + np.arange(first, first + columns)).ravel()
        if "to free TMEM" not in w.extra:
            if tmem.allocations.get(first, (0, 0))[0] != columns:
                raise Misuse(f"frees {columns} columns at {first:#x}; allocated are {tmem.allocations}")
            tmem.shadow.write(Access(issuer(w).clock(), w.number, w), words, defined=False)

        def act() -> int:
            for x in tmems:
                x.shadow.writer[words], x.shadow.readers[words] = 0, 0
                x.allocated[first : first + columns] = False
                del x.allocations[first]
            return first

        done = together(w, group, "free TMEM", columns, lambda: True, act)
        return done if isinstance(done, Wait) else None

    return step


@instruction("tcgen05.relinquish_alloc_permit")
def relinquish(i: Instruction, d: Decoder) -> Step:
    i.only("cta_group::1", "cta_group::2", "sync", "aligned")
    group = group_of(i, d)

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        tmem_of(w.cta).relinquished = i.line
        done = together(w, group, "give up the right to allocate TMEM", 0, lambda: True, lambda: 0)
        return done if isinstance(done, Wait) else None

    return step
