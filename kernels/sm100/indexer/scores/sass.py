"""The products of `indexer_scores_sm100`."""

from collections.abc import Mapping
from typing import Any

from ....abi import IndexerScores
from ....sass import Products


def products(variant: IndexerScores, facts: Mapping[str, Any]) -> Products:
    """Counts products over the 128 numbers of a key; a product's k is 32 bytes. Pages' keys come in two halves."""
    halves = 1 + variant.paged
    return {"UTCQMMA": 4 * halves} if variant.dtype == "float8_e4m3fn" else {"UTCHMMA": 8 * halves}
