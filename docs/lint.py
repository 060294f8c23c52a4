"""Checks the form of the pages, of the API's docstrings, and of the pictures: `python docs/lint.py`, a part of `make lint`.
`python docs/lint.py --table` prints how long pages and their sentences are.

Nothing here runs a program of a page: `tests/test_docs.py` does. A function that yields complaints is a check.
"""

import ast
import dataclasses
import inspect
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import jax_dsv4_fmha  # noqa: E402
from jax_dsv4_fmha import layers  # noqa: E402
from tests.retired_words import RETIRED, come_back, sources  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OTHERS = tuple(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "AGENTS", "CHANGELOG", "SECURITY"))
KERNELS = sorted((ROOT / "docs/kernels").glob("*.md"))
BRIEF = (*KERNELS, ROOT / "docs/architecture.md")
GENERATE = runpy.run_path(str(ROOT / "docs/generate.py"))
DRAW = runpy.run_path(str(ROOT / "docs/draw.py"))

from figures import ran as runs  # noqa: E402  generate.py says where

Check = Callable[[], Iterable[str]]
CHECKS: list[Check] = []


def check(f: Check) -> Check:
    CHECKS.append(f)
    return f


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---- sentences, and what was measured


@check
def generated() -> Iterator[str]:
    """The text between marks is that which docs/generate.py writes there."""
    for page in GENERATE["PAGES"]:
        text = page.read_text()
        if GENERATE["generated"](text) != text:
            yield f"{named(page)}: run python docs/generate.py"
    performance = (ROOT / "docs/performance.md").read_text()
    if missing := {"dsv4", "dense", "decode"} - {found[1] for found in GENERATE["MARKED"].findall(performance)}:
        yield f"docs/performance.md: has no table of {', '.join(missing)}"


def prose(text: str) -> list[str]:
    """Paragraphs and items of lists, without a bold heading in front; no tables, programs, pictures or addresses."""
    text = re.sub(r"^```.*?^```|^(?: {4}|#|\||!\[|<!--).*?$", "", text, flags=re.M | re.S)
    blocks = re.split(r"\n\s*\n|\n(?=- |\d+\. )", re.sub(r"\]\([^)]*\)", "]", text))
    return [re.sub(r"^(- )?(\*\*[^*]+[.:]\*\*)?", "", " ".join(block.split())) for block in blocks if block.strip()]


def split(text: str) -> list[str]:
    """The sentences of a text."""
    found = [sentence for block in prose(text) for sentence in re.split(r"(?<=[.?!])[)\]*]*\s+", block)]
    return [sentence for sentence in found if sentence.strip()]


def sentences(text: str) -> list[int]:
    """The numbers of words of a text's sentences; what has no letter and no digit is not a word."""
    return [len([word for word in sentence.split() if re.search(r"\w", word)]) for sentence in split(text)]


REFERENCE = tuple(
    ROOT / f"docs/{name}.md"
    for name in ("semantics", "layouts", "bits", "layers", "meshes", "layer-times", "transforms", "verification")
)
LINES = {"semantics": 240, "layers": 250, "verification": 200, "performance": 150}  # at most, of docs/*.md


@check
def short() -> Iterator[str]:
    """Pages of kernels, and sentences of what explains the whole, are short."""
    most = {ROOT / f"docs/{name}.md": lines for name, lines in LINES.items()} | dict.fromkeys(KERNELS, 60)
    for page, wanted in most.items():
        if (lines := len(page.read_text().splitlines())) > wanted:
            yield f"{named(page)}: has {lines} lines, wanted {wanted} at most"
    for page in (*BRIEF, *REFERENCE):
        words = sentences(page.read_text())
        if (mean := sum(words) / len(words)) > 20:
            yield f"{named(page)}: its sentences have {mean:.1f} words in the mean, wanted 20 at most"


GENITIVE = re.compile(r"Of\b")
SUBJECT = re.compile(r"(?:What|How)\b[^:?]*$|Whether\b[^,:?]*$")  # not a label, "What was tried: …", nor a question
TRAILING = re.compile(r"(?:And|Or|But)(?: [\w’'-]+){1,4}\.$")


def clumsy(text: str) -> Iterator[str]:
    """What makes a sentence hard to read: each with the sentence's first words."""
    for sentence in split(text):
        start = " ".join(sentence.split()[:6])
        if GENITIVE.match(sentence):
            yield f"a sentence begins with a genitive: {start}"
        if SUBJECT.match(sentence):
            yield f"a clause is the subject: {start}"
        if TRAILING.match(sentence):
            yield f"a sentence has no verb: {start}"
        if found := re.search(r"(?:\S+ ){0,2}of which\b", sentence):
            yield f'"of which": {found[0]}'


