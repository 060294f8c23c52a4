"""Writes into the pages what was measured, from the JSON files beside this one, between marks:

    <!-- generated: NAME -->
    …
    <!-- end -->

`python docs/generate.py` does so for every page; `tests/test_docs.py` asserts that it would change nothing.
`make pictures` runs it, and draws the pictures from the same files. A new measurement is a new JSON file, and that run
again.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from interpreter.clocks.architecture import BLACKWELL, HOPPER  # noqa: E402
from interpreter.kernels.native import variant_of  # noqa: E402
from interpreter.machine.rules import Rule  # noqa: E402
from interpreter.witnesses.timing import B200, GB200  # noqa: E402
from kernels.abi import IndexerScores  # noqa: E402

PAGES = (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
MARKED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.S)


def load(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text())


FORWARD, DECODE, GRAD = map(load, ("h200", "h200_decode", "h200_grad"))
INDEXER, LAYER, PEERS, NOTED = map(load, ("h200_indexer", "h200_layer", "h200_peers", "h200_kernels"))
STEPS, WITNESSED, FORMS = map(load, ("h200_steps", "witnesses", "blackwell_forms"))
ORDERS, CLOCKS = map(load, ("orders", "clocks"))
PROFILES: dict[str, Any] = NOTED["profiles"]
SMS = int(FORWARD["devices"][0]["sms"])


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + "---|" + "---:|" * (len(names) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def texts(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A table of words."""
    return table(header, rows).replace("---:|", "---|")


def micro(seconds: float) -> str:
    """Three digits."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 99.95 else f"{us:.1f}"


def seconds(row: dict[str, Any], name: str) -> float:
    return float(row["times"][name]["seconds"])


def ours(row: dict[str, Any]) -> float:
    return seconds(row, "ours")


def beside(peer: str) -> list[dict[str, Any]]:
    """The rows of the record of peers that a peer is in."""
    return [row for row in PEERS["rows"] if peer in row["times"]]


def of_peer(row: dict[str, Any], peer: str) -> str:
    """How many times as long the peer takes."""
    if peer not in row["times"]:
        return "–"
    ratio = seconds(row, peer) / ours(row)
    return f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def share(row: dict[str, Any]) -> str:
    """The share of the roofline, which the machine's matrix rate and copy rate give."""
    least = max(row["flops"] / row["matmul_flops_per_s"], row["bytes"] / row["copy_bytes_per_s"])
    return f"{100 * least / ours(row):.0f} %"


def rate(row: dict[str, Any]) -> str:
    return f"{row['flops'] / ours(row) / 1e12:.0f}" if row["flops"] else "–"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def bullets(text: str) -> str:
    """A list, an item for each line that begins with "- ", in lines of a page."""
    return "\n".join(wrapped(f"- {item}", "  ") for item in re.split(r"^- ", text, flags=re.M)[1:])


def launched(row: dict[str, Any]) -> list[float]:
    """The seconds of the kernels of a call, the longest first; the others are XLA's, or much shorter."""
    return sorted(row["times"]["ours"]["kernels"].values(), reverse=True)


def suite(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if row["suite"] == name and "ours" in row["times"]]


def rows_of(data: dict[str, Any], name: str, *peers: str) -> list[list[str]]:
    return [
        [row["name"], micro(ours(row)), rate(row), share(row), *(of_peer(row, peer) for peer in peers)]
        for row in suite(data, name)
    ]


def dsv4() -> str:
    return table("layer | µs | TFLOP/s | of the roofline | two passes / ours", rows_of(FORWARD, "dsv4", "two_pass"))


def dense() -> str:
    rows = [*rows_of(FORWARD, "dense", "cudnn", "xla"), *rows_of(FORWARD, "window", "cudnn", "xla")]
    return table("attention | µs | TFLOP/s | of the roofline | cuDNN / ours | XLA / ours", rows)


STEP = re.compile(r"d 512 window 128 \+ top-k (\d+) of 16384 b(\d+) s2 h(\d+)(?: (\w+))?$")
CACHES = {None: "bfloat16", "fp8": "FP8", "v41_fp4": "V4.1's FP8 and FP4"}


def decode() -> str:
    """A row for each kind of cache and number of heads, a column for each batch; then what is left."""
    kinds: dict[tuple[str, ...], dict[int, str]] = {}
    others = []
    for row in suite(DECODE, "decode"):
        if found := STEP.match(row["name"]):
            topk, b, heads, cache = found.groups()
            kinds.setdefault((heads, topk, CACHES[cache]), {})[int(b)] = micro(ours(row))
        else:
            beside = next((peer for peer in ("contiguous", "graph") if peer in row["times"]), "")
            others.append([row["name"], micro(ours(row)), rate(row), share(row), of_peer(row, beside)])
    batches = sorted({b for times in kinds.values() for b in times})
    first = table(
        " | ".join(["a step, cache", *(f"b {b}, µs" for b in batches)]),
        (
            [f"{heads} heads, top-k {topk}, {cache}", *(times.get(b, "–") for b in batches)]
            for (heads, topk, cache), times in kinds.items()
        ),
    )
    return first + "\n\n" + table("other steps | µs | TFLOP/s | of the roofline | beside it / ours", others)


