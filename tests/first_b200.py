"""The first minutes on a B200: is it the chip that our kernels were written for?

    python -m tests.first_b200                       all of what follows, some 20 minutes
    python -m tests.first_b200 answers rates         forms of instructions, and units' rates: a minute
    python -m tests.first_b200 check bench           every kernel against the reference, and times beside those expected
    python -m tests.first_b200 rates --json FILE     also keeps what was found

answers: programs of a few instructions each, beside what the interpreter says they do. rates: what the interpreter's
clocks take for granted, beside this chip's. check, bench: the package's own commands; a time beside what the clocks
predict, and beside what the account of the kernel allows at least, with the unit that bounds it. What is off says
which of these to mend first: a rate, then a kernel's structure.

On an H200 those parts run that it has. Without a GPU: what is expected. Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from interpreter.machine.handwritten import Handwritten
from interpreter.machine.hazards import Fault
from interpreter.machine.state import Array
from tests.rates import RATES
from tests.test_ptx_clusters import PROGRAMS
from tests.test_ptx_forms import gathered
from tests.test_ptx_pairs import PAIRS
from tests.test_ptx_product_forms import COPIES, PRODUCTS, copied, product_named

ROOT = Path(__file__).parents[1]
TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
SUITES = ("dsv4", "window", "dense", "decode")


def answers() -> Iterator[tuple[str, Handwritten, Array]]:
    """(name, program, what it writes); those without tensor cores run everywhere."""
    for name, (program, want) in PROGRAMS.items():
        yield f"cluster, {name}", program, want
    for name in PRODUCTS:
        yield f"product, {name}", *product_named(name)
    for name in COPIES:
        yield f"copy to TMEM, {name}", *copied(name)
    for name, (program, want) in PAIRS.items():
        yield f"product of a pair, {name}", program, want
    for atom in (16, 32):
        yield f"gather of four rows, atoms of {atom} bytes", *gathered(atom)


def same(got: Array, want: Array) -> bool:
    """True if both are equal; of a masked array only in those words that are not masked."""
    return bool((np.ma.getdata(got) == want).all())


class Chip:
    """The first CUDA device; or none, and the interpreter in its place."""

    def __init__(self) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        try:
            device = jax.local_devices(backend="cuda")[0]
        except RuntimeError:
            self.name, self.target, self.sms = "no GPU, so the interpreter", "sm_100a", 1
            self.is_there = False
            return
        major, minor = map(int, device.compute_capability.split("."))
        if (major, minor) not in TARGETS:
            raise SystemExit(f"{device.device_kind} has compute capability {major}.{minor}, wanted 9.0, 10.0 or 10.3")
        self.name, self.target, self.sms = device.device_kind, TARGETS[major, minor], device.core_count
        self.is_there = True

    def program(self, x: Handwritten) -> Handwritten | None:
        """Returns the program for this chip, or None if that has not what it asks for."""
        if x.target == "sm_90a" or self.target != "sm_90a":
            return replace(x, target=self.target)
        return None


def run_answers(chip: Chip, found: dict[str, Any]) -> bool:
    rows = found["answers"] = {}
    for name, program, want in answers():
        mine = chip.program(program)
        if mine is None:
            continue
        try:
            right = same(mine.on_device() if chip.is_there else mine.interpret(), want)
            rows[name] = "right" if right else "WRONG"
        except (RuntimeError, Fault) as e:
            rows[name] = f"FAILED: {e}"
        print(f"  {rows[name]:6} {name}", flush=True)
    print("  64 bytes, where four gathered rows go by 128: ", end="")
    program, _ = gathered(16, to=64)
    if (mine := chip.program(program)) is not None:
        try:
            mine.on_device() if chip.is_there else mine.interpret()
            rows["gather to 64 bytes"] = "accepted"
        except (RuntimeError, Fault) as e:
            rows["gather to 64 bytes"] = f"refused: {str(e).splitlines()[0]}"
        print(rows["gather to 64 bytes"])
    return all(x == "right" for name, x in rows.items() if name != "gather to 64 bytes")


def run_rates(chip: Chip, found: dict[str, Any]) -> bool:
    rows = found["rates"] = {}
    print(f"  {'expected':>9} {'measured':>9}")
    for x in RATES:
        if chip.program(x.program(1)) is None:
            continue
        row = rows[x.name] = {"unit": x.unit, "expected": round(x.expected(chip.target), 1)}
        measured = ""
        if chip.is_there:
            row["measured"] = round(x.measured(chip.target, chip.sms), 1)
            measured = f"{row['measured']:.1f}"
        off = abs(row.get("measured", row["expected"]) / row["expected"] - 1) > 0.15
        print(f"  {row['expected']:9.1f} {measured:>9}  {x.name}, {x.unit}" + f": off, see {x.tells}" * off, flush=True)
    return True


def run_check(chip: Chip, found: dict[str, Any]) -> bool:
    status = subprocess.run([sys.executable, "-m", "jax_dsv4_fmha", "check", "--progress"], cwd=ROOT).returncode
    found["check"] = status
    return status == 0


def run_bench(chip: Chip, found: dict[str, Any]) -> bool:
    expected = json.loads((ROOT / "docs" / "clocks.json").read_text())["sm_100f"]
    rows = {}
    if chip.is_there:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "bench.json"
            suites = [word for suite in SUITES for word in ("--suite", suite)]
            command = [sys.executable, "-m", "jax_dsv4_fmha", "bench", *suites, "--json", str(file), "--progress"]
            subprocess.run(command, cwd=ROOT, check=True)
            rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    found["bench"] = rows
    print(f"  {'measured':>9} {'by clocks':>9} {'at least':>9}  in us, and what bounds it: of 148 SMs at 1.83 GHz")
    for name, x in expected.items():
        kernels = rows[name]["times"]["ours"]["kernels"] if name in rows else {}
        measured = f"{1e6 * sum(t for k, t in kernels.items() if 'fwd' in k):.1f}" if kernels else ""
        print(f"  {measured:>9} {x['predicted_us']:9.1f} {x['at_least_us']:9.1f}  {name}: {x['bound']}")
    return True


PARTS: dict[str, Callable[[Chip, dict[str, Any]], bool]] = {
    "answers": run_answers,
    "rates": run_rates,
    "check": run_check,
    "bench": run_bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.first_b200", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found into this file")
    args = parser.parse_args(argv)
    if unknown := [x for x in args.parts if x not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}, there are {', '.join(PARTS)}")
    chip, found, ok = Chip(), dict[str, Any](), True
    found["chip"] = chip.name
    print(chip.name)
    for part in args.parts or PARTS:
        print(f"{part}:", flush=True)
        ok &= PARTS[part](chip, found)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
