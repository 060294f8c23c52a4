"""A router's cases: the kernel, and the definition in float32, beside NumPy in float64."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Implementation
from .._ops.moe_router import moe_router
from .case import Case, Judgement, judgement

_LIMIT = 1e-5
"""of a weight, and of two scores that may change places in the choice"""
_SCALE, _TEMPERATURE = 1.5, 0.75

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class RouterCase(Case):
    """A router of k numbers a token, to topk of s_c experts; features: "given" experts, scores by a "sigmoid"."""

    op = "moe_router"

    k: int
    s_c: int
    topk: int
    features: tuple[str, ...] = ()

    @property
    def work(self) -> int:
        return self.b * self.s_q * self.k * self.s_c

    def judge(self, implementation: Implementation) -> Judgement:
        """The results of an implementation, and of a second run."""
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.standard_normal((self.b, self.s_q, self.k)), self.dtype)
        gate = (rng.standard_normal((self.k, self.s_c)) * 2 * self.k**-0.5).astype(np.float32)
        bias = (rng.standard_normal(self.s_c) / 4).astype(np.float32)
        given = rng.integers(0, self.s_c, (self.b, self.s_q, self.topk), np.int32)
        of_choice: dict[str, Any] = {"bias": bias, "top_k": self.topk}
        if is_given := "given" in self.features:
            of_choice = {"given": given}
        is_sigmoid = "sigmoid" in self.features
        of_choice["score"] = "sigmoid" if is_sigmoid else "sqrtsoftplus"

        @jax.jit
        def run(x: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
            how: dict[str, Any] = {"temperature": _TEMPERATURE, "scale": _SCALE}
            return moe_router(x, gate, **of_choice, **how, implementation=implementation)

        (weights, chosen), again = (tuple(map(np.asarray, run(x, gate))) for _ in range(2))

        logits = np.asarray(x, np.float64) @ gate.astype(np.float64) / _TEMPERATURE
        scores = 1 / (1 + np.exp(-logits)) if is_sigmoid else np.sqrt(np.logaddexp(logits, 0))
        complaints = [] if is_given else _of_choice(scores + bias, chosen)
        if not complaints:
            wanted = np.take_along_axis(scores, chosen, -1)
            wanted *= _SCALE / wanted.sum(-1, keepdims=True)
            off = float((np.abs(weights - wanted) / wanted).max())
            complaints += [f"weights off by {off:.1e}"] if not off <= _LIMIT else []
        if any(a.tobytes() != b.tobytes() for a, b in zip((weights, chosen), again, strict=True)):
            complaints.append("other bits in the second run")
        return judgement(complaints, "experts and weights within limits")


def _of_choice(sums: Numbers, chosen: Numbers) -> list[str]:
    """The errors of a choice by these sums of scores and bias."""
    if (chosen < 0).any() or (chosen >= sums.shape[-1]).any():
        return ["experts that do not exist"]
    if (np.diff(np.sort(chosen, -1), axis=-1) == 0).any():
        return ["experts that are chosen twice"]
    best = -np.sort(-sums, -1)[..., : chosen.shape[-1]]
    off = float(np.abs(np.take_along_axis(sums, chosen, -1) - best).max())
    return [f"scores of chosen experts off by {off:.1e}"] if not off <= _LIMIT else []
