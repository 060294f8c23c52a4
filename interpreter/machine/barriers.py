"""mbarriers, named barriers and fences (PTX ISA 9.7.14.16 mbarrier, 9.7.14.1 bar, 9.7.14.5 membar and fence).

A phase of an mbarrier completes when no arrival is pending and no transaction byte outstanding; then the next begins.
A warp that waits for a phase learns what all who arrived in it knew.
"""

from __future__ import annotations

import numpy as np

from .decode import Decoder, Step, instruction
from .hazards import Clock, Event, Misuse
from .parser import Instruction
from .state import FULL, SMEM_BASE, Array, AsyncOp, MBarrier, NamedBarrier, Wait, Warp, lanes_of, names

MAX_COUNT = (1 << 20) - 1
SPURIOUS = 0.25  # how often try_wait gives up where it would have to wait


def lookup(w: Warp, address: int, own: bool = False) -> MBarrier:
    """The mbarrier at an address, which this warp must know to have been initialised; `own`: by its own CTA."""
    cta, offset = w.cta.at(address)
    if own and cta is not w.cta:
        raise Misuse(f"an address in shared memory of CTA {cta.number}, wanted one of this CTA's own")
    bar = cta.barriers.get(offset)
    if bar is None:
        of = f" of CTA {cta.number}" if len(cta.cluster) > 1 else ""
        raise Misuse(f"there is no mbarrier at shared memory +{offset - SMEM_BASE}{of}")
    maker, epoch, line = bar.init
    if w.clock.seen[0, maker.index] < epoch and w.clock.seen[2, maker.index] < epoch:
        raise Misuse(f"{bar} is used while nothing orders that after its initialisation in line {line}")
    return bar


def lookup_all(w: Warp, at: Array, own: bool = False) -> list[tuple[MBarrier, int]]:
    """(mbarrier, number of lanes) for the addresses of lanes."""
    if (at == at[0]).all():
        return [(lookup(w, int(at[0]), own), len(at))]
    values, counts = np.unique(at, return_counts=True)
    return [(lookup(w, int(a), own), int(n)) for a, n in zip(values, counts, strict=True)]


def arrive(bar: MBarrier, count: int, clock: Clock, who: Warp | AsyncOp) -> None:
    """`count` arrivals by one that knows `clock`."""
    if who.cta is not bar.cta:
        bar.cta.visit(who, "arrives at an mbarrier in", told(who, clock))
    name = who.name if isinstance(who, Warp) else f"{who.kind} of {who.warp.name}"
    bar.known[name] = None
    while count:
        if bar.pending == 0:
            raise Misuse(f"an arrival too many: {bar.state()}")
        bar.clock.join(clock)
        bar.arrived.append(name)
        n = min(count, bar.pending)
        if (tape := bar.cta.machine.tape) is not None:
            tape.arrives(bar, n)
        bar.pending -= n
        count -= n
        settle(bar)


def told(who: Warp | AsyncOp, clock: Clock) -> int:
    """The event of an arrival that tells `clock`: of a warp, what it did before it began an epoch with that."""
    if isinstance(who, AsyncOp):
        return who.event()
    i = who.instruction
    event = Event(who.index, int(clock.seen[0, who.index]), None, who.proxy, who.name, i.line, i.text)
    return who.machine.new_event(event)


def expect_tx(bar: MBarrier, size: int) -> None:
    if (tape := bar.cta.machine.tape) is not None:
        tape.expects(bar, size)
    bar.tx += size
    if abs(bar.tx) > MAX_COUNT:
        raise Misuse(f"too many transaction bytes: {bar.state()}")


def complete_tx(bar: MBarrier, size: int, clock: Clock) -> None:
    """`size` bytes have arrived; whoever waits learns `clock`."""
    if (tape := bar.cta.machine.tape) is not None:
        tape.brings(bar, size)
    bar.clock.join(clock)
    bar.tx -= size
    if abs(bar.tx) > MAX_COUNT:
        raise Misuse(f"too many transaction bytes: {bar.state()}")
    settle(bar)


