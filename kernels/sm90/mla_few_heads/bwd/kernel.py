"""The gradient of attention for Hopper over a latent that is both K and V, of few heads whose keys differ from query to
query.

A tile of 64 rows would hold one query's heads, and most of it nothing. So, as in `few_heads`, the operands change
sides: keys are the rows, heads the columns. With P, dS, weight and delta as in `latent_bwd`,

    [S' dP'] = K [Q dO]'           64 keys x twice the heads
    dQ' += K' dS'                  d x heads, 64 rows of d a product; dS' goes through SMEM
    dKV = [dS' (weight P)'] [Q dO] 64 keys x d, some columns at a time; its first operand stays in registers

A tile of rows is one query with all its heads. A CTA has two warpgroups, and an SM two CTAs, so that the reductions of
one, which bound this kernel, go on under the products of the other:

    producer    Q and dO of a query; its keys, gathered with cp.async, as soon as dQ' has read the tile before
                    | q_full   | full[piece of columns]                       ^ empty                   ^ q_empty
    consumer    [S' dP'], P and dS in registers, dS to SMEM, dQ'; dKV, chunk by chunk, through 2 KiB of SMEM of each
                warp to memory; at last dQ'

An absent key is zeros and has P = 0; nothing is added for it. A head that does not exist has P = 0 too.
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import MlaBackward
from kernels.aot import Compiled
from kernels.lib.columns import by_column, column_of
from kernels.lib.launch import SMEM_LIMIT, WARP, WARPGROUP
from kernels.lib.ptx import arrive_if, copy_or_zero, copy_out
from kernels.lib.rows import PUBLISHED, ROWS, Extents, RowTile, Walk, load, row_of
from kernels.lib.selections import CHUNK, LANES_A_ROW, Selection, open_selection, with_keys
from kernels.lib.softmax import LOG2_E, exp2
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.tiles import TileAllocator
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

from ...mla.bwd.host import LatentBackwardKernel, RowOperands, compile_backward
from ...mla.bwd.key_gradients import Target, add_staged, stage_rows

CTAS_PER_SM = 2  # CTAs of an SM
CONSUMERS_MET = 1  # a named barrier: all threads of the warpgroup have arrived
STAGES = 2  # of what is listed of a tile of keys, and published of a query


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...]  # of keys, in the order in which they are walked: "span" or "selection"
    tile_m: int  # heads
    tile_n: int = 64  # keys: the rows of one WGMMA
    pieces: int = 4  # of the columns, in which keys arrive
    chunk: int = 32  # columns of dKV that are made at a time
    under_way: int = 2  # chunks
    gathers: bool = True
    cluster: int = 1

    @property
    def threads(self) -> int:
        return 2 * WARPGROUP

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": CTAS_PER_SM, "preferred_smem_carveout": 100}  # otherwise the DSL asks the device

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread, out of what a launch of two CTAs an SM gives to both alike."""
        return 56, 200

    @property
    def sum_bytes(self) -> int:
        """The bytes of a number of dKV in memory."""
        return 4

    @property
    def slot_bytes(self) -> int:
        """The bytes of a chunk of dKV in SMEM."""
        return self.sum_bytes * self.tile_n * self.chunk

    @property
    def slabs(self) -> int:
        return self.d // SLAB

    @property
    def slabs_at_a_time(self) -> int:
        """How many slabs of dQ fit in the place of a chunk of dKV."""
        return self.slot_bytes // (self.tile_m * SLAB * 2)

    @property
    def smem_limit(self) -> int:
        """A CTA's share of an SM's 228 KiB, less the 1 KiB that the system keeps."""
        return (SMEM_LIMIT + 1024) // CTAS_PER_SM - 1024

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * self.d * (2 * self.tile_m + self.tile_n) + 2 * self.tile_m * self.tile_n
        infos = 4 * PUBLISHED * (1 + len(self.sources))
        numbers = 4 * 3 * self.tile_m
        return tiles + self.slot_bytes + STAGES * (4 * self.tile_n + infos + numbers) + 8 * Barriers.COUNT + 64

    def __post_init__(self):
        if self.d % (SLAB * self.pieces) or self.tile_n != SLAB:
            raise ValueError(f"wanted d in {self.pieces} pieces of slabs and tiles of {SLAB} keys, got {self}")
        if self.tile_m != 16:
            raise ValueError(f"wanted the 16 heads of one step of a product, got {self}")
        if self.smem_bytes > self.smem_limit:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {self.smem_limit} fit: {self}")


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce. All threads of a warpgroup arrive."""

    first: cute.Pointer

    COUNT = 9

    def initialise(self) -> None:
        for i in range(self.COUNT):
            cute.arch.mbarrier_init(self.first + i, WARPGROUP)

    @property
    def opened(self) -> cute.Pointer:
        """What the producer found out of a query stands in SMEM."""
        return self.first

    @property
    def q_full(self) -> cute.Pointer:
        return self.first + 1

    @property
    def q_empty(self) -> cute.Pointer:
        return self.first + 2

    @property
    def listed(self) -> cute.Pointer:
        """Where a tile's keys are stands in SMEM."""
        return self.first + 3

    @property
    def empty(self) -> cute.Pointer:
        return self.first + 4

    @property
    def full(self) -> cute.Pointer:
        """By piece of the columns: of a tile of keys."""
        return self.first + 5


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    rows: cute.Tensor  # (2 heads, d): Q, then dO
    k: cute.Tensor  # (keys, d)
    ds: cute.Tensor  # (heads, keys)
    out: cute.Tensor  # float32: a chunk of dKV on its way out, 2 KiB a warp
    dq: cute.Tensor  # (heads, 64, slab) in the same place: dQ on its way out
    keys: cute.Tensor  # (keys, stage): where each is in its source, or -1
    numbers: cute.Tensor  # (heads, 3, stage): of each lse in units of log2, weight, and scaled delta
    info: cute.Tensor  # (PUBLISHED, row tile and each source, stage): what the producer found out


