"""The programs in README and docs run, and print what their comments say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    pytest.param(program, id=f"{page.relative_to(ROOT)}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, program in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_prints_what_it_says(program, capsys):
    said = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.M)
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert said and printed == said
