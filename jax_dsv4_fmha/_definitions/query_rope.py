"""RoPE of a query's heads and the norm before it, as one operand of attention."""

import dataclasses

import jax

from .pytree import public_pytree


@public_pytree
@dataclasses.dataclass(frozen=True)
class QueryRope:
    """RoPE of q's heads, with the norm before it, as a part of attention: q comes before both, and o is rotated back.

    Attributes:
      table: float32 `[b, s_q, n]` or `[1, s_q, n]`, cos and sin of n / 2 pairs by turns, as `layers.Rope.table` makes
        them. The last n dimensions of q's heads are rotated, in neighbouring pairs, and those of o are rotated back.
      eps: a float > 0, if q comes before the norm of its heads too, `q / sqrt(mean(q²) + eps)`. None means no norm.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import QueryRope, dsv4_attention
      >>> from jax_dsv4_fmha.layers import Rope
      >>> q, window_kv = jnp.ones((1, 8, 4, 512), jnp.bfloat16), jnp.ones((1, 8, 512), jnp.bfloat16)
      >>> rope = QueryRope(Rope(64).table(jnp.arange(8)[None]), eps=1e-6)
      >>> o, lse = dsv4_attention(q, window_kv, window=3, rope=rope)
      >>> o.shape
      (1, 8, 4, 512)
    """

    table: jax.Array
    eps: float | None = dataclasses.field(default=None, metadata={"static": True})


@public_pytree
@dataclasses.dataclass(frozen=True)
class GroupedRope(QueryRope):
    """`QueryRope` before a product that takes o in groups of heads, as V4's output projection does.

    A kernel then reads the gradient of o as that product's gradient writes it. Results are the same.
    """

    groups: int = dataclasses.field(default=1, metadata={"static": True})
    """a divisor of the number of heads"""
