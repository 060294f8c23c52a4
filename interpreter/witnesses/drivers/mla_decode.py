"""FlashInfer's own decoding of MLA, in the DSL: 64 rows an accumulator, two side by side."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ...cute.record import allocated, placed, tensor
from ...machine.state import Array
from . import OPERAND, RESULT, Case, bare, folder, normal


def forward(*, h: int = 64, s_kv: int = 256, page: int = 32) -> Case:
    """One query of h heads over a sequence of s_kv - 5 latents [512 + 64] in pages."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    root = folder("flashinfer")
    for name in ("flashinfer", "flashinfer.attention", "flashinfer.attention.prims_ts"):
        bare(name, root.joinpath(*name.split(".")[1:]))
    from flashinfer.attention.prims_ts.kernels.mla_decode.throughput_latency_1cta.kernel import (
        ThroughputLatencyMlaDecodeTs,
    )

    kernel = ThroughputLatencyMlaDecodeTs(
        batch_size=1,
        num_heads=h,
        seq_len_q=1,
        seq_len_k=s_kv,
        page_size=page,
        max_active_clusters=148,
        profile="h64_keeps_mma_ab",
        logical_num_heads=h,
        logical_seq_len_q=1,
        tile_size_q=64,
    )
    d, rope = 512, 64
    q, cache = normal(1, 1, h, d + rope, scale=1 / 3), normal(s_kv // page, page, d + rope, seed=2)
    pages = placed(np.random.default_rng(3).permutation(s_kv // page)[None].astype(np.int32))
    lengths = placed(np.array([s_kv - 5], np.int32))
    o, lse = allocated((1, 1, h, d), ml_dtypes.bfloat16), allocated((1, 1, h), np.float32)
    scale = (d + rope) ** -0.5

    def given(x: Array, align: int = 16) -> object:
        return tensor(x, dynamic=False, align=align)

    queries, latents = q.transpose(2, 3, 1, 0), cache.transpose(1, 2, 0)
    kv = cache[pages[0]].reshape(-1, d + rope)[: int(lengths[0])].astype(np.float64)
    logits = q[0, 0].astype(np.float64) @ kv.T * scale
    p = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
    operands = {"q": q, "cache": cache, "pages": pages, "lengths": lengths}
    return Case(
        kernel,
        [
            *(given(queries[:, :d]), given(queries[:, d:]), given(latents[:, :d]), given(latents[:, d:])),
            *(given(pages.T, 4), given(o.transpose(2, 3, 1, 0)), given(lse.transpose(2, 1, 0)), None),
            *(cutlass.Int32(1), given(lengths, 4), None, None),
            *(cutlass.Float32(scale), cutlass.Float32(1.0), make_fake_stream()),
        ],
        {name: (x, OPERAND) for name, x in operands.items()} | {"o": (o, RESULT), "lse": (lse, RESULT)},
        {"o": (p @ kv[:, :d])[None, None]},
        8e-3,
        compiler=cute.compile[cute.FrontendNext],
    )
