"""Everything that is shipped, as data.  The build, the C++ table and the tests read this list; nothing restates it."""

from .abi import (
    ANY,
    BACKWARD_OPS,
    DENSE_BACKWARD_OPS,
    FORWARD_OPS,
    Backward,
    Combine,
    DenseBackward,
    Forward,
    IndexAt,
    IndexScores,
    NormRope,
    Probabilities,
    Rope,
    RowSpans,
    TopK,
    Variant,
)
from .packings import PACKED

DTYPES = ("bfloat16", "float16")
DENSE, LATENT, FEW_HEADS = (f"kernels.sm90.{name}" for name in ("fwd", "latent.kernel", "few_heads.kernel"))
DENSE_BACKWARD = "kernels.sm90.bwd"
LATENT_BACKWARD, FEW_HEADS_BACKWARD = (f"kernels.sm90.{name}" for name in ("latent_bwd.kernel", "few_heads_bwd"))
BLACKWELL = "kernels.sm100.fwd.kernel"
PACKED_OPS = tuple(op for op, kinds in FORWARD_OPS.items() if kinds[0] in PACKED)
LATENT_OPS = ("fwd", "sparse_fwd", "dsv4_sparse_fwd", "dsv4_dense_fwd", "dsv4_decode")  # d 512, where K is V

VARIANTS: tuple[Variant, ...] = (
    *(
        Forward("fwd", arch, module, d, dtype, shared_kv=False)
        for arch, module in (("sm_90a", DENSE), ("sm_100a", BLACKWELL))
        for d in (64, 128, 256)
        for dtype in DTYPES
    ),
    *(
        Forward(op, arch, module, 512, dtype, shared_kv=True)
        for arch, module in (("sm_100a", BLACKWELL), ("sm_90a", LATENT))
        for op in LATENT_OPS
        for dtype in DTYPES
    ),
    # a tile of rows has heads of several queries, which together see a window and a few keys more
    *(Forward("fwd", "sm_90a", LATENT, 512, dtype, shared_kv=True, max_heads=63) for dtype in DTYPES),
    *(
        Forward(op, "sm_90a", FEW_HEADS, 512, dtype, shared_kv=True, max_heads=heads)
        for op in ("sparse_fwd", "dsv4_sparse_fwd", "dsv4_decode")
        for dtype in DTYPES
        for heads in (8, 16, 32)
    ),
    *(
        Forward(op, "sm_90a", LATENT, 512, "bfloat16", shared_kv=True, max_heads=heads)
        for op in PACKED_OPS
        for heads in (64, ANY)
    ),
    *(
        Backward(op, "sm_90a", LATENT_BACKWARD, 512, dtype, shared_kv=True, deterministic=deterministic)
        for deterministic in (False, True)
        for op in BACKWARD_OPS
        for dtype in DTYPES
    ),
    # a tile of rows has all heads of a query, and may have keys that no other tile has
    *(
        Backward(op, "sm_90a", LATENT_BACKWARD, 512, dtype, shared_kv=True, max_heads=64)
        for op in ("bwd", "sparse_bwd", "dsv4_sparse_bwd")
        for dtype in DTYPES
    ),
    *(
        Backward(op, "sm_90a", FEW_HEADS_BACKWARD, 512, dtype, shared_kv=True, max_heads=16)
        for op in ("sparse_bwd", "dsv4_sparse_bwd")
        for dtype in DTYPES
    ),
    RowSpans("row_spans", "sm_90a", f"{DENSE_BACKWARD}.row_spans"),
    *(
        DenseBackward(op, "sm_90a", f"{DENSE_BACKWARD}.{op}", d, dtype)
        for op in DENSE_BACKWARD_OPS
        for d in (64, 128, 256)
        if (op, d) != ("all_gradients", 256)  # dK, dV and dQ are more than registers hold
        for dtype in DTYPES
    ),
    *(Combine("combine", "sm_90a", "kernels.sm90.combine", dtype) for dtype in DTYPES),  # of split keys
    *(
        IndexScores("index_scores", "sm_90a", "kernels.sm90.index_scores", heads, dtype, paged)
        for paged in (False, True)
        for heads in (16, 32, 64)
        for dtype in (*DTYPES, "float8_e4m3fn")
    ),
    *(
        IndexAt(op, "sm_90a", "kernels.sm90.index_at", heads, dtype)
        for op, dtypes in (("index_at", (*DTYPES, "float8_e4m3fn")), ("index_at_bwd", DTYPES))
        for heads in (16, 32, 64)
        for dtype in dtypes
    ),
    TopK("topk", "sm_90a", "kernels.sm90.topk", max_topk=2048),
    *(
        Probabilities("head_summed_probabilities", "sm_90a", "kernels.sm90.probabilities", 512, dtype)
        for dtype in DTYPES
    ),
    *(Rope("rope", "sm_90a", "kernels.sm90.rope", 64, dtype) for dtype in DTYPES),
    *(
        NormRope(op, "sm_90a", "kernels.sm90.rope", 512, 64, dtype)
        for op in ("norm_rope", "norm_rope_bwd")
        for dtype in DTYPES
    ),
)
