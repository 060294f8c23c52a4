"""Products of rows by group, as training has them, by the library's plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_dsv4_fmha._testing.experts import BF16
from kernels.abi import ExpertProduct

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

PROCESSORS = 2
FORMS = ("rows", "gated", "turned", "gated_back", "outer")  # as ffi/expert_product_plan.h counts them
LIMIT, TILE_N = 2.0, 256


class Result(NamedTuple):
    """An array that a launch writes."""

    shape: tuple[int, ...]
    dtype: Any
    order: str
    """ "sorted" as rows of a are, "listed" by the list, or of "groups" """


@dataclass(frozen=True)
class Problem:
    """Rows of each group, then some of no group, which are not numbers."""

    form: str
    sizes: tuple[int, ...]  # rows of each group
    a: Array  # bfloat16 [rows, m]
    b: Array  # [groups, n, m], [groups, m, n] or [rows, n]
    made: Array  # of `gated_back`: gates and up projections [rows, 2 n], listed
    weights: Array  # float32 [rows], listed

    @staticmethod
    def of(form: str, sizes: tuple[int, ...], m: int, n: int, left: int = 3, seed: int = 0) -> Problem:
        """Some gates and up projections are the limit, and some are beyond it."""
        rng, rows = np.random.default_rng(seed), sum(sizes) + left
        of_b = {"outer": (rows, n)}.get(
            form, (len(sizes), m, n) if "turned" in form or "back" in form else (len(sizes), n, m)
        )
        a, b = (rng.standard_normal(shape).astype(BF16) for shape in ((rows, m), of_b))
        if form == "gated":
            a = (a * m**-0.5).astype(BF16)
        made = (1.5 * rng.standard_normal((rows, 2 * n))).astype(BF16)
        made[:, ::7], made[:, 1::7] = LIMIT, -LIMIT
        if left:
            a[-left:] = np.nan
        if left and form == "outer":
            b[-left:] = np.nan
        return Problem(form, tuple(sizes), a, b, made, rng.uniform(0.25, 2, rows).astype(np.float32))

    @property
    def first(self) -> Array:
        """int32 [groups]"""
        return (np.cumsum(self.sizes) - self.sizes).astype(np.int32)

    @property
    def n(self) -> int:
        """The columns of products."""
        return int(self.b.shape[1 if self.form in ("rows", "gated", "outer") else 2])

    @property
    def results(self) -> dict[str, Result]:
        """The arrays that a launch writes."""
        (rows, m), n = self.a.shape, self.n
        if self.form == "gated":
            return {"y": Result((rows, n), BF16, "listed"), "inner": Result((rows, n // 2), BF16, "sorted")}
        if self.form == "gated_back":
            parts = Result((rows, n // TILE_N), np.float32, "listed")
            of_made, inner = (Result((rows, x), BF16, "sorted") for x in (2 * n, n))
            return {"y": of_made, "inner": inner, "of_weights": parts}
        if self.form == "outer":
            return {"y": Result((len(self.sizes), m, n), BF16, "groups")}
        return {"y": Result((rows, n), BF16, "listed")}

    def rows_of(self, group: int) -> slice:
        first = int(self.first[group])
        return slice(first, first + self.sizes[group])

    def of_group(self, results: Mapping[str, Array], group: int) -> dict[str, Array]:
        """The part of results that a group has."""
        rows = self.rows_of(group)
        places: dict[str, Any] = {"sorted": rows, "listed": self.list[rows], "groups": group}
        return {name: results[name][places[x.order]] for name, x in self.results.items()}

    def spoil(self, group: int) -> None:
        """Makes all numbers of a group's rows NaN."""
        rows = self.rows_of(group)
        self.a[rows], self.made[self.list[rows]] = np.nan, np.nan
        if self.form == "outer":
            self.b[rows] = np.nan

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

    def wanted(self, group: int, found: Mapping[str, Array]) -> dict[str, Array]:
        """float64, of a group. What gates let through is that of those that were found, which are rounded."""
        a, rows = self.a.astype(np.float64), self.rows_of(group)
        if self.form == "outer":
            return {"y": a[rows].T @ self.b[rows].astype(np.float64)}
        b, weight = self.b[group].astype(np.float64), self.weights[self.list[rows], None].astype(np.float64)
        y = a[rows] @ (b.T if self.form in ("rows", "gated") else b)
        if self.form == "gated":
            return {"y": y, "inner": weight * through(found["y"])[0]}
        if self.form == "gated_back":
            value, by_gate, by_up = through(self.made[self.list[rows]])
            parts = (y * value).reshape(len(y), self.n // TILE_N, TILE_N).sum(2)
            of_made = np.concatenate([weight * y * by_gate, weight * y * by_up], 1)
            return {"y": of_made, "inner": weight * value, "of_weights": parts}
        return {"y": y}


def through(made: Array) -> tuple[Array, Array, Array]:
    """The numbers that gates let through of up projections, and their derivatives in both; where one is the limit, half
    of that before it."""
    gate, up = np.split(made.astype(np.float64), 2, 1)
    slope = lambda x: np.where(x < LIMIT, 1, np.where(x == LIMIT, 0.5, 0))  # noqa: E731
    opens, passes = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
    share = 1 / (1 + np.exp(-opens))
    by_gate = passes * share * (1 + opens * (1 - share)) * slope(gate)
    return opens * share * passes, by_gate, opens * share * slope(np.abs(up))


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
    if x.form in ("gated", "gated_back"):
        arrays |= {"weights": x.weights}
    if x.form == "gated_back":
        arrays |= {"made": x.made}
    arrays |= dict(instead or {})
    at = {name: memory.add(name, np.ascontiguousarray(array, array.dtype)) for name, array in arrays.items()}
    for name, result in x.results.items():
        at[name] = memory.add(name, None, int(np.prod(result.shape)) * np.dtype(result.dtype).itemsize)
    shape = {"form": FORMS.index(x.form), "rows": rows, "m": m, "n": x.n, "groups": len(x.sizes)}
    shape |= {"type": native.TYPES[variant.dtype], "tiles": len(tiles)}
    facts = {name: kernel.facts[name] for name in ("tile_m", "tile_n")}
    plan = native.plan_expert_product(shape, LIMIT, **facts, processors=PROCESSORS, addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def run(variant: ExpertProduct, x: Problem, **how: Any) -> dict[str, Array]:
    """The results, by name."""
    of_launch = launched(variant, x, **how)
    scheduler.run(of_launch)
    arrays = {name: of_launch.memory.named(name) for name in x.results}
    return {
        name: arrays[name].bytes[: arrays[name].size].view(result.dtype).reshape(result.shape)
        for name, result in x.results.items()
    }


def judge(x: Problem, got: Mapping[str, Array]) -> None:
    """Raises Wrong unless every number is right, within the rounding of sums and of the result."""
    for g in range(len(x.sizes)):
        found = x.of_group(got, g)
        for name, want in x.wanted(g, found).items():
            size = np.sqrt(np.mean(want * want)) if want.size else 0.0
            made = found[name].astype(np.float64)
            wrong = ~(np.abs(made - want) <= 2**-8 * np.maximum(np.abs(want), size))
            if wrong.any():
                row, column = (int(i) for i in np.argwhere(wrong)[0])
                raise Wrong(
                    f"{int(wrong.sum())} of {wrong.size} numbers of group {g} are wrong in {name}, first {column} of"
                    f" row {row}: {made[row, column]:.6g}, wanted {want[row, column]:.6g}"
                )


def typical(variant: ExpertProduct) -> Problem:
    """Groups with no row, with one, with whole stages or tiles and with more than one tile."""
    if variant.form == "outer":
        return Problem.of("outer", (5, 0, 320, 130), 128, 256)
    return Problem.of(variant.form, (3, 0, 148, 128), 128, 512)
