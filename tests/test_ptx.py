"""Hopper's kernels in the interpreter: right answers, which do not depend on who is faster."""

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest

from interpreter import edits, hardware
from interpreter.kernels import attention, cases, command, native
from interpreter.kernels.cases import EVERYTHING
from interpreter.kernels.launch import Kernel, combine, launch
from interpreter.kernels.verdict import judge
from interpreter.machine import scheduler
from kernels.abi import ANY, BF16_ROPE, Combine, Forward
from kernels.packings import PACKED
from kernels.variants import typical

BUILT = [v.key for v in native.built(Forward) if v.arch == "sm_90a"]
V41, V41_FP4, V4_FP4 = "v41_fp8", "v41_fp4", "v4_fp4"
COMBINE = {(v.arch, v.dtype): v.key for v in native.built(Combine)}
ALIKE = {v.key for v in map(native.variant_of, BUILT) if typical(v) != v}
IN_BOTH_PRECISIONS = {("csa_fwd", "e4m3", "mixed"), ("hca_fwd", BF16_ROPE, "mixed")}
"""the longest cases, of walks over two sources, which are the same in both: each op has its own in the other one"""
RUNS = [  # those have the same code as others: one case, which may be of COMPARED
    (v.key, case)
    for v in map(native.variant_of, BUILT)
    for case in cases.CASES
    if (v.op, v.mode.precision, case) not in IN_BOTH_PRECISIONS
    if v.key not in ALIKE or (case == "tiles" and (v.max_heads < ANY or {V41_FP4, V4_FP4} & {*v.sources}))
    if case != "groups" or v.sources in (("span",), ("pages",))
]
QUICK = {"mla_span_fwd_turned": ("tiles", "few", "turns"), "csa_fwd_turned": ("tiles",), "hca_fwd_turned": ("few",)}
"""of kernels that turn q, whose code is else that of others; their other cases are slow together"""


def marked(key: str, case: str, is_slow: bool = False) -> Any:
    variant = native.variant_of(key)
    is_slow |= variant.turns and case not in QUICK[variant.name]
    is_slow |= variant.mode.is_e4m3 and case == "mixed"
    return pytest.param(key, case, marks=pytest.mark.slow) if is_slow else (key, case)


@functools.cache
def kernel(key: str) -> Kernel:
    return Kernel.of(native.variant_of(key))


def merging(variant: Forward) -> Kernel:
    """The kernel that merges what the variant's splits leave."""
    return kernel(COMBINE[variant.arch, variant.dtype])


def operands(key: str, case: str) -> attention.Operands:
    k = kernel(key)
    x = cases.operands(k.variant, k.facts["tile_n"], case)
    if x is None:
        pytest.skip(f"{case} is no case of {k.variant.name}")
    return x


def seeds(key: str, case: str) -> tuple[int, ...]:
    """All different: an order for every case. Cases for which we check that no bit of the answer differs have two,
    unless another kernel has the same code.
    """
    first = 2 * RUNS.index((key, case))
    return (first, first + 1) if case in (hardware.CASE, "turns") and key not in ALIKE else (first,)


def splits_in_bfloat16(key: str) -> bool:
    variant = native.variant_of(key)
    return variant.splits and variant.dtype == "bfloat16"


@pytest.mark.parametrize("key", [key for key in BUILT if native.variant_of(key).mode.is_e4m3])
def test_a_row_of_q_with_an_infinity_is_nan(key):
    """And no other row is, though rows are rounded two at a time."""
    x = operands(key, "few")
    (want, want_lse), place = launch(kernel(key), x).run(), (0, 0, 1)
    x.q[(*place, 300)] = np.inf
    o, lse = launch(kernel(key), x).run()
    assert np.isnan(o[place].astype(np.float32)).all() and np.isnan(lse[place])
    o[place], lse[place] = want[place], want_lse[place]
    np.testing.assert_array_equal(o.view(np.uint16), want.view(np.uint16))
    np.testing.assert_array_equal(lse, want_lse)


@pytest.mark.parametrize(("key", "case"), [marked(*run) for run in RUNS])
def test_is_right_in_any_order(key, case):
    x, results = operands(key, case), []
    for seed in seeds(key, case):
        run = launch(kernel(key), x, seed=seed, processors=cases.PROCESSORS[case])
        results.append(run.run())
        judge(results[-1], x, run.scale)
    for a, b in zip(results[0], results[-1], strict=True):
        assert (a.view(np.uint8) == b.view(np.uint8)).all(), "the answer depends on the order of things"
    if case == hardware.CASE and key in hardware.RUNS:
        assert_as_on_hardware(results[0], hardware.RUNS[key], x)