def _both(row: dict[str, Any]) -> str:
    both, theirs = row["times"].get("both"), row["times"].get("both by cudnn")
    return f"{theirs['seconds'] / both['seconds']:.2f}" if theirs else "–"


def _deterministic(name: str) -> str:
    """How many times as long the gradient with the same bits on every run takes."""
    if name in NOTED["deterministic"]["always"]:
        return "the same"
    if name not in NOTED["deterministic"]["ms"]:
        return "–"
    default, same_bits = NOTED["deterministic"]["ms"][name]
    return f"{same_bits / default:.2f}"


def gradients(dims: tuple[int, ...], peer: str, beside: Callable[[dict[str, Any]], str]) -> str:
    """Both passes are forward and backward; the other columns are the backward pass alone."""
    rows = []
    for row in suite(GRAD, "grad"):
        if row["case"]["d"] in dims:
            name = row["name"].removeprefix("gradient of ")
            both = micro(row["times"]["both"]["seconds"])
            rows.append([name, micro(ours(row)), rate(row), share(row), both, beside(row), _deterministic(name)])
    header = f"gradient | µs | TFLOP/s | of the roofline | both passes, µs | {peer} | deterministic / default"
    return table(header, rows)


def mla_backward() -> str:
    return gradients((512,), "XLA / ours", lambda row: of_peer(row, "xla"))


def mha_backward() -> str:
    return gradients((64, 128, 256), "cuDNN / ours, both", _both)


def mla_backward_bound() -> str:
    """The bytes that a tile of 64 rows and 64 keys adds, 128 KiB, leave an SM in the time that the tile takes."""
    row = _of(GRAD, "gradient of d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128")
    few = _of(GRAD, "gradient of d 512 window 128 + top-k 512 of 8192 b1 s4096 h16")
    far = _of(GRAD, "gradient of d 512 window 128 + top-k 512 of 65536 b1 s4096 h64")
    tiles = row["case"]["s_q"] * row["case"]["h_q"] // 64 * (row["case"]["window"] + row["case"]["topk"]) // 64
    seconds = launched(row)[0]
    tile = seconds * SMS / tiles
    added = few["case"]["s_q"] * (few["case"]["window"] + few["case"]["topk"]) * 512 * 4
    l2 = NOTED["additions"]["bytes a second that L2 adds"]
    return bullets(f"""- **128 heads**, a window and 1024 of 8192 keys: {seconds * 1e3:.2f} ms for {tiles:,} tiles, {tile * 1e6:.1f} µs a tile on an SM.
  Products take {percent(row["flops"] / row["matmul_flops_per_s"] / seconds)} of that time.
  The bound is what leaves an SM: {128 * 1024 / tile / 1e9:.0f} bytes a ns, reductions and `st.async` to the peer together.
- **Far keys**: 65536 keys of dkv do not fit into L2, so each reduction is a read and a write of HBM.
  The gradient at 64 heads then reaches {share(far)} of the roofline.
- **16 heads**: the reductions are {added / 1e9:.1f} GB. L2 adds {l2 / 1e12:.1f} TB a second, which gives {added / l2 * 1e3:.2f} ms.
  The kernel takes {launched(few)[0] * 1e3:.2f} ms.
- **Beside the kernel**, XLA makes rowsum(o ∘ do), clears dkv and rounds it: {(ours(row) - seconds) * 1e3:.2f} ms at 128 heads.""")


