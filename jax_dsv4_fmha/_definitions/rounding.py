"""The derivative of a rounding to few bits. JAX by itself would round cotangents in the same way, to 0 or NaN."""

from collections.abc import Callable
from typing import Any

import jax

from .. import _check


def straight_through(*static: int) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]:
    """Decorates a function that rounds its first argument, in place of which it is differentiated as if it did not: in
    every mode, and of every order. `static` are the places of its other arguments.
    """

    def decorated(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        rounded: Any = jax.custom_jvp(f, nondiff_argnums=static)

        @rounded.defjvp
        def _(*arguments: Any) -> tuple[jax.Array, jax.Array]:
            *options, (x,), (dx,) = arguments
            return rounded(x, *options), dx

        found: Callable[..., jax.Array] = rounded
        return found

    return decorated


@jax.custom_jvp
def packable(x: jax.Array) -> jax.Array:
    """x, whose numbers become bytes. JAX by itself would take these for constants, and leave out a part of a gradient:
    asking for a derivative raises an error.
    """
    return x


@packable.defjvp
def _packable(*_: Any) -> Any:
    wanted = "stop_gradient around it, or entries that are not packed, which have the gradient"
    raise _check.error(NotImplementedError, "quantize_cache", "gradient", "entries to differentiate", wanted)
