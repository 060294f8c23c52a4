"""The examples run, and print what they say they do."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache, Span, dsv4_decode, lightning_indexer, reference
from jax_dsv4_fmha._host import library


def example(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart(capsys):
    example("quickstart")
    device, implementation, compared, *results = capsys.readouterr().out.splitlines()
    assert device.startswith("device") and implementation.startswith("implementation") and "float32" in compared
    for line, most in zip(results, (1.0, 16), strict=True):  # o is rounded once, lse not at all
        assert float(re.search(r"at most ([\d.]+) ulp away$", line)[1]) <= most, line


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_context_parallel_gradients(kind):
    """Gradients of q, k and sink around a ring of 4 equal those on one device."""
    attention = example("context_parallel").attention
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(kind,), devices=jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    q, k, do = (jnp.asarray(rng.standard_normal((2, 32, h, 16)), jnp.float32) for h in (4, 1, 4))
    sink = jnp.linspace(-1, 3, 4)

    def loss(f):
        def total(q, k, sink, do):
            o, lse = f(q, k, sink)
            return (o * do).sum() + jnp.sin(lse).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))

    want = loss(lambda q, k, sink: reference.fmha(q, k, span=Span.causal(32), sink=sink))(q, k, sink, do)
    spec = NamedSharding(mesh, P(None, "ring"))
    q, k, do = (jax.device_put(x, spec) for x in (q, k, do))
    sink = jax.device_put(sink, NamedSharding(mesh, P()))
    got = loss(lambda q, k, sink: attention(q, k, mesh, sink))(q, k, sink, do)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_long_cache(capsys):
    example("long_cache").main()
    assert re.match(r"8 \w+ devices with room for 64 entries each: lse differs by \d", capsys.readouterr().out)


@pytest.mark.gpu
def test_long_cache_by_kernels(cuda):
    """A step of V4-Flash's sizes after 256 Ki tokens, over all GPUs, is that of one."""
    example("long_cache").main(b=2, tokens=2**18, h=64, d=512, index_heads=64, d_index=128, topk=512)


@pytest.mark.slow
def test_a_cache_that_devices_share_out(devices=3, s_q=3):
    """Choice and attention are those of one device, ties among scores and scores that are no number included; an idle
    place sees nothing.
    """
    long_cache, rng = example("long_cache"), np.random.default_rng(devices)
    mesh = jax.make_mesh((devices,), ("ring",), devices=jax.devices("cpu")[:devices])
    b, h, d, topk, ratio, capacity = 4, 4, 32, 40, 4, 3 * 64 * devices

    def normal(*shape, step=None):
        x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        return x if step is None else jnp.round(x / step) * step

    lengths = jnp.array([ratio * capacity - 1, 900, 140, 0])
    window, entries, keys = Cache(normal(b, 40, d)), normal(b, capacity, d), normal(b, capacity, 16, step=0.5)
    keys = keys.at[:, 7:30].set(jnp.nan)  # of which sequences with few entries choose some
    q, index_q, sink = normal(b, s_q, h, d), normal(b, s_q, h, 16, step=1), normal(h)
    weights = jnp.ones((b, s_q, h))
    held = long_cache.zeros(mesh, b, capacity, d, 16, jnp.float32)
    for first in (0, 100):  # a part of the entries, and then the others
        places = jnp.broadcast_to(jnp.arange(first, capacity if first else 100), (b, capacity - 100 if first else 100))
        held = long_cache.append(held, mesh, entries[:, places[0]], keys[:, places[0]], places)
    step = jax.jit(functools.partial(long_cache.attend, mesh=mesh, ratio=ratio, topk=topk, window=16))
    operands = (q, index_q, weights, window, held, lengths, sink)
    got = step(*operands)

    indices = lightning_indexer(index_q, keys, weights, topk=topk, span=Span.compressed(s_q, ratio, lengths - s_q))
    how = {"lengths": lengths, "sink": sink, "ratio": ratio, "window": 16}
    want = dsv4_decode(q, window, Cache(entries), indices=indices, **how)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)
    assert float(jnp.abs(dsv4_decode(q, window, **{**how, "ratio": None})[0] - want[0])[:3].max()) > 0.1
    text = step.lower(*operands).compile().as_text()
    assert f",{capacity // devices}," not in "".join(x for x in text.splitlines() if "all-gather(" in x)


def test_a_cache_that_cannot_be_shared_out():
    long_cache, mesh = example("long_cache"), jax.make_mesh((4,), ("ring",), devices=jax.devices("cpu")[:4])
    with pytest.raises(ValueError, match="capacity: got 128, want a multiple of 64 entries on each of 4 devices"):
        long_cache.zeros(mesh, 1, 128, 32, 16)


@pytest.mark.slow
def test_paged_devices(capsys):
    """Texts end, others take their places and pages, and each has the results that it has alone."""
    off = example("paged_devices").main(texts=19)
    text = capsys.readouterr().out
    places, reused = (int(re.search(rf"(\d+){words}", text)[1]) for words in (" places", " of them where"))
    assert off < 1e-5 and places == 16 and reused >= 3
    assert "collectives of a step: none" in text and str([3] * 8) in text