def mha_backward_bound() -> str:
    lines = []
    for name in ("d 128 causal b2 s8192 h16", "d 64 causal b4 s8192 h16"):
        row = _of(GRAD, f"gradient of {name}")
        reached = row["flops"] / launched(row)[0]
        of_m = percent(reached / row["matmul_flops_per_s"])
        lines.append(f"`mha_dqdkdv` makes its products at {reached / 1e12:.0f} TFLOP/s, {of_m} of M.")
    narrow = _of(GRAD, "gradient of d 128 window 128 b2 s8192 h16/1")
    dkdv, dq, rowsum, *_ = launched(narrow)
    return bullets(f"""- **d 128, causal**: {lines[0]}
- **d 64, causal**: {lines[1]} Exponentials and shifts take as long as products.
- **d 128, window**: `mha_dkdv` takes {micro(dkdv)} µs, `mha_dq` {micro(dq)} µs, and XLA's rowsum(o ∘ do) {micro(rowsum)} µs.
  Each CTA of `mha_dkdv` has 64 tiles of rows. S and dP of 64 rows read 128 bytes a clock of SMEM, all that it has.""")


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
    pages = {form: launched(_of(INDEXER, f"top-k 512 of 16384 in pages, {form} h64, b64 s2")) for form in FORMATS}
    bytes_of = {"float8_e4m3fn": 128 + 4, "bfloat16": 256}  # an entry; its scores for two queries are 8 more
    rates = {form: 64 * 16384 * (bytes_of[form] + 8) / times[0] for form, times in pages.items()}
    c = _of(INDEXER, "top-k 512 of 16384 in pages, float8_e4m3fn h64, b64 s2")["copy_bytes_per_s"]
    at = _of(INDEXER, "scores at 512 of 8192 and their gradients, bfloat16 h64, b1 s4096")
    l2 = NOTED["additions"]["bytes a second that L2 adds"]
    first, far, fewer = (row["ms"] for row in NOTED["probabilities"]["rows"])
    return bullets(f"""- **Scores of a prompt**: sums and products share the schedulers. A profile of 8192 entries had tensor cores busy
  {percent(profile["tensor of float8_e4m3fn"])} of the time in e4m3 and {percent(profile["tensor of bfloat16"])} in bfloat16.
- **Scores over pages**: memory. The kernel reads keys and writes scores at {percent(rates["float8_e4m3fn"] / c)} of C in e4m3 and {percent(rates["bfloat16"] / c)} in bfloat16.
- **Scores at entries**: what dk adds to memory. Additions alone take {4096 * 512 * 512 / l2 * 1e3:.2f} ms of {ours(at) * 1e3:.2f} ms for both passes.
- **Probabilities**: L2. 128 heads and 1024 keys of 8192 take {first:.2f} ms, of 65536 {far:.2f} ms. 64 heads and 512 keys take {fewer:.2f} ms.""")


def mha_forward_bound() -> str:
    full, window, clocks = PROFILES["d 128 full"], PROFILES["d 128 window"], PROFILES["clock, GHz"]
    row, narrow, small = (
        _of(FORWARD, f"d 128 {name}")
        for name in ("full b2 s8192 h16", "window 128 b2 s8192 h16/1", "causal b1 s512 h16")
    )
    beside = NOTED["clocks of the softmax of a tile of 160 keys"]
    floor = narrow["bytes"] / narrow["copy_bytes_per_s"]
    return bullets(f"""- **The softmax** of 160 keys takes a warpgroup {beside["alone"]} clocks alone, and {beside["beside another's"]} beside another's.
  Both want the same exponential unit.
- **d 128, all keys** ({share(row)} of M): power. Tensor cores are busy {percent(full["tensor"])} of the time, cuDNN's {percent(full["tensor of cuDNN"])}.
  We move {full["gigabytes through L2"]:g} GB through L2 where cuDNN moves {full["gigabytes through L2 of cuDNN"]:g}, so its clock is higher.
- **d 128, window** ({micro(ours(narrow))} µs, floor {micro(floor)}): the chain of one tile. In clocks: take over {window["take over"]}, scores {window["scores"]},
  softmax {window["softmax"]}, the rest of P V {window["P V"]}, stores {window["stores"]}.
- **Small calls** (b 1, s 512: {micro(ours(small))} µs): Q and K arrive after {PROFILES["d 128 causal b1 s512"]["cycles until Q and K are there"]} clocks.
- **Power**: after a second of work, kernels run into the driver's {clocks["watts"]} W. The clock falls from {clocks["at rest"]:g} GHz
  to {clocks["our kernels"]:g} in ours, and to {clocks["matrix product"]:g} in a matrix product.""")


def mla_forward_bound() -> str:
    causal, wide, narrow, window = (
        _of(FORWARD, f"d 512 {name}")
        for name in ("causal b1 s4096 h128", "top-k 1024 of 8192 b1 s4096 h128", "top-k 512 of 8192 b1 s4096 h64",
                     "window 128 b1 s4096 h128")
    )  # fmt: skip
    first, second, tile, parts = (
        PROFILES[name]
        for name in (
            "top-k 1024, 128 heads",
            "top-k 512, 64 heads",
            "a tile of rows of top-k 1024",
            "window, 128 heads",
        )
    )
    cycles = sum(parts.values())
    return bullets(f"""- **Causal** ({share(causal)} of the roofline): shared memory. Q K' reads both operands from it at full rate.
- **Top-k, 128 heads** ({share(wide)}): the chain from P V to handing a tile over. Tensor cores work {percent(first["tensor"])} of the time,
  FlashMLA's {percent(first["tensor of FlashMLA"])}. L2 is {percent(first["L2"])} busy, and {percent(first["L2 of 65536"])} with 65536 entries.
- **Top-k, 64 heads** ({share(narrow)}): the same chain. L2 is {percent(second["L2"])} busy, and {percent(second["L2 of 65536"])} with 65536 entries.
- **A tile of rows** costs {tile["beside its keys"]} of {tile["cycles"]} clocks beside its keys.
- **A window alone** ({micro(ours(window))} µs, {share(window)}): a tile of rows has one pair of key tiles, so nothing overlaps.
  Its {cycles} clocks: {", ".join(f"{name} {count}" for name, count in parts.items())}.""")


