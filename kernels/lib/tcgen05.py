"""tcgen05 in the shapes attention needs: products, and TMEM as lanes x columns of 32 bits."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from .wgmma import K_MAJOR, SLAB

LANES, COLUMNS = 128, 512  # columns of TMEM
LANE = 1 << 16  # step of one lane in a TMEM address; a column is 1


def tiled_mma(dtype, m: int, n: int, b_major, a_source=tcgen05.OperandSource.SMEM) -> cute.TiledMma:
    """One CTA's m x n product with fp32 accumulation."""
    op = tcgen05.MmaF16BF16Op(dtype, Float32, (m, n, 16), tcgen05.CtaGroup.ONE, a_source, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


# Products by their descriptors, for operands that lie as no tiled product of the DSL has them.

K_STEP = 16  # elements of 16 bits: the depth of a product
ROW_BYTES, ATOM_ROWS = 2 * SLAB, 8  # of a swizzled slab, whose pattern repeats every so many rows
A_MN_MAJOR = 1 << 15  # in an `instruction`: A as well


def instruction(dtype, m: int, n: int, b_mn_major: bool) -> int:
    """The descriptor of an instruction: m x n with fp32 accumulation, A K-major (PTX ISA, table 44)."""
    kind = {Float16: 0, BFloat16: 1}[dtype]
    return 1 << 4 | kind << 7 | kind << 10 | int(b_mn_major) << 16 | n // 8 << 17 | m // 16 << 24


def slab_descriptor(address: Int32, slab_stride: int) -> Int64:
    """A matrix in slabs of 128-byte swizzled rows, from an address in shared memory on (PTX ISA, 9.7.16.4.1).

    Its rows are K-major, or MN-major with slabs at this distance in bytes.
    """
    fixed = slab_stride // 16 << 16 | ATOM_ROWS * ROW_BYTES // 16 << 32 | 1 << 46 | 2 << 61
    return Int64(fixed) | Int64(address & 0x3FFFF) >> 4


@dataclass(frozen=True)
class Slabs:
    """`slab_descriptor`s of places in a matrix; only the first of their two words differs from place to place."""

    first: Int32

    @staticmethod
    def of(address: Int32, slab_stride: int = 16) -> "Slabs":
        return Slabs((address & 0x3FFFF) >> 4 | slab_stride // 16 << 16)

    @dsl_user_op
    def at(self, offset: int, *, loc=None, ip=None) -> Int64:
        """The descriptor so many bytes on."""
        second = Int32(ATOM_ROWS * ROW_BYTES // 16 | 1 << 14 | 2 << 29).ir_value(loc=loc, ip=ip)
        words = (self.first + offset // 16).ir_value(loc=loc, ip=ip), second
        pair = vector.from_elements(ir.VectorType.get([2], Int32.mlir_type, loc=loc), words, loc=loc, ip=ip)
        return Int64(llvm.bitcast(Int64.mlir_type, pair, loc=loc, ip=ip))


Collector = nvvm.Tcgen05MMACollectorOp  # FILL keeps A of a product, USE and LASTUSE take it for the next one


@dsl_user_op
def multiply(
    d: Int32,
    a: Int32 | Int64,
    b: Int64,
    kind: int,
    adds: Boolean,
    cluster: int,
    collector: Collector = Collector.DISCARD,
    rows: int = 64,
    *,
    loc=None,
    ip=None,
) -> None:
    """D (+)= A B, issued by one thread: D in TMEM, A in TMEM or by a descriptor, B by a descriptor.

    `kind` is an `instruction`. Each CTA has so many rows; 64 take all lanes: in a pair, or in one CTA by `.ws`, which
    keeps no A.
    """

    def in_tmem(x: Int32):
        kind = llvm.PointerType.get(cute.AddressSpace.tmem.value)
        return llvm.inttoptr(kind, x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)

    left = in_tmem(a) if isinstance(a, Int32) else a.ir_value(loc=loc, ip=ip)
    others = (x.ir_value(loc=loc, ip=ip) for x in (b, Int32(kind), Boolean(adds)))
    if cluster == 1 and rows < LANES:
        nvvm.tcgen05_mma_ws(nvvm.Tcgen05MMAKind.F16, in_tmem(d), left, *others, loc=loc, ip=ip)
    else:
        group = nvvm.CTAGroupKind.CTA_2 if cluster == 2 else nvvm.CTAGroupKind.CTA_1
        kept = {"collector_op": collector, "loc": loc, "ip": ip}
        nvvm.tcgen05_mma(nvvm.Tcgen05MMAKind.F16, group, in_tmem(d), left, *others, **kept)


# Between TMEM and registers. A warp has 32 of the lanes.


@cute.jit
def begin_load(base: cute.Pointer, values: cute.Tensor, thread: Int32):
    """values <- this thread's lane, as many columns from base on; the caller waits."""
    count = cutlass.const_expr(cute.size(values))
    copy_lanes(tcgen05.Ld32x32bOp(tcgen05.Repetition(count)), lanes(base, count), values, thread)


@cute.jit
def load_lanes(base: cute.Pointer, values: cute.Tensor, thread: Int32):
    """`begin_load`, and waits."""
    begin_load(base, values, thread)
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def store_lanes(base: cute.Pointer, values: cute.Tensor, thread: Int32):
    """This thread's lane, as many columns from base on, <- values of 32 bits; waits."""
    count = cutlass.const_expr(math.gcd(cute.size(values), 32))  # others' kernels, which run on B200s, store no more
    for first in cutlass.range_constexpr(0, cute.size(values), count):
        bits = cute.make_tensor(cute.recast_ptr(values.iterator + first, dtype=Float32), cute.make_layout(count))
        copy_lanes(tcgen05.St32x32bOp(tcgen05.Repetition(count)), lanes(base + first, count), bits, thread)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def scale_lanes(
    base: cute.Pointer,
    columns: cutlass.Constexpr,
    factor: Float32,
    thread: Int32,
    at_a_time: cutlass.Constexpr = SLAB,
):
    """So many columns of this thread's lane times a factor, so many of them at a time."""
    chunk = cute.make_rmem_tensor(at_a_time, Float32)
    for i in cutlass.range(columns // at_a_time, unroll=1):
        load_lanes(base + i * at_a_time, chunk, thread)
        for j in cutlass.range_constexpr(at_a_time):
            chunk[j] = chunk[j] * factor
        store_lanes(base + i * at_a_time, chunk, thread)


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
def commit(barrier: cute.Pointer, cluster: cutlass.Constexpr = 1):
    """Arrive when all products issued so far are done, in both CTAs of a pair."""
    with cute.arch.elect_one():
        if cutlass.const_expr(cluster == 2):
            tcgen05.commit(barrier, 0b11, tcgen05.CtaGroup.TWO)
        else:
            tcgen05.commit(barrier)


@dsl_user_op
def before_thread_sync(*, loc=None, ip=None) -> None:
    """Orders this thread's accesses to TMEM before the signal that tells others of them."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def after_thread_sync(*, loc=None, ip=None) -> None:
    """Orders this thread's later accesses to TMEM after the signal that it has waited for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
