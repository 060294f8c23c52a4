"""The operands of interpreted kernels: small, with everything that has gone wrong before.

All have a query that sees nothing, absent indices of every kind, infinite sinks, and NaN in keys that no query sees
(`attention.operands`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.abi import ANY, Forward
from kernels.packings import PACKED
from kernels.params import PAGES, WINDOWS

from . import attention, native

EVERYTHING = 1 << 30  # a width: all keys so far


def extents(variant: Forward, tile_n: int, case: str) -> dict[str, int] | None:
    """The extents of a case, in tiles of `tile_n` keys; None where it makes no sense."""
    n, sparse, op = tile_n, variant.gathers, variant.op
    # two sources whose tiles come in pairs: more numbers of tiles that one may leave to the other
    many_pairs = op in ("csa_fwd", "hca_fwd") and variant.max_heads == ANY
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
        # any number of key tiles from none on, for every tile of rows, where maxima rise
        "mixed": {
            "b": 1,
            "s_q": 31 if many_pairs else 17,
            "s_kv": 4 * n + 11,
            "h_q": 64,
            "s_kv1": 3 * n,
            "topk": 3 * n + 9,
        },
    }
    if op == "mla_span_fwd" and not variant.shares_tiles:
        # a few keys after a pair of tiles, or after two; the last tiles of rows see more
        table["after a pair"] = {"b": 2, "s_q": 19, "s_kv": 2 * n + 22, "h_q": 8, "width": 2 * n}
        table["after two pairs"] = {"b": 1, "s_q": 20, "s_kv": 4 * n + 19, "h_q": 16, "width": EVERYTHING}
        # two tiles of rows a query: the second finds its keys where they are
        table["again"] = {"b": 1, "s_q": 4, "s_kv": 2 * n + 3, "h_q": 128, "width": n + 30}
    if variant.sources[0] in ("span", *PAGES) and len(variant.sources) == 1 and not variant.shares_tiles:
        # several heads of keys: a tile of rows is a box of heads x queries
        table["groups"] = {"b": 1, "s_q": 7, "s_kv": n + 40, "h_q": 12, "h_kv": 2, "width": EVERYTHING}
    if variant.sources[0] in PAGES:  # of boxes of 8, 16, 32 and 64 keys, in part of several
        for name, page in {"tiles": 32, "window": 16, "few": 8, "turns": 64, "mixed": 24, "groups": 128}.items():
            table[name]["page"] = page
    if case in table:
        table[case]["h_q"] = min(table[case]["h_q"], variant.max_heads)
    if case == "tiles":  # a GPU runs this too: enough heads that a call gets this variant
        table[case]["h_q"] = max(table[case]["h_q"], native.fewer_heads(variant) + 1)
    return table.get(case)


PROCESSORS = {
    "tiles": 2,
    "window": 2,
    "few": 1,
    "turns": 1,
    "mixed": 1,
    "groups": 2,
    "after a pair": 1,
    "after two pairs": 2,
    "again": 1,
}
CASES = tuple(PROCESSORS)


def operands(variant: Forward, tile_n: int, case: str) -> attention.Operands | None:
    given = extents(variant, tile_n, case)
    if given is None or (case == "mixed" and variant.sources[0] in (*PACKED, *WINDOWS)):  # keys that it cannot make
        return None
    x = attention.operands(variant, **given)
    return mixed(x, variant, tile_n) if case == "mixed" else x


def mixed(x: attention.Operands, variant: Forward, tile_n: int) -> attention.Operands:
    """Every query sees a random number of keys of every source; later keys are larger."""
    rng, n = np.random.default_rng(2), tile_n
    _, s_q, *_ = x.shape
    sources = []
    for kind, keys in zip(variant.sources, x.sources, strict=True):
        s_kv = keys.k.shape[1]
        many = np.array([0, 0, 1, n // 2, n - 1, n, n, n + 1, 2 * n - 3, 2 * n, 2 * n + 30, 3 * n, 3 * n + 9, s_kv])
        many = np.minimum(rng.permutation(np.resize(many, s_q)), s_kv)
        many[:3] = 0  # a tile of rows that sees nothing
        if kind in ("span", *PAGES):
            first = rng.integers(0, s_kv - many + 1)[None]
            seen_from, seen_to = first.astype(np.int32), (first + many).astype(np.int32)
            j = np.arange(s_kv)
            counts = ((j >= seen_from[..., None]) & (j < seen_to[..., None])).astype(np.int64)
        else:
            seen_from, seen_to = keys.seen_from, many[None].astype(np.int32)
            present = (np.arange(seen_from.shape[-1]) < many[:, None]) & (seen_from >= 0) & (seen_from < s_kv)
            counts = np.zeros((1, s_q, s_kv), np.int64)
            for b, i, p in zip(*np.nonzero(present), strict=True):
                counts[b, i, seen_from[b, i, p]] += 1
        size = np.linspace(0.02, 0.2, s_kv)[:, None, None]
        k = (size * rng.standard_normal(keys.k.shape)).astype(keys.k.dtype)
        if np.shares_memory(keys.v, keys.k):
            v = attention.values_of(k, keys.v.shape[-1])
        else:
            v = (0.125 * rng.standard_normal(k.shape)).astype(k.dtype)
        for array in (k, v):
            array[~counts.any(1)] = np.nan
        made = attention.Keys(k, v, seen_from, seen_to, counts)
        made = attention.in_pages(rng, kind, made, x.shape.page) if kind in PAGES else made
        sources.append(attention.as_codes(made, x.mode) if x.mode.is_e4m3 else made)
    return dataclasses.replace(x, sources=tuple(sources))
