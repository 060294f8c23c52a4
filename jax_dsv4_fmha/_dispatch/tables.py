"""Which kernel takes sources of these kinds, and its gradient."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._definitions import e4m3
from .._definitions.packed import LAYOUTS
from .._host import attention, gradients, library
from .op import Arrays
from .sources import SelectionSource, SpanSource


class Kernel(NamedTuple):
    """A raw call for a tuple of kinds of sources."""

    op: str
    """its name in the manifest"""
    run: Callable[..., Arrays]
    """a forward kernel takes (q, *operands, sink), with a `Turn` (q, *operands, sink, table), a gradient's kernel
    (q, do, lse, sink_factor, delta, *operands), with a `Turn` (…, *operands, table) and do in groups of heads"""
    operands: Callable[..., Sequence[Any]] = lambda *sources: jax.tree.leaves(sources)
    """makes `run`'s operands from the sources"""
    packing: str | None = None
    """a choice of an op whose keys may be packed; "" where they are not"""


def _span_fwd(q: Any, kv: Any, *others: Any, scale: float) -> Arrays:
    """Where there is no kernel for V = K, the kernel for separate K and V takes the keys twice."""
    if library.shipped_for("mla_span_fwd", d=q.shape[-1], dtype=q.dtype.name):
        return attention.mla_span_fwd(q, kv, *others, scale=scale)
    return attention.mha_fwd(q, kv, kv, *others, scale=scale)


def _pools(*sources: SelectionSource) -> Sequence[Any]:
    """Keys as pools of all sequences, so that each query may be one. Where it is one, all stays as it is."""

    def as_given(source: SelectionSource) -> bool:
        b, s_q = source.length.shape
        return isinstance(s_q, int) and s_q == 1 and source.keys.shape[0] == b and not source.is_packed

    return jax.tree.leaves([source if as_given(source) else source.flat() for source in sources])


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


def without_heads(keys: jax.Array) -> jax.Array:
    """Keys of a source, which have one head, as [b, s, d]."""
    return keys[:, :, 0] if keys.ndim == 4 else keys


def _over_packed(packing: str, operands: Callable[..., Sequence[Any]] = _pools) -> Kernel:
    return Kernel("dsv4_decode", functools.partial(attention.dsv4_decode, packing=packing), operands, packing)


FORWARD: dict[tuple[str, ...], Kernel] = {
    ("separate_kv",): Kernel("mha_fwd", attention.mha_fwd),
    ("span",): Kernel("mla_span_fwd", _span_fwd),
    ("selection",): Kernel("mla_sparse_fwd", attention.mla_sparse_fwd),
    ("span", "selection"): Kernel("csa_fwd", attention.csa_fwd, _span_and_pool),
    ("span", "span"): Kernel("hca_fwd", attention.hca_fwd),
    ("selection", "selection"): Kernel("dsv4_decode", attention.dsv4_decode, _pools, packing=""),
    ("v4_fp8", "v4_fp8"): _over_packed("v4_fp8"),
    ("v4_fp8",): _over_packed("v4_fp8", _pools_of_one),
    ("v4_fp8", "v4_fp4"): _over_packed("v4_fp4"),
    ("v4_fp4",): _over_packed("v4_fp4", functools.partial(_pools_after_none, first="v4_fp8")),
    ("v41_fp8", "v41_fp8"): _over_packed("v41_fp8"),
    ("v41_fp8",): _over_packed("v41_fp8", _pools_of_one),
    ("v41_fp8", "v41_fp4"): _over_packed("v41_fp4"),
    ("v41_fp4",): _over_packed("v41_fp4", functools.partial(_pools_after_none, first="v41_fp8")),
}


def _span_in_order(q: Any, kv: Any, start: Any, stop: Any, sink: Any, **params: Any) -> Arrays:
    """Without the kernel of spans beside a selection of which queries see nothing; where no kernel takes one, the keys
    twice.
    """
    if not library.shipped_for("csa_fwd", d=q.shape[-1], dtype=q.dtype.name):
        return attention.mha_fwd(q, kv, kv, start, stop, sink, **params)
    if attention.spans_pay(q, kv.shape[1], 1):
        return attention.mla_span_fwd(q, kv, start, stop, sink, **params)
    keys, nothing = kv[:, :, 0], jnp.zeros_like(start)
    if attention.groups_pay(q):
        return attention.mla_span_fwd_few_heads(q, keys, start, stop, sink, **params)
    return attention.csa_fwd(q, keys, start, stop, keys, nothing[..., None], nothing, sink, **params)


def _spans_in_order(q: Any, *operands: Any, **params: Any) -> Arrays:
    """Without the kernel of two spans, the second is a list of its keys, from the first that a query sees."""
    near, start, stop, far, start2, stop2, sink = operands
    if attention.spans_pay(q, near.shape[1], far.shape[1]):
        return attention.hca_fwd(q, *operands, **params)
    indices = start2[..., None] + jnp.arange(far.shape[1], dtype=jnp.int32)[None, None]
    return attention.csa_fwd(q, near, start, stop, far, indices, stop2 - start2, sink, **params)


