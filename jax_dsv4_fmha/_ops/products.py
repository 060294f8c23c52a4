"""What products of e4m3 are refused for, by every op that takes them."""

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions.e4m3 import E4M3


def check_products(op: str, products: str | None, q: jax.Array, batch_invariant: bool) -> None:
    _check.one_of(op, "products", products, (None, E4M3))
    if products is None:
        return
    if q.dtype != jnp.bfloat16:
        raise _check.error(ValueError, op, "q", q, f"bfloat16 with products={products!r}")
    if batch_invariant:
        raise _check.error(ValueError, op, "products", products, "None with batch_invariant=True")
