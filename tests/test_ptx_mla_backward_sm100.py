"""Blackwell's backward kernel, which no test has run on hardware: its PTX in the interpreter, with planted faults."""

import dataclasses
import functools
import re
from collections.abc import Callable
from importlib import util

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention, gradients, mla_backward
from interpreter.kernels.launch import Kernel
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Deadlock, Fault, Race, Undefined
from interpreter.machine.state import SMEM_BASE
from kernels.abi import MlaBackward
from kernels.variants import VARIANTS
from tests.test_ptx_mla_backward import ALL_KEYS, SHAPES

pytestmark = pytest.mark.skipif(util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")

SM100 = {v.key: v for v in VARIANTS if isinstance(v, MlaBackward) and v.arch == "sm_100f"}
CASES = SHAPES | {
    # a pair's 128 rows, three tiles of keys, absent ones among them
    "heads": {"b": 1, "s_q": 1, "s_kv": 150, "h_q": 128, "s_kv1": 40, "topk": 133},
    # more tiles of rows than pairs, two of a query where keys are gathered; heads that fill no tile
    "turns": {"b": 1, "s_q": 2, "s_kv": 94, "h_q": 130, "s_kv1": 9, "topk": 65, "width": 64},
}
RUNS = [
    (f"{op}_bwd_sm_100f_d512_bfloat16", case)
    for op, of_op in {
        "mla_sparse": ("heads", "turns", "few", "window"),
        "csa": ("turns", "few"),
        "hca": ("tiles", "few"),
        "mla_span": ("tiles", "window", "few", "groups"),
    }.items()
    for case in of_op
]
TWICE = ("heads",)
SLOW = {("mla_sparse", "window"), ("csa", "turns"), ("hca", "tiles"), ("mla_span", "tiles")}


def param(key: str, case: str):
    slow = any(key.startswith(op) and case == c for op, c in SLOW)
    return pytest.param(key, case, marks=[pytest.mark.slow] * slow)


@functools.cache
def given(key: str, case: str) -> gradients.Operands:
    variant, extents = SM100[key], CASES[case]
    if variant.gathers:  # each query has its own tile of rows
        extents = {**extents, "s_q": min(extents["s_q"], 2)}
    return gradients.operands(variant, **extents)


@pytest.mark.parametrize(("key", "case"), [param(*run) for run in RUNS])
def test_is_right(key, case):
    """In an order of its own; where `TWICE`, with the same bits of dq in two, on one pair of CTAs and on two."""
    first = 2 * RUNS.index((key, case))
    results = []
    for seed in (first, first + 1) if case in TWICE else (first,):
        run = mla_backward.launch(Kernel.of(SM100[key]), given(key, case), processors=2 + 2 * (seed % 2), seed=seed)
        results.append(run.run())
        mla_backward.judge(run, results[-1])
    (dq, *_), (other_dq, *_) = results[0], results[-1]
    np.testing.assert_array_equal(dq.view(np.uint16), other_dq.view(np.uint16))


def test_a_span_ends_where_its_keys_do():
    """Nothing is added before the first key's gradient or after the last one's."""
    kernel = Kernel.of(SM100[SPAN])
    x = gradients.operands(kernel.variant, **SHAPES["few"] | {"s_kv": 70, "width": ALL_KEYS})
    run = mla_backward.launch(kernel, dataclasses.replace(x, attention=attention.beyond(x.attention)))
    run.operands = x
    mla_backward.judge(run, run.run())


def test_config_refuses_what_does_not_fit():
    from kernels.sm100.mla_bwd.config import Config

    for changes, says in (
        ({"d": 256}, "products have 128 rows, got 128, and 64 columns of dKV"),
        ({"tile_m": 32}, "products have 128 rows, got 64"),
        ({"tile_n": 128}, "needs 704 columns of TMEM, there are 512"),
    ):
        with pytest.raises(ValueError, match=says):
            Config("bfloat16", ("selection",), **changes)


# ---- faults

SELECTION, SPAN = "mla_sparse_bwd_sm_100f_d512_bfloat16", "mla_span_bwd_sm_100f_d512_bfloat16"
OF_FAULTS = {
    SELECTION: {"b": 1, "s_q": 3, "s_kv": 100, "h_q": 8, "topk": 130},  # two tiles of rows, two of keys each or three
    SPAN: {"b": 1, "s_q": 6, "s_kv": 150, "h_q": 8, "width": ALL_KEYS},  # one tile of rows, three of keys
}
KIB = 1024
SMEM = {"Q": 64 * KIB, "dO": 64 * KIB, "K": 32 * KIB, "P": 16 * KIB, "dS": 16 * KIB, "given": 32 * KIB}
TMEM = {"dQ": 256, "S": 64, "dP": 64, "dKV": 64, "Q": 64}  # columns


def barriers(text: str) -> dict[str, list[int]]:
    """The offsets of the mbarriers, by name: those of `Config.barriers`."""
    counts = {"info_full": 2, "info_empty": 2, "rows_full": 2, "rows_empty": 1, "key_full": 2, "key_empty": 1}
    counts |= {"listed": 3, "scores_full": 2, "scores_empty": 1, "given_full": 2, "given_empty": 1}
    counts |= {"p_full": 2, "p_empty": 2, "q_full": 1, "dkv_full": 1, "dkv_empty": 1, "dq_full": 1}
    made = iter(edits.barriers(text))
    found = {name: [next(made) for _ in range(count)] for name, count in counts.items()}
    assert next(made, None) is None
    return found


def without_waiting(name: str, which: slice = slice(None)) -> Callable[[str], str]:
    return lambda text: edits.drop_waits(text, set(barriers(text)[name]), which)


def without(pattern: str, which: slice = slice(None)) -> Callable[[str], str]:
    return lambda text: edits.drop(text, pattern, which)


SEND = r"st\.async[^\[;]*\[(%r\d+)\], \{[^}]*\}, \[%r\d+\];"
REDUCTION = r"red\.relaxed\.gpu\.global\.add\.f32 [^;]*;"


def halves_swapped(text: str) -> str:
    """What a thread gives goes to the one that has the other half of the row's keys."""
    of_p_and_ds = 8

    def swapped(m: re.Match[str]) -> str:
        address = f"sub.u32 x, {m[1]}, {SMEM_BASE}; xor.b32 x, x, 1024; add.u32 x, x, {SMEM_BASE};"
        return f"{{ .reg .b32 x; {address} {m[0].replace(m[1], 'x', 1)} }}"

    return edits.replace(text, SEND, swapped, slice(of_p_and_ds, None))


def told_itself_alone(text: str) -> str:
    """The products of P and dS are done: only this CTA's threads hear of it."""
    told = r"(tcgen05\.commit[^;]*\.multicast::cluster\.b64\s+\[%r\d+(?:\+\d+)?\]), (%rs\d+);"
    return edits.replace(text, told, lambda m: f"{m[1]}, 1;")


def alone_at_the_end(text: str) -> str:
    """In the end the threads of a CTA wait for each other, and neither for the peer nor for what it sends."""
    for name in ("given_empty", "p_empty"):
        text = without_waiting(name, slice(-1, None))(text)
    text = edits.drop(text, r"barrier\.cluster\.arrive", slice(1, None))
    return edits.replace(text, r"barrier\.cluster\.wait;", "bar.sync 0;", slice(1, None))


def by_name(message: str) -> str:
    """The interpreter's message, with names for places in memory."""

    def named(m: re.Match[str]) -> str:
        regions, place = (SMEM, int(m[2]) - SMEM_BASE) if m[1] == "SMEM" else (TMEM, int(m[2]))
        for name, size in regions.items():
            if place < size:
                return name
            place -= size
        return "lists" if place < 3 * 4 * 64 else "the rest"

    return re.sub(r"(SMEM|TMEM) (?:of CTA \d+ )?(?:bytes|lanes \S+ columns) (\d+)\.\.\d+", named, message)


def unordered(one: str, other: str, region: str) -> str:
    """Two accesses to a region of memory, whichever comes first."""

    def then(a: str, b: str) -> str:
        access = rf"{a}[^\n]*\n\s+(reads|overwrites) {region}\b[^\n]*"
        return rf"{access}nothing orders this and the (read|write) by [^\n]*{b}"

    return f"{then(one, other)}|{then(other, one)}"


def unwritten(reader: str, region: str) -> str:
    return rf"{reader}[^\n]*\n\s+reads {region}\b[^\n]*, which nobody wrote"


MMA, LD = r"tcgen05\.mma", r"tcgen05\.ld\.sync"
FAULTS = [
    PlantedFault(
        "what a thread gives goes to the other half of the keys",
        SELECTION,
        Wrong,
        r"dq is wrong in 16 of 24 rows, .*dkv0 is wrong in \d+ of 100 keys, .*columns 0\.\.511",
        halves_swapped,
    ),
    PlantedFault(
        "a part of the scores is read before the peer has given it",
        SELECTION,
        (Race, Undefined),
        unordered(r"ld\.shared", r"st\.async", "given") + "|" + unwritten(r"ld\.shared", "given"),
        without_waiting("given_full"),
    ),
    PlantedFault(
        "a part of the scores is given over one that the peer has not read",
        SELECTION,
        Race,
        unordered(r"st\.async", r"(ld\.shared|st\.async)", "given"),
        without_waiting("given_empty"),
    ),
    PlantedFault(
        "nobody tells the peer that what it gave is read",
        SELECTION,
        Deadlock,
        r"nothing can go on.*mbarrier \+\d+",
        lambda text: edits.replace(text, r"\{[^{}]*@p mbarrier\.arrive\.shared::cluster[^}]*\}", ""),
    ),
    PlantedFault(
        "only the own CTA hears that the products of P and dS are done",
        SELECTION,
        Deadlock,
        r"nothing can go on",
        told_itself_alone,
    ),
    PlantedFault(
        "products read P and dS before all of them are there",
        SELECTION,
        (Race, Undefined),
        unordered(MMA, r"st\.(async|shared)", "(P|dS)") + "|" + unwritten(MMA, "(P|dS)"),
        without_waiting("p_full"),
    ),
    PlantedFault(
        "P is written while products read the last tile's",
        SELECTION,
        Race,
        unordered(r"st\.(async|shared)", rf"({MMA}|st\.(async|shared))", "(P|dS)"),
        without_waiting("p_empty"),
    ),
    PlantedFault(
        "P and dS are not fenced for the products",
        SELECTION,
        Race,
        r"reads (P|dS)\b[^\n]*through the async proxy: no fence\.proxy\.async after the generic write by",
        without(r"fence\.proxy\.async\.shared::cta", slice(-1, None)),
    ),
    PlantedFault(
        "keys come in before dQ has read the last ones",
        SELECTION,
        Race,
        unordered(r"cp\.async", f"({MMA}|cp\\.async)", "K"),
        without_waiting("key_empty"),
    ),
    PlantedFault(
        "Q comes in while dKV of the rows before reads it",
        SELECTION,
        Race,
        unordered(r"cp\.async", f"({MMA}|cp\\.async)", "(Q|dO)"),
        without_waiting("rows_empty"),
    ),
    PlantedFault(
        "S of the next tile comes before this one's is read",
        SELECTION,
        Race,
        unordered(MMA, LD, "(S|dP)"),
        without_waiting("scores_empty"),
    ),
    PlantedFault(
        "products read Q before it is in TMEM",
        SELECTION,
        (Race, Undefined),
        unordered(MMA, r"tcgen05\.st\.sync", "Q") + "|" + unwritten(MMA, "Q"),
        without_waiting("q_full"),
    ),
    PlantedFault(
        "S is read before its products are done",
        SELECTION,
        (Race, Undefined),
        unordered(LD, MMA, "(S|dP)") + "|" + unwritten(LD, "(S|dP)"),
        without_waiting("scores_full"),
    ),
    PlantedFault(
        "dKV is added before its products are done",
        SELECTION,
        (Race, Undefined),
        unordered(LD, MMA, "dKV") + "|" + unwritten(LD, "dKV") + "|what is added to global memory is .*not defined",
        without_waiting("dkv_full"),
    ),
    PlantedFault(
        "dKV of the next tile comes before this one's is read",
        SELECTION,
        Race,
        unordered(MMA, LD, "dKV"),
        without_waiting("dkv_empty"),
    ),
    PlantedFault(
        "dQ is read before its products are done",
        SELECTION,
        (Race, Undefined),
        unordered(LD, MMA, "dQ") + "|" + unwritten(LD, "dQ"),
        without_waiting("dq_full"),
    ),
    PlantedFault(
        "a row of dKV is added twice",
        SELECTION,
        Wrong,
        r"dkv0: a reduction is lost: columns 128\.\.511 of key \d+ were added to \d+ times, the others",
        lambda text: edits.replace(text, REDUCTION, lambda m: 2 * m[0], slice(5, 6)),
    ),
    PlantedFault(
        "a reduction is lost",
        SELECTION,
        Wrong,
        r"dkv0: a reduction is lost: columns 0\.\.383 of key \d+ were added to \d+ times, the others",
        lambda text: edits.replace(text, REDUCTION, "", slice(5, 6)),
    ),
    PlantedFault(
        "a CTA leaves while its peer sends",
        SELECTION,
        Race,
        r"CTA \d ends while nothing orders that after .* of CTA \d .*who arrives at an mbarrier in its memory",
        alone_at_the_end,
    ),
    PlantedFault(
        "keys that a row does not see have a score of 0",
        SPAN,
        Wrong,
        r"dq is wrong in .*first in query 0, head 0",
        lambda text: edits.replace(text, r"(mov\.b32\s+%r\d+, )-8388608;", lambda m: f"{m[1]}0;"),
    ),
]


def run_with(fault: PlantedFault, seed: int) -> None:
    kernel = Kernel.of(SM100[fault.kernel])
    edited = dataclasses.replace(kernel, ptx=fault.planted_in(kernel.ptx))
    run = mla_backward.launch(edited, of_faults(fault.kernel), seed=seed)
    try:
        mla_backward.judge(run, run.run())
    except Fault as found:
        raise type(found)(by_name(str(found))) from None


@functools.cache
def of_faults(key: str) -> gradients.Operands:
    return gradients.operands(SM100[key], **OF_FAULTS[key])


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_finds(fault):
    """In an order of its own."""
    fault.check(run_with, seeds=(FAULTS.index(fault),))


@pytest.mark.parametrize("key", OF_FAULTS)
def test_without_a_fault_nothing_is_found(key):
    run = mla_backward.launch(Kernel.of(SM100[key]), of_faults(key))
    mla_backward.judge(run, run.run())
