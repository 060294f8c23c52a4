"""The command line, `python -m jax_dsv4_fmha`."""

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__

_JSON = "also write JSON to FILE; to stdout, instead of the text, where FILE is - or left out"
_FILTER = "only names that match: a shell pattern for the whole name, or a part of it"


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        for path in (args.json, getattr(args, "plot", None)):
            if path not in (None, "-"):  # before any work is done
                open(path, "ab").close()
        status = _run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on, not even what Python would flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:
        print(f"{e.filename}: {e.strerror}" if e.filename else str(e), file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.command == "info":
        from .info import info

        return info(args.json, args.plot)
    if args.command == "check":
        from .check import check

        return check(args.filter, args.json, args.progress, is_quick=args.quick, is_list=args.list)
    if args.command == "explain":
        from .explain import explain

        return explain(args.function, args.operand, args.gradient, args.json)
    from .bench import bench

    return bench(
        suites=args.suite,
        pattern=args.filter,
        rounds=args.rounds,
        source=getattr(args, "from"),
        flashmla_path=args.flashmla,
        with_cudnn_frontend=args.cudnn_frontend,
        json_path=args.json,
        plot_path=args.plot,
        progress=args.progress,
    )


def _parser() -> argparse.ArgumentParser:
    from .._bench import SUITES

    parser = argparse.ArgumentParser(
        prog="python -m jax_dsv4_fmha", description="What is built, whether it is right, and how fast it is."
    )
    parser.add_argument("--version", action="version", version=f"jax_dsv4_fmha {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(
        name: str, summary: str, description: str, filters: str | None = None, progress: str = ""
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=description)
        command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=_JSON)
        if filters:
            command.add_argument("--filter", metavar="PATTERN", help=f"{_FILTER}, e.g. {filters}")
            command.add_argument(
                "--progress",
                action=argparse.BooleanOptionalAction,
                help=f"a bar on stderr (default: where stderr is a terminal){progress}",
            )
        return command

    info = add(
        "info", "versions, devices, kernels built", "Print versions, devices, and the kernels that are built in."
    )
    info.add_argument("--plot", metavar="FILE", help="draw what is built into FILE.png or FILE.svg (matplotlib)")
    check = add(
        "check",
        "every case against the reference on this machine",
        "Run the table of cases on this machine: every kernel twice, with bitwise equal results, and against the "
        "reference in float32. Without a GPU that kernels are built for, the reference against loops in float64. "
        "Exit status 1 if any case fails, 2 if none matches or none is built, 130 if interrupted.",
        "'fmha*causal*' or 'FP8 products'",
    )
    check.add_argument("--list", action="store_true", help="print the names of the cases, and run none")
    check.add_argument(
        "--quick", action="store_true", help="the smallest cases that have everything once: 20 s on one core of a CPU"
    )
    explain = add(
        "explain",
        "which implementation runs a function's ops here, and why",
        "Trace a function, and say for each op in it whether a kernel or the reference runs here, and why. Nothing is "
        "compiled or run. Exit status 2 if the function, or one of its ops, does not take these operands.",
    )
    explain.add_argument("function", help="a name of this package, such as fmha, or module:function")
    explain.add_argument(
        "operand",
        nargs="*",
        help="in the function's order, or as name=…: an array's dtype and shape, 'bf16[1,4096,128,512]', or a value",
    )
    explain.add_argument("--gradient", action="store_true", help="of the sum of its results, in its float operands")
    bench = add(
        "bench",
        "timings beside cuDNN and XLA",
        "Time the kernels on this machine's first GPU, beside cuDNN and XLA through jax.nn where these can run, the "
        "rate of a bfloat16 8192^3 matrix product (M) and of a device copy (C), interleaved in one run. Device time "
        "from the profiler. FILE is written after every row. Exit status 2 without a GPU.",
        "'d 512' or '*causal*'",
        ", and a line for each row once it is timed (default: anywhere)",
    )
    bench.add_argument(
        "--suite",
        action="append",
        choices=tuple(SUITES),
        help="may be repeated (default: all)",
    )
    bench.add_argument("--rounds", type=_at_least_one, default=11, help="of interleaved bursts (default: %(default)s)")
    bench.add_argument("--plot", metavar="FILE", help="draw a roofline and bars into FILE.png or FILE.svg (matplotlib)")
    bench.add_argument("--from", metavar="FILE", help="measure nothing: take the results from this JSON")
    bench.add_argument(
        "--flashmla",
        metavar="PATH",
        help="also time FlashMLA: the folder of its built package flash_mla, or its extension; needs torch",
    )
    bench.add_argument(
        "--cudnn-frontend",
        action="store_true",
        help="also time the cuDNN frontend's indexer, if its package is installed; needs torch",
    )
    return parser


def _at_least_one(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError("wanted at least 1")
    return n
