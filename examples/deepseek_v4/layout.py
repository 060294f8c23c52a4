"""The places of tokens and parameters on a mesh with axes "data", "context", "tensor" and "expert".

In inference all devices but those of "data" have the same tokens, and share out heads and experts. Of a long chunk they
share out tokens, too, between sublayers (devices.py).

In training all devices but those of "tensor" have other tokens: "data" and "expert" share out sequences, "context" the
tokens of each. What has many parameters for a token's work stays where it is, and tokens travel to it within a group,
the devices of "context" and "expert": the embedding, experts, and the head. All others, attention's matrices above all,
are stored in parts, and gathered in the dtype of products where a layer needs them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SPLIT = ("tensor", "expert")
"""the mesh axes that share out heads, channels of the shared expert, and the vocabulary in inference"""
GROUP = ("context", "expert")
"""those of a group in training"""
SEQUENCES = ("data", "expert")
"""those that share out sequences in training"""
REST = (*SEQUENCES, "context")
"""those that share out tokens in training, and what is stored of parameters"""
TOKENS = P(SEQUENCES, "context")
"""of tokens `[b, s, …]` in training"""
ALL = ("tensor", *GROUP)
"""those that share out channels of the shared expert and the vocabulary in training"""
GATHERED = "gathered_tokens"
"""the name, for policies, of tokens that a device has from its group"""


def sequences(mesh: Mesh, b: int) -> NamedSharding:
    """The place of a batch of b sequences `[b, s]` in training: whole on every device of "context".

    Raises:
      ValueError: devices would have different numbers of them.
    """
    if b % (n := _size(mesh, SEQUENCES)):
        raise ValueError(f"b: got {b}, wanted a multiple of {n}, over which data and expert share it out")
    return NamedSharding(mesh, P(SEQUENCES))


def checked(specs: Any, shapes: Any, mesh: Mesh) -> None:
    """Raises ValueError if devices cannot share out an axis of a parameter equally."""

    def check(path: Any, spec: P, x: jax.ShapeDtypeStruct) -> None:
        for n, names in zip(x.shape, map(_names, spec), strict=False):
            if n % (parts := _size(mesh, names)):
                name, over = jax.tree_util.keystr(path, simple=True, separator="/"), " and ".join(names)
                raise ValueError(f"{name}: got an axis of {n}, wanted a multiple of {parts}: {over} share it out")

    jax.tree_util.tree_map_with_path(check, specs, shapes, is_leaf=lambda x: isinstance(x, P))


def rows_of(x: jax.Array, is_trained: bool) -> P:
    """Returns the axes of the mesh that share out x `[b, s, …]`: those whose devices then have equally much."""
    mesh = jax.sharding.get_abstract_mesh()
    choices = (SEQUENCES, "data") if is_trained else ("data",)
    of_b = next((axes for axes in choices if x.shape[0] % _size(mesh, _names(axes)) == 0), None)
    return P(of_b, "context" if x.shape[1] % mesh.shape["context"] == 0 else None)


def within(rows: P) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of ALL over which devices have other rows of tokens, and those over which they have the same."""
    names = sum(map(_names, rows), ())
    return tuple(axis for axis in ALL if axis in names), tuple(axis for axis in ALL if axis not in names)


def stored(spec: P, x: Any) -> P:
    """The place in a state of training of what products have as `spec`: over what that does not name of REST, too,
    along the first axis that has room for it. Along the first axis of all nothing is moved within a device.
    """
    mesh, axes = jax.sharding.get_abstract_mesh(), [_names(entry) for entry in spec]
    axes += [()] * (x.ndim - len(axes))
    rest = tuple(axis for axis in REST if axis not in sum(axes, ()))
    for n in range(x.ndim if x.ndim > 1 and rest else 0):
        if x.shape[n] % _size(mesh, axes[n] + rest) == 0:
            axes[n] += rest
            break
    return P(*(names or None for names in axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(dtype: Any, spec: P, x: jax.Array) -> jax.Array:
    """x, which lies as `stored` says, in a dtype and as `spec` says. Its gradient is summed in that dtype, and each
    device gets its part of the sum.
    """
    mine = jax.lax.with_sharding_constraint(x.astype(dtype), stored(spec, x))  # or XLA would gather x
    return jax.lax.with_sharding_constraint(mine, spec)


def _gathered_back(dtype: Any, spec: P, like: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(dy, stored(spec, dy)).astype(like.dtype),)


gathered.defvjp(lambda dtype, spec, x: (gathered(dtype, spec, x), jnp.zeros(0, x.dtype)), _gathered_back)


def gather(rows: Any, axes: tuple[str, ...] = GROUP, of: int = 0) -> Any:
    """In `jax.shard_map`: arrays of the rows of all devices along axes; `of`: the axis of an array that has rows."""
    if not (several := _several(axes)):
        return rows
    return checkpoint_name(jax.lax.all_gather(rows, several, axis=of, tiled=True), GATHERED)


def scatter(rows: jax.Array, axes: tuple[str, ...] = GROUP, of: int = 0) -> jax.Array:
    """In `jax.shard_map`: sums the devices' arrays along axes, and gives each device its own rows of the sum."""
    if not (several := _several(axes)):
        return rows
    return jax.lax.psum_scatter(rows, several, scatter_dimension=of, tiled=True)


def looked_up(embed: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows `[b, s, hidden]` of tokens, which lie as TOKENS says: a device has some columns for its group. A
    device sums a row's gradient over its tokens in float32: a token may be a tenth of them.
    """

    def of_own(embed: jax.Array, tokens: jax.Array) -> jax.Array:
        embed = jax.lax.pcast(embed, "data", to="varying")
        y = embed.astype(jnp.float32)[gather(tokens)].astype(embed.dtype)
        return jax.lax.all_to_all(y, axes, 0, 2, tiled=True) if (axes := _several(GROUP)) else y

    return jax.shard_map(of_own, in_specs=(P(None, GROUP), TOKENS), out_specs=TOKENS)(embed, tokens)


def _several(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)  # XLA does not leave out what moves nothing


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _size(mesh: Any, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)
