"""The public names, and no others; and no word in code that was retired."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_dsv4_fmha
from jax_dsv4_fmha import layers

from .retired_words import EVERYWHERE, HERE, RETIRED, come_back, identifiers

PUBLIC = [
    "Cache",
    "EXPORT_CHECKS",
    "Span",
    "dequantize_cache",
    "dot_product_attention",
    "dsv4_attention",
    "dsv4_decode",
    "explain",
    "fmha",
    "head_summed_probabilities",
    "indexer_blocks",
    "indexer_loss",
    "indexer_scores",
    "lightning_indexer",
    "merge",
    "quantize_cache",
    "quantize_indexer",
    "reference",
    "sparse_fmha",
]


def test_public_names():
    """In a separate process, because importing a module adds its name to the package."""
    code = "import jax_dsv4_fmha as x; print(sorted(x.__all__)); print([n for n in dir(x) if not n.startswith('_')])"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines() == [str(PUBLIC)] * 2


LAYERS = [
    "Compressor",
    "DSV4Attention",
    "Indexer",
    "LayerCache",
    "Output",
    "Rope",
    "RunningSums",
    "STEP_OPTIONS",
    "Shared",
    "from_config",
    "from_state_dict",
    "hadamard",
    "inverse_rope",
    "rope",
    "unzigzag",
    "zigzag",
]


def test_public_names_of_layers():
    assert sorted(layers.__all__) == LAYERS
    assert all(callable(getattr(layers, name)) for name in LAYERS if not name.endswith("_OPTIONS"))


def test_an_ops_name_is_the_function():
    assert all(callable(getattr(jax_dsv4_fmha, name)) for name in PUBLIC if name not in ("EXPORT_CHECKS", "reference"))


ROOT = Path(__file__).parents[1]
SOURCES = [
    path.relative_to(ROOT)
    for folder in EVERYWHERE
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".h", ".cc") and path.name != HERE
]
ACTIVE = [word for word in RETIRED if word.active]


@functools.cache
def code():
    return {path: identifiers(path, (ROOT / path).read_text()) for path in SOURCES}


def test_no_retired_word_comes_back():
    assert [said for path, names in code().items() for said in come_back(path, names, ACTIVE)] == []


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


@pytest.mark.parametrize("word", RETIRED, ids=lambda word: word.example)
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


def test_the_glossary_names_what_code_has():
    words = re.findall(r"^\|.*\|([^|]*)\|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    named = {name for cell in words for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 30 and named - set().union(*code().values()) == set()
