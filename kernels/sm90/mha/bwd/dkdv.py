"""The gradients of K and V for Hopper, head dimensions up to 256, separate K and V.

With P = exp(S - lse), and a sink factor f and a delta for each row (query, head):

    dV = (f P)' dO        dS = P * (f dO V' - delta)        dK = scale dS' Q

A CTA owns a tile of keys of one KV head and walks over the tiles of rows that see any of them, of all heads of the
group. dK and dV stay in registers, and have the same bits every time. All products are of transposes: keys are the rows
of every accumulator, and P' and dS' go from registers into the next product:

    producer warp     K V   Q0 dO0   Q1 dO1   Q2 dO2 ...                        TMA, into a ring
    row warps         the numbers of each tile's rows                           into the same stages
    consumer WG 0     S' = K Q',  dP' = V dO' | P' | dV += P' dO | dS' | dK += dS' Q       keys  0 ..  63
    consumer WG 1     S' = K Q',  dP' = V dO' | P' | dV += P' dO | dS' | dK += dS' Q       keys 64 .. 127

At d 256 two warpgroups can hold dK and dV of only 64 keys, so they share the work by role. P goes from one to the other
through SMEM, in float32:

    consumer WG 0     S' = K Q'  | P' |        dV += P' dO | S' of the next ...
    consumer WG 1     dP' = V dO'      | dS' | dK += dS' Q | dP' of the next ...
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.launch import WARPGROUP
from kernels.lib.rows import Extents
from kernels.lib.softmax import LOG2_E
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    tiled_mma,
    transposed,
)

from .config import KeyTileConfig
from .elements import (
    HAS_SINK,
    HIDES,
    SEES,
    add_scaled,
    apply_sink,
    differentiate,
    drop,
    exponentiate,
    hand_over,
    mask,
    part_of,
    take_over,
)
from .host import Results
from .key_tiles import KeyTile, KeyTileKernel
from .smem import KeyTileBarriers, KeyTileShared


class MhaDkdvSm90(KeyTileKernel):
    op = "mha_dkdv"

    @cute.jit
    def consume(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, results: Results, scale: Float32, n: Extents
    ):
        """One warpgroup: the gradients of its 64 keys."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        scores = tiled_mma(self.dtype, c.tile_m, K_MAJOR)
        sums = tiled_mma(self.dtype, c.d, MN_MAJOR, warpgroup.OperandSource.RMEM)
        a_k, a_v = (operand_a(scores, cute.local_tile(x, (64, c.d), (group, 0))) for x in (smem.k, smem.v))
        b_q, b_do = (operand_b(scores, x) for x in (smem.q, smem.do))
        b_qt, b_dot = (operand_b(sums, transposed(x)) for x in (smem.q, smem.do))
        s, dp = (accumulator(scores, c.tile_m) for _ in range(2))
        dk, dv = (accumulator(sums, c.d) for _ in range(2))
        p, ds = (register_operand(sums, c.tile_m, self.dtype) for _ in range(2))
        dk.fill(0.0)
        dv.fill(0.0)
        scale_log2 = scale * LOG2_E
        key0 = tile.key0 + group * 64
        cute.arch.mbarrier_wait(bar.keys, 0)
        for t in cutlass.range(self.steps(smem)[1], unroll=1):
            rows = bar.rows.at(t)
            stage = rows.index
            bar.landed.at(t).wait_full()
            rows.wait_full()
            numbers, flags = smem.numbers[None, None, stage], smem.flags[0, stage]
            hides = (flags >> group) & HIDES != 0
            if (flags >> group) & SEES != 0:
                multiply(scores, s, a_k, b_q[None, None, None, stage], fresh=True)
                multiply(scores, dp, a_v, b_do[None, None, None, stage], fresh=True)
                warpgroup.wait_group(1)
                if hides:
                    mask(s, smem.spans[None, None, stage], key0, thread)
                exponentiate(s, numbers, scale_log2)
                apply_sink(p, s, numbers, flags)
                warpgroup.wait_group(0)
                if hides:
                    drop(dp, s)
                multiply(sums, dv, p, b_dot[None, None, None, stage])
                differentiate(ds, s, dp, numbers, flags)
                multiply(sums, dk, ds, b_qt[None, None, None, stage])
                warpgroup.wait_group(0)
            rows.arrive_empty()
        if results.shared_kv != 0:
            add_scaled(dk, scale, dv)
            scale = Float32(1.0)
        else:
            self.store_sum(dv, Float32(1.0), results.dv, tile, results.s_kv, key0, thread, n)
        self.store_sum(dk, scale, results.dk, tile, results.s_kv, key0, thread, n)