class FewHeadsBwdSm90(LatentBackwardKernel):
    @cute.kernel
    def kernel(self, rows: RowOperands, sources: tuple, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
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

    def allocate(self) -> tuple[Barriers, Shared]:
        c, smem = self.config, TileAllocator(self.dtype)
        rows, k, ds = smem.tile(2 * c.tile_m, c.d), smem.tile(c.tile_n, c.d), smem.tile(c.tile_m, c.tile_n)
        dq = smem.tile(c.tile_m, SLAB, c.slabs_at_a_time)
        out = cute.make_tensor(cute.recast_ptr(dq.iterator, dtype=Float32), cute.make_layout(c.slot_bytes // 4))
        keys = smem.allocate_tensor(Int32, cute.make_layout((c.tile_n, STAGES)), 16)
        numbers = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 3, STAGES)), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), STAGES)), 16)
        return Barriers(smem.allocate_array(Int64, Barriers.COUNT)), Shared(rows, k, ds, out, dq, keys, numbers, info)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """For every query of this CTA: its first keys, what there is to see, Q and dO, and the other keys."""
        c = self.config
        thread = cute.arch.thread_idx()[0]
        walk, before = Walk.of(n), Int32(0)
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        for turn in cutlass.range(walk.turns, unroll=1):
            tile = walk.tile(turn)
            lists = tuple(
                open_selection(source.operands(kind, c.gathers), tile, c.tile_n, c.d)
                for kind, source in zip(c.sources, sources, strict=True)
            )
            tiles = total_tiles(lists)
            on_source(lists, 0, Selection.look_up, wanted, thread, WARPGROUP)
            for t in cutlass.range(cutlass.max(tiles, 1), unroll=1):
                if t < tiles:
                    on_source(lists, t, Selection.settle, wanted, thread, WARPGROUP)
                    self.gather(bar, smem, with_keys(lists, t), wanted, before + t, thread)
                    on_source(lists, t + 1, Selection.look_up, wanted, thread, WARPGROUP)
                if t == 0:
                    self.load_rows(bar, smem, rows, tile, lists, turn, thread)
            before = before + tiles

    @cute.jit
    def gather(self, bar: Barriers, smem: Shared, keys: Selection, wanted: cute.Tensor, k: Int32, thread: Int32):
        """The CTA's k-th tile of keys, piece by piece, and where its keys are."""
        c = self.config
        cute.arch.mbarrier_wait(bar.empty, (k & 1) ^ 1)
        each = c.slabs // c.pieces
        for piece in cutlass.range_constexpr(c.pieces):
            keys.gather(smem.k, wanted, thread, range(piece * each, (piece + 1) * each), WARPGROUP)
            cute.arch.cp_async_mbarrier_arrive_noinc(bar.full + piece)
        if thread % LANES_A_ROW == 0:
            for i in cutlass.range_constexpr(cute.size(wanted)):
                smem.keys[i * (WARPGROUP // LANES_A_ROW) + thread // LANES_A_ROW, k % STAGES] = wanted[i]
        cute.arch.mbarrier_arrive(bar.listed)

    @cute.jit
    def load_rows(
        self, bar: Barriers, smem: Shared, rows: RowOperands, tile: RowTile, lists: tuple, turn: Int32, thread: Int32
    ):
        """What was found out of a query, and its Q and dO; zeros for a head that does not exist or sees nothing."""
        c, n = self.config, tile.n
        head, chunk = thread // LANES_A_ROW, thread % LANES_A_ROW
        exists = (head < n.box_inner) & (tile.inner0 + head < n.inner)
        row = tile.row_index(tile.outer0, tile.inner0 + head) * Int64(exists)
        lse, weight, delta = (load(x + row) for x in (rows.lse, rows.weight, rows.delta))
        sees = exists & (lse != -Float32.inf)
        cute.arch.mbarrier_wait(bar.q_empty, (turn & 1) ^ 1)
        if thread == 0:
            tile.publish(smem.info[None, 0, turn % STAGES])
            for which, keys in enumerate(lists):
                smem.info[0, 1 + which, turn % STAGES] = keys.tiles
        if chunk == 0:
            smem.numbers[head, 0, turn % STAGES] = lse * LOG2_E if sees else Float32.inf
            smem.numbers[head, 1, turn % STAGES] = weight if sees else Float32(0.0)
            smem.numbers[head, 2, turn % STAGES] = delta * rows.scale if sees else Float32(0.0)
        cute.arch.mbarrier_arrive(bar.opened)
        place0 = smem.rows.iterator.toint() + head * (SLAB * 2) + (chunk ^ head % 8) * 16
        for which, source in enumerate((rows.q, rows.do)):
            of_row = source + (row * c.d + chunk * CHUNK)
            for slab in cutlass.range_constexpr(c.slabs):
                place = place0 + (slab * 2 + which) * c.tile_m * SLAB * 2
                copy_or_zero(place, (of_row + slab * SLAB).toint(), Int32(sees) * 16)
        cute.arch.cp_async_mbarrier_arrive_noinc(bar.q_full)

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
        for turn in cutlass.range(Walk.of(n).turns, unroll=1):
            stage = turn % STAGES
            cute.arch.mbarrier_wait(bar.opened, turn & 1)
            counts = tuple(cute.arch.make_warp_uniform(smem.info[0, 1 + i, stage]) for i in range(len(c.sources)))
            tiles = sum(counts[1:], counts[0])
            for i in cutlass.range_constexpr(c.tile_m // 4):
                for j in cutlass.range_constexpr(3):
                    numbers[i, j] = smem.numbers[column_of(thread, i), j, stage]
            cute.arch.mbarrier_wait(bar.q_full, turn & 1)
            cute.arch.fence_proxy("async.shared", space="cta")  # the producer wrote through the generic proxy
            for t in cutlass.range(tiles, unroll=1):
                k, last = before + t, Int32(t == tiles - 1)
                for piece in cutlass.range_constexpr(c.pieces):
                    cute.arch.mbarrier_wait(bar.full + piece, k & 1)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    here = range(piece * blocks, (piece + 1) * blocks)
                    multiply(both, scores, a_k, b_rows, piece == 0, here)
                cute.arch.mbarrier_wait(bar.listed, k & 1)
                seen = [smem.keys[row_of(thread, r), k % STAGES] >= 0 for r in range(ROWS)]
                listed = tuple(
                    smem.keys[thread // WARP * 16 + i * 4 + thread % WARP // 8, k % STAGES] for i in range(4)
                )
                sums = self.find_sums(smem, t < counts[0], sources, stage)
                target = Target(sums + thread % 8 * 16, listed, Int32(c.d * c.sum_bytes))
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
                cute.arch.mbarrier_arrive(bar.empty)
                for i in cutlass.range_constexpr(len(b_chunks)):
                    warpgroup.wait_group(min(c.under_way, len(b_chunks) - i) - 1)
                    if cutlass.const_expr(i == len(b_chunks) - 1):
                        arrive_if(bar.q_empty, last)
                    stage_rows(acc[i % c.under_way], slot)
                    if cutlass.const_expr(i + c.under_way < len(b_chunks)):
                        multiply(wide, acc[i % c.under_way], of_keys, b_chunks[i + c.under_way], fresh=True)
                    add_staged(slot, target, i * c.chunk)
            if tiles == 0:
                cute.arch.mbarrier_arrive(bar.q_empty)
                for x in dq:
                    x.fill(0.0)
            self.store(smem, one, dq, rows, RowTile.read(smem.info[None, 0, stage], n), thread)
            before = before + tiles

    @cute.jit
    def find_sums(self, smem: Shared, of_first: cutlass.Boolean, sources: tuple, stage: Int32) -> Int64:
        """Where the gradient of the keys of this batch entry begins, in the source that a tile is of."""
        batch = cute.arch.make_warp_uniform(smem.info[1, 0, stage])
        base = (sources[-1].dkv + Int64(batch) * sources[-1].s_batch * self.config.d).toint()
        if cutlass.const_expr(len(sources) == 2):  # noqa: SIM102, at compile time
            if of_first:
                base = (sources[0].dkv + Int64(batch) * sources[0].s_batch * self.config.d).toint()
        return base

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
    """S <- weight P, dP <- scale P (weight dP - delta), delta being scaled already: P = exp(scale S - lse), 0 for a key
    that is absent."""
    s, dp = by_column(s), by_column(dp)
    for i in cutlass.range_constexpr(cute.size(numbers, mode=[0])):
        lse, weight, delta = (numbers[i, j] for j in range(3))
        factor = weight * scale
        for r in cutlass.range_constexpr(ROWS):
            p = exp2(s[i, r] * scale_log2 - lse) if seen[r] else Float32(0.0)
            dp[i, r] = p * (dp[i, r] * factor - delta)
            s[i, r] = p * weight


def compile(variant: MlaBackward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources, variant.max_heads)
    return compile_backward(FewHeadsBwdSm90(config), variant, out_dir, name="mla_few_heads_bwd_sm90", ctas=CTAS_PER_SM)
