"""The ABI of kernels, as data: the parameters of each family's kernels. `kernels/calls.py` has the custom calls.

The build expects these parameters of a cubin, the C++ launcher fills them in by name, and the tests call them by name.
`kernels/tables.py` generates the C++ structs from here, and what Python knows of them. Nothing restates them.

A family is a class of variants. Its fields are the compile-time choices that a call must match; one that begins with
`max_` is a limit instead: a call gets the variant with the lowest limit that it keeps. A `Mode` says how an op of
attention computes, and an op in a mode has a custom call and a name of its own.
"""

# ruff: noqa: F403, F405

from collections.abc import Iterable

from .attention import *
from .by_rows import *
from .experts import *
from .indexer import *
from .products import *
from .variant import *

FAMILIES: tuple[type[Variant], ...] = (
    *(Forward, Combine, RowScores, RowColumns, MlaBackward, TileSpans, MhaBackward),
    *(IndexerScores, IndexerScoresAt, IndexerScoresWithin, TopK, Probabilities),
    *(Rope, NormRope, IndexQuery, FewRowsProduct, UnpackMatrix, KvInsert, SeenSlots, KeyCodes, Route, GroupRows),
    *(GroupedProduct, ExpertProduct, ExpertRows, HyperConnection, HyperConnectionBackward, AllReduce),
)


def layouts(variants: Iterable[Variant]) -> dict[str, Variant]:
    """For every layout one variant that has it."""
    found: dict[str, Variant] = {}
    for variant in variants:
        assert found.setdefault(variant.layout, variant).params == variant.params, variant.layout
    return found
