"""The record of how long tests take, and what `make quick` and `make test` leave out by it."""

import ast
import json
from collections import Counter, namedtuple
from pathlib import Path

from tests import times

Item = namedtuple("Item", "path parent originalname nodeid")
Report = namedtuple("Report", "nodeid when passed duration")
ITEMS = [Item("a.py", 0, test, f"a.py::{test}[{case}]") for test, cases in (("f", "xyz"), ("g", "x")) for case in cases]


def test_the_shortest_case_of_a_test_is_the_first_of_several():
    seconds = {"a.py::f[x]": 2.0, "a.py::g[x]": 9.0}
    assert [(x.nodeid, s) for x, s in times.shortest(ITEMS, seconds)] == [("a.py::f[y]", 0), ("a.py::g[x]", 9.0)]


def test_long_cases_are_left_out_but_the_shortest_unless_it_is_too_long():
    seconds = {"a.py::f[x]": times.ONE, "a.py::f[y]": 2 * times.ONE, "a.py::f[z]": 2 * times.ONE, "a.py::g[x]": 9.0}
    assert [x.nodeid for x in times.long(ITEMS, seconds)] == ["a.py::f[y]", "a.py::f[z]", "a.py::g[x]"]
    assert not [*times.long(ITEMS, dict.fromkeys(seconds, times.EVERY))]


def test_what_passed_is_recorded_anew_and_the_rest_kept(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"kept": 3.0, "failed": 4.0, "short now": 5.0, "longer": 1.0}))
    recorder = times.Recorder(path)
    for name, passed, seconds in (
        ("failed", False, 9),
        ("short now", True, 0.1),
        ("longer", True, 2),
        ("new", True, 6),
    ):
        recorder.pytest_runtest_logreport(Report(name, "setup", True, 0.25))
        recorder.pytest_runtest_logreport(Report(name, "call", passed, seconds))
    recorder.pytest_sessionfinish()
    assert times.recorded(path) == {"failed": 4.0, "kept": 3.0, "longer": 2.2, "new": 6.2}


def test_the_record_is_of_tests_that_there_are():
    files = Counter(name.partition("::")[0] for name in times.recorded())
    there = {}
    for file in files:
        tree = ast.parse(Path(times.PATH.parents[2], file).read_text())
        there[file] = {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    gone = [
        name
        for name in times.recorded()
        if name.split("::")[-1].partition("[")[0] not in there[name.partition("::")[0]]
    ]
    assert not gone, "run `pytest --record-times`, or take these out of tests/data/times.json"
