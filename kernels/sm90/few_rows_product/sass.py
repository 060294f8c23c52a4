"""The products of `few_rows_product_sm90`."""

from collections.abc import Mapping
from typing import Any

from kernels.lib.rows import ROWS_OF_WARPGROUP

from ...abi import FewRowsProduct
from ...sass import Products
from .config import CONSUMERS


def products(variant: FewRowsProduct, facts: Mapping[str, Any]) -> Products:
    """Of two slabs, with all columns of a consumer, where the matrix is packed; else of one with them at once."""
    return {"HGMMA": 8 * facts["tile_n"] // ROWS_OF_WARPGROUP // CONSUMERS if variant.weights else 4}
