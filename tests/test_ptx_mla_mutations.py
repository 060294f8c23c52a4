"""Faults planted in the kernels of attention at d 512 over keys that are not packed, codes of e4m3 among them: the
interpreter must find and name each.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention
from interpreter.kernels.verdict import Wrong
from interpreter.machine.copies import TensorMap
from interpreter.machine.hazards import Deadlock, Leak, Misuse, OutOfBounds, Race
from tests.planted import (
    KIB,
    MLA_BARRIERS,
    MLA_REGIONS,
    SEEDS,
    Subject,
    arrive_at_once,
    constants,
    keys_unfenced,
    longer_tile,
    run_with,
    without,
)
from tests.symptoms import EARLY, early, late, unfenced, unordered

SPAN = "mla_span_fwd_sm_90a_d512_bfloat16"
LATENT = Subject(  # four tiles of 64 keys
    SPAN, {"b": 1, "s_q": 12, "s_kv": 230, "h_q": 8, "width": 1000}, MLA_BARRIERS, MLA_REGIONS
)
FIRST_512 = Subject(  # P stands in the keys' last slab
    "mla_span_fwd_v512_sm_90a_d576_bfloat16",
    {"b": 1, "s_q": 12, "s_kv": 230, "h_q": 8, "width": 1000},
    MLA_BARRIERS,
    {"q": 72 * KIB, "k": 144 * KIB, "max": 512},
)
TURNED = Subject(  # two tiles of rows, two of keys
    "mla_span_fwd_turned_sm_90a_d512_bfloat16",
    {"b": 1, "s_q": 9, "s_kv": 70, "h_q": 8, "width": 1000},
    MLA_BARRIERS,
    {**MLA_REGIONS, "squares": 512},
)
LONG_ODD = Subject(  # whose odd tiles have 16 keys more: 64 keys and 71
    SPAN + "_h63",
    {"b": 1, "s_q": 24, "s_kv": 150, "h_q": 8, "width": 128},
    MLA_BARRIERS,
    {"q": 64 * KIB, "k": 144 * KIB, "p": 18 * KIB, "max": 512},
)
GATHERED = Subject(
    "mla_sparse_fwd_sm_90a_d512_bfloat16",
    {"b": 1, "s_q": 3, "s_kv": 300, "h_q": 8, "topk": 200},
    MLA_BARRIERS,
    MLA_REGIONS,
)
FEW_HEADS = Subject(
    "csa_fwd_sm_90a_d512_bfloat16_h16",
    {"b": 1, "s_q": 4, "s_kv": 300, "h_q": 16, "s_kv1": 300, "topk": 200},
    "",
    {"q": 16 * KIB, "k": 80 * KIB, "p": 16 * KIB, "found": 512},
)


def barriers_of_e4m3(places: int) -> str:
    return " ".join(
        f"{barrier}{stage}"
        for barriers, stages in (
            ("info_full info_empty q_full q_empty", 2),
            ("k_full k_empty p_full", places),
            ("sums_full sums_empty", 2),
        )
        for barrier in barriers.split()
        for stage in range(stages)
    )


AFTER_TILES_OF_E4M3 = {"factor": KIB, "rose": 64, "sums": 512, "scale": 512, "tiles": 16, "absent": 32, "units": 512}
E4M3 = Subject(  # two tiles and four
    "csa_fwd_e4m3_sm_90a_d512_bfloat16",
    {"b": 1, "s_q": 3, "s_kv": 90, "h_q": 8, "s_kv1": 300, "topk": 200},
    barriers_of_e4m3(4),
    {"q": 2 * 32 * KIB, "k": 4 * 32 * KIB, "p": 4 * 4 * KIB, "given": 16 * KIB} | AFTER_TILES_OF_E4M3,
)
ROPE_KEPT = dataclasses.replace(
    E4M3,
    key="csa_fwd_e4m3_bf16_rope_sm_90a_d512_bfloat16",
    barriers=barriers_of_e4m3(3),
    regions={"q": 2 * 32 * KIB, "k": 3 * 32 * KIB, "q_rope": 2 * 8 * KIB, "k_rope": 3 * 8 * KIB, "p": 3 * 4 * KIB},
)


def queries_unfenced(text: str) -> str:
    """No fence after Q is turned, before the other warpgroup multiplies it."""
    return edits.replace(text, r"fence\.proxy\.async\.shared::cta;(\s+bar\.sync\s+3, 256;)", lambda m: m[1])


def queries_not_awaited(text: str) -> str:
    """Left does not wait until Q is turned."""
    return edits.replace(text, r"bar\.sync\s+3, 256;", "bar.arrive 3, 256;", slice(0, 1))


def other_numbers_of_rope(text: str) -> str:
    """The second product of bfloat16 takes q's third 16 numbers."""
    begins = r"2;(\s+add\.s64[^;]*2;\s+// begin inline asm\s+\{\s+\.reg \.pred p;\s+setp[^;]*;\s+wgmma\S+k16\.)"
    return edits.replace(text, begins, lambda m: f"4;{m[1]}")


