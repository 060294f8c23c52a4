"""Raw calls that make codes of keys, for products of e4m3."""

import jax
import jax.numpy as jnp

from . import library
from .call import call

D, ROPE = 512, 64


def key_tops(keys: jax.Array, slots: jax.Array, *, packing: str) -> tuple[jax.Array]:
    """float32 `[b, parts]`: the greatest finite |x| of parts of a sequence's keys.

    Args:
      keys: a pool, bfloat16 `[rows, 512]`; or uint8 `[pages, bytes]`, where slot i means entry i % n of page i // n.
      slots: int32 `[b, n]`, where a sequence has its keys; those below 0 are absent.
      packing: the layout of pages; "" for bfloat16.
    """
    (b, n), of_warp = slots.shape, _keys_of_a_warp(packing)
    (tops,) = call(
        "key_tops", (jax.ShapeDtypeStruct((b, -(-n // of_warp)), jnp.float32),), keys, slots, packing=packing
    )
    return (tops,)


def key_codes(
    keys: jax.Array, slots: jax.Array, units: jax.Array, *, packing: str, rope: bool = False
) -> tuple[jax.Array]:
    """float8_e4m3fn `[b, n, 512]`: each key divided by its sequence's unit, a power of two; what is in the place of an
    absent key is not written.

    Args:
      units: float32 `[b]`.
      keys, slots, packing: as in `key_tops`.
      rope: 128 bytes more of each key, `[b, n, 640]`: the last 64 of the same numbers in bfloat16.
    """
    result = jax.ShapeDtypeStruct((*slots.shape, D + 2 * ROPE * rope), jnp.float8_e4m3fn)
    (codes,) = call("key_codes", (result,), keys, slots, units, packing=packing)
    return (codes,)


def _keys_of_a_warp(packing: str) -> int:
    (size,) = {v.tile_n for v in library.variants_for("key_tops", packing=packing)}
    return size
