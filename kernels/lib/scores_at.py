"""Code that kernels of an indexer's scores at given entries share on all chips: their host side, and what loads.

A CTA has a query. Its one warpgroup gathers a tile of keys by cp.async while it works on the one before, and an SM has
several CTAs, so that others' products run under one's sums.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from kernels.abi import IndexerScoresAt

from .indexer import HEADS, D
from .launch import WARPGROUP, Kernel, element_type, i32, pointers
from .selections import LANES_A_ROW, Selection, SelectionOperands
from .wgmma import SLAB

THREADS = WARPGROUP


@dataclass(frozen=True)
class ScoresAtConfig:
    """Compile-time choices; every size follows from them.

    A config also has `gradient`, `ctas` of an SM, `tile_n`, and `stages`: tiles of keys that fit into shared memory.
    """

    heads: int
    dtype: str

    @property
    def element_bytes(self) -> int:
        return element_type(self.dtype).width // 8

    @property
    def slabs(self) -> int:
        """Slabs of a row of q or of keys: each is 128 bytes, copied as 64 numbers of 16 bits, whatever they are."""
        return D * self.element_bytes // (2 * SLAB)

    @property
    def tile_m(self) -> int:
        return self.heads

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": self.ctas, "preferred_smem_carveout": 100}  # without it the DSL asks a driver

    def __post_init__(self):
        if self.heads not in HEADS:
            raise ValueError(f"heads must be 16, 32 or 64, got {self.heads}")


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    s_q: Int32
    s_c: Int32
    topk: Int32


class Arrays(NamedTuple):
    q: cute.Pointer  # [b, s_q, heads, D]
    k: cute.Pointer  # [b, s_c, D]
    weights: cute.Pointer  # float32 [b, s_q, heads]
    indices: cute.Pointer  # int32 [b, s_q, topk]
    scores: cute.Pointer  # float32 [b, s_q, topk]: a result, or its cotangent


class Gradients(NamedTuple):
    dq: cute.Pointer  # like q
    dk: cute.Pointer  # float32 [b, s_c, D], to which the kernel adds
    dweights: cute.Pointer  # float32 [b, s_q, heads]


class ScoresAtKernel(Kernel):
    """The host side of such a kernel, `kernel(arrays, to, n)`, where `to` is None without gradients; and its loads."""

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        weights: cute.Pointer,
        indices: cute.Pointer,
        scores: cute.Pointer,
        dq: cute.Pointer,  # this, dk and dweights are written where gradients are wanted
        dk: cute.Pointer,
        dweights: cute.Pointer,
        b: Int32,
        s_q: Int32,
        s_c: Int32,
        topk: Int32,
        stream: cuda.CUstream,
    ):
        to = Gradients(dq, dk, dweights) if cutlass.const_expr(self.config.gradient) else None
        arrays = Arrays(q, k, weights, indices, scores)
        self.launch(arrays, to, Extents(s_q, s_c, topk), ctas=b * s_q, stream=stream)

    def begin_query(
        self, arrays: Arrays, n: Extents, tile: cute.Tensor, thread: Int32
    ) -> tuple[Int64, Int32, Selection]:
        """Starts the copy of Q. Returns this CTA's query, counted over the whole batch; its batch entry; and the keys
        that it names."""
        row = Int64(cute.arch.block_idx()[0])
        entry = Int32(cute.arch.block_idx()[0] // n.s_q)
        d, q, k = self.config.slabs * SLAB, copied(arrays.q), copied(arrays.k)
        self.copy_q(q + row * (self.config.heads * d), tile, thread)
        operands = SelectionOperands(k, arrays.indices, arrays.indices, n.s_c, n.s_c, n.topk)
        keys = k + Int64(entry) * n.s_c * d
        named = Selection(operands, self.config.tile_n, d, keys, arrays.indices + row * n.topk, Int32(0), n.topk)
        return row, entry, named

    @cute.jit
    def copy_q(self, q: cute.Pointer, tile: cute.Tensor, thread: Int32):
        """Copies a query's heads, which are like contiguous keys."""
        heads = self.config.heads
        all_of_them = SelectionOperands(q, q, q, Int32(heads), Int32(heads), Int32(heads))
        rows = Selection(all_of_them, heads, self.config.slabs * SLAB, q, Int32(0), Int32(0), Int32(heads))
        wanted = cute.make_rmem_tensor(heads * LANES_A_ROW // THREADS, Int32)
        for i in cutlass.range_constexpr(cute.size(wanted)):
            wanted[i] = rows.position(Int32(0), i, thread, THREADS)
        rows.gather(tile, wanted, thread, range(self.config.slabs), THREADS)

    @cute.jit
    def gather(self, keys: cute.Tensor, named: Selection, t: Int32, wanted: cute.Tensor, thread: Int32):
        """Gathers tile t, whose entries were looked up, as one group; then looks up the entries of the next."""
        if t < named.tiles:
            named.mark_absent(t, wanted, thread, THREADS)
            tile = keys[None, None, t % self.config.stages]
            named.gather(tile, wanted, thread, range(self.config.slabs), THREADS)
            named.prefetch_indices(t + 1, wanted, thread, THREADS)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def begin(self, keys: cute.Tensor, named: Selection, thread: Int32) -> cute.Tensor:
        """Starts the copies of all tiles that there is room for, except the last."""
        wanted = cute.make_rmem_tensor(self.config.tile_n * LANES_A_ROW // THREADS, Int32)
        named.prefetch_indices(Int32(0), wanted, thread, THREADS)
        for t in cutlass.range_constexpr(self.config.stages - 1):
            self.gather(keys, named, Int32(t), wanted, thread)
        return wanted

    @cute.jit
    def await_tile(self):
        """Waits until the next tile is there for all threads to multiply."""
        cute.arch.cp_async_wait_group(self.config.stages - 2)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

    def examples(self, variant: IndexerScoresAt) -> tuple:
        arrays = ("q", "k", "float32", "int32", "float32", "dq", "float32", "float32")
        return *pointers(variant.dtype, *arrays), *(i32() for _ in range(4))


def copied(p: cute.Pointer) -> cute.Pointer:
    """As what numbers of 8 bits are copied as."""
    return p if p.dtype.width == 16 else cute.recast_ptr(p, dtype=BFloat16)
