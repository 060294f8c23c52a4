"""RoPE on the interpreter, in place, after a norm, their gradient, and quantized: a launch, and what is wrong with its
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kernels.abi import IndexQuery, NormRope, Rope

from ..machine import scheduler
from ..machine.reductions import add_cleared
from ..machine.state import Array, new_memory
from . import native
from .launch import Kernel, machine
from .verdict import Wrong

TOLERANCE = {
    "bfloat16": 2**-8,
    "float16": 2**-10,
}  # of a number and of the row's root mean square: half of it is rounding
EPS = 0.25
INDEX_D = 128
IN_PLACE, OF_INDEX = ("rope", "rope_hadamard"), ("rope_hadamard", "index_query")
_I = np.arange(INDEX_D)
HADAMARD = (1 - 2 * (np.bitwise_count(_I[:, None] & _I).astype(np.int64) % 2)) / np.sqrt(INDEX_D)


@dataclass(frozen=True)
class Problem:
    variant: Rope | NormRope | IndexQuery
    x: Array  # [b, s, h, d]
    dy: Array
    angle: Array  # float32 [b, s, dims / 2]

    @staticmethod
    def of(variant: Rope | NormRope | IndexQuery, b: int, s: int, h: int, d: int = 512) -> Problem:
        rng = np.random.default_rng(0)
        d = INDEX_D if variant.op in OF_INDEX else d
        x, dy = (rng.standard_normal((b, s, h, d)).astype(variant.dtype) for _ in range(2))
        return Problem(variant, x, dy, rng.uniform(-9, 9, (b, s, variant.dims // 2)).astype(np.float32))

    @property
    def table(self) -> Array:
        turns = np.stack([np.cos(self.angle), np.sin(self.angle)], -1)
        return turns.reshape(*self.angle.shape[:2], -1)

    def turned(self, x: Array, direction: int) -> Array:
        """float64"""
        y, n = x.astype(np.float64), self.variant.dims
        pairs = y[..., -n::2] + 1j * y[..., -n + 1 :: 2]
        pairs = pairs * np.exp(1j * direction * self.angle[:, :, None].astype(np.float64))
        y[..., -n::2], y[..., -n + 1 :: 2] = pairs.real, pairs.imag
        return y

    def wanted(self, direction: int) -> Array:
        """float64, of the variant's op."""
        if self.variant.op == "rope":
            return self.turned(self.x, direction)
        if self.variant.op in OF_INDEX:
            if direction > 0:
                return self.turned(self.x, 1) @ HADAMARD
            return self.turned(self.x.astype(np.float64) @ HADAMARD, -1)
        x = self.x.astype(np.float64)
        r = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
        if self.variant.op == "norm_rope":
            return self.turned(x * r, 1)
        g = self.turned(self.dy, -1)
        return r * g - r**3 * np.mean(g * x, -1, keepdims=True) * x


def run(x: Problem, *, direction: int = 1, seed: int = 0, edit: Callable[[str], str] = lambda text: text) -> Array:
    """The kernel's result, which the ops of `IN_PLACE` write where x was; "index_query" gives bytes, scales last."""
    kernel, memory = Kernel.of(x.variant), new_memory()
    in_place = x.variant.op in IN_PLACE
    addresses = {name: memory.add(name, getattr(x, name)) for name in ("table", "dy")}
    if in_place:
        addresses["x"] = add_cleared(memory, "x", x.x.nbytes)
        memory.named("x").bytes[:] = x.x.view(np.uint8).ravel()  # which the kernel may write
    else:
        addresses["x"] = memory.add("x", x.x)
    shape = dict(zip(("b", "s", "heads", "d"), x.x.shape, strict=True))
    if isinstance(x.variant, IndexQuery):
        addresses |= {
            "codes": memory.add("codes", None, x.x.size),
            "scales": memory.add("scales", None, x.x.size // 32),
        }
        plan = native.plan_index_query(shape, tile_m=kernel.facts["tile_m"], addresses=addresses)
        scheduler.run(machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, seed=seed))
        parts = (memory.named(name) for name in ("codes", "scales"))
        codes, scales = (found.bytes[: found.size].reshape(-1, found.size // (x.x.size // INDEX_D)) for found in parts)
        return np.concatenate([codes, scales], 1)
    if not in_place:
        addresses["y"] = memory.add("y", None, x.x.nbytes)
    number = direction if in_place else EPS
    plan = native.plan_rope(x.variant.family, shape, number, tile_m=kernel.facts["tile_m"], addresses=addresses)
    scheduler.run(machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, seed=seed))
    found = memory.named("x" if in_place else "y")
    return found.bytes[: found.size].view(x.x.dtype).reshape(x.x.shape)


def judge(x: Problem, got: Array, *, direction: int = 1) -> None:
    """Raises Wrong unless every number is right; those that "rope" does not turn stay as they were."""
    want = x.wanted(direction)
    if isinstance(x.variant, IndexQuery):
        judge_codes(x, got, want.reshape(-1, INDEX_D))
        return
    size = np.maximum(np.abs(want), np.sqrt(np.mean(want * want, -1, keepdims=True)))
    roundings = 3 if x.variant.op == "rope_hadamard" else 1
    wrong = ~(np.abs(got.astype(np.float64) - want) <= roundings * TOLERANCE[x.variant.dtype] * size)
    if x.variant.op == "rope":
        wrong[..., : -x.variant.dims] = (got != x.x)[..., : -x.variant.dims]
    if wrong.any():
        *row, i = (int(a) for a in np.argwhere(wrong)[0])
        raise Wrong(
            f"{int(wrong.sum())} of {wrong.size} numbers are wrong, in {int(wrong.any(-1).sum())} rows, first number "
            f"{i} of row {row}: {float(got[(*row, i)]):.6g}, wanted {want[(*row, i)]:.6g}"
        )


def judge_codes(x: Problem, got: Array, want: Array) -> None:
    """Raises Wrong unless scales are those of the greatest numbers, and codes those of numbers that are right."""
    scales, exactly = got[:, INDEX_D:].copy().view(np.float32), np.abs(want).max(-1, keepdims=True) / 448
    if not np.allclose(scales, np.maximum(exactly, 1e-4 / 448), rtol=3 * TOLERANCE[x.variant.dtype], atol=0):
        raise Wrong("scales are wrong")
    numbers = got[:, :INDEX_D].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    limit = 2**-4 * np.abs(want) + 3 * TOLERANCE[x.variant.dtype] * np.abs(want).max(-1, keepdims=True) + scales * 2**-9
    if (wrong := ~(np.abs(numbers - want) <= limit)).any():
        raise Wrong(f"{int(wrong.sum())} of {wrong.size} numbers are wrong, in {int(wrong.any(-1).sum())} rows")
