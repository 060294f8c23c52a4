"""Predicts by clocks what our own kernels take, beside what an H200 took, for docs/clocks.md.

    python -m interpreter.kernels.predictions docs/clocks.json           all
    python -m interpreter.kernels.predictions docs/clocks.json 'd 128'   only rows whose names have one of these words
    python -m interpreter.kernels.predictions docs/clocks.json sm_100f   the same launches on a B200, by their accounts
    python -m interpreter.kernels.predictions docs/clocks.json layers    those of which cuDNN published times on a GB200

A launch of a whole GPU is not run: one SM's share of it is counted. Runs of one SM with so many tiles of rows and with
more of them say what a further tile takes, and what a launch takes beside its tiles.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.abi import Forward
from kernels.variants import VARIANTS

from .. import clocks
from . import attention, long
from .launch import Kernel, launch
from .native import variant_of

DOCS = Path(__file__).parents[2] / "docs"
B200 = "sm_100f"
ARCHITECTURES = {"sm_90a": 132, B200: 148}  # SMs
B200_GHZ, B200_BYTES = 1.83, 7.2e12  # at which cuDNN frontend's benchmarks ran; of memory, a second


def gigahertz(tensor: float) -> float:
    """The clock of an H200 at 700 W, by the tensor pipe's share: what ncu's shares of kernels and their times give
    (docs/h200_kernels.json: 60 % of top-k 512, 69 % of top-k 1024), and a matrix product's 1.5 GHz."""
    return min(1.98, 1.755 - 0.68 * (tensor - 0.6))


@dataclass(frozen=True)
class Launch:
    """A row of a record, whose queries see so many keys of the first source and of the second."""

    record: str  # docs/h200*.json
    name: str  # of its row
    op: str
    d: int
    b: int
    s: int  # queries of a sequence
    h: int
    keys: tuple[int, int]
    is_causal: bool = False  # the last query sees all keys
    packing: str = ""
    fitted: bool = False  # constants were chosen with it in sight
    cold: bool = False  # keys come out of HBM

    def key(self, arch: str) -> str:
        """Returns the key of the kernel that is called; raises LookupError if there is none."""
        found = [
            v
            for v in VARIANTS
            if isinstance(v, Forward)
            and (v.name, v.arch, v.d, v.dtype, v.packing) == (self.op, arch, self.d, "bfloat16", self.packing)
            and v.max_heads >= self.h
        ]
        if not found:
            raise LookupError(f"{arch} has no kernel for {self.name}")
        return min(found, key=lambda v: v.max_heads).key

    def row(self) -> dict[str, Any]:
        """Returns the row that its record has of it."""
        rows: list[dict[str, Any]] = json.loads((DOCS / self.record).read_text())["rows"]
        (found,) = (row for row in rows if row["name"] == self.name)
        return found

    def tiles(self, kernel: Kernel[Forward]) -> int:
        """Counts the launch's tiles of rows; those of clusters, if it has any."""
        rows = kernel.facts["tile_m"] * kernel.facts["cluster"]
        if kernel.variant.gathers:
            return self.b * self.s * math.ceil(self.h / rows)
        return (
            self.b * self.h * math.ceil(self.s / rows) if self.d < 512 else self.b * math.ceil(self.s * self.h / rows)
        )

    def steps(self, kernel: Kernel[Forward]) -> int:
        """Counts the different numbers of keys that tiles of rows see in a causal launch."""
        return self.s if self.d == 512 else math.ceil(self.s / (kernel.facts["tile_m"] * kernel.facts["cluster"]))


FORWARD, DECODE = "h200.json", "h200_decode.json"
MHA, SPAN, SPARSE, CSA, HCA, STEP = "mha_fwd", "mla_span_fwd", "mla_sparse_fwd", "csa_fwd", "hca_fwd", "dsv4_decode"

