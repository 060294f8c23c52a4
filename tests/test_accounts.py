"""Accounts of a turn: by hand, beside what is counted from a kernel's PTX; and what the kernels were built for."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from interpreter import clocks
from interpreter.clocks.architecture import BLACKWELL, HOPPER
from interpreter.kernels import accounts, command
from interpreter.kernels.native import variant_of
from interpreter.machine.handwritten import Handwritten
from kernels.compare import nvdisasm
from kernels.cubin import read_code
from tests import first_b200, rates
from tests.test_ptx_product_forms import product

RECORD = json.loads((Path(__file__).parents[1] / "docs" / "clocks.json").read_text())
PORT = 128  # bytes a clock of shared memory

# Of a turn. A pair: 128 rows, 64 keys, each CTA half of the columns. 64 rows a CTA in two rails: scores are products
# with twice as many keys of half the depth, whose B is read once, and A is in TMEM; P V reads P and B, for each half
# of the columns.
PAIR = {
    "full rate": 2 * 2 * 64 * 64 * 512 / 8192,
    "copies": 64 * 256 * 2 / PORT,
    "products": (64 * 256 * 2 + 64 * 64 * 2 + 64 * 256 * 2) / PORT,  # P once: the collector keeps it
    "exchange and P": (64 * 64 * 4 + 64 * 64 * 2) / PORT,
    "mufu": 64 * 64 / 16,
    "L2 bytes": 64 * 256 * 2,
}
ONE_CTA = {
    "full rate": PAIR["full rate"],
    "copies": 64 * 512 * 2 / PORT,
    "products": (64 * 512 * 2 + 2 * 64 * 64 * 2 + 64 * 512 * 2) / PORT,
    "exchange and P": PAIR["exchange and P"],
    "mufu": PAIR["mufu"],
    "L2 bytes": 64 * 512 * 2,
}
BY_HAND = {
    "mla_span_fwd_sm_100f_d512_bfloat16": PAIR,
    "mla_sparse_fwd_sm_100f_d512_bfloat16_h64": ONE_CTA,
}


def counted(x):
    return {
        "full rate": x.full_rate,
        "copies": x.smem["copies"],
        "products": x.smem["products"],
        "exchange and P": x.smem["st.shared"],
        "mufu": x.units["mufu"],
        "L2 bytes": x.l2,
    }


@pytest.mark.parametrize("key", BY_HAND)
def test_a_turn_by_hand(key):
    """Sums of rows, O's factors and lists of keys are the rest."""
    found = accounts.of_variant(variant_of(key), keys=512)
    for name, want in BY_HAND[key].items():
        assert want <= counted(found)[name] * 1.001 <= 1.09 * want, name
    assert found.units["chain"] >= found.units["tensor"] >= found.full_rate
    assert found.clocks >= 0.99 * max(found.units.values())
    assert found.as_json()["bound"] in str(found).splitlines()[-1]


BUILT_FOR = {  # share of the tensor pipe's full rate that the account allows
    "mha_fwd_sm_100f_d64_bfloat16": 0.5,
    "mha_fwd_sm_100f_d128_bfloat16": 0.7,
    "mha_fwd_sm_100f_d256_bfloat16": 0.75,
    "mla_span_fwd_sm_100f_d512_bfloat16": 0.8,  # rows that share their keys
    "hca_fwd_sm_100f_d512_bfloat16": 0.8,
    "mla_sparse_fwd_sm_100f_d512_bfloat16": 0.8,  # 128 heads
    "csa_fwd_sm_100f_d512_bfloat16": 0.8,
    "mla_sparse_fwd_sm_100f_d512_bfloat16_h64": 0.5,
    "csa_fwd_sm_100f_d512_bfloat16_h64": 0.5,
    "mla_sparse_bwd_sm_100f_d512_bfloat16": 0.5,
    "mla_span_bwd_sm_100f_d512_bfloat16": 0.5,
    "dsv4_decode_sm_100f_d512_bfloat16_v4_fp8": 0.65,
    "dsv4_decode_sm_100f_d512_bfloat16_v4_fp8_h64": 0.4,
}


@pytest.mark.parametrize("key", BUILT_FOR)
def test_what_an_account_allows(key):
    assert RECORD["accounts"][key]["at_most"] >= BUILT_FOR[key]


def test_the_record_has_every_kernel():
    assert set(RECORD["accounts"]) == {v.key for v in accounts.accounted()}
    assert set(RECORD["accounts of others"]) == set(RECORD["others"])


def test_the_command_shows_an_account(capsys):
    assert command.main(["mha_fwd_sm_90a_d64_bf", "--account", "--keys", "896"]) == 0
    text = capsys.readouterr().out
    assert "a turn (" in text
    assert "at most" in text.splitlines()[-1]
    assert any(line.split()[0] == "mufu" for line in text.splitlines())


