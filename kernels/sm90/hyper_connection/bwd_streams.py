"""The gradient of hyper-connections, second part: of streams and all that mixes them, from what is known of each token.

    dx'_j         = given + t_j du + shrinking x'_j + Σ fn_j da rate / rms(x')         du = norm dz / rms(u) - along u
    dx_i, dy      = Σ_j mix_ij dx'_j, Σ_j post_j dx'_j
    dmix_ij, dpost_j = x_i · dx'_j, y · dx'_j                                          sums over channels
    dnorm         = Σ dz u / rms(u)                                                    a sum over tokens

All but the last two lines' sums is the business of a channel alone. So a CTA has a sixteenth of the channels of all
streams, and its part of fn stays in shared memory while it walks tiles of 16 tokens; the sums of a part of channels,
and of a walk, are for others to add up. x' is made anew from x and y, which are needed besides.

A lane has 8 channels of two tokens, as they lie in memory, and fetches those of the next tile while it works. Products
with fn make them so: the columns of a product are channels that lie 4 apart, and a lane loads fn for four products at a
time. They are those of tf32, three for each of float32: both operands are sums of their upper 11 bits and the next 11,
and the product of the latter is left out.
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
from kernels.lib.ptx import (
    bits_of,
    copy_or_zero,
    float_of,
    in_a_register,
    load_shared_four,
    load_shared_words,
    multiply_warp_tf32,
    prefetch_bulk,
    round_pair,
    store_shared_four,
)
from kernels.lib.rows import ceil_div, load

from .common import (
    MIX,
    UPPER,
    WORDS,
    joined_word,
    load_fn,
    mixed_word,
    numbers_of,
    of_quad,
    pair,
    put_numbers,
    put_words,
)
from .config import GROUP, NUMBERS, PARTS, ROW, ROWS, SHARES, STREAMS, TOKENS, VECTOR, StreamsConfig

STEPS = NUMBERS // 8  # of a product
COLUMNS = GROUP // 8  # products that make the channels of a warp


class Given(NamedTuple):
    x: cute.Pointer  # [tokens, STREAMS, hidden]
    y: cute.Pointer  # [tokens, hidden]
    post: cute.Pointer  # float32 [tokens, STREAMS]
    mix: cute.Pointer  # float32 [tokens, STREAMS, STREAMS]
    fn: cute.Pointer  # float32 [NUMBERS, STREAMS, hidden]
    scale: cute.Pointer  # float32 [3]
    norm: cute.Pointer  # float32 [hidden]
    dnew_x: cute.Pointer  # [tokens, STREAMS, hidden]
    dz: cute.Pointer  # [tokens, hidden]
    numbers: cute.Pointer  # float32 [tokens, ROW], as the first part makes them


class Made(NamedTuple):
    x: cute.Pointer
    y: cute.Pointer
    shares: cute.Pointer  # float32 [PARTS, tokens, SHARES], of post and then of mix
    norm: cute.Pointer  # float32 [walks, hidden]: of CTAs that share out the tokens


class BackwardStreamsSm90(Kernel):
    symbol = "hyper_connection_bwd_streams_sm90"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        y: cute.Pointer,
        post: cute.Pointer,
        mix: cute.Pointer,
        fn: cute.Pointer,
        scale: cute.Pointer,
        norm: cute.Pointer,
        dnew_x: cute.Pointer,
        dz: cute.Pointer,
        numbers: cute.Pointer,
        dx: cute.Pointer,
        dy: cute.Pointer,
        shares: cute.Pointer,
        dnorm: cute.Pointer,
        tokens: Int32,
        walks: Int32,
        stream: cuda.CUstream,
    ):
        given = Given(x, y, post, mix, fn, scale, norm, dnew_x, dz, numbers)
        self.launch(given, Made(dx, dy, shares, dnorm), tokens, ctas=PARTS * walks, stream=stream)

    @cute.kernel
    def kernel(self, given: Given, made: Made, tokens: Int32):
        c, thread = self.config, cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        part, walk = cute.arch.block_idx()[0] % PARTS, cute.arch.block_idx()[0] // PARTS
        smem = SmemAllocator()
        fn, shares, own = (
            smem.allocate_array(Float32, size // 4, byte_alignment=16).toint()
            for size in (STREAMS * c.stream_bytes, 2 * c.share_bytes, c.warps * c.fetched_bytes)
        )
        own = own + warp * c.fetched_bytes + cute.arch.lane_idx() * 16
        barriers = smem.allocate_array(Int64, STREAMS)
        if thread == 0:
            for i in cutlass.range_constexpr(STREAMS):
                cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            load_fn(c, fn, barriers, given.fn, part)
        for i in cutlass.range_constexpr(STREAMS):
            cute.arch.mbarrier_wait(barriers + i, 0)
        channel = part * c.channels + warp * GROUP + cute.arch.lane_idx() % 4 * VECTOR
        norm, of_norm = numbers_of(given.norm + channel, VECTOR), cute.make_rmem_tensor(VECTOR, Float32)
        of_norm.fill(0.0)
        walks = cute.arch.grid_dim()[0] // PARTS
        for half in cutlass.range_constexpr(2):
            self.fetch(given, half, own, channel, walk * TOKENS, tokens)
        for tile in cutlass.range(walk, ceil_div(tokens, Int32(TOKENS)), walks, unroll=1):
            first, place = tile * TOKENS, shares + ((tile - walk) // walks & 1) * c.share_bytes
            following = first + walks * TOKENS
            if thread == 0:
                self.prefetch(given, following, tokens)
            known = [self.known(given, token_of(first, half, tokens)) for half in range(2)]
            acc = cute.make_rmem_tensor((4, COLUMNS, STREAMS), Float32)
            self.multiply(acc, fn, given, first, tokens)
            for half in cutlass.range_constexpr(2):
                cute.arch.cp_async_wait_group(1)  # of what a lane fetched, the next half is under way
                self.of_token(acc, half, known[half], of_norm, norm, own, place, made, channel, first, tokens)
                self.fetch(given, half, own, channel, following, tokens)
            cute.arch.sync_threads()
            self.add_up(place, made, part, first, tokens)
        cute.arch.cp_async_wait_group(0)  # zeros, for what follows the last tile
        for k in cutlass.range_constexpr(VECTOR):
            for offset in (4, 8, 16):
                of_norm[k] = of_norm[k] + cute.arch.shuffle_sync_bfly(of_norm[k], offset=offset)
        if cute.arch.lane_idx() < 4:
            for k in cutlass.range_constexpr(0, VECTOR, 4):
                target = made.norm + (walk * c.hidden + channel + k)
                put_numbers(target, tuple(of_norm[k + i] for i in range(4)))

    @cute.jit
    def fetch(self, given: Given, half: cutlass.Constexpr, own: Int32, channel: Int32, first: Int32, tokens: Int32):
        """Copies a lane's channels of a token to its own place, as one group: y, dz, x and dx'. There, no lane needs to
        wait for another one. A token after the last is 0."""
        c, token = self.config, first + half * 8 + cute.arch.lane_idx() // 4
        at = Int64(cutlass.min(token, tokens - 1))
        present = Int32(16) if token < tokens else Int32(0)
        flat, streams = at * c.hidden + channel, at * (STREAMS * c.hidden) + channel
        sources = [given.y + flat, given.dz + flat]
        sources += [array + (streams + i * c.hidden) for array in (given.x, given.dnew_x) for i in range(STREAMS)]
        for i, source in enumerate(sources):
            copy_or_zero(in_a_register(own + (half * ROWS + i) * 16 * WARP), source.toint(), present)
        cute.arch.cp_async_commit_group()

    def known(self, given: Given, at: Int64) -> tuple:
        """The numbers of a token: its post and its mix; what it takes streams by, and the first part's last numbers."""
        post, mix = numbers_of(given.post + at * STREAMS, STREAMS), numbers_of(given.mix + at * MIX, MIX)
        return post, mix, numbers_of(given.numbers + (at * ROW + NUMBERS), ROW - NUMBERS)

    @cute.jit
    def prefetch(self, given: Given, first: Int32, tokens: Int32):
        """Brings the numbers of a whole tile into L2."""
        if first + TOKENS <= tokens:
            for array, count in ((given.numbers, ROW), (given.post, STREAMS), (given.mix, MIX)):
                prefetch_bulk((array + Int64(first) * count).toint(), 4 * TOKENS * count)

    @cute.jit
    def multiply(self, acc: cute.Tensor, fn: Int32, given: Given, first: Int32, tokens: Int32):
        """acc <- of a warp's channels and a tile's tokens, what comes by the product with fn."""
        c, lane = self.config, cute.arch.lane_idx()
        row, column = lane // 4, lane % 4
        acc.fill(0.0)
        split = [self.factors(given, token_of(first, half, tokens)) for half in range(2)]
        place = fn + column * c.row_bytes + (cute.arch.warp_idx() * GROUP + row * 4) * 4
        for stream in cutlass.range_constexpr(STREAMS):
            for step in cutlass.range_constexpr(STEPS):
                upper, lower = (
                    tuple(split[half][2 * step + k][which] for k in range(2) for half in range(2)) for which in range(2)
                )
                rows = [place + stream * c.stream_bytes + (2 * step + k) * 4 * c.row_bytes for k in range(2)]
                of_fn = [[in_two(x) for x in load_shared_four(address)] for address in rows]
                for q in cutlass.range_constexpr(COLUMNS):
                    total = tuple(acc[r, q, stream] for r in range(4))
                    above, below = (tuple(of_fn[k][q][which] for k in range(2)) for which in range(2))
                    total = multiply_warp_tf32(total, lower, above)
                    total = multiply_warp_tf32(total, upper, below)
                    total = multiply_warp_tf32(total, upper, above)
                    for r in cutlass.range_constexpr(4):
                        acc[r, q, stream] = total[r]

    def factors(self, given: Given, at: Int64) -> list:
        """The factors of rows of fn that a lane has of a token, each `in_two`: of numbers lane % 4, 4 more, …"""
        numbers = given.numbers + at * ROW
        inverse = load(numbers + (ROW - 1))
        scales = [load(given.scale + i) * inverse for i in range(3)]
        column = cute.arch.lane_idx() % 4
        return [in_two(load(numbers + (column + 4 * i)) * scales[min(i, 2)]) for i in range(2 * STEPS)]

    @cute.jit
    def of_token(
        self,
        acc: cute.Tensor,
        half: cutlass.Constexpr,
        known: tuple,
        of_norm: cute.Tensor,
        norm: list,
        own: Int32,
        place: Int32,
        made: Made,
        channel: Int32,
        first: Int32,
        tokens: Int32,
    ):
        """The gradients of a lane's channels of a token; its shares of those of post and mix, into shared memory."""
        c, lane = self.config, cute.arch.lane_idx()
        row = half * 8 + lane // 4
        token, at = first + row, token_of(first, half, tokens)
        rows = [load_shared_words(own + (half * ROWS + i) * 16 * WARP) for i in range(ROWS)]
        y, dz, xs, dxs = rows[0], rows[1], rows[2 : 2 + STREAMS], rows[2 + STREAMS :]
        post, mix, (*takes, of_u, along, shrinking, _) = known
        shares = cute.make_rmem_tensor(SHARES, Float32)
        shares.fill(0.0)
        out_y, out_x = (
            cute.make_rmem_tensor(WORDS, cutlass.Uint32),
            cute.make_rmem_tensor((WORDS, STREAMS), cutlass.Uint32),
        )
        for w in cutlass.range_constexpr(WORDS):
            streams = [mixed_word(i, w, y, xs, post, mix, self.dtype) for i in range(STREAMS)]
            us, of_streams = pair(joined_word(streams, takes, self.dtype)), [pair(word) for word in streams]
            of_y, of_dz = pair(y[w]), pair(dz[w])
            of_xs, of_dxs = ([pair(words[w]) for words in array] for array in (xs, dxs))
            totals = []
            for k in cutlass.range_constexpr(2):
                i = 2 * w + k
                du = of_dz[k] * norm[i] * of_u - along * us[k]
                of_norm[i] = of_norm[i] + of_dz[k] * us[k] * of_u
                ds = [
                    acc[2 * half + i // 4, i % 4, j] + of_dxs[j][k] + takes[j] * du + shrinking * of_streams[j][k]
                    for j in range(STREAMS)
                ]
                totals.append(
                    [dot(post, ds), *(dot(mix[STREAMS * j : STREAMS * j + STREAMS], ds) for j in range(STREAMS))]
                )
                for j in cutlass.range_constexpr(STREAMS):
                    shares[j] = shares[j] + of_y[k] * ds[j]
                    for source in cutlass.range_constexpr(STREAMS):
                        share = STREAMS + STREAMS * source + j
                        shares[share] = shares[share] + of_xs[source][k] * ds[j]
            out_y[w] = round_pair(totals[0][0], totals[1][0], self.dtype)
            for j in cutlass.range_constexpr(STREAMS):
                out_x[w, j] = round_pair(totals[0][1 + j], totals[1][1 + j], self.dtype)
        if token < tokens:
            put_words(made.y + (at * c.hidden + channel), out_y)
            for j in cutlass.range_constexpr(STREAMS):
                put_words(made.x + ((at * STREAMS + j) * c.hidden + channel), out_x[None, j])
        for i in cutlass.range_constexpr(SHARES):
            shares[i] = of_quad(shares[i])
        if lane % 4 == 0:
            there = place + (cute.arch.warp_idx() * TOKENS + row) * 4 * SHARES
            for i in cutlass.range_constexpr(0, SHARES, 4):
                store_shared_four(there + 4 * i, *(shares[i + k] for k in range(4)))

    @cute.jit
    def add_up(self, place: Int32, made: Made, part: Int32, first: Int32, tokens: Int32):
        """Adds up the warps' shares, in order, a thread four numbers."""
        c, thread = self.config, cute.arch.thread_idx()[0]
        quads = SHARES // 4
        token = first + thread // quads
        if (thread < TOKENS * quads) & (token < tokens):
            total = load_shared_four(place + 16 * thread)
            for warp in cutlass.range_constexpr(1, c.warps):
                others = load_shared_four(place + 16 * thread + warp * 4 * TOKENS * SHARES)
                total = tuple(x + y for x, y in zip(total, others, strict=True))
            there = (Int64(part) * tokens + token) * SHARES + thread % quads * 4
            put_numbers(made.shares + there, total)

    def examples(self, variant: HyperConnectionBackward) -> tuple:
        given = pointers(variant.dtype, "x", "y", *["float32"] * 5, "dnew_x", "dz", "float32")
        return *given, *pointers(variant.dtype, "dx", "dy", "float32", "float32"), i32(), i32()


def token_of(first: Int32, half: int, tokens: Int32) -> Int64:
    """A lane's token of a tile's half, or the last one of all."""
    return Int64(cutlass.min(first + half * 8 + cute.arch.lane_idx() // 4, tokens - 1))


def in_two(x: Float32) -> tuple[Int32, Int32]:
    """The bits of the upper part of a number in tf32, and of the next one."""
    upper = bits_of(x) & UPPER
    return upper, bits_of(x - float_of(upper)) & UPPER


def dot(xs: list, ys: list) -> Float32:
    total = xs[0] * ys[0]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        total = total + x * y
    return total


def compile(variant: HyperConnectionBackward, out_dir: Path) -> Compiled:
    return BackwardStreamsSm90(StreamsConfig(variant.dtype, variant.hidden)).compile(variant, out_dir)
