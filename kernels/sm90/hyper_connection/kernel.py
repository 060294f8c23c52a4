"""Between two sublayers of a model with hyper-connections: the streams after the first, and the second one's input.

    x'            = mixᵀ x + post y                          4 streams of a token, rounded
    numbers       = fn x' / rms(x')                          24, all streams side by side
    pre           = sigmoid(numbers[:4] s0 + b) + eps
    z             = norm(Σ pre x')                           what the sublayer is given
    post', mix'   = 2 sigmoid(numbers[4:8] s1 + b), Sinkhorn(numbers[8:] s2 + b)

XLA makes eight to ten kernels of it. Here a cluster of 8 CTAs has 16 tokens, and each CTA an eighth of the channels of
all streams. They stay in registers from the first line to the fourth, so HBM sees x, y, x' and z once:

    every warp     x', its part of the products | sums of warps, of CTAs | z, squares | sums | z / rms
    one more warp                                                        | Sinkhorn of two tokens

A lane holds 8 channels of two tokens as they lie in memory, and a product takes them in this order: then the order of
k is that of neither the token nor fn, but the same for both. Products are those of tf32, twice: x' has 8 bits and is
exact in it, and fn is the sum of its upper 11 bits and the next 11. Sums are added in one order, whatever the tokens.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernels.abi import HyperConnection
from kernels.aot import Compiled
from kernels.lib.launch import WARP, Kernel, i32, pointers
from kernels.lib.pipeline import wait_for
from kernels.lib.ptx import (
    address_in,
    arrive_in_cluster_if_zero,
    bits_of,
    float_of,
    load_shared,
    load_shared_four,
    load_shared_words,
    multiply_warp_tf32,
    prefetch_bulk,
    round_pair,
    send_words,
    store_shared,
    store_shared_four,
    store_shared_two,
)
from kernels.lib.rows import ceil_div, load, store
from kernels.lib.softmax import LOG2_E, exp2

from .common import (
    MIX,
    UPPER,
    WORDS,
    inverse_rms,
    joined_word,
    load_fn,
    mixed_word,
    numbers_of,
    of_quad,
    pair,
    pair_bits,
    put_numbers,
    put_words,
    sigmoid,
    words_of,
)
from .config import CLUSTER, GROUP, GROUPS, NUMBERS, PITCH, STREAMS, SUMS, TOKENS, VECTOR, Config

OF_CHANNELS = 1  # the named barrier of all warps that have channels
BLOCKS = NUMBERS // 8  # of a token's numbers: columns of a product
PLACE = 4 * PITCH  # bytes of a token's sums
RATES = NUMBERS + 4  # float32 numbers: of base, then of scale


class Before(NamedTuple):
    """The former sublayer: its streams, what it made, and how they go on."""

    x: cute.Pointer  # [tokens, STREAMS, hidden]
    y: cute.Pointer  # [tokens, hidden]
    post: cute.Pointer  # float32 [tokens, STREAMS]
    mix: cute.Pointer  # float32 [tokens, STREAMS, STREAMS]: of stream i, what goes to stream j
    taken: cute.Pointer  # float32 [tokens, STREAMS]: the pre to take, where `has_taken`


class Matrix(NamedTuple):
    """The parameters of the connections before a sublayer."""

    fn: cute.Pointer  # float32 [NUMBERS, STREAMS * hidden]
    scale: cute.Pointer  # float32 [3]
    base: cute.Pointer  # float32 [NUMBERS]
    norm: cute.Pointer  # float32 [hidden], the weight of z's norm


class Made(NamedTuple):
    x: cute.Pointer
    z: cute.Pointer  # [tokens, hidden]
    pre: cute.Pointer
    post: cute.Pointer
    mix: cute.Pointer
    totals: cute.Pointer  # float32 [tokens, NUMBERS]: fn x', which the gradient takes
    squares: cute.Pointer  # float32 [tokens]: the sum of those of x', too


class Numbers(NamedTuple):
    tokens: Int32
    has_taken: Int32
    iterations: Int32
    eps: Float32  # of norms
    hc_eps: Float32  # of pre and of Sinkhorn's sums


class HyperConnectionSm90(Kernel):
    symbol = "hyper_connection_sm90"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        y: cute.Pointer,
        post: cute.Pointer,
        mix: cute.Pointer,
        taken: cute.Pointer,
        fn: cute.Pointer,
        scale: cute.Pointer,
        base: cute.Pointer,
        norm: cute.Pointer,
        new_x: cute.Pointer,
        z: cute.Pointer,
        new_pre: cute.Pointer,
        new_post: cute.Pointer,
        new_mix: cute.Pointer,
        totals: cute.Pointer,
        squares: cute.Pointer,
        tokens: Int32,
        has_taken: Int32,
        iterations: Int32,
        eps: Float32,
        hc_eps: Float32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        before, matrix = Before(x, y, post, mix, taken), Matrix(fn, scale, base, norm)
        made = Made(new_x, z, new_pre, new_post, new_mix, totals, squares)
        n = Numbers(tokens, has_taken, iterations, eps, hc_eps)
        self.launch(before, matrix, made, n, ctas=ctas, stream=stream, cluster=CLUSTER)

    @cute.kernel
    def kernel(self, before: Before, matrix: Matrix, made: Made, n: Numbers):
        c, thread = self.config, cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, cluster = cute.arch.block_idx()[0] % CLUSTER, cute.arch.block_idx()[0] // CLUSTER
        smem = SmemAllocator()
        fn, sums, totals, of_tokens, squares, of_squares, rates = (
            smem.allocate_array(Float32, count, byte_alignment=16).toint()
            for count in (
                *(STREAMS * c.stream_bytes // 4, c.warps * SUMS, 2 * SUMS, CLUSTER * SUMS),
                *(c.warps * TOKENS, CLUSTER * TOKENS, RATES),
            )
        )
        barriers = smem.allocate_array(Int64, STREAMS + 3)
        of_sums, of_all_squares, read = (barriers + STREAMS + i for i in range(3))
        if thread == 0:
            for i in cutlass.range_constexpr(STREAMS + 2):
                cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init(read, CLUSTER * c.warps)
            expect_from_all(of_sums, SUMS)
            expect_from_all(of_all_squares, TOKENS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
        tiles, step = ceil_div(n.tokens, Int32(TOKENS)), cute.arch.grid_dim()[0] // CLUSTER
        if warp == c.warps:  # at once: launches do not overlap, so fn is there
            load_fn(c, fn, barriers, matrix.fn, rank)
            self.load_rates(rates, matrix)
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()  # barriers of all CTAs are there
        streams = cute.make_rmem_tensor((WORDS, 2, STREAMS, GROUPS), Uint32)
        for tile in cutlass.range(cluster, tiles, step, unroll=1):
            count, first = (tile - cluster) // step, tile * TOKENS
            phase, of_tile = count & 1, totals + (count & 1) * 4 * SUMS
            more = Int32(tile + step < tiles)
            if warp < c.warps:
                self.mixed(streams, before, made, rank, first, n)
                self.multiply(streams, barriers, fn, sums)
                self.meet(sums, of_tokens, of_tile, of_sums, read, rank, count, more)
            else:
                self.prefetch(before, rank, first + step * TOKENS, n)
            cute.arch.sync_threads()
            if warp < c.warps:
                whose = (squares, of_squares, of_all_squares, read, phase, more)
                self.join(streams, of_tile, rates, whose, before, matrix, made, rank, first, n)
            else:
                self.finish(of_tile, rates, made, rank, first, n)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_rates(self, rates: Int32, matrix: Matrix):
        """A warp copies base and scale to shared memory, a lane a number."""
        lane = cute.arch.lane_idx()
        if lane < NUMBERS:
            store_shared(rates + 4 * lane, load(matrix.base + lane))
        elif lane < NUMBERS + 3:
            store_shared(rates + 4 * lane, load(matrix.scale + (lane - NUMBERS)))

    @cute.jit
    def prefetch(self, before: Before, rank: Int32, first: Int32, n: Numbers):
        """Brings the next tile's tokens into L2, a lane one."""
        c, token = self.config, first + cute.arch.lane_idx()
        if (cute.arch.lane_idx() < TOKENS) & (token < n.tokens):
            at, channel = Int64(token), rank * c.channels
            prefetch_bulk((before.y + (at * c.hidden + channel)).toint(), 2 * c.channels)
            for i in cutlass.range_constexpr(STREAMS):
                prefetch_bulk((before.x + ((at * STREAMS + i) * c.hidden + channel)).toint(), 2 * c.channels)

    def channel(self, rank: Int32, group: int) -> Int32:
        """Returns a lane's first channel of a group."""
        return rank * self.config.channels + channel_of_cta(group)

    @cute.jit
    def mixed(self, streams: cute.Tensor, before: Before, made: Made, rank: Int32, first: Int32, n: Numbers):
        """streams <- x' of a lane's channels, two tokens, which also goes to memory."""
        c, row = self.config, cute.arch.lane_idx() // 4
        tokens = [first + half * 8 + row for half in range(2)]
        at = [Int64(cutlass.min(token, n.tokens - 1)) for token in tokens]
        places = [(half, group) for half in range(2) for group in range(GROUPS)]
        given = [self.given(before, at[half], self.channel(rank, group)) for half, group in places]  # all in flight
        shares = [self.shares(before, at[0])]
        for (half, group), (y, xs) in zip(places, given, strict=True):
            if cutlass.const_expr((half, group) == (0, GROUPS - 1)):  # once registers are free
                shares.append(self.shares(before, at[1]))
            post, mix = shares[half]
            for i in cutlass.range_constexpr(STREAMS):
                for w in cutlass.range_constexpr(WORDS):
                    streams[w, half, i, group] = mixed_word(i, w, y, xs, post, mix, self.dtype)
                if tokens[half] < n.tokens:
                    target = made.x + ((at[half] * STREAMS + i) * c.hidden + self.channel(rank, group))
                    put_words(target, streams[None, half, i, group])

    def shares(self, before: Before, at: Int64) -> tuple:
        """The parts of y and of its streams that each stream of a token gets."""
        return numbers_of(before.post + at * STREAMS, STREAMS), numbers_of(before.mix + at * MIX, MIX)

    def given(self, before: Before, at: Int64, channel: Int32) -> tuple:
        """A lane's words of y and of the streams of a token."""
        hidden = self.config.hidden
        xs = [words_of(before.x + ((at * STREAMS + j) * hidden + channel)) for j in range(STREAMS)]
        return words_of(before.y + (at * hidden + channel)), xs

    @cute.jit
    def multiply(self, streams: cute.Tensor, barriers: cute.Pointer, fn: Int32, sums: Int32):
        """The warp's part of its tokens' numbers, and of their sums of squares, into shared memory."""
        c, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        acc = cute.make_rmem_tensor((4, BLOCKS), Float32)
        acc.fill(0.0)
        squares = [Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(STREAMS):
            cute.arch.mbarrier_wait(barriers + i, 0)  # fn stays for all tiles
            rows = fn + i * c.stream_bytes + lane // 4 * c.row_bytes
            for group in cutlass.range_constexpr(GROUPS):
                for part in cutlass.range_constexpr(WORDS // 2):  # 16 bytes of a row of fn at a time
                    operands = []
                    for w in cutlass.range_constexpr(2 * part, 2 * part + 2):
                        low, high = (pair_bits(streams[w, half, i, group]) for half in range(2))
                        operands.append((low[0], high[0], low[1], high[1]))
                        for half, bits in enumerate((low, high)):
                            u, v = (float_of(x) for x in bits)
                            squares[half] = squares[half] + u * u + v * v
                    for block in cutlass.range_constexpr(BLOCKS):
                        place = rows + (block * 8 * c.row_bytes + 4 * (channel_of_cta(group) + 4 * part))
                        words = [Int32(word) for word in load_shared_words(place)]
                        upper = [word & UPPER for word in words]
                        rest = [float_of(word) - float_of(high) for word, high in zip(words, upper, strict=True)]
                        lower = [bits_of(x) & UPPER for x in rest]
                        total = tuple(acc[r, block] for r in range(4))
                        for k in cutlass.range_constexpr(2):
                            total = multiply_warp_tf32(total, operands[k], tuple(upper[2 * k : 2 * k + 2]))
                            total = multiply_warp_tf32(total, operands[k], tuple(lower[2 * k : 2 * k + 2]))
                        for r in cutlass.range_constexpr(4):
                            acc[r, block] = total[r]
        for half in cutlass.range_constexpr(2):
            place = sums + warp * 4 * SUMS + (half * 8 + lane // 4) * PLACE
            for block in cutlass.range_constexpr(BLOCKS):
                store_shared_two(place + lane % 4 * 8, block * 32, acc[2 * half, block], acc[2 * half + 1, block])
            total = of_quad(squares[half])
            if lane % 4 == 0:
                store_shared_four(place + 4 * NUMBERS, total, Float32(0.0), Float32(0.0), Float32(0.0))

    @cute.jit
    def meet(
        self,
        sums: Int32,
        of_tokens: Int32,
        of_tile: Int32,
        barrier: cute.Pointer,
        read: cute.Pointer,
        rank: Int32,
        count: Int32,
        more: Int32,
    ):
        """The cluster's sums, from those of warps."""
        c, thread = self.config, cute.arch.thread_idx()[0]
        cute.arch.barrier(barrier_id=OF_CHANNELS, number_of_threads=c.warps * WARP)
        if thread < SUMS // 4:
            place = thread * 16
            if count > 0:
                wait_for(read, count - 1)  # all CTAs have read what was sent of the tile before
            send(sum_of(sums + place, c.warps, 4 * SUMS), of_tokens + rank * 4 * SUMS + place, barrier)
            wait_for(barrier, count)
            total = sum_of(of_tokens + place, CLUSTER, 4 * SUMS)
            store_shared_four(of_tile + place, *(total[k] for k in range(4)))
            if (thread == 0) & (more > 0):
                expect_from_all(barrier, SUMS)

    @cute.jit
    def join(
        self,
        streams: cute.Tensor,
        totals: Int32,
        rates: Int32,
        whose: tuple,
        before: Before,
        matrix: Matrix,
        made: Made,
        rank: Int32,
        first: Int32,
        n: Numbers,
    ):
        """z of a lane's channels: the streams as one, divided by the root mean square of all channels."""
        c, lane, (squares, of_squares, barrier, read, phase, more) = self.config, cute.arch.lane_idx(), whose
        thread, row = cute.arch.thread_idx()[0], lane // 4
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        joined = cute.make_rmem_tensor((WORDS, 2, GROUPS), Uint32)
        for half in cutlass.range_constexpr(2):
            at = Int64(cutlass.min(first + half * 8 + row, n.tokens - 1))
            pre = cute.make_rmem_tensor(STREAMS, Float32)
            if n.has_taken > 0:
                given = numbers_of(before.taken + at * STREAMS, STREAMS)
                for i in cutlass.range_constexpr(STREAMS):
                    pre[i] = given[i]
            else:
                place = totals + (half * 8 + row) * PLACE
                of_token, factor = (
                    load_shared_four(place),
                    inverse_rms(load_shared(place + 4 * NUMBERS), STREAMS * c.hidden, n.eps),
                )
                scale, base = load_shared(rates + 4 * NUMBERS), load_shared_four(rates)
                for i in cutlass.range_constexpr(STREAMS):
                    pre[i] = sigmoid(of_token[i] * factor * scale + base[i]) + n.hc_eps
            of_row = Float32(0.0)
            for group in cutlass.range_constexpr(GROUPS):
                for w in cutlass.range_constexpr(WORDS):
                    joined[w, half, group] = joined_word(
                        [streams[w, half, i, group] for i in range(STREAMS)], pre, self.dtype
                    )
                    u, v = pair(joined[w, half, group])
                    of_row = of_row + u * u + v * v
            of_row = of_quad(of_row)
            if lane % 4 == 0:
                store_shared(squares + (warp * TOKENS + half * 8 + row) * 4, of_row)
        cute.arch.barrier(barrier_id=OF_CHANNELS, number_of_threads=c.warps * WARP)
        if thread < TOKENS // 4:
            place = thread * 16
            send(sum_of(squares + place, c.warps, 4 * TOKENS), of_squares + rank * 4 * TOKENS + place, barrier)
        norms = [numbers_of(matrix.norm + self.channel(rank, group), VECTOR) for group in range(GROUPS)]
        cute.arch.mbarrier_wait(barrier, phase)  # after the last tile nobody sends more to this CTA, which may leave
        if (thread == 0) & (more > 0):
            expect_from_all(barrier, TOKENS)
        for half in cutlass.range_constexpr(2):
            token = first + half * 8 + row
            total, *parts = (load_shared(of_squares + (i * TOKENS + half * 8 + row) * 4) for i in range(CLUSTER))
            for part in parts:
                total = total + part
            factor = inverse_rms(total, c.hidden, n.eps)
            if cutlass.const_expr(half == 1):  # noqa: SIM102, at compile time
                if more > 0:
                    cute.arch.sync_warp()
                    arrive_in_cluster_if_zero(address_in(read.toint(), lane % CLUSTER), lane // CLUSTER)
            for group in cutlass.range_constexpr(GROUPS):
                channel, out = self.channel(rank, group), cute.make_rmem_tensor(WORDS, Uint32)
                norm = norms[group]
                for w in cutlass.range_constexpr(WORDS):
                    u, v = pair(joined[w, half, group])
                    out[w] = round_pair(u * factor * norm[2 * w], v * factor * norm[2 * w + 1], self.dtype)
                if token < n.tokens:
                    put_words(made.z + (Int64(token) * c.hidden + channel), out)

    @cute.jit
    def finish(self, totals: Int32, rates: Int32, made: Made, rank: Int32, first: Int32, n: Numbers):
        """The numbers of a CTA's two tokens, a lane each."""
        c, lane = self.config, cute.arch.lane_idx()
        of_rank = rank * (TOKENS // CLUSTER) + lane
        token = first + of_rank
        if (lane < TOKENS // CLUSTER) & (token < n.tokens):
            place = totals + of_rank * PLACE
            squares = load_shared(place + 4 * NUMBERS)
            factor = inverse_rms(squares, STREAMS * c.hidden, n.eps)
            at, mix = Int64(token), cute.make_rmem_tensor(MIX, Float32)
            for block in cutlass.range_constexpr(NUMBERS // STREAMS):  # of pre, of post, then rows of the mix
                scale = load_shared(rates + 4 * (NUMBERS + min(block, 2))) * factor
                of_block = load_shared_four(place + block * 16)
                put_numbers(made.totals + (at * NUMBERS + block * 4), of_block)
                numbers = [x * scale + y for x, y in zip(of_block, load_shared_four(rates + block * 16), strict=True)]
                if cutlass.const_expr(block < 2):
                    target, times, more = (made.pre, 1.0, n.hc_eps) if block == 0 else (made.post, 2.0, Float32(0.0))
                    for i, x in enumerate(numbers):
                        store(target + (at * STREAMS + i), times * sigmoid(x) + more)
                else:
                    most = numbers[0]
                    for x in numbers[1:]:
                        most = cutlass.max(most, x)
                    powers = [exp2((x - most) * LOG2_E) for x in numbers]
                    inverse = 1.0 / (powers[0] + powers[1] + powers[2] + powers[3])
                    for j, x in enumerate(powers):
                        mix[STREAMS * (block - 2) + j] = x * inverse + n.hc_eps
            store(made.squares + at, squares)
            divide_by_sums(mix, STREAMS, 1, n.hc_eps)
            for _ in cutlass.range(n.iterations - 1, unroll=1):
                divide_by_sums(mix, 1, STREAMS, n.hc_eps)
                divide_by_sums(mix, STREAMS, 1, n.hc_eps)
            for i in cutlass.range_constexpr(MIX):
                store(made.mix + (at * MIX + i), mix[i])

    def examples(self, variant: HyperConnection) -> tuple:
        given = pointers(variant.dtype, "x", "y", *["float32"] * 7)
        made = pointers(variant.dtype, "x", "z", *["float32"] * 5)
        return *given, *made, i32(), i32(), i32(), Float32(1e-6), Float32(1e-6), i32()


def channel_of_cta(group: int) -> Int32:
    """Returns a lane's first channel of a group, of those of its CTA."""
    return (cute.arch.warp_idx() * GROUPS + group) * GROUP + cute.arch.lane_idx() % 4 * VECTOR


def divide_by_sums(mix: cute.Tensor, step: int, stride: int, eps: Float32) -> None:
    """Divides the numbers of each row (step 1) or column (step STREAMS) by their sum."""
    for i in range(STREAMS):
        of_sum = [i * stride + j * step for j in range(STREAMS)]
        a, b, c, d = (mix[x] for x in of_sum)
        inverse = cute.arch.rcp_approx((a + b) + (c + d) + eps)
        for x in of_sum:
            mix[x] = mix[x] * inverse


@cute.jit
def sum_of(place: Int32, count: cutlass.Constexpr, step: cutlass.Constexpr) -> cute.Tensor:
    """Four sums, in order, of so many numbers that lie so many bytes apart.

    Two at a time: a thread's streams stay in its registers meanwhile.
    """
    total = cute.make_rmem_tensor(4, Float32)
    total.fill(0.0)
    for i in cutlass.range(count // 2, unroll=1):
        for half in cutlass.range_constexpr(2):
            part = load_shared_four(place + (2 * i + half) * step)
            for k in cutlass.range_constexpr(4):
                total[k] = total[k] + part[k]
    return total


def expect_from_all(barrier: cute.Pointer, numbers: int) -> None:
    """Arrives, and expects so many numbers from each CTA of the cluster."""
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * CLUSTER * numbers)


def send(words: cute.Tensor, here: Int32, barrier: cute.Pointer) -> None:
    """Sends four numbers to this place of every CTA of the cluster, whose barriers count them."""
    bits = tuple(Uint32(bits_of(words[k])) for k in range(4))
    for i in range(CLUSTER):
        send_words(address_in(here, Int32(i)), bits, address_in(barrier.toint(), Int32(i)))


def compile(variant: HyperConnection, out_dir: Path) -> Compiled:
    config = Config(variant.dtype, variant.hidden)
    return HyperConnectionSm90(config).compile(variant, out_dir, cluster=CLUSTER)
