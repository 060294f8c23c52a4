"""Attention for Hopper, head dimensions up to 256, separate K and V.

    producer warp     Q  K0 V0  K1 V1  K2 V2 ...               TMA into rings of Q, K and V tiles
    clearing warps          V0     V1     V2 ...               unseen values become 0, because 0 * NaN is NaN

    consumer WG 0     S0 | S1 + P0 V0 | S2 + P1 V1 | ... Pn Vn     rows  0 .. 63
    consumer WG 1     S0 | S1 + P0 V0 | S2 + P1 V1 | ... Pn Vn     rows 64 .. 127, ...

Warps are specialised. Q K' of tile t + 1 is issued before P V of tile t, so the softmax of t + 1 runs under the tensor
cores: FlashAttention-3's overlap within a warpgroup. P stays in registers.

A tile of rows that sees few keys in all, such as a window, has a single tile of them, and there is nothing to issue
ahead. Its products are narrower, and WG 1 begins when WG 0 has its P: in step, each would wait for the other.

    consumer WG 0     S0      | P0 V0   O | S0'     | P0' V0'
    consumer WG 1     P V   O | S0        | P0 V0   O | S0' ...

CTAs are persistent, and the producer runs ahead into the next tile of rows: Q has two stages where they fit, and its
SMEM is free after the last scores, because O goes from registers to memory.
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.forward import ForwardKernel
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.output import store_output, store_part
from kernels.lib.rows import (
    ROWS_OF_WARPGROUP,
    BoxedRows,
    Extents,
    PlacedTile,
    RowTile,
    ceil_div,
)
from kernels.lib.softmax import ROWS, RowResults, Softmax, exp2, rescale_rows
from kernels.lib.spans import RowSpans, Span, SpanOperands, open_span, prefetch_span, read_span
from kernels.lib.splits import own_part
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    round_to,
    tiled_mma,
    tma_tiles,
    transposed,
    wait_after,
    zero_rows,
)

from .config import CLEARERS, Config
from .smem import Barriers, Shared, allocate

L2_KEYS = 32 * 1024 * 1024  # bytes of K and V that stay in L2 while others pass
P_READY = 1  # named barriers, by stage of Q: WG 0 has its P; 0 is sync_threads'
Q_CLEARED = 3  # named barrier: rows of Q's tiles that no box has are zeros


@dataclass(frozen=True)
class Scores:
    """Scores of a tile of keys, or of its first keys."""

    mma: cute.TiledMma
    acc: cute.Tensor
    keys: int


@dataclass(frozen=True)
class RoundedSoftmax(Softmax):
    """With a factor of two products, each of which is rounded: exactly 1 where the maximum stays.

    At d 128 ptxas makes every WGMMA wait for the one before it where the factor is a difference's.
    """

    @cute.jit
    def factor_of(self, r: cutlass.Constexpr) -> Float32:
        old = self.old_max[r] * self.scale(r)
        old = -Float32.inf if self.old_max[r] == -Float32.inf else old  # else ptxas would not round this product
        return exp2(old - self.shift(r))


def softmax_of(d: int, scale_log2: Float32) -> Softmax:
    kind = RoundedSoftmax if d == 128 else Softmax
    return kind(scale_log2, *(cute.make_rmem_tensor(ROWS, Float32) for _ in range(5)))


@dataclass(frozen=True)
class Consumer:
    """State that a consumer thread keeps from row tile to row tile: barriers, SMEM, operands and registers."""

    bar: Barriers
    smem: Shared
    thread: Int32  # within its warpgroup
    group: Int32
    n: Extents
    pv: cute.TiledMma
    a: cute.Tensor  # Q, (..., stage)
    b_k: cute.Tensor
    b_v: cute.Tensor
    scores: Scores
    few: Scores  # scores of `Config.few` keys, in the same registers
    p: cute.Tensor
    out: cute.Tensor
    softmax: Softmax


class MhaFwdSm90(ForwardKernel):
    symbol = "mha_fwd_sm90"

    @property
    def products(self):
        """The type of what products take."""
        return self.dtype

    @cute.kernel
    def kernel(
        self,
        rows_of_q: tuple,
        o: cute.Pointer,
        sources: tuple,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        c = self.config
        tma_k, mK, tma_v, mV, operands = sources[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = allocate(c, self.dtype, self.products)
        rows = n.box_inner * n.box_outer
        consumers = WARPGROUP * ceil_div(rows, ROWS_OF_WARPGROUP)  # threads of other warpgroups have no rows
        if warp == 0:
            for atom in (rows_of_q[0], tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                bar.initialise(c, consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # `combine`, where it follows, waits for this grid itself

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                self.produce(bar, smem, rows_of_q, (tma_k, mK), (tma_v, mV), operands, n)
            else:
                self.clear_q(smem, rows, consumers)
                self.clear(bar, smem, operands, n)
        elif warp * WARP < WARPGROUP + consumers:
            cute.arch.setmaxregister_increase(c.registers[1])
            if rows % ROWS_OF_WARPGROUP != 0:
                cute.arch.barrier(barrier_id=Q_CLEARED, number_of_threads=CLEARERS + consumers)
            self.consume(self.consumer(bar, smem, scale_log2, n), operands, o, results, n)

    @cute.jit
    def produce(
        self, bar: Barriers, smem: Shared, rows: tuple, keys: tuple, values: tuple, operands: SpanOperands, n: Extents
    ):
        """One warp, for every row tile of this CTA: it loads Q, opens the span, and loads the tiles of K and V."""
        c = self.config
        tma_q, mQ = rows
        scheduler, fills0 = self.scheduler(operands, n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            if cutlass.const_expr(c.stages_q == 1):  # otherwise the wait for the keys would be as long as that for Q
                bounds = prefetch_span(operands, tile, c.tile_m)
            q, slot = bar.q.at(wave), wave % c.slots
            full = q.full
            q.wait_empty()
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, n.box_inner * n.box_outer * c.row_bytes)
            gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
            cute.copy(tma_q, gQ, sQ[None, q.index], tma_bar_ptr=q.full)
            if cutlass.const_expr(c.stages_q > 1):
                bounds = prefetch_span(operands, tile, c.tile_m)
            (span,) = own_part((self.open(operands, tile, bounds),), tile, 1)
            with cute.arch.elect_one():
                tile.publish(smem.info[None, 0, slot])
                span.publish(smem.info[None, 1, slot])
                q.arrive_full()
            self.load_keys(bar, smem, keys, values, tile, span, fills0)
            fills0 = fills0 + key_tiles(span)

    @cute.jit
    def load_keys(
        self, bar: Barriers, smem: Shared, keys: tuple, values: tuple, tile: RowTile, span: Span, fills0: Int32
    ):
        """All tiles of K and V of one row tile."""
        c = self.config
        copies = tuple(
            (atom, *tma_tiles(atom, tile.keys(m, span.lo, c.tile_n, c.d)[None, None, None, 0], s), ring)
            for (atom, m), s, ring in ((keys, smem.k, bar.k), (values, smem.v, bar.v_landed))
        )
        for t in cutlass.range(key_tiles(span), unroll=1):
            for atom, gmem, stages, ring in copies:
                state = ring.at(fills0 + t)
                state.wait_empty()
                with cute.arch.elect_one():
                    state.expect_full(c.key_tile_bytes)
                cute.copy(atom, gmem[None, t], stages[None, state.index], tma_bar_ptr=state.full)

    @cute.jit
    def clear_q(self, smem: Shared, rows: Int32, consumers: Int32):
        """Three warps, once: they clear rows that a warpgroup has and no box has, so that their scores are numbers
        too.
        """
        c, thread = self.config, cute.arch.thread_idx()[0] - WARP
        if rows % ROWS_OF_WARPGROUP != 0:
            stop = ceil_div(rows, ROWS_OF_WARPGROUP) * ROWS_OF_WARPGROUP
            for s in cutlass.range_constexpr(c.stages_q):
                zero_rows(smem.q[None, None, s], rows, thread, CLEARERS, stop)
            cute.arch.barrier_arrive(barrier_id=Q_CLEARED, number_of_threads=CLEARERS + consumers)

    @cute.jit
    def clear(self, bar: Barriers, smem: Shared, operands: SpanOperands, n: Extents):
        """Three warps, for every row tile of this CTA: they hand V on, with zeros where no row sees it."""
        thread, fills0 = cute.arch.thread_idx()[0] - WARP, Int32(0)
        for wave in cutlass.range(self.scheduler(operands, n).waves, unroll=1):
            _, span = self.receive(bar, smem, operands, n, wave)
            bar.q.at(wave).arrive_empty()
            for t in cutlass.range(key_tiles(span), unroll=1):
                v = bar.v.at(fills0 + t)
                bar.v_landed.at(fills0 + t).wait_full()
                self.clear_unseen(smem.v, v.index, span, t, thread)
                v.arrive_full()
            fills0 = fills0 + key_tiles(span)

    @cute.jit
    def clear_unseen(self, values: cute.Tensor, stage: Int32, span: Span, t: Int32, thread: Int32):
        """Zeros for the values of tile t that no row sees."""
        if span.needs_clearing(t):
            zero_rows(values[None, None, stage], span.unseen_from(t), thread, CLEARERS)

    def open(self, operands: SpanOperands, tile: RowTile, bounds: tuple) -> Span:
        """The span of a row tile, by the producer."""
        return open_span(operands, tile, self.config.tile_n, bounds)

    def read(self, operands: SpanOperands, tile: RowTile, slot: cute.Tensor) -> Span:
        """The same span, by others."""
        return read_span(operands, tile, self.config.tile_n, slot)

    def scheduler(self, operands: SpanOperands, n: Extents) -> TileScheduler:
        """Sections of as many pairs of (batch, KV head) as L2 holds."""
        return TileScheduler.of(n, operands.s_kv, L2_KEYS // (2 * self.config.row_bytes))

    def receive(
        self, bar: Barriers, smem: Shared, operands: SpanOperands, n: Extents, wave: Int32
    ) -> tuple[PlacedTile, Span]:
        """The next row tile, once its Q and its span are there."""
        slot = wave % self.config.slots
        bar.q.at(wave).wait_full()
        tile = RowTile.read(smem.info[None, 0, slot], n)
        return tile, self.read(operands, tile, smem.info[None, 1, slot])

    def consumer(self, bar: Barriers, smem: Shared, scale_log2: Float32, n: Extents) -> Consumer:
        c = self.config
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        qk, a = self.queries(smem, group)
        few = tiled_mma(self.products, c.few or c.tile_n, K_MAJOR)
        pv = tiled_mma(self.products, c.d, MN_MAJOR, warpgroup.OperandSource.RMEM)
        scores = accumulator(qk, c.tile_n)
        scores_of_few = cute.make_tensor(scores.iterator, accumulator(few, c.few or c.tile_n).layout)
        return Consumer(
            bar,
            smem,
            thread=cute.arch.thread_idx()[0] % WARPGROUP,
            group=group,
            n=n,
            pv=pv,
            a=a,
            b_k=operand_b(qk, smem.k),
            b_v=operand_b(pv, transposed(smem.v)),
            scores=Scores(qk, scores, c.tile_n),
            few=Scores(few, scores_of_few, c.few),
            p=register_operand(pv, c.tile_n, self.products),
            out=accumulator(pv, c.d),
            softmax=self.softmax(scale_log2, group, n),
        )

    def queries(self, smem: Shared, group: Int32) -> tuple[cute.TiledMma, cute.Tensor]:
        """The product Q K' of a warpgroup, and Q as it takes it."""
        qk = tiled_mma(self.products, self.config.tile_n, K_MAJOR)
        return qk, operand_a(qk, cute.local_tile(smem.q, (64, self.config.d), (group, 0, None)))

    def softmax(self, scale_log2: Float32, group: Int32, n: Extents) -> Softmax:
        """The softmax of a warpgroup's rows."""
        return softmax_of(self.config.d, scale_log2)

    @cute.jit
    def consume(self, w: Consumer, operands: SpanOperands, o: cute.Pointer, results: RowResults, n: Extents):
        """One warpgroup: its 64 rows of every row tile of this CTA."""
        c, boxed, fills0 = self.config, BoxedRows.of(n, w.group * 64, w.thread), Int32(0)
        for wave in cutlass.range(self.scheduler(operands, n).waves, unroll=1):
            _, span = self.receive(w.bar, w.smem, operands, n, wave)
            if c.few == 0 or span.hi - span.lo > c.few:
                self.attend(w, span, boxed, o, results, wave, fills0)
            else:
                self.attend_to_few(w, span, boxed, o, results, wave, fills0)
            fills0 = fills0 + key_tiles(span)

    @cute.jit
    def attend(
        self,
        w: Consumer,
        span: Span,
        boxed: BoxedRows,
        o: cute.Pointer,
        results: RowResults,
        wave: Int32,
        fills0: Int32,
    ):
        """All key tiles of one row tile. fills0 counts the rings' fills before it."""
        s, bar, last, q = w.softmax, w.bar, key_tiles(span) - 1, w.bar.q.at(wave)
        mma, scores = w.scores.mma, w.scores.acc
        rows = self.issue_first(w, w.scores, span, boxed, wave, fills0)
        bar.k.at(fills0).arrive_empty()
        rows.mask(scores, 0)
        self.first_softmax(w, w.scores)
        for t in cutlass.range(1, last + 1, unroll=1):
            k, v = bar.k.at(fills0 + t), bar.v.at(fills0 + t - 1)
            k.wait_full()
            multiply(mma, scores, w.a[None, None, None, q.index], w.b_k[None, None, None, k.index], fresh=True)
            v.wait_full()
            multiply(w.pv, w.out, w.p, w.b_v[None, None, None, v.index], fresh=t == 1)
            warpgroup.wait_group(1)
            k.arrive_empty()
            rows.mask(scores, t)
            s.remember_max()
            s.raise_max(scores)
            s.decay()
            s.exponentiate(scores)
            wait_after(s.row_sum[0], s.row_sum[1])
            v.arrive_empty()
            round_to(w.p, scores)
            rescale_rows(w.out, s.factor)
        q.arrive_empty()
        self.finish(w, w.scores, boxed, o, results, wave, fills0 + last, fresh=last == 0)

    @cute.jit
    def attend_to_few(
        self,
        w: Consumer,
        span: Span,
        boxed: BoxedRows,
        o: cute.Pointer,
        results: RowResults,
        wave: Int32,
        fill: Int32,
    ):
        """`attend` where the first tile has all keys. One warpgroup works half a tile of rows after the other."""
        c = self.config
        two = w.n.box_inner * w.n.box_outer > ROWS_OF_WARPGROUP
        # a barrier for each stage: the first to begin can be two tiles of rows ahead, but not three
        p_ready = {"barrier_id": P_READY + wave % c.stages_q, "number_of_threads": 2 * WARPGROUP}
        if two & (w.group == 1):
            cute.arch.barrier(**p_ready)
        rows = self.issue_first(w, w.few, span, boxed, wave, fill)
        w.bar.k.at(fill).arrive_empty()
        w.bar.q.at(wave).arrive_empty()
        rows.mask(w.few.acc, 0)
        self.first_softmax(w, w.few)
        if two & (w.group == 0):
            cute.arch.barrier_arrive(**p_ready)
        self.finish(w, w.few, boxed, o, results, wave, fill, fresh=True)

    @cute.jit
    def issue_first(
        self, w: Consumer, scores: Scores, span: Span, boxed: BoxedRows, wave: Int32, fill: Int32
    ) -> RowSpans:
        """Issues the scores of the first key tile, and meanwhile finds what each row sees."""
        q, k = w.bar.q.at(wave), w.bar.k.at(fill)
        k.wait_full()
        multiply(scores.mma, scores.acc, w.a[None, None, None, q.index], w.b_k[None, None, None, k.index], fresh=True)
        rows = span.of_rows(boxed)
        w.softmax.reset()
        warpgroup.wait_group(0)
        return rows

    @cute.jit
    def first_softmax(self, w: Consumer, scores: Scores):
        w.softmax.raise_max(scores.acc)
        w.softmax.exponentiate(scores.acc)
        round_to(w.p, scores.acc)

    @cute.jit
    def finish(
        self,
        w: Consumer,
        scores: Scores,
        boxed: BoxedRows,
        o: cute.Pointer,
        results: RowResults,
        wave: Int32,
        fill: Int32,
        fresh: bool | cutlass.Boolean,
    ):
        """The last key tile's values, and the output."""
        c, s = self.config, w.softmax
        tile = RowTile.read(w.smem.info[None, 0, wave % c.slots], w.n)  # again: it is not kept meanwhile
        v = w.bar.v.at(fill)
        v.wait_full()
        multiply(w.pv, w.out, w.p, w.b_v[None, None, None, v.index], fresh=fresh, blocks=range(scores.keys // 16))
        s.read_sinks(tile, boxed, results)
        s.sum_columns()
        s.finish(tile, boxed, w.thread, results, writes_lse=True)
        warpgroup.wait_group(0)
        v.arrive_empty()
        if tile.n.splits == 1:
            store_output(w.out, s.factor, o, tile, boxed, 0, w.thread, c.d)
        else:
            store_part(w.out, s, results.o_parts, tile, boxed, 0, w.thread, c.d)


def key_tiles(span: Span) -> Int32:
    """At least one, which is masked for a tile of rows that see nothing."""
    return cutlass.max(span.tiles, 1)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    return MhaFwdSm90(Config(variant.d, variant.dtype)).compile(variant, out_dir)
