"""Draws the pictures of the pages, as SVG: who sees what, from the very `Span`s, and who works when in a kernel.

`python docs/draw.py` writes them into docs/pictures; `tests/test_docs.py` asserts that it would change nothing.
"""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha import Span

PICTURES = Path(__file__).parent / "pictures"
INK, GRID, SEEN, SECOND, THIRD, IDLE = "#303030", "#d9d9d9", "#4053d3", "#ddb310", "#00806c", "#f3f3f3"
FONT = "font-family='system-ui, sans-serif'"


def svg(width: float, height: float, body: Sequence[str], title: str) -> str:
    """On white, so that it can be read on a dark page too."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' role='img'>"
    back = f"<rect width='{width:g}' height='{height:g}' fill='white'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *body, "</svg>\n"])


def text(x: float, y: float, words: str, size: float = 12, anchor: str = "start", color: str = INK) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size:g}' text-anchor='{anchor}' fill='{color}'>"
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, color: str, edge: str = "white") -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{color}' stroke='{edge}'/>"


# Who sees what

CELL = 15


def grid(shown: Any, x: float, y: float, title: str, color: str = SEEN) -> list[str]:
    """A mask bool [queries, keys]: a filled cell is a key that the query sees."""
    body = [text(x, y - 10, title, 13)]
    for i, row in enumerate(np.asarray(shown)):
        for j, sees in enumerate(row):
            body.append(box(x + j * CELL, y + i * CELL, CELL, CELL, color if sees else IDLE, GRID))
    return body


def mask_of(span: Span, s_q: int, s_kv: int) -> Any:
    start, stop = (np.asarray(x)[0][:, None] for x in span.bounds(1, s_q, s_kv))
    j = np.arange(s_kv)
    return (start <= j) & (j < stop)


def masks() -> str:
    """The constructors of `Span`, 12 queries down and their keys across."""
    n = 12
    ids = jnp.array([[0] * 5 + [1] * 3 + [2] * 4], jnp.int32)
    causal = Span.causal(n)
    spans = [
        ("Span.causal(12)", causal, n),
        ("Span.sliding_window(12, 4)", Span.sliding_window(n, 4), n),
        ("Span.compressed(12, 4)", Span.compressed(n, 4), 3),
        ("Span.segments(ids)", Span.segments(ids), n),
        ("Span.segments(ids) & Span.causal(12)", Span.segments(ids) & causal, n),
        ("Span.lengths([7])", Span.lengths(jnp.array([7], jnp.int32)), n),
        ("Span.causal(12, offset=-4)", Span.causal(n, -4), n),
        ("Span.compressed_segments(ids, 2)", Span.compressed_segments(ids, 2), 6),
    ]
    body, step = [], 270
    for k, (title, span, s_kv) in enumerate(spans):
        body += grid(mask_of(span, n, s_kv), 30 + step * (k % 4), 40 + 235 * (k // 4), title)
    body.append(text(30, 500, "down: queries, the first above; across: keys; filled: the query sees the key", 12))
    return svg(30 + 4 * step, 515, body, "The masks that Span makes")


def layer() -> str:
    """Who sees what in a DeepSeek-V4 layer: window, compressed entries, and of these the indexer's choice."""
    n, ratio, window, topk = 24, 4, 6, 2
    near = mask_of(Span.sliding_window(n, window), n, n)
    past = mask_of(Span.compressed(n, ratio), n, n // ratio)
    scores = np.random.default_rng(3).random(past.shape)
    best = np.argsort(np.where(past, -scores, 1), axis=1, kind="stable")[:, :topk]
    chosen = np.zeros_like(past)
    np.put_along_axis(chosen, best, True, axis=1)
    chosen &= past
    right = 40 + (n + 2) * CELL
    body = grid(near, 40, 50, f"window_kv: the last {window} positions")
    body += grid(past, right, 50, f"compressed_kv: one entry for {ratio}")
    for i, j in zip(*np.nonzero(chosen), strict=True):
        body.append(box(right + j * CELL, 50 + i * CELL, CELL, CELL, SECOND, GRID))
    last = right + 8 * CELL + 120
    body += [box(last, 60, CELL, CELL, SEEN, GRID), text(last + 24, 72, "visible")]
    body += [box(last, 85, CELL, CELL, SECOND, GRID), text(last + 24, 97, f"chosen: top-k of {topk}")]
    body += [box(last, 110, CELL, CELL, IDLE, GRID), text(last + 24, 122, "not seen")]
    words = (
        "One softmax over",
        "the window's blue cells,",
        "the yellow entries",
        "(without indices: the blue ones too),",
    )
    body += [text(last, 165 + 18 * k, line) for k, line in enumerate((*words, "and the head's sink."))]
    body.append(text(40, 50 + n * CELL + 24, "down: queries, at positions 0, 1, …; across: positions, then entries"))
    return svg(last + 230, 50 + n * CELL + 40, body, "Who sees what in a DeepSeek-V4 layer")


# Who works when

LANE, LEFT, UNIT, LETTER = 34, 130, 62, 6.4
KINDS = {"load": "#8a8a8a", "scores": SEEN, "softmax": SECOND, "out": THIRD, "store": "#a05a9c", "wait": IDLE}


def timeline(title: str, lanes: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], note: str = "") -> str:
    """Lanes of (kind, length, words), one after the other; time runs to the right, not to scale. Words fit into their box."""
    unit = max(UNIT, *((LETTER * len(words) + 8) / length for _, work in lanes for _, length, words in work))
    longest = max(sum(length for _, length, _ in work) for _, work in lanes)
    width = LEFT + longest * unit + 20
    body = [text(12, 22, title, 14)]
    for i, (who, work) in enumerate(lanes):
        x, y = float(LEFT), 36 + i * LANE
        body.append(text(12, y + 18, who))
        for kind, length, words in work:
            body.append(box(x, y, length * unit, LANE - 8, KINDS[kind]))
            dark = kind not in ("wait", "softmax")
            color = "white" if dark else INK
            body.append(text(x + length * unit / 2, y + 17, words, 11, "middle", color))
            x += length * unit
    y = 36 + len(lanes) * LANE + 14
    body.append(text(12, y, note or "time runs to the right; lengths are not to scale", 11, color="#606060"))
    return svg(width, y + 14, body, title)


