"""tcgen05 in the shapes attention needs: products of one CTA, and TMEM as lanes x columns of 32 bits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from .wgmma import SLAB

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
LANES, COLUMNS = 128, 512  # of TMEM
LANE = 1 << 16  # of a TMEM address; a column is 1


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


def tmem_lanes(base: cute.Pointer, columns: int) -> cute.Tensor:
    return cute.make_tensor(base, cute.make_layout((LANES, columns), stride=(LANE, 1)))


@cute.jit
def tmem_copy(op: cutlass.Constexpr, lanes: cute.Tensor, values: cute.Tensor, thread: Int32):
    """Between the lanes of this thread's warp and its registers; neither is ready before its wait."""
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), lanes).get_slice(thread)
    if cutlass.const_expr(isinstance(op, tcgen05.St32x32bOp)):
        there = copy.partition_D(lanes)
        here = copy.partition_S(cute.make_identity_tensor(lanes.shape))
        cute.copy(copy, cute.make_tensor(values.iterator, cute.make_layout(here.shape)), there)
    else:
        there = copy.partition_S(lanes)
        here = copy.partition_D(cute.make_identity_tensor(lanes.shape))
        cute.copy(copy, there, cute.make_tensor(values.iterator, cute.make_layout(here.shape)))


@cute.jit
def commit(barrier: cute.Pointer):
    """Arrive when all products issued so far are done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@dsl_user_op
def before_thread_sync(*, loc=None, ip=None) -> None:
    """Order what was done to TMEM before what tells others of it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def after_thread_sync(*, loc=None, ip=None) -> None:
    """Order what will be done to TMEM after what others told."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@cute.jit
def sync_with_tmem():
    before_thread_sync()
    cute.arch.sync_threads()
    after_thread_sync()
