"""Rows of an M tile: the query and head of each, and where its operands lie.

A row is one (query, head) pair of one KV head's group. In memory q and o are the 5-D tensor
[d, inner, outer, h_kv, b] (fastest first), and a tile is a box of box_inner x box_outer rows of it, which TMA loads
and stores, clipping what lies outside:

    h_kv == 1   inner = s_q * group, outer = 1      rows of neighbouring queries are contiguous: any group packs
    h_kv  > 1   inner = group,       outer = s_q    a box of heads x queries
    one query a tile (keys gathered for each query): the same as h_kv > 1, with a box of heads x 1

In each view query = outer index + inner index // group and head = inner index % group.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

PUBLISHED = 6  # the most numbers that the producer publishes of a row tile or a source
WARP = 32  # threads
ROWS_OF_WARPGROUP, ROWS = 64, 2  # elements of a WGMMA's accumulator: all, and those that one thread holds


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    s_q: Int32
    group: Int32  # h_q // h_kv
    h_kv: Int32
    inner: Int32
    outer: Int32
    box_inner: Int32
    box_outer: Int32
    tiles_inner: Int32  # a tile has as many boxes as a cluster has CTAs
    tiles_outer: Int32
    pairs: Int32  # pairs of batch entry and KV head
    splits: Int32  # splits of each tile's keys: this many CTAs work on a tile of rows

    @property
    def tiles_of_pair(self) -> Int32:
        return self.tiles_inner * self.tiles_outer

    @property
    def tiles(self) -> Int32:
        return self.tiles_of_pair * self.pairs

    @property
    def work(self) -> Int32:
        """The work items that CTAs share: each split of each row tile."""
        return self.tiles * self.splits


def ceil_div(a: Int32, b: Int32) -> Int32:
    return (a + b - 1) // b


@cute.jit
def divide(a: Int32, b: Int32) -> tuple[Int32, Int32]:
    """Quotient and remainder of nonnegative numbers.

    For the device, where a CTA begins with a dozen divisions in a row, most of them by 1 or with quotient 0.
    """
    quotient = Int32(0)
    if a >= b:
        quotient = a
        if b != 1:
            quotient = Int32(Uint32(a) // Uint32(b))
    return quotient, a - quotient * b


def count(a: Int32, b: Int32) -> Int32:
    """Returns how many b cover a, which is not 0."""
    return divide(a - 1, b)[0] + 1


@cute.jit
def extents(
    tile_m: cutlass.Constexpr,
    one_query: cutlass.Constexpr,
    b: Int32,
    s_q: Int32,
    h_q: Int32,
    h_kv: Int32,
    splits: Int32,
    ctas: Int32,
    cluster: cutlass.Constexpr = 1,
) -> Extents:
    """Host side: the boxes of a launch. The CTAs of a cluster take boxes of heads of the same queries.

    A tile has at most tile_m rows, and the fewest whole warpgroups that give no CTA a second tile.
    """
    n = boxes(tile_m, one_query, b, s_q, h_q, h_kv, splits, cluster)
    for rows in cutlass.range_constexpr(tile_m - ROWS_OF_WARPGROUP, 0, -ROWS_OF_WARPGROUP):
        fewer = boxes(rows, one_query, b, s_q, h_q, h_kv, splits, cluster)
        if fewer.work <= ctas:
            n = fewer
    return n


@cute.jit
def boxes(
    at_most: cutlass.Constexpr,
    one_query: cutlass.Constexpr,
    b: Int32,
    s_q: Int32,
    h_q: Int32,
    h_kv: Int32,
    splits: Int32,
    cluster: cutlass.Constexpr,
) -> Extents:
    """Boxes of at most this many rows."""
    group = h_q // h_kv
    inner, outer = s_q * group, Int32(1)
    box_inner, box_outer = cutlass.min(Int32(at_most), inner), Int32(1)
    if one_query or h_kv > 1:
        inner, outer = group, s_q
        box_inner = ceil_div(group, ceil_div(group, at_most * cluster) * cluster)
        box_outer = cutlass.min(at_most // box_inner, s_q)
        if cutlass.const_expr(one_query):
            box_outer = Int32(1)
    tiles_inner = ceil_div(inner, box_inner * cluster)
    tiles_outer = ceil_div(outer, box_outer)
    return Extents(s_q, group, h_kv, inner, outer, box_inner, box_outer, tiles_inner, tiles_outer, h_kv * b, splits)


@dataclass(frozen=True)
class RowTile:
    """The place of one CTA's rows, and which part of their keys it takes."""

    n: Extents
    split: Int32
    batch: Int32
    kv_head: Int32
    inner0: Int32
    outer0: Int32

    @property
    def first_query(self) -> Int32:
        return self.outer0 + divide(cutlass.min(self.inner0, self.n.inner - 1), self.n.group)[0]

    @property
    def last_query(self) -> Int32:
        n = self.n
        inner_last = cutlass.min(self.inner0 + n.box_inner, n.inner) - 1
        outer_last = cutlass.min(self.outer0 + n.box_outer, n.outer) - 1
        return outer_last + divide(inner_last, n.group)[0]

    def publish(self, slot: cute.Tensor) -> None:
        """To SMEM, for `read`."""
        for i, x in enumerate((self.split, self.batch, self.kv_head, self.inner0, self.outer0, self.first_query)):
            slot[i] = x

    @staticmethod
    def read(slot: cute.Tensor, n: Extents) -> "PlacedTile":
        return PlacedTile(n, *(cute.arch.make_warp_uniform(slot[i]) for i in range(PUBLISHED)))

    def of(self, gmem: cute.Tensor, tile_m: int, columns: int) -> cute.Tensor:
        """This tile of q or o: (tile_m, columns, column tile). TMA touches the box's rows only."""
        rows = cute.domain_offset((self.inner0, 0, self.outer0, self.kv_head, self.batch), gmem)
        return cute.local_tile(rows[None, None, 0, 0, 0], (tile_m, columns), (0, None))

    def keys(self, gmem: cute.Tensor, first_key: Int32, tile_n: int, columns: int) -> cute.Tensor:
        """K or V of this tile's KV head from first_key on: (tile_n, columns, key tile, column tile)."""
        keys = cute.domain_offset((first_key, 0, self.kv_head, self.batch), gmem)
        return cute.local_tile(keys[None, None, 0, 0], (tile_n, columns), (None, None))

    def key(self, p: cute.Pointer, s_kv: Int32, key: Int32, d: int) -> tuple[cute.Pointer, Int64]:
        """The place of this tile's KV head's key in an array [b, s_kv, h_kv, d], and the distance to the next key."""
        n = self.n
        return p + ((Int64(self.batch) * s_kv + key) * n.h_kv + self.kv_head) * d, Int64(n.h_kv) * d

    def at_query(self, p: cute.Pointer, query: Int32, width: Int32 = 1) -> cute.Pointer:
        """The place of a query's elements in an array [b, s_q, width]."""
        return p + (Int64(self.batch) * self.n.s_q + query) * width

    def row_index(self, query: Int32, head: Int32) -> Int64:
        """The index of a row in an array [b, s_q, h_q, splits]."""
        row = (Int64(self.batch) * self.n.s_q + query) * (self.n.group * self.n.h_kv) + head
        return row * self.n.splits + self.split


