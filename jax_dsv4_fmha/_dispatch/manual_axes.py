"""Manual axes of jax.shard_map, along which values vary."""

from collections.abc import Sequence

import jax
from jax import lax

from .op import Arrays


def varying(operands: Sequence[jax.Array]) -> frozenset[str]:
    """The manual axes along which any of the operands varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))


def vary(xs: Sequence[jax.Array], axes: frozenset[str]) -> Arrays:
    """xs as varying along these manual axes; the transpose sums over axes that are new to an x."""
    return tuple(lax.pcast(x, tuple(sorted(axes - varying([x]))), to="varying") for x in xs)
