"""The n residual streams of each token, which hyper-connections take into a sublayer and carry past it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .exact import exact_product


class Streams(NamedTuple):
    """The n residual streams of each token, as they go from sublayer to sublayer."""

    x: jax.Array
    """`[b, s, n, hidden]`, before a sublayer"""
    y: jax.Array
    """`[b, s, hidden]`: what it made"""
    post: jax.Array
    """float32 `[b, s, n]`: how much of that each stream gets"""
    mix: jax.Array
    """float32 `[b, s, n, n]`: how the streams go past it"""
    pre: jax.Array
    """float32 `[b, s, n]`: how the next sublayer takes them in, in V4.1"""

    @staticmethod
    def of(x: jax.Array, pre: jax.Array) -> "Streams":
        """These streams, to which no sublayer adds."""
        n, zeros = x.shape[2], jnp.zeros(x.shape[:3])
        return Streams(x, jnp.zeros_like(x[:, :, 0]), zeros, zeros[..., None] + jnp.eye(n), pre)

    def after(self) -> jax.Array:
        """The streams after the sublayer."""
        return mixed(self.post, self.mix, self.y, self.x)

    def at(self, at: jax.Array) -> "Streams":
        """Those of one token of each sequence, int32 `[b]`."""
        return jax.tree.map(lambda x: jax.vmap(lambda y, n: y[n][None])(x, at), self)


def means_of(seen: Sequence[Streams]) -> jax.Array | None:
    """The means `[b, s, len(seen) · hidden]` of some streams, side by side; None of none."""
    after = [x.after() for x in seen]
    means = [x.mean(2, dtype=jnp.float32).astype(x.dtype) for x in after]
    return jnp.concatenate(means, -1) if means else None


def norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps) * weight).astype(x.dtype)


def projected(fn: jax.Array, x: jax.Array, eps: float) -> jax.Array:
    """All streams of a token, normed, times fn `[count, n hidden]`: float32 `[b, s, count]`."""
    x = x.reshape(*x.shape[:2], -1)
    square = jnp.square(x.astype(jnp.float32))
    return exact_product(x, fn) * jax.lax.rsqrt(jnp.mean(square, -1, keepdims=True) + eps)


def joined(pre: jax.Array, x: jax.Array) -> jax.Array:
    """The streams x `[b, s, n, hidden]` as one, `[b, s, hidden]`."""
    return (pre[..., None] * x).sum(2).astype(x.dtype)


def mixed(post: jax.Array, mix: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """The streams after a sublayer that made y `[b, s, hidden]` of them."""
    past = (mix[..., None] * x[:, :, :, None]).sum(2)  # not a product: its matrices would have n rows
    return (past + post[..., None] * y[:, :, None]).astype(x.dtype)
