"""The canonical order of sums, in which the bits of a query's results depend on its own operands alone."""

import dataclasses
import functools
from typing import ClassVar

import jax

from .base import AttentionMode


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclasses.dataclass(frozen=True)
class CanonicalOrder(AttentionMode):
    """`batch_invariant`: XLA chooses a definition's order of sums, so a kernel must run (docs/bits.md)."""

    is_batch_invariant: ClassVar[bool] = True


def wanted(batch_invariant: bool) -> list[AttentionMode]:
    """The modes, one or none, that `batch_invariant` asks for, an option that is already checked."""
    return [CanonicalOrder()] if batch_invariant else []
