"""The modes that options of an op ask for, and the options that they refuse."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions.e4m3 import BF16_ROPE, PRODUCTS, ROPE
from .._dispatch.modes import AttentionMode, CanonicalOrder, Fp8Products, Rotary


def ordered(batch_invariant: bool) -> list[AttentionMode]:
    """The mode of `batch_invariant`, which is checked."""
    return [CanonicalOrder()] if batch_invariant else []


def with_products(op: str, products: str | None, q: jax.Array, batch_invariant: bool) -> list[AttentionMode]:
    """The mode of `products`, if they are given."""
    _check.one_of(op, "products", products, (None, *PRODUCTS))
    if products is None:
        return []
    if q.dtype != jnp.bfloat16:
        raise _check.error(ValueError, op, "q", q, f"bfloat16 with products={products!r}")
    if products == BF16_ROPE and isinstance(q.shape[-1], int) and q.shape[-1] <= ROPE:
        wanted = f"d > {ROPE}, of which the last {ROPE} are RoPE's, with products={products!r}"
        raise _check.error(ValueError, op, "q", q, wanted)
    if batch_invariant:
        raise _check.error(ValueError, op, "products", products, "None with batch_invariant=True")
    return [Fp8Products(products)]


def rotary(op: str, rope_table: Any, norm_eps: Any, o_groups: Any, dims: Mapping[str, Any]) -> list[AttentionMode]:
    """The mode of `rope_table`, if it is given."""
    eps, table = None, None
    if rope_table is not None:
        eps = None if norm_eps is None else _check.number(op, "norm_eps", norm_eps, "a float > 0", lambda x: x > 0)
        table = _table(op, rope_table, dims)
    elif norm_eps is not None:
        raise _check.error(ValueError, op, "norm_eps", norm_eps, "None without a rope_table")
    if not isinstance(o_groups, int) or o_groups < 1 or dims["h_q"] % o_groups:
        raise _check.error(ValueError, op, "o_groups", o_groups, f"a divisor of h_q={dims['h_q']}")
    return [] if table is None else [Rotary(table, eps, dims["h_q"] // o_groups)]


def _table(op: str, x: Any, dims: Mapping[str, Any]) -> jax.Array:
    b, s_q, d = (dims[name] for name in ("b", "s_q", "d"))
    wanted = f"float32[b={b} or 1, s_q={s_q}, n], n even and at most {d}"

    def fits(x: Any) -> bool:
        shaped = x.dtype == jnp.float32 and x.ndim == 3 and x.shape[0] in (1, b) and x.shape[1] == s_q
        return bool(shaped and x.shape[2] % 2 == 0 and x.shape[2] <= d)

    return _check.array(op, "rope_table", x, wanted, fits)
