"""Everything that is shipped, as data.  The build, the C++ table and the tests read this list; nothing restates it."""

import dataclasses
from collections.abc import Collection
from typing import Any

from .abi import (
    ANY,
    BOUNDS,
    BOUNDS_OF_576,
    BY_COLUMNS,
    FEW_HEADS,
    FEW_ROWS,
    FIRST_512,
    FP8,
    MHA_BACKWARD_OPS,
    PACKINGS_OF_V4,
    ROTARY,
    AllReduce,
    Combine,
    ExpertProduct,
    ExpertRows,
    FewRowsProduct,
    Forward,
    GroupedProduct,
    GroupRows,
    HyperConnection,
    HyperConnectionBackward,
    IndexerScores,
    IndexerScoresAt,
    IndexerScoresWithin,
    IndexQuery,
    KeyCodes,
    KvInsert,
    MhaBackward,
    MlaBackward,
    Mode,
    NormRope,
    Probabilities,
    Rope,
    Route,
    RowColumns,
    RowScores,
    SeenSlots,
    TileSpans,
    TopK,
    UnpackMatrix,
    Variant,
)
from .packings import PACKED, ROPE

INDEX_FP4 = "index_fp4"
DTYPES = ("bfloat16", "float16")  # of attention up to d 256; at d 512, and what layers add, have bfloat16 alone
INDEX_HEADS = (32, 64)  # of DeepSeek-V4.1's indexer, and of V4's
OF_BLOCKS = (32,)  # V4.1's alone chooses blocks, and then entries within them
INDEX_DTYPES = ("bfloat16", "float8_e4m3fn")
HOPPER, BLACKWELL, PLAIN = "kernels.sm90", "kernels.sm100", "kernels.plain"
MHA, MLA, MLA_FEW_HEADS = (f"{HOPPER}.{name}.fwd.kernel" for name in ("mha", "mla", "mla_few_heads"))
MHA_PAGED = f"{HOPPER}.mha.fwd.paged"
MHA_512 = f"{HOPPER}.mla.fwd.own_values"
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
        # of split keys, which Blackwell's kernels up to d 256 do not split
        *(
            Combine("combine", arch, f"{PLAIN}.combine.kernel", dtype)
            for dtype in DTYPES
            if dtype == "bfloat16" or arch == "sm_90a"
        ),
        TopK("indexer_topk", arch, f"{PLAIN}.topk.kernel", max_topk=2048),
        TopK("indexer_topk", arch, f"{PLAIN}.topk.shared_row", max_topk=2048, max_rows=60),
        *(Rope(op, arch, f"{PLAIN}.rope.{op}", ROPE, "bfloat16") for op in ("rope", "rope_hadamard")),
        IndexQuery("index_query", arch, f"{PLAIN}.rope.index_query", ROPE, "bfloat16"),
        Route("route", arch, f"{PLAIN}.route.kernel"),
        UnpackMatrix("unpack_matrix", arch, f"{PLAIN}.unpack_matrix.kernel"),
        *(
            NormRope(op, arch, f"{PLAIN}.rope.norm_rope", 512, ROPE, "bfloat16")
            for op in ("norm_rope", "norm_rope_bwd")
        ),
        *(
            KvInsert("kv_insert", arch, f"{PLAIN}.kv_insert.kernel", 512, "bfloat16", packing, pooled, running=running)
            for packing in ("", "v4_fp8", "v41_fp8", "v4_fp4")
            for pooled, running in ((False, False), (True, False), (True, True))
            if pooled or packing != "v4_fp4"  # which only pooled entries have
        ),
        *(
            KvInsert(
                "kv_insert", arch, f"{PLAIN}.kv_insert.kernel", 128, "bfloat16", packing, pooled=True, hadamard=True
            )
            for packing in ("", "index_fp8", INDEX_FP4)
        ),
        *(
            KvInsert("kv_insert", arch, f"{PLAIN}.kv_insert.kernel", 512, "bfloat16", packing, rope=True)
            for packing in ("", "v32_fp8")
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
    *(Forward("mha_fwd", "sm_90a", MHA_512, 512, dtype) for dtype in DTYPES),
    *(
        Forward(f"mha_fwd_paged{form}", "sm_90a", f"{MHA_PAGED}{form}", d, dtype)
        for form in ("", "_e4m3", "_window", "_e4m3_window")
        for d in (64, 128, 256)
        for dtype in DTYPES
    ),
    *(
        Forward(op, arch, module, 512, "bfloat16")
        for arch, module in (("sm_100f", MLA_BLACKWELL), ("sm_90a", MLA))
        for op in MLA_OPS
    ),
    *(Forward(op, "sm_90a", MLA, 512, "bfloat16", mode=ROTARY) for op in ("mla_span_fwd", "csa_fwd", "hca_fwd")),
    *(Forward(op, "sm_90a", MLA, 576, "bfloat16", mode=FIRST_512) for op in ("mla_span_fwd", "mla_sparse_fwd")),
    *(
        Forward(op, "sm_90a", MLA_E4M3, 512, "bfloat16", mode=Mode(precision=precision))
        for precision in FP8
        for op in ("csa_fwd", "hca_fwd")
    ),
    *(
        KeyCodes("key_codes", "sm_90a", f"{PLAIN}.key_codes.kernel", "bfloat16", packing, rope)
        for rope in (False, True)
        for packing in ("", *(x for x in PACKED if x != "v32_fp8"))
    ),
    # one CTA where a pair would share the keys of one query's heads, and half of it had no rows
    *(
        Forward(op, "sm_100f", MLA_BLACKWELL, 512, "bfloat16", max_heads=64)
        for op in ("mla_sparse_fwd", "csa_fwd", "dsv4_decode")
    ),
    # a tile of rows has heads of several queries, which together see a window and a few keys more
    Forward("mla_span_fwd", "sm_90a", MLA, 512, "bfloat16", max_heads=63),
    *(
        Forward(op, "sm_90a", MLA_FEW_HEADS, 512, "bfloat16", max_heads=heads)
        for op in ("mla_sparse_fwd", "csa_fwd", "dsv4_decode")
        for heads in (8, 16, 32)
    ),
    *(
        Forward("mla_sparse_fwd", "sm_90a", MLA, 576, "bfloat16", "v32_fp8", heads, mode=FIRST_512)
        for heads in (64, ANY)
    ),
    *(
        Forward("mla_sparse_fwd", "sm_90a", MLA_FEW_HEADS, 576, "bfloat16", max_heads=heads, mode=FIRST_512)
        for heads in (8, 16, 32)
    ),
    *(
        Forward("mla_span_fwd", "sm_90a", MLA_FEW_HEADS_SPANS, 512, "bfloat16", max_heads=heads, mode=FEW_HEADS)
        for heads in (8, 16, 32)
    ),
    *(
        Forward("dsv4_decode", arch, module, 512, "bfloat16", packing, heads)
        for arch, module in (("sm_100f", MLA_BLACKWELL), ("sm_90a", MLA))
        for packing in PACKINGS_OF_V4
        for heads in (64, ANY)
        if (arch, packing, heads) != ("sm_100f", "v4_fp4", 64)  # where more heads have no other kernel
    ),
    # few queries in the canonical order of sums: keys are shared out, and then columns
    *(
        RowScores(op, "sm_90a", MLA_SCORES, 512, "bfloat16", mode=BY_COLUMNS)
        for op in ("mla_sparse_fwd", "csa_fwd", "dsv4_decode")
    ),
    *(
        RowScores("dsv4_decode", "sm_90a", MLA_SCORES, 512, "bfloat16", packing, mode=BY_COLUMNS)
        for packing in PACKINGS_OF_V4
    ),
    RowColumns("row_columns", "sm_90a", MLA_COLUMNS, 512, "bfloat16"),
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, "bfloat16", deterministic=deterministic)
        for deterministic in (False, True)
        for op in MLA_GRADIENTS
    ),
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, "bfloat16", max_heads=heads, mode=ROTARY)
        for op, heads in (("mla_span_bwd", 64), ("csa_bwd", 64), ("hca_bwd", ANY))
    ),
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, "bfloat16", deterministic=True, mode=BOUNDS)
        for op in MLA_GRADIENTS
    ),
    # a tile of rows has all heads of a query, and may have keys that no other tile has
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 512, "bfloat16", deterministic=deterministic, max_heads=64)
        for deterministic in (False, True)
        for op in ("mla_span_bwd", "mla_sparse_bwd", "csa_bwd")
    ),
    *(
        MlaBackward(op, "sm_90a", MLA_BACKWARD, 576, "bfloat16", deterministic=deterministic, mode=mode)
        for mode, deterministic in ((FIRST_512, False), (FIRST_512, True), (BOUNDS_OF_576, True))
        for op in ("mla_span_bwd", "mla_sparse_bwd")
    ),
    *(
        MlaBackward(op, "sm_90a", MLA_FEW_HEADS_BACKWARD, 512, "bfloat16", deterministic=deterministic, max_heads=16)
        for deterministic in (False, True)
        for op in ("mla_sparse_bwd", "csa_bwd")
    ),
    *(MlaBackward(op, "sm_100f", MLA_BACKWARD_BLACKWELL, 512, "bfloat16") for op in MLA_GRADIENTS),
    TileSpans("tile_spans", "sm_90a", f"{HOPPER}.mha.bwd.tile_spans"),
    *(
        MhaBackward(op, "sm_90a", f"{HOPPER}.mha.bwd.{op.removeprefix('mha_')}" + "_512" * (d == 512), d, dtype)
        for op in MHA_BACKWARD_OPS
        for d in (64, 128, 256, 512)
        if op != "mha_dqdkdv" or d < 256  # dK, dV and dQ are more than registers hold
        for dtype in DTYPES
    ),
    *(
        IndexerScores("indexer_scores", arch, f"{package}.indexer.scores.kernel", heads, dtype, paged)
        for arch, package in (("sm_90a", HOPPER), ("sm_100f", BLACKWELL))
        for paged in (False, True)
        for heads in INDEX_HEADS
        for dtype in INDEX_DTYPES
    ),
    *(
        IndexerScores("indexer_scores", arch, f"{package}.indexer.scores.kernel", heads, dtype, paged, blocks=True)
        for arch, package in (("sm_90a", HOPPER), ("sm_100f", BLACKWELL))
        for paged in (False, True)
        for heads in OF_BLOCKS
        for dtype in INDEX_DTYPES
    ),
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
        for blocks, with_heads in ((False, INDEX_HEADS), (True, OF_BLOCKS))
        for heads in with_heads
    ),
    *(
        IndexerScoresAt(op, arch, f"{package}.indexer.scores_at.kernel", heads, dtype)
        for op, arch, package, dtypes in (
            ("indexer_scores_at", "sm_90a", HOPPER, INDEX_DTYPES),
            ("indexer_scores_at_bwd", "sm_90a", HOPPER, ("bfloat16",)),
            ("indexer_scores_at", "sm_100f", BLACKWELL, INDEX_DTYPES),
        )
        for heads in INDEX_HEADS
        for dtype in dtypes
    ),
    *(
        IndexerScoresWithin(
            "indexer_scores_within", "sm_90a", f"{HOPPER}.indexer.scores_within.kernel", heads, dtype, paged, packing
        )
        for paged, dtype, packing in (
            *((paged, dtype, "") for paged in (False, True) for dtype in INDEX_DTYPES),
            (True, "bfloat16", INDEX_FP4),
        )
        for heads in OF_BLOCKS
    ),
    *(
        Probabilities("head_summed_probabilities", arch, f"{package}.indexer.probabilities.kernel", 512, "bfloat16")
        for arch, package in (("sm_90a", HOPPER), ("sm_100f", BLACKWELL))
    ),
    # a step's products; parts are those into which steps of published models cut k
    *(
        FewRowsProduct(op, "sm_90a", FEW_ROWS_PRODUCT, "bfloat16", to_float32, parts, max_rows=rows)
        for op, to_float32, cut in (
            ("few_rows_product", False, (2, 4)),
            ("few_rows_product", True, (2, 4, 8)),
            ("few_rows_product_of_turned", False, (1, 2)),
        )
        for parts in cut
        for rows in (64, ANY)
    ),
    *(
        FewRowsProduct("few_rows_product_norm_rope", "sm_90a", FEW_ROWS_PRODUCT, "bfloat16", max_rows=rows)
        for rows in (64, ANY)
    ),
    *(
        FewRowsProduct(
            "few_rows_product_index_query",
            "sm_90a",
            FEW_ROWS_PRODUCT,
            "bfloat16",
            parts=2,
            to_fp8=to_fp8,
            max_rows=rows,
        )
        for to_fp8 in (False, True)
        for rows in (64, ANY)
    ),
    # the same from FP8; x is multiplied by several matrices, by packed ones only where none of them is in 16 bits
    *(
        dataclasses.replace(
            FewRowsProduct(f"few_rows_product{op}", "sm_90a", FEW_ROWS_PRODUCT, "bfloat16", weights="e4m3"),
            to_float32=result == "float32",
            parts=parts,
            to_fp8=result == "fp8",
            max_rows=rows,
        )
        for op, result, cut in (
            ("", "", (2, 3)),
            ("", "float32", (8,)),
            ("_of_turned", "", (1, 2)),
            ("_norm_rope", "", (1,)),
            ("_index_query", "", (2,)),
            ("_index_query", "fp8", (2,)),
        )
        for parts in cut
        for rows in (16, 64, ANY)
    ),
    *(
        GroupedProduct(
            "grouped_product", "sm_90a", f"{HOPPER}.grouped_product.kernel", "bfloat16", weights, gated, rows
        )
        for weights in ("mxfp4", "e4m3", "bfloat16")
        for gated in (False, True)
        for rows in (FEW_ROWS, ANY)
    ),
    *(
        ExpertProduct("expert_product", "sm_90a", f"{HOPPER}.expert_product.kernel", "bfloat16", form)
        for form in ("rows", "gated", "turned", "gated_back", "outer")
    ),
    *(
        ExpertRows("expert_rows", "sm_90a", f"{PLAIN}.expert_rows.kernel", "bfloat16", form)
        for form in ("taken", "summed")
    ),
    AllReduce("all_reduce", "sm_90a", f"{PLAIN}.all_reduce.kernel", "bfloat16"),
    GroupRows("group_rows", "sm_90a", f"{PLAIN}.group_rows.kernel"),
    HyperConnection("hyper_connection", "sm_90a", f"{HOPPER}.hyper_connection.kernel", 4096, "bfloat16"),
    *(
        HyperConnectionBackward(
            "hyper_connection_bwd", "sm_90a", f"{HOPPER}.hyper_connection.bwd_{part}", 4096, "bfloat16", part
        )
        for part in ("numbers", "streams")
    ),
    *plain("sm_90a"),
    *plain("sm_100f"),
)


