"""Attention for Hopper, head dimension 512, separate K and V: `mla_fwd_sm90` whose values have tiles of their own.

SMEM holds Q and two tiles each of K and V, so these have 32 keys. A tile of K is refilled as soon as its scores are
there, under the softmax and the products of the same pair; one of V by halves, as in `mla_fwd_sm90`.

64 rows are few for 64 KiB of keys and values: L2 would be the bound. So a cluster of two CTAs takes tiles of rows that
see the same keys, heads of the same queries where there are several KV heads. Each CTA loads half of every tile, for
both by multicast, once the place is free in both.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels.abi import Forward
from kernels.aot import Compiled
from kernels.lib.cluster import CLUSTER, Peer, await_others
from kernels.lib.cut_keys import cut_keys, first_keys
from kernels.lib.forward import Source
from kernels.lib.launch import WARP, WARPGROUP, Shapes
from kernels.lib.pipeline import PipelineState, Ring, split_barriers
from kernels.lib.rows import PUBLISHED, Extents, RowTile
from kernels.lib.spans import Span, SpanOperands, open_span, prefetch_span
from kernels.lib.splits import own_part
from kernels.lib.tile_scheduler import TileScheduler
from kernels.lib.tiles import TileAllocator
from kernels.lib.turned import Turn
from kernels.lib.wgmma import MN_MAJOR, operand_b, operand_layout, tiled_mma, tma_atom, tma_tiles, transposed

from . import config, smem
from .consumer import Consumer
from .kernel import MlaFwdSm90
from .key_tiles import Work
from .smem import EVEN, LEFT, ODD, REFILL_ORDER, RIGHT

L2_KEYS = 32 * 1024 * 1024  # bytes of K and V that stay in L2 while others pass
BOTH = 0b11  # CTAs of a cluster


@dataclass(frozen=True)
class Config(config.Config):
    """Compile-time choices of `mha_fwd_512_sm90`."""

    sources: tuple[str, ...] = ("span",)
    cluster: int = CLUSTER
    tile_n: int = 32
    shared_kv: bool = False

    @property
    def run(self) -> int:
        return 1

    @property
    def fillers(self) -> int:
        return 1

    @property
    def moves_o(self) -> bool:
        return True

    @property
    def columns_k(self) -> int:
        """Columns that a TMA copy takes: a CTA loads half of those that come free together, here half of V's half."""
        return self.half // CLUSTER

    @property
    def smem_bytes(self) -> int:
        tiles = (self.tile_m + 4 * self.tile_n) * self.row_bytes + 2 * self.tile_m * self.tile_n * 2
        return tiles + 4 * self.tile_m * 2 + 4 * 2 * PUBLISHED * 2 + 8 * sum(Barriers.COUNTS)


@dataclass(frozen=True)
class Barriers(smem.Barriers):
    """`smem.Barriers` with rings for V, and one for each tile of K."""

    v_full: cute.Pointer  # 4, indexed by 2 * (EVEN or ODD) + half, and so is
    v_empty: cute.Pointer
    side: int | None = None  # of a consumer

    COUNTS = (1, 1, 2, 2, 2, 2, 1, 4, 4)  # in the order of the fields, but the peer

    @staticmethod
    def at(first: cute.Pointer) -> "Barriers":
        *places, v_full, v_empty = split_barriers(first, Barriers.COUNTS)
        return Barriers(*places, Peer.of(first), v_full, v_empty)

    def initialise(self, loaders: int, extra: int) -> None:
        """One thread initialises them. A place is read by a warpgroup here, and by that of the peer's, of which each
        warp arrives once.
        """
        consumers, readers = 2 * WARPGROUP, WARPGROUP + WARPGROUP // WARP
        arrivals = (1, consumers, loaders, readers, WARPGROUP, WARPGROUP, consumers, loaders, readers)
        firsts = (self.q_full, self.q_empty, self.k_full, self.k_empty, self.max_shared, self.p_shared, self.all_read)
        for first, count, arriving in zip((*firsts, self.v_full, self.v_empty), self.COUNTS, arrivals, strict=True):
            for i in range(count):
                cute.arch.mbarrier_init(first + i, arriving)

    def k(self, which: int, half: int) -> Ring:
        """A tile of K, EVEN or ODD, whose halves come together."""
        return Ring(self.k_full + which, self.k_empty + which)

    def v(self, which: int, half: int) -> Ring:
        """A half of a tile of V."""
        return Ring(self.v_full + (2 * which + half), self.v_empty + (2 * which + half))

    def release(self, which: int, half: int) -> None:
        """A half of a tile of V has been read for the last time."""
        self.give_back(self.v(which, half))

    def give_back(self, ring: Ring) -> None:
        cute.arch.mbarrier_arrive(ring.empty)
        self.peer.arrive(ring.empty)

    def await_readers(self, fills: tuple[Int32, Int32]) -> None:
        for which in (EVEN, ODD):
            for ring in (self.k(which, LEFT), self.v(which, LEFT), self.v(which, RIGHT)):
                ring.at(fills[which]).wait_empty()


