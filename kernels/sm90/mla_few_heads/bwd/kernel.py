"""The gradient of attention for Hopper over a latent that is both K and V, of few heads whose keys differ from query to
query.

A tile of 64 rows would hold one query's heads, and most of it nothing. So, as in `mla_few_heads_fwd`, the operands
change sides: keys are the rows, heads the columns. With P, dS, f and delta as in `mla_bwd`,

    [S' dP'] = K [Q dO]'           64 keys x twice the heads
    dQ' += K' dS'                  d x heads, 64 rows of d a product; dS' goes through SMEM
    dKV = [dS' (f P)'] [Q dO]      64 keys x d, some columns at a time; its first operand stays in registers

A tile of rows is one query with all its heads. A CTA has two warpgroups, and an SM two CTAs, so that the reductions of
one, which bound this kernel, go on under the products of the other:

    producer    Q and dO of a query; its keys, gathered with cp.async, as soon as dQ' has read the tile before
                    | q full   | k full[piece of columns]                     ^ k empty                 ^ q empty
    consumer    [S' dP'], P and dS in registers, dS to SMEM, dQ'; dKV, chunk by chunk, through 2 KiB of SMEM of each
                warp to memory; at last dQ'

An absent key is zeros and has P = 0; nothing is added for it. A head that does not exist has P = 0 too.
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import MlaBackward
from kernels.aot import Compiled
from kernels.lib.columns import by_column, column_of
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.mla_backward import MlaBackwardKernel, RowOperands
from kernels.lib.pipeline import wait_for
from kernels.lib.ptx import arrive_if, copy_or_zero, copy_out
from kernels.lib.rows import ROWS, Extents, RowTile, load, row_of
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection, open_selection, with_keys
from kernels.lib.softmax import LOG2_E, exp2
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    round_to,
    store_columns,
    tiled_mma,
    transposed,
)

from ...mla.bwd.dkv import (
    FOUR_ROWS,
    Destination,
    add_in_fixed_point,
    add_staged,
    place_of_absent,
    stage_rows,
    staged_row,
    units_of_keys,
)
from .config import CTAS_PER_SM, Config
from .smem import STAGES, Barriers, Shared

CONSUMERS_MET = 1  # a named barrier: all threads of the warpgroup have arrived


class MlaFewHeadsBwdSm90(MlaBackwardKernel):
    symbol = "mla_few_heads_bwd_sm90"

    @cute.kernel
    def kernel(self, rows: RowOperands, sources: tuple, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = Shared.allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            self.produce(bar, smem, rows, sources, n)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, rows, sources, n)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """For every query of this CTA: its first keys, what there is to see, Q and dO, and the other keys."""
        c = self.config
        thread = cute.arch.thread_idx()[0]
        scheduler, before = TileScheduler.of(n), Int32(0)
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            lists = tuple(
                open_selection(source.operands(kind, c.gathers), tile, c.tile_n, c.d)
                for kind, source in zip(c.sources, sources, strict=True)
            )
            tiles = total_tiles(lists)
            on_source(lists, 0, Selection.prefetch_indices, wanted, thread, WARPGROUP)
            for t in cutlass.range(cutlass.max(tiles, 1), unroll=1):
                if t < tiles:
                    on_source(lists, t, Selection.mark_absent, wanted, thread, WARPGROUP)
                    self.gather(bar, smem, with_keys(lists, t), wanted, sources, before + t, thread)
                    on_source(lists, t + 1, Selection.prefetch_indices, wanted, thread, WARPGROUP)
                if t == 0:
                    self.load_rows(bar, smem, rows, tile, lists, wave, thread)
            before = before + tiles

    @cute.jit
    def gather(
        self,
        bar: Barriers,
        smem: Shared,
        keys: Selection,
        wanted: cute.Tensor,
        sources: tuple,
        k: Int32,
        thread: Int32,
    ):
        """The CTA's k-th tile of keys, piece by piece, and where its keys are."""
        c = self.config
        bar.k().at(k).wait_empty()
        count = c.slabs // c.pieces
        for piece in cutlass.range_constexpr(c.pieces):
            keys.gather(smem.k, wanted, thread, range(piece * count, (piece + 1) * count), WARPGROUP)
            bar.k(piece).at(k).copy_full()
        if thread % LANES_A_ROW == 0:
            absent = place_of_absent(sources, c.cluster) if c.deterministic else Int32(-1)
            for i in cutlass.range_constexpr(cute.size(wanted)):
                key = wanted[i]
                if cutlass.const_expr(c.deterministic):
                    key = key if key >= 0 else absent
                smem.keys[i * (WARPGROUP // LANES_A_ROW) + thread // LANES_A_ROW, k % STAGES] = key
        cute.arch.mbarrier_arrive(bar.listed)

    @cute.jit
    def load_rows(
        self, bar: Barriers, smem: Shared, rows: RowOperands, tile: RowTile, lists: tuple, wave: Int32, thread: Int32
    ):
        """Publishes what was found of a query, and loads Q and dO; zeros for a head that is absent or sees nothing."""
        c, n = self.config, tile.n
        head, chunk = thread // LANES_A_ROW, thread % LANES_A_ROW
        exists = (head < n.box_inner) & (tile.inner0 + head < n.inner)
        row = tile.row_index(tile.outer0, tile.inner0 + head) * Int64(exists)
        lse, sink_factor, delta = (load(x + row) for x in (rows.lse, rows.sink_factor, rows.delta))
        sees = exists & (lse != -Float32.inf)
        state = bar.q.at(wave)
        state.wait_empty()
        if thread == 0:
            tile.publish(smem.info[None, 0, wave % STAGES])
            for which, keys in enumerate(lists):
                smem.info[0, 1 + which, wave % STAGES] = keys.tiles
        if chunk == 0:
            smem.numbers[head, 0, wave % STAGES] = lse * LOG2_E if sees else Float32.inf
            smem.numbers[head, 1, wave % STAGES] = sink_factor if sees else Float32(0.0)
            smem.numbers[head, 2, wave % STAGES] = delta * rows.scale if sees else Float32(0.0)
        cute.arch.mbarrier_arrive(bar.published)
        place0 = smem.rows.iterator.toint() + head * (SLAB * 2) + (chunk ^ head % 8) * 16
        for which, source in enumerate((rows.q, rows.do)):
            of_row = source + (row * c.d + chunk * CHUNK)
            for slab in cutlass.range_constexpr(c.slabs):
                place = place0 + (slab * 2 + which) * c.tile_m * SLAB * 2
                copy_or_zero(place, (of_row + slab * SLAB).toint(), Int32(sees) * 16)
        state.copy_full()

    # ---- consumer

    @cute.jit
    def consume(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        both, one = tiled_mma(self.dtype, 2 * c.tile_m, K_MAJOR), tiled_mma(self.dtype, c.tile_m, K_MAJOR)
        kds = tiled_mma(self.dtype, c.tile_m, K_MAJOR, a_major=MN_MAJOR)
        wide = tiled_mma(self.dtype, c.chunk, MN_MAJOR, warpgroup.OperandSource.RMEM)
        a_k, b_rows, b_ds = operand_a(both, smem.k), operand_b(both, smem.rows), operand_b(kds, smem.ds)
        a_slabs = tuple(
            operand_a(kds, transposed(cute.local_tile(smem.k, (c.tile_n, SLAB), (0, i)))) for i in range(c.slabs)
        )
        b_chunks = tuple(
            operand_b(wide, transposed(cute.local_tile(smem.rows, (2 * c.tile_m, c.chunk), (0, i))))
            for i in range(c.d // c.chunk)
        )
        scores = accumulator(both, 2 * c.tile_m)
        half = cute.size(scores) // 2
        like = accumulator(one, c.tile_m)
        s, dp = (cute.make_tensor(scores.iterator + i * half, like.layout) for i in range(2))
        dq = tuple(accumulator(kds, c.tile_m) for _ in range(c.slabs))
        of_keys = register_operand(wide, 2 * c.tile_m, self.dtype)
        of_ds, of_p = (cute.make_tensor(of_keys.iterator + i * half, cute.make_layout(half)) for i in range(2))
        acc = tuple(accumulator(wide, c.chunk) for _ in range(c.under_way))
        numbers = cute.make_rmem_tensor((c.tile_m // 4, 3), Float32)
        slot = smem.out.iterator.toint() + thread // WARP * (c.slot_bytes // 4)
        blocks = c.d // c.pieces // 16
        scale_log2 = rows.scale * LOG2_E
        before = Int32(0)
        for wave in cutlass.range(TileScheduler.of(n).waves, unroll=1):
            stage = wave % STAGES
            wait_for(bar.published, wave)
            counts = tuple(cute.arch.make_warp_uniform(smem.info[0, 1 + i, stage]) for i in range(len(c.sources)))
            tiles = sum(counts[1:], counts[0])
            for i in cutlass.range_constexpr(c.tile_m // 4):
                for j in cutlass.range_constexpr(3):
                    numbers[i, j] = smem.numbers[column_of(thread, i), j, stage]
            q = bar.q.at(wave)
            q.wait_full()
            cute.arch.fence_proxy("async.shared", space="cta")  # the producer wrote through the generic proxy
            for t in cutlass.range(tiles, unroll=1):
                k, last = before + t, Int32(t == tiles - 1)
                for piece in cutlass.range_constexpr(c.pieces):
                    bar.k(piece).at(k).wait_full()
                    cute.arch.fence_proxy("async.shared", space="cta")
                    here = range(piece * blocks, (piece + 1) * blocks)
                    multiply(both, scores, a_k, b_rows, piece == 0, here)
                wait_for(bar.listed, k)
                seen = [smem.keys[row_of(thread, r), k % STAGES] >= 0 for r in range(ROWS)]
                sums, units = self.find_sums(smem, t < counts[0], rows, sources, n, stage)
                to = self.destination(sums, units, smem.keys[None, k % STAGES], thread)
                warpgroup.wait_group(0)
                differentiate(s, dp, numbers, seen, rows.scale, scale_log2)
                round_to(of_ds, dp)
                round_to(of_p, s)
                store_columns(one, dp, smem.ds, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)
                for i in cutlass.range_constexpr(c.slabs):
                    multiply(kds, dq[i], a_slabs[i], b_ds, t == 0)
                for i in cutlass.range_constexpr(c.under_way):
                    multiply(wide, acc[i], of_keys, b_chunks[i], fresh=True)
                warpgroup.wait_group(c.under_way)
                bar.k().at(k).arrive_empty()
                for i in cutlass.range_constexpr(len(b_chunks)):
                    warpgroup.wait_group(min(c.under_way, len(b_chunks) - i) - 1)
                    if cutlass.const_expr(i == len(b_chunks) - 1):
                        arrive_if(q.empty, last)
                    stage_rows(acc[i % c.under_way], slot, FOUR_ROWS, to.units)
                    if cutlass.const_expr(i + c.under_way < len(b_chunks)):
                        multiply(wide, acc[i % c.under_way], of_keys, b_chunks[i + c.under_way], fresh=True)
                    if cutlass.const_expr(c.deterministic):
                        add_in_fixed_point(slot, FOUR_ROWS, to, i * c.chunk)
                    else:
                        add_staged(slot, to, i * c.chunk)
            if tiles == 0:
                q.arrive_empty()
                for x in dq:
                    x.fill(0.0)
            self.store(smem, one, dq, rows, RowTile.read(smem.info[None, 0, stage], n), thread)
            before = before + tiles

    def destination(self, sums: Int64, units: Int64, listed: cute.Tensor, thread: Int32) -> Destination:
        step = self.config.d * 4
        if self.config.deterministic:  # a column of all keys of a warp
            return Destination(sums + thread % WARP * 4, listed, Int32(step), units_of_keys(units, listed, Int32(4)))
        keys = tuple(listed[staged_row(thread, i)] for i in range(4))
        return Destination(sums + thread % 8 * 16, keys, Int32(step))

    @cute.jit
    def find_sums(
        self, smem: Shared, of_first: cutlass.Boolean, rows: RowOperands, sources: tuple, n: Extents, stage: Int32
    ) -> tuple:
        """Finds where the gradient of the keys of this batch entry begins, in the source that a tile is of, and where
        their units do, which lie one source after the other."""
        c = self.config
        batch = Int64(cute.arch.make_warp_uniform(smem.info[1, 0, stage]))
        first, units = batch * sources[-1].s_batch, Int64(0)
        base = (sources[-1].dkv + first * c.d).toint()
        if cutlass.const_expr(c.deterministic):
            before = sum(Int64(x.s_batch) for x in sources[:-1]) * n.pairs if len(sources) > 1 else Int64(0)
            units = (rows.resolution + (before + first)).toint()
        if cutlass.const_expr(len(sources) == 2):  # noqa: SIM102, at compile time
            if of_first:
                first = batch * sources[0].s_batch
                base = (sources[0].dkv + first * c.d).toint()
                if cutlass.const_expr(c.deterministic):
                    units = (rows.resolution + first).toint()
        return base, units

    @cute.jit
    def store(self, smem: Shared, mma: cute.TiledMma, dq: tuple, rows: RowOperands, tile: RowTile, thread: Int32):
        """dQ through SMEM, by rows of 128 bytes."""
        c, n = self.config, tile.n
        head, chunk = thread // LANES_A_ROW, thread % LANES_A_ROW
        exists = (head < n.box_inner) & (tile.inner0 + head < n.inner)
        row = rows.dq + (tile.row_index(tile.outer0, tile.inner0 + head) * c.d + chunk * CHUNK)
        place = smem.dq.iterator.toint() + head * (SLAB * 2) + (chunk ^ head % 8) * 16
        for first in cutlass.range_constexpr(0, c.slabs, c.slabs_at_a_time):
            cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)  # what was there has been read
            for i in cutlass.range_constexpr(c.slabs_at_a_time):
                store_columns(mma, dq[first + i], smem.dq[None, None, i], thread)
            cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)
            if exists:
                for i in cutlass.range_constexpr(c.slabs_at_a_time):
                    copy_out((row + (first + i) * SLAB).toint(), place + i * c.tile_m * SLAB * 2)
        cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)


@cute.jit
def differentiate(
    s: cute.Tensor, dp: cute.Tensor, numbers: cute.Tensor, seen: list, scale: Float32, scale_log2: Float32
):
    """S <- f P, dP <- scale P (f dP - delta), where P = exp(scale S - lse), 0 for an absent key, f is the sink's
    factor, and delta is scaled already."""
    s, dp = by_column(s), by_column(dp)
    for i in cutlass.range_constexpr(cute.size(numbers, mode=[0])):
        lse, sink_factor, delta = (numbers[i, j] for j in range(3))
        factor = sink_factor * scale
        for r in cutlass.range_constexpr(ROWS):
            p = exp2(s[i, r] * scale_log2 - lse) if seen[r] else Float32(0.0)
            dp[i, r] = p * (dp[i, r] * factor - delta)
            s[i, r] = p * sink_factor


def compile(variant: MlaBackward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources, variant.max_heads, deterministic=variant.deterministic)
    return MlaFewHeadsBwdSm90(config).compile(variant, out_dir, ctas=CTAS_PER_SM)
