"""The products of the gradients of `mha_fwd`."""

from collections.abc import Mapping
from typing import Any

from ....abi import MhaBackward, TileSpans
from ....sass import Products


def products(variant: MhaBackward | TileSpans, facts: Mapping[str, Any]) -> Products:
    if isinstance(variant, TileSpans):
        return {}
    of_keys = variant.op != "mha_dq"
    if variant.d == 512:  # S and dP, and halves of one sum or two
        return {"HGMMA": 2 * variant.d // 16 + 2 * (1 + of_keys) * facts["tile_m" if of_keys else "tile_n"] // 16}
    depth = 64 if of_keys else facts["tile_n"]  # of S and dP, then of one sum or two
    count = 2 * variant.d // 16 + (1 + of_keys) * depth // 16
    if variant.op == "mha_dqdkdv":  # by halves of a tile of rows; and half of dQ of a tile, and of the last one
        count = facts["tile_m"] // 64 * count + 2 * facts["tile_n"] // 16
    return {"HGMMA": count}
