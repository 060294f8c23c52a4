"""Head-summed probabilities in the interpreter: right answers, and planted faults, each found and named."""

import functools

import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.probabilities import Problem, judge, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Deadlock, Race
from kernels.abi import Probabilities

BUILT = {v.key: v for v in native.built(Probabilities)}
KEY = "head_summed_probabilities_sm_90a_d512_bfloat16"


@pytest.mark.parametrize(
    ("shape", "processors", "seed"),
    [
        ((1, 3, 5, 90, 40), 1, 0),  # one tile of keys: nothing for the second warpgroup
        ((2, 1, 130, 90, 133), 3, 1),  # more heads than a tile has, more CTAs than queries
    ],
)
def test_is_right(shape, processors, seed):
    variant = BUILT.get(KEY) or pytest.skip("not built")
    x = Problem.of(variant, *shape)
    judge(x, run(variant, x, processors=processors, seed=seed))


def barriers(text):
    """The offsets of q_full, q_empty, k_full and k_empty."""
    made, at = edits.barriers(text), 0
    found = {}
    for name, count in (("q_full", 4), ("q_empty", 4), ("k_full", 6), ("k_empty", 6)):
        found[name], at = set(made[at : at + count]), at + count
    assert at == len(made)
    return found


def without_waiting_for(name):
    return lambda text: edits.drop_waits(text, barriers(text)[name])


def never_handed_back(text):
    """A piece of keys is not handed back."""
    (first, *_) = sorted(barriers(text)["k_empty"])
    return edits.replace(text, rf"mbarrier\.arrive\.shared\.b64 %rd\d+, \[%r\d+\+{first}\][^;]*;", "", slice(1, 2))


def handed_back_too_early(text):
    """Pieces of keys are handed back while products still read them."""
    return edits.replace(text, r"wgmma\.wait_group\.sync\.aligned\s+1;", "wgmma.wait_group.sync.aligned 4;")


def lse_of_another_head(text):
    pattern = r"ld\.shared\.v2\.b32\s+(\{[^}]*\}), \[(%r\d+)\+(\d+)\];"
    return edits.replace(text, pattern, lambda m: f"ld.shared.v2.b32 {m[1]}, [{m[2]}+{int(m[3]) - 32}];", slice(1, 2))


def lse_read_too_early(text):
    """It is read before the whole warpgroup has written its heads'."""
    return edits.replace(text, r"^\s*(bar\.sync|barrier\.sync)\s+%r\d+, \d+;", "", slice(-1, None))


def half_a_sum(text):
    """The sums of two of four lanes are lost."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+)(?:\|%p\d+)?, (%r\d+), 2,[^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, 0;", slice(0, 1))


Q_BYTES, K_BYTES = r"(\d{4,5}|1[0-2]\d{4}|13[01]\d{3})", r"(13[2-9]\d{3}|1[4-9]\d{4}|2\d{5})"
"""Where Q lies in shared memory, 128 KiB from 1024 on, and where keys do."""


def early(place: str) -> str:
    """Products read what is not there yet."""
    return rf"wgmma[^\n]*\n\s+reads SMEM bytes {place}\.\.[^\n]*(the write by cp\.async|which nobody wrote)"


def late(place: str) -> str:
    """What is written over is still read, or may be."""
    over = rf"cp\.async[^\n]*\n\s+overwrites SMEM bytes {place}\.\.[^\n]*nothing orders this and the read by wgmma"
    return rf"{over}|wgmma[^\n]*\n\s+reads SMEM bytes {place}\.\.[^\n]*nothing orders this and the write by cp\.async"


FAULTS = [
    PlantedFault("keys read before they are there", KEY, Race, early(K_BYTES), without_waiting_for("k_full")),
    PlantedFault("Q read before it is there", KEY, Race, early(Q_BYTES), without_waiting_for("q_full")),
    PlantedFault("Q overwritten while it is read", KEY, Race, late(Q_BYTES), without_waiting_for("q_empty")),
    PlantedFault("keys never handed back", KEY, Deadlock, "128 of 128 arrivals pending", never_handed_back),
    PlantedFault("keys handed back too early", KEY, Race, late(K_BYTES), handed_back_too_early),
    PlantedFault(
        "lse of another head", KEY, Wrong, r"^225 of 258 .* entry 65: 0\.3194\d+, wanted 0\.3540", lse_of_another_head
    ),
    PlantedFault(
        "lse read too early",
        KEY,
        Race,
        r"ld\.shared[^\n]*\n\s+reads SMEM [^\n]*the write by [^\n]*st\.shared\.b32",
        lse_read_too_early,
    ),
    PlantedFault("half a sum", KEY, Wrong, r"^110 of 258 .* entry 65: 0\.2630\d+, wanted 0\.3540", half_a_sum),
]


@functools.cache
def problem():
    variant = BUILT.get(KEY) or pytest.skip("not built")
    return Problem.of(variant, 1, 2, 20, 90, 129)


def run_with(fault, seed):
    x = problem()
    judge(x, run(BUILT[fault.kernel], x, processors=1, seed=seed, edit=fault.planted_in))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault):
    fault.check(run_with, seeds=(0,))
