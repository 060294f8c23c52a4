"""The products of `mla_bwd_sm90` and `mla_bounds_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import MlaBackward
from ....sass import Products


def products(variant: MlaBackward, facts: Mapping[str, Any]) -> Products:
    columns = variant.d + variant.d_v  # of Q and dO
    if variant.bounds:
        return {"HGMMA": columns // 16}
    parts = 2 if variant.d > variant.d_v else 1  # of a half of dQ: of columns that are values, and of others
    of_tiles = columns // 16 + 2 * parts * 64 // 16  # S and dP, and both halves of dQ
    of_keys = columns // 32 * 64 // 16  # dS' Q and P' dO, 32 columns at a time
    return {"HGMMA": (of_tiles + of_keys, 2 * (of_tiles + of_keys))}
