"""The raw call that makes codes of keys, for products of e4m3."""

import jax
import jax.numpy as jnp

from .call import call, extent

PLAIN, WITH_ROPE = (extent(f"csa_fwd_{precision}", "window_kv") for precision in ("e4m3", "e4m3_bf16_rope"))
"""bytes of a key's codes and its unit, alone and with RoPE's numbers in bfloat16 between them"""


def key_codes(keys: jax.Array, slots: jax.Array, *, packing: str, rope: bool = False) -> jax.Array:
    """float8_e4m3fn `[b, n, 528]`: a key's 512 codes, and in the first two of 16 bytes the unit that it is divided by,
    a power of two in bfloat16 (`_definitions/e4m3.py`). What is in the place of an absent key is not written.

    Args:
      keys: a pool, bfloat16 `[rows, 512]`; or uint8 `[pages, bytes]`, where slot i means entry i % n of page i // n.
      slots: int32 `[b, n]`, where a sequence has its keys; those below 0 are absent.
      packing: the layout of pages; "" for bfloat16.
      rope: 128 bytes more after the codes, `[b, n, 656]`: the last 64 of the same numbers in bfloat16.
    """
    result = jax.ShapeDtypeStruct((*slots.shape, WITH_ROPE if rope else PLAIN), jnp.float8_e4m3fn)
    (codes,) = call("key_codes", (result,), keys, slots, packing=packing)
    return codes
