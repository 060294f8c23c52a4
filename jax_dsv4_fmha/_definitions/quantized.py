"""Codes of few bits with their scales, as one operand."""

import dataclasses

import jax

from .pytree import public_pytree


@public_pytree
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Numbers as codes with a scale for each row: the indexer's keys in 8 bits, as `quantize_indexer` makes them.

    Attributes:
      codes: `[…, d]`, float8_e4m3fn; a number is its code times the scale of its row.
      scales: float32 `[…]`, not negative.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Quantized, quantize_indexer
      >>> q, k, weights = quantize_indexer(jnp.ones((1, 8, 2, 128)), jnp.ones((1, 2, 128)), jnp.ones((1, 8, 2)))
      >>> k.codes.dtype, k.scales.shape
      (dtype(float8_e4m3fn), (1, 2))
      >>> Quantized(k.codes[:, :1], k.scales[:, :1]).scales.shape  # of the first key
      (1, 1)
    """

    codes: jax.Array
    scales: jax.Array
