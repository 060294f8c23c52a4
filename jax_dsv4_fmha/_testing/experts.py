"""Cases of a layer's experts: the kernels and the definition against float64 in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import PackedExperts, fused_moe, pack_experts
from .._check import Implementation
from .._definitions.experts import GROUP
from .._definitions.slabs import BLOCK
from .case import Case, Judgement, judgement

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits; the fourth is the sign
LIMIT = 3.0  # that some gates reach
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
_LIMITS: dict[Implementation, float] = {"reference": 2**-7, "cubin": 2**-6}  # of the greatest number

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Tokens, the experts that they chose, and matrices of these."""

    x: Numbers  # bfloat16 [tokens, k]
    chosen: Numbers  # int32 [tokens, n_chosen]; some of no expert here
    weights: Numbers  # float32 [tokens, n_chosen]
    codes13: Numbers  # of e2m1 or e4m3, one a number: [e, 2, inner, k]
    scales13: Numbers  # as ue8m0 has them, [e, 2, inner, k / GROUP] or [e, 2, inner / BLOCK, k / BLOCK]; or in float32
    codes2: Numbers  # [e, k, inner]
    scales2: Numbers

    @staticmethod
    def of(
        rows: list[int], k: int = 256, inner: int = 256, n_chosen: int = 2, scale: int = 122, fp8: bool = False
    ) -> Problem:
        """Makes a problem of experts with so many rows each; one more choice is of another device. In FP8 scales are
        2^-6 times those of MXFP4, since codes stand for larger numbers.
        """
        rng, e = np.random.default_rng(0), len(rows)
        flat = np.concatenate([np.repeat(np.arange(e), rows), [e]])
        flat = np.concatenate([flat, np.full(-len(flat) % n_chosen, -1)])
        chosen = rng.permutation(flat).reshape(-1, n_chosen).astype(np.int32)

        def matrix(*shape: int) -> tuple[Numbers, Numbers]:
            if fp8:
                *others, n, columns = shape
                blocks = rng.integers(scale - 8, scale - 3, (*others, n // BLOCK, columns // BLOCK), np.uint8)
                codes = rng.integers(0, 254, shape, np.uint8)
                return codes + (codes >= 0x7F), blocks  # 0x7f and 0xff are not numbers
            scales = rng.integers(scale - 2, scale + 3, (*shape[:-1], shape[-1] // GROUP), np.uint8)
            return rng.integers(0, 16, shape, np.uint8), scales

        x = rng.standard_normal((len(chosen), k)).astype(BF16)
        weights = rng.uniform(0.25, 2, chosen.shape).astype(np.float32)
        return Problem(x, chosen, weights, *matrix(e, 2, inner, k), *matrix(e, k, inner))

    def with_float32_scales(self) -> Problem:
        """The same in FP8, with scales that are up to twice as large and no powers of two."""
        rng = np.random.default_rng(1)

        def changed(scales: Numbers) -> Numbers:
            return np.ldexp(rng.uniform(1, 2, scales.shape), scales.astype(int) - 127).astype(np.float32)

        return replace(self, scales13=changed(self.scales13), scales2=changed(self.scales2))

    @property
    def packed(self) -> tuple[PackedExperts, PackedExperts]:
        def packed(codes: Numbers, scales: Numbers) -> PackedExperts:
            as_checkpoints = codes.view(E4M3) if in_fp8(codes, scales) else codes[..., ::2] | codes[..., 1::2] << 4
            return pack_experts(jnp.asarray(as_checkpoints), jnp.asarray(scales))

        return packed(self.codes13, self.scales13), packed(self.codes2, self.scales2)

    @property
    def unpacked(self) -> tuple[Any, Any]:
        """The same matrices in bfloat16, which has all their numbers: `[e, 2, inner, k]` and `[e, k, inner]`."""
        pairs = ((self.codes13, self.scales13), (self.codes2, self.scales2))
        w13, w2 = (jnp.asarray(numbers(*pair).astype(BF16)) for pair in pairs)
        return w13, w2

    def rows(self) -> dict[int, list[int]]:
        """The choices of each expert, by their numbers."""
        flat = self.chosen.ravel()
        return {e: np.flatnonzero(flat == e).tolist() for e in range(len(self.codes2))}

    def inner_of(self, choice: int) -> Numbers:
        """float64: the channels inside of a choice's expert."""
        e, token = self.chosen.ravel()[choice], choice // self.chosen.shape[1]
        gate, up = numbers(self.codes13[e], self.scales13[e]) @ self.x[token].astype(np.float64)
        gate = np.minimum(gate, LIMIT)
        made: Numbers = gate * (1 + np.tanh(gate / 2)) / 2 * np.clip(up, -LIMIT, LIMIT) * self.weights.ravel()[choice]
        return made


def numbers(codes: Numbers, scales: Numbers) -> Numbers:
    """float64: what codes and scales stand for. In FP8 scales are rounded to bfloat16, and products with them again."""
    if scales.dtype == np.float32:
        powers = scales.astype(BF16).astype(np.float64)
    else:
        powers = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    if in_fp8(codes, scales):
        whole = np.repeat(np.repeat(powers, BLOCK, -2), BLOCK, -1)
        of_blocks: Numbers = (codes.view(E4M3).astype(np.float64) * whole).astype(BF16).astype(np.float64)
        return of_blocks
    made: Numbers = np.array((*E2M1, *(-v for v in E2M1)))[codes] * np.repeat(powers, GROUP, -1)
    return made


def in_fp8(codes: Numbers, scales: Numbers) -> bool:
    """True where a scale is of a block, and not of a row's numbers."""
    return scales.shape[-2] != codes.shape[-2]


@dataclass(frozen=True, kw_only=True)
class ExpertsCase(Case):
    """A layer of `s_c` experts, for about `s_q` tokens of `d` channels that chose `topk` each. One in four has no
    token, and one choice is of another device.
    """

    op = "fused_moe"

    d: int = 256
    s_c: int = 4
    topk: int = 2
    features: tuple[str, ...] = ()

    @property
    def work(self) -> int:
        return self.s_q * self.topk * 3 * self.d * self.d

    def problem(self) -> Problem:
        """The rows of an expert are twice those of the one before, as far as there are rows."""
        rows, left = [], self.s_q * self.topk
        for e in range(self.s_c):
            rows.append(0 if e % 4 == 1 else left if e == self.s_c - 1 else min(left, 2**e))
            left -= rows[-1]
        x = Problem.of(rows, k=self.d, inner=self.d, n_chosen=self.topk, fp8="e4m3_weights" in self.features)
        return x.with_float32_scales() if "float32_scales" in self.features else x

    def judge(self, implementation: Implementation) -> Judgement:
        return judgement(self.complaints(implementation), "every token's result within limits")

    def complaints(self, implementation: Implementation) -> list[str]:
        x = self.problem()
        run = jax.jit(lambda *given: fused_moe(*given, limit=LIMIT, implementation=implementation))
        got, again = (np.asarray(run(*operands(x))) for _ in range(2))
        far = off(got, wanted(x))
        found = [] if far <= _LIMITS[implementation] else [f"results are off by {far:.1e}"]
        return found + ([] if got.tobytes() == again.tobytes() else ["other bits in the second run"])


def operands(x: Problem, dtype: Any = jnp.bfloat16, is_packed: bool = True) -> tuple[Any, ...]:
    """The op's operands, with the tokens as one sequence."""
    matrices = x.packed if is_packed else x.unpacked
    return jnp.asarray(x.x, dtype)[None], *matrices, jnp.asarray(x.chosen)[None], jnp.asarray(x.weights)[None]


def wanted(x: Problem, round_inner: bool = True) -> Numbers:
    """float64 [tokens, k], with the channels inside of experts rounded as they are in memory."""
    y, n_chosen = np.zeros(x.x.shape), x.chosen.shape[1]
    for e, choices in x.rows().items():
        for choice in choices:
            inner = x.inner_of(choice)
            inner = inner.astype(BF16).astype(np.float64) if round_inner else inner
            y[choice // n_chosen] += numbers(x.codes2[e], x.scales2[e]) @ inner
    return y


def off(y: Any, want: Numbers) -> float:
    """The greatest error of results, relative to the greatest number of all tokens."""
    return float(np.abs(np.asarray(y[0], np.float64) - want).max() / np.abs(want).max())
