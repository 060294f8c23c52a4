"""One softmax over the keys of sources: a kernel that takes all of them, and a gradient.

The gradient is the sum of the sources' gradients under the lse of all of them, so backward kernels serve kinds of
sources, as forward kernels do.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.rope import normed_and_turned, normed_and_turned_gradient, pairs_turned
from .._host import attention, library, rope
from . import products as by_products
from .attention_op import ByGradient, gradient, rowsum
from .autodiff import Differentiable, without_gradient
from .lowering import choose, choose_backward
from .op import ONE_OR_B, RESULTS, SINK, Arrays, Axes, Call, Halo, KernelUse, Op, Params
from .sources import Source, SpanSource
from .support import Support, not_built
from .tables import BACKWARD, BY_PRODUCTS, FORWARD, IN_ORDER, IN_ORDER_ON, TURNED, TURNED_BACKWARD, TURNED_DIMS, Kernel

_Q = Axes("q", "b s_q h_q d")


class Turn(NamedTuple):
    """That q is as a product makes it, and attention does the norm of its heads and their RoPE, and turns o back."""

    table: jax.Array
    """float32 `[b, s_q, n]` or `[1, s_q, n]`: cos and sin of each pair by turns"""
    eps: float | None
    """of the norm; None for RoPE without it, for which there is no kernel"""
    group_heads: int = 1
    """heads of which one product takes o: in groups of these it makes the cotangent of o"""


def attend(
    op: str,
    q: jax.Array,
    sources: Sequence[Source],
    *,
    sink: jax.Array | None,
    scale: float,
    implementation: _check.Implementation | None,
    differentiable: bool = True,
    names: tuple[str, str] = ("q", "sink"),
    deterministic: bool = False,
    batch_invariant: bool = False,
    turn: Turn | None = None,
    products: str | None = None,
) -> reference.Attention:
    """One softmax over the keys of all sources and the sink.

    Args:
      op: the caller's name, for errors.
      q: `[b, s_q, h_q, d]`.
      sources: one or two, in q's dtype, or packed with q in bfloat16.
      sink: float32 `[h_q]`, or None.
      implementation: None or "cubin".
      differentiable: whether there is a gradient; if not, asking for one is an error.
      names: the caller's names of q and sink.
      deterministic: whether the gradient must have the same bits every time.
      batch_invariant: whether the kernel must sum in the canonical order (docs/semantics.md).
      turn: what makes q of the given one, for sources that `support_of` knows a kernel of with it.
      products: of `e4m3.PRODUCTS`, for products of e4m3; packed keys are a `CachedSource` then. There is no gradient.

    Returns:
      o like q, rounded once, and lse float32 `[b, s_q, h_q]`, without the sink.

    Raises:
      NotImplementedError: "cubin", and no kernel is built for these sources; or `deterministic` where XLA's scatter
        would compute the gradient on a GPU; or `batch_invariant`, and no kernel with this order is built for them.
    """
    if not isinstance(deterministic, bool):
        raise _check.error(TypeError, op, "deterministic", deterministic, "a bool")
    if len(sources) == 1 and isinstance(sources[0], SpanSource) and sources[0].keys.ndim == 3:
        sources = [dataclasses.replace(sources[0], keys=sources[0].keys[:, :, None])]
    leaves, tree = jax.tree.flatten(tuple(sources))
    axes, kinds = tuple(x for source in sources for x in source.axes), _kinds(sources)
    support = (
        _support_in_order(op, q, sources) if batch_invariant else support_of(q, sources, turn is not None, products)
    )
    use = choose(op, "cubin" if batch_invariant else implementation, support)
    if sink is None:
        sink = jnp.full(q.shape[2:3], -jnp.inf, jnp.float32)
    params: Params = (("scale", scale),)
    ordered = (("batch_invariant", True),) * batch_invariant
    if turn is not None:
        leaves, params = [*leaves, turn.table], (*params, ("eps", turn.eps))
    halo = next((x.halo for x in sources if isinstance(x, SpanSource) and x.halo), None)
    attention, its_gradient = _ops(op, names, tree, axes, kinds, halo, turn is not None, products)
    if not differentiable:
        o, lse = without_gradient(Call(attention, use, params + ordered, support), q, *leaves, sink[None])
        return o, lse
    in_groups = () if turn is None else (("group_heads", turn.group_heads),)
    its_support = _support_of_gradient(q, kinds, support.got, **_same_bits(deterministic))
    use_backward = choose_backward(use, its_support.built)
    if deterministic and use_backward == KernelUse.NEVER and "selection" in kinds and library.local_architectures():
        wanted = "operands that a kernel for it is built for, or 'reference' and --xla_gpu_deterministic_ops"
        raise not_built(op, "deterministic", f"True for {support.got}", wanted, its_support.kernels)
    backward = Call(its_gradient, use_backward, (*params, *in_groups, *_same_bits(deterministic).items()), its_support)
    forward = Call(attention, use, params + ordered, support)
    o, lse = Differentiable(forward, backward, ByGradient)(q, *leaves, sink[None])
    return o, lse


_ONE_SPAN = (("separate_kv",), ("span",))


def support_of(q: jax.Array, sources: Sequence[Source], turns: bool = False, products: str | None = None) -> Support:
    """The kernel for all of these sources in one launch; turns: that with a `Turn`; products: that by these."""
    kinds = _kinds(sources)
    descriptions = dict.fromkeys(x for source in sources for x in source.description)
    got = ", ".join([q.dtype.name, f"d={q.shape[-1]}", *descriptions])
    if products is not None:
        kernels = BY_PRODUCTS[products]
        return Support(f"{got}, {products} products", _kernels_for(kernels, kinds), _shipped(kernels.get(kinds), q))
    if turns:
        return Support(got, _kernels_for(TURNED, kinds), _shipped(TURNED.get(kinds), q))
    found = _shipped(FORWARD.get(kinds), q)
    if kinds == ("span",) and not found:  # a kernel that reads separate K and V serves where they are one
        kinds, found = ("separate_kv",), _shipped(FORWARD["separate_kv",], q)
    if kinds in _ONE_SPAN and not found:
        return Support(got, tuple(FORWARD[x].op for x in _ONE_SPAN), ())
    packing = FORWARD[kinds].packing if kinds in FORWARD else None
    return Support(got, _kernels_for(FORWARD, kinds), found, packing=packing or "")


def _support_in_order(op: str, q: jax.Array, sources: Sequence[Source]) -> Support:
    """The kernel for all of these sources in the canonical order; an error where there is none."""
    kinds, got, (first, *others) = _kinds(sources), support_of(q, sources).got, sources
    kernel = IN_ORDER.get(kinds)
    if set(kinds) == {"span"} and attention.spans_have_order(q):
        kernel = FORWARD[kinds]
    if isinstance(first, SpanSource) and not others:
        dense = IN_ORDER["separate_kv",]  # also serves where K and V are one, as in `support_of`
        kernel = kernel if _shipped(kernel, q) else dense
        if kernel is dense and not first.from_first:
            kernel, got = None, f"{got}, keys that may begin after the first"
        elif kernel is not dense and first.keys.shape[2] != 1:
            kernel, got = None, f"{got}, {first.keys.shape[2]} KV heads"
    archs = tuple(x for x in _shipped(kernel, q) if x in IN_ORDER_ON)
    support = Support(got, (kernel.op,) if kernel else (), archs, packing=(kernel and kernel.packing) or "")
    if not support.built:
        known = dict.fromkeys(x.op for x in IN_ORDER.values())
        wanted = f"operands of a kernel that sums in the canonical order, on {' or '.join(IN_ORDER_ON)}"
        raise not_built(op, "batch_invariant", f"True for {got}", wanted, tuple(known))
    return support


def _support_of_gradient(q: jax.Array, kinds: tuple[str, ...], got: str, **choices: Any) -> Support:
    """The kernel of the gradient."""
    found = _shipped(BACKWARD.get(kinds), q, **choices)
    if not found and kinds in _ONE_SPAN:
        separate = BACKWARD["separate_kv",].op
        return Support(got, (separate,), library.shipped_for(separate, d=q.shape[-1], dtype=q.dtype.name))
    return Support(got, _kernels_for(BACKWARD, kinds), found)


def _kernels_for(kernels: Mapping[tuple[str, ...], Kernel], kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The kernel for sources of these kinds; where there is none, those for one of the kinds."""
    alike = [kinds] if kinds in kernels else [other for other in kernels if set(other) & set(kinds)]
    return tuple(dict.fromkeys(kernels[x].op for x in alike))


