"""The machine: grid, clusters, CTAs and warps (PTX ISA 2 Programming model, 5.1 State spaces)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from .hazards import HOST, Clock, Event, Misuse, OutOfBounds, Race, Undefined
from .parser import Instruction, Program
from .rules import MANUAL, Rule
from .storage import Array as Array
from .storage import GlobalMemory, Memory

DType = np.dtype[Any]

LANES = 32
FULL = 0xFFFFFFFF
RANK_SHIFT = 24  # an address of shared memory carries its CTA's rank in the cluster from this bit on
SMEM_BASE = 1024  # addresses below belong to the system
PARAM_BASE, GENERIC_PARAM_BASE = 1 << 56, 1 << 57  # in their own space, and in the generic one
SHARED_WINDOW = 1 << 48  # where shared memory of the cluster begins in the generic space
READ_STREAMS = 4  # readers of SMEM beside the warps: a CTA's warpgroups' WGMMA; others share the last of them

_BITS = np.uint32(1) << np.arange(LANES, dtype=np.uint32)


def mask_of(lanes: Array) -> int:
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def lanes_of(mask: int) -> Array:
    return (np.uint32(mask) & _BITS) != 0


@dataclass
class Wait:
    """The reason why a step cannot go on. It is run again once ready() holds."""

    ready: Callable[[], bool]
    why: Callable[[], str]


Step = Callable[["Warp"], int | Wait | None]
"""An instruction, for a warp: None: go on; a number: the next pc; a Wait: run it again later."""


class Code(Protocol):
    """A kernel, as `decode.Code` decodes it."""

    program: Program
    registers: tuple[int, ...]  # slots
    steps: list[Step]  # of every instruction
    fused: list[Step]  # some of which stand for several

    def initial(self, w: Warp) -> list[Array]:
        """Returns what every slot of a warp holds at first."""
        ...

    def registers_at(self, pc: int) -> frozenset[int]: ...

    def name_of(self, slot: int) -> str: ...


@dataclass(eq=False)
class AsyncOp:
    """Something that was issued and happens later: see `Warp.issue`."""

    number: int
    kind: str  # "tma", "cp.async", "wgmma", ...
    what: str
    warp: Warp
    instruction: Instruction
    clock: Clock  # the issuer's knowledge
    run: Callable[[AsyncOp], None]
    after: tuple[AsyncOp, ...]
    proxy: str
    reader: int
    issued: int  # time
    atomic = False
    left = False  # its CTA has ended, and may have
    ctas: tuple[Cta, ...] = ()  # CTAs that must not end before it is done
    done: bool = False
    product: tuple[slice, int] | None = None  # as an event has it
    _event: int = -1

    def __str__(self) -> str:
        return f"the {self.kind} of line {self.instruction.line}"

    @property
    def cta(self) -> Cta:
        return self.warp.cta

    def event(self) -> int:
        if self._event < 0:
            self._event = self.new_event(self.product)
        return self._event

    def new_event(self, product: tuple[slice, int] | None) -> int:
        who, i = f"{self.kind} of {self.warp.name}", self.instruction
        return self.warp.machine.new_event(
            Event(self.warp.index, 0, self.number, self.proxy, who, i.line, i.text, self.atomic, product)
        )

    def completed(self) -> Clock:
        """The knowledge of somebody who learns that it is complete."""
        clock = self.clock.copy()
        for op in (*self.after, self):
            learn(clock, op)
        return clock


def learn(clock: Clock, op: AsyncOp) -> None:
    clock.ops |= 1 << op.number
    if op.proxy == "async":
        clock.fenced_ops |= 1 << op.number


class Scoreboard(Protocol):
    """A guard that stops a warp at an instruction that names registers which are not there yet."""

    def before(self, w: Warp, pc: int) -> Wait | None:
        """Lets the registers of instruction pc arrive, or says why it cannot go on."""
        ...


class Tape(Protocol):
    """A listener that is told, as it happens, how agents wait for each other. A barrier is an MBarrier, or the name of
    whatever else is counted."""

    def issued(self, op: AsyncOp) -> None: ...

    def arrives(self, bar: Hashable, count: int = 1, phase: int | None = None) -> None:
        """Somebody arrives in a phase of its own; without one, in the present phase."""
        ...

    def expects(self, bar: Hashable, size: int) -> None: ...

    def brings(self, bar: Hashable, size: int) -> None: ...

    def completes(self, bar: Hashable) -> None:
        """The barrier's present phase is complete."""
        ...

    def passes(self, bar: Hashable, phase: int | None = None) -> None:
        """Somebody has waited for this phase; without, for the last that is complete."""
        ...


