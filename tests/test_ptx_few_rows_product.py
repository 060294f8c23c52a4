"""Products of few rows, interpreted: right answers, the same bits for any rows, and planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.few_rows_product import Problem, judge, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Race
from kernels.abi import ANY, FewRowsProduct

BUILT = {v.key: v for v in native.built(FewRowsProduct)}


@pytest.mark.parametrize("key", BUILT)
def test_is_right(key):
    variant = BUILT[key]
    x = Problem.typical(variant, 5 if variant.max_rows < ANY else 70, 1 if variant.norms else 2)
    judge(x, run(x))


def of(op, parts=1, max_rows=64, to_float32=False, dtype="bfloat16"):
    choices = {"dtype": dtype, "to_float32": to_float32, "parts": parts, "max_rows": max_rows}
    return next((v for v in BUILT.values() if v.op == op and v.choices == choices), None)


PRODUCT, HEADS, TURNED = (f"few_rows_product{what}" for what in ("", "_norm_rope", "_of_turned"))
needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")


@needs_kernels
@pytest.mark.parametrize(("op", "parts"), [(PRODUCT, 4), (HEADS, 1), (TURNED, 2)])
def test_a_row_has_the_same_bits_in_any_company(op, parts):
    """Alone, among others, in another place, by the kernel for more rows, and in its second tile of rows."""
    few, more = (of(op, parts, rows) for rows in (64, ANY))
    whole = Problem.typical(few, 140)
    want = run(replace(whole, variant=more))
    for variant, rows in ((few, slice(3, 4)), (few, slice(3, 60)), (more, slice(50, 139)), (few, slice(0, 140))):
        part = Problem(variant, whole.x[rows], whole.w, whole.angle[rows])
        assert np.array_equal(run(part).view(np.uint16), want[rows].view(np.uint16)), (variant.key, rows)


@needs_kernels
@pytest.mark.parametrize(("numbers", "total"), [((2.0**24, 1, -(2.0**24), 0), 0), ((-(2.0**24), 2.0**24, 1, 0), 1)])
def test_parts_are_added_in_turn(numbers, total):
    """Sums that only this order gives: 2^24 + 1 is 2^24."""
    x = Problem.typical(of(PRODUCT, 4, to_float32=True), 1)
    x.x[:], x.w[:] = 1, 0
    tiles = -(-x.x.shape[2] // 64)
    for part, number in enumerate(numbers):
        x.w[:, 64 * (tiles * part // 4)] = number
    assert (run(x) == total).all()


def another_part(text):
    """The second part is read from the first CTA."""
    pattern = r"mov\.b32 \s*(%r\d+), 1;(?=\s*// begin inline asm\s*mapa)"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, 0;", slice(0, 1))


def the_first_meeting_is_left_out(text):
    """A warp reads sums of CTAs that may not have made them."""
    for pattern in (r"barrier\.cluster\.arrive", r"barrier\.cluster\.wait"):
        text = edits.drop(text, pattern, slice(0, 1))
    return text


def the_last_meeting_is_left_out(text):
    """A CTA ends while others read its sums."""
    for pattern in (r"barrier\.cluster\.arrive", r"barrier\.cluster\.wait"):
        text = edits.drop(text, pattern, slice(1, 2))
    return text


def consumers_meet_alone(text):
    """Sums are written where the other warpgroup still reads."""
    return edits.drop(text, r"bar\.sync\s+1", slice(0, 1))


def one_mean_too_few(text):
    """Sums of squares of other lanes are lost."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+)(?:\|%p\d+)?, (%r\d+), 16,[^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, 0;", slice(0, 1))


def turned_numbers_are_not_awaited(text):
    """A warpgroup multiplies numbers that the other one has not turned yet."""
    return edits.drop(text, r"bar\.sync\s+2")


def turned_without_a_fence(text):
    """A product may read what was there before the turn."""
    return edits.drop(text, r"fence\.proxy\.async")


FAULTS = [
    PlantedFault("a tile of k is left out", PRODUCT, Wrong, "974 of 1000", parameters={"k": lambda k: k - 64}),
    PlantedFault("a row is left out", PRODUCT, Wrong, "200 of 1000 .* nan", parameters={"rows": lambda n: n - 1}),
    PlantedFault("eps", HEADS, Wrong, "589 of 5120", parameters={"eps": lambda x: 4 * x}),
    PlantedFault("a part of another CTA", PRODUCT, Wrong, "1000 of 1000", another_part),
    PlantedFault("squares of half of the columns", HEADS, Wrong, "5075 of 5120", one_mean_too_few),
    PlantedFault("consumers meet alone", PRODUCT, Race, "overwrites SMEM .* the read by wgmma", consumers_meet_alone),
    PlantedFault(
        "the first meeting is left out", PRODUCT, Race, "nothing tells that it has begun", the_first_meeting_is_left_out
    ),
    PlantedFault(
        "turned numbers are not awaited", TURNED, Race, "reads SMEM .* nothing orders", turned_numbers_are_not_awaited
    ),
    PlantedFault("turned without a fence", TURNED, Race, r"no fence\.proxy\.async after", turned_without_a_fence),
    PlantedFault("the last meeting is left out", PRODUCT, Race, "which has ended", the_last_meeting_is_left_out),
]


@needs_kernels
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault):
    def run_with(fault, seed):
        x = Problem.typical(of(fault.kernel, 1 if fault.kernel == HEADS else 2), 5)
        edit = fault.planted_in if fault.edit else lambda text: text
        judge(x, run(x, seed=seed, edit=edit, edits=fault.parameters))

    fault.check(run_with)


@needs_kernels
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"n": 12}, "n is 12, wanted a multiple of 8"),
        ({"rows": 0}, "rows is 0, wanted at least 1"),
        ({"takes_heads": 1}, "k is 64, wanted heads of 512"),
    ],
)
def test_the_launch_refuses(sizes, says):
    shape = {
        "rows": 3,
        "groups": 1,
        "k": 64,
        "n": 16,
        "type": native.TYPES["bfloat16"],
        "makes_heads": 0,
        "takes_heads": 0,
    } | sizes
    with pytest.raises(ValueError, match=says):
        native.plan_few_rows_product(shape, 1.0, tile_m=64, tile_n=128, cluster=1)
