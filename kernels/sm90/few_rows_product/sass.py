"""The products of `few_rows_product_sm90`."""

from collections.abc import Mapping
from typing import Any

from ...abi import FewRowsProduct
from ...sass import Products


def products(variant: FewRowsProduct, facts: Mapping[str, Any]) -> Products:
    return {"HGMMA": 4 * (2 if variant.weights else 1)}  # of 64 of k a stage one product, or two
