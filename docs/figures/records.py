"""The records of measurements, and how their figures are written."""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]


def load(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text())


def bench_records() -> dict[str, Any]:
    """The records that `bench` wrote, by the names of their files."""
    found = {path.stem: load(path.stem) for path in sorted(DOCS.glob("*.json"))}
    return {name: x for name, x in found.items() if "rounds" in x and "date" in x}


FORWARD, DECODE, GRAD, SAME_BITS = map(load, ("h200", "h200_decode", "h200_grad", "h100_grad"))


INDEXER, LAYER, PEERS, NOTED = map(load, ("h200_indexer", "h200_layer", "h200_peers", "h200_kernels"))


PROMPTS, MODEL, PRODUCTS, DEVICES = map(load, ("h200_prompt", "h200_model", "h100_products", "h100_devices"))


STEPS, STACKS, ON_H100, WITNESSED = map(load, ("h200_steps", "h200_stacks", "h100_layer", "witnesses"))
FORMS, CUDNN_FRONTEND, LATENT, WHOLE, FP8_PRODUCTS = map(
    load, ("blackwell_forms", "h200_cudnn_frontend", "h200_latent", "h200_whole", "h200_fp8_products")
)


ORDERS, CLOCKS, EXPERTS, RAN, GQA = map(load, ("orders", "clocks", "h200_experts", "ran", "h200_gqa"))
OPINIONS, UNPACKED, LOAD = map(load, ("opinions", "h200_unpack", "h200_load"))


PROFILES: dict[str, Any] = NOTED["profiles"]


SMS = int(FORWARD["devices"][0]["sms"])


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + "---|" + "---:|" * (len(names) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def texts(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A table of words."""
    return table(header, rows).replace("---:|", "---|")


def micro(seconds: float) -> str:
    """Three digits."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 99.95 else f"{us:.1f}"


def seconds(row: dict[str, Any], name: str) -> float:
    return float(row["times"][name]["seconds"])


def ours(row: dict[str, Any]) -> float:
    return seconds(row, "ours")


def of_peer(row: dict[str, Any], peer: str) -> str:
    """How many times as long the peer takes."""
    if peer not in row["times"]:
        return "–"
    ratio = seconds(row, peer) / ours(row)
    return f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def share(row: dict[str, Any]) -> str:
    """The share of the roofline, which the machine's matrix rate and copy rate give."""
    least = max(row["flops"] / row["matmul_flops_per_s"], row["bytes"] / row["copy_bytes_per_s"])
    return f"{100 * least / ours(row):.0f} %"


def rate(row: dict[str, Any]) -> str:
    return f"{row['flops'] / ours(row) / 1e12:.0f}" if row["flops"] else "–"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def bullets(text: str) -> str:
    """A list, an item for each line that begins with "- ", in lines of a page."""
    return "\n".join(wrapped(f"- {item}", "  ") for item in re.split(r"^- ", text, flags=re.M)[1:])


def launched(row: dict[str, Any]) -> list[float]:
    """The seconds of the kernels of a call, the longest first; the others are XLA's, or much shorter."""
    return sorted(row["times"]["ours"]["kernels"].values(), reverse=True)


def suite(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if row["suite"] == name and "ours" in row["times"]]


def rows_of(data: dict[str, Any], name: str, *peers: str) -> list[list[str]]:
    return [
        [row["name"], micro(ours(row)), rate(row), share(row), *(of_peer(row, peer) for peer in peers)]
        for row in suite(data, name)
    ]


def row_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in data["rows"] if row["name"] == name)


def has_own_values(row: Sequence[str]) -> bool:
    """True of a row at d 512 whose V is no part of K, by its name: these have a page of their own."""
    return re.search(r"\bd 512 \w+ b\d+ s\d+ h\d+/", row[0]) is not None


KINDS = ("with a window alone", "of ratio 4", "of ratio 128")


STEP = re.compile(r"d 512 window 128 \+ top-k (\d+) of 16384 b(\d+) s2 h(\d+)(?: (\w+))?$")


PROMPT = "d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128"


WINDOW = "d 512 window 128 b1 s4096 h128"
