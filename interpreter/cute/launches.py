"""Launches that were recorded, with the memory that they got: what a run needs, without the DSL that made them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from ..machine import scheduler
from ..machine.decode import Code
from ..machine.parser import parse
from ..machine.reductions import BY_HOST
from ..machine.rules import MANUAL, Rule
from ..machine.state import Array, Machine, new_memory
from ..machine.storage import Buffer, GlobalMemory


class Role(Enum):
    """The use that a launch makes of an array: it only reads it, only writes it, or (as far as is known) both."""

    OPERAND = "operand"
    RESULT = "result"
    BOTH = "both"


@dataclass(frozen=True)
class Argument:
    """An array as it was before the launches, at the address that they got."""

    name: str
    role: Role
    address: int  # of the first byte of `memory`
    memory: Array  # uint8: from the array's first byte to its last
    start: int  # of the array in it, its element 0
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype[Any]

    @staticmethod
    def of(name: str, array: Array, role: Role) -> Argument:
        """Makes an argument of an array that the launches got; what it holds is copied now."""
        first, end = np.lib.array_utils.byte_bounds(array)
        start = array.__array_interface__["data"][0] - first
        made = Argument(
            name, role, first, np.zeros(end - first, np.uint8), start, array.shape, array.strides, array.dtype
        )
        made.look(made.memory)[...] = array
        return made

    def look(self, memory: Array) -> Array:
        """The array in memory like this."""
        return np.ndarray(self.shape, self.dtype, memory.data, self.start, self.strides)


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel, as the host code made it."""

    kernel: str
    ptx: str
    grid: Sequence[int]
    block: Sequence[int]
    cluster: Sequence[int]
    smem_bytes: int
    params: Sequence[bytes]


@dataclass
class Run:
    """A run of launches, one after the other."""

    arguments: Sequence[Argument]
    memory: GlobalMemory = field(default_factory=new_memory)
    machines: list[Machine] = field(default_factory=list)

    def results(self) -> dict[str, Array]:
        """Returns the arrays that the launches may have written, as they are now, by name."""
        written = [x for x in self.arguments if x.role is not Role.OPERAND]
        return {x.name: x.look(self.memory.named(x.name).bytes) for x in written}

    def written(self, name: str) -> Array:
        """bool: which 4-byte words of an array's memory a launch has written."""
        shadow = self.memory.named(name).shadow
        assert shadow is not None
        return np.asarray(shadow.writer > BY_HOST)

    @property
    def remarks(self) -> list[str]:
        return sorted({remark for machine in self.machines for remark in machine.remarks})


def run(
    launches: Sequence[Launch],
    arguments: Sequence[Argument],
    *,
    seed: int = 0,
    rules: Collection[Rule] = MANUAL,
    record: bool = False,
    started: Run | None = None,
    by: Callable[[Machine], object] = scheduler.run,
) -> Run:
    """Raises what is found. `started`: a new run of these arguments, which has its machines even then. `by`: what runs
    a machine, in place of its own scheduler."""
    result = started or Run(arguments)
    memory = result.memory
    for x in sorted(arguments, key=lambda x: x.address):
        memory.buffers.append(buffer(x, memory))
        memory.bases.append(x.address)
    for launch in launches:
        machine = about_to_run(launch, memory, seed=seed, rules=rules, record=record)
        result.machines.append(machine)
        by(machine)
        if launch is not launches[-1]:
            finish(memory)
    return result


def buffer(x: Argument, memory: GlobalMemory) -> Buffer:
    made = Buffer(x.name, x.address, x.memory if x.role is Role.OPERAND else None, len(x.memory), memory.events)
    if x.role is Role.BOTH:
        assert made.shadow is not None
        made.bytes[: len(x.memory)] = x.memory
        made.shadow.writer[:], made.shadow.defined[:] = BY_HOST, True
    return made


def finish(memory: GlobalMemory) -> None:
    """A kernel's end orders all that it wrote before the next."""
    for b in memory.buffers:
        if b.shadow is not None:
            b.shadow.writer[b.shadow.writer > 0] = BY_HOST
            b.shadow.readers[:] = 0


def about_to_run(launch: Launch, memory: GlobalMemory, *, seed: int, rules: Collection[Rule], record: bool) -> Machine:
    program = parse(launch.ptx)
    params = bytearray(program.param_bytes)
    for place, blob in zip(program.params.values(), launch.params, strict=True):
        params[place.offset : place.offset + place.size] = blob
    return Machine(
        Code.of(program),
        grid=launch.grid,
        threads=launch.block,
        smem_bytes=launch.smem_bytes,
        params=bytes(params),
        memory=memory,
        events=memory.events,
        cluster_size=launch.cluster,
        seed=seed,
        record=record,
        rules=rules,
    )
