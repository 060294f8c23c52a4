"""The programs in README and docs run, and print what their comments say; and docs/lint.py finds what it looks for."""

import doctest
import inspect
import re
import runpy
import shlex
import types
from pathlib import Path

import pytest

import interpreter.__main__
from interpreter.cute import script
from interpreter.kernels import command
from jax_dsv4_fmha import _cli
from jax_dsv4_fmha.layers import weights

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
WHERE = {  # each program once, however many pages show it
    program: f"{page.relative_to(ROOT)}-{number}"
    for page in PAGES
    for number, program in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
}
PROGRAMS = [pytest.param(program, id=where) for program, where in WHERE.items()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_prints_what_it_says(program, capsys, in_place):
    """And what it donates is updated in place."""
    said = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.M)
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert said and printed == said
    assert bool(in_place) == ("donate_arg" in program)


def test_commands_are_understood(monkeypatch):
    """The command lines on the pages, up to what they say about themselves, which two spaces or a # part from them."""
    said = [page.read_text() for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md")]
    said += [module.__doc__ for module in (interpreter.__main__, command, script)]
    commands = re.findall(r"python -m (jax_dsv4_fmha|interpreter) +([^`\n#)]*?)(?:  |[`\n#)])", "\n".join(said))
    assert {program for program, _ in commands} == {"jax_dsv4_fmha", "interpreter"} and len(commands) > 9
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # those that they name are the reader's
    for program, words in commands:
        if program == "jax_dsv4_fmha":
            _cli._parser().parse_args(shlex.split(words))
        elif words.startswith("run "):
            script.parser().parse_args(shlex.split(words)[1:])
        else:
            arguments = command.parser().parse_args(shlex.split(words))
            command.find(arguments.kernel)


def test_the_names_of_tensors_are_what_is_read():
    """A row for each parameter: its tensors' names in DeepSeek's checkpoints and in Hugging Face's."""
    page = (ROOT / "docs/howto/checkpoint-names.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (.*) \| (.*) \|$", page, re.M)
    for column, names in enumerate((weights._DEEPSEEK, weights._HUGGING_FACE), 1):
        said = {row[0]: re.findall("`([^`]+)`", row[column]) for row in rows}
        assert {name: x for name, x in said.items() if x} == {
            name: [x] if isinstance(x, str) else [*x] for name, x in names.items()
        }


LINT = runpy.run_path(str(ROOT / "docs/lint.py"))


@pytest.mark.parametrize("name", LINT["DOCUMENTED"])
def test_the_example_of_a_docstring_runs(name):
    docstring = inspect.getdoc(LINT["DOCUMENTED"][name])
    example = doctest.DocTestParser().get_doctest(docstring, {}, name, None, 0)
    assert example.examples[-1].want, "it prints what it has made"
    said = []
    assert doctest.DocTestRunner(verbose=False).run(example, out=said.append).failed == 0, "".join(said)


LINKS = runpy.run_path(str(ROOT / "docs/links.py"))


def of_site(page):
    """What MkDocs hands to a hook."""
    url = page.replace(".md", ".html")
    return types.SimpleNamespace(file=types.SimpleNamespace(src_uri=page, url=url))


def test_names_and_pages_in_docstrings_become_links():
    heading = '<h3 id="jax_dsv4_fmha.layers.rope.rope"><code>rope</code></h3>'
    name, other = "<code>rope</code>", "<code>init</code> <b><code>rope</code></b> <pre><code>rope</code></pre>"
    file = types.SimpleNamespace(url_relative_to=lambda _: "../layers.html")
    files = types.SimpleNamespace(get_file_from_path={"layers.md": file}.get)
    page = LINKS["on_page_content"](f"{heading}{name}{other} (docs/layers.md)", of_site("api.md"), files)
    anchor = "#jax_dsv4_fmha.layers.rope.rope"
    assert page == f'{heading}<a href="{anchor}">{name}</a>{other} (<a href="../layers.html">docs/layers.md</a>)'

    text = f"<nav>{name}</nav><article>{name}{other}</article>"
    for uri, to_api in (("howto/few-heads.md", "../api.html"), ("layers.md", "api.html")):
        want = f'<nav>{name}</nav><article><a href="{to_api}{anchor}">{name}</a>{other}</article>'
        assert LINKS["on_page_content"](text, of_site(uri), files) == text
        assert LINKS["on_post_page"](text, of_site(uri)) == want
    assert LINKS["on_post_page"](text, of_site("kernels/rope.md")) == text, "there it is a kernel"


def test_what_a_sentence_is():
    lines = ["# No words here", "", "One two [three](four.md).", "Here", "are four more.", "", "- **Few.** Two words."]
    text = "\n".join([*lines, "- an item = 1", "- b", "", "    a = 1", "| c |", ""])
    assert LINT["sentences"](text) == [3, 4, 2, 3, 1]


CLUMSY = {
    "Of 16 chunks left makes four.": "a sentence begins with a genitive: Of 16 chunks left makes four.",
    "What it reads is a page.": "a clause is the subject: What it reads is a page.",
    "Whether it runs depends on d.": "a clause is the subject: Whether it runs depends on d.",
    "Two queries in a pair. And a B200.": "a sentence has no verb: And a B200.",
    "It reads keys, of which two are new.": '"of which": reads keys, of which',
}


@pytest.mark.parametrize("sentence", CLUMSY)
def test_a_clumsy_sentence_is_found(sentence):
    assert [*LINT["clumsy"](f"# Of a page\n\n- **What.** It reads. {sentence}\n")] == [CLUMSY[sentence]]


def test_what_is_not_clumsy():
    lines = [
        "Which of two? What is it? What was tried: [trials](a.md).",
        "**Of it.** Two of them, and that.",
        "",
        "| Of a |",
    ]
    plain = ["Whether keys are rows or pages, it runs.", "And it is one that you may keep.", "But see below: it is."]
    assert [*LINT["clumsy"]("\n".join([*lines, "", *plain, "", "    Of a program", ""]))] == []


def test_pages_in_a_table():
    head, line, *rows = LINT["table"]()
    assert len(rows) == len(LINT["PAGES"]) + len(LINT["OTHERS"])
    assert {row.count("|") for row in (head, line, *rows)} == {8} and any("docs/semantics.md" in row for row in rows)


@pytest.mark.parametrize("figure", ["6.8 ms", "51 % of", "3.8 TB/s", "12µs", "2.5 times as long"])
def test_a_figure_is_found(figure):
    find = LINT["MEASURED"].search
    assert find(f"It takes {figure} more.") and not find("128 bytes a clock, 160 keys, 5 × 1024 clocks")


@pytest.mark.parametrize("docstring", ["Of o and lse.", "Whether: it is one.", "How many keys there are."])
def test_a_fragment_is_found(docstring):
    find = LINT["FRAGMENT"].match
    assert find(docstring) and not find("Offsets of keys.") and not find("The keys that a query sees. Of one entry.")


def test_a_record_of_older_machine_code_is_found(monkeypatch):
    ran = LINT["runs"]
    row = {"key": "a_key", "sha256": "b" * 64, "arch": "sm_90a"}
    monkeypatch.setattr(ran.library, "manifest", lambda: {"variants": [row]})
    rows = [{"name": x, "times": {"ours": {"machine_code": {"a_key": x * 16}}, "xla": {}}} for x in "ab"]
    found = [*ran.older({"h200": {"devices": [{"compute_capability": "9.0"}], "rows": rows}})]
    assert found == ["docs/h200.json: a: timed older machine code of a_key"]


def test_a_tree_is_paths():
    lines = ["## The tree", "", "    a/    files/ of it", "      b/c/    more", "      b/{d,e}/   two", "    f/  g/"]
    found = LINT["tree"]("\n".join([*lines, "", "## Next", "    h/"]))
    assert found == {"a", "a/b/c", "a/b/d", "a/b/e", "f"}


def test_the_lines_for_code_bases_name_what_is_there():
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))["GENERATED"]
    codes = re.findall(r"\| `([^`]*jax_dsv4_fmha[^`]*)`", generate["code_bases"]())
    assert len(codes) == 5
    for code in codes:
        dotted, name = re.search(r"jax_dsv4_fmha[\w.]+", code)[0], re.findall(r"\w+", code)[-1]
        module = dotted.removesuffix(f".{name}") if name == "attention_fn" else dotted
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert ('if __name__ == "__main__":' if code.startswith("python -m ") else f"def {name}(") in text, code


def test_what_is_no_section():
    find = LINT["unknown_sections"]
    assert find("A.\n\nArgs (B batch, T queries):\n  query: an array.") == ["Args (B batch, T queries)"]
    assert find("A.\n\n  Args:\n    query: an array.\nkey: an array.") == ["  Args"]
    assert find("A:\n\n  p = 1\n\nArgs:\n  query, key: arrays.\n") == []
