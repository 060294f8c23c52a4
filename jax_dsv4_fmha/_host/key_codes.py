"""Raw calls that make codes of keys, for products of e4m3."""

import jax
import jax.numpy as jnp

from . import library
from .call import call, extent

D, WITH_ROPE = extent("key_codes", "keys"), extent("csa_fwd_e4m3_bf16_rope", "window_kv")
"""bytes of a key's codes, alone and with RoPE's numbers in bfloat16 after them"""


def key_codes(
    keys: jax.Array, slots: jax.Array, top: jax.Array, *, packing: str, rope: bool = False
) -> tuple[jax.Array, ...]:
    """(codes float8_e4m3fn `[b, n, 512]`, taken int32 `[b, parts]`, top): each key divided by the unit of the greatest
    finite |x| so far, a power of two. What is in the place of an absent key is not written.

    Args:
      keys: a pool, bfloat16 `[rows, 512]`; or uint8 `[pages, bytes]`, where slot i means entry i % n of page i // n.
      slots: int32 `[b, n]`, where a sequence has its keys; those below 0 are absent.
      top: int32 `[b]`, the bits of a float32: the greatest |x| of a sequence's other keys so far, or 0. The result's
        is of these keys, too. `taken` says which one each part took.
      packing: the layout of pages; "" for bfloat16.
      rope: 128 bytes more of each key, `[b, n, 640]`: the last 64 of the same numbers in bfloat16.
    """
    b, n = slots.shape
    results = (
        jax.ShapeDtypeStruct((b, n, WITH_ROPE if rope else D), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((b, -(-n // _keys_of_a_cta(packing))), jnp.int32),
        jax.ShapeDtypeStruct(top.shape, top.dtype),
    )
    return tuple(call("key_codes", results, keys, slots, top, aliases={2: 2}, packing=packing))


def key_codes_again(
    keys: jax.Array, slots: jax.Array, top: jax.Array, codes: jax.Array, taken: jax.Array, *, packing: str
) -> tuple[jax.Array]:
    """The codes in the unit of `top`, the greatest of all: those of parts that took another unit are made anew.

    Args:
      keys, slots, codes, taken, packing: as `key_codes` took and gave them.
      top: int32 `[b]`, of all keys.
    """
    result = jax.ShapeDtypeStruct(codes.shape, codes.dtype)
    (codes,) = call("key_codes_again", (result,), keys, slots, top, codes, taken, aliases={3: 0}, packing=packing)
    return (codes,)


def _keys_of_a_cta(packing: str) -> int:
    (size,) = {v.tile_m for v in library.variants_for("key_codes", packing=packing)}
    return size
