"""The lightning indexer's kernels in the interpreter: right answers, and planted faults, each found and named."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import indexer_within, native, nibbles
from interpreter.kernels.indexer import (
    TOPK,
    TOPKS,
    Call,
    Problem,
    ProblemAt,
    Run,
    choose,
    judge_at,
    judge_blocks,
    judge_choice,
    judge_scores,
    run,
    run_at,
)
from interpreter.kernels.launch import Kernel
from interpreter.kernels.verdict import Wrong
from interpreter.machine import scheduler
from interpreter.machine.hazards import Deadlock, OutOfBounds, Race, Undefined
from kernels.abi import TopK

KEYS = tuple(
    f"indexer_scores_sm_90a_heads{heads}_{dtype}"
    for heads, dtype in ((64, "bfloat16"), (64, "float8_e4m3fn"), (32, "bfloat16"), (32, "float8_e4m3fn"))
)


@functools.cache
def variant(key):
    found = native.variant_of(key)
    if key not in native.built_keys():
        pytest.skip(f"{key} is not built")
    return found


def problem(key, b=2, s_q=9, s_c=300, topk=40):
    return Problem.of(variant(key), b, s_q, s_c, topk)


@pytest.mark.parametrize("key", KEYS)
def test_scores_and_choice(key):
    x = problem(key)
    got = run(variant(key), x)
    judge_scores(x, got.scores, x.seen)
    judge_choice(got, x.start, x.stop)


def test_scores_and_choice_of_a_step():
    """Sequences with one query each: the rows of their blocks' other queries hold what nobody wrote."""
    x = problem(KEYS[0], b=3, s_q=1)
    got = run(variant(KEYS[0]), x)
    judge_scores(x, got.scores, x.seen)
    judge_choice(got, x.start, x.stop)


@pytest.mark.parametrize(
    ("key", "page", "s_c"),
    [("heads64_float8_e4m3fn", 64, 700), ("heads64_bfloat16", 8, 300), ("heads64_float8_e4m3fn", 304, 300)],
    ids=["several boxes a tile", "many", "one page"],
)
def test_scores_of_pages(key, page, s_c):
    """In any order, among pages of NaN; with a page that is not a multiple of a tile, in a table of one page."""
    key = f"indexer_scores_sm_90a_{key}_paged"
    x = Problem.of(variant(key), 2, 3, s_c, 40, page)
    got = run(variant(key), x, processors=3)
    judge_scores(x, got.scores, x.seen)
    judge_choice(got, x.start, x.stop)


BLOCKS = tuple(f"indexer_scores_{name}_blocks" for name in (
    "sm_90a_heads32_bfloat16", "sm_90a_heads32_float8_e4m3fn", "sm_90a_heads32_float8_e4m3fn_paged",
    "sm_90a_heads32_bfloat16_paged", "sm_100f_heads32_float8_e4m3fn", "sm_100f_heads32_bfloat16_paged",
))  # fmt: skip


def of_blocks(key, b=2, s_q=5, s_c=420, topk=7):
    """Queries that begin within a block, with keys before that which they do not see and that would win."""
    x = Problem.of(variant(key), b, s_q, s_c, topk, 64 if "paged" in key else 0)
    start = np.where(np.arange(s_q) % 2 == 1, np.minimum(x.stop, 11), 0).astype(np.int32) * np.ones_like(x.start)
    k = x.k.copy()
    k[:, 8:11] = (k[:, 8:11].astype(np.float32) * 8).astype(k.dtype)
    return dataclasses.replace(x, k=k, start=start)


@pytest.mark.parametrize("key", BLOCKS)
def test_greatest_blocks(key):
    """By the greatest score of each, in two orders of events; all but the newest, which nobody needs to judge."""
    x = of_blocks(key)
    for seed in range(2):
        got = run(variant(key), x, processors=3, seed=seed, wants_values=False)
        judge_blocks(x, got.scores)
        oldest, newest = x.judged
        scored = (x.stop - x.start > 8 * x.topk)[..., None]
        scores = np.where(scored, got.scores, np.float32(0))
        there = got.indices >= 0
        values = np.where(there, np.take_along_axis(scores, np.where(there, got.indices, 0), -1), -np.inf)
        judge_choice(Run(got.indices, values, scores), oldest, newest)


def judged_from_the_first_key(text):
    """Keys count that a query does not see, because they come before its first."""
    pattern = r"selp\.f32\s+(%r\d+), 0f7FC00000, (%r\d+), %p\d+;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, {m[2]};")


