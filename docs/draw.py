"""Draws the pictures of the pages, as SVG: who sees what, from the very `Span`s; who works when in a kernel; and times
beside those of peers, from the records.

`python docs/draw.py` writes them into docs/pictures; `tests/test_docs.py` asserts that it would change nothing.
"""

import json
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from examples.serving.pages import Pages
from jax_dsv4_fmha import Span, layers

PICTURES = Path(__file__).parent / "pictures"

# All pictures have one width, which a phone shows at about half of its size: there, type of 18 is still 10 pixels high.
WIDTH, MARGIN, SIZE, LINE = 640, 16, 18, 23
LETTER = 0.6 * SIZE  # the mean width, in a wide font

COLORS = {  # on a light page, on a dark one
    "page": ("#ffffff", "#1e2029"),
    "ink": ("#303030", "#e8e8ea"),
    "on": ("#ffffff", "#14161c"),  # words on a box
    "on-softmax": ("#303030", "#14161c"),
    "grid": ("#d9d9d9", "#4a4e5a"),
    "idle": ("#f3f3f3", "#2a2d37"),
    "load": ("#707070", "#a9adb8"),
    "scores": ("#4053d3", "#8c9bff"),
    "softmax": ("#ddb310", "#e8c547"),
    "out": ("#007a66", "#4fc3ae"),
    "store": ("#93508f", "#d49ad0"),
}


def style() -> str:
    """CSS: a class for each colour, by what the reader's device prefers."""
    light, dark = ("".join(f".{name}{{fill:{color[i]}}}" for name, color in COLORS.items()) for i in (0, 1))
    lines = [f"rect{{stroke:{COLORS['page'][i]}}}.cell{{stroke:{COLORS['grid'][i]}}}" for i in (0, 1)]
    font = f"text{{font:{SIZE}px system-ui,sans-serif}}"
    return f"<style>{font}{light}{lines[0]}@media(prefers-color-scheme:dark){{{dark}{lines[1]}}}</style>"


