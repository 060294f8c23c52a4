"""The products of `mha_fwd_sm100`."""

from collections.abc import Mapping
from typing import Any

from ...abi import Forward
from ...sass import Products


def products(variant: Forward, facts: Mapping[str, Any]) -> Products:
    tiles = -(-facts["tile_m"] // 128)  # of rows
    of_v = facts["tile_n"] * facts["cluster"] // 16  # of which each CTA loads as many keys
    of_k = 2 * variant.d // 16  # of the first tile, and of the others
    return {"UTCHMMA": tiles * (of_k + of_v)}
