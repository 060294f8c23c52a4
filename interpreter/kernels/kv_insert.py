"""Insertion of entries on the interpreter: a launch, and what is wrong with the cache and the state that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jax_dsv4_fmha._definitions.packed import LAYOUTS
from kernels.abi import KvInsert
from kernels.packings import ROPE

from ..machine import scheduler
from ..machine.reductions import add_changed
from ..machine.state import Array, new_memory
from . import native
from .launch import Kernel, machine
from .verdict import Wrong

EPS = 1e-3
TOLERANCE = {"bfloat16": 2**-6, "float16": 2**-9}  # of an entry's greatest number: four roundings
UNWRITTEN = 0x5A  # every byte of the cache before


def numbers(variant: KvInsert) -> int:
    """Returns how many an entry has."""
    return variant.d + ROPE * variant.rope


def summed(rows: Array, folded: int, ratio: int) -> Array:
    """float64 [3, d]: what is kept of the first `folded` tokens: of those in the last one's block."""
    rows = rows[(folded - 1) // ratio * ratio : folded].astype(np.float64)
    if not len(rows):
        return np.zeros((3, rows.shape[1] // 2))
    kv, score = np.split(rows, 2, -1)
    weights = np.exp(score - score.max(0))
    return np.stack([score.max(0), weights.sum(0), (weights * kv).sum(0)])


@dataclass(frozen=True)
class Problem:
    variant: KvInsert
    ratio: int
    bounds: Array  # int32 [b, 1 or 2]: tokens of a sequence; the position of the first new one, if not s before that
    joined: Array  # float32 [b, s, columns], with the rows from `column` on
    column: int
    state: Array  # float32 [b, ring, width]
    sums: Array  # float32 [b, 3 or 0, d]: of the tokens of a block before those in the ring
    folded: Array  # int32 [b, 1 or 0]
    history: Array  # float32 [b, positions, width]: all rows of each sequence, where there are sums
    ape: Array  # float32 [ratio or 0, channels]
    norm: Array  # float32 [d]
    angle: Array  # float32 [b, n, ROPE / 2]
    page: int  # entries
    pages: int
    block_table: Array  # int32 [b, pages of a sequence]; of none, where page i belongs to sequence i

    @staticmethod
    def of(
        variant: KvInsert, lengths: tuple[int, ...], s: int, *, ratio: int = 1, blocks: int = 1, has_ape: bool = True,
        page: int = 8, table: tuple[tuple[int, ...], ...] = (), steps: int = 0, counts: tuple[int, ...] = (),
        seed: int = 0,
    ) -> Problem:  # fmt: skip
        """counts: how many tokens of each sequence are new; the others of s are padding."""
        rng, b, d = np.random.default_rng(seed), len(lengths), variant.d
        width = 2 * blocks * d if variant.pooled else numbers(variant)
        ring = blocks * ratio + max(s, steps) - 1 if variant.pooled else 0
        if variant.running:
            ring = max(s, steps)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(np.float32)

        n = -(-s // ratio)
        history, state = normal(b, max(*lengths, 3), width), normal(b, ring, width)
        folded = np.zeros((b, int(variant.running)), np.int32)
        sums = normal(b, 3 * int(variant.running), d)
        for i in range(b * int(variant.running)):
            count = counts[i] if counts else min(s, lengths[i])
            start = max(lengths[i] - count, 0)
            folded[i] = max(start + 1 - ring, 0) if count else 3  # a token at `start` was taken back
            sums[i] = summed(history[i], int(folded[i, 0]), ratio)
            for position in range(int(folded[i, 0]), start):
                state[i, position % ring] = history[i, position]
        return Problem(
            variant,
            ratio,
            np.asarray([lengths, np.subtract(lengths, counts)] if counts else [lengths], np.int32).T.copy(),
            normal(b, s, width + 12),
            8,
            state,
            sums,
            folded,
            history,
            normal(ratio if has_ape and variant.pooled else 0, width // 2),
            1 + normal(d) / 4,
            rng.uniform(-9, 9, (b, n, ROPE // 2)).astype(np.float32),
            page,
            3 * b if table else b,
            np.asarray(table, np.int32).reshape(b, -1),
        )

    @property
    def rows(self) -> Array:
        """float32 [b, s, width]"""
        return self.joined[..., self.column : self.column + (self.state.shape[2] or numbers(self.variant))]

    @property
    def shape(self) -> dict[str, int]:
        (b, s, width), n = self.rows.shape, self.angle.shape[1]
        return {
            "b": b, "s": s, "n": n, "width": width, "columns": self.joined.shape[2], "column": self.column,
            "n_ape": len(self.ape), "n_bounds": self.bounds.shape[1], "ratio": self.ratio, "ring": self.state.shape[1],
            "pages": self.pages, "page": self.page, "page_bytes": self.page_bytes if self.variant.packing else 0,
            "table_width": self.block_table.shape[1],
        }  # fmt: skip

    @property
    def page_bytes(self) -> int:
        if self.variant.packing:
            return int(LAYOUTS[self.variant.packing].page_bytes(self.page))
        return self.page * numbers(self.variant) * 2

    @property
    def unpacked(self) -> Problem:
        """The same for a cache that is not packed."""
        return replace(self, variant=replace(self.variant, packing=""))

    @property
    def table(self) -> Array:
        turns = np.stack([np.cos(self.angle), np.sin(self.angle)], -1)
        return turns.reshape(*self.angle.shape[:2], -1)

    @property
    def lengths(self) -> Array:
        return self.bounds[:, 0]

    def first(self, n: int) -> int:
        """The position of a sequence's first row."""
        return int(self.bounds[n, 1]) if self.bounds.shape[1] > 1 else int(self.lengths[n]) - self.rows.shape[1]

    def token(self, n: int, i: int) -> Array:
        """The row of new token i, as it is kept."""
        row = self.rows[n, i].copy()
        if len(self.ape):
            row[row.size // 2 :] += self.ape[(self.first(n) + i) % self.ratio]
        return row

    def new_state(self) -> Array:
        """Returns the state with the new tokens in their places."""
        state, (b, s, _) = self.state.copy(), self.rows.shape
        for n in range(b * bool(state.shape[1])):
            for i in range(s):
                position = self.first(n) + i
                if 0 <= position < self.lengths[n]:
                    state[n, position % state.shape[1]] = self.token(n, i)
        return state

    def new_sums(self) -> tuple[Array, Array]:
        """Sums, and how many tokens they have, where the new tokens displace others."""
        sums, folded = self.sums.astype(np.float64), self.folded.copy()
        for n in range(len(folded) * self.variant.running):
            length, first = int(self.lengths[n]), max(self.first(n), 0)
            if length > first:
                folded[n] = max(min(folded[n, 0], first), length - self.state.shape[1])
            if folded[n] != self.folded[n]:
                sums[n] = summed(self.history[n], int(folded[n, 0]), self.ratio)
        return sums, folded

    def row_at(self, n: int, position: int, state: Array) -> Array:
        """float64, of a token of a block that is complete."""
        if self.variant.running and position < self.first(n):
            return self.history[n, position].astype(np.float64)
        return state[n, position % state.shape[1]].astype(np.float64)

    def entries(self) -> dict[tuple[int, int], tuple[int, Array]]:
        """Maps a new entry's sequence and index to its row of the table, and to the entry before its norm, float64."""
        found, state, (b, _, width) = {}, self.new_state(), self.rows.shape
        for n in range(b):
            length, d = int(self.lengths[n]), self.variant.d
            first = self.first(n) // self.ratio
            for k in range(self.angle.shape[1]):
                index, end = first + k, (first + k + 1) * self.ratio
                if index < 0 or not self.first(n) < end <= length:
                    continue
                if not self.variant.pooled:
                    found[n, index] = k, self.rows[n, k].astype(np.float64)
                    continue
                blocks, kv, score = width // (2 * d), [], []
                for position in range(end - blocks * self.ratio, end):
                    if position >= 0:
                        row = self.row_at(n, position, state)
                        before = blocks == 2 and position < end - self.ratio
                        part = slice(d) if before else slice((blocks - 1) * d, None)
                        kv.append(row[: width // 2][part])
                        score.append(row[width // 2 :][part])
                weights = np.exp(np.asarray(score) - np.max(score, 0))
                found[n, index] = k, (weights * kv).sum(0) / weights.sum(0)
        return found

    def finished(self, n: int, k: int, x: Array) -> Array:
        """After norm, RoPE and the Hadamard transform, in float64."""
        y, d = x.copy(), self.variant.d
        y[:d] *= self.norm.astype(np.float64) / np.sqrt(np.mean(x[:d] ** 2) + EPS)
        pairs = (y[-ROPE::2] + 1j * y[-ROPE + 1 :: 2]) * np.exp(1j * self.angle[n, k].astype(np.float64))
        y[-ROPE::2], y[-ROPE + 1 :: 2] = pairs.real, pairs.imag
        if self.variant.hadamard:
            i = np.arange(self.variant.d)
            signs = 1 - 2 * (np.bitwise_count(i[:, None] & i).astype(np.int64) % 2)
            y = y @ signs / np.sqrt(self.variant.d)
        return y

    def slot(self, n: int, index: int) -> tuple[int, int] | None:
        """The page and the place on it of a sequence's entry; None where there is no page."""
        page, at = index // self.page, index % self.page
        if not self.block_table.shape[1]:
            return n, at
        page = int(self.block_table[n, page % self.block_table.shape[1]])
        return (page, at) if 0 <= page < self.pages else None


def run(
    x: Problem, *, seed: int = 0, edit: Callable[[str], str] = lambda text: text, **edits: Callable[[int], int]
) -> tuple[Array, Array, Array, Array]:
    """The bytes of the cache's pages, the state, the sums, and how many tokens these have."""
    kernel, memory = Kernel.of(x.variant), new_memory()
    given = {"rows": x.joined, "ape": x.ape, "norm": x.norm, "table": x.table, "bounds": x.bounds}
    addresses = {name: memory.add(name, array) for name, array in (given | {"block_table": x.block_table}).items()}
    kept = {"state": x.state, "sums": x.sums, "folded": x.folded}
    addresses |= {name: add_changed(memory, name, array.view(np.uint8).ravel()) for name, array in kept.items()}
    addresses["cache"] = add_changed(memory, "cache", np.full(x.pages * x.page_bytes, UNWRITTEN, np.uint8))
    plan = native.plan_kv_insert(x.shape, EPS, tile_m=kernel.facts["tile_m"], addresses=addresses)
    scheduler.run(machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed))
    cache = memory.named("cache")
    found = (memory.named(name).bytes[: array.nbytes].view(array.dtype) for name, array in kept.items())
    state, sums, folded = (y.reshape(array.shape) for y, array in zip(found, kept.values(), strict=True))
    return cache.bytes[: cache.size].reshape(x.pages, -1), state, sums, folded


def judge(x: Problem, got: tuple[Array, Array, Array, Array]) -> None:
    """Raises Wrong unless every new entry and row is right, and all else is as it was.

    An entry that is packed must have the bytes that the layout's definition makes of the entry that is not.
    """
    pages, state, sums, folded = got
    want_sums, want_folded = x.new_sums()
    if not np.array_equal(folded, want_folded):
        raise Wrong(f"{folded.ravel()} tokens are folded, wanted {want_folded.ravel()}")
    if not np.allclose(sums, want_sums, rtol=1e-4, atol=1e-4):
        raise Wrong(f"sums are wrong: off by {np.abs(sums - want_sums).max():.2g}")
    if (wrong := state.view(np.uint32) != x.new_state().view(np.uint32)).any():
        raise Wrong(f"{int(wrong.any(-1).sum())} rows of the state are wrong")
    wanted = np.full_like(pages, UNWRITTEN)
    exactly = run(x.unpacked)[0] if x.variant.packing else None
    for (n, index), (k, entry) in x.entries().items():
        if (slot := x.slot(n, index)) is None:
            continue
        page, at = slot
        what = f"entry {index} of sequence {n}"
        d, dtype = numbers(x.variant), np.dtype(x.variant.dtype)
        rounded = (pages if exactly is None else exactly)[page, at * d * 2 : (at + 1) * d * 2]
        found, want = rounded.view(dtype).astype(np.float64), x.finished(n, k, entry)
        off = np.abs(found - want).max() / np.abs(want).max()
        if not off <= TOLERANCE[x.variant.dtype]:
            raise Wrong(f"{what} is wrong: off by {off:.2g} of its greatest number")
        if exactly is None:
            wanted[page, at * d * 2 : (at + 1) * d * 2] = rounded
            continue
        layout = LAYOUTS[x.variant.packing]
        parts = layout.encode(rounded.view(dtype))
        for start, part in zip(layout.starts(at, x.page), parts, strict=True):
            wanted[page, start : start + part.size] = np.asarray(part)
    if (wrong := pages != wanted).any():
        page, byte = (int(i) for i in np.argwhere(wrong)[0])
        raise Wrong(f"{int(wrong.sum())} bytes are wrong, first byte {byte} of page {page}")
