"""Slots of a step on the interpreter: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernels.abi import SeenSlots

from ..machine import scheduler
from ..machine.state import Array, new_memory
from . import native
from .launch import Kernel, machine
from .verdict import Wrong


class Pool(NamedTuple):
    """The places where a cache has its entries: without a table, a sequence's are in a row."""

    room: int
    page: int = 0
    pages: int = 0
    table: tuple[tuple[int, ...], ...] = ()
    stride: int = 0
    """slots from one sequence to the next, without a table"""

    def slot(self, n: int, entry: int) -> int:
        """-1 for an entry that does not exist."""
        if not 0 <= entry < self.room:
            return -1
        if not self.page:
            return entry + n * self.stride
        page = self.table[n][entry // self.page]
        return page * self.page + entry % self.page if 0 <= page < self.pages else -1

    def array(self, b: int) -> Array:
        return np.asarray(self.table, np.int32).reshape(b, -1)

    def shape(self, b: int) -> dict[str, int]:
        of_pages = {"width": self.array(b).shape[1], "room": self.room, "page": self.page, "pages": self.pages}
        return of_pages | {"stride": self.stride}


@dataclass(frozen=True)
class Problem:
    variant: SeenSlots
    lengths: tuple[int, ...]
    s_q: int
    window: int
    of_window: Pool
    compressed: Pool | None = None
    ratio: int = 0
    topk: int = 0
    """indices for each query; 0 where it sees all past entries"""
    first: tuple[int, ...] = ()
    """the position of each sequence's first query, if its queries are not its last tokens"""
    topk_length: tuple[int, ...] = ()
    """of each sequence"""

    @property
    def b(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> Array:
        """int32 [b, s_q], or [0, s_q]"""
        return np.asarray(self.first, np.int32)[:, None] + np.arange(self.s_q, dtype=np.int32)

    @property
    def indices(self) -> Array:
        """Entries, some that do not exist, some that are not past."""
        highest = self.compressed.room + 3 if self.compressed else 1
        return np.random.default_rng(0).integers(-2, highest, (self.b, self.s_q, self.topk), np.int32)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of slots of the window, and that of compressed entries."""
        far = 0 if self.compressed is None else self.topk or self.compressed.room
        return self.window, far

    def wanted(self) -> tuple[Array, Array, Array, Array]:
        """Returns what `run` should, by the definition: the window's slots begin with the oldest position seen."""
        near, far = (np.full((self.b, self.s_q, n), -1, np.int32) for n in self.sizes)
        near_length, far_length = np.zeros((2, self.b, self.s_q), np.int32)
        for n, length in enumerate(self.lengths):
            length = max(length, 0)
            for i in range(self.s_q):
                p = (self.first[n] if self.first else length - self.s_q) + i
                oldest = max(p + 1 - self.window, 0)
                for j in range(near.shape[2]):
                    near[n, i, j] = self.of_window.slot(n, (oldest + j) % self.of_window.room)
                there = 0 <= p < length
                near_length[n, i] = (p + 1 - oldest) * there
                far[n, i], far_length[n, i] = self.entries_of(n, i, p, length)
                far_length[n, i] *= there
        return near, near_length, far, far_length

    def entries_of(self, n: int, i: int, position: int, length: int) -> tuple[list[int], int]:
        pool, ratio = self.compressed, self.ratio
        if pool is None:
            return [], 0
        past = max(position + 1, 0) // ratio if ratio else pool.room
        if not self.topk:
            oldest = max(length // ratio - pool.room, 0)  # a ring has the last ones
            return [pool.slot(n, (oldest + j) % pool.room) for j in range(pool.room)], past - oldest
        entries = [int(x) if not ratio or x < past else -1 for x in self.indices[n, i]]
        return [pool.slot(n, x) for x in entries], self.topk_length[n] if self.topk_length else self.topk


def run(
    x: Problem, *, seed: int = 0, edit: Callable[[str], str] = lambda text: text, **edits: Callable[[int], int]
) -> list[Array]:
    """Slots of the window, how many of them count, slots of entries, and how many count."""
    kernel, memory, pool = Kernel.of(x.variant), new_memory(), x.compressed or Pool(1)
    near, far = x.sizes
    given = {
        "lengths": np.asarray(x.lengths, np.int32),
        "position": x.positions,
        "indices": x.indices,
        "topk_length": np.repeat(np.asarray(x.topk_length, np.int32), x.s_q),
        "window_table": x.of_window.array(x.b),
        "table": pool.array(x.b),
    }
    shapes = {"near": (near,), "near_length": (), "far": (far,), "far_length": ()}
    addresses = {name: memory.add(name, array) for name, array in given.items()}
    sizes = {name: 4 * x.b * x.s_q * int(np.prod(shape, dtype=int)) for name, shape in shapes.items()}
    addresses |= {name: memory.add(name, None, size) for name, size in sizes.items()}
    shape = {
        "b": x.b, "s_q": x.s_q, "window": near, "ratio": x.ratio, "n_position": int(bool(x.first)),
        "n_topk_length": int(bool(x.topk_length)), "n_far": far,
        "topk": x.topk,
    }  # fmt: skip
    pools = x.of_window.shape(x.b), pool.shape(x.b)
    plan = native.plan_seen_slots(shape, *pools, tile_n=kernel.facts["tile_n"], addresses=addresses)
    scheduler.run(machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed))
    found = (memory.named(name).bytes[: sizes[name]].view(np.int32) for name in shapes)
    return [y.reshape(x.b, x.s_q, *shape) for y, shape in zip(found, shapes.values(), strict=True)]


def judge(x: Problem, got: list[Array]) -> None:
    """Raises Wrong unless every number is right."""
    names = "slots of the window", "lengths of the window", "slots of entries", "lengths of entries"
    for name, numbers, want in zip(names, got, x.wanted(), strict=True):
        if (wrong := np.argwhere(numbers != want)).size:
            at = tuple(int(i) for i in wrong[0])
            raise Wrong(f"{name}: {len(wrong)} are wrong, first {at}: {numbers[at]}, wanted {want[at]}")
