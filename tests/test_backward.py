"""The backward kernels' raw calls: their launch against the DSL's own host stub, and on a GPU their answers."""

import ctypes
import dataclasses
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from importlib import util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreter.kernels import native
from interpreter.kernels.gradients import FUNCTIONS, assert_right, gradient, operands
from interpreter.kernels.native import Shape, addresses_of, plan
from jax_dsv4_fmha._definitions import attention_gradient
from jax_dsv4_fmha._definitions.rope import normed_and_rotated, rotated_pairs
from jax_dsv4_fmha._host import call, library
from jax_dsv4_fmha._host.call import TARGETS
from kernels.abi import MlaBackward
from kernels.variants import VARIANTS
from tests.oracle import HostStub

ALL = [v for v in VARIANTS if isinstance(v, MlaBackward) and not v.bounds]
BUILT = [v for v in native.built(MlaBackward) if not v.bounds]
every_built = pytest.mark.parametrize("variant", BUILT, ids=lambda v: v.key)
SHAPES = [
    Shape(b, s_q, s_kv, h_q, h_kv, 512, s_kv1, topk)
    for b, s_q, s_kv, h_q, h_kv, s_kv1, topk in [
        (1, 1, 1, 1, 1, 1, 1),
        (2, 70, 333, 8, 1, 80, 512),
        (1, 4096, 4096, 128, 1, 1024, 1024),
        (4, 2, 300, 65, 1, 100_000, 192),
        (3, 5, 1000, 200, 2, 0, 0),
        (2, 1000, 77, 16, 16, 0, 0),
    ]
]


def test_every_op_has_a_function_and_a_target():
    assert set(FUNCTIONS) == {v.name for v in ALL} <= set(TARGETS)


@pytest.mark.parametrize("variant", {v.name: v for v in ALL}.values(), ids=lambda v: v.key)
def test_lowers_for_cuda_without_a_gpu(variant):
    x = operands(variant, b=2, s_q=3, h_q=8, s_kv=20, s_kv1=9, topk=5)
    f = jax.jit(functools.partial(FUNCTIONS[variant.name], scale=0.125))
    text = f.trace(*x.arguments()).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call" in line)
    assert f"@dsv4_fmha_{variant.name}(" in call and "scale = 1.250000e-01 : f32" in call
    dtype = {"float16": "f16", "bfloat16": "bf16"}[variant.dtype]
    keys = ("20x1",) if variant.sources == ("span",) else ("20", "9")[: len(variant.sources)]
    wanted = [f"tensor<2x3x8x{variant.d}x{dtype}>", *(f"tensor<2x{x}x{variant.d}xf32>" for x in keys)]
    assert re.search(r"-> \(" + ", ".join(wanted) + r"\)", call), call


@pytest.mark.parametrize("op", sorted({v.name for v in ALL if v.deterministic}))
def test_a_deterministic_gradient_bounds_its_keys_first(op):
    """A unit for each key of all sources, one after the other; sums of 32 bits."""
    variant = next(v for v in ALL if v.name == op and v.deterministic)
    x = operands(variant, b=2, s_q=3, h_q=8, s_kv=20, s_kv1=9, topk=5)
    f = jax.jit(functools.partial(FUNCTIONS[op], scale=0.125, deterministic=True))
    text = f.trace(*x.arguments()).lower(lowering_platforms=("cuda",)).as_text()
    bounds, gradient = (line for line in text.splitlines() if "custom_call @dsv4_fmha" in line)
    keys = ("20x1",) if variant.sources == ("span",) else ("20", "9")[: len(variant.sources)]
    assert f"@dsv4_fmha_{op.replace('bwd', 'bounds')}(" in bounds and f"@dsv4_fmha_{op}(" in gradient
    assert all(f"tensor<2x{x}x2xui32>" in bounds and f"tensor<2x{x}x{variant.d}xui32>" in gradient for x in keys)
    assert "tensor<1xf32>" in bounds and f"tensor<{2 * sum(int(x.split('x')[0]) for x in keys)}xf32>" in gradient


