"""The files that the build writes of `calls.TARGETS`: calls.h and targets.cc for C++, and the same for Python as data.

calls.h has, for every family of calls, a struct of what XLA passes to one, and of every custom call its arrays with
their axes, by which `CheckArrays` in ffi/operands.h checks them. targets.cc has the handlers. abi.h gets `arrays()`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from .calls import TARGETS, Array, Form, Target

ATTRIBUTES = {"float32": "float", "int64": "int64_t", "string": "std::string_view"}
DTYPES = {"f32": "F32", "bf16": "BF16", "s32": "S32", "u32": "U32", "u8": "U8", "f8e4m3fn": "F8E4M3FN"}


def described() -> dict[str, Any]:
    """Every custom call's operands and results, as `calls.array` takes them, and its attributes."""
    return {
        t.name: {
            "operands": list(map(str, t.operands)),
            "results": list(map(str, t.results)),
            "attributes": t.attributes,
            **({"state": t.state} if t.state else {}),
        }
        for t in TARGETS
    }


@cache
def families() -> dict[str, list[Target]]:
    """The custom calls of each family, by its name."""
    return {calls: [t for t in TARGETS if t.calls == calls] for calls in dict.fromkeys(t.calls for t in TARGETS)}


def axes() -> list[str]:
    """The names of all axes."""
    names = (n for t in TARGETS for x in (*t.operands, *t.results) for form in x.forms for n in form.axes)
    return list(dict.fromkeys(n for n in names if not n.isdigit()))


@cache
def fields(calls: str) -> tuple[list[str], list[str], int]:
    """The names of a family's arrays of each source of keys, those of the others, and the number of sources."""
    found = [x for t in families()[calls] for x in (*t.operands, *t.results)]
    of_sources = dict.fromkeys(name for x in found if x.source is not None for name in x.fields)
    others = dict.fromkeys(name for x in found if x.source is None for name in x.fields)
    return list(of_sources), list(others), max((len(t.sources) for t in families()[calls]), default=0)


def arrays() -> Iterator[str]:
    """A struct of each family's arrays, sources first."""
    for calls in families():
        of_sources, others, count = fields(calls)
        lines = ["template <typename T>", f"struct {_camel(calls)}Arrays {{"]
        if count:
            lines += ["  struct Source {", f"    T {', '.join(of_sources)};", f"  }} sources[{count}];"]
        lines += [f"  T {', '.join(others)};", "};"]
        yield "\n".join([*lines, f"using {_camel(calls)}Addresses = {_camel(calls)}Arrays<void*>;"])


def calls() -> str:
    return _CALLS.format(parts="\n\n".join([*map(_call, families()), *map(_target, TARGETS)]))


def handlers() -> str:
    return _HANDLERS.format(
        includes="\n".join(f'#include "{calls}.h"' for calls in sorted(families())),
        readers="\n\n".join(map(_reader, TARGETS)),
        targets="\n".join(
            [*map(_registered, TARGETS), *map(_shared, dict.fromkeys(filter(None, (t.state for t in TARGETS))))]
        ),
    )


def _camel(name: str) -> str:
    return name.title().replace("_", "")


def _attributes(of: Any) -> dict[str, str]:
    return {name: kind for t in of for name, kind in t.attributes.items()}


def _call(calls: str) -> str:
    name, attributes = _camel(calls), _attributes(families()[calls])
    members = [f"  {ATTRIBUTES[kind]} {attribute}{{}};" for attribute, kind in attributes.items()]
    lines = [f"struct {name}Call : {name}Arrays<Operand> {{", "  const Target* target = nullptr;", *members, "};"]
    return "\n".join(lines)


def _target(t: Target) -> str:
    table = [f"    {_array(t, x)}," for x in (*t.operands, *t.results)]
    kinds = ", ".join(f"k{_camel(kind)}" for kind in t.sources)
    name = f"k{_camel(t.name)}"
    facts = f'"{t.name}", {name}Arrays, {len(table)}, {len(t.sources)}, {{{kinds}}}'
    return "\n".join(
        [
            f"inline constexpr Array {name}Arrays[] = {{",
            *table,
            "};",
            f"inline constexpr Target {name}Target{{{facts}}};",
        ]
    )


def _array(t: Target, x: Array) -> str:
    of_sources, others, count = fields(t.calls)
    if x.source is None:
        places = [count * len(of_sources) + others.index(name) for name in x.fields]
    else:
        places = [x.source * len(of_sources) + of_sources.index(name) for name in x.fields]
    place = ", ".join(map(str, [*places, -1][:2]))
    forms = ", ".join(map(_form, x.forms))
    return f'{{"{x.name}", {{{place}}}, {str(x.aligned).lower()}, {len(x.forms)}, {{{forms}}}}}'


def _form(form: Form) -> str:
    dtype = "kLikeFirst" if form.dtype == "T" else f"ffi::{DTYPES[form.dtype]}"
    extents = ", ".join(n if n.isdigit() else f"&Axes::{n}" for n in form.axes)
    return f'{{{dtype}, "[{", ".join(form.axes)}]", {len(form.axes)}, {{{extents}}}}}'


def _reader(t: Target) -> str:
    """The function that fills in a call's attributes."""
    places = "".join(f', "{name}", &call->{name}' for name in t.attributes)
    call = f"{_camel(t.calls)}Call*{' call' if places else ''}"
    return f"ffi::Error Read{_camel(t.name)}(ffi::Dictionary x, {call}) {{ return Read(x{places}); }}"


def _registered(t: Target) -> str:
    name = _camel(t.name)
    how = f"{_camel(t.calls)}, k{name}Target, Read{name})"
    if not t.state:
        return f"DSV4_FMHA_TARGET({t.name}, Handlers, {how}"
    return f"DSV4_FMHA_STATE_OF({t.name}, {how}\nDSV4_FMHA_TARGET({t.name}, HandlersWithState, {how}"


def _shared(state: str) -> str:
    """Functions that tell XLA of the type of a state."""
    of, name = f"dsv4_fmha::{_camel(state)}", f"dsv4_fmha_{state}"
    return (
        f"XLA_FFI_TypeId* {name}_type_id() {{ return &{of}::id; }}\n"
        f"const XLA_FFI_TypeInfo* {name}_type_info() {{\n"
        f"  static constexpr XLA_FFI_TypeInfo info = dsv4_fmha::ffi::MakeTypeInfo<{of}>();\n  return &info;\n}}"
    )


_CALLS = """\
// Generated by kernels/targets.py from kernels/calls.py.
#pragma once

#include "operands.h"

namespace dsv4_fmha {{

{parts}

}}  // namespace dsv4_fmha
"""

_HANDLERS = """\
// The XLA custom calls.  Generated by kernels/targets.py from kernels/calls.py.
#include "target.h"

{includes}

namespace dsv4_fmha {{
namespace {{

{readers}

}}  // namespace
}}  // namespace dsv4_fmha

#pragma GCC visibility push(default)
extern "C" {{

{targets}

}}  // extern "C"
#pragma GCC visibility pop
"""
