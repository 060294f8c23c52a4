"""The gradient of hyper-connections, first part: what the second one needs to know of each token.

With g = norm dz, u = Σ t x' rounded, where t is pre or what was taken, and a = (rates of numbers + base):

    1 / rms(u), along = (g · u) / (hidden rms(u)³)     the gradient of u is g / rms(u) - along u
    dt            = x' · that                           by x' · g and x' · u
    da            = the gradient of a, by sigmoids, and by Sinkhorn's iterations walked back
    shrinking     = -(Σ da rate (fn x')) / (4 hidden rms(x')³)

A warp has a token. It reads x' and dz once, adds up ten products over all channels, and then has a number of the 24 a
lane, those of the mix in the first 16: their rows and columns are sums over lanes. It keeps the sums by which Sinkhorn
divides, and multiplies by them on the way back.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from kernels.abi import HyperConnectionBackward
from kernels.aot import Compiled
from kernels.lib.launch import WARP, Kernel, i32, pointers
from kernels.lib.ptx import load_shared, store_shared
from kernels.lib.rows import ceil_div, load, store
from kernels.lib.softmax import LOG2_E, exp2

from .common import MIX, WORDS, inverse_rms, joined_word, numbers_of, of_quad, pair, sigmoid, words_of
from .config import KEPT, NUMBERS, ROW, STREAMS, VECTOR, NumbersConfig

ROWS, COLUMNS = (1, 2), (4, 8)  # by which lanes of a mix's row, and of its column, differ
FIRST = 2 * STREAMS  # of a token's numbers: those of the mix


class Given(NamedTuple):
    x: cute.Pointer  # x', [tokens, STREAMS, hidden]
    dz: cute.Pointer  # [tokens, hidden]
    norm: cute.Pointer  # float32 [hidden]
    totals: cute.Pointer  # float32 [tokens, NUMBERS], fn x'
    squares: cute.Pointer  # float32 [tokens], the sum of those of x'
    scale: cute.Pointer  # float32 [3]
    base: cute.Pointer  # float32 [NUMBERS]
    taken: cute.Pointer  # float32 [tokens, STREAMS], where `has_taken`
    dpre: cute.Pointer  # float32 [tokens, STREAMS]
    dpost: cute.Pointer
    dmix: cute.Pointer  # float32 [tokens, STREAMS, STREAMS]


class Made(NamedTuple):
    numbers: cute.Pointer  # float32 [tokens, ROW]: da, t, 1 / rms(u), along, shrinking, 1 / rms(x')
    dtaken: cute.Pointer  # float32 [tokens, STREAMS], where `has_taken`


class Numbers(NamedTuple):
    tokens: Int32
    has_taken: Int32
    iterations: Int32
    eps: Float32
    hc_eps: Float32


class BackwardNumbersSm90(Kernel):
    symbol = "hyper_connection_bwd_numbers_sm90"

    @cute.jit
    def __call__(
        self,
        new_x: cute.Pointer,
        dz: cute.Pointer,
        norm: cute.Pointer,
        totals: cute.Pointer,
        squares: cute.Pointer,
        scale: cute.Pointer,
        base: cute.Pointer,
        taken: cute.Pointer,
        dnew_pre: cute.Pointer,
        dnew_post: cute.Pointer,
        dnew_mix: cute.Pointer,
        numbers: cute.Pointer,
        dtaken: cute.Pointer,
        tokens: Int32,
        has_taken: Int32,
        iterations: Int32,
        eps: Float32,
        hc_eps: Float32,
        stream: cuda.CUstream,
    ):
        given = Given(new_x, dz, norm, totals, squares, scale, base, taken, dnew_pre, dnew_post, dnew_mix)
        n = Numbers(tokens, has_taken, iterations, eps, hc_eps)
        ctas = ceil_div(tokens, Int32(self.config.tile_m))
        self.launch(given, Made(numbers, dtaken), n, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, given: Given, made: Made, n: Numbers):
        c, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kept = SmemAllocator().allocate_array(Float32, c.warps * KEPT, byte_alignment=16).toint() + warp * 4 * KEPT
        token = cute.arch.block_idx()[0] * c.warps + warp
        if token < n.tokens:
            at = Int64(token)
            place = (lane + FIRST) % WARP  # of what the lane has, in a row of numbers
            number, block = cutlass.min(place, NUMBERS - 1), cutlass.min(place // STREAMS, 2)
            total = load(given.totals + (at * NUMBERS + number))
            inverse = inverse_rms(load(given.squares + at), STREAMS * c.hidden, n.eps)
            rate = load(given.scale + block)
            a = total * inverse * rate + load(given.base + number)  # the bits of which z was made
            share = sigmoid(a)
            takes = cute.make_rmem_tensor(STREAMS, Float32)
            if n.has_taken > 0:
                for i, x in enumerate(numbers_of(given.taken + at * STREAMS, STREAMS)):
                    takes[i] = x
            else:
                for i in cutlass.range_constexpr(STREAMS):
                    takes[i] = cute.arch.shuffle_sync(share, WARP - FIRST + i) + n.hc_eps
            found = self.products(given, at, takes)
            of_u = inverse_rms(found[FIRST + 1], c.hidden, n.eps)
            along = of_u * of_u * of_u * found[FIRST] * (1.0 / c.hidden)
            dtakes = [of_u * found[i] - along * found[STREAMS + i] for i in range(STREAMS)]
            own = dtakes[0]  # of the stream that a lane of pre or of the last numbers has
            for i in cutlass.range_constexpr(1, STREAMS):
                own = dtakes[i] if place % STREAMS == i else own
            cotangent = Float32(0.0)
            if place < STREAMS:
                cotangent = load(given.dpre + (at * STREAMS + place))
                if n.has_taken == 0:
                    cotangent = cotangent + own
            elif place < FIRST:
                cotangent = 2.0 * load(given.dpost + (at * STREAMS + (place - STREAMS)))
            elif place < NUMBERS:
                cotangent = load(given.dmix + (at * MIX + (place - FIRST)))
            da = self.walked_back(a, cotangent, kept, n)
            if place < FIRST:
                da = cotangent * share * (1.0 - share)
            stretch = Float32(0.0)
            if place < NUMBERS:
                stretch = da * rate * total
            shrinking = sum_over(stretch, *ROWS, *COLUMNS, 16) * inverse * inverse * inverse
            value = da
            for i, x in enumerate((*(takes[i] for i in range(STREAMS)), of_u, along)):
                value = x if place == NUMBERS + i else value
            value = shrinking * (-1.0 / (STREAMS * c.hidden)) if place == ROW - 2 else value
            value = inverse if place == ROW - 1 else value
            store(made.numbers + (at * ROW + place), value)
            if (n.has_taken > 0) & (place >= NUMBERS) & (place < NUMBERS + STREAMS):
                store(made.dtaken + (at * STREAMS + (place - NUMBERS)), own)

    @cute.jit
    def products(self, given: Given, at: Int64, takes: cute.Tensor) -> cute.Tensor:
        """Sums over all channels: x' · g of each stream, x' · u, then g · u and u · u."""
        c = self.config
        found = cute.make_rmem_tensor(FIRST + 2, Float32)
        found.fill(0.0)
        for first in cutlass.range(0, c.hidden, c.step, unroll=1):
            channel = first + cute.arch.lane_idx() * VECTOR
            xs = [words_of(given.x + ((at * STREAMS + i) * c.hidden + channel)) for i in range(STREAMS)]
            dz, norm = words_of(given.dz + (at * c.hidden + channel)), numbers_of(given.norm + channel, VECTOR)
            for w in cutlass.range_constexpr(WORDS):
                u = pair(joined_word([x[w] for x in xs], takes, self.dtype))
                g = [v * norm[2 * w + k] for k, v in enumerate(pair(dz[w]))]
                for i in cutlass.range_constexpr(STREAMS):
                    for k, v in enumerate(pair(xs[i][w])):
                        found[i] = found[i] + v * g[k]
                        found[STREAMS + i] = found[STREAMS + i] + v * u[k]
                for k in cutlass.range_constexpr(2):
                    found[FIRST] = found[FIRST] + g[k] * u[k]
                    found[FIRST + 1] = found[FIRST + 1] + u[k] * u[k]
        for i in cutlass.range_constexpr(FIRST + 2):
            found[i] = sum_over(found[i], *ROWS, *COLUMNS, 16)
        return found

    @cute.jit
    def walked_back(self, a: Float32, cotangent: Float32, kept: Int32, n: Numbers) -> Float32:
        """The gradient of an entry's logit a, from that of the doubly stochastic matrix, in the first MIX lanes."""
        lane, step = cute.arch.lane_idx(), Int32(4 * MIX)
        place = kept + 4 * lane
        if lane >= MIX:  # which are beside it, and keep nothing
            place, step = kept + 4 * (KEPT - WARP + lane), Int32(0)
        most = a
        for offset in ROWS:
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
        share = exp2((a - most) * LOG2_E)
        share = share * cute.arch.rcp_approx(of_quad(share))
        entry = divided(share + n.hc_eps, COLUMNS, place, n)
        for i in cutlass.range(1, n.iterations, unroll=1):
            entry = divided(entry, ROWS, place + (2 * i - 1) * step, n)
            entry = divided(entry, COLUMNS, place + 2 * i * step, n)
        for j in cutlass.range(1, n.iterations, unroll=1):
            i = n.iterations - j
            cotangent, entry = undivided(cotangent, entry, COLUMNS, place + 2 * i * step)
            cotangent, entry = undivided(cotangent, entry, ROWS, place + (2 * i - 1) * step)
        cotangent, entry = undivided(cotangent, entry, COLUMNS, place)
        return share * (cotangent - of_quad(cotangent * share))

    def examples(self, variant: HyperConnectionBackward) -> tuple:
        arrays = pointers(variant.dtype, "x", "dz", *["float32"] * 11)
        return *arrays, i32(), i32(), i32(), Float32(1e-6), Float32(1e-6)


def sum_over(x: Float32, *offsets: int) -> Float32:
    """The sum over lanes that differ by these."""
    for offset in offsets:
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x


def divided(entry: Float32, over: tuple[int, ...], place: Int32, n: Numbers) -> Float32:
    """An entry by the sum of its row or column, which is kept."""
    total = sum_over(entry, *over) + n.hc_eps
    store_shared(place, total)
    return entry * cute.arch.rcp_approx(total)


def undivided(cotangent: Float32, entry: Float32, over: tuple[int, ...], place: Int32) -> tuple[Float32, Float32]:
    """The gradient of an entry before it was `divided`, and that entry."""
    total = load_shared(place)
    rest = cotangent - sum_over(cotangent * entry, *over)
    return rest * cute.arch.rcp_approx(total), entry * total


def compile(variant: HyperConnectionBackward, out_dir: Path) -> Compiled:
    return BackwardNumbersSm90(NumbersConfig(variant.dtype, variant.hidden)).compile(variant, out_dir)
