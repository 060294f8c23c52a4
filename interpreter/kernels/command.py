"""Run a kernel of this build on the CPU, and show who did what when.

    python -m interpreter mha_fwd_sm_90a_d128_bfloat16                      a timeline of warps and barriers, as text
    python -m interpreter mha_fwd_sm_90a_d128_bf --plot run.svg             the same as a picture
    python -m interpreter hca_fwd_sm_90a_d512_bf --case mixed    another case
    python -m interpreter mha_fwd_sm_90a_d128_bf --seed 3                   another order of things
    python -m interpreter mha_fwd_sm_90a_d128_bf --ptx edited.ptx           PTX that was changed by hand
    python -m interpreter mha_fwd_sm_90a_d128_bf --time                     clocks of a long run (docs/clocks.md)
    python -m interpreter mha_fwd_sm_90a_d128_bf --account                  what each unit has to do for a tile of keys
    python -m interpreter mha_fwd_sm_90a_d128_bf --orders                   whether it ends in every order

The kernel is a key of kernels/variants.py, or a part of one: of attention, its gradient at d 512, an indexer's scores
or its teacher. It is compiled if no build has it. With a fault (a deadlock, a race, an access out of bounds, a wrong
answer, ...) the exit status is 1, and the timeline ends where it was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from kernels.variants import VARIANTS

from .. import clocks
from ..arguments import count, file
from ..machine import scheduler
from ..machine.hazards import Fault
from ..machine.timeline import lines, plot
from ..orders.verdict import verdict
from . import cases, native
from .launch import Kernel
from .prepared import Interpreted, Prepared


def find(name: str) -> Interpreted:
    every = [v for v in VARIANTS if isinstance(v, Interpreted)]
    found = next(
        filter(
            None,
            (
                [v for v in every if fits(v.key)]
                for fits in (name.__eq__, lambda key: key.startswith(name), lambda key: name in key)
            ),
        ),
        [],
    )
    if len(found) != 1:
        keys = "\n  ".join(v.key for v in found or every)
        raise LookupError(f"{name!r} names {len(found)} kernels; there are\n  {keys}")
    return found[0]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m interpreter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", metavar="KERNEL", help="a key of kernels/variants.py, or a part of one")
    parser.add_argument("--case", choices=cases.CASES, default="tiles", help="what to run on (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="what the scheduler does; without, it gives everybody a turn")
    parser.add_argument("--processors", type=count, help="how many CTAs at most (default: as the case says)")
    parser.add_argument("--ptx", type=file, help="run this PTX in place of the build's")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the timeline (.svg, .png, ...) instead of printing it"
    )
    parser.add_argument("--time", action="store_true", help="show clocks, of a tile of rows that sees many keys")
    parser.add_argument("--account", action="store_true", help="show what bounds its steady state, by the clocks")
    long_run = "with --time or --account: "
    parser.add_argument("--keys", type=count, default=1280, help=long_run + "how many, of each source (%(default)s)")
    parser.add_argument("--queries", type=count, help=long_run + "how many (a tile of rows, or two queries)")
    parser.add_argument("--heads", type=count, help=long_run + "how many (a tile of rows)")
    parser.add_argument(
        "--orders", action="store_true", help="instead, whether every order of events ends, from one run"
    )
    parser.add_argument("--tail", type=count, metavar="N", help="print only the last N lines of the timeline")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        variant = find(args.kernel)
        native.library()
    except (LookupError, native.NoLibrary) as e:
        parser().error(str(e))
    kernel = Kernel.of(variant)
    if args.ptx is not None:
        kernel = dataclasses.replace(kernel, ptx=args.ptx.read_text())
    if args.time or args.account:
        return show_clocks(kernel, args)
    try:
        prepared = Prepared.case(kernel, args.case, args.processors)
    except LookupError as e:
        parser().error(str(e))
    if args.orders:
        return show_orders(prepared)
    machine, judged = prepared.make(args.seed or 0, True)
    found = None
    try:
        scheduler.run(machine, scheduler.Policy.even(machine) if args.seed is None else None)
        judged(machine)
    except Fault as fault:
        found = fault
    assert machine.moments is not None
    if args.plot is not None:
        plot(machine, args.plot, f"{kernel.variant.key}, case {args.case}")
        print(f"wrote {args.plot}")
    else:
        text = list(lines(machine.moments))
        print("\n".join(text if args.tail is None else [text[0], *text[1:][-args.tail :]]))
    size = f"{machine.grid_size} CTAs of {machine.threads} threads"
    share = f"{len(machine.executed)} of {len(machine.program.code)} instructions"
    print(f"\n{kernel.variant.key} on {prepared.shape}: {size}, {machine.time} steps, {share}")
    if found is not None:
        print(f"{type(found).__name__}: {found}", file=sys.stderr)
        return 1
    print("right, and nothing to complain about")
    return 0


def show_clocks(kernel: Kernel[Any], args: argparse.Namespace) -> int:
    ctas = kernel.facts["ctas"]
    processors = args.processors or kernel.facts["cluster"] * ctas
    prepared = Prepared.long(kernel, args.keys, args.queries, args.heads, processors)

    def timed(alone: bool = False) -> clocks.Timing:
        machine, judged = prepared.make(0, False)
        timing = clocks.run(machine, ctas, alone=alone)
        judged(machine)
        return timing

    try:
        found = [*([timed()] if args.time else []), *([clocks.account(timed)] if args.account else [])]
    except (Fault, LookupError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(f"{kernel.variant.key} on {prepared.shape}", *found, sep="\n")
    return 0


def show_orders(prepared: Prepared) -> int:
    try:
        found = verdict(prepared.machine)
    except Fault as fault:
        print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
        return 1
    print(*found.lines(), sep="\n")
    return 0 if found.right else 1
