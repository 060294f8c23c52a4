"""Vectors of a row: loads, stores and rotations."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.lib.ptx import round_pair

from .config import INDEX_D, VECTOR, Config


def token(row: Int32, heads: Int32) -> Int64:
    return Int64(Uint32(row) // Uint32(heads))


def read(source: cute.Pointer, target: cute.Tensor) -> None:
    cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(VECTOR)), target)


@cute.jit
def index_rows(
    c: cutlass.Constexpr[Config],
    x: cute.Pointer,
    table: cute.Pointer,
    rows: Int32,
    heads: Int32,
    row0: Int32,
    lane: Int32,
) -> tuple[cute.Tensor, cute.Tensor]:
    """A lane's numbers of rows of INDEX_D, (VECTOR, row), and their rotations: cos 1, sin 0 for what is not turned."""
    first_lane = c.lanes - c.dims // VECTOR  # whose numbers are rotated
    given = cute.make_rmem_tensor((VECTOR, c.tile_n), x.dtype)
    rotations = cute.make_rmem_tensor((VECTOR, c.tile_n), Float32)
    given.fill(0.0)
    for i in cutlass.range_constexpr(c.tile_n):
        row = row0 + i * c.at_once
        if row < rows:
            read(x + (Int64(row) * INDEX_D + lane * VECTOR), given[None, i])
            turns = table + (token(row, heads) * c.dims + cutlass.max(lane - first_lane, 0) * VECTOR)
            read(turns, rotations[None, i])
    if lane < first_lane:
        for i in cutlass.range_constexpr(c.tile_n):
            for k in cutlass.range_constexpr(VECTOR):
                rotations[k, i] = Float32((k + 1) % 2)  # cos 1, sin 0
    return given, rotations


def write(target: cute.Pointer, values: cute.Tensor) -> None:
    """Writes rounded numbers."""
    packed = cute.make_rmem_tensor(VECTOR // 2, Uint32)
    for k in range(VECTOR // 2):
        packed[k] = round_pair(values[2 * k], values[2 * k + 1], target.dtype)
    place = cute.recast_ptr(target, dtype=Uint32).align(16)
    cute.autovec_copy(packed, cute.make_tensor(place, cute.make_layout(VECTOR // 2)))


def as_float(x: cute.Tensor) -> cute.Tensor:
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.store(x.load().to(Float32))
    return values


def rotate(values: cute.Tensor, rotations: cute.Tensor, direction: Float32) -> None:
    """Rotates pair by pair; rotations has cos and sin of each pair."""
    for k in range(VECTOR // 2):
        a, b, cos, sin = values[2 * k], values[2 * k + 1], rotations[2 * k], rotations[2 * k + 1] * direction
        values[2 * k], values[2 * k + 1] = a * cos - b * sin, a * sin + b * cos


def total(products: list[tuple[cute.Tensor, cute.Tensor]]) -> Float32:
    """The sum of the products of pairs of chunks, over the warp."""
    found = Float32(0.0)
    for a, b in products:
        for k in range(VECTOR):
            found = found + a[k] * b[k]
    for offset in (16, 8, 4, 2, 1):
        found = found + cute.arch.shuffle_sync_bfly(found, offset=offset)
    return found
