"""Chooses the experts of each token by its logits, or finds them in a table, and weighs them: a warp a token.

    choose    a lane has 8 of 256 experts: it loads their logits and biases, and keeps ranks of score + bias; in as many
              rounds as a token gets experts the warp finds the highest rank, and of equal ones the first expert
    look up   or lane j reads expert j of the token's row in the table
    weigh     lane j computes the score of expert j, from its logits; the warp sums these

A logit is the sum of up to three parts, as a product with a gate in three numbers of bfloat16 leaves them. It is bound
by latency: all loads of 256 experts are on their way at once. What a token gets does not depend on the others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.abi import MOST_CHOSEN, MOST_PARTS, MOST_ROUTED, Route
from kernels.aot import Compiled
from kernels.lib.launch import WARP, Kernel, i32, pointers
from kernels.lib.ptx import bits_of, float_of, load_four_words, max_u32, rank_of, warp_max_u32, warp_min_u32
from kernels.lib.rows import load, store
from kernels.lib.softmax import LOG2_E, exp2

OF_LANE = MOST_ROUTED // WARP  # experts of a lane
AT_ONCE = 8  # of them: all of 256
VECTOR = 4  # next to one another
NAN = float("nan")
TERMS = 8  # of the series of the logarithm


@dataclass(frozen=True)
class Config:
    tile_m: int = 4  # tokens of a CTA, a warp each
    tile_n: int = 1
    smem_bytes: int = 0

    @property
    def threads(self) -> int:
        return self.tile_m * WARP

    @property
    def launch_options(self) -> dict[str, int]:
        """62 registers: without a number ptxas takes 49, and loads wait for loads; with fewer CTAs a prompt's last ones
        begin late. Without a carve-out the DSL asks a driver for one."""
        return {"min_blocks_per_mp": 8, "preferred_smem_carveout": 0}


class Given(NamedTuple):
    logits: cute.Pointer  # float32 [rows, parts, experts]
    bias: cute.Pointer  # float32 [experts], which has a say in the choice alone
    table: cute.Pointer  # int32 [vocabulary, chosen]
    tokens: cute.Pointer  # int32 [rows]


class Made(NamedTuple):
    weights: cute.Pointer  # float32 [rows, chosen]
    chosen: cute.Pointer  # int32 [rows, chosen]


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    rows: Int32
    parts: Int32  # of a logit
    experts: Int32
    chosen: Int32  # experts of a token
    vocabulary: Int32  # rows of the table; 0 where the bias has a say
    is_sigmoid: Int32  # whether a score is a sigmoid, and not sqrt(softplus)
    unit: Float32  # that logits are multiplied by
    scale: Float32  # of the weights, whose sum is 1 otherwise


class RouteKernel(Kernel):
    symbol = "route"

    @cute.jit
    def __call__(
        self,
        logits: cute.Pointer,  # `Given`
        bias: cute.Pointer,
        table: cute.Pointer,
        tokens: cute.Pointer,
        weights: cute.Pointer,  # `Made`
        chosen: cute.Pointer,
        rows: Int32,  # `Extents`
        parts: Int32,
        experts: Int32,
        n_chosen: Int32,
        vocabulary: Int32,
        is_sigmoid: Int32,
        unit: Float32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        n = Extents(rows, parts, experts, n_chosen, vocabulary, is_sigmoid, unit, scale)
        ctas = (rows + self.config.tile_m - 1) // self.config.tile_m
        self.launch(Given(logits, bias, table, tokens), Made(weights, chosen), n, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, given: Given, made: Made, n: Extents):
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * self.config.tile_m + warp
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if row < n.rows:
            logits = given.logits + Int64(row) * n.parts * n.experts
            expert = Int32(0)
            if n.vocabulary > 0:
                token = cutlass.min(cutlass.max(load(given.tokens + row), Int32(0)), n.vocabulary - 1)
                if lane < n.chosen:
                    expert = load(given.table + (Int64(token) * n.chosen + lane))
            else:
                expert = self.choose(logits, given.bias, n)
            score = Float32(0.0)
            if lane < n.chosen:
                score = Float32(NAN)  # unless there is such an expert
                if (expert >= 0) & (expert < n.experts):
                    x = cute.make_rmem_tensor(1, Float32)
                    x[0] = summed([load(logits + (part + expert)) for part in parts_of(n)], n)
                    to_scores(x, n)
                    score = x[0]
            factor = n.scale * cute.arch.rcp_approx(cute.arch.warp_reduction_sum(score) + 1e-20)
            if lane < n.chosen:
                at = Int64(row) * n.chosen + lane
                store(made.weights + at, score * factor)
                store(made.chosen + at, expert)

    @cute.jit
    def choose(self, logits: cute.Pointer, bias: cute.Pointer, n: Extents) -> Int32:
        """Lane j's expert is the one whose score and bias have the j-th greatest sum."""
        lane, own = cute.arch.lane_idx(), Int32(0)
        ranks = cute.make_rmem_tensor(OF_LANE, Uint32)
        ranks.fill(0)  # below that of any number
        for first in cutlass.range_constexpr(0, OF_LANE, AT_ONCE):
            if first * WARP < n.experts:
                self.rank(ranks, first, logits, bias, n)
        for j in cutlass.range(n.chosen, unroll=1):
            most, expert = Uint32(0), Int32(MOST_ROUTED)
            for first in cutlass.range_constexpr(0, OF_LANE, AT_ONCE):
                if first * WARP < n.experts:
                    tops = [Uint32(ranks[first + i]) for i in range(AT_ONCE)]
                    while cutlass.const_expr(len(tops) > 1):
                        tops = [max_u32(x, y) for x, y in zip(tops[::2], tops[1::2], strict=True)]
                    most = max_u32(most, tops[0])
            most = warp_max_u32(most)
            for first in cutlass.range_constexpr(OF_LANE - AT_ONCE, -1, -AT_ONCE):
                if first * WARP < n.experts:
                    for i in cutlass.range_constexpr(first + AT_ONCE - 1, first - 1, -1):
                        if ranks[i] == most:
                            expert = expert_of(i, lane)
            expert = Int32(warp_min_u32(Uint32(expert)))
            for first in cutlass.range_constexpr(0, OF_LANE, AT_ONCE):
                if first * WARP < n.experts:
                    for i in cutlass.range_constexpr(first, first + AT_ONCE):
                        if expert == expert_of(i, lane):
                            ranks[i] = Uint32(0)
            if lane == j:
                own = expert
        return own

    @cute.jit
    def rank(self, ranks: cute.Tensor, first: cutlass.Constexpr, logits: cute.Pointer, bias: cute.Pointer, n: Extents):
        """Ranks of AT_ONCE experts of a lane, from its number `first` on: all loads, then all else."""
        lane, loaded, biases = cute.arch.lane_idx(), [], []
        for i in cutlass.range_constexpr(0, AT_ONCE, VECTOR):
            expert = cutlass.min(expert_of(first + i, lane), n.experts - VECTOR)  # that exists
            biases += load_four_words((bias + expert).toint())
            loaded += zip(*[load_four_words((logits + (part + expert)).toint()) for part in parts_of(n)], strict=True)
        x = cute.make_rmem_tensor(AT_ONCE, Float32)
        for i in cutlass.range_constexpr(AT_ONCE):
            x[i] = summed([float_of(part) for part in loaded[i]], n)
        to_scores(x, n)
        for i in cutlass.range_constexpr(AT_ONCE):
            rank = rank_of(Uint32(bits_of(x[i] + float_of(biases[i])))) - 2  # NaN is before all others
            ranks[first + i] = rank if expert_of(first + i, lane) < n.experts else Uint32(0)

    def examples(self, variant: Route) -> tuple:
        arrays = pointers("bfloat16", "float32", "float32", "int32", "int32", "float32", "int32")
        return *arrays, *(i32() for _ in range(6)), Float32(1.0), Float32(1.5)


