"""The gradient of Q for Hopper, head dimensions up to 256, separate K and V.

With P = exp(S - lse), and a sink factor f and a delta for each row (query, head):

    dQ = scale dS K        dS = P * (f dO V' - delta)

A tile of rows walks over the keys that its rows see, as in the forward pass. dQ stays in registers, and has the same
bits every time. CTAs are persistent, and the producer runs ahead into the next tile of rows: Q and dO have two stages
where they fit, and dQ goes from registers to memory.

    producer warp     Q dO   K0 V0   K1 V1 ...                             TMA, into rings
    clearing warps           K0      K1    ...                             keys that no row sees become 0
    consumer WG 0     S0 dP0 | dS0 | S1 dP1, dQ += dS0 K0 | dS1 | ...      rows  0 ..  63
    consumer WG 1     S0 dP0 | dS0 | S1 dP1, dQ += dS0 K0 | dS1 | ...      rows 64 .. 127
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.output import store_output
from kernels.lib.rows import ROWS, BoxedRows, Extents, PlacedTile, RowTile, load
from kernels.lib.softmax import LOG2_E, by_row, exp2
from kernels.lib.spans import Span, SpanOperands, open_span, prefetch_span, read_span
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
    zero_rows,
)

from .config import CLEARERS, DqConfig
from .host import MhaBackwardKernel, Results, RowOperands
from .smem import DqBarriers, DqShared, allocate_dq

L2_KEYS = 32 * 1024 * 1024  # bytes of K and V that stay in L2 while others pass
LSE, SINK_FACTOR, DELTA = range(3)


class MhaDqSm90(MhaBackwardKernel):
    op = "mha_dq"

    def ctas(self, n: Extents, s_kv: Int32, at_a_time: Int32) -> Int32:
        return cutlass.min(n.work, at_a_time)

    def allocate(self) -> tuple[DqBarriers, DqShared]:
        return allocate_dq(self.config, self.dtype)

    @cute.kernel
    def kernel(
        self,
        rows: tuple,
        keys: tuple,
        operands: RowOperands,
        results: Results,
        scale: Float32,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        spans = SpanOperands(operands.start, operands.stop, results.s_kv)
        if warp == 0:
            for atom, _ in (*rows, *keys):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                bar.initialise(c)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                self.produce(bar, smem, rows, keys, spans, n)
            else:
                self.clear(bar, smem, spans, n)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, operands, spans, results.dq, scale, n)

    @cute.jit
    def produce(self, bar: DqBarriers, smem: DqShared, rows: tuple, keys: tuple, spans: SpanOperands, n: Extents):
        """One warp loads Q and dO, opens the span, and loads the tiles of K and V."""
        c = self.config
        scheduler, fills0 = self.scheduler(spans, n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            state, slot = bar.rows.at(wave), wave % c.slots
            full = state.full
            state.wait_empty()
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, 2 * 2 * c.d * n.box_inner * n.box_outer)
            for (atom, m), s in zip(rows, (smem.q, smem.do), strict=True):
                g, to = tma_tiles(atom, tile.of(m, c.tile_m, c.d)[None, None, 0], s)
                cute.copy(atom, g, to[None, state.index], tma_bar_ptr=full)
            span = open_span(spans, tile, c.tile_n, prefetch_span(spans, tile, c.tile_m))
            with cute.arch.elect_one():
                tile.publish(smem.info[None, 0, slot])
                span.publish(smem.info[None, 1, slot])
                state.arrive_full()
            self.load_keys(bar, smem, keys, tile, span, fills0)
            fills0 = fills0 + span.tiles

    @cute.jit
    def load_keys(self, bar: DqBarriers, smem: DqShared, keys: tuple, tile: RowTile, span: Span, fills0: Int32):
        """Loads the tiles of K and V that a tile of rows sees."""
        c = self.config
        copies = tuple(
            (atom, *tma_tiles(atom, tile.keys(m, span.lo, c.tile_n, c.d)[None, None, None, 0], s), ring)
            for (atom, m), s, ring in zip(keys, (smem.k, smem.v), (bar.k_landed, bar.v), strict=True)
        )
        for t in cutlass.range(span.tiles, unroll=1):
            for atom, gmem, stages, ring in copies:
                tile_state = ring.at(fills0 + t)
                tile_state.wait_empty()
                with cute.arch.elect_one():
                    tile_state.expect_full(c.key_tile_bytes)
                cute.copy(atom, gmem[None, t], stages[None, tile_state.index], tma_bar_ptr=tile_state.full)

    @cute.jit
    def clear(self, bar: DqBarriers, smem: DqShared, spans: SpanOperands, n: Extents):
        """Three warps hand K on, with zeros where no row sees it, because dS K would add 0 * NaN."""
        c = self.config
        thread, fills0 = cute.arch.thread_idx()[0] - WARP, Int32(0)
        for wave in cutlass.range(self.scheduler(spans, n).waves, unroll=1):
            _, span = self.receive(bar, smem, spans, n, wave)
            bar.rows.at(wave).arrive_empty()
            for t in cutlass.range(span.tiles, unroll=1):
                for part in cutlass.range_constexpr(c.parts_of_k):
                    fill = (fills0 + t) * c.parts_of_k + part
                    k = bar.k.at(fill)
                    bar.k_landed.at(fill).wait_full()
                    if span.needs_clearing(t):
                        zero_rows(smem.k[None, None, k.index], span.unseen_from(t), thread, CLEARERS)
                    k.arrive_full()
            fills0 = fills0 + span.tiles

    def scheduler(self, spans: SpanOperands, n: Extents) -> TileScheduler:
        """Sections of as many pairs of (batch, KV head) as L2 holds."""
        return TileScheduler.of(n, spans.s_kv, L2_KEYS // (2 * 2 * self.config.d))

    def receive(
        self, bar: DqBarriers, smem: DqShared, spans: SpanOperands, n: Extents, wave: Int32
    ) -> tuple[PlacedTile, Span]:
        """The next row tile, once its Q, its dO and its span are there."""
        c, slot = self.config, wave % self.config.slots
        bar.rows.at(wave).wait_full()
        tile = RowTile.read(smem.info[None, 0, slot], n)
        return tile, read_span(spans, tile, c.tile_n, smem.info[None, 1, slot])

    @cute.jit
    def consume(
        self,
        bar: DqBarriers,
        smem: DqShared,
        operands: RowOperands,
        spans: SpanOperands,
        dq: cute.Pointer,
        scale: Float32,
        n: Extents,
    ):
        """One warpgroup: the gradient of its 64 rows."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        boxed = BoxedRows.of(n, group * 64, thread)
        scores = tiled_mma(self.dtype, c.tile_n, K_MAJOR)
        sums = tiled_mma(self.dtype, c.d, MN_MAJOR, warpgroup.OperandSource.RMEM)
        a_q, a_do = (operand_a(scores, cute.local_tile(x, (64, c.d), (group, 0, None))) for x in (smem.q, smem.do))
        b_k, b_v = (operand_b(scores, x) for x in (smem.k, smem.v))
        b_kt = operand_b(sums, transposed(smem.k))
        s, dp = (accumulator(scores, c.tile_n) for _ in range(2))
        out, ds = accumulator(sums, c.d), register_operand(sums, c.tile_n, self.dtype)
        numbers = cute.make_rmem_tensor((ROWS, 3), Float32)
        scale_log2 = scale * LOG2_E

        factor = cute.make_rmem_tensor(ROWS, Float32)
        factor.fill(scale)
        fills0 = Int32(0)
        for wave in cutlass.range(self.scheduler(spans, n).waves, unroll=1):
            tile, span = self.receive(bar, smem, spans, n, wave)
            state = bar.rows.at(wave)
            read_numbers(numbers, operands, tile, boxed)
            rows = span.of_rows(boxed)
            out.fill(0.0)
            for t in cutlass.range(span.tiles, unroll=1):
                k, v = bar.k.at(fills0 + t), bar.v.at(fills0 + t)
                k.wait_full()
                multiply(scores, s, a_q[None, None, None, state.index], b_k[None, None, None, k.index], fresh=True)
                v.wait_full()
                multiply(scores, dp, a_do[None, None, None, state.index], b_v[None, None, None, v.index], fresh=True)
                warpgroup.wait_group(1)
                if t > 0:
                    bar.k.at(fills0 + t - 1).arrive_empty()
                rows.mask(s, t)
                exponentiate(s, numbers, scale_log2)
                warpgroup.wait_group(0)
                v.arrive_empty()
                differentiate(ds, s, dp, numbers)
                multiply(sums, out, ds, b_kt[None, None, None, k.index])
            state.arrive_empty()
            warpgroup.wait_group(0)
            if span.tiles > 0:
                bar.k.at(fills0 + span.tiles - 1).arrive_empty()
            fills0 = fills0 + span.tiles
            tile = RowTile.read(smem.info[None, 0, wave % c.slots], n)  # again: it is not kept meanwhile
            store_output(out, factor, dq, tile, boxed, 0, thread, c.d)