def half_a_block(text):
    """The greatest of four keys stands for eight."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+), (%r\d+), 16, 31, -1;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, {m[2]};")


class FromTheFirst(Problem):
    """As if a query saw what comes before its first key."""

    def __init__(self, x):
        super().__init__(*(getattr(x, field.name) for field in dataclasses.fields(x)))

    def greatest(self):
        return dataclasses.replace(Problem(*dataclasses.astuple(self)), start=np.zeros_like(self.start)).greatest()


BLOCK_FAULTS = [
    PlantedFault(
        "what a query does not see wins", BLOCKS[0], Wrong,
        r"first that of query 3 .* with entry 1: .* of queries \[1, 3\]$", judged_from_the_first_key,
        answers=FromTheFirst,
    ),
    PlantedFault("half a block", BLOCKS[0], Wrong, r"with entry 5: .* of queries \[0, 1, 2, 3, 4\]$", half_a_block),
]  # fmt: skip


def run_blocks_with(fault, seed):
    x = of_blocks(fault.kernel)
    got = run(variant(fault.kernel), x, edit_scores=fault.planted_in, seed=seed, wants_values=False)
    if fault.answers is not None:
        judge_blocks(fault.answers(x), got.scores)
    judge_blocks(x, got.scores)


@pytest.mark.parametrize("fault", BLOCK_FAULTS, ids=str)
def test_fault_of_blocks(fault):
    fault.check(run_blocks_with)


def page_of_another(text):
    """Every page is its neighbour."""
    pattern = r"ld\.global\.b32\s+(%r\d+), (\[%rd\d+\]);"
    return edits.replace(text, pattern, lambda m: f"{m[0]} xor.b32 {m[1]}, {m[1]}, 1;", slice(2, 3))


def run_with_pages(fault, seed):
    x = Problem.of(variant(fault.kernel), 2, 2, 300, 40, 64)
    got = run(variant(fault.kernel), x, edit_scores=fault.planted_in, seed=seed)
    judge_scores(x, got.scores, x.seen)


def test_fault_of_pages():
    key = "indexer_scores_sm_90a_heads64_float8_e4m3fn_paged"
    PlantedFault("pages of another", key, Wrong, "scores are wrong", page_of_another).check(run_with_pages)


OF_4_BITS = "indexer_scores_sm_90a_heads64_bfloat16_paged_index_fp4"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("heads32_bfloat16_paged", marks=pytest.mark.rest),
        "heads64_bfloat16_paged",
        "heads32_bfloat16_paged_blocks",
    ],
)
def test_keys_of_4_bits(kind):
    """Of scales on either side of 2, some 2^40 apart, and of NaN; more queries than a block has, more tiles than a ring
    has stages, and in two orders of events."""
    key = f"indexer_scores_sm_90a_{kind}_index_fp4"
    for seed, shape in enumerate(((2, 3, 300, 40, 64), (1, 6, 1800, 40, 1800))):
        call = Call.of(Kernel.of(variant(key)), Problem.of(variant(key), *shape), 3)
        scheduler.run(ran := call.scoring(seed=seed))
        call.judge(ran)


def test_scales_of_4_bits_far_apart():
    """Every key by itself: its scores are right though others are greater, down to a scale 2^100 below its greatest."""
    x = Problem.of(variant(OF_4_BITS), 1, 1, 40, 7, 40)
    k_scale = np.full((1, 40, 4), 127, np.uint8)
    k_scale[0, :4] = [(20,) * 4, (227, 127, 127, 127), (128, 129, 248, 200), (248,) * 4]
    k = nibbles.rounded(np.random.default_rng(3).standard_normal((1, 40, 128)) * 4, np.full_like(k_scale, 127))
    k = (k.reshape(1, 40, 4, 32) * np.exp2(k_scale.astype(np.float64) - 127)[..., None]).reshape(k.shape)
    q = x.q.copy()
    q[..., :32] = 0  # so that small groups count
    x = dataclasses.replace(
        x, q=(q.astype(np.float32) * 2.0**-8).astype(q.dtype), k=k.astype(x.k.dtype), k_scale=k_scale,
        start=np.zeros_like(x.start), stop=np.full_like(x.stop, 40),
    )  # fmt: skip
    got = run(variant(OF_4_BITS), x).scores[0, 0, :40].astype(np.float64)
    want = x.scores()[0, 0]
    products = np.abs(x.weights[0, 0]) @ np.maximum(x.q[0, 0].astype(np.float64) @ x.k[0].astype(np.float64).T, 0)
    assert (np.abs(got - want) <= 2e-5 * products).all() and products.min() < 1e-30 < 1e30 < products.max()


def scale_of_another_group(text):
    """A lane takes its neighbour's scale."""
    pattern = r"shr\.u32\s+(%r\d+), (%r\d+), (%r\d+);"
    return edits.replace(
        text, pattern, lambda m: f"{{ .reg .u32 o; xor.b32 o, {m[3]}, 8; shr.u32 {m[1]}, {m[2]}, o; }}"
    )