def mha_forward() -> str:
    def consumer(first: float, tile: int) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("wait", first, ""), ("scores", 1, "S0"), ("softmax", 1, "P0")]
        for t in range(1, 4):
            work += [("scores", 1, f"S{t}"), ("out", 1, f"O += P{t - 1} V{t - 1}"), ("softmax", 1, f"P{t}")]
        return [*work, ("out", 1, "O += P3 V3"), ("store", 1, f"O, rows {tile}")]

    load = [
        ("load", 1, "Q"),
        *(("load", 1.5, f"K{t} V{t}") for t in range(4)),
        ("load", 1, "next Q"),
        ("load", 1.5, "K0 V0"),
    ]
    lanes = [("producer warp", load), ("warpgroup 0", consumer(1.5, 0)), ("warpgroup 1", consumer(2, 64))]
    return timeline("mha_fwd_sm90: one warpgroup's softmax runs under the other's products", lanes)


def mla_forward() -> str:
    left = [("wait", 1, ""), ("scores", 1, "S0"), ("softmax", 1, "P0"), ("out", 1.5, "O_l += P0 K0_l"), ("softmax", 1, "P0 → right"),
            ("out", 1.5, "O_l += P1 K1_l"), ("scores", 1, "S2"), ("softmax", 1, "P2"), ("out", 1.5, "O_l += P2 K2_l")]  # fmt: skip
    right = [("wait", 1.5, ""), ("scores", 1, "S1"), ("wait", 0.5, ""), ("softmax", 1, "P1 → left"), ("out", 1.5, "O_r += P1 K1_r"),
             ("out", 1.5, "O_r += P0 K0_r"), ("wait", 0.5, ""), ("scores", 1, "S3"), ("softmax", 1, "P3 → left")]  # fmt: skip
    load = [
        ("load", 1, "Q"),
        ("load", 1.5, "K0"),
        ("load", 1.5, "K1"),
        ("wait", 2, ""),
        ("load", 1.5, "K2"),
        ("load", 1.5, "K3"),
    ]
    lanes = [("producers", load), ("left", left), ("right", right)]
    return timeline("mla_fwd_sm90, the seesaw: each side owns 256 columns of O and one key tile of a pair", lanes)


def few_heads() -> str:
    def cta(first: float) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("wait", first, "")] if first else []
        for t in range(3):
            work += [("scores", 1.5, f"S' = K{t} Q'"), ("softmax", 1.2, f"P{t}"), ("out", 1.5, f"O' += K{t}' P{t}'")]
        return work

    lanes = [("CTA 0, consumer", cta(0)), ("CTA 1, consumer", cta(2.1))]
    return timeline("mla_few_heads_fwd_sm90: two CTAs of an SM, keys as rows, heads as columns", lanes)


def decode() -> str:
    halves = ("K0 left", "K1 right", "K0 right", "K1 left")
    load: list[tuple[str, float, str]] = []
    for pair in range(2):
        load += [("wait", 1.2, "")] if pair else []
        for half in halves:
            load += [("load", 0.5, "FP8"), ("softmax", 1, half)]
    work = [("scores", 1.2, "S"), ("softmax", 1, "P"), ("out", 2, "O")]
    lanes = [
        ("eight producer warps", load),
        ("left", [("wait", 4.5, ""), *work, *work]),
        ("right", [("wait", 6, ""), *work]),
    ]
    return timeline("mla_fwd_sm90 over FP8 pages: a half of a tile waits in registers for its place", lanes)


