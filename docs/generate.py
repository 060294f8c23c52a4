"""Writes into the pages what was measured, from the JSON files beside this one, between marks:

    <!-- generated: NAME -->
    …
    <!-- end -->

`python docs/generate.py` does so for every page; `tests/test_docs.py` asserts that it would change nothing.
`make pictures` runs it, and draws the pictures from the same files. A new measurement is a new JSON file, and that run
again.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
MARKED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.S)


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DOCS / f"{name}.json").read_text())
    return data


FORWARD, DECODE, GRAD = map(load, ("h200", "h200_decode", "h200_grad"))
INDEXER, LAYER, PEERS = map(load, ("h200_indexer", "h200_layer", "h200_peers"))


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + "---|" + "---:|" * (len(names) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def micro(seconds: float) -> str:
    """Three digits."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 99.95 else f"{us:.1f}"


def ours(row: dict[str, Any]) -> float:
    return float(row["times"]["ours"]["seconds"])


def of_peer(row: dict[str, Any], peer: str) -> str:
    """How many times as long the peer takes."""
    if peer not in row["times"]:
        return "–"
    ratio = row["times"][peer]["seconds"] / ours(row)
    return f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def share(row: dict[str, Any]) -> str:
    """The share of the roofline, which the machine's matrix rate and copy rate give."""
    least = max(row["flops"] / row["matmul_flops_per_s"], row["bytes"] / row["copy_bytes_per_s"])
    return f"{100 * least / ours(row):.0f} %"


def rate(row: dict[str, Any]) -> str:
    return f"{row['flops'] / ours(row) / 1e12:.0f}" if row["flops"] else "–"


def suite(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if row["suite"] == name and "ours" in row["times"]]


def rows_of(data: dict[str, Any], name: str, *peers: str) -> list[list[str]]:
    return [
        [row["name"], micro(ours(row)), rate(row), share(row), *(of_peer(row, peer) for peer in peers)]
        for row in suite(data, name)
    ]


def dsv4() -> str:
    return table("layer | µs | TFLOP/s | of the roofline | two passes / ours", rows_of(FORWARD, "dsv4", "two_pass"))


def dense() -> str:
    rows = [*rows_of(FORWARD, "dense", "cudnn", "xla"), *rows_of(FORWARD, "window", "cudnn", "xla")]
    return table("attention | µs | TFLOP/s | of the roofline | cuDNN / ours | XLA / ours", rows)


STEP = re.compile(r"d 512 window 128 \+ top-k (\d+) of 16384 b(\d+) s2 h(\d+)(?: (\w+))?$")
CACHES = {None: "bfloat16", "fp8": "FP8", "v41_fp4": "V4.1's FP8 and FP4"}


def decode() -> str:
    """A row for each kind of cache and number of heads, a column for each batch; then what is left."""
    kinds: dict[tuple[str, ...], dict[int, str]] = {}
    others = []
    for row in suite(DECODE, "decode"):
        if found := STEP.match(row["name"]):
            topk, b, heads, cache = found.groups()
            kinds.setdefault((heads, topk, CACHES[cache]), {})[int(b)] = micro(ours(row))
        else:
            beside = next((peer for peer in ("contiguous", "graph") if peer in row["times"]), "")
            others.append([row["name"], micro(ours(row)), rate(row), share(row), of_peer(row, beside)])
    batches = sorted({b for times in kinds.values() for b in times})
    first = table(
        " | ".join(["a step, cache", *(f"b {b}, µs" for b in batches)]),
        (
            [f"{heads} heads, top-k {topk}, {cache}", *(times.get(b, "–") for b in batches)]
            for (heads, topk, cache), times in kinds.items()
        ),
    )
    return first + "\n\n" + table("other steps | µs | TFLOP/s | of the roofline | beside it / ours", others)


def grad() -> str:
    rows = []
    for row in suite(GRAD, "grad"):
        both, theirs = row["times"].get("both"), row["times"].get("both by cudnn")
        rows.append(
            [
                row["name"].removeprefix("gradient of "),
                micro(ours(row)),
                rate(row),
                share(row),
                micro(both["seconds"]) if both else "–",
                f"{theirs['seconds'] / both['seconds']:.2f}" if both and theirs else "–",
                of_peer(row, "xla"),
            ]
        )
    return table("gradient | µs | TFLOP/s | of the roofline | both passes, µs | cuDNN / ours, both | XLA / ours", rows)


def indexer() -> str:
    theirs = {row["name"]: f"{row['us']:g}" for row in PEERS["cudnn_frontend"]}
    rows = [[*row, theirs.get(row[0], "–")] for row in rows_of(INDEXER, "indexer", "xla")]
    return table("indexer | µs | TFLOP/s | of the roofline | XLA / ours | cuDNN frontend, µs", rows)


def layer() -> str:
    """A row for each kind of layer, and what each of its parts takes."""
    parts = ("products", "attention", "indexer", "compressor", "append", "rope", "norm", "other")
    rows = []
    for row in suite(LAYER, "layer"):
        times = row["times"]["ours"]["parts"]
        rest = 1 - (times["products"] + times["attention"]) / sum(times.values())
        each = (micro(times[part]) if part in times else "" for part in parts)
        rows.append([row["name"].removeprefix("layer "), micro(ours(row)), *each, f"{100 * rest:.1f} %"])
    return table(" | ".join(["layer", "all", *parts, "rest"]), rows)


