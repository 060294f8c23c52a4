"""The lightning indexer's scores of keys in 4 bits, for Hopper: sum over h of weights[t, h] * max(q[t, h] . k[s], 0).

As in `indexer_scores_sm90`, whose loads these are, the 64 rows of a product are keys. They come from registers: each of
four consumer warpgroups decodes its quarter of a tile to bf16, exactly, and multiplies it by the heads of one query
after the other.

    producer warp    Q of a block    K0  K1  K2 ...     TMA, 68 bytes a key
    consumer WG i    keys 64 i .. 64 i + 63             decode | product | sum | product of the next query | sum ...

A step has one query of most sequences. Of a product of 32 heads the tensor cores then take 128 clocks for 64 keys, and
to decode these and to sum up takes every scheduler about 240: the others' products run meanwhile.
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import IndexerScores
from kernels.aot import Compiled
from kernels.lib.index_fp4 import KEY_BYTES, decode_rows, reorder_queries
from kernels.lib.indexer import BLOCK, KEYS, D
from kernels.lib.launch import WARPGROUP, i32, pointers
from kernels.lib.pipeline import PipelineState
from kernels.lib.ptx import add_relu, keep
from kernels.lib.rows import load, row_of, store
from kernels.lib.scores import BOX, PUBLISHED, Arrays, BlockScheduler, Extents, greatest_of_block
from kernels.lib.scores_hopper import Barriers, HopperScoresConfig, HopperScoresKernel, Shared
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import K_MAJOR, accumulator, multiply, operand_b, register_operand, tiled_mma

QUERIES = 1  # the named barrier of the threads that reorder queries


class Config(HopperScoresConfig):
    """As of keys in 8 bits, with fewer bytes. A product has the columns of one query."""

    @property
    def key_elements(self) -> int:
        return KEY_BYTES

    @property
    def scale_bytes(self) -> int:
        return 4 * self.tile_n

    @property
    def k_bytes(self) -> int:
        return self.tile_n * KEY_BYTES + self.scale_bytes


class IndexerScoresFp4Sm90(HopperScoresKernel):
    symbol = "indexer_scores_fp4_sm90"
    scale_type = Uint32  # those of a key's four groups

    def allocate_keys(self, smem: TileAllocator) -> cute.Tensor:
        c = self.config
        of_keys = cute.make_layout((c.tile_n, KEY_BYTES, c.stages_k), stride=(KEY_BYTES, 1, c.tile_n * KEY_BYTES))
        return smem.allocate_tensor(Uint8, of_keys, 128)

    def maps_of_keys(self, k: cute.Pointer, k_scale: cute.Pointer, length: Int32, count: Int32) -> tuple:
        """TMA of keys, bytes [count, length, KEY_BYTES], and of the scales that follow each page's."""
        op, step = cpasync.CopyBulkTensorTileG2SOp(), Int64(length) * (KEY_BYTES + 4)
        keys = cute.make_tensor(k, cute.make_layout((length, KEY_BYTES, count), stride=(KEY_BYTES, 1, step)))
        box = cute.make_layout((BOX, KEY_BYTES), stride=(KEY_BYTES, 1))
        scales = cute.make_tensor(k_scale, cute.make_layout((length, count), stride=(1, step // 4)))
        return (
            cpasync.make_tiled_tma_atom(op, keys, box, (BOX, KEY_BYTES)),
            cpasync.make_tiled_tma_atom(op, scales, cute.make_layout((BOX, 1)), (BOX, 1)),
        )

    @cute.jit
    def consume(self, bar: Barriers, smem: Shared, arrays: Arrays, n: Extents):
        """One warpgroup scores its keys of every tile with all queries of every block of this CTA."""
        c, scheduler = self.config, BlockScheduler(n)
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        mma = tiled_mma(self.dtype, c.heads, K_MAJOR, warpgroup.OperandSource.RMEM)
        a, acc = register_operand(mma, D, self.dtype), accumulator(mma, c.heads)
        b = operand_b(mma, cute.local_tile(smem.q, (c.heads, D), (None, 0, 0)))
        row, lane = keep(group * KEYS + row_of(thread, 0)), keep(thread % 4)
        key0, stage, parity = row + lane % 2 * 8, Int32(0), Int32(0)  # the key whose sum this lane ends up with
        for wave in cutlass.range(scheduler.waves, unroll=1):
            q = bar.q.at(wave)
            q.wait_full()
            block, entry, first, last = (cute.arch.make_warp_uniform(smem.info[i, q.index]) for i in range(PUBLISHED))
            if first < last:
                query0 = ((n.first_block + block) - entry * n.blocks_of_entry) * c.queries
                queries, first_query = cutlass.min(n.s_q - query0, c.queries), Int64(entry) * n.s_q + query0
                reorder_queries(smem.q[None, None, q.index], cute.arch.thread_idx()[0], 4 * c.tile_m, QUERIES)
                weights = arrays.weights.toint() + (first_query * c.heads + lane * 2) * 4
                starts = arrays.start + first_query
                at = (first * c.tile_n + key0) // c.keys_of_score
                out = arrays.scores + (Int64(block) * c.queries * n.stride + at)
                for t in cutlass.range(first, last, unroll=1):
                    k = PipelineState(bar.k, stage, parity)
                    k.wait_full()
                    whole = decode_rows(a, smem.k[None, None, stage], smem.k_scale[None, stage], row, lane)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        k.arrive_empty()
                    scale = whole[1] if lane % 2 == 1 else whole[0]
                    for u in cutlass.range(queries, unroll=1):
                        multiply(mma, acc, a, b[None, None, None, u], fresh=True)
                        taken = self.take_weights(weights + u * (4 * c.heads))
                        seen = True
                        if cutlass.const_expr(c.blocks):
                            seen = t * c.tile_n + key0 >= load(starts + u)
                        warpgroup.wait_group(0)
                        self.store(out + Int64(u) * n.stride, self.summed(acc, taken, lane) * scale, seen, lane)
                    out, stage = out + c.tile_n // c.keys_of_score, stage + 1
                    if stage == c.stages_k:
                        stage, parity = Int32(0), parity ^ 1
            with cute.arch.elect_one():
                q.arrive_empty()

    @cute.jit
    def take_weights(self, address: Int64) -> cute.Tensor:
        """The weights (c, j) of this thread's columns 8 j + 2 (lane % 4) + c of a query."""
        taken = cute.make_rmem_tensor((2, self.config.heads // BLOCK), Float32)
        place = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(taken.shape, stride=(1, BLOCK))), taken)
        return taken

    @cute.jit
    def summed(self, acc: cute.Tensor, weights: cute.Tensor, lane: Int32) -> Float32:
        """The weighted sum over heads of this lane's key: an odd lane of a quad has the second of the quad's rows."""
        columns = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.config.heads // BLOCK)))
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(self.config.heads // BLOCK):
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    sums[r] = add_relu(columns[c, r, j], weights[c, j], sums[r])
        odd = lane % 2 == 1
        total = (sums[1] if odd else sums[0]) + cute.arch.shuffle_sync_bfly(sums[0] if odd else sums[1], 1)
        return total + cute.arch.shuffle_sync_bfly(total, 2)

    @cute.jit
    def store(self, out: cute.Pointer, score: Float32, seen: cutlass.Boolean, lane: Int32):
        """The first two lanes of a quad store a score; for a block, whose keys are in eight, the first quad's do."""
        stores = lane < 2
        if cutlass.const_expr(self.config.blocks):
            score, stores = greatest_of_block(score, seen, (4, 8, 16)), cute.arch.lane_idx() < 2
        if stores:
            store(out, score)

    def examples(self, variant: IndexerScores) -> tuple:
        arrays = ("q", "bytes", "float32", "float32", "int32", "int32", "int32", "float32")
        return *pointers(variant.dtype, *arrays), *(i32() for _ in range(13))


def compile(variant: IndexerScores, out_dir: Path) -> Compiled:
    config = Config(variant.heads, variant.dtype, variant.paged, variant.blocks)
    return IndexerScoresFp4Sm90(config).compile(variant, out_dir)
