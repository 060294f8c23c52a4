"""What the interpreter says: clocks and accounts, witnesses, orders."""

import re
from typing import Any

from interpreter.clocks.architecture import BLACKWELL, HOPPER
from interpreter.kernels.native import variant_of
from interpreter.machine.rules import Rule
from interpreter.witnesses.opinions import FAULTS, WITHOUT
from interpreter.witnesses.timing import B200, GB200

from .records import CLOCKS, FORMS, OPINIONS, ORDERS, WITNESSED, percent, table, texts, wrapped


def clocks_layers() -> str:
    """Our kernels in the launches whose times cuDNN has published."""
    pro, flash = (CLOCKS["layers"][name] for name in ("V4-Pro", "V4-Flash"))
    return wrapped(f"""Our kernels for the two launches of cuDNN's, the attention of 4096 queries in a layer of V4-Pro and of V4-Flash,
        would take {pro["predicted_ms"]:.2f} and {flash["predicted_ms"]:.2f} ms on a GB200 by these clocks; cuDNN's took
        {pro["published_ms"]:g} and {flash["published_ms"]:g}.""")


def structure(key: str) -> str:
    """A kernel of Blackwell in a table: d, and at d 512 what it walks, and how."""
    v = variant_of(key)
    words = {"mla_span_fwd": ", span", "mla_sparse_fwd": ", sparse"}
    ctas = ", one CTA" if v.max_heads <= 64 else ", a pair"
    return f"{v.d}{words[v.op]}{ctas}" if v.d == 512 else f"{v.d}"


def blackwell() -> str:
    """The account of our kernels of one source."""
    rows = []
    for key, x in CLOCKS["accounts"].items():
        if "sm_100f" not in key or not key.startswith(("mha_fwd", "mla_span_fwd", "mla_sparse_fwd")):
            continue
        units = (f"{x['units'][name]}" for name in ("tensor", "SMEM", "mufu", "L2", "chain"))
        rows.append([structure(key), *units, percent(x["at_most"]), percent(x["by_the_clocks"])])
    return table("d | tensor pipe | SMEM | exp2 | L2 | chain | at most | by the clocks", rows)


def blackwell_gradients() -> str:
    """The account of our kernels of gradients at d 512."""
    names = {"mla_span_bwd": "span", "mla_sparse_bwd": "sparse"}
    rows = []
    for key, x in CLOCKS["accounts"].items():
        if (v := variant_of(key)).op in names:
            units = (f"{x['units'][name]}" for name in ("tensor", "SMEM", "to L2", "to peers", "L2", "chain"))
            rows.append([names[v.op], *units, percent(x["at_most"]), percent(x["by_the_clocks"])])
    return table("keys | tensor pipe | SMEM | to L2 | to peers | L2 | chain | at most | by the clocks", rows)


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
        f"""No constant was chosen for {len(held)} rows; {near} of them are within 15 % of what was measured."""
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
                if not x["maker"].startswith("CUTLASS")
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
    return wrapped(f"""{len(found)} kernels, {chips[0]} for Blackwell and {chips[1]} for Hopper: {right} give the right answer in every order that was tried. Our Blackwell
kernels execute {len(FORMS)} forms, and {len(FORMS) - len(lone)} of them have a witness.""")


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
    clean = [x for x in found if not x["breaks"]]
    rows = []
    for name in WITNESSED["rules"]:
        examined = [x for x in found if name in x["examined"]]
        rows.append([f"`{name}`", f"{sum(name in x['breaks'] for x in examined)} of {len(examined)}"])
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


def opinions() -> str:
    """What two interpreters say of one text, and of faults planted in it."""

    def said(found: dict[str, Any]) -> str:
        if not (verdict := found["verdict"]):
            return f"error {found['error']:.6f}"
        kind = re.match(r"\w+: (?:[A-Z]+ [A-Z]+|tcgen05\.\w+)|[\w ]+", verdict)
        return kind[0] if kind else verdict

    rows = [
        [f"{fault}: {what}" if what else "nothing", *(said(OPINIONS[fault][by]) for by in ("jax", "ours"))]
        for fault, what in FAULTS.items()
    ]
    return texts("what is changed | JAX's interpreter | ours", rows)


def opinions_apart() -> str:
    (apart,) = (x["apart"] for x in OPINIONS[WITHOUT].values() if "apart" in x)
    return f"Without a fault, the two answers differ by {apart:.1e} of the greatest number."


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
