"""A custom call by its name: its operands are checked while tracing, and then XLA runs it."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

TARGETS: Mapping[str, Any] = json.loads(Path(__file__).with_name("targets.json").read_text())
"""The operands, results and attributes of every custom call, which `kernels/tables.py` writes of `kernels/abi`"""

_DTYPES = {  # as XLA prints them
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8E4M3FN",
    "int32": "S32",
    "uint32": "U32",
    "uint8": "U8",
}

Described = jax.Array | jax.ShapeDtypeStruct


class Form(NamedTuple):
    """A dtype and axes that an array may have."""

    dtype: str
    """T is that of the call's first array"""
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"[{', '.join(self.axes)}]"


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Sequence[jax.Array]:
    """The results of a custom call.

    Raises:
      ValueError: an operand or a result has no shape or dtype that the call takes, or they do not fit together.
    """
    check(target, operands, results)
    run = jax.ffi.ffi_call(f"dsv4_fmha_{target}", tuple(results), input_output_aliases=aliases)
    done: Sequence[jax.Array] = run(*operands, **attributes)
    return done


def check(target: str, operands: Sequence[Described], results: Sequence[Described]) -> None:
    """Checks what `CheckArrays` of ffi/operands.h checks when the call runs. An unknown extent fits any other."""
    extents: dict[str, Any] = {}
    first, arrays = operands[0], _arrays(target)
    for (name, forms), x in zip(arrays, (*operands, *results), strict=True):
        form = next((f for f in forms if len(f.axes) == x.ndim and _dtype(f, first) == _name(x)), None)
        if form is None:
            raise _misfit(target, name, forms, x, first, arrays[0][0])
        wanted = [
            int(n) if n.isdigit() else extents.setdefault(n, got) for n, got in zip(form.axes, x.shape, strict=True)
        ]
        if any(isinstance(n, int) and isinstance(m, int) and n != m for n, m in zip(x.shape, wanted, strict=True)):
            raise ValueError(f"{target}: {name}: got shape {_show(x.shape)}, wanted {_show(wanted)}")


@functools.cache
def _arrays(target: str) -> list[tuple[str, tuple[Form, ...]]]:
    """Names and forms of a call's operands and results."""
    found = []
    for text in (*TARGETS[target]["operands"], *TARGETS[target]["results"]):
        name, _, forms = text.partition(": ")
        parts = [form.removesuffix("]").split("[") for form in forms.split(" or ")]
        found.append((name, tuple(Form(dtype, tuple(axes.split())) for dtype, axes in parts)))
    return found


def extent(target: str, name: str) -> int:
    """The extent that a call's array of this name has on its last axis."""
    (last,) = {form.axes[-1] for x, forms in _arrays(target) if x == name for form in forms if form.axes[-1].isdigit()}
    return int(last)


def _misfit(
    target: str, name: str, forms: Sequence[Form], x: Described, first: Described, first_name: str
) -> ValueError:
    """Why an array has none of its forms."""
    dtypes = [
        _dtype(form, first) + f" like {first_name}" * (form.dtype == "T") for form in forms if len(form.axes) == x.ndim
    ]
    got, wanted = (_name(x), dtypes) if dtypes else (f"shape {_show(x.shape)}", [str(form) for form in forms])
    return ValueError(f"{target}: {name}: got {got}, wanted {' or '.join(wanted)}")


def _dtype(form: Form, first: Described) -> str:
    return _name(first) if form.dtype == "T" else form.dtype.upper()


def _name(x: Described) -> str:
    return _DTYPES.get(x.dtype.name, x.dtype.name)


def _show(extents: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, extents))}]"
