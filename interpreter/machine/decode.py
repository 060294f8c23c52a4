"""Instructions -> Python closures, made once for a kernel: operands become slots of `Warp.R`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .fusion import Lanewise, Run, fused
from .hazards import Misuse, Unsupported
from .parser import Address, Arg, Instruction, Program, is_jump
from .state import FULL, LANES, PARAM_BASE, SMEM_BASE, Array, Step, Wait, Warp, mask_of

Decode = Callable[[Instruction, "Decoder"], Step]

FAMILIES = (
    *("alu", "control", "memory", "reductions", "barriers", "clusters", "copies", "lanes", "wgmma"),
    *("warp_products", "tmem", "tcgen05", "products", "launch_control"),
)

DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    **{
        f"{kind}{bits}": np.dtype(f"{c}{bits // 8}").type
        for bits in (8, 16, 32, 64)
        for kind, c in (("b", "u"), ("u", "u"), ("s", "i"))
    },
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "b128": np.complex128,  # for its width alone
}
WIDTHS = {"pred": "pred", "b8": "b16", "u8": "b16", "s8": "b16"}  # 8-bit values live in 16-bit registers

REGISTRY: dict[str, Decode] = {}


def instruction(*names: str) -> Callable[[Decode], Decode]:
    """Registers a decoder for all opcodes that begin with one of these dotted names, the longest one winning."""

    def add(decode: Decode) -> Decode:
        for name in names:
            assert name not in REGISTRY, name
            REGISTRY[name] = decode
        return decode

    return add


@functools.cache
def bits_of(kind: str) -> str:
    """The kind of register that holds a type: "pred", "b16", "b32", "b64" or "b128"."""
    if kind in WIDTHS:
        return WIDTHS[kind]
    if kind.endswith("x2"):
        return "b32"
    return "b" + kind.lstrip("bf" if kind.startswith("bf") else "busf")


def number_of(text: str) -> int | None:
    """An immediate's bits; None for a name."""
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0) if text.removeprefix("-")[:1].isdigit() else None


def lanes_with(value: int, bits: str) -> Array:
    """The same in all lanes, for good."""
    dtype = DTYPES[bits]
    kept = value != 0 if bits == "pred" else value & ((1 << 8 * dtype().itemsize) - 1)
    array = np.array([kept] * LANES, dtype)
    array.flags.writeable = False
    return array


