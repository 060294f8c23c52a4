"""tcgen05 in the shapes attention needs: products of one CTA, and TMEM as lanes x columns of 32 bits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from kernels.lib.wgmma import K_MAJOR, SLAB

LANES, COLUMNS = 128, 512  # columns of TMEM
LANE = 1 << 16  # step of one lane in a TMEM address; a column is 1


@cute.jit
def write_row(tile: cute.Tensor, row: Int32, column: Int32, packed: cute.Tensor):
    """Pairs of elements -> a row of a (rows, SLAB) tile from a column on, in 16-byte chunks as the swizzle has them."""
    for i in cutlass.range_constexpr(cute.size(packed) // 4):
        chunk = (column // 8 + i) ^ (row % 8)
        place = cute.recast_ptr(tile.iterator, dtype=Uint32) + (row * (SLAB // 2) + chunk * 4)
        cute.autovec_copy(
            cute.make_tensor(packed.iterator + 4 * i, cute.make_layout(4)),
            cute.make_tensor(place.align(16), cute.make_layout(4)),
        )


def tiled_mma(dtype, m: int, n: int, b_major, a_source=tcgen05.OperandSource.SMEM) -> cute.TiledMma:
    """One CTA's m x n product with fp32 accumulation."""
    op = tcgen05.MmaF16BF16Op(dtype, Float32, (m, n, 16), tcgen05.CtaGroup.ONE, a_source, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


# Between TMEM and registers. A warp has 32 of the lanes; these functions wait for its loads and stores.


@cute.jit
def load_lanes(base: cute.Pointer, values: cute.Tensor, thread: Int32):
    """values <- this thread's lane, as many columns from base on."""
    count = cutlass.const_expr(cute.size(values))
    copy_lanes(tcgen05.Ld32x32bOp(tcgen05.Repetition(count)), lanes(base, count), values, thread)
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def load_half_lanes(tile: cute.Tensor, values: cute.Tensor, thread: Int32):
    """For a tile in 16 lanes of each warp's 32: each of two threads gets half of a lane's columns."""
    op = tcgen05.Ld16x32bx2Op(tcgen05.Repetition(cutlass.const_expr(cute.size(values))))
    copy_lanes(op, tile, values, thread)
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def store_lanes(base: cute.Pointer, values: cute.Tensor, thread: Int32):
    """This thread's lane, as many columns from base on, <- values of 32 bits."""
    count = cutlass.const_expr(cute.size(values))
    bits = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Float32), values.layout)
    copy_lanes(tcgen05.St32x32bOp(tcgen05.Repetition(count)), lanes(base, count), bits, thread)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def scale_lanes(base: cute.Pointer, columns: cutlass.Constexpr, factor: Float32, thread: Int32):
    chunk = cute.make_rmem_tensor(SLAB, Float32)
    for i in cutlass.range(columns // SLAB, unroll=1):
        load_lanes(base + i * SLAB, chunk, thread)
        for j in cutlass.range_constexpr(SLAB):
            chunk[j] = chunk[j] * factor
        store_lanes(base + i * SLAB, chunk, thread)


def lanes(base: cute.Pointer, columns: int) -> cute.Tensor:
    return cute.make_tensor(base, cute.make_layout((LANES, columns), stride=(LANE, 1)))


@cute.jit
def copy_lanes(op: cutlass.Constexpr, tile: cute.Tensor, values: cute.Tensor, thread: Int32):
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), tile).get_slice(thread)
    coordinates = cute.make_identity_tensor(tile.shape)
    if cutlass.const_expr(isinstance(op, tcgen05.St32x32bOp)):
        here = cute.make_tensor(values.iterator, cute.make_layout(copy.partition_S(coordinates).shape))
        cute.copy(copy, here, copy.partition_D(tile))
    else:
        here = cute.make_tensor(values.iterator, cute.make_layout(copy.partition_D(coordinates).shape))
        cute.copy(copy, copy.partition_S(tile), here)


@cute.jit
def commit(barrier: cute.Pointer):
    """Arrive when all products issued so far are done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@dsl_user_op
def before_thread_sync(*, loc=None, ip=None) -> None:
    """Orders this thread's accesses to TMEM before the signal that tells others of them."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def after_thread_sync(*, loc=None, ip=None) -> None:
    """Orders this thread's later accesses to TMEM after the signal that it has waited for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@cute.jit
def sync_with_tmem():
    before_thread_sync()
    cute.arch.sync_threads()
    after_thread_sync()