@cute.jit
def read_numbers(numbers: cute.Tensor, operands: RowOperands, tile: PlacedTile, boxed: BoxedRows):
    """For a thread's rows: lse in units of log2, sink factor and delta; for a row that sees nothing, values that make P
    and dS 0.
    """
    for r in cutlass.range_constexpr(ROWS):
        exists, query, head = tile.place(boxed, r)
        row = tile.row_index(query, head) * Int64(exists)
        lse, sink_factor, delta = (load(x + row) for x in operands[:3])
        sees = exists & (lse != -Float32.inf)
        numbers[r, LSE] = lse * LOG2_E if sees else Float32.inf
        numbers[r, SINK_FACTOR] = sink_factor if sees else Float32(0.0)
        numbers[r, DELTA] = delta if sees else Float32(0.0)


@cute.jit
def exponentiate(scores: cute.Tensor, numbers: cute.Tensor, scale_log2: Float32):
    """P <- exp(scale S - lse)."""
    s = by_row(scores)
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            s[r, i] = exp2(s[r, i] * scale_log2 - numbers[r, LSE])


@cute.jit
def differentiate(operand: cute.Tensor, p: cute.Tensor, dp: cute.Tensor, numbers: cute.Tensor):
    """operand <- P (f dP - delta), rounded; 0 where P is 0, because an unseen key may make dP NaN."""
    x, y = by_row(p), by_row(dp)
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(x, mode=[1])):
            y[r, i] = (
                x[r, i] * (y[r, i] * numbers[r, SINK_FACTOR] - numbers[r, DELTA]) if x[r, i] != 0.0 else Float32(0.0)
            )
    round_to(operand, dp)


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    return MhaDqSm90(DqConfig(variant.d, variant.dtype)).compile(variant, out_dir)
