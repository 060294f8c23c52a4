"""Where training was followed from step to step: docs/learns_*.jsonl, as examples/deepseek_v4/train.py wrote them."""

import json
import statistics
from collections import defaultdict

from .records import DOCS, load, table

RUNS = {
    "v4": "V4: a window, chosen entries, all entries",
    "v4_rounded": "V4 with `--fake-quantize`",
    "dense": "dense attention in all three layers",
}
BYTES_OF_ADAM = 28
"""of a parameter: it, two moments and the gradient are read, and all but the last written, in float32"""
STREAMS, SUBLAYERS = 4, 2
"""of a token in V4, and of a layer"""
ARRAYS = 5
"""of streams, each with the row of a sublayer: read and written by connections; read twice and written by their gradient"""
ONE_PART = {"experts": "moe"}
OF_PART = {
    "products": "attention's projections",
    "connections": "hyper-connections",
    "moe": "experts, routed and shared, and the router",
    "head": "head and loss",
    "optimizer": "optimizer",
    "attention": "attention",
    "rest": "rest",
    "compressor": "compressors",
    "indexer": "indexers",
    "norm": "norms of attention",
    "collectives": "collectives",
    "idle": "idle",
}
HIDDEN, INNER, CHOSEN = 4096, 2048, 6
"""of V4-Flash's experts: their channels, those inside, and how many a token has"""
LAST = 25
"""steps of a mean"""
REMAT = {
    "all": "all of a layer",
    "but-attention": "all but attention",
    "but-experts": "all but attention and the routed experts' products",
    "but-products": "all but attention and products with matrices",
    "but-parameters": "all but these and parameters in bfloat16",
    "none": "nothing",
}


def learns() -> str:
    """The losses of the runs at some steps, and how far apart V4 and dense attention are."""
    losses = {}
    for name in RUNS:
        lines = (DOCS / f"learns_{name}.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    (count,) = {len(x) for x in losses.values()}
    ends = [count // 4, count // 2, count]
    means = {name: [statistics.fmean(x[end - LAST : end]) for end in ends] for name, x in losses.items()}
    rows = [[RUNS[name], *(f"{x:.3f}" for x in means[name])] for name in RUNS]
    apart = (f"{x - y:+.3f}" for x, y in zip(means["v4"], means["dense"], strict=True))
    rows.append(["V4 less dense attention", *apart])
    return table(f"loss, mean of {LAST} steps | " + " | ".join(f"to step {end}" for end in ends), rows)


def remat() -> str:
    """What the forward pass keeps by each --remat."""
    kept = load("kept")["kept"]
    return table("`--remat` | computed anew | GiB kept", [[f"`{x}`", REMAT[x], f"{kept[x]:.1f}"] for x in kept])


def head_loss() -> str:
    """What the head's loss takes."""
    loss = load("kept")["loss"]
    rows = [["1024 tokens at a time", f"{loss['parts']:.1f}"], ["all logits at once", f"{loss['all logits']:.1f}"]]
    return table("loss and gradient | GiB of temporary arrays on a CPU", rows)


def experts_budget() -> str:
    """Bytes and FLOP of a layer's experts in training, forward and back, and the least time that they take."""
    row, k, n = load("h200_training"), HIDDEN, INNER
    rows, number = row["b"] * row["s"] * CHOSEN, 2  # bytes

    def moved(*columns: float) -> str:
        return f"{(size := sum(columns) * rows * number) / 1e9:.2f} GB, {1e6 * size / row['C']:.0f} µs"

    def multiplied(n_times_k: int) -> str:
        return f"{(flop := 2 * n_times_k * n * k * rows) / 1e12:.2f} TFLOP, {1e6 * flop / row['M']:.0f} µs"

    by_token = moved(k, k / CHOSEN)
    lines = [
        ["rows by expert", moved(2 * k), moved(4 * k)],
        ["SwiGLU, by XLA before", moved(3 * n), moved(3 * n, 3 * n, 5 * n)],
        ["SwiGLU, at the end of products", moved(n), moved(4 * n)],
        ["the sum over a token's experts", by_token, by_token],
        ["products", multiplied(3), multiplied(6)],
    ]
    return table("least, at C and at M | forward | gradient", lines)


def training_parts() -> str:
    """A step of training by part, each beside the least that its products or its bytes take."""
    row = load("h200_training")
    of_streams = 2 * ARRAYS * (STREAMS + 1) * HIDDEN * row["b"] * row["s"] * SUBLAYERS * row["layers"]
    moved = {"optimizer": row["parameters"] * BYTES_OF_ADAM, "connections": of_streams}
    least = defaultdict(float, {part: 1e3 * size / row["C"] for part, size in moved.items()})
    for part, tflop in row["TFLOP"].items():
        least[ONE_PART.get(part, part)] += 1e15 * tflop / row["M"]
    parts = defaultdict(float)
    for part, ms in row["parts"].items():
        parts[ONE_PART.get(part, part)] += ms
    rows = []
    for part, ms in sorted(parts.items(), key=lambda item: -item[1]):
        least_ms = f"{least[part]:.0f}" if least.get(part, 0) >= 1 else "–"
        rows.append([OF_PART[part], f"{ms:.0f}", least_ms])
    rows.append(["all", f"{row['ms']:.0f}", f"{sum(least.values()):.0f}"])
    rate = f"The step makes {row['tokens/s']:.0f} tokens/s, MFU {100 * row['mfu']:.1f} %. XLA says that it holds "
    rate += f"{row['GiB of state']:.1f} GiB of parameters and moments, and {row['GiB beside it']:.1f} GiB beside them."
    return table("ms of a step | measured | least", rows) + "\n\n" + rate