def few_heads() -> str:
    return table(
        "`mla_fwd_sm90` → `mla_few_heads_fwd_sm90`, µs | 8 heads | 16 heads | 32 heads",
        (
            [row["name"], *(" → ".join(map(str, row[heads])) for heads in ("8", "16", "32"))]
            for row in NOTED["few heads"]["rows"]
        ),
    )


def few_heads_bound() -> str:
    tile, products = PROFILES["few heads, a tile of 64 keys, µs"], PROFILES["few heads, clocks of both products"]
    near, far = (_of(FORWARD, f"d 512 window 128 + top-k 512 of {n} b1 s4096 h16") for n in (8192, 65536))
    return wrapped(f"""The chain from keys to P to O bounds it, and the other CTA of the SM hides a part. An SM takes {tile["takes"]} µs for a tile
of 64 keys. Gathering alone takes {tile["gathering alone"]} µs, and {tile["gathering alone of 65536"]} out of 65536 entries. Both products take
{", ".join(str(n) for n in products.values())} clocks at 8, 16 and 32 heads, from keys in SMEM. A layer of 16 heads takes {micro(ours(near))} µs, {share(near)} of the
roofline. From 65536 entries it takes {micro(ours(far))} µs, {share(far)}.""")


def decode_bound() -> str:
    name = "d 512 window 128 + top-k 1024 of 16384 b{} s2 h128 fp8"
    small, large = (_of(DECODE, name.format(b)) for b in (2, 64))
    plain = _of(DECODE, name.format(64).removesuffix(" fp8"))
    dense = _of(DECODE, "d 512 full b16 s1 h128")
    steps = _steps_beside_flashmla()
    four = _of(DECODE, "d 512 window 128 + top-k 512 of 16384 b64 s2 h64 v41_fp4")
    kernel, merge, *_ = launched(small)
    return bullets(f"""- **Batch 2** ({micro(ours(small))} µs): the begin of a call. Lengths, entries and keys are three misses of memory in a row.
  The kernel takes {micro(kernel)} µs and the merge {micro(merge)}.
- **FP8, batch 64** ({micro(ours(large))} µs, bfloat16 {micro(ours(plain))}): filling and using keys take turns. Three of the four places of a pair
  come free at its end. Producers wait for places {percent(NOTED["decode"]["producers wait, share of the time"])} of the time.
- **FlashMLA** takes {steps["fp8", 128, 2]:.2f} times as long at batch 2 and {steps["fp8", 128, 64]:.2f} times at batch 64. With 64 heads it takes {steps["fp8", 64, 2]:.2f} and {steps["fp8", 64, 64]:.2f} times.
- **FP4 beside FP8** takes {ours(four) / four["times"]["v4_fp8"]["seconds"]:.2f} of the time of V4's layout, at batch 64 and 64 heads.
- **All of 32768 keys**, batch 16: {micro(ours(dense))} µs, {share(dense)} of the roofline. The keys do not fit into L2.""")


def rope() -> str:
    c = LAYER["rows"][0]["copy_bytes_per_s"]
    return table(
        "kernel | least at C, µs | XLA, µs | ours, µs",
        ([f"`{r['name']}`", micro(r["bytes"] / c), *(f"{us:g}" for us in r["us"])] for r in NOTED["rope"]["rows"]),
    )


def scaling() -> str:
    found = NOTED["scaling"]
    one = found["one device, ms"]
    return f"{found['method']}. One device takes {one} ms.\n\n".replace("fmha", "`fmha`", 1).replace(
        "jax.jit", "`jax.jit`"
    ) + table(
        "sharded | Auto mesh, ms | faster | Explicit mesh, ms | faster | results",
        (
            [
                r["sharded"],
                *(text for ms in (r["auto_ms"], r["explicit_ms"]) for text in (f"{ms}", f"{one / ms:.2f} ×")),
                r["bits"],
            ]
            for r in found["rows"]
        ),
    )


def host() -> str:
    found = NOTED["host"]
    return wrapped(f"""{found["method"]}: {found["ours_us"]} µs from Python to the call's return. cuDNN through `jax.nn` takes {found["cudnn_us"]} µs.
Our handler takes {found["handler_us"]} µs of that (median), for look-up, tensor maps and launch.""")


def clocks_layers() -> str:
    """Our kernels in the launches whose times cuDNN has published."""
    pro, flash = (CLOCKS["layers"][name] for name in ("V4-Pro", "V4-Flash"))
    return wrapped(f"""Our kernels for the two launches of cuDNN's, the attention of 4096 queries in a layer of V4-Pro and of V4-Flash,
        would take {pro["predicted_ms"]:.2f} and {flash["predicted_ms"]:.2f} ms on a GB200 by these clocks; cuDNN's took
        {pro["published_ms"]:g} and {flash["published_ms"]:g}.""")


def structure(key: str) -> str:
    """A kernel of Blackwell in a table: d, and at d 512 what it walks, and how."""
    v = variant_of(key)
    if isinstance(v, IndexerScores):
        number = "e4m3" if v.dtype == "float8_e4m3fn" else "bf16"
        return f"128, an indexer's scores, {number}" + ", pages" * v.paged
    words = {"mla_span_fwd": ", span", "mla_sparse_fwd": ", sparse"}
    ctas = ", one CTA" if v.max_heads <= 64 else ", a pair"
    return f"{v.d}{words[v.op]}{ctas}" if v.d == 512 else f"{v.d}"


