"""Rows moved to and from a layer's experts, by the library's plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jax_dsv4_fmha._testing.experts import BF16
from kernels.abi import ExpertRows

from ..machine import scheduler
from ..machine.state import Array, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

POISON = 0x5A


@dataclass(frozen=True)
class Problem:
    """Choices of experts, of which some are of other devices, and rows: of tokens, or of choices."""

    form: str
    chosen: Array  # int32 [tokens, choices]
    x: Array  # bfloat16 [tokens, k] or [tokens choices, k]
    experts: int

    @staticmethod
    def of(form: str, tokens: int, choices: int, k: int, experts: int = 4) -> Problem:
        """Half of the experts are here. The first token has none here, the second has all. Rows of others are NaN."""
        rng = np.random.default_rng(0)
        chosen = rng.integers(-experts // 2, experts + experts // 2, (tokens, choices), np.int32)
        chosen[0], chosen[1:2] = experts, experts - 1
        x = rng.standard_normal((tokens * (choices if form == "summed" else 1), k)).astype(BF16)
        made = Problem(form, chosen, x, experts)
        if form == "summed":
            x[~made.is_here.reshape(-1)] = np.nan
        return made

    @property
    def is_here(self) -> Array:
        return (self.chosen >= 0) & (self.chosen < self.experts)

    @property
    def list(self) -> Array:
        """int32 [tokens choices], choices by expert, and those of no expert here at the end"""
        group = np.where(self.is_here, self.chosen, self.experts).reshape(-1)
        return np.argsort(group, kind="stable").astype(np.int32)

    @property
    def count(self) -> int:
        """The choices of experts here."""
        return int(self.is_here.sum())

    @property
    def wanted(self) -> Array:
        """Rows taken, exactly, or sums in float32, as they are rounded: all that is written."""
        tokens, choices = self.chosen.shape
        if self.form == "taken":
            found: Array = self.x[self.list[: self.count] // choices]
            return found
        parts = np.where(self.is_here[..., None], self.x.reshape(tokens, choices, -1).astype(np.float32), np.float32(0))
        total = np.zeros_like(parts[:, 0])
        for j in range(choices):
            total += parts[:, j]
        return total.astype(BF16)


def run(variant: ExpertRows, x: Problem, *, seed: int = 0, edit: Callable[[str], str] = str, **edits: Edit) -> Array:
    """bfloat16 [rows of y, k], `POISON` where the kernel writes nothing; the edits plant faults."""
    kernel, memory, (tokens, choices), k = Kernel.of(variant), new_memory(), x.chosen.shape, x.x.shape[1]
    is_sum = x.form == "summed"
    rows = tokens if is_sum else tokens * choices
    arrays = {"x": x.x, "which": x.chosen if is_sum else x.list}
    arrays |= {} if is_sum else {"count": np.array([x.count], np.int32)}
    at = {name: memory.add(name, np.ascontiguousarray(array)) for name, array in arrays.items()}
    at["y"] = memory.add("y", None, rows * k * 2)
    memory.named("y").bytes[:] = POISON
    shape = {"tokens": tokens, "choices": choices, "k": k, "experts": x.experts, "summed": is_sum}
    plan = native.plan_expert_rows(shape, tile_m=kernel.facts["tile_m"], addresses=at)
    scheduler.run(machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed))
    return memory.named("y").bytes[: rows * k * 2].view(BF16).reshape(rows, k)


def judge(x: Problem, got: Array) -> None:
    """Raises Wrong unless every number has the right bits, and nothing is written beside them."""
    want = x.wanted
    found = got[: len(want)]
    if (wrong := np.argwhere(found.view(np.uint16) != want.view(np.uint16))).size:
        at = tuple(int(i) for i in wrong[0])
        raise Wrong(f"{len(wrong)} of {want.size} numbers are wrong, first {at}: {found[at]}, wanted {want[at]}")
    if (got[len(want) :].view(np.uint8) != POISON).any():
        raise Wrong("a row of no expert is written")