def indexer() -> str:
    def group(first: float) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("wait", first, "")] if first else []
        for t in range(3):
            work += [("scores", 1, f"K{t} Q'"), ("softmax", 1, "Σ over heads")]
        return work

    lanes = [(f"warpgroup {i}", group(0.5 * i)) for i in range(4)]
    row = [("load", 1, "guess"), ("scores", 1.5, "collect"), ("softmax", 1.5, "narrow"), ("store", 1.5, "emit")]
    return timeline(
        "indexer_scores_sm90: sums under products; then indexer_topk_sm90, one CTA a row",
        [*lanes, ("top-k, one row", row)],
    )


def blackwell() -> str:
    mma = [
        ("wait", 1, ""),
        ("scores", 1, "S0"),
        ("scores", 1, "S1"),
        ("out", 1.2, "O = P0 V0"),
        ("scores", 1, "S2"),
        ("out", 1.2, "O += P1 V1"),
    ]
    warps = [("wait", 2, ""), ("softmax", 1.2, "P0"), ("softmax", 1.6, "P1"), ("softmax", 1.6, "P2"), ("store", 1, "O")]
    load = [("load", 1, "Q K0"), ("load", 1, "V0 K1"), ("load", 1, "V1 K2"), ("load", 1, "V2")]
    lanes = [("warp 5, TMA", load), ("warp 4, MMA", mma), ("warps 0-3", warps)]
    return timeline("fwd_sm100: scores run a tile ahead of O, both in tensor memory", lanes)


def mla_backward() -> str:
    load = [("load", 2, "K0"), ("wait", 1, ""), ("load", 2, "K1"), ("wait", 1.5, ""), ("load", 2, "K2")]
    left = [("wait", 1, ""), ("scores", 2, "S, dP"), ("softmax", 1, "P, dS"), ("out", 1.2, "dq left"), ("store", 1.2, "dkv, 4 chunks"),
            ("scores", 2, "S, dP of the next")]  # fmt: skip
    right = [("wait", 4, ""), ("out", 1.2, "dq right"), ("store", 3.2, "dkv, 12 chunks, and reductions")]
    return timeline("mla_bwd_sm90: rows stay, keys pass", [("producers", load), ("left", left), ("right", right)])


def mha_backward() -> str:
    def consumer(first: float) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("wait", first, "")]
        for t in range(2):
            work += [
                ("scores", 1.5, f"K Q{t}', V dO{t}'"),
                ("softmax", 1.2, "P', dS'"),
                ("out", 2, f"dV += P' dO{t}, dK += dS' Q{t}"),
            ]
        return [*work, ("store", 1, "dK, dV")]

    load = [("load", 1, "K V"), *(("load", 2, f"Q{t} dO{t}") for t in range(3))]
    lanes = [("producer warp", load), ("64 keys", consumer(2)), ("64 keys more", consumer(2.8))]
    return timeline("mha_dkdv_sm90: keys are rows and stay, tiles of Q and dO pass", lanes)


def rope() -> str:
    def row(i: int) -> list[tuple[str, float, str]]:
        ahead: list[tuple[str, float, str]] = [("wait", 0.7 * i, "")] if i else []
        return [*ahead, ("load", 1.2, f"x, row {i}"), ("wait", 2.2 + 2.8 * i, ""), ("softmax", 1.5, "Σ x², 5 shuffles"),
                ("out", 1.2, "x r, turn"), ("store", 0.8, "store")]  # fmt: skip

    return timeline(
        "norm_rope: one warp, four rows; it asks for all before it needs the first",
        [(f"row {i}", row(i)) for i in range(4)],
    )


def kv_insert() -> str:
    def group(i: int) -> list[tuple[str, float, str]]:
        return [("load", 1.2, "lengths"), ("load", 1.2, "rows"), ("store", 0.8, "to the ring"),
                ("load", 1.2, f"tokens {i}, {i + 4}, …"), ("softmax", 1.5, "online softmax"),
                ("store", 0.8, "parts")]  # fmt: skip

    finish: list[tuple[str, float, str]] = [
        ("wait", 6.9, ""), ("out", 1, "merge"), ("softmax", 1, "Σ x²"), ("out", 1.6, "norm, turn, pack"), ("store", 0.8, "store")
    ]  # fmt: skip
    lanes = [(f"group {i}", group(i)) for i in range(4)]
    return timeline("kv_insert: a sequence whose block is complete", [*lanes, ("a warp", finish)])


DRAWN: dict[str, Callable[[], str]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        masks,
        layer,
        mha_forward,
        mla_forward,
        few_heads,
        decode,
        indexer,
        blackwell,
        mla_backward,
        mha_backward,
        rope,
        kv_insert,
    )
}


def main() -> None:
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
