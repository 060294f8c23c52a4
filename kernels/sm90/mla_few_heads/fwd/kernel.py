"""Attention for Hopper over a latent that is both K and V, for few heads whose keys differ from query to query.

The head dimension is 512, or 576 where V is the first 512 of K.

A tile of 64 rows would hold one query's heads, and be mostly empty. So the operands change sides (swap A/B): keys
are the rows, heads the columns.

    S' = K Q'       64 keys x heads, K from SMEM
    O' += V' P'     d x heads, 64 rows of d a product, V' being the same tile of keys read the other way

A tile of rows is one query with all its heads. A CTA has two warpgroups, and an SM two CTAs, so that one's softmax
runs under the other's products:

    producer    Q, by TMA; keys, gathered with cp.async: a ring of pieces, each some columns of 64 keys
                    | k full[stage]                                           ^ k empty[stage]
    consumer    S', softmax over the keys of each column, P' to SMEM, O', all of it in registers; at last
                normalised, and through P's SMEM and what else is left of it to memory

Q's SMEM is free after the last scores of a query, so that the producer runs ahead into the next one.
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.column_softmax import ColumnSoftmax, exists, scale_columns
from kernels.lib.columns import by_column, column_of
from kernels.lib.forward import ForwardKernel
from kernels.lib.launch import WARPGROUP
from kernels.lib.rows import ROWS, Extents, RowTile, row_of, store
from kernels.lib.selections import (
    LANES_A_ROW,
    Selection,
    open_selection,
    present,
    present_at,
    read_selection,
    with_keys,
)
from kernels.lib.softmax import RowResults
from kernels.lib.splits import on_source, own_part, total_tiles
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    not_,
    operand_a,
    operand_b,
    store_columns,
    tiled_mma,
    tma_tiles,
    transposed,
    zero_rows,
)

from .config import CTAS_PER_SM, Config
from .smem import Barriers, Shared

CONSUMERS_MET = 1  # a named barrier: all threads of the warpgroup have arrived


@dataclass(frozen=True)
class Consumer:
    """State that a consumer thread keeps from query to query."""

    bar: Barriers
    smem: Shared
    thread: Int32
    qk: cute.TiledMma
    pv: cute.TiledMma
    keys: cute.Tensor  # keys as S' takes them: (.., stage)
    q: cute.Tensor  # (.., piece of d)
    values: tuple[cute.Tensor, ...]  # keys as O' takes them, by slab of a piece: (.., stage)
    p: cute.Tensor
    scores: cute.Tensor
    out: tuple[cute.Tensor, ...]  # by slab of d
    softmax: ColumnSoftmax


class MlaFewHeadsFwdSm90(ForwardKernel):
    symbol = "mla_few_heads_fwd_sm90"

    @property
    def d_v(self) -> int:
        return self.config.d_v

    @cute.kernel
    def kernel(
        self,
        rows_of_q: tuple,
        output: tuple,
        sources: tuple,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        c = self.config
        operands = tuple(source[-1] for source in sources)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = Shared.allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        for i in cutlass.range_constexpr(c.pieces):  # the kernel also computes heads that do not exist
            zero_rows(smem.q[None, None, i], n.box_inner, cute.arch.thread_idx()[0], c.threads)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # `combine`, where it follows, waits for this grid itself

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            self.produce(bar, smem, rows_of_q, operands, n)
            # A grid that began early ends after the grid before it, so that what follows waits for this one alone.
            cute.arch.griddepcontrol_wait()
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, operands, output, results, scale_log2, n)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, row_source: tuple, sources: tuple, n: Extents):
        """For every query of this CTA: loads Q, opens the sources, and gathers the keys."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tma_q, mQ = row_source
        scheduler, before = TileScheduler.of(n), Int32(0)
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            opened = own_part(tuple(open_selection(x, tile, c.tile_n, c.d) for x in sources), tile, 1)
            if warp == 0:
                q = bar.q.at(wave)
                q.wait_empty()
                with cute.arch.elect_one():
                    for which, x in enumerate((tile, *opened)):
                        x.publish(smem.info[None, which])
                    q.expect_full(n.box_inner * n.box_outer * c.row_bytes)
                gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.piece), smem.q)
                for i in cutlass.range_constexpr(c.pieces):
                    cute.copy(tma_q, gQ[None, i], sQ[None, i], tma_bar_ptr=q.full)
            self.gather(bar, smem, opened, before)
            before = before + total_tiles(opened)

    @cute.jit
    def gather(self, bar: Barriers, smem: Shared, selections: tuple, before: Int32):
        c = self.config
        thread = cute.arch.thread_idx()[0]
        slabs = c.piece // SLAB
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        on_source(selections, 0, Selection.prefetch_indices, wanted, thread, WARPGROUP)
        for t in cutlass.range(total_tiles(selections), unroll=1):
            on_source(selections, t, Selection.mark_absent, wanted, thread, WARPGROUP)
            source = with_keys(selections, t)
            here = present([wanted[i] >= 0 for i in range(cute.size(wanted))], thread)
            for i in cutlass.range_constexpr(c.pieces):
                state = bar.k.at((before + t) * c.pieces + i)
                state.wait_empty()
                if cutlass.const_expr(i == 0):
                    self.publish(smem, here, before + t)
                columns = range(i * slabs, (i + 1) * slabs)
                source.gather(smem.k[None, None, state.index], wanted, thread, columns, WARPGROUP, i * slabs)
                state.copy_full()
                self.arrive_as_warp(state.full)
            on_source(selections, t + 1, Selection.prefetch_indices, wanted, thread, WARPGROUP)

    @cute.jit
    def publish(self, smem: Shared, present: Uint32, k: Int32):
        with cute.arch.elect_one():
            smem.seen[cute.arch.warp_idx(), k % self.config.key_tiles] = present

    @cute.jit
    def arrive_as_warp(self, barrier: cute.Pointer):
        """Arrives after everything that all lanes did, except copies by cp.async, which arrive themselves."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    # ---- consumer

    @cute.jit
    def consume(
        self,
        bar: Barriers,
        smem: Shared,
        sources: tuple,
        output: tuple,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        """For every query of this CTA: O and lse."""
        c = self.config
        w = self.consumer(bar, smem, scale_log2)
        w.softmax.read_sinks(n, results)
        before = Int32(0)  # tiles of keys
        for wave in cutlass.range(TileScheduler.of(n).waves, unroll=1):
            q = bar.q.at(wave)
            q.wait_full()
            tile = RowTile.read(smem.info[None, 0], n)
            slots = (smem.info[None, 1 + i] for i in range(len(sources)))
            opened = (read_selection(x, tile, c.tile_n, c.d, slot) for x, slot in zip(sources, slots, strict=True))
            tiles = total_tiles(tuple(opened))
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # all warps meet before anything else takes O's place
            w.softmax.reset()
            if tiles == 0:
                q.arrive_empty()
                for acc in w.out:
                    acc.fill(0.0)
            for t in cutlass.range(tiles, unroll=1):
                seen = self.multiply_keys(w, before + t)
                if t == tiles - 1:
                    q.arrive_empty()
                self.mask(w, seen)
                w.softmax.step(w.scores)
                self.share_p(w, fresh=t == 0)
                self.multiply_values(w, before + t, fresh=t == 0)
            before = before + tiles
            w.softmax.finish(tile, results)
            for acc in w.out:
                scale_columns(acc, w.softmax.factor)
            if n.splits == 1:
                self.store(w, tile, output)
            else:
                self.store_part(w, tile, results)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def consumer(self, bar: Barriers, smem: Shared, scale_log2: Float32) -> Consumer:
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        qk, pv = tiled_mma(self.dtype, c.tile_m, K_MAJOR), tiled_mma(self.dtype, c.tile_m, K_MAJOR, a_major=MN_MAJOR)
        slabs = (cute.local_tile(smem.k, (c.tile_n, SLAB, c.stages), (0, i, 0)) for i in range(c.piece // SLAB))
        return Consumer(
            bar,
            smem,
            thread,
            qk,
            pv,
            keys=operand_a(qk, smem.k),
            q=operand_b(qk, smem.q),
            values=tuple(operand_a(pv, transposed(slab)) for slab in slabs),
            p=operand_b(pv, smem.p[None, None, 0]),
            scores=accumulator(qk, c.tile_m),
            out=tuple(accumulator(pv, c.tile_m) for _ in range(c.d_v // SLAB)),
            softmax=ColumnSoftmax.of(scale_log2, thread, CONSUMERS_MET, smem.found),
        )

    @cute.jit
    def multiply_keys(self, w: Consumer, k: Int32) -> list[cutlass.Boolean]:
        """The scores of this CTA's k-th tile of keys; and which keys of a thread's rows are there."""
        c = self.config
        for i in cutlass.range_constexpr(c.pieces):
            state = w.bar.k.at(k * c.pieces + i)
            state.wait_full()
            cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote through the generic proxy
            multiply(w.qk, w.scores, w.keys[None, None, None, state.index], w.q[None, None, None, i], fresh=i == 0)
        places = (present_at(row_of(w.thread, r), WARPGROUP) for r in range(ROWS))
        seen = [w.smem.seen[warp, k % c.key_tiles] >> bit & 1 != 0 for warp, bit in places]  # under the products
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(c.pieces_of_values, c.pieces):  # nothing reads them again
            w.bar.k.at(k * c.pieces + i).arrive_empty()
        return seen

    @cute.jit
    def mask(self, w: Consumer, seen: list[cutlass.Boolean]):
        """-inf for every key that is not there."""
        s = by_column(w.scores)
        for r in cutlass.range_constexpr(ROWS):
            for i in cutlass.range_constexpr(cute.size(s, mode=[0])):
                s[i, r] = s[i, r] if seen[r] else -Float32.inf

    @cute.jit
    def share_p(self, w: Consumer, fresh: cutlass.Boolean):
        """All warps' products with the previous P are done, because the warps have met in the softmax.

        O is rescaled while P goes to SMEM; the fence waits for them.
        """
        store_columns(w.qk, w.scores, w.smem.p[None, None, 0], w.thread)
        self.rescale(w, fresh)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)

    @cute.jit
    def rescale(self, w: Consumer, fresh: cutlass.Boolean):
        """O' in units of the new maxima. Where no column of the warp rose, the factors are exactly 1."""
        factor = w.softmax.factor
        rises = factor[0] != 1.0
        for i in cutlass.range_constexpr(1, cute.size(factor)):
            rises = rises | (factor[i] != 1.0)
        if not_(fresh) & cute.arch.vote_any_sync(rises):
            for acc in w.out:
                scale_columns(acc, factor)

    @cute.jit
    def multiply_values(self, w: Consumer, k: Int32, fresh: cutlass.Boolean):
        """O' += V' P', piece by piece of d; each piece is handed back while the next is read."""
        c = self.config
        slabs = c.piece // SLAB
        for i in cutlass.range_constexpr(c.pieces_of_values):
            state = w.bar.k.at(k * c.pieces + i)
            for j in cutlass.range_constexpr(slabs):
                multiply(w.pv, w.out[i * slabs + j], w.values[j][None, None, None, state.index], w.p, fresh)
            if cutlass.const_expr(i > 0):
                warpgroup.wait_group(slabs)
                w.bar.k.at(k * c.pieces + i - 1).arrive_empty()
        warpgroup.wait_group(0)
        w.bar.k.at(k * c.pieces + c.pieces_of_values - 1).arrive_empty()

    @cute.jit
    def store(self, w: Consumer, tile: RowTile, output: tuple):
        """Stores O through SMEM, and by TMA to memory, which leaves out heads that do not exist."""
        c = self.config
        tma_o, mO = output
        gO, sO = tma_tiles(tma_o, tile.of(mO, c.tile_m, SLAB), w.smem.p)
        for first in cutlass.range_constexpr(0, c.d_v // SLAB, c.slabs_at_a_time):
            if cutlass.const_expr(first > 0):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)
            for i in cutlass.range_constexpr(c.slabs_at_a_time):
                store_columns(w.pv, w.out[first + i], w.smem.p[None, None, i], w.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)
            if cute.arch.make_warp_uniform(w.thread // 32) == 0:
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(c.slabs_at_a_time):
                        cute.copy(tma_o, sO[None, i], gO[None, first + i])
                    cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_part(self, w: Consumer, tile: RowTile, results: RowResults):
        """Stores O as fp32, from registers; for a query that saw no key, lse says so."""
        c = self.config
        for i in cutlass.range_constexpr(c.tile_m // 4):
            column = column_of(w.thread, i)
            row = results.o_parts + tile.row_index(tile.outer0, tile.inner0 + column) * c.d_v
            if exists(tile, column):
                for slab, acc in enumerate(w.out):
                    for r in cutlass.range_constexpr(ROWS):
                        store(row + (slab * SLAB + row_of(w.thread, r)), by_column(acc)[i, r])
        # as in `store`, between the softmax's results of this query and of the next
        cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources, variant.max_heads, variant.d_v)
    return MlaFewHeadsFwdSm90(config).compile(variant, out_dir, ctas=CTAS_PER_SM)
