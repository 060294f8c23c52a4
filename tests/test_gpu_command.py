"""`python -m tests.gpu`, which runs the tests of a GPU: here those of small files, on a CPU."""

import json

import pytest

from tests import gpu, ran

TESTS = {
    "test_some.py": """
import os, time
import pytest

def test_passes(): print("printed")
def test_fails(): assert 1 + 1 == 3
def test_is_skipped(): pytest.skip("for a reason")
def test_takes_the_process_down(): os.abort()
def test_comes_after(): pass
def test_hangs(): time.sleep(600)
def test_comes_last(): pass
""",
    "test_memory.py": """
import os
import pytest

SHARE = float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])

def test_needs_much():
    if SHARE < 0.5:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

@pytest.mark.alone
def test_is_alone(): assert SHARE > 0.5

def test_has_a_part(): assert SHARE < 0.5

@pytest.fixture
def breaks():
    yield
    raise ValueError("in tear-down")

def test_breaks_later(breaks): pass
""",
    "test_broken.py": "import nothing_of_this_name",
}
WANTED = {
    "test_some.py::test_passes": "passed",
    "test_some.py::test_fails": "failed",
    "test_some.py::test_is_skipped": "skipped",
    "test_some.py::test_takes_the_process_down": "crashed",
    "test_some.py::test_comes_after": "passed",
    "test_some.py::test_hangs": "timeout",
    "test_some.py::test_comes_last": "passed",
    "test_memory.py::test_needs_much": "passed",
    "test_memory.py::test_is_alone": "passed",
    "test_memory.py::test_has_a_part": "passed",
    "test_memory.py::test_breaks_later": "error",
    "test_broken.py": "error",
}


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Runs the command on TESTS with some arguments: its exit status, and the results that it added."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    for name in ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # which the command sets
    kept = tmp_path / "results" / "gpu.jsonl"

    def run(*arguments, **how):
        before = len(kept.read_text().splitlines()) if kept.exists() else 0
        how = {"platform": "cpu", "marks": ""} | how
        status = gpu.main(["--workers", "2", "--results", str(kept), *arguments, str(tmp_path)], **how)
        lines = [json.loads(line) for line in kept.read_text().splitlines()[before:]] if kept.exists() else []
        return status, {line["test"]: line for line in lines if "test" in line}

    run.kept = kept
    return run


@pytest.mark.slow
def test_every_test_has_its_result(suite, capsys):
    status, results = suite("--test-limit", "5")
    assert {name: result["outcome"] for name, result in results.items()} == WANTED
    assert status == 1
    printed = capsys.readouterr().out
    assert "FAILED test_some.py::test_fails" in printed and "out of memory, runs again alone" in printed
    assert "assert (1 + 1) == 3" in results["test_some.py::test_fails"]["why"]
    assert "time.sleep(600)" in TESTS["test_some.py"] and "test_hangs" in results["test_some.py::test_hangs"]["why"]
    assert results["test_some.py::test_is_skipped"]["why"].endswith("for a reason")
    assert "6 passed" in printed.splitlines()[-1] and "0 not run" in printed.splitlines()[-1]

    with suite.kept.open("a") as file:
        file.write('{"test": "test_some.py::test_com')  # a run that was cut off
        file.write("\n")
    status, results = suite("--skip-passed", str(suite.kept), "-k", "fails or passes or skipped or alone")
    assert results.keys() == {"test_some.py::test_fails", "test_some.py::test_is_skipped", "test_broken.py"}


@pytest.mark.slow
def test_a_run_over_its_time_names_what_is_left(suite, tmp_path, capsys):
    (tmp_path / "test_broken.py").unlink()
    status, results = suite("--limit", "8", "-k", "passes or hangs or last")
    assert status == 3 and {x["outcome"] for x in results.values()} <= {"passed"}
    said = capsys.readouterr().out
    assert "test_some.py::test_hangs" in said.partition("was over:")[2]


def test_without_a_gpu_it_says_so(suite, capsys):
    assert suite(platform="cuda")[0] == 2
    assert "there is no cuda device here" in capsys.readouterr().err
    assert suite("--no-such-option")[0] == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        suite("--skip-passed", "nowhere.jsonl")
    assert "there is no nowhere.jsonl" in capsys.readouterr().err


def test_results_are_noted_in_the_table_of_runs(tmp_path, capsys):
    """A row gets the card and the day of the newest of its tests, unless one of them failed."""
    results, table = tmp_path / "gpu.jsonl", tmp_path / "ran.json"
    runs = {
        ("2026-01-02T03:04:05", "NVIDIA H100 80GB HBM3, jax 0.11.2"): {"a[one]": "failed", "c[one]": "passed"},
        ("2026-02-03T04:05:06", "NVIDIA H200, jax 0.11.2"): {
            "a[one]": "passed",
            "a[two]": "passed",
            "a[three]": "skipped",
            "b[one]": "timeout",
        },
    }
    lines = []
    for (began, device), outcomes in runs.items():
        lines.append({"began": began, "device": device, "tests": len(outcomes)})
        lines += [{"test": x, "outcome": outcome, "seconds": 1.0, "why": ""} for x, outcome in outcomes.items()]
    results.write_text("\n".join(map(json.dumps, lines)))
    record = {"source": "“none”", "rows": [{"kernels": x, "tests": None, "by": rf"^{x}\["} for x in "abcd"]}
    table.write_text(ran.written(record))
    assert ran.main([str(results), "--commit", "0123456"], table) == 1
    rows = [row["tests"] for row in json.loads(table.read_text())["rows"]]
    assert rows == [
        ["0123456", "H200", "2026-02-03", "2 tests"],
        None,
        ["0123456", "H100", "2026-01-02", "1 test"],
        None,
    ]
    assert "FAILED  b: b[one]" in capsys.readouterr().out


def test_the_table_of_runs_is_as_it_is_written():
    text = ran.RAN.read_text()
    assert ran.written(json.loads(text)) == text
