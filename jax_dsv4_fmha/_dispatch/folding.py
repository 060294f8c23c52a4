"""All batch axes of an op made the one that a kernel has."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions.log_space import sink_factor
from .lowering import lowered
from .op import ONE_OR_B, Arrays, Axes, Call, Sink, is_pool


def batch_shape(operands: Sequence[tuple[Axes, jax.Array]]) -> tuple[Any, ...]:
    """The sizes of the batch axes, to which those of the operands (1 or the size) broadcast."""
    shapes = [x.shape[: x.ndim - len(axes.axes.split()) + 1] for axes, x in operands]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*shapes, strict=True))


def folded(call: Call, *operands: jax.Array) -> Arrays:
    """The op on one device, all batch axes made one.

    The last batch axes become queries instead where no key has them, so that keys need not be copied. A kernel does not
    take a sink for every batch entry; such a sink scales o afterwards, as its definition in terms of lse allows. All
    batch entries add to the gradient of a pool, whose batch axis stays 1.
    """
    op = call.op
    given = list(zip(op.operands, operands, strict=True))
    batch = batch_shape(given)
    sink = next((x for axes, x in given if isinstance(axes, Sink)), None)
    others = [(axes, x) for axes, x in given if not isinstance(axes, Sink)]
    inner = batch_shape(others)
    per_entry = sink is not None and any(n != 1 for n in sink.shape[:-1])
    if per_entry and op.batch_invariant:  # o would be rounded twice
        got, wanted = "True with a sink for every batch entry", "a sink that jax.vmap does not map"
        raise _check.error(NotImplementedError, op.name, "batch_invariant", got, wanted)
    pools = {axes.axes for axes, x in others if is_pool(axes, x.shape)}
    keep = max((len(batch) - (axes.axes in pools) for axes in op.results if "s_q" not in axes.axes), default=0)
    for axes, x in others:
        if "s_q" not in axes.axes:
            keep = max([keep, *(i + 1 for i in range(len(batch)) if x.shape[i] != 1)])

    def fold(axes: Axes, x: jax.Array) -> jax.Array:
        rest = x.shape[len(batch) :]
        if isinstance(axes, Sink):
            return jnp.full_like(x[(0,) * len(batch)], -jnp.inf) if per_entry else x.reshape(rest)
        if "s_q" in axes.axes:
            x = jnp.broadcast_to(x, (*inner, *rest))
            return x.reshape(math.prod(inner[:keep]), math.prod(inner[keep:]) * rest[0], *rest[1:])
        shared = axes.axes.startswith(ONE_OR_B) and math.prod(x.shape[: len(batch)]) == 1
        if shared and all("s_q" in result.axes for result in op.results):
            return x.reshape(1, *rest)
        x = jnp.broadcast_to(x, (*inner[:keep], *x.shape[keep:]))
        return x.reshape(math.prod(inner[:keep]), *rest)

    def of_result(axes: Axes, batch: Sequence[Any]) -> Sequence[Any]:
        return (*batch[:-1], 1) if axes.axes in pools else batch

    def unfold(axes: Axes, x: jax.Array) -> jax.Array:
        rest = x.shape[1:]
        if "s_q" in axes.axes:
            rest = (rest[0] // math.prod(inner[keep:]), *rest[1:])
        return x.reshape(*of_result(axes, inner), *rest)

    if 0 in batch:  # jax.vmap over nothing
        one = [(() if isinstance(axes, Sink) else (1,), x) for axes, x in given]
        shapes = jax.eval_shape(
            functools.partial(op.reference, **dict(call.params)),
            *(jax.ShapeDtypeStruct((*b, *x.shape[len(batch) :]), x.dtype) for b, x in one),
        )
        made = zip(op.results, shapes, strict=True)
        return tuple(jnp.zeros((*of_result(axes, batch), *x.shape[1:]), x.dtype) for axes, x in made)
    results = lowered(call, *(fold(axes, x) for axes, x in given))
    results = tuple(map(unfold, op.results, results))
    if per_entry:
        assert sink is not None
        o, lse = results
        factor = sink_factor(lse, sink[..., None, :])
        o = (o.astype(jnp.float32) * factor[..., None]).astype(o.dtype)
        results = o, jnp.broadcast_to(lse, factor.shape)
    return results
