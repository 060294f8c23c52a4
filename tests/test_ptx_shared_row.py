"""The choice of the greatest scores where CTAs share a row, in the interpreter: right answers, and planted faults."""

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels.indexer import SHARED_ROWS, choose, judge_choice
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Race
from tests.test_ptx_indexer import rows

SHARED_ROW = SHARED_ROWS["sm_90a"]


@pytest.mark.parametrize("row", [0, 1, 4, 5, 7, 8])
def test_choice_of_a_shared_row(row):
    """Rows that are hard to choose from, each alone; the first CTA has all that there is."""
    scores, start, stop = (x[..., row : row + 1, :] if x.shape[0] > 1 else x[:, row : row + 1] for x in rows(640))
    judge_choice(choose(scores, start, stop, 33, variant=SHARED_ROW), start, stop)


def in_several_parts(s=20000):
    """A row of which several CTAs have a part, each with some of the greatest and some of the last one's equals."""
    scores = np.minimum(np.random.default_rng(3).standard_normal((1, s)), 1.5).astype(np.float32)
    scores[0, ::200] = np.arange(2, 3, 200 / s)
    scores[0, [0, s - 1]] = 9  # which the query does not see
    return scores, np.array([[1]], np.int32), np.array([[s - 1]], np.int32)


@pytest.mark.parametrize("arch", SHARED_ROWS)
@pytest.mark.parametrize("topk", [90, 1000])
def test_choice_of_parts(arch, topk):
    scores, start, stop = in_several_parts()
    judge_choice(choose(scores, start, stop, topk, variant=SHARED_ROWS[arch], seed=1), start, stop)


def test_choice_in_rounds():
    """A row that is too long for shared memory, so that each step reads it again."""
    scores, start, stop = in_several_parts(8 * 512 * 4 * 16 + 1000)
    judge_choice(choose(scores, start, stop, 2048, variant=SHARED_ROW), start, stop)


def without_meeting(which):
    """The CTAs of a cluster do not meet where the code has its first or its last meeting."""
    pattern = r"barrier\.cluster\.(arrive|wait)[^;]*;"
    return lambda text: edits.replace(text, pattern, "", slice(None, 2) if which == "first" else slice(2, None))


def forgets(which):
    """A part does not know how many those before it have: of what is over, or of what equals the last one."""
    pattern, place = r"(st\.shared\.b32\s+\[%r\d+\+\d+\], )%r\d+;", {"over": 2, "equal": 3}[which]
    return lambda text: edits.replace(text, pattern, lambda m: f"{m[1]}0;", slice(place, place + 1))


def counts_pile_up(text):
    """The histogram of a step still has the counts of the steps before."""
    return edits.replace(text, r"st\.shared\.v4\.b32\s+\[%r\d+\+\d+\], \{0, 0, 0, 0\};", "", slice(None))


SHARED_FAULTS = [
    PlantedFault(
        "counts of others before these are there",
        SHARED_ROW.key,
        Race,
        r"ld\.shared::cluster[^\n]*\n\s+loads from shared memory of CTA \d+ while nothing tells that it has begun",
        without_meeting("first"),
    ),
    PlantedFault(
        "a CTA leaves while others read its counts",
        SHARED_ROW.key,
        Race,
        r"loads from shared memory of CTA \d+, which has ended|CTA \d+ ends while nothing orders that after CTA \d+ "
        r"warp \d+ \(line \d+: ld\.shared::cluster",
        without_meeting("last"),
    ),
    PlantedFault(  # none of those that are chosen equals the last one
        "places that parts before it have",
        SHARED_ROW.key,
        Race,
        r"st\.global[^\n]*\n\s+overwrites indices",
        forgets("over"),
        case="greater",
    ),
    PlantedFault(  # all of them do
        "ties that parts before it have",
        SHARED_ROW.key,
        Race,
        r"st\.global[^\n]*\n\s+overwrites indices",
        forgets("equal"),
        case="equal",
    ),
    PlantedFault("counts pile up", SHARED_ROW.key, Wrong, " 99 different entries, wanted 1000", counts_pile_up),
]


def run_parts_with(fault, seed):
    """Where the case is not "greater" or "equal", some of both are chosen."""
    scores, start, stop = in_several_parts()
    topk = 90 if fault.case == "greater" else 1000
    if fault.case == "equal":
        scores[:] = 1
    judge_choice(choose(scores, start, stop, topk, variant=SHARED_ROW, edit=fault.planted_in, seed=seed), start, stop)


@pytest.mark.parametrize("fault", SHARED_FAULTS, ids=str)
def test_fault_of_a_shared_row(fault):
    fault.check(run_parts_with)
