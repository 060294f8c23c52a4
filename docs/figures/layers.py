"""The indexer, and whole layers."""

from typing import Any

from .peers import beside
from .records import (
    DEVICES,
    EXPERTS,
    FP8_PRODUCTS,
    INDEXER,
    LAYER,
    LOAD,
    MODEL,
    NOTED,
    ON_H100,
    PRODUCTS,
    PROFILES,
    PROMPTS,
    STACKS,
    STEPS,
    UNPACKED,
    WHOLE,
    bullets,
    launched,
    micro,
    of_peer,
    ours,
    percent,
    row_of,
    seconds,
    share,
    suite,
    table,
    wrapped,
)

FORMATS = ("float8_e4m3fn", "bfloat16")


def indexer() -> str:
    """A row for a call, with its time in 8 and in 16 bits; then calls that were timed in one of them alone."""
    theirs = {row["name"]: micro(seconds(row, "cudnn_frontend")) for row in beside("cudnn_frontend")}
    found = {row["name"]: row for row in suite(INDEXER, "indexer")}
    rows, others = [], []
    for name, row in found.items():
        wide = found.get(name.replace("float8_e4m3fn", "bfloat16"), row)
        if "float8_e4m3fn" in name:
            times = [cell for each in (row, wide) for cell in (micro(ours(each)), share(each))]
            peers = [of_peer(wide, "xla"), *(theirs.get(each["name"], "–") for each in (row, wide))]
            rows.append([name.replace(", float8_e4m3fn", ","), *times, *peers])
        elif "bfloat16" not in name or name.replace("bfloat16", "float8_e4m3fn") not in found:
            said = name.replace(", bfloat16 h64", "").replace("a window of 128 and these", "a window and these")
            others.append([said, micro(ours(row)), share(row), of_peer(row, "xla"), theirs.get(name, "–")])
    first = table(
        "scores and choice | e4m3, µs | of the roofline | bf16, µs | of the roofline | XLA / ours, bf16"
        " | cuDNN frontend, e4m3, µs | bf16, µs",
        rows,
    )
    return (
        first
        + "\n\n"
        + table("calls timed in one precision | µs | of the roofline | XLA / ours | cuDNN frontend, µs", others)
    )


def indexer_bound() -> str:
    profile = PROFILES["scores of the indexer"]
    pages = {form: launched(row_of(INDEXER, f"top-k 512 of 16384 in pages, {form} h64, b64 s2")) for form in FORMATS}
    bytes_of = {"float8_e4m3fn": 128 + 4, "bfloat16": 256}  # an entry; its scores for two queries are 8 more
    rates = {form: 64 * 16384 * (bytes_of[form] + 8) / times[0] for form, times in pages.items()}
    c = row_of(INDEXER, "top-k 512 of 16384 in pages, float8_e4m3fn h64, b64 s2")["copy_bytes_per_s"]
    at = row_of(INDEXER, "scores at 512 of 8192 and their gradients, bfloat16 h64, b1 s4096")
    l2 = NOTED["additions"]["bytes a second that L2 adds"]
    first, far, fewer = (row["ms"] for row in NOTED["probabilities"]["rows"])
    return bullets(f"""- **Scores of a prompt**: sums and products share the schedulers. A profile of 8192 entries had tensor cores busy
  {percent(profile["tensor of float8_e4m3fn"])} of the time in e4m3 and {percent(profile["tensor of bfloat16"])} in bfloat16.
- **Scores over pages**: memory. The kernel reads keys and writes scores at {percent(rates["float8_e4m3fn"] / c)} of C in e4m3 and {percent(rates["bfloat16"] / c)} in bfloat16.
- **Scores at entries**: what dk adds to memory. Additions alone take {4096 * 512 * 512 / l2 * 1e3:.2f} ms of {ours(at) * 1e3:.2f} ms for both passes.
- **Probabilities**: L2. 128 heads and 1024 keys of 8192 take {first:.2f} ms, of 65536 {far:.2f} ms. 64 heads and 512 keys take {fewer:.2f} ms.""")


