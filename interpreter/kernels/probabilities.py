"""Head-summed probabilities on the interpreter: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kernels.abi import Probabilities

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Kernel, machine
from .verdict import Wrong

TOLERANCE = 2e-5  # bounds for a probability, relative to it and to the greatest one


CASES = {
    # three tiles of keys, and a part of one; heads that fill no tile
    "tiles": {"b": 1, "s_q": 2, "h_q": 70, "s_kv": 290, "topk": 400},
    # two tiles of heads for each query
    "turns": {"b": 1, "s_q": 2, "h_q": 130, "s_kv": 90, "topk": 140},
}


@dataclass(frozen=True)
class Problem:
    """Absent entries of every kind, one that is named twice, heads that saw nothing, NaN in keys that nobody names."""

    q: Array
    k: Array
    lse: Array
    indices: Array
    scale: float

    @staticmethod
    def of(variant: Probabilities, b: int, s_q: int, h_q: int, s_kv: int, topk: int) -> Problem:
        rng, dtype = np.random.default_rng(0), np.dtype(variant.dtype)
        q, k = (rng.standard_normal(s).astype(np.float32) for s in ((b, s_q, h_q, variant.d), (b, s_kv, variant.d)))
        lse = (rng.standard_normal((b, s_q, h_q)) + np.log(s_kv)).astype(np.float32)
        lse[0, 0, 0], lse[-1, -1, -1] = -np.inf, np.inf
        absent = [-1, s_kv, np.iinfo(np.int32).min, np.iinfo(np.int32).max]
        indices = rng.integers(0, s_kv, (b, s_q, topk))
        indices = np.where(rng.random(indices.shape) < 0.1, rng.choice(absent, indices.shape), indices)
        indices[..., -1] = indices[..., 0]
        for n in range(b):
            k[n, ~np.isin(np.arange(s_kv), indices[n])] = np.nan
        return Problem(q.astype(dtype), k.astype(dtype), lse, indices.astype(np.int32), variant.d**-0.5)

    @staticmethod
    def case(variant: Probabilities, name: str) -> Problem | None:
        """One of `CASES`; None if there is none of this name."""
        return Problem.of(variant, **CASES[name]) if name in CASES else None

    def probabilities(self) -> Array:
        """float64 [b, s_q, topk]"""
        there = (self.indices >= 0) & (self.indices < self.k.shape[1])
        keys = np.stack([k[i] for k, i in zip(self.k, np.where(there, self.indices, 0), strict=True)])
        keys = np.where(there[..., None], keys, 0).astype(np.float64)
        s = self.scale * np.einsum("bnhd,bntd->bnht", self.q.astype(np.float64), keys)
        adds = np.isfinite(self.lse)[..., None]
        p = np.where(adds, np.exp(s - np.where(adds, self.lse[..., None], 0)), 0).sum(2)
        return np.where(there, p, 0)


@dataclass(frozen=True)
class Call:
    """A launch that can be made several times."""

    kernel: Kernel[Probabilities]
    x: Problem
    processors: int

    def machine(self, *, seed: int = 0, record: bool = False) -> Machine:
        x, memory = self.x, new_memory()
        (b, s_q, h_q, _), s_kv, topk = x.q.shape, x.k.shape[1], x.indices.shape[2]
        addresses = {name: memory.add(name, getattr(x, name)) for name in ("q", "k", "lse", "indices")}
        addresses["p"] = memory.add("p", None, x.indices.nbytes)
        shape = {"b": b, "s_q": s_q, "h_q": h_q, "s_kv": s_kv, "topk": topk}
        plan = native.plan_probabilities(shape, x.scale, processors=self.processors, addresses=addresses)
        return machine(self.kernel, plan, memory, seed=seed, record=record)

    def result(self, ran: Machine) -> Array:
        found = ran.memory.named("p")
        return found.bytes[: found.size].view(np.float32).reshape(self.x.indices.shape)

    def judge(self, ran: Machine) -> None:
        judge(self.x, self.result(ran))


def run(
    variant: Probabilities,
    x: Problem,
    *,
    processors: int = 2,
    seed: int = 0,
    edit: Callable[[str], str] = lambda text: text,
) -> Array:
    kernel = Kernel.of(variant)
    call = Call(replace(kernel, ptx=edit(kernel.ptx)), x, processors)
    scheduler.run(ran := call.machine(seed=seed))
    return call.result(ran)


def judge(x: Problem, got: Array) -> None:
    """Raises Wrong unless every probability is right."""
    want = x.probabilities()
    wrong = ~(np.abs(got - want) <= TOLERANCE * np.maximum(np.abs(want), want.max()))
    if wrong.any():
        n, i, j = (int(a) for a in np.argwhere(wrong)[0])
        raise Wrong(
            f"{int(wrong.sum())} of {wrong.size} probabilities are wrong, first that of query {i} of batch entry {n} "
            f"at place {j}, entry {x.indices[n, i, j]}: {got[n, i, j]:.6g}, wanted {want[n, i, j]:.6g}"
        )
