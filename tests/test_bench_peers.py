"""bench beside FlashMLA and the cuDNN frontend, by stand-ins for their packages (tests/peers) and, where it is not
installed, for torch.
"""

import importlib
import itertools
import json
import runpy
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Span, dsv4_attention, dsv4_decode, fmha, lightning_indexer, mla_decode, sparse_fmha
from jax_dsv4_fmha._bench import SUITES, attention, decode, indexer, latent, measure, outside
from jax_dsv4_fmha._bench.attention import FmhaRow, SparseRow, layer
from jax_dsv4_fmha._bench.cudnn_frontend import cudnn_frontend
from jax_dsv4_fmha._bench.decode import step
from jax_dsv4_fmha._bench.flashmla import flashmla
from jax_dsv4_fmha._bench.indexer import ChoiceRow, TopkRow
from jax_dsv4_fmha._bench.latent import LatentStepRow
from jax_dsv4_fmha._bench.measure import Contestant
from jax_dsv4_fmha._cli import bench, main
from jax_dsv4_fmha._host import library

PEERS = Path(__file__).parent / "peers"
STEP = replace(step(64, 128, 2, "fp8"), s_kv=1024)
ROWS = {
    "layer": replace(layer(64, 3, topk=128, ratio=4, s_c=256), peers=()),
    "layer whose entries are not all past": replace(layer(64, 40, topk=128, ratio=4, s_c=128), peers=()),
    "selected keys": SparseRow(b=1, s_q=3, s_kv=256, h_q=64, topk=128),
    "selection of 576": SparseRow(d=576, b=1, s_q=20, s_kv=150, h_q=64, topk=128),
    "selection of 8 heads": SparseRow(d=576, b=1, s_q=20, s_kv=150, h_q=8, topk=128),
    "step from 656 bytes": LatentStepRow(b=2, s_kv=256, h_q=64, topk=128),
    "dense step": FmhaRow(d=576, b=2, s_q=1, s_kv=128, h_q=64),
    "window": FmhaRow(d=512, b=1, s_q=140, s_kv=140, h_q=64, window=128, has_sink=True),
    "step": STEP,
}
CHOICES = {
    "bfloat16": ChoiceRow(s_q=8, s_c=256, topk=16, dtype="bfloat16"),
    "e4m3": ChoiceRow(s_q=8, s_c=256, topk=16, dtype="float8_e4m3fn", h=32),
    "of ratio 4": ChoiceRow(s_q=80, s_c=16, topk=8, dtype="float8_e4m3fn", ratio=4),
    "given scores": TopkRow(b=2, s_q=2, s_c=64, topk=8),
}


@pytest.fixture
def torch(monkeypatch):
    """torch as if it saw a GPU; where it is not installed, what we use of it."""
    if importlib.util.find_spec("torch") is None:
        found = types.SimpleNamespace(__version__="2.11.0", from_dlpack=lambda x: x, float8_e4m3fn=jnp.float8_e4m3fn)
        found.cuda = types.SimpleNamespace()
        monkeypatch.setitem(sys.modules, "torch", found)
    else:
        import torch as found
    monkeypatch.setattr(found.cuda, "is_available", lambda: True, raising=False)
    monkeypatch.setattr(found.cuda, "synchronize", lambda: None, raising=False)
    return found


@pytest.fixture
def built(tmp_path):
    """The folder of FlashMLA's package, with an extension."""
    shutil.copytree(PEERS / "flash_mla", tmp_path / "flash_mla")
    (tmp_path / "flash_mla" / "cuda.so").write_bytes(b"")
    return str(tmp_path)


