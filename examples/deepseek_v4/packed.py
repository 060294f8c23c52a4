"""Matrices as a checkpoint has them, in 4 or 8 bits with a scale for each block: in a device's memory, too."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import PackedMatrix

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""what 3 bits of e2m1 stand for; the fourth is the sign"""

TILE, BLOCK = 64, 128
"""rows and columns of a `PackedMatrix` that lie together, and those that share a scale"""


def unpacked(codes: jax.Array, scales: jax.Array | None, axes: tuple[int, ...], dtype: Any) -> jax.Array:
    """Codes `[…, rows, columns]` times their scales `[…, rows, blocks]`, with axes in the model's order."""
    x = codes
    if x.dtype == jnp.uint8:  # two of e2m1
        x = jnp.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1)
        x = jnp.array((*FP4, *(-v for v in FP4)), jnp.float32)[x]
    if scales is not None:
        x = x.astype(jnp.float32).reshape(*scales.shape, -1) * scales.astype(jnp.float32)[..., None]
        x = x.reshape(*x.shape[:-2], -1)
    return x.astype(dtype).transpose(axes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["axes"])
@dataclass(frozen=True)
class Packed:
    """Matrices `[…, rows, columns]` of a checkpoint. One of them is `jax.tree.map(lambda x: x[i], packed)`."""

    codes: jax.Array
    """uint8, two of e2m1, the first in the lower bits; or e4m3"""
    scales: jax.Array
    """`[…, rows, blocks]`"""
    axes: tuple[int, ...]
    """where the model has these axes: its axis i is axis `axes[i]`"""

    def unpacked(self, dtype: Any) -> jax.Array:
        gone = len(self.axes) - self.codes.ndim  # leading axes, which stand first in the model, too
        return unpacked(self.codes, self.scales, tuple(axis - gone for axis in self.axes[gone:]), dtype)


def in_file(spec: P, axes: tuple[int, ...]) -> P:
    """The PartitionSpec of a checkpoint's tensors whose axes, in the model's order, have this one."""
    padded = (*spec, *[None] * (len(axes) - len(spec)))
    return P(*(padded[axes.index(axis)] for axis in range(len(axes))))


def of_data(spec: P, dims: int) -> P:
    """The PartitionSpec of a `PackedMatrix`'s data of so many axes, where the model's matrix has this one: its columns
    are the first axis, and its rows the last, of each of several with an axis between.
    """
    padded = (*spec, *[None] * (dims - 1 - len(spec)))
    return P(*[None] * (dims - 3), padded[-1], padded[0])


def one_matrix(w: Any) -> Any:
    """A matrix `[columns, rows]`, or several side by side: the model's `[columns, several, rows]`. A packed one
    is the part that a device has.
    """
    if not isinstance(w, PackedMatrix):
        return w.reshape(len(w), -1)
    *_, slabs, size = w.data.shape
    data = w.data.reshape(-1, slabs, size)
    rows, columns = TILE * len(data), TILE * slabs
    return PackedMatrix(data, rows, columns, (columns, rows))


def product(x: jax.Array, w: Any) -> jax.Array:
    """x times `one_matrix`, with a gradient in x."""
    return x @ (w.unpacked(x.dtype) if isinstance(w, PackedMatrix) else w)


def is_packed(x: Any) -> bool:
    return isinstance(x, Packed | PackedMatrix)


def whole(params: Any, dtype: Any) -> Any:
    """The same parameters, with unpacked ones in dtype."""
    return jax.tree.map(lambda x: x.unpacked(dtype) if is_packed(x) else x, params, is_leaf=is_packed)
