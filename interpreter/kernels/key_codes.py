"""Codes of keys on the interpreter, and the greatest numbers of keys: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_dsv4_fmha._definitions.cache import read_slots
from jax_dsv4_fmha._definitions.e4m3 import ROPE, codes
from jax_dsv4_fmha._definitions.packed import LAYOUTS, quantize_cache
from kernels.abi import KeyCodes

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
    units: Array  # float32 [b]

    @staticmethod
    def of(variant: KeyCodes, b: int = 2, n: int = 37, pages: int = 5, page: int = 17) -> Problem:
        """Entries of all sizes, among them 0, NaN and infinities, in pages, of which nobody reads the last."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((pages * page, D)) * np.exp2(rng.integers(-12, 6, (pages * page, D // 64))).repeat(
            64, 1
        )
        x[3] = 0
        x[5, 40], x[6, 500], x[7, 511] = np.nan, np.inf, -np.inf
        pool = x.astype(ml_dtypes.bfloat16)
        if variant.packing:
            pool = np.array(quantize_cache(jnp.asarray(pool.reshape(pages, page, D)), variant.packing))
        slots = rng.integers(-3, (pages - 1) * page, (b, n), np.int32)
        slots[0, :4], slots[-1, -4:] = (3, 5, 6, 7), -1
        return Problem(variant, pool, slots, np.exp2(rng.integers(-7, 2, b)).astype(np.float32))

    @property
    def entries(self) -> Array:
        """bfloat16 [b, n, D]"""
        return np.asarray(read_slots(jnp.asarray(self.pool)[None], jnp.asarray(self.slots), self.variant.packing))


def run(
    x: Problem, *, seed: int = 0, edit: Callable[[str], str] = lambda text: text, **edits: Callable[[int], int]
) -> Array:
    """float32 [b, parts], or bytes [b, n, row], which are `POISON` where the kernel writes nothing."""
    kernel, memory, (b, n) = Kernel.of(x.variant), new_memory(), x.slots.shape
    parts = -(-n // kernel.facts["tile_n"])
    is_tops = x.variant.op == "key_tops"
    row = D + 2 * ROPE * x.variant.rope
    name, size = ("tops", 4 * b * parts) if is_tops else ("codes", b * n * row)
    addresses = {given: memory.add(given, getattr(x, field)) for given, field in (("keys", "pool"), ("slots", "slots"))}
    if not is_tops:
        addresses["units"] = memory.add("units", x.units)
    addresses[name] = memory.add(name, None, size)
    memory.named(name).bytes[:] = POISON
    rows, width = x.pool.shape
    layout = LAYOUTS[x.variant.packing] if x.variant.packing else None
    page = layout.page_entries(width) if layout else 1
    shape = {"b": b, "n": n, "rows": rows, "page": page, "page_bytes": width if layout else 0}
    plan = native.plan_key_codes(shape, tile_m=kernel.facts["tile_m"], addresses=addresses)
    machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed).run()
    found = memory.named(name).bytes[:size]
    return found.view(np.float32).reshape(b, parts) if is_tops else found.reshape(b, n, row)


def judge(x: Problem, got: Array) -> None:
    """Raises Wrong unless every number is right to the bit."""
    entries, (b, n) = x.entries, x.slots.shape
    if x.variant.op == "key_tops":
        size = np.abs(entries.astype(np.float32))
        most = np.where(np.isfinite(size), size, 0).max(-1)
        want = np.pad(most, ((0, 0), (0, -n % (-(-n // got.shape[1]))))).reshape(b, got.shape[1], -1).max(-1)
        what = "greatest numbers"
    else:
        made = np.asarray(codes(jnp.asarray(entries), jnp.asarray(x.units)[:, None, None])).view(np.uint8)
        want, what, there = made, "codes", (x.slots >= 0)[..., None]
        alike = np.isin(made & 0x7F, (0, 0x7F)) & ((got[..., :D] & 0x7F) == (made & 0x7F))  # of either sign
        if x.variant.rope:
            rope = entries[..., -ROPE:].astype(np.float32) / x.units[:, None, None]
            rope = np.where(np.isfinite(rope), rope, np.nan).astype(ml_dtypes.bfloat16)
            found = np.ascontiguousarray(got[..., D:]).view(ml_dtypes.bfloat16)
            same = (found == rope) | (np.isnan(found) & np.isnan(rope))
            want = np.concatenate([made, rope.view(np.uint8)], -1)
            alike = np.concatenate([alike, np.repeat(same, 2, -1)], -1)
        want, got = np.where(there, want, POISON), np.where(alike & there, want, got)
    if (wrong := np.argwhere(got != want)).size:
        at = tuple(int(i) for i in wrong[0])
        raise Wrong(f"{what}: {len(wrong)} are wrong, first {at}: {got[at]}, wanted {want[at]}")
