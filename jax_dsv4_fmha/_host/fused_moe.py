"""The raw call of a layer's experts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import library
from .call import call

MOST_EXPERTS = 1024
"""that the kernels take"""
LEAST_TILE = min(v.choices["max_rows"] for v in library.SHIPPED if v.op == "grouped_product")
"""rows of a tile of the kernel that has the fewest"""


def fused_moe(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    w13: jax.Array,
    factor13: jax.Array,
    w2: jax.Array,
    factor2: jax.Array,
    *,
    inner: int,
    limit: float,
    format: str,
    num_experts: int,
) -> tuple[jax.Array, jax.Array]:
    """The results of each chosen expert for its tokens: `[rows, k]` in x's dtype, rows by expert; and int32 `[b, s_q,
    n_chosen]`, the row of each choice, -1 where its expert is not below `groups`.

    Args:
      x: `[b, s_q, k]`, bfloat16.
      chosen: int32 `[b, s_q, n_chosen]`, any numbers.
      weights: float32 `[b, s_q, n_chosen]`, that the channels inside of an expert are multiplied by.
      w13, w2: uint8 `[groups, tiles, slabs, slab_bytes]`, as `_definitions.experts` lays matrices out; or bfloat16
        `[groups, 2, inner, k]` and `[groups, k, inner]`.
      factor13, factor2: float32 `[groups]`, that packed matrices are multiplied by; `[0]` for others.
      inner: channels inside of an expert. It and k are multiples of 256.
      limit: of a gate, and of the size of what it lets through.
      format: "mxfp4", "e4m3" or "bfloat16".
      num_experts: among which tokens chose, of all devices: so many rows as one of them has on average, twice, fit into
        a tile of the kernel.
    """
    rows, groups = chosen.size, w13.shape[0]
    results = (
        jax.ShapeDtypeStruct((rows, x.shape[2]), x.dtype),
        jax.ShapeDtypeStruct(chosen.shape, jnp.int32),
        jax.ShapeDtypeStruct((rows, inner), x.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((groups + rows // LEAST_TILE, 4), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    operands = (x, chosen, weights, w13, factor13, w2, factor2)
    params: dict[str, Any] = {"limit": np.float32(limit), "format": format, "num_experts": np.int64(num_experts)}
    y, places, *_ = call("fused_moe", results, *operands, **params)
    return y, places
