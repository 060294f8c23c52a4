"""The products of `mla_few_heads_bwd_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import MlaBackward
from ....sass import Products


def products(variant: MlaBackward, facts: Mapping[str, Any]) -> Products:
    """S' and dP' at once, dQ' by 64 rows of d; dKV of 16 heads is one step of a product, 32 columns at a time."""
    of_tiles, of_keys = variant.d // 16 + variant.d // 64 * 64 // 16, 2 * variant.d // 32
    return {"HGMMA": (of_tiles + of_keys, 2 * (of_tiles + of_keys))}