def _kinds(sources: Sequence[Source]) -> tuple[str, ...]:
    return tuple(kind for source in sources for kind in source.kinds)


def _shipped(kernel: Kernel | None, q: jax.Array, **choices: Any) -> tuple[str, ...]:
    if kernel is None:
        return ()
    if kernel.packing is not None:
        choices["packing"] = kernel.packing
    return library.shipped_for(kernel.op, d=q.shape[-1], dtype=q.dtype.name, **choices)


def _same_bits(deterministic: bool) -> dict[str, Any]:
    """The choices that a gradient's kernel must match."""
    return {"deterministic": True} if deterministic else {}


def takes_turns(q: jax.Array, sources: Sequence[Source], turn: Turn) -> bool:
    """Whether every device here has a kernel that takes q with such a `Turn`, and is made for as many heads as the one
    that takes q without it. A program that is made where no device is runs on all architectures.
    """
    kinds, here = _kinds(sources), library.local_architectures()
    if turn.eps is None or turn.table.shape[-1] != TURNED_DIMS or kinds not in TURNED or not here:
        return False
    return _made_alike(q, TURNED[kinds].op, FORWARD[kinds].op, here)


def _made_alike(q: jax.Array, op: str, other: str, archs: Sequence[str]) -> bool:
    """Whether the kernels of two ops that take q on these architectures are made for as many heads."""

    def made_for(op: str, arch: str) -> int | None:
        built = library.variants_for(op, d=q.shape[-1], dtype=q.dtype.name)
        limits = (v.choices["max_heads"] for v in built if v.arch == arch)
        return min((n for n in limits if n >= q.shape[2]), default=None)

    return all(made_for(op, arch) == made_for(other, arch) is not None for arch in archs)


