import ctypes
import itertools
import math
import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import util

import jax
import jax.numpy as jnp
import pytest
from native import FwdShape, assert_right, fwd_operands, library, plan_fwd
from oracle import HostStub, TensorMap

from jax_dsv4_fmha import _ffi
from kernels.variants import VARIANTS

SHAPES = [
    FwdShape(b, s_q, s_kv, h_q, h_kv, 0)
    for b, s_q, s_kv, h_q, h_kv in [
        (1, 1, 1, 1, 1),
        (2, 70, 333, 8, 1),
        (1, 4096, 4096, 128, 1),
        (1, 70_000, 128, 1, 1),
        (3, 5, 1000, 8, 2),
        (3, 5, 1000, 200, 2),
        (2, 1000, 77, 16, 16),
        (1, 3, 64, 12, 4),
        (5, 129, 1, 300, 3),
    ]
]
built = pytest.mark.parametrize("variant", _ffi.variants(), ids=lambda v: v.key)


def operands(d, dtype, *, b=2, s_q=70, s_kv=150, h_q=8, h_kv=1, shared_kv=False, device=None):
    q, k, v, start, stop, sink = fwd_operands(FwdShape(b, s_q, s_kv, h_q, h_kv, d), dtype)
    return jax.device_put((q, k, None if shared_kv else v, start, stop, sink), device)