@dataclass(frozen=True)
class PlacedTile(RowTile):
    """A row tile as consumers see it."""

    query0: Int32  # row, query and head of its first row

    def place(self, rows: "BoxedRows", r: int) -> tuple[cutlass.Boolean, Int32, Int32]:
        """(exists, query, query head) of a thread's row, without a division: a thread does this for every tile."""
        n = self.n
        exists = (self.inner0 + rows.inner[r] < n.inner) & (self.outer0 + rows.outer[r] < n.outer)
        head = self.inner0 - (self.query0 - self.outer0) * n.group + rows.head[r]
        over = Int32(head >= n.group)
        query = self.query0 + rows.query[r] + over
        return exists & (rows.outer[r] < n.box_outer), query, self.kv_head * n.group + head - over * n.group


@dataclass(frozen=True)
class BoxedRows:
    """The places in a tile's box of the rows that a thread holds: the same in every tile."""

    inner: tuple[Int32, ...]
    outer: tuple[Int32, ...]
    query: tuple[Int32, ...]  # counted from the box's first row, as if that had head 0
    head: tuple[Int32, ...]

    @staticmethod
    def of(n: Extents, row0: Int32, thread: Int32, one_query: bool = False) -> "BoxedRows":
        """The rows of the warpgroup that begins at row0, in WGMMA's order."""
        rows = [row0 + row_of(thread, r) for r in range(ROWS)]
        if one_query:  # nothing to divide, and almost nothing to keep
            outer = tuple(Int32(row >= n.box_inner) for row in rows)
            return BoxedRows(tuple(rows), outer, outer, tuple(cutlass.min(row, n.box_inner - 1) for row in rows))
        return BoxedRows.at(n, rows)

    @staticmethod
    def at(n: Extents, rows: list[Int32]) -> "BoxedRows":
        """The places of these rows of the tile."""
        # without `divide`, whose branches make the latent kernel's consumers spill; once a CTA, under the first loads
        inner, outer = [row % n.box_inner for row in rows], [row // n.box_inner for row in rows]
        query = (o + i // n.group for i, o in zip(inner, outer, strict=True))
        return BoxedRows(tuple(inner), tuple(outer), tuple(query), tuple(i % n.group for i in inner))


def row_of(thread: Int32, r: int) -> Int32:
    """Row of a warpgroup's 64 that element r of a thread's row state belongs to (the WGMMA accumulator's layout)."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * r


def load(p: cute.Pointer):
    return cute.make_tensor(p, cute.make_layout(1))[0]


def store(p: cute.Pointer, value) -> None:
    cute.make_tensor(p, cute.make_layout(1))[0] = value
