"""Every order of the launches of attention, to few queries too, of its gradients, of a step's, of experts' and of
training's products, of an indexer's scores and of its teacher: `interpreter/orders` says what that is.

    python -m interpreter.kernels.orders                            all kernels, in one 16-bit type
    python -m interpreter.kernels.orders mha sm_100f                those whose keys have all of these words
    python -m interpreter.kernels.orders --record docs/orders.json  also what docs/interpreter.md shows

Exit status 1 if an order does not end, or the interpreter finds a fault in one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from kernels.abi import (
    ExpertProduct,
    FewRowsProduct,
    Forward,
    GroupedProduct,
    MhaBackward,
    MlaBackward,
    Probabilities,
    RowColumns,
    RowScores,
)
from kernels.variants import VARIANTS

from .. import edits
from ..arguments import count
from ..machine import scheduler
from ..machine.hazards import Fault
from ..orders.verdict import Making, verdict
from . import by_columns, expert_product, few_rows_product, fused_moe, gradients, mha_backward, native
from .launch import Kernel
from .prepared import Interpreted, OfIndexer, Prepared, is_typical

CASES = ("tiles", "turns")
SCORES = "mla_sparse_fwd_by_columns_sm_90a_d512_bfloat16"
DENSE_SHAPE = {"b": 1, "s_q": 50, "s_kv": 150, "h_q": 8, "h_kv": 2, "width": 1 << 30}
OF_SMALL_TILES = {"h_q": 4, "h_kv": 1}  # at d 512 these are enough for several tiles of each CTA


def launches(key: str) -> Iterator[tuple[str, Making]]:
    """The launches of a kernel: what each is run on, and how its machine is made."""
    variant = native.variant_of(key)
    kernel: Kernel[Any] = Kernel.of(variant)
    if isinstance(variant, Interpreted):
        for case in CASES:
            try:
                yield case, Prepared.case(kernel, case, None).machine
            except LookupError:  # there is none for this kernel
                continue
        return
    if isinstance(variant, FewRowsProduct):
        x = few_rows_product.Problem.around(variant, len(edits.barriers(kernel.ptx)) // 2)  # a stage has two barriers
        yield "rows", lambda seed: few_rows_product.launched(x, seed=seed)
        return
    if isinstance(variant, GroupedProduct):
        experts = fused_moe.typical(variant)
        yield "groups", lambda seed: fused_moe.product_launched(variant, experts, seed=seed)
        return
    if isinstance(variant, ExpertProduct):
        groups = expert_product.typical(variant)
        yield "groups", lambda seed: expert_product.launched(variant, groups, seed=seed)
        return
    if isinstance(variant, RowScores | RowColumns):
        first = native.variant_of(SCORES) if isinstance(variant, RowColumns) else variant
        of_scores, few = Kernel.of(first), by_columns.typical(first)
        if isinstance(variant, RowScores):
            yield "keys", lambda seed: by_columns.score(of_scores, few, seed=seed)
            return
        scheduler.run(scored := by_columns.score(of_scores, few))
        yield "columns", lambda seed: by_columns.add_columns(kernel, few, scored, seed=seed)
        return
    dense = native.variant_of(f"mha_fwd_{variant.arch}_d{variant.d}_{variant.dtype}")
    shape = DENSE_SHAPE | (OF_SMALL_TILES if variant.d > 256 else {})
    given, scale = gradients.operands(dense, **shape), variant.d**-0.5
    before: dict[str, Kernel[Any]] = {"tile_spans": Kernel.of(native.variant_of(f"tile_spans_{variant.arch}"))}
    seen = None
    if variant.op != "mha_dq":
        seen = mha_backward.tiles_seen({variant.op: kernel} | before, given, scale)
    yield "tiles", lambda seed: mha_backward.launch(kernel, given, scale, seen, seed=seed)[0]


def keys(words: Sequence[str]) -> list[str]:
    """Returns the keys of typical kernels that have all of these words; indexers' are last. Hopper's probabilities are
    not among them: their consumers rely on more than this argument knows (docs/interpreter.md).
    """
    of_attention = Forward | RowScores | RowColumns | MlaBackward | MhaBackward
    families = of_attention | Probabilities | FewRowsProduct | GroupedProduct | ExpertProduct | OfIndexer
    typical = [v for v in VARIANTS if isinstance(v, families) and is_typical(v)]
    shown = [v for v in typical if not isinstance(v, Probabilities) or v.arch != "sm_90a"]
    return [
        v.key for v in sorted(shown, key=lambda v: isinstance(v, OfIndexer)) if all(word in v.key for word in words)
    ]


def examined(key: str) -> list[dict[str, Any]]:
    """All about one kernel, as JSON has it."""
    found = []
    for case, make in launches(key):
        about: dict[str, Any] = {"kernel": key, "case": case}
        try:
            x = verdict(make)
        except Fault as fault:
            found.append(about | {"right": False, "says": [f"{type(fault).__name__}: {fault}"]})
            continue
        skeleton = x.skeleton
        about |= {"warps": len(skeleton.warps), "barriers": len(skeleton.barriers), "events": skeleton.size}
        about |= {"seconds": x.seconds, "run_s": x.run_seconds, "loose": x.loose, "right": x.right}
        found.append(about | {"says": x.lines()})
    return found


def merged(file: Path, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what was found, and with it what a file has of other kernels that there still are."""
    before = json.loads(file.read_text()) if file.exists() else []
    ran = {x["kernel"] for x in found}
    of = {key: [x for x in (found if key in ran else before) if x["kernel"] == key] for key in keys([])}
    return [x for rows in of.values() for x in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m interpreter.kernels.orders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only kernels whose keys have all of these")
    parser.add_argument("--jobs", type=count, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was found into this JSON")
    args = parser.parse_args(argv)
    start, found = time.monotonic(), list[dict[str, Any]]()
    with ProcessPoolExecutor(args.jobs) as pool:
        for results in pool.map(examined, keys(args.words)):
            for x in results:
                print(f"{x['kernel']}, {x['case']}:", *x["says"], sep="\n  ", flush=True)
            found += results
    wrong = [x["kernel"] for x in found if not x["right"]]
    print(f"{len(found) - len(wrong)} of {len(found)} launches end in every order; {time.monotonic() - start:.0f} s")
    if args.record is not None:
        args.record.write_text(json.dumps(merged(args.record, found), indent=1) + "\n")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
