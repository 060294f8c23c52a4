"""The norm of q's heads and RoPE before attention, and RoPE back of o after it: inside of a kernel, or by passes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ... import _check, reference
from ..._definitions.query_rope import GroupedRope, QueryRope
from ..._definitions.rope import normed_and_rotated, normed_and_rotated_gradient, rotated_pairs
from ..._host import rope as kernels
from ..._host.attention import ROPE
from ..autodiff import constant
from ..op import ONE_OR_B, Arrays, Axes
from ..rope import normed_then_rotated, rotated
from .base import Attention, AttentionMode, Gradient


class Passes(NamedTuple):
    """q as attention sees it, a rotation, and the gradient of the first."""

    norm_rope: Callable[..., Arrays]
    rope: Callable[..., Arrays]
    norm_rope_bwd: Callable[..., Arrays]


BY_DEFINITION = Passes(normed_and_rotated, rotated_pairs, normed_and_rotated_gradient)
BY_KERNELS = Passes(kernels.norm_rope, kernels.rope, kernels.norm_rope_bwd)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("table",), meta_fields=("eps", "group_heads"))
@dataclasses.dataclass(frozen=True)
class Rotary(AttentionMode):
    """q is as a product makes it.

    A rotation leaves rowsum(o∘do) as it is. So the gradient is made of this q, and of o after RoPE back.

    Attributes:
      table: float32 `[b, s_q, n]` or `[1, s_q, n]`: cos and sin of each pair in turn.
      eps: of the norm; None for RoPE without it, for which there is no kernel.
      group_heads: how many heads a product takes together: it makes the cotangent of o in groups of these.
    """

    table: jax.Array
    eps: float | None
    group_heads: int

    may_be_outside: ClassVar[bool] = True
    passes_of_gradient: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = (("norm_rope", "rope"), ("norm_rope_bwd",))

    @property
    def kernel_mode(self) -> dict[str, Any]:
        return {"rotary": True}

    @property
    def axes(self) -> tuple[Axes, ...]:
        return (Axes("rope.table", f"{ONE_OR_B} s_q n"),)

    @property
    def operands(self) -> Arrays:
        return (self.table,)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def fits(self, q: jax.Array) -> bool:
        return self.eps is not None and self.table.shape[-1] == ROPE

    def definition(self, inner: Attention) -> Attention:
        def attention(q: Any, *operands: Any, **params: Any) -> reference.Attention:
            o, lse = inner(self._seen(q, BY_DEFINITION), *operands, **params)
            return rotated_pairs(o, self.table, direction=-1)[0], lse

        return attention

    def gradient(self, inner: Gradient, *, by_kernels: bool) -> Gradient:
        passes = BY_KERNELS if by_kernels else BY_DEFINITION

        def gradient(q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, *rest: Any, **params: Any) -> Arrays:
            do, delta = jax.lax.optimization_barrier((do, delta))  # then nothing reads do, and it is rotated in place
            seen, (do,) = self._seen(q, passes), passes.rope(do, self.table, direction=1)
            dq, *of_keys = inner(seen, do, lse, sink_factor, delta, *rest, **params)
            return *passes.norm_rope_bwd(q, self.table, dq, eps=self.eps), *of_keys

        return gradient

    def cotangent(self, do: jax.Array) -> jax.Array:
        """Puts do in groups of heads, which undoes a product's transposition."""
        b, s, h, d = do.shape
        heads = self.group_heads if h % self.group_heads == 0 else h
        return do.reshape(b, s, h // heads, heads, d).transpose(2, 0, 1, 3, 4)

    def outside(self, attention: Callable[[jax.Array], reference.Attention]) -> Callable[[jax.Array], Any]:
        def in_passes(q: jax.Array) -> reference.Attention:
            seen = rotated(q, self.table, 1) if self.eps is None else normed_then_rotated(q, self.table, self.eps)
            o, lse = attention(seen)
            return rotated(o, self.table, -1), lse

        return in_passes

    def _seen(self, q: Any, passes: Passes) -> Any:
        """q as attention sees it."""
        norm = {} if self.eps is None else {"eps": self.eps}
        (seen,) = passes.norm_rope(q, self.table, **norm) if norm else passes.rope(q, self.table, direction=1)
        return seen


def wanted(
    op: str,
    rope: Any,
    dims: Mapping[str, Any],
    implementation: _check.Implementation | None,
) -> list[AttentionMode]:
    """The modes that the option `rope` of `dsv4_attention` asks for. The reference alone has derivatives in the table.

    Args:
      dims: the sizes of its axes.

    Raises:
      ValueError, TypeError: the option is not as it is documented.
    """
    if rope is None:
        return []
    if not isinstance(rope, QueryRope):
        raise _check.error(TypeError, op, "rope", rope, "a QueryRope or None")
    eps = None if rope.eps is None else _check.number(op, "rope.eps", rope.eps, "a float > 0", lambda x: x > 0)
    table = _checked(op, rope.table, dims)
    table = table if implementation == "reference" else constant(table, op, "rope.table")
    groups = rope.groups if isinstance(rope, GroupedRope) else 1
    return [Rotary(table, eps, dims["h_q"] // groups)]


def _checked(op: str, table: Any, dims: Mapping[str, Any]) -> jax.Array:
    b, s_q, d = (dims[name] for name in ("b", "s_q", "d"))

    def fits(x: Any) -> bool:
        shaped = x.dtype == jnp.float32 and x.ndim == 3 and x.shape[0] in (1, b) and x.shape[1] == s_q
        return bool(shaped and x.shape[2] % 2 == 0 and 2 <= x.shape[2] <= d)

    return _check.array(op, "rope.table", table, f"float32[b={b} or 1, s_q={s_q}, n], n even, from 2 to {d}", fits)
