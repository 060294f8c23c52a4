"""The gradient of hyper-connections, interpreted: right answers, the same bits in any company, and planted faults."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.hyper_connection import KEPT, gradients
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Race, Undefined
from jax_dsv4_fmha._host import hyper_connection as raw
from jax_dsv4_fmha._ops.hyper_connection_training import joined
from jax_dsv4_fmha._testing.hyper_connection import GRADIENTS, Problem, complaints_of_gradients
from kernels.abi import HyperConnectionBackward

BUILT = {v.part: v for v in native.built(HyperConnectionBackward)}
HIDDEN = 4096

needs_kernels = pytest.mark.skipif(len(BUILT) < 2, reason="without kernels")


def made(x, **how):
    """What the kernels make, and the streams that it is the gradient at."""
    new_x = x.streams()
    return gradients(BUILT["numbers"], BUILT["streams"], x, new_x, x.cotangents(), **how), new_x


def run(x, **how):
    """The gradients by names of operands, and those streams."""
    found, new_x = made(x, **how)
    of_tokens = (jnp.asarray(found[name])[None] for name in ("dx", "dy", "dtaken", "numbers"))
    totals = jnp.asarray(x.sums(new_x)[KEPT.index("totals")].astype(np.float32))
    rest = jnp.asarray(found["shares"])[:, None], jnp.asarray(found["dnorm"])
    all_of_them = joined(jnp.asarray(new_x)[None], totals[None], jnp.asarray(x.scale), *of_tokens, *rest)
    return {name: np.asarray(a)[0] for name, a in zip(GRADIENTS, all_of_them, strict=True)}, new_x


def judge(x, **how):
    got, new_x = run(x, **how)
    if found := complaints_of_gradients(x, new_x, x.cotangents(), got):
        raise Wrong(found[0])


@needs_kernels
@pytest.mark.parametrize("is_taken", [False, True])
def test_is_right(is_taken):
    judge(Problem.of(3, HIDDEN, is_taken))


@needs_kernels
@pytest.mark.parametrize(("tokens", "walks"), [(35, 1), (35, 2), (3, 2)], ids=["3 tiles", "2 walks", "an empty walk"])
def test_many_tiles_are_right(tokens, walks):
    judge(Problem.of(tokens, HIDDEN, is_taken=True), walks=walks)


@needs_kernels
def test_a_token_has_the_same_bits_in_any_company():
    whole = Problem.of(18, HIDDEN, is_taken=True)
    of_tokens = ("x", "y", "post", "mix", "taken")
    part = replace(whole, **{name: getattr(whole, name)[11:13] for name in of_tokens})
    cotangents, new_x = whole.cotangents(), whole.streams()
    kernels = BUILT["numbers"], BUILT["streams"]
    want = gradients(*kernels, whole, new_x, cotangents)
    got = gradients(*kernels, part, new_x[11:13], tuple(a[11:13] for a in cotangents))
    for name in ("dx", "dy", "dtaken", "numbers"):
        assert got[name].tobytes() == want[name][11:13].tobytes()
    assert got["shares"].tobytes() == want["shares"][:, 11:13].tobytes()


@needs_kernels
def test_what_is_not_a_number_stays_in_its_token():
    x = Problem.of(4, HIDDEN)
    usual, _ = made(x)
    x.y[2, 7] = np.nan
    got, _ = made(x)
    for name in ("dx", "dy", "numbers"):
        assert np.isnan(got[name][2].astype(np.float32)).any()
        assert np.delete(got[name], 2, 0).tobytes() == np.delete(usual[name], 2, 0).tobytes()


@needs_kernels
def test_refused_by_the_plan():
    tiles = {"tile_m": 8, "tile_n": raw.MOST_ITERATIONS}
    good = {"tokens": 3, "hidden": 4096, "taken": 0, "iterations": raw.MOST_ITERATIONS}
    native.plan_hyper_connection_bwd(good, 0, 1e-6, 1e-6, **tiles)
    for changed in ({"tokens": 0}, {"taken": 2}, {"iterations": 0}, {"iterations": raw.MOST_ITERATIONS + 1}):
        with pytest.raises(ValueError, match=r"wanted|is 0|limit"):
            native.plan_hyper_connection_bwd(good | changed, 0, 1e-6, 1e-6, **tiles)


def test_python_has_the_kernels_numbers():
    pytest.importorskip("cutlass")
    from kernels.sm90.hyper_connection.config import MOST_ITERATIONS, PARTS

    assert (raw.PARTS, raw.MOST_ITERATIONS) == (PARTS, MOST_ITERATIONS)


def fault(part, name, raises, says, edit=None, is_taken=False, given=3, **parameters):
    key = BUILT[part].key if part in BUILT else ""
    return PlantedFault(name, key, raises, says, edit, parameters=parameters, case=(part, given, is_taken))


def without(pattern, which=slice(None)):
    return lambda text: edits.drop(text, pattern, which)


def without_lower_parts(ptx):
    """The lower parts of what products take are 0: the masked bits of differences."""
    asm = r"\s*// (?:begin|end) inline asm\s*"
    pattern = rf"(sub\.f32\s+(%\w+),[^;]*;{asm}mov\.b32 (%r\d+), \2;{asm})and\.b32\s+(%r\d+), \3, -8192;"
    return re.sub(pattern, r"\1mov.b32 \4, 0;", ptx)


FETCHED = r"cp\.async\.wait_group\s+1"
FAULTS = [
    fault("numbers", "an iteration too few", Wrong, "post:", iterations=lambda n: n - 1),
    fault("numbers", "z took the new pre", Wrong, "x:|y:", is_taken=True, has_taken=lambda n: 0),
    fault("numbers", "a token too few", Wrong, "x: 16384 of", tokens=lambda n: n - 1),
    fault("numbers", "eps of the norm for Sinkhorn's", Wrong, "post:", hc_eps=lambda x: x / 10),
    fault("streams", "nobody waits for what is fetched", (Race, Undefined), "reads", without(FETCHED)),
    fault("streams", "gradients of a token too few", Wrong, "x: 16384 of", tokens=lambda n: n - 1),
    fault("streams", "fn in 11 bits", Wrong, "post:", without_lower_parts),
    fault(
        "streams",
        "nobody waits for fn",
        (Race, Undefined),
        "reads",
        lambda ptx: edits.drop_waits(ptx, {edits.barriers(ptx)[0]}),
    ),
    fault(
        "streams",
        "nobody waits for other warps' shares",
        (Race, Undefined),
        "reads",
        without(r"bar(rier)?\.sync\s+0", slice(1, None)),
    ),
]


@pytest.mark.faults
@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_a_fault_is_found(planted):
    if len(BUILT) < 2:
        pytest.skip("not built")
    part, tokens, is_taken = planted.case
    x = Problem.of(tokens, HIDDEN, is_taken)

    def run_with(planted, seed):
        judge(x, seed=seed, edits={part: planted.planted_in}, parameters={part: planted.parameters})

    found = planted.findings(run_with, (0,))
    assert all(planted.symptoms_of(error) for error in found), found
