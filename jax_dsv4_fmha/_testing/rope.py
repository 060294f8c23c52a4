"""RoPE's cases, alone and after a norm: kernels against jnp in float32, and that against float64 in NumPy."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Implementation
from .._dispatch.support import not_built
from .._host import library
from ..layers.rope import Rope, inverse_rope, rope, rope_hadamard, rope_of_normed
from .case import Case, Judgement, judgement

_ROPE, _EPS = Rope(64, 160_000, 16, 4096), 1e-3

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class RopeCase(Case):
    """A rotation, and the one back."""

    op = "rope"

    d: int = 64

    roundings: ClassVar[int] = 1

    @property
    def work(self) -> int:
        return self.b * self.s_q * self.h_q * self.d

    @property
    def kernel(self) -> dict[str, Any]:
        """The choices that the kernel must have, beside the dtype and the rotated dimensions."""
        return {}

    def results(self, position: jax.Array, x: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        return {"rope": rope(x, position, _ROPE), "inverse rope": inverse_rope(dy, position, _ROPE)}

    def results_float64(self, position: Numbers, x: Numbers, dy: Numbers) -> dict[str, Numbers]:
        return {"rope": _rotated(x, position, 1), "inverse rope": _rotated(dy, position, -1)}

    def judge(self, implementation: Implementation) -> Judgement:
        return judgement(self.complaints(implementation), "rotated numbers and gradients within limits")

    def complaints(self, implementation: Implementation) -> list[str]:
        """The errors of an implementation: kernels beside jnp in float32, jnp beside NumPy in float64."""
        rng = np.random.default_rng(0)
        shape = (self.b, self.s_q, self.h_q, self.d)
        x, dy = (jnp.asarray(3 * rng.standard_normal(shape), self.dtype) for _ in range(2))
        position = rng.integers(0, 5000, (self.b, self.s_q)).astype(np.int32)
        run = jax.jit(lambda x, dy: self.results(jnp.asarray(position), x, dy))
        exactly = run(*(z.astype(jnp.float32) for z in (x, dy)))
        if implementation == "reference":
            return _wrong(exactly, self.results_float64(position, *(np.asarray(z, np.float64) for z in (x, dy))), 1e-5)
        if not library.variants_for(self.op, dtype=self.dtype, dims=_ROPE.dims, **self.kernel):
            raise not_built(self.op, "x", x, "rows that a kernel is built for", (self.op,))
        got, again = run(x, dy), run(x, dy)
        same = all(np.array_equal(np.asarray(got[name]), np.asarray(again[name])) for name in got)
        wrong = _wrong(got, exactly, self.roundings * float(jnp.finfo(self.dtype).eps) / 2)
        return wrong + ([] if same else ["other bits in the second run"])


@dataclass(frozen=True, kw_only=True)
class NormRopeCase(RopeCase):
    """A rotation after a norm, and its gradient."""

    op = "norm_rope"

    @property
    def kernel(self) -> dict[str, Any]:
        return {"d": self.d}

    def results(self, position: jax.Array, x: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        y, vjp = jax.vjp(lambda x: rope_of_normed(x, position, _ROPE, _EPS), x)
        return {"rope of the norm": y, "gradient": vjp(dy)[0]}

    def results_float64(self, position: Numbers, x: Numbers, dy: Numbers) -> dict[str, Numbers]:
        r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS)
        dn = _rotated(dy, position, -1)  # a rotation's gradient is the rotation back
        gradient = r * dn - r**3 * x * (dn * x).mean(-1, keepdims=True)
        return {"rope of the norm": _rotated(x * r, position, 1), "gradient": gradient}


@dataclass(frozen=True, kw_only=True)
class RopeHadamardCase(RopeCase):
    """A rotation before the Hadamard transform, and its gradient."""

    op = "rope_hadamard"
    roundings = 2

    def results(self, position: jax.Array, x: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        y, vjp = jax.vjp(lambda x: rope_hadamard(x, position, _ROPE), x)
        return {"transformed": y, "gradient": vjp(dy)[0]}

    def results_float64(self, position: Numbers, x: Numbers, dy: Numbers) -> dict[str, Numbers]:
        i = np.arange(self.d)
        matrix = (1.0 - 2.0 * (np.bitwise_count(i[:, None] & i) % 2)) / np.sqrt(self.d)
        return {"transformed": _rotated(x, position, 1) @ matrix, "gradient": _rotated(dy @ matrix, position, -1)}


def _wrong(got: dict[str, Any], wanted: dict[str, Any], limit: float) -> list[str]:
    off = {}
    for name, x in wanted.items():
        x, y = np.asarray(x, np.float64), np.asarray(got[name], np.float64)
        off[name] = max(np.linalg.norm(y - x) / np.linalg.norm(x), np.abs(y - x).max() / np.abs(x).max())
    return [f"{name} off by {part:.1e}" for name, part in off.items() if not part <= limit]


def _rotated(x: Numbers, position: Numbers, direction: int) -> Numbers:
    """Pairs as complex numbers, times e^(i angle); angles are rounded to float32, as a table of them is."""
    n = _ROPE.dims
    angle = (position[..., None].astype(np.float32) * _ROPE.frequencies()).astype(np.float64)
    pairs = (x[..., -n::2] + 1j * x[..., -n + 1 :: 2]) * np.exp(1j * direction * angle)[:, :, None]
    rotated = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], n)
    return np.concatenate([x[..., :-n], rotated], -1)