def blackwell() -> str:
    """The account of our kernels of one source."""
    rows = []
    for key, x in CLOCKS["accounts"].items():
        if "sm_100f" not in key or not key.startswith(("mha_fwd", "mla_span_fwd", "mla_sparse_fwd", "indexer_scores")):
            continue
        units = (f"{x['units'][name]}" for name in ("tensor", "SMEM", "mufu", "L2", "chain"))
        rows.append([structure(key), *units, percent(x["at_most"]), percent(x["by_the_clocks"])])
    return table("d | tensor pipe | SMEM | exp2 | L2 | chain | at most | by the clocks", rows)


def accounts_ours() -> str:
    """What bounds our kernels for Hopper, beside what an H200 took."""
    rows = []
    for name, x in CLOCKS["ours"].items():
        found = CLOCKS["accounts"][x["kernel"]]
        measured = x["tensor"] * x["predicted_us"] / x["measured_us"]
        shares = (percent(y) for y in (found["at_most"], found["by_the_clocks"], x["tensor"], measured))
        rows.append([name, found["bound"], *shares])
    header = "launch | bound by | at most | by the clocks | by the clocks, whole launch | measured, whole launch"
    return texts(header, rows)


def accounts_others() -> str:
    """What bounds witnesses, beside what was published of them."""
    rows = []
    for name, x in CLOCKS["others"].items():
        found = CLOCKS["accounts of others"][name]
        chip = next(chip for chip in (B200, GB200) if x["chip"].startswith(f"{chip.name},"))
        published = 1e12 * x["published_tflops"] / (1e9 * chip.ghz * chip.sms * BLACKWELL["tensor"].value)
        shares = (percent(y) for y in (found["at_most"], found["by_the_clocks"], published))
        rows.append([name.removesuffix(" long"), found["bound"], *shares])
    return texts("witness | bound by | at most | by the clocks | published", rows)


def expected_b200() -> str:
    rows = [
        [name, f"{x['predicted_us']:g}", f"{x['at_least_us']:g}", x["bound"]] for name, x in CLOCKS["sm_100f"].items()
    ]
    return table("launch on a B200 of 1.83 GHz, never run | µs by the clocks | µs at least | bound by", rows)


def clock_constants() -> str:
    rows = []
    for name, x in HOPPER.items():
        other = BLACKWELL[name]
        values = f"{x.value:g}" if other.value == x.value else f"{x.value:g}, on Blackwell {other.value:g}"
        source = x.source if other.source == x.source or x.source == "-" else f"{x.source}; Blackwell: {other.source}"
        rows.append([name, values, other.unit, source if x.source != "-" else other.source])
    return texts("what | value | of what | source", rows)


def off(predicted: float, wanted: float) -> str:
    return f"{round(100 * (predicted / wanted - 1)):+d} %".replace("+0 ", "0 ")


def clocks_ours() -> str:
    """Predictions of our kernels beside what an H200 took."""
    rows = []
    for name, x in CLOCKS["ours"].items():
        how = "fitted" if x["fitted"] else "predicted"
        times = (f"{x['predicted_us']:g}", f"{x['measured_us']:g}", off(x["predicted_us"], x["measured_us"]))
        rows.append([name, how, f"{x['clocks'] / 1000:.0f}", percent(x["tensor"]), f"{x['ghz']:.2f}", *times])
    return table("launch | how | thousand clocks | tensor pipe | GHz | µs | measured µs | off by", rows)


def clocks_ours_count() -> str:
    held = [x for x in CLOCKS["ours"].values() if not x["fitted"]]
    near = sum(abs(x["predicted_us"] / x["measured_us"] - 1) <= 0.15 for x in held)
    return wrapped(
        f"""Of the {len(held)} rows that no constant was chosen for, {near} are within 15 % of what was measured."""
    )


def clocks_others() -> str:
    rows = []
    for name, x in CLOCKS["others"].items():
        counted = "whole launch" if x["whole"] else "steady state"
        figures = (f"{x['predicted_tflops']:g}", f"{x['published_tflops']:g}")
        rows.append(
            [
                name.removesuffix(" long"),
                f"{x['chip']}",
                counted,
                percent(x["tensor"]),
                *figures,
                off(x["predicted_tflops"], x["published_tflops"]),
                x["source"],
            ]
        )
    header = "witness | chip | what counts | tensor pipe | TFLOP/s | published | off by | published by"
    return texts(header, rows)


def rules() -> str:
    rows = [[f"`{x.name}`", x.says, x.without, x.evidence] for x in Rule]
    return texts("rule | the manual | without it | evidence", rows)


