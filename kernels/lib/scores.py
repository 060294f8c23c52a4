"""Code that kernels of an indexer's scores share on all chips: their tiles, what the host hands over, and what loads.

A tile is 128 keys by 256 columns, each a (query, head) pair. With a cache, a table names the pages of keys, and queries
are few: a tile is then 256 keys by 128 columns, so that fewer products are wasted. Callers make room for scores by
tiles, so these have the same sizes on every chip. Boxes that divide a page and a tile load a page's keys, and in 8 bits
their scales, which follow all keys of a page.

The kernel loads only key tiles that some query of the block sees; a query that takes all it sees needs none. Scores
that a query does not see may be anything: their reader knows what the query sees. CTAs are persistent: one takes every
gridDim-th block, forth and back, from the last on, so that under a causal mask all have the same work. Blocks may be
split by their key tiles.

Where blocks are to be chosen, the kernel stores the greatest score of each block of keys: a block's keys are in the
registers of lanes of one warp.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels.abi import INDEX_BLOCK, IndexerScores

from .indexer import HEADS, D
from .launch import SMEM_LIMIT, WARP, Kernel, element_type, i32, pointers
from .rows import ceil_div, load
from .wgmma import tma_atom, tma_tiles

HALF = 128  # columns that a thread or a warpgroup sums up
PRODUCTS = 256 * HALF  # of a tile
BOX = 8  # keys of the least box: this many rows of 128 bytes are swizzled alike
PUBLISHED = 4  # numbers that the producer publishes of a block


@dataclass(frozen=True)
class ScoresConfig:
    """Compile-time choices; every tile, count and size follows from them."""

    heads: int
    dtype: str
    paged: bool = False
    blocks: bool = False

    @property
    def keys_of_score(self) -> int:
        """Keys for which one score is stored, the greatest of theirs."""
        return INDEX_BLOCK if self.blocks else 1

    @property
    def stages_q(self) -> int:
        return 1 if self.paged else 2  # few queries: one block a CTA, more keys at a time

    @property
    def columns(self) -> int:
        """(query, head) pairs of a block."""
        return HALF if self.paged else 2 * HALF

    @property
    def element_bytes(self) -> int:
        return element_type(self.dtype).width // 8

    @property
    def scaled(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.columns // self.heads

    @property
    def q_bytes(self) -> int:
        return self.columns * D * self.element_bytes

    @property
    def key_elements(self) -> int:
        """The number of elements in memory that a key has."""
        return D

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that come with a tile's keys."""
        return 4 * self.tile_n * (self.paged and self.scaled)

    @property
    def k_bytes(self) -> int:
        return self.tile_n * D * self.element_bytes + self.scale_bytes

    @property
    def stages_k(self) -> int:
        return min(6, (SMEM_LIMIT - 2048 - self.stages_q * self.q_bytes) // self.k_bytes)

    @property
    def tile_m(self) -> int:
        return self.columns

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return PRODUCTS // self.columns

    @property
    def tile_bytes(self) -> int:
        """The bytes of shared memory for tiles, with what is published."""
        tiles = self.stages_q * self.q_bytes + self.stages_k * self.k_bytes
        return 1024 + tiles + 4 * PUBLISHED * self.stages_q

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}  # without it ptxas silently drops setmaxnreg

    def __post_init__(self):
        if self.heads not in HEADS:
            raise ValueError(f"heads must be 16, 32 or 64, got {self.heads}")
        if self.stages_k < 2:
            raise ValueError(f"SMEM holds {self.stages_k} stages of keys, wanted 2 at least: {self}")


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    s_q: Int32
    s_c: Int32
    blocks_of_entry: Int32  # blocks of queries of a batch entry
    first_block: Int32  # first block of this launch, counted over all batch entries
    blocks: Int32  # blocks of this launch
    splits: Int32  # splits of each block's key tiles
    stride: Int32  # between the scores of two queries, those of whole tiles
    skip: Int32  # a query that sees at most this many entries needs no scores


class Pages(NamedTuple):
    """The sizes by which the keys of a cache are found, for each batch entry."""

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


@dataclass(frozen=True)
class BlockScheduler:
    """The blocks that one CTA works on, in order. Each split of a block is one."""

    n: Extents

    @property
    def waves(self) -> Int32:
        ctas, work = cute.arch.grid_dim()[0], self.n.blocks * self.n.splits
        rounds = (work - 1) // ctas
        return rounds + Int32(self.place(rounds) < work - rounds * ctas)

    def place(self, wave: Int32) -> Int32:
        """Every other round goes backwards: if lengths fall steadily, all CTAs get the same sum."""
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        return cta + (wave % 2) * (ctas - 1 - 2 * cta)

    def at(self, wave: Int32) -> tuple[Int32, Int32]:
        """(block, counted within the launch, and split)"""
        i = wave * cute.arch.grid_dim()[0] + self.place(wave)
        return self.n.blocks - 1 - i // self.n.splits, i % self.n.splits


