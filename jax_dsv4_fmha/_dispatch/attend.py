"""One softmax over the keys of sources, in some modes: a kernel that takes all of them, and a gradient.

The gradient is the sum of the sources' gradients under the lse of all of them, so backward kernels serve kinds of
sources, as forward kernels do.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from . import plan
from .attention_op import ByGradient, gradient, rowsum
from .autodiff import Differentiable, without_gradient
from .lowering import choose, choose_backward
from .merge import merged
from .modes.base import AttentionMode, Gradient, around, defined
from .op import RESULTS, RESULTS_OF_D_V, Arrays, Axes, Call, Halo, Op, Sink
from .sources import Source, SpanSource
from .tables import BACKWARD, FORWARD


def attend(
    op: str,
    q: jax.Array,
    sources: Sequence[Source],
    *,
    sink: jax.Array | None,
    scale: float,
    implementation: _check.Implementation | None,
    modes: Sequence[AttentionMode] = (),
    differentiable: bool = True,
    deterministic: bool = False,
    names: tuple[str, str] = ("q", "sink"),
) -> reference.Attention:
    """One softmax over the keys of all sources and the sink.

    Args:
      op: the caller's name, for errors.
      q: `[b, s_q, h_q, d]`.
      sources: one or two, in q's dtype, or packed with q in bfloat16.
      sink: float32 `[h_q]`, or None.
      implementation: None or "cubin".
      modes: how, where it is not the plain way: inside of a kernel, or by passes around it.
      differentiable: whether there is a gradient; if not, asking for one is an error.
      deterministic: whether the gradient must have the same bits every time.
      names: the caller's names of q and sink.

    Returns:
      o like q, or as wide as the sources' V, and lse float32 `[b, s_q, h_q]`, without the sink.

    Raises:
      NotImplementedError: "cubin" or a mode that insists on a kernel, and none is built for these sources; or
        `deterministic` where XLA's scatter would compute the gradient on a GPU.
    """
    found = plan.best(q, sources, modes)
    is_ordered = any(mode.is_batch_invariant for mode in found.inside)
    instead = next(filter(None, (mode.differentiated for mode in found.inside)), None)
    d_v = next((x.d_v for x in sources if x.d_v), None)
    traits: dict[str, Any] = {"batch_invariant": is_ordered} | ({"differentiated": instead} if instead else {})

    def run(q: jax.Array, sources: Sequence[Source], sink: jax.Array | None) -> reference.Attention:
        """Attends in one launch, with the modes that are inside."""
        if len(sources) == 1 and isinstance(sources[0], SpanSource) and sources[0].keys.ndim == 3:
            sources = [dataclasses.replace(sources[0], keys=sources[0].keys[:, :, None])]
        leaves, tree = jax.tree.flatten((tuple(sources), found.inside))
        axes = (*(x for source in sources for x in source.axes), *(x for mode in found.inside for x in mode.axes))
        kinds = plan.kinds_of(sources)
        halo = next((x.halo for x in sources if isinstance(x, SpanSource) and x.halo), None)
        results = RESULTS if d_v is None else RESULTS_OF_D_V
        attention, its_gradient = _ops(op, names, tree, axes, results, kinds, halo, **traits)
        support = plan.support_of(op, q, sources, found.inside)
        use = choose(op, "cubin" if is_ordered else implementation, support)
        params = {"scale": scale}
        of_forward = params if d_v is None else params | {"d_v": d_v}
        forward = Call(attention, use, tuple(of_forward.items()), support)
        sink = jnp.full(q.shape[2:3], -jnp.inf, jnp.float32) if sink is None else sink
        if not differentiable or instead:
            o, lse = without_gradient(forward, q, *leaves, sink[None])
            return o, lse
        its_support = plan.support_of_gradient(op, q, kinds, support.got, use, deterministic)
        params |= {"deterministic": True} if deterministic else {}
        use = choose_backward(use, its_support.built)
        backward = Call(its_gradient, use, tuple(params.items()), its_support)
        o, lse = Differentiable(forward, backward, ByGradient)(q, *leaves, sink[None])
        return o, lse

    def attention(q: jax.Array) -> reference.Attention:
        if found.is_split:
            return merged([run(q, [source], None) for source in sources], sink, op)
        return run(q, sources, sink)

    return around(attention, found.outside)(q)


@functools.cache
def _ops(
    op: str,
    names: tuple[str, str],
    tree: Any,
    axes: tuple[Axes, ...],
    results: tuple[Axes, ...],
    kinds: tuple[str, ...],
    halo: Halo | None,
    **traits: Any,
) -> tuple[Op, Op]:
    """Attention over sources and in modes that `tree` makes of leaves, and its gradient; traits: of the first."""

    def given(operands: Sequence[Any]) -> tuple[Any, Any, Any]:
        return *tree.unflatten(operands[:-1]), operands[-1]

    # the sources know d_v, which is a parameter for the sizes of results alone
    def definition(q: Any, *operands: Any, scale: float, d_v: int | None = None) -> Arrays:
        sources, modes, sink = given(operands)
        return defined(_definition, modes)(q, sources, sink, scale=scale)

    def kernel(q: Any, *operands: Any, scale: float, d_v: int | None = None) -> Arrays:
        return plan.launch(q, *given(operands)).run(q, scale)

    def launches(q: Any, *operands: Any, scale: float, d_v: int | None = None) -> Sequence[str]:
        return plan.launch(q, *given(operands)).kernels(q)

    def rows(q: Any, operands: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """The sources and modes, what `_gradient` takes for the rows of q, and rowsum(o∘do), which XLA makes."""
        *leaves, o, do, lse, sink_factor, dlse = operands
        sums = rowsum(o, do)
        return *tree.unflatten(leaves), (q, do, lse, sink_factor, sink_factor * sums - dlse), sums

    def gradient_by_definition(q: Any, *operands: Any, scale: float, deterministic: bool = False) -> Arrays:
        sources, modes, of_rows, sums = rows(q, operands)
        run: Gradient = _gradient
        for mode in modes:
            run = mode.gradient(run, by_kernels=False)
        return *run(*of_rows, sources, scale=scale), sums

    def gradient_by_kernel(q: Any, *operands: Any, scale: float, deterministic: bool = False) -> Arrays:
        sources, modes, of_rows, sums = rows(q, operands)
        found = plan.launch_gradient(q, sources, modes, deterministic)
        run: Gradient = found.run
        for mode in found.outside:
            run = mode.gradient(run, by_kernels=True)
        return *run(*of_rows, sources, scale=scale), sums

    def launches_of_gradient(q: Any, *operands: Any, scale: float, deterministic: bool = False) -> Sequence[str]:
        sources, modes, *_ = rows(q, operands)
        return plan.launch_gradient(q, sources, modes, deterministic).kernels()

    operands = (Axes(names[0], "b s_q h_q d"), *axes, Sink(names[1]))
    attention = Op(
        op, operands, results, definition, kernel if kinds in FORWARD else None, launches=launches, halo=halo, **traits
    )  # fmt: skip
    by_kernel = gradient_by_kernel if kinds in BACKWARD else None
    return attention, gradient(attention, gradient_by_definition, by_kernel, launches_of_gradient)


def _definition(q: Any, sources: Sequence[Source], sink: Any, *, scale: float) -> reference.Attention:
    """Attention in the plain way."""
    parts = [part for source in sources for part in source.parts()]
    if len(parts) == 1:
        return parts[0].reference(q, sink, scale)
    q32 = q.astype(jnp.float32)
    o, lse = reference.merge([part.reference(q32, None, scale) for part in parts], sink)
    return o.astype(q.dtype), lse


def _gradient(
    q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, sources: Sequence[Any], *, scale: float
) -> Arrays:
    """The gradient in the plain way: the sum of the sources' own."""
    parts = [x.gradient(q, do, lse, sink_factor, delta, scale=scale) for x in sources]
    dq = functools.reduce(lambda x, y: x + y, [dq for dq, *_ in parts])
    return dq.astype(q.dtype), *(x for _, *of_keys in parts for x in of_keys)
