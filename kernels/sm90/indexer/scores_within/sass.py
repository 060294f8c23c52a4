"""The products of `indexer_scores_within_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import IndexerScoresWithin
from ....sass import Products


def products(variant: IndexerScoresWithin, facts: Mapping[str, Any]) -> Products:
    return {"QGMMA": 4} if variant.dtype == "float8_e4m3fn" else {"HGMMA": 8}
