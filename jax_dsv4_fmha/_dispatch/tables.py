"""The ops whose kernels take sources of these kinds, with operands made of them; `plan.py` chooses among these."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._definitions.packed import LAYOUTS
from .._host.mode import PLAIN, Mode, name_of
from .sources import SelectionSource, SpanSource


class Kernel(NamedTuple):
    """An op of attention, or of its gradient, that takes sources of some kinds."""

    op: str
    """its plain name in the manifest"""
    operands: Callable[..., Sequence[Any]] = lambda *sources: jax.tree.leaves(sources)
    """makes the operands of its raw call of the sources"""
    packing: str | None = None
    """a choice of an op whose keys may be packed; "" where they are not"""
    d_v: int = 0
    """how many of a key's numbers are its value; 0: all"""

    def in_mode(self, mode: Mode) -> Mode:
        """The mode of its kernels, beside what it says itself."""
        return dataclasses.replace(mode, d_v=self.d_v)

    def name(self, mode: Mode = PLAIN) -> str:
        """The name of its kernels in a mode."""
        return name_of(self.op, self.in_mode(mode))


def _keys_twice(source: SpanSource) -> Sequence[Any]:
    """The operands of the kernel of separate K and V, where both are one array."""
    return [source.keys, source.keys, source.start, source.stop]


def _pools(*sources: SelectionSource) -> Sequence[Any]:
    """Keys as pools of all sequences, so that each query may be one."""
    return jax.tree.leaves([source.flat() for source in sources])


def _span_and_pool(window: SpanSource, source: SelectionSource) -> Sequence[Any]:
    """A pool of all sequences has no batch axis, as the kernel takes it."""
    return jax.tree.leaves((window, source if source.keys.shape[0] == window.keys.shape[0] else source.flat()))


def _pools_of_one(source: SelectionSource, other: SelectionSource | None = None) -> Sequence[Any]:
    """The given source as one of two; queries see nothing of the other, which is made if it is not given."""
    return _pools(source, other or _unseen(source))


def _pools_after_none(source: SelectionSource, other: SelectionSource | None = None, *, first: str) -> Sequence[Any]:
    """The given FP4 source as the second of two; the first is an FP8 page, of which queries see nothing."""
    other = other or _unseen(source)
    page = jnp.zeros((1, LAYOUTS[first].page_bytes(1)), jnp.uint8)
    return [page, other.indices, other.length, *_pools(source)]


def _unseen(source: SelectionSource) -> SelectionSource:
    nothing = jnp.zeros_like(source.length)
    return dataclasses.replace(source, indices=nothing[..., None], length=nothing, is_counted=True)


def _span_beside_none(source: SpanSource) -> Sequence[Any]:
    """A span as the first of two; queries see nothing of the other, which is a key of it."""
    keys, nothing = without_heads(source.keys), jnp.zeros_like(source.start)
    return [keys, source.start, source.stop, keys[:, :1], nothing, nothing]


def _span_beside_no_list(source: SpanSource) -> Sequence[Any]:
    """A span beside a selection of the same keys, of which queries see nothing."""
    keys, nothing = without_heads(source.keys), jnp.zeros_like(source.start)
    return [keys, source.start, source.stop, keys, nothing[..., None], nothing]


def _span_and_list(near: SpanSource, far: SpanSource) -> Sequence[Any]:
    """The second span as a list of its keys, from the first that a query sees."""
    indices = far.start[..., None] + jnp.arange(far.keys.shape[1], dtype=jnp.int32)[None, None]
    return [near.keys, near.start, near.stop, far.keys, indices, far.stop - far.start]


def without_heads(keys: jax.Array) -> jax.Array:
    """Keys of a source, which have one head, as [b, s, d]."""
    return keys[:, :, 0] if keys.ndim == 4 else keys


def _over_packed(packing: str, operands: Callable[..., Sequence[Any]] = _pools) -> tuple[Kernel, ...]:
    return (Kernel("dsv4_decode", operands, packing),)


