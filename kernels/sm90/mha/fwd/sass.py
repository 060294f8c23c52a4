"""The products of `mha_fwd_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import Forward
from ....sass import Products


def products(variant: Forward, facts: Mapping[str, Any]) -> Products:
    a_tile = (variant.d + facts["tile_n"]) // 16  # an MMA has k = 16: those of Q K', and those of P V
    return {"HGMMA": (2 * a_tile, 8 * a_tile)}
