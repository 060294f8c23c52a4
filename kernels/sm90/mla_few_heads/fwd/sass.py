"""The products of `mla_few_heads_fwd_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import Forward
from ....sass import Products


def products(variant: Forward, facts: Mapping[str, Any]) -> Products:
    """Keys are rows: K Q', and V' P' by 64 rows of V'."""
    return {"HGMMA": variant.d // 16 + variant.d_v // 64 * facts["tile_n"] // 16}
