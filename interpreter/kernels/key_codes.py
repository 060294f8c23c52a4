"""Codes of keys on the interpreter: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_dsv4_fmha._definitions.cache import read_slots
from jax_dsv4_fmha._definitions.e4m3 import ROPE, codes, unit_of
from jax_dsv4_fmha._definitions.packed import LAYOUTS, quantize_cache
from kernels.abi import KeyCodes

from ..machine import scheduler
from ..machine.reductions import add_changed
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
    top: Array  # float32 [b]: of other keys, or, where codes are made again, of all

    @staticmethod
    def of(variant: KeyCodes, b: int = 2, n: int = 37, pages: int = 5, page: int = 17) -> Problem:
        """Entries of all sizes, among them 0, NaN and infinities, in pages, of which nobody reads the last."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((pages * page, D)) * np.exp2(rng.integers(-12, 6, (pages * page, D // 64))).repeat(
            64, 1
        )
        x[3] = 0
        x[5, 40], x[6, 500], x[7, 100], x[7, 511] = np.nan, np.inf, -200, -np.inf
        pool = x.astype(ml_dtypes.bfloat16)
        if variant.packing:
            pool = np.array(quantize_cache(jnp.asarray(pool.reshape(pages, page, D)), variant.packing))
        slots = rng.integers(-3, (pages - 1) * page, (b, n), np.int32)
        slots[0, :4], slots[-1, -4:] = (3, 5, 6, 7), -1
        of_others = 300 if variant.op == "key_codes_again" else 0
        return Problem(variant, pool, slots, np.array([of_others, *[700] * (b - 1)], np.float32))

    @property
    def is_again(self) -> bool:
        return self.variant.op == "key_codes_again"

    @property
    def row(self) -> int:
        """Bytes of what is made of a key."""
        return D + 2 * ROPE * self.variant.rope

    @property
    def entries(self) -> Array:
        """bfloat16 [b, n, D]"""
        return np.asarray(read_slots(jnp.asarray(self.pool)[None], jnp.asarray(self.slots), self.variant.packing))

    def tops(self, size: int) -> Array:
        """float32 [b, parts]: the greatest finite |x| of parts of so many keys."""
        sizes, (b, n) = np.abs(self.entries.astype(np.float32)), self.slots.shape
        most = np.where(np.isfinite(sizes) & (self.slots >= 0)[..., None], sizes, 0).max(-1)
        return np.pad(most, ((0, 0), (0, -n % size))).reshape(b, -1, size).max(-1)

    def taken(self, size: int) -> Array:
        """What parts took before codes are made again: the unit of the first is right, that of the next is not."""
        b, parts = len(self.top), -(-self.slots.shape[1] // size)
        less = np.where((np.arange(parts) + np.arange(b)[:, None]) % 2 == 0, 0.75, 0.25)
        return (np.exp2(np.ceil(np.log2(self.top)))[:, None] * less).astype(np.float32)


@dataclass(frozen=True)
class Made:
    codes: Array  # uint8 [b, n, row], which are `POISON` where the kernel writes nothing
    taken: Array  # float32 [b, parts]
    top: Array  # float32 [b]
    size: int  # keys of a part


def run(
    x: Problem, *, seed: int = 0, edit: Callable[[str], str] = lambda text: text, **edits: Callable[[int], int]
) -> Made:
    kernel, memory, (b, n) = Kernel.of(x.variant), new_memory(), x.slots.shape
    size = kernel.facts["tile_m"]
    parts = -(-n // size)
    addresses = {given: memory.add(given, getattr(x, field)) for given, field in (("keys", "pool"), ("slots", "slots"))}
    if x.is_again:
        addresses |= {"top": memory.add("top", x.top), "taken": memory.add("taken", x.taken(size))}
    else:
        addresses |= {"top": add_changed(memory, "top", x.top), "taken": memory.add("taken", None, 4 * b * parts)}
    addresses["codes"] = memory.add("codes", None, b * n * x.row)
    memory.named("codes").bytes[:] = POISON
    rows, width = x.pool.shape
    layout = LAYOUTS[x.variant.packing] if x.variant.packing else None
    page = layout.page_entries(width) if layout else 1
    shape = {"b": b, "n": n, "rows": rows, "page": page, "page_bytes": width if layout else 0}
    plan = native.plan_key_codes(shape, tile_m=size, addresses=addresses)
    scheduler.run(machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed))
    taken, top = (memory.named(name).bytes.view(np.float32) for name in ("taken", "top"))
    made = memory.named("codes").bytes[: b * n * x.row].reshape(b, n, x.row)
    return Made(made, taken[: b * parts].reshape(b, parts), top[:b], size)


def judge(x: Problem, got: Made) -> None:
    """Raises Wrong unless every number is right to the bit. A part may take what any other one has in its sequence."""
    tops, is_made = x.tops(got.size), np.ones(got.taken.shape, bool)
    if x.is_again:
        is_made = unit(got.taken) != unit(x.top)[:, None]
        units = np.broadcast_to(unit(x.top)[:, None], is_made.shape)
    else:
        units = unit(got.taken)
        equal(got.top, np.maximum(x.top, tops.max(1)), "greatest numbers")
        least = np.maximum(tops, x.top[:, None])
        of_some = (got.taken[:, :, None] == np.concatenate([tops, x.top[:, None]], 1)[:, None]).any(2)
        equal(of_some & (got.taken >= least), np.ones_like(of_some), "what parts took")
    units, is_made = (y.repeat(got.size, 1)[:, : x.slots.shape[1], None] for y in (units, is_made))
    made = np.asarray(codes(jnp.asarray(x.entries), jnp.asarray(units))).view(np.uint8)
    is_made = is_made & (x.slots >= 0)[..., None]
    alike = np.isin(made & 0x7F, (0, 0x7F)) & ((got.codes[..., :D] & 0x7F) == (made & 0x7F))  # of either sign
    if x.variant.rope:
        rope = x.entries[..., -ROPE:].astype(np.float32) / units
        rope = np.where(np.isfinite(rope), rope, np.nan).astype(ml_dtypes.bfloat16)
        found = np.ascontiguousarray(got.codes[..., D:]).view(ml_dtypes.bfloat16)
        same = (found == rope) | (np.isnan(found) & np.isnan(rope))
        made = np.concatenate([made, rope.view(np.uint8)], -1)
        alike = np.concatenate([alike, np.repeat(same, 2, -1)], -1)
    equal(np.where(alike & is_made, made, got.codes), np.where(is_made, made, POISON), "codes")


def unit(tops: Array) -> Array:
    """The unit that each greatest number gives."""
    return np.asarray(unit_of(jnp.asarray(tops)[..., None], axes=-1))[..., 0]


def equal(got: Array, want: Array, what: str) -> None:
    if (wrong := np.argwhere(got != want)).size:
        at = tuple(int(i) for i in wrong[0])
        raise Wrong(f"{what}: {len(wrong)} are wrong, first {at}: {got[at]}, wanted {want[at]}")
