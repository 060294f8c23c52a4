"""Sentences of README, the landing page and others."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from tests import check

from .options import extent
from .peers import steps_beside_flashmla
from .records import (
    CUDNN_FRONTEND,
    DECODE,
    FORWARD,
    GQA,
    GRAD,
    INDEXER,
    LATENT,
    LAYER,
    LOAD,
    NOTED,
    ON_H100,
    PEERS,
    PROMPT,
    PROMPTS,
    STACKS,
    STEPS,
    WHOLE,
    WINDOW,
    bullets,
    micro,
    of_peer,
    ours,
    percent,
    rate,
    row_of,
    seconds,
    share,
    table,
    texts,
    wrapped,
)


def limits() -> str:
    """What performance.md says of pages that have tables of their own."""
    rows = {row["sharded"]: NOTED["scaling"]["one device, ms"] / row["auto_ms"] for row in NOTED["scaling"]["rows"]}
    host = NOTED["host"]
    return wrapped(f"""[Four GPUs of a host](kernels/scaling.md): batch over four is {rows["batch over four"]:.1f} times as fast as one,
    heads over four {rows["heads over four"]:.1f} times. A tiny jitted call returns to Python after {host["ours_us"]} µs (cuDNN through `jax.nn`: {host["cudnn_us"]} µs).""")


def machine() -> str:
    """The machines on which the numbers were measured."""
    lines = []
    runs = {name: x for name, x in (("FlashMLA", PEERS), ("cuDNN frontend", CUDNN_FRONTEND)) if "versions" in x}
    runs |= {
        "forward": FORWARD,
        "steps": DECODE,
        "gradients": GRAD,
        "indexer": INDEXER,
        "layers": LAYER,
        "layers' steps": STEPS,
        "steps of many layers": STACKS,
        "layers and steps": ON_H100,
        "long prompts": PROMPTS,
        "latents of 576": LATENT,
        "steps of GQA": GQA,
    }
    days: dict[tuple[str, ...], list[tuple[str, float, float, int]]] = {}
    for name, data in runs.items():
        matmul, copy = (
            sorted(row[key] for row in data["rows"])[len(data["rows"]) // 2]
            for key in ("matmul_flops_per_s", "copy_bytes_per_s")
        )
        versions = data["versions"]
        day = (data["devices"][0]["name"], data["date"][:10], versions["jax"], versions["cuda_driver"])
        days.setdefault(day, []).append((name, matmul, copy, data["rounds"]))
    for (card, date, jax, driver), found in sorted(days.items(), key=lambda x: x[0][1]):
        names, matmuls, copies, rounds = zip(*found, strict=True)
        m, c, n = (
            _extent(x, form)
            for x, form in (
                (matmuls, lambda m: f"{m / 1e12:.0f}"),
                (copies, lambda c: f"{c / 1e12:.2f}"),
                (rounds, str),
            )
        )
        lines.append(
            f"- {date}, {card}, jax {jax}, CUDA driver {driver}: {', '.join(names)}; M {m} TFLOP/s, C {c} TB/s, {n} rounds"
        )
    spread, machines = NOTED["noise"]["middle half of the rounds above a millisecond"], NOTED["noise"]["machines"]
    noise = f"""Above a millisecond the power limit acts: the rounds' middle half spreads by {percent(spread)}.
    Machines differ by {percent(machines)}: compare within a run."""
    return "\n".join([*lines, "", wrapped(noise)])


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _stack() -> tuple[str, dict[str, Any]]:
    """The card, and the row, of the newest step through the attention of all of V4-Flash's layers."""
    record = max((STACKS, ON_H100), key=lambda record: record["date"])
    return record["devices"][0]["name"].split()[1], row_of(record, "43 layers, step after 16384, b64")


def _extent(numbers: Iterable[float], form: Callable[[float], str]) -> str:
    least, *_, most = [form(x) for x in sorted(numbers) for _ in range(2)]
    return least if least == most else f"{least} to {most}"


