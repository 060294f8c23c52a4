"""The gradient of attention for Hopper over a latent that is both K and V, head dimension 512.

With P = exp(S - lse), and a weight and a delta for each row (query, head):

    dS = scale P * (weight dO K' - delta)        dQ = dS K        dKV += dS' Q + (weight P)' dO

A CTA keeps 64 rows of Q and dO in SMEM and walks over the keys of the sources, 64 at a time, as the forward pass does.
dQ, 64 x 512 in fp32, stays in the registers of two warpgroups, 256 columns each. What a tile of keys adds to dKV does
not: it goes out to memory by reductions, 64 columns at a time. Each warpgroup has half of the products:

    producer    K of the next tile, gathered with cp.async as soon as both halves of dQ have read this one's;
                Q and dO of the next rows, as the last chunks of dKV free them
                    | full[piece of columns]                     ^ empty[half]
    left        S = Q K',  dP = dO K',  P and dS to SMEM,  dQ_l += dS K_l        2048 + 512 clocks of tensor cores
                    | shared[stage]                              ^ taken[stage]
    right       dQ_r += dS K_r,  dKV chunk by chunk, one under way while the one before goes out       512 + 2048

So right's products and reductions of one tile run while left makes the P and dS of the next one. A tile adds 128 KiB to
dKV, some 4.6 us at the 28 bytes a ns and SM that reductions reach, and the tensor cores have 2.9 us of work: the
reductions bound it.

Every tile of keys is listed in SMEM by its producer: where each key is, or that it is absent. An absent key is filled
with zeros, its P is 0, and nothing is added for it. Rows that do not exist, or that see no key, are filled with zeros.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp as cute_warp
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from kernels.abi import Backward
from kernels.aot import Compiled, compile_ahead
from kernels.lib.launch import (
    SMEM_LIMIT,
    WARP,
    WARPGROUP,
    element_type,
    i32,
    launch_facts,
    pointers,
    registers_at_launch,
)
from kernels.lib.output import BLOCK, store_output
from kernels.lib.ptx import ptx
from kernels.lib.rows import PUBLISHED, BoxedRows, Extents, PlacedTile, RowTile, Walk, extents, load, row_of
from kernels.lib.selections import (
    CHUNK,
    LANES_A_ROW,
    Run,
    RunOperands,
    Selection,
    SelectionOperands,
    copy_or_zero,
    open_selection,
    with_keys,
)
from kernels.lib.softmax import LOG2_E, ROWS, by_row, exp2
from kernels.lib.spans import Span, SpanOperands, ask_span, bits, open_span, span_of
from kernels.lib.splits import on_source, total_tiles
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    round_to,
    slab_layout,
    store_rows,
    tiled_mma,
    transposed,
)

LEFT, RIGHT = 0, 1  # a warpgroup, and its half of dQ's columns
STAGES = 2  # of what is listed of a tile of keys


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...]  # of keys, in the order in which they are walked: "span" or "selection"
    tile_m: int = 64
    tile_n: int = 64
    pieces: int = 4  # of the columns, in which Q, dO and K arrive
    chunk: int = 32  # columns of dKV that are made at a time
    under_way: int = 2  # chunks

    @property
    def gathers(self) -> bool:
        """Whether the keys differ from query to query: then a tile holds heads of one query only."""
        return self.sources[-1] != "span"

    @property
    def threads(self) -> int:
        return 3 * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """(producer, left, right) registers a thread, out of what a launch gives to all three warpgroups alike."""
        return 56, 224, 224

    @property
    def half(self) -> int:
        return self.d // 2

    @property
    def slabs_of_piece(self) -> int:
        return self.d // self.pieces // SLAB

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * self.d * (2 * self.tile_m + self.tile_n)
        weights = 2 * 2 * self.tile_m * self.tile_n
        infos = 4 * 2 * PUBLISHED * (1 + len(self.sources))
        spans = 0 if self.gathers else 4 * 2 * ROWS * len(self.sources) * WARPGROUP
        return tiles + weights + 4 * STAGES * self.tile_n + infos + spans + 8 * Barriers.COUNT + 16

    def __post_init__(self):
        if self.d % (2 * SLAB) or self.half > 256:
            raise ValueError(
                f"d must be a multiple of {2 * SLAB} up to 512 (half of it is one WGMMA's N), got {self.d}"
            )
        at_launch = registers_at_launch(self.threads)
        if sum(self.registers) > 3 * at_launch:  # or the last to ask would wait for ever
            raise ValueError(f"a launch gives {at_launch} registers a thread, too few for {self.registers}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce."""

    first: cute.Pointer

    COUNT = 18

    def initialise(self) -> None:
        """By one thread. Producers and consumers arrive thread by thread."""
        for barriers, count, arrivals in (
            (self.q_full, 4, WARPGROUP),
            (self.q_empty, 4, 2 * WARPGROUP),
            (self.full, 4, WARPGROUP),
            (self.empty, 2, WARPGROUP),
            (self.listed, 1, WARPGROUP),
            (self.shared, 1, WARPGROUP),
            (self.taken, 1, WARPGROUP),
            (self.opened, 1, 1),
        ):
            for i in range(count):
                cute.arch.mbarrier_init(barriers + i, arrivals)

    @property
    def q_full(self) -> cute.Pointer:
        """By piece of the columns: of Q and dO."""
        return self.first

    @property
    def q_empty(self) -> cute.Pointer:
        return self.first + 4

    @property
    def full(self) -> cute.Pointer:
        """By piece of the columns: of a tile of keys."""
        return self.first + 8

    @property
    def empty(self) -> cute.Pointer:
        """By half of the columns, which one side reads last."""
        return self.first + 12

    @property
    def listed(self) -> cute.Pointer:
        """Where a tile's keys are stands in SMEM."""
        return self.first + 14

    @property
    def shared(self) -> cute.Pointer:
        """P and dS stand in SMEM."""
        return self.first + 15

    @property
    def taken(self) -> cute.Pointer:
        return self.first + 16

    @property
    def opened(self) -> cute.Pointer:
        """What the producer found out of a row tile stands in SMEM."""
        return self.first + 17


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (64, d)
    do: cute.Tensor  # (64, d)
    k: cute.Tensor  # (64, d)
    p: cute.Tensor  # (64, keys): weight P
    ds: cute.Tensor  # (64, keys)
    keys: cute.Tensor  # (keys, stage): where each is in its source, or -1
    info: cute.Tensor  # (PUBLISHED, row tile and each source, row tile & 1): what the producer found out
    seen: tuple[
        cute.Tensor, ...
    ]  # of each source (thread, start and stop of each of its rows), read by that thread alone


