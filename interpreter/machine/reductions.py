"""Atomics in global memory (PTX ISA 9.7.13.5 atom, 9.7.13.6 red): sums that are added to by everybody, in any order,
and greatest numbers.

They are relaxed: they order nothing, and nobody may read or write their targets without another order. A buffer counts
how often each of its numbers was added to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .decode import Decoder, Step, instruction
from .memory import addresses
from .parser import Instruction
from .state import LANES, Array, Warp
from .storage import Buffer, GlobalMemory

BY_HOST = 1  # the event
REDUCED: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
}


def add_cleared(memory: GlobalMemory, name: str, size: int) -> int:
    """The address of a new allocation of zeros, which the host has written and a kernel may add to."""
    return add_changed(memory, name, np.zeros(size, np.uint8))


def add_changed(memory: GlobalMemory, name: str, data: Array) -> int:
    """The address of a new allocation of what the host has written, and a kernel may change."""
    address = memory.add(name, None, data.nbytes)
    buffer = memory.named(name)
    buffer.bytes[:] = 0
    buffer.bytes[: data.nbytes] = data.view(np.uint8).ravel()
    assert buffer.shadow is not None
    buffer.shadow.writer[:], buffer.shadow.defined[:] = BY_HOST, True
    return address


def additions(buffer: Buffer) -> Array:
    """Returns how often each number of a buffer was added to, counted at the first of its words."""
    return buffer.extra.setdefault("additions", np.zeros(len(buffer.bytes) // 4, np.int32))


@instruction("red.relaxed.gpu.global.add")
def reduce(i: Instruction, d: Decoder) -> Step:
    """A reduction into memory of one, two or four float32 a lane, or of an integer of 32 or 64 bits."""
    i.only("v2", "v4", "f32", "u32", "u64")
    count = next((int(m[1:]) for m in i.mods if m in ("v2", "v4")), 1)
    kind = i.mods[-1]
    values = d.vector(i.args[1], "f32") if kind == "f32" else [d.slot(i.args[1], f"b{kind[1:]}")]
    if len(values) != count or kind not in REDUCED or (kind != "f32" and count > 1):
        raise d.fail(i.opcode)
    return change(d, i, values, REDUCED[kind], np.add)


@instruction("red.relaxed.gpu.global.or")
def set_bits(i: Instruction, d: Decoder) -> Step:
    """Sets bits of 64 in memory."""
    i.only("b64")
    return change(d, i, [d.slot(i.args[1], "b64")], np.dtype(np.uint64), np.bitwise_or)


def change(d: Decoder, i: Instruction, values: list[Any], dtype: np.dtype, combine: np.ufunc) -> Step:
    """Combines numbers of a lane with those in memory. The lanes go in any order."""
    count = len(values)
    base, offset = d.address(i.args[0])
    size = dtype.itemsize

    def step(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        for slot in values:
            w.demand(slot, "what is added to global memory")
        given = np.stack([w.read(slot, dtype)[w.lanes] for slot in values], 1)
        for buffer, which, offsets in w.machine.memory.find_all(at, size * count, "adds"):
            order = w.machine.rng.sample(range(len(which)), len(which))
            numbers = (offsets[order, None] // size + np.arange(count)).ravel()
            words = numbers * (size // 4)
            w.atomic = True
            try:
                buffer.change(w, (words[:, None] + np.arange(size // 4)).ravel())
            finally:
                w.atomic = False
            combine.at(buffer.bytes.view(dtype), numbers, given[which[order]].ravel())
            np.add.at(additions(buffer), words, 1)

    return step


@instruction("atom.global.max")
def greatest(i: Instruction, d: Decoder) -> Step:
    """The greatest so far of an int32 in memory, and what was there before; relaxed. The lanes go in any order."""
    i.only("s32")
    target, (base, offset), given = d.sink(i.args[0], "s32"), d.address(i.args[1]), d.slot(i.args[2], "s32")

    def step(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        w.demand(given, "an operand of an atomic")
        numbers, old = w.read(given, np.int32)[w.lanes], np.zeros(LANES, np.int32)
        for buffer, which, offsets in w.machine.memory.find_all(at, 4, "an atomic on"):
            words = offsets // 4
            w.atomic = True
            try:
                buffer.change(w, words)
            finally:
                w.atomic = False
            memory = buffer.bytes.view(np.int32)
            for n in w.machine.rng.sample(range(len(which)), len(which)):
                old[np.flatnonzero(w.lanes)[which[n]]] = memory[words[n]]
                memory[words[n]] = max(memory[words[n]], numbers[which[n]])
        w.put(target, old.view(np.uint32))

    return step
