"""Whether an answer is right, and what is wrong about it: which rows and columns, and what the rows have in common."""

from __future__ import annotations

import numpy as np

from jax_dsv4_fmha._testing.compare import Tolerance, compare
from tests import native

from .hazards import Fault
from .state import Array


class Wrong(Fault):
    """The kernel ran to its end, with a wrong answer."""


def judge(got: tuple[Array, Array], x: native.Operands, scale: float) -> None:
    """Raises Wrong unless o and lse are what they should be, by the tolerances of the tests on hardware."""
    want = native.attention(x, scale)
    verdicts = compare(got, want, native.TOLERANCES)
    if all(v.passed for v in verdicts):
        return
    o, lse = (
        wrong_elements(g.astype(np.float64), w, native.TOLERANCES[name])
        for g, w, name in zip(got, want, ("o", "lse"), strict=True)
    )
    keys = sum(source.counts.sum(-1) for source in x.sources)[..., None]  # [b, s_q, 1]
    parts = [describe("lse", lse, got[1], want[1], keys), describe("o", o.any(-1), got[0], want[0], keys)]
    if o.any():
        columns = np.flatnonzero(o.any((0, 1, 2)))
        parts.append(f"columns {columns[0]}..{columns[-1]} of o")
    raise Wrong("; ".join(parts) + "\n    " + "\n    ".join(map(str, verdicts)))


def wrong_elements(got: Array, want: Array, t: Tolerance) -> Array:
    with np.errstate(invalid="ignore"):
        distance = np.abs(got - want)
        near = (distance <= t.abs) | (distance <= t.rel * np.abs(want))
    return ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))


def describe(name: str, wrong: Array, got: Array, want: Array, keys: Array) -> str:
    """wrong: [b, s_q, h_q]."""
    if not wrong.any():
        return f"{name} is right"
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    worst = np.unravel_index(
        np.nanargmax(np.abs(np.nan_to_num(got[where] - want[where], nan=np.inf))), got[where].shape
    )
    seen = np.broadcast_to(keys, wrong.shape)
    text = (
        f"{name} is wrong in {int(wrong.sum())} of {wrong.size} rows, first in batch entry {where[0]}, "
        f"query {where[1]}, head {where[2]} ({got[where][worst]:.6g}, wanted {want[where][worst]:.6g}); "
        f"wrong rows see {seen[wrong].min()}..{seen[wrong].max()} keys"
    )
    if not wrong.all():
        text += f", right ones {seen[~wrong].min()}..{seen[~wrong].max()}"
    return text
