"""The products of `moe_router_sm90`."""

from collections.abc import Mapping
from typing import Any

from ...abi import MoeRouter
from ...sass import Products
from .config import STEPS, Config

OF_BITS = 3  # a product for each third of the gate's bits


def products(variant: MoeRouter, facts: Mapping[str, Any]) -> Products:
    """All of a unit of k, for each 8 tokens, as often as a lane has registers for units of the gate."""
    config = Config(variant.dtype, variant.max_rows)
    return {"HMMA": OF_BITS * STEPS * config.tile_m // 8 * config.depth}
