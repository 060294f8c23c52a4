"""Products of rows by group, as training has them, interpreted: right answers, the same bits, planted faults."""

import pytest

from interpreter.kernels import native
from interpreter.kernels.expert_product import judge, run, typical
from kernels.abi import ExpertProduct

BUILT = {v.form: v for v in native.built(ExpertProduct)}

needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")


@pytest.mark.parametrize("form", BUILT)
def test_is_right(form):
    x = typical(BUILT[form])
    judge(x, run(BUILT[form], x))