@dataclass(eq=False)
class Side:
    """Lanes that took another way than those that run: where they go on, and what they wait for there."""

    lanes: int
    pc: int
    waits: Wait | None = None


@dataclass
class Branching:
    """Sides of a branch that have not met again."""

    join: int  # where they meet; -1: nowhere before the end
    pending: list[Side]  # that have not reached the join
    arrived: int  # mask of the lanes that have reached the join


class Warp:
    """32 lanes, and all that they hold."""

    proxy = "generic"
    atomic = False  # True during an atomic instruction
    cta: Cta
    machine: Machine
    number: int  # in its CTA
    index: int  # in the machine
    code: Code

    def __init__(self, cta: Cta, number: int, index: int, code: Code):
        machine = cta.machine
        self.cta, self.machine, self.number, self.index, self.code = cta, machine, number, index, code
        self.reader = cta.rank * cta.warp_total + number  # column of Shadow.readers in every CTA of its cluster
        self.name = (
            f"warp {number}" if len(machine.ctas) == 1 and machine.grid_size == 1 else f"CTA {cta.number} warp {number}"
        )
        self.R: list[Array] = code.initial(self)
        self.D: list[int] = [FULL] * len(self.R)
        for slot in code.registers:
            self.D[slot] = 0
        self.pc, self.steps = 0, machine.steps
        self.active, self.lanes, self.alive = FULL, np.ones(LANES, bool), FULL
        self.stack: list[Branching] = []
        self.join = -2
        self.exited = False
        self.waiting: Wait | None = None
        self.clock, self.released, self.unfenced = (Clock(machine.warp_count) for _ in range(3))
        self.clock.seen[:, index] = 2, 0, 1, 0
        self.released.seen[2, index] = 1  # what a relaxed arrival releases: all before the last fence
        # unfenced: what a relaxed wait was told, and is known from the next fence on
        self.held: dict[int, tuple[object, bool]] = {}  # slot -> (operation, whether it writes it)
        self.scoreboard: Scoreboard | None = None  # of registers whose loads nobody has waited for
        self.extra: dict[str, Any] = {}
        self._events: dict[tuple[int, int], int] = {}

    @property
    def instruction(self) -> Instruction:
        """The one that it is at."""
        return self.code.program.code[self.pc]

    # ---- registers

    def read(self, slot: int, dtype: DTypeLike) -> Array:
        """The 32 lanes of a slot, viewed; a held one is a Race."""
        if self.held:
            self.check_read(slot)
        return self.R[slot].view(dtype)

    def check_read(self, slot: int) -> None:
        if (held := self.held.get(slot)) is not None and held[1]:
            raise Race(
                f"reads register {self.code.name_of(slot)} while {held[0]} may still write it: nothing waited for it"
            )

    def put(self, slot: int, value: Array, defined: int = FULL) -> None:
        """Write the active lanes of a slot."""
        if self.held and slot in self.held:
            raise Race(
                f"writes register {self.code.name_of(slot)} while {self.held[slot][0]} may still use it: "
                "nothing waited for it"
            )
        if self.active == FULL:
            self.R[slot], self.D[slot] = value, defined
        else:
            old = self.R[slot]
            self.R[slot] = np.where(self.lanes, value.view(old.dtype), old)
            self.D[slot] = (self.D[slot] & ~self.active) | (defined & self.active)

    def demand(self, slot: int, what: str) -> None:
        """Undefined unless the active lanes of a slot are defined, where its value decides about something."""
        if missing := self.active & ~self.D[slot]:
            self.check_read(slot)
            raise Undefined(
                f"{what} is register {self.code.name_of(slot)}, which is not defined in {lane_names(missing)}"
            )

    def uniform(self, slot: int, dtype: DTypeLike, what: str) -> int:
        """A value that must be the same in all active lanes."""
        self.demand(slot, what)
        values = self.read(slot, dtype)
        one, *others = (values if self.active == FULL else values[self.lanes]).tolist()
        if others.count(one) != len(others):
            raise Misuse(f"{what} differs from lane to lane: {[one, *others[:7]]} ...")
        return one

    def place(self, slot: int, what: str) -> int:
        """An address of shared memory, the same in all active lanes, in a register of 32 or of 64 bits."""
        return self.uniform(slot, self.width(slot), what)

    def width(self, slot: int) -> DTypeLike:
        return np.uint32 if self.R[slot].itemsize == 4 else np.uint64

    def hold(self, slots: Iterable[int], op: object, writes: bool = True) -> None:
        """Lets `op` write (or, where not `writes`, read) these registers at any time from now until the wait."""
        for slot in slots:
            self.held[slot] = (op, writes)
            if writes:
                self.D[slot] = 0

    def release(self, slots: Iterable[int], op: object) -> list[int]:
        """`op` was waited for. Returns the slots that no later operation holds."""
        free = [slot for slot in slots if slot in self.held and self.held[slot][0] is op]
        for slot in free:
            del self.held[slot]
        return free

    # ---- events and clocks

    def event(self) -> int:
        key = int(self.clock.seen[0, self.index]), self.instruction.line
        number = self._events.get(key)
        if number is None:
            i = self.instruction
            number = self._events[key] = self.machine.new_event(
                Event(self.index, key[0], None, self.proxy, self.name, i.line, i.text, self.atomic)
            )
        return number

    def publish(self) -> Clock:
        """A clock for others to join; what this warp does from now on is not in it."""
        clock = self.clock.copy()
        self.clock.seen[0, self.index] += 1
        return clock

    def fence_proxy(self) -> None:
        self.clock.fence_proxy()
        self.clock.seen[0, self.index] += 1

    def fence(self) -> None:
        """8, release and acquire patterns: relaxed operations before it acquire, later ones release."""
        self.clock.join(self.unfenced)
        self.released = self.publish()

    def fence_made(self) -> None:
        """The same of mbarriers that it made alone."""
        own = self.clock.seen[:, self.index]
        own[2] = own[0]
        own[0] += 1
        np.maximum(self.released.seen[2], self.clock.seen[2], out=self.released.seen[2])

    def learn(self, op: AsyncOp) -> None:
        """A completion was waited for."""
        learn(self.clock, op)

    def issue(
        self,
        kind: str,
        what: str,
        run: Callable[[AsyncOp], None],
        after: Sequence[AsyncOp] = (),
        proxy: str = "async",
        reader: int | None = None,
        clock: Clock | None = None,
        ctas: Sequence[Cta] = (),
    ) -> AsyncOp:
        """Something that the scheduler lets happen at any later time, when all of `after` have.

        `reader`: its column of Shadow.readers; operations that share one must complete in the order of their issue.
        `ctas`: whose shared memory it reads or writes, if that is not this warp's CTA.
        """
        m = self.machine
        op = AsyncOp(
            len(m.ops_log),
            kind,
            what,
            self,
            self.instruction,
            self.publish() if clock is None else clock,
            run,
            tuple(after),
            proxy,
            self.cta.first_stream + READ_STREAMS - 1 if reader is None else reader,
            m.time,
            tuple(ctas) or (self.cta,),
        )
        m.ops_log.append(op)
        m.pending.append(op)
        m.log("issue", self, op.what, op)
        if m.tape is not None:
            m.tape.issued(op)
        return op

    # ---- control

    def set_active(self, mask: int) -> None:
        self.active = mask
        self.lanes = lanes_of(mask)

    def converged(self, what: str = "an .aligned instruction") -> None:
        if self.active != FULL:
            raise Misuse(f"{what} by {lane_names(self.active)} only, wanted by the whole warp")


