"""Codes of keys for products of e4m3, interpreted: right to the bit, and planted faults."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import native
from interpreter.kernels.key_codes import POISON, Made, Problem, judge, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Race
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._host.key_codes import key_codes, key_codes_again
from kernels.abi import KeyCodes

BUILT = {v.key: v for v in native.built(KeyCodes)}


@pytest.mark.parametrize("key", BUILT)
def test_is_right(key):
    x = Problem.of(BUILT[key])
    judge(x, run(x))


def test_parts_take_what_others_found():
    """In some order a part has a greater number of another one; whatever the order, its codes are what it says."""
    x = Problem.of(variant("key_codes_sm_90a_bfloat16"), n=130)
    taken = [run(x, seed=seed) for seed in range(4)]
    for made in taken:
        judge(x, made)
    own = x.tops(32)
    assert any((made.taken[0] != own[0]).any() for made in taken)
    assert (np.array([made.taken[1] for made in taken]) == 700).all()  # of other keys


FAULTS = {  # a kernel, numbers of the launch that are changed
    "a page has another size": ("key_codes_sm_90a_bfloat16_v41_fp8", {"page_bytes": lambda n: n - 16}),
    "scales of an entry before": ("key_codes_sm_90a_bfloat16_v4_fp8", {"page": lambda n: n - 1}),
    "the last key": ("key_codes_sm_90a_bfloat16", {"n": lambda n: n - 1}),
    "entries of another page": ("key_codes_again_sm_90a_bfloat16_v4_fp4", {"page_bytes": lambda n: n - 368}),
}


def variant(key):
    if key not in BUILT:
        pytest.skip("not built")
    return BUILT[key]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_number_is_found(fault):
    key, changed = FAULTS[fault]
    x = Problem.of(variant(key))
    with pytest.raises(Wrong):
        judge(x, run(x, **changed))


def of_its_own(found):
    return re.sub(r"max\.s32(.*), %r\d+;", r"mov.b32\1;", found[0])


def read_alone(found):
    return f"ld.global.b32{found[1]};"


IN_THE_KERNEL = {  # a kernel, an instruction that is changed, how it is found
    "infinities": ("key_codes_again_sm_90a_bfloat16", r"2143289344", "1065353216", (Wrong, "codes")),
    "infinities are greatest": ("key_codes_sm_90a_bfloat16", r"2139095040", "2147483647", (Wrong, "greatest")),
    "signs": ("key_codes_sm_90a_bfloat16", r", 2147483647;", ", -1;", (Wrong, "greatest")),
    "a lane's second pair": ("key_codes_again_sm_90a_bfloat16", r", -65536;", ", 0;", (Wrong, "codes")),
    "a unit twice as large": ("key_codes_again_sm_90a_bfloat16", r", 261, ", ", 262, ", (Wrong, "codes")),
    "what others had": (
        *("key_codes_sm_90a_bfloat16", r"max\.s32\s+%r\d+, %r\d+, %r\d+;(?=\s+st\.shared)", of_its_own),
        (Wrong, "what parts took"),
    ),
    "nobody learns of greater numbers": (
        *("key_codes_sm_90a_bfloat16", r"atom\.global\.max\.s32(\s+%r\d+, \[%rd\d+\]), %r\d+;", read_alone),
        (Wrong, "greatest"),
    ),
    "those in the right unit, not the others": (
        *("key_codes_again_sm_90a_bfloat16", r"setp\.eq\.b32(?=\s+%p\d+, %r\d+, %r\d+;)", "setp.ne.b32"),
        (Wrong, "codes"),
    ),
    "all tops are there": ("key_codes_sm_90a_bfloat16", r"bar\.sync\s+0;(?=.*bar\.sync)", "", (Race, "reads")),
}


@pytest.mark.parametrize("fault", IN_THE_KERNEL)
def test_a_fault_in_the_kernel_is_found(fault):
    key, pattern, to, (how, says) = IN_THE_KERNEL[fault]
    x = Problem.of(variant(key))
    with pytest.raises(how, match=says):
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
    (size,) = {v.tile_m for v in library.held() if v.key == key}
    given = [jnp.asarray(y) for y in (x.pool, x.slots, x.top.view(np.int32))]
    if x.is_again:
        taken, top = x.taken(size), x.top
        codes = jnp.full((*x.slots.shape, x.row), POISON, jnp.uint8).view(jnp.float8_e4m3fn)
        made = functools.partial(key_codes_again, packing=x.variant.packing)
        (codes,) = jax.jit(made)(*given, codes, jnp.asarray(taken.view(np.int32)))
        codes = np.asarray(codes).view(np.uint8)
    else:
        codes, *others = (
            np.asarray(y)
            for y in jax.jit(functools.partial(key_codes, packing=x.variant.packing, rope=x.variant.rope))(*given)
        )
        codes, (taken, top) = codes.view(np.uint8), (y.view(np.float32) for y in others)
        codes = np.where((x.slots < 0)[..., None], POISON, codes)
    judge(x, Made(codes, taken, top, size))
