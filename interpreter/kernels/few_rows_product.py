"""Products of few rows on the interpreter: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.abi import FewRowsProduct

from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

EPS = 0.25  # large enough to matter
HEAD, DIMS = 512, 64


@dataclass(frozen=True)
class Problem:
    variant: FewRowsProduct
    x: Array  # [rows, groups, k]
    w: Array  # [groups, k, n]
    angle: Array  # float32 [rows, DIMS / 2]

    @staticmethod
    def of(variant: FewRowsProduct, rows: int, k: int, n: int, groups: int = 1) -> Problem:
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape).astype(variant.dtype) for shape in ((rows, groups, k), (groups, k, n)))
        return Problem(variant, x, w, rng.uniform(-9, 9, (rows, DIMS // 2)).astype(np.float32))

    @staticmethod
    def typical(variant: FewRowsProduct, rows: int, groups: int = 1) -> Problem:
        """k and n that fill no tile; heads are whole, and have no groups where columns are heads."""
        if variant.norms:
            return Problem.of(variant, rows, 136, 2 * HEAD)
        return Problem.of(variant, rows, 2 * HEAD if variant.turns_back else 64 * (variant.parts + 1) + 8, 200, groups)

    @property
    def table(self) -> Array:
        return np.stack([np.cos(self.angle), np.sin(self.angle)], -1).reshape(len(self.angle), DIMS)

    @property
    def result(self) -> str:
        return "float32" if self.variant.to_float32 else self.variant.dtype

    def wanted(self) -> Array:
        """float64 [rows, groups, n]"""
        x = self.x.astype(np.float64)
        if self.variant.turns_back:
            x = self.turned(x, -1).astype(self.variant.dtype).astype(np.float64)
        y: Array = np.einsum("rgk,gkn->rgn", x, self.w.astype(np.float64))
        if not self.variant.norms:
            return y
        heads = y.reshape(len(y), -1, HEAD)
        heads = heads / np.sqrt(np.mean(heads * heads, -1, keepdims=True) + EPS)
        return self.turned(heads, 1).reshape(y.shape)

    def turned(self, x: Array, direction: int) -> Array:
        """x, whose rows are heads, with the last numbers of each head turned."""
        heads = x.reshape(len(x), -1, HEAD).copy()
        pairs = heads[..., -DIMS::2] + 1j * heads[..., -DIMS + 1 :: 2]
        pairs = pairs * np.exp(1j * direction * self.angle[:, None].astype(np.float64))
        heads[..., -DIMS::2], heads[..., -DIMS + 1 :: 2] = pairs.real, pairs.imag
        return heads.reshape(x.shape)


def launched(
    x: Problem,
    *,
    seed: int = 0,
    edit: Callable[[str], str] = lambda text: text,
    edits: Mapping[str, Edit] | None = None,
) -> Machine:
    """The launch, about to run; the edits plant faults, in PTX and in parameters."""
    kernel, memory = Kernel.of(x.variant), new_memory()
    rows, groups, k = x.x.shape
    n, dtype = x.w.shape[2], np.dtype(x.result)
    addresses = {name: memory.add(name, getattr(x, name)) for name in ("x", "w", "table")}
    addresses["y"] = memory.add("y", None, rows * groups * n * dtype.itemsize)
    shape = {"rows": rows, "groups": groups, "k": k, "n": n, "type": native.TYPES[x.variant.dtype]}
    sizes = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    shape |= {"makes_heads": x.variant.norms, "takes_heads": x.variant.turns_back}
    plan = native.plan_few_rows_product(shape, EPS, **sizes, addresses=addresses)
    return machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def run(x: Problem, **how: Any) -> Array:
    """The kernel's result, [rows, groups, n]; how: as in `launched`."""
    of_launch = launched(x, **how)
    of_launch.run()
    found = of_launch.memory.named("y")
    return found.bytes[: found.size].view(x.result).reshape(*x.x.shape[:2], x.w.shape[2])


def judge(x: Problem, got: Array) -> None:
    """Raises Wrong unless every number is right, within the rounding of sums and of the result."""
    want = x.wanted()
    size = np.sqrt(np.mean(want * want, -1, keepdims=True))
    rounding = 2**-8 if x.result == "bfloat16" else 2**-10 if x.result == "float16" else 2**-20
    wrong = ~(np.abs(got.astype(np.float64) - want) <= rounding * np.maximum(np.abs(want), size))
    if wrong.any():
        row, group, i = (int(a) for a in np.argwhere(wrong)[0])
        raise Wrong(
            f"{int(wrong.sum())} of {wrong.size} numbers are wrong, in {int(wrong.any((1, 2)).sum())} rows, first"
            f" number {i} of row {row}, group {group}: {float(got[row, group, i]):.6g}, wanted"
            f" {want[row, group, i]:.6g}"
        )
