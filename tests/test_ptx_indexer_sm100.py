"""The indexer's scores and its teacher's probabilities for Blackwell, which no test has run on hardware: their PTX in
the interpreter, with planted faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from interpreter.faults import PlantedFault
from interpreter.kernels import indexer, native, probabilities
from interpreter.kernels.indexer import (
    Call,
    CallAt,
    Problem,
    ProblemAt,
    judge_at,
    judge_choice,
    judge_scores,
    run_at,
)
from interpreter.kernels.launch import Kernel
from interpreter.kernels.verdict import Wrong
from interpreter.machine import scheduler
from interpreter.machine.hazards import Race, Undefined
from interpreter.machine.state import Array
from tests.sm100 import HANDED_OVER_UNFENCED, MMA, NEEDS_DSL, compiler, mutant, unordered  # noqa: F401

pytestmark = NEEDS_DSL

SCORES = "indexer_scores_sm_100f_heads"
IN_16_BITS, IN_8_BITS, OF_PAGES = (SCORES + x for x in ("64_bfloat16", "64_float8_e4m3fn", "64_float8_e4m3fn_paged"))


@pytest.mark.parametrize("key", ["64_bfloat16", "64_float8_e4m3fn", "32_bfloat16", "32_float8_e4m3fn"])
def test_scores_and_choice(key):
    """By both kernels of a call: scores, then top-k; in another order on another number of CTAs with the same bits."""
    v = native.variant_of(SCORES + key)
    x = Problem.of(v, 2, 5, 260, 40)
    got = indexer.run(v, x)
    judge_scores(x, got.scores, x.seen)
    judge_choice(got, x.start, x.stop)
    call = Call.of(Kernel.of(v), x, processors=3)
    scheduler.run(again := call.scoring(seed=1))
    assert call.scores(call.rows(again))[x.seen].tobytes() == got.scores[x.seen].tobytes()


@pytest.mark.parametrize(
    ("key", "page", "s_c"),
    [("64_float8_e4m3fn", 64, 700), ("32_bfloat16", 8, 300), ("32_float8_e4m3fn", 304, 300)],
    ids=["several boxes a tile", "many", "one page"],
)
def test_scores_of_pages(key, page, s_c):
    """In any order, among pages of NaN; with a page that is not a multiple of a tile, in a table of one page."""
    v = native.variant_of(f"{SCORES}{key}_paged")
    x = Problem.of(v, 2, 3, s_c, 40, page)
    got = indexer.run(v, x, processors=3)
    judge_scores(x, got.scores, x.seen)
    judge_choice(got, x.start, x.stop)


def test_a_step_of_eight_queries_with_places_that_see_nothing():
    v = native.variant_of(OF_PAGES)
    x = Problem.of(v, 3, 8, 500, 40, 64)
    start, stop = x.start.copy(), x.stop.copy()
    start[1], stop[1] = 0, 0
    x = dataclasses.replace(x, start=start, stop=stop)
    call = Call.of(Kernel.of(v), x, processors=2)
    scheduler.run(scored := call.scoring())
    call.judge(scored)


def test_nan_of_a_key_stays_nan():
    """Whether ReLU is a maximum or half of x + |x|."""
    v = native.variant_of(IN_8_BITS)
    x = Problem.of(v, 1, 4, 128, 40)
    k = x.k.copy()
    k[:, 5] = np.nan
    x = dataclasses.replace(x, k=k, start=np.zeros_like(x.start), stop=np.full_like(x.stop, 128))
    call = Call.of(Kernel.of(v), x, processors=1)
    scheduler.run(scored := call.scoring())
    scores = call.scores(call.rows(scored))
    assert np.isnan(scores[..., 5]).all() and np.isfinite(scores[..., :5]).all()


# ---- faults


def of_columns(wrong: Callable[[Array], Array]) -> Callable[[Problem], Problem]:
    """As if q were other: [b, s_q, heads, 128] of float32."""
    return lambda x: dataclasses.replace(x, q=wrong(x.q.astype(np.float32)).astype(x.q.dtype))


def of_weights(wrong: Callable[[Array], Array]) -> Callable[[Problem], Problem]:
    def answers(x: Problem) -> Problem:
        return dataclasses.replace(x, weights=wrong(x.weights))

    return answers


def neighbours_scales(x: Problem) -> Problem:
    return dataclasses.replace(x, k_scale=x.k_scale[:, np.arange(x.k_scale.shape[1]) ^ 1])


HEAD = np.arange(64)
BLOCK = 256 // 64  # queries
CLASH = rf"{MMA}[^\n]*\n\s+reads SMEM [^\n]*(which nobody wrote|the write by tma)"

FAULTS = [
    PlantedFault(
        "the scale of the neighbouring key",
        OF_PAGES,
        Wrong,
        "scores are wrong",
        answers=neighbours_scales,
        source=(("k_scale[key0, k.index]", "k_scale[key0 ^ 1, k.index]"),),
    ),
    PlantedFault(
        "weights of the first block of queries",
        IN_8_BITS,
        Wrong,
        r"scores are wrong.* of queries \[4\]$",
        answers=of_weights(lambda w: w[:, np.arange(w.shape[1]) % BLOCK]),
        source=(
            ("take_weights(arrays.weights, entry, query0, n)", "take_weights(arrays.weights, entry, Int32(0), n)"),
        ),
    ),
    PlantedFault(
        "two heads of every 16 are left out",
        IN_16_BITS,
        Wrong,
        "scores are wrong",
        answers=of_weights(lambda w: np.where(HEAD % 16 >= 2, w, 0)),
        source=(("range_constexpr(0, cute.size(products), 2)", "range_constexpr(2, cute.size(products), 2)"),),
    ),
    PlantedFault(
        "x + |x| is not halved",
        IN_8_BITS,
        Wrong,
        "scores are wrong",
        answers=of_weights(lambda w: np.where(HEAD // 2 % 2 == 1, 2 * w, w)),
        source=(("(total + 0.5 * more) * scale", "(total + more) * scale"),),
    ),
    PlantedFault(
        "every step of the depth reads the first one's columns of q",
        IN_8_BITS,
        Wrong,
        "scores are wrong",
        answers=of_columns(lambda q: q[..., np.arange(q.shape[-1]) % 32]),
        source=(("b[None, None, step, q.index], d)", "b[None, None, 0, q.index], d)"),),
    ),
    PlantedFault(
        "q counts as e5m2",
        IN_8_BITS,
        Wrong,
        "scores are wrong",
        answers=lambda x: dataclasses.replace(x, q=x.q.view(ml_dtypes.float8_e5m2)),
        edit=lambda ptx: ptx.replace("138412048;", f"{138412048 | 1 << 10};"),
    ),
    PlantedFault(
        "products of a tile lie in the other buffer",
        IN_8_BITS,
        (Race, Undefined),
        r"tcgen05\.ld[^\n]*\n\s+reads TMEM [^\n]*(which nobody wrote|the write by tcgen05\.mma)|"
        + unordered(MMA, r"tcgen05\.ld\.sync", "TMEM"),
        source=(
            ("cta.tmem + (s.index * c.buffer_columns + part", "cta.tmem + ((1 - s.index) * c.buffer_columns + part"),
        ),
    ),
    PlantedFault(
        "a buffer of products is given back when a part of it is read",
        IN_8_BITS,
        Race,
        unordered(MMA, r"tcgen05\.ld\.sync", "TMEM"),
        source=(("column + CHUNK == HALF", "column == 0"),),
    ),
    PlantedFault(
        "a buffer of products is given back without a fence",
        IN_8_BITS,
        Race,
        unordered(MMA, r"tcgen05\.ld\.sync", "TMEM", r"no tcgen05\.fence::before_thread_sync$"),
        source=HANDED_OVER_UNFENCED,
    ),
    PlantedFault(
        "a tile of keys is complete too early",
        IN_16_BITS,
        (Race, Undefined),
        CLASH,
        source=(("k.expect_full(self.config.k_bytes)", "k.expect_full(self.config.k_bytes // 2)"),),
    ),
    PlantedFault(
        "keys are given back before their scales are read",
        OF_PAGES,
        Race,
        unordered(r"tma", r"ld\.shared", "SMEM"),
        case=2100,
        source=(("1 + SUM_WARPS * bool(self.scale_bytes)", "1"), ("            self.arrive(k.empty)\n", "")),
    ),
]


def run_with(kernel: Kernel, fault: PlantedFault[str, int], seed: int) -> None:
    """A fault's very answer is compared before it is judged."""
    v = native.variant_of(fault.kernel)
    x = Problem.of(v, 1, 5, fault.case or 600, 40, 64 if v.paged else 0)
    call = Call.of(kernel, x, processors=1)
    scheduler.run(scored := call.scoring(seed=seed))
    scores = call.scores(call.rows(scored))
    if fault.answers is not None:
        try:
            judge_scores(fault.answers(x), scores, x.seen)
        except Wrong as wrong:
            raise AssertionError(f"wrong, and not in the way that was foretold: {wrong}") from None
    judge_scores(x, scores, x.seen)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_finds(fault, tmp_path, compiler):  # noqa: F811
    """The interpreter finds a planted fault in any order of events."""
    kernel = mutant(fault, tmp_path, compiler)
    fault.check(lambda fault, seed: run_with(kernel, fault, seed))