def queries_in_their_order(text):
    """Queries keep the order of their dimensions."""
    return edits.replace(text, r"st\.shared\.v4\.b32 \[%r\d+\], \{[^;]*;", "")


def half_in_their_order(text):
    """The first half of the heads does, where a CTA reorders them in turns."""
    return edits.replace(text, r"st\.shared\.v4\.b32 \[%r\d+\], \{[^;]*;", "", slice(4))


FP4_FAULTS = [
    PlantedFault("scale of another group", OF_4_BITS, Wrong, "scores are wrong", scale_of_another_group),
    PlantedFault("queries in their order", OF_4_BITS, Wrong, "scores are wrong", queries_in_their_order),
]


@pytest.mark.parametrize("fault", FP4_FAULTS, ids=str)
def test_fault_of_4_bits(fault):
    fault.check(run_with_pages)


def test_a_workspace_that_is_used_again():
    """Two of six blocks at a time, each split over CTAs; without scores as a result, queries that take all get none."""
    key = KEYS[0]
    x = problem(key)
    got = run(variant(key), x, at_a_time=2, processors=5, wants_values=False, seed=1)
    scored = (x.stop - x.start > x.topk)[..., None]
    judge_scores(x, got.scores, x.seen & scored)
    got.scores = np.where(scored, got.scores, x.scores().astype(np.float32))
    there = got.indices >= 0
    values = np.take_along_axis(got.scores, np.where(there, got.indices, 0), -1)
    got.values = np.where(there, values, -np.inf)
    judge_choice(got, x.start, x.stop)


def rows(s):
    """Rows of scores that are hard to choose from, and the spans that see them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, s)).astype(np.float32)
    x[1] = np.maximum(x[1], 0)  # half of them are 0
    x[2] = 3.5
    x[3] = 10 + x[3] * 1e-3  # a few thousand different numbers
    x[4, ::3], x[4, ::7], x[4, ::11] = np.nan, np.inf, -np.inf
    x[5] = np.where(rng.random(s) < 0.5, np.float32(0), np.float32(-0.0)) - (rng.random(s) < 0.3)
    x[6] = np.arange(s) * 1e-2 + x[6]  # the last ones are the greatest
    x[7] *= np.exp2(rng.integers(-100, 100, s)).astype(np.float32)
    start = np.array([0, 3, 2, 1, 0, 5, 0, 7, s - 20], np.int32)
    stop = np.array([s, s - 1, s, s - 2, s, s, s - 3, s, s - 3], np.int32)
    return x, start[None], stop[None]


@pytest.mark.parametrize("chooser", [v for v in native.built(TopK) if v in TOPKS.values()], ids=lambda v: v.arch)
@pytest.mark.parametrize(("s", "topk"), [(640, 33), (4500, 512)], ids=["short", "sampled"])
def test_choice(s, topk, chooser):
    scores, start, stop = rows(s)
    judge_choice(choose(scores, start, stop, topk, variant=chooser), start, stop)


# ---- faults of the scores


def weight_of_another_query(text):
    """The second of a consumer's two queries has the first's weights."""
    pattern = r"min\.s32\s+(%r\d+), (%r\d+), (%r\d+);(.*?)min\.s32\s+(%r\d+), %r\d+, \3;"
    return edits.replace(
        text, pattern, lambda m: f"min.s32 {m[1]}, {m[2]}, {m[3]};{m[4]}mov.b32 {m[5]}, {m[1]};", slice(-1, None)
    )


def no_relu(text):
    return edits.replace(text, r"max\.NaN\.f32 cut, (%r\d+), 0f00000000;", lambda m: f"mov.f32 cut, {m[1]};")


def barriers(text):
    """The offsets of q_full, q_empty, k_full and k_empty."""
    made = edits.barriers(text)
    stages = (len(made) - 4) // 2
    return {"q_full": made[:2], "q_empty": made[2:4], "k_full": made[4 : 4 + stages], "k_empty": made[4 + stages :]}


def without_waiting_for(name):
    return lambda text: edits.drop_waits(text, set(barriers(text)[name]))


def never_handed_back(text):
    """Those who have read a tile of keys do not hand it back."""
    return edits.replace(text, r"mbarrier\.arrive\.shared\.b64 [^;]*;", "", slice(1, 2))


CLASH = (  # of keys: TMA writes them, products read them
    r"wgmma[^\n]*\n\s+reads SMEM [^\n]*(nothing orders this and the write by tma|which nobody wrote)"
    r"|tma[^\n]*\n\s+overwrites SMEM [^\n]*nothing orders this and the read by wgmma"
)


class Uncut(Problem):
    """As if there were no ReLU."""

    def __init__(self, x):
        super().__init__(*(getattr(x, field.name) for field in dataclasses.fields(x)))

    def scores(self):
        products = np.einsum("bnhd,bsd->bnhs", self.q.astype(np.float64), self.k.astype(np.float64))
        return np.einsum("bnhs,bnh->bns", products, self.weights.astype(np.float64))


def others_weights(x):
    """Every second query has the weights of the one before."""
    weights = x.weights.copy()
    weights[:, 1::2] = weights[:, : weights.shape[1] // 2 * 2 : 2]
    return dataclasses.replace(x, weights=weights)


SCORE_FAULTS = [
    PlantedFault(
        "a head's weight of another query",
        KEYS[0],
        Wrong,
        r"of queries \[1, 3\]$",
        weight_of_another_query,
        answers=others_weights,
    ),
    PlantedFault("no ReLU", KEYS[0], Wrong, r"of queries \[1, 2, 3, 4\]$", no_relu, answers=Uncut),
    PlantedFault("keys read before they are there", KEYS[0], Race, CLASH, without_waiting_for("k_full")),
    PlantedFault(
        "keys never handed back", KEYS[0], Deadlock, "count 16, [^\n]* 16 of 16 arrivals pending", never_handed_back
    ),
]


def run_scores_with(fault, seed):
    """A fault's very answer is compared before it is judged."""
    x = problem(fault.kernel, b=1, s_q=5, s_c=900)
    got = run(variant(fault.kernel), x, edit_scores=fault.planted_in, seed=seed)
    if fault.answers is not None:
        judge_as_foretold(fault.answers(x), got)
    judge_scores(x, got.scores, x.seen)


