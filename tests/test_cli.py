"""python -m jax_dsv4_fmha, most of it without a GPU."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest

import jax_dsv4_fmha
from jax_dsv4_fmha._cli import check, main, report
from jax_dsv4_fmha._definitions.packed import LAYOUTS
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing import attention
from jax_dsv4_fmha._testing.attention import FmhaCase, LayerCase, SparseCase, run_into, run_reference
from jax_dsv4_fmha._testing.cases import CASES
from tests.helpers import ONE_BUILT

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"jax_dsv4_fmha {jax_dsv4_fmha.__version__}\n"


@pytest.mark.parametrize("cases", [check.small_cases(), CASES], ids=["reference", "kernels"])
def test_quick_has_everything_in_a_few_small_cases(cases):
    few = check.quick(cases)
    for what in (lambda c: c["d"], lambda c: c["dtype"], lambda c: c["sink"], lambda c: c["page"] > 0):
        assert {what(x.facts) for x in few} == {what(x.facts) for x in cases}
    features = [{f for x in some for f in x.facts["features"]} for some in (few, cases)]
    assert features[0] == features[1] and {x.op for x in few} == {x.op for x in cases}
    kinds = {(x.op, x.facts["topk"] > 0, x.facts["ratio"] > 0) for x in cases}
    layouts = features[1] & {"fp8", *LAYOUTS}  # of packed caches
    assert len(few) <= len(kinds) + len(layouts) + 1
    assert max(x.work for x in few) < 2**29  # the case of an indexer that chooses 512 in 8 bits


def test_the_bar_estimates_what_is_left(capsys, monkeypatch):
    now = iter([0.0, 0.0, 4.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(now))
    bar = report.Progress(3, True, sys.stdout)
    for name in "ab":
        bar.begin(name)
    text = capsys.readouterr().err
    assert "0/3 0 s  a" in text and "1/3 4 s, about 8 s left  b" in text


@pytest.mark.usefixtures("one_built")
class TestInfo:
    def test_prints_versions_and_variants(self, capsys):
        assert main(["info"]) == 0
        text = capsys.readouterr().out
        assert jax.__version__ in text and "42488" not in text
        (line,) = (line for line in text.splitlines() if "sm_90a" in line)
        cells = re.split(r"  +", line)
        assert cells == ["mha_fwd", "sm_90a", "bfloat16, d 64, heads <= 16", "384", "168", "81.1", "0", "41.5", "run"]

    def test_json(self, capsys, tmp_path):
        assert main(["info", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["variants"] == [dataclasses.asdict(ONE_BUILT)] and facts["versions"]["jax"] == jax.__version__
        assert main(["info", "--json", str(tmp_path / "info.json")]) == 0
        assert json.loads((tmp_path / "info.json").read_text()) == facts
        assert "sm_90a" in capsys.readouterr().out


@pytest.mark.usefixtures("one_built")
def test_info_draws_what_is_built(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["info", "--plot", str(tmp_path / "built.svg")]) == 0
    text = (tmp_path / "built.svg").read_text()
    assert all(word in text for word in ("mha_fwd", "d 64", "≤ 16 heads", "bfloat16"))
    capsys.readouterr()


def test_info_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(library, "variants", lambda: ())
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "No kernels are built in" in text
    counts = Counter(v.arch for v in library.SHIPPED)
    assert f"This version has {counts['sm_90a']} for sm_90a, {counts['sm_100f']} for sm_100f" in text


class TestCheckTheReference:
    @pytest.fixture(autouse=True)
    def table(self, monkeypatch):
        cases = [FmhaCase(s_q=2, s_kv=9, d=d) for d in (64, 8)] + [SparseCase(topk=3)]
        monkeypatch.setattr(check, "CASES", cases)

    def test_passes(self, capsys):
        assert main(["check", "--filter", "fmha: 2 queries*", "--progress"]) == 0
        text, bar = capsys.readouterr()
        assert "no CUDA device" in text and "passed" in text and text.splitlines()[-1] == "2 passed"
        assert "0/2" in bar and "1/2" in bar

    def test_json(self, capsys):
        assert main(["check", "--filter", "fmha: 2 queries*", "--json"]) == 0
        text, rest = capsys.readouterr()
        data = json.loads(text)
        assert data["compared"] == "reference, float64" and "2 passed" in rest and "/2" not in rest
        assert [case["status"] for case in data["cases"]] == ["passed"] * 2

    @pytest.mark.parametrize("broken", [lambda o: o.at[0, 0, 0, 0].add(1), lambda o: o.at[0, 0, 0, 0].set(np.nan)])
    def test_fails(self, capsys, monkeypatch, broken):
        def run(case):
            o, lse = run_reference(case)
            return broken(o), lse

        monkeypatch.setattr(attention, "run_reference", run)
        assert main(["check", "--filter", "fmha: 2 queries*"]) == 1
        text = capsys.readouterr().out
        assert text.count("FAILED") > 2 and text.splitlines()[-1] == "2 FAILED"

    def test_an_error_fails_one_case_only(self, capsys, monkeypatch):
        def run(case):
            if case.d == 64:
                raise RuntimeError("broken\nand more")
            return run_reference(case)

        monkeypatch.setattr(attention, "run_reference", run)
        assert main(["check", "--filter", "fmha: 2 queries*"]) == 1
        text = capsys.readouterr().out
        assert "RuntimeError: broken\n" in text and text.splitlines()[-1] == "1 FAILED, 1 passed"

    @pytest.mark.parametrize("part", ["top-k 3", "topk3"])
    def test_a_part_of_the_name_will_do(self, capsys, part):
        """A part of the id, by which pytest knows a case, does too."""
        assert main(["check", "--filter", part]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "1 passed"

    def test_a_list_of_names(self, capsys):
        assert main(["check", "--list", "--filter", "fmha: *"]) == 0
        names = capsys.readouterr().out.splitlines()[1:]
        assert names == [f"fmha: 2 queries, 1 head, 9 keys, d {d}" for d in (64, 8)]

    @pytest.mark.parametrize(
        "error, status, says",
        [
            (NotImplementedError("of JAX's own"), 1, "2 FAILED"),
            (NotImplementedError("fmha: d: got 3, wanted 4, built nothing"), 2, "2 not built"),
        ],
    )
    def test_nothing_is_built(self, capsys, monkeypatch, error, status, says):
        def run(case):
            raise error

        monkeypatch.setattr(attention, "run_reference", run)
        assert main(["check", "--filter", "fmha: 2 queries*"]) == status
        assert capsys.readouterr().out.splitlines()[-1] == says

    def test_interrupted(self, capsys, monkeypatch):
        """One line, with what has passed so far."""

        def run(case):
            if case.d == 8:
                raise KeyboardInterrupt
            return run_reference(case)

        monkeypatch.setattr(attention, "run_reference", run)
        assert main(["check", "--filter", "fmha: 2 queries*"]) == 130
        text, errors = capsys.readouterr()
        assert text.splitlines()[-1] == "Interrupted after 1 of 2 cases: 1 passed" and errors == ""

    def test_nothing_matches(self, capsys):
        assert main(["check", "--filter", "nonsense"]) == 2
        assert "No case matches 'nonsense'" in capsys.readouterr().out


@pytest.mark.usefixtures("as_if_gpu")
class TestCheckKernels:
    """The reference takes the kernels' place."""

    @pytest.fixture(autouse=True)
    def table(self, monkeypatch):
        cases = (
            FmhaCase(s_q=4, s_kv=9, sink="normal"),
            SparseCase(s_q=4, s_kv=9, d=16, topk=3, features=("nan",)),
            LayerCase(s_q=4, s_kv=9, d=16, s_c=2, ratio=4),
            FmhaCase(s_q=2**20, h_q=64),
        )
        monkeypatch.setattr(check, "CASES", cases)

    def run(self, monkeypatch, change=lambda results: results):
        def run_into(case, fills, *, implementation):
            assert implementation == "cubin"
            if case.op == "sparse_fmha":
                raise NotImplementedError("sparse_fmha: got this, wanted that, built so much")
            return change([attention.run(case)] * len(fills))

        monkeypatch.setattr(attention, "run_into", run_into)

    def test_passes(self, monkeypatch, capsys):
        self.run(monkeypatch)
        assert main(["check"]) == 0
        text = capsys.readouterr().out
        assert "dsv4_attention: 4 queries, 1 head, 9 keys, 2 entries of 4 tokens, d 16\n" in text and "o within" in text
        assert "NotImplementedError: sparse_fmha: got this, wanted that\n" in text
        assert "needs 128 GiB of device memory, has 1 GiB" in text
        assert text.splitlines()[-1] == "2 passed, 1 not built, 1 skipped"

    def test_another_second_result_fails(self, monkeypatch, capsys):
        self.run(monkeypatch, lambda results: [results[0], (results[1][0].at[0, 0].add(0.001), results[1][1])])
        assert main(["check", "--filter", "fmha: 4 queries*"]) == 1
        assert "; 64 elements differ in the second run" in capsys.readouterr().out


