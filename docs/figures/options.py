"""What options of a call cost: the page on options."""

from collections.abc import Iterable
from typing import Any

from .records import DECODE, FORWARD, GRAD, NOTED, STEP, micro, ours, seconds, table, texts

E4M3 = " float8_e4m3fn products"


def extent(ratios: Iterable[float]) -> str:
    """From the least to the greatest, of two digits."""
    found = [f"{ratio:.2f}" for ratio in sorted(ratios)]
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def options() -> str:
    """Promises, costs and needs, in times of the default."""
    order = NOTED["batch invariant"]["steps"]
    prompts = [row for row in _rows(FORWARD, "batch_invariant") if row["case"]["d"] == 512]
    selected = _ratios((row for row in prompts if row["case"].get("topk")), "batch_invariant")
    spans = _ratios(
        (row for row in prompts if not row["case"].get("topk") and row["case"]["h_q"] >= 64), "batch_invariant"
    )
    in_order = _rows(DECODE, "batch_invariant")
    few, many = (_ratios((row for row in in_order if row["case"]["b"] == b), "batch_invariant") for b in (2, 64))
    alone, dense = (
        _ratios((row for row in _rows(GRAD, "deterministic") if (row["case"]["d"] > 256) == is_wide), "deterministic")
        for is_wide in (True, False)
    )
    both = extent(seconds(row, "both by deterministic") / seconds(row, "both") for row in _rows(GRAD, "deterministic"))
    of_e4m3 = extent(ours(row) / seconds(row, "bfloat16") for row in _rows(FORWARD, "bfloat16"))
    rope = extent(seconds(row, "bf16_rope") / seconds(row, "bfloat16") for row in _rows(FORWARD, "bf16_rope"))
    steps = {match.groups(): ours(row) for row in _rows(DECODE, "ours") if (match := STEP.match(row["name"]))}
    packed = extent(time / steps[*key, None] for (*key, cache), time in steps.items() if cache == "fp8")
    return texts(
        "option | promises | a prompt | its gradient | a step | use it when | needs",
        [
            [
                "`batch_invariant=True`",
                "the bits of a query's o and lse depend on its own operands alone",
                f"{selected} over chosen entries; over spans {spans} with 64 or 128 heads, [else](#spans-with-few-heads) more",
                "promises nothing",
                f"2 sequences {few}, 64 {many}; 8 on an {order['device']} {extent(order['by sequences']['8'])}",
                "training must see the log-probabilities of generation; an answer must not depend on the batch",
                "Hopper; d 512 with V = K, or d 64 to 256 where queries see keys from the first on; no FP8 products",
            ],
            [
                "`deterministic=True`",
                "gradients have the same bits in every run",
                "the same bits anyway",
                f"d 512 and 576: {alone}; d 64 and 128, causal: {dense}; with the forward pass {both}; d 256, and queries that see at most 512 keys: the same bits anyway",
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
                f"{rope} over chosen entries",
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
    """Products in e4m3 beside those in bfloat16, in turns."""
    rows = []
    for row in _rows(FORWARD, "bfloat16"):
        times = [
            ours(row),
            *(seconds(row, name) if name in row["times"] else None for name in ("bf16_rope", "bfloat16")),
        ]
        ratio = f"{seconds(row, 'bfloat16') / ours(row):.2f}"
        rows.append([row["name"].removesuffix(E4M3), *(micro(x) if x else "–" for x in times), ratio])
    return table("H200 | e4m3, µs | RoPE in bfloat16, µs | bfloat16, µs | bfloat16 / e4m3", rows)


def _rows(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Those in which a time took turns with the default's."""
    return [row for row in record["rows"] if name in row["times"] and "seconds" in row["times"][name]]


def _ratios(rows: Iterable[dict[str, Any]], name: str) -> str:
    return extent(seconds(row, name) / ours(row) for row in rows)
