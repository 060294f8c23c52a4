"""The products of `few_rows_product_sm90`."""

from collections.abc import Mapping
from typing import Any

from ...abi import FewRowsProduct
from ...sass import Products


def products(variant: FewRowsProduct, facts: Mapping[str, Any]) -> Products:
    return {"HGMMA": 8 if variant.weights else 4}  # two products, or one, of 64 of k a stage