def expert_of(i: int, lane: Int32) -> Int32:
    """The number of a lane's i-th expert: lanes have VECTOR neighbours each, by turns."""
    return (i // VECTOR * WARP + lane) * VECTOR + i % VECTOR


def parts_of(n: Extents) -> list[Int32]:
    """The places of the parts of a token's logits; the last one stands for those that are not there."""
    return [cutlass.min(Int32(p), n.parts - 1) * n.experts for p in range(MOST_PARTS)]


@cute.jit
def summed(parts: list[Float32], n: Extents) -> Float32:
    """A logit: its parts, the last one first."""
    x = Float32(0.0)
    for p in cutlass.range_constexpr(MOST_PARTS - 1, -1, -1):
        x = (parts[p] if p < n.parts else Float32(0.0)) + x
    return x


@cute.jit
def to_scores(x: cute.Tensor, n: Extents):
    """Turns logits into scores, by a branch around all of them, before which what was loaded is waited for."""
    for i in cutlass.range_constexpr(cute.size(x)):
        x[i] = x[i] * n.unit
    if n.is_sigmoid != 0:
        for i in cutlass.range_constexpr(cute.size(x)):
            x[i] = sigmoid(x[i])
    else:
        for i in cutlass.range_constexpr(cute.size(x)):
            x[i] = sqrt_of_softplus(x[i])


@cute.jit
def sigmoid(x: Float32) -> Float32:
    u = exp_of_minus(x, 1.0)
    return (u if x < 0.0 else Float32(1.0)) * cute.arch.rcp_approx(1.0 + u)


@cute.jit
def sqrt_of_softplus(x: Float32) -> Float32:
    """sqrt(x + log(1 + u)) with u = e^-x. Below 0 it is e^(x/2) sqrt(log(1 + u) / u) with u = e^x, so that small ones
    are as precise as others.
    """
    root = exp_of_minus(x, 0.5)
    u = root * root
    half = cute.arch.rcp_approx(2.0 + u)  # log(1 + u) = 2 artanh(u / (2 + u))
    z, series = (u * half) * (u * half), Float32(1 / (2 * TERMS - 1))
    for i in cutlass.range_constexpr(TERMS - 1, 0, -1):
        series = series * z + 1 / (2 * i - 1)
    ratio = 2.0 * half * series
    is_less = x < 0.0  # which NaN is not
    y = cute.math.sqrt(ratio if is_less else x + u * ratio, fastmath=True)
    return root * y if is_less else y


def exp_of_minus(x: Float32, factor: float) -> Float32:
    """e^(-factor |x|)"""
    return exp2(float_of(bits_of(x) | Int32(-(2**31))) * (factor * LOG2_E))


def compile(variant: Route, out_dir: Path) -> Compiled:
    assert MOST_CHOSEN == WARP
    return RouteKernel(Config()).compile(variant, out_dir)