@check
def plain() -> Iterator[str]:
    """Sentences have a subject, a verb and an object, in this order; the lab says what was noted on its day."""
    for page in (*PAGES, *OTHERS):
        if page.parent.name != "lab":
            yield from (f"{named(page)}: {complaint}" for complaint in clumsy(page.read_text()))


def table() -> Iterator[str]:
    """How long pages and sentences are, a row a page: `python docs/lint.py --table`."""
    yield "| page | lines | sentences | words a sentence | more than 25 words | more than 40 | numbers per 100 words |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for page in (*PAGES, *OTHERS):
        text = page.read_text()
        words, n = sentences(text), len(text.splitlines())
        every = sum(words) or 1
        numbers = sum(bool(re.search(r"\d", word)) for block in prose(text) for word in block.split())
        long, longest = (sum(x > most for x in words) for most in (25, 40))
        mean, share = every / max(len(words), 1), 100 * long / max(len(words), 1)
        yield f"| {named(page)} | {n} | {len(words)} | {mean:.1f} | {share:.0f} % | {longest} | {100 * numbers / every:.1f} |"


MEASURED = re.compile(r"\d ?(?:[µmn]s|%|[TG]B/s|[TGM]FLOP/s|[GM]Hz|bytes a ns)(?!\w)|\d times as (?:long|fast)")


@check
def ran() -> Iterator[str]:
    """The table of which kernel ran where has every kernel of the list of kernels' pages."""
    record = (ROOT / "docs/ran.json").read_text()
    for row in re.findall(r"^\| \[.*$", (ROOT / "docs/kernels/index.md").read_text(), re.M):
        for name in re.findall(r"`(\w+)`", row.split(" | ")[1]):
            if not re.search(rf"\b{name}(_sm90)?\b", record):
                yield f"docs/ran.json: has no {name}"


@check
def machine_code() -> Iterator[str]:
    """No record of times is older than the machine code of its kernels, as far as it names it and kernels are built.

    That is lint and no test: ptxas made two machine codes of one PTX (mla_span_fwd_few_heads of 16 heads), so no record
    names this one.
    """
    yield from runs.older(runs.bench_records())


BY_ARITHMETIC = ("transforms", "verification")  # rates on paper, and what tests allow


@check
def measured() -> Iterator[str]:
    """Times, rates and shares stand between the marks of docs/generate.py, and so come from a record."""
    for page in (*BRIEF, *(x for x in REFERENCE if x.stem not in BY_ARITHMETIC), ROOT / "docs/performance.md"):
        for found in MEASURED.findall(GENERATE["MARKED"].sub("", page.read_text())):
            yield f"{named(page)}: {found} stands outside of what is generated"


FRAGMENT = re.compile(r"(Of|By|What|Whether|Where|How|From|That)\b")


def fragments(folder: Path) -> Iterator[str]:
    """The docstrings of a folder's files whose first word says that they are no sentence and no phrase that names."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                docstring = ast.get_docstring(node) or ""
                if found := FRAGMENT.match(docstring):
                    line = f"{named(path)}:{node.body[0].lineno}"
                    yield f"{line}: a docstring begins with {found[0]}, wanted a sentence or a noun phrase"


@check
def openings() -> Iterator[str]:
    """Docstrings are read without the name above them: none is the rest of a sentence that the name would begin."""
    for name in ("jax_dsv4_fmha", "kernels", "interpreter", "examples"):
        yield from fragments(ROOT / name)


TRIALS = {"forward": 120, "decode-fp8": 20, "gathering": 11, "backward": 9, "indexer": 5, "layers": 6}  # at least
VERDICTS = ("kept", "dropped", "replaced", "shipped", "measured", "not recorded", "…")


@check
def trials() -> Iterator[str]:
    """A trial is a line: date, commit, trial, predicted, measured, verdict; no cell of more than 120 characters."""
    for page, least in TRIALS.items():
        rows = [line for line in (ROOT / f"docs/lab/{page}.md").read_text().splitlines() if line.startswith("| 2")]
        if len(rows) < least:
            yield f"docs/lab/{page}.md: has {len(rows)} trials, wanted {least} at least"
        for row in rows:
            date, commit, *texts, verdict = (cell.strip() for cell in row.strip("|").split(" |"))
            fits = re.fullmatch(r"\d{4}-\d\d-\d\d", date) and re.fullmatch("[0-9a-f]{8}", commit)
            if not fits or len(texts) != 3 or max(map(len, texts)) > 120 or verdict not in VERDICTS:
                yield f"docs/lab/{page}.md: not a line of a trial: {row}"


# ---- links and names


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@check
def links() -> Iterator[str]:
    """Links between files lead somewhere; `make docs` checks the site's."""
    for page in (*PAGES, *OTHERS):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                yield f"{named(page)}: {link} leads nowhere"


