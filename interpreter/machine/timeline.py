"""Shows who did what when, as text and as a picture. Time is in steps of all warps together, which are not cycles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from .state import Machine, Moment, names

VERBS = {
    "issue": "issues",
    "complete": "completes",
    "wait": "waits for",
    "go": "goes on",
    "arrive": "arrives at",
    "phase": "",
    "exit": "ends",
}


def lines(moments: list[Moment]) -> Iterator[str]:
    """One line for every run of moments that differ only in the warp."""
    yield f"{'step':>8}  {'who':<16}{'line':>6}  what"
    shown = [m for m in moments if m.kind != "go"]
    for (kind, _, text), alike in groupby(shown, key=lambda m: (m.kind, m.line if m.kind != "issue" else 0, m.text)):
        run = list(alike)
        times = f" x {len(run)}" if kind in ("issue", "complete") and len(run) > 1 else ""
        where = str(run[0].line or "") if kind != "phase" else ""
        head = f"{run[0].time:>8}  {names([m.who for m in run]) if kind != 'phase' else '':<16}{where:>6}"
        target = f"mbarrier +{text}" if kind == "arrive" and text.isdigit() else brief(text) if kind == "wait" else text
        yield f"{head}  {VERBS[kind]} {target}{times}".rstrip()


def brief(why: str) -> str:
    """A wait without what a timeline shows anyway: who has arrived."""
    why = re.sub(r" \(count \d+, made in line \d+\) is in phase \d+:", ",", why.split("; ")[0])
    return re.sub(r" \(warp [^)]*\)$| \(CTA [^)]*\)$", "", why)


def barrier_of(why: str) -> str:
    """The barrier or event that a wait is for, in short."""
    if m := re.search(r"mbarrier (\+\d+)", why):
        return f"mbarrier {m[1]}"
    if m := re.search(r"named barrier \d+", why):
        return m[0]
    return "wgmma" if "wgmma" in why else why.split(",")[0][:24]


def plot(machine: Machine, path: Path, title: str) -> None:
    """Warps and asynchronous engines from top to bottom, steps from left to right."""
    try:
        import matplotlib
    except ImportError as e:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    moments = machine.moments
    assert moments is not None
    end = machine.time
    waits: dict[str, list[tuple[int, int, str]]] = {w.name: [] for w in machine.warps}
    open_: dict[str, tuple[int, str]] = {}
    ended: dict[str, int] = {}
    for m in moments:
        if m.kind == "wait":
            open_[m.who] = m.time, barrier_of(m.text)
        elif m.kind == "go" and m.who in open_:
            begin, what = open_.pop(m.who)
            waits[m.who].append((begin, m.time, what))
        elif m.kind == "exit":
            ended[m.who] = m.time
    for who, (begin, what) in open_.items():
        waits[who].append((begin, end, what))
    engines: dict[str, list[tuple[int, int]]] = {}
    done = {id(m.op): m.time for m in moments if m.kind == "complete"}
    for m in moments:
        if m.kind == "issue" and m.op is not None:
            row = engine(m)
            engines.setdefault(row, []).append((m.time, done.get(id(m.op), end)))
    rows: list[str] = [*waits, *sorted(engines)]
    kinds = sorted({what for spans in waits.values() for _, _, what in spans})
    palette = plt.get_cmap("tab20")
    colours: dict[str, Any] = {what: palette(n % 20) for n, what in enumerate(kinds)}
    figure, axes = plt.subplots(figsize=(16, 1.5 + 0.32 * len(rows) + 0.1 * len(kinds)), layout="constrained")
    for y, row in enumerate(rows):
        if row in waits:
            axes.broken_barh([(0, ended.get(row, end))], (y - 0.38, 0.76), facecolor="#d9d9d9")
            for begin, stop, what in waits[row]:
                axes.broken_barh([(begin, stop - begin)], (y - 0.38, 0.76), facecolor=colours[what])
        else:
            for begin, stop in engines[row]:
                axes.broken_barh(
                    [(begin, max(stop - begin, 1))], (y - 0.38, 0.76), facecolor="#222222", alpha=0.35, linewidth=0
                )
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("steps of all warps (no time)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    key = [Patch(facecolor="#d9d9d9", label="can go on"), Patch(facecolor="#222222", alpha=0.35, label="in flight")]
    key += [Patch(facecolor=colours[what], label=f"waits: {what}") for what in kinds]
    axes.legend(handles=key, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def engine(m: Moment) -> str:
    assert m.op is not None
    if m.op.kind == "wgmma":
        return f"wgmma, warpgroup {m.op.warp.number // 4}"
    return f"{m.op.kind} of {m.op.warp.name}" if m.op.kind.startswith("cp.async") else m.op.kind
