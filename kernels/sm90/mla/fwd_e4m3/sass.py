"""The products of `mla_fwd_e4m3_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import Forward
from ....sass import Products


def products(variant: Forward, facts: Mapping[str, Any]) -> Products:
    """Q K' of 512 in four places, V' P' of 64 keys by four times 64."""
    scores, of_rope = (14, 4) if variant.mode.keeps_rope else (16, 0)
    return {"QGMMA": 4 * scores + 8, "HGMMA": 4 * of_rope}
