"""The programs in README and docs run, and print what their comments say; generated parts are what docs/generate.py
writes.
"""

import dataclasses
import doctest
import inspect
import re
import runpy
import shlex
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest

import interpreter.__main__
import jax_dsv4_fmha
from interpreter.cute import script
from interpreter.kernels import command
from jax_dsv4_fmha import _cli, layers
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


def test_commands_are_understood():
    """The command lines on the pages, up to what they say about themselves, which two spaces or a # part from them."""
    said = [page.read_text() for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md")]
    said += [module.__doc__ for module in (interpreter.__main__, command, script)]
    commands = re.findall(r"python -m (jax_dsv4_fmha|interpreter) +([^`\n#)]*?)(?:  |[`\n#)])", "\n".join(said))
    assert {program for program, _ in commands} == {"jax_dsv4_fmha", "interpreter"} and len(commands) > 9
    for program, words in commands:
        if program == "jax_dsv4_fmha":
            _cli._parser().parse_args(shlex.split(words))
        elif words.startswith("run "):
            script.parser().parse_args(shlex.split(words)[1:])
        else:
            arguments = command.parser().parse_args(shlex.split(words))
            command.find(arguments.kernel)


def test_ci_runs_every_test():
    """What `make test` leaves out has a target of its own, except random cases, and CI runs every target of tests but
    that of a GPU.
    """
    makefile = (ROOT / "Makefile").read_text()
    targets, ci = re.findall(r"^(test[a-z-]*):", makefile, re.M), (ROOT / ".ci/run").read_text()
    (left_out,) = re.findall(r"-m 'not \((.*)\)'", makefile)
    assert set(left_out.split(" or ")) == {"fuzz", *re.findall(r"\(PYTEST\) -m ([a-z]+)$", makefile, re.M)}
    assert set(targets) - {"test-gpu"} == set(re.findall(r"make (test[a-z-]*)", ci))


GENERATE = runpy.run_path(str(ROOT / "docs/generate.py"))


@pytest.mark.parametrize("page", GENERATE["PAGES"], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_was_measured_is_what_the_page_says(page):
    text = page.read_text()
    assert GENERATE["generated"](text) == text, "run python docs/generate.py"
    if page.name == "performance.md":
        assert len(text.splitlines()) <= 150
        assert {found[1] for found in GENERATE["MARKED"].findall(text)} >= {"dsv4", "dense", "decode"}


KERNELS = sorted((ROOT / "docs/kernels").glob("*.md"))
BRIEF = (*KERNELS, ROOT / "docs/architecture.md")


def prose(text):
    """Paragraphs and items of lists, without a bold heading in front; no tables, programs, pictures or addresses."""
    text = re.sub(r"^```.*?^```|^(?: {4}|#|\||!\[|<!--).*?$", "", text, flags=re.M | re.S)
    blocks = re.split(r"\n\s*\n|\n(?=- |\d+\. )", re.sub(r"\]\([^)]*\)", "]", text))
    return [re.sub(r"^(- )?(\*\*[^*]+[.:]\*\*)?", "", " ".join(block.split())) for block in blocks if block.strip()]


def sentences(text):
    """The numbers of words of a text's sentences; what has no letter and no digit is not a word."""
    split = [sentence for block in prose(text) for sentence in re.split(r"(?<=[.?!])[)\]*]*\s+", block)]
    return [
        len([word for word in sentence.split() if re.search(r"\w", word)]) for sentence in split if sentence.strip()
    ]


@pytest.mark.parametrize("page", BRIEF, ids=lambda page: page.stem)
def test_a_page_is_short_and_so_are_its_sentences(page):
    text = page.read_text()
    words = sentences(text)
    assert page not in KERNELS or len(text.splitlines()) <= 60
    assert sum(words) / len(words) <= 20


def test_what_a_sentence_is():
    lines = ["# No words here", "", "One two [three](four.md).", "Here", "are four more.", "", "- **Few.** Two words."]
    assert sentences("\n".join([*lines, "- an item = 1", "- b", "", "    a = 1", "| c |", ""])) == [3, 4, 2, 3, 1]


MEASURED = re.compile(r"\d ?(?:[µmn]s|%|[TG]B/s|[TGM]FLOP/s|[GM]Hz|bytes a ns)(?!\w)|\d times as (?:long|fast)")


@pytest.mark.parametrize(
    "page", (*BRIEF, ROOT / "docs/layers.md", ROOT / "docs/performance.md"), ids=lambda page: page.stem
)
def test_what_was_measured_is_generated(page):
    """Times, rates and shares stand between the marks of docs/generate.py, and so come from a record."""
    assert MEASURED.findall(GENERATE["MARKED"].sub("", page.read_text())) == []


@pytest.mark.parametrize("figure", ["6.8 ms", "51 % of", "3.8 TB/s", "12µs", "2.5 times as long"])
def test_a_figure_is_found(figure):
    assert MEASURED.search(f"It takes {figure} more.") and not MEASURED.search(
        "128 bytes a clock, 160 keys, 5 × 1024 clocks"
    )


DRAW = runpy.run_path(str(ROOT / "docs/draw.py"))


def test_pictures_are_what_draws_them():
    for name, draw in DRAW["DRAWN"].items():
        assert (DRAW["PICTURES"] / f"{name}.svg").read_text() == draw(), "run python docs/draw.py"


def luminance(color):
    """Of WCAG 2, of a colour like "#4053d3"."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_of_pictures_stand_out(theme):
    """By WCAG 2's ratio for text, on the page and on every box that has words."""
    colors = {name: luminance(color[theme == "dark"]) for name, color in DRAW["COLORS"].items()}
    pairs = [("ink", "page"), ("on-softmax", "softmax"), *(("on", box) for box in ("load", "scores", "out", "store"))]
    for pair in pairs:
        dark, light = sorted(colors[name] for name in pair)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, pair


def test_pictures_can_be_read_on_a_phone():
    """A phone has some 360 pixels across. Letters are 9 high there, and lines end within the picture, or their box."""
    for draw in DRAW["DRAWN"].values():
        root = ElementTree.fromstring(draw())
        across = float(root.get("viewBox").split()[2])
        assert DRAW["SIZE"] * 360 / across >= 9
        for line in root.iter("{http://www.w3.org/2000/svg}text"):
            width, x = len(line.text) * DRAW["LETTER"], float(line.get("x"))
            assert x - width / 2 * (line.get("text-anchor") == "middle") >= 0, line.text
            assert x + width / (1 + (line.get("text-anchor") == "middle")) <= across, line.text


TRIALS = {"forward": 120, "decode-fp8": 20, "gathering": 11, "backward": 9, "indexer": 5, "layers": 6}  # at least


@pytest.mark.parametrize("page", TRIALS)
def test_a_trial_is_a_line(page):
    """Date, commit, trial, predicted, measured, verdict; no cell of more than 120 characters."""
    rows = [line for line in (ROOT / f"docs/lab/{page}.md").read_text().splitlines() if line.startswith("| 2")]
    for row in rows:
        date, commit, *texts, verdict = (cell.strip() for cell in row.strip("|").split(" |"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date) and re.fullmatch("[0-9a-f]{8}", commit) and len(texts) == 3, row
        assert max(map(len, texts)) <= 120, row
        assert verdict in ("kept", "dropped", "replaced", "shipped", "measured", "not recorded", "…"), row
    assert len(rows) >= TRIALS[page]


def anchors(page):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    """Links between files; `make docs` checks the site's."""
    for page in (*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "SECURITY.md"))):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)}: {link}"


