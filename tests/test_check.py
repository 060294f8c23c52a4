"""`make check`: which tests a change asks for, and CI, which runs all."""

import re

import pytest

from tests import check
from tests.check import Row

ROWS = [
    Row(("a",), run=("test_a",), interpret=("test_kernels_of_a",)),
    Row(("a/deep", "b/*.py"), run=("test_deep",)),
    Row(("a/deep/file.py",), interpret=("test_deep", "test_file")),
]


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        (["a/x.cc"], (["test_a"], ["test_kernels_of_a"], [])),
        (["a/x.py"], (["test_names", "test_a"], ["test_kernels_of_a"], [])),
        (["a/deep/x.cc", "b/y.py"], (["test_deep", "test_names"], [], [])),
        (["a/deep/file.py"], (["test_names"], ["test_deep", "test_file"], [])),
        (["a/deep/file.py", "a/deep/x"], (["test_names", "test_deep"], ["test_file"], [])),
        (["b/deep/y.py", "ab/x"], (["test_names"], [], ["b/deep/y.py", "ab/x"])),
        (["tests/test_z.py"], (["test_names", "test_z"], [], [])),
        ([], ([], [], [])),
    ],
)
def test_a_file_takes_the_row_that_says_most_of_its_path(paths, wanted):
    assert check.chosen(paths, ["test_names"], ROWS) == wanted


def test_what_runs(capsys, monkeypatch):
    """By this repository's table, for some files of it."""
    monkeypatch.setattr(check, "changed", lambda _: ["docs/api.md", "ffi/call.h", "kernels/sm90/mla/bwd/kernel.py"])
    assert check.main(["--list"]) == 0
    said = capsys.readouterr().out
    steps = ["ruff format", "ruff check", "clang-format", "python docs/lint.py", "mypy", "python -m pytest"]
    assert re.findall(f"check: ({'|'.join(steps)})", said) == steps
    assert all(f"tests/{name}.py" in said for name in ("test_docs", "test_native", "test_hops"))
    assert "they interpret kernels: test_ffi test_backward test_ptx_mla_backward;" in said


def test_an_unknown_revision(capsys):
    with pytest.raises(SystemExit):
        check.main(["--since", "no-such-branch"])
    assert "git does not know no-such-branch" in capsys.readouterr().err
