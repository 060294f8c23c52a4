"""Judges an answer, and says what is wrong about it: which rows and columns, and what the rows have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jax_dsv4_fmha._testing.compare import KERNEL, Tolerance, compare

from ..machine.hazards import Fault
from ..machine.state import Array
from . import attention


class Wrong(Fault):
    """The kernel ran to its end, with a wrong answer."""


ROWS = ("batch entry", "query", "head")


def judge(got: Sequence[Array], x: attention.Operands, scale: float) -> None:
    """Raises Wrong unless o and lse are right, by the tolerances of the tests on hardware."""
    keys = sum(source.counts.sum(-1) for source in x.sources)[..., None]  # [b, s_q, 1]
    judge_results(got, attention.answer(x, scale), KERNEL, {"o": ROWS, "lse": ROWS}, keys)


def judge_results(
    got: Sequence[Array],
    want: Sequence[Array],
    tolerances: Mapping[str, Tolerance],
    axes: Mapping[str, tuple[str, ...]],
    keys: Array | None = None,
) -> None:
    """Raises Wrong unless results of any kind are right.

    The tolerances and the axes are by the results' names, in order. Named axes are rows, the axes after them columns.
    `keys` says how many keys a row sees, for results whose rows are q's.
    """
    verdicts = compare(got, want, tolerances)
    if all(v.passed for v in verdicts):
        return
    parts = []
    for (name, tolerance), g, w in zip(tolerances.items(), got, want, strict=True):
        wrong = wrong_elements(g.astype(np.float64), w, tolerance)
        rank = len(axes[name])
        columns = np.flatnonzero(wrong.any(tuple(range(rank)))) if wrong.ndim > rank else np.empty(0, int)
        rows = np.asarray(wrong.any(tuple(range(rank, wrong.ndim))))
        parts.append(describe(name, rows, g, w, axes[name], keys if axes[name] == ROWS else None))
        if len(columns):
            parts.append(f"columns {columns[0]}..{columns[-1]} of {name}")
    raise Wrong("; ".join(parts) + "\n    " + "\n    ".join(map(str, verdicts)))


def wrong_elements(got: Array, want: Array, t: Tolerance) -> Array:
    with np.errstate(invalid="ignore"):
        distance = np.abs(got - want)
        near = (distance <= t.abs) | (distance <= t.rel * np.abs(want))
    return ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))


def describe(name: str, wrong: Array, got: Array, want: Array, axes: tuple[str, ...], keys: Array | None) -> str:
    """Describes wrong elements by row."""
    if not wrong.any():
        return f"{name} is right"
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    worst = np.unravel_index(
        np.nanargmax(np.abs(np.nan_to_num(got[where] - want[where], nan=np.inf))), got[where].shape
    )
    text = (
        f"{name} is wrong in {int(wrong.sum())} of {wrong.size} rows, first in "
        f"{', '.join(f'{axis} {i}' for axis, i in zip(axes, where, strict=True))} "
        f"({got[where][worst]:.6g}, wanted {want[where][worst]:.6g})"
    )
    if keys is not None:
        seen = np.broadcast_to(keys, wrong.shape)
        text += f"; wrong rows see {seen[wrong].min()}..{seen[wrong].max()} keys"
        if not wrong.all():
            text += f", right ones {seen[~wrong].min()}..{seen[~wrong].max()}"
    return text