def readme() -> str:
    layer, backward = row_of(FORWARD, PROMPT), row_of(GRAD, f"gradient of {PROMPT}")
    window = row_of(FORWARD, WINDOW)
    steps = steps_beside_flashmla()
    packed = [extent(x for (kind, h, b), x in steps.items() if (kind, h) == ("fp8", n) and b >= 64) for n in (128, 64)]
    card, stack = _stack()
    one, many = (next(row for row in WHOLE["rows"] if row["work"].startswith(f"step, b {b},")) for b in (1, 64))
    load = next(row for row in LOAD["rows"] if row["concurrency"] == 16)
    served, published = load["in_tokens_s"] + load["out_tokens_s"], LOAD["published"]["rows"]["16"][-1]
    return bullets(f"""- **A prompt.** Attention of 128 heads over a window of 128 and 1024 selected keys takes {_milli(ours(layer))} for 4096
  queries, at {rate(layer)} TFLOP/s. FlashMLA, [timed in turns](docs/peers.md#flashmla), takes {of_peer(row_of(PEERS, PROMPT), "flashmla")} times as long. Over the window alone it takes
  {_milli(ours(window))}; FlashMLA takes {of_peer(row_of(PEERS, WINDOW), "flashmla")} times as long, XLA {of_peer(window, "xla")} times.
- **Its gradient** takes {_milli(ours(backward))} more, at {rate(backward)} TFLOP/s.
- **A step** from FP8 caches, 64 to 148 sequences: FlashMLA takes {packed[0]} times as long with 128 heads, and
  {packed[1]} times with 64.
- **A step of a model**: the attention layers of V4-Flash, all 43 with their products, take {_milli(seconds(stack, "at once"))} for 64 sequences of 16384 tokens on an {card},
  in {stack["times"]["ours"]["launches"]} launches.
- **The whole model**: {WHOLE["devices"]} H200s take {one["ms"]:.1f} ms for a token of V4-Flash after 8192, experts in MXFP4 and projections in FP8, and
  {many["ms"]:.1f} ms for a step of 64 such sequences: {many["tokens/s"]:.0f} tokens/s. A server that has 16 requests at a time, of 8192 tokens with 1024 to say, reads and says {served:.0f} tokens/s a GPU;
  SGLang's documentation has {published} on four H200s ([how](docs/tutorials/model.md#how-fast)).""")


def at_a_glance() -> str:
    """What a user calls, how long it takes, and the best peer that was timed."""
    indexer = "top-k 512 of 8192, bfloat16 h64, b1 s4096"
    causal = "d 128 causal b2 s8192 h16"
    step = "d 512 window 128 + top-k 1024 of 16384 b{} s2 h128 fp8".format
    found = [
        ("prompt, 128 heads, window and 1024 of 8192 entries", FORWARD, PROMPT, "FlashMLA", PEERS),
        ("prompt, 128 heads, window alone", FORWARD, WINDOW, "FlashMLA", PEERS),
        ("its gradient", GRAD, f"gradient of {WINDOW}", "XLA", GRAD),
        ("prompt, causal, d 128, 2 × 8192 tokens, 16 heads", FORWARD, causal, "cuDNN", FORWARD),
        ("its gradient", GRAD, f"gradient of {causal}", "cuDNN", GRAD),
        ("step of 2 sequences from FP8, 128 heads", DECODE, step(2), "FlashMLA", PEERS),
        ("step of 64 sequences from FP8, 128 heads", DECODE, step(64), "FlashMLA", PEERS),
        ("an indexer's choice, 512 of 8192 entries", INDEXER, indexer, "cuDNN frontend", CUDNN_FRONTEND),
    ]
    rows = []
    for what, record, name, peer, of in found:
        row = row_of(record, name)
        beside = of_peer(row_of(of, name), peer.lower().replace(" ", "_"))
        rows.append([what, micro(ours(row)), share(row), f"{peer} {beside}"])
    card, stack = _stack()
    rows.append(
        [
            f"step of V4-Flash's 43 attention layers, 64 sequences, on an {card}",
            micro(seconds(stack, "at once")),
            "–",
            "–",
        ]
    )
    return table("4096 queries, or a step of two tokens | µs | of the roofline | the best peer, its time / ours", rows)


