"""The router's kernels, interpreted: right answers, ties, numbers that are not finite, bits, and planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.moe_router import Problem, judge, route
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Race, Undefined
from kernels.abi import ANY, MoeRouter

BUILT = {v.key: v for v in native.built(MoeRouter)}
FEW, MANY = "moe_router_sm_90a_bfloat16_r256", "moe_router_sm_90a_bfloat16"

needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")

CASES = {
    "a token": lambda: Problem.of(1),
    "tokens that fill no tile": lambda: Problem.of(19, sigmoid=True),
    "given": lambda: Problem.of(9, is_given=True),
    "given, of a sigmoid": lambda: Problem.of(2, is_given=True, sigmoid=True),
    "parts of k of several sizes": lambda: Problem.of(2, 1088, 144, 8),
    "an expert": lambda: Problem.of(2, e=16, chosen=1),
    "all experts": lambda: Problem.of(2, e=32, chosen=32),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key", BUILT)
def test_is_right(key, case):
    x = CASES[case]()
    judge(x, *route(BUILT[key], x))


@pytest.mark.slow
@pytest.mark.parametrize("e", [256, 384, 512])
@pytest.mark.parametrize("key", BUILT)
def test_experts_of_published_models(key, e):
    x = Problem.of(66 if BUILT[key].max_rows == ANY else 17, 512, e)
    judge(x, *route(BUILT[key], x))


@needs_kernels
def test_a_token_has_the_same_bits_in_any_company():
    """Alone, in another place of a tile, in a tile of either size."""
    whole = Problem.of(70, 576)
    want = route(BUILT[FEW], whole)
    for key, rows in ((FEW, [69]), (FEW, [3, 9, 65]), (MANY, slice(None))):
        for got, wanted in zip(route(BUILT[key], whole.of_rows(rows)), want, strict=True):
            assert got.tobytes() == wanted[rows].tobytes()


@needs_kernels
def test_of_equal_scores_the_lower_number_is_first():
    x = Problem.of(3, e=160, chosen=32)
    x.gate[:] = x.gate[:, :1]
    x.bias[:] = 0
    x.bias[[150, 7, 130]] = 1
    _, chosen = route(BUILT[FEW], x)
    rest = [expert for expert in range(160) if expert not in (7, 130, 150)]
    assert (chosen == [7, 130, 150, *rest[:29]]).all()


@needs_kernels
@pytest.mark.parametrize("sigmoid", [False, True])
def test_logits_of_any_size(sigmoid):
    """From those whose exponential is nearly 0 to those that a sum with 1 does not change."""
    x = Problem.of(4, sigmoid=sigmoid)
    x = replace(x, gate=np.float32(x.gate * np.geomspace(1e-3, 12, 48)), bias=np.zeros(48, np.float32), chosen=32)
    judge(x, *route(BUILT[FEW], x))


@needs_kernels
def test_what_is_not_a_number_stays_in_its_token():
    """Its experts exist, and are chosen once; the other tokens have what they had."""
    x = Problem.of(5)
    usual = route(BUILT[FEW], x)
    x.x[2, 77] = np.nan
    weights, chosen = route(BUILT[FEW], x)
    assert np.isnan(weights[2]).all() and chosen[2].tolist() == list(range(6))
    for got, wanted in zip((weights, chosen), usual, strict=True):
        np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(wanted, 2, 0))


@needs_kernels
def test_a_score_that_is_not_a_number_is_before_all_others():
    x = Problem.of(2)
    x.gate[9, 33] = np.nan
    weights, chosen = route(BUILT[FEW], x)
    assert (chosen[:, 0] == 33).all() and np.isnan(weights).all()
    rest = replace(x, gate=np.delete(x.gate, 33, 1), bias=np.delete(x.bias, 33), chosen=5)
    order = np.argsort(-(rest.scores() + rest.bias))[:, :5]
    np.testing.assert_array_equal(chosen[:, 1:], order + (order >= 33))


@needs_kernels
def test_given_experts_that_do_not_exist_have_no_weight():
    x = Problem.of(3, is_given=True)
    usual, _ = route(BUILT[FEW], x)
    for number in (-1, 48, 2**31 - 1, -(2**31)):
        x.given[1, 2] = number
        weights, _ = route(BUILT[FEW], x)
        assert np.isnan(weights[1]).all()
        np.testing.assert_array_equal(weights[[0, 2]], usual[[0, 2]])


def test_the_launch_refuses():
    sizes = Problem.of(1).sizes
    changes = (
        ({"k": 544}, "k is 544, wanted a multiple of 64"),
        ({"k": 448}, "at least 512"),
        ({"k": 2**20}, "too large"),
        ({"experts": 40}, "e is 40, wanted a multiple of 16"),
        ({"experts": 528}, "at most 512"),
        ({"chosen": 33}, "n_chosen is 33"),
        ({"experts": 16, "chosen": 17}, "no more than e"),
        ({"rows": 0}, "b \\* s_q is 0"),
    )
    for changed, says in changes:
        with pytest.raises(ValueError, match=says):
            native.plan_moe_router(sizes | changed, 1.0, 1.0, tile_m=16)


def fault(name, raises, says, edit=None, **parameters):
    return PlantedFault(name, FEW, raises, says, edit, parameters=parameters)


def to(pattern, becomes, which=slice(None)):
    return lambda text: edits.replace(text, pattern, becomes, which)


def without(pattern, which=slice(None)):
    return lambda text: edits.drop(text, pattern, which)


WRONG = "weights are wrong|experts of row"
FAULTS = [
    fault("16 bits of the gate", Wrong, WRONG, to(r"(and\.b32\s+%r\d+, %r\d+,) -256;", lambda m: f"{m[1]} -65536;")),
    fault("8 bits of the gate beside", Wrong, WRONG, to(r" 30258;", " 29298;")),
    fault("fewer experts", Wrong, WRONG, e=lambda n: n - 16),
    fault("all of k but a unit", Wrong, WRONG, k=lambda n: n - 64),
    fault("temperature", Wrong, WRONG, unit=lambda x: 1 / x),
    fault("scale", Wrong, WRONG, scale=lambda x: x * 1.00001),
    fault("another score", Wrong, WRONG, is_sigmoid=lambda x: 1 - x),
    fault("nobody waits for x", (Race, Undefined), "reads|nobody", without(r"cp\.async\.wait_group")),
    fault("nobody waits for others' x", (Race, Undefined), "reads|nobody", without(r"bar\.sync")),
    fault("nobody waits for others' sums", (Race, Undefined), "", without(r"barrier\.cluster\.\w+", slice(0, 2))),
    fault("a CTA leaves early", Race, "", without(r"barrier\.cluster\.\w+", slice(2, 4))),
]


@pytest.mark.faults
@needs_kernels
@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_a_fault_is_found(planted):
    variant, x = BUILT[planted.kernel], Problem.of(3, 640)

    def run(planted, seed):
        judge(x, *route(variant, x, seed=seed, edit=planted.planted_in, edits=planted.parameters))

    found = planted.findings(run, (0, 1))
    assert all(planted.symptoms_of(error) for error in found), found
