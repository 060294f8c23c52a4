"""The gradients of K and V for Hopper, head dimension 512, separate K and V.

dK and dV of 64 keys would be the whole register file. So a cluster of two CTAs takes a tile of keys: one makes dV and
the other dK, each by two warpgroups that hold half of its columns. Both CTAs make S. One warpgroup leaves P or dS for
both in SMEM:

    CTA 0   left     S' = K Q'   | P'                                 | dV += P' dO    columns   0 .. 255
            right                                                     | dV += P' dO    columns 256 .. 511
    CTA 1   left     S' = K Q'   | P', handed to right, in float32    | dK += dS' Q    columns   0 .. 255
            right    dP' = V dO'                                | dS' | dK += dS' Q    columns 256 .. 511
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.output import store_output
from kernels.lib.pipeline import Ring
from kernels.lib.rows import ROWS, Extents
from kernels.lib.softmax import LOG2_E
from kernels.lib.wgmma import tma_tiles

from .elements import (
    DEAD,
    HAS_SINK,
    HIDES,
    LSE,
    apply_sink,
    differentiate,
    drop,
    exponentiate,
    mask,
    zero_row,
)
from .halves import (
    HALVES,
    LEFT,
    PASSING,
    RIGHT,
    Half,
    KeyHalvesBarriers,
    KeyHalvesConfig,
    SumsByHalves,
    allocate_key_tiles,
)
from .host import Results, RowOperands
from .key_tiles import KeysOfWarpgroup, KeyTile, KeyTileKernel
from .smem import KeyTileShared

VALUES = 0  # the rank in its cluster of the CTA that has dV
HALF_MET = 1  # named barriers, + LEFT and + RIGHT: all threads of the one warpgroup have come


def has_values() -> cutlass.Boolean:
    return cute.arch.block_idx_in_cluster() == VALUES


class MhaDkdv512Sm90(SumsByHalves, KeyTileKernel):
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
        c = self.config
        q, do = (smem.q, bar.q), (smem.do, bar.do)
        stays, passes = (smem.k, q) if side == LEFT else (smem.v, do)
        parts = Half.parts(side, bar.exchange, stays, passes, do if values else q)
        w = KeyHalf(*parts, values, bar, smem, tile.key0, scale * LOG2_E)
        cute.arch.mbarrier_wait(bar.keys, 0)
        makes, early = side == LEFT or not values, (LEFT,) if side == LEFT and not values else HALVES
        self.add_up(w, Int32(0), self.steps(smem)[1], makes, early)
        target, factor = (results.dv, Float32(1.0)) if values else (results.dk, scale)
        keys = KeysOfWarpgroup(results.s_kv, n.h_kv, tile.batch, tile.kv_head, tile.key0, w.thread)
        factors = cute.make_rmem_tensor(ROWS, Float32)
        factors.fill(factor)
        store_output(w.total, factors, target, keys, None, side * (c.d // 2), w.thread, c.d)

    @cute.jit
    def weigh(self, w: "KeyHalf", t: Int32, _: Int32):
        """P or dS from S and dP."""
        numbers, flags = w.smem.numbers[None, None, 0], w.smem.flags
        w.bar.rows.at(t).wait_full()
        if cutlass.const_expr(w.side == LEFT):
            if flags[0, 0] & HIDES != 0:
                mask(w.x, w.smem.spans[None, None, 0], w.key0, w.thread)
            exponentiate(w.x, numbers, w.scale_log2)
            if cutlass.const_expr(w.values):
                for half in HALVES:
                    w.bar.q.at(2 * t + half).arrive_empty()
                apply_sink(w.rounded, w.x, numbers, flags[0, 0])
                w.exchange.weights.at(t).wait_empty()
                w.share(t)
            else:
                w.exchange.hand_over(w.x, w.thread)
        elif cutlass.const_expr(not w.values):
            for half in HALVES:
                w.bar.do.at(2 * t + half).arrive_empty()
            w.exchange.take_over(w.p, t, w.thread)
            drop(w.x, w.p)
            differentiate(w.rounded, w.p, w.x, numbers, Int32(HAS_SINK))
            w.share(t)

    @cute.jit
    def before_the_sum(self, w: "KeyHalf", t: Int32, place: Int32):
        """Zeroes rows that see nothing: their weights are 0, and 0 * NaN is NaN."""
        if w.smem.flags[0, 0] & DEAD != 0:
            if w.thread < PASSING:  # noqa: SIM102
                if w.smem.numbers[w.thread, LSE, 0] == Float32.inf:
                    zero_row((w.smem.do if w.values else w.smem.q)[None, None, place], w.thread)
                    cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=HALF_MET + w.side, number_of_threads=WARPGROUP)
        w.bar.rows.at(t).arrive_empty()


@dataclass(frozen=True)
class KeyHalf(Half):
    values: bool  # whether it has dV
    bar: KeyHalvesBarriers
    smem: KeyTileShared
    key0: Int32
    scale_log2: Float32


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    config = KeyHalvesConfig(variant.d, variant.dtype)
    return MhaDkdv512Sm90(config).compile(variant, out_dir, cluster=config.cluster)
