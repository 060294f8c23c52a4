"""What the host hands to `indexer_scores_sm90`."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    s_q: Int32
    s_c: Int32
    blocks_of_entry: Int32  # blocks of queries of a batch entry
    first_block: Int32  # first block of this launch, counted over all batch entries
    blocks: Int32  # blocks of this launch
    splits: Int32  # splits of each block's key tiles
    stride: Int32  # between the scores of two queries, a multiple of a tile
    skip: Int32  # a query that sees at most this many entries needs no scores


class Pages(NamedTuple):
    """Where the keys of a cache are, for each batch entry."""

    width: Int32  # pages of a batch entry
    page: Int32  # keys of a page
    box: Int32  # keys of one load


class Arrays(NamedTuple):
    weights: cute.Pointer  # float32 [b, s_q, heads]
    # k_scale, float32 [b, s_c], not read where keys have no scales; for pages the table, int32 [b, width]
    keys: cute.Pointer
    start: cute.Pointer  # int32 [b, s_q]
    stop: cute.Pointer  # int32 [b, s_q]
    scores: cute.Pointer  # float32 [blocks * queries of a block, stride]
