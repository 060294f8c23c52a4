"""The products of `indexer_scores_at_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import IndexerScoresAt
from ....sass import Products


def products(variant: IndexerScoresAt, facts: Mapping[str, Any]) -> Products:
    if variant.dtype == "float8_e4m3fn":
        return {"QGMMA": 4}
    of_gradients = variant.heads // 16 + 2 * 64 // 16 if variant.op.endswith("_bwd") else 0  # dk; dq, 64 columns each
    return {"HGMMA": 8 + of_gradients}
