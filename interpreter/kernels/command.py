"""Run a kernel of this build on the CPU, and show who did what when.

    python -m interpreter mha_fwd_sm_90a_d128_bfloat16                      a timeline of warps and barriers, as text
    python -m interpreter mha_fwd_sm_90a_d128_bf --plot run.svg             the same as a picture
    python -m interpreter hca_fwd_sm_90a_d512_bf --case mixed    another case
    python -m interpreter mha_fwd_sm_90a_d128_bf --seed 3                   another order of things
    python -m interpreter mha_fwd_sm_90a_d128_bf --ptx edited.ptx           PTX that was changed by hand
    python -m interpreter mha_fwd_sm_90a_d128_bf --time                     clocks of a long run (docs/clocks.md)
    python -m interpreter mha_fwd_sm_90a_d128_bf --account                  what each unit has to do for a tile of keys
    python -m interpreter mha_fwd_sm_90a_d128_bf --orders                   whether it ends in every order

The kernel is an attention's key of kernels/variants.py, or an unambiguous part of one; it is compiled if no build has
it. With a fault (a deadlock, a race, an access out of bounds, a wrong answer, ...) the exit status is 1, and the
timeline ends where it was found.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from kernels.abi import Forward
from kernels.variants import VARIANTS

from .. import clocks
from ..machine.hazards import Fault
from ..machine.scheduler import Policy
from ..machine.timeline import lines, plot
from ..orders.verdict import verdict
from . import attention, cases, long
from .launch import Kernel, launch
from .verdict import judge


def find(name: str) -> Forward:
    attention = [v for v in VARIANTS if isinstance(v, Forward)]
    found = next(
        filter(
            None,
            (
                [v for v in attention if fits(v.key)]
                for fits in (name.__eq__, lambda key: key.startswith(name), lambda key: name in key)
            ),
        ),
        [],
    )
    if len(found) != 1:
        keys = "\n  ".join(v.key for v in found or attention)
        raise LookupError(f"{name!r} names {len(found)} kernels; there are\n  {keys}")
    return found[0]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m interpreter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", metavar="KERNEL", help="an attention's key of kernels/variants.py, or a part of one")
    parser.add_argument("--case", choices=cases.CASES, default="tiles", help="what to run on (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="what the scheduler does; without, it gives everybody a turn")
    parser.add_argument("--processors", type=int, help="how many CTAs at most (default: as the case says)")
    parser.add_argument("--ptx", type=Path, help="run this PTX in place of the build's")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the timeline (.svg, .png, ...) instead of printing it"
    )
    parser.add_argument("--time", action="store_true", help="show clocks, of a tile of rows that sees many keys")
    parser.add_argument("--account", action="store_true", help="show what bounds its steady state, by the clocks")
    long_run = "with --time or --account: "
    parser.add_argument("--keys", type=int, default=1280, help=long_run + "how many, of each source (%(default)s)")
    parser.add_argument("--queries", type=int, help=long_run + "how many (a tile of rows, or two queries)")
    parser.add_argument("--heads", type=int, help=long_run + "how many (a tile of rows)")
    parser.add_argument(
        "--orders", action="store_true", help="instead, whether every order of events ends, from one run"
    )
    parser.add_argument("--tail", type=int, metavar="N", help="print only the last N lines of the timeline")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        kernel = Kernel.of(find(args.kernel))
    except LookupError as e:
        parser().error(str(e))
    if args.ptx is not None:
        kernel = dataclasses.replace(kernel, ptx=args.ptx.read_text())
    if args.time or args.account:
        return show_clocks(kernel, args)
    x = cases.operands(kernel.variant, kernel.facts["tile_n"], args.case)
    if x is None:
        parser().error(f"there is no case {args.case!r} for {kernel.variant.key}")
    processors = args.processors or cases.PROCESSORS[args.case]
    if args.orders:
        return show_orders(kernel, x, processors)
    run = launch(kernel, x, seed=args.seed or 0, processors=processors, record=True)
    machine, found = run.machine, None
    if args.seed is None:
        machine.policy = Policy.even(machine)
    try:
        judge(run.run(), x, run.scale)
    except Fault as fault:
        found = fault
    assert machine.moments is not None
    if args.plot is not None:
        plot(machine, args.plot, f"{kernel.variant.key}, case {args.case}")
        print(f"wrote {args.plot}")
    else:
        text = list(lines(machine.moments))
        print("\n".join(text if args.tail is None else [text[0], *text[1:][-args.tail :]]))
    shape = ", ".join(f"{k} {v}" for k, v in x.shape._asdict().items() if v)
    size = f"{machine.grid_size} CTAs of {machine.threads} threads"
    share = f"{len(machine.executed)} of {len(machine.program.code)} instructions"
    print(f"\n{kernel.variant.key} on {shape}: {size}, {machine.time} steps, {share}")
    if found is not None:
        print(f"{type(found).__name__}: {found}", file=sys.stderr)
        return 1
    print("right, and nothing to complain about")
    return 0


def show_clocks(kernel: Kernel[Forward], args: argparse.Namespace) -> int:
    x = long.operands(kernel.variant, kernel.facts["tile_m"], args.keys, queries=args.queries, heads=args.heads)
    ctas = kernel.facts["ctas"]

    def timed(alone: bool = False) -> clocks.Timing:
        run = launch(kernel, x, processors=args.processors or kernel.facts["cluster"] * ctas)
        timing = clocks.run(run.machine, ctas, alone=alone)
        if all(keys.pool is None for keys in x.sources):
            judge(run.results(), x, run.scale)
        return timing

    try:
        found = [*([timed()] if args.time else []), *([clocks.account(timed)] if args.account else [])]
    except (Fault, LookupError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    shape = ", ".join(f"{k} {v}" for k, v in x.shape._asdict().items() if v)
    print(f"{kernel.variant.key} on {shape}", *found, sep="\n")
    return 0


def show_orders(kernel: Kernel[Forward], x: attention.Operands, processors: int) -> int:
    try:
        found = verdict(lambda seed: launch(kernel, x, processors=processors, seed=seed).machine)
    except Fault as fault:
        print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
        return 1
    print(*found.lines(), sep="\n")
    return 0 if found.right else 1