def landing() -> str:
    """The first page's number."""
    row = row_of(FORWARD, PROMPT)
    return wrapped(f"""On one {FORWARD["devices"][0]["name"].removeprefix("NVIDIA ")}, attention of 128 heads over a window of 128 and 1024 chosen
    entries takes **{_milli(ours(row))}** for 4096 queries, at {rate(row)} TFLOP/s, {share(row)} of the roofline.""")


PEER = {
    "flashmla": "FlashMLA",
    "flash_attention_3": "FlashAttention 3",
    "cudnn": "cuDNN",
    "cudnn_frontend": "cuDNN frontend",
    "xla": "XLA",
}
CACHE = {None: "bfloat16", "fp8": "FP8"}


def losses() -> str:
    """Every row in which a peer was faster, by the records that have peers; then where we are slow by ourselves."""
    lost = []
    for record in (PEERS, LATENT, CUDNN_FRONTEND, FORWARD, GRAD):
        for row in record["rows"]:
            pairs = [(peer, seconds(row, peer) / ours(row)) for peer in PEER if peer in row["times"]]
            lost += [(ratio, peer, row["name"]) for peer, ratio in pairs if ratio < 0.995]
    lost += [(x, "torch's cuDNN", name) for name, x in NOTED["torch's cuDNN"]["ratios"].items() if x < 0.995]
    gradients = [x for x in lost if x[1] == "flash_attention_3" and x[2].startswith("gradient")]
    lost = sorted(set(lost) - set(gradients))
    rows = [[_said(name), PEER.get(peer, peer), f"{ratio:.2f}"] for ratio, peer, name in lost]
    what = f"{len(gradients)} gradients, causal, d 64 to 256"
    rows.insert(0, [what, "FlashAttention 3", extent(ratio for ratio, *_ in gradients)])
    of_gqa = extent(seconds(row, "cudnn") / ours(row) for row in GQA["rows"] if "cudnn" in row["times"])
    rows.insert(1, ["steps of GQA, 1 to 256 sequences of 8192 tokens in pages", "cuDNN, contiguous", of_gqa])
    few = row_of(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h16")
    far = row_of(GRAD, "gradient of d 512 window 128 + top-k 512 of 65536 b1 s4096 h64")
    slow = wrapped(f"""A prompt of 16 heads over selected keys reaches {share(few)} of the roofline, and the
    gradient of 64 heads over 512 of 65536 keys {share(far)}.""")
    return table("call | faster | its time / ours", rows).replace("---|---:|---:|", "---|---|---:|", 1) + "\n\n" + slow


def _said(name: str) -> str:
    """A step, or a call over latents, in words."""
    if found := re.match(r"d 576 top-k (\d+) of (\d+) b1 s4096 h(\d+)$", name):
        topk, keys, heads = found.groups()
        return f"prompt, {heads} heads, top-k {topk} of {keys} latents of 576 numbers"
    if found := re.match(r"d 576 step, top-k (\d+) of (\d+) b(\d+) s1 h(\d+) v32_fp8$", name):
        topk, keys, b, heads = found.groups()
        return f"step of {b} sequences, {heads} heads, top-k {topk} of {keys} latents of 576 numbers in 656 bytes"
    if found := re.match(r"d 576 full b(\d+) s1 h(\d+)$", name):
        return f"step of {found[1]} sequences, {found[2]} heads, over all latents of 576 numbers"
    if not (found := re.match(r"d 512 window 128 \+ top-k (\d+) of 16384 b(\d+) s(\d+) h(\d+)(?: (\w+))?$", name)):
        return name
    topk, b, s, heads, cache = found.groups()
    return f"step of {b} sequences, {s} tokens each, {heads} heads, top-k {topk}, {CACHE[cache]} caches"


def which_tests() -> str:
    """CONTRIBUTING.md's table, of tests/which.toml."""
    rows = []
    for row in check.table()[1]:
        tests = [f"`{name}.py`" for name in row.run] + [f"*`{name}.py`*" for name in row.interpret]
        paths = (x if "*" in x or "." in x else f"{x}/" for x in row.change)
        rows.append([", ".join(f"`{path}`" for path in paths), "; ".join(filter(None, [", ".join(tests), row.more]))])
    return texts("you change | run, of `tests/`", rows)
