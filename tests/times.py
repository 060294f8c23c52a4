"""The record of how long tests take, tests/data/times.json, by which `make quick` and `make test` leave out long cases.

`python -m pytest -n 2 -m 'not fuzz' --record-times` writes it anew, on two idle cores, after `make build`. It has the
seconds of a case with its fixtures, beside as many others as there are workers. Cases that take less than half a second
are not in it, and those that did not pass keep what they had.
"""

import collections
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PATH = Path(__file__).parent / "data" / "times.json"
LEAST = 0.5
QUICK = 1.0  # seconds up to which `make quick` runs one case of a test
EVERY, ONE = 0.7, 3.0  # and `make test` every case, and one case


def recorded(path: Path = PATH) -> dict[str, float]:
    """Returns seconds by node id."""
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def shortest(items: Iterable[pytest.Item], seconds: Mapping[str, float]) -> Iterator[tuple[pytest.Item, float]]:
    """Yields the shortest case of each test, the first one of several, and its seconds."""
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.path, item.parent, getattr(item, "originalname", None) or item.name].append(item)
    for of_test in cases.values():
        item = min(of_test, key=lambda x: seconds.get(x.nodeid, 0))
        yield item, seconds.get(item.nodeid, 0)


def long(items: Iterable[pytest.Item], seconds: Mapping[str, float]) -> Iterator[pytest.Item]:
    """Yields what takes too long for `make test`."""
    items = list(items)
    kept = {id(item) for item, x in shortest(items, seconds) if x <= ONE}
    yield from (item for item in items if seconds.get(item.nodeid, 0) > EVERY and id(item) not in kept)


class Recorder:
    """A plugin that writes the times of the tests that passed into the record."""

    def __init__(self, path: Path = PATH) -> None:
        self.path = path
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        kept = {name: x for name, x in recorded(self.path).items() if name not in self.passed}
        new = {name: round(self.seconds[name], 1) for name in self.passed if self.seconds[name] >= LEAST}
        self.path.write_text(json.dumps(dict(sorted({**kept, **new}.items())), indent=0) + "\n")