class RowOperands(NamedTuple):
    """What belongs to rows: [b, s_q, h_q, d], and float32 [b, s_q, h_q]."""

    q: cute.Pointer
    do: cute.Pointer
    dq: cute.Pointer
    lse: cute.Pointer
    weight: cute.Pointer
    delta: cute.Pointer
    scale: Float32


class Source(NamedTuple):
    """Some keys, who sees them, and where their gradient goes."""

    keys: cute.Pointer  # [b, s_kv, h_kv, d], or a pool [s_kv, d]
    dkv: cute.Pointer  # as keys, but float32: added to
    seen_from: cute.Pointer  # int32: start of a span, indices of a selection
    seen_to: cute.Pointer  # int32: stop of a span, lengths of a selection
    s_kv: Int32
    s_batch: Int32  # keys from one batch entry's to the next's: s_kv, or 0 where all share a pool
    topk: Int32  # of a selection

    def operands(self, kind: str, gathers: bool) -> Any:
        if kind == "selection":
            return SelectionOperands(self.keys, self.seen_from, self.seen_to, self.s_kv, self.s_batch, self.topk)
        if gathers:
            return RunOperands(self.keys, self.seen_from, self.seen_to, self.s_kv)
        return SpanOperands(self.seen_from, self.seen_to, self.s_kv)


