"""A layer of a step, or of a chunk of a prompt, as each device of a mesh computes it: all of it in one `jax.shard_map`.

With shardings alone XLA's partitioner asks for each op of each layer what a device computes, which is then traced and
lowered again: 639 times in a step of V4-Flash over two devices, two thirds of the time that XLA took to compile it.
Such a program has an address in its key, too, and no cache on disk serves it.

Between sublayers a device has its own tokens of a long chunk, and makes connections, norms and a router's choice of no
others. A sublayer then gathers what it is given, and scatters its sum: together as many bytes as a sum for all.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from jax_dsv4_fmha import PackedMatrix
from jax_dsv4_fmha.layers import DSV4Attention, step_psum

from .layout import scatter
from .packed import TILE

HEADS = {"wq_b": 1, "wo_a": 0, "wo_b": 0}
"""the axis of heads, or of groups of them, of attention's matrices"""

FEWEST = 128
"""tokens of a sequence on a device, or all devices have all tokens: sums of few are a kernel's (`step_psum`)"""


def is_on_each() -> bool:
    """Returns whether this is what one device computes: all axes of the mesh are a `jax.shard_map`'s."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and set(mesh.axis_types) == {AxisType.Manual}


def share(axes: Sequence[str]) -> bool:
    """Returns whether these axes, and no others, share out what several devices have, and XLA decides how."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return False
    return 1 < mesh.size == math.prod(mesh.shape[name] for name in axes)


def of_tokens(s: int, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes that share out s tokens of each sequence between sublayers: these, or none."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axes) if s % (FEWEST * math.prod(mesh.shape[name] for name in axes)) == 0 else ()


def summed(y: jax.Array, axes: Sequence[str], apart: tuple[str, ...]) -> jax.Array:
    """The sum `[b, s, …]` over axes of what devices made: of all tokens, or of a device's own where they are apart."""
    return scatter(y, apart, 1) if apart else step_psum(y, axes)


def own_heads(layer: DSV4Attention, params: Any, axes: Sequence[str]) -> tuple[DSV4Attention, Any]:
    """A layer with the heads of one device, which share them over these axes, and its parameters on the device."""
    n = jax.lax.axis_size(tuple(axes))
    few = dataclasses.replace(layer, heads=layer.heads // n, o_groups=layer.o_groups // n)
    return few, {**params, **{name: _own(params[name], axis, n) for name, axis in HEADS.items()}}


def _own(w: Any, axis: int, n: int) -> Any:
    """A matrix on a device that has one of n parts of an axis. A packed one's sizes were those of the whole matrix."""
    if not isinstance(w, PackedMatrix):
        return w
    *_, tiles, slabs, _ = w.data.shape
    shape = *w.shape[:axis], w.shape[axis] // n, *w.shape[axis + 1 :]
    return PackedMatrix(w.data, min(w.rows, TILE * tiles), min(w.columns, TILE * slabs), shape)
