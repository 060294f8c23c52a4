"""The one table of cases, for the tests and `python -m jax_dsv4_fmha check`.

It is in the package and not under tests/, because `check` also runs from an installed wheel.
"""

from typing import Any

from .attention import AttentionCase, DecodeCase, FmhaCase, HeadsStepCase, LatentStepCase, LayerCase, SparseCase
from .case import Case
from .experts import ExpertsCase
from .hyper_connection import HyperConnectionCase
from .indexer import BlocksCase, ChoiceCase, IndexerCase, ScoresCase
from .insert import InsertCase
from .rope import NormRopeCase, RopeCase, RopeHadamardCase
from .router import RouteCase


def _attention() -> tuple[AttentionCase, ...]:
    def separate(d: int, **fields: Any) -> FmhaCase:
        return FmhaCase(d=d, **fields)

    def latent(h_q: int, **fields: Any) -> FmhaCase:
        return FmhaCase(h_q=h_q, d=512, shared_kv=True, **fields)

    def sparse(h_q: int, **fields: Any) -> SparseCase:
        return SparseCase(h_q=h_q, **{"d": 512, "s_kv": 300, **fields})

    def dsv4(h_q: int, **fields: Any) -> LayerCase:
        return LayerCase(h_q=h_q, d=512, **fields)

    def decode(h_q: int, **fields: Any) -> DecodeCase:
        return DecodeCase(h_q=h_q, d=512, **fields)

    def mla(h_q: int, **fields: Any) -> LatentStepCase:
        return LatentStepCase(h_q=h_q, **{"d": 576, **fields})

    def gqa(h_q: int, **fields: Any) -> HeadsStepCase:
        return HeadsStepCase(h_q=h_q, **fields)

    every_d = [
        case
        for d in (64, 128, 256, 512)
        for case in (
            separate(d, b=2, s_q=200, s_kv=200, h_q=2, h_kv=2, span="causal"),
            separate(d, s_q=130, s_kv=257, h_q=14, h_kv=2, span="window", window=33, sink="normal"),  # groups of 7
            separate(d, s_q=33, s_kv=129, h_q=16, sink="mixed"),
            separate(d, b=3, s_q=65, s_kv=190, h_q=8, h_kv=2, span="lengths", features=("nan",)),
            separate(d, b=2, s_q=150, s_kv=150, h_q=4, h_kv=2, span="causal+segments", sink="normal"),
            separate(d, b=2, s_q=100, s_kv=180, h_q=3, h_kv=3, span="random", sink="normal"),
            separate(d, s_q=190, s_kv=190, h_q=6, h_kv=2, span="causal", dtype="float16", sink="normal"),
            separate(d, s_q=70, s_kv=300, h_q=12, span="window", dtype="float16"),
        )
    ]
    return (
        *every_d,
        # the smallest, one key, one query, ragged tails
        separate(64, s_q=1, s_kv=1),
        separate(128, s_q=1, s_kv=1000, h_q=7, sink="normal"),
        separate(256, b=3, s_q=1, s_kv=63, h_q=4, h_kv=4),
        separate(128, s_q=300, s_kv=1, h_q=2),
        separate(512, b=2, s_q=1, s_kv=1000, h_q=16, h_kv=2, sink="normal"),
        separate(64, s_q=129, s_kv=65, h_q=5, h_kv=5),
        separate(128, s_q=257, s_kv=383, h_q=9, h_kv=3, span="causal"),
        separate(64, s_q=96, s_kv=64, h_q=4, span="causal"),  # the first 32 rows are empty
        separate(128, b=2, s_q=130, s_kv=77, h_q=4, h_kv=2, span="segments"),
        separate(128, b=4, s_q=90, s_kv=150, h_q=2, span="window+lengths", window=17, features=("nan",)),
        separate(64, s_q=128, s_kv=128, h_q=128),
        # sinks at their ends, large logits, V is K where the kernel reads them apart
        separate(128, s_q=70, s_kv=70, h_q=4, span="causal", sink="+inf"),
        separate(128, s_q=70, s_kv=70, h_q=4, span="causal", sink="-inf"),
        separate(64, s_q=100, s_kv=150, h_q=4, h_kv=2, sink="normal", features=("large",)),
        separate(256, s_q=100, s_kv=150, h_q=4, span="causal", dtype="float16", features=("large",)),
        separate(128, s_q=100, s_kv=150, h_q=4, h_kv=2, shared_kv=True, span="causal", sink="mixed"),
        separate(128, s_q=64, s_kv=150, h_q=16, shared_kv=True, span="causal", dtype="float16", sink="normal"),
        # 16-bit and 31-bit counts of rows and of elements
        separate(64, s_q=70_000, s_kv=70_000, span="window"),
        separate(128, b=2, s_q=2048, s_kv=2048, h_q=16, h_kv=4, span="causal", sink="normal"),
        separate(512, s_q=2048, s_kv=2048, h_q=16, h_kv=2, span="causal"),
        separate(128, b=2, s_q=2048, s_kv=2048, h_q=16, span="window", sink="normal"),  # few keys, many tiles of them
        latent(8, s_q=70_000, s_kv=70_000, span="window", sink="normal"),
        latent(64, s_q=70_000, s_kv=70_000, span="window", sink="normal"),  # 2**31 elements and more
        # one latent head, with every number of query heads that a rank may have
        latent(1, s_q=150, s_kv=150, span="causal"),
        latent(7, s_q=50, s_kv=200, span="window", sink="normal"),
        latent(8, b=2, s_q=33, s_kv=130, sink="mixed"),
        latent(16, s_q=64, s_kv=64, span="causal", sink="normal"),
        latent(32, s_q=40, s_kv=190, span="window"),
        latent(64, s_q=30, s_kv=64, span="causal", sink="normal"),
        latent(96, s_q=20, s_kv=97, span="window", window=40),
        latent(128, s_q=20, s_kv=130, span="window", sink="normal"),
        latent(128, s_q=1, s_kv=500, sink="normal"),
        latent(8, s_q=1, s_kv=1),
        latent(8, h_kv=2, s_q=70, s_kv=100, span="causal", sink="normal"),
        latent(21, h_kv=3, s_q=40, s_kv=140, span="random", sink="mixed"),
        latent(16, b=3, s_q=40, s_kv=140, span="lengths", features=("nan",)),
        latent(16, b=3, s_q=40, s_kv=140, span="window+lengths", sink="normal", features=("nan",)),
        latent(8, b=2, s_q=120, s_kv=120, span="causal+segments"),
        latent(8, s_q=300, s_kv=75, span="compressed", ratio=4, sink="normal"),
        latent(64, s_q=160, s_kv=4, span="compressed", ratio=128),  # entries that nobody sees, and rows without entries
        latent(32, s_q=50, s_kv=110, span="causal", sink="normal", features=("large",)),
        latent(128, s_q=16, s_kv=140, span="window", features=("large",)),
        latent(64, s_q=1024, s_kv=1024, span="causal", sink="normal"),
        latent(128, s_q=2048, s_kv=2048, span="window", sink="normal"),
        # top-k
        sparse(8, s_q=20, topk=64),
        sparse(64, b=2, s_q=9, topk=192, sink="normal", features=("absent", "nan")),
        sparse(128, s_q=5, topk=70, sink="mixed", features=("absent", "lengths", "nan")),
        sparse(1, s_q=30, topk=1, features=("absent",)),
        sparse(7, s_q=30, s_kv=1, topk=5, features=("absent",)),
        sparse(4, b=3, s_q=40, d=64, topk=33, dtype="float16", sink="normal", features=("lengths", "nan")),
        sparse(16, s_q=20, topk=400, sink="+inf"),
        sparse(16, s_q=20, topk=48, sink="-inf", features=("large", "absent")),
        sparse(64, s_q=256, s_kv=4096, topk=1152, sink="normal"),
        # the same of latents with numbers for RoPE after values: the kinds that FlashMLA's suites hold
        *(
            case
            for h in (128, 64, 16)
            for case in (
                sparse(h, s_q=213, s_kv=592, d=576, topk=128),
                sparse(h, s_q=62, s_kv=1521, d=576, topk=512, sink="mixed", features=("absent", "lengths", "nan")),
                sparse(h, s_q=62, s_kv=95, d=576, topk=128, sink="mixed", features=("absent",)),  # more than there are
                sparse(h, s_q=1, s_kv=256, d=576, topk=256, sink="normal", features=("absent",)),  # none is there
                sparse(h, s_q=1024, s_kv=32, d=576, topk=2048, sink="mixed", features=("absent", "lengths")),
                sparse(h, s_q=1, s_kv=64, d=576, topk=8192, features=("lengths",)),
            )
        ),
        # of 136 tiles of rows the last four queries' are split, on 132 SMs
        *(sparse(64, s_q=136, s_kv=3000, d=d, topk=2048, sink="mixed", features=("absent", "nan")) for d in (512, 576)),
        sparse(64, b=136, s_q=1, s_kv=500, d=576, topk=2048, sink="mixed", features=("lengths", "nan")),
        # whole layers; a prefill sees some positions both in the window and compressed
        dsv4(8, b=2, s_q=150, s_kv=150, sink="normal"),
        dsv4(64, s_q=24, s_kv=24, sink="mixed", window=8),
        dsv4(16, b=3, s_q=40, s_kv=140, decode=True, sink="normal", features=("lengths", "nan")),
        dsv4(8, s_q=300, s_kv=300, s_c=3, ratio=128, sink="normal", features=("nan",)),
        dsv4(8, b=2, s_q=120, s_kv=120, s_c=30, ratio=4, sink="normal"),
        dsv4(128, s_q=2, s_kv=128, s_c=60, ratio=128, decode=True, sink="mixed"),
        dsv4(8, b=3, s_q=4, s_kv=150, s_c=40, ratio=128, decode=True, sink="normal", features=("lengths", "nan")),
        dsv4(8, b=2, s_q=60, s_kv=60, s_c=15, ratio=4, topk=12, sink="normal", features=("absent",)),
        dsv4(64, s_q=3, s_kv=128, s_c=700, ratio=4, topk=512, decode=True, sink="normal", features=("absent", "nan")),
        dsv4(16, b=2, s_q=30, s_kv=30, s_c=8, ratio=4, topk=6, features=("absent", "lengths", "nan")),
        dsv4(16, s_q=64, s_kv=64, s_c=16, ratio=4, sink="normal", features=("large",)),
        dsv4(128, s_q=1024, s_kv=1024, s_c=8, ratio=128, sink="normal"),
        # by products of e4m3: of arrays, and chunks of prompts over caches
        dsv4(64, b=2, s_q=150, s_kv=150, sink="normal", features=("e4m3",)),
        dsv4(128, s_q=300, s_kv=300, s_c=75, ratio=4, topk=70, sink="mixed", features=("e4m3", "absent", "nan")),
        dsv4(80, b=2, s_q=300, s_kv=300, s_c=3, ratio=128, sink="normal", features=("e4m3",)),
        dsv4(72, s_q=150, s_kv=150, s_c=37, ratio=4, topk=36, sink="normal", features=("e4m3", "bf16_rope", "nan")),
        *(
            decode(h, b=3, s_q=70, s_kv=900, page=64, ratio=4, topk=k, sink="normal", features=("e4m3", "nan", *more))
            for h, k, more in (
                *((128, 130, ()), (64, 90, ("lengths",)), (64, 130, ("fp8",)), (7, 0, ("fp8", "lengths"))),
                *((128, 200, ("v41_fp8", "ragged")), (16, 70, ("v4_fp4", "absent")), (80, 130, ("v41_fp4", "drafts"))),
            )
        ),
        decode(128, b=2, s_q=64, s_kv=700, ratio=4, topk=200, features=("e4m3", "fp8", "nan")),
        decode(64, b=2, s_q=70, s_kv=900, page=64, ratio=4, topk=130, features=("e4m3", "bf16_rope", "fp8", "nan")),
        # steps of generation: contiguous and paged, in 16 bits and in FP8
        decode(64, s_kv=1),
        decode(8, b=4, s_kv=300, sink="normal"),
        decode(128, s_q=2, s_kv=4608, page=64, ratio=4, topk=1024, sink="normal"),
        decode(16, b=2, s_kv=900, page=64, ratio=4, topk=48, sink="mixed"),
        decode(128, s_kv=9000, ratio=1, sink="normal"),  # one query of many keys
        *(
            case
            for fp8 in ((), ("fp8",))
            for case in (
                decode(16, b=4, s_q=8, s_kv=500, page=64, sink="mixed", features=("lengths", "nan", *fp8)),
                decode(128, b=4, s_q=3, s_kv=9000, page=2, ratio=128, sink="normal", features=("lengths", "nan", *fp8)),
                decode(7, b=3, s_q=2, s_kv=3000, ratio=4, topk=1, features=("absent", "lengths", "nan", *fp8)),
                decode(64, b=4, s_kv=4000, page=61, ratio=4, topk=512, features=("absent", "nan", *fp8)),
                decode(96, b=4, s_q=5, s_kv=1500, page=576, ratio=4, topk=192, sink="normal", features=fp8),
                decode(
                    8, b=74, s_q=2, s_kv=600, page=69, ratio=4, topk=64, features=("absent", "lengths", "nan", *fp8)
                ),
                decode(
                    64, b=321, s_kv=800, page=256, ratio=4, topk=130, sink="normal", features=("lengths", "nan", *fp8)
                ),
                decode(32, b=2, s_q=2, s_kv=2000, ratio=4, topk=70, features=("large", *fp8)),
                decode(
                    64,
                    b=6,
                    s_q=6,
                    s_kv=700,
                    page=32,
                    ratio=4,
                    topk=96,
                    sink="normal",
                    features=("ragged", "lengths", "nan", *fp8),
                ),
                decode(128, b=5, s_q=5, s_kv=400, page=64, sink="normal", features=("drafts", "ragged", "nan", *fp8)),
            )
        ),
        # DeepSeek-V4's entries in FP4, beside a window in FP8
        decode(64, b=3, s_q=2, s_kv=1300, page=64, ratio=4, topk=200, sink="normal", features=("v4_fp4", "nan")),
        decode(128, b=4, s_q=2, s_kv=2000, page=61, ratio=4, topk=320, features=("v4_fp4", "pages", "absent", "nan")),
        decode(16, b=4, s_q=8, s_kv=900, page=2, ratio=128, sink="mixed", features=("v4_fp4", "ragged", "nan")),
        decode(96, b=3, s_q=3, s_kv=700, page=32, ratio=4, topk=96, features=("v4_fp4", "lengths", "nan")),
        # DeepSeek-V4.1's: window FP8, compressed FP8 or FP4, of ratios 1 and 2
        decode(64, b=3, s_q=2, s_kv=1300, page=64, ratio=1, topk=512, sink="normal", features=("v41_fp4", "nan")),
        decode(64, b=4, s_kv=2000, page=61, ratio=2, topk=512, features=("v41_fp8", "pages", "absent", "nan")),
        decode(16, b=4, s_q=8, s_kv=500, page=32, ratio=2, sink="mixed", features=("v41_fp4", "pages", "lengths")),
        decode(128, b=2, s_q=2, s_kv=900, page=2, ratio=1, topk=320, features=("v41_fp4", "lengths", "nan")),
        decode(96, b=2, s_q=3, s_kv=700, ratio=128, sink="normal", features=("v41_fp8",)),
        decode(8, b=3, s_q=2, s_kv=300, page=16, sink="normal", features=("v41_fp8", "lengths")),
        decode(32, b=4, s_q=7, s_kv=260, page=64, sink="normal", features=("v41_fp8", "drafts", "ragged")),
        decode(64, b=4, s_q=8, s_kv=500, page=64, ratio=128, features=("v41_fp4", "ragged", "nan")),
        # of latents with numbers for RoPE after values: V3.2 and its kin, dense too; without these, as GLM-5.3-Flash
        mla(128, s_kv=1),
        mla(64, b=3, s_q=2, s_kv=700, sink="normal", features=("lengths", "nan")),
        mla(8, b=2, s_kv=900, topk=70, features=("absent", "nan")),
        mla(128, s_q=4, s_kv=9000, topk=2048, sink="normal"),
        mla(16, b=3, s_q=8, s_kv=500, d=512, page=64, topk=67, sink="normal", features=("ragged", "nan")),
        mla(64, b=2, s_q=2, s_kv=300, d=512, features=("ragged",)),
        *(
            case
            for packed in ((), ("v32_fp8",))
            for case in (
                mla(64, s_kv=3, page=2, features=packed),
                mla(128, b=4, s_q=3, s_kv=1500, page=64, sink="normal", features=("lengths", "nan", *packed)),
                mla(16, b=4, s_q=8, s_kv=500, page=64, sink="mixed", features=("ragged", "nan", *packed)),
                mla(8, b=2, s_kv=2000, page=64, topk=130, sink="normal", features=("absent", "nan", *packed)),
                mla(64, b=3, s_q=2, s_kv=4000, page=61, topk=512, features=("absent", "lengths", "nan", *packed)),
                mla(128, b=5, s_q=5, s_kv=900, page=64, topk=96, sink="normal", features=("ragged", "nan", *packed)),
                mla(24, b=74, s_q=2, s_kv=600, page=69, topk=64, features=("lengths", "nan", *packed)),
                mla(32, b=2, s_q=2, s_kv=800, page=64, topk=70, features=("large", *packed)),
            )
        ),
        mla(16, b=3, s_q=2, s_kv=200, sink="normal", features=("lengths", "nan", "v32_fp8")),
        mla(64, b=3, s_q=2, s_kv=400, topk=90, features=("ragged", "nan", "v32_fp8")),
        mla(64, b=321, s_q=3, s_kv=512, page=2, topk=64, sink="mixed", features=("lengths", "nan", "v32_fp8")),
        mla(128, b=2, s_q=2, s_kv=2046, page=576, topk=2048, sink="mixed", features=("absent", "nan", "v32_fp8")),
        mla(128, b=74, s_q=3, s_kv=650, page=53, topk=576, features=("absent", "lengths", "nan", "v32_fp8")),
        mla(64, b=4, s_kv=512, page=61, topk=64, features=("absent", "nan", "v32_fp8")),  # none is there
        mla(64, b=2, s_q=2, s_kv=32768, page=64, topk=16384, sink="normal", features=("v32_fp8",)),
        # of keys and values of several heads, as gpt-oss, Llama and Qwen have them
        gqa(1, s_kv=1),
        gqa(64, b=3, h_kv=8, s_kv=700, sink="normal", features=("lengths",)),
        gqa(64, b=3, s_q=2, h_kv=8, s_kv=700, span="window", sink="normal"),
        gqa(64, s_kv=3, h_kv=8, page=16),
        gqa(64, b=5, h_kv=8, s_kv=1500, page=64, sink="normal", features=("lengths", "nan")),
        gqa(64, b=5, h_kv=8, s_kv=1500, page=64, span="window", sink="mixed", features=("lengths", "nan")),
        gqa(64, b=3, s_q=8, h_kv=8, s_kv=400, page=16, span="window", sink="normal", features=("ragged", "nan")),
        gqa(32, b=4, s_q=8, h_kv=2, s_kv=900, d=128, page=16, sink="mixed", features=("ragged", "lengths", "nan")),
        gqa(32, b=3, h_kv=8, s_kv=900, d=128, page=128, features=("nan",)),
        gqa(4, b=40, h_kv=4, s_kv=150, d=128, page=24, span="window", window=33, sink="normal", features=("nan",)),
        gqa(16, b=2, s_q=3, h_kv=1, s_kv=500, d=256, page=8, sink="normal", features=("lengths", "nan")),
        gqa(14, b=2, h_kv=2, s_kv=500, d=256, page=64, span="window", window=200, features=("nan",)),
        gqa(8, b=2, s_q=2, h_kv=2, s_kv=300, page=64, dtype="float16", sink="normal"),
        gqa(8, b=2, s_q=2, h_kv=2, s_kv=300, page=7, sink="normal", features=("nan",)),
        gqa(64, b=140, h_kv=8, s_kv=150, page=32, sink="normal", features=("lengths", "nan")),
        gqa(64, b=2, h_kv=8, s_kv=20000, page=64, sink="normal", features=("nan",)),
        *(
            gqa(h_q, page=page, sink="normal", features=("nan", "e4m3_caches", *features), **fields)
            for h_q, page, features, fields in (
                (64, 64, ("lengths",), {"b": 5, "h_kv": 8, "s_kv": 1500}),
                (64, 16, ("ragged",), {"b": 3, "s_q": 8, "h_kv": 8, "s_kv": 400, "span": "window"}),
                (32, 128, (), {"b": 3, "h_kv": 8, "s_kv": 900, "d": 128}),
                (32, 16, ("lengths",), {"b": 4, "s_q": 8, "h_kv": 2, "s_kv": 900, "d": 128, "dtype": "float16"}),
                (16, 8, (), {"b": 2, "s_q": 3, "h_kv": 1, "s_kv": 500, "d": 256}),
                (8, 0, (), {"b": 2, "s_q": 2, "h_kv": 2, "s_kv": 320}),
                (64, 64, (), {"b": 2, "h_kv": 8, "s_kv": 20000}),
            )
        ),
    )


