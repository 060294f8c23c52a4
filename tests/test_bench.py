"""python -m jax_dsv4_fmha bench, most of it without a GPU."""

import dataclasses
import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Cache, dsv4_decode, sparse_fmha
from jax_dsv4_fmha._bench import SUITES, devices, layer, measure, prompt, v41
from jax_dsv4_fmha._bench.attention import FmhaRow, LayerRow, SparseRow
from jax_dsv4_fmha._bench.decode import DecodeRow, LayersRow, permutations, step
from jax_dsv4_fmha._bench.indexer import AttendedRow, InsideBlocksRow, ScoresRow, TopkRow
from jax_dsv4_fmha._bench.machine_code import changed, machine_code
from jax_dsv4_fmha._bench.row import maker
from jax_dsv4_fmha._cli import bench, main
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha.layers import unzigzag

pytestmark = pytest.mark.usefixtures("no_gpu")

ROWS = [row for suite in SUITES.values() for row in suite.rows]
ATTENTION = [
    row.layer if isinstance(row, LayersRow) else row
    for name in ("dsv4", "dense", "window", "decode")
    for row in SUITES[name].rows
]


@pytest.fixture
def small_layers(monkeypatch):
    """In place of V4-Flash."""
    small = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 64, "q_lora_rank": 32, "o_lora_rank": 16}
    small |= {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 8, "sliding_window": 16}
    monkeypatch.setattr(layer, "FLASH", layer.FLASH | small)


