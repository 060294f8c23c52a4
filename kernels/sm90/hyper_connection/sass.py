"""The products of `hyper_connection_sm90`."""

from collections.abc import Mapping
from typing import Any

from ...abi import HyperConnection
from ...sass import Products
from .config import GROUPS, NUMBERS, STREAMS, VECTOR


def products(variant: HyperConnection, facts: Mapping[str, Any]) -> Products:
    """8 of k at a time, of a number's two parts."""
    return {"HMMA": GROUPS * STREAMS * (VECTOR // 2) * (NUMBERS // 8) * 2}
