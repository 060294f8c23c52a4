"""The products of `mla_bwd_sm90` and `mla_bounds_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import MlaBackward
from ....sass import Products


def products(variant: MlaBackward, facts: Mapping[str, Any]) -> Products:
    if variant.bounds:
        return {"HGMMA": 2 * variant.d // 16}
    of_tiles = 2 * variant.d // 16 + 2 * 64 // 16  # S and dP, and both halves of dQ
    of_keys = 2 * variant.d // 32 * 64 // 16  # dS' Q and P' dO, 32 columns at a time
    return {"HGMMA": (of_tiles + of_keys, 2 * (of_tiles + of_keys))}
