"""Faults planted in the gradient's kernels of d 512 with separate K and V, whose warpgroups share a sum by halves of
its columns: the interpreter must find and name each.
"""

import dataclasses
import functools

import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import gradients, mha_backward
from interpreter.machine.hazards import Deadlock, Fault, Misuse, Race
from tests.planted import KIB, Subject, without
from tests.symptoms import EARLY, early, late, unfenced, unordered
from tests.test_ptx_mha_backward import kernels, operands

SCALE = 512**-0.5
PASSED = "p_full weights_full weights_empty "
DKDV = Subject(
    "mha_dkdv_sm_90a_d512_bfloat16",
    {},
    PASSED
    + "keys p_empty scored_full0 scored_full1 scored_full2 scored_full3 scored_empty0 scored_empty1 scored_empty2 "
    "scored_empty3 summed_full0 summed_full1 summed_full2 summed_full3 summed_empty0 summed_empty1 summed_empty2 "
    "summed_empty3 rows_full rows_empty",
    {"stays": 64 * KIB, "scored": 64 * KIB, "summed": 64 * KIB, "p": 8 * KIB, "weights": 4 * KIB},
)
DQ = Subject(
    "mha_dq_sm_90a_d512_bfloat16",
    {},
    PASSED + "rows_full rows_empty k_landed0 k_landed1 k_landed2 k_full0 k_full1 k_full2 k_empty0 k_empty1 k_empty2 "
    "v_full0 v_full1 v_empty0 v_empty1",
    {"q": 64 * KIB, "do": 64 * KIB, "k": 48 * KIB, "v": 32 * KIB, "p": 8 * KIB, "weights": 4 * KIB},
)
LOAD = r"cp\.async\.bulk"


def before_it_is_cleared(text: str) -> str:
    return edits.move_waits(text, DQ.barrier(text, "k_full0"), DQ.barrier(text, "k_landed0"))


FAULTS = [
    PlantedFault(
        "dS multiplied before it is there",
        DQ,
        EARLY,
        unordered("wgmma", "weights", "stmatrix"),
        DQ.without_wait("weights_full"),
    ),
    PlantedFault(
        "P taken before it is there",
        DQ,
        EARLY,
        early(r"ld\.shared", "p", r"st\.shared"),
        DQ.without_wait("p_full"),
    ),
    PlantedFault(
        "P written over that of the tile before",
        DKDV,
        Race,
        late("stmatrix", "weights", "wgmma"),
        DKDV.without_wait("weights_empty"),
    ),
    PlantedFault(
        "K read before it is cleared",
        DQ,
        Race,
        early("wgmma", "k", r"st\.shared"),
        before_it_is_cleared,
        case="window",
    ),
    PlantedFault(
        "half of K loaded over one that has not been read",
        DQ,
        Race,
        r"cp\.async\.bulk[^\n]*\n\s+overwrites SMEM of k\b[^\n]*nothing orders this and the write by tma",
        DQ.without_wait("k_empty0"),
    ),
    PlantedFault(
        "half of V loaded over one that has not come",
        DQ,
        Misuse,
        "an arrival too many: mbarrier v_full0",
        DQ.without_wait("v_empty0"),
    ),
    PlantedFault(
        "P and dS shared without a proxy fence",
        DKDV,
        Race,
        unfenced("weights", "stmatrix"),
        without(r"fence\.proxy\.async"),
    ),
    PlantedFault(
        "half of dO loaded over one that has not been read",
        DKDV,
        Race,
        r"cp\.async\.bulk[^\n]*\n\s+overwrites SMEM of summed\b",
        DKDV.without_wait("summed_empty0"),
    ),
    PlantedFault(
        "Q read before it is there",
        DKDV,
        EARLY,
        early("wgmma", "scored", LOAD),
        DKDV.without_wait("scored_full0"),
    ),
    PlantedFault(
        "numbers of rows published over those before, which nobody has read",
        DKDV,
        Deadlock,
        r"wait for parity \d: mbarrier rows_full [^\n]*in phase 11",
        DKDV.without_wait("rows_empty"),
    ),
    PlantedFault(
        "P taken before the peer has sent it",
        DKDV,
        EARLY,
        early(r"ld\.shared", "p", r"st\.async"),
        DKDV.without_wait("p_full"),
    ),
    PlantedFault(
        "P sent over the one that the peer reads",
        DKDV,
        Race,
        r"st\.async[^\n]*\n\s+overwrites SMEM of p\b[^\n]*nothing orders this",
        DKDV.without_wait("p_empty"),
    ),
    PlantedFault(
        "a row that sees nothing is not zeroed",
        DKDV,
        AssertionError,
        r"^dk: \d+ of \d+ wrong, first at .*: nan",
        without(r"st\.shared\.v4\.b32\s+\[%r\d+\], \{0, 0, 0, 0\}"),
        case="random",
    ),
]


@functools.cache
def right(case):
    return mha_backward.run(kernels(512, "bfloat16"), operands(512, "bfloat16", case), SCALE)


def run_with(fault, seed):
    """Runs the kernel with the fault, beside right answers of the others."""
    subject, found = fault.kernel, kernels(512, "bfloat16")
    kernel = subject.kernel
    case = fault.case or ("turns" if subject is DKDV else "groups")
    x, (dq, *of_keys) = operands(512, "bfloat16", case), right(case)
    broken = dataclasses.replace(kernel, ptx=fault.planted_in(kernel.ptx))
    try:
        if subject is DQ:
            (dq,) = mha_backward.run_step(broken, x, SCALE, None, seed=seed)
        else:
            seen = mha_backward.tiles_seen(found, x, SCALE)
            of_keys = mha_backward.run_step(broken, x, SCALE, seen, seed=seed)
        gradients.assert_right((dq, *(y.reshape(x.attention.sources[0].k.shape) for y in of_keys)), x, SCALE)
    except Fault as fault_found:
        raise type(fault_found)(subject.by_name(str(fault_found))) from None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_is_found(fault):
    fault.check(run_with, seeds=(0,))
