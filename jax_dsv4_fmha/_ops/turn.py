"""The norm of q's heads, RoPE, and RoPE back of o: operands of attention that ask for them, and passes of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions.rope import normed_and_turned, pairs_turned
from .._dispatch.attend import Turn
from .._dispatch.autodiff import constant
from .rope import normed_then_turned, turned


def checked_turn(
    op: str, rope_table: Any, norm_eps: Any, dims: Mapping[str, Any], implementation: _check.Implementation | None
) -> Turn | None:
    """What rope_table and norm_eps ask for, None if nothing. The reference alone has derivatives in the table."""
    if rope_table is None:
        if norm_eps is not None:
            raise _check.error(ValueError, op, "norm_eps", norm_eps, "None without a rope_table")
        return None
    eps = None if norm_eps is None else _check.number(op, "norm_eps", norm_eps, "a float > 0", lambda x: x > 0)
    table = _table(op, rope_table, dims)
    return Turn(table if implementation == "reference" else constant(table, op, "rope_table"), eps)


def _table(op: str, x: Any, dims: Mapping[str, Any]) -> jax.Array:
    b, s_q, d = (dims[name] for name in ("b", "s_q", "d"))
    wanted = f"float32[b={b} or 1, s_q={s_q}, n], n even, from 2 to {d}"

    def fits(x: Any) -> bool:
        shaped = x.dtype == jnp.float32 and x.ndim == 3 and x.shape[0] in (1, b) and x.shape[1] == s_q
        return bool(shaped and x.shape[2] % 2 == 0 and 2 <= x.shape[2] <= d)

    return _check.array(op, "rope_table", x, wanted, fits)


def in_passes(
    attention: Callable[[jax.Array], reference.Attention],
    q: jax.Array,
    turn: Turn | None,
    implementation: _check.Implementation | None,
) -> reference.Attention:
    """Attention of q after its norm, if there is one, and RoPE; with o turned back. The reference is `jnp` all through,
    so that it has derivatives of every mode."""
    if turn is None:
        return attention(q)
    table, eps = turn.table, turn.eps
    if implementation == "reference":
        (q,) = pairs_turned(q, table, direction=1) if eps is None else normed_and_turned(q, table, eps=eps)
        o, lse = attention(q)
        return pairs_turned(o, table, direction=-1)[0], lse
    o, lse = attention(turned(q, table, 1) if eps is None else normed_then_turned(q, table, eps))
    return turned(o, table, -1), lse
