"""Makes an op that ends in a kernel work under jax.jit, vmap, grad and meshes: one mechanism for all ops.

An op is data: the axes of its operands and results, a kernel and a reference. The layers that follow from that,
outermost first:

    Differentiable   custom_vjp: another op, with a kernel or without, computes the gradient from the residuals
    _batched         custom_vmap: a mapped axis becomes one more leading batch axis, of size 1 where nothing is mapped
    _sharded         which devices compute what. All axes manual: this device computes all; Explicit: jax.shard_map;
    Auto, or
                     no mesh: custom_partitioning, which compiles to nothing on a single device
    _folded          all batch axes become the one that a kernel has, on one device, where that moves no data
    _implementation  kernel or reference, by the platform that XLA compiles for

Batch, s_q and h_q may be sharded, and h_kv with h_q. A row needs all its keys, all of d and all its indices, so no
other axis may be sharded. A forward op has no collective; a result that lacks a sharded axis, as dk lacks s_q, is
summed.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _check, _explain, _ffi

Arrays = tuple[jax.Array, ...]


O, LSE = "dsv4_fmha_o", "dsv4_fmha_lse"
"""The names of a forward op's results under jax.checkpoint: with a policy that saves both, nothing runs twice."""

Params = tuple[tuple[str, Any], ...]
"""Parameters that an op gets at trace time, by name, as (("scale", 0.1),)."""


class Axes(NamedTuple):
    """An operand or a result: its name, for errors, and its axes, for example "b s_q h_q d"."""

    name: str
    axes: str


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


ONE_OR_B = "b*"
"""The batch axis of an operand that may have size 1 there, and then belongs to every batch entry."""

SINK = Axes("sink", "b h_q")
"""A sink as an operand of an op: it has batch axes too, of size 1 except where vmap maps it."""

RESULTS = (Axes("o", "b s_q h_q d"), Axes("lse", "b s_q h_q"))
"""The results of attention."""


class Fit(NamedTuple):
    """The kernels that fit a call's operands, for saying why the kernel or the reference runs."""

    got: str
    """the operands, in words"""
    kernels: tuple[str, ...]
    """the kernels that such a call launches, whatever its sizes, by their names in the manifest; where there are none,
    those for some of its operands"""
    built: tuple[str, ...]
    """the architectures that all are built for with these sizes and dtypes"""
    wanted: str = "operands that a kernel is built for"
    """what kernels take, for errors"""


class Call(NamedTuple):
    """An op, and what is known at trace time about the call."""

    op: Op
    when: str
    """When the kernel runs: "never", "on cuda", or "always" (an error elsewhere). "in exports" and "always in exports"
    are the same for programs that jax.export makes, because the devices here have no kernel.
    """
    params: Params = ()
    fit: Fit | None = None
    """None where the op has no kernel at all"""


# Which implementation


def choose(op: str, implementation: _check.Implementation | None, fit: Fit) -> str:
    """Call.when, for the kernels that fit the operands."""
    if implementation == "cubin":
        if not fit.built:
            raise _check.not_built(op, "implementation", f"'cubin' for {fit.got}", fit.wanted, fit.kernels)
        here = _ffi.local_architectures()
        return "always" if not here or set(here) & set(fit.built) else "always in exports"
    if not fit.built:
        return "never"
    return "on cuda" if _serves(fit.built) else "in exports"


def choose_backward(forward: str, built: Sequence[str]) -> str:
    """Call.when of a gradient's op, whose kernels are `built` for these architectures: the forward op's, if there is a
    kernel.
    """
    return forward if _serves(built) else "never"


def _serves(built: Sequence[str]) -> bool:
    """Whether there is a kernel for every device that this process has."""
    return bool(built) and all(a in built for a in _ffi.local_architectures())


