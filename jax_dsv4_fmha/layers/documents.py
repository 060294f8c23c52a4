"""Blocks of packed documents, which begin with each document's first token."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions.pytree import public_pytree
from .._definitions.span import positions_of


@public_pytree
class PackedBlocks(NamedTuple):
    """The blocks of packed documents, by runs of `ratio` tokens: a block has as many, so in each run ends one at most.

    Attributes:
      place: int32 `[b, s]`, a token's place in its block.
      end: int32 `[b, ceil(s / ratio)]`, the place in the run of the last token of the block that ends there; `ratio` if
        none does.
      next_end: int32, like end, that of the next run.
      has_before: int32, like end, 1 where there is a block before that block in its document.
      order: int32 `[b, s // ratio]`, the runs in which blocks end, and after them runs in which none does.
      first: int32, like order, the position in its document of the first token of each block.
    """

    place: jax.Array
    end: jax.Array
    next_end: jax.Array
    has_before: jax.Array
    order: jax.Array
    first: jax.Array


def packed_blocks(ids: jax.Array, ratio: int) -> PackedBlocks:
    """The blocks of packed documents with ids int32 `[b, s]`, in the order of `Span.compressed_segments`."""
    at, (b, s) = positions_of(ids), ids.shape
    padding = ((0, 0), (0, -s % ratio))
    last = jnp.pad((at + 1) % ratio == 0, padding).reshape(b, -1, ratio)
    there = jnp.any(last, 2)
    end = jnp.where(there, jnp.argmax(last, 2).astype(jnp.int32), ratio)
    next_end = jnp.pad(end[:, 1:], ((0, 0), (0, 1)), constant_values=ratio)
    position = jnp.max(jnp.where(last, jnp.pad(at, padding).reshape(b, -1, ratio), 0), 2)  # of the block's last token
    order = jnp.argsort(~there, axis=1, stable=True)[:, : s // ratio].astype(jnp.int32)
    first = jnp.take_along_axis(position, order, 1) + (1 - ratio)
    return PackedBlocks(at % ratio, end, next_end, (position >= 2 * ratio - 1).astype(jnp.int32), order, first)


def check(op: str, packed: Any, b: Any, s: Any, ratio: int) -> None:
    """Raises unless these are the blocks of `[b, s]` tokens."""
    if not isinstance(packed, PackedBlocks):
        raise _check.error(TypeError, op, "packed", packed, "what `packed_blocks` finds, or None")
    for name, x in packed._asdict().items():
        shape = (b, {"place": s, "order": s // ratio, "first": s // ratio}.get(name, -(-s // ratio)))
        fits = functools.partial(_is_int_of, shape)
        _check.array(op, f"packed.{name}", x, f"int32{list(shape)}", fits)


def _is_int_of(shape: tuple[Any, ...], x: Any) -> bool:
    return x.dtype in _check.INT and bool(x.shape == shape)