@pytest.fixture
def packages(torch, monkeypatch):
    """The stand-ins, imported anew."""
    for name in ("flash_mla", "cudnn", "cudnn.deepseek_sparse_attention"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.fixture
def ours(monkeypatch):
    """The reference takes the kernels' place."""

    def plain(op):
        return lambda *x, implementation, **choices: op(*x, **choices, implementation="reference")

    for module, ops in (
        (attention, (fmha, sparse_fmha, dsv4_attention)),
        (decode, (dsv4_decode,)),
        (latent, (mla_decode,)),
    ):
        for op in ops:
            monkeypatch.setattr(module, op.__name__, plain(op))
    monkeypatch.setattr(indexer, "lightning_indexer", plain(lightning_indexer))
    topk = lambda scores, start, stop, topk: (jax.lax.top_k(scores, topk)[1], None)  # noqa: E731
    monkeypatch.setattr(indexer, "indexer_topk", topk)


def contestants(peer, row, sets=2):
    inputs = row.inputs(sets)
    mine = Contestant(jax.jit(lambda operands: row.ours(**operands)), inputs)
    return mine, peer.contestant(row, inputs, mine)


@pytest.mark.usefixtures("packages", "ours")
class TestFlashMLA:
    @pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
    def test_it_computes_what_ours_does(self, row, built):
        """On the same operands; another set of operands gives another result, that of ours on them."""
        mine, theirs = contestants(flashmla(built), row)
        assert theirs.is_outside and 0 < theirs.facts["differs"] < 0.02 and len(theirs.sets) == 2
        for operands, call in zip(mine.sets, theirs.sets, strict=True):
            got, want = (
                np.asarray(x[0][..., : row.h_q, :], np.float32) for x in (theirs.run(call), mine.run(operands))
            )
            got = got.reshape(want.shape)
            np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())

    @pytest.mark.parametrize("index", [0, 7])
    def test_another_result_is_not_timed(self, index, built):
        """Not that of operands in which one entry of 256 is another one."""
        row = ROWS["layer"]
        right = flashmla(built)

        def prepare(row, operands):
            entries = operands["compressed_kv"]
            return right.prepare(row, operands | {"compressed_kv": entries.at[:, index].add(4)})

        with pytest.raises(ValueError, match=r"flashmla: its result differs from ours by .*, wanted 0.02"):
            contestants(replace(right, prepare=prepare), row)

    def test_a_schedule_is_made_before_the_timing(self, built):
        """One for each set of operands, kept from call to call."""
        _, theirs = contestants(flashmla(built), STEP)
        schedules = [call["call"].args[5] for call in theirs.sets]
        assert [schedule.calls for schedule in schedules] == [1, 0]
        theirs.run(theirs.sets[0])
        assert [schedule.calls for schedule in schedules] == [2, 0]

    def test_steps_from_bfloat16_stand_beside_its_steps_from_fp8(self, built):
        _, theirs = contestants(flashmla(built), replace(STEP, caches=""))
        assert theirs.facts == {}, "other operands, so other numbers"
        assert theirs.run(theirs.sets[0])[0].shape == (2, 2, 64, 512)

    def test_rows_that_it_takes(self, built):
        """Of the suites: those that peers.md compares."""
        peer = flashmla(built)
        taken = [
            row
            for suite in SUITES.values()
            for row in suite.rows
            if isinstance(row, outside.CallRow) and peer.takes(row)
        ]
        assert {row.h_q for row in taken} == {8, 16, 32, 64, 128} and {row.d for row in taken} == {512, 576}
        suites = "dsv4", "window", "decode", "latent"
        assert [sum(row in SUITES[name].rows for row in taken) for name in suites] == [14, 2, 18, 15]
        assert all(peer.contestant(row, [], None) is None for row in SUITES["layer"].rows)


@pytest.mark.usefixtures("packages", "ours")
class TestCudnnFrontend:
    @pytest.mark.parametrize("row", CHOICES.values(), ids=CHOICES)
    def test_it_chooses_what_ours_does(self, row):
        mine, theirs = contestants(cudnn_frontend(), row)
        assert theirs.facts["differs"] < 0.01
        got, want = (np.asarray(x).reshape(-1, row.topk) for x in (theirs.run(theirs.sets[1]), mine.run(mine.sets[1])))
        np.testing.assert_array_equal(np.sort(got), np.sort(want))

    def test_another_choice_is_not_timed(self):
        row = CHOICES["given scores"]
        right = cudnn_frontend()
        wrong = replace(right, prepare=lambda row, x: right.prepare(row, {"scores": x["scores"].at[0, 0].multiply(-1)}))
        with pytest.raises(ValueError, match=r"differs from ours by 0\.2"):
            contestants(wrong, row)

    def test_rows_that_it_takes(self):
        taken = [row.name for row in SUITES["indexer"].rows if cudnn_frontend().takes(row)]
        assert len(taken) == 15 and all("pages" not in name and "blocks" not in name for name in taken)


