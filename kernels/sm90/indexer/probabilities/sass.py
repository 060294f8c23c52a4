"""The products of `probabilities_sm90`."""

from collections.abc import Mapping
from typing import Any

from ....abi import Probabilities
from ....sass import Products


def products(variant: Probabilities, facts: Mapping[str, Any]) -> Products:
    return {"HGMMA": variant.d // 16}
