"""Faults planted in the kernel of attention at d 512 with separate K and V, whose CTAs load keys for one another: the
interpreter must find and name each.
"""

import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.machine.hazards import Deadlock, Misuse, OutOfBounds, Race
from tests.planted import KIB, SEEDS, Subject, constants, longer_tile, run_with, without
from tests.symptoms import EARLY, early, late

OWN_VALUES = Subject(  # five tiles of 32 keys: the last pair has no odd one
    "mha_fwd_sm_90a_d512_bfloat16",
    {"b": 1, "s_q": 10, "s_kv": 150, "h_q": 16, "h_kv": 2, "width": 1000},
    "q_full q_empty k_full0 k_full1 k_empty0 k_empty1 max_shared0 max_shared1 p_shared0 p_shared1 all_read "
    "v_full0 v_full1 v_full2 v_full3 v_empty0 v_empty1 v_empty2 v_empty3",
    {"q": 64 * KIB, "k": 2 * 32 * KIB, "v": 2 * 32 * KIB, "p": 2 * 4 * KIB, "max": 512},
)
LOAD = r"cp\.async\.bulk"


def to_itself(text: str) -> str:
    """Each CTA loads its half of the tiles for the one with rank 0."""
    return edits.replace(text, r"(mov\.b16\s+%rs\d+, )3;", lambda m: f"{m[1]}1;")


FAULTS = [
    PlantedFault(
        "a value after a tile's last, where there are to be zeros",
        OWN_VALUES,
        OutOfBounds,
        r"a tensor map reads past the end of v0",
        parameters={"cut_v0.map": longer_tile},
    ),
    PlantedFault(
        "the other tile's values multiplied before they are there",
        OWN_VALUES,
        EARLY,
        early(r"wgmma", r"v", LOAD),
        OWN_VALUES.without_wait("v_full1"),
    ),
    PlantedFault(
        "keys loaded before those of the last pair are scored",
        OWN_VALUES,
        Misuse,
        r"an arrival too many: mbarrier k_full0",
        OWN_VALUES.without_wait("k_empty0"),
    ),
    PlantedFault(
        "tiles loaded again while the peer reads them",
        OWN_VALUES,
        Race,
        late(LOAD, "[kv]", r"wgmma"),
        constants(_132=128),
    ),
    PlantedFault(
        "tiles that reach one CTA of two",
        OWN_VALUES,
        Deadlock,
        r"transaction bytes outstanding",
        to_itself,
    ),
    PlantedFault(
        "values multiplied before the peer's half is there",
        OWN_VALUES,
        EARLY,
        early(r"wgmma", "v", LOAD),
        lambda text: edits.replace(text, r"(mov\.b32\s+%r\d+, )16384;", lambda m: f"{m[1]}8192;"),
    ),
    PlantedFault(
        "P written over that of the pair before",
        OWN_VALUES,
        Race,
        late(r"stmatrix", "p", r"wgmma"),
        OWN_VALUES.without_wait("v_empty1", slice(-1, None)),
    ),
    PlantedFault(
        "P shared without a proxy fence",
        OWN_VALUES,
        Race,
        r"no fence\.proxy\.async after the generic write by [^\n]*stmatrix",
        without(r"fence\.proxy\.async"),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_is_found(fault):
    fault.check(run_with, seeds=SEEDS)


@pytest.mark.faults
def test_nothing_is_found_without_a_fault():
    OWN_VALUES.judge_as_it_is()
