"""The products that a kernel's machine code has: `sass.py` of its folder says how many, from the sizes of its tiles.

ptxas unrolls a loop, or copies it, without being asked: then a number here is wrong, and a kernel slower or larger. A
test compares the numbers with the disassembly of every kernel.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from .abi import Variant

KINDS = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")  # by warps; of Hopper and Blackwell, in 16 and 8 bits
Products = dict[str, int | tuple[int, int]]
"""Kind -> how many, or the least and the most"""


def expected(variant: Variant, facts: Mapping[str, Any]) -> Products:
    """The products of a kernel; facts: those of its record, such as `tile_n`. A kernel of `kernels.plain` has none."""
    if variant.module.startswith("kernels.plain"):
        return {}
    found: Products = importlib.import_module(f"{variant.module.rpartition('.')[0]}.sass").products(variant, facts)
    return found
