"""jax.vmap of an op."""

from collections.abc import Sequence

import jax
from jax.custom_batching import custom_vmap

from .op import Arrays, Call
from .sharding import sharded


def batched(call: Call, *operands: jax.Array) -> Arrays:
    @custom_vmap
    def run(*operands: jax.Array) -> Arrays:
        return sharded(call, *operands)

    @run.def_vmap
    def _(_: int, mapped: Sequence[bool], *operands: jax.Array) -> tuple[Arrays, tuple[bool, ...]]:
        operands = tuple(x if is_mapped else x[None] for x, is_mapped in zip(operands, mapped, strict=True))
        return batched(call, *operands), (True,) * len(call.op.results)

    results: Arrays = run(*operands)
    return results
