"""The rounding of `fake_quantize`: to numbers that the models' caches hold."""

import jax

from .._definitions import packed

Rounding = tuple[str, int] | None
"""A layout of `packed.LAYOUTS`, and how many dimensions, the last, stay as they are; None leaves all as they are"""


def rounded(x: jax.Array, rounding: Rounding) -> jax.Array:
    """x `[…, d]`, rounded, with a gradient that passes straight through."""
    return x if rounding is None else packed.rounded(x, *rounding)