def test_import_initialises_no_backend():
    code = (
        "import jax_dsv4_fmha; from jax._src import xla_bridge;"
        "assert not xla_bridge.backends_are_initialized(), 'a backend came up'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_built_for_agrees_with_variants():
    for v in _ffi.variants():
        assert v.arch in _ffi.built_for(v.op, d=v.d, dtype=v.dtype, shared_kv=v.shared_kv)
    assert _ffi.built_for("fwd", d=63, dtype="bfloat16", shared_kv=False) == ()
    assert _ffi.built_for("fwd", d=64, dtype="float32", shared_kv=False) == ()


@pytest.mark.parametrize(("capability", "arch"), [("8.9", "sm_89"), ("9.0", "sm_90a"), ("10.0", "sm_100a")])
def test_architecture(capability, arch):
    assert _ffi._architecture(capability) == arch


@pytest.mark.parametrize("shared_kv", [False, True])
def test_lowers_for_cuda_without_a_gpu(shared_kv):
    def f(*operands):
        return _ffi.fwd(*operands, 0.125)

    lowered = jax.jit(f).trace(*operands(64, "bfloat16", shared_kv=shared_kv)).lower(lowering_platforms=("cuda",))
    (call,) = (line for line in lowered.as_text().splitlines() if "custom_call" in line)
    target = "@dsv4_fmha_fwd_shared_kv(" if shared_kv else "@dsv4_fmha_fwd("
    assert target in call
    assert "scale = 1.250000e-01 : f32" in call
    assert "tensor<2x70x8x64xbf16>, tensor<2x70x8xf32>)" in call


# The launch, against the DSL's own host stub.


@pytest.fixture(scope="module", params=[v for v in VARIANTS if v.dtype == "bfloat16"], ids=lambda v: v.key)
def stub(request, tmp_path_factory):
    if util.find_spec("cutlass") is None or shutil.which("gcc") is None:
        pytest.skip("needs nvidia-cutlass-dsl and gcc")
    return request.param, HostStub(request.param, tmp_path_factory.mktemp("oracle"))


def test_launch_is_what_the_host_stub_launches(stub):
    variant, host = stub
    row = next((row for row in _ffi.manifest()["variants"] if row["key"] == variant.key), None)
    if row is None:
        pytest.skip("not built")
    scale = 0.1
    q, k, v, o, start, stop, sink, lse = (0x7F00_0000_0000 + i * 0x1000_0000 for i in range(8))
    for shape in (shape._replace(d=variant.d) for shape in SHAPES):
        launch = host.run(host_values(shape, scale, q=q, k=k, v=v, o=o, start=start, stop=stop, sink=sink, lse=lse))
        tiles = {"tile_m": row["tile_m"], "tile_n": row["tile_n"], "shared_kv": variant.shared_kv}
        plan = plan_fwd(shape, scale, **tiles, start=start, stop=stop, sink=sink, lse=lse)
        assert launch.grid == (plan.grid, 1, 1), shape
        assert launch.block == (row["threads"], 1, 1)
        assert launch.smem_bytes == row["smem_bytes"]
        assert [len(x) for x in plan.params] == [len(x) for x in launch.params]

        tensors = [(q, plan.rows), (o, plan.rows), (k, plan.keys), *([] if variant.shared_kv else [(v, plan.keys)])]
        maps = [TensorMap.decode(blob) for blob in launch.params if len(blob) == 128]
        for (address, ours), theirs in zip(tensors, maps, strict=True):
            assert theirs.address == address
            assert theirs.extents == tuple(ours.extents[: ours.rank])
            assert theirs.strides == tuple(ours.strides[: ours.rank - 1])
            assert theirs.swizzle == 3
            # The stub's boxes are constants; ours shrink with a small shape and split odd head counts evenly.
            assert theirs.box[0] == ours.box[0] == 64
            assert math.prod(ours.box[1 : ours.rank]) <= math.prod(theirs.box[1:])
        assert maps[2].box == tuple(plan.keys.box[: plan.keys.rank])

        for i, (ours, theirs) in enumerate(zip(plan.params, launch.params, strict=True)):
            if i == len(plan.params) - 10:  # scale_log2, in whose product the last bit may be rounded otherwise
                assert struct.unpack("<f", ours) == pytest.approx(struct.unpack("<f", theirs), rel=2e-7)
            elif len(ours) != 128:
                assert ours == theirs, (i, shape)


def host_values(shape, scale, **addresses):
    """Whatever a kernel's host side may ask for, by the names it has there."""
    pointers = {name: ctypes.c_void_p(x) for name, x in addresses.items()}
    ints = {name: ctypes.c_int32(x) for name, x in shape._asdict().items()}
    sources = {  # of keys, where there may be several: the first is all that `fwd` has
        "keys0": pointers["k"],
        "from0": pointers["start"],
        "to0": pointers["stop"],
        "s_kv0": ints["s_kv"],
        **dict.fromkeys(("keys1", "from1", "to1"), ctypes.c_void_p()),
        **dict.fromkeys(("topk0", "s_kv1", "topk1"), ctypes.c_int32()),
    }
    scale_log2 = ctypes.c_float(scale * math.log2(math.e))
    return {**pointers, **ints, **sources, "scale_log2": scale_log2, "stream": ctypes.c_void_p()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile_m", [64, 128])
def test_tiles_cover_every_row_once(shape, tile_m):
    """By the definition of a tile alone: its box of rows, cut at the extents."""
    plan = plan_fwd(shape._replace(d=64), 1.0, tile_m=tile_m, tile_n=64, shared_kv=False)
    s_q, group, h_kv, inner, outer, box_inner, box_outer, tiles_inner, tiles_outer = (
        struct.unpack("<i", blob)[0] for blob in plan.params[-9:]
    )
    assert box_inner * box_outer <= tile_m
    assert plan.grid == tiles_inner * tiles_outer * h_kv * shape.b
    assert inner * outer == s_q * group == shape.s_q * shape.h_q // h_kv
    assert (tiles_inner - 1) * box_inner < inner <= tiles_inner * box_inner
    assert (tiles_outer - 1) * box_outer < outer <= tiles_outer * box_outer
    queries = {o + i // group for o, i in itertools.product((0, outer - 1), (0, inner - 1))}
    assert (min(queries), max(queries)) == (0, s_q - 1)


@pytest.mark.parametrize(
    ("change", "scale", "says"),
    [
        ({"h_q": 7, "h_kv": 2}, 1.0, "h_q is 7, wanted a multiple of h_kv = 2"),
        ({"s_kv": 0}, 1.0, "s_kv is 0, wanted at least 1"),
        ({"s_q": 2**31}, 1.0, "s_q is 2147483648, the limit is 2147483647"),
        ({"s_q": 2**28}, 1.0, r"s_q \* h_q is 2147483648"),
        ({"b": 2**18, "s_q": 2**20, "h_q": 4, "h_kv": 4}, 1.0, "grid of .* is too large"),
        ({"s_kv": 2**31 - 1, "h_kv": 8}, 1.0, r"s_kv \* h_kv \* d is"),
        ({}, math.nan, "scale is nan, wanted a finite number > 0"),
        ({}, math.inf, "scale is inf"),
        ({}, 0.0, "scale is 0"),
    ],
)
def test_plan_refuses(change, scale, says):
    shape = FwdShape(1, 16, 16, 8, 1, 64)._replace(**change)
    with pytest.raises(ValueError, match=says):
        plan_fwd(shape, scale, tile_m=64, tile_n=64, shared_kv=False)


def test_plan_takes_shapes_beyond_32_bit_addresses():
    shape = FwdShape(2, 70_000, 1_000_000, 128, 1, 512)
    plan = plan_fwd(shape, 1.0, tile_m=64, tile_n=64, shared_kv=True)
    assert plan.rows.strides[3] == 70_000 * 128 * 512 * 2
    assert plan.keys.strides[2] == 1_000_000 * 512 * 2


# On a GPU.


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.usefixtures("cuda")(test))


def check(variant, device=None, **shape):
    x, scale = operands(variant.d, variant.dtype, shared_kv=variant.shared_kv, device=device, **shape), variant.d**-0.5
    assert_right(jax.jit(_ffi.fwd, static_argnums=6)(*x, scale), *x, scale)


@on_gpu
@built
def test_runs(variant):
    check(variant)
    check(variant, h_q=8, h_kv=2)


@on_gpu
@built
def test_runs_on_every_device(variant):
    for device in jax.local_devices(backend="cuda"):
        check(variant, device)


@on_gpu
def test_runs_from_eight_threads():
    variant = next(v for v in _ffi.variants() if v.d == 128)
    x = operands(variant.d, variant.dtype)
    f = jax.jit(_ffi.fwd, static_argnums=6)

    def run(_):
        return jax.block_until_ready(f(*x, 0.1))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(64)))
    for o, lse in results:
        assert jnp.array_equal(o, results[0][0]) and jnp.array_equal(lse, results[0][1])


