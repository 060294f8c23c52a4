"""The gradient of Q for Hopper, head dimension 512, separate K and V: `mha_dq` whose warpgroups share 64 rows.

    producer warp     Q dO   K0 V0   K1 V1 ...                             TMA, into rings, K and V in halves
    clearing warps           K0      K1    ...                             keys that no row sees become 0
    left              S  = Q K'   | P, handed to right, in float32    | dQ += dS K     columns   0 .. 255
    right             dP = dO V'                                 | dS | dQ += dS K     columns 256 .. 511
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.launch import WARPGROUP
from kernels.lib.output import store_output
from kernels.lib.rows import ROWS, BoxedRows, Extents, RowTile
from kernels.lib.softmax import LOG2_E
from kernels.lib.spans import Span, SpanOperands
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

from .dq import MhaDqSm90, differentiate, exponentiate, read_numbers
from .elements import hand_over, take_over
from .halves import HALVES, LEFT, RIGHT, DqHalvesBarriers, DqHalvesConfig, allocate_dq
from .host import RowOperands
from .smem import DqShared


class MhaDq512Sm90(MhaDqSm90):
    def allocate(self) -> tuple[DqHalvesBarriers, DqShared]:
        return allocate_dq(self.config, self.dtype)

    @cute.jit
    def load_keys(self, bar: DqHalvesBarriers, smem: DqShared, keys: tuple, tile: RowTile, span: Span, fills0: Int32):
        """Loads the tiles of K and V that a tile of rows sees, in halves, in the order in which places come free."""
        c = self.config
        k, v = (
            (atom, *tma_tiles(atom, tile.keys(m, span.lo, c.tile_n, c.key_columns), s), ring)
            for (atom, m), s, ring in zip(keys, (smem.k, smem.v), (bar.k_landed, bar.v), strict=True)
        )
        for t in cutlass.range(span.tiles, unroll=1):
            for (atom, gmem, places, ring), half in ((k, LEFT), (v, LEFT), (v, RIGHT), (k, RIGHT)):
                state = ring.at(2 * (fills0 + t) + half)
                state.wait_empty()
                with cute.arch.elect_one():
                    state.expect_full(c.key_tile_bytes)
                cute.copy(atom, gmem[None, t, half], places[None, state.index], tma_bar_ptr=state.full)

    @cute.jit
    def consume(
        self,
        bar: DqHalvesBarriers,
        smem: DqShared,
        operands: RowOperands,
        spans: SpanOperands,
        dq: cute.Pointer,
        scale: Float32,
        n: Extents,
    ):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8:
            self.consume_half(LEFT, bar, smem, operands, spans, dq, scale, n)
        else:
            self.consume_half(RIGHT, bar, smem, operands, spans, dq, scale, n)

    @cute.jit
    def consume_half(
        self,
        side: cutlass.Constexpr[int],
        bar: DqHalvesBarriers,
        smem: DqShared,
        operands: RowOperands,
        spans: SpanOperands,
        dq: cute.Pointer,
        scale: Float32,
        n: Extents,
    ):
        """One warpgroup: half of the columns of dQ, and S or dP."""
        c, half, exchange = self.config, self.config.d // 2, bar.exchange
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        boxed = BoxedRows.of(n, Int32(0), thread)
        scores, sums = tiled_mma(self.dtype, c.tile_n, K_MAJOR), tiled_mma(self.dtype, half, MN_MAJOR)
        stays, passes, ring = (smem.q, smem.k, bar.k) if side == LEFT else (smem.do, smem.v, bar.v)
        a = tuple(operand_a(scores, cute.local_tile(stays, (c.tile_m, half), (0, i, 0))) for i in HALVES)
        b = operand_b(scores, passes)
        a_weights, b_sum = operand_a(sums, exchange.weights_tile), operand_b(sums, transposed(smem.k))
        x, p = (accumulator(scores, c.tile_n) for _ in range(2))
        total = accumulator(sums, half)
        rounded = cute.make_rmem_tensor_like(x, self.dtype)
        numbers = cute.make_rmem_tensor((ROWS, 3), Float32)
        scale_log2 = scale * LOG2_E
        factor = cute.make_rmem_tensor(ROWS, Float32)
        factor.fill(scale)
        fills0 = Int32(0)
        for wave in cutlass.range(self.scheduler(spans, n).waves, unroll=1):
            tile, span = self.receive(bar, smem, spans, n, wave)
            read_numbers(numbers, operands, tile, boxed)
            rows = span.of_rows(boxed)
            total.fill(0.0)
            for t in cutlass.range(span.tiles, unroll=1):
                fill = fills0 + t
                handed, weights = exchange.p.at(fill), exchange.weights.at(fill)
                for i in cutlass.range_constexpr(len(HALVES)):
                    state = ring.at(2 * fill + i)
                    state.wait_full()
                    multiply(scores, x, a[i], b[None, None, None, state.index], fresh=i == 0)
                warpgroup.wait_group(0)
                if cutlass.const_expr(side == LEFT):
                    rows.mask(x, t)
                    exponentiate(x, numbers, scale_log2)
                    handed.wait_empty()
                    hand_over(x, exchange.p_tile, thread)
                    handed.arrive_full()
                else:
                    for i in cutlass.range_constexpr(len(HALVES)):
                        bar.v.at(2 * fill + i).arrive_empty()
                    handed.wait_full()
                    take_over(p, exchange.p_tile, thread)
                    handed.arrive_empty()
                    differentiate(rounded, p, x, numbers)
                    weights.wait_empty()
                    store_rows(scores, rounded, rounded, exchange.weights_tile, thread)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    weights.arrive_full()
                k = bar.k.at(2 * fill + side)
                k.wait_full()
                weights.wait_full()
                multiply(sums, total, a_weights, b_sum[None, None, None, k.index])
                warpgroup.wait_group(0)
                weights.arrive_empty()
                k.arrive_empty()
            bar.rows.at(wave).arrive_empty()
            fills0 = fills0 + span.tiles
            store_output(total, factor, dq, tile, boxed, side * half, thread, c.d)


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    return MhaDq512Sm90(DqHalvesConfig(variant.d, variant.dtype)).compile(variant, out_dir)