def judge_as_foretold(x, got):
    try:
        judge_scores(x, got.scores, x.seen)
    except Wrong as wrong:
        raise AssertionError(f"wrong, and not in the way that was foretold: {wrong}") from None


@pytest.mark.parametrize("fault", SCORE_FAULTS, ids=str)
def test_fault_of_scores(fault):
    fault.check(run_scores_with)


# ---- faults of the choice


def past_the_last(text):
    """A query sees one entry too many."""
    pattern = r"ld\.global\.b32\s+(%r\d+), (\[%rd\d+\]);"
    return edits.replace(text, pattern, lambda m: f"{m[0]} add.s32 {m[1]}, {m[1]}, 1;", slice(1, 2))


def lost_count(text):
    """Scores that a warp has looked at are missing in the histograms."""
    return edits.replace(
        text,
        r"red\.shared\.add\.u32 (\[%r\d+\]), 1;",
        lambda m: f"{{ .reg .pred q; .reg .b32 t; mov.u32 t, %tid.x; setp.ge.u32 q, t, 32; @q {m[0]} }}",
        slice(1, None),
    )


def minus_zero(text):
    """-0 is less than 0."""
    return edits.replace(text, r"selp\.b32 x, 0, (%r\d+), p;", lambda m: f"mov.b32 x, {m[1]};")


def nan_first(text):
    """NaN is ordered by its bits."""
    return edits.replace(text, r"selp\.b32 (%r\d+), 1, s, p; }", lambda m: f"mov.b32 {m[1]}, s; }}")


def later_ties_first(text):
    """Among equal scores that a warp looks at together, later ones count as earlier."""
    pattern = r"(vote\.sync\.ballot\.b32\s+%r\d+, %p\d+, -1;\s+vote\.sync\.ballot\.b32\s+(%r\d+), %p\d+, -1;\s+)"
    pattern += r"and\.b32\s+(%r\d+), \2, (%r\d+);"
    above = "{{ .reg .b32 m; shl.b32 m, {0}, 1; or.b32 m, m, 1; not.b32 m, m; and.b32 {1}, {2}, m; }}"
    return edits.replace(text, pattern, lambda m: m[1] + above.format(m[4], m[3], m[2]), slice(None))


