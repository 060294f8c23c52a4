"""Pictures: a bench's rows beside the machine's roofline, and which kernels are built."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._bench import SUITES
from .._host import library

_PEERS = {
    "two_pass": "#a9b4e8", "cudnn": "#8a8a8a", "xla": "#cfcfcf", "flashmla": "#e0a3a0", "cudnn_frontend": "#b5bf8a",
    "graph": "#d9bd94", "both": "#c9a6d1",
}  # fmt: skip
_INCHES = 6.67  # 640 pixels, as wide as the pages' pictures, so that a phone shows the same type
_TYPE, _SMALL, _LINE = 12.5, 11, 16  # points; a line has a bar or a row's name
_CHARACTERS = 60  # of a line of a name
_INSIDE = 0.55  # of the axis: a bar from here on has its time inside
_DARK = "@media(prefers-color-scheme:dark){svg{filter:invert(.9) hue-rotate(180deg)}}"
"""dark for light, with the same hues"""
_DTYPES = ("#4053d3", "#ddb310", "#00806c", "#b51d14")

Rows = list[dict[str, Any]]


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise SystemExit("--plot needs matplotlib: pip install 'jax_dsv4_fmha[plot]'") from e
    return Figure


def draw(results: dict[str, Any], path: str) -> None:
    """A roofline above bars, into a .png or .svg."""
    figure_of = _figure()
    rows = [row for row in results["rows"] if "ours" in row["times"]]
    if not rows:
        raise SystemExit("--plot: no row holds a time of ours")
    import matplotlib

    names = [textwrap.wrap(row["name"], _CHARACTERS) for row in rows]
    lines = sum(len(name) + len(_shown(row)) + 0.5 for name, row in zip(names, rows, strict=True))
    bars_inches = lines * _LINE / 72
    with matplotlib.rc_context({"font.size": _TYPE, "axes.titlesize": _TYPE, "figure.titlesize": _TYPE + 1}):
        figure = figure_of(figsize=(_INCHES, bars_inches + 6.2), layout="constrained")
        roofline, bars = figure.subplots(2, 1, height_ratios=(4, bars_inches))
        _roofline(roofline, rows)
        _bars(bars, rows, names)
        for axes in (roofline, bars):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        versions = ", ".join(f"{name} {x}" for name, x in results["versions"].items() if x and name != "kernels")
        figure.suptitle(f"jax_dsv4_fmha on {results['devices'][0]['name']}", fontweight="bold")
        figure.supxlabel(textwrap.fill(f"{results['date'][:10]}: {versions}", 70), fontsize=_SMALL, color="#606060")
        save(figure, path)


def _shown(row: dict[str, Any]) -> list[str]:
    return ["ours", *(name for name in _PEERS if name in row["times"])]


def draw_built(variants: Sequence[library.BuiltVariant], path: str) -> None:
    """Draws the kernels that are built: ops down, head dimensions and heads across, marks by architecture and dtype."""
    figure_of = _figure()
    if not variants:
        raise SystemExit("--plot: no kernels are built in")
    ops = list(dict.fromkeys(v.op for v in variants))
    sizes = sorted({_size(v) for v in variants})
    archs = sorted({v.arch for v in variants}, reverse=True)
    dtypes = list(dict.fromkeys(v.choices.get("dtype", "float32") for v in variants))
    figure = figure_of(figsize=(3.2 + 0.95 * len(sizes), 1.6 + 0.42 * len(ops)), layout="constrained")
    axes = figure.subplots()
    for v in {(v.op, _size(v), v.arch, v.choices.get("dtype", "float32")) for v in variants}:
        op, size, arch, dtype = v
        x = sizes.index(size) + (archs.index(arch) - (len(archs) - 1) / 2) * 0.42
        y = ops.index(op) + (dtypes.index(dtype) - (len(dtypes) - 1) / 2) * 0.17
        axes.scatter(x, y, marker="s", s=26, color=_DTYPES[dtypes.index(dtype) % len(_DTYPES)], linewidths=0)
    for i, dtype in enumerate(dtypes):
        axes.scatter([], [], marker="s", s=26, color=_DTYPES[i % len(_DTYPES)], label=dtype)
    heads = "".join(f"\n{label}" for label in ("left to right: " + ", ".join(archs),) if len(archs) > 1)
    axes.set_xticks(range(len(sizes)), [label for _, _, label in sizes], fontsize=8)
    axes.set_yticks(range(len(ops)), ops, fontsize=9)
    axes.set(xlim=(-0.6, len(sizes) - 0.4), ylim=(len(ops) - 0.4, -0.6))
    axes.set_title(f"Kernels that are built{heads}", fontsize=11)
    axes.set_xticks([i - 0.5 for i in range(1, len(sizes))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(ops))], minor=True)
    axes.grid(which="minor", color="#e0e0e0")
    axes.tick_params(which="both", length=0)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def _size(v: library.Variant) -> tuple[int, int, str]:
    """A variant's head dimension and most heads, as a sort key and as text."""
    c = v.choices
    d, heads = c.get("d", 0), c.get("heads", c.get("max_heads", library.ANY))
    lines = [f"d {d}"] if d else []
    lines += [] if heads >= library.ANY else [f"{'' if 'heads' in c else '≤ '}{heads} heads"]
    return d, heads, "\n".join(lines) or "any"