def layer() -> str:
    """A table of prompts and gradients, and one of steps: a row for each kind of layer, what each of its parts takes, and
    the whole in a run on another card.
    """
    prompts = "layer, prompt of 4096 tokens, µs", suite(LAYER, "layer")
    steps = "layer, step after 16384 tokens, µs", [r for r in suite(STEPS, "layer") if r["name"].startswith("layer")]
    return "\n\n".join(_by_parts(*found) for found in (prompts, steps))


PARTS = ("products", "attention", "indexer", "compressor", "append", "rope", "norm", "other")


def _by_parts(title: str, found: list[dict[str, Any]]) -> str:
    """Columns of the parts that some row has."""
    on_h100 = {row["name"]: row for row in suite(ON_H100, "layer")}
    parts = [part for part in PARTS if any(part in row["times"]["ours"]["parts"] for row in found)]
    rows = []
    for row in found:
        times, other = row["times"]["ours"], on_h100[row["name"]]
        rest = 1 - (times["parts"]["products"] + times["parts"]["attention"]) / sum(times["parts"].values())
        each = (micro(times["parts"][part]) if part in times["parts"] else "" for part in parts)
        there = [micro(ours(other)), str(other["times"]["ours"]["launches"])]
        rows.append([_kind(row["name"]), micro(ours(row)), str(times["launches"]), *each, percent(rest), *there])
    return table(" | ".join([title, "all", "launches", *parts, "rest", _card(ON_H100), "launches"]), rows)


def _kind(name: str) -> str:
    """A row's name without the words that its table says: "gradient of ratio 4", "window, b 8, FP8"."""
    name = (
        name.removesuffix(", prompt of 4096")
        .replace(", step after 16384, b", ", b ")
        .replace("gradient and layer ", "with its gradient, ")
    )
    return name.removeprefix("layer ").replace("with a window alone", "window").replace("of ratio", "ratio")


def layer_steps() -> str:
    """What surrounds attention in a step of 64 sequences."""
    parts = ("append", "compressor", "indexer", "attention", "products")
    rows = []
    for row in suite(STEPS, "layer"):
        if row["name"].startswith("layer") and ", b64" in row["name"]:
            times = row["times"]["ours"]
            each = (micro(times["parts"][part]) if part in times["parts"] else "" for part in parts)
            name = row["name"].removeprefix("layer ").replace(", step after 16384, b64", "")
            rows.append([name, micro(ours(row)), str(times["launches"]), *each])
    return table(" | ".join(["layer, µs", "all", "launches", *parts]), rows)


def few_rows_product() -> str:
    """Each product of a step, beside XLA's."""
    found: dict[str, list[str]] = {}
    for row in suite(PRODUCTS, "product"):
        cells = found.setdefault(row["case"]["what"], [f"{row['bytes'] / 1e6:.0f}"])
        cells += [micro(row["bytes"] / row["copy_bytes_per_s"]), micro(ours(row)), of_peer(row, "xla")]
    sizes = sorted({row["case"]["b"] for row in suite(PRODUCTS, "product")})
    columns = [f"b {b}: least at C, µs | ours, µs | XLA / ours" for b in sizes]
    about = f"""On one {_card(PRODUCTS)}. XLA's figure has our kernel for norm and RoPE, or RoPE back, beside it, which ours does
    itself:"""
    return wrapped(about) + "\n\n" + table(" | ".join(["product", "MB", *columns]), ([k, *x] for k, x in found.items()))


def experts() -> str:
    """A layer's experts, by how many tokens a call has."""
    rows = []
    for row in suite(EXPERTS, "experts"):
        case = row["case"]
        if case["op"] not in ("fused_moe", "fused_moe_gradient"):
            continue
        least = max(row["flops"] / row["matmul_flops_per_s"], row["bytes"] / row["copy_bytes_per_s"])
        products = sum(s for kernel, s in row["times"]["ours"]["kernels"].items() if "product" in kernel)
        passes = ", both passes" if case["op"] == "fused_moe_gradient" else ""
        of = f"{case['experts']} in {case.get('weights', 'MXFP4')}, {case['tokens']}{passes}"
        rows.append(
            [of, f"{row['bytes'] / 1e6:.0f}", *map(micro, (least, ours(row), ours(row) - products)), share(row)]
        )
    about = f"""Experts of 4096 x 2048, 6 a token, chosen at random, on one {_card(EXPERTS)}; V4-Flash has 256 in a layer. The least is
    what M or C allow for all experts that are chosen on average:"""
    head = "experts, tokens | MB | least, µs | ours, µs | of it all but products, µs | of the roofline"
    return wrapped(about) + "\n\n" + table(head, rows)