# ---- the teacher's probabilities

TEACHER = "head_summed_probabilities_sm_100f_d512_bfloat16"


@pytest.mark.parametrize(
    ("shape", "seed"),
    [
        ((1, 2, 5, 90, 40), 0),  # one tile of keys: nothing for the second warpgroup
        ((2, 1, 130, 90, 333), 1),  # more heads than a tile has, three tiles of keys
    ],
)
def test_probabilities(shape, seed):
    """With the same bits on one CTA and on more than there are queries."""
    v = native.variant_of(TEACHER)
    x = probabilities.Problem.of(v, *shape)
    first, second = (probabilities.run(v, x, processors=n, seed=seed + n) for n in (1, 4))
    probabilities.judge(x, first)
    assert first.tobytes() == second.tobytes()


def other_lse(x: probabilities.Problem) -> probabilities.Problem:
    """Every even head has the lse of the one after it; the last one that there is has none."""
    lse = np.concatenate([x.lse, np.full_like(x.lse[..., :1], np.inf)], -1)
    return dataclasses.replace(x, lse=lse[..., np.arange(x.lse.shape[-1]) | 1])


def last_heads(x: probabilities.Problem) -> probabilities.Problem:
    return dataclasses.replace(x, q=x.q[:, :, 128:], lse=x.lse[:, :, 128:])


