"""Anybody's CuTe DSL functions in the interpreter: `interpreted`, `interpreting`, `python -m interpreter run`."""

import importlib.util
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from interpreter.cute import interpreted, interpreting, script
from interpreter.machine.hazards import OutOfBounds, Race
from interpreter.machine.rules import CHIP, MANUAL, Rule

EXAMPLE = Path(__file__).parents[1] / "examples/interpret.py"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("interpret_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(count=3, dtype=np.float32):
    return np.random.default_rng(0).integers(-8, 9, (count, 128)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_function_is_right(example, dtype, arch):
    """The arrays hold the answer; the report says what ran."""
    x, sums = rows(dtype=dtype), np.zeros(3, np.float32)
    report = interpreted(example.sum_rows, x, sums, True, seeds=2, arch=arch)
    assert report.ok and sums.tolist() == x.sum(1, dtype=np.float64).tolist()
    (call,) = report.calls
    ((ran, total),) = call.instructions
    assert ran == total > 50 and call.compared and call.seeds == 2 and not call.unreached
    assert call.written == {next(iter(call.written)): 12}
    assert f".target {arch}" in call.launches[0].ptx
    assert "bar.sync" in report.forms()["Barriers and fences"]
    assert "nothing to complain about in 2 orders, the same bits in all" in str(report)


def test_a_race_is_found_with_its_line(example):
    x, sums = rows(), np.zeros(3, np.float32)
    report = interpreted(example.sum_rows, x, sums, False)
    (call,) = report.calls
    assert not report.ok and isinstance(call.fault, Race) and not sums.any()
    line = next(n for n, text in enumerate(EXAMPLE.read_text().splitlines(), 1) if "+ shared[thread + rest]" in text)
    assert f"{EXAMPLE}:{line}" in str(report)
    with interpreting() as stopped, pytest.raises(Race):
        from cutlass.cute.runtime import from_dlpack

        example.sum_rows(from_dlpack(x), from_dlpack(sums), False)
    assert [type(call.fault) for call in stopped.calls] == [Race]


def test_only_its_own_memory(example):
    """The third sum is outside of the array, though inside of the one that it is a part of."""
    sums = np.zeros(3, np.float32)
    report = interpreted(example.sum_rows, rows(), sums[:2], True)
    assert isinstance(report.calls[0].fault, OutOfBounds) and not sums.any()
    sums.flags.writeable = False
    with pytest.raises(ValueError, match="an array that cannot be written"):
        interpreted(example.sum_rows, rows(), sums, True)


def test_afterwards_the_dsl_is_as_it_was():
    from cutlass import utils
    from cutlass.base_dsl.jit_executor import JitCompiledFunction
    from cutlass.cute import runtime

    def state():
        return JitCompiledFunction.run_compiled_program, runtime._Tensor.__init__, utils.HardwareInfo

    before = state()
    with interpreting():
        assert not any(now is was for now, was in zip(state(), before, strict=True))
    assert state() == before


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--no-barrier"], 1)])
def test_a_script(arguments, status, capsys):
    assert script.main(["--seeds", "2", "--forms", "--time", str(EXAMPLE), *arguments]) == status
    out = capsys.readouterr().out
    assert ("greatest difference to float64" in out) == (status == 0)
    assert ("Race: CTA" in out and "examples/interpret.py" in out) == (status == 1)
    assert "Barriers and fences:\n  bar.sync" in out or status
    assert (" clocks\n" in out) == (status == 0)


def test_a_script_that_launches_nothing(tmp_path, capsys):
    path = tmp_path / "nothing.py"
    path.write_text("import sys\nprint(sys.argv[1:])\n")
    assert script.main([str(path), "--seeds", "2"]) == 1
    assert capsys.readouterr().out == "['--seeds', '2']\nnothing was launched\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "0", str(EXAMPLE)], "argument --seeds: got 0, wanted an int >= 1"),
        (["--seeds", "many", str(EXAMPLE)], "argument --seeds: got many, wanted an int >= 1"),
        (["--processors", "-1", str(EXAMPLE)], "argument --processors: got -1, wanted an int >= 1"),
        (["--arch", "sm_80", str(EXAMPLE)], "argument --arch: invalid choice: 'sm_80'"),
        (["nowhere.py"], "argument script: got nowhere.py, wanted a file that is there"),
    ],
)
def test_wrong_arguments(arguments, says, capsys):
    with pytest.raises(SystemExit) as e:
        script.main(arguments)
    assert e.value.code == 2 and says in capsys.readouterr().err


def test_without_the_compiler(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else find(name))
    with pytest.raises(SystemExit) as e:
        script.main([str(EXAMPLE)])
    assert e.value.code == 2
    assert "nvidia-cutlass-dsl, which compiles a script's functions, is not installed here" in capsys.readouterr().err


def test_rules_by_name():
    assert script.rules("manual") == MANUAL and script.rules("chip") == CHIP
    assert script.rules("wait_ld,own_lanes") == {Rule.WAIT_LD, Rule.OWN_LANES}
    with pytest.raises(Exception, match="no rule is 'NONE'; there are manual, chip, TMEM_FENCES"):
        script.rules("none")
