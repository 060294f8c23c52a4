"""The Blackwell kernels, which no test has run on hardware: their PTX in the interpreter, with planted faults."""

import contextlib
import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interpreter.faults import PlantedFault
from interpreter.kernels import attention, cases, native
from interpreter.kernels.launch import Kernel, Launch, combine, launch
from interpreter.kernels.verdict import Wrong, judge
from interpreter.machine.hazards import Deadlock, Fault, Leak, Misuse, Race, Undefined
from interpreter.machine.state import SMEM_BASE, Array
from kernels import build
from kernels.abi import Forward
from kernels.cache import KernelCache, default_folder
from kernels.variants import VARIANTS
from tests import wrong_answers

pytestmark = [
    pytest.mark.skipif(util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)"),  # NumPy's warnings about NaN and inf
]

ROOT = Path(__file__).parent.parent
SM100 = {v.key: v for v in VARIANTS if isinstance(v, Forward) and v.arch == "sm_100f"}


def seen(case: str, b: int, s_q: int, s_kv: int) -> tuple[Array, Array]:
    """start and stop of every query."""
    i, zero = np.arange(s_q), np.zeros(s_q, np.int64)
    position = i + s_kv - s_q  # the last query is at the last key
    start, stop = {
        "full": (zero, zero + s_kv),
        "causal": (zero, position + 1),
        "window": (position - 40, position + 1),
        "compressed": (zero, (position + 1) // 4),
        "rising": (zero, zero + s_kv),
        "empty rows": (zero + 3, np.where(i % 3 == 1, 3, s_kv - 2)),  # and later keys that nobody sees
    }[case]
    start, stop = (np.tile(np.clip(x, 0, s_kv).astype(np.int32), (b, 1)) for x in (start, stop))
    if case == "empty rows" and b > 1:
        stop[1] = start[1]  # nobody of this sequence sees anything
    return start, stop


def operands(variant: Forward, case: str, **extents: int) -> attention.Operands:
    """Random, with NaN in keys that nobody sees after the last that somebody sees; rising: later keys are larger."""
    x = attention.operands(variant, **extents)
    b, s_q, s_kv, _, h_kv, d, *_ = x.shape
    start, stop = seen(case, b, s_q, s_kv)
    j = np.arange(s_kv)
    counts = ((j >= start[..., None]) & (j < stop[..., None])).astype(np.int64)
    rng = np.random.default_rng(1)
    size = np.linspace(0.02, 0.5, s_kv)[:, None, None] if case == "rising" else 0.125
    k = (size * rng.standard_normal((b, s_kv, h_kv, d))).astype(x.q.dtype)
    v = k if variant.shared_kv else (0.125 * rng.standard_normal(k.shape)).astype(x.q.dtype)
    for array in (k, v):
        array[j >= stop.max(1)[:, None]] = np.nan
    return dataclasses.replace(x, sources=(attention.Keys(k, v, start, stop, counts),))


RISES = "maxima that rise"
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "three tiles, ragged": ("full", {"b": 1, "s_q": 9, "h_q": 8, "s_kv": 300}),
    "causal, several row tiles a CTA": ("causal", {"b": 1, "s_q": 70, "h_q": 4, "s_kv": 150}),
    "window, grouped heads": ("window", {"b": 1, "s_q": 33, "h_q": 12, "h_kv": 2, "s_kv": 170}),
    "a head for each head of keys": ("causal", {"b": 1, "s_q": 150, "h_q": 2, "h_kv": 2, "s_kv": 160}),
    "empty rows and an empty sequence": ("empty rows", {"b": 2, "s_q": 5, "h_q": 7, "s_kv": 140}),
    "more heads than rows in a tile": ("compressed", {"b": 1, "s_q": 2, "h_q": 130, "s_kv": 600}),
    RISES: ("rising", {"b": 1, "s_q": 20, "h_q": 8, "s_kv": 300}),
    "one key": ("full", {"b": 3, "s_q": 1, "h_q": 1, "s_kv": 1}),
    "one tile": ("full", {"b": 1, "s_q": 5, "h_q": 8, "s_kv": 60}),
}


DECODE = "dsv4_decode_sm_100f_d512_bfloat16"
UNPACKING = {  # what warps unpack is other code for each format and number of CTAs; the rest of the kernel is not
    f"{DECODE}_v4_fp8": ("few", "split few", "window"),
    f"{DECODE}_v4_fp8_h64": ("few", "tiles"),
    f"{DECODE}_v41_fp8": ("few",),
    f"{DECODE}_v41_fp8_h64": ("few",),
    f"{DECODE}_v41_fp4": ("few", "turns"),
    f"{DECODE}_v41_fp4_h64": ("few",),
}
RUNS = [  # float16 is the same code up to conversions; `cases` has the ops of a layer, where CASES has more for fmha
    (key, case)
    for key, v in SM100.items()
    for case in (CASES if v.sources == ("span",) else UNPACKING.get(key, ("tiles", "few", "turns")))
    if v.dtype == "bfloat16" or case in ("three tiles, ragged", "few")
    if case != RISES or not v.shared_kv  # large keys are large values there; there is another list for them
]