# both kinds of sources, and both ways of cutting rows
@pytest.mark.parametrize("op", ["mla_span_bwd", "csa_bwd", "mla_span_bwd_turned"])
def test_launch_is_what_the_host_stub_launches(op, tmp_path):
    if util.find_spec("cutlass") is None or shutil.which("gcc") is None:
        pytest.skip("needs nvidia-cutlass-dsl and gcc")
    variant = next((v for v in BUILT if (v.name, v.dtype) == (op, "bfloat16")), None)
    if variant is None:
        pytest.skip("not built")
    row = next(row for row in library.manifest()["variants"] if row["key"] == variant.key)
    addresses = {name: 0x7F00_0000_0000 + i * 0x1000_0000 for i, name in enumerate(addresses_of("mla_backward"))}
    pointers = {name: ctypes.c_void_p(x) for name, x in addresses.items()}
    aliases = {"do": pointers["dout"], "keys0": pointers["k0"], "keys1": pointers["k1"]}
    stub = HostStub(variant, tmp_path)
    for shape, processors in itertools.product(SHAPES, (1, 132)):
        one_source = variant.sources == ("span",)
        if shape.h_kv > 1 and not one_source:
            continue
        ints = {name: ctypes.c_int32(x) for name, x in shape._asdict().items()}
        keys = {"s_kv0": ints["s_kv"], "s_batch0": ints["s_kv"], "s_batch1": ints["s_kv1"]}
        keys |= {"topk0": ctypes.c_int32(0) if one_source else ints["topk"], "topk1": ints["topk"]}
        keys |= {"eps": ctypes.c_float(native.EPS), "do_heads": ctypes.c_int32(native.group_heads(shape.h_q))}
        keys |= {"do_queries": ctypes.c_int32(shape.b * shape.s_q)}
        rest = {"ctas": ctypes.c_int32(processors), "scale": ctypes.c_float(0.1), "stream": ctypes.c_void_p()}
        theirs = stub.run({**pointers, **aliases, **ints, **keys, **rest})
        tiles = {name: row[name] for name in ("tile_m", "tile_n", "cluster")}
        ours = plan(variant, shape, 0.1, **tiles, processors=processors, addresses=addresses)
        assert theirs.grid == (ours.grid, 1, 1), shape
        assert theirs.block == (row["threads"], 1, 1)
        assert theirs.cluster == (row["cluster"], 1, 1)
        assert theirs.smem_bytes == row["smem_bytes"]
        for (name, mine), its in zip(ours.params.items(), theirs.params, strict=True):
            assert mine == its or (name == "topk0" and variant.sources[0] == "span"), (name, shape)


# On a GPU.


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.usefixtures("cuda")(test))


def run(variant, x, scale):
    """Runs into results that hold NaN, so an element that is not written shows."""
    keys = x.arguments()[5 : 5 + 3 * len(variant.sources) : 3]
    results = (x.attention.q, *(k.astype(jnp.float32) for k in keys))
    gradient_of = functools.partial(FUNCTIONS[variant.name], scale=scale, deterministic=variant.deterministic)
    f = jax.jit(lambda into, args: gradient_of(*args), donate_argnums=0, keep_unused=True)
    return jax.tree.map(np.asarray, f(tuple(jnp.full(y.shape, jnp.nan, y.dtype) for y in results), x.arguments()))


