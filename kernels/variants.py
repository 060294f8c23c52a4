"""Everything that is shipped, as data.  The build, the C++ table and the tests read this list; nothing restates it."""

from .abi import (
    ANY,
    BOUNDS,
    BY_COLUMNS,
    E4M3,
    FEW_ROWS,
    MHA_BACKWARD_OPS,
    PACKED_SOURCES,
    SPAN_OF_FEW_HEADS,
    TO_E4M3,
    TURNING,
    TURNING_GRADIENTS,
    Combine,
    FewRowsProduct,
    Forward,
    GroupedProduct,
    GroupRows,
    IndexerScores,
    IndexerScoresAt,
    IndexerScoresWithin,
    IndexQuery,
    KeyCodes,
    KvInsert,
    MhaBackward,
    MlaBackward,
    NormRope,
    Probabilities,
    Rope,
    RowColumns,
    RowScores,
    SeenSlots,
    TileSpans,
    TopK,
    Variant,
)
from .packings import PACKED

INDEX_FP4 = "index_fp4"
DTYPES = ("bfloat16", "float16")
HOPPER, BLACKWELL, PLAIN = "kernels.sm90", "kernels.sm100", "kernels.plain"
MHA, MLA, MLA_FEW_HEADS = (f"{HOPPER}.{name}.fwd.kernel" for name in ("mha", "mla", "mla_few_heads"))
MLA_FEW_HEADS_SPANS = f"{HOPPER}.mla_few_heads.fwd_spans.kernel"
MLA_E4M3 = f"{HOPPER}.mla.fwd_e4m3.kernel"
MLA_SCORES, MLA_COLUMNS = (f"{HOPPER}.mla.fwd.{name}" for name in ("scores", "columns"))
MLA_BACKWARD, MLA_FEW_HEADS_BACKWARD = (f"{HOPPER}.{name}.bwd.kernel" for name in ("mla", "mla_few_heads"))
MHA_BLACKWELL, MLA_BLACKWELL = (f"{BLACKWELL}.{name}.kernel" for name in ("mha", "mla"))
FEW_ROWS_PRODUCT = f"{HOPPER}.few_rows_product.kernel"
MLA_BACKWARD_BLACKWELL = f"{BLACKWELL}.mla_bwd.kernel"
MLA_OPS = ("mla_span_fwd", "mla_sparse_fwd", "csa_fwd", "hca_fwd", "dsv4_decode")  # d 512, where K is V
MLA_GRADIENTS = ("mla_span_bwd", "mla_sparse_bwd", "csa_bwd", "hca_bwd")


def plain(arch: str) -> tuple[Variant, ...]:
    """The kernels without tensor cores, which every architecture has of the same source."""
    return (
        *(Combine("combine", arch, f"{PLAIN}.combine.kernel", dtype) for dtype in DTYPES),  # of split keys
        TopK("indexer_topk", arch, f"{PLAIN}.topk.kernel", max_topk=2048),
        TopK("indexer_topk", arch, f"{PLAIN}.topk.shared_row", max_topk=2048, max_rows=60),
        *(Rope(op, arch, f"{PLAIN}.rope.{op}", 64, dtype) for op in ("rope", "rope_hadamard") for dtype in DTYPES),
        *(IndexQuery("index_query", arch, f"{PLAIN}.rope.index_query", 64, dtype) for dtype in DTYPES),
        *(
            NormRope(op, arch, f"{PLAIN}.rope.norm_rope", 512, 64, dtype)
            for op in ("norm_rope", "norm_rope_bwd")
            for dtype in DTYPES
        ),
        *(
            KvInsert("kv_insert", arch, f"{PLAIN}.kv_insert.kernel", 512, dtype, packing, pooled, running=running)
            for dtype, packings in (("bfloat16", ("", "v4_fp8", "v41_fp8", "v4_fp4")), ("float16", ("",)))
            for packing in packings
            for pooled, running in ((False, False), (True, False), (True, True))
            if pooled or packing != "v4_fp4"  # which only pooled entries have
        ),
        *(
            KvInsert("kv_insert", arch, f"{PLAIN}.kv_insert.kernel", 128, dtype, packing, pooled=True, hadamard=True)
            for dtype, packings in (("bfloat16", ("", "index_fp8", INDEX_FP4)), ("float16", ("",)))
            for packing in packings
        ),
        SeenSlots("seen_slots", arch, f"{PLAIN}.seen_slots.kernel"),
    )


