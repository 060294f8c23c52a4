"""The slots and clocks that an instruction of PTX takes in a quarter of an SM, and its registers.

An assembler makes other instructions of some: it drops moves, contracts a product and a sum, and tests seven bits at a
time. `costs_of` counts what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..machine.decode import Code, number_of
from ..machine.parser import Address, Arg, Instruction

Registers = tuple[int, ...]  # slots


@dataclass(frozen=True)
class Cost:
    slots: float  # of the quarter's issue
    unit: str = ""  # "fma", "alu", "mufu" of the quarter; "" for none of these
    clocks: float = 0  # of that unit
    latency: float = 0
    ordered: bool = False  # it stays in order with others that are: what touches memory, or other warps
    reads: Registers = ()
    writes: Registers = ()


NOTHING = Cost(0)

TOUCHES = (  # memory, or other warps and engines
    *("ld.shared", "ld.global", "ld.volatile", "ld.acquire", "ld.relaxed", "ld.weak", "st.", "atom", "red", "cp."),
    *("mbarrier", "bar.", "barrier", "fence", "membar", "wgmma", "tcgen05", "shfl", "vote", "elect", "activemask"),
    *("ldmatrix", "stmatrix", "setmaxnreg", "griddepcontrol", "nanosleep", "clusterlaunchcontrol", "prefetch", "trap"),
    *("ret", "exit", "bra"),
)
NO_TARGET = (
    *("st.", "red.", "cp.", "bar.", "barrier", "fence", "membar", "tcgen05.st", "tcgen05.mma", "tcgen05.commit"),
    *("tcgen05.cp", "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.fence", "tcgen05.wait", "tcgen05.relinquish", "bra"),
    *("mbarrier.init", "mbarrier.inval", "mbarrier.expect_tx", "mbarrier.complete_tx", "stmatrix", "setmaxnreg"),
    *("prefetch", "griddepcontrol", "nanosleep", "trap", "ret", "exit", "clusterlaunchcontrol.try_cancel"),
    *("wgmma.fence", "wgmma.commit", "wgmma.wait"),
)
MUFU = ("ex2.approx", "lg2.approx", "rcp.approx", "rsqrt.approx", "sqrt.approx", "tanh.approx", "sin.", "cos.")
FREE = ("mov", "cvta", "ld.param", "neg.f", "abs.f", "not.pred")
FLOATS = ("f32", "bf16x2", "f16x2", "f32x2", "bf16", "f16", "f64")


def names_in(arg: Arg) -> Iterable[str]:
    if isinstance(arg, Address):
        return (arg.base, *arg.coordinates)
    if isinstance(arg, tuple):
        return [name for part in arg for name in names_in(part)]
    return arg.lstrip("!").split("|")


def registers_of(i: Instruction, slots: Mapping[tuple[str, str], int]) -> tuple[Registers, Registers]:
    """Those that it reads, and those that it writes."""

    def of(args: Iterable[Arg]) -> list[int]:
        found = (slots.get((name, "")) for arg in args for name in names_in(arg))
        return [slot for slot in found if slot is not None]

    targets = 0 if not i.args or i.opcode.startswith(NO_TARGET) or isinstance(i.args[0], Address) else 1
    reads = of(i.args[targets:]) + of((i.guard or "",))
    writes = of(i.args[:targets])
    if i.opcode.startswith("wgmma.mma") or (i.guard is not None and writes):  # adds to what is there
        reads += writes
    return tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes))


def cost_of(i: Instruction, c: Callable[[str], float]) -> Cost:
    """Returns the cost of one instruction by itself, without its registers."""
    name, opcode = i.opcode.split(".")[0], i.opcode
    kind = opcode.rsplit(".", 1)[-1]
    if opcode.startswith(FREE):
        return NOTHING
    if opcode.startswith(TOUCHES):
        return Cost(1, ordered=True, latency=latency_of(opcode, c))
    fma, alu = ("fma", c("fma"), c("fma latency")), ("alu", c("alu"), c("alu latency"))
    if opcode.startswith(MUFU):
        return Cost(1, "mufu", c("mufu"), c("mufu latency"))
    if kind == "f32x2":
        return Cost(1, "fma", 2 * c("fma"), c("fma latency"))
    if name in ("div", "rem") and kind not in FLOATS:
        return Cost(20, "alu", 10 * c("alu"), 60)
    if name in ("div", "sqrt", "rcp") and kind in FLOATS:
        return Cost(9, "mufu", c("mufu"), 40)
    if opcode == "cvt.f32.f16" or (name in ("add", "sub", "mul", "fma", "mad") and kind in FLOATS):
        return Cost(1, *fma)  # HADD2.F32 is that conversion
    if name in ("mul", "mad"):
        return Cost(2 if kind.endswith("64") else 1, "fma", 2 * c("fma"), c("alu latency"))
    wide = kind.endswith("64") and name not in ("setp", "cvt", "selp")
    return Cost(2, "alu", 2 * c("alu"), c("alu latency")) if wide else Cost(1, *alu)


def latency_of(opcode: str, c: Callable[[str], float]) -> float:
    opcode = opcode.replace(".volatile", "")
    if opcode.startswith(("ld.shared::cluster",)):
        return c("peer latency")
    if opcode.startswith(("ld.shared", "ldmatrix", "atom.shared")):
        return c("smem latency")
    if opcode.startswith("ld"):
        return c("l2 latency")
    if opcode.startswith("atom"):
        return c("l2 latency") + c("atomic latency")
    if opcode.startswith("tcgen05.ld"):
        return 32 + c("tmem latency")
    if opcode.startswith(("shfl", "redux")):
        return c("shuffle latency")
    if opcode.startswith(("vote", "elect", "activemask")):
        return 2 * c("alu latency")
    return 1


def costs_of(code: Code, rates: Mapping[str, float]) -> list[Cost]:
    """Returns the cost of every instruction of a program, less for those that an assembler merges with others."""
    program, slots = code.program.code, code.decoder.slots
    registers = [registers_of(i, slots) for i in program]
    found = [
        replace(cost_of(i, rates.__getitem__), reads=reads, writes=writes)
        for i, (reads, writes) in zip(program, registers, strict=True)
    ]
    readers: dict[int, list[int]] = {}
    writers = Counter(slot for _, writes in registers for slot in writes)
    for n, (reads, _) in enumerate(registers):
        for slot in reads:
            readers.setdefault(slot, []).append(n)
    for n, i in enumerate(program):
        if len(found[n].writes) != 1 or writers[found[n].writes[0]] != 1:
            continue
        users = [program[x] for x in readers.get(found[n].writes[0], [])]
        if i.opcode in ("mul.f32", "mul.ftz.f32") and len(users) == 1 and contracts(users[0]):
            found[n] = replace(found[n], slots=0, unit="", clocks=0, latency=0)  # an FFMA with the sum
        if i.opcode == "and.b32" and users and all(x.opcode in BITS for x in users) and is_bit(i):
            found[n] = replace(found[n], slots=0, unit="", clocks=0, latency=0)  # R2P tests seven bits at a time
            for x in readers[found[n].writes[0]]:
                found[x] = replace(found[x], slots=0.25, clocks=0.5)
    return found


BITS = ("setp.eq.b32", "setp.ne.b32", "setp.eq.s32", "setp.ne.s32")


def contracts(i: Instruction) -> bool:
    return i.opcode in ("add.f32", "sub.f32", "add.ftz.f32", "sub.ftz.f32")


def is_bit(i: Instruction) -> bool:
    value = number_of(str(i.args[2])) if len(i.args) == 3 and isinstance(i.args[2], str) else None
    return value is not None and value.bit_count() == 1