class MhaDkdvByRoleSm90(KeyTileKernel):
    op = "mha_dkdv"

    @cute.jit
    def consume(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, results: Results, scale: Float32, n: Extents
    ):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8:
            self.consume_values(bar, smem, tile, results, scale, n)
        else:
            self.consume_keys(bar, smem, tile, results, scale, n)

    @cute.jit
    def consume_values(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, results: Results, scale: Float32, n: Extents
    ):
        """One warpgroup makes S and P, which it hands on, and dV."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        scores = tiled_mma(self.dtype, c.tile_m, K_MAJOR)
        sums = tiled_mma(self.dtype, c.d, MN_MAJOR, warpgroup.OperandSource.RMEM)
        a_k, b_q, b_dot = operand_a(scores, smem.k), operand_b(scores, smem.q), operand_b(sums, transposed(smem.do))
        s, dv = accumulator(scores, c.tile_m), accumulator(sums, c.d)
        p = register_operand(sums, c.tile_m, self.dtype)
        dv.fill(0.0)
        scale_log2 = scale * LOG2_E
        cute.arch.mbarrier_wait(bar.keys, 0)
        for t in cutlass.range(self.steps(smem)[1], unroll=1):
            rows = bar.rows.at(t)
            stage = rows.index
            bar.landed.at(t).wait_full()
            rows.wait_full()
            multiply(scores, s, a_k, b_q[None, None, None, stage], fresh=True)
            numbers = smem.numbers[None, None, stage]
            warpgroup.wait_group(0)
            if smem.flags[0, stage] & HIDES != 0:
                mask(s, smem.spans[None, None, stage], tile.key0, thread)
            exponentiate(s, numbers, scale_log2)
            handed = bar.p.at(t)
            handed.wait_empty()
            hand_over(s, smem.p, thread)
            handed.arrive_full()
            apply_sink(p, s, numbers, Int32(HAS_SINK))
            multiply(sums, dv, p, b_dot[None, None, None, stage])
            warpgroup.wait_group(0)
            rows.arrive_empty()
        if results.shared_kv != 0:
            for i in cutlass.range_constexpr(c.d // c.tile_m):
                handed = bar.p.at(self.steps(smem)[1] + i)
                handed.wait_empty()
                hand_over(part_of(dv, s, i), smem.p, thread)
                handed.arrive_full()
        else:
            self.store_sum(dv, Float32(1.0), results.dv, tile, results.s_kv, tile.key0, thread, n)

    @cute.jit
    def consume_keys(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, results: Results, scale: Float32, n: Extents
    ):
        """The other warpgroup makes dP, dS from P, and dK."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        scores = tiled_mma(self.dtype, c.tile_m, K_MAJOR)
        sums = tiled_mma(self.dtype, c.d, MN_MAJOR, warpgroup.OperandSource.RMEM)
        a_v, b_do, b_qt = operand_a(scores, smem.v), operand_b(scores, smem.do), operand_b(sums, transposed(smem.q))
        dp, p, dk = accumulator(scores, c.tile_m), accumulator(scores, c.tile_m), accumulator(sums, c.d)
        ds = register_operand(sums, c.tile_m, self.dtype)
        dk.fill(0.0)
        cute.arch.mbarrier_wait(bar.keys, 0)
        for t in cutlass.range(self.steps(smem)[1], unroll=1):
            rows = bar.rows.at(t)
            stage = rows.index
            bar.landed.at(t).wait_full()
            rows.wait_full()
            multiply(scores, dp, a_v, b_do[None, None, None, stage], fresh=True)
            handed = bar.p.at(t)
            handed.wait_full()
            take_over(p, smem.p, thread)
            handed.arrive_empty()
            warpgroup.wait_group(0)
            drop(dp, p)
            differentiate(ds, p, dp, smem.numbers[None, None, stage], Int32(HAS_SINK))
            multiply(sums, dk, ds, b_qt[None, None, None, stage])
            warpgroup.wait_group(0)
            rows.arrive_empty()
        if results.shared_kv != 0:
            for i in cutlass.range_constexpr(c.d // c.tile_m):
                handed = bar.p.at(self.steps(smem)[1] + i)
                handed.wait_full()
                take_over(p, smem.p, thread)
                handed.arrive_empty()
                add_scaled(part_of(dk, p, i), scale, p)
            scale = Float32(1.0)
        self.store_sum(dk, scale, results.dk, tile, results.s_kv, tile.key0, thread, n)


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    config = KeyTileConfig(variant.d, variant.dtype)
    kernel = MhaDkdvByRoleSm90 if config.by_role else MhaDkdvSm90
    return kernel(config).compile(variant, out_dir)
