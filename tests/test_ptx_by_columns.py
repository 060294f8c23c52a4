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
from interpreter.machine import scheduler
from interpreter.machine.hazards import Misuse, Race, Undefined
from kernels.abi import RowColumns, RowScores

BUILT = {v.key: v for family in (RowScores, RowColumns) for v in native.built(family)}
COLUMNS = "row_columns_sm_90a_d512_bfloat16"
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
    ("op", "packing", "extents"),
    [
        ("csa_fwd", "", {"h_q": 70, "topk": 200, "width": 150}),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("mla_sparse_fwd", "", {"h_q": 64, "s_q": 3, "topk": 200}),
                ("dsv4_decode", "", {"h_q": 33, "topk": 130}),
                ("dsv4_decode", "v4_fp8", {"h_q": 100, "topk": 200}),
                ("dsv4_decode", "v4_fp4", {"h_q": 66, "s_kv": 70, "topk": 80}),
                ("dsv4_decode", "v41_fp4", {"h_q": 64, "s_kv": 70, "topk": 80}),
            )
        ),
    ],
)
def test_the_bits_are_those_of_one_launch(op, packing, extents):
    packed = f"_{packing}" * bool(packing)
    key = f"{op}_sm_90a_d512_bfloat16{packed}" + "_h64" * (packing != "" and extents["h_q"] <= 64)
    x = operands(key, seed=3, **extents)
    scores = kernel(f"{op}_by_columns_sm_90a_d512_bfloat16{packed}")
    got = by_columns.run(scores, kernel(COLUMNS), x)
    whole = launch(Kernel.of(native.variant_of(key)), x).run()
    assert all((a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(got, whole, strict=True))
    attention.assert_right(got, x, 512**-0.5)


@pytest.mark.slow
def test_more_tiles_of_keys_than_fit_into_shared_memory():
    """And two more than there is need for."""
    x = operands("mla_sparse_fwd_sm_90a_d512_bfloat16", s_q=2, h_q=33, topk=64 * 23 + 5)
    got = by_columns.run(kernel(KEY), kernel(COLUMNS), x, room=26)
    attention.assert_right(got, x, 512**-0.5)


# ---- planted faults


def bare_of_waits(barriers):
    """Without the waits for these: full and empty of tiles of keys, and of P."""

    def edit(text):
        starts = {"keys full": 0, "keys empty": 8, "P full": 16, "P empty": 20}
        return edits.drop_waits(text, {edits.barriers(text)[starts[barriers]]})

    return edit


def weights_unfenced(text):
    return edits.drop(text, r"fence\.proxy\.async\.shared::cta")


def groups_never_meet(text):
    return edits.drop(text, r"bar\.sync\s+1, 384")


def products_not_awaited(text):
    return edits.drop(text, r"wgmma\.wait_group\.sync\.aligned", slice(0, -1))


COLUMNS_BYTES = r"[1-5]?\d{4}"
P_BYTES = r"(6[6-9]|[78]\d|9[0-8])\d{3}"
SCORES_BYTES = r"(99[3-9]\d\d|[12]\d{5})"
"""Where these lie in shared memory: 64 KiB of columns of keys from 1024 on, then P, then scores, and then sums."""

LONG = {"s_q": 2, "h_q": 33, "topk": 64 * 17}  # more tiles of keys than there are places

FAULTS = [
    PlantedFault(
        "scores or columns of keys read before they are there",
        "row_columns",
        (Race, Undefined),
        rf"(wgmma[^\n]*\n\s+reads SMEM of CTA \d+ bytes {COLUMNS_BYTES}|"
        rf"ld\.shared\.v4[^\n]*\n\s+reads SMEM of CTA \d+ bytes {SCORES_BYTES})\.\.",
        bare_of_waits("keys full"),
    ),
    PlantedFault(
        "scores or columns of keys loaded over others that are still read",
        "row_columns",
        Misuse,  # before any race: the barrier of the place still counts bytes
        r"expect_tx[^\n]*\n\s+an arrival too many: mbarrier \+2298[89]\d|mbarrier \+229[89]\d\d \(count 1",
        bare_of_waits("keys empty"),
        case=LONG,
    ),
    PlantedFault(
        "P read through another proxy",
        "row_columns",
        Race,
        rf"bytes {P_BYTES}\.\.\d+ through the async proxy: no fence\.proxy\.async after",
        weights_unfenced,
    ),
    PlantedFault(
        "P read before it is there",
        "row_columns",
        (Race, Undefined),
        rf"wgmma[^\n]*\n\s+reads SMEM of CTA \d+ bytes {P_BYTES}\.\.\d+[^:\n]*(which nobody wrote|nothing orders)",
        bare_of_waits("P full"),
    ),
    PlantedFault(
        "P written over other weights that are still read",
        "row_columns",
        Race,
        rf"stmatrix[^\n]*\n\s+overwrites SMEM of CTA \d+ bytes {P_BYTES}\.\.",
        bare_of_waits("P empty"),
        case=LONG,
    ),
    PlantedFault(
        "a sum read before a side has written it",
        "row_columns",
        (Race, Undefined),
        r"SMEM of CTA \d+ bytes (230[4-9]\d\d)\.\.\d+[ ,][^\n]*(which nobody wrote|nothing orders)",
        groups_never_meet,
    ),
    PlantedFault(
        "o scaled under products",
        "row_columns",
        Race,
        r"register %r\d+ while the wgmma of line \d+ may still write it",
        products_not_awaited,
        case=LONG,
    ),
]


@functools.cache
def problem(**extents):
    return operands("mla_sparse_fwd_sm_90a_d512_bfloat16", **(extents or {"s_q": 2, "h_q": 33, "topk": 130}))


@functools.cache
def scored(**extents):
    scheduler.run(machine := by_columns.score(kernel(KEY), problem(**extents)))
    return machine


def run_with(fault, seed):
    columns, case = kernel(COLUMNS), fault.case or {}
    faulty = replace(columns, ptx=fault.planted_in(columns.ptx))
    scheduler.run(by_columns.add_columns(faulty, problem(**case), scored(**case), seed=seed))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault):
    fault.check(run_with, among=FAULTS)
