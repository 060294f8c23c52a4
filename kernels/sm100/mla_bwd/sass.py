"""The products of `mla_bwd_sm100`."""

from collections.abc import Mapping
from typing import Any

from ...abi import MlaBackward
from ...sass import Products


def products(variant: MlaBackward, facts: Mapping[str, Any]) -> Products:
    columns, rows, keys = variant.d // 2, 128, 64  # of a CTA of a pair
    of_scores, of_dq, of_dkv = 2 * columns // 16, keys // 16, 2 * 2 * rows // 16  # dKV of P and dS, by 128 columns
    return {"UTCHMMA": of_scores + of_dq + of_dkv + of_dkv // 2}  # the last tile's second half
