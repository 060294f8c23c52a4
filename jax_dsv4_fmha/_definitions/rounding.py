"""The derivative of a rounding to few bits. JAX by itself would round cotangents in the same way, to 0 or NaN."""

from collections.abc import Callable
from typing import Any

import jax


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