CHOICE_FAULTS = [  # what is said of the first row of `rows` that the fault changes
    PlantedFault(
        "an entry past the visible one",
        TOPK.key,
        Wrong,
        r"^query 1 .*: entries that it does not see: \[639\]",
        past_the_last,
    ),
    PlantedFault(
        "a tie broken the other way",
        TOPK.key,
        Wrong,
        r"^query 2 .*: of equal scores a higher entry .* of \[2, 3, 4, 5\]",
        later_ties_first,
    ),
    PlantedFault(
        "-0 is less than 0", TOPK.key, Wrong, r"^query 5 .*: of equal scores a higher entry was chosen", minus_zero
    ),
    PlantedFault(
        "NaN wins",
        TOPK.key,
        Wrong,
        r"^query 4 .*: an entry with a lesser score was chosen: \[3, 6, 9, 12\]",
        nan_first,
    ),
]


@functools.cache
def with_unseen_maxima():
    """Rows whose entries that a query does not see would be chosen."""
    scores, start, stop = rows(640)
    scores[np.arange(len(scores))[:-1], np.minimum(stop[0, :-1], 639)] = 1e38
    return scores, start, stop


def test_choice_among_unseen_maxima():
    scores, start, stop = with_unseen_maxima()
    judge_choice(choose(scores, start, stop, 21), start, stop)


def run_choice_with(fault, seed):
    scores, start, stop = with_unseen_maxima()
    judge_choice(choose(scores, start, stop, 21, edit=fault.planted_in, seed=seed), start, stop)


@pytest.mark.parametrize("fault", CHOICE_FAULTS, ids=str)
def test_fault_of_choice(fault):
    fault.check(run_choice_with)


def run_row_with(fault, seed):
    scores, start, stop = (x[..., :1, :] if x.ndim == 2 and len(x) > 1 else x[:, :1] for x in rows(640))
    choose(scores, start, stop, 33, edit=fault.planted_in, seed=seed)


def test_a_buckets_count_lost():
    """Fewer entries seem to be chosen than are: there is no room for all of them."""
    PlantedFault("a bucket's count lost", TOPK.key, OutOfBounds, "indices", lost_count).check(run_row_with)


def never_counts_a_row(text):
    """A histogram over a row in memory stays empty."""
    pattern = r"(ld\.global\.b32[^\n]*\n(?:(?!ld\.global|red\.shared)[^\n]*\n){1,20}?)[^\n]*red\.shared\.add\.u32[^;]*;"
    return edits.replace(text, pattern, lambda m: m[1])


def test_a_guess_among_scores_of_like_size():
    """Thousands of scores between two powers of two beside a few that are far away: what is chosen is found among those
    that the guess collects, as if there were no histogram over the row, which equal scores need."""
    rng = np.random.default_rng(2)
    scores = (1 + 0.2 * rng.random((1, 8192))).astype(np.float32)
    scores[0, ::1000] = -(2.0 ** rng.integers(-90, 90, 9))
    start, stop = np.zeros((1, 1), np.int32), np.full((1, 1), 8192, np.int32)
    judge_choice(choose(scores, start, stop, 2047, edit=never_counts_a_row), start, stop)
    with pytest.raises((Wrong, OutOfBounds, AssertionError)):
        scores[:] = 1
        judge_choice(choose(scores, start, stop, 2047, edit=never_counts_a_row), start, stop)


# ---- scores of the keys in listed blocks


WITHIN = tuple(f"indexer_scores_within_sm_90a_{x}" for x in (
    "heads32_bfloat16", "heads32_float8_e4m3fn", "heads32_float8_e4m3fn_paged", "heads32_bfloat16_paged",
    "heads32_bfloat16_paged_index_fp4"
))  # fmt: skip


@pytest.mark.parametrize("key", WITHIN)
@pytest.mark.parametrize("case", [*indexer_within.CASES, "from the first"])
def test_scores_within_blocks(key, case):
    v = variant(key)
    x = indexer_within.Problem.case(v, case)
    if x is None and v.paged:
        pytest.skip("a block's keys are in one page")
    x = x or indexer_within.Problem.of(v, 2, 2, 200, 12, from_start=True)
    for seed in range(2):
        call = indexer_within.Call(Kernel.of(v), x)
        scheduler.run(ran := call.machine(seed=seed))
        call.judge(ran)


# ---- scores at given entries, and their gradients