RISING = "rising"
RUNS += [(key, RISING) for key, v in SM100.items() if v.op == "mla_sparse_fwd" and v.dtype == "bfloat16"]


def rising(x: attention.Operands) -> attention.Operands:
    """`mixed` with later keys, which are larger, later in every list, and so large that O is rescaled."""
    (keys,) = x.sources
    indices = keys.seen_from.copy()
    for n, i in np.ndindex(indices.shape[:2]):
        indices[n, i, : keys.seen_to[n, i]].sort()
    q = (4 * x.q.astype(np.float32)).astype(x.q.dtype)
    return dataclasses.replace(x, q=q, sources=(dataclasses.replace(keys, seen_from=indices),))


SPLIT = "split "  # before a case: in three parts, which `combine` merges; some rows have fewer tiles of keys
SPLITTING = {"mla_span": "three tiles, ragged", "csa": "turns", "dsv4": "turns"}
RUNS += [
    (key, SPLIT + case)
    for op, case in SPLITTING.items()
    for key, v in SM100.items()
    if v.op.startswith(op) and v.dtype == "bfloat16" and key not in UNPACKING
]

TWICE = ("three tiles, ragged", "causal, several row tiles a CTA", "tiles", "turns")


def started(kernel: Kernel, case: str, seed: int = 0, processors: int = 1) -> Launch:
    case, splits = case.removeprefix(SPLIT), 3 if case.startswith(SPLIT) else 1
    if case in CASES:
        name, extents = CASES[case]
        x = operands(kernel.variant, name, **extents)
    else:
        x = cases.operands(kernel.variant, kernel.facts["tile_n"], "mixed" if case == RISING else case)
        assert x is not None
        x = rising(x) if case == RISING else x
    return launch(kernel, x, processors=processors * kernel.facts["cluster"], seed=seed, splits=splits)


def results(run: Launch, seed: int) -> tuple[Array, ...]:
    """(o, lse), where keys are split of what `combine` makes of the parts."""
    if run.operands.shape.splits == 1:
        return run.run()
    run.machine.run()
    return combine(Kernel.of(native.variant_of(f"combine_sm_100f_{run.operands.q.dtype.name}")), run, seed=seed).run()


def interpret(kernel: Kernel, case: str, seed: int = 0, processors: int = 1) -> tuple[Array, ...]:
    """(o, lse); raises what is wrong with them, or with how they came about."""
    run = started(kernel, case, seed, processors)
    got = results(run, seed)
    attention.assert_right(got, run.operands, run.scale)
    return got


@pytest.mark.parametrize(("key", "case"), RUNS)
def test_is_right(key, case):
    """In an order of its own; where `TWICE`, with the same bits in two, on one and on two CTAs or pairs."""
    kernel, first = Kernel.of(SM100[key]), 2 * RUNS.index((key, case))
    seeds = (first, first + 1) if case in TWICE and SM100[key].dtype == "bfloat16" else (first,)
    found = [interpret(kernel, case, seed, processors=1 + seed % 2) for seed in seeds]
    for one, another in zip(found[0], found[-1], strict=True):
        assert one.tobytes() == another.tobytes()


def test_config_refuses_what_does_not_fit():
    from kernels.sm100.mha.config import Config
    from kernels.sm100.mla.config import Config as Latent

    class Wide(Config):
        keys = 256

    class Greedy(Config):
        registers = (208, 64, 48)

    class Deep(Latent):
        stages = 7

    for config, arguments, says in (
        (Greedy, {"d": 128}, "gives 528 registers to a thread of each group, more than there are"),
        (Config, {"d": 512}, "at most 256"),
        (Config, {"d": 96}, "whole slabs of 64"),
        (Wide, {"d": 64}, "needs 896 columns of TMEM, there are 512"),
        (Latent, {"sources": ("span",), "cluster": 1}, "spans are for pairs"),
        (Deep, {"sources": ("span",), "cluster": 2}, "needs 26.* bytes of SMEM, 232448 fit"),
    ):
        with pytest.raises(ValueError, match=says):
            config(**{"dtype": "bfloat16", **arguments})


# Planted faults: an edit of the source, which is compiled, or of the PTX.


