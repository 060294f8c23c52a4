"""What is said of a witness, on a kernel written by hand; the witnesses themselves run in `make test-witnesses`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from interpreter.cute.forms import by_family
from interpreter.cute.launches import Argument, Launch, Role
from interpreter.machine.handwritten import SMEM_BYTES
from interpreter.machine.rules import Rule
from interpreter.witnesses.__main__ import QUICK, chosen, parser, write
from interpreter.witnesses.catalogue import WITNESSES
from interpreter.witnesses.opinions import BY, FAULTS, VERDICTS, WITHOUT, is_expected
from interpreter.witnesses.recording import Recording
from interpreter.witnesses.verdict import answer, broken, difference, edits, plant
from tests.test_ptx_product_forms import product

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def witness():
    """D = 2 A B', with no fence and no wait for what it loads."""
    program, want = product()
    body = "\n".join(x for x in program.body.splitlines() if "tcgen05.fence" not in x and "tcgen05.wait::ld" not in x)
    source, d = program.source.copy(), np.zeros((program.outputs, program.total), np.float32)
    arguments = [Argument.of("source", source, Role.OPERAND), Argument.of("d", d, Role.RESULT)]
    addresses = [x.address.to_bytes(8, "little") for x in arguments]
    launch = Launch(
        "kernel", replace(program, body=body).ptx, (1,), (program.threads,), (1,), SMEM_BYTES, [bytes(128), *addresses]
    )
    return Recording([launch], arguments, {"d": want}, 0.0, 0.0)


def test_an_answer(witness):
    found = answer(witness, seeds=2)
    assert found.right and found.errors == {"d": 0.0} and found.fault == ""
    assert 100 < found.instructions[0] <= found.instructions[1]
    forms = by_family(found.forms)["Tensor cores and tensor memory"]
    assert "tcgen05.mma.cta_group::1.kind::f16: 128x64x16" in forms
    assert "tcgen05.ld.sync.aligned.32x32b.x64.b32" in forms


def test_a_wrong_answer_and_a_fault(witness):
    wrong = answer(replace(witness, wanted={"d": witness.wanted["d"] + 1}), seeds=1)
    assert not wrong.right and wrong.errors["d"] > 0 and wrong.fault == ""
    (launch,) = witness.launches
    lost = replace(launch, ptx=launch.ptx.replace("tcgen05.commit", "// tcgen05.commit"))
    faulty = answer(replace(witness, launches=[lost]), seeds=1)
    assert not faulty.right and faulty.fault.startswith("seed 0: Deadlock: ")


def test_a_difference():
    wanted = np.array([4.0, -np.inf, 2.0])
    assert difference(np.array([4, -np.inf, 2], np.float32), wanted) == 0
    assert difference(np.array([4, -np.inf, 1], np.float32), wanted) == 0.25
    for wrong in ([4, 0, 2], [4, np.nan, 2], [np.nan, -np.inf, 2], [np.inf, -np.inf, 2]):
        assert difference(np.array(wrong, np.float32), wanted) == np.inf


def test_rules_that_it_breaks(witness):
    assert broken(witness) == [Rule.TMEM_FENCES.name, Rule.WAIT_LD.name, Rule.LD_ORDER.name]


def test_planted_faults(witness):
    """At every place of every kind that the kernel has, and each is found."""
    found = plant(witness, seeds=1)
    places = {"a proxy fence": 1, "a barrier of warps": 3, "a commit": 1, "a wait": 1, "a phase": 1, "B's major": 1}
    assert {kind: count.planted for kind, count in found.items()} == places
    assert {kind for kind, count in found.items() if count.wrong} <= {"B's major"}
    assert all(count.raised + count.wrong == count.planted for count in found.values())


def test_an_edit_is_one_line(witness):
    (launch,) = witness.launches
    lines = launch.ptx.splitlines()
    for edit in edits(launch, range(len(lines) + 1)):
        edited = edit.planted_in(launch.ptx).splitlines()
        assert [n for n, (a, b) in enumerate(zip(lines, edited, strict=True)) if a != b] == [edit.line]


def test_which_are_chosen():
    assert len({x.name for x in WITNESSES}) == len(WITNESSES)
    assert chosen(parser().parse_args([])) == list(WITNESSES)
    assert {x.name for x in chosen(parser().parse_args(["--quick"]))} == set(QUICK)
    assert [x.name for x in chosen(parser().parse_args(["fmha"]))] == ["fmha 64", "fmha 128"]


def test_a_record_keeps_what_was_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("interpreter.witnesses.__main__.version", lambda package: "1")
    file = tmp_path / "witnesses.json"
    write(file, {"fmha 128": {"right": True, "breaks": []}})
    write(file, {"gemm 128": {"right": True}, "fmha 128": {"right": False}})
    found = json.loads(file.read_text())["witnesses"]
    assert found == {"gemm 128": {"right": True}, "fmha 128": {"right": False, "breaks": []}}


def test_the_page_has_every_witness():
    """And each is right."""
    record = json.loads((DOCS / "witnesses.json").read_text())
    assert list(record["witnesses"]) == [x.name for x in WITNESSES]
    assert record["rules"] == [rule.name for rule in Rule]
    assert all(x["right"] and "breaks" in x for x in record["witnesses"].values())


def test_two_interpreters_agree():
    """The record has the verdict of both on each fault. `make test-witnesses` asks ours again."""
    record = json.loads((DOCS / "opinions.json").read_text())
    assert set(record) == set(FAULTS) == {WITHOUT, *VERDICTS} and all(
        set(found) == set(BY) for found in record.values()
    )
    assert all(is_expected(by, fault, x) for fault, found in record.items() for by, x in found.items())
    assert any(x.get("apart", 1) < 1e-5 for x in record[WITHOUT].values())


@pytest.mark.parametrize("fault", VERDICTS)
def test_another_fault_s_verdict_is_not_expected(fault):
    """Ours tells all three faults apart."""
    record = json.loads((DOCS / "opinions.json").read_text())
    assert [x for x in record if is_expected("ours", fault, record[x]["ours"])] == [fault]
