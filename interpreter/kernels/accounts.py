"""What bounds our attention kernels' steady state, for docs/clocks.json: a turn's demands, and the clocks' turn.

python -m interpreter.kernels.accounts docs/clocks.json              all
python -m interpreter.kernels.accounts docs/clocks.json sm_100f      only kernels whose keys have one of these words
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kernels.abi import Forward, IndexerScores
from kernels.variants import VARIANTS

from .. import clocks
from ..machine.state import Machine
from . import indexer, long
from .launch import Kernel, launch
from .predictions import LAUNCHES

KEYS = 1536  # of each source


def accounted() -> list[Forward | IndexerScores]:
    """Forward kernels in bfloat16: those for Blackwell, and those for Hopper that docs/clocks.md has times of. And an
    indexer's scores on Blackwell."""
    timed = {x.key("sm_90a") for x in LAUNCHES}
    found = [v for v in VARIANTS if isinstance(v, Forward) and v.dtype == "bfloat16"]
    scores = [v for v in VARIANTS if isinstance(v, IndexerScores) and v.arch != "sm_90a" and v.dtype != "float16"]
    return [*(v for v in found if v.arch != "sm_90a" or v.key in timed), *(v for v in scores if v.heads == 64)]


def of_variant(v: Forward | IndexerScores, keys: int = KEYS) -> clocks.Account:
    make = of_scores(v, keys) if isinstance(v, IndexerScores) else of_attention(v, keys)
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