def _in_order(kernel: Kernel) -> Kernel:
    return kernel._replace(run=functools.partial(kernel.run, order=attention.ORDER))


IN_ORDER: dict[tuple[str, ...], Kernel] = {
    **{kinds: _in_order(kernel) for kinds, kernel in FORWARD.items()},
    ("span",): _in_order(Kernel("csa_fwd", _span_in_order)),
    ("span", "span"): _in_order(Kernel("csa_fwd", _spans_in_order)),
}
"""The kernels that sum in the canonical order. Tiles of keys are counted from the first key that a query sees: a tile
of rows has one query's heads, or for separate K and V all queries begin with the first key."""

IN_ORDER_ON = ("sm_90a",)
"""architectures; ffi/forward.h refuses others"""

TURNED: dict[tuple[str, ...], Kernel] = {
    ("span",): Kernel("mla_span_fwd_turned", attention.mla_span_fwd_turned),
    ("span", "selection"): Kernel("csa_fwd_turned", attention.csa_fwd_turned, _span_and_pool),
    ("span", "span"): Kernel("hca_fwd_turned", attention.hca_fwd_turned),
}
"""With a `Turn`"""


def _by_products(suffix: str) -> dict[tuple[str, ...], Kernel]:
    csa, hca = f"csa_fwd_{suffix}", f"hca_fwd_{suffix}"
    return {
        ("span",): Kernel(hca, getattr(attention, hca), _span_beside_none),
        ("span", "selection"): Kernel(csa, getattr(attention, csa), _span_and_pool),
        ("span", "span"): Kernel(hca, getattr(attention, hca)),
    }


BY_PRODUCTS = {e4m3.E4M3: _by_products("e4m3"), e4m3.BF16_ROPE: _by_products("e4m3_bf16_rope")}
"""By products of e4m3: they take codes in place of keys, and after the sink the unit of each batch entry's"""

TURNED_DIMS = 64
"""the dimensions of a head that they turn"""


FEW_KEYS = 512
"""the most keys of a query with which two kernels are faster than one that adds to memory"""


def _dense_bwd(*operands: Any, width: int | None, scale: float, deterministic: bool = False) -> Arrays:
    """One kernel makes all gradients where that is faster, unless the same bits are wanted."""
    q, k = operands[0], operands[5]
    known = [n for n in (width, k.shape[1]) if isinstance(n, int)]
    few = bool(known) and min(known) <= FEW_KEYS
    one = library.shipped_for("mha_dqdkdv", d=q.shape[-1], dtype=q.dtype.name)
    dq, *of_keys = gradients.mha_bwd(*operands, scale=scale, deterministic=deterministic or few or not one)
    return dq, *(x.astype(jnp.float32) for x in of_keys)


def _separate_bwd(*operands: Any, **params: Any) -> Arrays:
    *arrays, width = operands
    return _dense_bwd(*arrays, width=width, **params)


def _span_bwd(q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, kv: Any, *span: Any, **params: Any) -> Arrays:
    """Where there is no kernel for V = K, the kernels for separate K and V take the keys twice."""
    rows, (start, stop, width) = (q, do, lse, sink_factor, delta), span
    if library.shipped_for("mla_span_bwd", d=q.shape[-1], dtype=q.dtype.name):
        return gradients.mla_span_bwd(*rows, kv, start, stop, **params)
    return _dense_bwd(*rows, kv, None, start, stop, width=width, **params)


BACKWARD: dict[tuple[str, ...], Kernel] = {
    ("separate_kv",): Kernel("mha_dq", _separate_bwd, lambda x: (x.keys, x.values, x.start, x.stop, x.width)),
    ("span",): Kernel("mla_span_bwd", _span_bwd, lambda x: (x.keys, x.start, x.stop, x.width)),
    ("selection",): Kernel("mla_sparse_bwd", gradients.mla_sparse_bwd),
    ("span", "selection"): Kernel("csa_bwd", gradients.csa_bwd),
    ("span", "span"): Kernel("hca_bwd", gradients.hca_bwd),
}
"""A kernel gives dq in q's dtype, and in float32 the gradient of every source's keys, and values, in order."""

TURNED_BACKWARD: dict[tuple[str, ...], Kernel] = {
    ("span",): Kernel("mla_span_bwd_turned", gradients.mla_span_bwd_turned),
    ("span", "selection"): Kernel("csa_bwd_turned", gradients.csa_bwd_turned),
    ("span", "span"): Kernel("hca_bwd_turned", gradients.hca_bwd_turned),
}
"""With a `Turn`, unless the same bits are wanted"""
