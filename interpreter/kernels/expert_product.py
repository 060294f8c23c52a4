"""Products of rows by group, as training has them, by the library's plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_dsv4_fmha._testing.experts import BF16
from kernels.abi import ExpertProduct

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

PROCESSORS = 2
FORMS = ("rows", "turned", "outer")  # as ffi/expert_product_plan.h counts them


@dataclass(frozen=True)
class Problem:
    """Rows of each group, then some of no group, which are not numbers."""

    form: str
    sizes: tuple[int, ...]  # rows of each group
    a: Array  # bfloat16 [rows, m]
    b: Array  # [groups, n, m], [groups, m, n] or [rows, n]

    @staticmethod
    def of(form: str, sizes: tuple[int, ...], m: int, n: int, left: int = 3, seed: int = 0) -> Problem:
        rng, rows = np.random.default_rng(seed), sum(sizes) + left
        of_b = {"rows": (len(sizes), n, m), "turned": (len(sizes), m, n), "outer": (rows, n)}[form]
        a, b = (rng.standard_normal(shape).astype(BF16) for shape in ((rows, m), of_b))
        if left:
            a[-left:] = np.nan
        if left and form == "outer":
            b[-left:] = np.nan
        return Problem(form, tuple(sizes), a, b)

    @property
    def first(self) -> Array:
        """int32 [groups]"""
        return (np.cumsum(self.sizes) - self.sizes).astype(np.int32)

    @property
    def n(self) -> int:
        """The columns of results."""
        return int(self.b.shape[1 if self.form != "turned" else 2])

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of results."""
        rows, m = self.a.shape
        return (len(self.sizes), m, self.n) if self.form == "outer" else (rows, self.n)

    def rows_of(self, group: int) -> slice:
        first = int(self.first[group])
        return slice(first, first + self.sizes[group])

    def tiles(self, tile_m: int) -> Array:
        """int32 [tiles, 4]"""
        found = [
            (g, int(first) + i, min(tile_m, size - i), 0)
            for g, (first, size) in enumerate(zip(self.first, self.sizes, strict=True))
            for i in range(0, size, tile_m)
        ]
        return np.array(found, np.int32).reshape(-1, 4)

    @property
    def list(self) -> Array:
        """int32 [rows], backwards: the row of results for each row"""
        return np.arange(len(self.a), dtype=np.int32)[::-1]

    def wanted(self, group: int) -> Array:
        """float64, of a group's rows, or of its matrix."""
        a, rows = self.a.astype(np.float64), self.rows_of(group)
        if self.form == "outer":
            return a[rows].T @ self.b[rows].astype(np.float64)
        b = self.b[group].astype(np.float64)
        return a[rows] @ (b.T if self.form == "rows" else b)


def launched(
    variant: ExpertProduct,
    x: Problem,
    *,
    seed: int = 0,
    edit: Callable[[str], str] = str,
    instead: Mapping[str, Array] | None = None,
    **edits: Edit,
) -> Machine:
    """The launch, about to run; the edits plant faults, in PTX and in parameters, and so does what is given `instead`
    of tables.
    """
    kernel, memory = Kernel.of(variant), new_memory()
    tiles, (rows, m) = x.tiles(kernel.facts["tile_m"]), x.a.shape
    arrays = {"a": x.a, "b": x.b}
    if x.form == "outer":
        arrays |= {"first": x.first, "sizes": np.array(x.sizes, np.int32)}
    else:
        arrays |= {"list": x.list, "tiles": tiles, "count": np.array([len(tiles)], np.int32)}
    arrays |= dict(instead or {})
    at = {name: memory.add(name, np.ascontiguousarray(array, array.dtype)) for name, array in arrays.items()}
    at["y"] = memory.add("y", None, int(np.prod(x.result)) * 2)
    shape = {"form": FORMS.index(x.form), "rows": rows, "m": m, "n": x.n, "groups": len(x.sizes)}
    shape |= {"type": native.TYPES[variant.dtype], "tiles": len(tiles)}
    facts = {name: kernel.facts[name] for name in ("tile_m", "tile_n")}
    plan = native.plan_expert_product(shape, **facts, processors=PROCESSORS, addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def run(variant: ExpertProduct, x: Problem, **how: Any) -> Array:
    """bfloat16 results"""
    of_launch = launched(variant, x, **how)
    scheduler.run(of_launch)
    array = of_launch.memory.named("y")
    return array.bytes[: array.size].view(BF16).reshape(x.result)


def judge(x: Problem, got: Array) -> None:
    """Raises Wrong unless every number is right, within the rounding of sums and of the result."""
    for g in range(len(x.sizes)):
        want, found = x.wanted(g), got[g] if x.form == "outer" else got[x.list[x.rows_of(g)]]
        size = np.sqrt(np.mean(want * want)) if want.size else 0.0
        wrong = ~(np.abs(found.astype(np.float64) - want) <= 2**-8 * np.maximum(np.abs(want), size))
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            raise Wrong(
                f"{int(wrong.sum())} of {wrong.size} numbers of group {g} are wrong, first {column} of row {row}:"
                f" {float(found[row, column]):.6g}, wanted {want[row, column]:.6g}"
            )


def typical(variant: ExpertProduct) -> Problem:
    """Groups with no row, with one, with whole stages or tiles and with more than one tile."""
    if variant.form == "outer":
        return Problem.of("outer", (5, 0, 320, 130), 128, 256)
    return Problem.of(variant.form, (3, 0, 148, 128), 128, 512)
