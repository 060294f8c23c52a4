"""What the clocks say of our own kernels beside what an H200 took, for docs/clocks.md.

    python -m interpreter.kernels.predictions docs/clocks.json

A launch of a whole GPU is not run: one SM's share of it is counted. Runs of one SM with so many tiles of rows and with
more of them say what a further tile takes, and what a launch takes beside its tiles.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.abi import Forward
from kernels.variants import VARIANTS

from .. import clocks
from . import attention, long
from .launch import Kernel, launch
from .native import variant_of

DOCS = Path(__file__).parents[2] / "docs"
SMS = 132


def gigahertz(tensor: float) -> float:
    """The clock of an H200 at 700 W, by the tensor pipe's share: what ncu's shares of kernels and their times give
    (docs/h200_kernels.json: 60 % of top-k 512, 69 % of top-k 1024), and a matrix product's 1.5 GHz."""
    return min(1.98, 1.755 - 0.68 * (tensor - 0.6))


@dataclass(frozen=True)
class Tiles:
    """A launch: tiles of rows, each of which sees so many keys of the first source and of the second."""

    record: str  # docs/h200*.json
    name: str  # of its row
    key: str
    rows: int  # tiles of them; of a cluster's, if it has one
    keys: tuple[int, int] = (0, 0)
    causal: int = 0  # tiles of rows of a sequence, of which the last sees all keys
    fitted: bool = False  # constants were chosen with it in sight
    cold: bool = False  # keys come out of HBM


H512, SPARSE = "mla_span_fwd_sm_90a_d512_bfloat16", "mla_sparse_fwd_sm_90a_d512_bfloat16"
CSA, HCA, MHA = "csa_fwd_sm_90a_d512_bfloat16", "hca_fwd_sm_90a_d512_bfloat16", "mha_fwd_sm_90a_d{}_bfloat16"
FP8 = "dsv4_decode_sm_90a_d512_bfloat16_v4_fp8"
FORWARD, DECODE = "h200.json", "h200_decode.json"

