"""Hyper-connections between two sublayers, and their gradient, by the library's plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_dsv4_fmha._definitions.hyper_connection import NUMBERS, STREAMS
from jax_dsv4_fmha._host.hyper_connection import PARTS
from jax_dsv4_fmha._testing.hyper_connection import (
    BF16,
    EPS,
    HC_EPS,
    ITERATIONS,
    RESULTS,
    Problem,
    complaint,
    complaints,
)
from kernels.abi import HyperConnection, HyperConnectionBackward

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

KEPT = ("totals", "squares")  # for the gradient
PROCESSORS = 8  # of one cluster, which takes all tiles


def launched(
    variant: HyperConnection,
    x: Problem,
    *,
    seed: int = 0,
    edit: Callable[[str], str] = str,
    processors: int = PROCESSORS,
    **edits: Edit,
) -> Machine:
    """The kernel, about to run; the edits plant faults, in PTX and in parameters."""
    kernel, memory = Kernel.of(variant), new_memory()
    tokens, hidden = x.y.shape
    given = ("x", "y", "post", "mix", "taken", "fn", "scale", "base", "norm")
    at = {name: memory.add(name, getattr(x, name)) for name in given}
    row = (2 * STREAMS * hidden, 2 * hidden, 4 * STREAMS, 4 * STREAMS, 4 * STREAMS**2, 4 * NUMBERS, 4)
    sizes = zip((*RESULTS, *KEPT), row, strict=True)
    at |= {name: memory.add(name, None, size * tokens) for name, size in sizes}
    shape = {"tokens": tokens, "hidden": hidden, "taken": x.taken.shape[1], "iterations": ITERATIONS}
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    plan = native.plan_hyper_connection(shape, EPS, HC_EPS, **tiles, processors=processors, addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def results(variant: HyperConnection, x: Problem, **how: Any) -> dict[str, Array]:
    of_launch = launched(variant, x, **how)
    scheduler.run(of_launch)
    tokens, hidden = x.y.shape
    shapes = ((STREAMS, hidden), (hidden,), (STREAMS,), (STREAMS,), (STREAMS, STREAMS), (NUMBERS,), ())
    found = {}
    for name, shape in zip((*RESULTS, *KEPT), shapes, strict=True):
        array, dtype = of_launch.memory.named(name), BF16 if name in ("new_x", "z") else np.float32
        found[name] = array.bytes[: array.size].view(dtype).reshape(tokens, *shape)
    return found


def judge(x: Problem, got: dict[str, Array]) -> None:
    """Raises Wrong where `complaints` has any, or the sums that the gradient takes are wrong."""
    found = complaints(x, got)
    for name, right in zip(KEPT, x.sums(got["new_x"]), strict=True):
        found += complaint(name, got[name], right, 2**-18 * np.maximum(np.abs(right), np.sqrt(np.mean(right * right))))
    if found:
        raise Wrong(found[0])


def gradients(
    numbers: HyperConnectionBackward,
    streams: HyperConnectionBackward,
    x: Problem,
    new_x: Array,
    cotangents: tuple[Array, ...],
    *,
    walks: int = 1,
    seed: int = 0,
    edits: Mapping[str, Callable[[str], str]] | None = None,
    parameters: Mapping[str, Mapping[str, Edit]] | None = None,
) -> dict[str, Array]:
    """The arrays that both kernels of the gradient make, by name; the edits plant faults, by part."""
    tokens, hidden = x.y.shape
    shape = {"tokens": tokens, "hidden": hidden, "taken": x.taken.shape[1], "iterations": ITERATIONS}
    dnew_x, dz, dnew_pre, dnew_post, dnew_mix = cotangents
    given = {name: getattr(x, name) for name in ("x", "y", "post", "mix", "taken", "fn", "scale", "base", "norm")}
    given |= {name: a.astype(np.float32) for name, a in zip(KEPT, x.sums(new_x), strict=True)}
    given |= {"new_x": new_x, "dnew_x": dnew_x, "dz": dz}
    given |= {"dnew_pre": dnew_pre, "dnew_post": dnew_post, "dnew_mix": dnew_mix}
    made = {
        "numbers": {"numbers": (np.float32, (tokens, 32)), "dtaken": (np.float32, x.taken.shape)},
        "streams": {
            "dx": (BF16, x.x.shape),
            "dy": (BF16, x.y.shape),
            "shares": (np.float32, (PARTS, tokens, 20)),
            "dnorm": (np.float32, (walks, hidden)),
        },
    }
    found: dict[str, Array] = {}
    for variant in (numbers, streams):
        kernel, memory = Kernel.of(variant), new_memory()
        names = {param.name for param in variant.params}
        at = {name: memory.add(name, array) for name, array in (given | found).items() if name in names}
        results = made[variant.part]
        for name, (dtype, extents) in results.items():
            at[name] = memory.add(name, None, np.dtype(dtype).itemsize * math.prod(extents))
        tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n")}
        plan = native.plan_hyper_connection_bwd(
            shape, walks if variant is streams else 0, EPS, HC_EPS, **tiles, addresses=at
        )
        edited = Kernel(variant, (edits or {}).get(variant.part, str)(kernel.ptx), kernel.facts)
        scheduler.run(machine(edited, plan, memory, (parameters or {}).get(variant.part), seed=seed))
        for name, (dtype, extents) in results.items():
            array = memory.named(name)
            found[name] = array.bytes[: array.size].view(dtype).reshape(extents)
    return found
