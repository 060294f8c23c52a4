"""Products of few rows, interpreted: right answers, the same bits for any rows, and planted faults."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.few_rows_product import INDEX_D, Problem, judge, results, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Misuse, OutOfBounds, Race, Undefined
from jax_dsv4_fmha._definitions.packed import quantize_rows
from kernels.abi import ANY, FewRowsProduct

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
BUILT = {v.key: v for v in native.built(FewRowsProduct)}


@pytest.mark.parametrize("key", BUILT)
def test_is_right(key):
    variant = BUILT[key]
    x = Problem.typical(variant, 5 if variant.max_rows < ANY else 70, 1 if variant.norms else 2)
    judge(x, results(x))


def of(op, parts=1, max_rows=64, to_float32=False, to_fp8=False, dtype="bfloat16", weights=""):
    choices = {"dtype": dtype, "to_float32": to_float32, "parts": parts, "to_fp8": to_fp8, "weights": weights}
    choices["max_rows"] = max_rows
    found = next((v for v in BUILT.values() if v.op == op and v.choices == choices), None)
    if found is None:
        pytest.skip(f"{op} with {choices} is not built")
    return found


PRODUCT, HEADS, INDEX, TURNED = (f"few_rows_product{what}" for what in ("", "_norm_rope", "_index_query", "_of_turned"))


def with_low_rank(max_rows=64, rows=5):
    """A low-rank query in all but the last columns of a product."""
    return Problem.of(of(PRODUCT, 4, max_rows, to_float32=True), rows, 264, 328, low_columns=256)


def left_to_be_normed(max_rows=64, rows=5):
    return Problem.of(of(HEADS, 1, max_rows), rows, 256, 1024, left=True)


def without_squares():
    """An indexer's query of a query that is normed."""
    return Problem.of(of(INDEX, 2), 5, 136, 256)


def packed_with_low_rank(max_rows=64, rows=5):
    variant = of(PRODUCT, 8, max_rows, to_float32=True, weights="e4m3")
    return Problem.of(variant, rows, 1032, 328, low_columns=256)


def packed_left_to_be_normed(max_rows=64, rows=5):
    return Problem.of(of(HEADS, 1, max_rows, weights="e4m3"), rows, 256, 1024, left=True)


def packed(op, parts=1, rows=5, **choices):
    return Problem.typical(of(op, parts, **choices, weights="e4m3"), rows)


needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")


@needs_kernels
@pytest.mark.parametrize(
    "make",
    [
        with_low_rank,
        lambda rows, **how: with_low_rank(rows, 70),
        left_to_be_normed,
        lambda rows: without_squares(),
        packed_with_low_rank,
        packed_left_to_be_normed,
    ],
    ids=[
        *("with a low-rank query", "of more rows", "left to be normed", "an index query of one that is normed"),
        *("packed, with a low-rank query", "packed, left to be normed"),
    ],
)
@pytest.mark.parametrize("max_rows", [64, ANY])
def test_norms_apart(make, max_rows):
    x = make(max_rows)
    judge(x, results(x))


