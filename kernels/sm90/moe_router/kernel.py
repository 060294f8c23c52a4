"""Scores of a layer's experts, the choice among them, and the weights of those that are chosen, in one kernel.

    load        a CTA's part of k of its tile's tokens into SMEM, by cp.async; of the gate into registers, ahead of use
    multiply    a warp 16 experts x all tokens of the tile, by `mma.sync`; the sums into SMEM
    cluster     meets: each of its CTAs has a part of k
    finish      a warp a token: the sum of all parts, in their order (DSMEM); scores; rounds of a greatest one; weights

Products have the precision of float32, by tensor cores. A number of the gate is exactly the sum of three of bfloat16:
its mantissa's upper 8 bits, the next 8, and the last 8. x is of bfloat16, so no product is rounded. Tensor cores
need not round their sums as float32 does: they sum 32 of k at a time, and plain additions sum the rest.

The gate is `[k, e]`, and its rows are 16 columns of a product's A: a lane has two experts of four numbers of k, which
lie 4 apart in k from those of the lane beside it. x has the same order: four neighbours, 8 bytes of SMEM.

How k is cut, and the order of all sums, depend on k alone. So a token has the same bits alone and among others.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernels.abi import MoeRouter
from kernels.aot import Compiled
from kernels.lib.launch import WARP, Kernel, i32, pointers
from kernels.lib.ptx import (
    bits_of,
    copy_or_zero,
    exp_accurately,
    float_of,
    load_four_of,
    load_shared_two_words,
    load_two_once_if,
    multiply_warp,
    permute_bytes,
    rank_of,
    store_shared_two,
    warp_max_u32,
    warp_min_u32,
)
from kernels.lib.rows import ceil_div, load, store

from .config import AT_ONCE, BLOCK, CHUNK, MOST_CHOSEN, PARTS, STEPS, TOGETHER, UNIT, WARPS, Config

UPPER_HALVES = 0x7632  # of two words, by `permute_bytes`
NAN = float("nan")


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    rows: Int32
    k: Int32
    e: Int32  # experts, a multiple of BLOCK
    c: Int32  # chosen ones of a token
    is_given: Int32  # whether these are given
    is_sigmoid: Int32  # whether a score is a sigmoid, and not sqrt(softplus)
    unit: Float32  # that logits are multiplied by
    scale: Float32  # of the weights, whose sum is 1 otherwise


class Chosen(NamedTuple):
    """The arrays that choices come from, and those that they go to."""

    bias: cute.Pointer  # float32 [e], which has a say in the choice alone
    given: cute.Pointer  # int32 [rows, c]
    weights: cute.Pointer  # float32 [rows, c]
    made: cute.Pointer  # int32 [rows, c]


class Part(NamedTuple):
    """A CTA's part of k, in units of UNIT, and where it has its rows of x and the sums."""

    first: Int32
    count: Int32
    x: Int32
    pitch: Int32  # bytes from one row of x to the next
    sums: Int32  # float32 [tile_m, sums_pitch]
    sums_pitch: Int32  # bytes


