"""The gradients of K and V for Hopper, head dimensions up to 256, K and V apart.

With P = exp(S - lse), and a weight and a delta for each row (query, head):

    dV = (weight P)' dO        dS = P * (weight dO V' - delta)        dK = scale dS' Q

A CTA owns a tile of keys of one KV head and walks over the tiles of rows that see any of them, of all heads of the
group. dK and dV stay in registers, and have the same bits every time. All products are of transposes: keys are the rows
of every accumulator, and P' and dS' go from registers into the next product:

    producer warp     K V   Q0 dO0   Q1 dO1   Q2 dO2 ...                        TMA, into a ring
    row warp          the numbers of each tile's rows                           into the same stages
    consumer WG 0     S' = K Q',  dP' = V dO' | P' | dV += P' dO | dS' | dK += dS' Q       keys  0 ..  63
    consumer WG 1     S' = K Q',  dP' = V dO' | P' | dV += P' dO | dS' | dK += dS' Q       keys 64 .. 127

At d 256 two warpgroups can hold dK and dV of only 64 keys, so they share the work by role. P goes from one to the other
through SMEM, in float32:

    consumer WG 0     S' = K Q'  | P' |        dV += P' dO | S' of the next ...
    consumer WG 1     dP' = V dO'      | dS' | dK += dS' Q | dP' of the next ...

A CTA first finds, in `row_spans`' results, the first tile of rows that sees its keys, and how many do. A row that sees
no key may hold anything, so its Q and dO are zeroed where they landed, because 0 * NaN is NaN.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from kernels.abi import DenseBackward
from kernels.aot import Compiled, compile_ahead
from kernels.lib.launch import (
    SMEM_LIMIT,
    WARP,
    WARPGROUP,
    Shapes,
    element_type,
    i32,
    launch_facts,
    pointers,
    registers_at_launch,
)
from kernels.lib.output import store_output
from kernels.lib.rows import (
    ROWS,
    BoxedRows,
    Extents,
    PlacedTile,
    RowTile,
    ceil_div,
    divide,
    extents,
    load,
    row_of,
)
from kernels.lib.softmax import LOG2_E
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    slab_layout,
    tiled_mma,
    tma_atom,
    tma_tiles,
    transposed,
    zero_rows,
)

from .elements import (
    DELTA,
    HIDES,
    LSE,
    SEES,
    START,
    WEIGHS,
    WEIGHT,
    WIDTH,
    add_scaled,
    bits_below,
    differentiate,
    drop,
    exponentiate,
    hand_over,
    mask,
    part_of,
    take_over,
    weigh,
    zero_row,
)
from .row_spans import read_seen

CONSUMERS = 2  # warpgroups, of 64 keys each
EVERYTHING = 0x7FFFFFFF


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str

    adds_rows: bool = False  # whether dQ is made too

    @property
    def tile_m(self) -> int:
        """Rows of a step, at most."""
        return 128 if self.adds_rows and self.d == 64 else 64

    @property
    def row_warps(self) -> int:
        """Warps of the producer's that tell what belongs to rows, 64 each."""
        return self.tile_m // 64

    @property
    def by_role(self) -> bool:
        """Whether one warpgroup has dV and the other dK of all keys, instead of both for half of the keys."""
        return self.d > 128

    @property
    def tile_n(self) -> int:
        return 64 if self.by_role else 64 * CONSUMERS

    @property
    def stages(self) -> int:
        """Stages of Q and dO."""
        return 2 if self.by_role else 3

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + CONSUMERS)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return (40, 232) if self.by_role else (24, 240)

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * 2 * self.d * (self.tile_n + self.stages * self.tile_m)
        tiles += 2 * 2 * self.tile_n * self.tile_m * self.adds_rows
        rows = 4 * self.stages * self.tile_m * (5 + self.adds_rows) + 4 * self.tile_n * self.tile_m * self.by_role
        rows += 4 * 4 * self.tile_m
        small = 4 * (self.stages * self.row_warps + 2 * self.threads // WARP)
        small += 4 * (self.tile_n // WARP * self.threads // WARP) * self.adds_rows
        small += 8 * (3 + 4 * self.adds_rows + 3 * self.stages)
        return 1024 + tiles + rows + small + 64

    def __post_init__(self):
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
        producer, consumer = self.registers
        if producer + CONSUMERS * consumer > (1 + CONSUMERS) * registers_at_launch(self.threads):
            raise ValueError(f"setmaxnreg would wait for ever for registers that a CTA does not have: {self}")


class RowOperands(NamedTuple):
    """The arrays of rows: float32 [b, s_q, h_q], and int32 [b, s_q]."""

    lse: cute.Pointer
    weight: cute.Pointer
    delta: cute.Pointer
    start: cute.Pointer
    stop: cute.Pointer
    seen: cute.Pointer  # int32 [b, row tile, 4]: the results of `row_spans`


class KeyResults(NamedTuple):
    """[b, s_kv, h_kv, d]."""

    dk: cute.Pointer
    dv: cute.Pointer
    sums: cute.Pointer | None  # float32 [b, s_q, h_q, d]: to what dQ / scale is added, where it is made too
    shared_kv: Int32  # whether K is V: then dk gets the sum of both, and dv is unused
    s_kv: Int32


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM; one for each stage, except the first."""

    keys: cute.Pointer  # K and V landed
    landed: cute.Pointer  # Q and dO
    told: cute.Pointer  # the numbers of rows
    empty: cute.Pointer
    p_full: cute.Pointer  # P is there; single
    p_empty: cute.Pointer
    ds_full: cute.Pointer | None  # dS is there; two, where dQ is made
    ds_empty: cute.Pointer | None


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    k: cute.Tensor  # (tile_n, d)
    v: cute.Tensor
    q: cute.Tensor  # (tile_m, d, stage)
    do: cute.Tensor
    numbers: cute.Tensor  # (tile_m, 3, stage) float32: lse in units of log2, weight, delta
    spans: cute.Tensor  # (tile_m, 2, stage) int32: start, and how many keys from there on are seen
    p: cute.Tensor | None  # (4, thread, accumulator's elements / 4) float32, from the warpgroup of dV to that of dK
    ds: cute.Tensor | None  # (tile_m, tile_n, 2), where dQ is made
    places: cute.Tensor | None  # (tile_m, stage) int32: which of all rows, or -1
    boxed: cute.Tensor  # (4, tile_m) int32: `BoxedRows` of every row of a tile
    facts: cute.Tensor  # (warp, stage) int32: of the rows that it tells of HIDES, WEIGHS, and SEES for each 64 keys
    found: cute.Tensor  # (first tile of rows and how many, warp): of those that a warp has looked at
    covered: cute.Tensor | None  # (32 keys, warp): a bit for each key that these tiles of rows load, where dQ is made


@dataclass(frozen=True)
class KeyTile:
    """A CTA's keys."""

    batch: Int32
    kv_head: Int32
    key0: Int32

    @staticmethod
    def of(n: Extents, s_kv: Int32, tile_n: int) -> "KeyTile":
        """Tiles of a pair of (batch, KV head) follow one another, the first keys first: under a causal mask they have
        most to do."""
        pair, tile = divide(cute.arch.block_idx()[0], ceil_div(s_kv, Int32(tile_n)))
        batch, kv_head = divide(pair, n.h_kv)
        return KeyTile(batch, kv_head, tile * tile_n)


@dataclass(frozen=True)
class KeysOfWarpgroup:
    """Where 64 keys lie in an array of results, in the form of rows for `store_output`."""

    s_kv: Int32
    h_kv: Int32
    batch: Int32
    kv_head: Int32
    key0: Int32
    thread: Int32

    def place(self, _, r: int) -> tuple[cutlass.Boolean, Int32, Int32]:
        key = self.key0 + row_of(self.thread, r)
        return key < self.s_kv, key, self.kv_head

    def row_index(self, key: Int32, kv_head: Int32) -> Int64:
        return (Int64(self.batch) * self.s_kv + key) * self.h_kv + kv_head


class KeyGradientsSm90:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = element_type(config.dtype)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        dout: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        lse: cute.Pointer,
        weight: cute.Pointer,
        delta: cute.Pointer,
        start: cute.Pointer,
        stop: cute.Pointer,
        seen: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        shared_kv: Int32,
        s_kv: Int32,
        scale: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        stream: cuda.CUstream,
    ):
        self.start(
            (q, dout),
            (k, v),
            RowOperands(lse, weight, delta, start, stop, seen),
            KeyResults(dk, dv, None, shared_kv, s_kv),
            scale,
            extents(self.config.tile_m, False, b, s_q, h_q, h_kv, Int32(1), Int32(1)),
            b,
            stream,
        )

    def start(
        self,
        rows: tuple[cute.Pointer, ...],
        keys: tuple[cute.Pointer, ...],
        operands: RowOperands,
        results: KeyResults,
        scale: Float32,
        n: Extents,
        b: Int32,
        stream: cuda.CUstream,
    ) -> None:
        c = self.config
        shapes = Shapes(c.d, b, n)
        op = cpasync.CopyBulkTensorTileG2SOp()
        self.kernel(
            tuple(tma_atom(op, shapes.rows(x), c.tile_m, c.d) for x in rows),
            tuple(tma_atom(op, shapes.keys(x, results.s_kv), c.tile_n, c.d) for x in keys),
            operands,
            results,
            scale,
            n,
        ).launch(
            grid=(ceil_div(results.s_kv, Int32(c.tile_n)) * n.pairs, 1, 1),
            block=(c.threads, 1, 1),
            smem=c.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas silently drops setmaxnreg
        )

    @cute.kernel
    def kernel(self, rows: tuple, keys: tuple, operands: RowOperands, results: KeyResults, scale: Float32, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        tile = KeyTile.of(n, results.s_kv, c.tile_n)
        if warp == 0:
            for atom, _ in (*rows, *keys):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bar.keys, 1)
                cute.arch.mbarrier_init(bar.p_full, WARPGROUP)
                cute.arch.mbarrier_init(bar.p_empty, WARPGROUP)
                for s in cutlass.range_constexpr(2 * c.adds_rows):
                    cute.arch.mbarrier_init(bar.ds_full + s, CONSUMERS * WARPGROUP)
                    cute.arch.mbarrier_init(bar.ds_empty + s, CONSUMERS * WARPGROUP)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(bar.landed + s, 1)
                    cute.arch.mbarrier_init(bar.told + s, c.row_warps * WARP)
                    cute.arch.mbarrier_init(bar.empty + s, CONSUMERS * WARPGROUP)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            self.load_keys(bar, smem, tile, keys)
        self.find_rows(smem, tile, operands, n)
        self.zero_what_no_row_is(smem, n)
        self.place_rows(smem, n)
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                self.load_rows(bar, smem, tile, rows, operands, n)
            elif warp <= c.row_warps:
                self.tell_rows(bar, smem, tile, operands, n, warp - 1 if c.row_warps > 1 else 0)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            if cutlass.const_expr(not c.by_role):
                self.consume(bar, smem, tile, results, scale, n)
            elif warp < 8:
                self.consume_values(bar, smem, tile, results, scale, n)
            else:
                self.consume_keys(bar, smem, tile, results, scale, n)

    def allocate(self) -> tuple[Barriers, Shared]:
        c = self.config
        smem = SmemAllocator()

        def tiles(*shape: int) -> cute.Tensor:
            layout = slab_layout(self.dtype, *shape)
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

        k, v = (tiles(c.tile_n, c.d) for _ in range(2))
        q, do = (tiles(c.tile_m, c.d, c.stages) for _ in range(2))
        numbers = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 3, c.stages)), 16)
        spans = smem.allocate_tensor(Int32, cute.make_layout((c.tile_m, 2, c.stages)), 16)
        p = None
        if c.by_role:
            p = smem.allocate_tensor(Float32, cute.make_layout((4, WARPGROUP, c.tile_m // 8)), 16)
        ds, places, covered = None, None, None
        if c.adds_rows:
            ds = tiles(c.tile_m, c.tile_n, 2)
            places = smem.allocate_tensor(Int32, cute.make_layout((c.tile_m, c.stages)), 16)
            covered = smem.allocate_tensor(Int32, cute.make_layout((c.tile_n // WARP, c.threads // WARP)), 16)
        boxed = smem.allocate_tensor(Int32, cute.make_layout((4, c.tile_m)), 16)
        facts = smem.allocate_tensor(Int32, cute.make_layout((c.row_warps, c.stages)), 16)
        found = smem.allocate_tensor(Int32, cute.make_layout((2, c.threads // WARP)), 16)
        counts = (1, c.stages, c.stages, c.stages, 1, 1, *2 * [2 * c.adds_rows])
        bars = (smem.allocate_array(Int64, count) if count else None for count in counts)
        return Barriers(*bars), Shared(k, v, q, do, numbers, spans, p, ds, places, boxed, facts, found, covered)

    # ---- before the first step

    @cute.jit
    def load_keys(self, bar: Barriers, smem: Shared, tile: KeyTile, keys: tuple):
        c = self.config
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar.keys, 2 * 2 * c.d * c.tile_n)
        for (atom, m), s in zip(keys, (smem.k, smem.v), strict=True):
            moved = cute.domain_offset((tile.key0, 0, tile.kv_head, tile.batch), m)
            gmem = cute.local_tile(moved[None, None, 0, 0], (c.tile_n, c.d), (0, 0))
            g, to = tma_tiles(atom, gmem, s)
            cute.copy(atom, g, to, tma_bar_ptr=bar.keys)

    @cute.jit
    def find_rows(self, smem: Shared, tile: KeyTile, operands: RowOperands, n: Extents):
        """All threads find which tiles of rows see some of the keys."""
        c = self.config
        first, count = Int32(EVERYTHING), Int32(0)
        covered = cute.make_rmem_tensor(c.tile_n // WARP, Int32)
        covered.fill(0)
        for i in cutlass.range(cute.arch.thread_idx()[0], n.tiles_of_pair, c.threads, unroll=4):
            if self.sees(operands, tile, n, i)[0]:
                first, count = cutlass.min(first, i), count + 1
                if cutlass.const_expr(c.adds_rows):
                    lo, hi, _, _ = read_seen(operands.seen, tile.batch * n.tiles_of_pair + i)
                    for word in cutlass.range_constexpr(c.tile_n // WARP):
                        key0 = tile.key0 + word * WARP
                        covered[word] = covered[word] | (bits_below(hi - key0) & ~bits_below(lo - key0))
        if cutlass.const_expr(c.adds_rows):
            for word in cutlass.range_constexpr(c.tile_n // WARP):
                bits = cute.arch.warp_redux_sync(covered[word], "or")
                if cute.arch.lane_idx() == 0:
                    smem.covered[word, cute.arch.warp_idx()] = bits
        first, count = cute.arch.warp_redux_sync(first, "min"), cute.arch.warp_redux_sync(count, "add")
        if cute.arch.lane_idx() == 0:
            smem.found[0, cute.arch.warp_idx()], smem.found[1, cute.arch.warp_idx()] = first, count

    def steps(self, smem: Shared) -> tuple[Int32, Int32]:
        """(the first tile of rows that sees some of the keys, how many do), which all warps have found out."""
        lane, warps = cute.arch.lane_idx(), self.config.threads // WARP
        of_warp = cutlass.min(lane, warps - 1)
        first, count = smem.found[0, of_warp], smem.found[1, of_warp] * Int32(lane < warps)
        return cute.arch.warp_redux_sync(first, "min"), cute.arch.warp_redux_sync(count, "add")

    def sees(
        self, operands: RowOperands, tile: KeyTile, n: Extents, i: Int32
    ) -> tuple[cutlass.Boolean, cutlass.Boolean]:
        """Whether any row of tile i sees any key, and whether some does not see some."""
        lo, hi, lo_all, hi_all = read_seen(operands.seen, tile.batch * n.tiles_of_pair + i)
        end = tile.key0 + self.config.tile_n
        return (lo < hi) & (lo < end) & (hi > tile.key0), (lo_all > tile.key0) | (hi_all < end)

    @cute.jit
    def zero_what_no_row_is(self, smem: Shared, n: Extents):
        """All threads zero the rows of every stage that no box fills."""
        c = self.config
        if n.box_inner * n.box_outer < c.tile_m:
            for s in cutlass.range_constexpr(c.stages):
                for x in (smem.q, smem.do):
                    zero_rows(x[None, None, s], n.box_inner * n.box_outer, cute.arch.thread_idx()[0], c.threads)

    @cute.jit
    def place_rows(self, smem: Shared, n: Extents):
        """By a thread for each row of a tile: where it lies in every tile's box."""
        row = cute.arch.thread_idx()[0]
        if row < self.config.tile_m:
            boxed = BoxedRows.at(n, [row])
            for i, x in enumerate((boxed.inner, boxed.outer, boxed.query, boxed.head)):
                smem.boxed[i, row] = x[0]

    # ---- the producer's warps, which agree on the order of steps

    @cute.jit
    def next_row_tile(
        self, seeing: Int32, chunk: Int32, smem: Shared, tile: KeyTile, operands: RowOperands, n: Extents
    ) -> tuple[Int32, Int32, Int32]:
        """(row tile, and the state: which of a chunk of 32 are still to come, and the chunk's first)."""
        while seeing == 0:
            chunk = chunk + WARP
            i = chunk + cute.arch.lane_idx()
            sees, _ = self.sees(operands, tile, n, cutlass.min(i, n.tiles_of_pair - 1))
            seeing = Int32(cute.arch.vote_ballot_sync(sees & (i < n.tiles_of_pair)))
        place = cute.arch.popc((seeing & -seeing) - 1)
        return chunk + place, seeing & (seeing - 1), chunk

    @cute.jit
    def load_rows(self, bar: Barriers, smem: Shared, tile: KeyTile, rows: tuple, operands: RowOperands, n: Extents):
        """One warp loads Q and dO of every tile of rows."""
        c = self.config
        first, steps = self.steps(smem)
        seeing, chunk = Int32(0), first - WARP
        for t in cutlass.range(steps, unroll=1):
            stage, parity = t % c.stages, t // c.stages & 1
            i, seeing, chunk = self.next_row_tile(seeing, chunk, smem, tile, operands, n)
            here = self.row_tile(tile, n, i)
            cute.arch.mbarrier_wait(bar.empty + stage, parity ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar.landed + stage, 2 * 2 * c.d * n.box_inner * n.box_outer)
            for (atom, m), s in zip(rows, (smem.q, smem.do), strict=True):
                g, to = tma_tiles(atom, here.of(m, c.tile_m, c.d)[None, None, 0], s)
                cute.copy(atom, g, to[None, stage], tma_bar_ptr=bar.landed + stage)

    def row_tile(self, tile: KeyTile, n: Extents, i: Int32) -> RowTile:
        outer, inner = divide(i, n.tiles_inner)
        return RowTile(n, Int32(0), tile.batch, tile.kv_head, inner * n.box_inner, outer * n.box_outer)

    @cute.jit
    def tell_rows(
        self, bar: Barriers, smem: Shared, tile: KeyTile, operands: RowOperands, n: Extents, warp: Int32 | int
    ):
        """One warp: what belongs to 64 rows of every tile, and zeros for those that see nothing."""
        c, lane = self.config, cute.arch.lane_idx()
        end = tile.key0 + c.tile_n
        row0 = lane if c.row_warps == 1 else warp * 64 + lane
        mine = [row0 + WARP * r for r in range(2)]
        first, steps = self.steps(smem)
        seeing, chunk = Int32(0), first - WARP
        for t in cutlass.range(steps, unroll=1):
            stage, parity = t % c.stages, t // c.stages & 1
            i, seeing, chunk = self.next_row_tile(seeing, chunk, smem, tile, operands, n)
            here = self.row_tile(tile, n, i)
            placed = PlacedTile(n, here.split, here.batch, here.kv_head, here.inner0, here.outer0, here.first_query)
            dead, facts = Int32(0), Int32(0)
            cute.arch.mbarrier_wait(bar.empty + stage, parity ^ 1)
            for r in cutlass.range_constexpr(len(mine)):  # one at a time, for registers are few
                boxed = BoxedRows(*((smem.boxed[i, mine[r]],) for i in range(4)))
                exists, query, head = placed.place(boxed, 0)
                row = placed.row_index(query, head) * Int64(exists)
                lse, weight, delta = (load(x + row) for x in (operands.lse, operands.weight, operands.delta))
                query = cutlass.min(query, n.s_q - 1)
                start, stop = (load(placed.at_query(x, query)) for x in (operands.start, operands.stop))
                sees = exists & (lse != -Float32.inf)
                smem.numbers[mine[r], LSE, stage] = lse * LOG2_E if sees else Float32.inf
                smem.numbers[mine[r], WEIGHT, stage] = weight if sees else Float32(0.0)
                smem.numbers[mine[r], DELTA, stage] = delta if sees else Float32(0.0)
                smem.spans[mine[r], START, stage] = start
                smem.spans[mine[r], WIDTH, stage] = cutlass.max(stop - start, 0) * Int32(sees)
                if cutlass.const_expr(c.adds_rows):
                    smem.places[mine[r], stage] = Int32(row) if exists else Int32(-1)
                dead = dead | (Int32(exists & (lse == -Float32.inf)) << r)
                facts = facts | Int32(sees & ((start > tile.key0) | (stop < end))) * HIDES
                facts = facts | Int32(sees & (weight != 1.0)) * WEIGHS
                for g in cutlass.range_constexpr(0 if c.adds_rows else c.tile_n // 64):
                    key0 = tile.key0 + g * 64
                    facts = facts | Int32(sees & (start < key0 + 64) & (stop > key0)) * (SEES << g)
            facts = cute.arch.warp_redux_sync(facts, "or")
            if lane == 0:
                smem.facts[warp, stage] = facts
            if cute.arch.vote_any_sync(dead != 0):
                cute.arch.mbarrier_wait(bar.landed + stage, parity)
                self.zero_dead(smem, dead, stage, row0)
            cute.arch.mbarrier_arrive(bar.told + stage)

    @cute.jit
    def zero_dead(self, smem: Shared, dead: Int32, stage: Int32, row: Int32):
        """Row `row` + 32 r of Q and dO, where bit r is set."""
        for r in cutlass.range_constexpr(2):
            if (dead >> r) & 1 == 1:
                for x in (smem.q, smem.do):
                    zero_row(x[None, None, stage], row + WARP * r)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---- consumers

    @cute.jit
    def consume(self, bar: Barriers, smem: Shared, tile: KeyTile, results: KeyResults, scale: Float32, n: Extents):
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
            stage, parity = t % c.stages, t // c.stages & 1
            cute.arch.mbarrier_wait(bar.landed + stage, parity)
            cute.arch.mbarrier_wait(bar.told + stage, parity)
            numbers, facts = smem.numbers[None, None, stage], smem.facts[0, stage]
            if (facts >> group) & SEES != 0:
                multiply(scores, s, a_k, b_q[None, None, None, stage], fresh=True)
                multiply(scores, dp, a_v, b_do[None, None, None, stage], fresh=True)
                warpgroup.wait_group(1)
                if facts & HIDES != 0:
                    mask(s, smem.spans[None, None, stage], key0, thread)
                exponentiate(s, numbers, scale_log2)
                weigh(p, s, numbers, facts)
                warpgroup.wait_group(0)
                if facts & HIDES != 0:
                    drop(dp, s)
                multiply(sums, dv, p, b_dot[None, None, None, stage])
                differentiate(ds, s, dp, numbers, facts)
                multiply(sums, dk, ds, b_qt[None, None, None, stage])
                warpgroup.wait_group(0)
            cute.arch.mbarrier_arrive(bar.empty + stage)
        if results.shared_kv != 0:
            add_scaled(dk, scale, dv)
            scale = Float32(1.0)
        else:
            self.store_sum(dv, Float32(1.0), results.dv, tile, results.s_kv, key0, thread, n)
        self.store_sum(dk, scale, results.dk, tile, results.s_kv, key0, thread, n)

    @cute.jit
    def consume_values(
        self, bar: Barriers, smem: Shared, tile: KeyTile, results: KeyResults, scale: Float32, n: Extents
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
            stage, parity = t % c.stages, t // c.stages & 1
            cute.arch.mbarrier_wait(bar.landed + stage, parity)
            cute.arch.mbarrier_wait(bar.told + stage, parity)
            multiply(scores, s, a_k, b_q[None, None, None, stage], fresh=True)
            numbers = smem.numbers[None, None, stage]
            warpgroup.wait_group(0)
            if smem.facts[0, stage] & HIDES != 0:
                mask(s, smem.spans[None, None, stage], tile.key0, thread)
            exponentiate(s, numbers, scale_log2)
            cute.arch.mbarrier_wait(bar.p_empty, (t & 1) ^ 1)
            hand_over(s, smem.p, thread)
            cute.arch.mbarrier_arrive(bar.p_full)
            weigh(p, s, numbers, Int32(WEIGHS))
            multiply(sums, dv, p, b_dot[None, None, None, stage])
            warpgroup.wait_group(0)
            cute.arch.mbarrier_arrive(bar.empty + stage)
        if results.shared_kv != 0:
            for i in cutlass.range_constexpr(c.d // c.tile_m):
                cute.arch.mbarrier_wait(bar.p_empty, (self.steps(smem)[1] + i & 1) ^ 1)
                hand_over(part_of(dv, s, i), smem.p, thread)
                cute.arch.mbarrier_arrive(bar.p_full)
        else:
            self.store_sum(dv, Float32(1.0), results.dv, tile, results.s_kv, tile.key0, thread, n)

    @cute.jit
    def consume_keys(self, bar: Barriers, smem: Shared, tile: KeyTile, results: KeyResults, scale: Float32, n: Extents):
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
            stage, parity = t % c.stages, t // c.stages & 1
            cute.arch.mbarrier_wait(bar.landed + stage, parity)
            cute.arch.mbarrier_wait(bar.told + stage, parity)
            multiply(scores, dp, a_v, b_do[None, None, None, stage], fresh=True)
            cute.arch.mbarrier_wait(bar.p_full, t & 1)
            take_over(p, smem.p, thread)
            cute.arch.mbarrier_arrive(bar.p_empty)
            warpgroup.wait_group(0)
            drop(dp, p)
            differentiate(ds, p, dp, smem.numbers[None, None, stage], Int32(WEIGHS))
            multiply(sums, dk, ds, b_qt[None, None, None, stage])
            warpgroup.wait_group(0)
            cute.arch.mbarrier_arrive(bar.empty + stage)
        if results.shared_kv != 0:
            for i in cutlass.range_constexpr(c.d // c.tile_m):
                cute.arch.mbarrier_wait(bar.p_full, self.steps(smem)[1] + i & 1)
                take_over(p, smem.p, thread)
                cute.arch.mbarrier_arrive(bar.p_empty)
                add_scaled(part_of(dk, p, i), scale, p)
            scale = Float32(1.0)
        self.store_sum(dk, scale, results.dk, tile, results.s_kv, tile.key0, thread, n)

    def store_sum(
        self,
        acc: cute.Tensor,
        factor: Float32,
        target: cute.Pointer,
        tile: KeyTile,
        s_kv: Int32,
        key0: Int32,
        thread: Int32,
        n: Extents,
    ) -> None:
        """Stores factor * acc, for the 64 keys from key0 on."""
        keys = KeysOfWarpgroup(s_kv, n.h_kv, tile.batch, tile.kv_head, key0, thread)
        factors = cute.make_rmem_tensor(ROWS, Float32)
        factors.fill(factor)
        store_output(acc, factors, target, keys, None, 0, thread, self.config.d)


def compile(variant: DenseBackward, out_dir: Path) -> Compiled:
    return compile_kernel(KeyGradientsSm90(Config(variant.d, variant.dtype)), variant, out_dir, "dk", "dv")


def compile_kernel(kernel: KeyGradientsSm90, variant: DenseBackward, out_dir: Path, *results: str) -> Compiled:
    return compile_ahead(
        kernel,
        KeyGradientsSm90.kernel,
        *pointers(variant.dtype, "q", "do", "k", "v", "float32", "float32", "float32", "int32", "int32", "int32"),
        *pointers(variant.dtype, *results),
        i32(),
        i32(),
        Float32(1.0),
        *(i32() for _ in range(4)),
        name=f"{variant.op}_sm90",
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(kernel.config),
    )
