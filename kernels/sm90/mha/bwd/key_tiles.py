"""Kernels whose CTAs own tiles of keys: what `mha_dkdv` and `mha_dqdkdv` share.

A CTA first finds, in `tile_spans`' results, the first tile of rows that sees its keys, and how many do. It walks over
these tiles, of all heads of the group, in an order that `KeyTile` has; `consume` is what the kernels do with one:

    producer warp     K V   Q0 dO0   Q1 dO1   Q2 dO2 ...            TMA, into a ring
    row warps         the numbers of each tile's rows               into the same stages
    consumer WGs      ...

A step is shorter than the way to memory and back. So three row warps work at a time, each on a tile of its own; where a
tile has 128 rows, two publish half of it each. A row that sees no key may hold anything, so its Q and dO are
zeroed where they landed, because 0 * NaN is NaN.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels.lib.launch import WARP
from kernels.lib.output import store_output
from kernels.lib.rows import ROWS, BoxedRows, Extents, PlacedTile, RowTile, ceil_div, divide, load, row_of
from kernels.lib.softmax import LOG2_E
from kernels.lib.wgmma import tma_tiles, zero_rows

from .elements import DEAD, DELTA, HAS_SINK, HIDES, LSE, SEES, SINK_FACTOR, START, WIDTH, bits_below, zero_row
from .host import MhaBackwardKernel, Results, RowOperands
from .smem import KeyTileBarriers, KeyTileShared, allocate_key_tiles
from .tile_spans import read_seen

NO_TILE = 0x7FFFFFFF  # after every tile of rows
TILES_AT_ONCE = 4  # tiles of rows whose spans a thread loads at a time
AT_ONCE = 128  # CTAs that walk together: about as many as a chip holds


@dataclass(frozen=True)
class KeyTile:
    """A CTA's keys, and whether it walks over their tiles of rows from the last to the first.

    Tiles of a few (batch, KV head) pairs follow one another. The last keys of each come first, and their CTAs walk
    backwards; then the first keys, forwards. Under a causal mask tile i of t is seen by (t - i) p tiles of rows. At
    time 0 all of the last keys begin with the last rows. Those of tile t - 1 - i end at (i + 1) p, when tile i takes
    their place, and begins with its first rows, those of index i p. So at time T all CTAs that walk backwards are at
    the T-th last tile of rows, and all others are at tile T - p: L2 reads rows twice, and not once for each tile of
    keys. All places end at (t + 1) p.
    """

    batch: Int32
    kv_head: Int32
    key0: Int32
    backwards: Int32

    @staticmethod
    def of(n: Extents, s_kv: Int32, tile_n: int, ctas: int) -> "KeyTile":
        """The keys of this CTA, and of all in its cluster."""
        index = cute.arch.block_idx()[0] // ctas if ctas > 1 else cute.arch.block_idx()[0]
        tiles, at_once = ceil_div(s_kv, Int32(tile_n)), Int32(AT_ONCE // ctas)
        most = cutlass.max(divide(at_once, ceil_div(tiles, Int32(2)))[0], 1)  # pairs
        section, rest = divide(index, most * tiles)
        pairs = cutlass.min(most, n.pairs - section * most)
        place, pair = divide(rest, pairs)
        each = divide(at_once, pairs)[0]  # tiles of a pair, of last keys and then of first keys
        turn, i = divide(place, 2 * each)
        last = cutlass.min(each, tiles - turn * 2 * each)
        backwards = Int32(i < last)
        tile = turn * each + i - last
        tile = tile + backwards * (tiles - 1 - turn * each - i - tile)
        batch, kv_head = divide(section * most + pair, n.h_kv)
        return KeyTile(batch, kv_head, tile * tile_n, backwards)

    def row_tile(self, n: Extents, i: Int32) -> Int32:
        """The i-th tile of rows, in the order in which the CTA walks over all of them."""
        return i + self.backwards * (n.tiles_of_pair - 1 - 2 * i)

    def seen(self, operands: RowOperands, n: Extents, i: Int32) -> tuple[Int32, Int32]:
        """Which keys, of all, the i-th tile of rows sees."""
        return read_seen(operands.seen, self.batch * n.tiles_of_pair + self.row_tile(n, i))


@dataclass(frozen=True)
class KeysOfWarpgroup:
    """The places of 64 keys in an array of results, in the form of rows for `store_output`."""

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


class KeyTileKernel(MhaBackwardKernel):
    """A kernel whose CTAs own tiles of keys; it has `consume`."""

    def ctas(self, n: Extents, s_kv: Int32, at_a_time: Int32) -> Int32:
        return ceil_div(s_kv, Int32(self.config.tile_n)) * n.pairs * self.config.cluster

    def allocate(self) -> tuple[KeyTileBarriers, KeyTileShared]:
        return allocate_key_tiles(self.config, self.dtype)

    @cute.kernel
    def kernel(self, rows: tuple, keys: tuple, operands: RowOperands, results: Results, scale: Float32, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        tile = KeyTile.of(n, results.s_kv, c.tile_n, c.cluster)
        if warp == 0:
            for atom, _ in (*rows, *keys):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                bar.initialise(c)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            self.load_keys(bar, smem, tile, keys)
        self.find_rows(smem, tile, operands, n)
        self.zero_unused_rows(smem, n)
        self.place_rows(smem, n)
        cute.arch.sync_threads()
        if cutlass.const_expr(c.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 0:
                self.load_rows(bar, smem, tile, rows, operands, n)
            elif warp <= c.row_warps * c.publishers:
                self.publish_rows(bar, smem, tile, operands, n, warp - 1)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, tile, results, scale, n)

    # ---- before the first step

    @cute.jit
    def load_keys(self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, keys: tuple):
        c = self.config
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar.keys, 2 * 2 * c.d * c.tile_n)
        for (atom, m), s in zip(keys, (smem.k, smem.v), strict=True):
            moved = cute.domain_offset((tile.key0, 0, tile.kv_head, tile.batch), m)
            gmem = cute.local_tile(moved[None, None, 0, 0], (c.tile_n, c.d), (0, 0))
            g, to = tma_tiles(atom, gmem, s)
            cute.copy(atom, g, to, tma_bar_ptr=bar.keys)

    @cute.jit
    def find_rows(self, smem: KeyTileShared, tile: KeyTile, operands: RowOperands, n: Extents):
        """All threads find which tiles of rows see some of the keys."""
        c = self.config
        first, count = Int32(NO_TILE), Int32(0)
        covered = cute.make_rmem_tensor(c.tile_n // WARP, Int32)
        covered.fill(0)
        last = n.tiles_of_pair - 1
        for i0 in cutlass.range(cute.arch.thread_idx()[0], n.tiles_of_pair, TILES_AT_ONCE * c.threads, unroll=1):
            tiles = [i0 + j * c.threads for j in range(TILES_AT_ONCE)]  # all are loaded before the first is looked at
            sees = [self.sees(operands, tile, n, cutlass.min(i, last)) & (i <= last) for i in tiles]
            for i, does in zip(tiles, sees, strict=True):
                if does:
                    first, count = cutlass.min(first, i), count + 1
                    if cutlass.const_expr(c.adds_rows):
                        lo, hi = tile.seen(operands, n, i)
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

    def steps(self, smem: KeyTileShared) -> tuple[Int32, Int32]:
        """(the first tile of rows that sees some of the keys, how many do), which all warps have found out."""
        lane, warps = cute.arch.lane_idx(), self.config.threads // WARP
        of_warp = cutlass.min(lane, warps - 1)
        first, count = smem.found[0, of_warp], smem.found[1, of_warp] * Int32(lane < warps)
        return cute.arch.warp_redux_sync(first, "min"), cute.arch.warp_redux_sync(count, "add")

    def sees(self, operands: RowOperands, tile: KeyTile, n: Extents, i: Int32) -> cutlass.Boolean:
        """Tells whether any row of the i-th tile of rows sees any key of this tile."""
        lo, hi = tile.seen(operands, n, i)
        return (lo < hi) & (lo < tile.key0 + self.config.tile_n) & (hi > tile.key0)

    @cute.jit
    def zero_unused_rows(self, smem: KeyTileShared, n: Extents):
        """All threads zero the rows of every stage that no box fills."""
        c = self.config
        if n.box_inner * n.box_outer < c.tile_m:
            for s in cutlass.range_constexpr(max(c.stages_of_rows)):
                for x, stages in zip((smem.q, smem.do), c.stages_of_rows, strict=True):
                    if cutlass.const_expr(s < stages):
                        zero_rows(x[None, None, s], n.box_inner * n.box_outer, cute.arch.thread_idx()[0], c.threads)

    @cute.jit
    def place_rows(self, smem: KeyTileShared, n: Extents):
        """Writes down where the rows lie in every tile's box, by a thread for each row of a tile."""
        row = cute.arch.thread_idx()[0]
        if row < self.config.tile_m:
            boxed = BoxedRows.at(n, [row])
            for i, x in enumerate((boxed.inner, boxed.outer, boxed.query, boxed.head)):
                smem.boxed[i, row] = x[0]

    # ---- the producer's warps, which agree on the order of steps

    @cute.jit
    def next_row_tile(
        self, seeing: Int32, chunk: Int32, tile: KeyTile, operands: RowOperands, n: Extents
    ) -> tuple[Int32, Int32, Int32]:
        """(the row tile's place in the order, and the state: which of a chunk of 32 are still to come, and the chunk's
        first)."""
        while seeing == 0:
            chunk = chunk + WARP
            i = chunk + cute.arch.lane_idx()
            sees = self.sees(operands, tile, n, cutlass.min(i, n.tiles_of_pair - 1))
            seeing = Int32(cute.arch.vote_ballot_sync(sees & (i < n.tiles_of_pair)))
        place = cute.arch.popc((seeing & -seeing) - 1)
        return chunk + place, seeing & (seeing - 1), chunk

    @cute.jit
    def load_rows(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, rows: tuple, operands: RowOperands, n: Extents
    ):
        """One warp loads Q and dO of every tile of rows."""
        c = self.config
        first, steps = self.steps(smem)
        seeing, chunk = Int32(0), first - WARP
        for t in cutlass.range(steps, unroll=1):
            state = bar.landed.at(t)
            i, seeing, chunk = self.next_row_tile(seeing, chunk, tile, operands, n)
            here = self.row_tile(tile, n, i)
            state.wait_empty()
            with cute.arch.elect_one():
                state.expect_full(2 * 2 * c.d * n.box_inner * n.box_outer)
            for (atom, m), s in zip(rows, (smem.q, smem.do), strict=True):
                g, to = tma_tiles(atom, here.of(m, c.tile_m, c.d)[None, None, 0], s)
                cute.copy(atom, g, to[None, state.index], tma_bar_ptr=state.full)

    def row_tile(self, tile: KeyTile, n: Extents, i: Int32) -> RowTile:
        outer, inner = divide(tile.row_tile(n, i), n.tiles_inner)
        return RowTile(n, Int32(0), tile.batch, tile.kv_head, inner * n.box_inner, outer * n.box_outer)

    @cute.jit
    def publish_rows(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, operands: RowOperands, n: Extents, warp: Int32
    ):
        """One warp publishes the numbers of 64 rows of every tile, or of every third where three warps share the tiles,
        because a step is shorter than the way to memory and back."""
        c = self.config
        part, share = warp % c.row_warps, warp // c.row_warps
        first, steps = self.steps(smem)
        seeing, chunk = Int32(0), first - WARP
        for t in cutlass.range(steps, unroll=1):
            i, seeing, chunk = self.next_row_tile(seeing, chunk, tile, operands, n)
            if t % c.publishers == share:
                self.publish(bar, smem, tile, operands, self.row_tile(tile, n, i), t, part)

    @cute.jit
    def publish(
        self,
        bar: KeyTileBarriers,
        smem: KeyTileShared,
        tile: KeyTile,
        operands: RowOperands,
        rows: RowTile,
        t: Int32,
        part: Int32,
    ):
        """The numbers of 64 rows, and zeros for rows that see nothing."""
        c, n, lane = self.config, rows.n, cute.arch.lane_idx()
        state = bar.rows.at(t)
        stage = state.index
        placed = PlacedTile(n, rows.split, rows.batch, rows.kv_head, rows.inner0, rows.outer0, rows.first_query)
        row0 = part * 64 + lane
        mine = [row0 + WARP * r for r in range(c.rows_of_lane)]
        dead, flags = Int32(0), Int32(0)
        there = cute.make_rmem_tensor(c.rows_of_lane, Int32)
        of_row = cute.make_rmem_tensor((c.rows_of_lane, 3), Float32)
        of_query = cute.make_rmem_tensor((c.rows_of_lane, 2), Int32)
        places = cute.make_rmem_tensor(c.rows_of_lane, Int32)
        if cutlass.const_expr(c.adds_rows):  # else all are loaded before the stage is free
            state.wait_empty()
        for at_once in c.rows_at_once:
            for r in at_once:
                boxed = BoxedRows(*((smem.boxed[i, mine[r]],) for i in range(4)))
                exists, query, head = placed.place(boxed, 0)
                row = placed.row_index(query, head) * Int64(exists)
                query = cutlass.min(query, n.s_q - 1)
                there[r] = Int32(exists)
                for i, x in enumerate((operands.lse, operands.sink_factor, operands.delta)):
                    of_row[r, i] = load(x + row)
                for i, x in enumerate((operands.start, operands.stop)):
                    of_query[r, i] = load(placed.at_query(x, query))
                if cutlass.const_expr(c.adds_rows):
                    places[r] = Int32(row) if exists else Int32(-1)
            if cutlass.const_expr(len(at_once) == c.rows_of_lane):
                state.wait_empty()
            for r in at_once:
                exists = there[r] == 1
                lse, sink_factor, delta = (of_row[r, i] for i in range(3))
                start, stop = of_query[r, 0], of_query[r, 1]
                sees = exists & (lse != -Float32.inf)
                smem.numbers[mine[r], LSE, stage] = lse * LOG2_E if sees else Float32.inf
                smem.numbers[mine[r], SINK_FACTOR, stage] = sink_factor if sees else Float32(0.0)
                smem.numbers[mine[r], DELTA, stage] = delta if sees else Float32(0.0)
                smem.spans[mine[r], START, stage] = start
                smem.spans[mine[r], WIDTH, stage] = cutlass.max(stop - start, 0) * Int32(sees)
                if cutlass.const_expr(c.adds_rows):
                    smem.places[mine[r], stage] = places[r]
                dead = dead | (Int32(exists & (lse == -Float32.inf)) << r)
                flags = flags | Int32(sees & (sink_factor != 1.0)) * HAS_SINK
                if cutlass.const_expr(c.consumers_zero):
                    flags = flags | Int32(exists & (lse == -Float32.inf)) * (DEAD | HIDES)
                for g in cutlass.range_constexpr(c.groups):
                    key0, end = tile.key0 + g * 64, tile.key0 + (g + 1) * (c.tile_n // c.groups)
                    flags = flags | Int32(sees & ((start > key0) | (stop < end))) * (HIDES << g)
                    if cutlass.const_expr(c.groups > 1):
                        flags = flags | Int32(sees & (start < end) & (stop > key0)) * (SEES << g)
        flags = cute.arch.warp_redux_sync(flags, "or")
        if lane == 0:
            smem.flags[part, stage] = flags
        if cutlass.const_expr(not c.consumers_zero):  # noqa: SIM102, at compile time
            if cute.arch.vote_any_sync(dead != 0):
                bar.landed.at(t).wait_full()
                self.zero_dead(smem, dead, stage, row0)
        state.arrive_full()

    @cute.jit
    def zero_dead(self, smem: KeyTileShared, dead: Int32, stage: Int32, row: Int32):
        """Row `row` + 32 r of Q and dO, where bit r is set."""
        for r in cutlass.range_constexpr(2):
            if (dead >> r) & 1 == 1:
                for x in (smem.q, smem.do):
                    zero_row(x[None, None, stage], row + WARP * r)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---- consumers

    def consume(
        self, bar: KeyTileBarriers, smem: KeyTileShared, tile: KeyTile, results: Results, scale: Float32, n: Extents
    ) -> None:
        """Makes the gradients of a tile of keys, by the consumers' warps."""
        raise NotImplementedError

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
