"""The products of `expert_product_sm90`."""

from collections.abc import Mapping
from typing import Any

from ...abi import ExpertProduct
from ...sass import Products

STEPS = 4  # of a stage, of 16 of what is summed over


def products(variant: ExpertProduct, facts: Mapping[str, Any]) -> Products:
    return {"HGMMA": STEPS}