@dataclass(frozen=True)
class Shared(smem.Shared):
    v: tuple[cute.Tensor, ...]  # (keys, d), by tile of the pair

    @staticmethod
    def allocate(c: Config, dtype: Any) -> tuple[Barriers, "Shared"]:
        allocator = TileAllocator(dtype)
        q = allocator.tile(c.tile_m, c.d)
        k, v = (tuple(allocator.tile(c.tile_n, c.d) for _ in (EVEN, ODD)) for _ in range(2))
        layout = operand_layout(dtype, c.tile_m, c.tile_n)
        p = tuple(allocator.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner) for _ in (LEFT, RIGHT))
        maxima = allocator.allocate_tensor(Float32, cute.make_layout((c.tile_m, 2)), 16)
        info = allocator.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 2, 2)), 16)
        bar = Barriers.at(allocator.allocate_array(Int64, sum(Barriers.COUNTS)))
        return bar, Shared(q, k, p, ((), ()), maxima, None, info, v)


class MhaFwd512Sm90(MlaFwdSm90):
    symbol = "mha_fwd_512_sm90"

    def source(self, kind: str, shapes: Shapes, x: Source) -> tuple:
        c, op = self.config, cpasync.CopyBulkTensorTileG2SMulticastOp()
        arrays = (x, x._replace(k=x.v))
        tma = (y for array in arrays for y in tma_atom(op, cut_keys(shapes, array, c.tile_n), c.tile_n, c.columns_k))
        return (*tma, SpanOperands(x.first, x.second, x.s_kv))

    def allocate(self) -> tuple[Barriers, Shared]:
        return Shared.allocate(self.config, self.dtype)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, row_source: tuple, sources: tuple, n: Extents):
        """For every row tile of this CTA: a warp loads Q, opens the span, and loads its part of K and V."""
        c, (tma_q, mQ), (tma_k, mK, tma_v, mV, operands) = self.config, row_source, sources[0]
        scheduler, fills = self.tile_scheduler(n, operands), (Int32(0), Int32(0))
        for wave in cutlass.range(scheduler.waves, unroll=1):
            tile = scheduler.tile(wave)
            (span,) = own_part((self.open(operands, tile),), tile, c.unit)
            tile = replace(tile, inner0=cutlass.min(tile.inner0, n.inner))  # the peer may have the last rows
            q = bar.q.at(wave)
            q.wait_empty()
            with cute.arch.elect_one():
                tile.publish(smem.info[None, 0, wave & 1])
                span.publish(smem.info[None, 1, wave & 1])
                q.expect_full(n.box_inner * n.box_outer * c.row_bytes)
            gQ, sQ = tma_tiles(tma_q, tile.of(mQ, c.tile_m, c.d)[None, None, 0], smem.q)
            cute.copy(tma_q, gQ, sQ, tma_bar_ptr=q.full)
            if wave == 0:
                await_others(c.cluster)
            work = Work((span,), (), fills)
            self.load(bar, smem, (tma_k, mK), (tma_v, mV), tile, work)
            fills = work.fills_after()
        bar.await_readers(fills)  # no CTA ends while its peer may still access it

    @cute.jit
    def load(self, bar: Barriers, smem: Shared, keys: tuple, values: tuple, tile: RowTile, work: Work):
        """Fills all tiles of K and V, in the order in which they come free."""
        (span,) = work.sources
        for pair in cutlass.range(work.evens, unroll=1):
            for which in (EVEN, ODD):
                if 2 * pair + which < span.tiles:
                    state = bar.k(which, LEFT).at(work.fill(which, pair))
                    self.fill(state, keys, smem.k[which], (LEFT, RIGHT), tile, span, 2 * pair + which)
            for which, half in REFILL_ORDER:
                if 2 * pair + which < span.tiles:
                    state = bar.v(which, half).at(work.fill(which, pair))
                    self.fill(state, values, smem.v[which], (half,), tile, span, 2 * pair + which)

    @cute.jit
    def fill(
        self,
        state: PipelineState,
        source: tuple,
        target: cute.Tensor,
        halves: cutlass.Constexpr[tuple],
        tile: RowTile,
        span: Span,
        t: Int32,
    ):
        """Loads halves of tile t, this CTA its part of these columns for both."""
        c, (atom, keys) = self.config, source
        key, count = span.first_key(t), cutlass.min(span.unseen_from(t), c.tile_n)
        gmem = first_keys(tile, keys, key, count, c.tile_n, c.columns_k)
        g, s = tma_tiles(atom, gmem, cute.local_tile(target, (c.tile_n, c.columns_k), (0, None)))
        state.wait_empty()
        with cute.arch.elect_one():
            state.expect_full(sum(c.filled_bytes(EVEN, half) for half in halves))
        for i in cutlass.range_constexpr(len(halves)):
            column = halves[i] * CLUSTER + cute.arch.block_idx_in_cluster()
            cute.copy(atom, g[None, 0, column], s[None, column], tma_bar_ptr=state.full, mcast_mask=Int16(BOTH))

    def tile_scheduler(self, n: Extents, operands: SpanOperands) -> TileScheduler:
        """Sections of as many pairs of (batch, KV head) as L2 holds."""
        c = self.config
        return TileScheduler.of(n, operands.s_kv, L2_KEYS // (2 * c.row_bytes), cluster=c.cluster)

    def open(self, operands: SpanOperands, tile: RowTile) -> Span:
        """Opens what the rows of both CTAs see."""
        c, n = self.config, tile.n
        first = tile.inner0 - cute.arch.block_idx_in_cluster() * n.box_inner
        both = replace(tile, n=n._replace(box_inner=CLUSTER * n.box_inner), inner0=first)
        return replace(
            open_span(operands, both, c.tile_n, prefetch_span(operands, both, CLUSTER * c.tile_m)), tile=tile
        )

    # ---- consumers

    def consumer(self, side: int, bar: Barriers, smem: Shared, output: Any, scaling: Float32 | Turn) -> Consumer:
        c, w = self.config, super().consumer(side, replace(bar, side=side), smem, output, scaling)
        mma = tiled_mma(self.dtype, c.columns_o, MN_MAJOR)
        columns = (cute.local_tile(v, (c.tile_n, c.half), (0, side)) for v in smem.v)
        return replace(w, b_value=tuple(operand_b(mma, transposed(v)) for v in columns))

    def release_scored(self, side: int, w: Consumer) -> None:
        w.bar.give_back(w.bar.k(side, LEFT))

    def values(self, w: Consumer, which: int, fill: Int32) -> cute.Tensor:
        w.bar.v(which, w.bar.side).at(fill).wait_full()
        return w.b_value[which]

    @cute.jit
    def left_pair(
        self,
        w: Consumer,
        work: Work,
        pair: Int32 | int,
        first: cutlass.Constexpr = False,
        has_odd: cutlass.Constexpr = True,
    ):
        if cutlass.const_expr(not has_odd):  # right no longer reads the last P, with which it read these values
            w.bar.v(EVEN, RIGHT).at(work.fill(EVEN, pair)).wait_empty()
        MlaFwdSm90.left_pair(self, w, work, pair, first, has_odd)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    choices = Config(variant.d, variant.dtype)
    return MhaFwd512Sm90(choices).compile(variant, out_dir, cluster=choices.cluster, unit=choices.unit)