def test_results_go_into_buffers_that_were_filled():
    case = FmhaCase(s_q=4, s_kv=9)
    for o, lse in run_into(case, (0.0, np.nan), implementation="reference"):
        want = attention.run(case)
        np.testing.assert_array_equal(o, want[0])
        np.testing.assert_array_equal(lse, want[1])


def run(*arguments, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-m", "jax_dsv4_fmha", *arguments]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_no_platform():
    """If the platform that JAX_PLATFORMS asks for is missing, `info` says so, and lists what is built."""
    process = run("info", JAX_PLATFORMS="rocm")
    text, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert "JAX finds no device (jax_platforms is 'rocm'): " in text and "library: " in text
    process = run("check", JAX_PLATFORMS="rocm")
    assert "JAX finds no device" in process.communicate(timeout=120)[0] and process.returncode == 2


def test_a_closed_pipe():
    with run("info", "--json") as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=120)) == ("", 141)


def test_no_command_prints_help(capsys):
    assert main([]) == 0 and "usage: python -m jax_dsv4_fmha" in capsys.readouterr().out


LAYER = ("dsv4_attention", "bf16[1,8,4,512]", "bf16[1,8,512]", "bf16[1,2,512]", "ratio=4", "window=4", "sink=f32[4]")


class TestExplain:
    """A function by its name, and its operands by their shapes."""

    def test_an_op(self, capsys):
        assert main(["explain", *LAYER]) == 0
        assert re.match("dsv4_attention, forward: reference: .*bfloat16, d=512", capsys.readouterr().out)

    def test_a_gradient(self, capsys):
        assert main(["explain", *LAYER, "--gradient", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [(x["op"], x["part"]) for x in found] == [("dsv4_attention", part) for part in ("forward", "gradient")]

    def test_a_function_of_a_module(self, capsys):
        assert main(["explain", "jax_dsv4_fmha:Span.causal", "8"]) == 0
        assert "no op" in capsys.readouterr().out
        assert main(["explain", "jax.nn:relu", "x=f32[8]"]) == 0

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["nothing"], "got 'nothing'"),
            (["no_module:f"], "got 'no_module:f'"),
            (["EXPORT_CHECKS"], "wanted a function"),
            (["fmha", "bf17[8]"], "got bf17[8]"),
            (["fmha", "bf16[1,8,4,64]"], "missing"),
            (["fmha", "bf16[1,8,4,64]", "f32[1,8,4,64]"], "fmha: k: got"),
        ],
    )
    def test_a_mistake(self, capsys, arguments, says):
        assert main(["explain", *arguments]) == 2
        out, err = capsys.readouterr()
        assert says in err and not out


@pytest.mark.parametrize("command", [[], ["info"], ["check"], ["explain"], ["bench"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as e:
        main([*command, "--help"])
    assert e.value.code == 0 and "usage: python -m jax_dsv4_fmha" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["explain"], ["bench", "--suite", "nothing"], ["bench", "--rounds", "0"]]
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert e.value.code == 2


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
class TestOnGpu:
    def test_check(self, capsys):
        assert main(["check", "--filter", "fmha: 1 query, 1 head, 1 key,*"]) == 0
        assert "passed" in capsys.readouterr().out.splitlines()[-1]