class MoeRouterSm90(Kernel):
    symbol = "moe_router_sm90"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # [rows, k]
        gate: cute.Pointer,  # float32 [k, e]
        bias: cute.Pointer,  # `Chosen`
        given: cute.Pointer,
        weights: cute.Pointer,
        chosen: cute.Pointer,
        rows: Int32,  # `Extents`
        k: Int32,
        e: Int32,
        c: Int32,
        is_given: Int32,
        is_sigmoid: Int32,
        unit: Float32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        n = Extents(rows, k, e, c, is_given, is_sigmoid, unit, scale)
        ctas = ceil_div(rows, Int32(self.config.tile_m)) * PARTS
        self.launch(x, gate, Chosen(bias, given, weights, chosen), n, ctas=ctas, stream=stream, cluster=PARTS)

    @cute.kernel
    def kernel(self, x: cute.Pointer, gate: cute.Pointer, chosen: Chosen, n: Extents):
        c = self.config
        smem = SmemAllocator().allocate_array(Uint32, c.smem_bytes // 4, byte_alignment=128).toint()
        rank, tile = cute.arch.block_idx()[0] % PARTS, cute.arch.block_idx()[0] // PARTS
        row0, units = tile * c.tile_m, n.k // UNIT
        first, last = units * rank // PARTS, units * (rank + 1) // PARTS
        pitch = ceil_div(units, Int32(PARTS)) * (UNIT * 2) + 32  # then no two rows that a warp reads meet in a bank
        part = Part(first, last - first, smem, pitch, smem + c.tile_m * pitch, (n.e + 4) * 4)
        cute.arch.griddepcontrol_wait()
        self.multiply(x, gate, part, row0, n)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for i in cutlass.range(warp, c.rows_of_cta, WARPS, unroll=1):
            row = rank * c.rows_of_cta + i
            if row0 + row < n.rows:
                self.finish(part.sums + row * part.sums_pitch, chosen, row0 + row, n)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # nobody leaves while others read its sums

    @cute.jit
    def multiply(self, x: cute.Pointer, gate: cute.Pointer, part: Part, row0: Int32, n: Extents):
        """A warp's blocks of experts, unit by unit of k: the gate is loaded `depth` units ahead.

        It is asked for before x: ptxas moves a wait for copies to SMEM in front of all loads that it can pass.
        """
        c, warp = self.config, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        items = (n.e // BLOCK - warp + WARPS - 1) // WARPS * part.count
        words = [cute.make_rmem_tensor(STEPS * 8, Uint32) for _ in range(c.depth)]
        sums = cute.make_rmem_tensor(c.tile_m // 2, Float32)
        sums.fill(0.0)
        to_load, to_load_block, unit, block = Int32(0), warp, Int32(0), warp
        for j in cutlass.range_constexpr(c.depth):
            self.fetch(words[j], gate, part, to_load, to_load_block, j < items, n)
            to_load, to_load_block = following(to_load, to_load_block, part.count)
        self.copy_x(x, part, row0, n)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # x is there
        for item in cutlass.range(0, items, c.depth, unroll=1):
            for j in cutlass.range_constexpr(c.depth):
                if item + j < items:
                    self.multiply_unit(sums, words[j], part, unit)
                    if unit == part.count - 1:
                        self.put(sums, part, block)
                self.fetch(words[j], gate, part, to_load, to_load_block, item + j + c.depth < items, n)
                to_load, to_load_block = following(to_load, to_load_block, part.count)
                unit, block = following(unit, block, part.count)

    @cute.jit
    def copy_x(self, x: cute.Pointer, part: Part, row0: Int32, n: Extents):
        """Asks for a part of each of the tile's rows; for zeros where there is none."""
        c, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for i in cutlass.range(warp, c.tile_m, WARPS, unroll=1):
            row = cutlass.min(row0 + i, n.rows - 1)
            source = (x + (Int64(row) * n.k + part.first * UNIT)).toint()
            present = Int32(16) if row0 + i < n.rows else Int32(0)
            for chunk in cutlass.range(lane, part.count * (UNIT // 8), WARP, unroll=1):
                copy_or_zero(part.x + i * part.pitch + chunk * 16, source + chunk * 16, present)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch(self, words: cute.Tensor, gate: cute.Pointer, part: Part, unit: Int32, block: Int32, wanted, n: Extents):
        """A lane's words of a unit of k of a block of experts, if wanted."""
        lane, wanted = cute.arch.lane_idx(), Int32(1) if wanted else Int32(0)
        row = (part.first + unit) * UNIT + lane % 4 * 4
        place = (gate + (Int64(row) * n.e + (block * BLOCK + lane // 4 * 2))).toint()
        for i in cutlass.range_constexpr(STEPS * 4):
            at = place + Int64((i // 4 * 16 + i % 4) * 4) * n.e
            words[2 * i], words[2 * i + 1] = load_two_once_if(at, wanted)

    @cute.jit
    def multiply_unit(self, sums: cute.Tensor, words: cute.Tensor, part: Part, unit: Int32):
        """sums += a unit of k of a block of experts times that of all tokens."""
        c, lane = self.config, cute.arch.lane_idx()
        place = part.x + lane // 4 * part.pitch + unit * (UNIT * 2) + lane % 4 * 8
        for first in cutlass.range_constexpr(0, STEPS, TOGETHER):
            thirds = []  # of the gate's bits, then of steps
            for step in cutlass.range_constexpr(first, first + TOGETHER):
                parts = [split(words[8 * step + j], words[8 * step + 2 + j]) for j in (0, 1, 4, 5)]
                thirds.append(list(zip(*parts, strict=True)))  # each of two experts, of two and again two numbers of k
            for tokens in cutlass.range_constexpr(c.tile_m // 8):
                b = [load_shared_two_words(place + tokens * 8 * part.pitch, (first + i) * 32) for i in range(TOGETHER)]
                acc = (Float32(0.0),) * 4
                for third in cutlass.range_constexpr(2, -1, -1):  # small numbers first
                    for i in cutlass.range_constexpr(TOGETHER):
                        acc = multiply_warp(acc, thirds[i][third], b[i])
                for r in cutlass.range_constexpr(4):
                    sums[4 * tokens + r] += acc[r]

    @cute.jit
    def put(self, sums: cute.Tensor, part: Part, block: Int32):
        """Sums of a block of experts go to SMEM, and begin again."""
        c, lane = self.config, cute.arch.lane_idx()
        place = part.sums + lane % 4 * 2 * part.sums_pitch + (block * BLOCK + lane // 4 * 2) * 4
        for tokens in cutlass.range_constexpr(c.tile_m // 8):
            own = [sums[4 * tokens + r] for r in range(4)]
            for i in cutlass.range_constexpr(2):
                store_shared_two(place + (tokens * 8 + i) * part.sums_pitch, 0, own[i], own[2 + i])
        sums.fill(0.0)

    @cute.jit
    def finish(self, place: Int32, chosen: Chosen, row: Int32, n: Extents):
        """A token's choices and their weights, by a warp: the sums begin at `place` in every CTA's memory."""
        c, lane = self.config, cute.arch.lane_idx()
        scores, ranks = cute.make_rmem_tensor(c.of_lane, Float32), cute.make_rmem_tensor(c.of_lane, Uint32)
        scores.fill(NAN)
        ranks.fill(0)  # below that of any number
        for i in cutlass.range_constexpr(c.of_lane // AT_ONCE):
            if i * WARP * AT_ONCE < n.e:
                self.score(scores, ranks, i, place, chosen.bias, n)
        own_expert, own_score = Int32(0), Float32(NAN)
        for j in cutlass.range(n.c, unroll=1):
            expert = load(chosen.given + (Int64(row) * n.c + j)) if n.is_given != 0 else self.greatest(ranks)
            found = Float32(NAN)  # unless there is such an expert
            for i in cutlass.range_constexpr(c.of_lane):
                if expert == expert_of(i, lane):
                    found = scores[i]
                    ranks[i] = Uint32(0)
            found = cute.arch.shuffle_sync(found, expert // CHUNK % WARP)
            if lane == j:
                own_expert, own_score = expert, found
        total = cute.arch.warp_reduction_sum(own_score if lane < n.c else Float32(0.0))
        if lane < n.c:
            at = Int64(row) * n.c + lane
            store(chosen.weights + at, n.scale * own_score / (total + 1e-20))
            if n.is_given == 0:
                store(chosen.made + at, own_expert)

    @cute.jit
    def score(self, scores: cute.Tensor, ranks: cute.Tensor, part: cutlass.Constexpr, place: Int32, bias, n: Extents):
        """Scores of a lane's AT_ONCE experts number `part`, and their ranks in the choice: all loads, then all else."""
        lane, totals, biases = cute.arch.lane_idx(), [], []
        for i in cutlass.range_constexpr(AT_ONCE // CHUNK):
            first = cutlass.min(expert_of(part * AT_ONCE + i * CHUNK, lane), n.e - CHUNK)
            totals.append([load_four_of(place + first * 4, p) for p in range(PARTS)])
            biases.append([Float32(0.0)] * CHUNK)
            if n.is_given == 0:
                biases[i] = [load(bias + (first + j)) for j in range(CHUNK)]
        for i in cutlass.range_constexpr(AT_ONCE // CHUNK):
            at = part * AT_ONCE + i * CHUNK
            if expert_of(at, lane) < n.e:
                for j in cutlass.range_constexpr(CHUNK):
                    total = Float32(0.0)
                    for p in cutlass.range_constexpr(PARTS):
                        total = total + totals[i][p][j]
                    x = total * n.unit
                    y = sqrt_of_softplus(x)
                    if n.is_sigmoid != 0:
                        y = sigmoid(x)
                    scores[at + j] = y
                    ranks[at + j] = rank_of(Uint32(bits_of(y + biases[i][j]))) - 2  # NaN is before all others

    @cute.jit
    def greatest(self, ranks: cute.Tensor) -> Int32:
        """The expert of the highest rank, the first of those that are equal."""
        lane, top, expert = cute.arch.lane_idx(), Uint32(0), Int32(0)
        for i in cutlass.range_constexpr(self.config.of_lane):
            if ranks[i] > top:
                top, expert = ranks[i], expert_of(i, lane)
        most = warp_max_u32(top)
        return Int32(warp_min_u32(Uint32(expert) if top == most else Uint32(0xFFFFFFFF)))

    def examples(self, variant: MoeRouter) -> tuple:
        arrays = pointers(variant.dtype, "x", "float32", "float32", "int32", "float32", "int32")
        return *arrays, *(i32() for _ in range(6)), Float32(1.0), Float32(1.5)


@cute.jit
def following(unit: Int32, block: Int32, count: Int32) -> tuple[Int32, Int32]:
    """The unit of k after this one, and its block of experts."""
    unit += 1
    if unit == count:
        unit, block = Int32(0), block + WARPS
    return unit, block


def expert_of(i: int, lane: Int32) -> Int32:
    """The number of a lane's i-th expert: lanes have CHUNK neighbours each, by turns."""
    return (i // CHUNK * WARP + lane) * CHUNK + i % CHUNK


def split(x: Uint32, y: Uint32) -> tuple[Uint32, Uint32, Uint32]:
    """Two numbers as three pairs of bf16, whose sums they are."""
    parts = [[z & 0xFFFF0000, z & 0xFFFFFF00, z] for z in (x, y)]
    words = [[a, *(bits_of(float_of(Int32(v)) - float_of(Int32(u))) for u, v in ((a, b), (b, z)))] for a, b, z in parts]
    return tuple(permute_bytes(Uint32(u), Uint32(v), Uint32(UPPER_HALVES)) for u, v in zip(*words, strict=True))


def sqrt_of_softplus(x: Float32) -> Float32:
    """sqrt(log(1 + e^x)), as accurate for small numbers as for large ones."""
    u = exp_of_minus(x)
    s = u * cute.arch.rcp_approx(2.0 + u)  # log(1 + u) = 2 artanh(u / (2 + u))
    z = s * s
    series = Float32(1 / 15)
    for n in (13, 11, 9, 7, 5, 3, 1):
        series = series * z + 1 / n
    return cute.math.sqrt(cutlass.max(x, Float32(0.0)) + 2.0 * s * series, fastmath=True)


@cute.jit
def sigmoid(x: Float32) -> Float32:
    u = exp_of_minus(x)
    return (u if x < 0.0 else Float32(1.0)) * cute.arch.rcp_approx(1.0 + u)


def exp_of_minus(x: Float32) -> Float32:
    """e^-|x|"""
    return exp_accurately(float_of(bits_of(x) | Int32(-(2**31))))


def compile(variant: MoeRouter, out_dir: Path) -> Compiled:
    config = Config(variant.dtype, variant.max_rows)
    assert MOST_CHOSEN == WARP
    return MoeRouterSm90(config).compile(variant, out_dir, ctas=1, cluster=PARTS)
