"""The gradient of Q for Hopper, head dimension 512, separate K and V: `mha_dq` whose warpgroups share 64 rows.

producer warp     Q dO   K0 V0   K1 V1 ...                             TMA, into rings, K and V in halves
clearing warps           K0      K1    ...                             keys that no row sees become 0
left              S  = Q K'   | P, handed to right, in float32    | dQ += dS K     columns   0 .. 255
right             dP = dO V'                                 | dS | dQ += dS K     columns 256 .. 511
"""

from dataclasses import dataclass, replace
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.output import store_output
from kernels.lib.rows import ROWS, BoxedRows, Extents, RowTile
from kernels.lib.softmax import LOG2_E
from kernels.lib.spans import RowSpans, Span, SpanOperands
from kernels.lib.wgmma import tma_tiles

from .dq import MhaDqSm90, differentiate, exponentiate, read_numbers
from .halves import HALVES, LEFT, RIGHT, DqHalvesBarriers, DqHalvesConfig, Half, SumsByHalves, allocate_dq
from .host import RowOperands
from .smem import DqShared


class MhaDq512Sm90(SumsByHalves, MhaDqSm90):
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
        c, k = self.config, (smem.k, bar.k)
        stays, passes = (smem.q, k) if side == LEFT else (smem.do, (smem.v, bar.v))
        parts = Half.parts(side, bar.exchange, stays[None, None, 0], passes, k)
        numbers = cute.make_rmem_tensor((ROWS, 3), Float32)
        factor = cute.make_rmem_tensor(ROWS, Float32)
        factor.fill(scale)
        fills0 = Int32(0)
        for wave in cutlass.range(self.scheduler(spans, n).waves, unroll=1):
            tile, span = self.receive(bar, smem, spans, n, wave)
            w = RowHalf(*parts, bar, numbers, None, scale * LOG2_E)
            boxed = BoxedRows.of(n, Int32(0), w.thread)
            read_numbers(numbers, operands, tile, boxed)
            self.add_up(replace(w, rows=span.of_rows(boxed)), fills0, span.tiles, True)
            bar.rows.at(wave).arrive_empty()
            fills0 = fills0 + span.tiles
            store_output(w.total, factor, dq, tile, boxed, side * (c.d // 2), w.thread, c.d)

    @cute.jit
    def weigh(self, w: "RowHalf", fill: Int32, t: Int32):
        """dS from S and dP."""
        if cutlass.const_expr(w.side == LEFT):
            w.rows.mask(w.x, t)
            exponentiate(w.x, w.numbers, w.scale_log2)
            w.exchange.hand_over(w.x, w.thread)
        else:
            for half in HALVES:
                w.bar.v.at(2 * fill + half).arrive_empty()
            w.exchange.take_over(w.p, fill, w.thread)
            differentiate(w.rounded, w.p, w.x, w.numbers)
            w.share(fill)

    def before_the_sum(self, w: "RowHalf", fill: Int32, place: Int32) -> None:
        """Keys that no row sees have been cleared."""


@dataclass(frozen=True)
class RowHalf(Half):
    bar: DqHalvesBarriers
    numbers: cute.Tensor
    rows: RowSpans | None
    scale_log2: Float32


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    return MhaDq512Sm90(DqHalvesConfig(variant.d, variant.dtype)).compile(variant, out_dir)
