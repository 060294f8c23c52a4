"""The kernels of a layer's experts, interpreted: right answers, the same bits in any company, and planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.fused_moe import (
    Problem,
    judge,
    judge_sort,
    listed,
    of_large_scales,
    product,
    sizes_of,
    sort,
    typical,
)
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Fault, Misuse, Race, Undefined
from kernels.abi import FEW_ROWS, MANY_ROWS, GroupedProduct, GroupRows

BUILT = {v.key: v for v in native.built(GroupedProduct)}
SORT = next(iter(native.built(GroupRows)), None)

WEIGHTS = ("mxfp4", "e4m3", "bfloat16")

needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")


@pytest.mark.parametrize("key", BUILT)
def test_is_right(key):
    x = typical(BUILT[key])
    judge(BUILT[key], x, product(BUILT[key], x))


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("weights", "more"), [("mxfp4", 10), ("e4m3", 24)])
def test_large_scales_are_a_factor_of_the_matrix(weights, more, gated):
    variant, x = of(gated, weights=weights), of_large_scales(problem(weights, [1, 3, 2]))
    x = replace(x, scales13=x.scales13 + np.uint8(more - 10), scales2=x.scales2 + np.uint8(more))
    assert max(np.asarray(w.factor).max() for w in x.packed) > 1
    judge(variant, x, product(variant, x))


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_has_the_same_bits_in_any_company(gated, few, weights):
    """Alone, among others, and in another place of a tile."""
    variant = of(gated, few, weights)
    whole = problem(weights, [5, 12 if few else 40])
    want = dict(zip(listed(whole), product(variant, whole), strict=True))
    alone = whole.chosen.copy().ravel()
    kept = [choice for choice in listed(whole) if alone[choice] == 1][3:5]
    alone[[i for i in range(len(alone)) if i not in kept]] = -1
    part = replace(whole, chosen=alone.reshape(whole.chosen.shape))
    if gated:  # the other product's rows are given by their places
        for choice, row in zip(listed(part), product(variant, part), strict=True):
            assert row.tobytes() == want[choice].tobytes()


@needs_kernels
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_is_not_a_number_stays_in_its_row(few, weights):
    """In the gate alone, in what it lets through alone, and in all of a token; other tokens have what they had."""
    variant, x = of(True, few, weights), problem(weights, [5, 3])
    usual, token = product(variant, x), listed(x)[2] // x.chosen.shape[1]
    x.x[token, 7] = np.nan
    made = product(variant, x).astype(np.float32)
    hit = np.array([choice // x.chosen.shape[1] == token for choice in listed(x)])
    assert np.isnan(made[hit]).all() and (made[~hit] == usual[~hit].astype(np.float32)).all()
    for half in (0, 1):
        x = problem(weights, [5, 3])
        x.scales13[1, half, 1 if weights == "e4m3" else 40] = 255
        spoilt = slice(128, 256) if weights == "e4m3" else slice(40, 41)
        made = product(variant, x).astype(np.float32)
        rows = np.array([x.chosen.ravel()[choice] == 1 for choice in listed(x)])
        assert not np.isfinite(made[rows, spoilt]).any() or half == 0
        others = np.delete(np.arange(made.shape[1]), spoilt)
        assert (made[:, others] == usual.astype(np.float32)[:, others]).all()


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("weights", ["mxfp4", "e4m3", "e4m3, scales in float32"])
def test_packed_or_not_sums_have_the_same_bits(gated, few, weights):
    """All numbers of MXFP4 and FP8 are in bfloat16, too, and those of scales in float32 are rounded to it."""
    weights, *others = weights.split(", ")
    x = typical(of(gated, few, weights))
    x = x.with_float32_scales() if others else x
    one, other = (product(of(gated, few, name), x) for name in (weights, "bfloat16"))
    assert one.tobytes() == other.tobytes()


def problem(weights, rows, **sizes):
    return Problem.of(rows, fp8=weights == "e4m3", **sizes)


def of(gated, few=True, weights="mxfp4"):
    of_weights = (v for v in BUILT.values() if v.weights == weights)
    return next(v for v in of_weights if v.gated == gated and (v.max_rows == FEW_ROWS) == few)


@pytest.mark.skipif(SORT is None, reason="without kernels")
@pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("rows", [[1], [0, 0, 3], [40, 0, 130, 1, 0, 16], [700, 0, 333], [1000, 0, 1100, 3]])
def test_sort(rows, tile):
    x = Problem.of(rows)
    judge_sort(x, tile, sort(SORT, x, tile))


def test_the_launch_refuses():
    sizes = sizes_of(Problem.of([1]))
    changes = (
        ({"k": 320}, "a multiple of 256"),
        ({"experts": 2000}, "groups is 2000"),
        ({"tiles2": 3}, "tiles2 is 3, wanted 4"),
        ({"tokens": 2**30, "chosen": 4}, "b \\* s_q \\* n_chosen"),
        ({"inner": 0}, "n is 0"),
    )
    for changed, says in changes:
        with pytest.raises(ValueError, match=says):
            native.plan_grouped_product(sizes | changed, True, 1.0, tile_m=16, tile_n=64, processors=2)


FEW, MANY, FEW_FP8, MANY_FP8, FEW_OF_ROWS, MANY_OF_ROWS = (
    f"grouped_product_sm_90a_bfloat16_{weights}{what}" for weights in WEIGHTS for what in ("_gated_r16", "")
)


def fault(name, kernel, raises, says, edit=None, **parameters):
    return PlantedFault(name, kernel, raises, says, edit, parameters=parameters)


def swapped(a, b):
    """Two constants change places."""
    return edits.replacing((a, "\0"), (b, a), ("\0", b))


def without(pattern, which=slice(None)):
    return lambda text: edits.drop(text, pattern, which)


def to(pattern, becomes, which=slice(None)):
    return lambda text: edits.replace(text, pattern, becomes, which)


def ring(which):
    """The offsets of the mbarriers of a ring that say that a stage is full, or empty."""

    def offsets(text):
        made = edits.barriers(text)
        return set(made[: len(made) // 2] if which == "full" else made[len(made) // 2 :])

    return offsets


def exchanged(text):
    """Either half of a pair of scales in place of the other."""
    return edits.replace(text, r"mov\.b32 both, \{(low|high), \1\}", lambda m: f"mov.b32 both, {{{HALVES[m[1]]}}}")


def with_a_factor(x):
    """Scales of the first expert are above 2^7."""
    scales = x.scales2.copy()
    scales[0] += 24
    return replace(x, scales2=scales)


HALVES = {"low": "high, high", "high": "low, low"}


def without_waits(which, chosen=slice(None)):
    return lambda text: edits.drop_waits(text, ring(which)(text), chosen)


FAULTS = [
    fault("scales of the other 32 of k", FEW, Wrong, "channels of row", swapped(" 9220;", " 13332;")),
    fault("scales of the row of 8 after", MANY, Wrong, "channels of row", to(r" 9220;", " 8260;")),
    fault(
        "pairs exchanged in a word",
        FEW,
        Wrong,
        "channels of row",
        to(r"(shl\.b32\s+%r\d+, %r\d+), 6;", lambda m: f"{m[1]}, 3;"),
    ),
    fault("a sign of the number beside", FEW, Wrong, "channels of row", to(r" -2147450880;", " 1073758208;")),
    fault("rows of the expert after", FEW, Wrong, "channels of row", list=lambda at: at + 4),
    fault("the matrix of the expert after", FEW, Wrong, "channels of row", w=lambda at: at + 8 * 16 * 2176),
    fault("factors of the expert after", FEW, Wrong, "channels of row", factor=lambda at: at + 4),
    fault("another token", FEW, Wrong, "channels of row", per_row=lambda n: n + 1),
    fault("weights of the row after", FEW, Wrong, "channels of row", weights=lambda at: at + 4),
    fault("limits", FEW, Wrong, "channels of row", limit=lambda x: x / 2),
    fault("all of k but a stage", FEW, Wrong, "channels of row", slabs=lambda n: n - 4),
    fault("a row of x too few", MANY, (Wrong, Undefined), "channels of row|nobody wrote", k=lambda n: n - 8),
    fault("nobody waits for a stage", FEW, (Race, Undefined), "reads", without_waits("full", slice(0, 1))),
    fault("nobody waits for a stage", MANY, (Race, Undefined), "reads|nobody", without_waits("full", slice(0, 1))),
    fault("a stage is filled while it is read", FEW, (Race, Misuse), "writes|an arrival too", without_waits("empty")),
    fault(
        *("zeros are not there for bulk copies", FEW, Race, "writes"),
        to(r"fence\.proxy\.async\.shared::cta;", "", slice(0, 1)),
    ),
    fault("rows of x by another proxy", MANY, Race, "fence", to(r"fence\.proxy\.async\.shared::cta;", "")),
    fault("sums are read while products run", MANY, Race, "register", without(r"wgmma\.wait_group\.sync\.aligned\s+0")),
    *(
        fault(
            f"the scale of the next block, {key}",
            key,
            (Wrong, Race, Undefined),
            "channels of row|reads",
            to(r" 8208;", " 12320;"),
        )
        for key in (FEW_FP8, MANY_FP8)
    ),
    *(
        fault(
            f"bits of a scale below its exponent are lost, {key}", key, Wrong, "channels of row", to(*edits.LOST_BITS)
        )
        for key in (FEW_FP8, MANY_FP8)
    ),
    fault("scales of gates and of the rest exchanged", FEW_FP8, Wrong, "channels of row", exchanged),
    fault(
        *("bits of the code beside", FEW_FP8, Wrong, "channels of row"),
        to(r"(shr\.u32\s+%r\d+, %r\d+), 4;", lambda m: f"{m[1]}, 3;"),
    ),
    fault("every other sign is lost", FEW_FP8, Wrong, "channels of row", to(r" -2131722000;", f" {0x00F000F0};")),
    fault("the matrix of the expert after", MANY_FP8, Wrong, "channels of row", w=lambda at: at + 8 * 4 * 4112),
    fault("factors of the expert after", MANY_FP8, Wrong, "channels of row", factor=lambda at: at + 4),
    *(
        fault(f"nobody waits for a stage, {key}", key, (Race, Undefined), "reads|nobody", without_waits("full", one))
        for key, one in ((FEW_FP8, slice(0, 1)), (MANY_FP8, slice(0, 1)))
    ),
    *(
        fault(
            f"a stage is filled while it is read, {key}",
            key,
            (Race, Misuse),
            "writes|an arrival",
            without_waits("empty"),
        )
        for key in (FEW_FP8, MANY_FP8)
    ),
    *(
        fault(f"rows of the neighbour: each matrix begins {n} rows late", key, Wrong, "channels of row", w=late)
        for key, n, late in ((FEW_OF_ROWS, 1, lambda at: at + 2 * 1024), (MANY_OF_ROWS, 2, lambda at: at + 4 * 256))
    ),
    fault("the matrix of the neighbour", FEW_OF_ROWS, Wrong, "channels of row", w=lambda at: at + 2 * 2 * 256 * 1024),
    fault("16 of k exchanged", FEW_OF_ROWS, Wrong, "channels of row", swapped(", 32;", ", 64;")),
    *(
        fault(f"nobody waits for a stage, {key}", key, (Race, Undefined), "reads|nobody", without_waits("full", one))
        for key, one in ((FEW_OF_ROWS, slice(0, 1)), (MANY_OF_ROWS, slice(0, 1)))
    ),
    *(
        fault(f"a stage is filled while it is read, {key}", key, (Race, Misuse), "writes", without_waits("empty"))
        for key in (FEW_OF_ROWS, MANY_OF_ROWS)
    ),
]

CASES = {
    FEW: lambda: of_large_scales(Problem.of([1, 4, 2, 0], k=1024)),
    MANY: lambda: Problem.of([3, 0, 33], k=512),
    FEW_FP8: lambda: problem("e4m3", [1, 4, 2, 0], k=1024).with_float32_scales(),
    MANY_FP8: lambda: with_a_factor(problem("e4m3", [3, 33, 0], k=512)).with_float32_scales(),
    FEW_OF_ROWS: lambda: Problem.of([1, 4, 2, 0], k=1024),
    MANY_OF_ROWS: lambda: Problem.of([3, 33, 0], k=512),
}


@pytest.mark.faults
@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_a_fault_is_found(planted):
    variant = BUILT.get(planted.kernel)
    if variant is None:
        pytest.skip("not built")
    x = CASES[planted.kernel]()

    def run(planted, seed):
        judge(variant, x, product(variant, x, seed=seed, edit=planted.planted_in, **planted.parameters))

    found = planted.findings(run, (0, 1))
    assert all(planted.symptoms_of(error) for error in found), found


@pytest.mark.faults
@pytest.mark.skipif(SORT is None, reason="without kernels")
@pytest.mark.parametrize(
    ("edit", "changed", "raises"),
    [
        (to(r" 0, 1024,", " 1024, 1024,"), {}, (Race, Wrong)),
        (to(r" 0, 1024,", " 0, 0,"), {}, (Wrong, Fault)),
        (to(r"bar\.sync\s+0;", "", slice(0, 1)), {}, (Race, Undefined)),
        (to(r"bar\.sync\s+0;", "", slice(1, 2)), {}, Race),
        (to(r"bar\.sync\s+0;", "", slice(2, 3)), {}, (Race, Undefined)),
        (to(r"bar\.sync\s+0;", "", slice(3, 4)), {}, (Race, Wrong)),
        (str, {"groups": lambda n: n - 1}, Wrong),
        (str, {"tile": lambda n: n + 1}, Wrong),
        (str, {"rows": lambda n: n - 2}, (Wrong, Fault)),
    ],
    ids=[
        "rows before this CTA's",
        "rows after",
        "counts at 0",
        "all are counted",
        "sums of warps",
        "places begin",
        "a group less",
        "larger tiles",
        "rows",
    ],
)
def test_a_fault_of_the_sort_is_found(edit, changed, raises):
    x = Problem.of([600, 0, 530, 1, 20])  # of two CTAs
    with pytest.raises(raises):
        judge_sort(x, FEW_ROWS, sort(SORT, x, FEW_ROWS, edit=edit, **changed))
