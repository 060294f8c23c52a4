"""Sums of exponentials by their logs, which may be ±inf; no result and no derivative here is NaN."""

import jax
import jax.numpy as jnp
from jax import lax


def logsumexp(x: jax.Array, axis: int) -> jax.Array:
    """log Σ exp(x), -inf where every x is, with gradients that are 0 there instead of NaN."""
    top = finite(lax.stop_gradient(jnp.max(x, axis, keepdims=True)))
    total = jnp.sum(jnp.exp(x - top), axis)
    nothing = total == 0
    return jnp.where(nothing, -jnp.inf, jnp.log(jnp.where(nothing, 1, total)) + jnp.squeeze(top, axis))


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(x)


@sigmoid.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Uses sigmoid(-x) for 1 - sigmoid(x), which has no digits left where x is 17 or more."""
    (x,), (dx,) = primals, tangents
    y = sigmoid(x)
    return y, y * sigmoid(-x) * dx


def finite(x: jax.Array) -> jax.Array:
    """x with 0 for ±inf, which may be subtracted from -inf."""
    return jnp.where(jnp.isinf(x), 0, x)


def denominator(lse: jax.Array, sink: jax.Array | None) -> jax.Array:
    """logaddexp(lse, sink); ±inf where a head saw no key, or only its sink."""
    if sink is None:
        return lse
    return jnp.where(lse == -jnp.inf, jnp.inf, jnp.logaddexp(lse, sink[None, None]))


def sink_factor(lse: jax.Array, sink: jax.Array) -> jax.Array:
    """exp(lse - logaddexp(lse, sink)), the part of the softmax that the keys get beside the sink; never NaN."""
    return jax.nn.sigmoid(jnp.where(jnp.isinf(lse), 0, lse) - sink)
