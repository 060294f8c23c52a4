"""The gradients of K and V for Hopper, head dimension 512, separate K and V.

dK and dV of 64 keys would be the whole register file. So a cluster of two CTAs takes a tile of keys: one makes dV and
the other dK, each by two warpgroups that hold half of its columns. Both CTAs make S. One warpgroup leaves P or dS for
both in SMEM:

    CTA 0   left     S' = K Q'   | P'                                 | dV += P' dO    columns   0 .. 255
            right                                                     | dV += P' dO    columns 256 .. 511
    CTA 1   left     S' = K Q'   | P', handed to right, in float32    | dK += dS' Q    columns   0 .. 255
            right    dP' = V dO'                                | dS' | dK += dS' Q    columns 256 .. 511
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.output import store_output
from kernels.lib.pipeline import Ring
from kernels.lib.rows import ROWS, Extents
from kernels.lib.softmax import LOG2_E
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    store_rows,
    tiled_mma,
    tma_tiles,
    transposed,
)

from .elements import HAS_SINK, HIDES, apply_sink, differentiate, drop, exponentiate, hand_over, mask, take_over, zero_row
from .halves import HALVES, LEFT, RIGHT, KeyHalvesBarriers, KeyHalvesConfig, allocate_key_tiles
from .host import Results, RowOperands
from .key_tiles import KeysOfWarpgroup, KeyTile, KeyTileKernel
from .smem import KeyTileShared

VALUES = 0  # the rank in its cluster of the CTA that has dV


def has_values() -> cutlass.Boolean:
    return cute.arch.block_idx_in_cluster() == VALUES


class MhaDkdv512Sm90(KeyTileKernel):
    op = "mha_dkdv"

    def allocate(self) -> tuple[KeyHalvesBarriers, KeyTileShared]:
        return allocate_key_tiles(self.config, self.dtype)

    # ---- producer

    @cute.jit
    def load_rows(
        self, bar: KeyHalvesBarriers, smem: KeyTileShared, tile: KeyTile, rows: tuple, operands: RowOperands, n: Extents
    ):
        """One warp loads Q and dO of every tile of rows, in halves, in the order in which their places come free."""
        c = self.config
        first, steps = self.steps(smem)
        seeing, chunk = Int32(0), first - WARP
        for t in cutlass.range(steps, unroll=1):
            i, seeing, chunk = self.next_row_tile(seeing, chunk, tile, operands, n)
            here = self.row_tile(tile, n, i)
            q, do = (
                (ring, atom, *tma_tiles(atom, here.of(m, c.tile_m, c.row_columns), s))
                for ring, (atom, m), s in zip((bar.q, bar.do), rows, (smem.q, smem.do), strict=True)
            )
            size = 2 * c.row_columns * n.box_inner * n.box_outer
            self.fill(*q, t, LEFT, size)
            if has_values():
                self.fill(*q, t, RIGHT, size)
            for half in HALVES:
                self.fill(*do, t, half, size)
            if not has_values():
                self.fill(*q, t, RIGHT, size)

    @cute.jit
    def fill(
        self,
        ring: Ring,
        atom: cute.CopyAtom,
        gmem: cute.Tensor,
        places: cute.Tensor,
        t: Int32,
        half: cutlass.Constexpr,
        size: Int32,
    ):
        state = ring.at(2 * t + half)
        state.wait_empty()
        with cute.arch.elect_one():
            state.expect_full(size)
        cute.copy(atom, gmem[None, half], places[None, state.index], tma_bar_ptr=state.full)

    @cute.jit
    def zero_dead(self, bar: KeyHalvesBarriers, smem: KeyTileShared, dead: Int32, t: Int32, row: Int32):
        """A lane's row of Q and dO, if it sees nothing."""
        for half in cutlass.range_constexpr(len(HALVES)):
            for ring, x in ((bar.q, smem.q), (bar.do, smem.do)):
                state = ring.at(2 * t + half)
                state.wait_full()
                if dead != 0:
                    zero_row(x[None, None, state.index], row)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---- consumers

    @cute.jit
    def consume(
        self, bar: KeyHalvesBarriers, smem: KeyTileShared, tile: KeyTile, results: Results, scale: Float32, n: Extents
    ):
        is_left = cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8
        if has_values():
            if is_left:
                self.consume_half(True, LEFT, bar, smem, tile, results, scale, n)
            else:
                self.consume_half(True, RIGHT, bar, smem, tile, results, scale, n)
        else:
            if is_left:
                self.consume_half(False, LEFT, bar, smem, tile, results, scale, n)
            else:
                self.consume_half(False, RIGHT, bar, smem, tile, results, scale, n)

    @cute.jit
    def consume_half(
        self,
        values: cutlass.Constexpr[bool],
        side: cutlass.Constexpr[int],
        bar: KeyHalvesBarriers,
        smem: KeyTileShared,
        tile: KeyTile,
        results: Results,
        scale: Float32,
        n: Extents,
    ):
        """One warpgroup: half of the columns of dV or of dK, and S or dP."""
        c, half = self.config, self.config.d // 2
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        scores, sums = tiled_mma(self.dtype, c.tile_m, K_MAJOR), tiled_mma(self.dtype, half, MN_MAJOR)
        stays, passes, ring = (smem.k, smem.q, bar.q) if side == LEFT else (smem.v, smem.do, bar.do)
        a = tuple(operand_a(scores, cute.local_tile(stays, (c.tile_n, half), (0, i))) for i in HALVES)
        b = operand_b(scores, passes)
        summed, summed_ring = (smem.do, bar.do) if values else (smem.q, bar.q)
        a_weights, b_sum = operand_a(sums, bar.exchange.weights_tile), operand_b(sums, transposed(summed))
        x, p = (accumulator(scores, c.tile_m) for _ in range(2))
        total = accumulator(sums, half)
        rounded = cute.make_rmem_tensor_like(x, self.dtype)
        total.fill(0.0)
        scale_log2 = scale * LOG2_E
        numbers, flags = smem.numbers[None, None, 0], smem.flags
        cute.arch.mbarrier_wait(bar.keys, 0)
        for t in cutlass.range(self.steps(smem)[1], unroll=1):
            rows, handed, weights = bar.rows.at(t), bar.exchange.p.at(t), bar.exchange.weights.at(t)
            if cutlass.const_expr(side == LEFT or not values):
                rows.wait_full()
                for i in cutlass.range_constexpr(len(HALVES)):
                    state = ring.at(2 * t + i)
                    state.wait_full()
                    multiply(scores, x, a[i], b[None, None, None, state.index], fresh=i == 0)
                warpgroup.wait_group(0)
            if cutlass.const_expr(side == LEFT):
                if flags[0, 0] & HIDES != 0:
                    mask(x, smem.spans[None, None, 0], tile.key0, thread)
                exponentiate(x, numbers, scale_log2)
                if cutlass.const_expr(values):
                    for i in cutlass.range_constexpr(len(HALVES)):
                        bar.q.at(2 * t + i).arrive_empty()
                    apply_sink(rounded, x, numbers, flags[0, 0])
                    self.share(bar, scores, rounded, t, thread)
                else:
                    handed.wait_empty()
                    hand_over(x, bar.exchange.p_tile, thread)
                    handed.arrive_full()
            elif cutlass.const_expr(not values):
                for i in cutlass.range_constexpr(len(HALVES)):
                    bar.do.at(2 * t + i).arrive_empty()
                handed.wait_full()
                take_over(p, bar.exchange.p_tile, thread)
                handed.arrive_empty()
                drop(x, p)
                differentiate(rounded, p, x, numbers, Int32(HAS_SINK))
                self.share(bar, scores, rounded, t, thread)
            state = summed_ring.at(2 * t + side)
            state.wait_full()
            weights.wait_full()
            rows.arrive_empty()  # and all of its Q and dO has landed: a row warp may wait for the next
            multiply(sums, total, a_weights, b_sum[None, None, None, state.index])
            warpgroup.wait_group(0)
            weights.arrive_empty()
            state.arrive_empty()
        target, factor = (results.dv, Float32(1.0)) if values else (results.dk, scale)
        keys = KeysOfWarpgroup(results.s_kv, n.h_kv, tile.batch, tile.kv_head, tile.key0, thread)
        factors = cute.make_rmem_tensor(ROWS, Float32)
        factors.fill(factor)
        store_output(total, factors, target, keys, None, side * half, thread, c.d)

    @cute.jit
    def share(self, bar: KeyHalvesBarriers, mma: cute.TiledMma, rounded: cute.Tensor, t: Int32, thread: Int32):
        """P or dS, rounded, for both warpgroups."""
        weights = bar.exchange.weights.at(t)
        weights.wait_empty()
        store_rows(mma, rounded, rounded, bar.exchange.weights_tile, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        weights.arrive_full()


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    config = KeyHalvesConfig(variant.d, variant.dtype)
    return MhaDkdv512Sm90(config).compile(variant, out_dir, cluster=config.cluster)
