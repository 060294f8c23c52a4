"""Raw calls of rotary position embedding."""

import jax
import jax.numpy as jnp
import numpy as np

from .call import call


def rope(x: jax.Array, table: jax.Array, *, direction: int) -> tuple[jax.Array]:
    """x `[b, s, h, d]`, bfloat16 or float16, with its last 64 numbers rotated, in pairs; in place, where XLA need not
    keep x.

    Args:
      table: float32 `[b, s, 64]`: cos and sin of each pair, by turns; direction: 1, or -1 to rotate back.
    """
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (y,) = call("rope", (result,), x, table, aliases={0: 0}, direction=np.float32(direction))
    return (y,)


def rope_hadamard(x: jax.Array, table: jax.Array, *, direction: int) -> tuple[jax.Array]:
    """`rope` of x `[b, s, h, 128]` and then the Hadamard transform; or, with direction -1, back."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (y,) = call("rope_hadamard", (result,), x, table, aliases={0: 0}, direction=np.float32(direction))
    return (y,)


def index_query(x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`rope_hadamard` of x `[b, s, h, 128]`, quantized: float8_e4m3fn like x, and a float32 scale `[b, s, h]` a row."""
    results = (jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(x.shape[:3], jnp.float32))
    codes, scales = call("index_query", results, x, table)
    return codes, scales


def norm_rope(x: jax.Array, table: jax.Array, *, eps: float) -> tuple[jax.Array]:
    """`rope` of x `[b, s, h, 512]` / sqrt(mean(x²) + eps), as a new array."""
    (y,) = call("norm_rope", (jax.ShapeDtypeStruct(x.shape, x.dtype),), x, table, eps=np.float32(eps))
    return (y,)


def norm_rope_bwd(x: jax.Array, table: jax.Array, dy: jax.Array, *, eps: float) -> tuple[jax.Array]:
    """The gradient of `norm_rope` in x, for the cotangent dy like x."""
    (dx,) = call("norm_rope_bwd", (jax.ShapeDtypeStruct(x.shape, x.dtype),), x, table, dy, eps=np.float32(eps))
    return (dx,)