def _implementation(call: Call, *operands: jax.Array) -> Arrays:
    op, params = call.op, dict(call.params)
    _explain.log_fallback(call)
    operands = (_explain.chosen.bind(operands[0], call=call), *operands[1:])
    reference = functools.partial(op.reference, **params)
    if op.kernel is None or call.when == "never":
        return reference(*operands)
    axes = _varying(operands)
    run = functools.partial(op.kernel, **params)

    def on_cuda(*operands: jax.Array) -> Arrays:  # a custom call says nothing about manual axes
        return _vary(run(*operands), axes)

    def refuse(*operands: jax.Array) -> Arrays:
        results = tuple((x.shape, x.dtype) for x in jax.eval_shape(run, *operands))
        return _vary(_not_cuda.bind(*operands, op=op.name, results=results), axes)

    def if_exported(*operands: jax.Array) -> Arrays:
        return tuple(_exported.bind(*operands, call=call, then=on_cuda, otherwise=otherwise))

    elsewhere = refuse if call.when.startswith("always") else reference
    otherwise = None if call.when.startswith("always") else reference
    on_cuda_here = if_exported if call.when.endswith("in exports") else on_cuda
    results: Arrays = lax.platform_dependent(*operands, cuda=on_cuda_here, default=elsewhere)
    return results


# Only lowering knows the platform of a call: jax.export lowers for CUDA on a machine without it. So on other platforms
# a primitive stands for the kernel, and raises when it is lowered.
_not_cuda = Primitive("dsv4_fmha_not_cuda")
_not_cuda.multiple_results = True
_not_cuda.def_abstract_eval(
    lambda x, *_, results, **__: [x.update(shape=s, dtype=t, weak_type=False) for s, t in results]
)


def _lower_refusal(ctx: Any, *_: Any, op: str, **__: Any) -> Any:
    platforms = " or ".join(ctx.module_context.platforms)
    raise _check.error(ValueError, op, "implementation", f"'cubin' on platform {platforms}", "platform cuda")


mlir.register_lowering(_not_cuda, _lower_refusal)


# Only lowering knows, too, whether a call is lowered for the devices that are here or exported for others.
_exported = Primitive("dsv4_fmha_exported")
_exported.multiple_results = True


@_exported.def_abstract_eval
def _(*operands: Any, then: Callable[..., Arrays], **_: Any) -> Any:
    return [operands[0].update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in jax.eval_shape(then, *operands)]


def _lower_exported(
    ctx: Any, *operands: Any, call: Call, then: Callable[..., Arrays], otherwise: Callable[..., Arrays] | None
) -> Any:
    run = then if ctx.module_context.lowering_parameters.for_export else otherwise
    if run is None:
        assert call.fit is not None
        got, wanted = f"'cubin' on {', '.join(_ffi.local_architectures())}", "a kernel that is built for it"
        raise _check.not_built(call.op.name, "implementation", got, wanted, call.fit.kernels)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


mlir.register_lowering(_exported, _lower_exported)


# Batch axes


def _names(x: Axes, ndim: int) -> tuple[str, ...]:
    """A name for each of ndim axes; several batch axes are b0, b1, …"""
    _, *rest = x.axes.split()
    return (*(f"b{i}" for i in range(ndim - len(rest))), *rest)


def _axes_of(xs: Sequence[Axes]) -> set[str]:
    return {name for x in xs for name in x.axes.split()}


def _batched(call: Call, *operands: jax.Array) -> Arrays:
    @custom_vmap
    def run(*operands: jax.Array) -> Arrays:
        return _sharded(call, *operands)

    @run.def_vmap
    def _(_: int, mapped: Sequence[bool], *operands: jax.Array) -> tuple[Arrays, tuple[bool, ...]]:
        operands = tuple(x if is_mapped else x[None] for x, is_mapped in zip(operands, mapped, strict=True))
        return _batched(call, *operands), (True,) * len(call.op.results)

    results: Arrays = run(*operands)
    return results


