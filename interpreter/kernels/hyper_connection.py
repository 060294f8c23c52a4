"""Hyper-connections between two sublayers, by the library's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_dsv4_fmha._definitions.hyper_connection import STREAMS
from jax_dsv4_fmha._testing.hyper_connection import BF16, EPS, HC_EPS, ITERATIONS, RESULTS, Problem, complaints
from kernels.abi import HyperConnection

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

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
    sizes = zip(RESULTS, (2 * STREAMS * hidden, 2 * hidden, 4 * STREAMS, 4 * STREAMS, 4 * STREAMS**2), strict=True)
    at |= {name: memory.add(name, None, size * tokens) for name, size in sizes}
    shape = {"tokens": tokens, "hidden": hidden, "taken": x.taken.shape[1], "iterations": ITERATIONS}
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    plan = native.plan_hyper_connection(shape, EPS, HC_EPS, **tiles, processors=processors, addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def results(variant: HyperConnection, x: Problem, **how: Any) -> dict[str, Array]:
    of_launch = launched(variant, x, **how)
    scheduler.run(of_launch)
    tokens, hidden = x.y.shape
    shapes = ((STREAMS, hidden), (hidden,), (STREAMS,), (STREAMS,), (STREAMS, STREAMS))
    found = {}
    for name, shape in zip(RESULTS, shapes, strict=True):
        array, dtype = of_launch.memory.named(name), BF16 if name in ("new_x", "z") else np.float32
        found[name] = array.bytes[: array.size].view(dtype).reshape(tokens, *shape)
    return found


def judge(x: Problem, got: dict[str, Array]) -> None:
    """Raises Wrong where `complaints` has any."""
    if found := complaints(x, got):
        raise Wrong(found[0])
