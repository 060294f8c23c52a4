"""What bounds our attention kernels' steady state, for docs/clocks.json: a turn's demands, and the clocks' turn.

python -m interpreter.kernels.accounts docs/clocks.json              all
python -m interpreter.kernels.accounts docs/clocks.json sm_100f      only kernels whose keys have one of these words
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kernels.abi import Forward
from kernels.variants import VARIANTS

from .. import clocks
from . import long
from .launch import Kernel, launch
from .predictions import LAUNCHES

KEYS = 1536  # of each source


def accounted() -> list[Forward]:
    """Forward kernels in bfloat16: those for Blackwell, and those for Hopper that docs/clocks.md has times of."""
    timed = {x.key("sm_90a") for x in LAUNCHES}
    found = [v for v in VARIANTS if isinstance(v, Forward) and v.dtype == "bfloat16"]
    return [v for v in found if v.arch != "sm_90a" or v.key in timed]


def of_variant(v: Forward, keys: int = KEYS) -> clocks.Account:
    kernel: Kernel[Forward] = Kernel.of(v)
    cluster, ctas = (kernel.facts[name] for name in ("cluster", "ctas"))
    x = long.operands(v, kernel.facts["tile_m"] * cluster, keys)

    def timed(alone: bool = False) -> clocks.Timing:
        return clocks.run(launch(kernel, x, processors=cluster * ctas).machine, ctas, alone=alone)

    return clocks.account(timed)


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