def svg(height: float, body: Sequence[str], title: str) -> str:
    """On a page of its own colour: where a site's switch and the device differ, it can still be read."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' width='{WIDTH}' role='img'>"
    back = box(0, 0, WIDTH, height, "page")
    return "\n".join([head, f"<title>{escape(title)}</title>", style(), back, *body, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start") -> str:
    return f"<text x='{x:g}' y='{y:g}' class='{kind}' text-anchor='{anchor}'>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' class='{kind}'/>"


def lines_of(words: str, width: float) -> list[str]:
    """Lines that fit."""
    return textwrap.wrap(words, int(width / LETTER), break_long_words=False, break_on_hyphens=False)


def paragraph(x: float, y: float, words: str, width: float, kind: str = "ink") -> list[str]:
    return [text(x, y + i * LINE, line, kind) for i, line in enumerate(lines_of(words, width))]


# Who sees what

CELL = 17


def grid(shown: Any, x: float, y: float, title: str, width: float) -> list[str]:
    """A mask bool [queries, keys]: a filled cell is a key that the query sees. The title ends above it."""
    body = paragraph(x, y - 10 - LINE * (len(lines_of(title, width)) - 1), title, width)
    for i, row in enumerate(np.asarray(shown)):
        for j, sees in enumerate(row):
            body.append(cell(x + j * CELL, y + i * CELL, "scores" if sees else "idle"))
    return body


def cell(x: float, y: float, kind: str) -> str:
    return box(x, y, CELL, CELL, f"cell {kind}")


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
        ("causal(12)", causal, n),
        ("sliding_window(12, 4)", Span.sliding_window(n, 4), n),
        ("compressed(12, 4)", Span.compressed(n, 4), 3),
        ("lengths([7])", Span.lengths(jnp.array([7], jnp.int32)), n),
        ("segments(ids)", Span.segments(ids), n),
        ("segments(ids) & causal(12)", Span.segments(ids) & causal, n),
        ("causal(12, offset=-4)", Span.causal(n, -4), n),
        ("compressed_segments(ids, 2)", Span.compressed_segments(ids, 2), 6),
    ]
    across, down = (WIDTH - 2 * MARGIN) / 2, n * CELL + LINE + 32
    body = []
    for k, (title, span, s_kv) in enumerate(spans):
        x, y = MARGIN + across * (k % 2), LINE + 16 + down * (k // 2)
        body += grid(mask_of(span, n, s_kv), x, y, title, across - 8)
    note = "Each is a Span. Down: queries, the first above. Across: keys. Filled: the query sees the key."
    body += paragraph(MARGIN, 4 * down + LINE, note, WIDTH - 2 * MARGIN)
    return svg(4 * down + 2.5 * LINE, body, "The masks that Span makes")


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
    top, right = 2 * LINE + 20, MARGIN + (n + 3) * CELL
    body = grid(near, MARGIN, top, f"window_kv: the last {window} positions", n * CELL)
    body += grid(past, right, top, f"compressed_kv: one entry for {ratio}", WIDTH - right)
    for i, j in zip(*np.nonzero(past), strict=True):
        body.append(cell(right + j * CELL, top + i * CELL, "softmax" if chosen[i, j] else "load"))
    y = top + n * CELL + 20
    for kind, words in (
        ("scores", "seen in the window"),
        ("softmax", f"chosen by the indexer, and so seen: {topk} entries"),
        ("load", "past, but not chosen: seen only without an indexer"),
        ("idle", "not seen"),
    ):
        body += [cell(MARGIN, y, kind), text(MARGIN + CELL + 10, y + CELL - 3, words)]
        y += LINE + 3
    said = (
        "Down: queries, at positions 0, 1, … Across: positions, then entries. One softmax is over the window's blue cells, "
        "the yellow entries (without an indexer the grey ones too), and the head's sink."
    )
    words = paragraph(MARGIN, y + LINE, said, WIDTH - 2 * MARGIN)
    return svg(y + (len(words) + 1) * LINE, [*body, *words], "Who sees what in a DeepSeek-V4 layer")


def drafts() -> str:
    """A step with four drafts after six tokens: each sees those before it, or all see one another."""
    new, past = 4, 6
    width = (past + new) * CELL
    top, right = 2 * LINE + 20, WIDTH / 2
    body = grid(mask_of(Span.causal(new, past), new, past + new), MARGIN, top, "a step, as it is", width + 80)
    shown = mask_of(Span.lengths(jnp.array([past + new], jnp.int32)), new, past + new)
    body += grid(shown, right, top, "is_causal=False", width + 80)
    said = f"Down: {new} new tokens. Across: {past} tokens of the cache, then the new ones. Filled: the token is seen."
    words = paragraph(MARGIN, top + new * CELL + LINE + 8, said, WIDTH - 2 * MARGIN)
    return svg(top + new * CELL + (len(words) + 1.5) * LINE, [*body, *words], "What drafts see")


OWNERS = ("scores", "softmax", "out", "store")


def zigzag() -> str:
    """Who computes which rows of a causal mask, with tokens as they come and in zigzag order."""
    n, devices = 16, len(OWNERS)
    body, top = [], LINE + 30
    for k, (title, order) in enumerate(
        (("as they come", np.arange(n)), ("zigzag", layers.zigzag(np.arange(n)[None], devices)[0]))
    ):
        x = MARGIN + k * WIDTH / 2
        body += paragraph(x, LINE + 8, title, WIDTH / 2)
        pairs = [0] * devices
        for place, i in enumerate(np.asarray(order).tolist()):
            owner = place * devices // n
            pairs[owner] += i + 1
            body += [cell(x + j * CELL, top + i * CELL, OWNERS[owner] if j <= i else "idle") for j in range(n)]
        body += paragraph(x, top + n * CELL + LINE + 4, f"pairs: {', '.join(map(str, pairs))}", WIDTH / 2)
    said = (
        f"Down: queries by position. Across: keys. A colour is a device; each of {devices} has {n // devices} of the {n} tokens. "
        "Below: how many pairs of query and key each device has, so how much it computes."
    )
    y = top + n * CELL + 2 * LINE + 12
    words = paragraph(MARGIN, y + LINE, said, WIDTH - 2 * MARGIN)
    return svg(y + (len(words) + 1) * LINE, [*body, *words], "Causal attention over devices")


def pages() -> str:
    """Pages of a pool at three moments, as the allocator of examples/serving hands them out."""
    pool, size, down = Pages(places=2, room=6 * 32, page=32, count=6), 46, 4 * LINE + 62
    texts: dict[int, str] = {}
    body = []

    def moment(k: int, title: str) -> None:
        y = k * down + LINE
        body.append(text(MARGIN, y, title))
        body.append(text(MARGIN, y + 44, "pool"))
        for page in range(6):
            owner = next((who for place, who in texts.items() if page in pool.table[place]), "")
            kind = {"a": "scores", "b": "out", "c": "softmax"}.get(owner, "idle")
            x, on = MARGIN + 70 + page * (size + 8), {"idle": "ink", "softmax": "on-softmax"}.get(kind, "on")
            body.extend(
                [box(x, y + 16, size, 40, kind), text(x + size / 2, y + 43, f"{owner} {page}".strip(), on, "middle")]
            )
        rows = [", ".join(map(str, row[row >= 0].tolist())) or "no page" for row in pool.table]
        for place, row in enumerate(rows):
            body.append(
                text(MARGIN + 70, y + 56 + (place + 1) * LINE, f"place {place}, {texts.get(place, 'idle')}: {row}")
            )

    texts |= {0: "a", 1: "b"}
    pool.grow(0, 70)
    pool.grow(1, 60)
    moment(0, "Text a has 70 tokens, b 60; a page has room for 32.")
    pool.leave(1)
    del texts[1]
    moment(1, "b has ended: its place is idle, its pages are free.")
    texts[1] = "c"
    pool.grow(0, 100)
    pool.grow(1, 33)
    moment(2, "c takes the place; a has grown to 100 tokens.")
    return svg(3 * down + 8, body, "Pages of sequences that come and go")


# Who works when


def timeline(title: str, lanes: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Lanes of (kind, length, words), side by side; time runs down, not to scale. Words fit into their box."""
    width = (WIDTH - 2 * MARGIN) / len(lanes)
    needed = [
        (len(lines_of(words, width - 8)) * LINE + 6) / length for _, work in lanes for _, length, words in work if words
    ]
    unit, heads = max(needed), max(len(lines_of(who, width - 8)) for who, _ in lanes)
    body = paragraph(MARGIN, LINE + 4, title, WIDTH - 2 * MARGIN, "ink")
    top = (len(body) + heads + 1) * LINE
    for i, (who, work) in enumerate(lanes):
        x, y = MARGIN + i * width, float(top)
        body += paragraph(x + 4, top - 8 - (len(lines_of(who, width - 8)) - 1) * LINE, who, width - 8)
        for kind, length, words in work:
            body.append(box(x, y, width - 4, length * unit, kind))
            lines = lines_of(words, width - 8)
            first = y + length * unit / 2 + 6 - (len(lines) - 1) * LINE / 2
            on = "on-softmax" if kind == "softmax" else "on"
            body += [text(x + width / 2 - 2, first + k * LINE, line, on, "middle") for k, line in enumerate(lines)]
            y += length * unit
    bottom = top + max(sum(length for _, length, _ in work) for _, work in lanes) * unit
    body.append(text(MARGIN, bottom + LINE + 4, "Time runs down; heights are not to scale."))
    return svg(bottom + 2 * LINE, body, title)


