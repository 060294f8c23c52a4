"""Attention forward, its steps, RoPE, and many GPUs."""

import re

from .gradients import gradients
from .peers import steps_beside_flashmla
from .records import (
    DECODE,
    FORWARD,
    GQA,
    GRAD,
    LATENT,
    LAYER,
    NOTED,
    PEERS,
    PROFILES,
    STEP,
    bullets,
    has_own_values,
    launched,
    micro,
    of_peer,
    ours,
    percent,
    rate,
    row_of,
    rows_of,
    seconds,
    share,
    suite,
    table,
    wrapped,
)


def dsv4() -> str:
    """Layers of 64 heads or more; fewer have a page of their own."""
    rows = [row for row in rows_of(FORWARD, "dsv4", "two_pass") if re.search(r" h(64|128)\b", row[0])]
    return table("layer | µs | TFLOP/s | of the roofline | two passes / ours", rows)


def own_values() -> str:
    """Prompts at d 512 with V of their own, and their gradients."""
    rows = filter(has_own_values, [*rows_of(FORWARD, "dense", "xla"), *rows_of(GRAD, "grad", "xla")])
    return "; ".join(f"{name} {time} µs ({rate} TFLOP/s, XLA {xla} times)" for name, time, rate, _, xla in rows) + "."


def dense() -> str:
    rows = [*rows_of(FORWARD, "dense", "cudnn", "xla"), *rows_of(FORWARD, "window", "cudnn", "xla")]
    rows = [row for row in rows if not ("d 512" in row[0] and "float16" in row[0])]  # these kernels are gone
    rows = [row for row in rows if not has_own_values(row)]
    return table("attention | µs | TFLOP/s | of the roofline | cuDNN / ours | XLA / ours", rows)


def latent() -> str:
    """Latents of 576 numbers, and of 512 beside them."""
    header = "top-k 2048, causal, or a step of 16 × 32768 keys | µs | TFLOP/s | of the roofline | FlashMLA / ours"
    their_gradients = gradients((576,), "XLA / ours", lambda row: of_peer(row, "xla"))
    return "\n\n".join((table(header, rows_of(LATENT, "latent", "flashmla")), _latent_bounds(), their_gradients))


def _latent_bounds() -> str:
    """What is below what was asked for, and why: counted with the rates of gathering that few heads have at d 512."""
    queries, keys = 4096, 2048
    bytes_of_all = queries * keys * 576 * 2
    gathered = [us * bytes_of_all / (queries * _FEW_KEYS * 1024) for us in _FEW["gathering alone, us"]]
    of_heads = lambda h: [row_of(LATENT, f"d 576 top-k 2048 of {n} b1 s4096 h{h}") for n in (8192, 65536)]  # noqa: E731
    both = lambda found: " / ".join(f"{us:.0f}" for us in found)  # noqa: E731
    asked = {h: both(seconds(row, "flashmla") / 1.5e-6 for row in of_heads(h)) for h in (8, 16)}
    step, dense = (
        row_of(LATENT, f"d 576 {x}") for x in ("step, top-k 2048 of 8192 b2 s1 h128 v32_fp8", "full b16 s1 h128")
    )
    launches = step["times"]["ours"]["kernels"]
    attends = launches["mla_fwd_sm90_0"] + launches["combine_0"]
    hot = NOTED["latents of 576, 128 heads"]
    split = lambda h: " / ".join(map(str, hot["whole / split"][f"{h} heads"]))  # noqa: E731
    clocks = " and ".join(f"{us * mhz / 1e6:.1f}" for us, mhz in zip(hot["us"], hot["MHz"], strict=True))
    return bullets(f"""- **128 heads**: power. After half a second the card draws {hot["watts"][0]} of its {PROFILES["clock, GHz"]["watts"]} W, and its clock is {hot["MHz"][0]} MHz with 8192 keys
  and {hot["MHz"][1]} with 65536. Both take about as many clocks, {clocks} million. A trial, where the left warpgroup's P takes the
  odd tile's numbers for RoPE, was 1 to 2 % faster, but lists would add a score's columns in another order than spans ([trials](lab/forward.md)).
- **The last queries are split** ([how](kernels/decode.md#the-idea)): in turns with the same kernels without it,
  {split(128)} times as fast with 128 heads and {split(64)} with 64.
- **8 and 16 heads**: keys of all queries are {bytes_of_all / 1e9:.1f} GB, and gathering them alone takes {both(gathered)} µs of
  8192 / 65536 keys, by [the rates at d 512](kernels/few-heads.md#what-bounds-it-today). For 1.5 times FlashMLA's speed 8 heads would have to take
  {asked[8]} µs, and 16 {asked[16]}: of 65536 keys that is less than gathering.
- **A step of 2 sequences** ({micro(ours(step))} µs): {micro(launches["seen_slots_0"])} µs of it find slots in pages, which FlashMLA is given. Attention and the merge
  take {micro(attends)} µs, FlashMLA's {micro(seconds(step, "flashmla"))}.
- **A step of GLM-5.3-Flash's 8 heads**, 64 sequences, took 45.0 µs from bfloat16, 71 % of a copy's rate, and 60.1 from FP8 ([lab](lab/forward.md)), before
  the kernel of slots changed: kernels for few heads have no packed keys, so a tile of 64 rows has 8 of them.
- **A dense step** ({micro(ours(dense))} µs): L2 is busy for 96 % of the time, for two CTAs read each key ([counts](lab/kernels.md#a-step-of-generation)).""")