def _batch_shape(op: Op, operands: Sequence[jax.Array]) -> tuple[Any, ...]:
    """The sizes of the batch axes, to which those of the operands (1 or the size) broadcast."""
    shapes = [x.shape[: x.ndim - len(axes.axes.split()) + 1] for axes, x in zip(op.operands, operands, strict=True)]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*shapes, strict=True))


def _folded(call: Call, *operands: jax.Array) -> Arrays:
    """The op on one device, all batch axes made one.

    The last batch axes become queries instead where no key has them, so that keys need not be copied. A kernel does not
    take a sink for every batch entry; such a sink weights o afterwards, as its definition in terms of lse allows.
    """
    op = call.op
    batch = _batch_shape(op, operands)
    given = dict(zip(op.operands, operands, strict=True))
    sink = next((x for axes, x in given.items() if axes.axes == SINK.axes), None)
    per_entry = sink is not None and any(n != 1 for n in sink.shape[:-1])
    keep = len(batch) if any("s_q" not in axes.axes for axes in op.results) else 0
    for axes, x in given.items():
        if "s_q" not in axes.axes and axes.axes != SINK.axes:
            keep = max([keep, *(i + 1 for i in range(len(batch)) if x.shape[i] != 1)])
    without_sink = {axes: x for axes, x in given.items() if axes.axes != SINK.axes}
    inner = _batch_shape(Op("", tuple(without_sink), (), op.reference), tuple(without_sink.values()))

    def fold(axes: Axes, x: jax.Array) -> jax.Array:
        rest = x.shape[len(batch) :]
        if axes.axes == SINK.axes:
            return jnp.full_like(x[(0,) * len(batch)], -jnp.inf) if per_entry else x.reshape(rest)
        if "s_q" in axes.axes:
            x = jnp.broadcast_to(x, (*inner, *rest))
            return x.reshape(math.prod(inner[:keep]), math.prod(inner[keep:]) * rest[0], *rest[1:])
        shared = axes.axes.startswith(ONE_OR_B) and math.prod(x.shape[: len(batch)]) == 1
        if shared and all("s_q" in of_result.axes for of_result in op.results):
            return x.reshape(1, *rest)
        x = jnp.broadcast_to(x, (*inner[:keep], *x.shape[keep:]))
        return x.reshape(math.prod(inner[:keep]), *rest)

    def unfold(axes: Axes, x: jax.Array) -> jax.Array:
        rest = x.shape[1:]
        if "s_q" in axes.axes:
            rest = (rest[0] // math.prod(inner[keep:]), *rest[1:])
        return x.reshape(*inner, *rest)

    if 0 in batch:  # jax.vmap over nothing
        one = [(() if axes.axes == SINK.axes else (1,), x) for axes, x in given.items()]
        shapes = jax.eval_shape(
            functools.partial(op.reference, **dict(call.params)),
            *(jax.ShapeDtypeStruct((*b, *x.shape[len(batch) :]), x.dtype) for b, x in one),
        )
        return tuple(jnp.zeros((*batch, *x.shape[1:]), x.dtype) for x in shapes)
    results = _implementation(call, *(fold(axes, x) for axes, x in given.items()))
    results = tuple(map(unfold, op.results, results))
    if per_entry:
        assert sink is not None
        o, lse = results
        weight = sink_weight(lse, sink[..., None, :])
        o = (o.astype(jnp.float32) * weight[..., None]).astype(o.dtype)
        results = o, jnp.broadcast_to(lse, weight.shape)
    return results


def sink_weight(lse: jax.Array, sink: jax.Array) -> jax.Array:
    """exp(lse - logaddexp(lse, sink)), the part of the softmax that the keys get beside the sink; never NaN."""
    return jax.nn.sigmoid(jnp.where(jnp.isinf(lse), 0, lse) - sink)


# Meshes


def _mesh(operands: Sequence[jax.Array]) -> Any:
    meshes = (jax.typeof(x).sharding.mesh for x in operands)
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _explicit_axes(mesh: Any) -> frozenset[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def _sharded(call: Call, *operands: jax.Array) -> Arrays:
    mesh = _mesh(operands)
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Manual}:
        return _folded(call, *operands)
    if AxisType.Explicit not in kinds:
        return _partitioned(call, *operands)
    layout = _explicit_layout(call, operands, mesh)
    # Without jax.set_mesh, a shard_map cannot ask XLA's partitioner: an operand with Auto axes is gathered.
    leaves_auto = AxisType.Auto in kinds and _explicit_axes(mesh) <= set(jax.sharding.get_abstract_mesh().axis_names)
    run = jax.shard_map(
        functools.partial(layout.run, functools.partial(_sharded if leaves_auto else _folded, call)),
        in_specs=layout.operands,
        out_specs=layout.results,
        # all, said so, is one too many where jax.vmap maps an axis that is sharded
        axis_names=_explicit_axes(mesh) if leaves_auto else frozenset(),
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return _vary(run(*layout.reshard(operands, mesh)), _varying(operands))


class _Layout:
    """Which mesh axes split which axes of an op, and from that what one device computes and which results are summed.

    The first operand that splits an axis decides for all. A split that cannot be is an error if strict. Otherwise it is
    dropped, and the partitioner gathers the operand.
    """

    def __init__(self, call: Call, shapes: Sequence[tuple[Any, ...]], specs: Sequence[P], mesh: Mapping[str, int],
                 strict: bool) -> None:  # fmt: skip
        self.mesh, op = mesh, call.op
        self.names = [_names(axes, len(shape)) for axes, shape in zip(op.operands, shapes, strict=True)]
        self.size = size = {name: x for name, x in call.params if name in _axes_of(op.results)}
        for names, shape in zip(self.names, shapes, strict=True):
            size |= {name: n for name, n in zip(names, shape, strict=True) if n != 1 or name not in size}
        self.h_q, self.h_kv = size.get("h_q", 1), size.get("h_kv", 1)
        self.split: dict[str, tuple[str, ...]] = {}
        for operand, names, spec in zip(op.operands, self.names, specs, strict=True):
            for name, entry in zip(names, spec, strict=False):
                axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
                problem = self._add(name, axes, size[name]) if axes else None
                if problem and strict:
                    got = f"{name} sharded over {', '.join(axes)}"
                    raise _check.error(ValueError, op.name, operand.name, got, problem)
        batch = sum(name not in op.operands[0].axes.split() for name in self.names[0])
        self.operands = tuple(self._spec(names, shape) for names, shape in zip(self.names, shapes, strict=True))
        self.result_names = [_names(axes, batch + len(axes.axes.split()) - 1) for axes in op.results]
        self.results = tuple(self._spec(names, [size[name] for name in names]) for names in self.result_names)

    @staticmethod
    def may_split(name: str) -> bool:
        return name in ("s_q", "h_q", "h_kv") or name[1:].isdigit()

    def _add(self, name: str, axes: tuple[str, ...], size: Any) -> str | None:
        """Enters a split, or says what it had to be instead."""
        if name == "h_kv":
            name, size = "h_q", self.h_q
        if not self.may_split(name):
            return "that axis whole: only batch, s_q and heads may be sharded"
        if name in self.split:
            return None if self.split[name] == axes else f"{name} sharded over {', '.join(self.split[name])}, as before"
        if any(a in axes for other in self.split.values() for a in other):
            return "mesh axes that no other axis is sharded over"
        shards = math.prod(self.mesh[a] for a in axes)
        if size % shards:
            return f"a multiple of {shards}"
        if name == "h_q" and self.h_kv % shards and (self.h_q // self.h_kv) % (self.h_q // shards):
            return f"query heads of whole key heads, or of one, on a device; there are {self.h_q} and {self.h_kv}"
        self.split[name] = axes
        return None

    @property
    def _one_of_h_kv(self) -> bool:
        """Whether there are more shards of heads than key heads, so that each device takes one of the key heads, all of
        which it has.
        """
        return self.h_kv % math.prod(self.mesh[a] for a in self.split.get("h_q", ())) != 0

    def _spec(self, names: Sequence[str], shape: Sequence[Any]) -> P:
        def entry(name: str, n: Any) -> tuple[str, ...] | None:
            if name == "h_kv":
                return None if self._one_of_h_kv else self.split.get("h_q")
            return self.split.get(name) if n != 1 or name == "h_q" else None

        return P(*map(entry, names, shape))

    def passes(self, arguments: Sequence[Any], results: Sequence[Any]) -> bool:
        """Whether these shardings may stay as they are; only the sizes of the shards are known.

        Such shardings come from inside of a jax.shard_map over some of the axes, where the partitioner sees the rest.
        It gives an axis the same shards everywhere. It does not say how query heads and key heads would meet, or over
        which devices to sum.
        """
        everywhere = set.intersection(*map(set, self.result_names))
        for x, names in zip((*arguments, *results), (*self.names, *self.result_names), strict=True):
            for name, n, local in zip(names, x.shape, x.sharding.shard_shape(x.shape), strict=True):
                if n != local and (name not in everywhere or (name == "h_q" and self.h_kv != 1)):
                    return False
        return True

    def reshard(self, operands: Arrays, mesh: Any) -> Arrays:
        specs = zip(operands, self.operands, strict=True)
        return tuple(jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in specs)

    def run(self, op: Callable[..., Arrays], *operands: jax.Array) -> Arrays:
        """The function that one device computes, with `op` on its operands."""
        heads = self.split.get("h_q", ())
        picks = self._one_of_h_kv and self.h_kv != 1
        if picks:
            shards = math.prod(self.mesh[a] for a in heads)
            head = lax.axis_index(heads) * self.h_kv // shards
            operands = tuple(
                lax.dynamic_slice_in_dim(x, head, 1, names.index("h_kv")) if "h_kv" in names else x
                for x, names in zip(operands, self.names, strict=True)
            )
        results = []
        for x, names in zip(op(*operands), self.result_names, strict=True):
            has = {"h_q" if name == "h_kv" and not self._one_of_h_kv else name for name in names}
            if picks and "h_kv" in names:
                axis = names.index("h_kv")
                whole = jnp.zeros((*x.shape[:axis], self.h_kv, *x.shape[axis + 1 :]), x.dtype)
                x = lax.dynamic_update_slice_in_dim(whole, x, head, axis)
            lacks = tuple(a for name, axes in self.split.items() if name not in has for a in axes)
            results.append(lax.psum(x, lacks) if lacks else x)
        return tuple(results)


def _explicit_layout(call: Call, operands: Sequence[jax.Array], mesh: Any) -> _Layout:
    specs = [jax.typeof(x).sharding.spec for x in operands]
    return _Layout(call, [x.shape for x in operands], specs, mesh.shape, strict=True)


def _partitioned(call: Call, *operands: jax.Array) -> Arrays:
    """The op where XLA's partitioner decides, and then asks what a device computes."""
    shapes = [x.shape for x in operands]

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        if mesh.empty and whole_layout.passes(arguments, results):
            return mesh, alone, *(tuple(x.sharding for x in xs) for xs in (results, arguments))
        specs = [getattr(x.sharding, "spec", P()) for x in arguments]
        layout = _Layout(call, shapes, specs, mesh.shape, strict=False)

        def on(specs: Any) -> Any:
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, functools.partial(layout.run, alone), on(layout.results), on(layout.operands)

    alone = functools.partial(_folded, call)
    run = custom_partitioning(alone)
    whole_layout = _Layout(call, shapes, [P()] * len(shapes), {}, strict=False)
    rule, whole = _sharding_rule(whole_layout, shapes)
    run.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)
    results: Arrays = run(*operands)
    return results


def _sharding_rule(layout: _Layout, shapes: Sequence[tuple[Any, ...]]) -> tuple[str, tuple[str, ...]]:
    """The op for Shardy, with the axes that it may not shard. Shardy does not learn how key heads follow query
    heads.
    """
    whole: dict[str, None] = {}

    def factor(name: str, n: Any) -> str:
        if layout.may_split(name) and (n != 1 or name[0] == "h"):
            return name
        name = name if n != 1 else f"one{len(whole)}"
        whole.setdefault(name)
        return name

    def term(names: Sequence[str], shape: Sequence[Any]) -> str:
        return " ".join(map(factor, names, shape))

    left = ", ".join(map(term, layout.names, shapes))
    right = ", ".join(term(names, [layout.size[name] for name in names]) for names in layout.result_names)
    return f"{left} -> {right}", tuple(whole)


# Manual axes of jax.shard_map


def _varying(operands: Sequence[jax.Array]) -> frozenset[str]:
    """The manual axes along which any of the operands varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))


def _vary(xs: Sequence[jax.Array], axes: frozenset[str]) -> Arrays:
    """xs as varying along these manual axes; the transpose sums over axes that are new to an x."""
    return tuple(lax.pcast(x, tuple(sorted(axes - _varying([x]))), to="varying") for x in xs)


def aligned(call: Call, operands: Arrays) -> Arrays:
    """The operands, placed as the op needs them, so that autodiff sees how they got there and transposes it."""
    operands = _vary(operands, _varying(operands))
    mesh = _mesh(operands)
    if _explicit_axes(mesh):
        operands = _explicit_layout(call, operands, mesh).reshard(operands, mesh)
    return operands


# Forward-mode derivatives, which a custom_vjp does not have


def in_reverse(call: Call, operands: Arrays) -> Arrays:
    """The operands, `aligned`, for an op that is differentiated in reverse mode only."""
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    placed = zip(aligned(call, operands), floats, strict=True)
    return tuple(_in_reverse.bind(x, op=call.op.name) if is_float else x for x, is_float in placed)


def _no_tangent(*_: Any, op: str, **__: Any) -> Any:
    raise no_derivative(op)


def _jvp_in_reverse(primals: tuple[jax.Array], tangents: tuple[Any], *, op: str) -> tuple[jax.Array, Any]:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _tangent.bind(t, op=op)


# x, whose tangents raise our error where somebody asks for them, before JAX's own; cotangents pass
_in_reverse = Primitive("dsv4_fmha_in_reverse")
_in_reverse.def_abstract_eval(lambda x, **_: x)
_in_reverse.def_impl(lambda x, **_: x)
ad.primitive_jvps[_in_reverse] = _jvp_in_reverse
batching.primitive_batchers[_in_reverse] = lambda xs, axes, **of: (_in_reverse.bind(*xs, **of), *axes)
mlir.register_lowering(_in_reverse, lambda _, x, **__: [x])

# its tangent: reverse mode transposes it, and nothing else may use it
_tangent = Primitive("dsv4_fmha_tangent")
_tangent.def_abstract_eval(lambda x, **_: x)
_tangent.def_impl(_no_tangent)
ad.deflinear2(_tangent, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[_tangent] = _no_tangent
mlir.register_lowering(_tangent, _no_tangent, cacheable=False)


def no_derivative(op: str) -> Exception:
    """The error for a derivative that is not a first one in reverse mode."""
    wanted = "jax.grad or jax.vjp, once, or attention with implementation='reference', which has all of them"
    return _check.error(NotImplementedError, op, "gradient", "a second derivative, or one forward", wanted)


# Without a gradient


@functools.partial(jax.jit, static_argnums=0)  # so that a call outside of jit compiles only once
def forward(call: Call, *operands: jax.Array) -> Arrays:
    """The results of an op without a gradient; asking for one raises an error."""
    return _opaque(call, *in_reverse(call, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _opaque(call: Call, *operands: jax.Array) -> Arrays:
    return _batched(call, *operands)


def _no_gradient(call: Call, *_: Any) -> Any:
    wanted = "stop_gradient around it, or implementation='reference'"
    raise _check.error(NotImplementedError, call.op.name, "gradient", "a call to differentiate", wanted)


_opaque.defvjp(_no_gradient, _no_gradient)


# Gradients


def gradient(op: Op, reference: Callable[..., Arrays], kernel: Callable[..., Arrays] | None = None) -> Op:
    """The op of the gradient of attention `op`, (…, sink) -> (o, lse), with the sink last:

        (…, o, do, lse, weight, dlse) -> (dq, the gradients of all other operands whose last axis is d, rowsum(o∘do))

    With P = exp(S - lse) and delta = weight·rowsum(o∘do) - dlse,

        dS = P∘(weight · do·v - delta);  dq = scale·dS k;  dk = scale·dSᵀ q;  dv = Pᵀ (weight · do)

    A sink enters only as weight = exp(lse - logaddexp(lse, sink)), a cotangent of lse only as dlse. Gradients of keys
    come in float32, so that devices can sum them.
    """
    rows = (*each("b s_q h_q d", "o", "do"), *each("b s_q h_q", "lse", "weight", "dlse"))
    gradients = (Axes(f"d{name}", axes) for name, axes in op.operands if axes.endswith(" d"))
    results = (*gradients, *each("b s_q h_q", "rowsum"))
    return Op(op.name, (*op.operands[:-1], *rows), results, reference, kernel, "gradient")


def each(axes: str, *names: str) -> tuple[Axes, ...]:
    return tuple(Axes(name, axes) for name in names)


def rowsum(o: jax.Array, do: jax.Array) -> jax.Array:
    """rowsum(o∘do) in float32, where no kernel makes it."""
    return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1)


class Differentiable(NamedTuple):
    """Attention and its `gradient`: two calls, each with a kernel or without."""

    forward: Call
    backward: Call

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        """o and lse of the forward op."""
        o, lse = _call(self, *operands)
        return o, lse


@functools.partial(jax.jit, static_argnums=0)  # so that a call outside of jit compiles only once
def _call(calls: Differentiable, *operands: jax.Array) -> Arrays:
    return _differentiable(calls, *in_reverse(calls.forward, operands))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(call: Call, *operands: jax.Array) -> Arrays:
    return _batched(call, *operands)


@_once.defjvp
def _twice(call: Call, *_: Any) -> Any:
    raise no_derivative(call.op.name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(calls: Differentiable, *operands: jax.Array) -> Arrays:
    return _once(calls.forward, *operands)


def _fwd(calls: Differentiable, *operands: jax.Array) -> tuple[Arrays, tuple[Arrays, Arrays]]:
    o, lse = _once(calls.forward, *operands)
    results = checkpoint_name(o, O), checkpoint_name(lse, LSE)
    return results, (operands, results)


def _bwd(calls: Differentiable, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (*operands, sink), (o, lse) = residuals
    do, dlse = cotangents
    weight = sink_weight(lse, sink[:, None])
    *gradients, of_rows = _once(calls.backward, *operands, o, do, lse, weight, dlse)
    of_sink = jax.nn.sigmoid(sink[:, None] - jnp.where(jnp.isinf(lse), 0, lse))  # 1 - weight, with all its digits
    dsink = -jnp.sum(jnp.where(jnp.isinf(lse) | jnp.isinf(sink[:, None]), 0, of_sink * of_rows), (0, 1))[None]
    given = iter(gradients)
    return *(next(given).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None for x in operands), dsink


_differentiable.defvjp(_fwd, _bwd)