def _indexer() -> tuple[IndexerCase, ...]:
    types = "bfloat16", "float8_e4m3fn"
    return (
        *(ChoiceCase(s_q=9, s_c=300, topk=40, h_q=h, dtype=t) for h in (32, 64) for t in types),
        *(ChoiceCase(s_q=29, s_c=5000, topk=512, ratio=4, dtype=t) for t in types),
        ChoiceCase(s_q=5, s_c=9000, topk=2048),
        *(ChoiceCase(s_q=s_q, s_c=640, topk=64, dtype=t, page=64) for s_q in (2, 8) for t in types),
        ChoiceCase(s_q=3, s_c=320, topk=700, h_q=32, dtype="float8_e4m3fn", page=32),
        *(BlocksCase(s_q=9, s_c=300, topk=40, h_q=32, dtype=t) for t in types),
        *(BlocksCase(s_q=2, s_c=320, topk=40, h_q=32, page=32, dtype=t) for t in types),
        *(ScoresCase(s_q=9, s_c=90, topk=130, h_q=h) for h in (32, 64)),
    )


def _rope() -> tuple[RopeCase, ...]:
    return (
        RopeCase(b=2, s_q=150, h_q=16, d=512),
        RopeCase(b=3, s_q=5),
        NormRopeCase(b=2, s_q=60, h_q=16, d=512),
        RopeHadamardCase(b=2, s_q=70, h_q=16, d=128),
    )


