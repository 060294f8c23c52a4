"""The products of `mla_fwd_sm90`, and of the two kernels for few queries."""

from collections.abc import Mapping
from typing import Any

from ....abi import Forward, RowColumns, RowScores
from ....sass import Products


def products(variant: Forward | RowColumns | RowScores, facts: Mapping[str, Any]) -> Products:
    if isinstance(variant, RowScores):  # one tile of 64 rows and 64 keys for each warpgroup
        return {"HGMMA": 2 * variant.d // 16}
    if isinstance(variant, RowColumns):
        return {"HGMMA": 24}
    a_tile = (variant.d + facts["tile_n"]) // 16  # an MMA has k = 16: those of Q K', and those of P V
    return {"HGMMA": (2 * a_tile, 8 * a_tile)}
