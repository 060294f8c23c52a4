"""Chooses the experts of each token by its logits, or finds them in a table, and weighs them: a warp a token.

    choose    a lane has every 32nd expert: logits and biases in registers, and then ranks of score + bias; as many
              rounds as a token gets experts find the highest rank of the warp, and of equal ones the first expert
    look up   or lane j reads expert j of the token's row in the table
    weigh     lane j computes the score of expert j, from its logits; the warp sums these

A logit is the sum of up to three parts, as a product with a gate in three numbers of bfloat16 leaves them. It is bound
by latency: all loads of a token are on their way at once. What a token gets does not depend on the others.
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
from kernels.lib.ptx import bits_of, float_of, load_or_minus_inf, max_u32, rank_of, warp_max_u32, warp_min_u32
from kernels.lib.rows import load, store
from kernels.lib.softmax import LOG2_E, exp2

OF_LANE = MOST_ROUTED // WARP  # experts of a lane
AT_ONCE = 8  # of them: all of 256
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
        return {}


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
                    parts = [Float32(0.0)] * MOST_PARTS
                    for i in cutlass.range_constexpr(MOST_PARTS):
                        if i < n.parts:
                            parts[i] = load(logits + (i * n.experts + expert))
                    score = score_of(parts, n)
            total = cute.arch.warp_reduction_sum(score) + 1e-20
            if lane < n.chosen:
                at = Int64(row) * n.chosen + lane
                store(made.weights + at, n.scale * score / total)
                store(made.chosen + at, expert)

    @cute.jit
    def choose(self, logits: cute.Pointer, bias: cute.Pointer, n: Extents) -> Int32:
        """Lane j's expert is the one whose score and bias have the j-th greatest sum."""
        lane, own = cute.arch.lane_idx(), Int32(0)
        ranks = cute.make_rmem_tensor(OF_LANE, Uint32)
        ranks.fill(0)  # below that of any number
        for first in cutlass.range_constexpr(0, OF_LANE, AT_ONCE):
            if first * WARP < n.experts:
                self.rank(ranks, first, logits + lane, bias + lane, n)
        for j in cutlass.range(n.chosen, unroll=1):
            most = Uint32(0)
            for first in cutlass.range_constexpr(0, OF_LANE, AT_ONCE):
                if first * WARP < n.experts:
                    tops = [Uint32(ranks[first + i]) for i in range(AT_ONCE)]
                    while cutlass.const_expr(len(tops) > 1):
                        tops = [max_u32(x, y) for x, y in zip(tops[::2], tops[1::2], strict=True)]
                    most = max_u32(most, tops[0])
            most = warp_max_u32(most)
            expert = Int32(MOST_ROUTED)
            for i in cutlass.range_constexpr(OF_LANE - 1, -1, -1):
                if ranks[i] == most:
                    expert = i * WARP + lane
            expert = Int32(warp_min_u32(Uint32(expert)))
            for i in cutlass.range_constexpr(OF_LANE):
                if expert == i * WARP + lane:
                    ranks[i] = Uint32(0)
            if lane == j:
                own = expert
        return own

    @cute.jit
    def rank(self, ranks: cute.Tensor, first: cutlass.Constexpr, logits: cute.Pointer, bias: cute.Pointer, n: Extents):
        """Ranks of AT_ONCE experts of a lane, from its number `first` on: all loads, then all else."""
        left = n.experts - first * WARP - cute.arch.lane_idx()
        places = [(logits + (p * n.experts + first * WARP)).toint() for p in range(MOST_PARTS)]
        counts = [left if p < n.parts else Int32(0) for p in range(MOST_PARTS)]
        loaded = [
            [load_or_minus_inf(place, i * WARP, count) for place, count in zip(places, counts, strict=True)]
            for i in range(AT_ONCE)
        ]
        biases = [load_or_minus_inf((bias + first * WARP).toint(), i * WARP, left) for i in range(AT_ONCE)]
        for i in cutlass.range_constexpr(AT_ONCE):
            parts = [x if p < n.parts else Float32(0.0) for p, x in enumerate(loaded[i])]
            rank = rank_of(Uint32(bits_of(score_of(parts, n) + biases[i]))) - 2  # NaN is before all others
            ranks[first + i] = rank if i * WARP < left else Uint32(0)

    def examples(self, variant: Route) -> tuple:
        arrays = pointers("bfloat16", "float32", "float32", "int32", "int32", "float32", "int32")
        return *arrays, *(i32() for _ in range(6)), Float32(1.0), Float32(1.5)


@cute.jit
def score_of(parts: list, n: Extents) -> Float32:
    """The score of an expert from the parts of its logit, the last of which are added first.

    sqrt(softplus(x)) is sqrt(x + log(1 + u)) with u = e^-x. Below 0 it is e^(x/2) sqrt(log(1 + u) / u) with u = e^x, so
    that small ones are as precise as others.
    """
    x = Float32(0.0)
    for part in parts[::-1]:
        x = part + x
    x = x * n.unit
    root = exp2(float_of(bits_of(x) | Int32(-(2**31))) * (LOG2_E / 2))
    u = root * root
    score = Float32(0.0)
    if n.is_sigmoid != 0:
        score = (u if x < 0.0 else Float32(1.0)) * cute.arch.rcp_approx(1.0 + u)
    else:
        half = cute.arch.rcp_approx(2.0 + u)  # log(1 + u) = 2 artanh(u / (2 + u))
        z, series = (u * half) * (u * half), Float32(1 / (2 * TERMS - 1))
        for i in cutlass.range_constexpr(TERMS - 1, 0, -1):
            series = series * z + 1 / (2 * i - 1)
        ratio = 2.0 * half * series
        score = root * cute.math.sqrt(ratio, fastmath=True)
        if not x < 0.0:  # NaN stays NaN
            score = cute.math.sqrt(x + u * ratio, fastmath=True)
    return score


def compile(variant: Route, out_dir: Path) -> Compiled:
    assert MOST_CHOSEN == WARP
    return RouteKernel(Config()).compile(variant, out_dir)
