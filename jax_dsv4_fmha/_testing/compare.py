"""The one comparison of results with expected results, for tests and for `python -m jax_dsv4_fmha check`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """An element passes if the absolute or the relative bound holds; `cos` bounds the cos_diff of the whole."""

    abs: float
    rel: float
    cos: float
    of_rows: bool = False
    """whether elements are rows along the last axis, by their norms"""


KERNEL = {"o": Tolerance(8e-4, 3.01 / 128, 7e-6), "lse": Tolerance(4e-6, 2.01 / 65536, 1e-9)}
"""a kernel against the reference in fp32 from the same 16-bit operands; an lse near 0 is the difference of logits of
some units, and has their rounding
"""

E4M3 = {"o": Tolerance(2.5e-3, 1.01 / 8, 6e-5, of_rows=True), "lse": Tolerance(3e-3, 2.01 / 8192, 1e-6)}
"""a kernel by products of e4m3 against its definition, whose sums are in float32. The kernel's keep 14 bits, so a
weight near a tie may be rounded to the other side, by an eighth; in a row that sees few keys it may be almost all of o.
These bounds are of what `check`'s operands lose. tests/hopper_e4m3.py has what the kernel's sums are.
"""

FP32 = {"o": Tolerance(1e-6, 1e-3, 1e-10), "lse": Tolerance(3e-6, 1e-6, 1e-12)}
"""the reference in fp32 against float64"""

FP32_LARGE = {"o": Tolerance(3e-5, 1e-3, 1e-10), "lse": Tolerance(3e-4, 1e-6, 1e-12)}
"""the same where logits are some hundreds: the rounding of a logit grows with it"""


@dataclass(frozen=True)
class Verdict:
    """The distance of one result from the expected one, over the elements that are finite."""

    name: str
    tolerance: Tolerance
    elements: int
    misplaced: int
    """numbers that are NaN, inf or -inf in only one of the two"""
    wrong: int
    """elements that break both bounds"""
    max_abs: float
    cos_diff: float

    @property
    def passed(self) -> bool:
        return self.misplaced == 0 and self.wrong == 0 and self.cos_diff <= self.tolerance.cos

    def __str__(self) -> str:
        t = self.tolerance
        what = "rows" if t.of_rows else "elements"
        return (
            f"{self.name}: {'passed' if self.passed else 'FAILED'}: of {self.elements} {what} {self.wrong} beyond "
            f"abs {t.abs:.3g} and rel {t.rel:.3g}, {self.misplaced} with inf or NaN misplaced; "
            f"max abs {self.max_abs:.3g}, cos_diff {self.cos_diff:.3g} of {t.cos:.3g}"
        )


def compare(
    got: Sequence[Any], want: Sequence[Any], tolerances: Mapping[str, Tolerance] = KERNEL
) -> tuple[Verdict, ...]:
    """The verdicts on results, in order; the tolerances give their names and bounds.

    `want` is in float32, on whose device the comparison runs, or in NumPy's float64.
    """
    results = zip(tolerances.items(), got, want, strict=True)
    return tuple(_verdict(name, x, y, tolerance) for (name, tolerance), x, y in results)


def _verdict(name: str, got: Any, want: Any, tolerance: Tolerance) -> Verdict:
    if got.shape != want.shape:
        raise ValueError(f"{name}: got {got.shape}, wanted {want.shape}")
    if isinstance(want, np.ndarray):
        measured = _measure(np, np.asarray(got), want, tolerance)
    else:
        measured = jax.jit(_measure, static_argnums=(0, 3))(jnp, got, want, tolerance)
    misplaced, wrong, max_abs, cos_diff = (x.item() for x in measured)
    elements = got.size // got.shape[-1] if tolerance.of_rows else got.size
    return Verdict(name, tolerance, elements, misplaced, wrong, max_abs, cos_diff)


def _measure(xp: Any, got: Any, want: Any, tolerance: Tolerance) -> tuple[Any, ...]:
    got = got.astype(want.dtype)
    finite = xp.isfinite(got) & xp.isfinite(want)
    misplaced = ~finite & ~((got == want) | (xp.isnan(got) & xp.isnan(want)))
    got, want = xp.where(finite, got, 0), xp.where(finite, want, 0)
    distance = xp.abs(got - want)
    far, size = distance, xp.abs(want)
    if tolerance.of_rows:
        far, size = (xp.sqrt(xp.sum(x * x, -1)) for x in (far, size))
    wrong = (far > tolerance.abs) & (far > tolerance.rel * size)
    norms = xp.sum(got * got) + xp.sum(want * want)
    # 1 - 2<a,b> / (|a|² + |b|²), in a form without cancellation
    cos_diff = xp.sum(distance * distance) / xp.where(norms == 0, 1, norms)
    return xp.sum(misplaced), xp.sum(wrong), xp.max(distance), cos_diff


@jax.jit
def _differing(x: Any, y: Any) -> jax.Array:
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(jax.lax.bitcast_convert_type(x, bits) != jax.lax.bitcast_convert_type(y, bits))


def differing(x: Any, y: Any) -> int:
    """The number of elements that differ in their bits."""
    return int(_differing(x, y))
