"""The lightning indexer's scores of keys in listed blocks, launched as our own launcher plans it; and a judgement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels.abi import INDEX_BLOCK, IndexerScores, IndexerScoresWithin

from ..machine.state import Array, Machine, new_memory
from . import native, nibbles
from .indexer import Edit
from .indexer import Problem as Keys
from .launch import Kernel, machine
from .verdict import Wrong

CASES: dict[str, dict[str, Any]] = {
    # two tiles of blocks, the last of them not whole, and lists of which half is absent
    "tiles": {"b": 2, "s_q": 2, "s_c": 300, "count": 13},
    # more tiles than shared memory holds, shared out over CTAs
    "turns": {"b": 1, "s_q": 2, "s_c": 900, "count": 70, "processors": 6},
}


@dataclass(frozen=True)
class Problem:
    """An indexer's operands, and each query's ascending blocks, then -1; `from_start`: block 0 begins at `start`."""

    keys: Keys
    blocks: Array
    from_start: bool
    processors: int = 1

    @staticmethod
    def case(variant: IndexerScoresWithin, name: str) -> Problem | None:
        """One of `CASES`; None if there is none of this name."""
        return Problem.of(variant, **CASES[name]) if name in CASES else None

    @staticmethod
    def of(
        variant: IndexerScoresWithin,
        b: int,
        s_q: int,
        s_c: int,
        count: int,
        processors: int = 1,
        from_start: bool = False,
    ) -> Problem:
        """Keys that no block has are NaN; the last block is not whole, in arrays."""
        v = variant
        like = IndexerScores("indexer_scores", v.arch, "", v.heads, v.dtype, v.paged, packing=v.packing)
        x = Keys.of(like, b, s_q, s_c, 40, 64 if v.paged else 0)
        rng = np.random.default_rng(2)
        start: Array = rng.integers(1, 20, x.start.shape, np.int32)
        base: Array = start if from_start else np.zeros_like(start)
        blocks = np.full((b, s_q, count), -1, np.int32)
        k, named = x.k.copy(), np.zeros(x.k.shape[:2], bool)
        for n, i in np.ndindex(b, s_q):
            there = -(-(s_c - int(base[n, i])) // INDEX_BLOCK)
            some = min(count, there) - (i + n) % 2 * (count // 2)
            blocks[n, i, :some] = np.sort(np.append(rng.permutation(there - 1)[: some - 1], there - 1))
            entries = base[n, i] + blocks[n, i, :some, None] * INDEX_BLOCK + np.arange(INDEX_BLOCK)
            named[n, entries[entries < s_c]] = True
        last = np.ones_like(k[:, s_c - 3 :])
        k[:, s_c - 3 :] = nibbles.rounded(last, x.k_scale[:, s_c - 3 :]) if x.of_4_bits else last
        k[~named] = np.nan
        return Problem(replace(x, k=k, start=start), blocks, from_start, processors)

    @property
    def entries(self) -> Array:
        """int32 [b, s_q, 8 count]: the entry at each place of a list, -1 where there is none."""
        base: Array = self.keys.start if self.from_start else np.zeros_like(self.keys.start)
        entries = base[..., None, None] + self.blocks[..., None] * INDEX_BLOCK + np.arange(INDEX_BLOCK)
        there = (self.blocks[..., None] >= 0) & (entries < self.keys.k.shape[1])
        found: Array = np.where(there, entries, -1).reshape(*self.blocks.shape[:2], -1)
        return found


@dataclass(frozen=True)
class Call:
    """A launch that can be made several times."""

    kernel: Kernel[IndexerScoresWithin]
    x: Problem

    def machine(self, *, seed: int = 0, record: bool = False, edit: Edit = lambda text: text) -> Machine:
        x, variant, memory = self.x.keys, self.kernel.variant, new_memory()
        (b, s_q, heads, _), s_c, count = x.q.shape, x.k.shape[1], self.x.blocks.shape[2]
        operands = {name: getattr(x, name) for name in ("q", "k", "weights", "k_scale", "start")}
        paging = {"pages": b, "page": s_c, "width": 0}
        if variant.paged:
            operands["k"], operands["table"] = x.pages()
            del operands["k_scale"]
            paging = {"pages": len(operands["k"]), "page": x.page, "width": operands["table"].shape[1]}
            s_c = x.page * paging["width"]
        addresses = {name: memory.add(name, array) for name, array in (operands | {"blocks": self.x.blocks}).items()}
        addresses["scores"] = memory.add("scores", None, self.x.entries.size * 4)
        shape = {"b": b, "s_q": s_q, "s_c": s_c, "heads": heads, "topk": x.topk, "type": native.TYPES[variant.dtype]}
        shape |= {
            "of_4_bits": int(x.of_4_bits),
            "queries": 1,
            "stride": count * INDEX_BLOCK,
            "wants_values": 1,
            "keys_of_score": 1,
        }
        plan, _ = native.plan_indexer_within(
            shape | paging, count, self.x.from_start, processors=self.x.processors, queries=b * s_q, addresses=addresses
        )
        return machine(replace(self.kernel, ptx=edit(self.kernel.ptx)), plan, memory, seed=seed, record=record)

    def judge(self, ran: Machine) -> None:
        """Raises Wrong unless the scores of all entries that are there are right."""
        found = ran.memory.named("scores")
        entries = self.x.entries
        got = found.bytes[: found.size].view(np.float32).reshape(entries.shape)
        want = np.take_along_axis(self.x.keys.scores(), np.maximum(entries, 0), -1)
        there, tolerance = entries >= 0, 2e-3 if self.x.keys.q.dtype.itemsize == 1 else 2e-5
        wrong = there & ~(np.abs(got - want) <= tolerance * np.abs(want[there]).max())
        if wrong.any():
            n, i, j = (int(a) for a in np.argwhere(wrong)[0])
            raise Wrong(
                f"{int(wrong.sum())} scores are wrong, first that of query {i} of batch entry {n} at place {j}, entry "
                f"{entries[n, i, j]}: {got[n, i, j]:.6g}, wanted {want[n, i, j]:.6g}"
            )
