"""The public names, and no others; and no word in code that was retired, which docs/lint.py sees to."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jax_dsv4_fmha
from jax_dsv4_fmha import layers

from .retired_words import Retired, come_back, identifiers


@pytest.mark.parametrize("module", ["jax_dsv4_fmha", "jax_dsv4_fmha.layers"])
def test_public_names(module):
    """In a separate process, because importing a module adds its name to the package."""
    code = f"import {module} as x; print(sorted(x.__all__)); print([n for n in dir(x) if not n.startswith('_')])"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    names, there = (eval(line) for line in done.stdout.splitlines())
    path = Path(sys.modules[module].__file__).parent
    assert names and {*there} - {x.stem for x in path.iterdir()} <= {*names} <= {*there}


def test_a_public_name_is_no_module():
    for module in (jax_dsv4_fmha, layers):
        found = [name for name in module.__all__ if inspect.ismodule(getattr(module, name))]
        assert found == (["reference"] if module is jax_dsv4_fmha else [])


PLANTED = {
    "x.py": [
        "{} = 1",
        "def f(*, {}): ...",
        "import a.{}",
        "y.{}(z)",
        'f("{}")',
        'f("a/{}.py")',
        "f({}=1)",
        "class {}: ...",
    ],
    "x.h": ["int {} = 1;", "y.{}(z);", 'f("{}");', "struct {} {{}};"],
}


@pytest.mark.parametrize("word", [Retired("old_word", "new"), Retired("old*", "new", ("jax_dsv4_fmha",))])
def test_a_planted_word_is_found_and_prose_is_not(word):
    def said(path, source):
        return come_back(path, identifiers(path, source), [word])

    folder = Path(word.folders[0])
    for name, lines in PLANTED.items():
        for line in lines:
            found = said(folder / name, line.format(word.example))
            assert len(found) == 1 and found[0].endswith(word.new), line
    assert said(folder / f"{word.example}.h", "")
    prose = {"x.py": '"""They {} it."""\nx = 1  # {}', "x.h": '// {}\n/* {}\n {} */ f("they {} it");'}
    for name, line in prose.items():
        assert said(folder / name, line.replace("{}", word.example)) == []
    assert said(Path("elsewhere/x.py"), f"{word.example} = 1") == []