def test_products_that_do_not_repeat_have_no_turn():
    program, _ = product()
    with pytest.raises(LookupError, match="no products that repeat"):
        clocks.account(lambda **how: clocks.run(program.machine(), **how))


def test_alone_nothing_waits_for_a_unit():
    """Two warps of a quarter take as long as one does, where each has its own."""
    one, two = (rates.exponentials(100, warps) for warps in (4, 8))
    shared = [clocks.run(x.machine()).clocks for x in (one, two)]
    alone = [clocks.run(x.machine(), alone=True).clocks for x in (one, two)]
    assert shared[1] > 1.5 * shared[0]
    assert alone[1] == pytest.approx(alone[0], rel=0.1)


# ---- a chip's first minutes


EXPECTED = {  # what the constants say of a unit, and of two that share one
    "product, 128 x 64": (128 + 64) * 32 / PORT,
    "product, 128 x 128": 64,
    "product of a pair, 128 x 128, A in TMEM": 32,
    "product, 128 x 128, beside warps' loads": 64 + 8 * 512 / PORT,
    "copies out of L2, all SMs": BLACKWELL["l2"].value,
    "gathers of four rows": BLACKWELL["l2"].value,
    "copies to a peer": BLACKWELL["peer"].value,
    "exp2": 2 * BLACKWELL["mufu"].value,
}


@pytest.mark.parametrize("x", rates.RATES, ids=lambda x: x.name)
def test_a_rate(x):
    found = x.expected("sm_100a")
    assert found > 0
    assert found == pytest.approx(EXPECTED.get(x.name, found), rel=0.02)
    assert "%clock64" in rates.timed(x.program(2)).ptx
    assert x.tells


def assembled(x: Handwritten, folder: Path) -> Path:
    """Its cubin."""
    ptx, cubin = folder / "x.ptx", folder / "x.cubin"
    ptx.write_text(x.ptx)
    subprocess.run(["ptxas", "-arch", x.target, "-o", cubin, ptx], check=True)
    return cubin


def statements(x: Handwritten) -> int:
    return sum(line.strip().endswith(";") for line in x.ptx.splitlines())


needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")


@needs_ptxas
@pytest.mark.parametrize("x", rates.RATES, ids=lambda x: x.name)
def test_ptxas_keeps_what_a_rate_repeats(x, tmp_path):
    """Two additions may become one; NOPs at the end do not count."""
    few, many = (rates.timed(replace(x.program(n), target="sm_100a")) for n in (x.few, x.many))
    sizes = [len(read_code(assembled(program, tmp_path).read_bytes())) for program in (few, many)]
    assert (sizes[1] - sizes[0]) / 16 > 0.7 * (statements(many) - statements(few)) - 8


@needs_ptxas
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_exponentials_stand_between_the_readings_of_the_clock(target, tmp_path):
    cubin = assembled(rates.timed(replace(rates.exponentials(100), target=target)), tmp_path)
    try:
        sass = subprocess.run([nvdisasm(), "-c", cubin], check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        pytest.skip(str(error))
    lines = sass.splitlines()
    begin, end = (n for n, line in enumerate(lines) if "SR_CLOCK" in line)
    assert [sum("MUFU.EX2" in line for line in part) for part in (lines, lines[begin:end])] == [100, 100]


def test_a_rate_on_hopper():
    found = {x.name: x.expected("sm_90a") for x in rates.RATES if x.program(1).target == "sm_90a"}
    assert found["copies out of L2, all SMs"] == pytest.approx(HOPPER["l2"].value, rel=0.05)
    assert found["copies to a peer"] == pytest.approx(HOPPER["peer"].value, rel=0.05)


def test_the_first_minutes_without_a_gpu(capsys, tmp_path, monkeypatch):
    program, want = product()
    words = want.astype(np.float32).view(np.uint32)
    monkeypatch.setattr(first_b200, "answers", lambda: [("right", program, words), ("wrong", program, words + 1)])
    monkeypatch.setattr(first_b200, "RATES", rates.RATES[:1])
    file = tmp_path / "found.json"
    assert first_b200.main(["answers", "rates", "bench", "--json", str(file)]) == 1
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    assert text.startswith("no GPU")
    assert list(found["answers"].values())[:2] == ["right", "WRONG"]
    assert found["answers"]["gather to 64 bytes"].startswith("refused")
    assert found["rates"]["product, 128 x 64"]["expected"] == 48
    assert "d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128" in text
    with pytest.raises(SystemExit):
        first_b200.main(["everything"])
