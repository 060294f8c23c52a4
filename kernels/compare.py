"""Compare the machine code of two builds: `python -m kernels.compare BEFORE AFTER`, directories with KEY.cubin.

Two kernels are equal if nvdisasm prints the same for both: every instruction with its encoding, registers, shared
memory and parameters. Names do not count, neither the kernel's symbol nor its key: a key that only one build has is
compared with a key of the other build that has the same instructions. Exits with 1 if anything differs or is missing.
Needs nvidia-cuda-nvdisasm.
"""

import argparse
import difflib
import fnmatch
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from .cubin import read_code, read_kernel

NAMELESS = "KERNEL"  # stands for the symbol
UNCOUNTED = (".debug_", ".note.")  # sections: where the stack is, and what made the file


def nvdisasm() -> Path:
    """The disassembler of the package nvidia-cuda-nvdisasm, or of triton; FileNotFoundError if neither is installed."""
    for package in ("nvidia-cuda-nvdisasm", "triton"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "nvdisasm":
                return Path(str(file.locate()))
    raise FileNotFoundError("needs nvidia-cuda-nvdisasm: pip install nvidia-cuda-nvdisasm")


def listing(cubin: Path) -> list[str]:
    """The lines that nvdisasm prints, without names and without sections that do not matter to the GPU."""
    command = [str(nvdisasm()), "--print-instruction-encoding", "--no-dataflow", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = re.sub(rf"\b{re.escape(read_kernel(cubin.read_bytes()).name)}\b", NAMELESS, text)
    header, *sections = re.split(r"^//-{9,}\s+(.*?)\s+-{9,}$", text, flags=re.M)
    kept = [body for name, body in zip(sections[::2], sections[1::2], strict=True) if not name.startswith(UNCOUNTED)]
    return [" ".join(line.split()) for line in "\n".join([header, *kept]).splitlines() if line.strip()]


def differences(before: Path, after: Path, most: int = 6) -> tuple[int, list[str]]:
    """Counts the lines of the listings that differ, and returns at most `most` of them too."""
    old, new = listing(before), listing(after)
    if old == new:
        return 0, []
    if len(old) == len(new):
        changed = [(f"- {a}", f"+ {b}") for a, b in zip(old, new, strict=True) if a != b]
        return len(changed), [line for pair in changed[: most // 2] for line in pair]
    lines = [line for line in difflib.unified_diff(old, new, n=0, lineterm="") if re.match(r"[-+](?![-+]{2})", line)]
    return len(lines), lines[:most]


def pairs(before: Path, after: Path, renamed: Iterable[tuple[str, str]] = ()) -> list[tuple[str | None, str | None]]:
    """Keys of both builds that are to be compared; None for what one of them lacks.

    A key is paired with itself, with the one that `renamed` gives as (old, new), or by equal instructions.
    """
    old, new = ({path.stem: path for path in sorted(folder.glob("*.cubin"))} for folder in (before, after))
    found = [(a, b) for a, b in renamed if a in old and b in new]
    found += [(key, key) for key in old.keys() & new.keys() if not any(key in names for names in found)]
    taken = ({a for a, _ in found}, {b for _, b in found})
    by_code: dict[bytes, list[str]] = {}
    for key in sorted(old.keys() - taken[0], reverse=True):
        by_code.setdefault(read_code(old[key].read_bytes()), []).append(key)
    rest: list[tuple[str | None, str | None]] = []
    for key in sorted(new.keys() - taken[1]):
        alike = by_code.get(read_code(new[key].read_bytes()))
        rest.append((alike.pop() if alike else None, key))
    rest += [(key, None) for keys in by_code.values() for key in keys]
    return sorted([*found, *rest], key=lambda pair: pair[0] or pair[1] or "")


def report(before: Path, after: Path, compared: Sequence[tuple[str | None, str | None]]) -> Iterator[tuple[bool, str]]:
    """For each pair whether it is equal, and a line of the table."""

    def one(pair: tuple[str | None, str | None]) -> tuple[bool, str]:
        old, new = pair
        if old is None or new is None:
            return False, f"{'new' if old is None else 'missing':10}{old or new}"
        count, lines = differences(before / f"{old}.cubin", after / f"{new}.cubin")
        name = old if old == new else f"{old} -> {new}"
        shown = "".join(f"\n          {line}" for line in lines)
        return count == 0, f"{'different' if count else 'equal':10}{name}{f': {count} lines' if count else ''}{shown}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(one, compared)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="only keys of AFTER that match; the rest of BEFORE may be missing",
    )
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW", help="compare these two keys")
    args = parser.parse_args(argv)
    for folder in (args.before, args.after):
        if not any(folder.glob("*.cubin")):
            parser.error(f"{folder} has no cubins")
    compared = pairs(args.before, args.after, [tuple(names.split("=")) for names in args.renamed])
    if args.only != "*":
        compared = [(a, b) for a, b in compared if b and (fnmatch.fnmatch(b, args.only) or args.only in b)]
    equal = total = 0
    for same, line in report(args.before, args.after, compared):
        equal, total = equal + same, total + 1
        print(line, flush=True)
    print(f"{equal} of {total} kernels are equal")
    return 0 if 0 < equal == total else 1


if __name__ == "__main__":
    sys.exit(main())