def mha_forward() -> str:
    def consumer(first: float, tile: int) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("idle", first, ""), ("scores", 1, "S0"), ("softmax", 1, "P0")]
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
    left = [("idle", 1, ""), ("scores", 1, "S0"), ("softmax", 1, "P0"), ("out", 1.5, "O_l += P0 K0_l"), ("softmax", 1, "P0 → right"),
            ("out", 1.5, "O_l += P1 K1_l"), ("scores", 1, "S2"), ("softmax", 1, "P2"), ("out", 1.5, "O_l += P2 K2_l")]  # fmt: skip
    right = [("idle", 1.5, ""), ("scores", 1, "S1"), ("idle", 0.5, ""), ("softmax", 1, "P1 → left"), ("out", 1.5, "O_r += P1 K1_r"),
             ("out", 1.5, "O_r += P0 K0_r"), ("idle", 0.5, ""), ("scores", 1, "S3"), ("softmax", 1, "P3 → left")]  # fmt: skip
    load = [
        ("load", 1, "Q"),
        ("load", 1.5, "K0"),
        ("load", 1.5, "K1"),
        ("idle", 2, ""),
        ("load", 1.5, "K2"),
        ("load", 1.5, "K3"),
    ]
    lanes = [("producers", load), ("left", left), ("right", right)]
    return timeline("mla_fwd_sm90, the seesaw: each side owns 256 columns of O and one key tile of a pair", lanes)


