"""Explicit axes of meshes: an array's type says what they shard. On other meshes nothing here does anything."""

import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _check

T = TypeVar("T")

Entry = str | tuple[str, ...] | None
"""The mesh axes that shard an axis of an array, as a PartitionSpec has them"""


def entries(x: Any) -> tuple[Entry, ...]:
    """The mesh axes that shard each axis of an array, or of what JAX takes for one."""
    return tuple(jax.typeof(x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x)).sharding.spec)


def names(entry: Entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def described(name: str, entry: Entry) -> str:
    """An axis and what shards it, for errors."""
    return f"{name} sharded over {', '.join(names(entry))}"


def placed(x: jax.Array, *wanted: Entry, of: jax.Array | None = None) -> jax.Array:
    """x with its axes sharded as wanted, over the mesh of x, or that of another array."""
    if entries(x) == wanted:
        return x
    return _moved(x, x if of is None else of, *wanted)


def _moved(x: jax.Array, of: jax.Array, *wanted: Entry) -> jax.Array:
    there = getattr(of, "sharding", None)
    if isinstance(x, jax.core.Tracer) or not isinstance(there, NamedSharding):
        return jax.sharding.reshard(x, sharding(of, *wanted))
    # outside of jit, where reshard wants jax.set_mesh for an array of one device
    return jax.device_put(x, NamedSharding(there.mesh, P(*wanted)))


def on_mesh(xs: T, of: jax.Array) -> T:
    """These arrays. One that is on no mesh is put whole onto every device of another array's mesh, if that is Explicit.

    Its gradient is whole there, too. JAX does not know how to shard the gradient of an array that is on no mesh.
    """
    if AxisType.Explicit not in jax.typeof(of).sharding.mesh.axis_types:
        return xs

    def moved(x: Any) -> Any:
        return _moved(x, of, *[None] * x.ndim) if jax.typeof(x).sharding.mesh.empty else x

    found: T = jax.tree.map(moved, xs)
    return found


def like(x: jax.Array, other: jax.Array) -> jax.Array:
    """x with its axes sharded as the first axes of another array."""
    return placed(x, *entries(other)[: x.ndim], of=other)


def sharding(of: jax.Array, *wanted: Entry) -> NamedSharding | None:
    """A sharding over the mesh of an array, by which JAX needs no jax.set_mesh; None if there are no Explicit axes."""
    mesh = jax.typeof(of).sharding.mesh
    return None if mesh.empty else NamedSharding(mesh, P(*wanted))


def whole(x: jax.Array, *axes: int) -> jax.Array:
    """x with all of these axes on every device that has some of it."""
    return placed(x, *(None if i in axes else entry for i, entry in enumerate(entries(x))))


@functools.partial(jax.jit, inline=True)
def taken(x: jax.Array, at: jax.Array) -> jax.Array:
    """The numbers of x `[b, n]` at the places `at [b, m]` of each row, on the devices that have the places.

    It is jitted because JAX outside of jit wants `jax.set_mesh` where Explicit axes shard an array.
    """
    take = functools.partial(jnp.take_along_axis, axis=1, mode="clip")
    batch, places = entries(at)
    if places is None:
        return take(x, at)
    with jax.sharding.use_abstract_mesh(jax.typeof(at).sharding.mesh):  # JAX finds no sharding for the result itself
        on_device = jax.shard_map(take, in_specs=(P(batch), P(batch, places)), out_specs=P(batch, places))
        return on_device(placed(x, batch, None, of=at), at)


def without_single(xs: Any) -> Any:
    """A tree of arrays that no mesh axis of size 1 shards. Such a mesh axis splits nothing, but on an array's axis of
    size 1 JAX loses it where it broadcasts, and then does not find operands sharded alike.
    """

    def kept(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        sizes = jax.typeof(x).sharding.mesh.shape
        some = [tuple(name for name in names(entry) if sizes[name] > 1) for entry in entries(x)]
        return placed(x, *((axes if len(axes) > 1 else axes[0]) if axes else None for axes in some))

    return jax.tree.map(kept, xs)


def divide(x: jax.Array, axis: int, size: int) -> bool:
    """True if every shard of an axis has whole groups of that size, or if there is one shard alone."""
    mesh = jax.typeof(x).sharding.mesh
    shards = math.prod(mesh.shape[name] for name in names(entries(x)[axis]))
    return shards == 1 or x.shape[axis] % (shards * size) == 0


def with_one_batch(op: str, **xs: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays `[b, …]` with b sharded alike: as in the first array that shards it.

    Raises:
      ValueError: two of the arrays shard b over different mesh axes, or one has another axis sharded over those of b.
    """
    first = next((x for x in xs.values() if entries(x)[0] is not None), None)
    if first is None:
        return tuple(xs.values())
    batch = entries(first)[0]
    for name, x in xs.items():
        own, *others = entries(x)
        if own not in (None, batch):
            raise _check.error(ValueError, op, name, described("b", own), described("b", batch))
        if any(set(names(other)) & set(names(batch)) for other in others):
            got, wanted = (
                f"it sharded as {P(*entries(x))}",
                f"other mesh axes than those of b, {', '.join(names(batch))}",
            )
            raise _check.error(ValueError, op, name, got, wanted)
    return tuple(placed(x, batch, *entries(x)[1:], of=first) for x in xs.values())
