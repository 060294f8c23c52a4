"""The products of `few_rows_product_sm90`."""

from collections.abc import Mapping
from typing import Any

from ...abi import FewRowsProduct
from ...sass import Products


def products(variant: FewRowsProduct, facts: Mapping[str, Any]) -> Products:
    # of 64 of k a stage one product, or two; four where a consumer has two tiles of query heads' columns
    return {"HGMMA": 4 * (4 if variant.norms and variant.max_rows <= 64 else 2) if variant.weights else 4}
