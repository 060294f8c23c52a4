"""RoPE's cases, alone and after a norm: kernels against jnp in float32, and that against float64 in NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._dispatch.support import not_built
from .._host import library
from ..layers.rope import Rope, inverse_rope, rope, rope_of_normed
from .cases import Case

OPS = ("rope", "norm_rope")
PASSES = "rotated numbers and gradients within limits"
CASES = (
    *(Case("rope", 2, 150, h_q=16, d=512, dtype=t) for t in ("bfloat16", "float16")),
    Case("rope", 3, 5, d=64),
    *(Case("norm_rope", 2, 60, h_q=16, d=512, dtype=t) for t in ("bfloat16", "float16")),
)
_HOW, _EPS = Rope(64, 160_000, 16, 4096), 1e-3

Numbers = np.ndarray[Any, Any]


def complaints(c: Case, implementation: str) -> list[str]:
    """The errors of an implementation: kernels beside jnp in float32, jnp beside NumPy in float64."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(3 * rng.standard_normal((c.b, c.s_q, c.h_q, c.d)), c.dtype) for _ in range(2))
    at = rng.integers(0, 5000, (c.b, c.s_q)).astype(np.int32)
    run = jax.jit(functools.partial(_results, c.op, jnp.asarray(at)))
    exactly = run(*(z.astype(jnp.float32) for z in (x, dy)))
    if implementation == "reference":
        wanted, limit = _results_float64(c.op, at, *(np.asarray(z, np.float64) for z in (x, dy))), 1e-5
        return _wrong(exactly, wanted, limit)
    sizes = {"d": c.d} if c.op == "norm_rope" else {}
    if not library.built_for(c.op, dtype=c.dtype, dims=_HOW.dims, **sizes):
        raise not_built(c.op, "x", x, "rows that a kernel is built for", (c.op,))
    got, again = run(x, dy), run(x, dy)
    same = all(np.array_equal(np.asarray(got[name]), np.asarray(again[name])) for name in got)
    wrong = _wrong(got, exactly, float(jnp.finfo(c.dtype).eps) / 2)
    return wrong + ([] if same else ["other bits in the second run"])


def _results(op: str, at: jax.Array, x: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    if op == "rope":
        return {"rope": rope(x, at, _HOW), "inverse rope": inverse_rope(dy, at, _HOW)}
    y, vjp = jax.vjp(lambda x: rope_of_normed(x, at, _HOW, _EPS), x)
    return {"rope of the norm": y, "gradient": vjp(dy)[0]}


def _wrong(got: dict[str, Any], wanted: dict[str, Any], limit: float) -> list[str]:
    off = {}
    for name, x in wanted.items():
        x, y = np.asarray(x, np.float64), np.asarray(got[name], np.float64)
        off[name] = max(np.linalg.norm(y - x) / np.linalg.norm(x), np.abs(y - x).max() / np.abs(x).max())
    return [f"{name} off by {part:.1e}" for name, part in off.items() if not part <= limit]


def _results_float64(op: str, at: Numbers, x: Numbers, dy: Numbers) -> dict[str, Numbers]:
    if op == "rope":
        return {"rope": _turned(x, at, 1), "inverse rope": _turned(dy, at, -1)}
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS)
    dn = _turned(dy, at, -1)  # a rotation's gradient is the rotation back
    return {"rope of the norm": _turned(x * r, at, 1), "gradient": r * dn - r**3 * x * (dn * x).mean(-1, keepdims=True)}


def _turned(x: Numbers, at: Numbers, direction: int) -> Numbers:
    """Pairs as complex numbers, times e^(i angle); angles are rounded to float32, as a table of them is."""
    n = _HOW.dims
    angle = (at[..., None].astype(np.float32) * _HOW.frequencies()).astype(np.float64)
    pairs = (x[..., -n::2] + 1j * x[..., -n + 1 :: 2]) * np.exp(1j * direction * angle)[:, :, None]
    turned = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], n)
    return np.concatenate([x[..., :-n], turned], -1)
