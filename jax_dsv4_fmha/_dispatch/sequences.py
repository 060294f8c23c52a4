"""Arrays whose sequence a mesh may shard: gathered, or moved by a place. Their values do not depend on the mesh."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._definitions import explicit_axes
from .._definitions.packed import LAYOUTS, codes_of
from . import neighbours
from .op import Arrays
from .sharding import mesh_of, on_explicit_axes


def whole_sequences(x: jax.Array) -> jax.Array:
    """x `[b, s, …]` with all of s on every device that has some of it.

    Over Auto axes XLA decides, so it is asked for this: otherwise it moves what is made of x, piece by piece.
    """
    spec = explicit_axes.entries(x)
    if spec[1] is not None:
        return _placed(spec, (spec[0], None, *spec[2:]), x)
    return _gathered(1, x) if _has_auto_axes_alone(x) else x


def rounded_sequences(x: jax.Array, layout: str) -> jax.Array:
    """`whole_sequences` of x, rounded as `packed.rounded` does, with its gradient; devices send codes and scales."""
    return _rounded(layout, explicit_axes.entries(x), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded(layout: str, given: tuple[Any, ...], x: jax.Array) -> jax.Array:
    codes, scales = codes_of(x, layout)
    both = whole_sequences(jnp.concatenate([codes, scales], -1))
    codes, scales = jnp.split(both, [codes.shape[-1]], -1)
    return LAYOUTS[layout].decode_groups(codes, scales).reshape(x.shape).astype(x.dtype)


def _rounded_backward(layout: str, given: tuple[Any, ...], _: None, dy: jax.Array) -> tuple[jax.Array]:
    return (whole_sequences(dy) if given[1] is None else explicit_axes.placed(dy, *given),)


_rounded.defvjp(lambda layout, given, x: (_rounded(layout, given, x), None), _rounded_backward)


def previous(*xs: jax.Array) -> Arrays:
    """Arrays `[b, n, …]` of one shape, each row in the place of the next one and zeros in the first. Devices that share
    n send one row of each array, and nothing else.
    """
    return _moved(1, 1, *xs)


def before(reach: int, *xs: jax.Array) -> Arrays:
    """`[b, n, 2, reach, …]`: the rows before each chunk of arrays `[b, n, 2, m, …]` of one shape, the first has zeros.

    Of a sequence's chunks i of n has chunk i and chunk 2 n - 1 - i. Devices that share n send these rows, nothing else.
    """
    n, m = xs[0].shape[1], xs[0].shape[3]
    edges = [lax.slice_in_dim(x, m - reach, m, axis=3) for x in xs]
    early, late = ([lax.index_in_dim(x, i, 2, keepdims=False) for x in edges] for i in range(2))
    found = []
    for own, first, second in zip(early, _moved(1, 1, *early), _moved(1, -1, *late), strict=True):
        is_last = jnp.arange(n).reshape(1, n, *[1] * (own.ndim - 2)) == n - 1  # whose second chunk is after its first
        found.append(jnp.stack([first, jnp.where(is_last, own, second)], 2))
    return tuple(found)


def _has_auto_axes_alone(x: jax.Array) -> bool:
    return set(mesh_of([x]).axis_types) <= {AxisType.Auto}


def _spec(x: Any, mesh: Any) -> list[tuple[str, ...] | None]:
    """The mesh axes that shard each axis of what the partitioner gives; None where no whole ones do.

    XLA may shard blocks of tokens over a part of a mesh axis that shards the tokens, which JAX cannot read: so it is
    asked for no names, and they are found from what each device has.
    """
    parts = x.sharding.devices_indices_map(x.shape)
    whole = x.sharding.shard_shape(x.shape)
    return [
        _axes_of(mesh, np.vectorize(lambda device, i=i: parts[device][i].start or 0)(mesh.devices) // max(whole[i], 1))
        for i in range(len(x.shape))
    ]


def _axes_of(mesh: Any, part: np.ndarray[Any, Any]) -> tuple[str, ...] | None:
    """The mesh axes over which an axis is split, if this says which part each device has."""
    axes = [i for i in range(part.ndim) if (part != part.take([0], i)).any()]
    for order in itertools.permutations(axes):
        number = functools.reduce(lambda n, i: n * part.shape[i] + np.indices(part.shape)[i], order, 0)
        if (part == number).all():
            return tuple(mesh.axis_names[i] for i in order)
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _placed(given: tuple[Any, ...], wanted: tuple[Any, ...], x: jax.Array) -> jax.Array:
    """x, sharded over Explicit axes as given, sharded as wanted."""
    return neighbours.as_bits(lambda x: explicit_axes.placed(x, *wanted), x)


_placed.defvjp(
    lambda given, wanted, x: (_placed(given, wanted, x), None),
    lambda given, wanted, _, dy: (explicit_axes.placed(dy, *given),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axis: int, x: jax.Array) -> jax.Array:
    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        entries = _spec(arguments[0], mesh)
        entries[axis] = None
        where = NamedSharding(mesh, P(*entries))
        return mesh, lambda x: x, where, (where,)

    @custom_vmap
    def run(x: jax.Array) -> jax.Array:
        given, made = ([f"a{i}" if i != axis else name for i in range(x.ndim)] for name in ("given", "made"))
        rule = f"{' '.join(given)} -> {' '.join(made)}"  # two names, or XLA would shard the result as x is
        gather = custom_partitioning(lambda x: x)
        gather.def_partition(
            partition, decode_shardings=False, sharding_rule=rule, need_replication_factors=("given", "made")
        )
        return neighbours.as_bits(gather, x)

    @run.def_vmap
    def _(_: int, __: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        return _gathered(axis + 1, x), True

    whole: jax.Array = run(x)
    return whole


_gathered.defvjp(lambda axis, x: (_gathered(axis, x), None), lambda axis, _, dy: (_gathered(axis, dy),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(axis: int, by: int, *xs: jax.Array) -> Arrays:
    """The rows along an axis moved one place forward (by 1) or back (by -1)."""

    @custom_vmap
    def run(*xs: jax.Array) -> Arrays:
        return _moved_on_mesh(axis, by, *xs)

    @run.def_vmap
    def _(n: int, mapped: Sequence[bool], *xs: jax.Array) -> tuple[Arrays, tuple[bool, ...]]:
        alike = [
            x if is_mapped else jnp.broadcast_to(x, (n, *x.shape)) for x, is_mapped in zip(xs, mapped, strict=True)
        ]
        return _moved(axis + 1, by, *alike), (True,) * len(xs)

    moved: Arrays = run(*xs)
    return moved


_moved.defvjp(lambda axis, by, *xs: (_moved(axis, by, *xs), None), lambda axis, by, _, dys: _moved(axis, -by, *dys))


def _moved_on_mesh(axis: int, by: int, *xs: jax.Array) -> Arrays:
    first = xs[0]
    plain = functools.partial(_moved_on_device, axis, by)
    spec = explicit_axes.entries(first)
    if mesh_axes := explicit_axes.names(spec[axis]):
        mesh = mesh_of(xs)
        run = functools.partial(plain, mesh_axes=mesh_axes, shards=math.prod(mesh.shape[a] for a in mesh_axes))
        where = (P(*spec),) * len(xs)
        return on_explicit_axes(lambda *xs, is_partial: run(*xs), mesh, where, where, xs)
    if not _has_auto_axes_alone(first):
        return plain(*xs)
    moved: Arrays = _partitioned(plain, axis, len(xs), first.ndim)(*xs)
    return moved


def _partitioned(move: Callable[..., Arrays], axis: int, count: int, ndim: int) -> Callable[..., Arrays]:
    """`move` of so many arrays along an axis that XLA's partitioner may split. An equation keeps its functions, so none
    of them may know an array.
    """

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        spec = _spec(arguments[0], mesh)
        mesh_axes = spec[axis] or ()
        where = (NamedSharding(mesh, P(*spec)),) * count
        shards = math.prod(mesh.shape[a] for a in mesh_axes)
        return mesh, functools.partial(move, mesh_axes=mesh_axes, shards=shards), where, where

    op: Any = custom_partitioning(lambda *xs: move(*xs))
    terms = ", ".join([" ".join(f"a{i}" for i in range(ndim))] * count)
    op.def_partition(partition, decode_shardings=False, sharding_rule=f"{terms} -> {terms}")
    run: Callable[..., Arrays] = op
    return run


def _moved_on_device(axis: int, by: int, *xs: jax.Array, mesh_axes: tuple[str, ...] = (), shards: int = 1) -> Arrays:
    """`_moved` on one of the devices that share the axis."""
    n = xs[0].shape[axis]
    if n == 0:
        return xs
    edge, rest = ((n - 1, n), (0, n - 1)) if by > 0 else ((0, 1), (1, n))
    edges = jnp.stack([lax.slice_in_dim(x, *edge, axis=axis) for x in xs])  # which travel together
    edges = neighbours.sent(edges, by, mesh_axes, shards) if shards > 1 else jnp.zeros_like(edges)

    def joined(x: jax.Array, edge: jax.Array) -> jax.Array:
        parts = (edge, lax.slice_in_dim(x, *rest, axis=axis))
        return lax.concatenate(parts[::by], axis)

    return tuple(map(joined, xs, edges))
