"""Hyper-connections between two sublayers, by the library's plan, and what they are in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kernels.abi import HyperConnection

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

BF16 = ml_dtypes.bfloat16
STREAMS, NUMBERS = 4, 24
PROCESSORS = 8  # of one cluster, which takes all tiles
EPS, HC_EPS, ITERATIONS = 1e-6, 1e-5, 6
ROUNDED = {"new_x": 2**-8, "z": 2**-7}  # the latter twice, before its norm and after it
RESULTS = ("new_x", "z", "new_pre", "new_post", "new_mix")


@dataclass(frozen=True)
class Problem:
    """Streams of tokens, what the former sublayer made, and the parameters of what comes next."""

    x: Array  # bfloat16 [tokens, STREAMS, hidden]
    y: Array  # bfloat16 [tokens, hidden]
    post: Array  # float32 [tokens, STREAMS]
    mix: Array  # float32 [tokens, STREAMS, STREAMS]
    taken: Array  # float32 [tokens, STREAMS], or [tokens, 0]
    fn: Array  # float32 [NUMBERS, STREAMS, hidden]
    scale: Array  # float32 [3]
    base: Array  # float32 [NUMBERS]
    norm: Array  # float32 [hidden]

    @staticmethod
    def of(tokens: int, hidden: int, is_taken: bool = False, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)

        def normal(*shape: int, by: float = 1.0) -> Array:
            return (rng.standard_normal(shape) * by).astype(np.float32)

        return Problem(
            normal(tokens, STREAMS, hidden).astype(BF16),
            normal(tokens, hidden).astype(BF16),
            rng.uniform(0, 2, (tokens, STREAMS)).astype(np.float32),
            rng.dirichlet(np.ones(STREAMS), (tokens, STREAMS)).astype(np.float32),
            rng.uniform(0, 1, (tokens, STREAMS if is_taken else 0)).astype(np.float32),
            normal(NUMBERS, STREAMS, hidden, by=(STREAMS * hidden) ** -0.5),
            rng.uniform(0.5, 2, 3).astype(np.float32),
            normal(NUMBERS),
            rng.uniform(0.5, 2, hidden).astype(np.float32),
        )

    def mixed(self) -> Array:
        """float64: the streams after the former sublayer, not yet rounded."""
        x, y, post, mix = (a.astype(np.float64) for a in (self.x, self.y, self.post, self.mix))
        made: Array = np.einsum("tij,tih->tjh", mix, x) + post[..., None] * y[:, None]
        return made

    def after(self, x: Array) -> dict[str, Array]:
        """float64: what follows from the streams x, as they were rounded."""
        x = x.astype(np.float64)
        flat = x.reshape(len(x), -1)
        factor = 1 / np.sqrt(np.mean(flat * flat, -1, keepdims=True) + EPS)
        numbers = flat @ self.fn.reshape(NUMBERS, -1).astype(np.float64).T * factor
        scales = np.repeat(self.scale.astype(np.float64), (STREAMS, STREAMS, STREAMS**2))
        numbers = numbers * scales + self.base
        pre, post, mix = np.split(numbers, (STREAMS, 2 * STREAMS), -1)
        pre, post = sigmoid(pre) + HC_EPS, 2 * sigmoid(post)
        mix = mix.reshape(-1, STREAMS, STREAMS)
        mix = np.exp(mix - mix.max(-1, keepdims=True))
        mix = mix / mix.sum(-1, keepdims=True) + HC_EPS
        mix = mix / (mix.sum(-2, keepdims=True) + HC_EPS)
        for _ in range(ITERATIONS - 1):
            for axis in (-1, -2):
                mix = mix / (mix.sum(axis, keepdims=True) + HC_EPS)
        takes = self.taken.astype(np.float64) if self.taken.shape[1] else pre
        joined = np.einsum("tj,tjh->th", takes, x)
        z = joined / np.sqrt(np.mean(joined * joined, -1, keepdims=True) + EPS) * self.norm
        return {"z": z, "new_pre": pre, "new_post": post, "new_mix": mix}


def sigmoid(x: Array) -> Array:
    made: Array = (1 + np.tanh(x / 2)) / 2
    return made


def launched(
    variant: HyperConnection, x: Problem, *, seed: int = 0, edit: Callable[[str], str] = str, **edits: Edit
) -> Machine:
    """The kernel, about to run; the edits plant faults, in PTX and in parameters."""
    kernel, memory = Kernel.of(variant), new_memory()
    tokens, hidden = x.y.shape
    given = ("x", "y", "post", "mix", "taken", "fn", "scale", "base", "norm")
    at = {name: memory.add(name, getattr(x, name)) for name in given}
    sizes = zip(RESULTS, (2 * STREAMS * hidden, 2 * hidden, 4 * STREAMS, 4 * STREAMS, 4 * STREAMS**2), strict=True)
    at |= {name: memory.add(name, None, size * tokens) for name, size in sizes}
    shape = {"tokens": tokens, "hidden": hidden, "taken": x.taken.shape[1], "iterations": ITERATIONS}
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    plan = native.plan_hyper_connection(shape, EPS, HC_EPS, **tiles, processors=PROCESSORS, addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def results(variant: HyperConnection, x: Problem, **how: Any) -> dict[str, Array]:
    of_launch = launched(variant, x, **how)
    scheduler.run(of_launch)
    tokens, hidden = x.y.shape
    shapes = ((STREAMS, hidden), (hidden,), (STREAMS,), (STREAMS,), (STREAMS, STREAMS))
    found = {}
    for name, shape in zip(RESULTS, shapes, strict=True):
        array, dtype = of_launch.memory.named(name), BF16 if name in ("new_x", "z") else np.float32
        found[name] = array.bytes[: array.size].view(dtype).reshape(tokens, *shape)
    return found


def judge(x: Problem, got: dict[str, Array]) -> None:
    """Raises Wrong unless streams and z are right but for their rounding, and the rest to float32's precision."""
    want = {"new_x": x.mixed(), **x.after(got["new_x"])}
    for name, right in want.items():
        scale = np.sqrt(np.mean(right * right, -1, keepdims=True))
        most = ROUNDED.get(name, 2**-18) * np.maximum(np.abs(right), scale)
        wrong = ~(np.abs(got[name].astype(np.float64) - right) <= most)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise Wrong(
                f"{name}: {int(wrong.sum())} of {wrong.size} numbers are wrong, first {first}: "
                f"{float(got[name][first]):.7g}, wanted {float(right[first]):.7g}"
            )
