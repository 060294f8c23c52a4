"""Tables of recorded rows, for people."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .._cli.report import table as as_table

PEERS = (
    *("two_pass", "cudnn", "flash_attention_3", "xla", "flashmla", "cudnn_frontend"),
    *("contiguous", "v4_fp8", "graph", "batch_invariant", "deterministic", "bfloat16", "unpacked"),
)
"""in the order of a table's columns"""


def table(rows: Sequence[dict[str, Any]], compared: Sequence[str] = (), note: str = "") -> str:
    """Our times beside the machine's rates and the peers' times; then further times, each `compared` with the first,
    which the note explains.
    """
    peers = [name for name in PEERS if any(name in row["times"] for row in rows)]
    header = ["row", "us", "spread", "TFLOP/s", "of M", "GB/s", "of C"]
    for peer in peers:
        header += [f"{peer} us", "ratio"]
    for name in compared:
        header += [f"{name} us", *["ratio"] * (name != compared[0])]
    lines: list[list[str]] = []
    notes: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        times = row["times"]
        line = [row["name"], *_ours(row)]
        for peer in peers:
            line += [_us(times.get(peer)), _ratio(times.get(peer), times.get("ours"))]
        for name in compared:
            line.append(_us(times.get(name)))
            if name != compared[0]:
                line.append(_ratio(times.get(name), times.get(compared[0])))
        lines.append(line)
        for skipped in row["skipped"].items():
            notes[skipped] += 1
    matmul = statistics.median(row["matmul_flops_per_s"] for row in rows) / 1e12
    copy = statistics.median(row["copy_bytes_per_s"] for row in rows) / 1e9
    foot = f"M {matmul:.0f} TFLOP/s, C {copy:.0f} GB/s; ratio: the peer's time over ours"
    foot += f"; {note}" if compared else ""
    why = [f"- {name}, {n} row{'s' * (n > 1)}: {text}" for (name, text), n in notes.items()]
    return "\n".join([as_table(header, lines), foot, *why])


def _ours(row: dict[str, Any]) -> list[str]:
    ours = row["times"].get("ours")
    if not ours:
        return ["-"] * 6
    rate, flow = row["flops"] / ours["seconds"], row["bytes"] / ours["seconds"]
    return [
        _us(ours),
        f"{spread(ours['rounds']):.1%}",
        f"{rate / 1e12:.0f}",
        f"{rate / row['matmul_flops_per_s']:.2f}",
        f"{flow / 1e9:.0f}",
        f"{flow / row['copy_bytes_per_s']:.2f}",
    ]


def _us(times: dict[str, Any] | None) -> str:
    return f"{times['seconds'] * 1e6:.1f}" if times else "-"


def _ratio(times: dict[str, Any] | None, to: dict[str, Any] | None) -> str:
    return f"{times['seconds'] / to['seconds']:.2f}" if times and to else "-"


def spread(rounds: Sequence[float]) -> float:
    """The spread of the middle half of the rounds, as a part of their median."""
    low, median, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else [rounds[0]] * 3
    return (high - low) / median