class TestBench:
    def test_needs_a_gpu(self, capsys):
        assert main(["bench"]) == 2
        assert "sees none here" in capsys.readouterr().out

    @pytest.mark.usefixtures("as_if_gpu")
    @pytest.mark.parametrize("quiet", [False, True])
    def test_a_run_that_is_cut_short_keeps_its_rows(self, quiet, monkeypatch, tmp_path, capsys):
        """In the file; on stderr there is a line of each before the next one begins."""
        said = []

        def measure_row(row, *_):
            said.append(capsys.readouterr())
            if row is not ROWS[0]:
                raise KeyboardInterrupt
            return record

        record = {"name": ROWS[0].name, "times": {"ours": {"seconds": 2e-6}}, "skipped": {"xla": "TimeoutError"}}
        monkeypatch.setattr(bench, "_measure_row", measure_row)
        monkeypatch.setattr(measure, "yardsticks", dict)
        monkeypatch.setattr(bench, "maker", lambda row: None)
        path, suite = tmp_path / "results.json", next(iter(SUITES))
        options = ["--no-progress"] if quiet else []
        assert main(["bench", "--suite", suite, "--json", str(path), *options]) == 130
        assert json.loads(path.read_text())["rows"] == [{"suite": suite, **record}]
        count = len(SUITES[suite].rows)
        lines = [f"0/{count}  compiling the programs that make operands\n"]
        lines.append(f"1/{count}  {ROWS[0].name}: ours 2.0 us, no xla\n")
        assert [re.sub(r" \d+ s", "", x.err) for x in said] == ["" if quiet else line for line in lines]
        assert [x.out for x in said] == ["", ""]

    def test_names_of_rows_are_unique(self):
        assert len({row.name for row in ROWS}) == len(ROWS)

    @pytest.mark.parametrize("row", SUITES["indexer"].rows, ids=lambda row: row.name)
    def test_work_of_the_indexer(self, row):
        queries = row.b * row.s_q
        if isinstance(row, TopkRow):
            assert row.flops == 0 and row.bytes == 4 * queries * (row.s_c + row.topk)
            return
        entries = row.s_c
        if isinstance(row, ScoresRow):
            entries = 4 * row.topk
        elif isinstance(row, InsideBlocksRow):
            entries = 2048 * 8
        elif isinstance(row, AttendedRow):
            entries += 2 * 512 / 128 * (128 + row.topk)
        elif row.ratio:
            entries /= 2  # of a triangle, and some that are not whole
        assert row.flops == pytest.approx(2 * 128 * row.h * queries * entries, rel=1e-3)
        assert row.bytes > 128 * row.h * row.s_q * jnp.dtype(row.dtype).itemsize

    @pytest.mark.parametrize("row", [*ATTENTION, *(row.attention for row in SUITES["grad"].rows)], ids=lambda r: r.name)
    def test_work(self, row):
        """Against a formula, where there is one."""
        if isinstance(row, FmhaRow):
            keys = (row.s_kv / row.segments + 1) / 2 if row.is_causal else row.s_kv
            if row.window:
                keys = row.window - row.window * (row.window - 1) / 2 / row.s_q
        elif isinstance(row, SparseRow):
            keys = row.topk
        elif isinstance(row, LayerRow) and not row.topk:
            keys = row.window + sum((61440 + i + 1) // 128 for i in range(row.s_q)) / row.s_q
        else:
            keys = row.window + (row.topk or row.s_kv)
        queries = row.b * row.s_q * row.h_q
        assert row.flops == pytest.approx(2 * (row.d + row.d_v) * queries * keys)
        assert row.bytes > queries * (2 * (row.d + row.d_v) + 4)

    @pytest.mark.parametrize("row", SUITES["grad"].rows, ids=lambda row: row.name)
    def test_work_of_a_gradient(self, row):
        """Five products, and of RoPE's numbers three; do and dq, and dkv beside what the forward pass moves."""
        x = row.attention
        keys = x.s_kv + x.s_c if isinstance(x, LayerRow) else x.s_kv * getattr(x, "h_kv", 1)
        assert row.flops == pytest.approx(2 * x.h_q * x.visible * (3 * x.d + 2 * x.d_v))
        assert row.bytes == x.bytes + 2 * x.b * (x.s_q * x.h_q * (x.d + x.d_v) + keys * 2 * x.d)

    @pytest.mark.parametrize(
        "row", [r for r in SUITES["layer"].rows if isinstance(r, layer.LayerRow)], ids=lambda r: r.name
    )
    def test_work_of_a_layer(self, row):
        """A layer has three large matrices: 1024 by 64 heads of 512, 64 heads of 512 by 1024, 8192 by 4096. Where they
        are packed, those of a compressor stay in 16 bits.
        """
        passes, matrices = 3 if row.has_gradient else 1, 3 * 2**25
        assert 1 < row.flops / (2 * passes * row.b * row.s_q * matrices) < 1.9
        assert 1 < row.bytes / ((1 if row.packed else 2) * passes * matrices) < (2.4 if row.packed else 1.9)

    @pytest.mark.parametrize("ratio", [0, 4, 128])
    def test_a_long_prompt_by_chunks(self, ratio, small_layers):
        """The window's ring stays as it is, and the other caches grow with the prompt."""
        rows = [prompt.PromptRow(tokens=n, ratio=ratio, chunk=128) for n in (256, 1024)]
        short, long = (row.clocked(*row.inputs(1)) for row in rows)
        assert len(short["rounds"]) == 2 and 0 < short["seconds"] < long["seconds"]
        assert min(short["program_bytes"], long["program_bytes"]) >= 128 * 64 * 2  # y
        assert (short["cache_bytes"] < long["cache_bytes"]) == bool(ratio)
        record = {"name": rows[1].name, "flops": rows[1].flops, "matmul_flops_per_s": 1e12, "times": {"ours": long}}
        assert f"{long['cache_bytes'] / 1e6:.0f}\nthe host's clock" in prompt.table([record])

    @pytest.mark.parametrize(
        "row",
        [
            devices.SequenceRow(tokens=256, ratio=4, has_gradient=True),
            devices.LongCacheRow(b=2, tokens=1024),
            devices.LongCacheRow(b=2, tokens=1024, layers=2),
            pytest.param(devices.SequenceRow(tokens=1024, ratio=128, is_zigzag=True), marks=pytest.mark.slow),
            devices.SequenceRow(tokens=256, ratio=0, devices=9),
        ],
        ids=["sequence", "cache", "cache of layers", "zigzag", "too many"],
    )
    def test_over_several_devices(self, row, small_layers, monkeypatch):
        """Both programs give the same numbers, and a record says how long each takes; or why there is none."""
        monkeypatch.setattr(devices, "FLASH", layer.FLASH)
        monkeypatch.setattr(devices, "_BURST_SECONDS", 0)
        monkeypatch.setattr(devices, "_SETTLING_SECONDS", 0)
        monkeypatch.setattr(measure, "interleaved", lambda *_: {x: {"seconds": 1.0} for x in ("matmul", "copy")})
        monkeypatch.setattr(type(row), "programs", functools.cache(type(row).programs))
        record = bench._measure_row(row, (), {}, 1)
        if row.devices > jax.device_count():
            assert set(record["skipped"]) == {"ours", "one"} and not record["times"]
            assert f"{row.name}: RuntimeError: needs 9 devices, and JAX sees 8" in devices.table([record])
            return
        assert set(record["times"]) == {"ours", "one"} and not record["skipped"]
        seconds = [record["times"][name]["seconds"] for name in ("one", "ours")]
        assert f"{seconds[0] / seconds[1]:.2f}" in devices.table([record])
        one, ours = (jax.tree.leaves(run()) for run in row.programs().values())
        for x, y in zip(one, ours, strict=True):
            assert len(x.sharding.device_set) == 1 and len(y.sharding.device_set) == 2
            if isinstance(row, devices.SequenceRow):  # the parts of a drawn cache are not one device's in its order
                x, y = (np.asarray(a, np.float32) for a in (x, y))
                y = unzigzag(y, row.devices) if row.is_zigzag else y
                assert np.linalg.norm(x - y) <= 0.02 * np.linalg.norm(x)

    def test_work_of_a_long_prompt(self):
        """That of its chunks."""
        row = prompt.PromptRow(tokens=2**14, ratio=4)
        chunks = [layer.LayerRow(b=1, s_q=4096, s_kv=4096 * (i + 1), ratio=4).flops for i in range(4)]
        assert row.flops == sum(chunks)

    @pytest.mark.parametrize("kind", [layer.LayerRow, layer.StackRow])
    def test_a_step_of_layers_in_place(self, kind, monkeypatch, small_layers):
        """It runs again and again on its caches; every instruction of its program belongs to a part."""
        monkeypatch.setattr(layer, "ALL_RATIOS", (0, 4, 128, 4))
        one = {"s_q": 1, "ratio": 4} if kind is layer.LayerRow else {}
        row = kind(b=2, s_kv=64, **one)
        inputs = row.inputs(1)
        contestant = row.compiled(inputs, {})
        first = contestant.run(inputs[0])
        np.testing.assert_array_equal(contestant.run(inputs[0]), first)
        instruction = r"^ *(?:ROOT )?%?([\w.-]+) = \S+ (?:fusion|dot|scatter|custom-call)\("
        kernels = dict.fromkeys(re.findall(instruction, contestant.text, re.M), 1.0)
        times = row.times({"ours": {"kernels": kernels, "rounds": [1.0]}}, {"ours": contestant})
        found = times["ours"]["parts"]
        assert set(times) == ({"ours"} if kind is layer.LayerRow else {"ours", "graph", "at once"})
        assert set(layer.PARTS) <= set(found) and sum(found.values()) == len(kernels)
        assert 0 < layer.rest(found) < 1

    @pytest.mark.parametrize("number", v41.KINDS)
    def test_a_step_of_a_layer_of_v41(self, number, monkeypatch, small_layers):
        """It takes what earlier layers made."""
        small = {name: layer.FLASH[name] for name in layer.FLASH if not re.search("ratio|num_hidden", name)}
        small |= {"candidate_topk_blocks": 4, "index_n_heads": 2}
        monkeypatch.setattr(v41, "FLASH_V41", v41.FLASH_V41 | small)
        row = dataclasses.replace(v41.SUITE.rows[number - 1], b=2, s_kv=64)
        inputs = row.inputs(1)
        contestant = row.compiled(inputs, {})
        first = contestant.run(inputs[0])
        np.testing.assert_array_equal(contestant.run(inputs[0]), first)
        assert row.number == number and first.shape == (2, 1, 64) and np.isfinite(first).all()
        assert 2 * 2 * 512 * 64 < row.flops < 2 * v41.SUITE.rows[number - 1].flops

    def test_work_of_all_layers(self):
        """43 layers: two with a window alone, 21 of ratio 4, 20 of ratio 128."""
        rows = SUITES["layer"].rows
        stack = next(row for row in rows if isinstance(row, layer.StackRow))
        times = {row.ratio: row.flops for row in rows if isinstance(row, layer.LayerRow) and row in stack.layers}
        assert stack.flops == 2 * times[0] + 21 * times[4] + 20 * times[128]

    def test_the_time_of_all_layers_and_of_each(self):
        stack = next(row for row in SUITES["layer"].rows if isinstance(row, layer.StackRow))
        names = {row.name for row in stack.layers}
        made = {"seconds": 1e-4, "rounds": [1e-4] * 2, "parts": {"products": 1.0}}
        times = {"ours": made, "graph": made, "at once": made | {"seconds": 9e-5}}
        rows = [
            {"name": name, "times": times if name == stack.name else {"ours": made}} for name in (stack.name, *names)
        ]
        clocked = "by the host's clock, in a CUDA graph 100, with STEP_OPTIONS 90"
        assert layer.table(rows).endswith(f"{stack.name}: 100 us; alone they take 4300; {clocked}")
        assert layer.table(rows[:-1]).endswith("nor attention")

    def test_parts_of_a_layer(self):
        """From text as XLA writes it for a GPU."""
        text = """
%gemm_fusion_dot.3_computation (p.1: bf16[64,32], p.2: bf16[32,8]) -> bf16[64,8] {
  ROOT %dot.1 = bf16[64,8]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}
}

%fused_reduce (p.3: f32[4,64,8]) -> f32[64,8] {
  ROOT %reduce.1 = f32[64,8]{1,0} reduce(%p.3, %zero), dimensions={0}, to_apply=%add
}

ENTRY %main (x: bf16[64,32]) -> bf16[64,8] {
  %custom-call.1 = (bf16[64,8]{1,0}, s8[4]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"
  %gemm_fusion_dot.3 = bf16[64,8]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm_fusion_dot.3_computation
  %sums = f32[64,8]{1,0} fusion(%y), calls=%fused_reduce, metadata={op_name="jit(ours)/bsr,rhd->bshd/dot_general"}
  %norms = f32[64,8]{1,0} fusion(%y), calls=%fused_reduce, metadata={op_name="jit(ours)/indexer/norm/reduce_sum"}
  %ffi_call.1 = bf16[4]{0} custom-call(%y), metadata={op_name="jit(ours)/transpose(jvp(attention))/jit(_call)/ffi_call"}
  %ffi_call.2 = bf16[1,8,4]{2,1,0} custom-call(%data), custom_call_target="dsv4_fmha_unpack_matrix"
  %scatter.1 = f32[8]{0} fusion(%y), calls=%fused_scatter, metadata={op_name="jit(ours)/compressor/append/scatter"}
  ROOT %copy.1 = f32[8]{0} copy(%y)
}
"""
        times = {"custom-call.1": 1, "gemm_fusion_dot.3": 2, "sums": 4, "norms": 8, "ffi_call.1": 16, "scatter.1": 32}
        found = layer.parts(text, times | {"copy.1": 64, "unknown": 128, "ffi_call.2": 256})
        assert found == {"products": 7 + 256, "indexer": 8, "attention": 16, "append": 32, "other": 192}

    def test_indices_are_permutations(self):
        row = SparseRow(b=1, s_q=5, s_kv=40, h_q=1, d=64, topk=30)
        indices = np.sort(maker(row)(jax.random.key(0))["indices"])
        assert indices.shape == (1, 5, 30) and (np.diff(indices) > 0).all() and indices.min() >= 0
        assert indices.max() < 40 and len(np.unique(indices, axis=1)[0]) == 5

    @pytest.mark.parametrize("n", [2, 64, 16384])
    def test_indices_of_decode_are_permutations(self, n):
        rows = np.asarray(permutations(jax.random.key(0), 6, n, n))
        np.testing.assert_array_equal(np.sort(rows), np.tile(np.arange(n), (6, 1)))
        if n > 2:
            assert (
                len(np.unique(rows, axis=0)) == 6
                and abs(np.corrcoef(rows[:, 1:].ravel(), rows[:, :-1].ravel())[0, 1]) < 0.2
            )

    def test_a_layer_has_two_ways(self):
        row = next(row for row in SUITES["dsv4"].rows if isinstance(row, LayerRow) and row.ratio == 128)
        small = dataclasses.replace(row, s_q=4, s_kv=131, h_q=2, d=16)
        operands = small.operands(jax.random.key(0))
        for name in ("ours", "two_pass"):
            with pytest.raises((NotImplementedError, ValueError), match="cubin"):
                small.function(name)(**operands)

    def test_both_passes_and_the_forward_one(self, monkeypatch):
        """A gradient's contestants; what is recorded is the time of both less that of the forward pass."""
        monkeypatch.setattr(
            FmhaRow, "ours", lambda self, q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
        )
        small = FmhaRow(b=1, s_q=4, s_kv=4, h_q=2, h_kv=2, d=64, is_causal=True, dtype="float32")
        row = dataclasses.replace(SUITES["grad"].rows[-1], attention=small)
        inputs = row.inputs(2)
        found = row.contestants("ours", inputs)
        (gradients,) = found["ours"].run(inputs[0])
        assert gradients.keys() == {"q", "k", "v"} and found.keys() == {"ours", "ours_forward"}
        do, x = inputs[0]["do"], {name: inputs[0][name] for name in "qkv"}
        want = jax.grad(lambda x: jnp.sum(small.ours(**x) * do))(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradients, want)
        np.testing.assert_allclose(found["ours_forward"].run(inputs[0]), small.ours(**x), rtol=1e-5)
        both = {"seconds": 5.0, "rounds": [4.0, 5.0, 7.0], "kernels": {"a": 1.0, "b": 4.0}}
        forward = {"seconds": 1.0, "rounds": [1.0, 1.0, 2.0], "kernels": {"a": 1.0}}
        times = row.times({"ours": both, "ours_forward": forward, "xla": both}, found)
        assert times == {"ours": {"seconds": 4.0, "rounds": [3.0, 4.0, 5.0], "kernels": {"b": 4.0}}, "both": both}

    def test_a_gradient_of_latents(self):
        """Its cotangent is as wide as V."""
        row = next(row for row in SUITES["grad"].rows if row.attention.d == 576)
        small = dataclasses.replace(row.attention, s_q=3, s_kv=9, h_q=2, topk=4)
        (operands,) = dataclasses.replace(row, attention=small).inputs(1)
        do, kv, indices = (operands.pop(name) for name in ("do", "kv", "indices"))
        f = lambda q, kv: sparse_fmha(q, kv, indices, d_v=512, implementation="reference")[0]  # noqa: E731
        _, vjp = jax.vjp(f, operands["q"], kv)
        assert [x.shape for x in vjp(do)] == [(1, 3, 2, 576), (1, 9, 576)]

    @pytest.mark.parametrize("caches", ["", "fp8"])
    @pytest.mark.parametrize("topk", [0, 7])
    def test_a_step_of_decode(self, topk, caches, monkeypatch):
        """The op takes its operands, a copy of them in jnp gives the same."""
        monkeypatch.setattr(library, "variants", lambda: ())
        row = dataclasses.replace(step(4, 7, 2, caches), s_kv=256, topk=topk, window=20, page=16)
        operands = maker(row)(jax.random.key(0))
        f = jax.jit(functools.partial(dsv4_decode, ratio=row.ratio, window=row.window, implementation="reference"))
        got, _ = f(**operands)
        want = jax.jit(row.function("xla"))(**operands)
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), rtol=0.02, atol=0.02)
        with pytest.raises(NotImplementedError, match="dsv4_decode: implementation: got 'cubin'"):
            jax.eval_shape(row.function("ours"), **operands)

    def test_layers_follow_on_each_other(self, monkeypatch):
        """Each layer gets the previous one's o as its q, and reads pages at the places of the first."""

        def call(row, **operands):
            return dsv4_decode(**operands, ratio=row.ratio, window=row.window, implementation="reference")

        monkeypatch.setattr(DecodeRow, "ours", call)
        one = dataclasses.replace(step(4, 7, 2, "fp8"), s_kv=256, window=20, page=16)
        row = LayersRow(layer=one, layers=3, peers=("graph",))
        (operands,) = inputs = row.inputs(row.sets)
        assert len({x["indices"].tobytes() for x in operands["layers"]}) == 3
        contestants = row.contestants("ours", inputs) | row.contestants("graph", inputs)
        got = contestants["ours"].run(operands)
        q, (first, *_) = operands["q"], operands["layers"]
        for x in operands["layers"]:
            near, far = (
                Cache(x[name].entries, first[name].block_table) for name in ("window_cache", "compressed_cache")
            )
            q, _ = one.ours(**x | {"q": q, "window_cache": near, "compressed_cache": far})
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, q)), rtol=0.02, atol=0.02)
        times = row.times({"ours": {"seconds": 1.0, "rounds": [1.0, 1.0], "kernels": {}}}, contestants)
        assert times.keys() == {"ours", "graph"} and len(times["graph"]["rounds"]) == 2

    @pytest.mark.parametrize(
        "row", [row for row in ROWS if {"contiguous", "v4_fp8"} & {*row.peers}], ids=lambda r: r.name
    )
    def test_peers_that_are_ours_on_other_operands(self, row):
        other = row.of(row.peers[0])
        assert other != row and row.calls == {row, other}
        assert row.function(row.peers[0]).__self__ == other

    def test_steps_under_graphs(self):
        """Each step gets the previous one's results."""

        def step(q, by):
            return q + by

        q = jnp.zeros(3)
        times = measure.under_graphs(step, {"q": q, "by": jnp.ones(3)}, rounds=4)
        assert len(times["rounds"]) == 4 and 0 < times["seconds"] < 1 and not q.is_deleted()

    def test_kernels_of_a_trace(self):
        def event(start, name, module):
            return types.SimpleNamespace(
                start_ns=float(start), duration_ns=10.0 + start, name=name, stats=[("hlo_module", module)]
            )

        def line(name, *events):
            return types.SimpleNamespace(name=name, events=events)

        ours = [event(start, name, "jit_ours") for start, name in ((60, "b"), (20, "a"), (1, "b"), (0, "a"))]
        first = line("Stream #1", *ours, event(9, "c", "jit_xla"))
        planes = [
            types.SimpleNamespace(name="/device:GPU:0", lines=[first, line("XLA Ops", event(5, "a", "jit_ours"))]),
            types.SimpleNamespace(name="/host:CPU", lines=[line("Stream #2", event(7, "h", "jit_ours"))]),
        ]
        found = measure.kernels(types.SimpleNamespace(planes=planes))
        assert [name for _, _, name in found["jit_ours"]] == ["a", "b", "a", "b"] and len(found["jit_xla"]) == 1
        times = measure.summary("ours", found["jit_ours"], burst=1, rounds=2)
        assert times["rounds"] == pytest.approx([12e-9, 100e-9]), "the first b begins under its a"
        assert times["seconds"] == pytest.approx(56e-9)
        assert times["kernels"] == pytest.approx({"a": 20e-9, "b": 36e-9})
        with pytest.raises(RuntimeError, match="saw 4 kernels in 3 calls"):
            measure.summary("ours", found["jit_ours"], burst=3, rounds=1)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_found_out_first(option, capsys, monkeypatch, results):
    monkeypatch.setattr(bench, "tables", lambda rows: pytest.fail("worked before it looked"))
    assert main(["bench", "--from", str(results), option, "/nowhere/file.png"]) == 2
    assert capsys.readouterr().err == "/nowhere/file.png: No such file or directory\n"


