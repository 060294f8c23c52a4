"""The kernel of hyper-connections, interpreted: right answers, the same bits in any company, and planted faults."""

import re
from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.hyper_connection import Problem, judge, results
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Misuse, Race, Undefined
from kernels.abi import HyperConnection

BUILT = {v.key: v for v in native.built(HyperConnection)}
FLASH = next(iter(BUILT.values()), None)

needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("key", BUILT)
def test_is_right(key, is_taken):
    x = Problem.of(19, BUILT[key].hidden, is_taken)
    judge(x, results(BUILT[key], x))


@needs_kernels
@pytest.mark.parametrize(("tokens", "processors"), [(33, 8), (67, 16)], ids=["three tiles", "two clusters"])
def test_many_tiles_are_right(tokens, processors):
    x = Problem.of(tokens, FLASH.hidden)
    judge(x, results(FLASH, x, processors=processors))


@needs_kernels
def test_a_token_has_the_same_bits_in_any_company():
    whole = Problem.of(18, FLASH.hidden)
    part = replace(whole, **{name: getattr(whole, name)[11:13] for name in ("x", "y", "post", "mix", "taken")})
    want = results(FLASH, whole)
    for name, got in results(FLASH, part).items():
        assert got.tobytes() == want[name][11:13].tobytes()


@needs_kernels
def test_what_is_not_a_number_stays_in_its_token():
    x = Problem.of(4, FLASH.hidden)
    usual = results(FLASH, x)
    x.y[2, 7] = np.nan
    for name, got in results(FLASH, x).items():
        assert np.isnan(got[2].astype(np.float32)).any()
        assert np.delete(got, 2, 0).tobytes() == np.delete(usual[name], 2, 0).tobytes()


@needs_kernels
def test_first_streams_are_the_embedding():
    """x is 0, mix is 0 and post is 1."""
    x = Problem.of(2, FLASH.hidden)
    x = replace(x, x=np.zeros_like(x.x), mix=np.zeros_like(x.mix), post=np.ones_like(x.post))
    got = results(FLASH, x)
    assert (got["new_x"] == x.y[:, None]).all()
    judge(x, got)


@needs_kernels
def test_refused_by_the_plan():
    tiles = {"tile_m": 16, "tile_n": 24, "cluster": 8, "processors": 8}
    good = {"tokens": 3, "hidden": 4096, "taken": 0, "iterations": 20}
    native.plan_hyper_connection(good, 1e-6, 1e-6, **tiles)
    for changed in ({"tokens": 0}, {"taken": 2}, {"iterations": 0}):
        with pytest.raises(ValueError, match=r"wanted|is 0"):
            native.plan_hyper_connection(good | changed, 1e-6, 1e-6, **tiles)


def fault(name, raises, says, edit=None, is_taken=False, given=3, **parameters):
    key = FLASH.key if FLASH else ""
    return PlantedFault(name, key, raises, says, edit, parameters=parameters, case=(given, is_taken))


def without_lower_parts(ptx):
    """fn's lower bits are 0: the masked bits of a difference, and not those that were loaded."""
    differences = set(re.findall(r"mov\.b32 (%r\d+), %f?r?\d+;", ptx))
    pattern = re.compile(r"and\.b32\s+(%r\d+), (%r\d+), -8192;")
    return pattern.sub(lambda m: f"mov.b32 {m[1]}, 0;" if m[2] in differences else m[0], ptx)


def exchanged_rows(ptx):
    """The second and the third row of the first mix that is loaded, 16 bytes each, change places."""
    pattern = r"(?s)(add\.s64\s+%rd\d+, (%rd\d+), )16;(.*?add\.s64\s+%rd\d+, \2, )32;"
    return re.sub(pattern, r"\g<1>32;\g<3>16;", ptx, count=1)


def without_waits(which):
    """Drops the waits for a barrier: first come those of fn, then of sums, of squares, and of what has been read."""
    return lambda ptx: edits.drop_waits(ptx, {edits.barriers(ptx)[which]})


def without(pattern, which=slice(None)):
    return lambda text: edits.drop(text, pattern, which)


CLUSTER, BARRIER = r"barrier\.cluster\.(arrive|wait)", r"bar(rier)?\.sync\s+1,"
FAULTS = [
    fault("fn in 11 bits", Wrong, "new_pre", without_lower_parts),
    fault("a CTA sends before another one has barriers", Misuse, "initialisation", without(CLUSTER)),
    fault("nobody waits for fn", (Race, Undefined), "reads", without_waits(0)),
    fault("nobody waits for sums of other CTAs", (Race, Undefined), "reads", without_waits(4)),
    fault("nobody waits for squares of other CTAs", (Race, Undefined), "reads|ends while", without_waits(5)),
    fault("sums are sent before others are read", Race, "overwrites", without_waits(6), given=33),
    fault("nobody waits for sums of other warps", (Race, Undefined), "reads", without(BARRIER, slice(0, 1))),
    fault("the new pre in place of the one that is given", Wrong, "z:", is_taken=True, has_taken=lambda n: 0),
    fault("an iteration too few", Wrong, "new_mix", iterations=lambda n: n - 1),
    fault("a token too few", Wrong, "new_x", tokens=lambda n: n - 1),
    fault("rows of a mix exchanged", Wrong, "new_x", exchanged_rows),
    fault("eps of the norm for Sinkhorn's", Wrong, "new_pre", hc_eps=lambda x: x / 10),
]


@pytest.mark.faults
@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_a_fault_is_found(planted):
    if FLASH is None:
        pytest.skip("not built")
    x = Problem.of(planted.case[0], FLASH.hidden, planted.case[1])

    def run(planted, seed):
        judge(x, results(FLASH, x, seed=seed, edit=planted.planted_in, **planted.parameters))

    found = planted.findings(run, (0,))
    assert all(planted.symptoms_of(error) for error in found), found
