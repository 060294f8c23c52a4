"""A router after its product, by the library's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_dsv4_fmha._testing.router import SCALE, UNIT, Problem, complaints
from kernels.abi import Route

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong


def sizes_of(x: Problem) -> dict[str, int]:
    """The extents of a launch's operands."""
    rows, parts, e = x.logits.shape
    vocabulary = 0 if x.table is None else len(x.table)
    given = {"chosen": x.chosen, "vocabulary": vocabulary, "is_sigmoid": int(x.is_sigmoid)}
    return {"rows": rows, "parts": parts, "experts": e, **given}


def launched(variant: Route, x: Problem, *, seed: int = 0, edit: Callable[[str], str] = str, **edits: Edit) -> Machine:
    """The router, about to run; the edits plant faults, in PTX and in parameters."""
    kernel, memory = Kernel.of(variant), new_memory()
    of_choice = {"bias": x.bias} if x.table is None else {"table": x.table, "tokens": x.tokens}
    at = {name: memory.add(name, array) for name, array in {"logits": x.logits, **of_choice}.items()}
    at |= {name: memory.add(name, None, 4 * len(x.logits) * x.chosen) for name in ("weights", "chosen")}
    plan = native.plan_route(sizes_of(x), UNIT, SCALE, tile_m=kernel.facts["tile_m"], addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def route(variant: Route, x: Problem, **how: Any) -> tuple[Array, Array]:
    """float32 weights and int32 experts, `[tokens, chosen]`"""
    of_launch = launched(variant, x, **how)
    scheduler.run(of_launch)

    def found(name: str, dtype: Any) -> Array:
        array = of_launch.memory.named(name)
        return array.bytes[: array.size].view(dtype).reshape(-1, x.chosen)

    return found("weights", np.float32), found("chosen", np.int32)


def judge(x: Problem, weights: Array, chosen: Array) -> None:
    """Raises Wrong where `complaints` has any."""
    if found := complaints(x, weights, chosen):
        raise Wrong(found[0])
