"""Ours beside FlashMLA, and in MaxText beside its dot products, each of one run."""

from typing import Any

from .records import CUDNN_FRONTEND, PEERS, STEP, load, micro, of_peer, ours, seconds, table, wrapped


def beside(peer: str) -> list[dict[str, Any]]:
    """The rows of the records of peers that a peer is in."""
    return [row for record in (PEERS, CUDNN_FRONTEND) for row in record["rows"] if peer in row["times"]]


def flashmla() -> str:
    steps, prompts = [], []
    bf16 = {key[1:]: f"{ratio:.2f}" for key, ratio in steps_beside_flashmla().items() if key[0] is None}
    for row in beside("flashmla"):
        times = [micro(seconds(row, "flashmla")), micro(ours(row)), of_peer(row, "flashmla")]
        if row["suite"] != "decode":
            prompts.append([row["name"], *times])
        elif (found := STEP.match(row["name"])) and found[4] == "fp8":
            topk, b, heads = (int(x) for x in found.groups()[:3])
            steps.append([f"{heads} heads, top-k {topk}, b {b}", *times, bf16.get((heads, b), "–")])
    first = table("a prompt, with a sink | FlashMLA, µs | ours, µs | FlashMLA / ours", prompts)
    header = "a step, two queries | FlashMLA (FP8), µs | ours, FP8, µs | FlashMLA / ours | FlashMLA / ours, bfloat16"
    return f"{wrapped(_peers_measured())}\n\n{first}\n\n{table(header, steps)}"


def _peers_measured() -> str:
    """What the record of peers is."""
    if "copied" in PEERS:
        return str(PEERS["copied"])
    flashmla = PEERS["peers"]["flashmla"]
    sources = (
        f"commit {flashmla['commit'][:7]}" if flashmla["commit"] else f"extension {flashmla['sha256'][:8]} (SHA-256)"
    )
    return f"""The record was begun by a run of `bench --flashmla` on {PEERS["date"][:10]}, of {PEERS["rounds"]} rounds or more: FlashMLA's
    {sources} through torch {flashmla["torch"]}."""


def steps_beside_flashmla() -> dict[tuple[str | None, int, int], float]:
    """How many times as long FlashMLA takes, by the kind of our cache, heads and batch."""
    found = ((STEP.match(row["name"]), seconds(row, "flashmla") / ours(row)) for row in beside("flashmla"))
    return {(step[4], int(step[3]), int(step[2])): ratio for step, ratio in found if step}


def in_maxtext() -> str:
    """Attention of V4-Flash's layers in MaxText, as examples/maxtext_times.py timed it."""
    layers = {0: "window", 4: "window, and what CSA chose", 128: "window, and all of HCA"}
    return beside_dots("8192 tokens, 64 heads", layers, load("h200_maxtext")["results"])


def layers_in_maxtext() -> str:
    """Whole layers of that attention, forward and gradient, beside attention alone."""
    layers, found, rows = {0: "a window", 4: "CSA", 128: "HCA"}, load("h200_maxtext"), []
    alone = {x["ratio"]: x for x in found["results"] if x["what"] == found["layers"]["what"]}
    for x in found["layers"]["results"]:
        attention = x["attention"] if x["tokens"] != found["tokens"] else alone[x["ratio"]]
        (theirs, own), (dots, kernels) = ((y["dots_ms"], y["ours_ms"]) for y in (x, attention))
        most = f"{theirs / own:.1f} of {theirs / (own - kernels):.1f}"
        times = [f"{theirs:.1f}", f"{own:.1f}", most, f"{dots:.1f}", f"{kernels:.2f}", f"{dots / kernels:.0f}"]
        rows.append([f"layer of {layers[x['ratio']]}, {x['tokens']} tokens", *times])
    each = "dot products, ms | ours, ms | their time / ours"
    return table(f"forward and gradient, 64 heads | {each}, of at most | attention alone: {each}", rows)


def shares_in_maxtext() -> str:
    """What a layer's and a step's kernels take with this package's attention, and what is left of dots' without any."""
    parts, rows = ("attention", "indexer", "products", "streams", "rest"), []
    for x in load("h200_maxtext")["shares"]["results"]:
        own, dots = x["ours_ms"], x["dots_ms"]
        total = sum(own.values())
        least = f"{dots / total:.1f} of {dots / (total - own['attention']):.1f}"
        each = [f"{own[part]:.1f}" if own[part] else "–" for part in parts]
        rows.append([x["of"], f"{dots:.1f}", f"{total:.1f}", *each, least])
    names = "attention | indexer | products | streams | the rest | their time / ours, of at most"
    return table(f"ms of kernels | dot products | ours | … of it {names}", rows)


def training_in_maxtext() -> str:
    """MaxText's training steps, and how far apart their losses were."""
    rows = []
    for x in load("h200_maxtext")["training"]:
        apart, theirs, own = x["apart"], x["dots_ms"], x["ours_ms"]
        far = f"{abs(apart['ours_loss'] - apart['dots_loss']):.4f}, at {apart['dots_loss']:.2f}"
        model = f"{x['model']}, {x['rows']} × {x['tokens']} tokens"
        rows.append([model, str(x["steps"]), far, f"{theirs:.1f}", f"{own:.1f}", f"{theirs / own:.1f}"])
    return table("model | steps | losses apart by at most | dot products, ms | ours, ms | their time / ours", rows)


def beside_dots(of: str, layers: dict[int, str], results: list[dict[str, Any]]) -> str:
    rows = []
    for x in results:
        theirs, own = x["dots_ms"], x["ours_ms"]
        ratio = f"{theirs / own:.{int(theirs < 10 * own)}f}"
        rows.append([f"{layers[x['ratio']]}: {x['what']}", f"{theirs:.1f}", f"{own:.2f}", ratio])
    return table(f"{of} | dot products, ms | ours, ms | their time / ours", rows)