@check
def site() -> Iterator[str]:
    """The site lists every page, and its pages open as files."""
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", config))
    for page in listed ^ {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}:
        yield f"mkdocs.yml: {page} is {'no page' if page in listed else 'not listed'}"
    if not re.search(r"^use_directory_urls: false\b", config, re.M):
        yield "mkdocs.yml: wanted use_directory_urls: false; a link to a folder would open a list of files"


FOLDERS = ("jax_dsv4_fmha", "kernels", "ffi", "interpreter", "tests", "examples", "docs")
GENERATED = ["/abi.h", "/calls.h", "/targets.cc", "/cubins.cc"]  # by kernels/tables.py, into the build's folder


@check
def files() -> Iterator[str]:
    """A file that a page names is there: by its path, or the end of its path. The lab names files of its day. Words in
    capitals stand for any name.
    """
    there = [f"/{path.relative_to(ROOT)}" for name in FOLDERS for path in (ROOT / name).rglob("*.*")] + GENERATED
    for page in (*PAGES, *OTHERS[:2]):
        if page.parent.name == "lab":
            continue
        for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|h|cc|npz))`", page.read_text()):
            if not re.search("[A-Z]{4}", name) and not any(path.endswith(f"/{name}") for path in there):
                yield f"{named(page)}: there is no {name}"


def tree(page: str) -> set[str]:
    """The folders that the page's tree names, as paths; `{a,b}/` is two of them."""
    block = page[page.index("## The tree") :].split("\n## ", 1)[0]
    parents: dict[int, str] = {}
    found = set()
    for indent, path in re.findall(r"^( {4,})((?:[\w{},]+/)+)", block, re.M):
        above = "".join(folder for column, folder in parents.items() if column < len(indent))
        parents = {column: folder for column, folder in parents.items() if column < len(indent)} | {len(indent): path}
        head, _, braces = (above + path).partition("{")
        inner, _, tail = braces.partition("}")
        found |= {f"{head}{one}{tail}".rstrip("/") for one in inner.split(",")}
    return found


@check
def tree_of_folders() -> Iterator[str]:
    """docs/architecture.md names each folder of package, kernels, ffi and interpreter, and none that is not there."""
    said = tree((ROOT / "docs/architecture.md").read_text())
    sources = {path for root in FOLDERS[:4] for path in (ROOT / root).rglob("*") if path.suffix in (".py", ".h", ".cc")}
    there = {named(path.parent) for path in sources if path.name != "__init__.py"}
    for folder in sorted(there - said):
        yield f"docs/architecture.md: does not name {folder}"
    for folder in sorted(path for path in said if not (ROOT / path).is_dir()):
        yield f"docs/architecture.md: names {folder}, which is not there"


@check
def which_tests() -> Iterator[str]:
    """Every path of tests/which.toml exists, every test file is in it, and so is every file with code."""
    text = (ROOT / "tests/which.toml").read_text()
    known: set[Path] = set()
    for path in (path for row in tomllib.loads(text)["row"] for path in row["change"]):
        if not (found := [*ROOT.glob(path)]):
            yield f"tests/which.toml: there is no {path}"
        known |= set(found)
    listed = set(re.findall(r"\btest_\w+[a-z0-9]\b", text))
    for name in sorted(listed ^ {path.stem for path in (ROOT / "tests").glob("test_*.py")}):
        yield f"tests/which.toml: {name} is {'no test file' if name in listed else 'not listed'}"
    for path in (path for folder in FOLDERS[:4] for path in (ROOT / folder).rglob("*.py")):
        if not known & {path, *path.parents} and path.name not in ("__init__.py", "__main__.py"):
            yield f"tests/which.toml: says nothing of {named(path)}"


@check
def words() -> Iterator[str]:
    """No retired word comes back, and the glossary names what code has."""
    active, said = [word for word in RETIRED if word.active], set[str]()
    for path, names in sources():
        yield from come_back(path, names, active)
        said |= names
    cells = re.findall(r"^\|.*\|([^|]*)\|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    for name in sorted({name for cell in cells for name in re.findall(r"`(\w+)`", cell)} - said):
        yield f"docs/glossary.md: no code says {name}"


# ---- the API


PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name) for module in (jax_dsv4_fmha, layers) for name in module.__all__
}
DOCUMENTED: dict[str, Any] = {name: x for name, x in PUBLIC.items() if callable(x) or inspect.ismodule(x)}
METHODS = {
    f"{name}.{method}": getattr(x, method)
    for name, x in DOCUMENTED.items()
    if inspect.isclass(x)
    for method, own in vars(x).items()
    if isinstance(own, property | classmethod) or inspect.isfunction(own)
}
SECTIONS = {"Args", "Attributes", "Examples", "Raises", "Returns"}


def unknown_sections(docstring: str) -> list[str]:
    """Lines that look like the heading of a section, and that the API page would show as text."""
    headings = re.findall(r"^( *\S.*):\n +[\w, *]+: ", docstring, re.M)
    return [heading for heading in headings if heading not in SECTIONS]


@check
def docstrings() -> Iterator[str]:
    """Sections are those that the API page knows, each attribute has its line, and every name has an example."""
    for name, x in (DOCUMENTED | METHODS).items():
        docstring = inspect.getdoc(x) or ""
        for heading in unknown_sections(docstring):
            yield f"{name}: {heading!r} is no section: {', '.join(sorted(SECTIONS))}"
        if name in DOCUMENTED and not re.search(r"^Examples:\n  >>> ", docstring, re.M):
            yield f"{name}: has no example"
        if dataclasses.is_dataclass(x):
            section = re.search(r"^Attributes:\n((?:  .*\n?)+)", docstring, re.M)
            fields = [field.name for field in dataclasses.fields(x)]
            if section and re.findall(r"^  (\S[^:]*):", section[1], re.M) != fields:
                yield f"{name}: wanted a line for each attribute: {', '.join(fields)}"


@check
def api_page() -> Iterator[str]:
    """It has every public name; `layers.rope` would be the file rope.py, and the function is `layers.rope.rope`."""
    page = (ROOT / "docs/api.md").read_text()
    for name in PUBLIC:
        if not re.search(rf"{re.escape(name)}\b", page):
            yield f"docs/api.md: has no {name}"
    entries = re.findall(r"^::: ([\w.]+)$", page, re.M)
    for entry in entries:
        if (ROOT / f"{entry.replace('.', '/')}.py").exists() and entry != "jax_dsv4_fmha.reference":
            yield f"docs/api.md: {entry} is a file"


# ---- pictures


@check
def drawn() -> Iterator[str]:
    for name, draw in DRAW["DRAWN"].items():
        if (DRAW["PICTURES"] / f"{name}.svg").read_text() != draw():
            yield f"{name}.svg: run python docs/draw.py"


@check
def plotted() -> Iterator[str]:
    """What `bench --plot` drew of a record says the record's day."""
    for record, picture in re.findall(
        r"--from docs/(\w+)\.json.* --plot docs/(\w+)\.svg", (ROOT / "Makefile").read_text()
    ):
        day = json.loads((ROOT / f"docs/{record}.json").read_text())["date"][:10]
        if day not in (ROOT / f"docs/{picture}.svg").read_text():
            yield f"docs/{picture}.svg: is not of {day}, as docs/{record}.json is: run make pictures"


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2, of a colour like "#4053d3"."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@check
def contrast() -> Iterator[str]:
    """Words stand out by WCAG 2's ratio for text, on the page and on every box that has them."""
    pairs = [("ink", "page"), ("on-softmax", "softmax"), *(("on", box) for box in ("load", "scores", "out", "store"))]
    for theme in ("light", "dark"):
        colors = {name: luminance(color[theme == "dark"]) for name, color in DRAW["COLORS"].items()}
        for pair in pairs:
            dark, light = sorted(colors[name] for name in pair)
            if (light + 0.05) / (dark + 0.05) < 4.5:
                yield f"docs/draw.py: {' on '.join(pair)} does not stand out ({theme})"


@check
def on_a_phone() -> Iterator[str]:
    """A phone has some 360 pixels across. Letters are 9 high there, and lines end within the picture, or their box."""
    for name, draw in DRAW["DRAWN"].items():
        root = ElementTree.fromstring(draw())
        across = float(root.get("viewBox", "").split()[2])
        if DRAW["SIZE"] * 360 / across < 9:
            yield f"{name}.svg: its letters are too small on a phone"
        for line in root.iter("{http://www.w3.org/2000/svg}text"):
            width, x = len(line.text or "") * DRAW["LETTER"], float(line.get("x", 0))
            is_middle = line.get("text-anchor") == "middle"
            if x - width / 2 * is_middle < 0 or x + width / (1 + is_middle) > across:
                yield f"{name}.svg: leaves the picture: {line.text}"


def main() -> int:
    if sys.argv[1:] == ["--table"]:
        print(*table(), sep="\n")
        return 0
    found = [complaint for check in CHECKS for complaint in check()]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
