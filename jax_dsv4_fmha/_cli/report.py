"""Output for people: tables, a progress bar, and JSON."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

_BAR = 24


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose columns are as wide as needed; the first `left` are aligned to the left, the others to the
    right.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])


def output(json_path: str | None) -> TextIO:
    """The stream that gets the text for people: stdout, unless the JSON goes there."""
    return sys.stderr if json_path == "-" else sys.stdout


def write_json(data: Any, path: str) -> None:
    """Writes to a file, or to stdout for "-"."""
    text = json.dumps(data, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


class Progress:
    """A bar on stderr, below the lines that are printed meanwhile, and notes."""

    def __init__(self, total: int, shown: bool | None, out: TextIO):
        """shown=None shows the bar only where stderr is a terminal, and notes anywhere; `out` is where lines are
        printed.
        """
        self.total, self.done, self.out = total, 0, out
        self.shown, self.notes = sys.stderr.isatty() if shown is None else shown, shown is not False
        self.began = time.monotonic()

    def begin(self, label: str) -> None:
        """The next of `total` begins."""
        if self.shown:
            full = _BAR * self.done // self.total
            seconds = time.monotonic() - self.began
            left = f", about {seconds / self.done * (self.total - self.done):.0f} s left" if self.done else ""
            bar = f"[{'#' * full}{'.' * (_BAR - full)}] {self.done}/{self.total} {seconds:.0f} s{left}  {label[:60]}"
            sys.stderr.write(f"\r\033[K{bar}")
            sys.stderr.flush()
        self.done += 1

    def note(self, text: str) -> None:
        """A line on stderr: how many have begun, the seconds so far, and the text."""
        self.clear()
        if self.notes:
            seconds = time.monotonic() - self.began
            print(f"{self.done}/{self.total} {seconds:.0f} s  {text}", file=sys.stderr, flush=True)

    def print(self, text: str) -> None:
        self.clear()
        print(text, file=self.out, flush=True)

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
