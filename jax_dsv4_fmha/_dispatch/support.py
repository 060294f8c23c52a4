"""The operands that kernels are built for, in words, and the error where there is no kernel."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from .. import _check
from .._host import library

explaining = jax.make_user_context(False)
"""whether a function is traced for `explain`, which says so where a kernel is missing that a call insists on"""


class Support(NamedTuple):
    """The kernels that take a call's operands, for saying why the kernel or the reference runs."""

    got: str
    """the operands, in words"""
    kernels: tuple[str, ...]
    """the kernels that such a call launches, whatever its sizes, by their names in the manifest; where there are none,
    those for some of its operands"""
    shipped: tuple[str, ...]
    """the architectures that this version has all of them for, with these sizes and dtypes"""
    wanted: str = "operands that a kernel is built for"
    """what kernels take, for errors"""
    packing: str = ""
    """how their keys are packed, if they are: a choice of the kernels"""

    @property
    def built(self) -> tuple[str, ...]:
        """the architectures that all are built in for"""
        return tuple(arch for arch in self.shipped if arch in library.architectures())

    @property
    def is_there(self) -> bool:
        """True if a call may insist on them: they are built in, or they are shipped and this is for `explain`."""
        return bool(self.shipped if explaining.value else self.built)


def not_built(op: str, name: str, got: Any, wanted: str, kernels: Collection[str]) -> Exception:
    """Makes the error for a missing kernel, which lists what there is of `kernels`; the caller raises it."""
    return NotImplementedError(f"{_check.error(NotImplementedError, op, name, got, wanted)}, built {built(kernels)}")


def built(kernels: Collection[str]) -> str:
    """The variants of these kernels that are built in, in words; without any, those of this version. Kernels of the
    same sizes and dtypes are listed once.
    """
    if here := library.variants():
        return _listed(here, kernels)
    return f"nothing here (`python -m jax_dsv4_fmha info`); there are {_listed(library.SHIPPED, kernels)}"


def _listed(variants: Iterable[library.Variant], kernels: Collection[str]) -> str:
    shapes: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for v in variants:
        if v.op in kernels:
            shapes.setdefault((v.op, _shape(v.choices)), set()).add((v.arch, v.choices.get("dtype", "float32")))
    sizes: dict[tuple[str, str], list[str]] = {}
    for (kernel, shape), places in shapes.items():
        sizes.setdefault((kernel, _places(places)), []).append(shape)
    named: dict[str, list[str]] = {}
    for (kernel, where), ofs in sizes.items():
        named.setdefault(f"{' or '.join(filter(None, ofs))}, {where}", []).append(kernel)
    rows = [f"{', '.join(names)} ({what})" for what, names in named.items()]
    return "; ".join(rows) or "no kernel of this op, only the reference"


def _shape(choices: Mapping[str, Any]) -> str:
    sizes = [f"{name}={choices[name]}" for name in ("d", "heads") if name in choices]
    sizes += filter(None, [choices.get("packing")])
    topk = [f"topk<={choices['max_topk']}"] if "max_topk" in choices else []
    return " ".join([*sizes, *topk])


def _places(where: set[tuple[str, str]]) -> str:
    """Pairs of architecture and dtype in words: "bfloat16 or float16 on sm_90a"."""
    dtypes: dict[str, list[str]] = {}
    for arch in sorted({arch for arch, _ in where}):
        dtypes.setdefault(" or ".join(sorted(dtype for a, dtype in where if a == arch)), []).append(arch)
    return ", ".join(f"{names} on {' and '.join(archs)}" for names, archs in dtypes.items())