@functools.cache
def _ops(
    op: str,
    names: tuple[str, str],
    tree: Any,
    axes: tuple[Axes, ...],
    kinds: tuple[str, ...],
    halo: Halo | None,
    turns: bool,
    products: str | None = None,
) -> tuple[Op, Op]:
    """Attention over sources of these kinds, and its gradient. Where it turns, its table is the last operand before the
    sink, and eps is a parameter.

    A rotation leaves rowsum(o∘do) as it is. So of q and o the gradient is made of what is given and returned.
    """

    def definition(q: Any, *operands: Any, scale: float, batch_invariant: bool = False) -> Any:
        del batch_invariant  # which no definition can be; its call insists on the kernel
        *leaves, sink = operands
        parts = [part for source in tree.unflatten(leaves) for part in source.parts()]
        if len(parts) == 1:
            return parts[0].reference(q, sink, scale)
        q32 = q.astype(jnp.float32)
        o, lse = reference.merge([part.reference(q32, None, scale) for part in parts], sink)
        return o.astype(q.dtype), lse

    def turned_definition(q: Any, *operands: Any, scale: float, eps: float) -> Any:
        *leaves, table, sink = operands
        o, lse = definition(*normed_and_turned(q, table, eps=eps), *leaves, sink, scale=scale)
        return *pairs_turned(o, table, direction=-1), lse

    def rounded_definition(q: Any, *operands: Any, scale: float) -> Any:
        *leaves, sink = operands
        assert products is not None
        return by_products.definition(q, tree.unflatten(leaves), sink, scale, products)

    def kernel_by_products(q: Any, *operands: Any, scale: float) -> Any:
        *leaves, sink = operands
        assert products is not None
        return by_products.by_kernel(q, tree.unflatten(leaves), sink, scale, products)

    def kernel(q: Any, *operands: Any, scale: float, batch_invariant: bool = False) -> Any:
        *leaves, sink = operands
        row = (IN_ORDER if batch_invariant else FORWARD)[kinds]
        parts = [part for source in tree.unflatten(leaves) for part in source.parts_of_kernel()]
        return row.run(q, *row.operands(*parts), sink, scale=scale)

    def turned_kernel(q: Any, *operands: Any, scale: float, eps: float) -> Any:
        *leaves, table, sink = operands
        row = TURNED[kinds]
        return row.run(q, *row.operands(*tree.unflatten(leaves)), sink, table, scale=scale, eps=eps)

    def backward(q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, *leaves: Any, **params: Any) -> Arrays:
        rows = (do, lse, sink_factor, delta)
        parts = [x.gradient(q, *rows, scale=params["scale"]) for x in tree.unflatten(leaves)]
        dq = functools.reduce(lambda x, y: x + y, [dq for dq, *_ in parts])
        return dq.astype(q.dtype), *(x for _, *of_keys in parts for x in of_keys)

    def backward_kernel(q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, *leaves: Any, **params: Any) -> Arrays:
        row = BACKWARD[kinds]
        return row.run(q, do, lse, sink_factor, delta, *row.operands(*tree.unflatten(leaves)), **params)

    def whole_backward_kernel(
        q: Any, do: Any, *operands: Any, eps: float, group_heads: int, deterministic: bool = False, **params: Any
    ) -> Arrays:
        """By one kernel where there is one, made for these heads; else by passes over q, do and dq besides."""
        row = TURNED_BACKWARD[kinds]
        archs = library.local_architectures() or library.shipped_for(row.op)
        *numbers, delta = operands[:3]
        *leaves, table = operands[3:]
        if deterministic or not _made_alike(q, row.op, BACKWARD[kinds].op, archs):
            params |= _same_bits(deterministic)
            return in_passes(q, do, *operands, eps=eps, group_heads=group_heads, **params)
        b, s, h, d = do.shape
        heads = group_heads if h % group_heads == 0 else h
        do = do.reshape(b, s, h // heads, heads, d).transpose(2, 0, 1, 3, 4)  # which undoes a product's transposition
        sources = row.operands(*tree.unflatten(leaves))
        return row.run(q, do, *numbers, delta, *sources, table, eps=eps, **params)

    def of_rows(run: Callable[..., Arrays]) -> Callable[..., Arrays]:
        """As `gradient` takes it: with o and dlse in place of delta, and with rowsum(o∘do), which XLA makes."""

        def run_with(q: Any, *operands: Any, **params: Any) -> Arrays:
            *leaves, o, do, lse, sink_factor, dlse = operands
            sums = rowsum(o, do)
            return *run(q, do, lse, sink_factor, sink_factor * sums - dlse, *leaves, **params), sums

        return run_with

    def turning(
        run: Callable[..., Arrays],
        forth: Callable[..., Arrays],
        rotate: Callable[..., Arrays],
        back: Callable[..., Arrays],
    ) -> Callable[..., Arrays]:
        """A gradient of q as attention sees it, by the norm and RoPE, by RoPE alone, and by the gradient of both."""

        def run_with(q: Any, do: Any, *operands: Any, eps: float, group_heads: int, **params: Any) -> Arrays:
            del group_heads  # which is about memory
            *numbers, delta = operands[:3]
            *leaves, table = operands[3:]
            do, delta = jax.lax.optimization_barrier((do, delta))  # then nothing reads do, and it is turned in place
            (seen,), (do,) = forth(q, table, eps=eps), rotate(do, table, direction=1)
            dq, *of_keys = run(seen, do, *numbers, delta, *leaves, **params)
            return *back(q, table, dq, eps=eps), *of_keys

        return run_with

    q_axes, sink_axes = Axes(names[0], _Q.axes), Axes(names[1], SINK.axes)
    if turns:
        table_axes = Axes("rope_table", f"{ONE_OR_B} s_q n")
        attention = Op(op, (q_axes, *axes, table_axes, sink_axes), RESULTS, turned_definition, turned_kernel, halo=halo)
        backward = turning(backward, normed_and_turned, pairs_turned, normed_and_turned_gradient)
        in_passes = turning(backward_kernel, rope.norm_rope, rope.rope, rope.norm_rope_bwd)
        backward_kernel = whole_backward_kernel
    elif products is not None:
        rounded_kernel = kernel_by_products if kinds in BY_PRODUCTS[products] else None
        attention = Op(op, (q_axes, *axes, sink_axes), RESULTS, rounded_definition, rounded_kernel, halo=halo)
    else:
        forward_kernel = kernel if kinds in FORWARD else None
        attention = Op(op, (q_axes, *axes, sink_axes), RESULTS, definition, forward_kernel, halo=halo)
    return attention, gradient(attention, of_rows(backward), of_rows(backward_kernel) if kinds in BACKWARD else None)
