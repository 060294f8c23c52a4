"""The tables that the build writes beside the cubins: manifest.json for Python, and the same for the C++ compiler.

abi.h has, for every family of ops, a struct of its kernels' arguments, a struct of the choices that a call makes
among them, and each order in which some kernel takes these arguments; and how keys are packed. cubins.cc has the
cubins. All of it follows from `kernels/abi` and the variants; `kernels/targets.py` writes what custom calls need.

`python -m kernels.tables` writes what the package reads with or without a library: jax_dsv4_fmha/_host/targets.json and
variants.json. They are committed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import targets
from .abi import FAMILIES, MOST_CHOSEN, MOST_GROUPS, MOST_PARTS, MOST_ROUTED, PACKED_SOURCES, Variant, layouts
from .packings import CACHED
from .params import Param
from .variants import VARIANTS

Record = dict[str, Any]

LAUNCHED = ("threads", "smem_bytes", "tile_m", "tile_n", "ctas", "cluster")  # what the launcher needs besides the cubin
FACTS = (*LAUNCHED, "unit")  # facts from a kernel's module
PACKAGE = Path(__file__).parents[1] / "jax_dsv4_fmha" / "_host"


def described(variant: Variant) -> Record:
    """Returns what Python knows of a variant without its cubin."""
    named = ("family", "arch", "choices", "splits", "evidence")
    return {"key": variant.key, "op": variant.name} | {name: getattr(variant, name) for name in named}


def committed(variants: Sequence[Variant]) -> dict[Path, str]:
    """The files in the package that follow from data here, with their contents."""
    rows = ",\n".join(json.dumps(described(variant)) for variant in variants)
    return {
        PACKAGE / "targets.json": json.dumps(targets.described(), indent=1) + "\n",
        PACKAGE / "variants.json": f"[\n{rows}\n]\n",
    }


def write(
    variants: Sequence[Variant], records: Mapping[str, Record], toolchain: str, out: Path, is_for_tests: bool = False
) -> None:
    """Writes manifest.json and the files in C++. It ships the variants that have a record, by their keys; is_for_tests:
    for the interpreter alone, since a call would not find all that it may need.
    """
    shipped = [v for v in variants if v.key in records]
    rows = [
        described(v)
        | {"params": [p.name for p in v.params]}
        | {k: x for k, x in records[v.key].items() if k != "digest"}
        for v in shipped
    ]
    facts = {"toolchain": toolchain, "is_for_tests": is_for_tests, "targets": targets.described(), "variants": rows}
    manifest = json.dumps(facts, indent=1)
    files = {
        "manifest.json": manifest,
        "abi.h": header(variants),
        "calls.h": targets.calls(),
        "targets.cc": targets.handlers(),
        "cubins.cc": cubins(shipped, records, manifest, out),
    }
    for name, text in files.items():
        if not (path := out / name).exists() or path.read_text() != text:
            path.write_text(text)


def cubins(shipped: Sequence[Variant], records: Mapping[str, Record], manifest: str, out: Path) -> str:
    blobs, rows = [], []
    for variant in shipped:
        key, record = variant.key, records[variant.key]
        blobs.append(f'DSV4_FMHA_EMBED({key}, "{(out / f"{key}.cubin").resolve()}")  // {record["sha256"]}')
        choices = ", ".join(f".{name} = {_literal(name, value)}" for name, value in variant.choices.items())
        row = {
            "op": f'"{variant.name}"',
            "arch": f'"{variant.arch}"',
            "choices": f"{_struct(variant)}Choices{{{choices}}}",
            "layout": f"&{_layout_name(variant)}",
            "name": f'"{key}"',
            "symbol": f'"{record["symbol"]}"',
            "cubin": key,
            "cubin_bytes": record["cubin_bytes"],
            **{name: record[name] for name in LAUNCHED},
            "splits": str(variant.splits).lower(),
        }
        rows.append("      Launcher{" + ", ".join(f".{name} = {value}" for name, value in row.items()) + "},")
    return _CUBINS.format(blobs="\n".join(blobs), count=len(rows), rows="\n".join(rows), manifest=manifest)


def header(variants: Sequence[Variant]) -> str:
    found, parts = layouts(variants).values(), []
    for family in FAMILIES:
        of_family = [v for v in found if isinstance(v, family)]
        params = [p for v in of_family for p in v.params]
        mapped = {p.field for p in params if p.kind == "map"}  # arrays of which some kernel takes a map
        parts += [_arguments(family, params, mapped), _choices(family), *(_layout(v, mapped) for v in of_family)]
    return _HEADER.format(
        parts="\n\n".join(parts),
        max_params=max(len(v.params) for v in found),
        most_groups=MOST_GROUPS,
        most_routed=MOST_ROUTED,
        most_chosen=MOST_CHOSEN,
        most_parts=MOST_PARTS,
        max_maps=max(sum(p.kind == "map" for p in v.params) for v in found),
        layouts=", ".join(f"&{_layout_name(v)}" for v in found),
        choices=", ".join(f"{_struct(family)}Choices" for family in FAMILIES),
        arrays="\n\n".join(targets.arrays()),
        axes=" = -1, ".join(targets.axes()),
        packings=", ".join(map(_packing, CACHED)),
        packed="\n".join(f'    {{"{name}", {{{", ".join(map(_packing, x))}}}}},' for name, x in PACKED_SOURCES.items()),
    )


def _packing(kind: str) -> str:
    return f'{{"{kind}", {CACHED[kind].entry}, {CACHED[kind].multiple}}}'


def _struct(family: type[Variant] | Variant) -> str:
    return family.family.title().replace("_", "")


def _layout_name(variant: Variant) -> str:
    return "k" + variant.layout.title().replace("_", "")


def _literal(name: str, value: Any) -> str:
    if name == "dtype":
        return f"ffi::{_XLA_DTYPE[value]}"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


_XLA_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8E4M3FN", "uint8": "U8"}
_TYPES = {"address": "void*", "int32": "int32_t", "float32": "float"}


def _arguments(family: type[Variant], params: Sequence[Param], mapped: set[str]) -> str:
    def members(of: Iterable[Param]) -> list[str]:
        types = {p.field: "TensorArgument" if p.field in mapped else _TYPES[p.kind] for p in of}
        return [f"  {kind} {name};" for name, kind in types.items()]

    lines = [f"struct {_struct(family)}Arguments {{"]
    if of_source := [p for p in params if p.source is not None]:
        count = 1 + max(p.source or 0 for p in of_source)
        lines += ["  struct Source {", *(f"  {line}" for line in members(of_source)), f"  }} sources[{count}];"]
    return "\n".join([*lines, *members(p for p in params if p.source is None), "};"])


def _choices(family: type[Variant]) -> str:
    types = {int: "int64_t", bool: "bool", str: "std::string_view"}
    named = {"dtype": "ffi::DataType"}
    choices = [(f.name, named.get(f.name) or types[f.type]) for f in fields(family)[len(fields(Variant)) :]]  # type: ignore[index]
    limits = [name for name, _ in choices if name.startswith("max_")]
    takes = [f"{name} {'>=' if name in limits else '=='} call.{name}" for name, _ in choices]
    shown = [f'"{name.removeprefix("max_")}=" + Show({name})' for name, _ in choices]
    tighter = " || ".join(f"{limit} < other.{limit}" for limit in limits) or "false"
    name = f"{_struct(family)}Choices"
    return "\n".join(
        [
            f"struct {name} {{",
            *(f"  {kind} {name};" for name, kind in choices),
            f"  bool Takes([[maybe_unused]] const {name}& call) const {{ return {' && '.join(takes) or 'true'}; }}",
            f"  bool IsTighterThan([[maybe_unused]] const {name}& other) const {{ return {tighter}; }}",
            "  std::string Text() const { return " + (' + ", " + '.join(shown) or '""') + "; }",
            "};",
        ]
    )


def _layout(variant: Variant, mapped: set[str]) -> str:
    name, lines = _layout_name(variant), []
    for p in variant.params:
        place = p.field if p.source is None else f"sources[{p.source}].{p.field}"
        if p.kind != "map" and p.field in mapped:
            place += ".address" if p.kind == "address" else ".extents"
        offset = f"offsetof({_struct(variant)}Arguments, {place})"
        lines.append(f'    {{"{p.name}", {p.bytes}, {offset}, {str(p.kind == "map").lower()}}},')
    facts = f'"{variant.layout}", {name}Params, {len(lines)}, {str(variant.gathers).lower()}'
    return "\n".join(
        [f"inline constexpr Param {name}Params[] = {{", *lines, "};", f"inline constexpr Layout {name}{{{facts}}};"]
    )


_HEADER = """\
// Generated by kernels/tables.py from kernels/abi.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <variant>