def test_bench_from_nothing(capsys, results):
    assert main(["bench", "--from", str(results), "--filter", "nonsense"]) == 2
    assert "No row of " in capsys.readouterr().out
    assert main(["bench", "--from", "/nowhere/file.json"]) == 2
    assert capsys.readouterr().err == "/nowhere/file.json: No such file or directory\n"


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda x: None, "results: got NoneType, wanted an object"),
        (lambda x: [x], "results: got list, wanted an object"),
        (lambda x: x | {"rows": {}}, "results: rows: got dict, wanted what"),
        (lambda x: {"traceEvents": []}, "results: date: got nothing, wanted what"),
        (lambda x: x | {"rows": [1]}, "row 0: got int, wanted an object"),
        (lambda x: x | {"rows": [x["rows"][0] | {"flops": "many"}]}, "row 0: flops: got str"),
        (lambda x: x | {"rows": [x["rows"][0] | {"suite": "other"}]}, "row 0: suite: got other, wanted dsv4 or"),
        (lambda x: x | {"rows": [x["rows"][0] | {"times": {"ours": 3}}]}, "row 0: times of ours: got int"),
    ],
)
def test_bench_from_another_json(spoil, says, results, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(spoil(json.loads(results.read_text()))))
    assert main(["bench", "--from", str(path)]) == 2
    assert f"{path}: {says}" in capsys.readouterr().out


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1"])
def test_bench_from_no_json(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_bytes(text)
    assert main(["bench", "--from", str(path)]) == 2
    assert f"{path}: got no JSON (" in capsys.readouterr().out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A file that a bench might have written."""

    def times(us):
        return {"seconds": us * 1e-6, "rounds": [us * x * 1e-6 for x in (0.99, 1, 1.01)], "kernels": {}}

    rows = []
    for name, row in ((suite.name, row) for suite in SUITES.values() for row in suite.rows):
        floor = 1e6 * max(row.flops / 800e12, row.bytes / 4.2e12)
        rows.append(
            {
                "suite": name,
                "name": row.name,
                "flops": row.flops,
                "bytes": row.bytes,
                "matmul_flops_per_s": 800e12,
                "copy_bytes_per_s": 4.2e12,
                "times": {"ours": times(floor / 0.8) | {"parts": {"products": 3e-4, "norm": 1e-4}}}
                | {peer: times(floor / 0.5) for peer in row.peers[:1]},
                "skipped": dict.fromkeys(row.peers[1:], "ValueError: no"),
            }
        )
    path = tmp_path_factory.mktemp("bench") / "results.json"
    machine = {"versions": {"jax": "0.11.2"}, "devices": [{"name": "NVIDIA H200"}]}
    path.write_text(json.dumps({"date": "2026-01-01T00:00:00+00:00", **machine, "rows": rows}))
    return path


def test_tables_from_results(results, capsys):
    assert main(["bench", "--from", str(results)]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line in SUITES] == [*SUITES]
    for row in ROWS:
        assert row.name in text
    assert text.count("1.60") == sum(bool(row.peers) for row in ROWS) and "ValueError: no" in text


def test_tables_of_some_results(results, capsys):
    assert main(["bench", "--from", str(results), "--suite", "window", "--filter", "d 512*"]) == 0
    assert sum(line.startswith("d ") for line in capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_from_results(results, suffix, tmp_path):
    path = tmp_path / f"picture.{suffix}"
    assert main(["bench", "--from", str(results), "--plot", str(path)]) == 0
    head = path.read_bytes()[:200]
    assert (b"PNG" if suffix == "png" else b"<svg" if b"<svg" in head else b"<?xml") in head


def test_a_picture_is_the_same_bytes_again_and_its_text_is_text(results, tmp_path):
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    for path in (first, again):
        assert main(["bench", "--from", str(results), "--plot", str(path)]) == 0
    assert first.read_bytes() == again.read_bytes()
    assert ">share of the roofline</text>" in first.read_text()
    assert "@media(prefers-color-scheme:dark)" in first.read_text()


def test_a_picture_can_be_read_on_a_phone(results, tmp_path):
    """It is as wide as the pages' pictures, 640 pixels, and no type is smaller than 14 of them."""
    path = tmp_path / "picture.svg"
    assert main(["bench", "--from", str(results), "--plot", str(path)]) == 0
    text = path.read_text()
    assert float(re.search(r'width="([\d.]+)pt"', text)[1]) == pytest.approx(480, abs=0.5)
    sizes = {float(size) for size in re.findall(r"font(?:-size)?: [^;\"]*?([\d.]+)px", text)}
    assert sizes and min(sizes) * 640 / 480 > 14


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore:builtin type event_stats")
def test_bench(capsys):
    assert main(["bench", "--filter", "*b1 s512*", "--rounds", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["times"].keys() == {"ours", "cudnn", "xla"}
    assert any("mha_fwd_sm90" in kernel for kernel in row["times"]["ours"]["kernels"])


class TestMachineCode:
    """A row names the kernels that it timed, by the profiler's names and the program's custom calls."""

    PACKED = (("a", "v4_fp8"), ("b", "v41_fp8"), ("c", ""))

    @pytest.fixture(autouse=True)
    def built(self, monkeypatch, no_gpu):
        def row(key, op, symbol, arch="sm_90a", **choices):
            return {"key": key, "op": op, "symbol": symbol, "arch": arch, "choices": choices, "sha256": key * 64}

        rows = [row(key, "dsv4_decode", "mla_0", dtype="bfloat16", packing=x) for key, x in self.PACKED]
        rows += [row(f"{d}", "mha_fwd", "mha_0", dtype="float16", d=d, max_heads=128) for d in (64, 128)]
        rows += [
            row("f", "csa_fwd", "mla_0"),
            row("g", "combine", "combine_0"),
            row("h", "csa_fwd", "mla_0", "sm_100f"),
        ]
        monkeypatch.setattr(library, "manifest", lambda: {"variants": rows})
        monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))

    @pytest.mark.parametrize(
        ("symbols", "program", "keys"),
        [
            ({"mla_0", "fusion"}, "", "abcf"),
            ({"mla_0", "combine_0"}, 'bf16[8], custom_call_target="dsv4_fmha_dsv4_decode", packing = "v4_fp8"', "ag"),
            ({"mla_0"}, 'bf16[8], custom_call_target="dsv4_fmha_dsv4_decode", {packing = "", order = 0}', "c"),
            ({"mla_0"}, 'f16[8], custom_call_target="dsv4_fmha_dsv4_decode"', ""),
            ({"mla_0"}, 'f16[8], custom_call_target="dsv4_fmha_csa_fwd"', "f"),
            ({"combine_0"}, 'f16[8], custom_call_target="dsv4_fmha_csa_fwd"', "g"),
        ],
    )
    def test_of_a_row(self, symbols, program, keys):
        assert machine_code(symbols, program) == {key: key * 16 for key in keys}

    def test_the_width_of_heads(self):
        program = 'a = f16[1,64,4,128]{3,2} custom-call(b), custom_call_target="dsv4_fmha_mha_fwd"'
        assert [*machine_code({"mha_0"}, program)] == ["128"]

    def test_what_has_changed(self):
        built = library.manifest()["variants"]
        recorded = {"a": "a" * 16, "old name": "b" * 16, "c": "x" * 16, "gone": "y" * 16}
        assert changed(recorded, built, is_whole=True) == ["c", "gone"]
        assert changed(recorded, built, is_whole=False) == ["c"]