def settle(bar: MBarrier) -> None:
    if bar.pending == 0 and bar.tx == 0:
        machine = bar.cta.machine
        machine.news = True
        if machine.tape is not None:
            machine.tape.completes(bar)
        if machine.moments is not None:
            machine.log("phase", f"+{bar.offset - SMEM_BASE}", f"{bar} completes phase {bar.phase}")
        bar.done = bar.clock
        bar.clock = Clock(machine.warp_count)
        bar.phase += 1
        bar.pending = bar.count
        bar.arrived = []


def one(w: Warp, slot: int, offset: int, own: bool = False) -> MBarrier:
    return lookup(w, w.place(slot, "the address of an mbarrier") + offset, own)


def the_lanes(w: Warp, slot: int, offset: int) -> Array:
    w.demand(slot, "the address of an mbarrier")
    return w.read(slot, w.width(slot)).astype(np.int64)[w.lanes] + offset


def of_each(w: Warp, slot: int, at: Array) -> list[int]:
    """The sum of arrivals or bytes that the lanes at each address count, by address as in `lookup_all`."""
    w.demand(slot, "a number of arrivals or bytes")
    amounts = w.read(slot, np.uint32).astype(np.int64)[w.lanes]
    if (at == at[0]).all():
        return [int(amounts.sum())]
    return [int(amounts[at == one].sum()) for one in np.unique(at)]


STATE_SPACES = ("shared", "shared::cta", "b64")  # the executing CTA's; with shared::cluster, any CTA's of its cluster
SCOPES = ("release", "acquire", "relaxed", "cta", "cluster")


@instruction("mbarrier.init")
def init(i: Instruction, d: Decoder) -> Step:
    i.only(*STATE_SPACES)
    base, offset = d.address(i.args[0])
    count = d.slot(i.args[1], "u32")

    def step(w: Warp) -> None:
        cta, at = w.cta.at(w.place(base, "the address of an mbarrier") + offset)
        if cta is not w.cta:
            raise Misuse(f"makes an mbarrier in shared memory of CTA {cta.number}")
        words = cta.smem_span(at, 8, 8, "makes an mbarrier of")
        n = w.uniform(count, np.uint32, "the count of an mbarrier")
        if not 1 <= n <= MAX_COUNT:
            raise Misuse(f"an mbarrier with a count of {n}")
        if at in cta.barriers:
            raise Misuse(f"{cta.barriers[at]} is initialised again")
        cta.smem.shadow.write(w, words)
        cta.barrier_words[words] = True
        made = (w, int(w.clock.seen[0, w.index]), i.line)
        cta.barriers[at] = MBarrier(cta, at, n, Clock(w.machine.warp_count), made, pending=n)

    return step