def witnesses() -> str:
    """Each witness: what it is, how many of our forms it executes, its answer."""
    rows = []
    for name, x in WITNESSED["witnesses"].items():
        ran, total = x["instructions"]
        worst = max(x["errors"].values())
        rows.append(
            [
                name,
                x["what"].removeprefix("Hopper: "),
                f"{x['maker']} {x['version']}"
                if " " not in x["maker"]
                else f"CUTLASS, in flashinfer-python {x['version']}",
                x["arch"],
                f"{ran} of {total}",
                f"{len(FORMS.keys() & set(x['forms']))}" if x["arch"] == "sm_100a" else "–",
                f"{x['seeds']}",
                ("exact" if worst == 0 else f"{worst:.0e}") if x["right"] else "WRONG",
                f"{x['compile_s']:.0f} s, {x['seconds']:.1f} s",
            ]
        )
    header = "witness | what | by | for | instructions executed | our forms | orders | error | to compile, a run"
    return texts(header, rows)


def witness_count() -> str:
    found = WITNESSED["witnesses"].values()
    chips = [sum(x["arch"] == arch for x in found) for arch in ("sm_100a", "sm_90a")]
    right = sum(x["right"] for x in found)
    lone = [form for form in FORMS if not _vouching(form)]
    return wrapped(f"""{len(found)} kernels, {chips[0]} for Blackwell and {chips[1]} for Hopper: {right} give the right answer in every order that was tried. Of the {len(FORMS)} forms
that our Blackwell kernels execute, {len(FORMS) - len(lone)} have a witness.""")


def _vouching(form: str) -> list[str]:
    return [name for name, x in WITNESSED["witnesses"].items() if form in x["forms"]]


def witnessed_forms() -> str:
    rows = []
    for form in FORMS:
        names = _vouching(form)
        many = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append([f"`{form}`", f"{len(FORMS[form])}", ", ".join(names[:3]) + many if names else "**nobody**"])
    return texts("form | kernels of ours | witnesses", rows)


def witness_rules() -> str:
    """For each rule of the manual, how many of the witnesses for Blackwell would fail if it alone were checked."""
    found = [x for x in WITNESSED["witnesses"].values() if "breaks" in x]
    clean = [name for name, x in WITNESSED["witnesses"].items() if not x["breaks"]]
    rows = [[f"`{name}`", f"{sum(name in x['breaks'] for x in found)} of {len(found)}"] for name in WITNESSED["rules"]]
    alarms = f"{len(found) - len(clean)} of {len(found)}"
    return table("rule | witnesses that break it", [*rows, ["all, as for our kernels", alarms]])


def witness_faults() -> str:
    counts: dict[str, list[int]] = {}
    for x in WITNESSED["witnesses"].values():
        for kind, count in x.get("faults", {}).items():
            total = counts.setdefault(kind, [0, 0, 0])
            for n, part in enumerate(("planted", "raised", "wrong")):
                total[n] += count[part]
    sums = [sum(x[n] for x in counts.values()) for n in range(3)]
    rows = [[kind, *map(str, x), str(x[0] - x[1] - x[2])] for kind, x in (*counts.items(), ("**all**", sums))]
    return table("what is changed | places | a fault is raised | the answer is wrong | no effect", rows)


def planted_in() -> str:
    names = [name for name, x in WITNESSED["witnesses"].items() if "faults" in x]
    return f"Planted in: {', '.join(names)}."


def orders() -> str:
    """By op and chip: how large the skeletons of its kernels' launches are, and what every order of them does."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for x in ORDERS:
        op, _, rest = x["kernel"].partition("_sm_")
        found.setdefault((op, f"sm_{rest.partition('_')[0]}"), []).append(x)
    rows = []
    for (op, arch), some in found.items():
        sizes = []
        for what in ("warps", "barriers", "events"):
            least, most = (limit(x[what] for x in some) for limit in (min, max))
            sizes.append(f"{least}" if least == most else f"{least} to {most}")
        loose = sum(x["loose"] > 0 for x in some)
        does = "ends" if all(x["right"] for x in some) else "FAULT"
        does += f"; in {loose} launches {max(x['loose'] for x in some)} waits may pass in several phases" * bool(loose)
        seconds = f"{max(x['seconds'] for x in some):.2f}"
        rows.append([op, arch, f"{len({x['kernel'] for x in some})}, {len(some)}", *sizes, seconds, does])
    header = "op | chip | kernels, launches | warps | barriers | events | longest, s | every order"
    return texts(header, rows)


def order_count() -> str:
    longest = max(ORDERS, key=lambda x: x["events"])
    return wrapped(f"""{len(ORDERS)} launches of {len({x["kernel"] for x in ORDERS})} kernels, of a few tiles of keys: {sum(x["right"] for x in ORDERS)} end in every order, {sum(x["loose"] == 0 for x in ORDERS)} with no event in