AT_KEYS = (
    "at_sm_90a_heads64_bfloat16",
    "at_sm_90a_heads64_float8_e4m3fn",
    "at_bwd_sm_90a_heads64_bfloat16",
    pytest.param("at_bwd_sm_90a_heads32_bfloat16", marks=pytest.mark.rest),
)


@pytest.mark.parametrize("key", AT_KEYS)
def test_scores_at_entries(key):
    x = ProblemAt.of(variant(f"indexer_scores_{key}"), 2, 2, 90, 150)
    judge_at(x, run_at(variant(f"indexer_scores_{key}"), x, seed=1))


def never_waits_for_keys(text):
    return edits.replace(text, r"cp\.async\.wait_group\s+\d+;", "", slice(None))


def barriers_of_ds(text):
    """The barrier between the writes of dS and the product that reads it."""
    return edits.replace(text, r"bar\.sync\s+0;", "", slice(2, 3))


def other_sign(text):
    """Positive logits have no gradient, the others have one."""
    return edits.replace(
        text, r"setp\.gt\.f32(\s+%p\d+, %f?r?\d+, 0f00000000;)", lambda m: f"setp.le.f32{m[1]}", slice(None)
    )


def read_early(writer):
    return rf"wgmma[^\n]*\n\s+reads SMEM [^\n]*nothing orders this and the write by [^\n]*{re.escape(writer)}"


GRADIENT = "indexer_scores_at_bwd_sm_90a_heads64_bfloat16"
AT_FAULTS = [
    PlantedFault("keys read before they are there", GRADIENT, Race, read_early("cp.async"), never_waits_for_keys),
    PlantedFault("dS multiplied before all have written it", GRADIENT, Race, read_early("stmatrix"), barriers_of_ds),
    PlantedFault(
        "the gradient of what ReLU cut",
        GRADIENT,
        Wrong,
        r"^5703 of dq are wrong, first \[0, 0, 0, 0\]: -0\.04125",
        other_sign,
    ),
]


def run_gradient_with(fault, seed):
    v = variant(fault.kernel)
    x = ProblemAt.of(v, 1, 1, 90, 150)
    judge_at(x, run_at(v, x, edit=fault.planted_in, seed=seed))


@pytest.mark.parametrize("fault", AT_FAULTS, ids=str)
def test_fault_of_gradients(fault):
    fault.check(run_gradient_with)


def without_scales(text):
    """Zeros stand for the scales."""
    return edits.replace(text, r"(cp\.async\.ca\.shared\.global [^;]*, 4), 4;", lambda m: f"{m[1]}, 0;")


def keys_of_the_block_before(text):
    """The third copy of a thread takes the keys of the block before its own in the tile."""
    pattern = r"(shfl\.sync\.idx\.b32\s+%r\d+, %r\d+, )(%r\d+)(, 31, -1;)"
    return edits.replace(
        text, pattern, lambda m: f"{{ .reg .b32 t; sub.s32 t, {m[2]}, 1; {m[1]}t{m[3]} }}", slice(6, 8)
    )


WITHIN_FAULTS = [
    PlantedFault(
        "keys read before they are there", WITHIN[0], Undefined, r"wgmma[^\n]*\n\s+reads SMEM", never_waits_for_keys
    ),
    PlantedFault("no scales", WITHIN[1], Wrong, "batch entry 0 at place 0, entry [^\n]*: 0, wanted", without_scales),
    PlantedFault(
        "keys of another block", WITHIN[2], Wrong, "batch entry 0 at place 32, entry", keys_of_the_block_before
    ),
    PlantedFault("pages of another", WITHIN[2], Wrong, "batch entry 0 at place 0, entry", page_of_another),
    PlantedFault("keys of 4 bits read early", WITHIN[4], Undefined, r"ld\.shared", never_waits_for_keys),
    PlantedFault("scale of another group", WITHIN[4], Wrong, "scores are wrong", scale_of_another_group),
    PlantedFault("queries in their order", WITHIN[4], Wrong, "scores are wrong", queries_in_their_order),
    PlantedFault("half of the queries in their order", WITHIN[4], Wrong, "scores are wrong", half_in_their_order),
]


@pytest.mark.parametrize("fault", WITHIN_FAULTS, ids=str)
def test_fault_within_blocks(fault):
    def run_with(fault, seed):
        call = indexer_within.Call(
            Kernel.of(variant(fault.kernel)), indexer_within.Problem.case(variant(fault.kernel), "tiles")
        )
        scheduler.run(ran := call.machine(seed=seed, edit=fault.planted_in))
        call.judge(ran)

    fault.check(run_with)
