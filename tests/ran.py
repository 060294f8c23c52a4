"""Note GPU tests that passed in docs/ran.json: `python -m tests.ran build/gpu.jsonl`, after `python -m tests.gpu`.

A row of docs/ran.json names its tests by a regular expression, `by`. If all of these that the results have passed or
were skipped, and one at least passed, the row gets the commit, the card, the day and the number of tests. Tests that
failed leave a row as it is, and are printed; the exit status is then 1. `python docs/generate.py` writes the page.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RAN = Path(__file__).resolve().parents[1] / "docs/ran.json"


def results(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The last result of each test, with the day, the card and the commit of its run."""
    found, run = dict[str, dict[str, Any]](), dict[str, Any]()
    for line in map(json.loads, lines):
        if "began" in line:
            run = {"date": line["began"][:10], "card": card(line["device"]), "commit": line.get("commit", "")}
        elif "test" in line:
            found[line["test"]] = {**line, **run}
    return found


def card(device: str) -> str:
    """Like H200, of "NVIDIA H200, jax 0.11.2"."""
    return device.split(",")[0].removeprefix("NVIDIA ").split()[0]


def noted(rows: Sequence[dict[str, Any]], of: dict[str, dict[str, Any]], commit: str) -> list[str]:
    """Notes in each row what ran of its tests; returns lines that say so."""
    said = []
    for row in rows:
        its = [x for test, x in of.items() if re.search(row["by"], test)]
        passed = [x for x in its if x["outcome"] == "passed"]
        if bad := [x["test"] for x in its if x["outcome"] not in ("passed", "skipped")]:
            said.append(f"FAILED  {row['kernels']}: {', '.join(bad)}")
        elif passed:
            last = max(passed, key=lambda x: str(x["date"]))
            count = sum((x["card"], x["commit"]) == (last["card"], last["commit"]) for x in passed)
            row["tests"] = [last["commit"] or commit, last["card"], last["date"], f"{count} test{'s' * (count > 1)}"]
            said.append(f"noted   {row['kernels']}: {', '.join(row['tests'])}")
    return said


def written(record: dict[str, Any]) -> str:
    """The record as JSON, a row in a line."""
    parts = {name: json.dumps(x, ensure_ascii=False) for name, x in record.items()}
    rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in record["rows"])
    parts["rows"] = f"[\n    {rows}\n  ]"
    return "{\n" + ",\n".join(f'  "{name}": {text}' for name, text in parts.items()) + "\n}\n"


def main(argv: Sequence[str] | None = None, path: Path = RAN) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ran", description=__doc__)
    parser.add_argument("results", type=Path, help="the file that tests.gpu wrote")
    parser.add_argument(
        "--commit", help="the commit that tests ran at whose results name none (default: the one that is checked out)"
    )
    args = parser.parse_args(argv)
    command = ["git", "-C", str(RAN.parent), "rev-parse", "--short=7", "HEAD"]
    commit = args.commit or subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    record = json.loads(path.read_text())
    said = noted(record["rows"], results(args.results.read_text().splitlines()), commit)
    path.write_text(written(record))
    print(*(said or ["no result is of a test that a row names"]), sep="\n")
    return int(any(line.startswith("FAILED") for line in said))


if __name__ == "__main__":
    sys.exit(main())