def is_packed(key: str) -> bool:
    return not PACKED.keys().isdisjoint(native.variant_of(key).sources)


@pytest.mark.parametrize(
    ("key", "case"),
    [marked(*x, is_packed(x[0])) for x in RUNS if x[1] == "turns" and splits_in_bfloat16(x[0])],
)
def test_splits_are_merged_right(key, case):
    """With more splits than some rows have key tiles, and with rows that see nothing. The case "tiles" is among what
    the hardware has answered, of packed keys too.
    """
    x, (seed, *_) = operands(key, case), seeds(key, case)
    forward = launch(kernel(key), x, splits=3, seed=seed, processors=cases.PROCESSORS[case])
    scheduler.run(forward.machine)
    merged = combine(merging(kernel(key).variant), forward, seed=seed)
    judge(merged.run(), x, merged.scale)


def test_a_kernel_that_turns_rounds_less_than_passes():
    """Beside float64 with no rounding of q: its lse, and that of q normed and turned and then rounded."""
    if (key := "mla_span_fwd_turned_sm_90a_d512_bfloat16") not in BUILT:
        pytest.skip(f"{key} is not built")
    x = operands(key, "few")
    run = launch(kernel(key), x, processors=1)
    (_, lse), exact = run.run(), attention.turned(x.q.astype(np.float64), x.table)
    seen = attention.normed(exact, x.q, native.EPS)
    wanted, passes = (
        attention.answer(dataclasses.replace(x, q=q, table=None), run.scale)[1] for q in (seen, seen.astype(x.q.dtype))
    )
    there = np.isfinite(wanted)
    error, of_passes = (np.sqrt(np.mean(np.square(y[there] - wanted[there]))) for y in (lse.astype(np.float64), passes))
    assert 0 < error < 0.6 * of_passes < 1e-3  # 64 of 512 columns are rounded


@pytest.mark.parametrize("splits", [2, 9, 24])
@pytest.mark.parametrize(("arch", "dtype"), COMBINE)
def test_merges_any_number_of_splits(arch, dtype, splits):
    """By the definition, in float64. Some splits saw no key of a row, and left NaN there; one row saw none at all."""
    if (key := f"mha_fwd_sm_90a_d64_{dtype}") not in BUILT:
        pytest.skip(f"{key} is not built")
    rng, x = np.random.default_rng(splits), operands(key, "tiles")
    forward = launch(kernel(key), x, splits=splits)  # does not run: its results are made here
    o_parts, lse_parts = (
        (b := forward.machine.memory.named(name)).bytes[: b.size].view(np.float32).reshape(*x.q.shape[:3], splits, n)
        for name, n in (("o_parts", x.shape.d), ("lse_parts", 1))
    )
    lse_parts[:] = np.where(rng.random(lse_parts.shape) < 0.4, -np.inf, rng.normal(0, 3, lse_parts.shape))
    lse_parts[0, 0, 0] = -np.inf
    seen = lse_parts > -np.inf
    o_parts[:] = np.where(seen, rng.normal(size=o_parts.shape), np.nan)
    weights = np.exp(lse_parts.astype(np.float64))
    total = weights.sum(axis=3)
    o = (weights * np.where(seen, o_parts, 0)).sum(axis=3) / (total + np.exp(x.sink.astype(np.float64))[:, None])
    merged = combine(kernel(COMBINE[arch, dtype]), forward)
    got_o, got_lse = merged.run()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got_lse, np.log(total[..., 0]), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got_o.astype(np.float64), o, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("key", [key for key in BUILT if key.startswith("csa_fwd") and "_bfloat16" in key])
def test_a_nan_reaches_those_alone_who_see_it(key):
    """For a window beside selected keys: there, the tiles of rows hold one query each."""
    k = kernel(key)
    x = attention.operands(
        k.variant, b=1, s_q=4, s_kv=75, h_q=native.heads_for(k.variant, 8), s_kv1=9, topk=5, width=70
    )
    window, entries = x.sources
    bad = 4  # the first two queries see it; the third sees nothing of the window; the last begins with the next key
    sees = window.counts[0, :, bad] > 0
    assert sees.tolist() == [True, True, False, False]
    poisoned = window.k.copy()
    poisoned[:, bad] = np.nan
    spoilt_window = dataclasses.replace(window, k=poisoned, v=poisoned)
    if x.mode.is_e4m3:
        spoilt_window = attention.as_codes(spoilt_window, x.mode)
    spoilt = dataclasses.replace(x, sources=(spoilt_window, entries))
    (want, _), (got, _) = (launch(k, y, processors=1).run() for y in (x, spoilt))
    o = got.astype(np.float32)
    assert np.isnan(o[:, sees]).all()
    np.testing.assert_array_equal(o[:, ~sees], want.astype(np.float32)[:, ~sees])