def fence_before(what: str) -> Callable[[str], str]:
    """No proxy fence where this comes next."""
    return lambda text: edits.replace(text, rf"fence\.proxy\.async\.shared::cta;(\s+{what})", lambda m: m[1])


def units_of_others(text: str) -> str:
    """Two rows of q, which are rounded together, have each other's unit."""
    top = r"(redux\.sync\.max\.u32 )(%r\d+)(,[^;]*;)"
    return edits.replace(text, rf"{top}(.*?){top}", lambda m: "".join(m.group(1, 6, 3, 4, 5, 2, 7)))


def weights_unfenced(text: str) -> str:
    """The first fence before a meeting of a consumer's warps is missing."""
    met = r"fence\.proxy\.async\.shared::cta;(\s+bar\.sync\s+1, 128;)"
    return edits.replace(text, met, lambda m: m[1], slice(0, 1))


def named_barrier_count(text: str) -> str:
    return edits.replace(text, r"bar\.sync\s+1, 128;", "bar.sync 1, 256;")


def without_rope(tensor: TensorMap) -> TensorMap:
    """Keys end where values do, and zeros follow."""
    return dataclasses.replace(tensor, extents=(512, *tensor.extents[1:]))


FAULTS = [
    PlantedFault(
        "a key after a tile's last, where there are to be zeros",
        LATENT,
        OutOfBounds,
        r"a tensor map reads past the end of k0",
        parameters={"cut_k0.map": longer_tile},
    ),
    PlantedFault(
        "a named barrier that restates the number of threads",
        LATENT,
        Deadlock,
        r"named barrier 1: 128 of 256 threads",
        named_barrier_count,
    ),
    PlantedFault(
        "P read before the softmax barrier",
        LATENT,
        EARLY,
        unordered(r"wgmma", "p", r"stmatrix"),
        LATENT.without_wait("p_shared0", slice(0, 1)),
    ),
    PlantedFault(
        "the maximum read before it is handed over",
        LATENT,
        EARLY,
        early(r"ld\.shared", "max", r"st\.shared"),
        LATENT.without_wait("max_shared0", slice(0, 1)),
    ),
    PlantedFault(
        "P shared without a proxy fence",
        LATENT,
        Race,
        unfenced("p", r"stmatrix"),
        without(r"fence\.proxy\.async"),
    ),
    PlantedFault(
        "P written over numbers of RoPE that other warps still multiply",
        FIRST_512,
        Race,
        late(r"stmatrix", "k", r"wgmma"),
        lambda text: edits.replace(text, r"bar\.sync\s+2, 128;", ""),
    ),
    PlantedFault(
        "keys written over P that is still read",
        FIRST_512,
        Race,
        late(r"cp\.async\.bulk", "k", r"wgmma"),
        FIRST_512.without_wait("k_empty1"),
    ),
    PlantedFault(
        "scores without RoPE's numbers",
        FIRST_512,
        Wrong,
        r"lse is wrong",
        parameters={"cut_k0.map": without_rope},
        answers=lambda x, scale: attention.answer(
            dataclasses.replace(x, q=np.where(np.arange(576) < 512, x.q, 0).astype(x.q.dtype)), scale
        ),
    ),
    PlantedFault(
        "the norm of q without eps",
        TURNED,
        Wrong,
        r"lse is wrong in 63 of 72 rows, first in batch entry 0, query 0, head 0 ",
        parameters={"eps": lambda x: 0.0},
        answers=lambda x, scale: attention.answer(x, scale, eps=0.0),
    ),
    PlantedFault(
        "a row turned by the next query's position",
        TURNED,
        OutOfBounds,
        r"ld\.global\.[^\n]*\n[^\n]*table",
        parameters={"table": lambda address: address + 256},
    ),
    PlantedFault(
        "Q turned without a proxy fence",
        TURNED,
        Race,
        unfenced("q", r"st\.shared"),
        queries_unfenced,
    ),
    PlantedFault(
        "Q and its squares read before they are there",
        TURNED,
        EARLY,
        early(r"ld\.shared", "squares", r"st\.shared"),
        queries_not_awaited,
    ),
    PlantedFault(
        "gathered keys read without a proxy fence",
        GATHERED,
        Race,
        unfenced("k", r"cp\.async"),
        keys_unfenced,
    ),
    PlantedFault(
        "arrives before its copies are there",
        GATHERED,
        EARLY,
        early(r"wgmma", "k", r"cp\.async"),
        arrive_at_once,
    ),
    PlantedFault(
        "odd columns in place of even ones",
        E4M3,
        Wrong,
        r"^o is wrong in \d+ of .*; lse is right",
        constants(_25632=0x7531),
    ),
    PlantedFault(
        "a byte of a pair for two keys",
        E4M3,
        Wrong,
        r"^o is wrong in \d+ of .*; lse is right",
        constants(_25632=0x4420),
    ),
    PlantedFault(
        "what stands after a key's unit in place of it",
        E4M3,
        Wrong,
        r"lse is wrong in \d+ of \d+ rows",
        lambda text: edits.replace(text, r"(ld\.global\.b16 [^\[]*\[%rd\d+)\+512\];", lambda m: f"{m[1]}+514];"),
    ),
    PlantedFault(
        "a key's unit for two keys",
        E4M3,
        Wrong,
        r"lse is wrong in \d+ of \d+ rows",
        lambda text: edits.replace(
            text, r"and\.b32 ([^;]*), -65536;", lambda m: f"shl.b32 {m[1]}, 16;", slice(64, None)
        ),
    ),
    PlantedFault(
        "codes of keys and q read without a proxy fence",
        E4M3,
        Race,
        unfenced("(k|q)", r"(cp\.async|st\.shared)"),
        fence_before(r"// begin inline asm\s+mov\.b32"),
    ),
    PlantedFault(
        "codes of P read without a proxy fence",
        E4M3,
        Race,
        unfenced("p", r"st\.shared"),
        fence_before(r"bar\.warp\.sync\s+-1;"),
    ),
    PlantedFault(
        "codes announced before they are there",
        E4M3,
        EARLY,
        early(r"(wgmma|ldmatrix|ld\.shared)", "k", r"cp\.async"),
        arrive_at_once,
    ),
    PlantedFault(
        "codes of P read before they are there",
        E4M3,
        EARLY,
        unordered(r"(wgmma|ld\.shared)", "(p|rose|factor)", r"st\.shared"),
        E4M3.without_wait("p_full0"),
    ),
    PlantedFault(
        "codes of keys written over others that are still read",
        E4M3,
        Race,
        r"cp\.async[^\n]*\n\s+overwrites SMEM of k while nothing orders this",
        E4M3.without_wait("k_empty0"),
    ),
    PlantedFault(
        "codes of q written over others that are still read",
        E4M3,
        EARLY,
        unordered(r"(wgmma|ld\.shared)", "(q|scale)", r"st\.shared"),
        E4M3.without_wait("q_empty0"),
    ),
    PlantedFault(
        "rows of q rounded before they are there",
        E4M3,
        EARLY,
        early(r"ld\.shared", "given", r"cp\.async"),
        lambda text: edits.replace(text, r"cp\.async\.wait_group\s+3;", "cp.async.wait_group 4;"),
    ),
    PlantedFault(
        "rows of q in the units of those beside them",
        E4M3,
        Wrong,
        r"lse is wrong in \d+ of \d+ rows",
        units_of_others,
    ),
    PlantedFault(
        "every other number of q times nothing",
        E4M3,
        Wrong,
        r"lse is wrong in \d+ of \d+ rows",
        lambda text: edits.replace(text, r"8388736;", "8388608;"),
    ),
    PlantedFault(
        "the sum of a tile added before it is complete",
        E4M3,
        Race,
        r"reads register %r\d+ while the wgmma of line \d+ may still write it",
        without(r"wgmma\.wait_group", slice(-1, None)),
    ),
    PlantedFault(
        "RoPE's products in place of the others",
        ROPE_KEPT,
        Wrong,
        r"lse is wrong in \d+ of \d+ rows",
        lambda text: edits.replace(
            text, r"setp\.ne(\.b32 p, %r\d+, 0;\s+wgmma\S+k16\.)", lambda m: f"setp.eq{m[1]}", slice(0, 1)
        ),
    ),
    PlantedFault(
        "RoPE of q beside other numbers of keys",
        ROPE_KEPT,
        Wrong,
        r"lse is wrong in \d+ of \d+ rows",
        other_numbers_of_rope,
    ),
    PlantedFault(
        "a warpgroup asks for more registers than ptxas left it",
        FEW_HEADS,
        Misuse,
        r"the warps of a CTA ask for 33792 registers, it was launched with 32768",
        lambda text: edits.replace(
            text, r"setmaxnreg\.inc\.sync\.aligned\.u32\s+200;", "setmaxnreg.inc.sync.aligned.u32 208;"
        ),
    ),
    PlantedFault(
        "weights of a few heads without a proxy fence",
        FEW_HEADS,
        Race,
        unfenced("p", r"stmatrix"),
        weights_unfenced,
    ),
    PlantedFault(
        "weights of a few heads multiplied before all warps have shared them",
        FEW_HEADS,
        EARLY,
        unordered(r"wgmma", "p", r"stmatrix"),
        without(r"bar\.sync\s+1, 128", slice(1, 2)),
    ),
    PlantedFault(
        "values handed back before they are multiplied",
        FEW_HEADS,
        Race,
        late(r"cp\.async", "k", r"wgmma"),
        without(r"wgmma\.wait_group\.sync\.aligned\s+2"),
        case={"topk": 300},
    ),
    PlantedFault(
        "weights of a few heads shared while O leaves from their place",
        FEW_HEADS,
        Race,
        late(r"stmatrix", "p", r"tma"),
        without(r"cp\.async\.bulk\.wait_group\.read\s+0"),
    ),
    PlantedFault(
        "O's slab overwritten while TMA reads it",
        LATENT,
        Race,
        late(r"stmatrix", "[op]", r"tma"),  # slabs go through both by turns
        without(r"cp\.async\.bulk\.wait_group\.read\s+1"),
    ),
    PlantedFault(
        "the last keys of an odd tile announced before they have come",
        LONG_ODD,
        EARLY,
        early(r"wgmma", "k", r"cp\.async"),
        arrive_at_once,
    ),
    PlantedFault(
        "the last keys of an odd tile copied while those before are read",
        LONG_ODD,
        Race,
        r"overwrites SMEM of k [^\n]*nothing orders this and the write by cp\.async",
        LONG_ODD.without_wait("k_empty3", slice(-1, None)),
    ),
    PlantedFault(
        "the last keys of an odd tile read without a proxy fence",
        LONG_ODD,
        Race,
        unfenced("k", r"cp\.async"),
        keys_unfenced,
    ),
    PlantedFault(
        "O staged while the weights in its place are multiplied",
        LONG_ODD,
        Race,
        r"stmatrix[^\n]*\n\s+overwrites SMEM of p [^\n]*nothing orders this and the write by [^\n]*stmatrix",
        LONG_ODD.without_wait("all_read"),
    ),
    PlantedFault(
        "the last store of O not waited for",
        LATENT,
        Leak,
        r"ends while TMA may still read shared memory",
        without(r"cp\.async\.bulk\.wait_group\.read\s+0", slice(-1, None)),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_is_found(fault):
    fault.check(run_with, seeds=SEEDS)


@pytest.mark.faults
@pytest.mark.parametrize("subject", [LATENT, FIRST_512, TURNED, LONG_ODD, GATHERED, FEW_HEADS, E4M3], ids=str)
def test_nothing_is_found_without_a_fault(subject):
    subject.judge_as_it_is()