@pytest.mark.usefixtures("packages")
def test_the_commit_of_a_clone(built, monkeypatch):
    """Not that of a clone that the package's folder happens to be in."""
    assert flashmla(built).facts["commit"] is None
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", "-C", built, *command], check=True)
    head = subprocess.run(["git", "-C", built, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    monkeypatch.delitem(sys.modules, "flash_mla")
    assert len(head) == 40 and flashmla(built).facts["commit"] == head
    inside = Path(built) / "build"
    shutil.copytree(Path(built) / "flash_mla", inside / "flash_mla")
    monkeypatch.delitem(sys.modules, "flash_mla")
    assert flashmla(str(inside)).facts["commit"] is None


class TestErrors:
    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
        monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured"))

    def says(self, capsys, *options):
        assert main(["bench", *options]) == 2
        return capsys.readouterr().out

    def test_no_package(self, capsys, tmp_path, torch):
        said = self.says(capsys, "--flashmla", str(tmp_path))
        assert said == f"{tmp_path}: no package flash_mla, wanted the folder that holds it, or its extension\n"

    def test_sources_that_are_not_built(self, capsys, tmp_path, torch):
        (tmp_path / "flash_mla").mkdir()
        (tmp_path / "flash_mla" / "__init__.py").write_text("")
        assert "no extension cuda*.so, wanted a built package" in self.says(capsys, "--flashmla", str(tmp_path))

    def test_another_version(self, capsys, tmp_path, torch, monkeypatch):
        monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
        for name, text in (("__init__.py", "def get_mla_metadata(): ..."), ("cuda.so", "")):
            (tmp_path / "flash_mla").mkdir(exist_ok=True)
            (tmp_path / "flash_mla" / name).write_text(text)
        said = self.says(capsys, "--flashmla", str(tmp_path / "flash_mla" / "cuda.so"))
        assert "has no flash_mla_sparse_fwd, flash_mla_with_kvcache: another version of its API" in said

    def test_an_extension_for_another_torch(self, capsys, tmp_path, torch, monkeypatch):
        monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
        (tmp_path / "flash_mla").mkdir()
        (tmp_path / "flash_mla" / "cuda.so").write_bytes(b"")
        (tmp_path / "flash_mla" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
        said = self.says(capsys, "--flashmla", str(tmp_path))
        assert "undefined symbol: _ZN3c10; was it built for this torch and this Python?" in said
        assert "flash_mla" not in sys.modules

    def test_no_torch(self, capsys, monkeypatch, built):
        monkeypatch.setitem(sys.modules, "torch", None)
        for options in (["--flashmla", built], ["--cudnn-frontend"]):
            assert self.says(capsys, *options).startswith("torch: not found (")

    def test_no_gpu_in_torch(self, capsys, torch, monkeypatch, built):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for options in (["--flashmla", built], ["--cudnn-frontend"]):
            said = f"torch {torch.__version__}: sees no GPU, wanted one built for CUDA\n"
            assert self.says(capsys, *options) == said

    def test_no_cudnn_frontend(self, capsys, torch, monkeypatch):
        monkeypatch.setitem(sys.modules, "cudnn", None)
        assert "wanted: pip install nvidia-cudnn-frontend" in self.says(capsys, "--cudnn-frontend")

    def test_results_of_a_file(self, capsys):
        assert self.says(capsys, "--from", "results.json", "--cudnn-frontend").startswith("--from measures nothing")


class Trace:
    """A profiler for a CPU: a kernel of 1 µs for each call of an XLA program, two of 2 µs for each call of a peer."""

    def __init__(self, modules, calls):
        self.modules, self.calls = modules, calls

    def start_trace(self, folder, **_):
        (Path(folder) / "a.xplane.pb").write_bytes(b"")

    def from_file(self, path):
        events, at = [], 0.0
        for module in self.modules:
            for name, ns in [("ours", 1000.0)] if module else [("split", 2000.0), ("merge", 2000.0)]:
                stats = [("hlo_module", module)] if module else []
                for _ in range(self.calls):
                    events.append(types.SimpleNamespace(start_ns=at, duration_ns=ns, name=name, stats=stats))
                    at += ns
        line = types.SimpleNamespace(name="Stream #7", events=events)
        return types.SimpleNamespace(planes=[types.SimpleNamespace(name="/device:GPU:0", lines=[line])])


@pytest.fixture
def trace(monkeypatch):
    """One burst of 3 calls in each of 2 rounds."""
    found = Trace(["jit_matmul", "jit_copy", "jit_ours", ""], calls=6)
    monkeypatch.setattr(jax.profiler, "start_trace", found.start_trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax.profiler, "ProfileData", found)
    monkeypatch.setattr(measure, "_burst", lambda _: 3)
    return found


def test_kernels_of_a_peer_are_those_of_no_xla_program(trace):
    waited = []
    theirs = Contestant(lambda x: "theirs", [{}], is_outside=True, wait=waited.append, facts={"differs": 0.001})
    ours = Contestant(lambda x: jnp.zeros(1), [{}])
    trace.modules = ["jit_ours", ""]
    found = measure.interleaved({"ours": ours, "flashmla": theirs}, rounds=2)
    assert found["ours"]["seconds"] == pytest.approx(1e-6) and "differs" not in found["ours"]
    peer = found["flashmla"]
    assert peer["seconds"] == pytest.approx(4e-6) and peer["launches"] == 2 and peer["differs"] == 0.001
    assert peer["kernels"].keys() == {"split", "merge"} and waited == ["theirs"] * 2
    with pytest.raises(ValueError, match="flashmla and cudnn_frontend: the profiler cannot tell"):
        measure.interleaved({"flashmla": theirs, "cudnn_frontend": theirs}, rounds=2)
    trace.modules = ["jit_ours"]
    with pytest.raises(RuntimeError, match="flashmla: the profiler saw 0 kernels in 6 calls"):
        measure.interleaved({"flashmla": theirs}, rounds=2)


@pytest.mark.usefixtures("packages", "ours", "trace")
@pytest.mark.slow
def test_a_run_beside_both(monkeypatch, built, tmp_path, capsys):
    """From the command line to a record that keeps what was measured of each, and to the page."""
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(measure, "MATMUL", 8)
    monkeypatch.setattr(measure, "COPY_BYTES", 1024)
    choice = replace(CHOICES["bfloat16"], peers=())
    rows = {"dsv4": (ROWS["layer"],), "decode": (STEP, replace(STEP, caches="")), "indexer": (choice,)}
    suites = {name: replace(SUITES[name], rows=some) for name, some in rows.items()}
    monkeypatch.setattr(bench, "SUITES", suites)
    path = tmp_path / "h200_peers.json"
    options = ["--flashmla", built, "--cudnn-frontend", "--rounds", "2", "--json", str(path)]
    assert main(["bench", *options]) == 0
    record = json.loads(path.read_text())
    assert record["peers"]["flashmla"].keys() == {"commit", "extension", "sha256", "torch"}
    assert record["peers"]["cudnn_frontend"]["version"] == "1.32.0" and record["rounds"] == 2
    assert not any(row["skipped"] for row in record["rows"])
    theirs = [next(name for name in row["times"] if name != "ours") for row in record["rows"]]
    assert theirs == ["flashmla"] * 3 + ["cudnn_frontend"]
    for row, name in zip(record["rows"], theirs, strict=True):
        assert row["times"]["ours"]["seconds"] == pytest.approx(1e-6) and len(row["times"][name]["rounds"]) == 2
        assert row["times"][name]["launches"] == 2 and row["times"][name]["kernels"].keys() == {"split", "merge"}
    assert "flashmla us" in capsys.readouterr().out
    runpy.run_path(str(Path(__file__).parents[1] / "docs" / "generate.py"))
    peers = importlib.import_module("figures.peers")
    monkeypatch.setattr(peers, "PEERS", record)
    page = peers.flashmla().replace("\n", " ")
    assert f"a run of `bench --flashmla` on {record['date'][:10]}, of 2 rounds or more: FlashMLA's extension" in page
    assert f"| {ROWS['layer'].name} | 4.0 | 1.0 | 4.00 |" in page


def test_kernels_that_do_not_come_with_every_call_are_nobody_s():
    """As a copy of JAX's own, which has no program either."""
    calls = [(100.0 * i + at, 5.0, name) for i in range(4) for at, name in ((0.0, "attend"), (10.0, "merge"))]
    found, others = measure.of_every_call(sorted([*calls, (55.0, 3.0, "copy")]), 4)
    assert found == calls and others == {"copy": 1}
    assert measure.summary("peer", found, 2, 2)["seconds"] == pytest.approx(1e-8)


@pytest.mark.parametrize("row", [{"window": 4, "has_sink": True}, {"is_causal": True, "segments": 2}], ids=str)
def test_flash_attention_3_is_asked_for_the_same(row, monkeypatch):
    """A stand-in for the package has its arguments, and attends by `fmha`."""
    row = FmhaRow(d=64, b=2, s_q=16, s_kv=16, h_q=4, h_kv=2, **row)

    def flash_mha(q, k, v, *, is_causal, window_size, sinks):
        s, (left, right) = q.shape[1], window_size
        assert is_causal and right == (0 if left >= 0 else -1)
        return fmha(q, k, v, sink=sinks, span=Span.sliding_window(s, left + 1) if left >= 0 else Span.causal(s))[0]

    def flash_mha_varlen(q, k, v, starts, longest, **how):
        parts = [slice(*x) for x in itertools.pairwise(starts.tolist())]
        assert max(x.stop - x.start for x in parts) == longest
        return jnp.concatenate([flash_mha(*(x[None, part] for x in (q, k, v)), **how)[0] for part in parts])

    package = types.SimpleNamespace(flash_mha=flash_mha, flash_mha_varlen=flash_mha_varlen)
    monkeypatch.setitem(sys.modules, "dew_flash_attn", package)
    monkeypatch.setattr(attention, "fmha", lambda *x, implementation, **how: fmha(*x, **how))
    (x,) = row.inputs(1)
    theirs, ours = (np.asarray(y, np.float32) for y in (row.peer("flash_attention_3", **x), row.ours(**x)[0]))
    np.testing.assert_allclose(theirs, ours, atol=0.02)