DENSE = "mha_fwd_sm_100f_d128_bfloat16"
PAIR = "mha_fwd_sm_100f_d256_bfloat16"
LATENT = "mla_span_fwd_sm_100f_d512_bfloat16"
FUSED = "csa_fwd_sm_100f_d512_bfloat16"
ALONE = "csa_fwd_sm_100f_d512_bfloat16_h64"
PACKED, PACKED_ALONE = f"{DECODE}_v4_fp8", f"{DECODE}_v4_fp8_h64"
DENSE_TILE, LATENT_TILE = 128, 64  # keys
KIB = 1024
LATENT_SMEM = {"keys": 192 * KIB, "p": 16 * KIB, "exchange": 16 * KIB}
SMEM = {  # what lies in shared memory, in order
    DENSE: {"q": 64 * KIB, "keys": 160 * KIB},
    PAIR: {"q": 64 * KIB, "keys": 160 * KIB},
    LATENT: LATENT_SMEM,
    FUSED: LATENT_SMEM,
    ALONE: LATENT_SMEM,
    PACKED: LATENT_SMEM,
    PACKED_ALONE: LATENT_SMEM,
}
ROWS = {"o": 256, "q": 128, "scores": 128}
OF_DENSE = {"o": 256, "scores": 128, "p": 128}
TMEM = {DENSE: OF_DENSE, PAIR: OF_DENSE, LATENT: ROWS, FUSED: ROWS, ALONE: ROWS}
TMEM |= dict.fromkeys((PACKED, PACKED_ALONE), ROWS)  # columns


def by_name(message: str, kernel: Kernel) -> str:
    """The interpreter's message, with names for places in memory; a load from TMEM after the last store to it is
    called final."""

    def named(regions: dict[str, int], place: int) -> str:
        for name, size in regions.items():
            if 0 <= place < size:
                return name
            place -= size
        return "the rest"

    key, lines = kernel.variant.key, kernel.ptx.splitlines()
    last = max(n for n, line in enumerate(lines, 1) if line.strip().startswith("tcgen05.st"))
    message = re.sub(r"line (\d+): (?=tcgen05\.ld)", lambda m: "final " * (int(m[1]) > last), message)
    message = re.sub(
        r"SMEM (?:of CTA \d+ )?bytes (\d+)\.\.\d+",
        lambda m: "SMEM of " + named(SMEM[key], int(m[1]) - SMEM_BASE),
        message,
    )
    return re.sub(
        r"TMEM (?:of CTA \d+ )?lanes \S+ columns (\d+)", lambda m: "TMEM of " + named(TMEM[key], int(m[1])), message
    )


def unordered(one: str, other: str, region: str, says: str = "") -> str:
    """Two accesses to a region of memory, whichever comes first."""

    def then(a: str, b: str) -> str:
        access = rf"{a}[^\n]*\n\s+(reads|overwrites) {region}\b[^\n]*"
        return rf"{access}nothing orders this and the (read|write) by [^\n]*{b}[^\n]*{says}"

    return f"{then(one, other)}|{then(other, one)}"


def unfenced(reader: str, region: str, writer: str) -> str:
    after = rf"no fence\.proxy\.async after the generic write by [^\n]*{writer}"
    return rf"{reader}[^\n]*\n\s+reads {region}\b[^\n]*{after}"


MMA, LD, ST = r"tcgen05\.mma", r"(?<!final )tcgen05\.ld\.sync", r"tcgen05\.st\.sync"
UNTOLD = r"(?<!thread_sync)(?<!wait::[ls][dt])$"  # nor would a fence or a wait have been enough
WRONG = (Wrong, r"^o is wrong in .*; lse is wrong in ")
WRONG_O = (Wrong, r"^o is wrong in .*; lse is right")


def without(instruction: str) -> Callable[[str], str]:
    """The PTX without the lines that begin with an instruction."""
    return lambda ptx: "\n".join(x for x in ptx.splitlines() if not x.strip().startswith(instruction))


def unelected(ptx: str) -> str:
    """The PTX without the branch that leaves all products to one lane."""
    lines = ptx.splitlines()
    product = next(n for n, line in enumerate(lines) if "tcgen05.mma" in line)
    election = max(n for n, line in enumerate(lines[:product]) if line.strip().startswith("elect"))
    branch = next(n for n in range(election, product) if lines[n].strip().startswith("@"))
    return "\n".join([*lines[:branch], *lines[branch + 1 :]])