def few_heads() -> str:
    def cta(first: float) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("idle", first, "")] if first else []
        for t in range(3):
            work += [("scores", 1.5, f"S' = K{t} Q'"), ("softmax", 1.2, f"P{t}"), ("out", 1.5, f"O' += K{t}' P{t}'")]
        return work

    lanes = [("CTA 0, consumer", cta(0)), ("CTA 1, consumer", cta(2.1))]
    return timeline("mla_few_heads_fwd_sm90: two CTAs of an SM, keys as rows, heads as columns", lanes)


def decode() -> str:
    halves = ("K0 left", "K1 right", "K0 right", "K1 left")
    load: list[tuple[str, float, str]] = []
    for pair in range(2):
        load += [("idle", 1.2, "")] if pair else []
        for half in halves:
            load += [("load", 0.5, "FP8"), ("softmax", 1, half)]
    work = [("scores", 1.2, "S"), ("softmax", 1, "P"), ("out", 2, "O")]
    lanes = [
        ("eight producer warps", load),
        ("left", [("idle", 4.5, ""), *work, *work]),
        ("right", [("idle", 6, ""), *work]),
    ]
    return timeline("mla_fwd_sm90 over FP8 pages: a half of a tile waits in registers for its place", lanes)


def indexer() -> str:
    def group(first: float) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("idle", first, "")] if first else []
        for t in range(3):
            work += [("scores", 1, f"K{t} Q'"), ("softmax", 1, "Σ over heads")]
        return work

    lanes = [(f"warpgroup {i}", group(0.5 * i)) for i in range(4)]
    row = [("load", 1, "guess"), ("scores", 1.5, "collect"), ("softmax", 1.5, "narrow"), ("store", 1.5, "emit")]
    return timeline(
        "indexer_scores_sm90: sums under products; then indexer_topk, one CTA a row",
        [*lanes, ("top-k, one row", row)],
    )


def blackwell() -> str:
    load = [("load", 1, f"K{t}") for t in range(5)]
    both = [
        x for t in range(3) for half in range(2) for x in (("scores", 0.6, f"S{t + 2}"), ("out", 0.6, f"O += P{t}"))
    ]
    mma = [("idle", 1, ""), ("scores", 1, "S0"), ("scores", 1, "S1"), ("idle", 0.3, ""), *both]
    softmax = [("idle", 2, ""), ("softmax", 1.3, "P0"), *(("softmax", 2.4, f"P{t}") for t in (1, 2))]
    rows = [("load", 1, "Q"), ("load", 1.2, "next Q"), ("idle", 6.1, ""), ("store", 1.5, "O")]
    lanes = [("TMA", load), ("MMA", mma), ("softmax, 4 warps", softmax), ("rows, 4 warps", rows)]
    return timeline("mla_fwd_sm100: scores and P V by turns, two tiles apart; S, Q and O in tensor memory", lanes)


def mla_backward() -> str:
    load = [("load", 2, "K0"), ("idle", 1, ""), ("load", 2, "K1"), ("idle", 1.5, ""), ("load", 2, "K2")]
    left = [("idle", 1, ""), ("scores", 2, "S, dP"), ("softmax", 1, "P, dS"), ("out", 1.2, "dq left"), ("store", 1.2, "dkv, 4 chunks"),
            ("scores", 2, "S, dP of the next")]  # fmt: skip
    right = [("idle", 4, ""), ("out", 1.2, "dq right"), ("store", 3.2, "dkv, 12 chunks, and reductions")]
    return timeline("mla_bwd_sm90: rows stay, keys pass", [("producers", load), ("left", left), ("right", right)])


