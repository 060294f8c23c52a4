"""WGMMA and TMA in the shapes attention needs: K-major tiles of 64-column slabs, 128-byte swizzled."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from .ptx import round_pair, sleep_if_negative

SLAB = 64  # columns of 2-byte elements in a 128-byte swizzled row
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def slab_layout(dtype, *shape: int) -> cute.ComposedLayout:
    """(rows, columns, ...) in slabs of rows x 64 columns: what one TMA box writes and a K-major operand reads."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def operand_layout(dtype, rows: int, columns: int) -> cute.ComposedLayout:
    """(rows, columns) of a K-major operand: in slabs, or by 16 columns, 32-byte swizzled, where those do not divide."""
    if columns % SLAB == 0:
        return slab_layout(dtype, rows, columns)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, dtype)
    return cute.tile_to_shape(atom, (rows, columns), order=(0, 1))


def seen_as(tile: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
    """The same SMEM seen in another layout."""
    return cute.make_tensor(cute.recast_ptr(tile.iterator, layout.inner, dtype=tile.element_type), layout.outer)


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """(rows, columns, ...) seen as (columns, rows, ...): K's tile read as V."""
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0, *range(2, cute.rank(tile))]))


def tiled_mma(dtype, n: int, b_major, a_source=warpgroup.OperandSource.SMEM, a_major=K_MAJOR) -> cute.TiledMma:
    """One warpgroup's 64 x n product with fp32 accumulation."""
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, n, 16), a_source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def operand_a(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))


def operand_b(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def accumulator(mma: cute.TiledMma, n: int) -> cute.Tensor:
    return cute.make_rmem_tensor(mma.partition_shape_C((64, n)), Float32)


def register_operand(mma: cute.TiledMma, k: int, dtype) -> cute.Tensor:
    """The A operand 64 x k in registers; element order is that of a 64 x k accumulator."""
    return cute.make_rmem_tensor(mma.partition_shape_A((64, k)), dtype)


@cute.jit
def round_to(operand: cute.Tensor, acc: cute.Tensor):
    """operand <- acc rounded, element by element in the fragments' common order."""
    pairs = cute.make_tensor(
        cute.recast_ptr(operand.iterator, dtype=cutlass.Uint32), cute.make_layout(cute.size(acc) // 2)
    )
    flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = round_pair(flat[2 * i], flat[2 * i + 1], operand.element_type)


def wait_after(sum0: Float32, sum1: Float32) -> None:
    """Waits for all products, and not before these sums of exponentials are known.

    ptxas sees no reason to wait late, and moves the wait before the softmax that must run under the products. So a
    sleep depends on the sums, and no wait may pass it. A sum is never negative, so the sleep never runs.
    """
    sleep_if_negative(sum0, sum1)
    warpgroup.wait_group(0)


@cute.jit
def multiply(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    fresh: bool | cutlass.Boolean = False,
    blocks: cutlass.Constexpr = None,
):
    """acc (+)= a b over K, or over some of its 16-wide blocks, issued and committed as one group; the caller waits.

    `fresh` products do not read acc, whatever it holds; it may be known at run time only.
    """
    mma = cute.make_tiled_mma(cute.make_mma_atom(mma.op))  # its accumulate flag is set below: a value of this region
    warpgroup.fence()
    blocks = range(cute.size(a, mode=[2])) if blocks is None else blocks
    for i, k in enumerate(blocks):
        mma.set(warpgroup.Field.ACCUMULATE, True if i else not_(fresh))
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


def not_(x: bool | cutlass.Boolean) -> bool | cutlass.Boolean:
    return not x if isinstance(x, bool) else x == cutlass.Boolean(False)


def tma_atom(op, gmem: cute.Tensor, rows: int, columns: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Copies of (rows, columns) slab tiles of gmem, whose first two modes these are."""
    return cpasync.make_tiled_tma_atom(op, gmem, slab_layout(gmem.element_type, rows, columns), (rows, columns))


def tma_tiles(atom: cute.CopyAtom, gmem: cute.Tensor, smem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Both sides of a TMA copy, (gmem, smem), whose first two modes are the tile: ((tile), rest...)."""
    tiles = (cute.group_modes(side, 0, 2) for side in (smem, gmem))
    s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), *tiles)
    return g, s


@cute.jit
def store_rows(mma: cute.TiledMma, acc: cute.Tensor, rounded: cute.Tensor, tile: cute.Tensor, thread: cutlass.Int32):
    """An accumulator that was rounded by `round_to` -> the 64-row SMEM tile, by stmatrix."""
    store_matrices(mma, cute.make_tensor(rounded.iterator, acc.layout), tile, thread, False)


@cute.jit
def store_columns(mma: cute.TiledMma, acc: cute.Tensor, tile: cute.Tensor, thread: cutlass.Int32):
    """Accumulator -> the SMEM tile of its n columns, each a row of 64: `store_rows` of the transposed, rounded here."""
    rounded = cute.make_rmem_tensor_like(acc, tile.element_type)
    rounded.store(acc.load().to(tile.element_type))
    store_matrices(mma, rounded, transposed(tile), thread, True)


@cute.jit
def store_matrices(mma, rounded: cute.Tensor, tile: cute.Tensor, thread: cutlass.Int32, transpose: cutlass.Constexpr):
    matrices = min(4, cute.size(rounded) // 2)  # of 8 x 8; a thread has two elements of each
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose, matrices), tile.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(tile))


@cute.jit
def zero_rows(
    tile: cute.Tensor,
    first: cutlass.Int32,
    thread: cutlass.Int32,
    threads: cutlass.Constexpr,
    stop: cutlass.Int32 | None = None,
):
    """Zero the rows from `first` on, or those before `stop`, of a (rows, columns) slab tile.

    The swizzle permutes 16-byte chunks within a row's 128 bytes, so whole rows may be written as they lie.
    """
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    chunks, words = SLAB // 8, cute.recast_ptr(tile.iterator, dtype=cutlass.Uint32)
    per_row = chunks * (columns // SLAB)
    zeros = cute.make_rmem_tensor(4, cutlass.Uint32)
    zeros.fill(0)
    stop = rows if cutlass.const_expr(stop is None) else stop
    for i in cutlass.range(thread, (stop - first) * per_row, threads, unroll=1):
        row, chunk = first + i // per_row, i % per_row
        place = words + ((chunk // chunks * rows + row) * chunks + chunk % chunks) * 4
        cute.autovec_copy(zeros, cute.make_tensor(place.align(16), cute.make_layout(4)))
    cute.arch.fence_proxy("async.shared", space="cta")
