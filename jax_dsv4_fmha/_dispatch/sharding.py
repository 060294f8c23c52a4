"""An op on a mesh: which devices compute what."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _check
from . import neighbours
from .folding import folded
from .manual_axes import vary, varying
from .op import Arrays, Axes, Call, Halo, axes_of, axis_names, is_pool
from .psum import psum

LONG_TRIANGLE = 16384
"""keys from which on devices balance a triangle: there, on two H100s, it was measured to save more than it costs"""


def mesh_of(operands: Sequence[jax.Array]) -> Any:
    meshes = (jax.typeof(x).sharding.mesh for x in operands)
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _explicit_axes(mesh: Any) -> frozenset[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def on_explicit_axes(
    run: Callable[..., Arrays], mesh: Any, given: Sequence[P], made: Sequence[P], operands: Arrays
) -> Arrays:
    """`run` on every device of a mesh's Explicit axes, for operands that are placed as `given` first; `made`: the
    results' shardings. It is told as `is_partial` whether Auto axes are left to XLA.
    """
    # Without jax.set_mesh, a shard_map cannot ask XLA's partitioner: an operand with Auto axes is gathered.
    explicit, known = _explicit_axes(mesh), set(jax.sharding.get_abstract_mesh().axis_names)
    is_partial = AxisType.Auto in mesh.axis_types and explicit <= known
    is_empty = [0 in x.shape for x in operands]

    def some(xs: Sequence[Any]) -> Arrays:
        return tuple(x for x, none in zip(xs, is_empty, strict=True) if not none)

    with jax.sharding.use_abstract_mesh(mesh):
        placed = _resharded(operands, mesh, given)

        def on_own(*filled: jax.Array) -> Arrays:
            types, others = map(jax.typeof, placed), iter(filled)
            own = (jnp.zeros(x.sharding.shard_shape(x.shape), x.dtype) if none else next(others)
                   for none, x in zip(is_empty, types, strict=True))  # fmt: skip
            return run(*own, is_partial=is_partial)

        # XLA of jax 0.11.2 crashes where a shard_map is given an array without numbers: each device makes its own
        on_device = jax.shard_map(
            on_own,
            in_specs=some(given),
            out_specs=tuple(made),
            # all, said so, is one too many where jax.vmap maps an axis that is sharded
            axis_names=explicit if is_partial else frozenset(),
            check_vma=False,
        )
        return vary(on_device(*some(placed)), varying(operands))


def _resharded(operands: Arrays, mesh: Any, specs: Sequence[P]) -> Arrays:
    return tuple(jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True))


def sharded(call: Call, *operands: jax.Array) -> Arrays:
    mesh = mesh_of(operands)
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Manual}:
        return folded(call, *operands)
    if AxisType.Explicit not in kinds:
        if AxisType.Manual in kinds:  # the partitioner will not say who has the keys before
            call = call._replace(op=dataclasses.replace(call.op, halo=None, triangle=None))
        return _partitioned(call, *operands)
    layout = _explicit_layout(call, operands, mesh)

    def run(*operands: jax.Array, is_partial: bool) -> Arrays:
        return layout.run(functools.partial(sharded if is_partial else folded, call), *operands)

    return on_explicit_axes(run, mesh, layout.operands, layout.results, operands)


class _Layout:
    """The mesh axes that split the axes of an op, and from that what one device computes and which results are summed.

    The first operand that splits an axis decides for all. A split that cannot be is an error if strict. Otherwise it is
    dropped, and the partitioner gathers the operand.
    """

    def __init__(self, call: Call, shapes: Sequence[tuple[Any, ...]], specs: Sequence[P], mesh: Mapping[str, int],
                 strict: bool) -> None:  # fmt: skip
        self.mesh, self.op = mesh, call.op
        op = call.op
        self.names = [self._names(axes, len(shape)) for axes, shape in zip(op.operands, shapes, strict=True)]
        self.size = size = {name: x for name, x in call.params if name in axes_of(op.results)}
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
        self.result_names = [self._names(axes, batch + len(axes.axes.split()) - 1) for axes in op.results]
        pools = {axes.axes for axes, shape in zip(op.operands, shapes, strict=True) if is_pool(axes, shape)}
        size["pool"] = 1
        for i, axes in enumerate(op.results):  # all batch entries add to the gradient of a pool
            if axes.axes in pools:
                names = self.result_names[i]
                self.result_names[i] = (*names[: batch - 1], "pool", *names[batch:])
        self.results = tuple(self._spec(names, [size[name] for name in names]) for names in self.result_names)

    def _names(self, x: Axes, ndim: int) -> tuple[str, ...]:
        """Names of axes; keys of which a device has a halo are split as the queries are."""
        near = self.op.halo.axis if self.op.halo else None
        return tuple("s_q" if name == near else name for name in axis_names(x, ndim))

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
        """True if there are more shards of heads than key heads, so that each device takes one of the key heads, all of
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
        """True if these shardings may stay as they are; only the sizes of the shards are known.

        Such shardings come from inside of a jax.shard_map over some of the axes, where the partitioner sees the rest.
        It gives an axis the same shards everywhere. It does not say how query heads and key heads would meet, over
        which devices to sum, or who has the keys of a halo.
        """
        everywhere = set.intersection(*map(set, self.result_names))
        for x, names in zip((*arguments, *results), (*self.names, *self.result_names), strict=True):
            for name, n, local in zip(names, x.shape, x.sharding.shard_shape(x.shape), strict=True):
                alone = name in everywhere and not (name == "h_q" and self.h_kv != 1)
                if n != local and (not alone or (name == "s_q" and self.op.halo)):
                    return False
        return True

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
        near = self._near_keys()
        if near is not None:
            operands = tuple(map(near.given, self.op.operands, operands, self.names))
        results = []
        for axes, x, names in zip(self.op.results, self._in_balance(op, operands), self.result_names, strict=True):
            x = x if near is None else near.made(axes, x, names)
            has = {"h_q" if name == "h_kv" and not self._one_of_h_kv else name for name in names}
            if picks and "h_kv" in names:
                axis = names.index("h_kv")
                whole = jnp.zeros((*x.shape[:axis], self.h_kv, *x.shape[axis + 1 :]), x.dtype)
                x = lax.dynamic_update_slice_in_dim(whole, x, head, axis)
            lacks = tuple(a for name, over in self.split.items() if name not in has for a in over)
            results.append(psum(x, lacks, math.prod(self.mesh.values())) if lacks else x)
        return tuple(results)

    def _in_balance(self, op: Callable[..., Arrays], operands: Arrays) -> Arrays:
        """`op` on a device's queries. In a long triangle each pair of devices, the first and the last and so on, has
        the earlier half of its queries computed by the other one, so all have as much to do.
        """
        mesh_axes, size = self.split.get("s_q"), self.size
        if self.op.triangle is None or mesh_axes is None:
            return op(*operands)
        queries, keys = size["s_q"], size[self.op.triangle]
        shards = math.prod(self.mesh[a] for a in mesh_axes)
        is_whole = isinstance(queries, int) and isinstance(keys, int) and queries >= keys  # not a chunk after others
        if shards == 1 or not is_whole or keys < LONG_TRIANGLE or queries // shards % 2:
            return op(*operands)
        axes = [names.index("s_q") if "s_q" in names else None for names in self.names]
        halves = [(x, x) if i is None else jnp.split(x, 2, i) for x, i in zip(operands, axes, strict=True)]
        mirrored = functools.partial(neighbours.mirrored, mesh_axes=mesh_axes, shards=shards)
        given = [x if i is None else mirrored(x) for (x, _), i in zip(halves, axes, strict=True)]
        own, others = op(*(x for _, x in halves)), op(*given)  # the later ones take longer, and hide what is sent
        joined = zip(map(mirrored, others), own, self.result_names, strict=True)
        return tuple(jnp.concatenate([x, y], names.index("s_q")) for x, y, names in joined)

    def _near_keys(self) -> "_NearKeys | None":
        mesh_axes = self.split.get("s_q")
        if self.op.halo is None or mesh_axes is None:
            return None
        shards = math.prod(self.mesh[a] for a in mesh_axes)
        return _NearKeys(self.op.halo, mesh_axes, shards, self.size["s_q"] // shards)


class _NearKeys(NamedTuple):
    """The keys of a halo on one device: its own and those before them."""

    halo: Halo
    mesh_axes: tuple[str, ...]
    shards: int
    own: int
    """keys of a device"""

    def given(self, axes: Axes, x: jax.Array, names: Sequence[str]) -> jax.Array:
        """An operand: keys with those before them, and what counts keys counting from the first of these."""
        if self.halo.axis in axes.axes.split():
            return neighbours.with_halo(x, names.index("s_q"), self.halo.reach, self.mesh_axes, self.shards)
        if axes.name not in self.halo.bounds:
            return x
        more = neighbours.halo(self.own, self.halo.reach, self.shards)
        return jnp.clip(x - lax.axis_index(self.mesh_axes) * self.own + more, 0, more + self.own)

    def made(self, axes: Axes, x: jax.Array, names: Sequence[str]) -> jax.Array:
        """A result: a gradient of such keys, summed where the keys are."""
        if self.halo.axis not in axes.axes.split():
            return x
        of = (names.index("s_q"), self.halo.reach, self.mesh_axes, self.shards, self.own)
        return neighbours.without_halo(x, *of)


def _explicit_layout(call: Call, operands: Sequence[jax.Array], mesh: Any) -> _Layout:
    specs = [jax.typeof(x).sharding.spec for x in operands]
    return _Layout(call, [x.shape for x in operands], specs, mesh.shape, strict=True)


def _partitioned(call: Call, *operands: jax.Array) -> Arrays:
    """The op where XLA's partitioner decides, and then asks what a device computes."""
    shapes = [x.shape for x in operands]

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        if mesh.empty and whole_layout.passes(arguments, results):
            return mesh, alone, *(tuple(x.sharding for x in xs) for xs in (results, arguments))
        specs = tuple(getattr(x.sharding, "spec", P()) for x in arguments)
        layout, of_device = _of_device(call, tuple(shapes), specs, mesh)

        def on(specs: Any) -> Any:
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, of_device, on(layout.results), on(layout.operands)

    alone = functools.partial(folded, call)
    run = custom_partitioning(alone)
    whole_layout = _Layout(call, shapes, [P()] * len(shapes), {}, strict=False)
    rule, whole = _sharding_rule(whole_layout, shapes)
    run.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)
    results: Arrays = run(*operands)
    return results


@functools.lru_cache(maxsize=1024)
def _of_device(
    call: Call, shapes: tuple[tuple[Any, ...], ...], specs: tuple[P, ...], mesh: Any
) -> tuple[_Layout, Callable[..., Arrays]]:
    """The split of a call over a mesh, and what a device computes: the same function for alike calls, as in the layers
    of a model, so that JAX traces it once. The partitioner asks for each of them.
    """
    layout = _Layout(call, shapes, specs, mesh.shape, strict=False)
    return layout, jax.jit(functools.partial(layout.run, functools.partial(folded, call)))


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


def aligned(call: Call, operands: Arrays) -> Arrays:
    """The operands, placed as the op needs them, so that autodiff sees how they got there and transposes it."""
    operands = vary(operands, varying(operands))
    mesh = mesh_of(operands)
    if _explicit_axes(mesh):
        operands = _resharded(operands, mesh, _explicit_layout(call, operands, mesh).operands)
    return operands
