"""The products of `mla_fwd_sm100`."""

from collections.abc import Mapping
from typing import Any

from ...abi import Forward
from ...sass import Products


def products(variant: Forward, facts: Mapping[str, Any]) -> Products:
    of_s, of_o = variant.d // 2 // 16, facts["tile_n"] // 16 * 2  # two rails of half the depth; halves of O
    scores = 1 if facts["cluster"] == 1 else 2  # before P V; a pair issues them with P V, too
    return {"UTCHMMA": scores * of_s + 3 * of_o}  # P V in the loop, before Q's next rows, at the end
