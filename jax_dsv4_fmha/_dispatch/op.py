"""An op, and a call of it, as data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Arrays = tuple[jax.Array, ...]

Params = tuple[tuple[str, Any], ...]
"""Parameters that an op gets at trace time, by name, as (("scale", 0.1),)."""


class Axes(NamedTuple):
    """An operand or a result: its name, for errors, and its axes, for example "b s_q h_q d"."""

    name: str
    axes: str


@dataclass(frozen=True)
class Op:
    """A kernel and its reference. Both take the operands, with one batch axis, and the call's `Params` as keywords, and
    give results of the same shapes and dtypes.

    An axis of a result that no operand has is as long as the parameter of that name says.
    """

    name: str
    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    reference: Callable[..., Arrays]
    kernel: Callable[..., Arrays] | None = None
    part: str = "forward"
    """"forward" or "gradient", the pass"""


ONE_OR_B = "b*"
"""The batch axis of an operand that may have size 1 there, and then belongs to every batch entry."""

SINK = Axes("sink", "b h_q")
"""A sink as an operand of an op: it has batch axes too, of size 1 except where vmap maps it."""

RESULTS = (Axes("o", "b s_q h_q d"), Axes("lse", "b s_q h_q"))
"""The results of attention."""


class Fit(NamedTuple):
    """The kernels that fit a call's operands, for saying why the kernel or the reference runs."""

    got: str
    """the operands, in words"""
    kernels: tuple[str, ...]
    """the kernels that such a call launches, whatever its sizes, by their names in the manifest; where there are none,
    those for some of its operands"""
    built: tuple[str, ...]
    """the architectures that all are built for with these sizes and dtypes"""
    wanted: str = "operands that a kernel is built for"
    """what kernels take, for errors"""
    packing: str = ""
    """how their keys are packed, if they are: a choice of the kernels"""


class Call(NamedTuple):
    """An op, and what is known at trace time about the call."""

    op: Op
    when: str
    """When the kernel runs: "never", "on cuda", or "always" (an error elsewhere). "in exports" and "always in exports"
    are the same for programs that jax.export makes, because the devices here have no kernel.
    """
    params: Params = ()
    fit: Fit | None = None
    """None where the op has no kernel at all"""


def axis_names(x: Axes, ndim: int) -> tuple[str, ...]:
    """A name for each of ndim axes; several batch axes are b0, b1, …"""
    _, *rest = x.axes.split()
    return (*(f"b{i}" for i in range(ndim - len(rest))), *rest)


def axes_of(xs: Sequence[Axes]) -> set[str]:
    return {name for x in xs for name in x.axes.split()}
