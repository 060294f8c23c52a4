"""What bounds our attention kernels' steady state, for docs/clocks.json: a turn's demands, and the clocks' turn.

python -m interpreter.kernels.accounts docs/clocks.json              all
python -m interpreter.kernels.accounts docs/clocks.json sm_100f      only kernels whose keys have one of these words
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kernels.abi import Forward, IndexerScores, Probabilities
from kernels.variants import VARIANTS

from .. import clocks
from ..machine.state import Machine
from . import indexer, long, probabilities
from .launch import Kernel, launch
from .predictions import LAUNCHES

KEYS = 1536  # of each source


Accounted = Forward | IndexerScores | Probabilities


def accounted() -> list[Accounted]:
    """Forward kernels in bfloat16: those for Blackwell, and those for Hopper that docs/clocks.md has times of. And the
    indexer's on Blackwell."""
    timed = {x.key("sm_90a") for x in LAUNCHES}
    found = [v for v in VARIANTS if isinstance(v, Forward) and v.dtype == "bfloat16"]
    rest = (v for v in VARIANTS if isinstance(v, IndexerScores | Probabilities) and v.dtype != "float16")
    indexers = [v for v in rest if v.arch != "sm_90a" and (isinstance(v, Probabilities) or v.heads == 64)]
    return [*(v for v in found if v.arch != "sm_90a" or v.key in timed), *indexers]


def of_variant(v: Accounted, keys: int = KEYS) -> clocks.Account:
    if isinstance(v, Forward):
        make = of_attention(v, keys)
    elif isinstance(v, IndexerScores):
        make = of_scores(v, keys)
    else:
        make = of_probabilities(v, keys)
    ctas = Kernel.of(v).facts["ctas"]
    return clocks.account(lambda alone=False: clocks.run(make(), ctas, alone=alone))


def of_attention(v: Forward, keys: int) -> Callable[[], Machine]:
    kernel = Kernel.of(v)
    cluster, ctas = (kernel.facts[name] for name in ("cluster", "ctas"))
    x = long.operands(v, kernel.facts["tile_m"] * cluster, keys)
    return lambda: launch(kernel, x, processors=cluster * ctas).machine


def of_scores(v: IndexerScores, keys: int) -> Callable[[], Machine]:
    kernel = Kernel.of(v)
    x = indexer.Problem.seen_by_all(v, kernel.facts["tile_m"] // v.heads, 2 * keys)
    return indexer.Call.of(kernel, x, 1).scoring


def of_probabilities(v: Probabilities, keys: int) -> Callable[[], Machine]:
    kernel = Kernel.of(v)
    x = probabilities.Problem.of(v, 1, 1, kernel.facts["tile_m"], 4 * keys, keys)
    return probabilities.Call(kernel, x, 1).machine


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*", help="only kernels whose keys have one of these")
    args = parser.parse_args(argv)
    record = json.loads(args.file.read_text()) if args.file.exists() else {}
    before, rows = record.get("accounts", {}), dict[str, dict[str, object]]()
    for v in accounted():
        if args.words and not any(word in v.key for word in args.words):
            rows |= {v.key: before[v.key]} if v.key in before else {}
            continue
        x = of_variant(v)
        rows[v.key] = x.as_json()
        print(f"{v.key}\n{x}", flush=True)
    record["accounts"] = rows
    args.file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
