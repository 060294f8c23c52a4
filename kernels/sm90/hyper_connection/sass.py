"""The products of `hyper_connection_sm90`, and of the kernels of its gradient."""

from collections.abc import Mapping
from typing import Any

from ...abi import HyperConnection, HyperConnectionBackward
from ...sass import Products
from .config import GROUP, GROUPS, NUMBERS, STREAMS, VECTOR


def products(variant: HyperConnection | HyperConnectionBackward, facts: Mapping[str, Any]) -> Products:
    """8 of k at a time: of a number's two parts, or, in the gradient, three products of two parts of both."""
    if isinstance(variant, HyperConnection):
        return {"HMMA": GROUPS * STREAMS * (VECTOR // 2) * (NUMBERS // 8) * 2}
    return {"HMMA": STREAMS * (NUMBERS // 8) * (GROUP // 8) * 3} if variant.part == "streams" else {}
