"""The parts that kernels of hyper-connections share: loads of a lane, and how streams are mixed and joined."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.lib.ptx import copy_bulk, float_of, load_four_words, round_pair
from kernels.lib.softmax import LOG2_E, exp2

from .config import NUMBERS, STREAMS, VECTOR

WORDS = VECTOR // 2  # of a lane's channels of a token's stream
MIX = STREAMS * STREAMS
UPPER = -(1 << 13)  # the bits that tf32 has of float32


@cute.jit
def load_fn(c: cutlass.Constexpr, fn: Int32, barriers: cute.Pointer, source: cute.Pointer, rank: Int32):
    """A warp loads fn of a CTA's channels, stream by stream, a lane a row."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(STREAMS):
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, NUMBERS * 4 * c.channels)
        cute.arch.sync_warp()
        if lane < NUMBERS:
            row = source + ((Int64(lane) * STREAMS + i) * c.hidden + rank * c.channels)
            copy_bulk(fn + i * c.stream_bytes + lane * c.row_bytes, row.toint(), 4 * c.channels, barriers + i)


def mixed_word(i: int, w: int, y: list, xs: list, post: list, mix: list, dtype) -> Uint32:
    """A word of x' of stream i, from the words of y and of x."""
    total = [post[i] * v for v in pair(y[w])]
    for j in range(STREAMS):
        total = [t + mix[STREAMS * j + i] * v for t, v in zip(total, pair(xs[j][w]), strict=True)]
    return round_pair(total[0], total[1], dtype)


def joined_word(streams: list, pre, dtype) -> Uint32:
    """A word of u, the streams as one, from those of x'."""
    total = [Float32(0.0), Float32(0.0)]
    for i, word in enumerate(streams):
        total = [t + pre[i] * v for t, v in zip(total, pair(word), strict=True)]
    return round_pair(total[0], total[1], dtype)


def inverse_rms(squares: Float32, count: int, eps: Float32) -> Float32:
    """1 / sqrt(mean + eps) of the sum of so many squares."""
    return cute.math.rsqrt(squares * (1.0 / count) + eps, fastmath=True)


def sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + exp2(-x * LOG2_E))


def of_quad(x: Float32) -> Float32:
    """The sum over the four lanes that share a row of a product."""
    for offset in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x


def pair_bits(word: Uint32) -> tuple[Int32, Int32]:
    """A pair of bfloat16 as the bits of two float32."""
    return Int32(word << Uint32(16)), Int32(word & Uint32(0xFFFF0000))


def pair(word: Uint32) -> tuple[Float32, Float32]:
    low, high = pair_bits(word)
    return float_of(low), float_of(high)


def words_of(source: cute.Pointer) -> list[Uint32]:
    """The words of a lane's channels, loaded where this stands."""
    return [Uint32(word) for word in load_four_words(source.toint())]


def put_words(target: cute.Pointer, words: cute.Tensor) -> None:
    place = cute.recast_ptr(target, dtype=Uint32).align(16)
    cute.autovec_copy(words, cute.make_tensor(place, cute.make_layout(WORDS)))


def put_numbers(target: cute.Pointer, numbers: tuple) -> None:
    """Writes four float32 numbers at once."""
    values = cute.make_rmem_tensor(4, Float32)
    for i, x in enumerate(numbers):
        values[i] = x
    cute.autovec_copy(values, cute.make_tensor(target.align(16), cute.make_layout(4)))


def numbers_of(source: cute.Pointer, count: int) -> list[Float32]:
    """float32 numbers, a multiple of four, loaded where this stands: those of all tiles would fill registers."""
    place = source.toint()
    return [float_of(word) for i in range(0, count, 4) for word in load_four_words(place + 4 * i)]
