"""Explicit axes of meshes: an array's type says which of its axes they shard. On other meshes nothing here does
anything.
"""

import math

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _check

Entry = str | tuple[str, ...] | None
"""The mesh axes that shard an axis of an array, as a PartitionSpec has them"""


def entries(x: jax.Array) -> tuple[Entry, ...]:
    """What shards each axis of x."""
    return tuple(jax.typeof(x).sharding.spec)


def names(entry: Entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def described(name: str, entry: Entry) -> str:
    """An axis and what shards it, for errors."""
    return f"{name} sharded over {', '.join(names(entry))}"


def placed(x: jax.Array, *wanted: Entry, of: jax.Array | None = None) -> jax.Array:
    """x with its axes sharded as wanted, over the mesh of x, or that of another array."""
    if entries(x) == wanted:
        return x
    return jax.sharding.reshard(x, sharding(x if of is None else of, *wanted))


def sharding(of: jax.Array, *wanted: Entry) -> NamedSharding | None:
    """A sharding over the mesh of an array, by which JAX needs no jax.set_mesh; None if there are no Explicit axes."""
    mesh = jax.typeof(of).sharding.mesh
    return None if mesh.empty else NamedSharding(mesh, P(*wanted))


def whole(x: jax.Array, *axes: int) -> jax.Array:
    """x with all of these axes on every device that has some of it."""
    return placed(x, *(None if i in axes else entry for i, entry in enumerate(entries(x))))


def divide(x: jax.Array, axis: int, size: int) -> bool:
    """Whether every shard of an axis has whole groups of that size."""
    mesh = jax.typeof(x).sharding.mesh
    shards = math.prod(mesh.shape[name] for name in names(entries(x)[axis]))
    return shards == 1 or x.shape[axis] % (shards * size) == 0


def together(op: str, axes: str, **xs: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays with their first axes, named as in "b s", sharded alike: as in the first array that shards the axis.
    An axis of size 1 stays whole.

    Raises:
      ValueError: two of the arrays shard such an axis over different mesh axes, or one mesh axis shards two of them.
    """
    split: dict[str, Entry] = {}
    of = None
    for name, x in xs.items():
        for axis, entry in zip(axes.split(), entries(x), strict=False):
            if entry is None:
                continue
            others = {a for other, found in split.items() if other != axis for a in names(found)}
            if split.setdefault(axis, entry) != entry:
                raise _check.error(ValueError, op, name, described(axis, entry), described(axis, split[axis]))
            if others & set(names(entry)):
                wanted = "mesh axes that no other axis is sharded over"
                raise _check.error(ValueError, op, name, described(axis, entry), wanted)
            of = x if of is None else of
    if of is None:
        return tuple(xs.values())

    def alike(x: jax.Array) -> jax.Array:
        first = [None if n == 1 else split.get(axis) for axis, n in zip(axes.split(), x.shape, strict=False)]
        return placed(x, *first, *entries(x)[len(first) :], of=of)

    return tuple(map(alike, xs.values()))
