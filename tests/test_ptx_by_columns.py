"""The two kernels for few queries in the interpreter: the bits of one launch over whole keys, right answers, and
planted faults, each found and named.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention, by_columns, native
from interpreter.kernels.launch import Kernel, launch
from interpreter.machine.hazards import Race, Undefined
from kernels.abi import RowColumns, RowScores

BUILT = {v.key: v for family in (RowScores, RowColumns) for v in native.built(family)}
COLUMNS = "row_columns_sm_90a_d512_{}"
KEY = "mla_sparse_fwd_by_columns_sm_90a_d512_bfloat16"


@functools.cache
def kernel(key):
    if key not in BUILT:
        pytest.skip(f"{key} is not built")
    return Kernel.of(BUILT[key])


def operands(key, **extents):
    """Of `attention.operands`, with smaller q, so that many keys of a row matter."""
    x = attention.operands(native.variant_of(key), **{"b": 1, "s_q": 2, "s_kv": 230, "s_kv1": 90, **extents})
    return replace(x, q=(x.q.astype(np.float32) / 4).astype(x.q.dtype))


@pytest.mark.parametrize(
    ("op", "dtype", "packing", "extents"),
    [
        ("csa_fwd", "bfloat16", "", {"h_q": 70, "topk": 200, "width": 150}),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("mla_sparse_fwd", "float16", "", {"h_q": 64, "s_q": 3, "topk": 200}),
                ("dsv4_decode", "bfloat16", "", {"h_q": 33, "topk": 130}),
                ("dsv4_decode", "bfloat16", "v4_fp8", {"h_q": 100, "topk": 200}),
                ("dsv4_decode", "bfloat16", "v4_fp4", {"h_q": 66, "s_kv": 70, "topk": 80}),
                ("dsv4_decode", "bfloat16", "v41_fp4", {"h_q": 64, "s_kv": 70, "topk": 80}),
            )
        ),
    ],
)
def test_the_bits_are_those_of_one_launch(op, dtype, packing, extents):
    key = (
        f"{op}_sm_90a_d512_{dtype}" + f"_{packing}" * bool(packing) + "_h64" * (packing != "" and extents["h_q"] <= 64)
    )
    x = operands(key, seed=3, **extents)
    scores = kernel(f"{op}_by_columns_sm_90a_d512_{dtype}" + f"_{packing}" * bool(packing))
    got = by_columns.run(scores, kernel(COLUMNS.format(dtype)), x)
    whole = launch(Kernel.of(native.variant_of(key)), x).run()
    assert all((a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(got, whole, strict=True))
    attention.assert_right(got, x, 512**-0.5)


@pytest.mark.slow
def test_more_tiles_of_keys_than_fit_into_shared_memory():
    """And two more than there is need for."""
    x = operands("mla_sparse_fwd_sm_90a_d512_bfloat16", s_q=2, h_q=33, topk=64 * 23 + 5)
    got = by_columns.run(kernel(KEY), kernel(COLUMNS.format("bfloat16")), x, room=26)
    attention.assert_right(got, x, 512**-0.5)


# ---- planted faults


def read_early(text):
    """All waits are dropped except for the first one, of what loads."""
    return edits.replace(text, edits.WAIT.pattern, "", slice(1, None))


def weights_unfenced(text):
    return edits.drop(text, r"fence\.proxy\.async\.shared::cta")


def sides_never_meet(text):
    return edits.drop(text, r"bar\.sync\s+1, 256")


P_BYTES = r"(6[6-9]|[78]\d|9[0-8])\d{3}"
"""Where P lies in shared memory, after 64 KiB of columns of keys from 1024 on; scores come after it, then sums."""

FAULTS = [
    PlantedFault(
        "scores or columns of keys read before they are there",
        "row_columns",
        (Race, Undefined),
        r"(wgmma[^\n]*\n\s+reads SMEM of CTA \d+ bytes [1-5]?\d{4}|"
        r"ld\.shared\.v4[^\n]*\n\s+reads SMEM of CTA \d+ bytes (99[3-9]\d\d|[12]\d{5}))\.\.",
        read_early,
    ),
    PlantedFault(
        "P read through another proxy",
        "row_columns",
        Race,
        rf"bytes {P_BYTES}\.\.\d+ through the async proxy: no fence\.proxy\.async after",
        weights_unfenced,
    ),
    PlantedFault(
        "P, or a sum, read before the other side has written it",
        "row_columns",
        (Race, Undefined),
        rf"SMEM of CTA \d+ bytes ({P_BYTES}|230[4-9]\d\d)\.\.\d+[ ,][^\n]*(which nobody wrote|nothing orders)",
        sides_never_meet,
    ),
]


@functools.cache
def problem():
    return operands("mla_sparse_fwd_sm_90a_d512_bfloat16", s_q=2, h_q=33, topk=130)


@functools.cache
def scored():
    (machine := by_columns.score(kernel(KEY), problem())).run()
    return machine


def run_with(fault, seed):
    columns = kernel(COLUMNS.format("bfloat16"))
    faulty = replace(columns, ptx=fault.planted_in(columns.ptx))
    by_columns.add_columns(faulty, problem(), scored(), seed=seed).run()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault):
    fault.check(run_with, among=FAULTS)