def test_sharded(capsys):
    example("sharded").main(s=128, h=8, d=16)
    text = capsys.readouterr().out
    assert "o P('data', None, 'tensor'), collectives none" in text
    assert "gradient: collectives ['all-reduce'" in text


@pytest.mark.gpu
def test_training_by_kernels_learns_what_it_does_by_the_reference(cuda, monkeypatch):
    """200 steps from the same weights over the same batches give the same curves, of both losses, up to noise."""
    pytest.importorskip("optax")
    main = example("train_step").main
    by_kernels = np.asarray(main(steps=200))
    monkeypatch.setattr(library, "architectures", lambda: ())
    by_reference = np.asarray(main(steps=200))
    assert by_kernels.shape == (200, 2)  # of tokens; of the indexer
    assert by_kernels[-1, 0] < by_kernels[0, 0] - 2 and by_kernels[-1, 1] < 0.5 * by_kernels[0, 1]
    a, b = (x.reshape(-1, 10, 2).mean(1) for x in (by_kernels, by_reference))
    print("largest differences of ten steps' mean losses:", np.abs(a - b).max(0))
    assert (np.abs(a - b).max(0) < (0.05, 0.05 * by_reference[0, 1])).all()


@pytest.mark.slow
def test_train_step():
    pytest.importorskip("optax")
    losses = example("train_step").main(steps=15, b=4)
    assert losses[-1][0] < losses[0][0] - 1 and losses[-1][1] < 0.8 * losses[0][1]  # losses of tokens; of the indexer


@pytest.mark.parametrize("speculate", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_serve(speculate, capsys, in_place):
    """Requests come and go in two places, over too few pages; greedy ones say what they say alone, with drafts too."""
    with jax.default_matmul_precision("float32"):
        sizes = {"places": 2, "chunk": 16, "longest": 56, "wanted": 24, "page": 16, "pages": 6, "beginning": 34}
        done, server = example("serve").main(requests=8, speculate=speculate, **sizes)
        for request in done:
            if not request.temperature:
                assert server.alone(request).tolist() == request.said
    assert sorted(in_place) == ["begin", "read", "say"]
    assert len(done) == 8 and all(len(r.said) == r.wanted for r in done)
    assert server.put_back > 0 and server.shared >= 32 and len(server.pages.free) + server.pages.idle == 6
    assert (server.pages.table == -1).all() and not server.pages.owners.any()
    said = capsys.readouterr().out
    assert "8 requests in 2 places" in said
    found = re.search(r"(\d+) of (\d+) drafts were right; a place said ([\d.]+) tokens a step", said)
    assert bool(found) == bool(speculate)
    if found:
        right, drafted = int(found[1]), int(found[2])
        assert 0 < right < drafted and float(found[3]) > 1 and server.accepted == right


@pytest.mark.parametrize("page", [pytest.param(0, marks=pytest.mark.slow), 16])
def test_generate(page, capsys, in_place):
    """Steps give the logits of prefill, across the first entry of ratio 128 and around the rings."""
    with jax.default_matmul_precision("float32"):
        error = example("generate").main(batch=2, prompt=120, steps=16, page=page)
    assert error.shape == (2, 16) and error.max() < 1e-5 and len(in_place) == 1
    found = re.search(r"caches of (\d+) KiB, (\d+) KiB updated in place", capsys.readouterr().out)
    assert int(found[2]) >= int(found[1])


@pytest.mark.slow
def test_generate_in_fp8():
    with jax.default_matmul_precision("float32"):
        error = example("generate").main(batch=2, prompt=120, steps=12, page=8, fp8=True)
    assert jnp.median(error) < 5e-3


def test_generate_says_how_it_is_called():
    command = [sys.executable, str(Path(__file__).parents[1] / "examples/generate.py"), "--help"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    assert all(option in done.stdout for option in ("--batch", "--prompt", "--steps", "--page", "--fp8"))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch", "0"], "--batch: got 0, wanted at least 1"),
        (["--batch", "3", "--prompt", "14"], "--prompt: got 14, wanted at least 15"),  # each is 7 shorter than another
        (["--steps", "-1"], "--steps: got -1, wanted at least 1"),
        (["--page", "-1"], "--page: got -1, wanted at least 0"),
    ],
)
def test_generate_checks_its_options(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", *options])
    with pytest.raises(SystemExit):
        example("generate").arguments()
    assert f"error: argument {message}" in capsys.readouterr().err


def test_examples_need_what_their_extra_installs():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for path in (root / "examples").rglob("*.py"):
        if path.name in ("interpret.py", "maxtext_times.py"):  # they say what they need: the compiler, MaxText
            continue
        extra = [
            *project["dependencies"],
            *extras["examples"],
            *(extras["http"] if path.name in ("endpoint.py", "chat.py") else []),
            *(extras["plot"] if path.name == "metrics.py" else []),  # --plot says so, where it is not there
        ]
        installed = {re.match(r"\w+", name)[0] for name in extra} | {"jax_dsv4_fmha", "examples"}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            needed = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
            assert needed <= installed, path.name
