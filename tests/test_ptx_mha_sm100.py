"""Blackwell's kernels for d up to 256: their PTX in the interpreter, with planted faults."""

import math
import re
from collections.abc import Callable

import pytest

from interpreter.faults import PlantedFault
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Deadlock, Leak, Misuse, Race, Undefined
from tests import wrong_answers
from tests.sm100 import (  # noqa: F401
    CASES,
    ENDS_ALONE,
    HANDED_OVER_UNFENCED,
    LD,
    MMA,
    NEEDS_DSL,
    QUIET,
    RISES,
    SM100,
    ST,
    UNTOLD,
    WRONG,
    WRONG_O,
    assert_right,
    compiler,
    find,
    unordered,
)

pytestmark = [NEEDS_DSL, QUIET]

RUNS = [  # float16 is the same code up to conversions
    (key, case)
    for key, v in SM100.items()
    if not v.shared_kv
    for case in CASES
    if v.dtype == "bfloat16" or case == "three tiles, ragged"
]


@pytest.mark.parametrize(("key", "case"), RUNS)
def test_is_right(key, case):
    assert_right(key, case, first=2 * RUNS.index((key, case)))


def test_config_refuses_what_does_not_fit():
    from kernels.sm100.mha.config import Config

    class Wide(Config):
        keys = 256

    class Greedy(Config):
        registers = (208, 64, 48)

    for config, d, says in (
        (Greedy, 128, "gives 528 registers to a thread of each group, more than there are"),
        (Config, 512, "at most 256"),
        (Config, 96, "whole slabs of 64"),
        (Wide, 64, "needs 896 columns of TMEM, there are 512"),
    ):
        with pytest.raises(ValueError, match=says):
            config(dtype="bfloat16", d=d)


DENSE = "mha_fwd_sm_100f_d128_bfloat16"
PAIR = "mha_fwd_sm_100f_d256_bfloat16"
DENSE_TILE = 128  # keys


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
                "                self.hand_over(barrier)\n",
                "                self.hand_over(barrier)\n                store_lanes(p + first // 2, rounded, lane)\n",
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
            ENDS_ALONE,
        ),
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
        "keys past the last that a query sees are not cleared",
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
        source=HANDED_OVER_UNFENCED,
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
        source=(("self.sync()  # nothing may arrive in a CTA that has ended, nor may TMEM of either go", "pass"),),
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


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_finds(fault, tmp_path, compiler):  # noqa: F811
    find(fault, tmp_path, compiler)
