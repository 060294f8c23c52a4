"""The gradients of K and V for Hopper, head dimension 512, separate K and V.

dK and dV of 64 keys would be the whole register file. So a cluster of two CTAs takes a tile of keys: one makes S, P and
dV, the other dP, dS and dK. P goes from one to the other in float32. In each, two warpgroups hold half of the sum's
columns, and one of them makes its weights for both:

    CTA 0   left     S' = K Q'   | P'                                 | dV += P' dO    columns   0 .. 255
            right                                                     | dV += P' dO    columns 256 .. 511
    CTA 1   left                                                      | dK += dS' Q    columns   0 .. 255
            right    dP' = V dO'         | P' comes             | dS' | dK += dS' Q    columns 256 .. 511
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.abi import MhaBackward
from kernels.aot import Compiled
from kernels.lib.cluster import Peer
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.output import store_output
from kernels.lib.pipeline import Ring
from kernels.lib.rows import ROWS, Extents, RowTile
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
    def load_keys(self, bar: KeyHalvesBarriers, smem: KeyTileShared, tile: KeyTile, keys: tuple):
        """One warp loads K where dV is made, or V."""
        c = self.config
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar.keys, 2 * c.d * c.tile_n)
        if has_values():
            self.load_array(bar, smem, tile, keys[0])
        else:
            self.load_array(bar, smem, tile, keys[1])

    @cute.jit
    def load_array(self, bar: KeyHalvesBarriers, smem: KeyTileShared, tile: KeyTile, array: tuple):
        c, (atom, m) = self.config, array
        moved = cute.domain_offset((tile.key0, 0, tile.kv_head, tile.batch), m)
        g, to = tma_tiles(atom, cute.local_tile(moved[None, None, 0, 0], (c.tile_n, c.d), (0, 0)), smem.k)
        cute.copy(atom, g, to, tma_bar_ptr=bar.keys)

    @cute.jit
    def load_rows(
        self, bar: KeyHalvesBarriers, smem: KeyTileShared, tile: KeyTile, rows: tuple, operands: RowOperands, n: Extents
    ):
        """One warp loads Q and dO of every tile of rows in halves, first the array of S or dP."""
        c = self.config
        first, steps = self.steps(smem)
        seeing, chunk = Int32(0), first - WARP
        for t in cutlass.range(steps, unroll=1):
            i, seeing, chunk = self.next_row_tile(seeing, chunk, tile, operands, n)
            here, size = self.row_tile(tile, n, i), 2 * c.row_columns * n.box_inner * n.box_outer
            if has_values():
                self.fill(bar.scored, rows[0], smem.q, here, t, size)
                self.fill(bar.summed, rows[1], smem.do, here, t, size)
            else:
                self.fill(bar.scored, rows[1], smem.q, here, t, size)
                self.fill(bar.summed, rows[0], smem.do, here, t, size)

    @cute.jit
    def fill(self, ring: Ring, array: tuple, places: cute.Tensor, rows: RowTile, t: Int32, size: Int32):
        c, (atom, m) = self.config, array
        g, to = tma_tiles(atom, rows.of(m, c.tile_m, c.row_columns), places)
        for half in HALVES:
            state = ring.at(2 * t + half)
            state.wait_empty()
            with cute.arch.elect_one():
                state.expect_full(size)
            cute.copy(atom, g[None, half], to[None, state.index], tma_bar_ptr=state.full)

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
        parts = Half.parts(side, bar.exchange, smem.k, (smem.q, bar.scored), (smem.do, bar.summed))
        w = KeyHalf(*parts, values, bar, smem, tile.key0, scale * LOG2_E)
        cute.arch.mbarrier_wait(bar.keys, 0)
        steps = self.steps(smem)[1]
        self.add_up(w, Int32(0), steps, values == (side == LEFT))
        target, factor = (results.dv, Float32(1.0)) if values else (results.dk, scale)
        keys = KeysOfWarpgroup(results.s_kv, n.h_kv, tile.batch, tile.kv_head, tile.key0, w.thread)
        factors = cute.make_rmem_tensor(ROWS, Float32)
        factors.fill(factor)
        store_output(w.total, factors, target, keys, None, side * (c.d // 2), w.thread, c.d)
        if cutlass.const_expr(values and side == LEFT):
            bar.p.at(steps).wait_empty()  # no CTA ends while its peer may still arrive at its barriers

    @cute.jit
    def weigh(self, w: "KeyHalf", t: Int32, _: Int32):
        """P or dS from S and dP."""
        numbers, flags, handed = w.smem.numbers[None, None, 0], w.smem.flags, w.bar.p.at(t)
        w.bar.rows.at(t).wait_full()
        if cutlass.const_expr(w.values and w.side == LEFT):
            self.release_scored(w, t)
            if flags[0, 0] & HIDES != 0:
                mask(w.x, w.smem.spans[None, None, 0], w.key0, w.thread)
            exponentiate(w.x, numbers, w.scale_log2)
            handed.wait_empty()
            send(w.x, w.exchange.p_tile, w.thread, w.bar.peer, handed.full)
            apply_sink(w.rounded, w.x, numbers, flags[0, 0])
            w.exchange.weights.at(t).wait_empty()
            w.share(t)
        elif cutlass.const_expr(not w.values and w.side == RIGHT):
            self.release_scored(w, t)
            handed.expect_full(4 * 64 * PASSING // WARPGROUP)
            w.exchange.take_over(w.p, t, w.thread)
            cute.arch.sync_warp()
            w.bar.peer.arrive(handed.empty)
            drop(w.x, w.p)
            differentiate(w.rounded, w.p, w.x, numbers, Int32(HAS_SINK))
            w.exchange.weights.at(t).wait_empty()
            w.share(t)

    def release_scored(self, w: "KeyHalf", t: Int32) -> None:
        for half in HALVES:
            w.bar.scored.at(2 * t + half).arrive_empty()

    @cute.jit
    def before_the_sum(self, w: "KeyHalf", t: Int32, place: Int32):
        """Zeroes rows that see nothing: their weights are 0, and 0 * NaN is NaN."""
        if w.smem.flags[0, 0] & DEAD != 0:
            if w.thread < PASSING:  # noqa: SIM102
                if w.smem.numbers[w.thread, LSE, 0] == Float32.inf:
                    zero_row(w.smem.do[None, None, place], w.thread)
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


@cute.jit
def send(acc: cute.Tensor, place: cute.Tensor, thread: Int32, peer: Peer, full: cute.Pointer):
    """To the peer's same place, for the thread with the same number."""
    words = cute.recast_ptr(acc.iterator, dtype=Uint32)
    words = cute.make_tensor(words, cute.make_layout(cute.size(acc)))
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        peer.send(place[None, thread, i].iterator.toint(), tuple(words[4 * i + j] for j in range(4)), full)


def compile(variant: MhaBackward, out_dir: Path) -> Compiled:
    config = KeyHalvesConfig(variant.d, variant.dtype)
    return MhaDkdv512Sm90(config).compile(variant, out_dir, cluster=config.cluster)
