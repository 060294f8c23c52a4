"""State of a consumer warpgroup of `mla_fwd`, and the numbers that the two hand over to one another."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels.lib.launch import WARPGROUP
from kernels.lib.output import SlabStores
from kernels.lib.rows import ROWS, BoxedRows, RowTile, row_of
from kernels.lib.softmax import RowResults, Softmax
from kernels.lib.turned import Turn
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    operand_a,
    operand_b,
    register_operand,
    tiled_mma,
    transposed,
)

from .smem import Barriers, Shared

WARPGROUP_MET = 1  # named barriers, + LEFT and + RIGHT: all threads of the one warpgroup have come
BOTH_MET = 3  # all threads of both


class Rows(NamedTuple):
    """The rows of a tile that a thread holds, with their numbers."""

    tile: RowTile
    boxed: BoxedRows
    results: RowResults


@dataclass(frozen=True)
class Consumer:
    """State that a consumer thread keeps from row tile to row tile: barriers, SMEM, operands and registers."""

    bar: Barriers
    smem: Shared
    thread: Int32
    qk: cute.TiledMma
    pv: cute.TiledMma
    pv_other: cute.TiledMma
    a: cute.Tensor  # Q
    b_own: cute.Tensor  # this side's tile as K
    b_value: tuple[cute.Tensor, ...]  # this side's columns as V, by tile of the pair
    a_other: cute.Tensor  # the other side's P
    scores: cute.Tensor
    p: cute.Tensor  # rounded: this side's, in registers
    out: cute.Tensor
    products: cute.Tensor  # the same registers, by `columns_o`
    softmax: Softmax
    stores: SlabStores | None  # where TMA stores O
    turn: Turn | None  # where q is turned

    @staticmethod
    def of(c: Any, dtype, side: int, bar: Barriers, smem: Shared, output: Any, scaling: Float32 | Turn) -> "Consumer":
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        keys = c.tile_keys[side]
        qk = tiled_mma(dtype, keys, K_MAJOR)
        pv = tiled_mma(dtype, c.columns_o, MN_MAJOR, warpgroup.OperandSource.RMEM)
        pv_other = tiled_mma(dtype, c.columns_o, MN_MAJOR)
        out = accumulator(tiled_mma(dtype, c.half, MN_MAJOR), c.half)
        return Consumer(
            bar,
            smem,
            thread,
            qk=qk,
            pv=pv,
            pv_other=pv_other,
            a=operand_a(qk, smem.q),
            b_own=operand_b(qk, smem.k[side]),
            b_value=tuple(
                operand_b(pv, transposed(cute.local_tile(k, (cute.size(k, mode=[0]), c.half), (0, side))))
                for k in smem.k
            ),
            a_other=operand_a(pv_other, smem.p[1 - side]),
            scores=accumulator(qk, keys),
            p=register_operand(pv, keys, dtype),
            out=out,
            products=cute.make_tensor(out.iterator, pv.partition_shape_C((c.tile_m, c.half))),
            softmax=Softmax.of(cute.make_rmem_tensor(ROWS, Float32) if c.turns else scaling),
            stores=None if c.moves_o else SlabStores(output[0], smem.o[side], WARPGROUP_MET + side, thread),
            turn=scaling if c.turns else None,
        )


@cute.jit
def hand_over(shared: cute.Tensor, side: cutlass.Constexpr, state: cute.Tensor, thread: Int32):
    if thread % 4 == 0:
        for r in cutlass.range_constexpr(ROWS):
            shared[row_of(thread, r), side] = state[r]


@cute.jit
def take_over(shared: cute.Tensor, side: cutlass.Constexpr, state: cute.Tensor, thread: Int32):
    for r in cutlass.range_constexpr(ROWS):
        state[r] = shared[row_of(thread, r), side]
