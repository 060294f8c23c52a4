"""Writes accounts of our kernels' steady state into docs/clocks.json: a turn's demands, and the clocks' turn.

python -m interpreter.kernels.accounts docs/clocks.json              all
python -m interpreter.kernels.accounts docs/clocks.json sm_100f      only kernels whose keys have one of these words
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kernels.variants import VARIANTS

from .. import clocks
from .launch import Kernel
from .predictions import LAUNCHES
from .prepared import Interpreted, Prepared, is_typical

KEYS = 1536  # of each source


def accounted() -> list[Interpreted]:
    """Typical ones: all for Blackwell, and those for Hopper that docs/clocks.json has times of."""
    timed = {x.key("sm_90a") for x in LAUNCHES}
    found = [v for v in VARIANTS if isinstance(v, Interpreted) and is_typical(v)]
    return [v for v in found if v.arch != "sm_90a" or v.key in timed]


def of_variant(v: Interpreted, keys: int = KEYS) -> clocks.Account:
    kernel = Kernel.of(v)
    ctas = kernel.facts["ctas"]
    prepared = Prepared.long(kernel, keys, None, None, kernel.facts["cluster"] * ctas)
    return clocks.account(lambda alone=False: clocks.run(prepared.machine(), ctas, alone=alone))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*", help="only kernels whose keys have one of these")
    args = parser.parse_args(argv)
    record = json.loads(args.file.read_text()) if args.file.exists() else {}
    keys = [v.key for v in accounted()]
    rows = {key: x for key, x in record.get("accounts", {}).items() if key in keys}
    for v in accounted():
        if args.words and not any(word in v.key for word in args.words):
            continue
        x = of_variant(v)
        rows[v.key] = x.as_json()
        print(f"{v.key}\n{x}", flush=True)
        record["accounts"] = {key: rows[key] for key in keys if key in rows}
        args.file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