TWINS: dict[str, dict[Any, Any]] = {
    "deterministic": {True: False},
    "dtype": {"float16": "bfloat16"},
    "heads": {32: 64},
    "max_heads": {8: 16, 32: 16},
    "parts": {1: 2, 2: 4, 8: 4},
    "packing": dict.fromkeys(("v4_fp4", "v41_fp8", "v41_fp4"), "v4_fp8"),
}
"""Values of a choice, and another one. Their kernels have the same code but for numbers, how they unpack keys, or how
they sum gradients of keys."""


def typical(variant: Variant, choices: Collection[str] = tuple(TWINS)) -> Variant:
    """The kernel that tests run in every case, where this one, which differs from it in these choices, has one."""
    others = {name: TWINS[name].get(x, x) for name, x in variant.choices.items() if name in choices}
    found = dataclasses.replace(variant, **others)
    return found if found in _ALL else variant


_ALL = frozenset(VARIANTS)
TESTED = tuple(v for v in VARIANTS if v.arch == "sm_90a" and typical(v) == v)
"""What `make test` compiles and interprets. `make test-all` does so with all, and a wheel holds them."""
KERNELS = {"all": VARIANTS, "tested": TESTED}
KERNELS |= {arch: tuple(v for v in VARIANTS if v.arch == arch) for arch in ("sm_90a", "sm_100f")}
"""The sets of kernels that can be built, by name"""
