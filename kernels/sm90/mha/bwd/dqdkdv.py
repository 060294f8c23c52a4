"""All gradients of attention for Hopper in one kernel, head dimensions 64 and 128, separate K and V.

This is `mha_dkdv` with dQ: five products instead of the seven of two kernels. dS goes through SMEM, rounded as for
dK. The kernel adds each tile of keys' part of dQ to float32 in memory, in no fixed order.

    consumer WG 0     S'0 dP'0 | dV += P'0 dO | dS'0 | dK += dS'0 Q, dQ of the tile before | S'1 dP'1 | ...
    consumer WG 1     S'0 dP'0 | dV += P'0 dO | dS'0 | dK += dS'0 Q, dQ of the tile before | S'1 dP'1 | ...

dQ from all 128 keys needs dS of both warpgroups, so they make it a step later: neither waits for the other as long as
they are less than a step apart. At d 128 each makes half of its columns, at d 64 half of 128 rows.

Four neighbouring numbers of a row in memory belong to one thread: columns 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of sixteen
lie at 4 i. The reader of the sums puts columns in order (`_host.gradients.mha_bwd`).
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.ptx import add_four
from kernels.lib.rows import ROWS, Extents, row_of
from kernels.lib.softmax import LOG2_E, by_row
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    store_matrices,
    tiled_mma,
    transposed,
    zero_rows,
)

from .config import KeyTileConfig
from .elements import HIDES, add_scaled, apply_sink, differentiate, drop, exponentiate, mask, zero_row
from .host import Results
from .key_tiles import KeyTile, KeyTileKernel
from .smem import KeyTileBarriers, KeyTileShared


class MhaDqdkdvSm90(KeyTileKernel):
    op = "mha_dqdkdv"

    @cute.jit
    def consume(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, results: Results, scale: Float32, n: Extents
    ):
        """One warpgroup: the gradients of its 64 keys, and its half of dQ."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        scores = tiled_mma(self.dtype, 64, K_MAJOR)
        sums = tiled_mma(self.dtype, c.d, MN_MAJOR, warpgroup.OperandSource.RMEM)
        of_rows = tiled_mma(self.dtype, 64, MN_MAJOR)
        a_k, a_v = (operand_a(scores, cute.local_tile(x, (64, c.d), (group, 0))) for x in (smem.k, smem.v))
        halves = [
            tuple(cute.local_tile(x, (64, c.d), (i, 0, None)) for x in (smem.q, smem.do)) for i in range(c.row_warps)
        ]
        b_q, b_do = ([operand_b(scores, half[i]) for half in halves] for i in range(2))
        b_qt, b_dot = ([operand_b(sums, transposed(half[i])) for half in halves] for i in range(2))
        row0, column0 = (group * 64, Int32(0)) if c.d == 64 else (Int32(0), group * 64)
        a_ds = operand_a(of_rows, cute.local_tile(smem.ds, (64, c.tile_n), (row0 // 64, 0, None)))
        b_kt = operand_b(of_rows, transposed(cute.local_tile(smem.k, (c.tile_n, 64), (0, column0 // 64))))
        s, dp = (accumulator(scores, 64) for _ in range(2))
        dk, dv = (accumulator(sums, c.d) for _ in range(2))
        p, ds = (register_operand(sums, 64, self.dtype) for _ in range(2))
        dq = accumulator(of_rows, 64)
        places = cute.make_rmem_tensor(ROWS, Int32)
        places.fill(-1)
        dk.fill(0.0)
        dv.fill(0.0)
        scale_log2 = scale * LOG2_E
        key0 = tile.key0 + group * 64
        zero_rows(cute.local_tile(smem.ds, (c.tile_m, 64), (0, group, 1)), Int32(0), thread, WARPGROUP)
        cute.arch.mbarrier_wait(bar.keys, 0)
        self.zero_keys(smem, group * 64, thread)
        cute.arch.mbarrier_arrive(bar.ds.full + 1)  # as if of a tile before the first
        cute.arch.mbarrier_wait(bar.ds.full + 1, 0)
        steps = self.steps(smem)[1]
        for t in cutlass.range(steps, unroll=1):
            rows = bar.rows.at(t)
            stage = rows.index
            # a step fills a stage of dS and reads the other, which the step before has filled
            this, use, before = t & 1, t + 1 >> 1 & 1, t // 2 & 1
            bar.landed.at(t).wait_full()
            rows.wait_full()
            flags = smem.flags[0, stage]
            for i in cutlass.range_constexpr(1, c.row_warps):
                flags = flags | smem.flags[i, stage]
            hides = flags & HIDES != 0
            multiply(scores, s, a_k, b_q[0][None, None, None, stage], fresh=True)
            multiply(scores, dp, a_v, b_do[0][None, None, None, stage], fresh=True)
            if cutlass.const_expr(c.row_warps == 2):  # registers are there while S and dP are
                cute.arch.mbarrier_wait(bar.ds.full + (this ^ 1), before)
                multiply(of_rows, dq, a_ds[None, None, None, this ^ 1], b_kt, fresh=True)
            for i in cutlass.range_constexpr(c.row_warps):
                numbers = cute.local_tile(smem.numbers, (64, 3), (i, 0, stage))
                warpgroup.wait_group(2 if c.row_warps == 2 and i == 0 else 1)
                if cutlass.const_expr(i == 1):
                    cute.arch.mbarrier_arrive(bar.ds.empty + (this ^ 1))
                    add_rows(dq, results.sums, places, column0, c.d)
                if hides:
                    mask(s, cute.local_tile(smem.spans, (64, 2), (i, 0, stage)), key0, thread)
                exponentiate(s, numbers, scale_log2)
                apply_sink(p, s, numbers, flags)
                warpgroup.wait_group(1 if c.row_warps == 2 and i == 0 else 0)
                if hides:
                    drop(dp, s)
                multiply(sums, dv, p, b_dot[i][None, None, None, stage])
                differentiate(ds, s, dp, numbers, flags)
                if cutlass.const_expr(i == 0):
                    cute.arch.mbarrier_wait(bar.ds.empty + this, use ^ 1)
                rounded = cute.make_tensor(ds.iterator, s.layout)
                own = cute.local_tile(smem.ds, (64, 64), (i, group, this))
                store_matrices(scores, rounded, transposed(own), thread, True)
                if cutlass.const_expr(c.row_warps == 1):  # dQ first: its sums leave while dK is made
                    cute.arch.mbarrier_wait(bar.ds.full + (this ^ 1), before)
                    multiply(of_rows, dq, a_ds[None, None, None, this ^ 1], b_kt, fresh=True)
                multiply(sums, dk, ds, b_qt[i][None, None, None, stage])
                if cutlass.const_expr(i < c.row_warps - 1):
                    multiply(scores, s, a_k, b_q[i + 1][None, None, None, stage], fresh=True)
                    multiply(scores, dp, a_v, b_do[i + 1][None, None, None, stage], fresh=True)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(bar.ds.full + this)
            if cutlass.const_expr(c.row_warps == 1):
                warpgroup.wait_group(1)
                cute.arch.mbarrier_arrive(bar.ds.empty + (this ^ 1))
                add_rows(dq, results.sums, places, column0, c.d)
            warpgroup.wait_group(0)
            for r in cutlass.range_constexpr(ROWS):
                places[r] = smem.places[row0 + row_of(thread, r), stage]
            rows.arrive_empty()
        last = (steps & 1) ^ 1
        cute.arch.mbarrier_wait(bar.ds.full + last, steps // 2 & 1)
        multiply(of_rows, dq, a_ds[None, None, None, last], b_kt, fresh=True)
        warpgroup.wait_group(0)
        add_rows(dq, results.sums, places, column0, c.d)
        if results.shared_kv != 0:
            add_scaled(dk, scale, dv)
            scale = Float32(1.0)
        else:
            self.store_sum(dv, Float32(1.0), results.dv, tile, results.s_kv, key0, thread, n)
        self.store_sum(dk, scale, results.dk, tile, results.s_kv, key0, thread, n)

    @cute.jit
    def zero_keys(self, smem: KeyTileShared, key0: Int32, thread: Int32):
        """Those of 64 keys that no tile of rows loads: dS K would be 0 * NaN."""
        if thread < 64:
            key, covered = key0 + thread, Int32(0)
            for warp in cutlass.range_constexpr(self.config.threads // WARP):
                covered = covered | smem.covered[key // WARP, warp]
            if (covered >> key % WARP) & 1 == 0:
                zero_row(smem.k, key)
                cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def add_rows(acc: cute.Tensor, sums: cute.Pointer, places: cute.Tensor, column0: Int32, d: cutlass.Constexpr):
    """Adds to these rows in memory, if they exist, from column0 on: 64 bytes a quad of lanes."""
    rows = by_row(acc)
    for r in cutlass.range_constexpr(ROWS):
        place = Int64(cutlass.max(places[r], Int32(0))) * d + column0 + cute.arch.lane_idx() % 4 * 4
        target = sums.toint() + place * 4
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 4):
            add_four(target, places[r], i * 64, *(rows[r, 4 * i + j] for j in range(4)))


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    config = KeyTileConfig(variant.d, variant.dtype, adds_rows=True)
    return MhaDqdkdvSm90(config).compile(variant, out_dir)