@on_gpu
def test_runs_inside_cuda_graphs():
    """In a process of its own, where all that may go into a command buffer does."""
    code = """
import jax, numpy as np, test_ffi
from jax_dsv4_fmha import _ffi
for variant in _ffi.variants():
    test_ffi.check(variant)
    x = test_ffi.operands(variant.d, variant.dtype, shared_kv=variant.shared_kv)
    f = jax.jit(lambda *x: _ffi.fwd(*x, 0.1))
    first = jax.tree.map(np.asarray, f(*x))
    for _ in range(3):
        again = jax.tree.map(np.asarray, f(*jax.tree.map(jax.numpy.copy, x)))
        assert all(map(np.array_equal, first, again))
"""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    path = os.pathsep.join([os.path.dirname(__file__), os.getcwd()])
    env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


@on_gpu
def test_unknown_variant_lists_what_is_built():
    library()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"UNIMPLEMENTED: .*d=96.* on sm_\d+a?; built: .*d128_bfloat16"
    ):
        jax.block_until_ready(_ffi.fwd(*operands(96, "bfloat16"), 0.1))


@on_gpu
@pytest.mark.parametrize(
    ("index", "change", "says"),
    [
        (1, lambda x: x[0], r"k: got shape \[150, 1, 64\], wanted \[b, s_kv, h_kv, d\]"),
        (1, lambda x: x[:1], r"k: got shape \[1, 150, 1, 64\], wanted \[2, 150, 1, 64\]"),
        (2, lambda x: x[:, :9], r"v: got shape \[2, 9, 1, 64\], wanted \[2, 150, 1, 64\]"),
        (1, lambda x: x.astype(jnp.float16), "k: got F16, wanted BF16 like q"),
        (3, lambda x: x[:, :3], r"start: got shape \[2, 3\], wanted \[2, 70\]"),
        (5, lambda x: x[:3], r"sink: got shape \[3\], wanted \[8\]"),
        (5, lambda x: x.astype(jnp.bfloat16), "Wrong buffer dtype"),
    ],
)
def test_handler_refuses_operands(index, change, says):
    x = list(operands(64, "bfloat16"))
    x[index] = change(x[index])
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"(?s)INVALID_ARGUMENT: .*{says}"):
        jax.block_until_ready(_ffi.fwd(*x, 0.1))
