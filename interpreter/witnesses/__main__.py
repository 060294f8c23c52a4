"""Run kernels that others wrote for B200s, and compare their answers with float64.

    python -m interpreter.witnesses                          all of them
    python -m interpreter.witnesses gemm 'fa4 128'           those whose names have one of these words
    python -m interpreter.witnesses --list                   what there is
    python -m interpreter.witnesses --time dsa               clocks of longer runs, beside published times
    python -m interpreter.witnesses --account dsa            what bounds them, beside published times
    python -m interpreter.witnesses --record docs/witnesses.json --rules --faults
                                                             also what docs/witnesses.md shows

`make test-witnesses` makes the environment that this needs, and runs all. Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ..arguments import count
from ..machine.rules import Rule
from .catalogue import CLOCKED, WITNESSES, Witness
from .recording import NotRecorded, recording, version
from .timing import accounted, predicted, timed
from .verdict import answer, broken, plant

QUICK = (
    *(
        "gemm 128",
        "gemm 64x64",
        "gemm pair 128",
        "gemm plain",
        "gemm mixed 256",
        "fmha 64",
        "fa4 64",
        "dsa 64",
        "qsa 256",
    ),
    "hopper gemm",
)
PLANTED = ("gemm pair 128", "fmha 64", "fa4 64")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m interpreter.witnesses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="run only witnesses whose names have one of these")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--quick", action="store_true", help=f"run only {', '.join(QUICK)}")
    parser.add_argument("--jobs", type=count, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("--seeds", type=count, help="orders of events (default: as each says)")
    parser.add_argument("--rules", action="store_true", help="find the rules of the manual that each breaks")
    parser.add_argument("--faults", action="store_true", help=f"plant faults in {', '.join(PLANTED)}")
    parser.add_argument("--time", action="store_true", help="show clocks; with --record docs/clocks.json, keep them")
    parser.add_argument("--account", action="store_true", help="show what bounds each; --record as with --time")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was found into this JSON")
    return parser


def show_clocks(args: argparse.Namespace) -> int:
    rows = {}
    for x in (x for x in CLOCKED if not args.words or any(word in x.name for word in args.words)):
        timings = timed(x)
        rows[x.name] = row = predicted(x, timings)
        print(f"{x.name}: {row['predicted_tflops']} TFLOP/s predicted, {row['published_tflops']} published", flush=True)
        print(*(f"  {line}" for timing in timings for line in str(timing).splitlines()), sep="\n", flush=True)
    if args.record is not None:
        keep(args.record, "others", rows)
    return 0 if rows else 1


def show_accounts(args: argparse.Namespace) -> int:
    rows = {}
    for x in (x for x in CLOCKED if not args.words or any(word in x.name for word in args.words)):
        for found in accounted(x):
            rows[x.name] = found.as_json()
            print(f"{x.name}: {found}", flush=True)
    if args.record is not None:
        keep(args.record, "accounts of others", rows)
    return 0 if rows else 1


def keep(file: Path, name: str, rows: dict[str, Any]) -> None:
    """Keeps rows in the record of clocks, where what it has of other witnesses stays."""
    record = json.loads(file.read_text()) if file.exists() else {}
    record[name] = record.get(name, {}) | rows
    file.write_text(json.dumps(record, indent=1) + "\n")


def chosen(args: argparse.Namespace) -> list[Witness]:
    found = [x for x in WITNESSES if not args.words or any(word in x.name for word in args.words)]
    return [x for x in found if x.name in QUICK or not args.quick]


def examine(x: Witness, seeds: int | None, rules: bool, faults: bool) -> dict[str, Any]:
    """All about one witness, as JSON has it."""
    made = recording(x)
    found = dataclasses.asdict(answer(made, seeds or x.seeds))
    if rules:
        found["breaks"] = broken(made)
        found["examined"] = [rule.name for rule in Rule]
    if faults and x.name in PLANTED:
        found["faults"] = {kind: dataclasses.asdict(count) for kind, count in plant(made).items()}
    about = {"maker": x.maker, "version": version(x.package), "what": x.what, "arch": x.arch}
    return about | {"compile_s": made.seconds} | found


def line(x: Witness, found: dict[str, Any]) -> str:
    ran, total = found["instructions"]
    says = "right" if found["right"] else "WRONG"
    errors = ", ".join(f"{name} {error:.1g}" for name, error in found["errors"].items())
    times = f"compiled in {found['compile_s']:.0f} s, {found['seconds']:.1f} s a run"
    text = f"{x.name:18} {says} in {found['seeds']} orders ({errors}); {ran} of {total} instructions; {times}"
    return text + (f"\n    {found['fault']}" if found["fault"] else "")


def write(file: Path, found: dict[str, dict[str, Any]]) -> None:
    """Writes results into a file. Its other witnesses stay, with the versions of their packages. So do rules and faults
    where none were looked for."""
    record = json.loads(file.read_text()) if file.exists() else {"packages": {}, "witnesses": {}}
    before = record["witnesses"]
    all_found = before | {name: before.get(name, {}) | result for name, result in found.items()}
    used = dict.fromkeys(name for x in WITNESSES if x.name in found for name in (x.package, *x.compiler))
    packages = record["packages"] | {name: version(name) for name in used}
    order = {x.name: all_found[x.name] for x in WITNESSES if x.name in all_found}
    record = {"packages": packages, "rules": [rule.name for rule in Rule], "witnesses": order}
    file.write_text(json.dumps(record, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.time:
        return show_clocks(args)
    if args.account:
        return show_accounts(args)
    witnesses, start = chosen(args), time.monotonic()
    if args.list:
        for x in witnesses:
            print(f"{x.name:18} {x.what} ({x.maker})")
        return 0
    found: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = {pool.submit(examine, x, args.seeds, args.rules, args.faults): x for x in witnesses}
        for n, job in enumerate(as_completed(jobs), 1):
            x = jobs[job]
            try:
                found[x.name] = job.result()
            except NotRecorded as why:
                text = f"{x.name:18} {why}"
            else:
                text = line(x, found[x.name])
            if x.name not in found or not found[x.name]["right"]:
                failed.append(x.name)
            print(f"[{n}/{len(witnesses)}, {time.monotonic() - start:.0f} s] {text}", flush=True)
    print(
        f"{len(witnesses) - len(failed)} of {len(witnesses)} witnesses are right"
        + "".join(f"; not {x}" for x in failed)
    )
    if args.record is not None:
        write(args.record, found)
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
