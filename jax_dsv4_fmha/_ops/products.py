"""What products of e4m3 are refused for, by every op that takes them."""

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions.e4m3 import BF16_ROPE, PRODUCTS, ROPE


def check_products(op: str, products: str | None, q: jax.Array, batch_invariant: bool) -> None:
    _check.one_of(op, "products", products, (None, *PRODUCTS))
    if products is None:
        return
    if q.dtype != jnp.bfloat16:
        raise _check.error(ValueError, op, "q", q, f"bfloat16 with products={products!r}")
    if products == BF16_ROPE and isinstance(q.shape[-1], int) and q.shape[-1] <= ROPE:
        wanted = f"d > {ROPE}, of which the last {ROPE} are RoPE's, with products={products!r}"
        raise _check.error(ValueError, op, "q", q, wanted)
    if batch_invariant:
        raise _check.error(ValueError, op, "products", products, "None with batch_invariant=True")
