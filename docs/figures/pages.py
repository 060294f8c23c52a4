"""Sentences of README, the landing page and others."""

from collections.abc import Iterable

from tests import check

from .gradients import pair_of
from .peers import steps_beside_flashmla
from .records import (
    DECODE,
    FORWARD,
    GRAD,
    INDEXER,
    KINDS,
    LAYER,
    MODEL,
    NOTED,
    PEERS,
    PROMPT,
    PROMPTS,
    SAME_BITS,
    STEPS,
    TODAY,
    micro,
    of_peer,
    ours,
    percent,
    rate,
    row_of,
    share,
    suite,
    table,
    texts,
    wrapped,
)


def limits() -> str:
    """What performance.md says of pages that have tables of their own."""
    ratios = [same_bits / default for default, same_bits in map(pair_of, suite(SAME_BITS, "grad"))]
    rows = {row["sharded"]: NOTED["scaling"]["one device, ms"] / row["auto_ms"] for row in NOTED["scaling"]["rows"]}
    host = NOTED["host"]
    return wrapped(f"""`deterministic=True` takes {min(ratios):.1f} to {max(ratios):.1f} times as long at d 512. [Four GPUs of a host](kernels/scaling.md): batch over four is {rows["batch over four"]:.1f} times as fast as
one, heads over four {rows["heads over four"]:.1f} times. A tiny jitted call returns to Python after {host["ours_us"]} µs (cuDNN through `jax.nn`: {host["cudnn_us"]} µs).""")


