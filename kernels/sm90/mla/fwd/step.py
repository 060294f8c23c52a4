"""`mla_fwd_sm90` over packed keys, whose slots a kernel before it finds.

Few queries make few CTAs, and all of them begin at once. So a launch may begin while the kernel before it ends: its
barriers are set up by then, and its producers wait for what that kernel writes. But a launch that goes on with the last
queries of another one has its slots already. It begins early too, to fill processors as they come free, and waits as it
ends.
"""

from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.abi import ANY, Forward
from kernels.aot import Compiled
from kernels.lib.cluster import CLUSTER
from kernels.lib.forward import Source
from kernels.lib.launch import Shapes, i32
from kernels.lib.rows import Extents

from .config import Config
from .kernel import MlaFwdSm90
from .smem import Barriers, Shared


class MlaStepSm90(MlaFwdSm90):
    waits: Int32  # whether the launch before it leaves something that this one reads

    @cute.jit
    def __call__(
        self,
        waits: Int32,
        q: cute.Pointer,
        o: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        o_parts: cute.Pointer,
        scale_log2: Float32,
        table: cute.Pointer,
        eps: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        splits: Int32,
        ctas: Int32,
        k0: cute.Pointer,
        v0: cute.Pointer,
        from0: cute.Pointer,
        to0: cute.Pointer,
        s_kv0: Int32,
        s_batch0: Int32,
        topk0: Int32,
        k1: cute.Pointer,
        v1: cute.Pointer,
        from1: cute.Pointer,
        to1: cute.Pointer,
        s_kv1: Int32,
        s_batch1: Int32,
        topk1: Int32,
        stream: cuda.CUstream,
    ):
        self.waits = waits
        super().__call__(
            q, o, sink, lse, o_parts, scale_log2, table, eps, b, s_q, h_q, h_kv, splits, ctas, k0, v0,
            from0, to0, s_kv0, s_batch0, topk0, k1, v1, from1, to1, s_kv1, s_batch1, topk1, stream,
        )  # fmt: skip

    def source(self, kind: str, shapes: Shapes, x: Source) -> tuple:
        """The first one comes with `waits`."""
        before, self.waits = self.waits, None
        operands = super().source(kind, shapes, x)
        return operands if before is None else (before, *operands)

    @cute.jit
    def produce(self, bar: Barriers, smem: Shared, row_source: tuple, sources: tuple, n: Extents):
        if sources[0][0] != 0:
            cute.arch.griddepcontrol_wait()
        super().produce(bar, smem, row_source, sources, n)

    def examples(self, variant: Forward) -> tuple:
        return i32(), *super().examples(variant)


def compile(variant: Forward, out_dir: Path) -> Compiled:
    cluster = 1 if variant.max_heads < ANY else CLUSTER
    config = Config(variant.d, variant.dtype, variant.sources, cluster=cluster, rope=variant.d - variant.d_v)
    return MlaStepSm90(config).compile(variant, out_dir, cluster=config.cluster, unit=config.unit)
