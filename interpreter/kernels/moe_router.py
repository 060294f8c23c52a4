"""A mixture of experts' router on the interpreter: a launch, by the library's plan, and its answer in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from kernels.abi import MoeRouter

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

BF16 = ml_dtypes.bfloat16
SCALE = 2.5
TEMPERATURE = 0.75
UNIT = float(np.float32(1 / TEMPERATURE))
TOLERANCE = 2e-6  # of a weight, and of two scores that may change places in the choice


@dataclass(frozen=True)
class Problem:
    """Tokens, a gate, and what says which experts a token gets."""

    x: Array  # bfloat16 [rows, k]
    gate: Array  # float32 [k, e]
    bias: Array  # float32 [e]
    chosen: int
    given: Array | None = None  # int32 [rows, chosen]
    sigmoid: bool = False

    @staticmethod
    def of(rows: int, k: int = 512, e: int = 48, chosen: int = 6, *, is_given: bool = False, **how: Any) -> Problem:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((rows, k)).astype(BF16)
        gate = (rng.standard_normal((k, e)) * 2 * k**-0.5).astype(np.float32)
        bias = (rng.standard_normal(e) / 4).astype(np.float32)
        given = rng.integers(0, e, (rows, chosen), np.int32)
        return Problem(x, gate, bias, chosen, given if is_given else None, **how)

    def of_rows(self, rows: Any) -> Problem:
        """The same for some of the rows."""
        return replace(self, x=self.x[rows], given=None if self.given is None else self.given[rows])

    @property
    def sizes(self) -> dict[str, int]:
        (rows, k), e = self.x.shape, self.gate.shape[1]
        flags = {"is_given": int(self.given is not None), "is_sigmoid": int(self.sigmoid)}
        return {"rows": rows, "k": k, "experts": e, "chosen": self.chosen, **flags}

    def scores(self) -> Array:
        """float64 [rows, e]"""
        logits = self.x.astype(np.float64) @ self.gate.astype(np.float64) / TEMPERATURE
        made: Array = 1 / (1 + np.exp(-logits)) if self.sigmoid else np.sqrt(np.logaddexp(logits, 0))
        return made

    def weights_of(self, chosen: Array) -> Array:
        """float64 [rows, chosen]: the weights of these experts."""
        scores = np.take_along_axis(self.scores(), chosen, -1)
        made: Array = SCALE * scores / (scores.sum(-1, keepdims=True) + 1e-20)
        return made


def launched(
    variant: MoeRouter,
    x: Problem,
    *,
    seed: int = 0,
    edit: Callable[[str], str] = str,
    edits: Mapping[str, Edit] | None = None,
) -> Machine:
    """The router, about to run; the edits plant faults, in PTX and in parameters."""
    kernel, memory = Kernel.of(variant), new_memory()
    of_choice = {"bias": x.bias} if x.given is None else {"given": x.given}
    at = {name: memory.add(name, array) for name, array in {"x": x.x, "gate": x.gate, **of_choice}.items()}
    made = 4 * len(x.x) * x.chosen
    at |= {name: memory.add(name, None, made) for name in ("weights", *["chosen"] * (x.given is None))}
    plan = native.plan_moe_router(x.sizes, UNIT, SCALE, tile_m=kernel.facts["tile_m"], addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def route(variant: MoeRouter, x: Problem, **how: Any) -> tuple[Array, Array]:
    """float32 weights and int32 experts, `[rows, chosen]`"""
    of_launch = launched(variant, x, **how)
    scheduler.run(of_launch)

    def found(name: str, dtype: Any) -> Array:
        array = of_launch.memory.named(name)
        return array.bytes[: array.size].view(dtype).reshape(len(x.x), x.chosen)

    return found("weights", np.float32), found("chosen", np.int32) if x.given is None else x.given


def judge(x: Problem, weights: Array, chosen: Array, tolerance: float = TOLERANCE) -> None:
    """Raises Wrong unless the greatest scores are chosen, in their order, and weights are right."""
    e = x.gate.shape[1]
    if (chosen < 0).any() or (chosen >= e).any():
        raise Wrong(f"experts are chosen that do not exist: {chosen[(chosen < 0) | (chosen >= e)].tolist()}")
    if x.given is None:
        biased = x.scores() + x.bias
        for row, experts in enumerate(chosen):
            if len(set(experts.tolist())) < x.chosen:
                raise Wrong(f"experts of row {row} are chosen twice: {experts.tolist()}")
            got, want = biased[row, experts], np.sort(biased[row])[::-1][: x.chosen]
            if (np.abs(got - want) > tolerance).any():
                raise Wrong(f"experts of row {row} are {experts.tolist()}, of {got.tolist()}, wanted {want.tolist()}")
    want = x.weights_of(chosen)
    wrong = ~(np.abs(weights - want) <= tolerance * want)
    if wrong.any():
        row, place = (int(i) for i in np.argwhere(wrong)[0])
        raise Wrong(
            f"{int(wrong.sum())} of {wrong.size} weights are wrong, first number {place} of row {row}:"
            f" {float(weights[row, place]):.8g}, wanted {want[row, place]:.8g}"
        )
