"""What interpreted kernels are run on: small, and with everything that has gone wrong before.

All have a query that sees nothing, absent indices of every kind, infinite sinks, and NaN in keys that no query sees
(`native.operands`).
"""

from __future__ import annotations

from kernels.variants import Variant
from tests import native

EVERYTHING = 1 << 30  # a width: all keys so far


def extents(variant: Variant, tile_n: int, case: str) -> dict[str, int] | None:
    """Of a case, in tiles of `tile_n` keys; None where it makes no sense."""
    n, sparse = tile_n, variant.sources[-1] != "span"
    table: dict[str, dict[str, int]] = {
        # two whole tiles of keys and a part of one, heads of neighbouring queries in one tile of rows
        "tiles": {
            "b": 1,
            "s_q": 4,
            "s_kv": 2 * n + 21,
            "h_q": 8,
            "s_kv1": n + 17,
            "topk": 2 * n + 5,
            "width": EVERYTHING,
        },
        # a window that begins within a tile, two batch entries
        "window": {"b": 2, "s_q": 3 if sparse else 18, "s_kv": n + 70, "h_q": 8, "s_kv1": n // 2, "topk": 40},
        # rows that fill no tile, and keys that do not either
        "few": {"b": 1, "s_q": 3, "s_kv": 3, "h_q": 5, "s_kv1": 3, "topk": 3},
        # more tiles of rows than CTAs: the ring of key tiles goes on from one to the next
        "turns": {"b": 1, "s_q": 5 if sparse else 40, "s_kv": n + 30, "h_q": 12, "s_kv1": 9, "topk": n + 1, "width": n},
    }
    if variant.op == "fwd":
        # several heads of keys: a tile of rows is a box of heads x queries
        table["groups"] = {"b": 1, "s_q": 7, "s_kv": n + 40, "h_q": 12, "h_kv": 2, "width": EVERYTHING}
    return table.get(case)


CASES = ("tiles", "window", "few", "turns", "groups")
PROCESSORS = {"tiles": 2, "window": 2, "few": 1, "turns": 1, "groups": 2}


def operands(variant: Variant, tile_n: int, case: str) -> native.Operands | None:
    given = extents(variant, tile_n, case)
    return None if given is None else native.operands(variant, **given)
