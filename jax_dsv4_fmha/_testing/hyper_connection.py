"""Cases of hyper-connections, and of their gradient: the kernels and the definition against float64 in NumPy."""

from __future__ import annotations

from collections.abc import Iterable
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

PARTS = (STREAMS, STREAMS, STREAMS**2)
"""of a token's numbers: those of pre, of post, and of the mix"""
BF16 = ml_dtypes.bfloat16
EPS, HC_EPS, ITERATIONS = 1e-6, 1e-5, 6
ROUNDED = {"new_x": 2**-8, "z": 2**-7}  # the latter twice, before its norm and after it
OF_GRADIENTS = {"x": 2**-8, "y": 2**-8}  # which are rounded
RESULTS = ("new_x", "z", "new_pre", "new_post", "new_mix")
GRADIENTS = ("x", "y", "post", "mix", "taken", "fn", "scale", "base", "norm")

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

    def streams(self) -> Numbers:
        """The same as a kernel makes and rounds them."""
        past = ((self.mix[:, i, :, None], self.x[:, i, None]) for i in range(STREAMS))
        made = in_float32([(self.post[..., None], self.y[:, None]), *past])
        return made.astype(self.x.dtype)

    def after(self, x: Numbers) -> dict[str, Numbers]:
        """float64: what follows from the streams x, as they were rounded."""
        x = x.astype(np.float64)
        flat = x.reshape(len(x), -1)
        factor = 1 / np.sqrt(np.mean(flat * flat, -1, keepdims=True) + EPS)
        numbers = flat @ self.fn.reshape(NUMBERS, -1).astype(np.float64).T * factor
        scales = np.repeat(self.scale.astype(np.float64), PARTS)
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

    def sums(self, x: Numbers) -> tuple[Numbers, Numbers]:
        """float64 `[tokens, 24]` and `[tokens]`: fn times the streams x, as rounded, and sums of their squares."""
        flat = x.astype(np.float64).reshape(len(x), -1)
        return flat @ self.fn.reshape(NUMBERS, -1).astype(np.float64).T, (flat * flat).sum(-1)

    def cotangents(self, seed: int = 1) -> tuple[Numbers, ...]:
        """Cotangents of the results, in their order and like them. z's are 0 where the streams as one lie so near the
        middle of two numbers that sums in another order may round them to the other one.
        """
        rng = np.random.default_rng(seed)
        like = (self.x, self.y, self.post, self.post, self.mix)
        made = tuple(np.asarray(rng.standard_normal(a.shape), np.float32).astype(a.dtype) for a in like)
        streams = self.streams()
        u = self.joined(self.takes(streams), streams)
        made[1][np.equal(*((u * by).astype(self.x.dtype) for by in (1 - 2**-16, 1 + 2**-16))) == 0] = 0
        return made

    def takes(self, x: Numbers) -> Numbers:
        """float64: how z takes in the streams x."""
        if self.taken.shape[1]:
            return self.taken.astype(np.float64)
        totals, squares = self.sums(x)
        logits = totals / np.sqrt(squares[:, None] / self.fn[0].size + EPS) * np.repeat(self.scale, PARTS) + self.base
        return sigmoid(logits[:, :STREAMS]) + HC_EPS

    def joined(self, takes: Numbers, x: Numbers) -> Numbers:
        """float64: the streams x as one, as a kernel sums them, not yet rounded."""
        return in_float32((takes[:, i, None], x[:, i].astype(np.float64)) for i in range(STREAMS)).astype(np.float64)

    def gradients(self, x: Numbers, cotangents: tuple[Numbers, ...]) -> dict[str, Numbers]:
        """float64: the gradients, by the operands' names, at the streams x that were made, and rounded."""
        x = x.astype(np.float64)
        dx, dz, dpre, dpost, dmix = (a.astype(np.float64) for a in cotangents)
        fn, norm = self.fn.astype(np.float64), self.norm.astype(np.float64)
        (totals, squares), n = self.sums(x), fn[0].size
        inverse = 1 / np.sqrt(squares[:, None] / n + EPS)
        rates = np.repeat(self.scale.astype(np.float64), PARTS)
        logits = totals * inverse * rates + self.base
        of_pre, of_post, of_mix = np.split(logits, (STREAMS, 2 * STREAMS), -1)
        takes = self.takes(x)
        u = self.joined(takes, x).astype(self.x.dtype).astype(np.float64)
        of_u = 1 / np.sqrt(np.mean(u * u, -1, keepdims=True) + EPS)
        g = dz * norm
        du = of_u * g - of_u**3 * np.mean(u * g, -1, keepdims=True) * u
        dtakes = np.einsum("th,tjh->tj", du, x)
        if not self.taken.shape[1]:
            dpre = dpre + dtakes
        of_sigmoids = [d * sigmoid(a) * (1 - sigmoid(a)) for d, a in ((dpre, of_pre), (2 * dpost, of_post))]
        dlogits = np.concatenate([*of_sigmoids, walked_back(of_mix, dmix)], -1)
        dtotals = dlogits * rates * inverse
        shrinking = -(dtotals * totals).sum(-1)[:, None, None] * inverse[..., None] ** 2 / n
        whole = dx + takes[..., None] * du[:, None] + np.einsum("tc,cjh->tjh", dtotals, fn) + shrinking * x
        before, y = self.x.astype(np.float64), self.y.astype(np.float64)
        of_rates = (dlogits * totals * inverse).sum(0)
        return {
            "x": np.einsum("tij,tjh->tih", self.mix.astype(np.float64), whole),
            "y": np.einsum("tj,tjh->th", self.post.astype(np.float64), whole),
            "post": np.einsum("th,tjh->tj", y, whole),
            "mix": np.einsum("tih,tjh->tij", before, whole),
            "taken": dtakes[:, : self.taken.shape[1]],
            "fn": np.einsum("tc,tjh->cjh", dtotals, x),
            "scale": np.array([part.sum() for part in np.split(of_rates, np.cumsum(PARTS)[:-1])]),
            "base": dlogits.sum(0),
            "norm": (dz * u * of_u).sum(0),
        }


