"""Hopper's kernels, run by the interpreter: right answers, and nothing that depends on who is faster."""

import functools

import numpy as np
import pytest

from jax_dsv4_fmha import _ffi
from tests import native
from tests.ptx import cases, hardware
from tests.ptx.launch import Kernel, combine, launch
from tests.ptx.verdict import judge

BUILT = [v.key for v in _ffi.variants() if v.arch == "sm_90a" and v.splits]
COMBINE = {v.dtype: v.key for v in _ffi.variants() if v.op == "combine"}
RUNS = [  # the same code but for roundings: float16 needs no case but one
    (v.key, case)
    for v in map(native.variant_of, BUILT)
    for case in cases.CASES
    if (case == "tiles" or v.dtype == "bfloat16") and (case != "groups" or v.op == "fwd")
]


@functools.cache
def kernel(key: str) -> Kernel:
    return Kernel.of(native.variant_of(key))


def operands(key: str, case: str) -> native.Operands:
    k = kernel(key)
    x = cases.operands(k.variant, k.facts["tile_n"], case)
    if x is None:
        pytest.skip(f"{case} is no case of {k.variant.op}")
    return x


def seeds(key: str, case: str) -> tuple[int, int]:
    """Two for every test, all tests different."""
    first = 2 * RUNS.index((key, case))
    return first, first + 1


@pytest.mark.parametrize(("key", "case"), RUNS)
def test_is_right_in_any_order(key, case):
    x, results = operands(key, case), []
    for seed in seeds(key, case):
        run = launch(kernel(key), x, seed=seed, processors=cases.PROCESSORS[case])
        results.append(run.run())
        judge(results[-1], x, run.scale)
    for a, b in zip(*results, strict=True):
        assert (a.view(np.uint8) == b.view(np.uint8)).all(), "the answer depends on the order of things"


@pytest.mark.parametrize(("key", "case"), [x for x in RUNS if x[1] in ("tiles", "turns") and "_bfloat16" in x[0]])
def test_splits_are_merged_right(key, case):
    """More splits than some rows have key tiles, and what they leave of rows that see nothing."""
    x, (seed, _) = operands(key, case), seeds(key, case)
    forward = launch(kernel(key), x, splits=3, seed=seed, processors=cases.PROCESSORS[case])
    forward.machine.run()
    merged = combine(kernel(COMBINE[kernel(key).variant.dtype]), forward, seed=seed)
    judge(merged.run(), x, merged.scale)


@pytest.mark.parametrize("key", [key for key in BUILT if key in hardware.KEYS])
def test_agrees_with_hardware(key):
    """lse to 1e-6 and o to a unit in the last place: what is left is the order of sums, and how the chip rounds exp2."""
    x = operands(key, hardware.CASE)
    o, lse = hardware.recorded(kernel(key).variant, x)
    got_o, got_lse = launch(kernel(key), x, processors=1).run()
    finite = np.isfinite(lse)
    assert (got_lse[~finite] == lse[~finite]).all() and (~finite).any()
    np.testing.assert_allclose(got_lse[finite], lse[finite], rtol=1e-6)
    distance = np.abs(got_o.astype(np.float64) - o.astype(np.float64))
    assert np.max(distance / unit(o)) <= 1
    assert np.mean(got_o.view(np.uint16) != o.view(np.uint16)) < 0.05


def unit(o: np.ndarray) -> np.ndarray:
    """What the last place of an element is worth; of the row's mean, where an element is less: it is a sum that cancels."""
    x = o.astype(np.float64)
    mean = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    digits = 7 if o.dtype == "bfloat16" else 10
    return 2.0 ** (np.floor(np.log2(np.maximum(np.maximum(np.abs(x), mean), 2.0**-14))) - digits)
