"""Codes of keys on the interpreter: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_dsv4_fmha._definitions.cache import read_slots
from jax_dsv4_fmha._definitions.e4m3 import ROPE, codes, unit_of_key
from jax_dsv4_fmha._definitions.packed import LAYOUTS, quantize_cache
from kernels.abi import UNIT_BYTES, KeyCodes

from ..machine import scheduler
from ..machine.state import Array, new_memory
from . import native
from .launch import Kernel, machine
from .verdict import Wrong

D = 512
POISON = 0x5A


@dataclass(frozen=True)
class Problem:
    variant: KeyCodes
    pool: Array  # ml_dtypes.bfloat16 [rows, D], or uint8 [pages, page_bytes]
    slots: Array  # int32 [b, n]

    @staticmethod
    def of(variant: KeyCodes, b: int = 2, n: int = 37, pages: int = 5, page: int = 17) -> Problem:
        """Entries of all sizes, among them 0, NaN and infinities, in pages, of which nobody reads the last."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((pages * page, D)) * np.exp2(rng.integers(-12, 6, (pages * page, D // 64))).repeat(
            64, 1
        )
        x[3] = 0
        x[5, 40], x[6, 500], x[7, 100], x[7, 511] = np.nan, np.inf, -200, -np.inf
        x[8, 9], x[9, 7], x[10] = 1.5e17, 2.0**56, x[10] * 2.0**-80  # beyond the range, the last in it, below all units
        pool = x.astype(ml_dtypes.bfloat16)
        if variant.packing:
            pool = np.array(quantize_cache(jnp.asarray(pool.reshape(pages, page, D)), variant.packing))
        slots = rng.integers(-3, (pages - 1) * page, (b, n), np.int32)
        slots[0, :7], slots[-1, -5:-1], slots[-1, -1] = (3, 5, 6, 7, 8, 9, 10), -1, 1
        return Problem(variant, pool, slots)

    @property
    def row(self) -> int:
        """Bytes of what is made of a key."""
        return D + 2 * ROPE * self.variant.rope + UNIT_BYTES

    @property
    def entries(self) -> Array:
        """bfloat16 [b, n, D]"""
        return np.asarray(read_slots(jnp.asarray(self.pool)[None], jnp.asarray(self.slots), self.variant.packing))


def run(
    x: Problem, *, seed: int = 0, edit: Callable[[str], str] = lambda text: text, **edits: Callable[[int], int]
) -> Array:
    """uint8 [b, n, row], which are `POISON` where the kernel writes nothing."""
    kernel, memory, (b, n) = Kernel.of(x.variant), new_memory(), x.slots.shape
    addresses = {given: memory.add(given, getattr(x, field)) for given, field in (("keys", "pool"), ("slots", "slots"))}
    addresses["codes"] = memory.add("codes", None, b * n * x.row)
    memory.named("codes").bytes[:] = POISON
    rows, width = x.pool.shape
    layout = LAYOUTS[x.variant.packing] if x.variant.packing else None
    page = layout.page_entries(width) if layout else 1
    shape = {"b": b, "n": n, "rows": rows, "page": page, "page_bytes": width if layout else 0}
    plan = native.plan_key_codes(shape, tile_m=kernel.facts["tile_m"], addresses=addresses)
    scheduler.run(machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed))
    made: Array = memory.named("codes").bytes[: b * n * x.row].reshape(b, n, x.row)
    return made


def judge(x: Problem, got: Array) -> None:
    """Raises Wrong unless every byte is right."""
    units = np.asarray(unit_of_key(jnp.asarray(x.entries)))
    made = np.asarray(codes(jnp.asarray(x.entries), jnp.asarray(units))).view(np.uint8)
    alike = np.isin(made & 0x7F, (0, 0x7F)) & ((got[..., :D] & 0x7F) == (made & 0x7F))  # of either sign
    if x.variant.rope:
        rope = x.entries[..., -ROPE:].astype(np.float32) / units
        rope = np.where(np.isfinite(rope), rope, np.nan).astype(ml_dtypes.bfloat16)
        found = np.ascontiguousarray(got[..., D:-UNIT_BYTES]).view(ml_dtypes.bfloat16)
        same = (found == rope) | (np.isnan(found) & np.isnan(rope))
        made = np.concatenate([made, rope.view(np.uint8)], -1)
        alike = np.concatenate([alike, np.repeat(same, 2, -1)], -1)
    tail = np.zeros((*x.slots.shape, UNIT_BYTES), np.uint8)
    tail[..., :2] = units.astype(ml_dtypes.bfloat16).view(np.uint8)
    there = (x.slots >= 0)[..., None]
    made_of = np.where(alike, got[..., :-UNIT_BYTES], made)
    equal(got[..., :-UNIT_BYTES], np.where(there, made_of, POISON), "codes")
    equal(got[..., -UNIT_BYTES:], np.where(there, tail, POISON), "units")


def equal(got: Array, want: Array, what: str) -> None:
    if (wrong := np.argwhere(got != want)).size:
        at = tuple(int(i) for i in wrong[0])
        raise Wrong(f"{what}: {len(wrong)} are wrong, first {at}: {got[at]}, wanted {want[at]}")
