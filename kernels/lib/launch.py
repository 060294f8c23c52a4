"""The host side that every kernel shares: its launch, tensors for TMA, and compilation to a cubin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_ptr

from kernels.abi import Variant
from kernels.aot import Compiled, compile_ahead

from .rows import WARP, Extents

WARPGROUP = 4 * WARP  # threads
SMEM_LIMIT = 227 * 1024  # bytes a CTA may have on sm_90 and sm_100


def registers_at_launch(threads: int) -> int:
    """Registers of a thread of an SM's only CTA: the file of 65536 shared evenly, in eights."""
    return 65536 // threads // 8 * 8


def element_type(dtype: str):
    return {"bfloat16": BFloat16, "float16": Float16, "float8_e4m3fn": Float8E4M3FN}[dtype]


class Kernel:
    """A kernel's host side: an entry `__call__(arrays and numbers, stream)`, which launches the method `kernel` once.

    A config has `tile_m`, `tile_n`, `threads`, `smem_bytes`, mostly a `dtype`, and `launch_options`, the launch's facts
    for the compiler.
    """

    symbol: ClassVar[str]  # names the kernel in its cubin

    def __init__(self, config: Any):
        self.config = config

    @property
    def dtype(self):
        return element_type(self.config.dtype)

    def launch(self, *operands: Any, ctas: Int32, stream: cuda.CUstream, cluster: int = 1) -> None:
        """Launches so many CTAs, in clusters of so many."""
        c = self.config
        self.kernel(*operands).launch(
            grid=(ctas, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            smem=c.smem_bytes,
            stream=stream,
            **c.launch_options,
        )

    def launch_persistent(self, *operands: Any, n: Extents, ctas: Int32, stream: cuda.CUstream) -> None:
        """Launches no more CTAs than there is work for, and at most `ctas`, which run at a time."""
        cluster = self.config.cluster
        ctas = cutlass.min(n.work, cutlass.max(ctas // cluster, 1)) * cluster
        self.launch(*operands, n, ctas=ctas, stream=stream, cluster=cluster)

    def examples(self, variant: Variant) -> tuple:
        """Returns examples of what the entry takes, without the stream, for compilation."""
        raise NotImplementedError

    def compile(self, variant: Variant, out_dir: Path, **facts: int) -> Compiled:
        """Compiles to a cubin; the facts are `launch_facts`'."""
        return compile_ahead(
            self,
            type(self).kernel,
            *self.examples(variant),
            name=self.symbol,
            arch=variant.arch,
            out_dir=out_dir,
            facts=launch_facts(self.config, **facts),
        )


@dataclass(frozen=True)
class Shapes:
    """Views of a launch's arrays for TMA: the tile's two modes first, 64-bit strides."""

    d: int
    b: Int32
    n: Extents

    def rows(self, p: cute.Pointer) -> cute.Tensor:
        """q and o: (inner, d, outer, h_kv, b)."""
        n, head = self.n, Int64(self.n.group) * self.d
        query = head * n.h_kv
        return cute.make_tensor(
            p,
            cute.make_layout(
                (n.inner, self.d, n.outer, n.h_kv, self.b), stride=(self.d, 1, query, head, query * n.s_q)
            ),
        )

    def keys(self, p: cute.Pointer, s_kv: Int32) -> cute.Tensor:
        """k and v: (s_kv, d, h_kv, b)."""
        n, key = self.n, Int64(self.n.h_kv) * self.d
        return cute.make_tensor(
            p, cute.make_layout((s_kv, self.d, n.h_kv, self.b), stride=(key, 1, self.d, key * s_kv))
        )


def pointers(dtype: str, *targets: str) -> tuple:
    """Example pointers for compilation: to int32, float32, bytes, or (any other name) rows of dtype."""
    types = {"int32": Int32, "float32": Float32, "bytes": Uint8}
    return tuple(
        make_ptr(
            types.get(target, element_type(dtype)),
            16,
            cute.AddressSpace.gmem,
            assumed_align=4 if target in ("int32", "float32") else 16,
        )
        for target in targets
    )


def i32() -> Int32:
    return Int32(1)


def launch_facts(config: Any, ctas: int = 1, cluster: int = 1, unit: int = 1) -> dict[str, int]:
    """Facts that a caller must know and the cubin does not say: among others, how many CTAs run on an SM and make up a
    cluster, and how many key tiles splits share out as a unit."""
    facts = {name: getattr(config, name) for name in ("tile_m", "tile_n", "threads", "smem_bytes")}
    return facts | {"ctas": ctas, "cluster": cluster, "unit": unit}