FEW_HEADS, MANY_HEADS = (1, 2, 5, 90, 300), (1, 1, 130, 90, 60)
TEACHER_FAULTS = [
    PlantedFault(
        "the lse of another head",
        TEACHER,
        Wrong,
        "probabilities are wrong",
        answers=other_lse,
        source=(("scale_log2, shifts[column + i])", "scale_log2, shifts[column + i + 1])"),),
    ),
    PlantedFault(
        "the first heads are forgotten",
        TEACHER,
        Wrong,
        r"^5\d of 60 probabilities are wrong",
        answers=last_heads,
        case=MANY_HEADS,
        source=(("total = total + load(place)", "total = total + 0 * load(place)"),),
    ),
    PlantedFault(
        "an entry past the last key counts",
        TEACHER,
        Wrong,
        r"probabilities are wrong, .* entry (90|2147483647): ",
        source=(("if entry < 0 or entry >= n.s_kv:", "if entry < 0:"),),
    ),
    PlantedFault(
        "keys are multiplied without a proxy fence",
        TEACHER,
        Race,
        rf"{MMA}[^\n]*\n\s+reads SMEM [^\n]*no fence\.proxy\.async after the generic write by [^\n]*cp\.async",
        source=(('cute.arch.fence_proxy("async.shared", space="cta")  # they', "pass  # they"),),
    ),
    PlantedFault(
        "keys are multiplied before they are there",
        TEACHER,
        Race,
        rf"{MMA}[^\n]*\n\s+reads SMEM [^\n]*(which nobody wrote|nothing orders this and the write by cp\.async)",
        source=(("                    k.wait_full()\n", ""),),
    ),
    PlantedFault(
        "products overwrite those that are not read",
        TEACHER,
        Race,
        unordered(MMA, r"tcgen05\.ld\.sync", "TMEM"),
        case=(1, 1, 5, 90, 600),
        source=(("                s.wait_empty()\n", ""),),
    ),
]


def sum_with(kernel: Kernel, fault: PlantedFault[str, tuple[int, ...]], seed: int) -> None:
    x = probabilities.Problem.of(native.variant_of(TEACHER), *(fault.case or FEW_HEADS))
    call = probabilities.Call(kernel, x, processors=1)
    scheduler.run(ran := call.machine(seed=seed))
    if fault.answers is not None:
        try:
            probabilities.judge(fault.answers(x), call.result(ran))
        except Wrong as wrong:
            raise AssertionError(f"wrong, and not in the way that was foretold: {wrong}") from None
    call.judge(ran)


@pytest.mark.parametrize("fault", TEACHER_FAULTS, ids=str)
def test_finds_in_the_teacher(fault, tmp_path, compiler):  # noqa: F811
    kernel = mutant(fault, tmp_path, compiler)
    fault.check(lambda fault, seed: sum_with(kernel, fault, seed))


# ---- scores at given entries

AT = "indexer_scores_at_sm_100f_heads"
AT_BF16, AT_E4M3 = AT + "64_bfloat16", AT + "64_float8_e4m3fn"