@instruction("mbarrier.inval")
def invalidate(i: Instruction, d: Decoder) -> Step:
    i.only(*STATE_SPACES)
    base, offset = d.address(i.args[0])

    def step(w: Warp) -> None:
        bar = one(w, base, offset, own=True)
        del bar.cta.barriers[bar.offset]
        bar.cta.barrier_words[bar.offset // 4 : bar.offset // 4 + 2] = False

    return step


@instruction("mbarrier.arrive", "mbarrier.arrive.noComplete", "mbarrier.arrive.expect_tx")
def arrival(i: Instruction, d: Decoder) -> Step:
    """Every active lane arrives. The arrival releases what the warp knows; with .relaxed, what it did before its last
    fence. With .noComplete it must not complete the phase.
    """
    i.only(*STATE_SPACES, "shared::cluster", *SCOPES)
    expects, remote = "expect_tx" in i.opcode, i.has("shared::cluster")
    completes = "noComplete" not in i.opcode
    target = d.sink(i.args[0], "b64") if len(i.args) and isinstance(i.args[0], str) else None
    if remote and i.args[0] != "_":
        raise d.fail("an mbarrier of the cluster, whose state cannot be had: wanted _")
    rest = i.args[1:] if target is not None else i.args
    base, offset = d.address(rest[0])
    amount = d.slot(rest[1], "u32") if len(rest) > 1 else None
    if (expects or not completes) and amount is None:
        raise d.fail(i.opcode)
    zero = np.zeros(32, np.uint64)

    def step(w: Warp) -> None:
        at = the_lanes(w, base, offset)
        found = lookup_all(w, at, own=not remote)
        totals = [lanes for _, lanes in found] if amount is None else of_each(w, amount, at)
        clock = w.released if i.has("relaxed") else w.publish()
        for (bar, lanes), total in zip(found, totals, strict=True):
            if not completes and total >= bar.pending:
                raise Misuse(f"{total} arrivals with .noComplete, which complete a phase: {bar.state()}")
            if expects:
                expect_tx(bar, total)
                arrive(bar, lanes, clock, w)
            else:
                arrive(bar, total, clock, w)
        w.machine.log("arrive", w, str(found[0][0].offset - SMEM_BASE))
        if target is not None:
            w.put(target, zero, 0)

    return step


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def transactions(i: Instruction, d: Decoder) -> Step:
    i.only(*STATE_SPACES, "shared::cluster", *SCOPES)
    base, offset = d.address(i.args[0])
    amount = d.slot(i.args[1], "u32")
    expects = "expect_tx" in i.opcode

    def step(w: Warp) -> None:
        n = w.uniform(amount, np.uint32, "a number of bytes")
        for bar, lanes in lookup_all(w, the_lanes(w, base, offset), own=not i.has("shared::cluster")):
            bar.cta.visit(w, "counts bytes on an mbarrier in")
            if expects:
                expect_tx(bar, n * lanes)
            else:  # relaxed, as it must be
                complete_tx(bar, n * lanes, w.released)

    return step


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def wait(i: Instruction, d: Decoder) -> Step:
    """Waits for a parity: true once the phase of that parity is complete. try_wait may sleep, and may give up."""
    i.only("parity", *STATE_SPACES, *SCOPES)
    if not i.has("parity"):
        raise d.fail("without .parity")
    sleeps = "try_wait" in i.opcode
    target = d.sink(i.args[0], "pred")
    base, offset = d.address(i.args[1])
    parity = d.slot(i.args[2], "u32")
    yes, no = np.ones(32, bool), np.zeros(32, bool)

    def step(w: Warp) -> Wait | None:
        bar, p = one(w, base, offset, own=True), w.uniform(parity, np.uint32, "a parity") & 1

        def ready() -> bool:
            return bar.phase & 1 != p

        if ready():
            if bar.done is not None:
                (w.unfenced if i.has("relaxed") else w.clock).join(bar.done)
            if w.machine.tape is not None:
                w.machine.tape.passes(bar)
            w.put(target, yes)
            return None
        if sleeps and w.machine.rng.random() >= SPURIOUS:
            return Wait(ready, lambda: f"parity {p}: {bar.state()}")
        w.put(target, no)
        return None

    return step


# ---- named barriers


@instruction("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive", "barrier.cta.sync", "barrier.cta.arrive")
def named(i: Instruction, d: Decoder) -> Step:
    """A named barrier, whose count is all threads of the CTA if none is given."""
    i.only("aligned")
    number = d.slot(i.args[0], "u32")
    threads = d.slot(i.args[1], "u32") if len(i.args) > 1 else None
    waits = ".sync" in i.opcode

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        m, cta = w.machine, w.cta
        which = w.uniform(number, np.uint32, "the number of a barrier")
        name = f"named barrier {which} of CTA {cta.number}"
        if (mine := w.extra.pop("bar", None)) is None:
            if which > 15:
                raise Misuse(f"named barrier {which}, there are 16")
            count = m.threads if threads is None else w.uniform(threads, np.uint32, "the count of a barrier")
            if count % 32 or not 0 < count <= m.threads:
                raise Misuse(f"named barrier {which} of {count} threads in a CTA of {m.threads}")
            bar = cta.named.setdefault(which, NamedBarrier(Clock(m.warp_count)))
            if bar.arrived and bar.count != count:
                raise Misuse(f"named barrier {which} of {count} threads, {names(bar.who)} came to it with {bar.count}")
            bar.count = count
            bar.clock.join(w.publish())
            bar.arrived += 32
            bar.who.append(w.name)
            mine = bar.generation
            if m.tape is not None:
                m.tape.arrives(name)
            m.log("arrive", w, f"bar {which}")
            if bar.arrived == bar.count:
                bar.done, bar.clock = bar.clock, Clock(m.warp_count)
                bar.generation += 1
                bar.arrived, bar.who, m.news = 0, [], True
                if m.tape is not None:
                    m.tape.completes(name)
        bar = cta.named[which]
        if not waits:
            return None
        if bar.generation != mine:
            assert bar.done is not None
            w.clock.join(bar.done)
            if m.tape is not None:
                m.tape.passes(name, mine)
            return None
        w.extra["bar"] = mine
        return Wait(
            lambda: bar.generation != mine,
            lambda: f"named barrier {which}: {bar.arrived} of {bar.count} threads have come ({names(bar.who)})",
        )

    return step


@instruction("bar.warp.sync")
def warp_sync(i: Instruction, d: Decoder) -> Step:
    mask = d.slot(i.args[0], "u32")

    def step(w: Warp) -> None:
        meet(w, mask, i)

    return step


def meet(w: Warp, slot: int, i: Instruction) -> None:
    """.sync with a member mask: all members that have not ended must be here."""
    members = w.uniform(slot, np.uint32, "a member mask") & w.alive
    if not (w.active & ~members) and members == w.active:
        return
    raise Misuse(
        f"{i.opcode} for lanes {members:#010x} is reached by {w.active:#010x} only: the others are on another way "
        f"({int(lanes_of(members & ~w.active & FULL).sum())} missing)"
    )


# ---- fences


@instruction("fence.proxy.async")
def proxy_fence(i: Instruction, d: Decoder) -> Step:
    """9.7.14.5: what this warp knows of generic accesses becomes visible to the async proxy."""
    i.only("shared::cta", "shared::cluster", "global")

    def step(w: Warp) -> None:
        w.fence_proxy()

    return step


FROM_GENERIC = "fence.proxy.async::generic"


@instruction(f"{FROM_GENERIC}.release", f"{FROM_GENERIC}.acquire")
def one_way_proxy_fence(i: Instruction, d: Decoder) -> Step:
    """9.7.14.5, proxy fence (uni-directional): a release of generic accesses to shared memory of the CTA, which the
    async proxy sees; it takes an acquire too, by the thread that issues what follows. Only the first changes what is
    known here: whoever issues an operation must have learned of it, as of any other.
    """
    releases = i.opcode.startswith(f"{FROM_GENERIC}.release")
    i.only("sync_restrict::shared::cta" if releases else "sync_restrict::shared::cluster", "cluster")
    return lambda w: w.fence_proxy() if releases else None


@instruction("fence.mbarrier_init")
def init_fence(i: Instruction, d: Decoder) -> Step:
    """Makes mbarriers that this warp initialised visible to the async proxy and to the cluster."""
    i.only("release", "cluster")

    def step(w: Warp) -> None:
        for cta in w.cta.cluster:
            for bar in cta.barriers.values():
                if bar.init[0] is w:
                    bar.init_fenced = True
        w.fence_made()

    return step


@instruction("fence", "membar", "fence.proxy.tensormap")
def fence(i: Instruction, d: Decoder) -> Step:
    """Orders nothing here beyond what barriers order, except relaxed accesses."""
    i.only("acq_rel", "sc", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl")
    return lambda w: w.fence()