def gqa() -> str:
    """A row for each head dimension and what a query sees, a column for each batch."""
    kinds: dict[str, dict[int, str]] = {}
    for row in suite(GQA, "gqa"):
        if found := re.match(r"d (\d+) step, (.*) in pages of 64 b(\d+) s(\d+) h64/8( float8_e4m3fn)?$", row["name"]):
            d, seen, b, s_q, codes = found.groups()
            kind = f"d {d}, {seen} tokens{f', {s_q} new' if s_q != '1' else ''}{', FP8' if codes else ''}"
            kinds.setdefault(kind, {})[int(b)] = f"{micro(ours(row))} ({share(row)})"
    batches = sorted({b for times in kinds.values() for b in times})
    header = " | ".join(["64 heads, 8 KV heads", *(f"b {b}, µs" for b in batches)])
    return table(header, ([kind, *(times.get(b, "–") for b in batches)] for kind, times in kinds.items()))


CACHES = {None: "bfloat16", "fp8": "FP8", "v4_fp4": "FP8 and FP4", "v41_fp4": "V4.1's FP8 and FP4"}


def decode() -> str:
    """A row for each kind of cache and number of heads, a column for each batch; then what is left."""
    kinds: dict[tuple[str, ...], dict[int, str]] = {}
    others = []
    for row in suite(DECODE, "decode"):
        if found := STEP.match(row["name"]):
            topk, b, heads, cache = found.groups()
            kinds.setdefault((heads, topk, CACHES[cache]), {})[int(b)] = micro(ours(row))
        elif not row["name"].endswith("products"):  # those are prompts
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


def mha_forward_bound() -> str:
    full, window, clocks = PROFILES["d 128 full"], PROFILES["d 128 window"], PROFILES["clock, GHz"]
    row, narrow, small = (
        row_of(FORWARD, f"d 128 {name}")
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
        row_of(FORWARD, f"d 512 {name}")
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


_FEW, _FEW_KEYS = NOTED["few heads, a layer"], 640


def few_heads_bound() -> str:
    """Times beside what bounds them, and beside FlashMLA's 64 heads, to which fewer are padded."""
    queries, keys, processors = 4096, _FEW_KEYS, 132
    tiles, rows = queries * keys / 64 / processors, []
    both = lambda texts: " / ".join(texts)  # noqa: E731
    whole = lambda times: both(f"{us:.0f}" for us in times)  # noqa: E731
    name = "d 512 window 128 + top-k 512 of {} b1 s4096 h{}"
    pair = lambda record, heads: [row_of(record, name.format(n, heads)) for n in (8192, 65536)]  # noqa: E731
    padded = [seconds(row, "flashmla") for row in pair(PEERS, 64)]
    for heads, clocks in _FEW["clocks of shared memory, a tile of 64 keys"].items():
        timed = pair(FORWARD, heads)
        rows.append(
            [
                heads,
                whole(ours(row) * 1e6 for row in timed),
                whole(_FEW["gathering alone, us"]),
                f"{tiles * clocks / _FEW['GHz'] / 1e3:.0f}",
                both(share(row) for row in timed),
                both(f"{them / ours(row):.2f}" for them, row in zip(padded, timed, strict=True)),
            ]
        )
    header = "heads | µs | gathering alone | shared memory | of the roofline | FlashMLA's 64 heads / ours"
    near, far = (queries * keys * 1024 / us / 1e6 for us in _FEW["gathering alone, us"])
    asked = whole(_FEW["asked for 16 heads, us"])
    places = _FEW["clocks of a tile of 64 keys, 32 heads, by pieces of keys a CTA"]
    row = pair(FORWARD, 32)[0]
    asked_of_32 = row["flops"] / row["matmul_flops_per_s"] * 1e6 / 0.6
    return (
        table(header, rows)
        + "\n\n"
        + wrapped(f"""L2 gives {near:.1f} TB/s, and {far:.1f} of 65536 entries, which it does not hold. For 16 heads {asked} µs were asked:
    gathering alone takes more than the second, and either bound as much as the first. A CTA's chain from keys to P to O uses both in
    turns, and the other CTA hides a part. A trial had one CTA an SM, whose two queries shared a ring of keys: 16 heads took
    {whole(_FEW["one ring, us"])} µs. For 32 heads 60 % of the roofline were asked, {asked_of_32:.0f} µs: shared memory takes
    as much, and gathering alone more of 65536 entries. With room for 8 pieces of keys a CTA in place of 4 a tile would take
    {percent(1 - places["8"] / places["4"])} less, by the interpreter's clocks, for shared memory would be busy.""")
    )


def decode_bound() -> str:
    name = "d 512 window 128 + top-k 1024 of 16384 b{} s2 h128 fp8"
    small, large = (row_of(DECODE, name.format(b)) for b in (2, 64))
    plain = row_of(DECODE, name.format(64).removesuffix(" fp8"))
    dense = row_of(DECODE, "d 512 full b16 s1 h128")
    steps = steps_beside_flashmla()
    four = row_of(DECODE, "d 512 window 128 + top-k 512 of 16384 b64 s2 h64 v41_fp4")
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
