"""What bounds our attention kernels' steady state, for docs/clocks.json: a turn's demands, and the clocks' turn.

python -m interpreter.kernels.accounts docs/clocks.json              all
python -m interpreter.kernels.accounts docs/clocks.json sm_100f      only kernels whose keys have one of these words
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernels.abi import Forward, MlaBackward
from kernels.variants import VARIANTS

from .. import clocks
from ..machine.state import Machine
from . import gradients, long, mla_backward
from .launch import Kernel, launch
from .predictions import LAUNCHES

KEYS = 1536  # of each source


def accounted() -> list[Forward | MlaBackward]:
    """Kernels of attention and its gradients in bfloat16: those for Blackwell, and those for Hopper that docs/clocks.md
    has times of."""
    timed = {x.key("sm_90a") for x in LAUNCHES}
    found = [v for v in VARIANTS if isinstance(v, Forward | MlaBackward) and v.dtype == "bfloat16"]
    return [v for v in found if v.arch != "sm_90a" or v.key in timed]


def of_variant(v: Forward | MlaBackward, keys: int = KEYS) -> clocks.Account:
    kernel = Kernel.of(v)
    processors = kernel.facts["cluster"] * kernel.facts["ctas"]
    make = machines(kernel, keys, processors)
    return clocks.account(lambda alone=False: clocks.run(make(), kernel.facts["ctas"], alone=alone))


def machines(kernel: Kernel[Any], keys: int, processors: int) -> Callable[[], Machine]:
    """Launches over so many keys of each source, of two tiles of rows or one."""
    v, rows = kernel.variant, kernel.facts["tile_m"] * kernel.facts["cluster"]
    if isinstance(v, MlaBackward):
        given = gradients.of_attention(long.operands(v, rows, keys // 2, queries=1), v.d**-0.5)
        return lambda: mla_backward.launch(kernel, given, processors=processors).machine
    x = long.operands(v, rows, keys)
    return lambda: launch(kernel, x, processors=processors).machine


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
