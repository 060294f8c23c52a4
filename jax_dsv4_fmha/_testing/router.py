"""Cases of a router after its product: the kernel and the definition against float64 in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Implementation
from .._ops.route import route
from .case import Case, Judgement, judgement

SCALE, TEMPERATURE = 2.5, 0.75
UNIT = float(np.float32(1 / TEMPERATURE))
OF_WEIGHTS, OF_SUMS = 1e-5, 3e-6
"""how far a weight may be off, and sums that change places in the choice"""

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Logits of tokens, and what says which experts they get."""

    logits: Numbers  # float32 [tokens, parts, e]
    bias: Numbers  # float32 [e]
    chosen: int
    table: Numbers | None = None  # int32 [vocabulary, chosen]
    tokens: Numbers | None = None  # int32 [tokens]
    is_sigmoid: bool = False

    @staticmethod
    def of(
        tokens: int, e: int = 256, chosen: int = 6, *, parts: int = 3, vocabulary: int = 0, is_sigmoid: bool = False
    ) -> Problem:
        """Parts are as of a gate in three numbers of bfloat16: each is 2^-8 of the one before it."""
        rng = np.random.default_rng(0)
        sizes = 2.0 ** (-8 * np.arange(parts))
        logits = (2 * rng.standard_normal((tokens, parts, e)) * sizes[:, None]).astype(np.float32)
        bias = (rng.standard_normal(e) / 4).astype(np.float32)
        made = Problem(logits, bias, chosen, is_sigmoid=is_sigmoid)
        if not vocabulary:
            return made
        table = rng.integers(0, e, (vocabulary, chosen), np.int32)
        return replace(made, table=table, tokens=rng.integers(0, vocabulary, tokens, np.int32))

    @property
    def score(self) -> str:
        return "sigmoid" if self.is_sigmoid else "sqrtsoftplus"

    def of_rows(self, rows: Any) -> Problem:
        """The same for some of the tokens."""
        return replace(self, logits=self.logits[rows], tokens=None if self.tokens is None else self.tokens[rows])

    def scores(self) -> Numbers:
        """float64 [tokens, e]"""
        logits = self.logits.astype(np.float64).sum(1) / TEMPERATURE
        made: Numbers = 1 / (1 + np.exp(-logits)) if self.is_sigmoid else np.sqrt(np.logaddexp(logits, 0))
        return made

    def weights_of(self, chosen: Numbers) -> Numbers:
        """float64 [tokens, chosen]: the weights of these experts; NaN where one does not exist."""
        e = self.bias.size
        exists = (chosen >= 0) & (chosen < e)
        scores = np.where(exists, np.take_along_axis(self.scores(), np.where(exists, chosen, 0), -1), np.nan)
        made: Numbers = SCALE * scores / (scores.sum(-1, keepdims=True) + 1e-20)
        return made


@np.errstate(invalid="ignore", over="ignore")
def complaints(x: Problem, weights: Numbers, chosen: Numbers) -> list[str]:
    """Nothing if each token has the experts of the greatest sums, in their order, or the table's, and their weights."""
    found = _of_table(x, chosen) if x.table is not None else _of_choice(x, chosen)
    if found:
        return found
    want = x.weights_of(chosen)
    wrong = ~np.isclose(weights, want, rtol=OF_WEIGHTS, atol=1e-12, equal_nan=True)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        got = f"{float(weights[at]):.8g}, wanted {float(want[at]):.8g}"
        found.append(f"{int(wrong.sum())} of {wrong.size} weights are wrong, first {at}: {got}")
    return found


def _of_table(x: Problem, chosen: Numbers) -> list[str]:
    assert x.table is not None and x.tokens is not None
    want = x.table[np.clip(x.tokens, 0, len(x.table) - 1)]
    if np.array_equal(chosen, want):
        return []
    row = int(np.flatnonzero((chosen != want).any(-1))[0])
    return [f"experts of token {row} are {chosen[row].tolist()}, wanted {want[row].tolist()}"]


def _of_choice(x: Problem, chosen: Numbers) -> list[str]:
    if (chosen < 0).any() or (chosen >= x.bias.size).any():
        return ["experts are chosen that do not exist"]
    sums = x.scores() + x.bias
    keys = np.where(np.isnan(sums), np.finfo(np.float64).max, sums)  # which no sum is, but infinite ones are less
    keys = np.where(np.isposinf(sums), np.finfo(np.float64).max / 2, keys)
    order = np.argsort(-keys, -1, kind="stable")[:, : x.chosen]
    got, want = (np.take_along_axis(keys, of, -1) for of in (chosen, order))
    right = np.isclose(got, want, rtol=OF_SUMS, atol=OF_SUMS).all(-1)
    right &= (np.diff(np.sort(chosen, -1), axis=-1) > 0).all(-1)  # none is chosen twice
    if right.all():
        return []
    row = int(np.flatnonzero(~right)[0])
    return [f"experts of token {row} are {chosen[row].tolist()}, wanted {order[row].tolist()}, by their sums"]


@dataclass(frozen=True, kw_only=True)
class RouteCase(Case):
    """A router to `topk` of `s_c` experts; features: "of_table", and scores by a "sigmoid"."""

    op = "route"

    s_c: int = 256
    topk: int = 6
    features: tuple[str, ...] = ()

    @property
    def work(self) -> int:
        return self.b * self.s_q * self.s_c

    def judge(self, implementation: Implementation) -> Judgement:
        return judgement(self.complaints(implementation), "experts and weights of each token within limits")

    def complaints(self, implementation: Implementation) -> list[str]:
        how: dict[str, Any] = {
            "vocabulary": 1000 * ("of_table" in self.features),
            "is_sigmoid": "sigmoid" in self.features,
        }
        x = Problem.of(self.b * self.s_q, self.s_c, self.topk, **how)
        run = jax.jit(lambda logits: routed(x, logits, implementation=implementation))
        logits = jnp.asarray(x.logits).reshape(self.b, -1, *x.logits.shape[1:])
        got, again = (tuple(np.asarray(a).reshape(-1, x.chosen) for a in run(logits)) for _ in range(2))
        same = all(a.tobytes() == b.tobytes() for a, b in zip(got, again, strict=True))
        return complaints(x, *got) + ([] if same else ["other bits in the second run"])


def routed(x: Problem, logits: jax.Array | None = None, **how: Any) -> tuple[jax.Array, jax.Array]:
    """The op's results, of these logits `[b, s, parts, e]`, or of all tokens as one sequence."""
    logits = jnp.asarray(x.logits)[None] if logits is None else logits
    how |= {"score": x.score, "temperature": TEMPERATURE, "scale": SCALE}
    if x.table is None:
        return route(logits, jnp.asarray(x.bias), top_k=x.chosen, **how)
    return route(logits, table=jnp.asarray(x.table), tokens=jnp.asarray(x.tokens).reshape(logits.shape[:2]), **how)