@pytest.mark.parametrize("key", ["mha_fwd_sm_90a_d64_bfloat16", "mla_span_fwd_sm_90a_d512_bfloat16_h63"])
def test_a_span_ends_where_its_keys_do(key):
    """Whatever a raw call says of keys before the first and after the last."""
    if key not in BUILT:
        pytest.skip(f"{key} is not built")
    k = kernel(key)
    x = attention.operands(k.variant, b=2, s_q=9, s_kv=k.facts["tile_n"] + 70, h_q=8, width=EVERYTHING)
    run = launch(k, attention.beyond(x))
    judge(run.run(), x, run.scale)


COMPARED = [  # beside the cases that run in any order
    run
    for run in hardware.ATTENTION
    if run.variant.key in BUILT
    if V41 not in run.variant.sources or (V41_FP4 in run.variant.sources and run.variant.max_heads < ANY)
    if run.splits > 1 or (run.variant.key, hardware.CASE) not in RUNS
]


@pytest.mark.parametrize("recorded", COMPARED, ids=lambda run: run.name)
def test_agrees_with_hardware(recorded):
    variant, splits = recorded.variant, recorded.splits
    x = operands(variant.key, hardware.CASE)
    run = launch(kernel(variant.key), x, splits=splits, processors=1)
    if splits > 1:
        scheduler.run(run.machine)
        run = combine(merging(variant), run)
    assert_as_on_hardware(run.run(), recorded, x)


def assert_as_on_hardware(got, recorded, x):
    """lse to 1e-6, o to a unit in the last place; the rest is the order of sums, and how the chip rounds exp2."""
    (o, lse), (got_o, got_lse) = hardware.recorded(recorded, x).results, recorded.kept(got)
    finite = np.isfinite(lse)
    assert (got_lse[~finite] == lse[~finite]).all() and (~finite).any()
    np.testing.assert_allclose(got_lse[finite], lse[finite], rtol=1e-6)
    distance = np.abs(got_o.astype(np.float64) - o.astype(np.float64))
    assert np.max(distance / unit(o, x.q.dtype)) <= 1
    assert np.mean(got_o != o) < (0.1 if recorded.variant.turns else 0.05)  # those that turn q take a root, too


def unit(o: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A unit in the last place of an element; of the row's mean, where the element is a sum that cancels."""
    x = o.astype(np.float64)
    mean = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    digits = 7 if dtype == "bfloat16" else 10
    return 2.0 ** (np.floor(np.log2(np.maximum(np.maximum(np.abs(x), mean), 2.0**-14))) - digits)


@pytest.fixture
def one_kernel():
    key = "mha_fwd_sm_90a_d64_bfloat16"
    if key not in BUILT:
        pytest.skip(f"{key} is not built")
    return key


def test_timeline(one_kernel, capsys):
    assert command.main([one_kernel, "--case", "few"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +\d+  warp 0 +\d+  issues load \[0, 0, 0, 0\] to \+\d+ \(\d+ bytes\), completes on", out, re.M)
    assert re.search(r"warp 4-\d+ .* arrives at mbarrier \+\d+|completes phase 0", out)
    assert "right, and nothing to complain about" in out


def test_timeline_ends_with_the_fault(one_kernel, capsys, tmp_path):
    edited = tmp_path / "edited.ptx"
    edited.write_text(edits.drop(kernel(one_kernel).ptx, r"mbarrier\.arrive\.expect_tx", slice(0, 1)))
    assert command.main([one_kernel, "--case", "few", "--ptx", str(edited), "--tail", "5"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 8
    assert err.startswith("Deadlock: nothing can go on") and "warp 4-7 at line" in err


def test_plot(one_kernel, tmp_path):
    picture = tmp_path / "run.svg"
    assert command.main([one_kernel, "--case", "few", "--plot", str(picture)]) == 0
    svg = picture.read_text()
    assert svg.startswith("<?xml") and all(text in svg for text in ("warp 0", "wgmma, warpgroup 1", "in flight"))


def test_a_part_of_a_name_may_name_many(capsys):
    with pytest.raises(SystemExit):
        command.main(["d512"])
    assert re.search(r"'d512' names \d+ kernels; there are\n  \w+_d512_", capsys.readouterr().err)


def test_without_the_native_library_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(native.host_library, "native", lambda: None)
    with pytest.raises(SystemExit):
        command.main(["mha_fwd_sm_90a_d64_bfloat16"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("is not built here: `make test` builds it")
