"""A launch as our own launcher plans it: ffi/introspect.cc says every parameter, and what each tensor map encodes."""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from kernels import build
from kernels.abi import Combine, Forward, Variant
from kernels.tables import Record

from ..machine import scheduler
from ..machine.copies import TensorMap
from ..machine.decode import Code
from ..machine.parser import parse
from ..machine.state import GENERIC_PARAM_BASE, Array, Machine, new_memory
from ..machine.storage import GlobalMemory
from . import attention, native

BUILD = Path(__file__).parents[2] / "build"
ELEMENT_BYTES = {0: 1, 6: 2, 7: 4, 9: 2}  # by the driver's number of a type
SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}  # bytes, by the number that the driver has for one


V = TypeVar("V", bound=Variant)
Edit = Callable[[Any], Any]  # of a TensorMap, or of a number


@dataclass(frozen=True)
class Kernel(Generic[V]):
    """The build's result for a variant."""

    variant: V
    ptx: str
    facts: Record  # tile_m, tile_n, threads, smem_bytes

    @staticmethod
    def of(variant: V) -> Kernel[V]:
        """Takes an up-to-date build, or else compiles the kernel once, into build/ptx."""
        for directory in (*sorted(BUILD.glob("*/kernels")), BUILD / "ptx"):
            if (record := build.cached(variant, directory)) and (ptx := directory / f"{variant.key}.ptx").exists():
                return Kernel(variant, ptx.read_text(), record)
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f"{variant.key}.lock", "w") as lock:  # several test processes may want it
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = build.cached(variant, directory) or build.compile_one(variant, directory)[0]
        return Kernel(variant, (directory / f"{variant.key}.ptx").read_text(), record)


@dataclass
class Launch:
    """A machine that is about to run a kernel on operands."""

    machine: Machine
    operands: attention.Operands
    scale: float
    outputs: dict[str, Array]  # like them, in shape and dtype, the results are

    def run(self) -> tuple[Array, ...]:
        """The results, in the order of `outputs`: of attention (o, lse)."""
        scheduler.run(self.machine)
        return self.results()

    def results(self) -> tuple[Array, ...]:
        found = {name: self.machine.memory.named(name) for name in self.outputs}
        return tuple(
            x.bytes[: x.size].view(y.dtype).reshape(y.shape)
            for x, y in zip(found.values(), self.outputs.values(), strict=True)
        )


def launch(
    kernel: Kernel[Forward],
    x: attention.Operands,
    *,
    processors: int = 2,
    splits: int = 1,
    seed: int = 0,
    record: bool = False,
    edits: Mapping[str, Edit] | None = None,
) -> Launch:
    """Prepares a launch on so many processors.

    The edits plant faults in parameters, by name: in a TensorMap, or in what a number is. Where keys are split,
    `combine` makes the results of what the launch leaves.
    """
    variant, memory = kernel.variant, new_memory()
    x = replace(x, shape=x.shape._replace(splits=splits))
    scale = variant.d**-0.5
    addresses = {name: memory.add(name, array) for name, array in x.named().items()}
    addresses |= add_outputs(memory, outputs := outputs_of(x))
    for name, columns in parts_of(x).items():
        addresses[name] = memory.add(name, None, x.q[..., 0].size * columns * 4)
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    plan = native.plan(variant, x.shape, scale, **tiles, processors=processors, addresses=addresses)
    return Launch(machine(kernel, plan, memory, edits, seed=seed, record=record), x, scale, outputs)


def machine(
    kernel: Kernel[V],
    plan: native.Plan,
    memory: GlobalMemory,
    edits: Mapping[str, Edit] | None = None,
    *,
    seed: int = 0,
    record: bool = False,
) -> Machine:
    """About to run a planned launch of a kernel of any family."""
    program, edits = parse(kernel.ptx), dict(edits or {})
    params, maps = bytearray(program.param_bytes), {}
    kinds = {param.name: param.kind for param in kernel.variant.params}
    for place, (name, blob) in zip(program.params.values(), plan.params.items(), strict=True):
        edit = edits.pop(name, lambda value: value)
        if name in plan.maps:
            maps[GENERIC_PARAM_BASE + place.offset] = edit(tensor_map(plan.maps[name], plan[name]))
        elif kinds[name] == "float32":
            params[place.offset : place.offset + place.size] = struct.pack("<f", edit(*struct.unpack("<f", blob)))
        elif len(blob) > 8:  # the extents of a map
            params[place.offset : place.offset + place.size] = blob
        else:
            params[place.offset : place.offset + place.size] = edit(plan[name]).to_bytes(place.size, "little")
    if edits:
        raise LookupError(f"there is nothing to edit by the name of {', '.join(edits)}: {', '.join(plan.params)}")
    return Machine(
        Code.of(program),
        grid=plan.grid,
        threads=kernel.facts["threads"],
        smem_bytes=kernel.facts["smem_bytes"],
        params=bytes(params),
        memory=memory,
        events=memory.events,
        tensor_maps=maps,
        cluster_size=kernel.facts["cluster"],
        registers=kernel.facts["registers"],
        seed=seed,
        record=record,
    )


def parts_of(x: attention.Operands) -> dict[str, int]:
    """Returns how many numbers all splits leave of a row, by array; there are none without splits."""
    splits = x.shape.splits
    return {"o_parts": splits * x.d_v, "lse_parts": splits} if splits > 1 else {}


def outputs_of(x: attention.Operands) -> dict[str, Array]:
    """The outputs of attention."""
    return {"o": x.q[..., : x.d_v], "lse": x.q[..., 0].astype(np.float32)}


def add_outputs(memory: GlobalMemory, outputs: dict[str, Array]) -> dict[str, int]:
    return {name: memory.add(name, None, like.nbytes) for name, like in outputs.items()}


def combine(kernel: Kernel[Combine], forward: Launch, *, seed: int = 0) -> Launch:
    """The launch that merges the partial results of `forward`, which has run; a kernel's end lies between them."""
    x, memory, left = forward.operands, new_memory(), forward.machine.memory
    given = {name: (b := left.named(name)).bytes[: b.size].view(np.float32) for name in parts_of(x)} | {"sink": x.sink}
    addresses = {name: memory.add(name, array) for name, array in given.items()} | add_outputs(memory, forward.outputs)
    threads, tile_n = kernel.facts["threads"], kernel.facts["tile_n"]
    plan = native.plan_combine(x.shape, threads=threads, tile_n=tile_n, addresses=addresses)
    return Launch(machine(kernel, plan, memory, seed=seed), x, forward.scale, forward.outputs)


def tensor_map(spec: native.MapSpec, address: int) -> TensorMap:
    """The tensor map that ffi/tensor_map.h would encode."""
    rank = spec.rank
    return TensorMap(
        address,
        element=ELEMENT_BYTES[spec.type],
        box=tuple(spec.box[:rank]),
        extents=tuple(spec.extents[:rank]),
        strides=tuple(spec.strides[: rank - 1]),
        swizzle=SWIZZLES[spec.swizzle],
    )