def test_the_site_lists_every_page():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} == listed


def test_the_names_of_tensors_are_what_is_read():
    """A row for each parameter: its tensors' names in DeepSeek's checkpoints and in Hugging Face's."""
    page = (ROOT / "docs/howto/checkpoint-names.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (.*) \| (.*) \|$", page, re.M)
    for column, names in enumerate((weights._DEEPSEEK, weights._HUGGING_FACE), 1):
        said = {row[0]: re.findall("`([^`]+)`", row[column]) for row in rows}
        assert {name: x for name, x in said.items() if x} == {
            name: [x] if isinstance(x, str) else [*x] for name, x in names.items()
        }


def test_pages_open_as_files():
    """A link to a folder, as of MkDocs by default, would open a list of files."""
    assert re.search(r"^use_directory_urls: false\b", (ROOT / "mkdocs.yml").read_text(), re.M)


def tree(page):
    """The folders that the page's tree names, as paths; `{a,b}/` is two of them."""
    block = page[page.index("## The tree") :].split("\n## ", 1)[0]
    parents, named = {}, set()
    for indent, path in re.findall(r"^( {4,})((?:[\w{},]+/)+)", block, re.M):
        above = "".join(folder for column, folder in parents.items() if column < len(indent))
        parents = {column: folder for column, folder in parents.items() if column < len(indent)} | {len(indent): path}
        head, _, braces = (above + path).partition("{")
        inner, _, tail = braces.partition("}")
        named |= {f"{head}{one}{tail}".rstrip("/") for one in inner.split(",")}
    return named


def folders(*roots):
    """Those with sources: with more than an `__init__.py`."""
    sources = {path for root in roots for path in (ROOT / root).rglob("*") if path.suffix in (".py", ".h", ".cc")}
    return {str(path.parent.relative_to(ROOT)) for path in sources if path.name != "__init__.py"}


def test_the_tree_names_every_folder():
    """docs/architecture.md names each folder of package, kernels, ffi and interpreter, and none that is not there."""
    named = tree((ROOT / "docs/architecture.md").read_text())
    there = folders("jax_dsv4_fmha", "kernels", "ffi", "interpreter")
    assert there - named == set()
    assert [path for path in named if not (ROOT / path).is_dir()] == []


def test_a_tree_is_paths():
    lines = ["## The tree", "", "    a/    files/ of it", "      b/c/    more", "      b/{d,e}/   two", "    f/  g/"]
    assert tree("\n".join([*lines, "", "## Next", "    h/"])) == {"a", "a/b/c", "a/b/d", "a/b/e", "f"}


PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name) for module in (jax_dsv4_fmha, layers) for name in module.__all__
}
DOCUMENTED = {name: x for name, x in PUBLIC.items() if callable(x) or inspect.ismodule(x)}  # others have no docstring
METHODS = {
    f"{name}.{method}": getattr(x, method)
    for name, x in DOCUMENTED.items()
    if inspect.isclass(x)
    for method, own in vars(x).items()
    if isinstance(own, property | classmethod) or inspect.isfunction(own)
}
SECTIONS = {"Args", "Attributes", "Examples", "Raises", "Returns"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_of_a_docstring_runs(name):
    docstring = inspect.getdoc(DOCUMENTED[name])
    assert re.search(r"^Examples:\n  >>> ", docstring, re.M)
    example = doctest.DocTestParser().get_doctest(docstring, {}, name, None, 0)
    assert example.examples[-1].want, "it prints what it has made"
    said = []
    assert doctest.DocTestRunner(verbose=False).run(example, out=said.append).failed == 0, "".join(said)


def unknown_sections(docstring):
    """Lines that look like the heading of a section, and that the API page would show as text."""
    headings = re.findall(r"^( *\S.*):\n +[\w, *]+: ", docstring, re.M)
    return [heading for heading in headings if heading not in SECTIONS]


@pytest.mark.parametrize("name", [*DOCUMENTED, *METHODS])
def test_the_sections_of_a_docstring_are_sections(name):
    x = DOCUMENTED.get(name) or METHODS[name]
    assert unknown_sections(inspect.getdoc(x) or "") == []


def test_what_is_no_section():
    assert unknown_sections("A.\n\nArgs (B batch, T queries):\n  query: an array.") == ["Args (B batch, T queries)"]
    assert unknown_sections("A.\n\n  Args:\n    query: an array.\nkey: an array.") == ["  Args"]
    assert unknown_sections("A:\n\n  p = 1\n\nArgs:\n  query, key: arrays.\n") == []


DATACLASSES = {name: x for name, x in DOCUMENTED.items() if dataclasses.is_dataclass(x)}


@pytest.mark.parametrize("name", DATACLASSES)
def test_each_attribute_has_its_line(name):
    """A line for several would be shown as one attribute with their names for its type."""
    section = re.search(r"^Attributes:\n((?:  .*\n?)+)", inspect.getdoc(DATACLASSES[name]), re.M)
    fields = [field.name for field in dataclasses.fields(DATACLASSES[name])]
    assert section is None or re.findall(r"^  (\S[^:]*):", section[1], re.M) == fields


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    names = [*jax_dsv4_fmha.__all__, *(f"layers.{name}" for name in layers.__all__)]
    assert [name for name in names if not re.search(rf"jax_dsv4_fmha\.{name}\b", page)] == []


def test_an_entry_of_the_api_page_is_no_file():
    """`layers.rope` would be the file rope.py, with all that is in it; the function is `layers.rope.rope`."""
    entries = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.M)
    files = [entry for entry in entries if (ROOT / f"{entry.replace('.', '/')}.py").exists()]
    assert len(entries) > 30 and files == ["jax_dsv4_fmha.reference"]


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


FOLDERS = ("jax_dsv4_fmha", "kernels", "ffi", "interpreter", "tests", "examples", "docs")
FILES = [f"/{path.relative_to(ROOT)}" for name in FOLDERS for path in (ROOT / name).rglob("*.*")]
NOW = [page for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md") if page.parent.name != "lab"]


GENERATED = ["/abi.h", "/calls.h", "/targets.cc", "/cubins.cc"]  # by kernels/tables.py, into the build's folder


@pytest.mark.parametrize("page", NOW, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_that_a_page_names_is_there(page):
    """By its path, or the end of its path; the lab names files of its day. Words in capitals stand for any name."""
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|h|cc|npz))`", page.read_text())
    named = [name for name in named if not re.search("[A-Z]{4}", name)]
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in FILES + GENERATED)] == []


def test_which_test_for_which_file():
    """Every path of the table exists, every test file is in it, and so is every folder with code."""
    rows = re.findall(r"^\| (.*) \| (.*`test_.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    changed = {name for left, _ in rows for name in re.findall("`([^`]+)`", left)}
    places = {name: [*ROOT.glob(name), *(ROOT / "jax_dsv4_fmha").glob(name)] for name in changed}
    assert [name for name, found in places.items() if not found] == []
    tests = {name for _, right in rows for name in re.findall(r"`(test_\w+\.py)`", right)}
    assert tests == {path.name for path in (ROOT / "tests").glob("test_*.py")}
    known = {path for found in places.values() for path in found}
    for folder in ("jax_dsv4_fmha", "kernels", "ffi", "interpreter"):
        for path in (ROOT / folder).rglob("*.py"):
            assert known & {path, *path.parents} or path.name in ("__init__.py", "__main__.py"), path
