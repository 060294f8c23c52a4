"""jax.vmap of an op."""

import functools
from collections.abc import Sequence

import jax
from jax.custom_batching import custom_vmap

from .. import _check
from .op import Arrays, Call
from .sharding import sharded


def batched(call: Call, *operands: jax.Array) -> Arrays:
    @custom_vmap
    def run(*operands: jax.Array) -> Arrays:
        return sharded(call, *operands)

    @run.def_vmap
    def _(_: int, mapped: Sequence[bool], *operands: jax.Array) -> tuple[Arrays, tuple[bool, ...]]:
        if not call.op.is_mapped:
            if call.use.is_insisted:
                option, value = call.insisted_by
                wanted = "None, or a call without jax.vmap"
                raise _check.error(NotImplementedError, call.op.name, option, f"{value} under jax.vmap", wanted)
            axes = [0 if is_mapped else None for is_mapped in mapped]
            results = jax.vmap(functools.partial(call.op.reference, **dict(call.params)), axes)(*operands)
            return results, (True,) * len(call.op.results)
        operands = tuple(x if is_mapped else x[None] for x, is_mapped in zip(operands, mapped, strict=True))
        return batched(call, *operands), (True,) * len(call.op.results)

    results: Arrays = run(*operands)
    return results
