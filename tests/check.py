"""Lint, types, and the tests of what a change touches, by tests/which.toml: `python -m tests.check`, or `make check`.

A change is what differs from where this branch left main, committed or not. Tests that interpret kernels are named,
and `make test` runs them.
"""

import argparse
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPED = ("jax_dsv4_fmha/", "interpreter/", "kernels/")
SHOWN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/",
    "tests/which.toml",
    "tests/retired_words.py",
    "mkdocs.yml",
)


@dataclass(frozen=True)
class Row:
    """Files, and the tests that show that a change of them is right."""

    change: tuple[str, ...]  # paths of files or folders; those of files may have a *
    run: tuple[str, ...] = ()
    interpret: tuple[str, ...] = ()
    more: str = ""

    def fits(self, path: str) -> int:
        """Returns the length of the longest of its names that fits the path; 0 if none does."""
        return max(
            (len(x) for x in self.change if path == x or path.startswith(f"{x}/") or _matches(path, x)), default=0
        )


def _matches(path: str, pattern: str) -> bool:
    return "*" in pattern and path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def table(path: Path = ROOT / "tests/which.toml") -> tuple[list[str], list[Row]]:
    """The tests of every Python file, and the rows."""
    read = tomllib.loads(path.read_text())
    rows = [Row(**{name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}) for row in read["row"]]
    return read["always"], rows


def chosen(paths: Sequence[str], always: Sequence[str], rows: Sequence[Row]) -> tuple[list[str], list[str], list[str]]:
    """Returns for changed files the tests to run, tests that interpret kernels, and files that no row names."""
    run, interpret, unknown = dict[str, None](), dict[str, None](), list[str]()
    for path in paths:
        if path.endswith(".py"):
            run |= dict.fromkeys(always)
        if path.startswith("tests/test_"):
            run[Path(path).stem] = None
            continue
        best = max((row.fits(path) for row in rows), default=0)
        for row in (row for row in rows if best and row.fits(path) == best):
            run |= dict.fromkeys(row.run)
            interpret |= dict.fromkeys(row.interpret)
        if not best:
            unknown.append(path)
    return [*run], [name for name in interpret if name not in run], unknown


def changed(since: str) -> list[str]:
    """Files that differ from where this branch left `since`, and that are there."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (base,) = git("merge-base", since, "HEAD")
    found = [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]
    return sorted({path for path in found if (ROOT / path).exists()})


def commands(paths: Sequence[str], tests: Sequence[str]) -> Iterator[list[str]]:
    """Yields the commands that show that the change is right, quickest first."""
    python = [path for path in paths if path.endswith(".py")]
    cxx = [path for path in paths if path.endswith((".h", ".cc"))]
    if python:
        yield ["ruff", "format", "--check", "--quiet", *python]
        yield ["ruff", "check", "--quiet", *python]
    if cxx:
        yield ["clang-format", "--dry-run", "--Werror", *cxx]
    if any(path.startswith(SHOWN) for path in paths) or any(path.startswith(TYPED) for path in python):
        yield ["python", "docs/lint.py"]
    if any(path.startswith(TYPED) for path in python):
        yield ["mypy"]
    files = [f"tests/{name}.py" for name in tests if (ROOT / f"tests/{name}.py").exists()]
    if files:
        yield ["python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--quick", "-q", *files]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", default="main", metavar="REVISION", help="where the change began (default: main)")
    parser.add_argument("--list", action="store_true", help="print what would run and stop")
    arguments = parser.parse_args(argv)
    try:
        paths = changed(arguments.since)
    except subprocess.CalledProcessError as error:
        parser.error(f"git does not know {arguments.since}: {error.stderr.strip()}")
    tests, interpret, unknown = chosen(paths, *table())
    print(f"check: {len(paths)} files differ from {arguments.since}", flush=True)
    failed, binaries = [], Path(sys.executable).parent
    for command in commands(paths, tests):
        began, said = time.monotonic(), " ".join(command)
        said = said if len(said) < 200 else f"{said[:200]} ..."
        print(f"check: {said}", flush=True)
        if not arguments.list:
            status = subprocess.run(
                [str(binaries / command[0]), *command[1:]], cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            ).returncode
            print(
                f"check: {'ok' if status == 0 else f'FAILED, {status}'}, {time.monotonic() - began:.0f} s", flush=True
            )
            failed += [said] * (status != 0)
    if interpret:
        print(f"check: not run, for they interpret kernels: {' '.join(interpret)}; `make test` does")
    if unknown:
        print(f"check: tests/which.toml has no row for {' '.join(unknown)}; `make quick` runs all quick tests")
    print(*(f"check: FAILED: {said}" for said in failed), sep="\n", end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