FAULTS = [
    PlantedFault(
        "O is not rescaled when a maximum rises",
        DENSE,
        *WRONG_O,
        source=(("scale_lanes(cta.tmem + i * c.d, c.d, factor, lane, CHUNK)", "pass"),),
        case=RISES,
    ),
    PlantedFault(
        "products read P of the other tile of rows",
        DENSE,
        (Race, Undefined, Wrong),
        rf"{MMA}[^\n]*\n\s+reads TMEM of p\b|^o is wrong in .*; lse is right",
        source=(("cta.tmem.toint() + self.p_column(buffer)", "cta.tmem.toint() + self.p_column(1 - buffer)"),),
        case=RISES,
    ),
    PlantedFault(
        "products read the second part of P before it is there",
        DENSE,
        (Race, Undefined),
        unordered(f"({LD}|{ST})", MMA, "TMEM of p", UNTOLD) + rf"|{MMA}[^\n]*\n\s+reads TMEM of p, which nobody wrote",
        source=(
            (
                "barrier = bar.p_more + (len(c.parts) - 1) * buffer + (part - 1)\n            cute",
                "pass\n            cute",
            ),
        ),
    ),
    PlantedFault(
        "P is told of before it is stored",
        DENSE,
        (Race, Undefined),
        unordered(f"({LD}|{ST})", MMA, "TMEM of p", UNTOLD) + rf"|{MMA}[^\n]*\n\s+reads TMEM of p, which nobody wrote",
        source=(
            ("                store_lanes(p + first // 2, rounded, lane)\n", ""),
            (
                "                self.tell_mma(barrier)\n",
                "                self.tell_mma(barrier)\n                store_lanes(p + first // 2, rounded, lane)\n",
            ),
        ),
    ),
    PlantedFault(
        "P is overwritten while products read it",
        DENSE,
        Race,
        unordered(ST, MMA, "TMEM of p"),
        source=(("self.wait_output(cta, i, fill - P_BUFFERS // c.row_tiles)", "pass"),),
    ),
    PlantedFault(
        "scores are overwritten before they are read",
        DENSE,
        Race,
        unordered(LD, MMA, "TMEM of scores"),
        source=(("wait_for(cta.bar.s_empty + i, fill)", "pass"),),
        case=RISES,
    ),
    PlantedFault(
        "a correcting warp tells of O a tile of keys ahead of the others",
        DENSE,
        Race,
        unordered(r"tcgen05\.(ld|st)\.sync", MMA, "TMEM of o"),
        source=(("self.wait_output(cta, i, fill - 1)", "pass"),),
        case=RISES,
    ),
    PlantedFault(
        "a tile of keys is free before its products are done",
        DENSE,
        Race,
        unordered(MMA, "tma", "SMEM of keys"),
        source=(
            (
                "self.commit(bar.keys.at(2 * fills0).empty)",
                "cute.arch.mbarrier_arrive(bar.keys.at(2 * fills0).empty)",
            ),
        ),
    ),
    PlantedFault(
        "polynomials get minus infinity",
        DENSE,
        Wrong,
        r"^o is wrong in 72 of 72 rows, first in .* \(nan, wanted",
        source=(("tuple(cute.arch.fmax(y, LEAST, nan=True) for y in x)", "x"),),
    ),
    PlantedFault(
        "polynomials lack their highest power",
        DENSE,
        Wrong,
        r"^o is right; lse is wrong in 72 of 72 rows",
        source=(("for coefficient in POLYNOMIAL[1:]:", "for coefficient in POLYNOMIAL[2:]:"),),
    ),
    PlantedFault(
        "the CTAs of a pair exchange their keys",
        PAIR,
        *WRONG,
        answers=wrong_answers.with_k(wrong_answers.rows_exchanged(DENSE_TILE // 2)),
        source=(("span.lo + cta.rank * c.tile_n", "span.lo + (1 - cta.rank) * c.tile_n"),),
    ),
    PlantedFault(
        "the CTAs of a pair exchange their columns of values",
        PAIR,
        *WRONG_O,
        answers=wrong_answers.with_v(wrong_answers.halves_exchanged),
        source=(("c.columns_v)[None, None, None, cta.rank]", "c.columns_v)[None, None, None, 1 - cta.rank]"),),
    ),
    PlantedFault(
        "the softmax of one CTA of a pair is awaited",
        PAIR,
        (Race, Undefined),
        unordered(f"({LD}|{ST})", MMA, "TMEM of (scores|p|o)", UNTOLD)
        + rf"|{MMA}[^\n]*\n\s+reads TMEM of p, which nobody wrote",
        source=(("(P_BUFFERS, 2 * warps),  # p_full", "(P_BUFFERS, 2 * WARPS),  # p_full"),),
    ),
    PlantedFault(
        "the bytes of one CTA of a pair alone are expected",
        PAIR,
        (Race, Undefined),
        rf"{MMA}[^\n]*\n\s+reads SMEM of (CTA 1 )?(q|keys)\b[^\n]*(which nobody wrote|the write by tma)",
        source=(("expect_full(self.config.cluster * size)", "expect_full(size)"),),
    ),
    PlantedFault(
        "values are cleared before they are there",
        PAIR,
        Race,
        unordered(r"st\.shared", "tma", "SMEM of keys"),
        source=(("wait_for(bar.v_full, cleared)", "pass"),),
        case="empty rows and an empty sequence",
    ),
    PlantedFault(
        "a CTA of a pair ends while products may still arrive in it",
        PAIR,
        Race,
        r"^CTA \d ends while nothing orders that after ",
        source=(
            ("            bar.keys.at(2 * fills0 + i).wait_empty()", "            pass"),
            (
                "self.sync()  # nothing may arrive",
                "before_thread_sync(), cute.arch.sync_threads(), after_thread_sync()  # nothing may arrive",
            ),
        ),
    ),
    PlantedFault(
        "the maximum of a thread's part, not of its row",
        LATENT,
        *WRONG,
        answers=wrong_answers.maximum_of_a_part(2, lambda j: j % LATENT_TILE // 32),
        source=(("raise_max(measured, scores), cute.arch.fmax)", "raise_max(measured, scores), lambda a, b: a)"),),
        case="one tile",
    ),
    PlantedFault(
        "the collector is to give a P that it has not kept",
        LATENT,
        Misuse,
        r"takes an operand from collector a, which has nothing",
        edit=lambda ptx: ptx.replace("collector::a::fill", "collector::a::discard"),
        case="one tile",
    ),
    PlantedFault(
        "the collector is to give another part of P than it has kept",
        LATENT,
        Misuse,
        r"takes an operand from collector a, which has another operand",
        source=(("p.index * c.p_bytes + rows * 2 * K_STEP, 16)", "p.index * c.p_bytes + half * 2 * K_STEP, 16)"),),
        case="one tile",
    ),
    PlantedFault(
        "the scale is applied twice",
        DENSE,
        *WRONG,
        answers=wrong_answers.at_scale(lambda scale: scale * scale * math.log2(math.e)),
        source=(("fma_packed_f32x2(pair, both(scale_log2)", "fma_packed_f32x2(pair, both(scale_log2 * scale_log2)"),),
    ),
    PlantedFault(
        "TMA loads the first tile again and again",
        DENSE,
        *WRONG,
        answers=wrong_answers.with_keys_at(lambda j: j % DENSE_TILE),
        source=(("gK[None, c.cluster * t]", "gK[None, 0]"), ("gV[None, c.cluster * t + i]", "gV[None, i]")),
    ),
    PlantedFault(
        "TMA counts tiles by the ring's fills",
        DENSE,
        *WRONG,
        answers=wrong_answers.with_keys_for(lambda i: i < 64, lambda j: j + 2 * DENSE_TILE),
        source=tuple((f"g{x}[None, c.cluster * t", f"g{x}[None, c.cluster * (fills0 + t)") for x in "KV"),
        case="causal, several row tiles a CTA",
    ),
    PlantedFault(
        "K's extent restates 64",
        DENSE,
        *WRONG,
        answers=wrong_answers.with_k(wrong_answers.first_64_columns),
        source=(("range_constexpr(c.d // K_STEP)", "range_constexpr(64 // K_STEP)"),),
    ),
    PlantedFault(
        "keys that nobody sees are not cleared",
        DENSE,
        Wrong,
        r"^o is wrong in 35 of 70 rows, first in batch entry 0, query 0, head 0 \(nan, wanted 0\).*; lse is right",
        source=(("self.clear_values(cta, lane, fill, span.unseen_from(t))", "pass"),),
        case="empty rows and an empty sequence",
    ),
    PlantedFault(
        "the swizzle of a descriptor is that of 64 bytes",
        DENSE,
        *WRONG,
        answers=wrong_answers.with_descriptors_of_64,
        source=tuple((f"{x}.at(slab", f"cutlass.Int64(2 << 61) + {x}.at(slab") for x in "qk"),
    ),
    PlantedFault(
        "O is read before the last products are done",
        DENSE,
        Race,
        unordered(r"final tcgen05\.ld", MMA, "TMEM of o"),
        source=(("self.wait_output(cta, i, fills0 - 1)", "pass"),),
    ),
    PlantedFault(
        "products read P before the softmax gives it",
        DENSE,
        Race,
        unordered(f"({LD}|{ST})", MMA, "TMEM of (scores|p)", UNTOLD),
        source=(("cute.arch.mbarrier_wait(barrier, phase)", "pass"),),
    ),
    PlantedFault(
        "P is stored without a wait",
        DENSE,
        Race,
        unordered(MMA, ST, "TMEM of p", r"no tcgen05\.wait::st$"),
        source=(("    cute.arch.fence_view_async_tmem_store()\n", ""),),
    ),
    PlantedFault(
        "P is stored without a fence",
        DENSE,
        Race,
        unordered(MMA, f"({LD}|{ST})", "TMEM of (scores|p)", r"no tcgen05\.fence::before_thread_sync$"),
        source=(
            (
                "before_thread_sync()\n        if cutlass.const_expr(self.config.cluster == 2):\n"
                "            cute.arch.sync_warp()\n            with",
                "if cutlass.const_expr(self.config.cluster == 2):\n            cute.arch.sync_warp()\n            with",
            ),
        ),
    ),
    PlantedFault(
        "products are issued without a fence after the wait",
        DENSE,
        Race,
        unordered(MMA, f"({LD}|{ST})", "TMEM of (scores|p)", r"no tcgen05\.fence::after_thread_sync$"),
        source=(("mbarrier_wait(barrier, phase)\n            after_thread_sync()", "mbarrier_wait(barrier, phase)"),),
    ),
    PlantedFault(
        "scores are used before they are there",
        DENSE,
        Race,
        r"reads register %r\d+ while the tcgen05\.ld of line \d+ may still write it",
        source=(("            cute.arch.fence_view_async_tmem_load()\n", ""),),
    ),
    PlantedFault(
        "TMA does not wait for an empty ring",
        DENSE,
        (Race, Misuse),
        r"expect_tx[^\n]*\n\s+an arrival too many|tma[^\n]*\n\s+overwrites SMEM of keys\b[^\n]*nothing orders",
        source=(("values.wait_empty()", "pass"),),
    ),
    PlantedFault(
        "a barrier counts the CTA's threads",
        DENSE,
        Deadlock,
        r"count 512, [^\n]* 504 of 512 arrivals pending",
        source=(("(P_BUFFERS, 2 * warps),  # p_full", "(P_BUFFERS, self.threads),  # p_full"),),
    ),
    PlantedFault(
        "a barrier counts three warps of four",
        DENSE,
        Race,
        unordered(f"({LD}|{ST})", MMA, "TMEM of (scores|p)", UNTOLD),
        source=(("(P_BUFFERS, 2 * warps),  # p_full", "(P_BUFFERS, 2 * warps - 1),  # p_full"),),
    ),
    PlantedFault(
        "too few bytes are expected",
        DENSE,
        (Race, Undefined),
        rf"{MMA}[^\n]*\n\s+reads SMEM of (q|keys)\b[^\n]*(which nobody wrote|the write by tma)",
        source=(("expect_full(self.config.cluster * size)", "expect_full(size // 2)"),),
    ),
    PlantedFault(
        "too many bytes are expected",
        DENSE,
        Deadlock,
        r" 16 transaction bytes outstanding",
        source=(("expect_full(self.config.cluster * size)", "expect_full(size + 16)"),),
    ),
    PlantedFault(
        "absent keys are not masked",
        FUSED,
        *WRONG,
        answers=wrong_answers.absent_as_zeros(LATENT_TILE),
        source=(("if bits != Uint32(0):", "if bits == Uint32(1):"),),
        case="few",
    ),
    PlantedFault(
        "the second source's tiles are counted from the first's",
        FUSED,
        *WRONG,
        answers=wrong_answers.without_the_second,
        source=(("action(sources[1], t - first, *arguments)", "action(sources[1], t, *arguments)"),),
        case="few",
    ),
    PlantedFault(
        "the rails of Q are exchanged",
        LATENT,
        *WRONG,
        answers=wrong_answers.with_k(wrong_answers.halves_exchanged),
        source=(("q + (row * c.d + w.part *", "q + (row * c.d + (1 - w.part) *"),),
    ),
    PlantedFault(
        "scores of one rail alone",
        LATENT,
        *WRONG,
        answers=wrong_answers.with_k(wrong_answers.half_of_each(lambda j: j % LATENT_TILE // 32)),
        source=(("scores[4 * i + j] = scores[4 * i + j] + x", "scores[4 * i + j] = scores[4 * i + j] + 0 * x"),),
    ),
    PlantedFault(
        "a thread's halves are exchanged before the other has written its own",
        LATENT,
        (Race, Undefined),
        unordered(r"st\.shared", r"ld\.shared", "SMEM of exchange")
        + r"|ld\.shared[^\n]*\n\s+reads SMEM of exchange, which nobody wrote",
        source=(("for j in range(4)))\n        self.meet_other(w)", "for j in range(4)))"),),
    ),
    PlantedFault(
        "O is rescaled while products of a pair add to it",
        LATENT,
        Race,
        unordered(f"({LD}|{ST})", MMA, "TMEM of o"),
        source=(("(t > 0):\n                    bar.p.at(fill + 1).wait_empty()  # the last P V", "(t > 0):"),),
        case="mixed",
    ),
    PlantedFault(
        "P in SMEM without a proxy fence",
        LATENT,
        Race,
        unfenced(MMA, "SMEM of p", r"st\.shared"),
        source=(
            (
                'for j in range(4)))\n        cute.arch.fence_proxy("async.shared", space="cta")',
                "for j in range(4)))",
            ),
        ),
    ),
    PlantedFault(
        "Q is overwritten while products read it",
        LATENT,
        Race,
        unordered(ST, MMA, "TMEM of q"),
        source=(("wait_for(bar.q_empty, wave - 1)\n                    after_thread_sync()", "pass"),),
        case="causal, several row tiles a CTA",
    ),
    PlantedFault(
        "O is overwritten while it is read",
        LATENT,
        Race,
        unordered(r"tcgen05\.ld\.sync", MMA, "TMEM of o"),
        source=(("wait_for(bar.o_empty, finished - 1)", "pass"),),
        case="causal, several row tiles a CTA",
    ),
    PlantedFault(
        "numbers of a tile of rows are overwritten while they are read",
        LATENT,
        Race,
        unordered(r"st\.shared", r"ld\.shared", "SMEM of the rest"),
        source=(("info.wait_empty()", "pass"),),
        case="causal, several row tiles a CTA",
    ),
    PlantedFault(
        "a CTA ends while the other one of its pair may still reach it",
        LATENT,
        Race,
        r"^CTA \d ends while nothing orders that after CTA \d warp ",
        source=(
            (
                "self.sync()  # nothing may arrive",
                "before_thread_sync(), cute.arch.sync_threads(), after_thread_sync()  # nothing may arrive",
            ),
        ),
    ),
    PlantedFault(
        "the bytes of one CTA alone are expected",
        LATENT,
        (Race, Undefined),
        rf"{MMA}[^\n]*\n\s+reads SMEM of keys\b[^\n]*(which nobody wrote|the write by tma)",
        source=(
            ("expect_full(self.config.cluster * self.config.stage_bytes)", "expect_full(self.config.stage_bytes)"),
        ),
    ),
    PlantedFault(
        "a row more is expected than a copy brings",
        FUSED,
        Deadlock,
        r" 128 transaction bytes outstanding",
        source=(
            (
                "expect_full(self.config.cluster * self.config.stage_bytes)",
                "expect_full(self.config.cluster * self.config.stage_bytes + 128)",
            ),
        ),
        case="few",
    ),
    PlantedFault(
        "each CTA gathers the other's columns",
        FUSED,
        *WRONG,
        answers=wrong_answers.with_keys(wrong_answers.halves_exchanged),
        source=(("column = cta.rank * c.columns_k", "column = (1 - cta.rank) * c.columns_k"),),
        case="few",
    ),
    PlantedFault(
        "rows are gathered in another order",
        FUSED,
        *WRONG,
        answers=wrong_answers.at_positions(LATENT_TILE, keys=lambda j: j ^ 1),
        source=(("shuffle_sync(row, first + i)", "shuffle_sync(row, first + (i ^ 1))"),),
        case="few",
    ),
    PlantedFault(
        "the rails of a tile of keys do not take turns",
        ALONE,
        *WRONG,
        answers=wrong_answers.with_keys(wrong_answers.slabs_in_order),
        source=(("c.slab_of(slab) * c.slab_bytes", "slab * c.slab_bytes"),),
        case="few",
    ),
    PlantedFault(
        "P is not swizzled",
        ALONE,
        *WRONG_O,
        answers=wrong_answers.at_positions(LATENT_TILE, values=lambda j, head: j ^ head % 8 * 8),
        source=(("(chunk ^ w.row % 8)", "chunk"),),
        case="tiles",
    ),
    PlantedFault(
        "each split begins with a tile of the one before",
        LATENT,
        *WRONG,
        source=(("source.part(first, last - first)", "source.part(cutlass.max(first - 1, 0), last - first)"),),
        case="split three tiles, ragged",
    ),
    PlantedFault(
        "a part has the sink",
        ALONE,
        *WRONG_O,
        source=(("sink if n.splits == 1 else -Float32.inf", "sink"),),
        case="split few",
    ),
    PlantedFault(
        "parts are stored as if every row had one",
        LATENT,
        WRONG_O[0],
        r"^o is wrong in .*; lse is right",
        source=(("row * n.splits + tile.split", "row + tile.split"),),
        case="split three tiles, ragged",
    ),
    PlantedFault(
        "a slab has the scales of the next one",
        PACKED_ALONE,
        *WRONG,
        source=(("scale_of(form, scales, slab - slabs[0],", "scale_of(form, scales, (slab - slabs[0]) ^ 1,"),),
        case="few",
    ),
    PlantedFault(
        "registers are loaded for the next tile before they are unpacked",
        PACKED_ALONE,
        *WRONG,
        source=(
            (
                "self.unpack(t, half, key, place)\n        self.fetch(t + self.config.teams, half, key)",
                "self.fetch(t + self.config.teams, half, key)\n        self.unpack(t, half, key, place)",
            ),
        ),
        case="few",
    ),
    PlantedFault(
        "entries of a list are read a tile late",
        PACKED_ALONE,
        *WRONG,
        source=(("self.prefetch_indices(t + 2 * teams)", "self.prefetch_indices(t + teams)"),),
        case="tiles",
    ),
    PlantedFault(
        "unpacked keys are not swizzled",
        PACKED_ALONE,
        *WRONG,
        source=(("(chunk ^ self.row0 % ATOM_ROWS) * 16", "chunk * 16"),),
        case="few",
    ),
    PlantedFault(
        "each CTA unpacks the other's columns",
        PACKED,
        *WRONG,
        source=(("halves[rank : rank + 1]", "halves[1 - rank : 2 - rank]"),),
        case="few",
    ),
    PlantedFault(
        "products read unpacked keys without a proxy fence",
        PACKED_ALONE,
        Race,
        unfenced(MMA, "SMEM of keys", r"st\.shared"),
        source=(
            (
                'c.unpacks):\n                cute.arch.fence_proxy("async.shared", space="cta")\n',
                "c.unpacks):\n",
            ),
        ),
        case="few",
    ),
    PlantedFault(
        "the other CTA tells of its keys without a proxy fence",
        PACKED,
        Race,
        unfenced(MMA, "SMEM of keys", r"st\.shared"),
        source=(
            ('state.wait_full()\n        cute.arch.fence_proxy("async.shared", space="cta")\n', "state.wait_full()\n"),
        ),
        case="few",
    ),
    PlantedFault(
        "products do not wait for the other CTA's keys",
        PACKED,
        (Race, Undefined),
        rf"{MMA}[^\n]*\n\s+reads SMEM of keys\b",
        source=(("cute.arch.mbarrier_wait(bar.peer_full + keys.index, keys.phase)", "pass"),),
        case="few",
    ),
    PlantedFault(
        "warps unpack into a place that products still read",
        PACKED_ALONE,
        Race,
        unordered(MMA, r"st\.shared", "SMEM of keys"),
        source=(("            state.wait_empty()\n            stage", "            stage"),),
        case="tiles",
    ),
    PlantedFault(
        "both teams begin with the same tile",
        PACKED,
        Race,
        unordered(r"st\.shared", r"st\.shared", "SMEM of keys"),
        source=(("(thread // self.team + fill) % self.teams", "fill % self.teams"),),
        case="few",
    ),
    PlantedFault(
        "TMEM is not freed",
        DENSE,
        Leak,
        r"TMEM columns 0\.\.511, .* never freed",
        edit=without("tcgen05.dealloc"),
    ),
    PlantedFault(
        "TMEM is freed while the others read it",
        DENSE,
        Race,
        r"tcgen05\.dealloc[^\n]*\n\s+overwrites TMEM of (o|p|scores)\b[^\n]*nothing orders",
        source=(
            (
                "        self.sync()  # nothing may arrive in a CTA that has ended, nor may TMEM of either go\n",
                "",
            ),
        ),
    ),
    PlantedFault(
        "too few columns are allocated",
        DENSE,
        Misuse,
        r"has D in TMEM columns 256\.\.383, which are not allocated",
        edit=lambda ptx: re.sub(r"(mov\.b32\s+%r\d+, )512;", r"\g<1>256;", ptx),
    ),
    PlantedFault(
        "a product is issued by the whole warp",
        DENSE,
        Misuse,
        "issued by 32 threads|an arrival too many",
        edit=unelected,
    ),
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[build.Compiler]:
    with contextlib.closing(build.Compiler()) as process:
        yield process


def mutant(fault: PlantedFault[str, str], directory: Path, compiler: build.Compiler) -> Kernel[Any]:
    kernel: Kernel[Any] = Kernel.of(native.variant_of(fault.kernel))
    if not fault.source:
        return dataclasses.replace(kernel, ptx=fault.planted_in(kernel.ptx))
    shutil.copytree(ROOT / "kernels", directory / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    *folder, _ = kernel.variant.module.split(".")
    names = ("tcgen05", "row_softmax", "splits", "scores", "packed")
    shared = (directory / "kernels/lib" / f"{name}.py" for name in names)
    files = [*directory.joinpath(*folder).glob("*.py"), *shared]
    for old, new in fault.source:
        assert sum(file.read_text().count(old) for file in files) == 1, old
        for file in files:
            file.write_text(file.read_text().replace(old, new))
    ptx, name, cache = (
        directory / f"{fault.kernel}.ptx",
        build.digest(kernel.variant, directory),
        KernelCache(default_folder()),
    )
    if not cache.take(name, directory):
        compiler(kernel.variant, directory, root=directory)
        cache.keep(name, [ptx])
    return dataclasses.replace(kernel, ptx=ptx.read_text())


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_finds(fault, tmp_path, compiler):
    """The interpreter finds a planted fault in any order of events; its very answer is compared before it is judged."""
    kernel = mutant(fault, tmp_path, compiler)

    def run_with(fault, seed):
        run = started(kernel, fault.case or "three tiles, ragged", seed)
        try:
            got = results(run, seed)
            if fault.answers is not None:
                wrong_answers.assert_given(got, fault.answers(run.operands, run.scale))
            judge(got, run.operands, run.scale)
        except Fault as found:
            raise type(found)(by_name(str(found), kernel)) from None

    fault.check(run_with)
