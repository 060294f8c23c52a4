"""Matrices in FP8 written as arrays, on the interpreter: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_dsv4_fmha import PackedMatrix, pack_matrix
from jax_dsv4_fmha._definitions.slabs import BLOCK
from kernels.abi import UnpackMatrix

from ..machine import scheduler
from ..machine.state import Array, new_memory
from . import native
from .launch import Kernel, machine
from .verdict import Wrong

POISON = 0x5A


@dataclass(frozen=True)
class Problem:
    codes: Array  # float8_e4m3fn [m, rows, columns]
    scales: Array  # float32 [m, rows / 128, columns / 128]

    @staticmethod
    def of(m: int, rows: int, columns: int) -> Problem:
        """All codes that are numbers, and scales that differ from block to block."""
        rng = np.random.default_rng(0)
        codes = (
            rng.integers(0, 0x7F, (m, rows, columns), np.uint8) | rng.integers(0, 2, (m, rows, columns), np.uint8) << 7
        )
        blocks = (m, -(-rows // BLOCK), -(-columns // BLOCK))
        exponents = np.resize(rng.permutation(np.arange(-60, 7)), blocks)
        scales = np.ldexp(rng.uniform(1, 2, blocks), exponents).astype(np.float32)
        return Problem(codes.view(ml_dtypes.float8_e4m3fn), scales)

    @property
    def packed(self) -> PackedMatrix:
        return pack_matrix(jnp.asarray(self.codes), jnp.asarray(self.scales))

    @property
    def wanted(self) -> Array:
        """bfloat16 [m, rows, columns]: scales are rounded to it, and then products with them"""
        _, rows, columns = self.codes.shape
        kept = self.scales.astype(ml_dtypes.bfloat16).astype(np.float32)
        whole = kept.repeat(BLOCK, 1).repeat(BLOCK, 2)[:, :rows, :columns]
        return (self.codes.astype(np.float32) * whole).astype(ml_dtypes.bfloat16)


def run(
    variant: UnpackMatrix,
    x: Problem,
    *,
    seed: int = 0,
    edit: Callable[[str], str] = str,
    data: Callable[[Array], Array] = np.array,
    **edits: Callable[[int], int],
) -> Array:
    """bfloat16 [m, rows, columns], `POISON` where the kernel writes nothing; data: an edit of the bytes."""
    kernel, memory, (m, rows, columns) = Kernel.of(variant), new_memory(), x.codes.shape
    given = data(np.array(x.packed.data))
    _, tiles, slabs, size = given.shape
    addresses = {"data": memory.add("data", given), "w": memory.add("w", None, m * rows * columns * 2)}
    memory.named("w").bytes[:] = POISON
    shape = {"matrices": m, "rows": rows, "columns": columns, "tiles": tiles, "slabs": slabs, "slab_bytes": size}
    plan = native.plan_unpack_matrix(
        shape, tile_m=kernel.facts["tile_m"], tile_n=kernel.facts["tile_n"], addresses=addresses
    )
    scheduler.run(machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed))
    found = memory.named("w").bytes[: m * rows * columns * 2]
    return found.view(ml_dtypes.bfloat16).reshape(m, rows, columns)


def judge(x: Problem, got: Array) -> None:
    """Raises Wrong unless every number has the right bits."""
    want = x.wanted
    if (wrong := np.argwhere(got.view(np.uint16) != want.view(np.uint16))).size:
        at = tuple(int(i) for i in wrong[0])
        raise Wrong(f"{len(wrong)} of {got.size} numbers are wrong, first {at}: {got[at]}, wanted {want[at]}")
