"""The products of `mla_few_heads_spans_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import Forward
from ....sass import Products


def products(variant: Forward, facts: Mapping[str, Any]) -> Products:
    """Scores of all queries; then half of O, of all at once or of one after the other."""
    queries, of_half = 64 // variant.max_heads, variant.d // 64 // 2 * 4
    return {"HGMMA": variant.d // 16 + of_half * (1 + queries)}
