"""Sums over devices: a kernel's, where arrays are small and all devices are this process's, or XLA's collective."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from .._host import all_reduce as raw
from .._host import library
from .lowering import choose, lowered
from .manual_axes import varying
from .op import Arrays, Axes, Call, KernelUse, Op
from .support import Support


def psum(x: jax.Array, axes: Sequence[str], devices: int) -> jax.Array:
    """The sum of x over these axes of a mesh that has so many devices.

    A kernel takes bfloat16 up to a MiB, in multiples of 8 bytes, where the axes are all of the mesh, and its devices
    reach each other's memory. It has no gradient.
    """
    n, archs = lax.axis_size(tuple(axes)), library.shipped_for("all_reduce", dtype=x.dtype.name)
    is_small = isinstance(x.size, int) and 0 < x.nbytes <= raw.MOST_BYTES and x.nbytes % raw.LINE == 0
    is_here = n == devices and 2 <= n <= min(raw.exchanging_devices(), raw.MOST_DEVICES) and jax.process_count() == 1
    support = Support(x.dtype.name, ("all_reduce",), archs)
    use = choose("psum", None, support)
    if not (is_small and is_here and use == KernelUse.ON_CUDA) or varying((x,)):
        return lax.psum(x, tuple(axes))
    (y,) = lowered(Call(_OP, use, (("axes", tuple(axes)),), support), x)
    return y


def _sum(x: jax.Array, *, axes: Any) -> Arrays:
    return (lax.psum(x, axes),)


def _kernel(x: jax.Array, *, axes: Any) -> Arrays:
    return (raw.all_reduce(x.reshape(-1), devices=lax.axis_size(axes)).reshape(x.shape),)


_OP = Op("psum", (Axes("x", "b n"),), (Axes("y", "b n"),), _sum, _kernel, is_mapped=False)
