"""Attention for Hopper, head dimensions up to 256, K and V apart.

    producer warp     Q  K0 V0  K1 V1  K2 V2 ...               TMA into a ring of `stages` K tiles and as many V tiles

    consumer WG 0     S0 | S1 + P0 V0 | S2 + P1 V1 | ... Pn Vn     rows  0 .. 63
    consumer WG 1     S0 | S1 + P0 V0 | S2 + P1 V1 | ... Pn Vn     rows 64 .. 127, ...

Q K' of tile t + 1 is issued before P V of tile t, so the softmax of t + 1 runs under the tensor cores. P stays in
registers. The output goes back through Q's SMEM and out by TMA, which clips the rows that do not exist.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from .aot import Compiled, compile_ahead
from .lib.launch import SMEM_LIMIT, WARPGROUP, Shapes, element_type, i32, launch_facts, pointers
from .lib.rows import Extents, RowTile, extents
from .lib.softmax import RowResults, Softmax, scale_rows
from .lib.spans import Span, SpanOperands, open_span
from .lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    release,
    round_to,
    slab_layout,
    store_rows,
    tiled_mma,
    tma_atom,
    tma_tiles,
    transposed,
    zero_rows,
)
from .variants import Variant

BAR_CONSUMERS = 1  # named barrier of all consumer warpgroups


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    stages: int = 2
    consumers: int = 2  # warpgroups, of 64 rows each

    @property
    def tile_m(self) -> int:
        return 64 * self.consumers

    @property
    def tile_n(self) -> int:
        return {64: 128, 128: 128, 256: 80}[self.d]  # at 256, what is left of SMEM

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread; together they fill the file of 65536."""
        return {2: (24, 240), 3: (32, 160)}[self.consumers]

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def key_tile_bytes(self) -> int:
        return self.tile_n * self.row_bytes

    @property
    def smem_bytes(self) -> int:
        barriers = 8 * (1 + 4 * self.stages)
        return 1024 + self.tile_m * self.row_bytes + 2 * self.stages * self.key_tile_bytes + barriers

    def __post_init__(self):
        if self.d % SLAB or self.d > 256:
            raise ValueError(f"d must be a multiple of {SLAB} up to 256 (one WGMMA's N), got {self.d}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM; those of K and V have one per stage."""

    q_full: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer


@dataclass(frozen=True)
class Producer:
    """All that the loading warp touches. A copy is (TMA atom, gmem tiles, smem stages)."""

    bar: Barriers
    copy_q: tuple
    copy_k: tuple
    copy_v: tuple
    q_bytes: Int32
    tiles: Int32


@dataclass(frozen=True)
class Consumer:
    """All that a consumer thread touches."""

    bar: Barriers
    sQ: cute.Tensor  # (tile_m, d), becomes O
    sK: cute.Tensor  # (tile_n, d, stage)
    sV: cute.Tensor  # (tile_n, d, stage)
    tile: RowTile
    span: Span
    results: RowResults


class FwdSm90:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = element_type(config.dtype)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        start: cute.Pointer,
        stop: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        scale_log2: Float32,
        b: Int32,
        s_q: Int32,
        s_kv: Int32,
        h_q: Int32,
        h_kv: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, False, s_q, h_q, h_kv)
        shapes = Shapes(c.d, b, n)
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        self.kernel(
            *tma_atom(load, shapes.rows(q), c.tile_m, c.d),
            *tma_atom(save, shapes.rows(o), c.tile_m, c.d),
            *tma_atom(load, shapes.keys(k, s_kv), c.tile_n, c.d),
            *tma_atom(load, shapes.keys(v, s_kv), c.tile_n, c.d),
            SpanOperands(start, stop, s_kv),
            RowResults(sink, lse),
            scale_log2,
            n,
        ).launch(
            grid=(n.tiles_inner * n.tiles_outer * h_kv * b, 1, 1),
            block=(c.threads, 1, 1),
            smem=c.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas silently drops setmaxnreg
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        operands: SpanOperands,
        results: RowResults,
        scale_log2: Float32,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, sQ, sK, sV = self.allocate()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bar.q_full, 1)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(bar.k_full + s, 1)
                    cute.arch.mbarrier_init(bar.v_full + s, 1)
                    cute.arch.mbarrier_init(bar.k_empty + s, 4 * c.consumers)  # a lane of each consumer warp
                    cute.arch.mbarrier_init(bar.v_empty + s, 4 * c.consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        tile = RowTile.of_block(n)
        span = open_span(operands, tile, c.tile_n)
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                gQ = tile.of(mQ, c.tile_m, c.d)[None, None, 0]
                gK, gV = (tile.keys(m, span.lo, c.tile_n, c.d)[None, None, None, 0] for m in (mK, mV))
                copies = (
                    (atom, *tma_tiles(atom, g, s)) for atom, g, s in ((tma_q, gQ, sQ), (tma_k, gK, sK), (tma_v, gV, sV))
                )
                self.load(Producer(bar, *copies, n.box_inner * n.box_outer * c.row_bytes, span.tiles))
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.attend(Consumer(bar, sQ, sK, sV, tile, span, results), scale_log2)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=WARPGROUP * c.consumers)
            if warp == 4:
                target, source = tma_tiles(tma_o, tile.of(mO, c.tile_m, c.d)[None, None, 0], sQ)
                cute.copy(tma_o, source, target)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def allocate(self) -> tuple[Barriers, cute.Tensor, cute.Tensor, cute.Tensor]:
        c = self.config
        smem = SmemAllocator()
        key_layout = slab_layout(self.dtype, c.tile_n, c.d, c.stages)
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
            for layout in (slab_layout(self.dtype, c.tile_m, c.d), key_layout, key_layout)
        )
        mbar = smem.allocate_array(Int64, 1 + 4 * c.stages)
        return Barriers(mbar, *(mbar + (1 + i * c.stages) for i in range(4))), sQ, sK, sV

    @cute.jit
    def load(self, p: Producer):
        c = self.config
        atom_q, gQ, sQ = p.copy_q
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(p.bar.q_full, p.q_bytes)
        cute.copy(atom_q, gQ, sQ, tma_bar_ptr=p.bar.q_full)
        for t in cutlass.range(p.tiles, unroll=1):
            stage, parity = t % c.stages, t // c.stages % 2
            for copy, full, empty in (
                (p.copy_k, p.bar.k_full, p.bar.k_empty),
                (p.copy_v, p.bar.v_full, p.bar.v_empty),
            ):
                atom, gmem, smem = copy
                cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, c.key_tile_bytes)
                cute.copy(atom, gmem[None, t], smem[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def attend(self, p: Consumer, scale_log2: Float32):
        """One warpgroup: 64 rows of O, from the first key tile to the normalised output in SMEM, and lse."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        row0 = group * 64
        rows = p.span.of_rows(row0, thread)

        qk = tiled_mma(self.dtype, c.tile_n, K_MAJOR)
        pv = tiled_mma(self.dtype, c.d, MN_MAJOR, warpgroup.OperandSource.RMEM)
        my_rows = cute.local_tile(p.sQ, (64, c.d), (group, 0))
        a, b_k, b_v = operand_a(qk, my_rows), operand_b(qk, p.sK), operand_b(pv, transposed(p.sV))
        scores, out = accumulator(qk, c.tile_n), accumulator(pv, c.d)
        weights = register_operand(pv, c.tile_n, self.dtype)
        s = Softmax.start(scale_log2)
        out.fill(0.0)

        bar, tiles = p.bar, p.span.tiles
        cute.arch.mbarrier_wait(bar.q_full, 0)
        if tiles > 0:
            cute.arch.mbarrier_wait(bar.k_full, 0)
            multiply(qk, scores, a, b_k[None, None, None, 0], fresh=True)
            warpgroup.wait_group(0)
            release(bar.k_empty)
            rows.mask(scores, 0)
            s.raise_max(scores)
            s.exponentiate(scores)
            round_to(weights, scores)
            for t in cutlass.range(1, tiles, unroll=1):
                stage, parity = t % c.stages, t // c.stages % 2
                stage_v, parity_v = (t - 1) % c.stages, (t - 1) // c.stages % 2
                cute.arch.mbarrier_wait(bar.k_full + stage, parity)
                multiply(qk, scores, a, b_k[None, None, None, stage], fresh=True)
                cute.arch.mbarrier_wait(bar.v_full + stage_v, parity_v)
                multiply(pv, out, weights, b_v[None, None, None, stage_v])
                warpgroup.wait_group(1)
                release(bar.k_empty + stage)
                rows.mask(scores, t)
                s.remember_max()
                s.raise_max(scores)
                s.decay()
                s.exponentiate(scores)
                warpgroup.wait_group(0)
                release(bar.v_empty + stage_v)
                round_to(weights, scores)
                scale_rows(out, s.factor)
            last = tiles - 1
            stage, parity = last % c.stages, last // c.stages % 2
            cute.arch.mbarrier_wait(bar.v_full + stage, parity)
            if p.span.needs_clearing(last):
                threads = WARPGROUP * c.consumers
                zero_rows(p.sV[None, None, stage], p.span.unseen_from(last), group * WARPGROUP + thread, threads)
                cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=threads)
            multiply(pv, out, weights, b_v[None, None, None, stage])
            warpgroup.wait_group(0)

        s.sum_columns()
        s.finish(p.tile, row0, thread, p.results, writes_lse=True)
        scale_rows(out, s.factor)
        store_rows(pv, out, my_rows, thread)


def compile(variant: Variant, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype)
    return compile_ahead(
        FwdSm90(config),
        FwdSm90.kernel,
        *pointers(variant.dtype, "q", "k", "v", "o", "int32", "int32", "float32", "float32"),
        Float32(1.0),
        *(i32() for _ in range(5)),
        name="fwd_sm90",
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(config),
    )