class SlotTable:
    """Slots, and what is made of them, for all programs with the same declarations, such as edits of a kernel."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}  # of registers
        self.slots: dict[tuple[str, str], int] = {}
        self.names: list[str] = []
        self.values: list[Array | Callable[[Warp], Array]] = []  # what a slot holds at first: in all warps, or in one
        self.registers: list[int] = []
        self.constants: dict[int, Array] = {}  # slots that are the same for all warps
        self.lanewise: dict[tuple[str, tuple[Arg, ...]], Lanewise] = {}
        self.runs: dict[tuple[Lanewise, ...], Run] = {}

    @staticmethod
    def of(program: Program) -> SlotTable:
        table = SlotTable.with_declarations(program.name, tuple(program.params.values()), tuple(program.shared.items()))
        if any(table.types.setdefault(name, kind) != kind for name, kind in program.registers.items()):
            table = SlotTable()
            table.types.update(program.registers)
        return table

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def with_declarations(*declarations: object) -> SlotTable:
        return SlotTable()


class Decoder:
    """Operands -> slots. A slot is a register, or a constant that every warp has in the same place."""

    def __init__(self, program: Program):
        self.program, self.table = program, (table := SlotTable.of(program))
        self.slots, self.names, self.values = table.slots, table.names, table.values
        self.registers, self.constants = table.registers, table.constants
        self.fenced: set[int] = set()  # slots that products take or give
        self.here: Instruction = program.code[0]
        self.index = 0  # the instruction that is decoded now

    def fail(self, why: str) -> Unsupported:
        fault = Unsupported(why)
        fault.at_line(self.here.line, self.here.text)
        return fault

    def slot(self, arg: Arg, kind: str) -> int:
        """The slot of a register, a special register, an immediate or a symbol, as an operand of type `kind`."""
        if not isinstance(arg, str):
            raise self.fail(f"operand {arg}, wanted a register or a number")
        declared = self.program.register_type(arg)
        if declared is not None:
            have, want = bits_of(declared), bits_of(kind)
            if have != want:
                raise self.fail(f"register {arg} is .{declared}, the operand is .{kind}")
            key = (arg, "")
            if key not in self.slots:
                zero = np.zeros(LANES, DTYPES[have])
                self.slots[key] = self._new(arg, zero)
                self.registers.append(self.slots[key])
            return self.slots[key]
        key = (arg, bits_of(kind))
        if key not in self.slots:
            value = number_of(arg)
            if value is None:
                self.slots[key] = self._new(arg, self._named(arg, kind))
            else:
                array = lanes_with(value, bits_of(kind))
                self.slots[key] = self._new(arg, array)
                self.constants[self.slots[key]] = array
        return self.slots[key]

    def sink(self, arg: Arg, kind: str) -> int:
        """The slot of a destination, which may be `_`."""
        if arg == "_":
            key = ("_", bits_of(kind))
            if key not in self.slots:
                zero = np.zeros(LANES, DTYPES[bits_of(kind)])
                self.slots[key] = self._new("_", zero)
            return self.slots[key]
        if isinstance(arg, str) and self.program.register_type(arg) is None:
            raise self.fail(f"destination {arg} is not a register")
        return self.slot(arg, kind)

    def vector(self, arg: Arg, kind: str, sink: bool = False) -> list[int]:
        """The slots of {a, b, ...}, or of a single operand."""
        return [(self.sink if sink else self.slot)(x, kind) for x in (arg if isinstance(arg, tuple) else (arg,))]

    def predicate(self, arg: Arg) -> tuple[int, bool]:
        """(slot, negated) of p or !p."""
        if not isinstance(arg, str):
            raise self.fail(f"operand {arg}, wanted a predicate")
        return self.slot(arg.removeprefix("!"), "pred"), arg.startswith("!")

    def address(self, arg: Arg) -> tuple[int, int]:
        """(slot, offset) of [base + offset]. The base keeps its width: 32 or 64 bits."""
        if not isinstance(arg, Address) or arg.coordinates:
            raise self.fail(f"operand {arg}, wanted an address")
        return self.slot(arg.base, self.base_kind(arg.base)), arg.offset

    def base_kind(self, base: str) -> str:
        declared = self.program.register_type(base)
        if declared is not None:
            return bits_of(declared)
        return "b64" if base in self.program.params else "b32"

    def immediate(self, arg: Arg) -> int:
        """A number that must be known now."""
        try:
            return int(str(arg), 0)
        except ValueError:
            raise self.fail(f"operand {arg}, wanted a number") from None

    def _new(self, name: str, value: Array | Callable[[Warp], Array]) -> int:
        self.names.append(name)
        self.values.append(value)
        return len(self.names) - 1

    def _named(self, text: str, kind: str) -> Array | Callable[[Warp], Array]:
        """Returns the values of a parameter, shared variable or special register, or a function from a warp to them."""
        dtype = DTYPES[bits_of(kind)]
        if text in self.program.params:
            return lanes_with(PARAM_BASE + self.program.params[text].offset, bits_of(kind))
        if text in self.program.shared:
            return lambda w: np.full(LANES, w.cta.base + self._shared_offset(text), dtype)
        if text in SPECIAL:
            return lambda w: np.broadcast_to(np.asarray(SPECIAL[text](w)), LANES).astype(dtype)
        raise self.fail(f"unknown name {text}")

    def _shared_offset(self, name: str) -> int:
        at = SMEM_BASE
        for other, (align, size) in sorted(self.program.shared.items(), key=lambda x: x[1][1] is None):  # dynamic last
            at = -(-at // align) * align
            if other == name:
                return at
            at += size or 0
        raise AssertionError(name)


Special = Callable[[Warp], Array | int]


def _thread(w: Warp) -> tuple[Array, Array, Array]:
    n, (x, y, _) = w.number * LANES + np.arange(LANES), w.machine.block
    return n % x, n // x % y, n // (x * y)


_BY_AXIS: dict[str, Callable[[Warp], Sequence[Array | int]]] = {
    "tid": _thread,
    "ntid": lambda w: w.machine.block,
    "ctaid": lambda w: w.cta.at_grid,
    "nctaid": lambda w: w.machine.grid,
    "cluster_ctaid": lambda w: w.cta.in_cluster,
    "cluster_nctaid": lambda w: w.machine.cluster,
    "clusterid": lambda w: w.cta.cluster_at,
    "nclusterid": lambda w: w.machine.clusters,
}


def _axis(of: Callable[[Warp], Sequence[Array | int]], axis: int) -> Special:
    return lambda w: of(w)[axis]


SPECIAL: dict[str, Special] = {
    **{f"%{name}.{a}": _axis(of, n) for name, of in _BY_AXIS.items() for n, a in enumerate("xyz")},
    "%cluster_ctarank": lambda w: w.cta.rank,
    "%cluster_nctarank": lambda w: w.machine.cluster_size,
    "%is_explicit_cluster": lambda w: w.machine.cluster_size > 1,
    "%laneid": lambda w: np.arange(LANES),
    "%warpid": lambda w: w.number,
}
"""10 Special registers."""


@functools.cache
def decoder_of(opcode: str) -> tuple[Decode | None, tuple[str, ...]]:
    """The family's function for an opcode, and the modifiers that it is given."""
    parts = opcode.split(".")
    for n in range(len(parts), 0, -1):
        if (decode := REGISTRY.get(".".join(parts[:n]))) is not None:
            return decode, tuple(parts[n:])
    return None, ()