VARIANTS: tuple[Variant, ...] = (
    *(
        Forward("mha_fwd", arch, module, d, dtype)
        for arch, module in (("sm_90a", MHA), ("sm_100f", MHA_BLACKWELL))
        for d in (64, 128, 256)
        for dtype in DTYPES
    ),
    *(
        Forward(op, arch, module, 512, dtype)
        for arch, module in (("sm_100f", MLA_BLACKWELL), ("sm_90a", MLA))
        for op in MLA_OPS
        for dtype in DTYPES
    ),
    *(
        Forward(op, "sm_90a", MLA, 512, dtype)
        for op in TURNING
        for dtype in DTYPES
        if dtype == "bfloat16" or op not in TO_E4M3
    ),
    *(Forward(op, "sm_90a", MLA_E4M3, 512, "bfloat16") for op in E4M3),
    *(
        KeyCodes(op, "sm_90a", f"{PLAIN}.key_codes.kernel", "bfloat16", packing, rope)
        for rope in (False, True)
        for op in ("key_codes", "key_codes_again")
        for packing in ("", *PACKED)
    ),
    # one CTA where a pair would share the keys of one query's heads, and half of it had no rows
    *(
        Forward(op, "sm_100f", MLA_BLACKWELL, 512, dtype, max_heads=64)
        for op in ("mla_sparse_fwd", "csa_fwd", "dsv4_decode")
        for dtype in DTYPES
    ),
    # a tile of rows has heads of several queries, which together see a window and a few keys more
    *(Forward("mla_span_fwd", "sm_90a", MLA, 512, dtype, max_heads=63) for dtype in DTYPES),
    *(
        Forward(op, "sm_90a", MLA_FEW_HEADS, 512, dtype, max_heads=heads)
        for op in ("mla_sparse_fwd", "csa_fwd", "dsv4_decode")
        for dtype in DTYPES
        for heads in (8, 16, 32)
    ),
    *(
        Forward(SPAN_OF_FEW_HEADS, "sm_90a", MLA_FEW_HEADS_SPANS, 512, dtype, max_heads=heads)
        for dtype in DTYPES
        for heads in (8, 16, 32)
    ),
    *(
        Forward("dsv4_decode", arch, module, 512, "bfloat16", packing, heads)
        for arch, module in (("sm_100f", MLA_BLACKWELL), ("sm_90a", MLA))
        for packing in PACKED_SOURCES
        for heads in (64, ANY)
        if (arch, packing, heads) != ("sm_100f", "v4_fp4", 64)  # where more heads have no other kernel
    ),
    # few queries in the canonical order of sums: keys are shared out, and then columns
    *(RowScores(op, "sm_90a", MLA_SCORES, 512, dtype) for op in BY_COLUMNS for dtype in DTYPES),
    *(
        RowScores("dsv4_decode_by_columns", "sm_90a", MLA_SCORES, 512, "bfloat16", packing)
        for packing in PACKED_SOURCES
    ),
    *(RowColumns("row_columns", "sm_90a", MLA_COLUMNS, 512, dtype) for dtype in DTYPES),
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, dtype, deterministic=deterministic)
        for deterministic in (False, True)
        for op in MLA_GRADIENTS
        for dtype in DTYPES
    ),
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, "bfloat16", max_heads=ANY if op.startswith("hca") else 64)
        for op in TURNING_GRADIENTS
    ),
    *(MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, dtype, deterministic=True) for op in BOUNDS for dtype in DTYPES),
    # a tile of rows has all heads of a query, and may have keys that no other tile has
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, dtype, deterministic=deterministic, max_heads=64)
        for deterministic in (False, True)
        for op in ("mla_span_bwd", "mla_sparse_bwd", "csa_bwd")
        for dtype in DTYPES
    ),
    *(
        MlaBackward(op, "sm_90a", MLA_FEW_HEADS_BACKWARD, 512, dtype, deterministic=deterministic, max_heads=16)
        for deterministic in (False, True)
        for op in ("mla_sparse_bwd", "csa_bwd")
        for dtype in DTYPES
    ),
    *(MlaBackward(op, "sm_100f", MLA_BACKWARD_BLACKWELL, 512, dtype) for op in MLA_GRADIENTS for dtype in DTYPES),
    TileSpans("tile_spans", "sm_90a", f"{HOPPER}.mha.bwd.tile_spans"),
    *(
        MhaBackward(op, "sm_90a", f"{HOPPER}.mha.bwd.{op.removeprefix('mha_')}", d, dtype)
        for op in MHA_BACKWARD_OPS
        for d in (64, 128, 256)
        if (op, d) != ("mha_dqdkdv", 256)  # dK, dV and dQ are more than registers hold
        for dtype in DTYPES
    ),
    *(
        IndexerScores("indexer_scores", arch, f"{package}.indexer.scores.kernel", heads, dtype, paged)
        for arch, package in (("sm_90a", HOPPER), ("sm_100f", BLACKWELL))
        for paged in (False, True)
        for heads in (16, 32, 64)
        for dtype in (*DTYPES, "float8_e4m3fn")
    ),
    # DeepSeek-V4.1's first level
    *(
        IndexerScores("indexer_scores", arch, f"{package}.indexer.scores.kernel", heads, dtype, paged, blocks=True)
        for arch, package in (("sm_90a", HOPPER), ("sm_100f", BLACKWELL))
        for paged in (False, True)
        for heads in (32, 64)
        for dtype in ("bfloat16", "float8_e4m3fn")
    ),
    # and of its keys in 4 bits
    *(
        IndexerScores(
            "indexer_scores",
            "sm_90a",
            f"{HOPPER}.indexer.scores_fp4.kernel",
            heads,
            "bfloat16",
            True,
            blocks,
            INDEX_FP4,
        )
        for blocks in (False, True)
        for heads in (32, 64)
    ),
    *(
        IndexerScoresAt(op, arch, f"{package}.indexer.scores_at.kernel", heads, dtype)
        for op, arch, package, dtypes in (
            ("indexer_scores_at", "sm_90a", HOPPER, (*DTYPES, "float8_e4m3fn")),
            ("indexer_scores_at_bwd", "sm_90a", HOPPER, DTYPES),
            ("indexer_scores_at", "sm_100f", BLACKWELL, (*DTYPES, "float8_e4m3fn")),
        )
        for heads in (16, 32, 64)
        for dtype in dtypes
    ),
    # DeepSeek-V4.1's second level
    *(
        IndexerScoresWithin(
            "indexer_scores_within", "sm_90a", f"{HOPPER}.indexer.scores_within.kernel", heads, dtype, paged, packing
        )
        for paged, dtype, packing in (
            *((paged, dtype, "") for paged in (False, True) for dtype in ("bfloat16", "float8_e4m3fn")),
            (True, "bfloat16", INDEX_FP4),
        )
        for heads in (32, 64)
    ),
    *(
        Probabilities("head_summed_probabilities", arch, f"{package}.indexer.probabilities.kernel", 512, dtype)
        for arch, package in (("sm_90a", HOPPER), ("sm_100f", BLACKWELL))
        for dtype in DTYPES
    ),
    # a step's products
    *(
        FewRowsProduct(op, "sm_90a", FEW_ROWS_PRODUCT, dtype, to_float32, parts, max_rows=rows)
        for op, to_float32 in (
            ("few_rows_product", False),
            ("few_rows_product", True),
            ("few_rows_product_of_turned", False),
        )
        for dtype in DTYPES
        for parts in (1, 2, 4, 8)
        for rows in (64, ANY)
    ),
    *(
        FewRowsProduct("few_rows_product_norm_rope", "sm_90a", FEW_ROWS_PRODUCT, dtype, max_rows=rows)
        for dtype in DTYPES
        for rows in (64, ANY)
    ),
    # k of 64 heads of 128 is cut in two
    *(
        FewRowsProduct(
            "few_rows_product_index_query", "sm_90a", FEW_ROWS_PRODUCT, dtype, parts=2, to_fp8=to_fp8, max_rows=rows
        )
        for dtype, to_fp8 in (("bfloat16", False), ("bfloat16", True), ("float16", False))
        for rows in (64, ANY)
    ),
    *(
        GroupedProduct(
            "grouped_product", "sm_90a", f"{HOPPER}.grouped_product.kernel", "bfloat16", "mxfp4", gated, rows
        )
        for gated in (False, True)
        for rows in (FEW_ROWS, ANY)
    ),
    GroupRows("group_rows", "sm_90a", f"{PLAIN}.group_rows.kernel"),
    *plain("sm_90a"),
    *plain("sm_100f"),
)