def _insert() -> tuple[InsertCase, ...]:
    packed = (("v4_fp8",), ("v41_fp8",))
    return (
        *(InsertCase(s_q=3, ratio=r, features=x) for r in (0, 4, 128) for x in ((), *packed)),
        *(InsertCase(s_q=3, ratio=r, features=("v4_fp4",)) for r in (4, 128)),
        *(InsertCase(s_q=3, d=128, ratio=4, features=x) for x in ((), ("index_fp8",), ("index_fp4",))),
        *(InsertCase(s_q=4, ratio=r, features=(*x, "ragged")) for r in (0, 4, 128) for x in ((), ("v4_fp8",))),
        *(InsertCase(s_q=3, d=576, features=x) for x in ((), ("v32_fp8",), ("v32_fp8", "ragged"))),
    )


def _model() -> tuple[Case, ...]:
    """The ops of a model beside attention."""
    return (
        HyperConnectionCase(b=2, s_q=19),
        HyperConnectionCase(s_q=1, features=("taken",)),
        HyperConnectionCase(s_q=300, features=("taken",)),
        RouteCase(b=2, s_q=19),
        RouteCase(s_q=1, s_c=384),
        RouteCase(s_q=300, topk=8, features=("sigmoid",)),
        RouteCase(s_q=90, features=("of_table",)),
        ExpertsCase(s_q=12),
        ExpertsCase(s_q=90, d=512, s_c=6, topk=3),
        ExpertsCase(s_q=12, features=("e4m3_weights",)),
        ExpertsCase(s_q=90, d=512, s_c=6, topk=3, features=("e4m3_weights",)),
        ExpertsCase(s_q=20, d=512, features=("e4m3_weights", "float32_scales")),
    )


ATTENTION, INDEXER, ROPE, INSERT, MODEL = _attention(), _indexer(), _rope(), _insert(), _model()
CASES: tuple[Case, ...] = (*ATTENTION, *INDEXER, *ROPE, *INSERT, *MODEL)
