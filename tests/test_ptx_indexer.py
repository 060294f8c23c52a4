"""The lightning indexer's kernels in the interpreter: right answers, and planted faults, each found and named."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import native
from interpreter.kernels.indexer import Problem, ProblemAt, choose, judge_at, judge_choice, judge_scores, run, run_at
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Deadlock, Fault, OutOfBounds, Race

KEYS = tuple(
    f"indexer_scores_sm_90a_heads{heads}_{dtype}"
    for heads, dtype in ((64, "bfloat16"), (64, "float8_e4m3fn"), (32, "float16"), (16, "float8_e4m3fn"))
)
SEEDS = (0, 1)


@functools.cache
def variant(key):
    if key not in {v.key for v in native.host_library.variants()}:
        pytest.skip(f"{key} is not built")
    return native.variant_of(key)


def problem(key, b=2, s_q=9, s_c=300, topk=40):
    return Problem.of(variant(key), b, s_q, s_c, topk)


@pytest.mark.parametrize("key", KEYS)
def test_scores_and_choice(key):
    x = problem(key)
    got = run(variant(key), x)
    judge_scores(x, got, x.seen)
    judge_choice(got, x.start, x.stop)


@pytest.mark.parametrize(
    ("key", "page", "s_c"),
    [("heads64_float8_e4m3fn", 64, 700), ("heads16_bfloat16", 8, 300), ("heads32_float8_e4m3fn", 304, 300)],
    ids=["several boxes a tile", "many", "one page"],
)
def test_scores_of_pages(key, page, s_c):
    """In any order, among pages of NaN; with a page that is not a multiple of a tile, in a table of one page."""
    key = f"indexer_scores_sm_90a_{key}_paged"
    x = Problem.of(variant(key), 2, 3, s_c, 40, page)
    got = run(variant(key), x, processors=3)
    judge_scores(x, got, x.seen)
    judge_choice(got, x.start, x.stop)


def page_of_another(text):
    """Every page is its neighbour."""
    pattern = r"ld\.global\.b32\s+(%r\d+), (\[%rd\d+\]);"
    return edits.replace(text, pattern, lambda m: f"{m[0]} xor.b32 {m[1]}, {m[1]}, 1;", slice(2, 3))


def test_fault_of_pages():
    key = "indexer_scores_sm_90a_heads64_float8_e4m3fn_paged"
    x = Problem.of(variant(key), 2, 2, 300, 40, 64)
    for seed in SEEDS:
        with pytest.raises(Wrong, match="scores are wrong"):
            judge_scores(x, run(variant(key), x, edit_scores=page_of_another, seed=seed), x.seen)


def test_a_workspace_that_is_used_again():
    """Two of six blocks at a time, each split over CTAs; without scores as a result, queries that take all get none."""
    key = KEYS[0]
    x = problem(key)
    got = run(variant(key), x, at_a_time=2, processors=5, wants_values=False, seed=1)
    scored = (x.stop - x.start > x.topk)[..., None]
    judge_scores(x, got, x.seen & scored)
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


@pytest.mark.parametrize(("s", "topk"), [(640, 33), (4500, 512)], ids=["short", "sampled"])
def test_choice(s, topk):
    scores, start, stop = rows(s)
    judge_choice(choose(scores, start, stop, topk), start, stop)


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


SCORE_FAULTS = {
    "a head's weight of another query": (weight_of_another_query, Wrong, r"of queries \[1, 3\]$", others_weights),
    "no ReLU": (no_relu, Wrong, r"of queries \[1, 2, 3, 4\]$", Uncut),
    "keys read before they are there": (without_waiting_for("k_full"), Race, CLASH, None),
    "keys never handed back": (never_handed_back, Deadlock, "count 16, [^\n]* 16 of 16 arrivals pending", None),
}


@pytest.mark.parametrize("name", SCORE_FAULTS)
def test_fault_of_scores(name):
    edit, fault, says, foretold = SCORE_FAULTS[name]
    key = KEYS[0]
    x = problem(key, b=1, s_q=5, s_c=900)
    for seed in SEEDS:
        with pytest.raises(Fault, match=says) as found:
            judge_scores(x, got := run(variant(key), x, edit_scores=edit, seed=seed), x.seen)
        assert type(found.value) is fault
        if foretold is not None:
            judge_scores(foretold(x), got, x.seen)


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


CHOICE_FAULTS = {  # what is said of the first row of `rows` that the fault changes
    "an entry past the visible one": (past_the_last, r"^query 1 .*: entries that it does not see: \[639\]"),
    "a tie broken the other way": (
        later_ties_first,
        r"^query 2 .*: of equal scores a higher entry .* of \[2, 3, 4, 5\]",
    ),
    "-0 is less than 0": (minus_zero, r"^query 5 .*: of equal scores a higher entry was chosen"),
    "NaN wins": (nan_first, r"^query 4 .*: an entry with a lesser score was chosen: \[3, 6, 9, 12\]"),
}


@pytest.mark.parametrize("name", CHOICE_FAULTS)
def test_fault_of_choice(name):
    edit, says = CHOICE_FAULTS[name]
    scores, start, stop = rows(640)
    scores[np.arange(len(scores))[:-1], np.minimum(stop[0, :-1], 639)] = 1e38  # what is not seen would be chosen
    judge_choice(choose(scores, start, stop, 21), start, stop)
    for seed in SEEDS:
        with pytest.raises(Wrong, match=says):
            judge_choice(choose(scores, start, stop, 21, edit=edit, seed=seed), start, stop)


def test_a_buckets_count_lost():
    """Fewer entries seem to be chosen than are: there is no room for all of them."""
    scores, start, stop = (x[..., :1, :] if x.ndim == 2 and len(x) > 1 else x[:, :1] for x in rows(640))
    for seed in SEEDS:
        with pytest.raises(OutOfBounds, match="indices"):
            choose(scores, start, stop, 33, edit=lost_count, seed=seed)


# ---- scores at given entries, and their gradients


AT_KEYS = (
    "at_sm_90a_heads64_bfloat16",
    "at_sm_90a_heads32_float8_e4m3fn",
    "at_bwd_sm_90a_heads64_bfloat16",
    "at_bwd_sm_90a_heads16_float16",
)


@pytest.mark.parametrize("key", AT_KEYS)
def test_scores_at_entries(key):
    x = ProblemAt.of(variant(f"index_{key}"), 2, 2, 90, 150)
    judge_at(x, run_at(variant(f"index_{key}"), x, seed=1))


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


AT_FAULTS = {
    "keys read before they are there": (never_waits_for_keys, Race, read_early("cp.async")),
    "dS multiplied before all have written it": (barriers_of_ds, Race, read_early("stmatrix")),
    "the gradient of what ReLU cut": (other_sign, Wrong, r"^2022 of dq are wrong, first \[0, 0, 0, 0\]: -0\.01005"),
}


@pytest.mark.parametrize("name", AT_FAULTS)
def test_fault_of_gradients(name):
    edit, fault, says = AT_FAULTS[name]
    v = variant("indexer_scores_at_bwd_sm_90a_heads16_float16")
    x = ProblemAt.of(v, 1, 1, 90, 150)
    for seed in SEEDS:
        with pytest.raises(Fault, match=says) as found:
            judge_at(x, run_at(v, x, edit=edit, seed=seed))
        assert type(found.value) is fault
