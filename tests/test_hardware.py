"""Records of a GPU's answers: every run has one, and a GPU answers the same bits today."""

import numpy as np
import pytest

from interpreter import hardware
from interpreter.kernels import native
from jax_dsv4_fmha._host import library
from kernels.abi import Combine
from kernels.variants import VARIANTS


def test_every_run_has_an_answer():
    merged = {run.variant.dtype for run in hardware.ATTENTION if run.splits > 1}
    assert merged == {v.dtype for v in VARIANTS if isinstance(v, Combine)}
    assert hardware.missing() == [], "record them on a GPU: python -m interpreter.hardware --only NAME"


def test_nothing_else_has_an_answer():
    with np.load(hardware.RECORDED) as data:
        assert {name.rpartition(".")[0] for name in data} == {*hardware.RUNS}


@pytest.mark.gpu
@pytest.mark.parametrize("name", hardware.RUNS)
def test_answers_as_it_did(name, cuda):
    """A kernel whose sums have another order now is recorded anew. An H100 gives the bits of an H200."""
    run = hardware.RUNS[name]
    if run.variant not in native.built(type(run.variant)):
        pytest.skip(f"{name} is not built")
    x = run.operands()
    record = hardware.recorded(run, x)
    if hardware.ARCH not in library.local_architectures():
        pytest.skip(f"recorded on {record.device}, this is {cuda.device_kind}")
    got = run.on_gpu(x)
    assert hardware.digest_of(run, got) == record.digest
    for i, (y, want) in enumerate(zip(run.kept(got), record.results, strict=True)):
        if isinstance(run, hardware.AttentionRun) or i in range(len(got))[run.reproducible]:
            np.testing.assert_array_equal(y, want)
        else:  # sums in any order
            np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
