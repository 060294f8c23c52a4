"""The products of `grouped_product_sm90`."""

from collections.abc import Mapping
from typing import Any

from ...abi import FEW_ROWS, MANY_ROWS, GroupedProduct
from ...sass import Products

STEPS = 4  # of a product, of 16 of k, in a slab of 64


def products(variant: GroupedProduct, facts: Mapping[str, Any]) -> Products:
    """A loop for each number of rows of x: by warps, eight of them a product, or by warpgroups, all of them."""
    cut = 1 if variant.weights == "mxfp4" else 2  # of more than 4 bits a stage has half as many slabs
    if variant.max_rows <= FEW_ROWS:  # a stage of four slabs
        return {"HMMA": 4 // cut * STEPS * sum(n // 8 for n in range(8, FEW_ROWS + 1, 8))}
    return {"HGMMA": 2 * 2 // cut * 2 * STEPS * (MANY_ROWS // 16)}  # two stages of two slabs, two tiles of the matrix
