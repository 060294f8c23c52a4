"""The lightning indexer's scores for Hopper: k_scale[s] * sum over h of weights[t, h] * max(q[t, h] . k[s], 0).

The operands are swapped: the 64 rows of a product are keys, and its columns are the heads of a few queries. So the sum
over heads runs along a thread's own registers, whose weights it keeps, and needs two shuffles for every query.

    producer warp    Q of a block    K0  K1  K2 ...     TMA
    consumer WG 0    keys  0 .. 63, columns   0 .. 127   product | sum | product | sum | ...
    consumer WG 1    keys 64 .. 127, columns  0 .. 127             the same, each as it comes
    consumer WG 2    keys  0 .. 63, columns 128 .. 255
    consumer WG 3    keys 64 .. 127, columns 128 .. 255

112 registers hold an accumulator of 64 x 128 and the weights of 128 columns, so four consumers fit: while some sum up,
the others' products run. In 8 bits a product takes 256 clocks and its sum some 190 clocks of every scheduler, so a tile
takes 1024 clocks of the tensor cores and 760 of the schedulers.

With a cache, a table names the pages of keys, and queries are few. A tile is then 256 keys, 64 for each consumer, by
the 128 columns of a block, so that fewer products are wasted. Boxes that divide a page and a tile load a page's keys,
and in 8 bits their scales, which follow all keys of a page.

The kernel loads only key tiles that some query of the block sees; a query that takes all it sees needs none. Scores
that a query does not see may be anything: their reader knows what the query sees. CTAs are persistent: one takes every
gridDim-th block, forth and back, from the last on, so that under a causal mask all have the same work. Blocks may be
split by their key tiles.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_ptr

from kernels.abi import IndexerScores
from kernels.aot import Compiled, compile_ahead
from kernels.lib.launch import SMEM_LIMIT, WARP, WARPGROUP, i32, launch_facts
from kernels.lib.ptx import ptx
from kernels.lib.rows import ceil_div, load, store
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import K_MAJOR, accumulator, multiply, operand_a, operand_b, tma_atom, tma_tiles

D = 128  # of queries and keys
HALF = 128  # columns of a warpgroup's product
ROWS = 64  # keys of a warpgroup's product
GROUPS = 4  # warpgroups that share a block's columns and a tile's keys
CONSUMERS = GROUPS * WARPGROUP  # threads
BLOCK = 8  # columns of an accumulator; a quad's lanes hold two of each eight
BOX = 8  # keys of the least box: this many rows of 128 bytes are swizzled alike

ELEMENT = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float8_e4m3fn": cutlass.Float8E4M3FN}


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    heads: int
    dtype: str
    paged: bool = False

    @property
    def stages_q(self) -> int:
        return 1 if self.paged else 2  # few queries: one block a CTA, more keys at a time

    @property
    def columns(self) -> int:
        """(query, head) pairs of a block."""
        return HALF if self.paged else 2 * HALF

    @property
    def parts(self) -> int:
        """Parts of a tile's keys, one for each consumer."""
        return GROUPS * HALF // self.columns

    @property
    def tile(self) -> int:
        """Keys of a tile."""
        return self.parts * ROWS

    @property
    def element_bytes(self) -> int:
        return ELEMENT[self.dtype].width // 8

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
    def scale_bytes(self) -> int:
        """Bytes of the scales that come with a tile's keys."""
        return 4 * self.tile * (self.paged and self.scaled)

    @property
    def k_bytes(self) -> int:
        return self.tile * D * self.element_bytes + self.scale_bytes

    @property
    def stages_k(self) -> int:
        return min(6, (SMEM_LIMIT - 2048 - self.stages_q * self.q_bytes) // self.k_bytes)

    @property
    def tile_m(self) -> int:
        return self.columns

    @property
    def tile_n(self) -> int:
        return self.tile

    @property
    def threads(self) -> int:
        return CONSUMERS + WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return 24, 112

    @property
    def smem_bytes(self) -> int:
        tiles = self.stages_q * self.q_bytes + self.stages_k * self.k_bytes
        return 1024 + tiles + 4 * PUBLISHED * self.stages_q + 8 * 2 * (self.stages_q + self.stages_k)

    def __post_init__(self):
        if self.heads not in (16, 32, 64):
            raise ValueError(f"heads must be 16, 32 or 64, got {self.heads}")
        if self.stages_k < 2:
            raise ValueError(f"SMEM holds {self.stages_k} stages of keys, wanted 2 at least: {self}")


PUBLISHED = 4  # numbers that the producer publishes of a block


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
    keys: (
        cute.Pointer
    )  # k_scale, float32 [b, s_c], not read where keys have no scales; for pages the table, int32 [b, width]
    start: cute.Pointer  # int32 [b, s_q]
    stop: cute.Pointer  # int32 [b, s_q]
    scores: cute.Pointer  # float32 [blocks * queries of a block, stride]


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, one for each stage."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (columns, D, stage)
    k: cute.Tensor  # (tile, D, stage)
    k_scale: cute.Tensor | None  # (tile, stage), for pages
    info: cute.Tensor  # (PUBLISHED, stage of q)


@dataclass(frozen=True)
class Walk:
    """The work items of one CTA, in order."""

    n: Extents

    @property
    def turns(self) -> Int32:
        ctas, work = cute.arch.grid_dim()[0], self.n.blocks * self.n.splits
        rounds = (work - 1) // ctas
        return rounds + Int32(self.place(rounds) < work - rounds * ctas)

    def place(self, turn: Int32) -> Int32:
        """Every other round goes backwards: if lengths fall steadily, all CTAs get the same sum."""
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        return cta + (turn % 2) * (ctas - 1 - 2 * cta)

    def at(self, turn: Int32) -> tuple[Int32, Int32]:
        """(block, counted within the launch, and split)"""
        i = turn * cute.arch.grid_dim()[0] + self.place(turn)
        return self.n.blocks - 1 - i // self.n.splits, i % self.n.splits


class IndexScoresSm90:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = ELEMENT[config.dtype]

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
        self.kernel(*self.map_of_q(q, b * s_q), *self.maps_of_keys(*of_keys), arrays, n, where).launch(
            grid=(cutlass.min(n.blocks * n.splits, ctas), 1, 1),
            block=(c.threads, 1, 1),
            smem=c.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def map_of_q(self, q: cute.Pointer, queries: Int32) -> tuple[cute.CopyAtom, cute.Tensor]:
        rows = cute.make_tensor(q, cute.make_layout((queries * self.config.heads, D), stride=(D, 1)))
        return tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, self.config.columns, D)

    def maps_of_keys(self, k: cute.Pointer, k_scale: cute.Pointer, each: Int32, count: Int32) -> tuple:
        """TMA of keys [count, each, D], and of the scales that follow each page's."""
        c, op = self.config, cpasync.CopyBulkTensorTileG2SOp()
        step = (D + 4 * (c.paged and c.scaled)) * Int64(each)  # elements
        keys = cute.make_tensor(k, cute.make_layout((each, D, count), stride=(D, 1, step)))
        maps = tma_atom(op, keys, BOX if c.paged else c.tile, D)
        if not c.scale_bytes:
            return *maps, None, None
        scales = cute.make_tensor(k_scale, cute.make_layout((each, count), stride=(1, step // 4)))
        return *maps, *cpasync.make_tiled_tma_atom(op, scales, cute.make_layout((BOX, 1)), (BOX, 1))

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_scale: cute.CopyAtom | None,
        mScale: cute.Tensor | None,
        arrays: Arrays,
        n: Extents,
        pages: Pages | None,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            if cutlass.const_expr(tma_scale is not None):
                cpasync.prefetch_descriptor(tma_scale)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(c.stages_q):
                    cute.arch.mbarrier_init(bar.q_full + s, 1)
                    cute.arch.mbarrier_init(bar.q_empty + s, CONSUMERS // WARP)
                for s in cutlass.range_constexpr(c.stages_k):
                    cute.arch.mbarrier_init(bar.k_full + s, 1)
                    cute.arch.mbarrier_init(bar.k_empty + s, CONSUMERS // WARP)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # the choice that follows waits for this grid itself

        if warp * WARP >= CONSUMERS:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp * WARP == CONSUMERS:
                self.produce(bar, smem, (tma_q, mQ), (tma_k, mK), (tma_scale, mScale), arrays, n, pages)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, arrays, n)

    def allocate(self) -> tuple[Barriers, Shared]:
        c, smem = self.config, TileAllocator(self.dtype)
        q, k = smem.tile(c.columns, D, c.stages_q), smem.tile(c.tile, D, c.stages_k)
        k_scale = smem.allocate_tensor(Float32, cute.make_layout((c.tile, c.stages_k)), 128) if c.scale_bytes else None
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, c.stages_q)), 16)
        rings = (c.stages_q, c.stages_q, c.stages_k, c.stages_k)
        return Barriers(*(smem.allocate_array(Int64, stages) for stages in rings)), Shared(q, k, k_scale, info)

    @cute.jit
    def produce(
        self,
        bar: Barriers,
        smem: Shared,
        rows: tuple,
        keys: tuple,
        scales: tuple,
        arrays: Arrays,
        n: Extents,
        pages: Pages | None,
    ):
        """One warp, for every block of this CTA: it finds the key tiles to see, and loads Q and these tiles."""
        c, walk, fills = self.config, Walk(n), Int32(0)
        (tma_q, mQ), (tma_k, mK) = rows, keys
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_wait()  # a kernel may still read the scores of the previous launch
        for turn in cutlass.range(walk.turns, unroll=1):
            block, split = walk.at(turn)
            entry, query0 = (n.first_block + block) // n.blocks_of_entry, (n.first_block + block) % n.blocks_of_entry
            query0 = query0 * c.queries
            at = Int64(entry) * n.s_q + cutlass.min(query0 + cutlass.min(lane, c.queries - 1), n.s_q - 1)
            start, stop = load(arrays.start + at), load(arrays.stop + at)
            scored = stop - start > n.skip
            lo = cute.arch.warp_redux_sync(start if scored else n.s_c, "min") // c.tile
            hi = ceil_div(cute.arch.warp_redux_sync(stop if scored else Int32(0), "max"), Int32(c.tile))
            tiles = cutlass.max(hi - lo, 0)
            first, last = lo + tiles * split // n.splits, lo + tiles * (split + 1) // n.splits
            stage_q = turn % c.stages_q
            cute.arch.mbarrier_wait(bar.q_empty + stage_q, (turn // c.stages_q & 1) ^ 1)
            if first < last:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_expect_tx(bar.q_full + stage_q, c.q_bytes)
                there = cute.domain_offset(((entry * n.s_q + query0) * c.heads, 0), mQ)
                gQ, sQ = tma_tiles(tma_q, cute.local_tile(there, (c.columns, D), (0, 0)), smem.q)
                cute.copy(tma_q, gQ, sQ[None, stage_q], tma_bar_ptr=bar.q_full + stage_q)
            with cute.arch.elect_one():
                for i, x in enumerate((block, entry, first, last)):
                    smem.info[i, stage_q] = x
                cute.arch.mbarrier_arrive(bar.q_full + stage_q)
            if cutlass.const_expr(c.paged):
                fills = self.load_pages(bar, smem, keys, scales, arrays.keys + entry * pages.width, pages, first, last,
                                        fills)  # fmt: skip
            else:
                gK, sK = tma_tiles(tma_k, cute.local_tile(mK[None, None, entry], (c.tile, D), (None, 0)), smem.k)
                for t in cutlass.range(first, last, unroll=1):
                    stage = self.begin_fill(bar, fills)
                    cute.copy(tma_k, gK[None, t], sK[None, stage], tma_bar_ptr=bar.k_full + stage)
                    fills += 1

    @cute.jit
    def begin_fill(self, bar: Barriers, fills: Int32) -> Int32:
        """The stage of this fill of the ring of keys, once it is free, with its bytes announced."""
        stage = fills % self.config.stages_k
        cute.arch.mbarrier_wait(bar.k_empty + stage, (fills // self.config.stages_k & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar.k_full + stage, self.config.k_bytes)
        return stage

    @cute.jit
    def load_pages(
        self,
        bar: Barriers,
        smem: Shared,
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
        boxes = c.tile // pages.box
        sK = cute.local_tile(smem.k, (BOX, D), (None, 0, None))
        page, row = Int32(-1), Int32(0)
        for t in cutlass.range(first, last, unroll=1):
            before = (t - first) * boxes % WARP
            if before == 0:
                key = t * c.tile + lane * pages.box
                which = key // pages.page
                page, row = Int32(-1), key % pages.page
                if which < pages.width:
                    page = load(table + which)
            stage = self.begin_fill(bar, fills)
            for i in cutlass.range(boxes, unroll=1):
                its_page, its_row = (cute.arch.shuffle_sync(x, before + i) for x in (page, row))
                at = i * pages.box
                g, s = tma_tiles(tma_k, cute.local_tile(mK[None, None, its_page], (BOX, D), (None, 0)), sK)
                cute.copy(tma_k, g[None, its_row // BOX], s[None, at // BOX, stage], tma_bar_ptr=bar.k_full + stage)
                if cutlass.const_expr(c.scale_bytes):
                    g, s = tma_tiles(
                        tma_scale,
                        cute.local_tile(mScale, (BOX, 1), (None, None)),
                        cute.local_tile(smem.k_scale, (BOX, 1), (None, None)),
                    )
                    cute.copy(tma_scale, g[None, its_row // BOX, its_page], s[None, at // BOX, stage],
                              tma_bar_ptr=bar.k_full + stage)  # fmt: skip
            fills += 1
        return fills

    @cute.jit
    def consume(self, bar: Barriers, smem: Shared, arrays: Arrays, n: Extents):
        """One warpgroup scores its keys of every tile with its columns of every block of this CTA."""
        c, walk = self.config, Walk(n)
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        thread, mma = cute.arch.thread_idx()[0] % WARPGROUP, product(self.dtype)
        a = operand_a(mma, cute.local_tile(smem.k, (ROWS, D), (group % c.parts, 0, None)))
        b = operand_b(mma, cute.local_tile(smem.q, (HALF, D), (group // c.parts, 0, None)))
        sums = Sums.of(c, mma, group // c.parts, thread)
        key0, stage, parity = kept(group % c.parts * ROWS + key_of(thread)), Int32(0), Int32(0)
        for turn in cutlass.range(walk.turns, unroll=1):
            stage_q = turn % c.stages_q
            cute.arch.mbarrier_wait(bar.q_full + stage_q, turn // c.stages_q & 1)
            block, entry, first, last = (cute.arch.make_warp_uniform(smem.info[i, stage_q]) for i in range(PUBLISHED))
            if first < last:
                query0 = ((n.first_block + block) - entry * n.blocks_of_entry) * c.queries
                sums.take_weights(arrays.weights, entry, query0, n)
                out = sums.place(arrays.scores + (Int64(block) * c.queries * n.stride + first * c.tile + key0), n)
                scales = arrays.keys + Int64(entry) * n.s_c
                for t in cutlass.range(first, last, unroll=1):
                    cute.arch.mbarrier_wait(bar.k_full + stage, parity)
                    multiply(mma, sums.acc, a[None, None, None, stage], b[None, None, None, stage_q], fresh=True)
                    scale = self.scale_of(smem, stage, scales, key0, t, n)
                    warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(bar.k_empty + stage)
                    sums.store(out, scale, query0, n)
                    out, stage = out + c.tile, stage + 1
                    if stage == c.stages_k:
                        stage, parity = Int32(0), parity ^ 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bar.q_empty + stage_q)

    @cute.jit
    def scale_of(self, smem: Shared, stage: Int32, scales: cute.Pointer, key0: Int32, t: Int32, n: Extents) -> Float32:
        scale = Float32(1.0)
        if cutlass.const_expr(self.config.scale_bytes):
            scale = smem.k_scale[key0, stage]
        elif cutlass.const_expr(self.config.scaled):
            scale = load(scales + cutlass.min(t * self.config.tile + key0, n.s_c - 1))
        return scale


def product(dtype) -> cute.TiledMma:
    """ROWS keys by half of a block's columns."""
    shape, source = (ROWS, HALF), warpgroup.OperandSource.SMEM
    if dtype.width == 8:
        op = warpgroup.MmaF8Op(dtype, dtype, Float32, (*shape, 32), source, K_MAJOR, K_MAJOR)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (*shape, 16), source, K_MAJOR, K_MAJOR)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def key_of(thread: Int32) -> Int32:
    """The key, among a warpgroup's, whose sums a lane ends up with: an even lane of a quad has the quad's first row."""
    return thread // WARP * 16 + thread % WARP // 4 + thread % 2 * 8


def kept(x: Int32) -> Int32:
    """x, kept in a register: LLVM would otherwise compute it anew in every iteration."""
    return ptx("mov.b32 $0, $1;", Int32(x), gives=(Int32,))[0]


@dataclass(frozen=True)
class Sums:
    """A warpgroup's products, and the weighted sums of them over heads.

    A thread's accumulator is indexed (c, r, j): column 8 j + 2 (lane % 4) + c, row r of its two.
    """

    heads: int
    half: Int32
    lane: Int32
    acc: cute.Tensor
    weights: cute.Tensor  # (c, j)

    @staticmethod
    def of(c: Config, mma: cute.TiledMma, half: Int32, thread: Int32) -> "Sums":
        weights = cute.make_rmem_tensor((2, HALF // BLOCK), Float32)
        return Sums(c.heads, half, kept(thread % 4), accumulator(mma, HALF), weights)

    @property
    def queries(self) -> int:
        return HALF // self.heads

    @property
    def mine(self) -> int:
        """How many of these queries' sums a lane ends up with: lanes 2 and 3 of a quad get the last ones."""
        return self.queries // 2

    @property
    def first(self) -> Int32:
        """The first of them, within the block."""
        return self.half * self.queries + self.lane // 2 * self.mine

    @cute.jit
    def take_weights(self, weights: cute.Pointer, entry: Int32, query0: Int32, n: Extents):
        """The weights of this thread's columns. A query that does not exist gets those of the last one."""
        for u in cutlass.range_constexpr(self.queries):
            query = cutlass.min(query0 + self.half * self.queries + u, n.s_q - 1)
            row = weights + ((Int64(entry) * n.s_q + query) * self.heads + self.lane * 2)
            for j in cutlass.range_constexpr(self.heads // BLOCK):
                pair = cute.make_tensor((row + j * BLOCK).align(8), cute.make_layout(2))
                cute.autovec_copy(pair, self.weights[None, u * (self.heads // BLOCK) + j])

    @cute.jit
    def place(self, out: cute.Pointer, n: Extents) -> cute.Pointer:
        """The place of this lane's first query, in a block that begins at `out`."""
        return out + Int64(self.first) * n.stride

    @cute.jit
    def store(self, out: cute.Pointer, scale: Float32, query0: Int32, n: Extents):
        """Sums up the accumulated products, and stores them at out[query * stride] for this lane's queries."""
        acc = cute.make_tensor(self.acc.iterator, cute.make_layout((2, 2, HALF // BLOCK)))
        odd, high = self.lane % 2 == 1, self.lane >= 2
        for u in cutlass.range_constexpr(self.mine):
            sums = cute.make_rmem_tensor((2, 2), Float32)
            sums.fill(0.0)
            for j in cutlass.range_constexpr(self.heads // BLOCK):
                for c in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        for r in cutlass.range_constexpr(2):
                            column = (u + which * self.mine) * (self.heads // BLOCK) + j
                            sums[r, which] = add_relu(acc[c, r, column], self.weights[c, column], sums[r, which])
            for r in cutlass.range_constexpr(2):
                first, second = sums[r, 0], sums[r, 1]
                sums[r, 0] = (second if high else first) + cute.arch.shuffle_sync_bfly(first if high else second, 2)
            first, second = sums[0, 0], sums[1, 0]
            total = (second if odd else first) + cute.arch.shuffle_sync_bfly(first if odd else second, 1)
            if query0 + self.first + u < n.s_q:
                store(out + Int64(u) * n.stride, total * scale)


def add_relu(x: Float32, weight: Float32, total: Float32) -> Float32:
    """total + weight * max(x, 0), rounded once; NaN stays NaN."""
    text = "{ .reg .f32 cut; max.NaN.f32 cut, $1, 0f00000000; fma.rn.f32 $0, cut, $2, $3; }"
    return ptx(text, Float32(x), Float32(weight), Float32(total), gives=(Float32,), pure=True)[0]


def compile(variant: IndexerScores, out_dir: Path) -> Compiled:
    config, element = Config(variant.heads, variant.dtype, variant.paged), ELEMENT[variant.dtype]
    return compile_ahead(
        IndexScoresSm90(config),
        IndexScoresSm90.kernel,
        *map(array, (element, element, Float32, Float32, Int32, Int32, Int32, Float32)),
        *(i32() for _ in range(13)),
        name="indexer_scores_sm90",
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(config),
    )


def array(dtype) -> cute.Pointer:
    return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=16 if dtype.width < 32 else 4)
