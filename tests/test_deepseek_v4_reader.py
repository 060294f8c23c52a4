"""Chunks of prompts in examples/deepseek_v4: by a program for each kind of layers (reader.py), and over devices."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from examples.deepseek_v4 import common, devices
from examples.deepseek_v4.drafts import DSpark
from examples.deepseek_v4.model import Model
from examples.deepseek_v4.reader import Reader
from examples.serving import Request, Server

from .test_deepseek_v4 import CONFIGS, assert_close, prompts, random, small


@pytest.mark.parametrize("n, apart", [(1, False), *(pytest.param(2, x, marks=pytest.mark.slow) for x in (False, True))])
@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
def test_chunks(name, n, apart, monkeypatch):
    """The bits of one program of all layers: logits, and caches, which are donated.

    apart: whether devices share out the tokens of streams, as they do of long chunks. None has those of all then.
    """
    monkeypatch.setattr(devices, "FEWEST", 12 // n if apart else 128)
    model, params = small(name)
    tokens, lengths = prompts(3, 36), np.array([21, 4, 30], np.int32)
    with common.mesh_of(1, n, data=1) if n > 1 else contextlib.nullcontext():
        if n > 1:
            params = jax.device_put(params, model.partition())
        caches, others = (model.cache(3, 40, jnp.float32) for _ in range(2))
        calls = [
            (tokens[:, at : at + 12], np.full(3, at, np.int32), np.minimum(lengths, at + 12)) for at in (0, 12, 24)
        ]
        if n > 1:
            calls = jax.device_put(calls, jax.P())
        whole = jax.jit(model.read, donate_argnums=2, out_shardings=None if n == 1 else jax.P())
        (first, *of_first), before = calls[0], caches
        read = Reader(model, params, first, caches, *of_first)
        for some, *where in calls:
            logits, caches = read(params, some, caches, *where)
            want, others = whole(params, some, others, *where)
            np.testing.assert_array_equal(logits, want)
        jax.tree.map(np.testing.assert_array_equal, caches, others)
        assert all(x.is_deleted() for x in jax.tree.leaves(before) if x.size)
        own = {int(s) for s in re.findall(r"f32\[3,(\d+),4,64\]", read.as_text())}
        assert own & {6, 12} == {6 if apart else 12}


@pytest.mark.slow
@pytest.mark.parametrize("name, shape", [("v4", (1, 2)), ("v4", (2, 2)), ("v4.1", (2, 1))])
def test_devices_share_out_the_tokens_of_a_chunk(name, shape, monkeypatch):
    """Where each has enough of them: no device has the streams of all, and numbers are those of one device."""
    model, params = small(name)
    operands = prompts(2, 24, 4), np.int32(0), np.array([24, 17], np.int32)

    def read(params):
        return jax.jit(lambda params: model.read(params, operands[0], model.cache(2, 32, jnp.float32), *operands[1:]))

    want = read(params)(params)
    monkeypatch.setattr(devices, "FEWEST", 6)
    with common.mesh_of(*shape, data=1) as mesh:
        params = jax.tree.map(lambda x, p: jax.device_put(x, NamedSharding(mesh, p)), params, model.partition())
        compiled = read(params).lower(params).compile()
        got = compiled(params)
    streams = re.findall(r"= f32\[2,(\d+),4,64\]", compiled.as_text())
    assert str(24 // mesh.size) in streams and "24" not in streams
    jax.tree.map(functools.partial(assert_close, tolerance=3e-4), got, want)


def test_programs_are_of_kinds():
    """Their number does not grow with that of layers, nor does their size."""

    def programs(layers):
        kinds = [f"{common.KINDS[kind]}_attention" for kind in (0, *[1, 2] * layers)][:layers]
        model = Model.from_config(CONFIGS["v4"] | {"num_hidden_layers": layers, "layer_types": kinds})
        params, caches = jax.eval_shape(lambda: (model.init(jax.random.key(0)), model.cache(2, 64)))
        made = Reader(model, params, np.zeros((2, 8), np.int32), caches, *[np.full(2, 8, np.int32)] * 2)
        return sorted(text.count("\n") for text in map(jax.stages.Compiled.as_text, made.programs))

    few = programs(5)
    assert len(few) == 6 and programs(9) == few


def test_shapes_are_those_of_the_compiled_programs():
    model, params = small()
    at = np.zeros(1, np.int32), np.full(1, 8, np.int32)
    read = Reader(model, params, prompts(1, 8), model.cache(1, 16, jnp.float32), *at)
    with pytest.raises(TypeError, match="int32"):
        read(params, prompts(1, 9), model.cache(1, 16, jnp.float32), *at)


@pytest.mark.parametrize(
    "name, drafts", [("v4", 0), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("v4", "v4.1"))]
)
def test_served(name, drafts):
    """Requests, some of which begin alike, say what they say where a chunk is one program; and pages are not copied."""
    model, params = random(DSpark.from_config(CONFIGS[name])) if drafts else small(name)
    rng, beginning, said = np.random.default_rng(0), np.arange(34, dtype=np.int32), []
    ends = [rng.integers(0, 64, n, np.int32) for n in (5, 5, 12)]
    how = {"chunk": 16, "page": 16, "pages": 6, "speculate": drafts, "readers": 2}
    for reader in (None, Reader):
        server = Server(model, model.joined(params), jnp.float32, 2, 64, **how, reader=reader)
        server.compile()
        pools = [x.unsafe_buffer_pointer() for x in server.caches.pools()]
        requests = [Request(np.r_[beginning, end], 6, 0.0) for end in ends]
        for request in requests:
            server.submit(request)
        while not server.is_idle:
            server.work()
        said.append([request.said for request in requests])
        assert server.shared >= 32 and [x.unsafe_buffer_pointer() for x in server.caches.pools()] == pools
    assert said[0] == said[1] and all(len(x) == 6 for x in said[0])