class Code:
    """A kernel, decoded: for all its launches."""

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def of(program: Program) -> Code:
        return Code(program)

    def __init__(self, program: Program):
        for family in FAMILIES:
            importlib.import_module(f"{__package__}.{family}")
        self.program = program
        self.named: dict[int, frozenset[int]] = {}  # by instruction
        self.decoder = d = Decoder(program)
        self.steps: list[Step] = []  # a step for every instruction; in `fused` some stand for several
        for d.index, d.here in enumerate(program.code):
            i = d.here
            self.steps.append(self.decode(i, d))
        leaders = {*program.labels.values(), *program.join.values()}
        leaders |= {n + 1 for n, i in enumerate(program.code) if is_jump(i)}
        self.fused = fused(self.steps, leaders, d.constants, d.table.runs)
        self.registers = tuple(d.registers)
        self.alike = [None if callable(value) else value for value in d.values]
        self.own = [(slot, value) for slot, value in enumerate(d.values) if callable(value)]

    def decode(self, i: Instruction, d: Decoder) -> Step:
        lanewise = d.table.lanewise
        if i.guard is None and (decoded := lanewise.get((i.opcode, i.args))) is not None:
            return decoded
        decode, mods = decoder_of(i.opcode)
        if decode is None:
            raise Unsupported(f"unknown instruction {i.opcode}").at_line(i.line, i.text)
        step = decode(dataclasses.replace(i, mods=mods), d)
        if i.guard is None and isinstance(step, Lanewise):
            lanewise[i.opcode, i.args] = step
        return step if i.guard is None or i.opcode.startswith("bra") else guarded(step, i, d)

    def initial(self, w: Warp) -> list[Array]:
        """Returns what every slot of a warp holds at first."""
        values: list[Any] = self.alike.copy()
        for slot, value in self.own:
            values[slot] = value(w)
        return values

    def registers_at(self, pc: int) -> frozenset[int]:
        """The slots of the registers that an instruction names."""
        if pc in self.named:
            return self.named[pc]
        i, names = self.program.code[pc], set[str]()
        for arg in (*i.args, i.guard or ""):
            parts = (
                (arg.base, *arg.coordinates) if isinstance(arg, Address) else arg if isinstance(arg, tuple) else (arg,)
            )
            for part in parts:
                names.update(part.lstrip("!").split("|"))
        slots = self.decoder.slots
        self.named[pc] = found = frozenset(slots[name, ""] for name in names if (name, "") in slots)
        return found

    def name_of(self, slot: int) -> str:
        return self.decoder.names[slot]


def guarded(step: Step, i: Instruction, d: Decoder) -> Step:
    """@p: the step for the lanes where p holds."""
    assert i.guard is not None
    p, negated = d.slot(i.guard, "pred"), i.guard_negated

    def run(w: Warp) -> int | Wait | None:
        w.demand(p, "a guard")
        before = w.active
        mask = mask_of(w.R[p]) ^ (FULL if negated else 0)
        if mask & before == 0:
            return None
        w.set_active(mask & before)
        try:
            result = step(w)
        finally:
            w.set_active(before)
        if isinstance(result, int):
            raise Misuse("a guarded instruction that jumps")
        return result

    return run


__all__ = ["REGISTRY", "Code", "Decoder", "Step", "Wait", "instruction"]
