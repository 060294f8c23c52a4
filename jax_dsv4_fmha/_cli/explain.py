"""`python -m jax_dsv4_fmha explain`: which implementation runs the ops of a function, by its name and by shapes."""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import explain as decisions_of
from .report import output, write_json

_PACKAGE = __name__.partition(".")[0]
_ARRAY = re.compile(r"(\w+)\[([\d, ]*)\]")
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "u8": "uint8"}

Operands = dict[str, Any]
"""values by their names, or by their places, "0" and on; JAX sorts keys, so all are strings"""


def explain(name: str, words: Sequence[str], gradient: bool, json_path: str | None) -> int:
    try:
        f, values = _function(name), _values(words)
        arrays = {key: x for key, x in values.items() if isinstance(x, jax.ShapeDtypeStruct)}
        decisions = decisions_of(_gradient(f, values) if gradient else _of_arrays(f, values), arrays)
    except (ValueError, TypeError, NotImplementedError) as e:  # such as an op that does not take these operands
        print(e, file=sys.stderr)
        return 2
    if json_path is not None:
        write_json([decision._asdict() for decision in decisions], json_path)
    if json_path != "-":
        lines = [str(decision) for decision in decisions] or [f"{name}: no op that could run on a kernel"]
        print(*lines, sep="\n", file=output(json_path))
    return 0


def _function(name: str) -> Callable[..., Any]:
    """A function of this package, such as `fmha`, or `module:function`."""
    module, _, path = name.rpartition(":")
    try:
        found: Any = importlib.import_module(module or _PACKAGE)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"explain: function: got {name!r} ({e}), wanted a name as fmha, or module:function") from e
    if not callable(found):
        raise ValueError(f"explain: function: got {name!r}, a {type(found).__name__}, wanted a function")
    return found


def _values(words: Sequence[str]) -> Operands:
    values: Operands = {}
    for place, word in enumerate(words):
        name, is_named, value = word.partition("=")
        values[name if is_named else str(place)] = _value(value if is_named else word)
    return values


def _value(word: str) -> Any:
    """The type and shape of an array, such as bf16[1,8,4,512], or a value of Python's; other words are strings."""
    if found := _ARRAY.fullmatch(word):
        try:
            dtype = jnp.dtype(_SHORT.get(found[1], found[1]))
        except TypeError as e:
            raise ValueError(f"explain: operand: got {word}, wanted a dtype such as {', '.join(_SHORT)}") from e
        return jax.ShapeDtypeStruct([int(n) for n in found[2].split(",") if n.strip()], dtype)
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _of_arrays(f: Callable[..., Any], values: Operands) -> Callable[[Operands], Any]:
    """The function of the operands that are arrays, by place and by name; the others are as given."""

    def of(arrays: Operands) -> Any:
        every = values | arrays
        named = {key: x for key, x in every.items() if not key.isdigit()}
        return f(*(x for key, x in every.items() if key.isdigit()), **named)

    return of


def _gradient(f: Callable[..., Any], values: Operands) -> Callable[[Operands], Any]:
    """The gradient of the sum of all that f returns, in all operands that are floats."""

    def of(arrays: Operands) -> Any:
        floats = {key: x for key, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def total(floats: Operands) -> jax.Array:
            results = jax.tree.leaves(_of_arrays(f, values)(arrays | floats))
            return sum(
                (x.astype(jnp.float32).sum() for x in results if jnp.issubdtype(x.dtype, jnp.floating)), jnp.zeros(())
            )

        return jax.grad(total)(floats)

    return of
