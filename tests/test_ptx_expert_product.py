"""Products of rows by group, as training has them, interpreted: right answers, the same bits, planted faults."""

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.expert_product import Problem, judge, run, typical
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Misuse, Race, Undefined
from kernels.abi import ExpertProduct

BUILT = {v.form: v for v in native.built(ExpertProduct)}

needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")


@pytest.mark.parametrize("form", BUILT)
def test_is_right(form):
    x = typical(BUILT[form])
    judge(x, run(BUILT[form], x))
