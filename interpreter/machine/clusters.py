"""Between the CTAs of a cluster (PTX ISA 2.2.2 Cluster of Cooperative Thread Arrays; 9.7 mapa, getctarank,
barrier.cluster and st.async).

Shared memory of the cluster is one window, in which every CTA has its own part; `.shared::cluster` reaches all of it,
`.shared` and `.shared::cta` only the CTA's own. A warp that accesses another CTA's memory must know that the CTA has
begun, and the other must not end before it knows that all who did are done: `Cta.visit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .barriers import complete_tx, lookup_all, the_lanes
from .decode import DTYPES, Decoder, Step, instruction
from .hazards import Clock, Misuse
from .memory import addresses, refuse_barriers, shared_words, size_of
from .parser import Instruction
from .rules import Rule
from .state import RANK_SHIFT, AsyncOp, Cta, Wait, Warp, lanes_of, names


def ranks(w: Warp, mask: int) -> list[Cta]:
    """The CTAs of a multicast's mask: bit n is rank n."""
    if mask == 0 or mask >> len(w.cta.cluster):
        raise Misuse(f"a multicast to the CTAs of mask {mask:#b} in a cluster of {len(w.cta.cluster)}")
    return [cta for cta in w.cta.cluster if mask >> cta.rank & 1]


@instruction("mapa")
def map_address(i: Instruction, d: Decoder) -> Step:
    """The same place in the shared memory of another CTA of the cluster."""
    i.only("shared::cluster", "u32")
    target, a, rank = d.sink(i.args[0], "u32"), d.slot(i.args[1], "u32"), d.slot(i.args[2], "u32")

    def step(w: Warp) -> None:
        place = np.uint32((1 << RANK_SHIFT) - 1)
        w.put(target, w.read(a, np.uint32) & place | w.read(rank, np.uint32) << RANK_SHIFT, w.D[a] & w.D[rank])

    return step


@instruction("getctarank")
def rank_of(i: Instruction, d: Decoder) -> Step:
    i.only("shared::cluster", "u32")
    target, a = d.sink(i.args[0], "u32"), d.slot(i.args[1], "u32")
    return lambda w: w.put(target, w.read(a, np.uint32) >> RANK_SHIFT, w.D[a])


# ---- the barrier of all warps


@dataclass
class ClusterBarrier:
    warps: list[Warp]
    clock: Clock
    comes: Clock  # what those know who arrive relaxed: it tells of ends alone, without `Rule.RELAXED_END`
    arrived: set[int] = field(default_factory=set)  # warps, by index
    generation: int = 0
    done: Clock | None = None
    over: Clock | None = None

    def __post_init__(self) -> None:
        self.name = f"the cluster's barrier of CTA {self.warps[0].cta.number}"

    def passed(self, generation: int) -> bool:
        """Returns True once a phase is complete: all warps that have not ended have arrived in it."""
        if generation == self.generation and all(w.exited or w.index in self.arrived for w in self.warps):
            self.done, self.clock = self.clock, Clock(self.warps[0].machine.warp_count)
            self.over, self.comes = self.comes, Clock(self.warps[0].machine.warp_count)
            self.arrived = set()
            self.generation += 1
            if (tape := self.warps[0].machine.tape) is not None:
                tape.completes(self.name)
        return generation != self.generation

    def state(self) -> str:
        here, missing = (
            names(w.name for w in self.warps if not w.exited and (w.index in self.arrived) == come)
            for come in (True, False)
        )
        return f"the cluster's barrier, where {here} have come and not {missing}"


def barrier_of(w: Warp) -> ClusterBarrier:
    """Their cluster's."""
    home = w.cta.cluster[0].extra
    if "cluster barrier" not in home:
        warps = [x for cta in w.cta.cluster for x in cta.warps]
        home["cluster barrier"] = ClusterBarrier(warps, Clock(w.machine.warp_count), Clock(w.machine.warp_count))
    bar: ClusterBarrier = home["cluster barrier"]
    return bar


@instruction("barrier.cluster.arrive")
def arrive(i: Instruction, d: Decoder) -> Step:
    """Released is what mbarrier.arrive releases."""
    i.only("aligned", "release", "relaxed")

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        bar = barrier_of(w)
        if "cluster barrier phase" in w.extra:
            raise Misuse("arrives at the cluster's barrier again without having waited there")
        w.extra["cluster barrier phase"] = bar.generation
        if i.has("relaxed"):
            bar.clock.join(w.released)
            if Rule.RELAXED_END not in w.machine.rules:
                bar.comes.join(w.publish())
        else:
            bar.clock.join(w.publish())
        bar.arrived.add(w.index)
        if w.machine.tape is not None:
            w.machine.tape.arrives(bar.name)
        w.machine.news = True
        w.machine.log("arrive", w, "the cluster's barrier")

    return step


@instruction("barrier.cluster.wait")
def wait(i: Instruction, d: Decoder) -> Step:
    i.only("aligned", "acquire")

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        bar, phase = barrier_of(w), w.extra.get("cluster barrier phase")
        if phase is None:
            raise Misuse("waits at the cluster's barrier without having arrived")
        if not bar.passed(phase):
            return Wait(lambda: bar.passed(phase), bar.state)
        assert bar.done is not None and bar.over is not None
        w.clock.join(bar.done)
        w.cta.outlives(bar.over)
        del w.extra["cluster barrier phase"]
        if w.machine.tape is not None:
            w.machine.tape.passes(bar.name, phase)
        return None

    return step


# ---- st.async


@instruction("st.async")
def store(i: Instruction, d: Decoder) -> Step:
    """Every lane stores, and counts its bytes on an mbarrier of the target CTA. It releases only these stores."""
    kind = i.mods[-1]
    i.only("weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4", kind)
    count = next((int(m[1:]) for m in i.mods if m in ("v2", "v4")), 1)
    sources, size = d.vector(i.args[1], kind), size_of(kind)
    if len(sources) != count or size < 4 or not (i.has("shared::cluster") and i.has("mbarrier::complete_tx::bytes")):
        raise d.fail(i.opcode)
    (base, offset), (bar_base, bar_offset) = d.address(i.args[0]), d.address(i.args[2])
    total = size * count

    def step(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        cta, words = shared_words(w, at, total, "stores")
        bars = lookup_all(w, the_lanes(w, bar_base, bar_offset))
        if any(bar.cta is not cta for bar, _ in bars):
            raise Misuse(f"a store to CTA {cta.number} that completes on another's mbarrier")
        refuse_barriers(cta, words)
        for slot in sources:
            w.check_read(slot)
        values = np.stack([w.R[s].view(DTYPES[f"u{8 * size}"])[w.lanes] for s in sources], 1)
        lanes = np.stack([lanes_of(w.D[s])[w.lanes] for s in sources], 1)

        def run(op: AsyncOp) -> None:
            cta.visit(op, "stores to")
            cta.smem.shadow.write(op, words, np.repeat(lanes, size // 4, 1))
            cta.smem.words32[words] = values.view(np.uint32)
            clock = Clock(w.machine.warp_count)
            clock.ops |= 1 << op.number
            for bar, n in bars:
                complete_tx(bar, n * total, clock)

        w.issue("st.async", f"stores {len(at)} x {total} bytes to CTA {cta.number}", run, proxy="generic", ctas=(cta,))

    return step
