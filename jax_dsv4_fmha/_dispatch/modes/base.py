"""The parts of attention that a mode may change, as methods of a class. The plain way is this class as it is."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax

from ... import reference
from ..op import Arrays, Axes
from ..sources import Part, Source

Attention = Callable[..., reference.Attention]
"""(q, sources, sink, scale=…) -> (o, lse), by definition"""

Gradient = Callable[..., Arrays]
"""(q, do, lse, sink_factor, delta, sources, scale=…, …) -> (dq, gradients of keys …), as in `attention_op.gradient`"""


class Keys(NamedTuple):
    """The keys of sources as a kernel takes them."""

    parts: Sequence[Part]
    operands: Arrays = ()
    """what it takes of them after the sink"""
    launched: tuple[str, ...] = ()
    """the kernels that make them, by their names in the manifest"""

    @staticmethod
    def of(sources: Sequence[Source]) -> "Keys":
        """The keys as they are."""
        parts = [part for source in sources for part in source.parts_of_kernel()]
        return Keys(parts, launched=tuple(name for source in sources for name in source.launched))


class AttentionMode:
    """A way to attend, which a kernel has inside, or passes around attention have.

    A subclass is a pytree: its arrays are operands of the op, and the rest is known while tracing.
    """

    may_be_outside: ClassVar[bool] = False
    """whether passes do the same, by `outside`"""
    differentiated: ClassVar[str] = ""
    """what has a gradient where this mode has none, for errors; "" where it has one"""
    is_batch_invariant: ClassVar[bool] = False
    """whether it insists on kernels that sum in the canonical order"""
    passes_of_gradient: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ((), ())
    """the kernels that `gradient` launches before the inner gradient, and after it"""

    @property
    def kernel_mode(self) -> dict[str, Any]:
        """The fields of `_host.mode.Mode` that kernels with it inside are compiled for."""
        return {}

    @property
    def description(self) -> tuple[str, ...]:
        """Words about it for errors and `explain`, after those about the operands."""
        return ()

    @property
    def axes(self) -> tuple[Axes, ...]:
        """The axes of its arrays, in the order of its leaves."""
        return ()

    @property
    def operands(self) -> Arrays:
        """The arrays that kernels with it inside take after the sink, and those of gradients after the sources."""
        return ()

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of a raw call with it inside."""
        return {}

    def fits(self, q: jax.Array) -> bool:
        """True if kernels with it inside take q, as far as names and choices of kernels do not say so."""
        return True

    def definition(self, inner: Attention) -> Attention:
        """Attention in this mode, of attention without it."""
        return inner

    def keys(self, q: jax.Array, sources: Sequence[Source]) -> Keys | None:
        """The keys of sources as kernels with it inside take them; None where they take them as plain kernels do."""
        return None

    def gradient(self, inner: Gradient, *, by_kernels: bool) -> Gradient:
        """The gradient of attention in this mode, of that without it; by_kernels: passes by kernels, not by `jnp`."""
        return inner

    def cotangent(self, do: jax.Array) -> jax.Array:
        """The cotangent of o as a gradient's kernel with it inside takes it."""
        return do

    def outside(self, attention: Callable[[jax.Array], reference.Attention]) -> Callable[[jax.Array], Any]:
        """Attention of q in this mode, by passes around attention without it."""
        raise NotImplementedError


def defined(attention: Attention, modes: Iterable[AttentionMode]) -> Attention:
    """Attention in all of these modes, by definition."""
    for mode in modes:
        attention = mode.definition(attention)
    return attention


def around(
    attention: Callable[[jax.Array], reference.Attention], modes: Iterable[AttentionMode]
) -> Callable[[jax.Array], reference.Attention]:
    """Attention with passes around it for all of these modes."""
    for mode in modes:
        attention = mode.outside(attention)
    return attention
