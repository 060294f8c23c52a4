"""O as codes of e4m3, with a scale for every SCALED columns of a row: from the accumulator's registers to memory.

    scale = 2^k, the least with amax <= 448 2^k          amax is at least LEAST; a NaN has no say in it
    code  = round(o / scale)                             of o in float32: it is rounded once

A scale is a power of two, so that a consumer may keep its exponent alone. All is computed of the exponent's bits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32

from .launch import WARPGROUP
from .output import SlabStores
from .ptx import bits_of, float_of, store_shared_e4m3
from .rows import ROWS, BoxedRows, RowTile, row_of, store
from .softmax import by_row
from .wgmma import slab_layout, tma_tiles

CODE = Float8E4M3FN
SCALED = 128  # columns of a scale, and bytes of a row of swizzled SMEM
CHUNK = 16  # bytes that are swizzled together
PAIR = 2  # columns of a block of eight that a lane of a quad holds
LEAST = 1e-10  # the least amax, so that zeros have a scale
MANTISSA = 23  # bits of a float32


def seen_as_codes(slab: cute.Tensor) -> cute.Tensor:
    """A slab's SMEM as (rows, SCALED) codes."""
    layout = slab_layout(CODE, cute.size(slab, mode=[0]), SCALED)
    return cute.make_tensor(cute.recast_ptr(slab.iterator, layout.inner, dtype=CODE), layout.outer)


@dataclass(frozen=True)
class CodeStores(SlabStores):
    """The same of codes: a place has as many rows of SCALED codes."""

    @cute.jit
    def store(self, i: cutlass.Constexpr, slabs: list[cute.Tensor], factor: cute.Tensor, target: cute.Tensor):
        """Stores block i: factor * slabs, rounded on the way, to `target`; gives the scale of each row of a thread."""
        if cutlass.const_expr(i >= len(self.places)):
            self.await_reads(len(self.places) - 1)
        place, rows = self.places[i % len(self.places)], [by_row(slab) for slab in slabs]
        most = [greatest(rows, r) for r in range(ROWS)]
        found = [scale_and_inverse(cute.arch.fmax(most[r] * factor[r], LEAST)) for r in range(ROWS)]
        for r in cutlass.range_constexpr(ROWS):
            row, (_, inverse) = row_of(self.thread, r), found[r]
            first = place.iterator.toint() + row * SCALED + row % 8 * CHUNK + self.thread % 4 * PAIR
            numbers = [x[r, k] * (factor[r] * inverse) for x in rows for k in range(cute.size(x, mode=[1]))]
            for k in cutlass.range_constexpr(0, len(numbers), 2 * PAIR):
                chunk = first ^ (k // (2 * PAIR) * CHUNK)
                for half in cutlass.range_constexpr(2):
                    store_shared_e4m3(chunk, half * CHUNK // 2, *numbers[k + half * PAIR : k + (half + 1) * PAIR])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=WARPGROUP)
        if self.is_issuer():
            gmem, smem = tma_tiles(self.atom, target, place)
            with cute.arch.elect_one():
                cute.copy(self.atom, smem, gmem)
                cute.arch.cp_async_bulk_commit_group()
        return [scale for scale, _ in found]


@cute.jit
def store_scales(
    found: list,
    scales: cute.Pointer,
    tile: RowTile,
    boxed: BoxedRows,
    block: cutlass.Constexpr,
    d: cutlass.Constexpr,
    thread: Int32,
):
    """scales[row, block] <- those that were found, for the rows that exist."""
    for r in cutlass.range_constexpr(ROWS):
        exists, query, head = tile.place(boxed, r)
        if exists & (thread % 4 == 0):
            store(scales + (tile.row_index(query, head) * (d // SCALED) + block), found[r])


def greatest(slabs: list[cute.Tensor], r: int) -> Float32:
    """The greatest |x| of a row, in all lanes of its quad; NaN does not count. Four chains have a quarter of the
    latency of one.
    """
    chains = [Float32(0.0)] * 4
    for slab in slabs:
        for i in range(cute.size(slab, mode=[1])):
            chains[i % 4] = cute.arch.fmax(chains[i % 4], cute.math.absf(slab[r, i]))
    a, b, c, d = chains
    return cute.arch.warp_reduction_max(cute.arch.fmax(cute.arch.fmax(a, b), cute.arch.fmax(c, d)), threads_in_group=4)


def scale_and_inverse(amax: Float32) -> tuple[Float32, Float32]:
    """The least power of two of which 448 = 1.75 2^8 times are not less than amax; and 1 over it."""
    over = (1 << MANTISSA) - 1 - (3 << MANTISSA - 2)  # carries into the exponent where the mantissa is beyond 1.75
    bits = (bits_of(amax) + over & 0xFF << MANTISSA) - (8 << MANTISSA)
    return float_of(bits), float_of((254 << MANTISSA) - bits)
