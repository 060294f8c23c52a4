"""At d 512: choices, SMEM and the loop of the kernels in which two warpgroups share a sum by halves of its columns.

64 rows of a sum take 256 registers of a warpgroup's threads, so two warpgroups hold one sum, `LEFT` the first half of
its columns. Two tiles of 64 rows and 512 columns stay in SMEM. Tiles of 32 rows pass, in halves of their columns: three
places for those of the array that the sum reads, so that one of the next tile's is there early, and two for the other
array's.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from kernels.lib.cluster import Peer
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.pipeline import Ring, wait_for
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    operand_layout,
    store_rows,
    tiled_mma,
    transposed,
)

from .config import CLEARERS, DqConfig, KeyTileConfig
from .elements import hand_over, take_over
from .smem import DqBarriers, DqShared, KeyTileBarriers, KeyTileShared

LEFT, RIGHT = HALVES = 0, 1
PASSING = 32  # rows of a tile that passes
PLACES = 3, 2  # for halves of tiles of K and of V, or of Q and of dO


def bytes_of_tiles(d: int, stay: int, halves: int) -> int:
    """Counts the bytes of tiles that stay, of halves of those that pass, of P and of the weights."""
    return stay * 2 * d * 64 + halves * d * PASSING + (4 + 2) * 64 * PASSING


@dataclass(frozen=True)
class DqHalvesConfig(DqConfig):
    """`mha_dq`, whose consumers share 64 rows."""

    stages: int = PLACES[0]  # of halves of K

    @property
    def tile_m(self) -> int:
        return 64

    @property
    def tile_n(self) -> int:
        return PASSING

    @property
    def key_columns(self) -> int:
        return self.d // 2

    @property
    def parts_of_k(self) -> int:
        return 2

    @property
    def key_tile_bytes(self) -> int:
        """The bytes of half a tile."""
        return 2 * self.key_columns * self.tile_n

    def smem_with(self, stages_q: int) -> int:
        small = 4 * PUBLISHED * 2 * 2 * stages_q + 8 * (2 + 3 * PLACES[0] + 2 * PLACES[1] + 4)
        return 1024 + stages_q * bytes_of_tiles(self.d, 2, sum(PLACES)) + small


@dataclass(frozen=True)
class KeyHalvesConfig(KeyTileConfig):
    """`mha_dkdv`, where a CTA of a cluster has dV of 64 keys, and the other dK, of which each loads what it needs."""

    @property
    def tile_m(self) -> int:
        return PASSING

    @property
    def rows_at_once(self) -> tuple[tuple[int, ...], ...]:
        return ((0,),)

    @property
    def row_columns(self) -> int:
        return self.d // 2

    @property
    def cluster(self) -> int:
        return 2

    @property
    def consumers_zero(self) -> bool:
        return True

    @property
    def stages(self) -> int:
        """Places for the numbers of rows."""
        return 1

    @property
    def stages_of_rows(self) -> tuple[int, int]:
        return 4, 4

    @property
    def smem_bytes(self) -> int:
        rows = 4 * self.tile_m * 5 + 4 * 4 * self.tile_m
        small = 4 * (1 + 2 * self.threads // WARP) + 8 * (6 + 2 * sum(self.stages_of_rows))
        return 1024 + bytes_of_tiles(self.d, 1, sum(self.stages_of_rows)) + rows + small + 64


@dataclass(frozen=True)
class Exchange:
    """The place in SMEM where one warpgroup leaves numbers for the other, and its barriers."""

    p_full: cute.Pointer  # P waits for none to be read: left has seen weights that right made of the one before
    weights: Ring
    p_tile: cute.Tensor  # (4, thread, elements of an accumulator / 4) float32
    weights_tile: cute.Tensor  # (64, PASSING): P or dS, rounded, for both

    @staticmethod
    def allocate(smem: TileAllocator) -> "Exchange":
        p = smem.allocate_tensor(Float32, cute.make_layout((4, WARPGROUP, PASSING // 8)), 16)
        layout = operand_layout(smem.dtype, 64, PASSING)
        weights = smem.allocate_tensor(smem.dtype, layout.outer, 1024, swizzle=layout.inner)
        p_full, full, empty = (smem.allocate_array(Int64, 1) for _ in range(3))
        return Exchange(p_full, Ring(full, empty), p, weights)

    def initialise(self) -> None:
        cute.arch.mbarrier_init(self.p_full, WARPGROUP)
        self.weights.initialise(WARPGROUP, WARPGROUP)

    @cute.jit
    def hand_over(self, p: cute.Tensor, thread: Int32):
        """P of a thread of left's, for the same thread of right's."""
        hand_over(p, self.p_tile, thread)
        cute.arch.mbarrier_arrive(self.p_full)

    @cute.jit
    def take_over(self, p: cute.Tensor, fill: Int32, thread: Int32):
        wait_for(self.p_full, fill)
        take_over(p, self.p_tile, thread)


@dataclass(frozen=True)
class Half:
    """A consumer warpgroup: its columns of a sum, and the products and registers of its part of the weights."""

    side: int
    exchange: Exchange
    scores: cute.TiledMma
    sums: cute.TiledMma
    a: tuple[cute.Tensor, ...]  # halves of what stays
    b: cute.Tensor  # what passes
    ring: Ring
    a_weights: cute.Tensor
    b_sum: cute.Tensor
    sum_ring: Ring
    x: cute.Tensor  # an accumulator of S or dP
    p: cute.Tensor  # another, for P of the other warpgroup
    rounded: cute.Tensor
    total: cute.Tensor
    thread: Int32

    @staticmethod
    def parts(side: int, exchange: Exchange, stays: cute.Tensor, passes: tuple, summed: tuple) -> tuple:
        """The fields, in their order. `passes` and `summed`: places in SMEM and their ring."""
        dtype, half = stays.element_type, cute.size(stays, mode=[1]) // 2
        scores, sums = tiled_mma(dtype, PASSING, K_MAJOR), tiled_mma(dtype, half, MN_MAJOR)
        a = tuple(operand_a(scores, cute.local_tile(stays, (64, half), (0, i))) for i in HALVES)
        a_weights, b_sum = operand_a(sums, exchange.weights_tile), operand_b(sums, transposed(summed[0]))
        x, p = (accumulator(scores, PASSING) for _ in range(2))
        of_products = scores, sums, a, operand_b(scores, passes[0]), passes[1], a_weights, b_sum, summed[1]
        registers = x, p, cute.make_rmem_tensor_like(x, dtype), accumulator(sums, half)
        return side, exchange, *of_products, *registers, cute.arch.thread_idx()[0] % WARPGROUP

    @cute.jit
    def score(self, fill: Int32):
        """Makes S or dP of a tile."""
        for half in HALVES:
            state = self.ring.at(2 * fill + half)
            state.wait_full()
            multiply(self.scores, self.x, self.a[half], self.b[None, None, None, state.index], fresh=half == LEFT)
        warpgroup.wait_group(0)

    @cute.jit
    def share(self, fill: Int32):
        """Leaves the rounded weights for both warpgroups, which have read those before."""
        store_rows(self.scores, self.rounded, self.rounded, self.exchange.weights_tile, self.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.exchange.weights.at(fill).arrive_full()


class SumsByHalves:
    """The loop of a consumer warpgroup; a kernel has `weigh`, and what a warpgroup may do `before_the_sum`.

    Scores of the next tile wait for the sum of this one: begun under it they took longer (docs/lab/backward.md).
    """

    @cute.jit
    def add_up(self, w: Half, fills0: Int32, steps: Int32, makes: cutlass.Constexpr):
        """Adds `steps` tiles to the sum. `makes`: whether it makes S or dP; who makes neither says when it has read the
        weights."""
        w.total.fill(0.0)
        for t in cutlass.range(steps, unroll=1):
            fill = fills0 + t
            if cutlass.const_expr(makes):
                w.score(fill)
            self.weigh(w, fill, t)
            weights, summed = w.exchange.weights.at(fill), w.sum_ring.at(2 * fill + w.side)
            summed.wait_full()
            weights.wait_full()
            self.before_the_sum(w, fill, summed.index)
            multiply(w.sums, w.total, w.a_weights, w.b_sum[None, None, None, summed.index])
            warpgroup.wait_group(0)
            if cutlass.const_expr(not makes):
                weights.arrive_empty()
            summed.arrive_empty()


@dataclass(frozen=True)
class DqHalvesBarriers(DqBarriers):
    exchange: Exchange

    def initialise(self, c: DqHalvesConfig) -> None:
        """Initialises the barriers of all rings; one thread does so."""
        self.rows.initialise(1, 2 * WARPGROUP + CLEARERS)
        for stage in range(PLACES[0]):
            cute.arch.mbarrier_init(self.k_landed.full + stage, 1)
        self.k.initialise(CLEARERS, WARPGROUP)
        self.v.initialise(1, WARPGROUP)
        self.exchange.initialise()


def allocate_dq(c: DqHalvesConfig, dtype) -> tuple[DqHalvesBarriers, DqShared]:
    smem = TileAllocator(dtype)
    q, do = (smem.tile(c.tile_m, c.d, c.stages_q) for _ in range(2))
    k, v = (smem.tile(PASSING, c.d // 2, places) for places in PLACES)
    exchange = Exchange.allocate(smem)
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 2, c.slots)), 16)
    rows = Ring(smem.allocate_array(Int64, 1), smem.allocate_array(Int64, 1))
    landed, full, empty = (smem.allocate_array(Int64, PLACES[0]) for _ in range(3))
    v_full, v_empty = (smem.allocate_array(Int64, PLACES[1]) for _ in range(2))
    k_rings = (Ring(x, empty, PLACES[0]) for x in (landed, full))
    return DqHalvesBarriers(rows, *k_rings, Ring(v_full, v_empty, PLACES[1]), exchange), DqShared(q, do, k, v, info)


@dataclass(frozen=True)
class KeyHalvesBarriers(KeyTileBarriers):
    scored: Ring  # of halves, as `summed`
    summed: Ring
    exchange: Exchange
    peer: Peer

    def initialise(self, c: KeyHalvesConfig) -> None:
        """Initialises the rings and the other barriers; one thread does so."""
        cute.arch.mbarrier_init(self.keys, 1)
        self.rows.initialise(WARP, 2 * WARPGROUP)
        self.scored.initialise(1, WARPGROUP)
        self.summed.initialise(1, WARPGROUP)
        self.exchange.initialise()
        cute.arch.mbarrier_init(self.p.empty, WARPGROUP // WARP)


def allocate_key_tiles(c: KeyHalvesConfig, dtype) -> tuple[KeyHalvesBarriers, KeyTileShared]:
    """K of the CTA of dV, or V of the other's, is `k`; the array of S or dP is `q`, and that of the sum `do`."""
    smem = TileAllocator(dtype)
    stays = smem.tile(c.tile_n, c.d)
    scored, summed = (smem.tile(c.tile_m, c.d // 2, places) for places in c.stages_of_rows)
    exchange = Exchange.allocate(smem)
    numbers = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 3, 1)), 16)
    spans = smem.allocate_tensor(Int32, cute.make_layout((c.tile_m, 2, 1)), 16)
    boxed = smem.allocate_tensor(Int32, cute.make_layout((4, c.tile_m)), 16)
    flags = smem.allocate_tensor(Int32, cute.make_layout((1, 1)), 16)
    found = smem.allocate_tensor(Int32, cute.make_layout((2, c.threads // WARP)), 16)
    keys, p_empty = (smem.allocate_array(Int64, 1) for _ in range(2))
    of_scores, of_sum = (Ring(*(smem.allocate_array(Int64, n) for _ in range(2)), n) for n in c.stages_of_rows)
    rows = Ring(smem.allocate_array(Int64, 1), smem.allocate_array(Int64, 1))
    p, peer = Ring(exchange.p_full, p_empty), Peer.of(exchange.p_full)
    bar = KeyHalvesBarriers(keys, of_scores, rows, p, None, of_scores, of_sum, exchange, peer)
    return bar, KeyTileShared(stays, stays, scored, summed, numbers, spans, None, None, None, boxed, flags, found, None)
