"""What options of a call cost: the page on options."""

from collections.abc import Iterable

from .records import DECODE, NOTED, SAME_BITS, STEP, ours, seconds, suite, table, texts


def extent(ratios: Iterable[float]) -> str:
    """From the least to the greatest, of two digits."""
    found = [f"{ratio:.2f}" for ratio in sorted(ratios)]
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def options() -> str:
    """Promises, costs and needs, in times of the default."""
    order, codes = NOTED["batch invariant"], NOTED["products of e4m3"]
    selected = order["selected keys, 4096 queries"]
    few, some, *many = order["steps"]["by sequences"].values()
    of_e4m3 = extent(e4m3 / bf16 for e4m3, bf16 in codes["rows"].values())
    rope = (
        codes["64 heads, window and 512 of 65536, RoPE in bfloat16"]
        / codes["rows"]["64 heads, window and 512 of 65536"][1]
    )
    rows = suite(SAME_BITS, "grad")
    alone = extent(seconds(row, "deterministic") / ours(row) for row in rows)
    both = extent(seconds(row, "both by deterministic") / seconds(row, "both") for row in rows)
    dense = extent(same / default for default, same in NOTED["deterministic"]["ms"].values())
    steps = {match.groups(): ours(row) for row in suite(DECODE, "decode") if (match := STEP.match(row["name"]))}
    packed = extent(time / steps[*key, None] for (*key, cache), time in steps.items() if cache == "fp8")
    return texts(
        "option | promises | a prompt | its gradient | a step | use it when | needs",
        [
            [
                "`batch_invariant=True`",
                "the bits of a query's o and lse depend on its own operands alone",
                f"{selected['least']:.2f} to {selected['most']:.2f} over chosen entries; over spans 1.00 with 64 or 128 heads, [else](#spans-with-few-heads) more",
                "promises nothing",
                f"2 sequences {extent(few)}, 8 {extent(some)}, 64 or more {extent(x for each in many for x in each)}",
                "training must see the log-probabilities of generation; an answer must not depend on the batch",
                "Hopper; d 512 with V = K, or d 64 to 256 where queries see keys from the first on; no FP8 products",
            ],
            [
                "`deterministic=True`",
                "gradients have the same bits in every run",
                "the same bits anyway",
                f"d 512: {alone}, with the forward pass {both}; d 64 and 128, causal: {dense} with the forward pass; d 256, and queries that see at most 512 keys: the same bits anyway",
                "no gradient",
                "a run must be repeated exactly, or a fault is hunted",
                "Hopper; on a GPU a gradient without a kernel may refuse",
            ],
            [
                '`precision="float8_e4m3fn"`',
                "products of q, entries and weights in e4m3; o some 4 % off for normal data",
                of_e4m3,
                "an error",
                "chunks of 64 queries or more",
                "prompts over chosen entries must be read faster, and the model bears it",
                "Hopper, d 512; no `batch_invariant`",
            ],
            [
                '`precision="float8_e4m3fn_bf16_rope"`',
                "the same, with RoPE's 64 dimensions of scores in bfloat16",
                f"{rope:.2f}, 64 heads, 65536 entries",
                "an error",
                "as above",
                "RoPE's channels are large",
                "as above",
            ],
            [
                "caches in FP8",
                "V4's 584 bytes an entry, where bfloat16 has 1024",
                "–",
                "an error",
                packed,
                "memory limits the batch or the context",
                "d 512; x in bfloat16",
            ],
        ],
    )


def batch_invariant_spans() -> str:
    """The mode over spans, by the number of heads."""
    found = NOTED["batch invariant"]["spans, 4096 queries"]
    heads = [*found["window 128"]]
    rows = [
        [f"{name}, times of the default", *(f"{x:.2f}" if (x := found[name].get(h)) else "–" for h in heads)]
        for name in ("window 128", "causal")
    ]
    return table(" | ".join([f"4096 queries, {found['device']}; heads", *heads]), rows)


def fp8_prompts() -> str:
    """Products in e4m3 beside those in bfloat16."""
    found = NOTED["products of e4m3"]
    rows = [[name, f"{e4m3}", f"{bf16}", f"{bf16 / e4m3:.2f}"] for name, (e4m3, bf16) in found["rows"].items()]
    return table("4096 queries, H200 | e4m3, µs | bfloat16, µs | bfloat16 / e4m3", rows)