def machine() -> str:
    """The machines on which the numbers were measured."""
    lines = []
    runs = {"peers": PEERS} if "versions" in PEERS else {}
    runs |= {
        "forward": FORWARD,
        "steps": DECODE,
        "gradients": GRAD,
        "gradients with the same bits": SAME_BITS,
        "indexer": INDEXER,
        "layers": LAYER,
        "layers' steps": STEPS,
        "layers and steps now": TODAY,
        "long prompts": PROMPTS,
    }
    for name, data in runs.items():
        matmul, copy = (
            sorted(row[key] for row in data["rows"])[len(data["rows"]) // 2]
            for key in ("matmul_flops_per_s", "copy_bytes_per_s")
        )
        versions = data["versions"]
        lines.append(
            f"- {name}: {data['devices'][0]['name']}, {data['date'][:10]}, jax {versions['jax']}, CUDA driver"
            f" {versions['cuda_driver']}; M {matmul / 1e12:.0f} TFLOP/s, C {copy / 1e12:.2f} TB/s, {data['rounds']} rounds"
        )
    spread, machines = NOTED["noise"]["middle half of the rounds above a millisecond"], NOTED["noise"]["machines"]
    noise = f"""Above a millisecond the power limit acts: the rounds' middle half spreads by {percent(spread)}.
    Machines differ by {percent(machines)}: compare within a run."""
    return "\n".join([*lines, "", wrapped(noise)])


def _range(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def readme() -> str:
    layer = row_of(PEERS, PROMPT)
    window = row_of(FORWARD, "d 512 window 128 b1 s4096 h128")
    backward = row_of(GRAD, f"gradient of {PROMPT}")
    chosen = row_of(INDEXER, "top-k 512 of 8192, bfloat16 h64, b1 s4096")
    steps = steps_beside_flashmla()
    packed, plain = (
        {
            h: _range(x for (kind, heads, b), x in steps.items() if (kind, heads) == (cache, h) and b >= 64)
            for h in (128, 64)
        }
        for cache in ("fp8", None)
    )
    return f"""On one {FORWARD["devices"][0]["name"].removeprefix("NVIDIA ")}, device time:

- A layer of 128 heads over a window of 128 and 1024 selected keys takes {ours(layer) * 1e3:.2f} ms for 4096 queries,
  {rate(layer)} TFLOP/s. [In the same run](docs/peers.md#flashmla) FlashMLA takes {of_peer(layer, "flashmla")} times as long.
- The same layer with a window alone takes {ours(window) * 1e3:.2f} ms; XLA takes {of_peer(window, "xla")} times as long.
- A step of generation at b 64 to 148 from caches in FP8: FlashMLA takes {packed[128]} times as long with 128 heads,
  {packed[64]} times with 64. Our step from bfloat16 caches is faster still: FlashMLA's, from FP8, takes {plain[128]} times
  as long with 128 heads and {plain[64]} times with 64.
- The first layer's backward pass takes {ours(backward) * 1e3:.2f} ms, {rate(backward)} TFLOP/s.
{_steps_of_layers()}
- To choose 512 of 8192 entries for 4096 queries takes {ours(chosen) * 1e3:.2f} ms; XLA takes {of_peer(chosen, "xla")} times as long."""


def _steps_of_layers() -> str:
    window, sparse, dense = (micro(_as_documented(kind)) for kind in KINDS)
    launches = ", ".join(
        str(row_of(STEPS, f"layer {kind}, step after 16384, b64")["times"]["ours"]["launches"]) for kind in KINDS
    )
    stack = row_of(STEPS, "43 layers, step after 16384, b64")
    return f"""- A step of a whole V4-Flash layer, 64 sequences of 16384 tokens in bfloat16, jitted with `STEP_OPTIONS`: {window} µs with a
  window alone, {sparse} of ratio 4, {dense} of ratio 128, in {launches} launches. The attention of all 43 layers takes
  {stack["times"]["at once"]["seconds"] * 1e3:.2f} ms. [Since then](docs/layers.md#what-a-layer-costs) its products are kernels of ours."""


def _as_documented(kind: str) -> float:
    """Seconds of a layer's step at b 64, of eight in a graph with `STEP_OPTIONS`."""
    row = row_of(STEPS, f"8 layers {kind}, step after 16384, b64")
    return float(row["times"]["at once"]["seconds"]) / 8


def readme_model() -> str:
    """V4-Flash after as many tokens: a layer of the 43, and what its 43 layers and the head would do."""
    found: dict[str, list[str]] = {}
    for row in MODEL["rows"]:
        layer = (row["all"] - row["ms"]["head"]) / sum(MODEL["count"].values())
        found.setdefault(row["work"].rsplit(",", 1)[0], []).append(f"{layer:.2f} ms, {row['tokens/s']:.0f}")
    return table(
        "a layer on average, tokens/s | 8 Ki | 128 Ki | 1024 Ki", [[name, *cells] for name, cells in found.items()]
    )


def landing() -> str:
    """Two numbers for the first page: a prompt's attention, and a step of a whole layer."""
    prompt = row_of(PEERS, PROMPT)
    return wrapped(f"""On one {FORWARD["devices"][0]["name"].removeprefix("NVIDIA ")}, attention of 128 heads over a window of 128 and 1024 chosen
    entries takes **{ours(prompt) * 1e3:.2f} ms** for 4096 queries, at {rate(prompt)} TFLOP/s. A step of generation takes a whole V4-Flash layer of ratio 4
    **{micro(_as_documented("of ratio 4"))} µs**, for 64 sequences of 16384 tokens.""")


def losses() -> str:
    few = row_of(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h16")
    far = row_of(GRAD, "gradient of d 512 window 128 + top-k 512 of 65536 b1 s4096 h64")
    torch, least = min(NOTED["torch's cuDNN"]["ratios"].items(), key=lambda found: found[1])
    parts = row_of(STEPS, "layer of ratio 4, step after 16384, b64")["times"]["ours"]["parts"]
    rest = 1 - (parts["products"] + parts["attention"]) / sum(parts.values())
    return f"""- **Few heads**: a prefill layer of 16 heads over selected keys reaches {share(few)} of the roofline.
- **Backward over far keys**: 512 of 65536 keys at 64 heads reach {share(far)} of the roofline.
- **Small dense calls**: torch 2.11's cuDNN takes {least:.2f} times as long as ours for {torch}.
- **The rest of a step**: {rest:.0%} of a step of ratio 4 at b 64 is neither products nor attention."""


def which_tests() -> str:
    """CONTRIBUTING.md's table, of tests/which.toml."""
    rows = []
    for row in check.table()[1]:
        tests = [f"`{name}.py`" for name in row.run] + [f"*`{name}.py`*" for name in row.interpret]
        paths = (x if "*" in x or "." in x else f"{x}/" for x in row.change)
        rows.append([", ".join(f"`{path}`" for path in paths), "; ".join(filter(None, [", ".join(tests), row.more]))])
    return texts("you change | run, of `tests/`", rows)