def in_float32(products: Iterable[tuple[Numbers, Numbers]]) -> Numbers:
    """The sum of products as a kernel makes it: in order, with one rounding to float32 for each of them."""
    total: Numbers = np.zeros(())
    for a, b in products:
        total = (total + a.astype(np.float32).astype(np.float64) * b.astype(np.float64)).astype(np.float32)
    return total


def walked_back(logits: Numbers, dmix: Numbers) -> Numbers:
    """float64 `[tokens, 16]`: the gradient of a mix's logits."""
    logits = logits.reshape(-1, STREAMS, STREAMS)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    entries, kept = shares + HC_EPS, []
    for axis in (-2, *(-1, -2) * (ITERATIONS - 1)):
        kept.append((entries, entries.sum(axis, keepdims=True) + HC_EPS, axis))
        entries = entries / kept[-1][1]
    for entries, total, axis in reversed(kept):
        dmix = dmix / total - (dmix * entries).sum(axis, keepdims=True) / total**2
    made: Numbers = shares * (dmix - (dmix * shares).sum(-1, keepdims=True))
    return made.reshape(-1, STREAMS**2)


def sigmoid(x: Numbers) -> Numbers:
    made: Numbers = (1 + np.tanh(x / 2)) / 2
    return made


def complaints(x: Problem, got: dict[str, Numbers]) -> list[str]:
    """Nothing if streams and z are right but for their rounding, and the rest to float32's precision."""
    found = []
    for name, right in {"new_x": x.mixed(), **x.after(got["new_x"])}.items():
        scale = np.sqrt(np.mean(right * right, -1, keepdims=True))
        found += complaint(name, got[name], right, ROUNDED.get(name, 2**-18) * np.maximum(np.abs(right), scale))
    return found


def complaints_of_gradients(
    x: Problem, new_x: Numbers, cotangents: tuple[Numbers, ...], got: dict[str, Numbers], most: float = 2**-15
) -> list[str]:
    """Nothing if the gradients of x and y are right but for their rounding, and the rest by `most` of their size.

    That is float32's precision. Of many tokens sums in another order round a few numbers of the streams as one to the
    other side, which makes 2^-13 of it.
    """
    found = []
    for name, right in x.gradients(new_x, cotangents).items():
        scale = np.sqrt(np.mean(right * right)) if right.size else 0.0
        found += complaint(name, got[name], right, OF_GRADIENTS.get(name, most) * np.maximum(np.abs(right), scale))
    return found


def complaint(name: str, got: Numbers, right: Numbers, most: Numbers) -> list[str]:
    """A complaint if anything is further from right than `most`."""
    wrong = ~(np.abs(got.astype(np.float64) - right) <= most)
    if not wrong.any():
        return []
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return [
        f"{name}: {int(wrong.sum())} of {wrong.size} numbers are wrong, first {first}: "
        f"{float(got[first]):.7g}, wanted {float(right[first]):.7g}"
    ]


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
