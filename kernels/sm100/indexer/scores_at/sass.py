"""The products of `indexer_scores_at_sm100`."""

from collections.abc import Mapping
from typing import Any

from ....abi import IndexerScoresAt
from ....sass import Products


def products(variant: IndexerScoresAt, facts: Mapping[str, Any]) -> Products:
    return {"UTCQMMA": 4} if variant.dtype == "float8_e4m3fn" else {"UTCHMMA": 8}