@needs_kernels
def test_an_index_query_is_quantized_as_a_cache_quantizes():
    """The codes of what the kernel makes in 16 bits, bit for bit, and weights times its scales."""
    x = Problem.typical(of(INDEX, 2), 5)
    plain, packed = results(x), results(replace(x, variant=of(INDEX, 2, to_fp8=True)))
    codes, scales = (np.asarray(a) for a in quantize_rows(plain["y"].reshape(5, -1, INDEX_D)))
    assert np.array_equal(packed["y"].reshape(codes.shape).view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(packed["weights"], plain["weights"] * scales)


@needs_kernels
@pytest.mark.parametrize(
    "make",
    [
        *(lambda op=op, parts=parts: Problem.typical(of(op, parts), 140) for op, parts in ((PRODUCT, 4), (TURNED, 2))),
        lambda: Problem.typical(of(HEADS), 140),
        lambda: with_low_rank(64, 140),
        lambda: left_to_be_normed(64, 140),
        lambda: Problem.typical(of(INDEX, 2), 140),
        lambda: Problem.typical(of(INDEX, 2, to_fp8=True), 140),
        lambda: packed(PRODUCT, 3, 140),
        lambda: packed(TURNED, 2, 140),
        lambda: packed(HEADS, 1, 140),
        lambda: packed_with_low_rank(64, 140),
        lambda: packed(INDEX, 2, 140, to_fp8=True),
    ],
    ids=[
        *("plain", "turned", "heads", "with a low-rank query", "left to be normed", "index query", "in 8 bits"),
        *("packed", "packed, turned", "packed, heads", "packed, with a low-rank query", "packed, in 8 bits"),
    ],
)
def test_a_row_has_the_same_bits_in_any_company(make):
    """Alone, among others, in another place, by kernels for more rows and for fewer, and in a second tile of rows."""
    whole = make()
    few = whole.variant
    more = of(**{"op": few.op, **few.choices, "max_rows": ANY})
    want = results(replace(whole, variant=more))
    companies = [(few, slice(3, 4)), (few, slice(3, 70)), (more, slice(50, 139))]
    if few.weights:
        companies.append((of(**{"op": few.op, **few.choices, "max_rows": 16}), slice(60, 79)))
    for variant, rows in companies:
        part = replace(whole, variant=variant, x=whole.x[rows], angle=whole.angle[rows])
        for name, array in results(part).items():
            assert array.tobytes() == want[name][rows].tobytes(), (variant.key, rows, name)


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


@needs_kernels
@pytest.mark.parametrize("mantissas", [1, 2], ids=["scales that are powers of two", "any scales"])
def test_every_code_of_a_packed_matrix_is_read_exactly(mantissas):
    """Each row of x chooses a row of w, of all codes but NaN, subnormal numbers among them, in blocks of many scales:
    y has its bits.
    """
    rng, rows, k, n = np.random.default_rng(0), 60, 600, 200
    x = Problem.of(of(PRODUCT, 3, weights="e4m3"), rows, k, n)
    codes = rng.permutation(np.resize(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), k * n)).reshape(1, n, k)
    scales = 2.0 ** rng.permutation(np.arange(-113, 8, 13)[:10]).reshape(1, 2, 5) * rng.uniform(1, mantissas, (1, 2, 5))
    x = x.of_codes(codes.view(E4M3), scales.astype(np.float32))
    chosen = rng.permutation(k)[:rows]
    x.x[:] = 0
    x.x[np.arange(rows), 0, chosen] = 1
    want = x.w[0, chosen] + np.zeros((), BF16)  # sums have no -0
    assert np.array_equal(run(x)[:, 0].view(np.uint16), want.view(np.uint16))
    assert len(np.unique(np.abs(codes[0][:, chosen].view(E4M3).astype(np.float32)))) == 127


@needs_kernels
@pytest.mark.parametrize("axis", [1, 2])
def test_a_scale_of_the_next_block_is_found(axis):
    """As the kernel would read it: of the next 128 columns, or of the next 128 of k. All have one exponent."""
    x = packed(PRODUCT, 3)
    x = x.of_codes(x.codes, np.frexp(x.scales)[0])
    others = x.of_codes(x.codes, np.roll(x.scales, 1, axis))
    with pytest.raises(Wrong, match="numbers are wrong"):
        judge(x, results(others))


@needs_kernels
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_not_a_number_makes_its_columns_nan(code):
    """Those of its tile, and no others."""
    x = packed(PRODUCT, 3)
    usual = run(x).astype(np.float32)
    codes = x.codes.copy()
    codes[0, 70, 300] = np.uint8(code).view(E4M3)
    y = run(replace(x, codes=codes)).astype(np.float32)
    assert np.isnan(y[..., 64:128]).all()
    np.testing.assert_array_equal(np.delete(y, slice(64, 128), 2), np.delete(usual, slice(64, 128), 2))


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
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, 0;")