def lane_names(mask: int) -> str:
    lanes = np.flatnonzero(lanes_of(mask)).tolist()
    return (
        f"lane {lanes[0]}"
        if len(lanes) == 1
        else f"{len(lanes)} lanes ({', '.join(map(str, lanes[:4]))}{' ...' if len(lanes) > 4 else ''})"
    )


def names(who: Iterable[str]) -> str:
    """warp 4, warp 5, warp 6, warp 9 -> warp 4-6, 9"""
    numbers: dict[str, set[int]] = {}
    for name in who:
        prefix = name.rstrip("0123456789")
        numbers.setdefault(prefix, set()).add(int(name[len(prefix) :] or -1))
    parts = []
    for prefix, ns in numbers.items():
        starts = [n for n in sorted(ns) if n - 1 not in ns]
        ends = [n for n in sorted(ns) if n + 1 not in ns]
        ranges = (str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
        parts.append(prefix + ", ".join(ranges) if ns != {-1} else prefix)
    return "; ".join(parts)


Extent = tuple[int, int, int]
"""The extents in x, y and z."""


def extent(sizes: int | Sequence[int]) -> Extent:
    """A single number is that of x."""
    x, y, z = (*([sizes] if isinstance(sizes, int) else sizes), 1, 1)[:3]
    return x, y, z


def unravelled(n: int, sizes: Extent) -> Extent:
    """The coordinates of number n, x fastest."""
    return n % sizes[0], n // sizes[0] % sizes[1], n // (sizes[0] * sizes[1])


@dataclass(eq=False)
class MBarrier:
    """An mbarrier, which `barriers.py` makes and counts."""

    cta: Cta
    offset: int
    count: int
    clock: Clock  # the knowledge of those who arrived in this phase
    init: tuple[Warp, int, int]  # its maker, the maker's epoch, and the line
    pending: int = 0
    tx: int = 0
    phase: int = 0
    done: Clock | None = None  # the knowledge of the phase before
    init_fenced: bool = False
    arrived: list[str] = field(default_factory=list)  # in this phase
    known: dict[str, None] = field(default_factory=dict)  # everybody who ever arrived

    def __str__(self) -> str:
        where = f" of CTA {self.cta.number}" if len(self.cta.cluster) > 1 else ""
        return f"mbarrier +{self.offset - SMEM_BASE}{where} (count {self.count}, made in line {self.init[2]})"

    def state(self) -> str:
        left = f"{self.pending} of {self.count} arrivals pending, {self.tx} transaction bytes outstanding"
        text = f"{self} is in phase {self.phase}: {left}"
        if self.arrived:
            text += "; arrived: " + names(self.arrived)
        if missing := [who for who in self.known if who not in self.arrived]:
            text += "; arrived in earlier phases but not in this: " + names(missing)
        return text


@dataclass
class NamedBarrier:
    """One of the 16 barriers of a CTA."""

    clock: Clock
    count: int = 0
    arrived: int = 0
    generation: int = 0
    done: Clock | None = None
    who: list[str] = field(default_factory=list)


class Cta:
    """Numbers of CTAs count those of a cluster in a row."""

    def __init__(self, machine: Machine, number: int, rank: int, warps: int):
        self.machine, self.number, self.rank = machine, number, rank
        self.cluster_at: Extent = unravelled(number // machine.cluster_size, machine.clusters)
        self.in_cluster: Extent = unravelled(rank, machine.cluster)
        parts = zip(self.cluster_at, machine.cluster, self.in_cluster, strict=True)
        self.at_grid: Extent = extent([first * size + rest for first, size, rest in parts])
        self.cluster: list[Cta] = []
        self.warp_total = warps
        self.first_stream = warps * machine.cluster_size  # the first column of Shadow.readers that is not a warp's
        self.smem = Memory(
            f"SMEM of CTA {number}" if machine.grid_size > 1 else "SMEM",
            SMEM_BASE + machine.smem_bytes,
            self.first_stream + READ_STREAMS + warps,  # and every warp's bulk stores
            machine.events,
        )
        self.places: dict[tuple[bytes, int], Array] = {}  # (addresses, bytes at each) -> words, where all is well
        self.barrier_words = np.zeros(len(self.smem.words32), bool)
        self.barriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.extra: dict[str, Any] = {}
        self.warps: list[Warp] = []
        self.survived = Clock(machine.warp_count)  # what it does not end before, by relaxed barriers of its cluster
        self.visits: dict[int, str] = {}  # accesses of other CTAs of the cluster to its memory: event -> "reads", ...

    @property
    def ended(self) -> bool:
        return all(w.exited for w in self.warps)

    def visit(self, actor: Warp | AsyncOp, does: str, event: int | None = None) -> None:
        """Somebody comes to this CTA's memory: if of another, this one must have begun, and not end before (2.2.2)."""
        if actor.cta is self:
            return
        first = self.warps[0].index
        if not actor.clock.seen[:, first : first + self.warp_total].any():
            raise Race(f"{does} shared memory of CTA {self.number} while nothing tells that it has begun")
        if self.ended:
            raise Race(f"{does} shared memory of CTA {self.number}, which has ended")
        self.visits[actor.event() if event is None else event] = does

    def outlives(self, clock: Clock) -> None:
        """It ends after what `clock` knows of, though nothing orders its own accesses after that."""
        self.survived.join(clock)

    @property
    def base(self) -> int:
        """The address of its shared memory."""
        return self.rank << RANK_SHIFT

    def at(self, address: int) -> tuple[Cta, int]:
        """The CTA of a shared-memory address, and the offset there."""
        rank, offset = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
        if rank >= len(self.cluster):
            raise OutOfBounds(f"shared memory address 0x{address:x} of CTA {rank} in a cluster of {len(self.cluster)}")
        return self.cluster[rank], offset

    def smem_span(self, offset: int, size: int, align: int, what: str) -> slice:
        """The words of `size` bytes at an offset, checked."""
        if offset % align:
            raise OutOfBounds(f"{what} {size} bytes at SMEM {offset}, wanted a multiple of {align}")
        if offset < SMEM_BASE or offset + size > self.smem.size:
            raise OutOfBounds(f"{what} {size} bytes at SMEM {offset}, outside of {SMEM_BASE}..{self.smem.size - 1}")
        return slice(offset // 4, -(-(offset + size) // 4))


@dataclass
class Moment:
    """An entry of the log."""

    time: int
    kind: str  # "issue", "complete", "wait", "go", "arrive", "phase", "exit", "mark"
    who: str
    text: str
    op: AsyncOp | None = None
    line: int = 0


class Machine:
    """One launch of one kernel, which `scheduler.run` runs. `params` are the parameter bytes. Tensor maps lie in them,
    encoded, or in `tensor_maps` by their generic address.

    A grid, a CTA's threads and a cluster have one to three extents.
    """

    def __init__(
        self,
        code: Code,
        *,
        grid: int | Sequence[int],
        threads: int | Sequence[int],
        smem_bytes: int,
        params: bytes,
        memory: GlobalMemory,
        events: list[Event],
        tensor_maps: dict[int, Any] | None = None,
        cluster_size: int | Sequence[int] | None = None,
        registers: int | None = None,
        seed: int = 0,
        record: bool = False,
        rules: Collection[Rule] = MANUAL,
    ):
        program = code.program
        self.grid, self.block = extent(grid), extent(threads)
        self.grid_size, self.threads = math.prod(self.grid), math.prod(self.block)
        if program.threads is not None and program.threads != self.threads:
            raise Misuse(f"launched with {threads} threads, .reqntid says {program.threads}")
        if len(params) != program.param_bytes:
            raise Misuse(f"launched with {len(params)} bytes of parameters, the kernel has {program.param_bytes}")
        wanted = program.cluster
        self.cluster = extent((wanted or 1) if cluster_size is None else cluster_size)
        self.cluster_size = size = math.prod(self.cluster)
        if wanted not in (None, size) and not (wanted == 0 and size > 1):
            raise Misuse(f"launched in clusters of {size}, the kernel wants {wanted or 'some'}")
        if any(n % c for n, c in zip(self.grid, self.cluster, strict=True)):
            raise Misuse(f"a grid of {grid} CTAs is not made of clusters of {cluster_size or size}")
        self.clusters = extent([n // c for n, c in zip(self.grid, self.cluster, strict=True)])
        self.program, self.params, self.memory = program, np.frombuffer(params, np.uint8), memory
        self.tensor_maps = tensor_maps or {}
        self.smem_bytes = smem_bytes
        self.registers = registers or 65536 // self.threads // 8 * 8
        """of a thread at launch: as ptxas compiled the kernel, if that is known, or an even share of an SM's"""
        self.events = events
        self.rules = frozenset(rules)  # of the manual that are checked
        self.remarks: set[str] = set()  # what breaks a rule that is not, where that is seen
        self.rng = random.Random(seed)
        self.elected = self.rng.randrange(LANES)  # whom elect.sync prefers; any lane may be
        self.time = 0
        self.ops_log: list[AsyncOp] = []
        self.pending: list[AsyncOp] = []
        self.news = False  # something has happened that a warp may wait for
        self.moments: list[Moment] | None = [] if record else None
        self.tape: Tape | None = None
        self.executed: set[int] = set()  # the instructions that ran, where a record is kept
        self.exit_checks: list[Callable[[], None]] = []
        self.late: list[list[Cta]] = []  # clusters that have not begun, where others may take them over
        per_cta = -(-self.threads // LANES)
        self.warp_count = per_cta * self.grid_size
        self.ctas: list[Cta] = []
        for n in range(self.grid_size):
            self.ctas.append(Cta(self, n, n % size, per_cta))
        self.code = code
        self.single = [self.noting(n, step) for n, step in enumerate(code.steps)] if record else code.steps
        self.steps = self.single if record else code.fused
        for cta in self.ctas:
            first = cta.number - cta.rank
            cta.cluster = self.ctas[first : first + size]
            cta.warps = [Warp(cta, k, cta.number * per_cta + k, code) for k in range(per_cta)]
        if any(i.opcode.startswith("clusterlaunchcontrol.try_cancel") for i in program.code):
            self.late = [cta.cluster for cta in self.ctas[size::size]]

    @property
    def warps(self) -> list[Warp]:
        return [w for cta in self.ctas for w in cta.warps]

    def begin_late(self) -> list[Warp]:
        """The warps of the next cluster that has not begun, which begins."""
        return [w for cta in self.late.pop(0) for w in cta.warps]

    def take_late(self) -> Sequence[int] | None:
        """Cancels a cluster that has not begun; returns its place in the grid. None if none is left, or by chance."""
        if not self.late or self.rng.random() < 0.25:
            return None
        cluster = self.late.pop(self.rng.randrange(len(self.late)))
        for w in (w for cta in cluster for w in cta.warps):
            w.exited = True
        return cluster[0].at_grid

    def noting(self, number: int, step: Step) -> Step:
        def noted(w: Warp) -> int | Wait | None:
            self.executed.add(number)
            return step(w)

        return noted

    def new_event(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def at_exit(self, check: Callable[[], None]) -> None:
        self.exit_checks.append(check)

    def log(self, kind: str, who: Warp | str, text: str, op: AsyncOp | None = None) -> None:
        if self.moments is not None:
            line = op.instruction.line if op else who.instruction.line if isinstance(who, Warp) else 0
            name = who.name if isinstance(who, Warp) else who
            self.moments.append(Moment(self.time, kind, name, text, op, line))


def new_memory() -> GlobalMemory:
    """Makes a memory with the events that every shadow starts from: number 0 is nobody, number 1 the host."""
    return GlobalMemory([HOST, HOST])
