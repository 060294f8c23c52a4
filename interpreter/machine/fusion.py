"""Runs of instructions that do something to each lane alone, as one Python function each.

Only the warp itself sees what happens between them, so that a run is one step. The function is for the case where
all that is read is defined and no asynchronous operation has a hand on it; else its instructions go one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .state import FULL, LANES, Array, DType, Step, Warp

HOT = 2  # how often a run has been executed before it is worth compiling


class Lanewise:
    """targets <- compute(sources), lane by lane. Where a source is not defined, `defined` says which lanes are."""

    __slots__ = ("compute", "defined", "dtypes", "sources", "targets")

    def __init__(
        self,
        targets: tuple[int, ...],
        sources: tuple[int, ...],
        dtypes: tuple[DTypeLike, ...],
        compute: Callable[..., Array | tuple[Array, ...]],  # with more than one target: a tuple
        defined: Callable[[Warp], int] | None = None,  # without: the lanes where all sources are
    ):
        self.targets, self.sources, self.compute, self.defined = targets, sources, compute, defined
        self.dtypes = tuple(np.dtype(dtype) for dtype in dtypes)

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
    """The step that stands for instructions in a row, wherever they are."""

    def __init__(self, steps: tuple[Lanewise, ...], constants: dict[int, Array]):
        self.steps, self.constants, self.count = steps, constants, 0
        self.compiled: Callable[[Warp], int] | None = None

    def __call__(self, w: Warp) -> int:
        self.count += 1
        if self.compiled is None:
            if self.count < HOT:
                return self.one_by_one(w)
            self.compiled = self.compile()
        w.steps[w.pc] = self.compiled
        return self.compiled(w)

    def one_by_one(self, w: Warp) -> int:
        for step in self.steps:
            step(w)
            w.pc += 1
        return w.pc

    def compile(self) -> Callable[[Warp], int]:
        """Names are by order, so that the text is the same for runs that differ in their slots alone."""
        names: dict[str, Any] = {"one_by_one": self.one_by_one, "where": np.where}
        local: dict[int, tuple[str, DType | None]] = {}  # slot -> (variable, its dtype if that is known)
        views: dict[tuple[str, DType], str] = {}
        body: list[str] = []
        read: list[str] = []
        written: dict[int, tuple[str, str]] = {}  # slot -> (its name, variable)

        def named(slot: int) -> str:
            names[name := f"s{len(names)}"] = slot
            return name

        def value(slot: int, dtype: DType) -> str:
            if slot in self.constants:
                names[name := f"c{len(names)}"] = self.constants[slot].view(dtype)
                return name
            if slot not in local:
                name = f"r{len(read)}"
                read.append(place := named(slot))
                body.append(f"{name} = R[{place}]")
                local[slot] = name, None
            name, has = local[slot]
            if has == dtype:
                return name
            if (name, dtype) not in views:
                names[kind := f"t{dtype.num}"] = dtype
                views[name, dtype] = view = f"{name}{kind}"
                body.append(f"{view} = {name}.view({kind})")
            return views[name, dtype]

        for n, step in enumerate(self.steps):
            sources = [value(slot, dtype) for slot, dtype in zip(step.sources, step.dtypes, strict=True)]
            result = step.compute(*(ZEROS[dtype] for dtype in step.dtypes))
            results = result if isinstance(result, tuple) else (result,)
            targets = [f"x{n}_{k}" for k in range(len(results))]
            names[f"f{n}"] = step.compute
            body.append(f"{', '.join(targets)} = f{n}({', '.join(sources)})")
            for slot, name, value_ in zip(step.targets, targets, results, strict=True):
                local[slot] = name, value_.dtype
                written[slot] = written[slot][0] if slot in written else named(slot), name
        names["slots"] = frozenset((*(names[s] for s in read), *written))
        defined = " & ".join(f"D[{s}]" for s in read) or FULL
        lines = [
            "def run(w):",
            " R, D, active, held = w.R, w.D, w.active, w.held",
            f" if active & ~({defined}) or held and not held.keys().isdisjoint(slots):",
            "  return one_by_one(w)",
            *(f" {line}" for line in body),
            f" if active == {FULL}:",
            *(f"  R[{s}] = {name}" for s, name in written.values()),
            f"  {' = '.join(f'D[{s}]' for s, _ in written.values())} = {FULL}",
            " else:",
            "  lanes = w.lanes",
            *(
                f"  R[{s}] = where(lanes, {name}.view((old := R[{s}]).dtype), old); D[{s}] |= active"
                for s, name in written.values()
            ),
            f" return w.pc + {len(self.steps)}",
        ]
        exec(code_of("\n".join(lines)), names)
        return names["run"]


class _Zeros(dict[DType, Array]):
    def __missing__(self, dtype: DType) -> Array:
        self[dtype] = zeros = np.zeros(LANES, dtype)
        zeros.flags.writeable = False
        return zeros


ZEROS = _Zeros()


@functools.lru_cache(maxsize=4096)
def code_of(text: str) -> CodeType:
    return compile(text, "a run of instructions", "exec")


def fused(
    steps: Sequence[Step], leaders: set[int], constants: dict[int, Array], runs: dict[tuple[Lanewise, ...], Run]
) -> list[Step]:
    """The steps, with runs in place of the first of each. Leaders are where something may jump to."""
    result, row = list(steps), list[Lanewise]()

    def close(after: int) -> None:
        if row:
            if (key := tuple(row)) not in runs:
                runs[key] = Run(key, constants)
            result[after - len(row)] = runs[key]
            row.clear()

    for n, step in enumerate(steps):
        if n in leaders or not isinstance(step, Lanewise):
            close(n)
        if isinstance(step, Lanewise):
            row.append(step)
    close(len(steps))
    return result