def hyper_connections() -> str:
    """What is between two sublayers, by how many tokens a call has."""
    rows = []
    for row in suite(EXPERTS, "experts"):
        if row["case"]["op"] == "hyper_connection":
            least = row["bytes"] / row["copy_bytes_per_s"]
            rows.append([f"{row['case']['tokens']}", f"{row['bytes'] / 1e6:.0f}", micro(least), micro(ours(row))])
    about = f"4 streams of 4096 channels, on one {_card(EXPERTS)}:"
    return about + "\n\n" + table("tokens | MB | least at C, µs | ours, µs", rows)


def _card(record: dict[str, Any]) -> str:
    return str(record["devices"][0]["name"]).split()[1]


def layer_stack() -> str:
    """A step of all layers, in one program."""
    rows = []
    for row in suite(STACKS, "layer"):
        times = (row["times"][name]["seconds"] for name in ("ours", "graph", "at once"))
        rows.append([row["name"], str(row["times"]["ours"]["launches"]), *(f"{x * 1e3:.2f}" for x in times)])
    return table("ms | launches | kernels | in a graph | with `STEP_OPTIONS`", rows) + "\n\n" + _elsewhere()


def _elsewhere() -> str:
    """The same on another card, and when both were timed."""
    found = row_of(ON_H100, "43 layers, step after 16384, b64")["times"]
    kernels, graph, at_once = (found[name]["seconds"] * 1e3 for name in ("ours", "graph", "at once"))
    here, there = (record["date"][:10] for record in (STACKS, ON_H100))
    return wrapped(f"""The table is an {_card(STACKS)}'s, of {here}. On an {_card(ON_H100)}, whose memory is slower, on {there}, the 43 layers
    had {found["ours"]["launches"]} launches and took {kernels:.2f} ms kernel by kernel, {graph:.2f} in a graph, {at_once:.2f} with `STEP_OPTIONS`.""")


def long_prompts() -> str:
    """Whole prompts by chunks, and the memory that they take."""
    rows = []
    for row in suite(PROMPTS, "prompt"):
        case, times = row["case"], row["times"]["ours"]
        kind = f"ratio {case['ratio']}" if case["ratio"] else "a window alone"
        kind += ", FP8" * (case["cache"] != "bfloat16")
        megabytes = (f"{times[name] / 1e6:.1f}" for name in ("cache_bytes", "program_bytes"))
        rows.append(
            [f"{case['tokens'] // 1024} Ki", kind, f"{ours(row):.2f}", micro(ours(row) / case["tokens"]), *megabytes]
        )
    rows.sort(key=lambda row: row[1])
    return table("tokens | layer | s | µs a token | MB of the cache | MB of a chunk's program", rows)


def devices() -> str:
    """A long sequence over several GPUs, beside one of them."""
    rows = []
    for row in suite(DEVICES, "devices"):
        case, times = row["case"], [row["times"][name]["seconds"] for name in ("one", "ours")]
        kind = f"ratio {case['ratio']}" if case["ratio"] else "a window alone"
        if case["op"] == "long_cache":
            layers = f" of {n} layers" if (n := case.get("layers", 1)) > 1 else ""
            work = f"step{layers}, b {case['b']}, {case['tokens'] >> 10} Ki tokens, {kind}, the cache shared out"
        else:
            work = f"{'gradient and ' * case['has_gradient']}prompt of {case['tokens'] >> 10} Ki, {kind}"
            work += ", zigzag" * case["is_zigzag"]
        rows.append([work, *(f"{x * 1e3:.2f}" for x in times), f"{times[0] / times[1]:.2f}"])
    found = DEVICES["devices"]
    where = f"{len(found)} × {found[0]['name']}, {DEVICES['date'][:10]}, jax {DEVICES['versions']['jax']}:"
    return "\n\n".join([where, table("one sequence, or one cache, over two GPUs | one, ms | two, ms | times", rows)])


