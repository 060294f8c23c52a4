"""Forms of instructions that a run has executed: of tensor cores and memory, copies, barriers, fences and clusters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..machine.parser import Instruction
from ..machine.state import AsyncOp, Machine

FAMILIES = {  # heading -> beginnings of opcodes
    "Tensor cores and tensor memory": ("tcgen05.",),
    "Products of warpgroups": ("wgmma.",),
    "Copies": ("cp.async", "cp.reduce", "st.async", "prefetch"),
    "mbarriers": ("mbarrier.",),
    "Barriers and fences": ("bar.", "barrier.", "fence", "membar", "elect", "setmaxnreg", "griddepcontrol"),
    "Clusters and launches": ("mapa", "getctarank", "clusterlaunchcontrol", "multimem", "red.async"),
}


def family_of(form: str) -> str | None:
    return next((name for name, beginnings in FAMILIES.items() if form.startswith(beginnings)), None)


def executed(machine: Machine) -> set[str]:
    """An opcode; for products, loads and stores of tensor memory with what decides where their numbers lie.

    The machine must have been made to record.
    """
    code = machine.program.code
    ran = {code[n].opcode for n in machine.executed}
    detailed = {x for x in machine.ops_log if x.kind in ("tcgen05.mma", "tcgen05.ld", "tcgen05.st")}
    forms = {opcode for opcode in ran if not opcode.startswith(("tcgen05.mma", "tcgen05.ld", "tcgen05.st"))}
    return {form for form in forms | {detail(op) for op in detailed} if family_of(form)}


def detail(op: AsyncOp) -> str:
    """`tcgen05.mma….kind::f16: 128x64x16, A in TMEM, lane 16`."""
    what = op.what.split(", column")[0].replace(" into lane 0", "").replace(" into lane", ", lane")
    what = re.sub(r"^(product|load of|store of) ", "", what)
    if op.kind == "tcgen05.mma":
        return f"{without_discards(op.instruction)}: {what}"
    return f"{op.instruction.opcode}{what[what.index(',') :] if ',' in what else ''}"


def without_discards(i: Instruction) -> str:
    """A collector that keeps nothing is what a product has where it names none."""
    return re.sub(r"\.collector::\w+::discard", "", i.opcode)


def by_family(forms: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for form in sorted(forms):
        if (name := family_of(form)) is not None:
            found[name].append(form)
    return {name: members for name, members in found.items() if members}