@pytest.mark.parametrize(
    ("key", "case"),
    [("64_bfloat16", "turns"), ("64_float8_e4m3fn", "tiles"), ("32_bfloat16", "tiles"), ("32_float8_e4m3fn", "turns")],
)
def test_scores_at_entries(key, case):
    """In two orders with the same bits; absent entries of every kind, and NaN in keys that nobody names."""
    v = native.variant_of(AT + key)
    x = ProblemAt.case(v, case)
    found = [run_at(v, x, seed=seed) for seed in (1, 2)]
    judge_at(x, found[0])
    assert found[0]["scores"].tobytes() == found[1]["scores"].tobytes()


def neighbours_weights(x: ProblemAt) -> ProblemAt:
    return dataclasses.replace(x, weights=x.weights.reshape(-1, 2)[:, ::-1].reshape(x.weights.shape))


def twice_the_weights(x: ProblemAt) -> ProblemAt:
    return dataclasses.replace(x, weights=2 * x.weights)


AT_FAULTS = [
    PlantedFault(
        "the weights of the neighbouring head",
        AT_BF16,
        Wrong,
        r"of scores are wrong",
        answers=neighbours_weights,
        source=(("(weights[i], weights[i + 1])", "(weights[i + 1], weights[i])"),),
    ),
    PlantedFault(
        "x + |x| is not halved",
        AT_E4M3,
        Wrong,
        r"of scores are wrong",
        answers=twice_the_weights,
        source=(("0.5 if small", "1.0 if small"),),
    ),
    PlantedFault(
        "negative products count",
        AT_E4M3,
        Wrong,
        r"of scores are wrong",
        source=(("(abs(x[0]), abs(x[1]))", "(x[0], x[1])"),),
    ),
    PlantedFault(
        "an absent entry has a score",
        AT_BF16,
        Wrong,
        r"^223 of scores are wrong, first \[0, 0, 0\]: 0\.0, wanted -inf",
        source=(("total if named.is_present(position, index) else -Float32.inf", "total"),),
    ),
    PlantedFault(
        "keys are multiplied before they are there",
        AT_BF16,
        (Race, Undefined),
        rf"{MMA}[^\n]*\n\s+reads SMEM [^\n]*(which nobody wrote|nothing orders this and the write by cp\.async)",
        source=(("cute.arch.cp_async_wait_group(self.config.stages - 2)", "pass"),),
    ),
    PlantedFault(
        "keys are multiplied without a proxy fence",
        AT_BF16,
        Race,
        rf"{MMA}[^\n]*\n\s+reads SMEM [^\n]*no fence\.proxy\.async after the generic write by [^\n]*cp\.async",
        source=(('cute.arch.fence_proxy("async.shared", space="cta")', "pass"),),
    ),
    PlantedFault(
        "the next keys come where products read",
        AT_BF16,
        Race,
        unordered(MMA, r"cp\.async", "SMEM"),
        case="turns",
        source=(("named, t + c.stages - 1, wanted", "named, t + c.stages, wanted"),),
    ),
    PlantedFault(
        "products are read before they are made",
        AT_BF16,
        (Race, Undefined),
        r"what is stored to global memory is register [^\n]* not defined|" + unordered(MMA, r"tcgen05\.ld", "TMEM"),
        source=(("wait_for(cta.bar.made, t)", "pass"),),
    ),
    PlantedFault(
        "products overwrite those that are read, as no fence says that they are",
        AT_BF16,
        Race,
        unordered(MMA, r"tcgen05\.ld\.sync", "TMEM", r"no tcgen05\.fence::before_thread_sync$"),
        source=(("before_thread_sync()  # all have", "pass  # all have"),),
    ),
]


def score_at_with(kernel: Kernel, fault: PlantedFault[str, str], seed: int) -> None:
    x = ProblemAt.case(native.variant_of(fault.kernel), fault.case or "tiles")
    call = CallAt(kernel, x)
    scheduler.run(ran := call.machine(seed=seed))
    if fault.answers is not None:
        try:
            judge_at(fault.answers(x), call.results(ran))
        except Wrong as wrong:
            raise AssertionError(f"wrong, and not in the way that was foretold: {wrong}") from None
    call.judge(ran)


@pytest.mark.parametrize("fault", AT_FAULTS, ids=str)
def test_finds_at_entries(fault, tmp_path, compiler):  # noqa: F811
    kernel = mutant(fault, tmp_path, compiler)
    fault.check(lambda fault, seed: score_at_with(kernel, fault, seed))