def save(figure: Any, path: str) -> None:
    """Saves a .png or .svg; an SVG has its text as text, the same bytes for the same figure, and two colour schemes."""
    import matplotlib

    is_svg = path.endswith(".svg")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_dsv4_fmha"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else {})
    if is_svg:
        picture = Path(path)
        picture.write_text(picture.read_text().replace('<style type="text/css">', f'<style type="text/css">{_DARK}', 1))


def _roof(row: dict[str, Any]) -> float:
    """The least time that the machine's matrix rate and copy rate allow."""
    return max(row["flops"] / row["matmul_flops_per_s"], row["bytes"] / row["copy_bytes_per_s"])


def _roofline(axes: Any, rows: Rows) -> None:
    rows = [row for row in rows if row["flops"]]  # a top-k of given scores has no FLOP, and no place on a logarithm
    if not rows:
        axes.set_axis_off()
        return
    matmul = statistics.median(row["matmul_flops_per_s"] for row in rows) / 1e12
    copy = statistics.median(row["copy_bytes_per_s"] for row in rows) / 1e12
    points = [(row["flops"] / row["bytes"], row["flops"] / row["times"]["ours"]["seconds"] / 1e12) for row in rows]
    intensities, rates = zip(*points, strict=True)
    ridge = matmul / copy
    left, right = min(*intensities, ridge / 4) / 1.3, max(*intensities, ridge * 4) * 1.3
    axes.loglog([left, ridge, right], [copy * left, matmul, matmul], color="#303030", linewidth=1.5)
    for suite in SUITES.values():
        ours = [point for point, row in zip(points, rows, strict=True) if row["suite"] == suite.name]
        if ours:
            axes.scatter(*zip(*ours, strict=True), color=suite.color, s=48, alpha=0.8, label=suite.name, linewidths=0)
    low = min(*rates, copy * left)
    axes.set_yticks([t for n in range(7) for t in (10.0**n, 2 * 10.0**n, 5 * 10.0**n) if low / 2 < t < 2 * matmul])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlim=(left, right), ylim=(low / 1.3, matmul * 1.5))
    axes.annotate(
        f"matrix product, {matmul:.0f} TFLOP/s", (right, matmul), (-4, 5), textcoords="offset points", ha="right"
    )
    along = {"rotation": math.degrees(math.atan(copy)), "rotation_mode": "anchor", "transform_rotates_text": True}
    middle = math.sqrt(left * ridge)
    axes.text(middle / 1.08, copy * middle * 1.08, f"copy, {copy:.2f} TB/s", ha="center", va="bottom", **along)
    axes.set(xlabel="FLOP for each byte that must move", ylabel="TFLOP/s on visible keys")
    axes.set_title("What the machine allows, and each row")
    axes.grid(which="major", color="#e8e8e8")
    axes.legend(title="suite", loc="lower right", fancybox=False, framealpha=1)


def _bars(axes: Any, rows: Rows, names: Sequence[Sequence[str]]) -> None:
    """Draws for each row its name, and below it a bar for each time, all of one height."""
    shares = {
        (i, name): _roof(row) / row["times"][name]["seconds"] for i, row in enumerate(rows) for name in _shown(row)
    }
    end = max(1.1, 1.02 * max(shares.values()))
    y = 0.0
    axes.axvline(1, color="#303030", linewidth=1.5, zorder=0.9)  # below the bars, above the grid
    for i, row in enumerate(rows):
        for text in names[i]:
            beside = {"xytext": (2, 0), "textcoords": "offset points", "va": "center", "fontsize": _SMALL + 0.5}
            axes.annotate(text, (0, y), **beside, bbox={"color": "#ffffff", "pad": 0.5})
            y += 1
        for name in _shown(row):
            color = SUITES[row["suite"]].color if name == "ours" else _PEERS[name]
            share, time = shares[i, name], _microseconds(row["times"][name]["seconds"])
            axes.barh(y, share, 0.92, color=color)
            is_inside = share > _INSIDE * end
            axes.annotate(
                time if name == "ours" else f"{name} {time}",
                (share, y),
                (-4 if is_inside else 4, 0),
                textcoords="offset points",
                va="center",
                ha="right" if is_inside else "left",
                color="#ffffff" if is_inside and name == "ours" else "#000000",
                fontsize=_SMALL,
            )
            y += 1
        y += 0.5
    axes.set_yticks([])
    axes.set(xlim=(0, end), ylim=(y - 0.5, -0.75), xlabel="share of the roofline")
    axes.set_title("Device time, and how near to the roofline")
    axes.grid(axis="x", color="#e8e8e8")


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.0f} µs" if us >= 20 else f"{us:.1f} µs"
