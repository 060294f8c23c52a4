"""Vectors of a row: loads, stores and rotations."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.lib.wgmma import round_pair

from .config import VECTOR


def token(row: Int32, heads: Int32) -> Int64:
    return Int64(Uint32(row) // Uint32(heads))


def read(source: cute.Pointer, target: cute.Tensor) -> None:
    cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(VECTOR)), target)


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
