"""The package's hops, from a public op to the native library: a folder each, and imports in one direction."""

import ast
from pathlib import Path

import pytest

import jax_dsv4_fmha

PACKAGE = Path(jax_dsv4_fmha.__file__).parent
# A hop -> what it may import besides itself. Of public modules, `reference` is on the way, and `_check` at the end.
HOPS = {
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