def check(variant, **extents):
    if variant.arch not in (local := library.local_architectures()):
        pytest.skip(f"is for {variant.arch}, here is {', '.join(local)}")
    h_kv = extents.get("h_kv", 1)
    extents["h_q"] = -(-native.heads_for(variant, extents.get("h_q", 8)) // h_kv) * h_kv
    x, scale = operands(variant, **extents), variant.d**-0.5
    assert_right(run(variant, x, scale), x, scale)


@on_gpu
@every_built
def test_runs(variant):
    check(variant)
    check(variant, h_q=3, s_q=1, b=5, s_kv=1, s_kv1=1, topk=1)
    check(variant, h_q=65, s_q=20)
    check(variant, h_q=128, s_q=150, b=1, s_kv=400, s_kv1=300, topk=300)
    if variant.sources == ("span",):
        check(variant, h_q=8, h_kv=2)


@on_gpu
@pytest.mark.parametrize("variant", [v for v in BUILT if v.op == "mla_sparse_bwd"], ids=lambda v: v.key)
def test_runs_on_a_pool_of_all_sequences(variant):
    x, scale = operands(variant, h_q=native.heads_for(variant, 16), s_q=9), variant.d**-0.5
    q, *rows, kv, indices, length = x.arguments()
    b, s_kv, d = kv.shape
    slots = np.where((indices >= 0) & (indices < s_kv), indices + s_kv * np.arange(b)[:, None, None], -1)
    f = jax.jit(functools.partial(FUNCTIONS[variant.name], scale=scale))
    dq, dkv = map(np.asarray, f(q, *rows, kv.reshape(b * s_kv, d), slots.astype(np.int32), length))
    assert_right((dq, dkv), x, scale)


@on_gpu
@every_built
def test_dq_is_the_same_every_time(variant):
    """dkv is only nearly the same: sums in no fixed order round differently, except in fixed point."""
    if variant.arch not in library.local_architectures():
        pytest.skip(f"is for {variant.arch}")
    x, scale = operands(variant, h_q=native.heads_for(variant, 64), s_q=100), variant.d**-0.5
    first, *others = (run(variant, x, scale) for _ in range(20 if variant.deterministic else 4))
    for other in others:
        np.testing.assert_array_equal(first[0].view(np.uint16), other[0].view(np.uint16))
        for a, b in zip(first[1:], other[1:], strict=True):
            if variant.deterministic:
                np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@on_gpu
def test_runs_inside_cuda_graphs():
    """Runs in a process of its own, with every op that can go into a command buffer. Sums are cleared every time."""
    code = """
import functools, jax, numpy as np
from jax_dsv4_fmha._host import library
from tests import test_backward as t
for variant in t.BUILT:
    if variant.arch in library.local_architectures():
        x = t.operands(variant, h_q=t.native.heads_for(variant, 16), s_q=20)
        how = {"scale": variant.d**-0.5, "deterministic": variant.deterministic}
        f = jax.jit(functools.partial(t.FUNCTIONS[variant.name], **how))
        for _ in range(3):
            t.assert_right(jax.tree.map(np.asarray, f(*x.arguments())), x, variant.d**-0.5)
"""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    here = os.path.dirname(__file__)
    path = os.pathsep.join([os.path.dirname(here), here, os.getcwd()])
    env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


SOURCES = {
    "mla_span_bwd": ("kv", "start", "stop"),
    "mla_span_bwd_turned": ("kv", "start", "stop", "table"),
    "mla_sparse_bwd": ("kv", "indices", "length"),
    "csa_bwd": ("window_kv", "start", "stop", "kv", "indices", "length"),
    "hca_bwd": ("window_kv", "start", "stop", "kv", "start2", "stop2"),
}


@on_gpu
@pytest.mark.parametrize(
    ("op", "operand", "change", "says"),
    [
        ("mla_span_bwd", "do", lambda x: x[:, 1:], r"do: got shape \[2, 69, 8, 512\], wanted \[2, 70, 8, 512\]"),
        ("mla_span_bwd", "do", lambda x: x.astype(np.float16), "do: got F16, wanted BF16 like q"),
        ("mla_span_bwd", "lse", lambda x: x[..., :3], r"lse: got shape \[2, 70, 3\], wanted \[2, 70, 8\]"),
        ("mla_span_bwd", "sink_factor", lambda x: x.astype(jnp.bfloat16), "sink_factor: got BF16, wanted F32"),
        ("mla_span_bwd", "kv", lambda x: x[:, :, 0], r"kv: got .* wanted \[b, s_kv, h_kv, d\]"),
        ("mla_sparse_bwd", "delta", lambda x: x[:1], r"delta: got shape \[1, 70, 8\], wanted \[2, 70, 8\]"),
        ("mla_sparse_bwd", "indices", lambda x: x[..., :0], "topk is 0, wanted at least 1"),
        ("csa_bwd", "kv", lambda x: x.astype(np.float16), "kv: got F16, wanted BF16 like q"),
        ("hca_bwd", "start2", lambda x: x[:1], r"start2: got shape \[1, 70\], wanted \[2, 70\]"),
        ("mla_span_bwd_turned", "do", lambda x: x[:, 0], r"do: got .* wanted \[groups, b, s_q, group_heads, d\]"),
        (
            "mla_span_bwd_turned",
            "do",
            lambda x: x[:, :, :, :3],
            r"do: got shape \[2, 2, 70, 3, 512\], wanted \[8, 2, 70, 1",
        ),
        ("mla_span_bwd_turned", "table", lambda x: x[..., :32], r"table: got shape .* wanted \[2, 70, 64\]"),
        ("mla_span_bwd", "q", lambda x: x[..., :64], r"do: got shape \[2, 70, 8, 512\], wanted \[2, 70, 8, 64\]"),
    ],
)
def test_handler_refuses_operands(op, operand, change, says, monkeypatch):
    """Where the check while tracing, which says the same, does not refuse them before."""
    monkeypatch.setattr(call, "check", lambda *_: None)
    variant = next(v for v in ALL if (v.name, v.dtype) == (op, "bfloat16"))
    names = ["q", "do", "lse", "sink_factor", "delta", *SOURCES[op]]
    x = list(operands(variant).arguments())
    x[names.index(operand)] = change(x[names.index(operand)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"(?s)INVALID_ARGUMENT: .*{says}"):
        jax.block_until_ready(FUNCTIONS[op](*x, scale=0.1))


# The oracle, against autodiff of the definition.


@pytest.mark.parametrize("variant", {v.name: v for v in ALL if v.dtype == "bfloat16"}.values(), ids=lambda v: v.key)
def test_the_float64_gradient_is_that_of_the_package(variant):
    """Compares it with the sources' gradients in jnp, in float32 from the same operands."""
    x, scale = operands(variant, b=2, s_q=7, h_q=4, s_kv=20, s_kv1=9, topk=6), variant.d**-0.5
    a, dq, dkv = x.attention, jnp.zeros(()), []
    given, do = a.q.astype(np.float32), x.do.astype(np.float32)
    x, q, through = dataclasses.replace(x, attention=dataclasses.replace(a, q=given), do=do), given, lambda dq: dq
    if variant.turns:  # which no longer rounds
        (q,), pull = jax.vjp(lambda q: normed_and_rotated(q, a.table, eps=native.EPS), jnp.where(np.isnan(q), 1, q))
        (do,) = rotated_pairs(do, a.table, direction=1)
        through = lambda dq: pull((dq,))[0]  # noqa: E731
    for kind, keys in zip(variant.sources, a.sources, strict=True):
        k, rows = keys.k.astype(np.float32), (keys.seen_from, keys.seen_to, do, x.lse, x.sink_factor, x.delta)
        if kind == "span":
            part, of_keys = attention_gradient.fmha(q, k, None, *rows, scale=scale)
        else:
            part, of_keys = attention_gradient.sparse_fmha(q, k[:, :, 0], *rows, scale=scale)
        dq += part
        dkv.append(of_keys)
    for got, want in zip((through(dq), *dkv), gradient(x, scale), strict=True):
        np.testing.assert_allclose(np.asarray(got).reshape(want.shape), want, rtol=1e-4, atol=1e-5)