#include "layout.h"

namespace dsv4_fmha {{

{parts}

inline constexpr const Layout* kLayouts[] = {{{layouts}}};
inline constexpr int kMaxParams = {max_params}, kMaxMaps = {max_maps}, kMostGroups = {most_groups};
inline constexpr int kMostRouted = {most_routed}, kMostChosen = {most_chosen}, kMostParts = {most_parts};

using Choices = std::variant<{choices}>;

inline constexpr Packing kPackings[] = {{{packings}}};

inline constexpr PackedSources kPackedSources[] = {{
{packed}
}};

// ---- the arrays of each family of calls: as decoded operands, or as addresses

{arrays}

// The extents of axes by their names; -1 where they are not known.
struct Axes {{
  int64_t {axes} = -1;
}};

}}  // namespace dsv4_fmha
"""

_CUBINS = """\
// Generated by kernels/tables.py.
#include "registry.h"

{blobs}

namespace dsv4_fmha {{

LauncherTable Launchers() {{
  static std::array<Launcher, {count}> launchers{{{{
{rows}
  }}}};
  return {{launchers.data(), launchers.size()}};
}}

const char* Manifest() {{ return R"json({manifest})json"; }}

}}  // namespace dsv4_fmha
"""

if __name__ == "__main__":
    for path, text in committed(VARIANTS).items():
        path.write_text(text)
