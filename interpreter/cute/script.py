"""Run a script whose CuTe DSL functions go to the interpreter, and not to a GPU.

    python -m interpreter run script.py                     its arguments may follow
    python -m interpreter run --seeds 10 script.py          more orders of events
    python -m interpreter run --rules chip script.py        what a B200 does, where the PTX manual grants less
    python -m interpreter run --arch sm_90a script.py       compiled for Hopper
    python -m interpreter run --forms script.py             also which forms of instructions ran
    python -m interpreter run --time script.py              also clocks of each launch (docs/clocks.md)

No GPU, no CUDA. The script makes its arrays on the CPU (NumPy's or torch's) and hands them to `from_dlpack`, or to a
@cute.jit function. Every call runs in several orders of events; then the arrays hold what the kernels wrote, so that
the script can compare them. The first fault ends the script: exit status 1. A call takes seconds for some ten thousand
instructions of warps: give it small arrays. docs/howto/interpret.md says what is found, and what is not known.
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Sequence

from ..arguments import count, file
from ..machine.hazards import Fault
from ..machine.rules import CHIP, MANUAL, Rule
from .session import Report, interpreting

ARCHS = ("sm_100a", "sm_90a")


def rules(text: str) -> frozenset[Rule]:
    """`manual`, `chip`, or the names of rules, with commas between."""
    if text in ("manual", "chip"):
        return MANUAL if text == "manual" else CHIP
    try:
        return frozenset(Rule[name] for name in text.upper().split(","))
    except KeyError as unknown:
        names = ", ".join(rule.name for rule in Rule)
        raise argparse.ArgumentTypeError(f"no rule is {unknown}; there are manual, chip, {names}") from None


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m interpreter run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=count, default=3, help="orders of events for each call (default: %(default)s)")
    parser.add_argument("--rules", type=rules, default=MANUAL, help="manual (default), chip, or names of rules")
    parser.add_argument("--arch", default="sm_100a", choices=ARCHS, help="what is compiled for (default: %(default)s)")
    parser.add_argument("--processors", type=count, default=4, help="of the GPU that the script is told of")
    parser.add_argument("--forms", action="store_true", help="list the forms of instructions that ran")
    parser.add_argument("--time", action="store_true", help="show clocks of each launch, one CTA an SM")
    parser.add_argument("script", type=file, help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if importlib.util.find_spec("cutlass") is None:
        parser().error("nvidia-cutlass-dsl, which compiles a script's functions, is not installed here")
    before, sys.argv = sys.argv, [str(args.script), *args.arguments]
    options = {"seeds": args.seeds, "rules": args.rules, "arch": args.arch, "processors": args.processors}
    try:
        with interpreting(**options, time=args.time) as report:
            try:
                runpy.run_path(str(args.script), run_name="__main__")
            except Fault:  # which the report has
                pass
            finally:
                show(report, args.forms)
    finally:
        sys.argv = before
    return 0 if report.ok else 1


def show(report: Report, forms: bool) -> None:
    print(report)
    for family, members in report.forms().items() if forms else ():
        print(f"{family}:")
        print(*(f"  {form}" for form in members), sep="\n")