def a_lane_s_neighbour_is_lost(text):
    """One step of the Hadamard transform takes another lane's numbers for its own."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+)(?:\|%p\d+)?, (%r\d+), 8,[^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, {m[2]};", slice(0, 1))


def turned_numbers_are_not_awaited(text):
    """A warpgroup multiplies numbers that the other one has not turned yet."""
    return edits.drop(text, r"bar\.sync\s+2")


def turned_without_a_fence(text):
    """A product may read what was there before the turn."""
    return edits.drop(text, r"fence\.proxy\.async")


def with_waits_left_out(which, chosen=slice(None)):
    """Nobody waits for the barriers of a ring that say that a stage is full, or empty."""

    def edit(text):
        made = edits.barriers(text)
        half = len(made) // 2
        return edits.drop_waits(text, set(made[:half] if which == "full" else made[half:]), chosen)

    return edit


def changed(pattern, to, which=slice(None)):
    return lambda text: edits.replace(text, pattern, to, which)


LOW, LEFT = "with a low-rank query", "left to be normed"
PACKED, PACKED_TURNED, LONG = "packed", "packed, turned", "packed, of more stages than there are"
PROBLEMS = {
    PACKED: lambda: packed(PRODUCT, 3),
    PACKED_TURNED: lambda: packed(TURNED, 2),
    LONG: lambda: Problem.of(of(INDEX, 2, weights="e4m3"), 5, 1664, 128),
    PRODUCT: lambda: Problem.typical(of(PRODUCT, 2), 5),
    HEADS: lambda: Problem.typical(of(HEADS), 5),
    TURNED: lambda: Problem.typical(of(TURNED, 2), 5),
    INDEX: lambda: Problem.typical(of(INDEX, 2), 5),
    LOW: with_low_rank,
    LEFT: left_to_be_normed,
}
FAULTS = [
    PlantedFault("a tile of k is left out", PRODUCT, Wrong, "974 of 1000", parameters={"k": lambda k: k - 64}),
    PlantedFault("a row is left out", PRODUCT, Wrong, "200 of 1000 .* nan", parameters={"rows": lambda n: n - 1}),
    PlantedFault("eps", HEADS, Wrong, "589 of 5120", parameters={"eps": lambda x: 4 * x}),
    PlantedFault("a part of another CTA", PRODUCT, Wrong, "1000 of 1000", another_part),
    PlantedFault("squares of half of the columns", HEADS, Wrong, "5075 of 5120", one_mean_too_few),
    PlantedFault(
        "a low-rank query of fewer columns", LOW, Wrong, "of low", parameters={"low_columns": lambda n: n - 128}
    ),
    PlantedFault("a low-rank query of half of the squares", LOW, Wrong, "of squares", one_mean_too_few),
    PlantedFault("a tile of squares is left out", LEFT, Wrong, "of 5120", parameters={"square_tiles": lambda n: n - 1}),
    PlantedFault("nobody norms", INDEX, Wrong, "of 1280", parameters={"square_tiles": lambda n: 0}),
    PlantedFault("eps of the query", INDEX, Wrong, "of 1280", parameters={"eps": lambda x: 64 * x}),
    PlantedFault("another head's weight", INDEX, Wrong, "of weights", parameters={"column": lambda n: n + 1}),
    PlantedFault("another row's weight", INDEX, Wrong, "of weights", parameters={"columns": lambda n: n - 1}),
    PlantedFault("scale", INDEX, Wrong, "10 of 10 .* of weights", parameters={"scale": lambda x: 2 * x}),
    PlantedFault("a step of the transform", INDEX, Wrong, "of 1280", a_lane_s_neighbour_is_lost),
    PlantedFault("consumers meet alone", PRODUCT, Race, "overwrites SMEM .* the read by wgmma", consumers_meet_alone),
    PlantedFault(
        "the first meeting is left out", PRODUCT, Race, "nothing tells that it has begun", the_first_meeting_is_left_out
    ),
    PlantedFault(
        "nobody waits for readers of sums", INDEX, Race, "ends while nothing orders", the_last_meeting_is_left_out
    ),
    PlantedFault(
        "turned numbers are not awaited", TURNED, Race, "reads SMEM .* nothing orders", turned_numbers_are_not_awaited
    ),
    PlantedFault("turned without a fence", TURNED, Race, r"no fence\.proxy\.async after", turned_without_a_fence),
    PlantedFault(
        "a scale of the next stage",
        *(PACKED, Undefined, "reads SMEM .* nobody wrote"),
        changed(r"(add\.s32\s+%r\d+, %r\d+, )4096;", lambda m: f"{m[1]}20544;"),
    ),
    PlantedFault(
        "two codes exchanged",
        *(PACKED, Wrong, "numbers are wrong"),
        changed(r"(ld\.shared\.v4\.b32 \{)(%r\d+), (%r\d+)", lambda m: f"{m[1]}{m[3]}, {m[2]}", slice(1, 2)),
    ),
    PlantedFault(
        *("bits of a scale below its exponent are lost", PACKED, Wrong, "numbers are wrong"), changed(*edits.LOST_BITS)
    ),
    PlantedFault("a sign is lost", PACKED, Wrong, "numbers are wrong", changed(" -2131722000;", " 15728880;")),
    PlantedFault("a bit of the code beside", PACKED, Wrong, "numbers are wrong", changed(" 117442304;", " 251662080;")),
    PlantedFault(
        "another place in a line is read",
        *(PACKED, (Race, Undefined, Wrong), "reads|numbers are wrong"),
        changed(r"(and\.b32\s+%r\d+, %r\d+, )96;", lambda m: f"{m[1]}64;", slice(0, 1)),
    ),
    PlantedFault("codes of the slab after", PACKED, OutOfBounds, "bulk copy", parameters={"w": lambda at: at + 4112}),
    PlantedFault("packed: a tile of k is left out", PACKED, Wrong, "numbers", parameters={"k": lambda k: k - 128}),
    PlantedFault(
        "sums are read while products run",
        *(PACKED, Race, "register"),
        lambda text: edits.drop(text, r"wgmma\.wait_group\.sync\.aligned\s+0"),
    ),
    PlantedFault("nobody waits for a packed stage", PACKED, (Race, Undefined), "reads", with_waits_left_out("full")),
    PlantedFault(
        "a packed stage is filled while it is read",
        LONG,
        (Race, Misuse),
        "writes|an arrival",
        with_waits_left_out("empty"),
    ),
    PlantedFault(
        "turned numbers are not awaited, packed", PACKED_TURNED, Race, "nothing orders", turned_numbers_are_not_awaited
    ),
    PlantedFault("consumers meet alone, packed", PACKED, Race, "overwrites|writes", consumers_meet_alone),
    PlantedFault("the last meeting is left out", PRODUCT, Race, "which has ended", the_last_meeting_is_left_out),
]


PACKED_SIZES = {"n": 136, "is_packed": 1, "tiles": 4, "slabs": 2, "slab_bytes": 4112}


@needs_kernels
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault):
    def run_with(fault, seed):
        x = PROBLEMS[fault.kernel]()
        edit = fault.planted_in if fault.edit else lambda text: text
        judge(x, results(x, seed=seed, edit=edit, edits=fault.parameters))

    fault.check(run_with)


@needs_kernels
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"n": 12}, "n is 12, wanted a multiple of 8"),
        ({"rows": 0}, "rows is 0, wanted at least 1"),
        ({"k": 200, "parts": 8}, "parts is 8, wanted at most 4, one for 64 of k"),
        ({"takes_heads": 1}, "k is 64, wanted heads of 512"),
        ({"low_columns": 8}, "low_columns is 8, wanted a multiple of 128, at most n = 16"),
        ({"n": 256, "low_columns": 256, "square_tiles": 1}, "n_squares is 1, wanted one for 128 of 256"),
        ({"n": 256, "low_columns": 128, "square_tiles": 1, "groups": 2}, "groups is 2, wanted 1 with a low-rank query"),
        ({"makes_heads": 1, "k": 4224, "square_tiles": 33}, "n_squares is 33, the limit is 32"),
        ({"makes_heads": 1, "square_tiles": 1}, "n_squares is 1, wanted one for 128 of 64"),
        (PACKED_SIZES | {"tiles": 3}, "tiles is 3, wanted 4"),
        (PACKED_SIZES | {"slabs": 4}, "slabs is 4, wanted 2"),
        (PACKED_SIZES | {"slab_bytes": 4096}, "slab_bytes is 4096, wanted 4112"),
        (PACKED_SIZES | {"parts": 2}, "parts is 2, wanted at most 1, one for 128 of k"),
        ({"indexes": 1, "n": 256, "columns": 9, "column": 8}, "column is 8, wanted one with 2 of 9 from there on"),
    ],
)
def test_the_launch_refuses(sizes, says):
    shape = {"rows": 3, "groups": 1, "k": 64, "n": 16, "type": native.TYPES["bfloat16"]} | sizes
    with pytest.raises(ValueError, match=says):
        native.plan_few_rows_product(shape, 1.0, tile_m=64, tile_n=128, cluster=1)
