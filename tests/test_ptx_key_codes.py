"""Codes of keys for products of e4m3, interpreted: right to the bit, and planted faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import native
from interpreter.kernels.key_codes import POISON, Problem, judge, run
from interpreter.kernels.verdict import Wrong
from jax_dsv4_fmha._host.key_codes import key_codes
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
    "entries of another page": ("key_codes_sm_90a_bfloat16_v4_fp4", {"page_bytes": lambda n: n - 368}),
}


def variant(key):
    if key not in BUILT:
        pytest.skip("not built")
    return BUILT[key]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(x, marks=pytest.mark.rest if key.endswith(("v41_fp8", "fp4")) else ())
        for x, (key, _) in FAULTS.items()
    ],
)
def test_a_wrong_number_is_found(fault):
    key, changed = FAULTS[fault]
    x = Problem.of(variant(key))
    with pytest.raises(Wrong):
        judge(x, run(x, **changed))


IN_THE_KERNEL = {  # a kernel, an instruction that is changed, what is wrong then
    "numbers beyond the range": ("key_codes_sm_90a_bfloat16", r"2143289344", "1065353216", "codes"),
    "infinities are greatest": ("key_codes_sm_90a_bfloat16", r"2139095040", "2147483647", "codes"),
    "signs": ("key_codes_sm_90a_bfloat16", r", 2147483647;", ", -1;", "codes"),
    "a lane's second pair": ("key_codes_sm_90a_bfloat16", r", -65536;", ", 0;", "codes"),
    "a unit twice as large": ("key_codes_sm_90a_bfloat16", r", 261, ", ", 262, ", "codes"),
    "a unit that is not the codes'": (
        "key_codes_sm_90a_bfloat16",
        r"(?<=shl\.b32)(\s+%r\d+, %r\d+), 7;",
        lambda m: f"{m[1]}, 8;",
        "units",
    ),
    "units of all sizes": ("key_codes_sm_90a_bfloat16", r", 70;", ", 1;", "codes"),
}


@pytest.mark.parametrize("fault", IN_THE_KERNEL)
def test_a_fault_in_the_kernel_is_found(fault):
    key, pattern, to, says = IN_THE_KERNEL[fault]
    x = Problem.of(variant(key))
    with pytest.raises(Wrong, match=says):
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
    """The same by custom calls."""
    x = Problem.of(BUILT[key])
    run = jax.jit(functools.partial(key_codes, packing=x.variant.packing, rope=x.variant.rope))
    codes = np.asarray(run(jnp.asarray(x.pool), jnp.asarray(x.slots))).view(np.uint8)
    judge(x, np.where((x.slots < 0)[..., None], POISON, codes))
