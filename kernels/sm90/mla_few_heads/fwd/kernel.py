"""Attention for Hopper over a latent that is both K and V, for few heads whose keys differ from query to query.

A tile of 64 rows would hold one query's heads, and be mostly empty. So the operands change sides (swap A/B): keys
are the rows, heads the columns.

    S' = K Q'       64 keys x heads, K from SMEM
    O' += V' P'     d x heads, 64 rows of d a product, V' being the same tile of keys read the other way

A tile of rows is one query with all its heads. A CTA has two warpgroups, and an SM two CTAs, so that one's softmax
runs under the other's products:

    producer    Q, by TMA; keys, gathered with cp.async: a ring of pieces, each some columns of 64 keys
                    | full[stage]                                             ^ empty[stage]
    consumer    S', softmax over the keys of each column, weights to SMEM, O', all of it in registers; at last
                normalised, and through the weights' SMEM and what else is left of it to memory

Q's SMEM is free after the last scores of a query, so that the producer runs ahead into the next one.
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.columns import by_column, column_of
from kernels.lib.forward import ForwardKernel, compile_forward
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import PUBLISHED, ROWS, Extents, RowTile, Walk, row_of, store
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
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    not_,
    operand_a,
    operand_b,
    slab_layout,
    store_columns,
    tiled_mma,
    tma_tiles,
    transposed,
    zero_rows,
)

from .column_softmax import WARPS, ColumnSoftmax, exists, scale_columns

CTAS_PER_SM = 2  # CTAs of an SM
CONSUMERS_MET = 1  # a named barrier: all threads of the warpgroup have arrived


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...]  # kinds of the sources, in the order in which the kernel walks them: "span" or "selection"
    tile_m: int  # heads
    tile_n: int = 64  # keys: the rows of one WGMMA
    piece: int = 2 * SLAB  # columns of a key tile that are filled and freed together
    gathers: bool = True
    shared_kv: bool = True
    cluster: int = 1

    @property
    def threads(self) -> int:
        return 2 * WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread; a launch of two CTAs an SM gives both the same number at first."""
        return 56, 200

    @property
    def smem_limit(self) -> int:
        """A CTA's share of an SM's 228 KiB, 1 KiB of which the system takes."""
        return (SMEM_LIMIT + 1024) // CTAS_PER_SM - 1024

    @property
    def columns_q(self) -> int:
        return self.piece

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": CTAS_PER_SM, "preferred_smem_carveout": 100}  # otherwise the DSL asks the device

    @property
    def pieces(self) -> int:
        return self.d // self.piece

    @property
    def piece_bytes(self) -> int:
        return self.tile_n * self.piece * 2

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def bytes_beside_keys(self) -> int:
        infos = -(-PUBLISHED * (1 + len(self.sources)) // 4) * 4  # a multiple of 16 bytes
        small = 4 * (self.tile_m * WARPS + infos + WARPS * self.key_tiles)
        return self.tile_m * self.row_bytes + self.slab_bytes + small + 8 * 2

    @property
    def key_tiles(self) -> int:
        """The greatest number of key tiles with pieces in SMEM."""
        return self.smem_limit // (self.tile_n * self.row_bytes) + 2

    @property
    def stages(self) -> int:
        return (self.smem_limit - self.bytes_beside_keys) // (self.piece_bytes + 2 * 8)

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab of O, and of a tile's weights."""
        return self.tile_m * SLAB * 2

    @property
    def slabs_at_a_time(self) -> int:
        """Slabs of O in SMEM at a time: the weights' place, and what fits beside the keys; the same number each
        time.
        """
        slabs = self.d // SLAB
        fit = 1 + (self.smem_limit - self.bytes_with_keys) // self.slab_bytes
        return max(n for n in range(1, slabs + 1) if n <= fit and slabs % n == 0)

    @property
    def bytes_with_keys(self) -> int:
        return self.bytes_beside_keys + self.stages * (self.piece_bytes + 2 * 8)

    @property
    def smem_bytes(self) -> int:
        return self.bytes_with_keys + (self.slabs_at_a_time - 1) * self.slab_bytes

    def __post_init__(self):
        if self.d % self.piece or self.tile_n != SLAB:
            raise ValueError(f"wanted d in pieces of {self.piece} and tiles of {SLAB} keys, got {self}")
        if self.tile_m % 8 or self.d * self.tile_m > 512 * 32:
            raise ValueError(f"wanted a multiple of 8 heads, of which O fits into a warpgroup's registers, got {self}")
        if self.stages < self.pieces:
            raise ValueError(f"{self.stages} pieces fit into SMEM, a tile of keys has {self.pieces}: {self}")


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    full: cute.Pointer  # by stage
    empty: cute.Pointer


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (heads, piece, piece of d)
    k: cute.Tensor  # (tile_n, piece, stage)
    p: cute.Tensor  # (heads, tile_n, slabs_at_a_time): the weights first; O on its way out
    found: cute.Tensor  # (warp, heads, 2): see ColumnSoftmax
    seen: cute.Tensor  # (warp of the producer, key_tiles): see `present`
    info: cute.Tensor  # (PUBLISHED, row tile and each source): numbers that the producer found


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


class FewHeadsSm90(ForwardKernel):
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
        bar, smem = self.allocate()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bar.q_full, 1)
                cute.arch.mbarrier_init(bar.q_empty, WARPGROUP)
                for i in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(bar.full + i, WARPGROUP + WARPS)
                    cute.arch.mbarrier_init(bar.empty + i, WARPGROUP)
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

    def allocate(self) -> tuple[Barriers, Shared]:
        c = self.config
        smem = SmemAllocator()
        q, k, p = (
            smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
            for layout in (
                slab_layout(self.dtype, c.tile_m, c.piece, c.pieces),
                slab_layout(self.dtype, c.tile_n, c.piece, c.stages),
                slab_layout(self.dtype, c.tile_m, c.tile_n, c.slabs_at_a_time),
            )
        )
        found = smem.allocate_tensor(Float32, cute.make_layout((WARPS, c.tile_m)), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources))), 16)
        seen = smem.allocate_tensor(Uint32, cute.make_layout((WARPS, c.key_tiles)), 16)
        mbar = smem.allocate_array(Int64, 2 + 2 * c.stages)
        bar = Barriers(*(mbar + i for i in (0, 1, 2, 2 + c.stages)))
        return bar, Shared(q, k, p, found, seen, info)

    def slot(self, piece: Int32) -> tuple[Int32, Int32]:
        """(stage, phase) of a CTA's n-th piece."""
        return piece % self.config.stages, piece // self.config.stages & 1

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, row_source: tuple, sources: tuple, n: Extents):
        """For every query of this CTA: loads Q, opens the sources, and gathers the keys."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tma_q, mQ = row_source
        walk, before = Walk.of(n), Int32(0)
        for turn in cutlass.range(walk.turns, unroll=1):
            tile = walk.tile(turn)
            opened = own_part(tuple(open_selection(x, tile, c.tile_n, c.d) for x in sources), tile, 1)
            if warp == 0:
                cute.arch.mbarrier_wait(bar.q_empty, (turn & 1) ^ 1)
                with cute.arch.elect_one():
                    for which, thing in enumerate((tile, *opened)):
                        thing.publish(smem.info[None, which])
                    bytes_of_q = n.box_inner * n.box_outer * c.row_bytes
                    cute.arch.mbarrier_arrive_and_expect_tx(bar.q_full, bytes_of_q)
                gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.piece), smem.q)
                for i in cutlass.range_constexpr(c.pieces):
                    cute.copy(tma_q, gQ[None, i], sQ[None, i], tma_bar_ptr=bar.q_full)
            self.gather(bar, smem, opened, before)
            before = before + total_tiles(opened)

    @cute.jit
    def gather(self, bar: Barriers, smem: Shared, selections: tuple, before: Int32):
        c = self.config
        thread = cute.arch.thread_idx()[0]
        slabs = c.piece // SLAB
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        on_source(selections, 0, Selection.look_up, wanted, thread, WARPGROUP)
        for t in cutlass.range(total_tiles(selections), unroll=1):
            on_source(selections, t, Selection.settle, wanted, thread, WARPGROUP)
            source = with_keys(selections, t)
            here = present([wanted[i] >= 0 for i in range(cute.size(wanted))], thread)
            for i in cutlass.range_constexpr(c.pieces):
                stage, phase = self.slot((before + t) * c.pieces + i)
                cute.arch.mbarrier_wait(bar.empty + stage, phase ^ 1)
                if cutlass.const_expr(i == 0):
                    self.publish(smem, here, before + t)
                columns = range(i * slabs, (i + 1) * slabs)
                source.gather(smem.k[None, None, stage], wanted, thread, columns, WARPGROUP, i * slabs)
                cute.arch.cp_async_mbarrier_arrive_noinc(bar.full + stage)
                self.arrive_as_warp(bar.full + stage)
            on_source(selections, t + 1, Selection.look_up, wanted, thread, WARPGROUP)

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
        for turn in cutlass.range(Walk.of(n).turns, unroll=1):
            cute.arch.mbarrier_wait(bar.q_full, turn & 1)
            tile = RowTile.read(smem.info[None, 0], n)
            slots = (smem.info[None, 1 + i] for i in range(len(sources)))
            opened = (read_selection(x, tile, c.tile_n, c.d, slot) for x, slot in zip(sources, slots, strict=True))
            tiles = total_tiles(tuple(opened))
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # all warps meet before anything else takes O's place
            w.softmax.reset()
            if tiles == 0:
                cute.arch.mbarrier_arrive(bar.q_empty)
                for acc in w.out:
                    acc.fill(0.0)
            for t in cutlass.range(tiles, unroll=1):
                seen = self.multiply_keys(w, before + t)
                if t == tiles - 1:
                    cute.arch.mbarrier_arrive(bar.q_empty)
                self.mask(w, seen)
                w.softmax.step(w.scores)
                self.share_weights(w, fresh=t == 0)
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
            out=tuple(accumulator(pv, c.tile_m) for _ in range(c.d // SLAB)),
            softmax=ColumnSoftmax.of(scale_log2, thread, CONSUMERS_MET, smem.found),
        )

    @cute.jit
    def multiply_keys(self, w: Consumer, k: Int32) -> list[cutlass.Boolean]:
        """The scores of this CTA's k-th tile of keys; and which keys of a thread's rows are there."""
        c = self.config
        for i in cutlass.range_constexpr(c.pieces):
            stage, phase = self.slot(k * c.pieces + i)
            cute.arch.mbarrier_wait(w.bar.full + stage, phase)
            cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote through the generic proxy
            multiply(w.qk, w.scores, w.keys[None, None, None, stage], w.q[None, None, None, i], fresh=i == 0)
        places = (present_at(row_of(w.thread, r), WARPGROUP) for r in range(ROWS))
        seen = [w.smem.seen[warp, k % c.key_tiles] >> bit & 1 != 0 for warp, bit in places]  # under the products
        warpgroup.wait_group(0)
        return seen

    @cute.jit
    def mask(self, w: Consumer, seen: list[cutlass.Boolean]):
        """-inf for every key that is not there."""
        s = by_column(w.scores)
        for r in cutlass.range_constexpr(ROWS):
            for i in cutlass.range_constexpr(cute.size(s, mode=[0])):
                s[i, r] = s[i, r] if seen[r] else -Float32.inf

    @cute.jit
    def share_weights(self, w: Consumer, fresh: cutlass.Boolean):
        """All warps' products with the previous weights are done, because the warps have met in the softmax.

        O is rescaled while the weights go to SMEM; the fence waits for them.
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
        for i in cutlass.range_constexpr(c.pieces):
            stage, _ = self.slot(k * c.pieces + i)
            for j in cutlass.range_constexpr(slabs):
                multiply(w.pv, w.out[i * slabs + j], w.values[j][None, None, None, stage], w.p, fresh)
            if cutlass.const_expr(i > 0):
                warpgroup.wait_group(slabs)
                before, _ = self.slot(k * c.pieces + i - 1)
                cute.arch.mbarrier_arrive(w.bar.empty + before)
        warpgroup.wait_group(0)
        last, _ = self.slot((k + 1) * c.pieces - 1)
        cute.arch.mbarrier_arrive(w.bar.empty + last)

    @cute.jit
    def store(self, w: Consumer, tile: RowTile, output: tuple):
        """Stores O through SMEM, and by TMA to memory, which leaves out heads that do not exist."""
        c = self.config
        tma_o, mO = output
        gO, sO = tma_tiles(tma_o, tile.of(mO, c.tile_m, SLAB), w.smem.p)
        for first in cutlass.range_constexpr(0, c.d // SLAB, c.slabs_at_a_time):
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
            row = results.o_parts + tile.row_index(tile.outer0, tile.inner0 + column) * c.d
            if exists(tile, column):
                for slab, acc in enumerate(w.out):
                    for r in cutlass.range_constexpr(ROWS):
                        store(row + (slab * SLAB + row_of(w.thread, r)), by_column(acc)[i, r])
        # as in `store`, between the softmax's results of this query and of the next
        cute.arch.barrier(barrier_id=CONSUMERS_MET, number_of_threads=WARPGROUP)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources, variant.max_heads)
    return compile_forward(FewHeadsSm90(config), variant, out_dir, name="mla_few_heads_fwd_sm90", ctas=CTAS_PER_SM)