class ScoresKernel(Kernel):
    """The host side of such a kernel, `kernel(maps, arrays, n, pages)`, and the warp that loads.

    maps  (TMA, array) of q, of keys, and of the scales that come with these, or (None, None)
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,  # [b, s_c, D], or pages: [pages, page, D], with 8 bits [pages, page * (D + 4)], scales last
        k_scale: cute.Pointer,  # of an array's keys, or of the first page's, as float32
        weights: cute.Pointer,
        table: cute.Pointer,  # this, pages, width, page and box are read where keys are in pages
        start: cute.Pointer,
        stop: cute.Pointer,
        scores: cute.Pointer,
        b: Int32,
        s_q: Int32,
        s_c: Int32,
        first_block: Int32,
        blocks: Int32,
        splits: Int32,
        stride: Int32,
        skip: Int32,
        pages: Int32,
        width: Int32,
        page: Int32,
        box: Int32,
        ctas: Int32,  # at most, that is how many run at a time
        stream: cuda.CUstream,
    ):
        c = self.config
        n = Extents(s_q, s_c, ceil_div(s_q, Int32(c.queries)), first_block, blocks, splits, stride, skip)
        of_keys = (k, k_scale, page, pages) if cutlass.const_expr(c.paged) else (k, k_scale, s_c, b)
        arrays = Arrays(weights, table if cutlass.const_expr(c.paged) else k_scale, start, stop, scores)
        where = Pages(width, page, box) if cutlass.const_expr(c.paged) else None
        maps = (self.map_of_q(q, b * s_q), *self.maps_of_keys(*of_keys))
        self.launch(maps, arrays, n, where, ctas=cutlass.min(n.blocks * n.splits, ctas), stream=stream)

    def map_of_q(self, q: cute.Pointer, queries: Int32) -> tuple[cute.CopyAtom, cute.Tensor]:
        rows = cute.make_tensor(q, cute.make_layout((queries * self.config.heads, D), stride=(D, 1)))
        return tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, self.config.columns, D)

    def maps_of_keys(self, k: cute.Pointer, k_scale: cute.Pointer, length: Int32, count: Int32) -> tuple:
        """TMA of keys [count, length, D], and of the scales that follow each page's."""
        c, op = self.config, cpasync.CopyBulkTensorTileG2SOp()
        step = (D + 4 * (c.paged and c.scaled)) * Int64(length)  # elements
        keys = cute.make_tensor(k, cute.make_layout((length, D, count), stride=(D, 1, step)))
        map_of_keys = tma_atom(op, keys, BOX if c.paged else c.tile_n, D)
        if not c.scale_bytes:
            return map_of_keys, (None, None)
        scales = cute.make_tensor(k_scale, cute.make_layout((length, count), stride=(1, step // 4)))
        return map_of_keys, cpasync.make_tiled_tma_atom(op, scales, cute.make_layout((BOX, 1)), (BOX, 1))

    @cute.jit
    def produce(
        self,
        bar: Any,
        smem: Any,
        maps: tuple,
        arrays: Arrays,
        n: Extents,
        pages: Pages | None,
    ) -> Int32:
        """One warp, for every block of this CTA: it finds the key tiles to see, and loads Q and these tiles.

        Returns the number of all these tiles.
        """
        c, scheduler, fills = self.config, BlockScheduler(n), Int32(0)
        (tma_q, mQ), keys, scales = maps
        tma_k, mK = keys
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_wait()  # a kernel may still read the scores of the previous launch
        for wave in cutlass.range(scheduler.waves, unroll=1):
            block, split = scheduler.at(wave)
            entry, query0 = (n.first_block + block) // n.blocks_of_entry, (n.first_block + block) % n.blocks_of_entry
            query0 = query0 * c.queries
            at = Int64(entry) * n.s_q + cutlass.min(query0 + cutlass.min(lane, c.queries - 1), n.s_q - 1)
            start, stop = load(arrays.start + at), load(arrays.stop + at)
            scored = stop - start > n.skip
            lo = cute.arch.warp_redux_sync(start if scored else n.s_c, "min") // c.tile_n
            hi = ceil_div(cute.arch.warp_redux_sync(stop if scored else Int32(0), "max"), Int32(c.tile_n))
            tiles = cutlass.max(hi - lo, 0)
            first, last = lo + tiles * split // n.splits, lo + tiles * (split + 1) // n.splits
            q = bar.q.at(wave)
            q.wait_empty()
            if first < last:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_expect_tx(q.full, c.q_bytes)
                there = cute.domain_offset(((entry * n.s_q + query0) * c.heads, 0), mQ)
                gQ, sQ = tma_tiles(tma_q, cute.local_tile(there, (c.columns, D), (0, 0)), smem.q)
                cute.copy(tma_q, gQ, sQ[None, q.index], tma_bar_ptr=q.full)
            with cute.arch.elect_one():
                for i, x in enumerate((block, entry, first, last)):
                    smem.info[i, q.index] = x
                q.arrive_full()
            if cutlass.const_expr(c.paged):
                fills = self.load_pages(bar, smem, keys, scales, arrays.keys + entry * pages.width, pages, first, last,
                                        fills)  # fmt: skip
            else:
                gK, sK = tma_tiles(tma_k, cute.local_tile(mK[None, None, entry], (c.tile_n, D), (None, 0)), smem.k)
                for t in cutlass.range(first, last, unroll=1):
                    stage = self.begin_fill(bar, fills)
                    cute.copy(tma_k, gK[None, t], sK[None, stage], tma_bar_ptr=bar.k.full + stage)
                    fills += 1
        return fills

    @cute.jit
    def begin_fill(self, bar: Any, fills: Int32) -> Int32:
        """The stage of this fill of the ring of keys, once it is free, with its bytes announced."""
        k = bar.k.at(fills)
        k.wait_empty()
        with cute.arch.elect_one():
            k.expect_full(self.config.k_bytes)
        return k.index

    @cute.jit
    def load_pages(
        self,
        bar: Any,
        smem: Any,
        keys: tuple,
        scales: tuple,
        table: cute.Pointer,
        pages: Pages,
        first: Int32,
        last: Int32,
        fills: Int32,
    ) -> Int32:
        """Loads the key tiles from first to last, box by box, and their scales; returns the fills after them.

        A lane knows where one of the next 32 boxes is. Keys without a page, or after a page's end, are 0.
        """
        c, lane = self.config, cute.arch.lane_idx()
        (tma_k, mK), (tma_scale, mScale) = keys, scales
        boxes = c.tile_n // pages.box
        sK = cute.local_tile(smem.k, (BOX, c.key_elements), (None, 0, None))
        page, row = Int32(-1), Int32(0)
        for t in cutlass.range(first, last, unroll=1):
            before = (t - first) * boxes % WARP
            if before == 0:
                key = t * c.tile_n + lane * pages.box
                which = key // pages.page
                page, row = Int32(-1), key % pages.page
                if which < pages.width:
                    page = load(table + which)
            stage = self.begin_fill(bar, fills)
            for i in cutlass.range(boxes, unroll=1):
                its_page, its_row = (cute.arch.shuffle_sync(x, before + i) for x in (page, row))
                at = i * pages.box
                g, s = tma_tiles(tma_k, cute.local_tile(mK[None, None, its_page], (BOX, c.key_elements), (None, 0)), sK)
                cute.copy(tma_k, g[None, its_row // BOX], s[None, at // BOX, stage], tma_bar_ptr=bar.k.full + stage)
                if cutlass.const_expr(c.scale_bytes):
                    g, s = tma_tiles(
                        tma_scale,
                        cute.local_tile(mScale, (BOX, 1), (None, None)),
                        cute.local_tile(smem.k_scale, (BOX, 1), (None, None)),
                    )
                    cute.copy(tma_scale, g[None, its_row // BOX, its_page], s[None, at // BOX, stage],
                              tma_bar_ptr=bar.k.full + stage)  # fmt: skip
            fills += 1
        return fills

    def examples(self, variant: IndexerScores) -> tuple:
        arrays = ("q", "k", "float32", "float32", "int32", "int32", "int32", "float32")
        return *pointers(variant.dtype, *arrays), *(i32() for _ in range(13))


@cute.jit
def first_seen(arrays: Arrays, entry: Int32, query: Int32, n: Extents) -> Int32:
    """The first key that a query sees, of one that does not exist the last one's."""
    return load(arrays.start + (Int64(entry) * n.s_q + cutlass.min(query, n.s_q - 1)))


@cute.jit
def greatest_of_block(score: Float32, seen: cutlass.Boolean, strides: cutlass.Constexpr) -> Float32:
    """The greatest score that is seen and a number, of a block's keys, which are in lanes at these distances; else NaN.

    What comes after the last key that a query sees may count: the newest block is chosen without a score.
    """
    greatest = score if seen else Float32(float("nan"))
    for lanes in strides:
        other = cute.arch.shuffle_sync_bfly(greatest, lanes)
        greatest = cute.arch.fmax(greatest, other)  # of NaN and a number the number
    return greatest


def prefetch_maps(maps: tuple) -> None:
    for tma, _ in maps:
        if tma is not None:
            cpasync.prefetch_descriptor(tma)
