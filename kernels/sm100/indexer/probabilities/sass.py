"""The products of `probabilities_sm100`."""

from collections.abc import Mapping
from typing import Any

from ....abi import Probabilities
from ....sass import Products


def products(variant: Probabilities, facts: Mapping[str, Any]) -> Products:
    return {"UTCHMMA": variant.d // 16}  # pieces of 64 columns
