"""The backward kernels for K and V apart in the interpreter: right gradients, and planted faults.

The interpreter must find each fault by a symptom that only this fault has.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from interpreter import edits, hardware
from interpreter.faults import PlantedFault
from interpreter.kernels import gradients, mha_backward, native
from interpreter.kernels.launch import Kernel
from interpreter.machine.hazards import Deadlock, Misuse, Race, Undefined
from kernels.abi import MhaBackward

BUILT = native.built(MhaBackward)
ALL_KEYS = 1 << 30  # a width
SHAPES: dict[str, dict[str, int | None]] = {
    # several heads of keys, boxes that fill no tile of rows; the last tile of keys is not whole
    "groups": {"b": 1, "s_q": 18, "s_kv": 150, "h_q": 14, "h_kv": 2, "width": ALL_KEYS},
    # a window, two batch entries, tiles of rows that see nothing of a tile of keys
    "window": {"b": 2, "s_q": 40, "s_kv": 150, "h_q": 4, "width": 20},
    # spans in no order
    "random": {"b": 1, "s_q": 70, "s_kv": 140, "h_q": 2, "h_kv": 2, "width": None},
    # more tiles of rows than stages
    "turns": {"b": 1, "s_q": 50, "s_kv": 40, "h_q": 8, "width": ALL_KEYS},
    # less than a tile of anything
    "few": {"b": 1, "s_q": 3, "s_kv": 3, "h_q": 5, "width": ALL_KEYS},
}
PAIR, ONE = ("mha_dkdv", "mha_dq"), ("mha_dqdkdv",)
RUNS = [
    *(("bfloat16", d, case, False, PAIR) for d in (64, 128, 256, 512) for case in ("groups", "window")),
    *(("bfloat16", d, case, False, PAIR) for d in (64, 512) for case in ("random", "few")),
    *(("bfloat16", d, "few", True, PAIR) for d in (128, 256)),
    ("bfloat16", 128, "groups", False, ONE),
    *(("bfloat16", 64, case, shared_kv, ONE) for case, shared_kv in (("window", False), ("random", True))),
    *(("float16", d, "few", d == 256, PAIR) for d in (64, 128, 256, 512)),  # up to conversions it is the same code
    *(("float16", d, "random", d == 64, ONE) for d in (64, 128)),
]


@functools.cache
def kernels(d: int, dtype: str, ops: tuple[str, ...] = PAIR) -> dict[str, Kernel]:
    found = {op: f"{op}_sm_90a_d{d}_{dtype}" for op in ops}
    if found[ops[0]] not in [v.key for v in BUILT]:
        pytest.skip(f"{found[ops[0]]} is not built")
    return {op: Kernel.of(native.variant_of(key)) for op, key in (found | {"tile_spans": "tile_spans_sm_90a"}).items()}


@functools.cache
def operands(d: int, dtype: str, case: str, shared_kv: bool = False) -> gradients.Operands:
    op = "mla_span_fwd" if shared_kv else "mha_fwd"
    variant = dataclasses.replace(native.variant_of(f"mha_fwd_sm_90a_d{d}_{dtype}"), op=op)
    return gradients.operands(variant, **SHAPES[case])


def test_every_kernel_is_among_them():
    assert {(v.op, v.d) for v in BUILT} <= {(op, d) for _, d, *_, ops in RUNS for op in ops}


@pytest.mark.parametrize(
    ("dtype", "d", "case", "shared_kv", "ops"),
    [pytest.param(*run, marks=pytest.mark.rest if run[0] == "float16" else []) for run in RUNS],
)
def test_is_right(dtype, d, case, shared_kv, ops):
    found, x = kernels(d, dtype, ops), operands(d, dtype, case, shared_kv)
    got = mha_backward.run(found, x, d**-0.5, seed=d)
    gradients.assert_right(got, x, d**-0.5)


def test_is_the_same_bits_in_any_order():
    found, x = kernels(64, "bfloat16"), operands(64, "bfloat16", "window")
    first, second = (mha_backward.run(found, x, 0.125, seed=seed) for seed in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.parametrize("ops", [PAIR, ONE], ids=["pair", "one"])
def test_agrees_with_hardware(ops):
    """Sums within a product have another order, and the chip rounds exp2 in its own way."""
    run = hardware.RUNS[f"{'mha_bwd' if ops is PAIR else ops[0]}_sm_90a_d64_bfloat16"]
    x = run.operands()
    got = mha_backward.run(kernels(64, "bfloat16", ops), x, 0.125)
    for g, want in zip(run.kept(got), hardware.recorded(run, x).results, strict=True):
        assert np.sum((g - want) ** 2) <= 1e-6 * np.sum(want**2)


# ---- faults


def barriers(stages: int) -> list[str]:
    """Those of the kernels whose CTAs own keys."""
    each = [f"{name}{stage}" for name in ("landed", "published", "empty") for stage in range(stages)]
    return ["keys", *each, "p_full", "p_empty"]


BARRIERS = barriers(4)
ALL_BARRIERS = [*barriers(3), *(f"{name}{buffer}" for name in ("ds_full", "ds_empty") for buffer in range(2))]
ROW_BARRIERS = [
    f"{name}{stage}"
    for name in ("rows_full", "rows_empty", "k_landed", "k_full", "k_empty", "v_full", "v_empty")
    for stage in range(2)
]


DKDV, DQ, DQDKDV = (f"{op}_sm_90a_d64_bfloat16" for op in ("mha_dkdv", "mha_dq", "mha_dqdkdv"))
DQDKDV_D128, TILE_SPANS = "mha_dqdkdv_sm_90a_d128_bfloat16", "tile_spans_sm_90a"


def places(text: str, names: list[str]) -> dict[str, int]:
    """Where the mbarriers with these names are."""
    return dict(zip(names, edits.barriers(text), strict=True))


def without_waiting(*names: str, of: list[str] = BARRIERS, which: slice = slice(None)) -> Callable[[str], str]:
    """Some of the waits are dropped; all stages have those of the first."""
    return lambda text: edits.drop_waits(text, {places(text, of)[name] for name in names}, which)


def before_it_is_cleared(text: str) -> str:
    """Consumers wait until K has landed."""
    at = places(text, ROW_BARRIERS)
    return edits.move_waits(text, at["k_full0"], at["k_landed0"])


def seen_too_little(text: str) -> str:
    """The least stop of a tile of rows is taken for its greatest."""
    return edits.replace(text, r"redux\.sync\.max\.s32", "redux.sync.min.s32")


FAULTS = [
    PlantedFault(
        "products read K before it landed",
        DKDV,
        Race,
        r"wgmma.*reads SMEM.*orders this and the write by tma of CTA \d warp 0 \(line \d+: cp\.async\.bulk\.tensor\.4d",
        without_waiting("keys"),
        also=((Race, r"cp\.async\.bulk\.tensor\.4d.*overwrites SMEM.*orders this and the read by wgmma"),),
        seeds=(0, 3),
    ),
    PlantedFault(
        "products read Q before it landed",
        DKDV,
        Undefined,
        r"wgmma.*reads SMEM of CTA \d bytes \d+\.\.\d+, which nobody wrote",
        without_waiting("landed0", which=slice(1, None)),
        also=(
            (
                Race,
                r"wgmma.*reads SMEM of CTA.*orders this and the write by tma of CTA \d warp 0 "
                r"\(line \d+: cp\.async\.bulk\.tensor\.5d",
            ),
        ),
        seeds=(0, 3),
    ),
    PlantedFault(
        "rows of Q are zeroed before it landed",
        DKDV,
        Race,
        r"cp\.async\.bulk\.tensor\.5d.*overwrites SMEM.*orders this and the write by CTA \d warp [1-3] "
        r"\(line \d+: st\.shared\.v4\.b32 \[%r\d+\], \{0, 0, 0, 0\}",
        without_waiting("landed0", which=slice(1)),
        also=(
            (
                Race,
                r"st\.shared\.v4\.b32 \[%r\d+\], \{0, 0, 0, 0\}.*overwrites SMEM.*orders this and the write by tma of "
                r"CTA \d warp 0 \(line \d+: cp\.async\.bulk\.tensor\.5d",
            ),
        ),
        seeds=(0, 7),
    ),
    PlantedFault(
        "lse is read before it is there",
        DKDV,
        Race,
        r"ld\.shared\.b32.*reads SMEM.*orders this and the write by CTA \d warp [1-3] \(line \d+: st\.shared\.b32",
        without_waiting("published0"),
        also=((Undefined, r"ld\.shared\.b32.*reads SMEM.*, which nobody wrote"),),
        seeds=(0, 3),
    ),
    PlantedFault(
        "Q comes in while products read the one before",
        DKDV,
        Race,
        r"cp\.async\.bulk\.tensor\.5d.*overwrites SMEM.*orders this and the read by wgmma of warp",
        lambda text: edits.drop(text, r"wgmma\.wait_group\.sync\.aligned\s+0", slice(-1, None)),
        case="turns",
        also=((Race, r"wgmma.*reads SMEM bytes.*the write by tma of warp 0 \(line \d+: cp\.async\.bulk\.tensor\.5d"),),
        seeds=(0, 4),
    ),
    PlantedFault(
        "Q comes in before the one before has",
        DKDV,
        Misuse,
        r"mbarrier\.arrive\.expect_tx.*an arrival too many: mbarrier .* 0 of 1 arrivals pending, \d+ transaction bytes",
        without_waiting("empty0", which=slice(1)),
        case="turns",
        also=(
            (
                Race,
                r"cp\.async\.bulk\.tensor\.5d.*overwrites SMEM.*the write by tma of warp 0 "
                r"\(line \d+: cp\.async\.bulk\.tensor\.5d",
            ),
        ),
        seeds=(0, 5),
    ),
    PlantedFault(
        "a row warp publishes a tile where another still publishes the one before",
        DKDV,
        Race,
        r"st\.shared\.b32.*overwrites SMEM.*orders this and the write by warp [1-3] \(line \d+: st\.shared\.b32",
        without_waiting("empty0", which=slice(1, None)),
        case="turns",
    ),
    PlantedFault(
        "a row that sees nothing is not zeroed",
        DKDV,
        AssertionError,
        r"^dk: \d+ of \d+ wrong, first at .*: nan",
        lambda text: edits.drop(text, r"st\.shared\.v4\.b32\s+\[%r\d+\], \{0, 0, 0, 0\}"),
    ),
    PlantedFault(
        "a tile of rows is not visited",
        TILE_SPANS,
        AssertionError,
        r"^dk: \d+ of \d+ wrong, first at \(0, 0, 0, 0\): 0\.0, not ",
        seen_too_little,
        case="random",
    ),
    PlantedFault(
        "nobody says that a stage is free",
        DKDV,
        Deadlock,
        r"warp 0 at line \d+ waits for parity 0: mbarrier [^\n]*\(count 256, [^\n]* 256 of 256 arrivals pending"
        r".*warp 4-11 at line \d+ wait for parity 1: mbarrier [^\n]*\(count 1, ",
        lambda text: edits.drop(text, r"mbarrier\.arrive\.shared\.b64", slice(-1, None)),
        case="turns",
    ),
    PlantedFault(
        "a row warp does not say that it has published",
        DKDV,
        Deadlock,
        r"warp 4-11 at line \d+ wait for parity 0: mbarrier [^\n]*\(count 32, [^\n]* 32 of 32 arrivals pending",
        lambda text: edits.drop(text, r"mbarrier\.arrive\.shared\.b64", slice(0, 1)),
        case="turns",
    ),
    PlantedFault(
        "a warpgroup takes the flags of the other's keys",
        DKDV,
        AssertionError,
        r"^dk: \d+ of \d+ wrong, first at \(0, 91, 0, 0\): 0\.0, ",
        lambda text: edits.replace(
            text, r"shr\.s32\s+(%r\d+), (%r\d+), %r\d+;", lambda found: f"mov.b32 {found[1]}, {found[2]};"
        ),
    ),
    PlantedFault(
        "products read K before it is cleared",
        DQ,
        Race,
        r"wgmma.*reads SMEM.*orders this and the write by CTA \d warp [1-3] \(line \d+: st\.shared\.v4\.b32",
        before_it_is_cleared,
    ),
    PlantedFault(
        "dS is multiplied before both warpgroups have left theirs",
        DQDKDV,
        Race,
        r"wgmma.*reads SMEM.*orders this and the write by warp \d+ \(line \d+: stmatrix",
        without_waiting("ds_full0", of=ALL_BARRIERS, which=slice(1, None)),
        case="turns",
    ),
    PlantedFault(
        "dS is left where products still read the one before",
        DQDKDV_D128,
        Race,
        r"stmatrix.*overwrites SMEM.*nothing orders this and the read by wgmma",
        without_waiting("ds_empty0", of=ALL_BARRIERS),
        case="turns",
    ),
    PlantedFault(
        "warps ask for more registers than a CTA has",
        DQDKDV,
        Misuse,
        r"the warps of a CTA ask for 65536 registers, it was launched with 64512",
        lambda text: edits.replace(
            text, r"setmaxnreg\.dec\.sync\.aligned\.u32\s+24;", "setmaxnreg.dec.sync.aligned.u32 32;"
        ),
    ),
    PlantedFault(
        "keys that nobody loads are not zeroed",
        DQDKDV,
        AssertionError,
        r"^dq: \d+ of \d+ wrong, first at .*: nan",
        lambda text: edits.replace(
            text, r"redux\.sync\.or\.b32\s+(%r\d+), %r\d+, %r\d+;", lambda found: f"mov.b32 {found[1]}, -1;"
        ),
    ),
]


def run_with(fault, seed):
    variant = native.variant_of(fault.kernel)
    d, ops = getattr(variant, "d", 64), ONE if variant.op in ONE else PAIR
    found, x = dict(kernels(d, "bfloat16", ops)), operands(d, "bfloat16", fault.case or "window")
    kernel = found[variant.op]
    found[variant.op] = dataclasses.replace(kernel, ptx=fault.planted_in(kernel.ptx))
    gradients.assert_right(mha_backward.run(found, x, d**-0.5, seed=seed), x, d**-0.5)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_found(fault):
    """By each of its symptoms, and by nothing that another fault is found by."""
    found = fault.check(run_with, seeds=(0,))
    assert [other.name for other in FAULTS if other is not fault and any(map(other.symptoms_of, found))] == []
