"""Slots of a step as its kernels get them: on a device that has some of the queries, and of all sequences' keys."""

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
from tests.helpers import assert_close, assert_right, normal

B, S_Q, H, D = 2, 4, 2, 16
POSITIONS = jnp.tile(jnp.arange(24, dtype=jnp.int32), (B, 1))
LENGTHS = jnp.array([23, 9], jnp.int32)
INDICES = jnp.asarray(np.random.default_rng(0).integers(-1, 24, (B, S_Q, 7)), jnp.int32)
NEAR, FAR = Cache(normal(1, B, 8, D)), Cache(normal(2, B, 24, D))
TABLE = jnp.array([[3, 0, 5, 1, 7, 4], [2, 6, 9, 11, 8, 10]], jnp.int32)
PAGED = Cache(normal(2, 12, 4, D), TABLE)


def packed(layout, n):
    cache = Cache.zeros(B, n, layout=layout)
    return cache.append(normal(n, B, n, cache.packing.d), POSITIONS[:, :n])


def dsv4(q, near, far=None, **given):
    ratio = {} if far is None else {"ratio": 4}
    return dsv4_decode(q, near, far, window=4, **ratio, **{"lengths": LENGTHS} | given)


def mla(q, cache, d_v=None, **given):
    return mla_decode(q, cache, d_v=d_v, **{"lengths": LENGTHS, "indices": INDICES} | given)


Q, *PACKED_Q = (normal(3, B, S_Q, H, d, dtype=t) for d, t in ((D, None), (512, jnp.bfloat16), (576, jnp.bfloat16)))
FP8 = packed("v4_fp8", 8), packed("v4_fp8", 24)
STEPS = {
    "dsv4": (dsv4, Q, (NEAR, FAR), {}),
    "dsv4, indices": (dsv4, Q, (NEAR, FAR), {"indices": INDICES}),
    "dsv4, positions": (dsv4, Q, (NEAR, FAR), {"q_offset": LENGTHS - 6}),
    "dsv4, pages": (dsv4, Q, (NEAR, PAGED), {}),
    "dsv4, a window": (dsv4, Q, (NEAR,), {}),
    "dsv4, packed": (dsv4, PACKED_Q[0], FP8, {}),
    "dsv4, a packed window": (dsv4, PACKED_Q[0], FP8[:1], {}),
    "mla": (functools.partial(mla, d_v=12), Q, (FAR,), {}),
    "mla, packed": (mla, PACKED_Q[0], FP8[1:], {}),
    "mla, packed of 576": (functools.partial(mla, d_v=512), PACKED_Q[1], (packed("v32_fp8", 24),), {}),
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

    def pools(source):
        """What kernels take, as the definition takes it."""
        found = [x.flat() for x in source.parts_of_kernel()[: len(source.kinds)]]
        return [dataclasses.replace(x, keys=x.keys[None]) for x in found]

    monkeypatch.setattr(seen_slots.raw, "seen_slots", kernel)
    monkeypatch.setattr(seen_slots, "_OP", dataclasses.replace(seen_slots._OP, reference=seen_slots._by_kernel))
    monkeypatch.setattr(seen_slots.StepSource, "parts", pools)
    return numbers


def attend(name, split, axes, monkeypatch):
    """A step of which each device has some queries, or some sequences."""
    monkeypatch.setattr(seen_slots, "choose", lambda *_: KernelUse.ON_CUDA)
    step, q, caches, given = STEPS[name]
    what, devices = split
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(axes,), devices=jax.devices("cpu")[:devices])
    placed = jax.device_put(q, NamedSharding(mesh, P("x") if what == "sequences" else P(None, "x")))
    got = jax.jit(lambda q: step(q, *caches, **given))(placed)
    assert_close(got, step(q, *caches, **given, implementation="reference"))


SPLITS = [("queries", 1), ("queries", 2), ("queries", 4), ("sequences", 2)]


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
@pytest.mark.parametrize("split", SPLITS[1::2], ids=lambda x: f"{x[0]} over {x[1]}")
@pytest.mark.parametrize("name", STEPS)
def test_queries_over_devices(name, split, axes, monkeypatch):
    attend(name, split, axes, monkeypatch)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
@pytest.mark.parametrize("split", SPLITS, ids=lambda x: f"{x[0]} over {x[1]}")
@pytest.mark.parametrize("name", STEPS)
def test_queries_that_a_kernel_is_told_of(name, split, axes, told, monkeypatch):
    attend(name, split, axes, monkeypatch)
    what, devices = split
    assert told[-1] == (S_Q // devices if (what == "queries" and devices > 1) or "positions" in name else 0)


@pytest.mark.parametrize("mapped", ["all", "all but a cache"])
@pytest.mark.parametrize("name", STEPS)
def test_vmap(name, mapped, told, monkeypatch):
    """Over calls with caches of their own; and over sequences that all have one cache."""
    monkeypatch.setattr(seen_slots, "choose", lambda *_: KernelUse.ON_CUDA)
    step, q, caches, given = STEPS[name]
    operands = q, {"lengths": LENGTHS, **({"indices": INDICES} if step is not dsv4 else {}), **given}

    def call(operands, caches, **how):
        q, given = operands
        return step(q, *caches, **given, **how)

    if mapped == "all":
        xs = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (operands, caches))
        got, each = jax.vmap(call)(*xs), [jax.tree.map(lambda x, i=i: x[i], xs) for i in range(2)]
    else:
        one = tuple(jax.tree.map(lambda x: x[:1], x) if x.block_table is None else
                    dataclasses.replace(x, block_table=x.block_table[:1]) for x in caches)  # fmt: skip
        xs = jax.tree.map(lambda x: x[:, None], operands)
        got, each = jax.vmap(call, (0, None))(xs, one), [(jax.tree.map(lambda x, i=i: x[i], xs), one) for i in range(B)]
    want = [call(*x, implementation="reference") for x in each]
    assert_right(got, [np.stack(x) for x in zip(*want, strict=True)])