another phase. The largest has {longest["events"]} events; the argument took {longest["seconds"]:.2f} s for it, beside two runs of {longest["run_s"] / 2:.0f} s.""")


def interpreted() -> str:
    seconds = sorted(x["seconds"] for x in WITNESSED["witnesses"].values())
    compiled = sorted(x["compile_s"] for x in WITNESSED["witnesses"].values())
    half = len(seconds) // 2
    return wrapped(f"""The witnesses, GEMMs and attention on operands of some 10 to 500 KiB, take {seconds[0]:.1f} to {seconds[-1]:.1f} s a run, {seconds[half]:.1f} in the
median, and {compiled[0]:.0f} to {compiled[-1]:.0f} s to compile, {compiled[half]:.0f} in the median, on a core of a machine that was busy.""")


def limits() -> str:
    """What performance.md says of pages that have tables of their own."""
    ratios = [
        same_bits / default for default, same_bits in NOTED["deterministic"]["ms"].values() if same_bits > 2 * default
    ]
    rows = {row["sharded"]: NOTED["scaling"]["one device, ms"] / row["auto_ms"] for row in NOTED["scaling"]["rows"]}
    host = NOTED["host"]
    return wrapped(f"""`deterministic=True` takes {min(ratios):.1f} to {max(ratios):.1f} times as long at d 512. [Four GPUs of a host](kernels/scaling.md): batch over four is {rows["batch over four"]:.1f} times as fast as
one, heads over four {rows["heads over four"]:.1f} times. A tiny jitted call returns to Python after {host["ours_us"]} µs (cuDNN through `jax.nn`: {host["cudnn_us"]} µs).""")


def layer() -> str:
    """A row for each kind of layer, and what each of its parts takes."""
    parts = ("products", "attention", "indexer", "compressor", "append", "rope", "norm", "other")
    rows = []
    for row in suite(LAYER, "layer") + [row for row in suite(STEPS, "layer") if row["name"].startswith("layer")]:
        times = row["times"]["ours"]["parts"]
        rest = 1 - (times["products"] + times["attention"]) / sum(times.values())
        each = (micro(times[part]) if part in times else "" for part in parts)
        launches = str(row["times"]["ours"]["launches"])
        rows.append([row["name"].removeprefix("layer "), micro(ours(row)), launches, *each, f"{100 * rest:.1f} %"])
    return table(" | ".join(["layer", "all", "launches", *parts, "rest"]), rows)


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


def layer_stack() -> str:
    """A step of all layers, in one program."""
    rows = []
    for row in suite(STEPS, "layer"):
        if not row["name"].startswith("layer"):
            kernels, graph, at_once = (row["times"][name]["seconds"] for name in ("ours", "graph", "at once"))
            launches = str(row["times"]["ours"]["launches"])
            rows.append([row["name"], launches, *(f"{x * 1e3:.2f}" for x in (_alone(row), kernels, graph, at_once))])
    return table("ms | launches | layers, one by one | kernels | in a graph | with `STEP_OPTIONS`", rows)


def _alone(stack: dict[str, Any]) -> float:
    """The sum of what its 43 layers take alone."""
    end = ", FP8" if stack["name"].endswith("FP8") else ""
    found = (ours(_of(STEPS, f"layer {kind}, step after 16384, b64{end}")) for kind in KINDS)
    return sum(n * x for n, x in zip((2, 21, 20), found, strict=True))


def layer_rest() -> str:
    found = {row["name"]: row["times"]["ours"]["parts"] for row in suite(LAYER, "layer")}
    rests = {name: 1 - (parts["products"] + parts["attention"]) / sum(parts.values()) for name, parts in found.items()}
    most = max(rests.values())
    return wrapped(f"""\"Rest\" is the share that is neither matrix products nor attention: at most {percent(most)} in prompts and in their
    gradients. Kernels below 0.6 µs count only in \"all\".""")


def flashmla() -> str:
    steps, prompts = [], []
    bf16 = {key[1:]: f"{ratio:.2f}" for key, ratio in _steps_beside_flashmla().items() if key[0] is None}
    for row in beside("flashmla"):
        times = [micro(seconds(row, "flashmla")), micro(ours(row)), of_peer(row, "flashmla")]
        if row["suite"] != "decode":
            prompts.append([row["name"], *times])
        elif (found := STEP.match(row["name"])) and found[4] == "fp8":
            topk, b, heads = (int(x) for x in found.groups()[:3])
            steps.append([f"{heads} heads, top-k {topk}, b {b}", *times, bf16.get((heads, b), "–")])
    first = table("a prompt, with a sink | FlashMLA, µs | ours, µs | FlashMLA / ours", prompts)
    header = "a step, two queries | FlashMLA (FP8), µs | ours, FP8, µs | FlashMLA / ours | FlashMLA / ours, bfloat16"
    return f"{wrapped(_peers_measured())}\n\n{first}\n\n{table(header, steps)}"


def _peers_measured() -> str:
    """What the record of peers is."""
    if "copied" in PEERS:
        return str(PEERS["copied"])
    flashmla = PEERS["peers"]["flashmla"]
    sources = (
        f"commit {flashmla['commit'][:7]}" if flashmla["commit"] else f"extension {flashmla['sha256'][:8]} (SHA-256)"
    )
    return f"""Both tables are of one run of `bench --flashmla`, on {PEERS["date"][:10]}, of {PEERS["rounds"]} rounds: FlashMLA's
    {sources} through torch {flashmla["torch"]}."""


