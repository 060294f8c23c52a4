"""Attention over keys in pages: random places of sequences in pools, and faults planted in what finds the pages. The
cases of every kernel of attention are in test_ptx.py.
"""

import re

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention
from interpreter.kernels.launch import launch
from interpreter.kernels.verdict import Wrong, judge
from interpreter.machine.hazards import Deadlock, OutOfBounds, Race, Undefined
from tests import wrong_answers
from tests.planted import KIB, SEEDS, Subject, run_with, without
from tests.symptoms import EARLY, early

STAGES = 4
PAGED = Subject(
    "mha_fwd_paged_sm_90a_d64_bfloat16",
    {"b": 2, "s_q": 2, "s_kv": 420, "h_q": 8, "h_kv": 2, "width": 250, "page": 16},
    " ".join(
        ["q_full0 q_full1 q_empty0 q_empty1"]
        + [f"{x}{i}" for x in ("k_full", "k_empty", "v_landed", "v_full", "v_empty") for i in range(STAGES)]
    ),
    {"q": 2 * 16 * KIB, "k": STAGES * 16 * KIB, "v": STAGES * 16 * KIB},
)
TABLE = r"ld\.global\.b32\s+(%r\d+), \[(%rd\d+)\];(\s+add\.s64\s+%rd\d+, %rd\d+, %rd\d+;\s+)ld\.global\.b32\s+(%r\d+), \[%rd\d+\];"
COPY = r"cp\.async\.bulk\.tensor\.4d[^;]*;"


@pytest.mark.parametrize("page", [8, 24, 64, 192])
@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)])
def test_pages_of_any_size(d, page):
    """Windows that begin and end anywhere in a box, for steps of several tokens; some sequences see one page."""
    subject = Subject(f"mha_fwd_paged_sm_90a_d{d}_bfloat16", {}, "", {})
    for seed, width in enumerate((1, 9, 130, 1 << 30)):
        sizes = {"b": 3, "s_q": 1 + seed, "s_kv": 200 + 61 * seed, "h_q": 6, "h_kv": 3, "page": page, "width": width}
        x = attention.operands(subject.kernel.variant, seed=seed, **sizes)
        run = launch(subject.kernel, x, seed=seed, processors=2)
        judge(run.run(), x, run.scale)


def values_of_keys_pages(text: str) -> str:
    """V's pages by the table of K's."""
    return edits.replace(text, TABLE, lambda m: f"ld.global.b32 {m[1]}, [{m[2]}];{m[3]}ld.global.b32 {m[4]}, [{m[2]}];")


def first_rows(text: str) -> str:
    """Every box of K is the first one of its page."""
    return edits.replace(text, COPY, lambda m: re.sub(r"(\{%r\d+, )(%r\d+)", r"\g<1>0", m[0]), slice(0, 1))


def unaligned(text: str) -> str:
    """Tiles that begin with the first key that is seen."""
    return edits.replace(text, r"and\.b32\s+(%r\d+), (%r\d+), %r\d+;(\s+sub\.s32)", lambda m: f"mov.b32 {m[1]}, {m[2]};{m[3]}")


def no_last_key(text: str) -> str:
    """Lanes read the table for boxes after the last key that is seen."""
    pattern = r"(shr\.s32\s+%r\d+, %r\d+, 3;\s+)setp\.ge\.s32\s+(%p\d+), (%r\d+), %r\d+;"
    return edits.replace(text, pattern, lambda m: f"{m[1]}setp.ne.b32 {m[2]}, {m[3]}, {m[3]};")


FAULTS = [
    PlantedFault(
        "values by the pages of keys",
        PAGED,
        Wrong,
        r"^o is wrong in .*lse is right",
        values_of_keys_pages,
    ),
]
