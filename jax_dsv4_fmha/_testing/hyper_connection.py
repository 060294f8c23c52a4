"""Cases of hyper-connections: the kernel and the definition against float64 in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import hyper_connection
from .._check import Implementation
from .._definitions.hyper_connection import NUMBERS, STREAMS
from .case import Case, Judgement, judgement

BF16 = ml_dtypes.bfloat16
EPS, HC_EPS, ITERATIONS = 1e-6, 1e-5, 6
ROUNDED = {"new_x": 2**-8, "z": 2**-7}  # the latter twice, before its norm and after it
RESULTS = ("new_x", "z", "new_pre", "new_post", "new_mix")

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Streams of tokens, what the former sublayer made, and the parameters of what comes next."""

    x: Numbers  # bfloat16 [tokens, STREAMS, hidden]
    y: Numbers  # bfloat16 [tokens, hidden]
    post: Numbers  # float32 [tokens, STREAMS]
    mix: Numbers  # float32 [tokens, STREAMS, STREAMS]
    taken: Numbers  # float32 [tokens, STREAMS], or [tokens, 0]
    fn: Numbers  # float32 [NUMBERS, STREAMS, hidden]
    scale: Numbers  # float32 [3]
    base: Numbers  # float32 [NUMBERS]
    norm: Numbers  # float32 [hidden]

    @staticmethod
    def of(tokens: int, hidden: int, is_taken: bool = False, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)

        def normal(*shape: int, by: float = 1.0) -> Numbers:
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

    def mixed(self) -> Numbers:
        """float64: the streams after the former sublayer, not yet rounded."""
        x, y, post, mix = (a.astype(np.float64) for a in (self.x, self.y, self.post, self.mix))
        made: Numbers = np.einsum("tij,tih->tjh", mix, x) + post[..., None] * y[:, None]
        return made

    def after(self, x: Numbers) -> dict[str, Numbers]:
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


def sigmoid(x: Numbers) -> Numbers:
    made: Numbers = (1 + np.tanh(x / 2)) / 2
    return made


def complaints(x: Problem, got: dict[str, Numbers]) -> list[str]:
    """Nothing if streams and z are right but for their rounding, and the rest to float32's precision."""
    found = []
    for name, right in {"new_x": x.mixed(), **x.after(got["new_x"])}.items():
        scale = np.sqrt(np.mean(right * right, -1, keepdims=True))
        most = ROUNDED.get(name, 2**-18) * np.maximum(np.abs(right), scale)
        wrong = ~(np.abs(got[name].astype(np.float64) - right) <= most)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            found.append(
                f"{name}: {int(wrong.sum())} of {wrong.size} numbers are wrong, first {first}: "
                f"{float(got[name][first]):.7g}, wanted {float(right[first]):.7g}"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class HyperConnectionCase(Case):
    """All that stands between two sublayers, for `s_q` tokens of `d` channels."""

    op = "hyper_connection"

    d: int = 4096
    features: tuple[str, ...] = ()
    """("taken",): z takes in the streams by numbers that are given"""

    @property
    def work(self) -> int:
        return self.b * self.s_q * NUMBERS * STREAMS * self.d

    def judge(self, implementation: Implementation) -> Judgement:
        return judgement(self.complaints(implementation), "streams, z and the numbers of each token within limits")

    def complaints(self, implementation: Implementation) -> list[str]:
        x = Problem.of(self.b * self.s_q, self.d, "taken" in self.features)
        given, taken = operands(x, self.b)

        def run(*given: jax.Array) -> tuple[jax.Array, ...]:
            how: dict[str, Any] = {"iterations": ITERATIONS, "eps": EPS, "hc_eps": HC_EPS, "taken": taken}
            return hyper_connection(*given, **how, implementation=implementation)

        got, again = (results(jax.jit(run)(*given)) for _ in range(2))
        same = all(got[name].tobytes() == again[name].tobytes() for name in RESULTS)
        return complaints(x, got) + ([] if same else ["other bits in the second run"])


def operands(x: Problem, b: int = 1) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The op's operands, and `taken`, with the tokens as b sequences."""
    given = (jnp.asarray(a).reshape(b, -1, *a.shape[1:]) for a in (x.x, x.y, x.post, x.mix))
    taken = jnp.asarray(x.taken).reshape(b, -1, STREAMS) if x.taken.shape[1] else None
    return (*given, jnp.asarray(x.fn).reshape(NUMBERS, -1), *map(jnp.asarray, (x.scale, x.base, x.norm))), taken


def results(found: tuple[jax.Array, ...]) -> dict[str, Numbers]:
    """The op's results by name, a row for each token."""
    return {name: np.asarray(a).reshape(-1, *a.shape[2:]) for name, a in zip(RESULTS, found, strict=True)}
