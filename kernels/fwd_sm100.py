"""Attention for Blackwell: head dimensions up to 256 with K and V apart, 512 with one latent that is both.

    warp 5       Q K0 V0  K1 V1  K2 V2 ...                              TMA into rings of tiles
    warp 4       S0   | S1 | O = P0 V0 | S2 | O += P1 V1 | ... Pn Vn     tcgen05.mma, all in TMEM
    warps 0-3         | P0             | P1              | ...      O    softmax; O to memory

Q K' of tile t + 1 is issued before P V of tile t, so both run under the softmax of t and t + 1. The scores have two
buffers. A thread of warps 0 to 3 holds one row of the scores, or half of one, and the same lanes of O: before P of a
tile is given to the products, the thread rescales its part of O where the maximum of a row has risen.

TMEM has 128 lanes x 512 columns of 32 bits. With 128 rows a lane is a row. At d = 512, 128 rows of O would fill all of
it, so a tile has 64 rows there: an accumulator of 64 rows takes 16 lanes of each warp's 32, and two of them, the two
halves of O's columns or the two buffers of the scores, lie side by side in the same columns:

    lanes of warp w     0 .. 15: rows 16 w ..    O[:, :256]    S, even tiles
                       16 .. 31: the same rows   O[:, 256:]    S, odd tiles

P goes to TMEM where a lane is a row. Else it goes to SMEM, for an operand in TMEM would have to lie in the lanes of the
accumulator, and O has both halves of them.

CTAs are persistent: one takes every gridDim-th tile of rows, and TMA runs ahead into the next one.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from .aot import Compiled, compile_ahead
from .lib.launch import SMEM_LIMIT, WARPGROUP, Shapes, element_type, i32, launch_facts, pointers
from .lib.rows import PUBLISHED, BoxedRows, Extents, RowTile, Walk, extents, load, store
from .lib.softmax import LN_2, LOG2_E, RowResults, exp2
from .lib.spans import Span, SpanOperands, open_span, read_span, span_of
from .lib.tcgen05 import (
    COLUMNS,
    K_MAJOR,
    LANES,
    MN_MAJOR,
    after_thread_sync,
    before_thread_sync,
    commit,
    sync_with_tmem,
    tiled_mma,
    tmem_copy,
    tmem_lanes,
    write_row,
)
from .lib.wgmma import (
    SLAB,
    not_,
    operand_a,
    operand_b,
    round_pair,
    slab_layout,
    tma_atom,
    tma_tiles,
    transposed,
    zero_rows,
)
from .variants import Variant

SCORE_BUFFERS = 2

SOFTMAX_WARPS, MMA_WARP, TMA_WARP, WARPS = 4, 4, 5, 6
BAR_SOFTMAX = 1  # named barrier of the softmax warps


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count, column and size follows from them."""

    d: int
    dtype: str
    shared_kv: bool
    stages: int = 2

    @property
    def tile_m(self) -> int:
        return 128 if self.d <= 256 else 64

    @property
    def tile_n(self) -> int:
        return 128 if self.d <= 128 else 64

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def lanes_per_row(self) -> int:
        """Of TMEM, and so threads that share a row of scores and of O."""
        return LANES // self.tile_m

    @property
    def scores_per_thread(self) -> int:
        return self.tile_n // self.lanes_per_row

    @property
    def outputs_per_thread(self) -> int:
        return self.d // self.lanes_per_row

    @property
    def ring_d(self) -> int:
        """Columns of a ring's tiles: a ring of K and one of V, or one for each half of what is both."""
        return self.d // 2 if self.shared_kv else self.d

    @property
    def key_rings(self) -> tuple[int, ...]:
        return (0, 1) if self.shared_kv else (0,)

    @property
    def value_rings(self) -> tuple[int, ...]:
        return (0, 1) if self.shared_kv else (1,)

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def ring_tile_bytes(self) -> int:
        return self.tile_n * self.ring_d * 2

    @property
    def weights_in_tmem(self) -> bool:
        return self.lanes_per_row == 1

    # First columns of what is in TMEM: O, scores, weights.

    @property
    def scores_column(self) -> int:
        return self.outputs_per_thread

    @property
    def weights_column(self) -> int:
        return self.scores_column + SCORE_BUFFERS * self.tile_n // self.lanes_per_row

    @property
    def columns(self) -> int:
        return self.weights_column + (self.tile_n // 2 if self.weights_in_tmem else 0)

    @property
    def smem_bytes(self) -> int:
        weights = 0 if self.weights_in_tmem else self.tile_m * self.tile_n * 2
        staged = self.lanes_per_row * self.tile_m * SLAB * 2 if self.shared_kv else 0
        small = 4 * PUBLISHED * 2 + 16 + 8 * self.barriers
        return 1024 + self.tile_m * self.row_bytes + 2 * self.stages * self.ring_tile_bytes + weights + staged + small

    @property
    def barriers(self) -> int:
        return 4 + SCORE_BUFFERS + 4 * self.stages

    def __post_init__(self):
        if self.d % (2 * SLAB if self.shared_kv else SLAB) or self.ring_d > 256:
            raise ValueError(f"d must be whole slabs of {SLAB} in each ring of at most 256 (one MMA's N): {self}")
        if self.lanes_per_row == 2 and not self.shared_kv:
            raise ValueError(f"64 rows need O in two halves, which only a latent has: {self}")
        if self.columns > COLUMNS:
            raise ValueError(f"needs {self.columns} columns of TMEM, there are {COLUMNS}: {self}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce."""

    q_full: cute.Pointer  # and info
    q_empty: cute.Pointer  # every thread but TMA's has read info, and the last scores are computed
    full: cute.Pointer  # (stage, ring): TMA has filled it
    empty: cute.Pointer  # (stage, ring): the products that read it are done
    s_full: cute.Pointer  # by buffer: scores are computed
    p_full: cute.Pointer  # of every softmax thread: scores are read, weights given, O is in units of the new maximum
    o_full: cute.Pointer  # P V is done, and the weights are read


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (tile_m, d)
    rings: cute.Tensor  # (tile_n, ring_d, stage, ring)
    p: cute.Tensor | None  # (tile_m, tile_n), where P is not in TMEM
    o: cute.Tensor | None  # (tile_m, SLAB, part): O on its way out, where TMA stores it
    info: cute.Tensor  # (PUBLISHED, row tile and span): what the TMA warp found out
    tmem: cute.Pointer  # where TMEM was allocated


@dataclass(frozen=True)
class Row:
    """The row of scores and of O that a softmax thread has, or its part of it."""

    thread: Int32
    row: Int32
    part: Int32  # 0 unless two threads share a row: then which half of the columns
    boxed: BoxedRows

    @staticmethod
    def of(c: Config, n: Extents) -> "Row":
        thread = cute.arch.thread_idx()[0]
        rows_per_warp = 32 // c.lanes_per_row
        row = thread // 32 * rows_per_warp + thread % rows_per_warp
        return Row(thread, row, thread % 32 // rows_per_warp, BoxedRows.at(n, [row]))


class FwdSm100:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = element_type(config.dtype)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,  # ignored where K is V
        o: cute.Pointer,
        start: cute.Pointer,
        stop: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        o_parts: cute.Pointer,
        scale_log2: Float32,
        b: Int32,
        s_q: Int32,
        s_kv: Int32,
        h_q: Int32,
        h_kv: Int32,
        splits: Int32,  # always 1: this kernel splits no keys
        ctas: Int32,  # at most, that is how many run at a time
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, False, b, s_q, h_q, h_kv, splits)
        shapes = Shapes(c.d, b, n)
        load = cpasync.CopyBulkTensorTileG2SOp()
        arrays, output = (k, v), (o,)
        if cutlass.const_expr(c.shared_kv):
            arrays, output = (k,), tuple(tma_atom(cpasync.CopyBulkTensorTileS2GOp(), shapes.rows(o), c.tile_m, SLAB))
        self.kernel(
            *tma_atom(load, shapes.rows(q), c.tile_m, c.d),
            output,
            tuple(tma_atom(load, shapes.keys(array, s_kv), c.tile_n, c.ring_d) for array in arrays),
            SpanOperands(start, stop, s_kv),
            RowResults(sink, lse, o_parts),
            scale_log2,
            n,
        ).launch(grid=(cutlass.min(n.tiles, ctas), 1, 1), block=(c.threads, 1, 1), smem=c.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        output: tuple,  # TMA to o where K is V, else a pointer
        keys: tuple,
        operands: SpanOperands,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        if warp == 0:
            with cute.arch.elect_one():
                for barrier, count, arrivals in (
                    (bar.q_full, 1, 1),
                    (bar.q_empty, 1, WARPGROUP + 32 + 1),
                    (bar.full, 2 * c.stages, 1),
                    (bar.empty, 2 * c.stages, 1),
                    (bar.s_full, SCORE_BUFFERS, 1),
                    (bar.p_full, 1, WARPGROUP),
                    (bar.o_full, 1, 1),
                ):
                    for i in cutlass.range_constexpr(count):
                        cute.arch.mbarrier_init(barrier + i, arrivals)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(COLUMNS, smem.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
        sync_with_tmem()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem)

        if warp < SOFTMAX_WARPS:
            self.attend(bar, smem, tmem, operands, output, results, scale_log2, n)
        elif warp == MMA_WARP:
            self.multiply(bar, smem, tmem, operands, n)
        else:
            self.load(bar, smem, (tma_q, mQ), keys, operands, n)

        sync_with_tmem()
        if warp == 0:
            cute.arch.dealloc_tmem(tmem, COLUMNS)

    def allocate(self) -> tuple[Barriers, Shared]:
        c = self.config
        smem = SmemAllocator()
        layouts = [
            slab_layout(self.dtype, c.tile_m, c.d),
            slab_layout(self.dtype, c.tile_n, c.ring_d, c.stages, 2),
            None if c.weights_in_tmem else slab_layout(self.dtype, c.tile_m, c.tile_n),
            slab_layout(self.dtype, c.tile_m, SLAB, c.lanes_per_row) if c.shared_kv else None,
        ]
        tiles = [x and smem.allocate_tensor(self.dtype, x.outer, 1024, swizzle=x.inner) for x in layouts]
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 2)), 16)
        tmem = smem.allocate_array(Int32, 1)
        mbar = smem.allocate_array(Int64, c.barriers)
        counts = (1, 1, 2 * c.stages, 2 * c.stages, SCORE_BUFFERS, 1, 1)
        bar = Barriers(*(mbar + sum(counts[:i]) for i in range(len(counts))))
        return bar, Shared(*tiles, info, tmem)

    # ---- TMA

    @cute.jit
    def load(self, bar: Barriers, smem: Shared, rows: tuple, keys: tuple, operands: SpanOperands, n: Extents):
        """One warp, for every row tile of this CTA: Q, what there is to see, and the tiles of the rings."""
        c = self.config
        tma_q, mQ = rows
        walk, fills0 = Walk.of(n), Int32(0)
        for turn in cutlass.range(walk.turns, unroll=1):
            tile = walk.tile(turn)
            span = open_span(operands, tile, c.tile_n)
            cute.arch.mbarrier_wait(bar.q_empty, (turn & 1) ^ 1)
            with cute.arch.elect_one():
                tile.publish(smem.info[None, 0])
                span.publish(smem.info[None, 1])
                cute.arch.mbarrier_arrive_and_expect_tx(bar.q_full, n.box_inner * n.box_outer * c.row_bytes)
            gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
            cute.copy(tma_q, gQ, sQ, tma_bar_ptr=bar.q_full)
            copies = self.ring_copies(smem, keys, tile, span)
            for t in cutlass.range(span.tiles, unroll=1):
                stage, parity = (fills0 + t) % c.stages, (fills0 + t) // c.stages & 1
                for ring, (atom, gmem, tiles) in enumerate(copies):
                    full, empty = (x + ring * c.stages + stage for x in (bar.full, bar.empty))
                    cute.arch.mbarrier_wait(empty, parity ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, c.ring_tile_bytes)
                    cute.copy(atom, gmem[None, t], tiles[None, stage], tma_bar_ptr=full)
            fills0 = fills0 + span.tiles
        # Nothing may arrive in the SMEM of a CTA that has ended.
        cute.arch.mbarrier_wait(bar.q_empty, (walk.turns & 1) ^ 1)
        for i in cutlass.range_constexpr(c.stages):
            stage, parity = (fills0 + i) % c.stages, (fills0 + i) // c.stages & 1
            for ring in range(2):
                cute.arch.mbarrier_wait(bar.empty + ring * c.stages + stage, parity ^ 1)

    def ring_copies(self, smem: Shared, keys: tuple, tile: RowTile, span: Span) -> tuple:
        """For each ring (atom, its tiles in memory, its stages)."""
        c = self.config
        sources = tuple((*keys[0], half) for half in range(2)) if c.shared_kv else tuple((*x, 0) for x in keys)
        return tuple(
            (
                atom,
                *tma_tiles(
                    atom,
                    tile.keys(array, span.lo, c.tile_n, c.ring_d)[None, None, None, half],
                    smem.rings[None, None, None, ring],
                ),
            )
            for ring, (atom, array, half) in enumerate(sources)
        )

    # ---- MMA

    @cute.jit
    def multiply(self, bar: Barriers, smem: Shared, tmem: cute.Pointer, operands: SpanOperands, n: Extents):
        """One warp, of which one lane issues: the products of every row tile of this CTA."""
        c = self.config
        fills0 = Int32(0)
        for turn in cutlass.range(Walk.of(n).turns, unroll=1):
            cute.arch.mbarrier_wait(bar.q_full, turn & 1)
            tile = RowTile.read(smem.info[None, 0], n)
            tiles = read_span(operands, tile, c.tile_n, smem.info[None, 1]).tiles
            cute.arch.mbarrier_arrive(bar.q_empty)
            if tiles == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bar.q_empty)
            else:
                self.issue_scores(bar, smem, tmem, fills0, tiles == 1)
                for t in cutlass.range(tiles, unroll=1):
                    if t + 1 < tiles:
                        self.issue_scores(bar, smem, tmem, fills0 + t + 1, t + 2 == tiles)
                    self.issue_output(bar, smem, tmem, fills0 + t, t == 0)
            fills0 = fills0 + tiles

    @cute.jit
    def issue_scores(self, bar: Barriers, smem: Shared, tmem: cute.Pointer, fill: Int32, last: cutlass.Boolean):
        """S <- Q K' of the rings' tile number `fill`, the last of its row tile or not.

        The scores that stood there, two tiles before, are read: P of that tile has been waited for.
        """
        c = self.config
        stage, parity, buffer = fill % c.stages, fill // c.stages & 1, fill % SCORE_BUFFERS
        mma, a, s = self.score_operands(smem, tmem)
        blocks = c.ring_d // 16
        for i, ring in enumerate(c.key_rings):
            cute.arch.mbarrier_wait(bar.full + ring * c.stages + stage, parity)
            b = operand_b(mma, smem.rings[None, None, None, ring])
            for k in range(blocks):
                mma.set(tcgen05.Field.ACCUMULATE, i + k > 0)
                cute.gemm(
                    mma,
                    s[None, None, None, buffer],
                    a[None, None, i * blocks + k],
                    b[None, None, k, stage],
                    s[None, None, None, buffer],
                )
            if ring not in c.value_rings:
                commit(bar.empty + ring * c.stages + stage)
        commit(bar.s_full + buffer)
        if last:
            commit(bar.q_empty)

    def score_operands(self, smem: Shared, tmem: cute.Pointer) -> tuple[cute.TiledMma, cute.Tensor, cute.Tensor]:
        """(mma, Q, both score buffers)"""
        c = self.config
        mma = tiled_mma(self.dtype, c.tile_m, c.tile_n, K_MAJOR)
        s = mma.make_fragment_C(cute.append(mma.partition_shape_C((c.tile_m, c.tile_n)), SCORE_BUFFERS))
        return mma, operand_a(mma, smem.q), cute.make_tensor(tmem + c.scores_column, s.layout)

    @cute.jit
    def issue_output(self, bar: Barriers, smem: Shared, tmem: cute.Pointer, fill: Int32, fresh: cutlass.Boolean):
        """O (+)= P V of the rings' tile number `fill`, the first of its row tile or not."""
        c = self.config
        stage, parity = fill % c.stages, fill // c.stages & 1
        mma, p, o = self.output_operands(smem, tmem)
        cute.arch.mbarrier_wait(bar.p_full, fill & 1)
        after_thread_sync()
        for i, ring in enumerate(c.value_rings):
            cute.arch.mbarrier_wait(bar.full + ring * c.stages + stage, parity)
            b = operand_b(mma, transposed(smem.rings[None, None, None, ring]))
            for k in range(c.tile_n // 16):
                mma.set(tcgen05.Field.ACCUMULATE, True if k else not_(fresh))
                cute.gemm(
                    mma, o[None, None, None, i], p[None, None, k], b[None, None, k, stage], o[None, None, None, i]
                )
            commit(bar.empty + ring * c.stages + stage)
        commit(bar.o_full)

    def output_operands(self, smem: Shared, tmem: cute.Pointer) -> tuple[cute.TiledMma, cute.Tensor, cute.Tensor]:
        """(mma, P, O with one mode more for the value rings)"""
        c = self.config
        source = tcgen05.OperandSource.TMEM if c.weights_in_tmem else tcgen05.OperandSource.SMEM
        mma = tiled_mma(self.dtype, c.tile_m, c.ring_d, MN_MAJOR, source)
        o = mma.make_fragment_C(cute.append(mma.partition_shape_C((c.tile_m, c.ring_d)), len(c.value_rings)))
        if c.weights_in_tmem:
            layout = mma.make_fragment_A(mma.partition_shape_A((c.tile_m, c.tile_n))).layout
            p = cute.make_tensor(cute.recast_ptr(tmem + c.weights_column, dtype=self.dtype), layout)
        else:
            p = operand_a(mma, smem.p)
        return mma, p, cute.make_tensor(tmem, o.layout)

    # ---- softmax

    @cute.jit
    def attend(
        self,
        bar: Barriers,
        smem: Shared,
        tmem: cute.Pointer,
        operands: SpanOperands,
        output: tuple,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        """Four warps, a thread of which has a row or half of one, of every row tile of this CTA."""
        c = self.config
        w = Row.of(c, n)
        fills0 = Int32(0)
        for turn in cutlass.range(Walk.of(n).turns, unroll=1):
            cute.arch.mbarrier_wait(bar.q_full, turn & 1)
            tile = RowTile.read(smem.info[None, 0], n)
            span = read_span(operands, tile, c.tile_n, smem.info[None, 1])
            cute.arch.mbarrier_arrive(bar.q_empty)
            exists, query, head = tile.place(w.boxed, 0)
            start, stop = span_of(tile, operands, query, exists)
            sink = load(results.sink + head)
            tiles = span.tiles

            row_max, row_sum = -Float32.inf, Float32(0.0)
            scores = cute.make_rmem_tensor(c.scores_per_thread, Float32)
            weights = cute.make_rmem_tensor(c.scores_per_thread // 2, Uint32)
            for t in cutlass.range(tiles, unroll=1):
                fill = fills0 + t
                self.read_scores(bar, tmem, w, fill, scores)
                self.mask(span, t, start, stop, w, scores)
                old_max = row_max
                row_max = self.raise_max(row_max, scores)
                shift = shift_of(row_max, scale_log2)
                factor = exp2(old_max * scale_log2 - shift)
                row_sum = self.exponentiate(row_sum * factor, shift, scale_log2, scores, weights)
                if t > 0:
                    cute.arch.mbarrier_wait(bar.o_full, (fill - 1) & 1)
                    after_thread_sync()
                    if cute.arch.vote_any_sync(factor != 1.0):
                        self.rescale(tmem, w, factor)
                self.write_weights(smem, tmem, w, weights)
                if span.needs_clearing(t):
                    self.clear_values(bar, smem, w, fill, span.unseen_from(t))
                before_thread_sync()
                cute.arch.mbarrier_arrive(bar.p_full)

            if cutlass.const_expr(c.lanes_per_row == 2):
                row_sum = row_sum + cute.arch.shuffle_sync_bfly(row_sum, offset=16)
            factor, lse = Float32(0.0), -Float32.inf
            if exists:
                if row_sum != 0.0:
                    shift = shift_of(row_max, scale_log2)
                    factor = 1.0 / (row_sum + exp2(sink * LOG2_E - shift))
                    lse = (cute.math.log2(row_sum, fastmath=True) + row_max * scale_log2) * LN_2
                if w.part == 0:
                    store(results.lse + tile.row_index(query, head), lse)
            if tiles > 0:
                cute.arch.mbarrier_wait(bar.o_full, (fills0 + tiles - 1) & 1)
                after_thread_sync()
            self.write_output(smem, tmem, w, tiles > 0, factor, tile, exists, tile.row_index(query, head), output)
            fills0 = fills0 + tiles
        if cutlass.const_expr(c.shared_kv):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def read_scores(self, bar: Barriers, tmem: cute.Pointer, w: Row, fill: Int32, scores: cute.Tensor):
        c = self.config
        buffer = fill % SCORE_BUFFERS
        cute.arch.mbarrier_wait(bar.s_full + buffer, fill // SCORE_BUFFERS & 1)
        after_thread_sync()
        mma = tiled_mma(self.dtype, c.tile_m, c.tile_n, K_MAJOR)
        s = mma.make_fragment_C(cute.append(mma.partition_shape_C((c.tile_m, c.tile_n)), SCORE_BUFFERS))
        s = cute.make_tensor(tmem + c.scores_column, s.layout)[(None, None), 0, 0, buffer]
        if cutlass.const_expr(c.lanes_per_row == 1):
            op = tcgen05.Ld32x32bOp(tcgen05.Repetition(c.scores_per_thread))
        else:  # 16 lanes of a warp's 32 hold scores: half of a row goes to each of two threads
            op = tcgen05.Ld16x32bx2Op(tcgen05.Repetition(c.scores_per_thread))
        tmem_copy(op, s, scores, w.thread)
        cute.arch.fence_view_async_tmem_load()

    @cute.jit
    def mask(self, span: Span, t: Int32, start: Int32, stop: Int32, w: Row, scores: cute.Tensor):
        """-inf for every key of tile t that the row does not see."""
        key0 = span.lo + t * span.tile_n
        if key0 < span.lo_all or key0 + span.tile_n > span.hi_all:
            column0 = key0 + w.part * cute.size(scores)
            first, last = start - column0, stop - column0
            for i in cutlass.range_constexpr(cute.size(scores)):
                if i < first or i >= last:
                    scores[i] = -Float32.inf

    @cute.jit
    def raise_max(self, row_max: Float32, scores: cute.Tensor) -> Float32:
        a, b = row_max, scores[0]  # two chains have half the latency of one
        for i in cutlass.range_constexpr(1, cute.size(scores) - 1, 2):
            a, b = cute.arch.fmax(a, scores[i]), cute.arch.fmax(b, scores[i + 1])
        a = cute.arch.fmax(cute.arch.fmax(a, b), scores[cute.size(scores) - 1])
        if cutlass.const_expr(self.config.lanes_per_row == 2):
            a = cute.arch.fmax(a, cute.arch.shuffle_sync_bfly(a, offset=16))
        return a

    @cute.jit
    def exponentiate(
        self, row_sum: Float32, shift: Float32, scale_log2: Float32, scores: cute.Tensor, weights: cute.Tensor
    ) -> Float32:
        """weights <- exp(scale (scores - max)) rounded; the sum, which takes them up unrounded."""
        a, b = row_sum, Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(weights)):
            low, high = (exp2(scores[2 * i + j] * scale_log2 - shift) for j in range(2))
            a, b = a + low, b + high
            weights[i] = round_pair(low, high, self.dtype)
        return a + b

    @cute.jit
    def rescale(self, tmem: cute.Pointer, w: Row, factor: Float32):
        c = self.config
        chunk = cute.make_rmem_tensor(SLAB, Float32)
        for i in cutlass.range(c.outputs_per_thread // SLAB, unroll=1):
            lanes = tmem_lanes(tmem + i * SLAB, SLAB)
            tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(SLAB)), lanes, chunk, w.thread)
            cute.arch.fence_view_async_tmem_load()
            for j in cutlass.range_constexpr(SLAB):
                chunk[j] = chunk[j] * factor
            tmem_copy(tcgen05.St32x32bOp(tcgen05.Repetition(SLAB)), lanes, chunk, w.thread)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def write_weights(self, smem: Shared, tmem: cute.Pointer, w: Row, weights: cute.Tensor):
        c = self.config
        if cutlass.const_expr(c.weights_in_tmem):
            lanes = tmem_lanes(tmem + c.weights_column, cute.size(weights))
            values = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=Float32), weights.layout)
            tmem_copy(tcgen05.St32x32bOp(tcgen05.Repetition(cute.size(weights))), lanes, values, w.thread)
            cute.arch.fence_view_async_tmem_store()
        else:
            write_row(smem.p, w.row, w.part * c.scores_per_thread, weights)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_values(self, bar: Barriers, smem: Shared, w: Row, fill: Int32, first: Int32):
        """Zero the rows of a tile of V from `first` on, which no query sees."""
        c = self.config
        stage = fill % c.stages
        for ring in c.value_rings:
            cute.arch.mbarrier_wait(bar.full + ring * c.stages + stage, fill // c.stages & 1)
            zero_rows(smem.rings[None, None, stage, ring], first, w.thread, WARPGROUP)

    @cute.jit
    def write_output(
        self,
        smem: Shared,
        tmem: cute.Pointer,
        w: Row,
        any_key: cutlass.Boolean,
        factor: Float32,
        tile: RowTile,
        exists: cutlass.Boolean,
        row: Int64,
        output: tuple,
    ):
        """o <- factor O, rounded; without any key there is no O."""
        c = self.config
        chunk = cute.make_rmem_tensor(SLAB, Float32)
        packed = cute.make_rmem_tensor(SLAB // 2, Uint32)
        for i in cutlass.range(c.outputs_per_thread // SLAB, unroll=1):
            chunk.fill(0.0)
            if any_key:
                lanes = tmem_lanes(tmem + i * SLAB, SLAB)
                tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(SLAB)), lanes, chunk, w.thread)
                cute.arch.fence_view_async_tmem_load()
            for j in cutlass.range_constexpr(cute.size(packed)):
                packed[j] = round_pair(chunk[2 * j] * factor, chunk[2 * j + 1] * factor, self.dtype)
            if cutlass.const_expr(c.shared_kv):
                self.store_slabs(smem, w, tile, i, packed, output)
            elif exists:
                target = output[0] + (row * c.d + i * SLAB)
                place = cute.recast_ptr(target, dtype=Uint32).align(16)
                cute.autovec_copy(packed, cute.make_tensor(place, packed.layout))

    @cute.jit
    def store_slabs(self, smem: Shared, w: Row, tile: RowTile, i: Int32, packed: cute.Tensor, output: tuple):
        """The i-th slab of every part of the rows, through SMEM. TMA leaves out rows that do not exist."""
        c = self.config
        tma_o, mO = output
        if w.thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=BAR_SOFTMAX, number_of_threads=WARPGROUP)
        write_row(smem.o[None, None, w.part], w.row, 0, packed)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BAR_SOFTMAX, number_of_threads=WARPGROUP)
        if w.thread == 0:  # a copy to memory is issued by every lane that comes to it
            for part in cutlass.range_constexpr(c.lanes_per_row):
                slab = part * c.outputs_per_thread // SLAB + i
                gO, sO = tma_tiles(tma_o, tile.of(mO, c.tile_m, SLAB)[None, None, slab], smem.o[None, None, part])
                cute.copy(tma_o, sO, gO)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def shift_of(row_max: Float32, scale_log2: Float32) -> Float32:
    """What to subtract in the exponent; 0 for a row without keys, whose exponentials are exp2(-inf) = 0."""
    return Float32(0.0) if row_max == -Float32.inf else row_max * scale_log2


def compile(variant: Variant, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.shared_kv)
    return compile_ahead(
        FwdSm100(config),
        FwdSm100.kernel,
        *pointers(variant.dtype, "q", "k", "v", "o", "int32", "int32", "float32", "float32", "float32"),
        Float32(1.0),
        *(i32() for _ in range(7)),
        name="fwd_sm100",
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(config),
    )