LAUNCHES = (
    Launch(FORWARD, "d 64 causal b4 s8192 h16", MHA, 64, 4, 8192, 16, (8192, 0), is_causal=True, fitted=True),
    Launch(FORWARD, "d 128 full b2 s8192 h16", MHA, 128, 2, 8192, 16, (8192, 0), fitted=True),
    Launch(FORWARD, "d 128 causal b2 s8192 h16", MHA, 128, 2, 8192, 16, (8192, 0), is_causal=True),
    Launch(FORWARD, "d 128 causal b1 s512 h16", MHA, 128, 1, 512, 16, (512, 0), is_causal=True),
    Launch(FORWARD, "d 256 causal b2 s8192 h8/1", MHA, 256, 2, 8192, 8, (8192, 0), is_causal=True, fitted=True),
    Launch(FORWARD, "d 512 causal b1 s4096 h128", SPAN, 512, 1, 4096, 128, (4096, 0), is_causal=True, fitted=True),
    Launch(FORWARD, "d 512 window 128 b1 s4096 h128", SPAN, 512, 1, 4096, 128, (128, 0), cold=True),
    Launch(FORWARD, "d 512 window 128 b1 s4096 h64", SPAN, 512, 1, 4096, 64, (128, 0), cold=True),
    Launch(FORWARD, "d 512 top-k 1024 of 8192 b1 s4096 h128", SPARSE, 512, 1, 4096, 128, (1024, 0), fitted=True),
    Launch(FORWARD, "d 512 top-k 512 of 8192 b1 s4096 h64", SPARSE, 512, 1, 4096, 64, (512, 0)),
    Launch(FORWARD, "d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128", CSA, 512, 1, 4096, 128, (128, 1024)),
    Launch(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h64", CSA, 512, 1, 4096, 64, (128, 512)),
    Launch(FORWARD, "d 512 window 128 + 512 of ratio 128 b1 s4096 h128", HCA, 512, 1, 4096, 128, (128, 512)),
    Launch(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h16", CSA, 512, 1, 4096, 16, (128, 512)),
    *(
        Launch(
            DECODE,
            f"d 512 window 128 + top-k {topk} of 16384 b{b} s2 h{h}{' fp8' * bool(packing)}",
            STEP,
            512,
            b,
            2,
            h,
            (128, topk),
            packing=packing,
            cold=True,
        )
        for b, h, topk, packing in (
            (128, 64, 512, ""),
            (64, 64, 512, "v4_fp8"),
            (128, 64, 512, "v4_fp8"),
            (128, 128, 1024, "v4_fp8"),
        )
    ),
)


@dataclass(frozen=True)
class Taken:
    """The clocks that a run of one SM, or of a cluster's, takes, and those of its tensor pipe."""

    clocks: float
    tensor: float


def measure(kernel: Kernel[Forward], x: attention.Operands, cold: bool) -> Taken:
    ctas = kernel.facts["ctas"]
    run = launch(kernel, x, processors=kernel.facts["cluster"] * ctas)
    timing = clocks.run(run.machine, ctas, cold=cold)
    return Taken(timing.clocks, timing.tensor)


def operands(kernel: Kernel[Forward], tiles: int, keys: tuple[int, int]) -> attention.Operands:
    """Makes operands for so many tiles of rows of a CTA, or of a cluster."""
    v, rows, count = kernel.variant, kernel.facts["tile_m"] * kernel.facts["cluster"], tiles * kernel.facts["ctas"]
    if v.op == "mha_fwd":
        return long.operands(v, rows, keys, queries=rows, heads=count)
    return long.operands(v, rows, keys, queries=count, heads=min(rows, v.max_heads))


def predict(x: Launch, arch: str = "sm_90a") -> tuple[float, float]:
    """(clocks of the launch, the tensor pipe's share)"""
    kernel: Kernel[Forward] = Kernel.of(variant_of(x.key(arch)))
    per_turn, rows = ARCHITECTURES[arch] * kernel.facts["ctas"] // kernel.facts["cluster"], x.tiles(kernel)
    few, more = 1, 3

    def of_tile(keys: tuple[int, int]) -> tuple[Taken, float]:
        """(what one more tile takes, what a launch takes beside)"""
        a, b = (measure(kernel, operands(kernel, n, keys), x.cold) for n in (few, more))
        each = Taken((b.clocks - a.clocks) / (more - few), (b.tensor - a.tensor) / (more - few))
        return each, a.clocks - few * each.clocks

    if not x.is_causal:
        each, beside = of_tile(x.keys if x.keys[0] <= 2048 else (1600, 0))
        if x.keys[0] > 2048:
            each, beside = of_keys(of_tile, kernel, x.keys[0])
        total = beside + math.ceil(rows / per_turn) * each.clocks
        return total, rows / per_turn * each.tensor / total
    steps = x.steps(kernel)
    seen = [math.ceil((n + 1) * x.keys[0] / steps) for n in range(steps)]
    if rows <= per_turn:  # each SM has one tile, and the longest decides
        each, beside = of_tile((seen[-1], 0))
        return beside + each.clocks, rows / per_turn * each.tensor / (beside + each.clocks)
    each, beside = of_keys(of_tile, kernel, sum(seen) / len(seen))
    total = beside + rows / per_turn * each.clocks
    return total, rows / per_turn * each.tensor / total


def of_keys(
    of_tile: Callable[[tuple[int, int]], tuple[Taken, float]], kernel: Kernel[Forward], keys: float
) -> tuple[Taken, float]:
    """Predicts a tile of more keys than are worth running, in a straight line from two numbers of them."""
    tile = kernel.facts["tile_n"] * kernel.facts["unit"]
    low, high = 6 * tile, 14 * tile
    (a, beside), (b, _) = of_tile((low, 0)), of_tile((high, 0))
    share = (math.ceil(keys / tile) * tile - low) / (high - low)
    return Taken(a.clocks + share * (b.clocks - a.clocks), a.tensor + share * (b.tensor - a.tensor)), beside


def measured(x: Launch) -> float:
    """Seconds of the kernels alone."""
    kernels = x.row()["times"]["ours"]["kernels"]
    return float(sum(t for name, t in kernels.items() if "fwd" in name))


def floor(x: Launch) -> float:
    """Seconds that its bytes take out of the GPU's memory."""
    row = x.row()
    return float(row["bytes"] / row["copy_bytes_per_s"])


def blackwell(accounts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, object]]:
    """Returns what the same launches would take on a B200, and the least that their accounts allow."""
    found = {}
    for x in LAUNCHES:
        try:
            key = x.key(B200)
        except LookupError:
            continue
        took, share = predict(x, B200)
        account = accounts[key]
        least = share * took * account["units"][account["bound"]] / account["units"]["tensor"]
        bytes_us = 1e6 * x.row()["bytes"] / B200_BYTES
        by_memory = bytes_us > least / B200_GHZ / 1e3
        found[x.name] = {
            "kernel": key,
            "clocks": round(took),
            "predicted_us": round(max(took / B200_GHZ / 1e3, bytes_us), 1),
            "at_least_us": round(max(least / B200_GHZ / 1e3, bytes_us), 1),
            "bound": "memory" if by_memory else account["bound"],
        }
        print(x.name, found[x.name], flush=True)
    return found


GB200_SMS, GB200_GHZ, PROMPT = 152, 2.062, 4096
LAYERS = {  # heads, keys of the window and selected; milliseconds in cuDNN frontend's benchmarks, GB200, 28 Sep 2026
    "V4-Pro": ("csa_fwd_sm_100f_d512_bfloat16", 128, (128, 1024), 0.919),
    "V4-Flash": ("csa_fwd_sm_100f_d512_bfloat16_h64", 64, (128, 512), 0.414),
}


def layers() -> dict[str, dict[str, object]]:
    """Predicts a prompt's attention in a layer on a GB200, whose published times are cuDNN's."""
    found = {}
    for name, (key, heads, keys, published) in LAYERS.items():
        kernel: Kernel[Forward] = Kernel.of(variant_of(key))
        cluster, few, more = kernel.facts["cluster"], 1, 4
        one, several = (
            measure(kernel, long.operands(kernel.variant, 64, keys, queries=n, heads=heads), False).clocks
            for n in (few, more)
        )
        each = (several - one) / (more - few)
        total = one - few * each + math.ceil(PROMPT / (GB200_SMS // cluster)) * each
        found[name] = {
            "kernel": key,
            "clocks of a query": round(each),
            "predicted_ms": round(total / GB200_GHZ / 1e6, 3),
            "published_ms": published,
        }
        print(name, found[name], flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*", help="only rows whose names have one of these; sm_100f, layers: as above")
    args = parser.parse_args(argv)
    record: dict[str, dict[str, object]] = json.loads(args.file.read_text()) if args.file.exists() else {}
    rows = record.setdefault("ours", {})
    for x in LAUNCHES:
        if args.words and not any(word in x.name for word in args.words):
            continue
        took, share = predict(x)
        ghz = gigahertz(share)
        seconds = max(took / ghz / 1e9, floor(x))
        us, wanted = 1e6 * seconds, 1e6 * measured(x)
        rows[x.name] = {
            "kernel": x.key("sm_90a"),
            "fitted": x.fitted,
            "clocks": round(took),
            "tensor": round(share, 3),
            "ghz": round(ghz, 3),
            "predicted_us": round(us, 1),
            "measured_us": round(wanted, 1),
        }
        print(f"{x.name:62} {us:8.1f} {wanted:8.1f} {us / wanted:.2f} {share:.0%}", flush=True)
        args.file.write_text(json.dumps(record, indent=1) + "\n")
    if not args.words or B200 in args.words:
        record[B200] = dict(blackwell(json.loads(args.file.read_text())["accounts"]))
        args.file.write_text(json.dumps(record, indent=1) + "\n")
    if not args.words or "layers" in args.words:
        record["layers"] = dict(layers())
        args.file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
