"""Sums over devices: as `lax.psum` has them, on virtual devices and by the kernel on GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import EXPORT_CHECKS
from jax_dsv4_fmha._host import all_reduce as raw
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha.layers import step_psum
from jax_dsv4_fmha.layers._few_rows import summed_product

DEVICES = 2


def mesh_of(*sizes):
    """Axes "data" and "expert", or the latter alone."""
    names = ("data", "expert")[-len(sizes) :]
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def summed(x, over="expert", mesh=None, f=step_psum):
    """The sum of x `[devices, …]` over devices with a part each, as each of them has it, `[devices, …]`."""
    mesh = mesh or mesh_of(DEVICES)
    spec = P(mesh.axis_names)
    return jax.shard_map(lambda x: f(x, over), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def numbers(*shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(0), shape, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_is_the_sum(dtype):
    x = (8 * numbers(DEVICES, 3, 5)).astype(dtype)
    np.testing.assert_array_equal(summed(x), jnp.broadcast_to(x.sum(0, keepdims=True), x.shape).astype(dtype))


def test_over_one_of_two_axes():
    mesh = mesh_of(2, 2)
    x = numbers(4, 4)
    np.testing.assert_array_equal(summed(x, mesh=mesh), summed(x, mesh=mesh, f=lax.psum))


def test_an_axis_that_is_not_there():
    with pytest.raises(NameError, match="model"):
        summed(numbers(2, 4), over="model")


def test_what_is_not_an_array():
    with pytest.raises(TypeError, match="step_psum: x: got"):
        summed(numbers(2, 4), f=lambda x, axis: step_psum("x", axis))


@pytest.mark.parametrize(
    ("shape", "dtype", "devices", "processes", "takes"),
    [
        ((1, 4096), "bfloat16", 2, 1, True),
        ((128, 4096), "bfloat16", 2, 1, True),
        ((129, 4096), "bfloat16", 2, 1, False),
        ((1, 6), "bfloat16", 2, 1, False),
        ((1, 4096), "float32", 2, 1, False),
        ((1, 4096), "bfloat16", 4, 1, False),
        ((1, 4096), "bfloat16", 2, 2, False),
    ],
)
def test_which_sums_are_the_kernels(monkeypatch, shape, dtype, devices, processes, takes):
    """On GPUs that reach each other's memory: so the program for them has the custom call, or a collective."""
    monkeypatch.setattr(raw, "exchanging_devices", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(library, "architectures", lambda: ("sm_90a",))
    f = functools.partial(summed, mesh=mesh_of(devices // 2, 2))
    x = jnp.zeros((devices * shape[0], shape[1]), dtype)
    text = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(x).mlir_module()
    assert ("dsv4_fmha_all_reduce" in text) == takes
    assert ("stablehlo.all_reduce" in text) == (not takes)


def test_ops_on_a_mesh_sum_by_it(monkeypatch):
    """Here a step's last product, whose groups of heads devices share."""
    monkeypatch.setattr(raw, "exchanging_devices", lambda: 2)
    monkeypatch.setattr(library, "architectures", lambda: ("sm_90a",))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def like(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    x, w = like(1, 1, 8, 1024, spec=P(None, None, "model")), like(8, 1024, 4096, spec=P("model"))
    product = jax.jit(functools.partial(summed_product, kernel=True))
    text = jax.export.export(product, platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(x, w).mlir_module()
    assert "dsv4_fmha_few_rows_product" in text and "dsv4_fmha_all_reduce" in text
    assert "stablehlo.all_reduce" not in text


of_two_gpus = pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@of_two_gpus
@pytest.mark.parametrize("rows", [1, 3, 64, 128])
def test_the_kernel_is_right(rows):
    """Many calls of one program, so that messages follow each other at once."""
    x = numbers(DEVICES, rows, 4096)

    @jax.jit
    def both(x):
        ours = theirs = x
        for _ in range(5):
            ours = summed(ours).astype(jnp.bfloat16) * jnp.bfloat16(0.5)
            theirs = summed(theirs, f=lax.psum).astype(jnp.bfloat16) * jnp.bfloat16(0.5)
        return ours, theirs

    assert "dsv4_fmha_all_reduce" in both.lower(x).as_text()
    for _ in range(50):
        ours, theirs = both(x)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.gpu
@of_two_gpus
def test_sums_that_run_at_the_same_time_keep_their_messages_apart():
    x = numbers(DEVICES, 8, 16, 4096)
    options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT", "xla_gpu_graph_min_graph_size": "1"}

    @functools.partial(jax.jit, compiler_options=options)
    def each(x):
        return jnp.stack([summed(x[:, i] + i) for i in range(x.shape[1])], 1)

    want = jnp.broadcast_to((x + jnp.arange(8, dtype=x.dtype)[None, :, None, None]).sum(0, keepdims=True), x.shape)
    for _ in range(50):
        np.testing.assert_array_equal(each(x), want)
