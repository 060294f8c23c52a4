"""The kernel of spans for few heads in the interpreter: the bits of the one that gathers, right answers, and planted
faults, each found and named. `test_ptx.py` runs it on the cases of all kernels.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention, native
from interpreter.kernels.launch import Kernel, launch
from interpreter.machine.hazards import Misuse, Race, Undefined
from kernels.abi import FEW_HEADS, PLAIN, Forward, name_of

BUILT = {v.key for v in native.built(Forward)}
SPANS, LISTS = (f"{name}_sm_90a_d512_bfloat16_h{{}}" for name in (name_of("mla_span_fwd", FEW_HEADS), "mla_sparse_fwd"))


@functools.cache
def kernel(key):
    if key not in BUILT:
        pytest.skip(f"{key} is not built")
    return Kernel.of(native.variant_of(key))


def operands(heads, h_q, **extents):
    """Later keys are larger, so that maxima rise."""
    x = attention.operands(kernel(SPANS.format(heads)).variant, h_q=h_q, **{"b": 1, **extents})
    (source,) = x.sources
    size = np.linspace(0.5, 2, source.k.shape[1])[:, None, None]
    k = (source.k.astype(np.float32) * size).astype(source.k.dtype)
    q = (x.q.astype(np.float32) / 4).astype(x.q.dtype)
    return replace(x, q=q, sources=(replace(source, k=k, v=k),))


def as_lists(x):
    """The same keys by lists, for the kernel that gathers."""
    (source,) = x.sources
    start, length = source.seen_from, np.maximum(source.seen_to - source.seen_from, 0)
    topk = max(int(length.max()), 1)
    listed = replace(source, seen_from=(start[..., None] + np.arange(topk)).astype(np.int32), seen_to=length)
    return replace(x, op="mla_sparse_fwd", mode=PLAIN, sources=(listed,), shape=x.shape._replace(topk=topk))


CALLS = {  # with keys of which no query sees any, and one query that sees nothing (`attention.operands`)
    "a window": (16, 16, {"s_q": 19, "s_kv": 200, "width": 128}),
    "a window of sequences": (16, 11, {"b": 2, "s_q": 9, "s_kv": 150, "width": 70}),
    "spans of any begin": (16, 16, {"s_q": 9, "s_kv": 300, "width": None}),
    "from the first key on": (16, 13, {"s_q": 6, "s_kv": 200, "width": 1 << 30}),
    "8 heads": (8, 7, {"s_q": 6, "s_kv": 170, "width": 128}),
    "8 heads, any begin": (8, 8, {"s_q": 5, "s_kv": 170, "width": None}),
    "32 heads": (32, 29, {"s_q": 5, "s_kv": 170, "width": 100}),
    "32 heads, any begin": (32, 32, {"s_q": 5, "s_kv": 170, "width": None}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if heads == 16 else pytest.mark.rest) for name, (heads, *_) in CALLS.items()]
)
def test_the_bits_are_those_of_lists(name):
    heads, h_q, extents = CALLS[name]
    x = operands(heads, h_q, **extents)
    run = launch(kernel(SPANS.format(heads)), x, seed=2)
    got, gathered = run.run(), launch(kernel(LISTS.format(heads)), as_lists(x)).run()
    assert all((a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(got, gathered, strict=True))
    attention.assert_right(got, x, run.scale)


@pytest.mark.parametrize("spare", [8, 9])
def test_queries_that_begin_too_far_apart_have_passes(spare):
    """Whose begins are as far apart as a place has keys to spare, and one more: the bits are those of lists."""
    x = operands(16, 16, s_q=4, s_kv=150, width=100)
    (source,) = x.sources
    start = np.array([[20, 20 + spare, 23, 21]], np.int32)
    j = np.arange(150)
    counts = ((j >= start[..., None]) & (j < start[..., None] + 90)).astype(np.int64)
    k = np.nan_to_num(source.k.astype(np.float32), nan=0.1).astype(source.k.dtype)
    x = replace(x, sources=(attention.Keys(k, k, start, start + 90, counts),))
    made = launch(kernel(SPANS.format(16)), x, processors=1, record=True)
    got, gathered = made.run(), launch(kernel(LISTS.format(16)), as_lists(x)).run()
    assert all((a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(got, gathered, strict=True))
    attention.assert_right(got, x, made.scale)


def test_what_no_query_of_a_group_sees_reaches_none():
    """Keys before the first begin and after the last end are NaN, within the rows that TMA could load, too."""
    x = operands(16, 16, s_q=4, s_kv=120, width=60)
    (source,) = x.sources
    assert np.isnan(source.k.astype(np.float32)).any()
    start = np.array([[30, 31, 32, 33]], np.int32)
    k = np.full(source.k.shape, np.nan, np.float32).astype(source.k.dtype)
    k[:, 30:84] = (0.125 * np.random.default_rng(0).standard_normal((54, 1, 512))).astype(k.dtype)
    j = np.arange(120)
    counts = ((j >= start[..., None]) & (j < start[..., None] + 51)).astype(np.int64)
    x = replace(x, sources=(attention.Keys(k, k, start, start + 51, counts),))
    run = launch(kernel(SPANS.format(16)), x)
    attention.assert_right(run.run(), x, run.scale)


# ---- planted faults

KEYS_FULL, KEYS_EMPTY, P_FULL, O_FULL = 0, 8, 22, 28
"""The first of barriers: full, and then empty, of eight pieces of keys, of Q, of what two groups see, of two places of
P, of the last factors, and of O of either adder.
"""


def bare_of_waits(first):
    return lambda text: edits.drop_waits(text, {edits.barriers(text)[first]})


def without(pattern, which=slice(None)):
    return lambda text: edits.drop(text, pattern, which)


K_BYTES = r"([1-9]\d{3}|\d{5}|1[0-3]\d{4}|14[0-7]\d{3})"
P_BYTES = r"(21[4-9]\d{3}|22\d{4}|230[0-3]\d\d)"
FACTOR_BYTES = r"(230[4-9]\d\d|231[01]\d\d)"
"""Where these lie in shared memory: 144 KiB of keys, or of O, from 1024 on, 64 of Q, then 16 of P, then factors."""

WINDOW = {"s_q": 9, "s_kv": 200, "width": 128}
MANY_TILES = {"s_q": 9, "s_kv": 300, "width": 1 << 30}  # more tiles of keys than there are places

FAULTS = [
    PlantedFault(
        "keys read before they are there",
        SPANS,
        (Race, Undefined),
        rf"wgmma[^\n]*\n\s+reads SMEM bytes {K_BYTES}\.\.",
        bare_of_waits(KEYS_FULL),
    ),
    PlantedFault(
        "keys loaded over others that are still read",
        SPANS,
        Misuse,  # before any race: the barrier of the place still counts bytes
        r"an arrival too many|\(count 1",
        bare_of_waits(KEYS_EMPTY),
        case=MANY_TILES,
    ),
    PlantedFault(
        "values handed back before they are multiplied",
        SPANS,
        Race,
        rf"tma[^\n]*\n\s+overwrites SMEM bytes {K_BYTES}\.\.[^\n]*read by wgmma",
        without(r"wgmma\.wait_group\.sync\.aligned\s+1"),
        case=MANY_TILES,
    ),
    PlantedFault(
        "weights read through another proxy",
        SPANS,
        Race,
        rf"bytes {P_BYTES}\.\.\d+ through the async proxy: no fence\.proxy\.async after",
        without(r"fence\.proxy\.async\.shared::cta", slice(-3, -2)),
    ),
    PlantedFault(
        "weights and factors read before they are there",
        SPANS,
        (Race, Undefined),
        rf"ld\.shared[^\n]*\n\s+reads SMEM bytes {FACTOR_BYTES}\.\.",
        bare_of_waits(P_FULL),
    ),
    PlantedFault(
        "O stored before all of it is there",
        SPANS,
        (Misuse, Race, Undefined),
        rf"stores what is not defined to global memory|tma[^\n]*\n\s+reads SMEM bytes {K_BYTES}\.\.",
        bare_of_waits(O_FULL),
    ),
    PlantedFault(
        "keys loaded over O that has not left",
        SPANS,
        Race,
        rf"tma[^\n]*\n\s+overwrites SMEM bytes {K_BYTES}\.\.[^\n]*read by tma",
        without(r"cp\.async\.bulk\.wait_group\.read\s+\d"),
    ),
]


def run_with(fault, seed):
    built = kernel(SPANS.format(16))
    x = operands(16, 16, **(fault.case or WINDOW))
    faulty = replace(built, ptx=fault.planted_in(built.ptx))
    attention.assert_right(launch(faulty, x, seed=seed, processors=1).run(), x, 512**-0.5)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault):
    fault.check(run_with, among=FAULTS)
