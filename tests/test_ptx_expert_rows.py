"""Rows moved to and from a layer's experts, interpreted: every number's bits, what is not written, planted faults."""

import re

import numpy as np
import pytest

from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.expert_rows import Problem, judge, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Fault
from kernels.abi import ExpertRows

BUILT = {v.form: v for v in native.built(ExpertRows)}

needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")

CASES = {
    "rows of several CTAs": (11, 3, 512),
    "a row that fills no loop": (5, 2, 1280),
    "a choice of each token": (9, 1, 256),
    "a token": (1, 6, 256),
}


@pytest.mark.parametrize("form", BUILT)
@pytest.mark.parametrize("case", CASES)
def test_is_right(case, form):
    x = Problem.of(form, *CASES[case])
    judge(x, run(BUILT[form], x))


@needs_kernels
@pytest.mark.parametrize("form", BUILT)
def test_all_choices_are_here(form):
    x = Problem.of(form, 6, 2, 256)
    x.chosen[:] = np.arange(12).reshape(6, 2) % 4
    x.x[:] = np.arange(len(x.x))[:, None]
    judge(x, run(BUILT[form], x))


def test_the_launch_refuses():
    sizes = {"tokens": 3, "choices": 2, "k": 256, "experts": 4, "summed": True}
    changes = (
        ({"tokens": 0}, "tokens is 0"),
        ({"choices": 0}, "choices is 0"),
        ({"experts": 0}, "experts is 0"),
        ({"k": 128}, "k is 128, wanted a multiple of 256"),
        ({"tokens": 2**30, "choices": 8}, r"tokens \* choices is"),
    )
    for changed, says in changes:
        with pytest.raises(ValueError, match=says):
            native.plan_expert_rows(sizes | changed, tile_m=8)


def of_launch(name, form, raises=Wrong, says="numbers are wrong", **parameters):
    return form, PlantedFault(name, f"expert_rows_sm_90a_bfloat16_{form}", raises, says, parameters=parameters)


def in_kernel(name, form, says, pattern, becomes):
    def edit(text):
        changed = re.sub(pattern, becomes, text, count=1)
        assert changed != text
        return changed

    return form, PlantedFault(name, f"expert_rows_sm_90a_bfloat16_{form}", Wrong, says, edit)


FAULTS = [
    of_launch("a row less", "summed", rows=lambda n: n - 1),
    of_launch("rows of more choices", "taken", choices=lambda n: n + 1),
    of_launch("a choice less", "summed", choices=lambda n: n - 1),
    of_launch("an expert less", "summed", experts=lambda n: n - 1),
    of_launch("an expert more", "summed", experts=lambda n: n + 1),
    of_launch("fewer columns", "taken", k=lambda n: n - 256),
    of_launch("fewer columns of sums", "summed", k=lambda n: n - 256),
    of_launch("a row more", "summed", (Wrong, Fault), "", rows=lambda n: n + 1),
    in_kernel(
        *("rows of all choices", "taken", "a row of no expert is written"),
        *(r"min\.s32(\s+%r\d+), %r\d+, (%r\d+);", r"mov.b32\1, \2;"),
    ),
    in_kernel(
        *("a number for its neighbour", "summed", "numbers are wrong"),
        *(r"and\.b32(\s+%r\d+), (%r\d+), -65536;", r"shl.b32\1, \2, 16;"),
    ),
]


@pytest.mark.faults
@needs_kernels
@pytest.mark.parametrize(("form", "planted"), FAULTS, ids=[str(planted) for _, planted in FAULTS])
def test_a_fault_is_found(form, planted):
    x = Problem.of(form, *CASES["rows of several CTAs"])

    def run_with(planted, seed):
        judge(x, run(BUILT[form], x, seed=seed, edit=planted.planted_in, **planted.parameters))

    found = planted.findings(run_with, (0,))
    assert all(planted.symptoms_of(error) for error in found), found
