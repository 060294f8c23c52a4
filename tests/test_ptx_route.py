"""The router's kernel, interpreted: right answers, ties, numbers that are not finite, bits, and planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.route import judge, route, sizes_of
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Fault
from jax_dsv4_fmha._testing.router import Problem
from kernels.abi import Route
from tests.test_route import at_the_ends, ties, without_a_row

BUILT = {v.key: v for v in native.built(Route)}
KERNEL = BUILT.get("route_sm_90a")

needs_kernels = pytest.mark.skipif(KERNEL is None, reason="without kernels")

CASES = {
    "a token": lambda: Problem.of(1),
    "tokens that fill no CTA": lambda: Problem.of(6, 384),
    "a logit of one part, by a sigmoid": lambda: Problem.of(5, 256, 8, parts=1, is_sigmoid=True),
    "two parts": lambda: Problem.of(3, 100, 4, parts=2),
    "a table": lambda: Problem.of(9, vocabulary=50),
    "a table, by a sigmoid": lambda: Problem.of(3, 12, 12, vocabulary=5, is_sigmoid=True),
    "few experts": lambda: Problem.of(2, 4, 1),
    "all experts": lambda: Problem.of(2, 32, 32),
    "most of all": lambda: Problem.of(3, 512, 32),
    "tokens without a row, experts that do not exist": without_a_row,
}


@pytest.mark.parametrize("key", BUILT)
@pytest.mark.parametrize("case", CASES)
def test_is_right(case, key):
    x = CASES[case]()
    judge(x, *route(BUILT[key], x))


@needs_kernels
def test_of_equal_sums_the_lower_number_is_first():
    x, want = ties()
    assert (route(KERNEL, x)[1] == want).all()


@needs_kernels
@pytest.mark.parametrize("which", range(3))
def test_what_is_not_finite(which):
    """Experts exist and are chosen once, NaN before all others; other tokens have what they had."""
    x = at_the_ends()[which].of_rows(slice(12))
    judge(x, *route(KERNEL, x))


@needs_kernels
@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_logits_of_any_size(is_sigmoid):
    """From those whose exponential is nearly 0 to those that a sum with 1 does not change."""
    x = Problem.of(4, 32, 32, is_sigmoid=is_sigmoid)
    x.logits[:] *= np.geomspace(1e-4, 8, 32)
    x = replace(x, bias=np.zeros(32, np.float32))
    judge(x, *route(KERNEL, x))


@needs_kernels
@pytest.mark.parametrize("vocabulary", [0, 9])
def test_a_token_has_the_same_bits_in_any_company(vocabulary):
    whole = Problem.of(7, vocabulary=vocabulary)
    want = route(KERNEL, whole)
    for rows in ([6], [0, 3, 5, 1, 6]):
        for got, wanted in zip(route(KERNEL, whole.of_rows(rows)), want, strict=True):
            assert got.tobytes() == wanted[rows].tobytes()


def test_the_launch_refuses():
    sizes = sizes_of(Problem.of(1))
    changes = (
        ({"rows": 0}, "b \\* s_q is 0"),
        ({"parts": 4}, "n_parts is 4, .*3"),
        ({"experts": 516}, "e is 516, .*512"),
        ({"experts": 254}, "e is 254, wanted a multiple of 4"),
        ({"chosen": 33}, "n_chosen is 33, .*32"),
        ({"experts": 4}, "n_chosen is 6, .*4"),
        ({"vocabulary": 2**31}, "vocabulary is"),
    )
    for changed, says in changes:
        with pytest.raises(ValueError, match=says):
            native.plan_route(sizes | changed, 1.0, 1.0, tile_m=4)


def fault(name, x, edit=None, raises=Wrong, says="experts of token|weights are wrong|that do not exist", **parameters):
    key = "route_sm_90a"
    return pytest.param(PlantedFault(name, key, raises, says, edit, parameters=parameters), x, id=name)


def to(pattern, becomes, which=slice(None)):
    return lambda text: edits.replace(text, pattern, becomes, which)


def of_table():
    return Problem.of(5, vocabulary=9)


def with_ties():
    return ties()[0].of_rows(slice(2))


def not_finite():
    return at_the_ends()[0].of_rows(slice(12))


FAULTS = [
    fault("fewer experts", CASES["most of all"], experts=lambda n: n - 4),
    fault("more experts", CASES["a token"], experts=lambda n: n + 4, raises=(Wrong, Fault), says=""),
    fault("a part less", CASES["two parts"], parts=lambda n: n - 1),
    fault("a token less", CASES["two parts"], rows=lambda n: n - 1),
    fault("temperature", CASES["a token"], unit=lambda x: 1 / x),
    fault("scale", CASES["a token"], scale=lambda x: x * 1.0001),
    fault("another score", CASES["a token"], is_sigmoid=lambda x: 1 - x),
    fault("another score, of a table", of_table, is_sigmoid=lambda x: 1 - x),
    fault("the bias beside", CASES["most of all"], bias=lambda at: at - 16, raises=(Wrong, Fault), says=""),
    fault("a table too short", of_table, vocabulary=lambda n: n - 3),
    fault("the expert beside", of_table, table=lambda at: at + 4, raises=(Wrong, Fault), says=""),
    fault("the token beside", of_table, tokens=lambda at: at + 4, raises=(Wrong, Fault), says=""),
    fault("half of a lane's experts", CASES["tokens that fill no CTA"], to(r", 257;", ", 513;")),
    fault("of equal sums the last", with_ties, to(r"redux\.sync\.min", "redux.sync.max")),
    fault("NaN last", not_finite, to(r"selp\.b32 (%r\d+), 1, s, p;", lambda m: f"selp.b32 {m[1]}, 2, s, p;")),
    fault("NaN as numbers are", not_finite, to(r"0x7f800000; selp", "0xff800000; selp")),
    fault("e^x in place of its root", CASES["a token"], to(r"0f3F38AA3B", "0f3FB8AA3B")),
]


@pytest.mark.faults
@needs_kernels
@pytest.mark.parametrize(("planted", "x"), FAULTS)
def test_a_fault_is_found(planted, x):
    x = x()

    def run(planted, seed):
        judge(x, *route(KERNEL, x, seed=seed, edit=planted.planted_in, **planted.parameters))

    found = planted.findings(run, (0,))
    assert all(planted.symptoms_of(error) for error in found), found
