"""Runs of instructions that do something to each lane alone, as one Python function each.

Only the warp itself sees what happens between them, so that a run is one step. The function is for the case where
all that is read is defined and no asynchronous operation has a hand on it; else its instructions go one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .state import FULL, LANES, Array, Warp

HOT = 6  # how often a run has been executed before it is worth compiling


class Lanewise:
    """targets <- compute(sources), lane by lane. Where a source is not defined, `defined` says which lanes are."""

    __slots__ = ("compute", "defined", "dtypes", "sources", "targets")

    def __init__(
        self,
        targets: tuple[int, ...],
        sources: tuple[int, ...],
        dtypes: tuple[Any, ...],
        compute: Callable[..., Any],  # with more than one target: a tuple
        defined: Callable[[Warp], int] | None = None,  # without: the lanes where all sources are
    ):
        self.targets, self.sources, self.compute, self.defined = targets, sources, compute, defined
        self.dtypes = tuple(map(np.dtype, dtypes))

    def __call__(self, w: Warp) -> None:
        R, D, defined = w.R, w.D, FULL
        if w.held:
            for slot in self.sources:
                w.check_read(slot)
        for slot in self.sources:
            defined &= D[slot]
        if defined != FULL and self.defined is not None:
            defined = self.defined(w)
        result = self.compute(*(R[slot].view(dtype) for slot, dtype in zip(self.sources, self.dtypes, strict=True)))
        for target, value in zip(self.targets, result if len(self.targets) > 1 else (result,), strict=True):
            w.put(target, value, defined)


class Run:
    """The step that stands for instructions `first`, ... of a program."""

    def __init__(self, first: int, steps: list[Lanewise], constants: dict[int, Array], into: list[Any]):
        self.first, self.steps, self.constants, self.into, self.count = first, steps, constants, into, 0

    def __call__(self, w: Warp) -> int:
        self.count += 1
        if self.count < HOT:
            return self.one_by_one(w)
        self.into[self.first] = run = self.compiled()
        return run(w)

    def one_by_one(self, w: Warp) -> int:
        for n, step in enumerate(self.steps, self.first):
            w.pc = n
            step(w)
        return self.first + len(self.steps)

    def compiled(self) -> Callable[[Warp], int]:
        names: dict[str, Any] = {"one_by_one": self.one_by_one, "where": np.where}
        local: dict[int, tuple[str, Any]] = {}  # slot -> (variable, its dtype if that is known)
        views: dict[tuple[str, Any], str] = {}
        body: list[str] = []
        read: list[int] = []
        written: dict[int, str] = {}

        def value(slot: int, dtype: Any) -> str:
            if slot in self.constants:
                names[name := f"c{slot}{dtype.name}"] = self.constants[slot].view(dtype)
                return name
            if slot not in local:
                read.append(slot)
                body.append(f"r{slot} = R[{slot}]")
                local[slot] = f"r{slot}", None
            name, has = local[slot]
            if has == dtype:
                return name
            if (name, dtype) not in views:
                names[f"t{dtype.name}"] = dtype
                views[name, dtype] = f"{name}{dtype.name}"
                body.append(f"{name}{dtype.name} = {name}.view(t{dtype.name})")
            return views[name, dtype]

        for n, step in enumerate(self.steps):
            sources = [value(slot, dtype) for slot, dtype in zip(step.sources, step.dtypes, strict=True)]
            results = step.compute(*(np.zeros(LANES, dtype) for dtype in step.dtypes))
            results = results if len(step.targets) > 1 else (results,)
            targets = [f"x{n}_{k}" for k in range(len(results))]
            names[f"f{n}"] = step.compute
            body.append(f"{', '.join(targets)} = f{n}({', '.join(sources)})")
            for slot, name, result in zip(step.targets, targets, results, strict=True):
                local[slot] = name, result.dtype
                written[slot] = name
        names["slots"] = frozenset((*read, *written))
        defined = " & ".join(f"D[{slot}]" for slot in read) or FULL
        lines = [
            "def run(w):",
            " R, D, active, held = w.R, w.D, w.active, w.held",
            f" if active & ~({defined}) or held and not held.keys().isdisjoint(slots):",
            "  return one_by_one(w)",
            *(f" {line}" for line in body),
            f" if active == {FULL}:",
            *(f"  R[{slot}] = {name}" for slot, name in written.items()),
            f"  {' = '.join(f'D[{slot}]' for slot in written)} = {FULL}",
            " else:",
            "  lanes = w.lanes",
            *(
                f"  R[{slot}] = where(lanes, {name}.view((old := R[{slot}]).dtype), old); D[{slot}] |= active"
                for slot, name in written.items()
            ),
            f" return {self.first + len(self.steps)}",
        ]
        exec("\n".join(lines), names)
        return names["run"]


def fused(steps: list[Any], leaders: set[int], constants: dict[int, Array]) -> list[Any]:
    """The steps, with runs in place of the first of each. Leaders are where something may jump to."""
    result, first = list(steps), 0
    for n in range(len(steps) + 1):
        if n == len(steps) or n in leaders or not isinstance(steps[n], Lanewise):
            if n > first:
                result[first] = Run(first, steps[first:n], constants, result)
            first = n if n < len(steps) and isinstance(steps[n], Lanewise) else n + 1
    return result