def mha_backward() -> str:
    def consumer(first: float) -> list[tuple[str, float, str]]:
        work: list[tuple[str, float, str]] = [("idle", first, "")]
        for t in range(2):
            work += [
                ("scores", 1.5, f"K Q{t}', V dO{t}'"),
                ("softmax", 1.2, "P', dS'"),
                ("out", 2, f"dV\u00a0+=\u00a0P'\u00a0dO{t}, dK\u00a0+=\u00a0dS'\u00a0Q{t}"),
            ]
        return [*work, ("store", 1, "dK, dV")]

    load = [("load", 1, "K V"), *(("load", 2, f"Q{t} dO{t}") for t in range(3))]
    lanes = [("producer warp", load), ("64 keys", consumer(2)), ("64 keys more", consumer(2.8))]
    return timeline("mha_dkdv_sm90: keys are rows and stay, tiles of Q and dO pass", lanes)


def rope() -> str:
    def row(i: int) -> list[tuple[str, float, str]]:
        ahead: list[tuple[str, float, str]] = [("idle", 0.7 * i, "")] if i else []
        return [*ahead, ("load", 1.2, f"x, row {i}"), ("idle", 2.2 + 2.8 * i, ""), ("softmax", 1.5, "Σ x², 5 shuffles"),
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
        ("idle", 6.9, ""), ("out", 1, "merge"), ("softmax", 1, "Σ x²"), ("out", 1.6, "norm, turn, pack"), ("store", 0.8, "store")
    ]  # fmt: skip
    lanes = [(f"group {i}", group(i)) for i in range(4)]
    return timeline("kv_insert: a sequence whose block is complete", [*lanes, ("a warp", finish)])


BESIDE = (  # what is timed; the peer; the record, and the row, of its time and of ours
    ("a prompt, window and 1024 chosen entries", "FlashMLA", "flashmla", *["peers: d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128"] * 2),
    ("a prompt, window alone", "FlashMLA", "flashmla", *["peers: d 512 window 128 b1 s4096 h128"] * 2),
    ("a step from FP8 caches, 64 sequences", "FlashMLA", "flashmla", *["peers: d 512 window 128 + top-k 1024 of 16384 b64 s2 h128 fp8"] * 2),
    ("the indexer, 512 of 8192 entries", "cuDNN frontend", "cudnn_frontend", *["cudnn_frontend: top-k 512 of 8192, bfloat16 h64, b1 s4096"] * 2),
    ("backward, window alone", "XLA", "xla", *["grad: gradient of d 512 window 128 b1 s4096 h128"] * 2),
    ("backward, d 128, sliding window", "cuDNN", "cudnn", *["grad: gradient of d 128 window 128 b2 s8192 h16/1"] * 2),
)  # fmt: skip


def beside_peers() -> str:
    """A bar for each: how many times as long as ours the best peer takes that we timed."""

    def seconds(row: str, name: str) -> float:
        file, _, wanted = row.partition(": ")
        rows = json.loads((PICTURES.parent / f"h200_{file}.json").read_text())["rows"]
        return float(next(x for x in rows if x["name"] == wanted)["times"][name]["seconds"])

    unit, across, down, top = 250, WIDTH - 2 * MARGIN, LINE + 42, 2 * LINE + 12
    body = [text(MARGIN, LINE, "How many times as long as ours others take, on one H200")]
    for i, (what, who, name, theirs, mine) in enumerate(BESIDE):
        ratio, y = seconds(theirs, name) / seconds(mine, "ours"), top + i * down
        body += [text(MARGIN, y + 14, what), box(MARGIN, y + LINE, min(ratio * unit, across), 30, "scores")]
        if ratio * unit > across:  # the bar is broken
            body.append(box(MARGIN + across - 40, y + LINE, 10, 30, "page"))
        body.append(text(MARGIN + 10, y + LINE + 21, f"{who} {ratio:.{2 * (ratio < 9.95)}f} ×", "on"))
        body.append(box(MARGIN + unit - 2, y + LINE - 4, 4, 38, "ink"))
    height = top + len(BESIDE) * down
    body.append(text(MARGIN + unit, height + 10, "ours", anchor="middle"))
    note = "Forward and steps: 128 heads of d 512."
    body += paragraph(MARGIN, height + LINE + 16, note, across)
    return svg(height + 3 * LINE + 16, body, "Attention beside the best peer that was timed")


DRAWN: dict[str, Callable[[], str]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        masks,
        layer,
        drafts,
        zigzag,
        pages,
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
        beside_peers,
    )
}


def main() -> None:
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