def fp8_steps() -> str:
    """A step's products, and layers of V4-Flash, from matrices in FP8 beside bfloat16."""
    rows = []
    for row in FP8_PRODUCTS["rows"]:
        rates = row.get("TB/s", {})
        each = (x for name in ("bf16", "fp8") for x in (f"{row[name]['us']:.1f}", str(rates.get(name, "–"))))
        rows.append([row["row"].replace(", step after 16384", ""), *each])
    return table("a step | bfloat16, µs | TB/s | FP8, µs | TB/s", rows)


def unpacked_matrices() -> str:
    """Matrices of V4-Flash in FP8 as arrays, alone and before a product, beside XLA's."""
    found: dict[str, list[str]] = {}
    for row in suite(UNPACKED, "product"):
        b = row["case"]["b"]
        cells = found.setdefault(row["case"]["what"], [f"{row['bytes'] / 1e6:.0f}"])
        cells += [micro(ours(row)), of_peer(row, "xla")]
        if b == 0:
            cells.insert(2, f"{row['bytes'] / ours(row) / row['copy_bytes_per_s']:.2f}")
    columns = "MB | alone, µs | of C | XLA / ours | with 256 rows, µs | XLA / ours | with 4096 rows, µs | XLA / ours"
    return table(f"matrix of | {columns}", ([name, *cells] for name, cells in found.items()))


def whole_steps() -> str:
    """All layers of V4-Flash in one program, over GPUs."""
    rows = [
        [row["work"], *(f"{row[name]:.1f}" for name in ("ms", "compiled in s")), f"{row['tokens/s']:.0f}"]
        for row in WHOLE["rows"]
    ]
    return table(f"{WHOLE['devices']} × {WHOLE['device']} | ms | compiled in s | tokens/s", rows)


def whole_parts() -> str:
    """Where the devices' time of a call goes, by part of the model."""
    rows = WHOLE["of_parts"]["rows"]
    sums = {part: sum(row["parts"].get(part, 0) for row in rows) for row in rows for part in row["parts"]}
    parts = sorted(sums, key=lambda part: -sums[part])
    cells = ([row["work"], *(f"{row['parts'].get(part, 0):.1f}" for part in parts)] for row in rows)
    return table(f"ms of a device | {' | '.join(parts)}", cells)


def rates() -> str:
    """A server of V4-Flash under load, beside a published row."""
    heads = "TTFT, ms | TPOT, ms | tokens/s a GPU, in and out"
    rows = []
    for row in LOAD["rows"]:
        rate = row["in_tokens_s"] + row["out_tokens_s"]
        ours = f"{row['ttft_ms']:.0f}", f"{row['tpot_ms']:.1f}", f"{rate:.0f}"
        published = LOAD["published"]["rows"].get(str(row["concurrency"]), ["–"] * 3)
        rows.append([str(row["concurrency"]), *ours, *map(str, published)])
    name = LOAD["published"]["name"]
    return table(f"concurrency | {heads} | {name}: {heads}", rows)


def whole_model() -> str:
    """A step and a chunk of all layers of V4-Flash, from one of each kind and the head."""
    rows = []
    for row in MODEL["rows"]:
        n = int(row["work"].split()[-2])
        work = row["work"].rsplit(",", 1)[0] + f", {n >> 10} Ki"
        each = (f"{x:.2f}" for x in row["ms"].values())
        rows.append([work, *each, f"{row['all']:.1f}", f"{row['tokens/s']:.0f}"])
    return table("ms a layer, after tokens | window | ratio 4 | ratio 128 | head | 43 layers | tokens/s", rows)


def layer_rest() -> str:
    found = {row["name"]: row["times"]["ours"]["parts"] for row in suite(LAYER, "layer")}
    rests = {name: 1 - (parts["products"] + parts["attention"]) / sum(parts.values()) for name, parts in found.items()}
    most = max(rests.values())
    return wrapped(f"""\"Rest\" is the share that is neither matrix products nor attention: at most {percent(most)} in prompts and in their
    gradients. Kernels below 0.6 µs count only in \"all\".""")
