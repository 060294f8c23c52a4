"""The name of a case in words, as `python -m jax_dsv4_fmha check` prints it."""

from typing import Any

_SPANS = {
    "full": "",
    "causal": "causal",
    "window": "window {window}",
    "compressed": "each key after its {ratio} tokens",
    "lengths": "sequences of different lengths",
    "segments": "segments",
    "random": "a random span for each query",
}
_SINKS = {"none": "", "normal": "sink", "mixed": "sinks, some infinite"}  # another is a value
_OF_A_MODEL = ("hyper_connection", "route", "fused_moe")  # ops of tokens, which have no heads
_LENGTHS = {
    "sparse_fmha": "lists of different lengths",
    "dsv4_attention": "windows of different lengths",
    "dsv4_decode": "some sequences idle",
    "mla_decode": "some sequences idle",
    "gqa_decode": "some sequences idle",
}
_FEATURES = {
    "absent": "indices that name nothing",
    "ragged": "different numbers of new tokens",
    "drafts": "drafts that see each other",
    "fp8": "caches v4_fp8",
    "v4_fp4": "caches v4_fp8 and v4_fp4",
    "v41_fp8": "caches v41_fp8",
    "v41_fp4": "caches v41_fp8 and v41_fp4",
    "v32_fp8": "cache v32_fp8",
    "pages": "the window's pages of another size",
    "e4m3": "FP8 products",
    "e4m3_weights": "matrices in FP8",
    "float32_scales": "scales in float32",
    "bf16_rope": "RoPE's part in bfloat16",
    "e4m3_caches": "caches in e4m3, scales for each KV head",
    "large": "large logits",
    "taken": "streams taken in by given numbers",
    "sigmoid": "scores by a sigmoid",
    "of_table": "of a table",
    "nan": "NaN in unseen keys",
}


def said(op: str, facts: dict[str, Any]) -> str:
    """The op, the sizes of its operands, and at the end whatever is unusual about their values."""
    x = facts
    d = "" if op == "route" else f"d {x['d']}"
    words = [_queries(op, x), *_keys(op, x), d, x["dtype"] if x["dtype"] != "bfloat16" else ""]
    words += ["V is K" if op == "fmha" and x["shared_kv"] else ""]
    words += [_SPANS[part].format(**x) for part in x["span"].split("+")]
    words += [f"window {x['window']}" if op.startswith("dsv4") and x["window"] != 128 else ""]
    words += [f"pages of {x['page']}" if x["page"] else "", _SINKS.get(x["sink"], f"sink {x['sink']}")]
    return f"{op}: {', '.join(filter(None, [*words, *_features(op, x['features'])]))}"


def _queries(op: str, x: dict[str, Any]) -> str:
    if op == "kv_insert":
        return f"{x['s_q']} new tokens a sequence"
    batch = f"{x['b']} × " if x["b"] > 1 else ""
    one, more = ("token", "tokens") if "rope" in op or op in _OF_A_MODEL else ("query", "queries")
    heads = "" if op in _OF_A_MODEL else f", {_many(x['h_q'], 'head', 'heads')}"
    where = " at the ends of contexts" if x["decode"] else ""
    return f"{batch}{_many(x['s_q'], one, more)}{where}{heads}"


def _keys(op: str, x: dict[str, Any]) -> list[str]:
    """The number of keys, and how many of them a query chooses."""
    of = f" of {_many(x['ratio'], 'token', 'tokens')}" if x["ratio"] else ""
    some = f"top-k {x['topk']} of " if x["topk"] else ""
    entries, keys = (_many(x[n], *words) for n, words in (("s_c", ("entry", "entries")), ("s_kv", ("key", "keys"))))
    match op:
        case "fmha":
            return [keys + (f" of {x['h_kv']} heads" if x["h_kv"] > 1 else "")]
        case "sparse_fmha":
            return [some + keys]
        case "dsv4_attention":
            return [keys, some + entries + of if x["s_c"] else ""]
        case "dsv4_decode":
            return [
                f"up to {_many(x['s_kv'], 'token', 'tokens')}",
                f"{some or 'all '}entries{of}" if x["ratio"] else "",
            ]
        case "gqa_decode":
            return [f"up to {_many(x['s_kv'], 'token', 'tokens')} of {_many(x['h_kv'], 'head', 'heads')}"]
        case "mla_decode":
            return [f"{some or 'all of '}up to {_many(x['s_kv'], 'token', 'tokens')}"]
        case "fused_moe" | "route":
            return [f"{x['topk']} of {x['s_c']} experts each"]
        case "kv_insert":
            return [f"an entry for {x['ratio']} tokens" if x["ratio"] else "an entry for each token"]
        case _:
            return [some + entries + of if x["s_c"] else ""]


def _features(op: str, features: tuple[str, ...]) -> list[str]:
    if op == "kv_insert":
        return [_FEATURES[x] if x == "ragged" else f"layout {x}" for x in features]
    words = _FEATURES | {"lengths": _LENGTHS.get(op, "")}
    return [text for feature, text in words.items() if feature in features]


def _many(n: int, one: str, more: str) -> str:
    return f"{n} {one if n == 1 else more}"
