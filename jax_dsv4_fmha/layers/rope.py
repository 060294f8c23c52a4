"""Rotary position embedding (RoPE) as in DeepSeek-V4: on the last dimensions of a head, in neighbouring pairs.

    angle = p · f[i];    (x[2i], x[2i+1]) -> (x[2i] cos - x[2i+1] sin, x[2i] sin + x[2i+1] cos)
    f[i] = theta^(-2i / dims)                                     plain: layers with a window alone
    f[i] = theta^(-2i / dims) · ((1 - u[i]) + u[i] / factor)      YaRN: all other layers; u rises from 0 to 1

V is K in these models, so attention returns rotated values: `inverse_rope` at the query's position makes them a
function of distances again.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _check


@dataclasses.dataclass(frozen=True)
class Rope:
    """The frequencies of one kind of layer.

    Attributes:
      dims: how many of a head's last dimensions are rotated, even.
      theta: in DeepSeek-V4 10000 for layers with a window alone, 160000 for the others.
      factor: YaRN's factor; 1 means no YaRN.
      original: the context in tokens that the model was trained on before its extension, for YaRN.
      beta_fast, beta_slow: dimensions that turn more often than beta_fast within `original` keep their frequency.
        Those that turn less often than beta_slow are slowed down by `factor`. A ramp joins the two.
    """

    dims: int = 64
    theta: float = 10_000.0
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def frequencies(self) -> np.ndarray:
        """float32 `[dims / 2]`, in radians a token."""
        plain = 1 / np.float32(self.theta) ** (np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims))
        if self.factor == 1:
            return plain

        def turns_so_often(turns: float) -> float:
            """The dimension, counted in pairs, that makes this many turns within `original` tokens."""
            return self.dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first = max(math.floor(turns_so_often(self.beta_fast)), 0)
        last = min(math.ceil(turns_so_often(self.beta_slow)), self.dims - 1)
        width = last - first if last > first else 1e-3
        slowed = np.clip((np.arange(self.dims // 2, dtype=np.float32) - first) / np.float32(width), 0, 1)
        return (plain / np.float32(self.factor) * slowed + plain * (1 - slowed)).astype(np.float32)


def rope(x: jax.Array, positions: jax.Array, how: Rope) -> jax.Array:
    """x with its last `how.dims` dimensions rotated to `positions`.

    Args:
      x: `[b, s, d]` or `[b, s, h, d]`, d >= how.dims; computed in float32, returned in x's dtype.
      positions: int32 `[b, s]` or `[1, s]`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
    """
    return _turn("rope", x, positions, how, 1)


def inverse_rope(x: jax.Array, positions: jax.Array, how: Rope) -> jax.Array:
    """Undoes `rope`: x rotated back by as much; it takes the same operands."""
    return _turn("inverse_rope", x, positions, how, -1)


@jax.named_scope("rope")
def _turn(op: str, x: Any, positions: Any, how: Rope, direction: int) -> jax.Array:
    n = how.dims
    wanted = f"[b, s, d] or [b, s, h, d] of floats, d >= {n}"
    x = _check.array(op, "x", x, wanted, lambda x: x.dtype in _check.FLOAT and x.ndim in (3, 4) and x.shape[-1] >= n)
    s = x.shape[1]
    wanted = f"int32[b or 1, s={s}]"
    positions = _check.array(
        op, "positions", positions, wanted, lambda p: p.dtype in _check.INT and p.ndim == 2 and p.shape[1] == s
    )
    return _turned(x, positions, how, direction)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _turned(x: jax.Array, positions: jax.Array, how: Rope, direction: int) -> jax.Array:
    n = how.dims
    angle = positions[..., None].astype(jnp.float32) * how.frequencies()
    angle = angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), n // 2, 1)
    pairs = x[..., -n:].astype(jnp.float32).reshape(*x.shape[:-1], n // 2, 2)
    sides = jnp.array([-direction, direction], jnp.float32)
    turned = pairs * jnp.cos(angle) + pairs[..., ::-1] * (sides * jnp.sin(angle))
    return lax.platform_dependent(x, turned.reshape(*x.shape[:-1], n).astype(x.dtype), cuda=_put, default=_beside)


def _put(x: jax.Array, turned: jax.Array) -> jax.Array:
    """Writes in place, so that the dimensions before it need not be moved. A separate kernel rotates: one that also
    wrote in place would overwrite numbers that it reads for two results.
    """
    return lax.dynamic_update_slice_in_dim(x, lax.optimization_barrier(turned), x.shape[-1] - turned.shape[-1], -1)


def _beside(x: jax.Array, turned: jax.Array) -> jax.Array:
    """XLA's CPU compiler fuses the other form all the same, and returns wrong numbers (seen with jaxlib 0.10.2)."""
    return jnp.concatenate([x[..., : -turned.shape[-1]], turned], -1)


def _turned_forward(x: jax.Array, positions: jax.Array, how: Rope, direction: int) -> tuple[jax.Array, jax.Array]:
    return _turned(x, positions, how, direction), positions


def _turned_backward(how: Rope, direction: int, positions: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    return _turned(dy, positions, how, -direction), None


_turned.defvjp(_turned_forward, _turned_backward)