LAUNCHES = (
    Tiles(FORWARD, "d 64 causal b4 s8192 h16", MHA.format(64), 4 * 16 * 43, (8192, 0), 43, fitted=True),
    Tiles(FORWARD, "d 128 full b2 s8192 h16", MHA.format(128), 2 * 16 * 64, (8192, 0), fitted=True),
    Tiles(FORWARD, "d 128 causal b2 s8192 h16", MHA.format(128), 2 * 16 * 64, (8192, 0), 64),
    Tiles(FORWARD, "d 128 causal b1 s512 h16", MHA.format(128), 16 * 4, (512, 0), 4),
    Tiles(FORWARD, "d 256 causal b2 s8192 h8/1", MHA.format(256), 2 * 8 * 64, (8192, 0), 64, fitted=True),
    Tiles(FORWARD, "d 512 causal b1 s4096 h128", H512, 4096 * 2, (4096, 0), 4096, fitted=True),
    Tiles(FORWARD, "d 512 window 128 b1 s4096 h128", H512, 4096 * 2, (128, 0), cold=True),
    Tiles(FORWARD, "d 512 window 128 b1 s4096 h64", H512, 4096, (128, 0), cold=True),
    Tiles(FORWARD, "d 512 top-k 1024 of 8192 b1 s4096 h128", SPARSE, 4096 * 2, (1024, 0), fitted=True),
    Tiles(FORWARD, "d 512 top-k 512 of 8192 b1 s4096 h64", SPARSE, 4096, (512, 0)),
    Tiles(FORWARD, "d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128", CSA, 4096 * 2, (128, 1024)),
    Tiles(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h64", CSA, 4096, (128, 512)),
    Tiles(FORWARD, "d 512 window 128 + 512 of ratio 128 b1 s4096 h128", HCA, 4096 * 2, (128, 512)),
    Tiles(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h16", f"{CSA}_h16", 4096, (128, 512)),
    Tiles(
        DECODE,
        "d 512 window 128 + top-k 512 of 16384 b128 s2 h64",
        "dsv4_decode_sm_90a_d512_bfloat16",
        256,
        (128, 512),
        cold=True,
    ),
    Tiles(DECODE, "d 512 window 128 + top-k 512 of 16384 b64 s2 h64 fp8", f"{FP8}_h64", 128, (128, 512), cold=True),
    Tiles(DECODE, "d 512 window 128 + top-k 512 of 16384 b128 s2 h64 fp8", f"{FP8}_h64", 256, (128, 512), cold=True),
    Tiles(DECODE, "d 512 window 128 + top-k 1024 of 16384 b128 s2 h128 fp8", FP8, 256, (128, 1024), cold=True),
)


@dataclass(frozen=True)
class Taken:
    """By a run of one SM, or of a cluster's."""

    clocks: float
    tensor: float


def measure(kernel: Kernel[Forward], x: attention.Operands, cold: bool) -> Taken:
    ctas = kernel.facts["ctas"]
    run = launch(kernel, x, processors=kernel.facts["cluster"] * ctas)
    timing = clocks.run(run.machine, ctas, cold=cold)
    return Taken(timing.clocks, timing.tensor)


def operands(kernel: Kernel[Forward], tiles: int, keys: tuple[int, int]) -> attention.Operands:
    """For so many tiles of rows of a CTA."""
    v, rows = kernel.variant, kernel.facts["tile_m"]
    dense = v.op == "mha_fwd"
    count = tiles * kernel.facts["ctas"]
    heads = count if dense else min(rows * (1 + (v.max_heads > 64 and kernel.facts["cluster"] > 1)), v.max_heads)
    return long.operands(v, rows, keys, queries=rows if dense else count, heads=heads)


def predict(x: Tiles) -> tuple[float, float]:
    """(clocks of the launch, the tensor pipe's share)"""
    kernel: Kernel[Forward] = Kernel.of(variant_of(x.key))
    per_turn = SMS * kernel.facts["ctas"] // kernel.facts["cluster"]
    few, more = 1, 3

    def of_tile(keys: tuple[int, int]) -> tuple[Taken, float]:
        """(what one more tile takes, what a launch takes beside)"""
        a, b = (measure(kernel, operands(kernel, n, keys), x.cold) for n in (few, more))
        each = Taken((b.clocks - a.clocks) / (more - few), (b.tensor - a.tensor) / (more - few))
        return each, a.clocks - few * each.clocks

    if not x.causal:
        each, beside = of_tile(x.keys if x.keys[0] <= 2048 else (1600, 0))
        if x.keys[0] > 2048:
            each, beside = of_keys(of_tile, kernel, x.keys[0])
        total = beside + math.ceil(x.rows / per_turn) * each.clocks
        return total, x.rows / per_turn * each.tensor / total
    step = x.keys[0] / x.causal
    seen = [math.ceil((n + 1) * step) for n in range(x.causal)]
    if x.rows <= per_turn:  # each SM has one tile, and the longest decides
        each, beside = of_tile((seen[-1], 0))
        return beside + each.clocks, x.rows / per_turn * each.tensor / (beside + each.clocks)
    each, beside = of_keys(of_tile, kernel, sum(seen) / len(seen))
    total = beside + x.rows / per_turn * each.clocks
    return total, x.rows / per_turn * each.tensor / total


def of_keys(
    of_tile: Callable[[tuple[int, int]], tuple[Taken, float]], kernel: Kernel[Forward], keys: float
) -> tuple[Taken, float]:
    """For more keys than are worth running: in a straight line from two numbers of them."""
    tile = kernel.facts["tile_n"] * kernel.facts["unit"]
    low, high = 6 * tile, 14 * tile
    (a, beside), (b, _) = of_tile((low, 0)), of_tile((high, 0))
    share = (math.ceil(keys / tile) * tile - low) / (high - low)
    return Taken(a.clocks + share * (b.clocks - a.clocks), a.tensor + share * (b.tensor - a.tensor)), beside


def measured(x: Tiles) -> float:
    """Seconds of the kernels alone."""
    rows = json.loads((DOCS / x.record).read_text())["rows"]
    (row,) = (r for r in rows if r["name"] == x.name)
    names = row["times"]["ours"]["kernels"]
    return float(sum(t for name, t in names.items() if "fwd" in name))


def floor(x: Tiles) -> float:
    """Seconds that its bytes take out of the GPU's memory."""
    rows = json.loads((DOCS / x.record).read_text())["rows"]
    (row,) = (r for r in rows if r["name"] == x.name)
    return float(row["bytes"] / row["copy_bytes_per_s"])


def blackwell() -> dict[str, dict[str, object]]:
    """Of our kernels for Blackwell over one source, or over V4's pages: the steady state of a tile of rows."""
    found = {}
    for v in VARIANTS:
        if not isinstance(v, Forward) or not v.arch.startswith("sm_100") or v.dtype != "bfloat16":
            continue
        if v.sources not in (("span",), ("selection",), ("v4_fp8", "v4_fp8")):
            continue
        kernel: Kernel[Forward] = Kernel.of(v)
        ctas = kernel.facts["ctas"]
        x = long.operands(v, kernel.facts["tile_m"] * kernel.facts["cluster"], 1536)
        timing = clocks.run(launch(kernel, x, processors=kernel.facts["cluster"] * ctas).machine, ctas)
        steady = timing.steady()
        assert steady is not None
        found[v.key] = {
            "op": v.op,
            "d": v.d,
            "cluster": kernel.facts["cluster"],
            "turn": round(steady.period),
            "products": dict(Counter(steady.products)),
            "tensor": round(steady.flop / steady.clocks / timing.rates["tensor"], 3),
            "units": {name: round(share, 3) for name, share in steady.shares.items()},
            "l2": round(steady.l2, 1),
            "waits": {why: round(n / steady.clocks, 3) for why, n in clocks.timing.most(steady.waits, 3)},
        }
        print(v.key, found[v.key], flush=True)
    return found


GB200_SMS, GB200_GHZ, PROMPT = 152, 2.062, 4096
LAYERS = {  # heads, keys of the window and selected; milliseconds in cuDNN frontend's benchmarks, GB200, 28 Sep 2026
    "V4-Pro": ("csa_fwd_sm_100f_d512_bfloat16", 128, (128, 1024), 0.919),
    "V4-Flash": ("csa_fwd_sm_100f_d512_bfloat16_h64", 64, (128, 512), 0.414),
}


def layers() -> dict[str, dict[str, object]]:
    """Of a prompt's attention in a layer, on a GB200, whose published times are cuDNN's."""
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
    parser.add_argument("words", nargs="*", help="only rows whose names have one of these")
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
            "kernel": x.key,
            "fitted": x.fitted,
            "clocks": round(took),
            "tensor": round(share, 3),
            "ghz": round(ghz, 3),
            "predicted_us": round(us, 1),
            "measured_us": round(wanted, 1),
        }
        print(f"{x.name:62} {us:8.1f} {wanted:8.1f} {us / wanted:.2f} {share:.0%}", flush=True)
        args.file.write_text(json.dumps(record, indent=1) + "\n")
    if not args.words or "blackwell" in args.words:
        record |= {"blackwell": dict(blackwell()), "layers": dict(layers())}
        args.file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
