"""The package's hops, from a public op to the native library: a folder each, and imports in one direction; and no
circle of imports anywhere.
"""

import ast
import graphlib
from collections.abc import Mapping
from pathlib import Path

import pytest

import jax_dsv4_fmha

PACKAGE = Path(jax_dsv4_fmha.__file__).parent
# A hop -> what it may import besides itself. Of public modules, `reference` is on the way, and `_check` at the end.
HOPS = {
    "adapters": {"", "_check"},
    "layers": {"", "_ops", "_dispatch", "_host", "_definitions", "_check"},
    "_ops": {"_dispatch", "_host", "reference", "_definitions", "_check"},
    "_dispatch": {"_host", "reference", "_definitions", "_check"},
    "reference": {"_definitions"},
    "_definitions": {"_check"},
    "_host": set(),
    "_check": set(),
}


def imported(path: Path) -> set[str]:
    """The package's hops that a file imports; "" for a public name of the package."""
    inner = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            assert not isinstance(node, ast.Import | ast.ImportFrom) or "jax_dsv4_fmha" not in ast.unparse(node)
            continue
        module = (*inner[: len(inner) - node.level + 1], *(node.module or "").split("."))
        names = [alias.name for alias in node.names] if not any(module) else [next(filter(None, module))]
        found |= {name if name in HOPS else "" for name in names}
    return found


@pytest.mark.parametrize("hop", HOPS)
def test_imports_go_one_way(hop):
    files = [*PACKAGE.glob(f"{hop}.py"), *(PACKAGE / hop).rglob("*.py")]
    assert files
    for path in files:
        assert imported(path) <= HOPS[hop] | {hop}, path


def test_every_module_is_in_a_hop():
    """Besides the command line's, its benchmark's, and the cases of tests."""
    inside = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert inside == {*HOPS, "__init__", "__main__", "_bench", "_cli", "_testing"}


ROOT = PACKAGE.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("jax_dsv4_fmha", "kernels", "interpreter")
    for path in (ROOT / folder).rglob("*.py")
}


def imports(name: str, modules: Mapping[str, Path]) -> set[str]:
    """The modules that a module imports, anywhere in it, for types alone too."""
    path, found = modules[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= {x if x in modules else source for x in names}
    return found & modules.keys() - {name}


def circle(modules: Mapping[str, Path]) -> list[str]:
    """Modules of which each imports the next one, and the last the first; [] if there are none."""
    try:
        graphlib.TopologicalSorter({name: imports(name, modules) for name in modules}).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(MODULES) == []


def test_a_circle_is_found(tmp_path):
    texts = {"a": "from .b import f", "b": "def f():\n    from . import c", "c": "import p.a", "d": "from . import a"}
    modules = {"p": tmp_path / "__init__.py"} | {f"p.{name}": tmp_path / f"{name}.py" for name in texts}
    for name, path in modules.items():
        path.write_text(texts.get(name.removeprefix("p."), ""))
    assert {*circle(modules)} == {"p.a", "p.b", "p.c"} and circle(modules)[0] == circle(modules)[-1]
    modules["p.c"].write_text("from .d import a")
    assert {*circle(modules)} == {"p.a", "p.b", "p.c", "p.d"}
    modules["p.c"].write_text("import p.e")
    assert circle(modules) == []
