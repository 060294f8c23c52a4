"""An op, and a call of it, as data."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .support import Support

Arrays = tuple[jax.Array, ...]

Params = tuple[tuple[str, Any], ...]
"""Parameters that an op gets at trace time, by name, as (("scale", 0.1),)."""


class Axes(NamedTuple):
    """An operand or a result: its name, for errors, and its axes, for example "b s_q h_q d"."""

    name: str
    axes: str


class Sink(Axes):
    """A sink as an operand of an op: it has batch axes too, of size 1 except where vmap maps it."""

    def __new__(cls, name: str = "sink") -> "Sink":
        return super().__new__(cls, name, "b h_q")


class Halo(NamedTuple):
    """Keys that stand where queries do: query i sees of them none after i, and none more than `reach` before it.

    So a device with a part of the queries needs that part of the keys, and the `reach` keys before it.
    """

    axis: str
    """of the keys, as long as s_q"""
    reach: int
    bounds: tuple[str, ...]
    """the operands that count these keys"""


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
    launches: Callable[..., Sequence[str]] | None = None
    """names the kernels that `kernel` launches for such operands and parameters, in order; without it they are those of
    the call's `Support`"""
    is_mapped: bool = True
    """whether jax.vmap gives the kernel another batch axis; otherwise the reference runs under it"""
    halo: Halo | None = None
    triangle: str | None = None
    """the axis of keys that takes the op's time, where a later query sees more of them"""
    differentiated: str = "implementation='reference'"
    """what has a gradient where this has none, for errors"""
    batch_invariant: bool = False
    """whether no bit of a result may depend on other batch entries, so that no sink may scale o afterwards"""


ONE_OR_B = "b*"
"""The batch axis of an operand that may have size 1 there, and then belongs to every batch entry."""

RESULTS = (Axes("o", "b s_q h_q d"), Axes("lse", "b s_q h_q"))
"""The results of attention."""

RESULTS_OF_D_V = (Axes("o", "b s_q h_q d_v"), RESULTS[1])
"""Those where V is a part of K; d_v is a parameter of the call."""


class KernelUse(enum.Enum):
    """The programs that run a call's kernel. Others run the reference, or are an error if the caller insists on it."""

    NEVER = enum.auto()
    ON_CUDA = enum.auto()
    """on CUDA devices, and in exports for CUDA"""
    IN_EXPORTS = enum.auto()
    """in programs that jax.export makes for CUDA: the devices here have no kernel"""
    INSISTED_ON_CUDA = enum.auto()
    INSISTED_IN_EXPORTS = enum.auto()

    @property
    def is_insisted(self) -> bool:
        return self in (KernelUse.INSISTED_ON_CUDA, KernelUse.INSISTED_IN_EXPORTS)

    @property
    def is_in_exports_alone(self) -> bool:
        return self in (KernelUse.IN_EXPORTS, KernelUse.INSISTED_IN_EXPORTS)


class Call(NamedTuple):
    """An op, and what is known at trace time about the call."""

    op: Op
    use: KernelUse
    params: Params = ()
    support: Support | None = None
    """None where the op has no kernel at all"""

    @property
    def insisted_by(self) -> tuple[str, str]:
        """The option by which a caller insists on the kernel, and its value."""
        return ("batch_invariant", "True") if self.op.batch_invariant else ("implementation", "'cubin'")


def axis_names(x: Axes, ndim: int) -> tuple[str, ...]:
    """A name for each of ndim axes; several batch axes are b0, b1, …"""
    _, *rest = x.axes.split()
    return (*(f"b{i}" for i in range(ndim - len(rest))), *rest)


def is_pool(x: Axes, shape: Sequence[Any]) -> bool:
    """True if an operand of this shape belongs to every batch entry."""
    return x.axes.startswith(ONE_OR_B) and bool(shape[-len(x.axes.split())] == 1)


def axes_of(xs: Sequence[Axes]) -> set[str]:
    return {name for x in xs for name in x.axes.split()}
