"""Codes of keys for products of e4m3, interpreted: right to the bit, and planted faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import native
from interpreter.kernels.key_codes import POISON, Problem, judge, run
from interpreter.kernels.verdict import Wrong
from jax_dsv4_fmha._host.key_codes import key_codes, key_tops
from kernels.abi import KeyCodes

BUILT = {v.key: v for v in native.built(KeyCodes)}


@pytest.mark.parametrize("key", BUILT)
def test_is_right(key):
    x = Problem.of(BUILT[key])
    judge(x, run(x))


FAULTS = {  # a kernel, numbers of the launch that are changed
    "a page has another size": ("key_codes_sm_90a_bfloat16_v41_fp8", {"page_bytes": lambda n: n - 16}),
    "scales of an entry before": ("key_codes_sm_90a_bfloat16_v4_fp8", {"page": lambda n: n - 1}),
    "the last key": ("key_codes_sm_90a_bfloat16", {"n": lambda n: n - 1}),
    "entries of another page": ("key_tops_sm_90a_bfloat16_v4_fp4", {"page_bytes": lambda n: n - 368}),
}


def variant(key):
    if key not in BUILT:
        pytest.skip("not built")
    return BUILT[key]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_number_is_found(fault):
    key, changed = FAULTS[fault]
    x = Problem.of(variant(key))
    with pytest.raises(Wrong, match="greatest numbers" if "tops" in key else "codes"):
        judge(x, run(x, **changed))


IN_THE_KERNEL = {  # a kernel, an instruction that is changed
    "infinities": ("key_codes_sm_90a_bfloat16", r"2143289344", "1065353216"),
    "infinities are greatest": ("key_tops_sm_90a_bfloat16", r"2139095040", "2147483647"),
    "signs": ("key_tops_sm_90a_bfloat16", r", 2147483647;", ", -1;"),
    "a lane's second pair": ("key_codes_sm_90a_bfloat16", r", -65536;", ", 0;"),
}


@pytest.mark.parametrize("fault", IN_THE_KERNEL)
def test_a_fault_in_the_kernel_is_found(fault):
    key, pattern, to = IN_THE_KERNEL[fault]
    x = Problem.of(variant(key))
    with pytest.raises(Wrong):
        judge(x, run(x, edit=lambda text: edits.replace(text, pattern, to)))


def test_the_launch_refuses():
    shape = {"b": 2, "n": 0, "rows": 3, "page": 1, "page_bytes": 0}
    for changed, says in (({}, "n"), ({"n": 2**31}, "n"), ({"n": 9, "rows": 2**30, "page": 4}, "entries of a pool")):
        with pytest.raises(ValueError, match=says):
            native.plan_key_codes(shape | changed, tile_m=32)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("key", BUILT)
def test_kernel(key):
    """The same by custom calls, twice, into memory that other calls have used."""
    x = Problem.of(BUILT[key])
    pool, slots, units = (jnp.asarray(y) for y in (x.pool, x.slots, x.units))
    made = key_tops if x.variant.op == "key_tops" else key_codes
    others = () if made is key_tops else (units,)
    rope = {"rope": True} if x.variant.rope else {}
    (got,) = jax.jit(lambda *xs: made(*xs, packing=x.variant.packing, **rope))(pool, slots, *others)
    got = np.asarray(got)
    if made is key_codes:
        got = np.where((x.slots < 0)[..., None], POISON, got.view(np.uint8))
    judge(x, got)