def flashmla() -> str:
    first = table(
        "s_q 4096, sink, bfloat16 | FlashMLA, µs | ours, µs | FlashMLA / ours",
        ([r["name"], f"{r['flashmla_us']:g}", f"{r['ours_us']:g}", f"{r['ratio']:g}"] for r in PEERS["forward"]),
    )
    bf16 = {(r["heads"], r["b"]): f"{r['ratio']:.2f}" for r in PEERS["decode_bf16"]}
    second = table(
        "a step, two queries | FlashMLA (FP8), µs | ours, FP8, µs | FlashMLA / ours | FlashMLA / ours, bfloat16",
        (
            [
                _step(r),
                f"{r['flashmla_us']:.3g}",
                f"{r['fp8_us']:.3g}",
                f"{_beside_flashmla(r):.2f}",
                bf16.get((r["heads"], r["b"]), "–"),
            ]
            for r in PEERS["decode"]["rows"]
        ),
    )
    return first + "\n\n" + second


def _step(r: dict[str, Any]) -> str:
    return f"{r['heads']} heads, top-k {r['topk']}, b {r['b']}"


def _beside_flashmla(r: dict[str, Any]) -> float:
    return float(r["flashmla_us"] / r["fp8_us"])


def machine() -> str:
    """The machines on which the numbers were measured."""
    lines = []
    runs = {"forward": FORWARD, "steps": DECODE, "gradients": GRAD, "indexer": INDEXER, "layers": LAYER}
    for name, data in runs.items():
        matmul, copy = (
            sorted(row[key] for row in data["rows"])[len(data["rows"]) // 2]
            for key in ("matmul_flops_per_s", "copy_bytes_per_s")
        )
        versions = data["versions"]
        lines.append(
            f"- {name}: {data['devices'][0]['name']}, {data['date'][:10]}, jax {versions['jax']}, CUDA driver"
            f" {versions['cuda_driver']}; M {matmul / 1e12:.0f} TFLOP/s, C {copy / 1e12:.2f} TB/s, {data['rounds']} rounds"
        )
    return "\n".join(lines)


def _of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in data["rows"] if row["name"] == name)


def _range(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def readme() -> str:
    layer = _of(FORWARD, "d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128")
    window = _of(FORWARD, "d 512 window 128 b1 s4096 h128")
    backward = _of(GRAD, "gradient of d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128")
    chosen = _of(INDEXER, "top-k 512 of 8192, bfloat16 h64, b1 s4096")
    first = PEERS["forward"][0]
    packed, plain = (
        {h: _range(ratio(r) for r in rows if r["heads"] == h and r["b"] >= 64) for h in (128, 64)}
        for rows, ratio in (
            (PEERS["decode"]["rows"], _beside_flashmla),
            (PEERS["decode_bf16"], lambda r: float(r["ratio"])),
        )
    )
    return f"""On one {FORWARD["devices"][0]["name"].removeprefix("NVIDIA ")}, device time:

- A layer of 128 heads over a window of 128 and 1024 selected keys takes {ours(layer) * 1e3:.2f} ms for 4096 queries,
  {rate(layer)} TFLOP/s. FlashMLA takes {first["ratio"]:.2f} times as long in the same run.
- The same layer with a window alone takes {ours(window) * 1e3:.2f} ms; XLA takes {of_peer(window, "xla")} times as long.
- A step of generation at b 64 to 148 from caches in FP8: FlashMLA takes {packed[128]} times as long with 128 heads,
  {packed[64]} times with 64. From FP8 it takes {plain[128]} and {plain[64]} times as long as our step from bfloat16.
- The first layer's backward pass takes {ours(backward) * 1e3:.2f} ms, {rate(backward)} TFLOP/s.
- To choose 512 of 8192 entries for 4096 queries takes {ours(chosen) * 1e3:.2f} ms; XLA takes {of_peer(chosen, "xla")} times as long."""


def losses() -> str:
    few = _of(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h16")
    far = _of(GRAD, "gradient of d 512 window 128 + top-k 512 of 65536 b1 s4096 h64")
    torch = min(PEERS["torch_cudnn"], key=lambda row: row["ratio"])
    return f"""- **Few heads**: a prefill layer of 16 heads over selected keys reaches {share(few)} of the roofline.
- **Backward over far keys**: 512 of 65536 keys at 64 heads reach {share(far)} of the roofline.
- **Small dense calls**: cuDNN as torch 2.11 calls it takes {torch["ratio"]:.2f} times our time for {torch["name"]}."""


GENERATED: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (dsv4, dense, decode, grad, indexer, layer, flashmla, machine, readme, losses)
}


def generated(text: str) -> str:
    """A page's text with what is between marks made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{GENERATED[found[2]]()}\n{found[3]}", text)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if (new := generated(text)) != text:
            page.write_text(new)
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
