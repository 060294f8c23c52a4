"""A step's sums over devices."""

import math
from collections.abc import Sequence

import jax

from .. import _check
from .._dispatch.psum import psum


def step_psum(x: jax.Array, axis_name: str | Sequence[str]) -> jax.Array:
    """Sums x over mesh axes, as a step sums what its devices make: `lax.psum`, by a kernel where there is one.

    The kernel is a one-shot all-reduce: every device writes x into the memory of all others and sums what it gets, in
    float32 and in the order of the devices, so that all have the same bits. It is a custom call, so a CUDA graph holds
    it, where XLA's collectives break a step into many graphs. It takes bfloat16 up to a MiB, 8 bytes at a time, over
    all devices of a mesh, 2 to 8 GPUs of one process that reach each other's memory. Other sums are XLA's.

    Args:
      x: an array of any shape, in `jax.shard_map(…, check_vma=False)`; with check_vma, the sum is XLA's.
      axis_name: mesh axes to sum over.

    Returns:
      The sum, as x is. On a kernel it has no gradient.

    Raises:
      TypeError: x is no array.
      NameError: outside of `jax.shard_map`, or there is no such axis.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_dsv4_fmha.layers import step_psum
      >>> mesh = jax.make_mesh((1,), ("expert",))
      >>> both = lambda x: step_psum(x, "expert")
      >>> jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(jnp.ones(4)).tolist()
      [1.0, 1.0, 1.0, 1.0]
    """
    x = _check.array("step_psum", "x", x, "an array", lambda _: True)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    return psum(x, axes, math.prod(mesh.shape.values()))
