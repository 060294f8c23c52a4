"""A step whose queries are shared out over devices: each device finds the slots of its own queries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache, dsv4_decode, mla_decode
from jax_dsv4_fmha._dispatch import seen_slots
from jax_dsv4_fmha._dispatch.op import KernelUse
from tests.helpers import assert_close, normal

B, S_Q, H, D = 2, 4, 2, 16
POSITIONS = jnp.tile(jnp.arange(24, dtype=jnp.int32), (B, 1))
LENGTHS = jnp.array([23, 9], jnp.int32)
INDICES = jnp.asarray(np.random.default_rng(0).integers(-1, 24, (B, S_Q, 7)), jnp.int32)


def dsv4(q, **kwargs):
    return dsv4_decode(
        q, Cache(normal(1, B, 8, D)), Cache(normal(2, B, 24, D)), lengths=LENGTHS, window=4, ratio=4, **kwargs
    )


def packed(q):
    caches = (Cache.zeros(B, n, layout="v4_fp8").append(normal(n, B, n, 512), POSITIONS[:, :n]) for n in (8, 24))
    return dsv4_decode(q, *caches, lengths=LENGTHS, window=4, ratio=4)


Q = normal(3, B, S_Q, H, D)
STEPS = {
    "dsv4": (dsv4, Q),
    "dsv4, indices": (functools.partial(dsv4, indices=INDICES), Q),
    "dsv4, positions": (functools.partial(dsv4, q_offset=LENGTHS - 6), Q),
    "dsv4, packed": (packed, normal(4, B, S_Q, H, 512, dtype=jnp.bfloat16)),
    "mla": (lambda q: mla_decode(q, Cache(normal(2, B, 24, D)), LENGTHS, INDICES, d_v=12), Q),
}


@pytest.fixture
def told(monkeypatch):
    """The numbers of queries whose positions a kernel is told, one for each call. JAX stands for the kernel here, and
    counts the positions that it is not told by the queries that it has, as the kernel does.
    """
    jax.clear_caches()  # of calls that were traced with other kernels
    numbers = []

    def kernel(lengths, position, *operands, **sizes):
        numbers.append(position.size // B)
        if not position.shape[2]:
            position = seen_slots._positions(lengths, position.shape[1], None)[..., None]
        return seen_slots._slots(lengths, position, *operands, last=0, **sizes)

    monkeypatch.setattr(seen_slots.raw, "seen_slots", kernel)
    monkeypatch.setattr(seen_slots, "_OP", dataclasses.replace(seen_slots._OP, reference=seen_slots._by_kernel))
    return numbers


def attend(name, devices, axes, monkeypatch):
    monkeypatch.setattr(seen_slots, "choose", lambda *_: KernelUse.ON_CUDA)
    step, q = STEPS[name]
    want = step(q)
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(axes,), devices=jax.devices("cpu")[:devices])
    got = jax.jit(lambda q: step(q))(jax.device_put(q, NamedSharding(mesh, P(None, "sequence"))))
    assert_close(got, want)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_queries_over_devices(name, devices, axes, monkeypatch):
    attend(name, devices, axes, monkeypatch)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in STEPS if "packed" not in name])
def test_queries_that_a_kernel_is_told_of(name, devices, axes, told, monkeypatch):
    attend(name, devices, axes, monkeypatch)
    assert told[-1] == (S_Q // devices if devices > 1 or "positions" in name else 0)