class LatentBwdSm90:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = element_type(config.dtype)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        do: cute.Pointer,
        dq: cute.Pointer,
        lse: cute.Pointer,
        weight: cute.Pointer,
        delta: cute.Pointer,
        scale: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        keys0: cute.Pointer,
        from0: cute.Pointer,  # start of a span, indices of a selection
        to0: cute.Pointer,  # stop of a span, lengths of a selection
        dkv0: cute.Pointer,
        s_kv0: Int32,
        s_batch0: Int32,
        topk0: Int32,
        keys1: cute.Pointer,
        from1: cute.Pointer,
        to1: cute.Pointer,
        dkv1: cute.Pointer,
        s_kv1: Int32,
        s_batch1: Int32,
        topk1: Int32,
        ctas: Int32,  # at most, that is how many run at a time
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, c.gathers, b, s_q, h_q, h_kv, Int32(1), ctas)
        sources = (
            Source(keys0, dkv0, from0, to0, s_kv0, s_batch0, topk0),
            Source(keys1, dkv1, from1, to1, s_kv1, s_batch1, topk1),
        )[: len(c.sources)]
        rows = RowOperands(q, do, dq, lse, weight, delta, scale)
        self.kernel(rows, sources, n).launch(
            grid=(cutlass.min(n.work, ctas), 1, 1),
            block=(c.threads, 1, 1),
            smem=c.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas silently drops setmaxnreg
        )

    @cute.kernel
    def kernel(self, rows: RowOperands, sources: tuple, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            self.produce(bar, smem, rows, sources, n)
        else:
            if warp < 8:
                cute.arch.setmaxregister_increase(c.registers[1])
                self.left(bar, smem, rows, sources, n)
            else:
                cute.arch.setmaxregister_increase(c.registers[2])
                self.right(bar, smem, rows, sources, n)

    def allocate(self) -> tuple[Barriers, Shared]:
        c = self.config
        smem = SmemAllocator()

        def tile(*shape: int) -> cute.Tensor:
            layout = slab_layout(self.dtype, *shape)
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

        q, do, k = tile(c.tile_m, c.d), tile(c.tile_m, c.d), tile(c.tile_n, c.d)
        p, ds = (tile(c.tile_m, c.tile_n) for _ in range(2))
        keys = smem.allocate_tensor(Int32, cute.make_layout((c.tile_n, STAGES)), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), 2)), 16)
        seen = (
            ()
            if c.gathers
            else tuple(smem.allocate_tensor(Int32, cute.make_layout((WARPGROUP, 2 * ROWS)), 16) for _ in c.sources)
        )
        bar = Barriers(smem.allocate_array(Int64, Barriers.COUNT))
        return bar, Shared(q, do, k, p, ds, keys, info, seen)

    def walk(self, n: Extents) -> Walk:
        """Where keys are gathered, heads of one query follow one another: they share them in L2."""
        return Walk.of(n, Int32(1), 1) if self.config.gathers else Walk.of(n)

    # ---- producer

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """For every row tile of this CTA: its first keys, what there is to see, Q and dO, and the other keys."""
        c = self.config
        thread = cute.arch.thread_idx()[0]
        walk, before = self.walk(n), Int32(0)
        wanted = cute.make_rmem_tensor(c.tile_n // (WARPGROUP // LANES_A_ROW), Int32)
        for turn in cutlass.range(walk.turns, unroll=1):
            tile = walk.tile(turn)
            opened = tuple(self.open(kind, source, tile) for kind, source in zip(c.sources, sources, strict=True))
            lists = tuple(self.listed_keys(x, source, tile) for x, source in zip(opened, sources, strict=True))
            tiles = total_tiles(lists)
            on_source(lists, 0, Selection.look_up, wanted, thread, WARPGROUP)
            for t in cutlass.range(cutlass.max(tiles, 1), unroll=1):
                if t < tiles:
                    on_source(lists, t, Selection.settle, wanted, thread, WARPGROUP)
                    self.gather(bar, smem, with_keys(lists, t), wanted, before + t, thread)
                    on_source(lists, t + 1, Selection.look_up, wanted, thread, WARPGROUP)
                if t == 0:
                    self.load_rows(bar, smem, rows, tile, opened, lists, turn, thread)
            before = before + tiles

    def open(self, kind: str, source: Source, tile: RowTile) -> Any:
        c = self.config
        operands = source.operands(kind, c.gathers)
        if isinstance(operands, SpanOperands):
            return open_span(operands, tile, c.tile_n, ask_span(operands, tile, c.tile_m))
        return open_selection(operands, tile, c.tile_n, c.d)

    def listed_keys(self, opened: Any, source: Source, tile: RowTile) -> Selection:
        """What is opened as something to gather from: of a span the union of its rows' intervals."""
        if isinstance(opened, Selection):
            return opened
        place, step = tile.key(source.keys, opened.operands.s_kv, Int32(0), self.config.d)
        return Run(opened.operands, opened.tile_n, step, place, opened.lo, opened.lo, opened.hi - opened.lo)

    @cute.jit
    def gather(self, bar: Barriers, smem: Shared, keys: Selection, wanted: cute.Tensor, k: Int32, thread: Int32):
        """The CTA's k-th tile of keys, piece by piece, and where its keys are."""
        c = self.config
        for piece in cutlass.range_constexpr(c.pieces):
            if cutlass.const_expr(piece % (c.pieces // 2) == 0):
                cute.arch.mbarrier_wait(bar.empty + piece // (c.pieces // 2), (k & 1) ^ 1)
            slabs = range(piece * c.slabs_of_piece, (piece + 1) * c.slabs_of_piece)
            keys.gather(smem.k, wanted, thread, slabs, WARPGROUP)
            cute.arch.cp_async_mbarrier_arrive_noinc(bar.full + piece)
        if thread % LANES_A_ROW == 0:
            for i in cutlass.range_constexpr(cute.size(wanted)):
                smem.keys[i * (WARPGROUP // LANES_A_ROW) + thread // LANES_A_ROW, k % STAGES] = wanted[i]
        cute.arch.mbarrier_arrive(bar.listed)

    @cute.jit
    def load_rows(
        self,
        bar: Barriers,
        smem: Shared,
        rows: RowOperands,
        tile: RowTile,
        opened: tuple,
        lists: tuple,
        turn: Int32,
        thread: Int32,
    ):
        """What was found out of a row tile, and its Q and dO, piece by piece; zeros for a row that sees nothing."""
        c = self.config
        at_once, row0, chunk = WARPGROUP // LANES_A_ROW, thread // LANES_A_ROW, thread % LANES_A_ROW
        count = c.tile_m // at_once
        boxed = BoxedRows.at(tile.n, [row0 + i * at_once for i in range(count)])
        placed = PlacedTile(*(getattr(tile, name) for name in RowTile.__dataclass_fields__), tile.first_query)
        offsets = cute.make_rmem_tensor(count, Int64)
        sizes = cute.make_rmem_tensor(count, Int32)
        for i in cutlass.range_constexpr(count):
            exists, query, head = placed.place(boxed, i)
            row = placed.row_index(query, head) * Int64(exists)
            sees = exists & (load(rows.lse + row) != -Float32.inf)
            offsets[i], sizes[i] = row * c.d + chunk * CHUNK, Int32(sees) * 16
        offset0 = row0 * (SLAB * 2) + (chunk ^ row0 % 8) * 16
        for piece in cutlass.range_constexpr(c.pieces):
            cute.arch.mbarrier_wait(bar.q_empty + piece, (turn & 1) ^ 1)
            if cutlass.const_expr(piece == 0):  # noqa: SIM102, at compile time
                if thread == 0:
                    tile.publish(smem.info[None, 0, turn & 1])
                    for which, (found, keys) in enumerate(zip(opened, lists, strict=True)):
                        slot = smem.info[None, 1 + which, turn & 1]
                        slot[0] = keys.tiles
                        if cutlass.const_expr(isinstance(found, Span)):
                            slot[1], slot[2] = found.lo_all, found.hi_all
                    cute.arch.mbarrier_arrive(bar.opened)
            for source, target in ((rows.q, smem.q), (rows.do, smem.do)):
                target0 = target.iterator.toint() + offset0
                for slab in range(piece * c.slabs_of_piece, (piece + 1) * c.slabs_of_piece):
                    for i in range(count):
                        place = target0 + (slab * c.tile_m + i * at_once) * SLAB * 2
                        copy_or_zero(place, (source + (offsets[i] + slab * SLAB)).toint(), sizes[i])
            cute.arch.cp_async_mbarrier_arrive_noinc(bar.q_full + piece)

    # ---- consumers

    def reopen(self, smem: Shared, turn: Int32, n: Extents) -> tuple[PlacedTile, tuple[Int32, ...]]:
        """A row tile, and how many tiles of keys it has of each source."""
        tile = RowTile.read(smem.info[None, 0, turn & 1], n)
        slots = (smem.info[None, 1 + which, turn & 1] for which in range(len(self.config.sources)))
        return tile, tuple(cute.arch.make_warp_uniform(slot[0]) for slot in slots)

    @cute.jit
    def left(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """P and dS, and the left half of dQ."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        qk = tiled_mma(self.dtype, c.tile_n, K_MAJOR)
        dsk = tiled_mma(self.dtype, c.half, MN_MAJOR, warpgroup.OperandSource.RMEM)
        a_q, a_do, b_k = operand_a(qk, smem.q), operand_a(qk, smem.do), operand_b(qk, smem.k)
        b_left = operand_b(dsk, transposed(cute.local_tile(smem.k, (c.tile_n, c.half), (0, LEFT))))
        s, dp, dq = accumulator(qk, c.tile_n), accumulator(qk, c.tile_n), accumulator(dsk, c.half)
        p, ds = (register_operand(dsk, c.tile_n, self.dtype) for _ in range(2))
        shift, weight, delta = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(3))
        scale_log2 = rows.scale * LOG2_E
        blocks = c.d // c.pieces // 16
        before = Int32(0)
        for turn in cutlass.range(self.walk(n).turns, unroll=1):
            cute.arch.mbarrier_wait(bar.opened, turn & 1)
            tile, counts = self.reopen(smem, turn, n)
            tiles = sum(counts[1:], counts[0])
            boxed = BoxedRows.of(n, 0, thread, c.gathers)
            self.read_rows(rows, tile, boxed, shift, weight, delta)
            for seen, source in zip(smem.seen, sources, strict=False):
                keep_spans(seen[thread, None], source.operands("span", False), tile, boxed)
            for t in cutlass.range(tiles, unroll=1):
                k = before + t
                for piece in cutlass.range_constexpr(c.pieces):
                    cute.arch.mbarrier_wait(bar.q_full + piece, turn & 1)
                    cute.arch.mbarrier_wait(bar.full + piece, k & 1)
                    cute.arch.fence_proxy("async.shared", space="cta")  # the producer wrote through the generic proxy
                    here = range(piece * blocks, (piece + 1) * blocks)
                    multiply(qk, s, a_q, b_k, piece == 0, here)
                    multiply(qk, dp, a_do, b_k, piece == 0, here)
                cute.arch.mbarrier_wait(bar.listed, k & 1)
                warpgroup.wait_group(1)
                if cutlass.const_expr(c.gathers):
                    mask_absent(s, smem.keys[None, k % STAGES])
                else:
                    self.mask_rows(s, smem, t, k % STAGES, turn & 1, thread)
                exponentiate(s, shift, scale_log2)
                warpgroup.wait_group(0)
                if t == tiles - 1:
                    for piece in cutlass.range_constexpr(c.pieces):
                        cute.arch.mbarrier_arrive(bar.q_empty + piece)
                differentiate(s, dp, weight, delta, rows.scale)
                round_to(p, s)
                round_to(ds, dp)
                cute.arch.mbarrier_wait(bar.taken, (k & 1) ^ 1)
                store_rows(qk, s, p, smem.p, thread)
                store_rows(qk, dp, ds, smem.ds, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(bar.shared)
                multiply(dsk, dq, ds, b_left, t == 0)
                warpgroup.wait_group(0)
                cute.arch.mbarrier_arrive(bar.empty + LEFT)
            if tiles == 0:
                self.skip_rows(bar, turn, dq)
            self.store(dq, rows, tile, LEFT, thread)
            before = before + tiles

    @cute.jit
    def mask_rows(self, scores: cute.Tensor, smem: Shared, t: Int32, stage: Int32, parity: Int32, thread: Int32):
        key0 = smem.keys[0, stage]
        if cutlass.const_expr(len(smem.seen) == 1):  # noqa: SIM114, at compile time
            mask_span(scores, smem.seen[0][thread, None], smem.info[None, 1, parity], key0)
        elif t < smem.info[0, 1, parity]:
            mask_span(scores, smem.seen[0][thread, None], smem.info[None, 1, parity], key0)
        else:
            mask_span(scores, smem.seen[1][thread, None], smem.info[None, 2, parity], key0)

    @cute.jit
    def read_rows(
        self,
        rows: RowOperands,
        tile: PlacedTile,
        boxed: BoxedRows,
        shift: cute.Tensor,
        weight: cute.Tensor,
        delta: cute.Tensor,
    ):
        """The numbers of a thread's rows; a row that sees nothing gets P = 0 and dS = 0."""
        for r in cutlass.range_constexpr(ROWS):
            exists, query, head = tile.place(boxed, r)
            row = tile.row_index(query, head) * Int64(exists)
            lse, w, d = (load(x + row) for x in (rows.lse, rows.weight, rows.delta))
            sees = exists & (lse != -Float32.inf)
            shift[r] = lse * LOG2_E if sees else Float32.inf
            weight[r] = w if sees else Float32(0.0)
            delta[r] = d * rows.scale if sees else Float32(0.0)

    @cute.jit
    def skip_rows(self, bar: Barriers, turn: Int32, dq: cute.Tensor):
        """No row of this tile sees a key."""
        for piece in cutlass.range_constexpr(self.config.pieces):
            cute.arch.mbarrier_wait(bar.q_full + piece, turn & 1)
            cute.arch.mbarrier_arrive(bar.q_empty + piece)
        dq.fill(0.0)

    @cute.jit
    def right(self, bar: Barriers, smem: Shared, rows: RowOperands, sources: tuple, n: Extents):
        """The right half of dQ, and dKV."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        dsk = tiled_mma(self.dtype, c.half, MN_MAJOR)
        dkv = tiled_mma(self.dtype, c.chunk, MN_MAJOR, warpgroup.OperandSource.RMEM)
        b_right = operand_b(dsk, transposed(cute.local_tile(smem.k, (c.tile_n, c.half), (0, RIGHT))))
        a_ds = operand_a(dsk, smem.ds)
        of_keys = tuple(register_operand(dkv, c.tile_m, self.dtype) for _ in range(2))
        chunks = c.d // c.chunk
        of_rows = tuple(
            tuple(
                operand_b(dkv, transposed(cute.local_tile(x, (c.tile_m, c.chunk), (0, i)))) for x in (smem.do, smem.q)
            )
            for i in range(chunks)
        )
        dq, acc = accumulator(dsk, c.half), tuple(accumulator(dkv, c.chunk) for _ in range(c.under_way))
        before = Int32(0)

        for turn in cutlass.range(self.walk(n).turns, unroll=1):
            cute.arch.mbarrier_wait(bar.opened, turn & 1)
            tile, counts = self.reopen(smem, turn, n)
            tiles = sum(counts[1:], counts[0])
            if tiles > 0:
                for piece in cutlass.range_constexpr(c.pieces):
                    cute.arch.mbarrier_wait(bar.q_full + piece, turn & 1)
            for t in cutlass.range(tiles, unroll=1):
                k = before + t
                stage, last = k % STAGES, Int32(t == tiles - 1)
                cute.arch.mbarrier_wait(bar.listed, k & 1)
                target, there = self.find_target(smem.keys[None, stage], t < counts[0], sources, tile, thread)
                cute.arch.mbarrier_wait(bar.shared, k & 1)
                cute.arch.fence_proxy("async.shared", space="cta")
                multiply(dsk, dq, a_ds, b_right, t == 0)
                for tile_of, operand in zip((smem.p, smem.ds), of_keys, strict=True):
                    load_transposed(dkv, operand, tile_of, thread)
                for i in cutlass.range_constexpr(c.under_way):
                    make_chunk(dkv, acc[i], of_keys, of_rows[i])
                warpgroup.wait_group(2 * c.under_way)
                cute.arch.mbarrier_arrive(bar.empty + RIGHT)
                cute.arch.mbarrier_arrive(bar.taken)
                for i in cutlass.range_constexpr(chunks):
                    warpgroup.wait_group(2 * min(c.under_way - 1, chunks - 1 - i))
                    if cutlass.const_expr((i + 1) % (chunks // c.pieces) == 0):
                        arrive_if(bar.q_empty + i // (chunks // c.pieces), last)
                    add_chunk(acc[i % c.under_way], target, there, i * c.chunk)
                    if cutlass.const_expr(i + c.under_way < chunks):
                        make_chunk(dkv, acc[i % c.under_way], of_keys, of_rows[i + c.under_way])
            if tiles == 0:
                self.skip_rows(bar, turn, dq)
            self.store(dq, rows, tile, RIGHT, thread)
            before = before + tiles

    @cute.jit
    def find_target(
        self,
        keys: cute.Tensor,
        of_first: cutlass.Boolean,
        sources: tuple,
        tile: PlacedTile,
        thread: Int32,
    ) -> tuple[Int64, Int32]:
        """Where this thread adds to the gradient of its key, as `add_chunk` has it, and whether that is there."""
        c, n = self.config, tile.n
        step = Int64(n.h_kv) * c.d
        base = self.gradient_of(sources[-1], tile)
        if cutlass.const_expr(len(sources) == 2):  # noqa: SIM102, at compile time
            if of_first:
                base = self.gradient_of(sources[0], tile)
        there = keys[row_of(thread, thread % 2)]
        return base + (cutlass.max(there, Int32(0)) * step + thread % 4 // 2 * 4) * 4, there

    def gradient_of(self, source: Source, tile: PlacedTile) -> Int64:
        n = tile.n
        first = (Int64(tile.batch) * source.s_batch * n.h_kv + tile.kv_head) * self.config.d
        return (source.dkv + first).toint()

    def store(self, dq: cute.Tensor, rows: RowOperands, tile: PlacedTile, side: int, thread: Int32) -> None:
        boxed = BoxedRows.of(tile.n, 0, thread, self.config.gathers)  # again, rather than kept in registers
        ones = cute.make_rmem_tensor(ROWS, Float32)
        ones.fill(1.0)
        store_output(dq, ones, rows.dq, tile, boxed, side * self.config.half, thread, self.config.d)


def make_chunk(mma: cute.TiledMma, acc: cute.Tensor, a: tuple, b: tuple) -> None:
    """Some columns of (weight P)' dO + dS' Q, two groups of products."""
    for i, (of_keys, of_rows) in enumerate(zip(a, b, strict=True)):
        multiply(mma, acc, of_keys, of_rows, fresh=i == 0)


@cute.jit
def load_transposed(mma: cute.TiledMma, operand: cute.Tensor, tile: cute.Tensor, thread: Int32):
    """operand, of 64 keys x rows, <- the SMEM tile of rows x keys."""
    atom = cute.make_copy_atom(cute_warp.LdMatrix8x8x16bOp(True, 4), tile.element_type)
    copy = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    cute.copy(atom, copy.partition_S(transposed(tile)), copy.retile(operand))


@cute.jit
def keep_spans(seen: cute.Tensor, operands: SpanOperands, tile: PlacedTile, boxed: BoxedRows):
    """start and stop of the rows that a thread holds: in SMEM, for want of registers."""
    for r in cutlass.range_constexpr(ROWS):
        exists, query, _ = tile.place(boxed, r)
        seen[2 * r], seen[2 * r + 1] = span_of(tile, operands, query, exists)


@cute.jit
def mask_span(scores: cute.Tensor, seen: cute.Tensor, slot: cute.Tensor, key0: Int32):
    """-inf for every key that its row does not see, of the tile that begins with key0."""
    s = by_row(scores)
    keys = 4 * cute.size(s, mode=[1])
    if key0 < slot[1] or key0 + keys > slot[2]:
        column0 = key0 + cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(2):
                visible = bits(seen[2 * r] - column0 - c, seen[2 * r + 1] - column0 - c)
                for j in cutlass.range_constexpr(cute.size(s, mode=[1]) // 2):
                    if visible & (1 << j) == 0:
                        s[r, 2 * j + c] = -Float32.inf


@cute.jit
def mask_absent(scores: cute.Tensor, keys: cute.Tensor):
    """-inf for every key that is absent."""
    lane = cute.arch.lane_idx()
    absent = cute.make_rmem_tensor(cute.size(keys) // WARP, Uint32)
    anything = Uint32(0)
    for word in cutlass.range_constexpr(cute.size(absent)):
        absent[word] = Uint32(cute.arch.vote_ballot_sync(keys[word * WARP + lane] < 0))
        anything = anything | absent[word]
    if anything != Uint32(0):
        s = by_row(scores)
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            column = i % 2 + i // 2 * 8
            bits = absent[column // 32] >> Uint32(lane % 4 * 2)
            if bits & Uint32(1 << column % 32) != Uint32(0):
                for r in cutlass.range_constexpr(ROWS):
                    s[r, i] = -Float32.inf


@cute.jit
def exponentiate(scores: cute.Tensor, shift: cute.Tensor, scale_log2: Float32):
    """P <- exp(scale S - lse)."""
    s = by_row(scores)
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            s[r, i] = exp2(s[r, i] * scale_log2 - shift[r])


@cute.jit
def differentiate(p: cute.Tensor, dp: cute.Tensor, weight: cute.Tensor, delta: cute.Tensor, scale: Float32):
    """dP <- scale P (weight dP - delta), delta being scaled already; P <- weight P."""
    p, dp = by_row(p), by_row(dp)
    for r in cutlass.range_constexpr(ROWS):
        factor = weight[r] * scale
        for i in cutlass.range_constexpr(cute.size(p, mode=[1])):
            dp[r, i] = p[r, i] * (dp[r, i] * factor - delta[r])
            p[r, i] = p[r, i] * weight[r]


@cute.jit
def add_chunk(acc: cute.Tensor, target: Int64, there: Int32, column0: cutlass.Constexpr):
    """Columns of dKV to memory, 16 bytes a lane: of each block of eight columns even lanes take the first of their two
    rows, odd ones the second, and of that what their neighbour has, too. All are exchanged before the first goes out.
    """
    odd = cute.arch.lane_idx() % 2 == 1
    blocks = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
    for j in cutlass.range_constexpr(cute.size(blocks, mode=[1])):
        for i in cutlass.range_constexpr(2):
            received = cute.arch.shuffle_sync_bfly(blocks[i, j] if odd else blocks[2 + i, j], offset=1)
            blocks[i, j] = received if odd else blocks[i, j]
            blocks[2 + i, j] = blocks[2 + i, j] if odd else received
    for j in cutlass.range_constexpr(cute.size(blocks, mode=[1])):
        add_four(target, there, (column0 + j * BLOCK) * 4, *(blocks[i, j] for i in range(4)))


def add_four(target: Int64, there: Int32, offset: int, *values: Float32) -> None:
    """To four numbers in memory, `offset` bytes behind target, unless `there` is negative."""
    ptx(
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; "
        f"@p red.relaxed.gpu.global.add.v4.f32 [$0+{offset}], {{$2, $3, $4, $5}}; }}",
        Int64(target),
        Int32(there),
        *map(Float32, values),
    )


def arrive_if(barrier: cute.Pointer, condition: Int32) -> None:
    """In assembly: without a branch, for products may be under way."""
    ptx(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        barrier.toint(),
        Int32(condition),
    )


def compile(variant: Backward, out_dir: Path) -> Compiled:
    config = Config(variant.d, variant.dtype, variant.sources)
    source = (*pointers(variant.dtype, "keys", "int32", "int32", "float32"), i32(), i32(), i32())
    return compile_ahead(
        LatentBwdSm90(config),
        LatentBwdSm90.kernel,
        *pointers(variant.dtype, "q", "do", "dq", "float32", "float32", "float32"),
        Float32(1.0),
        *(i32() for _ in range(4)),
        *source,
        *source,
        i32(),
        name="latent_bwd_sm90",
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(config),
    )