def _steps_beside_flashmla() -> dict[tuple[str | None, int, int], float]:
    """How many times as long FlashMLA takes, by the kind of our cache, heads and batch."""
    found = ((STEP.match(row["name"]), seconds(row, "flashmla") / ours(row)) for row in beside("flashmla"))
    return {(step[4], int(step[3]), int(step[2])): ratio for step, ratio in found if step}


def machine() -> str:
    """The machines on which the numbers were measured."""
    lines = []
    runs = {"peers": PEERS} if "versions" in PEERS else {}
    runs |= {
        "forward": FORWARD,
        "steps": DECODE,
        "gradients": GRAD,
        "indexer": INDEXER,
        "layers": LAYER,
        "layers' steps": STEPS,
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


def _of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in data["rows"] if row["name"] == name)


def _range(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


PROMPT = "d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128"


def readme() -> str:
    layer = _of(PEERS, PROMPT)
    window = _of(FORWARD, "d 512 window 128 b1 s4096 h128")
    backward = _of(GRAD, f"gradient of {PROMPT}")
    chosen = _of(INDEXER, "top-k 512 of 8192, bfloat16 h64, b1 s4096")
    steps = _steps_beside_flashmla()
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
    found = {kind: _of(STEPS, f"layer {kind}, step after 16384, b64") for kind in KINDS}
    window, sparse, dense = (micro(ours(row)) for row in found.values())
    launches = ", ".join(str(row["times"]["ours"]["launches"]) for row in found.values())
    stack = _of(STEPS, "43 layers, step after 16384, b64")
    return f"""- A step of a whole V4-Flash layer, 64 sequences of 16384 tokens in bfloat16: {window} µs with a window alone, {sparse} of
  ratio 4, {dense} of ratio 128, in {launches} launches.
- The attention of V4-Flash's 43 layers, such a step: {stack["times"]["at once"]["seconds"] * 1e3:.2f} ms. Its layers alone take {_alone(stack) * 1e3:.2f} ms."""


KINDS = ("with a window alone", "of ratio 4", "of ratio 128")


def landing() -> str:
    """Two numbers for the first page: a prompt's attention, and a step of a whole layer."""
    prompt = _of(PEERS, PROMPT)
    step = _of(STEPS, "layer of ratio 4, step after 16384, b64")
    return wrapped(f"""On one {FORWARD["devices"][0]["name"].removeprefix("NVIDIA ")}, attention of 128 heads over a window of 128 and 1024 chosen
    entries takes **{ours(prompt) * 1e3:.2f} ms** for 4096 queries, at {rate(prompt)} TFLOP/s. A step of generation takes a whole V4-Flash layer of ratio 4
    **{micro(ours(step))} µs**, for 64 sequences of 16384 tokens.""")


def losses() -> str:
    few = _of(FORWARD, "d 512 window 128 + top-k 512 of 8192 b1 s4096 h16")
    far = _of(GRAD, "gradient of d 512 window 128 + top-k 512 of 65536 b1 s4096 h64")
    torch, least = min(NOTED["torch's cuDNN"]["ratios"].items(), key=lambda found: found[1])
    parts = _of(STEPS, "layer of ratio 4, step after 16384, b64")["times"]["ours"]["parts"]
    rest = 1 - (parts["products"] + parts["attention"]) / sum(parts.values())
    return f"""- **Few heads**: a prefill layer of 16 heads over selected keys reaches {share(few)} of the roofline.
- **Backward over far keys**: 512 of 65536 keys at 64 heads reach {share(far)} of the roofline.
- **Small dense calls**: torch 2.11's cuDNN takes {least:.2f} times as long as ours for {torch}.
- **The rest of a step**: {rest:.0%} of a step of ratio 4 at b 64 is neither products nor attention."""


GENERATED: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        dsv4,
        dense,
        decode,
        decode_bound,
        mha_forward_bound,
        mla_forward_bound,
        few_heads,
        few_heads_bound,
        mla_backward,
        mla_backward_bound,
        mha_backward,
        mha_backward_bound,
        indexer,
        indexer_bound,
        layer,
        layer_rest,
        layer_stack,
        rope,
        layer_steps,
        blackwell,
        accounts_ours,
        accounts_others,
        expected_b200,
        clock_constants,
        clocks_ours,
        clocks_ours_count,
        clocks_others,
        clocks_layers,
        rules,
        witnesses,
        witness_count,
        witnessed_forms,
        witness_rules,
        witness_faults,
        planted_in,
        orders,
        order_count,
        interpreted,
        scaling,
        host,
        flashmla,
        machine,
        limits,
        readme,
        landing,
        losses,
    )
}


def generated(text: str) -> str:
    """A page's text with what is between marks made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{GENERATED[found[2]]()}\n{found[3]}", text)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if (new := generated(text)) != text:
            page.write_text(new)
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
