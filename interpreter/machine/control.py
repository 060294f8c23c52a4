"""Branches and ends (PTX ISA 9.7.13), setmaxnreg (9.7.20.5), nanosleep, and launch order (griddepcontrol)."""

from __future__ import annotations

from .decode import Decoder, Step, instruction
from .hazards import Misuse
from .parser import Instruction
from .scheduler import branch
from .state import FULL, Warp, mask_of


@instruction("bra")
def jump(i: Instruction, d: Decoder) -> Step:
    i.only("uni")
    target = d.program.target_of(str(i.args[0]), i)
    if i.guard is None:
        return lambda w: target
    here = d.index
    p, join = d.slot(i.guard, "pred"), d.program.join[here]
    flip, uniform = FULL if i.guard_negated else 0, i.has("uni")
    fall = here + 1

    def step(w: Warp) -> int:
        if w.active & ~w.D[p]:
            w.demand(p, "the condition of a branch")
        taken = (mask_of(w.R[p]) ^ flip) & w.active
        if uniform and taken not in (0, w.active):
            raise Misuse("bra.uni that some lanes take and others do not")
        return branch(w, taken, target, fall, join)

    return step


@instruction("ret", "exit")
def end(i: Instruction, d: Decoder) -> Step:
    if i.guard is not None:
        raise d.fail("a guarded return")
    return lambda w: -1


@instruction("trap")
def trap(i: Instruction, d: Decoder) -> Step:
    def step(w: Warp) -> None:
        raise Misuse("the kernel stops itself")

    return step


@instruction("setmaxnreg")
def registers(i: Instruction, d: Decoder) -> Step:
    """The registers that a CTA's warps ask for must fit those it was launched with. On an H200 a warp that asks for
    more waits for ever.
    """
    i.only("inc", "dec", "sync", "aligned", "u32")
    count = d.immediate(i.args[0])
    if count % 8 or not 24 <= count <= 256:
        raise d.fail(f"{count} registers, wanted a multiple of 8 from 24 to 256")

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        w.extra["registers"] = count
        total = sum(32 * x.extra.get("registers", 0) for x in w.cta.warps)
        threads = 32 * w.cta.warp_total
        there_are = w.cta.machine.registers * threads
        if total > there_are:
            raise Misuse(f"the warps of a CTA ask for {total} registers, it was launched with {there_are}")

    return step


@instruction("nanosleep", "griddepcontrol")
def nothing(i: Instruction, d: Decoder) -> Step:
    return lambda w: None