FORWARD: dict[tuple[str, ...], tuple[Kernel, ...]] = {
    ("separate_kv",): (Kernel("mha_fwd"),),
    ("paged_kv",): (Kernel("mha_fwd_paged", lambda x: jax.tree.leaves(x.flat())),),
    ("paged_kv_window",): (Kernel("mha_fwd_paged_window", lambda x: jax.tree.leaves(x.flat())),),
    ("paged_kv_e4m3_window",): (Kernel("mha_fwd_paged_e4m3_window", lambda x: jax.tree.leaves(x.flat())),),
    ("paged_kv_e4m3",): (Kernel("mha_fwd_paged_e4m3", lambda x: jax.tree.leaves(x.flat())),),
    ("span",): (Kernel("mla_span_fwd"), Kernel("mha_fwd", _keys_twice), Kernel("hca_fwd", _span_beside_none)),
    ("selection",): (Kernel("mla_sparse_fwd"),),
    ("span", "selection"): (Kernel("csa_fwd", _span_and_pool),),
    ("span", "span"): (Kernel("hca_fwd"),),
    ("span_v512",): (Kernel("mla_span_fwd", d_v=512),),
    ("selection_v512",): (Kernel("mla_sparse_fwd", packing="", d_v=512),),
    ("v32_fp8_v512",): (Kernel("mla_sparse_fwd", _pools, packing="v32_fp8", d_v=512),),
    ("selection", "selection"): (Kernel("dsv4_decode", _pools, packing=""),),
    ("v4_fp8", "v4_fp8"): _over_packed("v4_fp8"),
    ("v4_fp8",): _over_packed("v4_fp8", _pools_of_one),
    ("v4_fp8", "v4_fp4"): _over_packed("v4_fp4"),
    ("v4_fp4",): _over_packed("v4_fp4", functools.partial(_pools_after_none, first="v4_fp8")),
    ("v41_fp8", "v41_fp8"): _over_packed("v41_fp8"),
    ("v41_fp8",): _over_packed("v41_fp8", _pools_of_one),
    ("v41_fp8", "v41_fp4"): _over_packed("v41_fp4"),
    ("v41_fp4",): _over_packed("v41_fp4", functools.partial(_pools_after_none, first="v41_fp8")),
}
"""Kernels by kinds of sources: the first one is the one that is made for them, others serve where it is not built."""

SPAN_OF_FEW_HEADS = Kernel("mla_span_fwd", lambda x: [without_heads(x.keys), x.start, x.stop])
"""in the mode "few_heads" """

LISTED: dict[tuple[str, ...], Kernel] = {
    ("span",): Kernel("csa_fwd", _span_beside_no_list),
    ("span", "span"): Kernel("csa_fwd", _span_and_list),
}
"""Spans for a kernel in which a tile of rows has heads of one query."""

DENSE = "mha_dq"
"""one of the kernels by which the raw call `mha_bwd` makes gradients"""

BACKWARD: dict[tuple[str, ...], tuple[Kernel, ...]] = {
    ("separate_kv",): (Kernel(DENSE, lambda x: (x.keys, x.values, x.start, x.stop)),),
    ("span",): (
        Kernel("mla_span_bwd", lambda x: (x.keys, x.start, x.stop)),
        Kernel(DENSE, lambda x: (x.keys, None, x.start, x.stop)),
    ),
    ("selection",): (Kernel("mla_sparse_bwd"),),
    ("span_v512",): (Kernel("mla_span_bwd", lambda x: (x.keys, x.start, x.stop), d_v=512),),
    ("selection_v512",): (Kernel("mla_sparse_bwd", d_v=512),),
    ("span", "selection"): (Kernel("csa_bwd"),),
    ("span", "span"): (Kernel("hca_bwd"),),
}
"""A kernel gives dq in q's dtype, and in float32 the gradient of every source's keys, and values, in order."""
