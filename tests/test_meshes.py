"""Every op on meshes: of 8 virtual CPU devices, of two processes and, where there are GPUs, of GPUs.

No kernel runs on a CPU: the tests claim that all are built. Then a call traces the path to the kernel, with types and
shapes, and lowers the reference on the same operands of one device.
"""

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import (
    Cache,
    dsv4_attention,
    fmha,
    reference,
    sparse_fmha,
)
from jax_dsv4_fmha._dispatch import sharding
from jax_dsv4_fmha._dispatch.folding import folded
from jax_dsv4_fmha._dispatch.sharding import on_explicit_axes
from tests.helpers import QUICK, normal
from tests.transformed import (
    KINDS,
    LAYOUTS,
    OPS,
    assert_close,
    expected,
    functions,
    loss,
    mesh_of,
    place,
    reduced_elements,
    run,
    run_python,
    specs_of,
)

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "name, layout, kind",
    [
        (name, layout, kind)
        for name in OPS
        for layout in LAYOUTS
        for kind in KINDS
        if layout == "batch_heads" or name in ("latent", "few_kv_heads", "fused_sparse")
    ],
)
def test_meshes(name, layout, kind):
    check_sharded(name, LAYOUTS[layout], mesh_of(kind))


def check_sharded(name: str, layout: dict[str, Any], mesh: Any, tolerance: float = 2e-5, **operands: Any) -> None:
    case = OPS[name]
    plain = case.operands(**operands)
    f, g, wrt = functions(case, plain)
    xs = place(case, plain, layout, mesh).values()
    if operands:
        want = jax.jit(g)(*plain.values()), jax.jit(jax.grad(loss(g), wrt))(*plain.values())
    else:
        want = expected(name)
    grad = jax.grad(loss(f), wrt)
    got, moved = run(f, *xs)
    assert_close(got, want[0], tolerance)
    assert moved == {}
    got, moved = run(grad, *xs)
    assert_close(got, want[1], tolerance)
    assert set(moved) <= {"all-reduce"}
    # the gradient of K summed and then added to that of V may be summed as two
    assert moved.get("all-reduce", 0) <= reduced_elements(case, plain, layout, mesh)


def _vmapped(f):
    """Every batch entry separately, with a shared sink."""

    def one(q, k, start, stop, sink):
        return jax.tree.map(lambda x: x[0], f(q[None], k[None], start[None], stop[None], sink))

    return jax.vmap(one, in_axes=(0, 0, 0, 0, None))


def _scanned(f):
    def scanned(q, *rest):
        def step(q, _):
            o, lse = f(q, *rest)
            return o, lse

        _, lse = jax.lax.scan(step, q, None, length=2)
        return f(q, *rest)[0], lse[0]

    return scanned


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "checkpoint": jax.checkpoint,
    "scan": _scanned,
    "vmap": _vmapped,
    "checkpoint_of_vmap": lambda f: jax.checkpoint(_vmapped(f)),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
class TestTransformsOnMeshes:
    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_of_one_program(self, transform, kind):
        case = OPS["latent"]
        f, _, wrt = functions(case, case.operands())
        f = TRANSFORMS[transform](f)
        xs = place(case, case.operands(), LAYOUTS["batch_heads"], mesh_of(kind)).values()
        grad = jax.grad(loss(f), wrt)
        got, moved = run(f, *xs)
        assert_close(got, expected("latent")[0])
        assert moved == {}
        got, moved = run(grad, *xs)
        assert_close(got, expected("latent")[1])
        assert set(moved) == {"all-reduce"}

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("name", ["gqa", "fused_sparse"])
    def test_shard_map(self, name, check_vma, kind):
        case, mesh = OPS[name], mesh_of(kind)
        f, _, wrt = functions(case, case.operands())
        specs = specs_of(case, LAYOUTS["batch_heads"], mesh)
        xs = place(case, case.operands(), LAYOUTS["batch_heads"], mesh).values()
        out = P("data", None, "model")
        f = jax.shard_map(f, mesh=mesh, in_specs=(*specs.values(),), out_specs=(out, out), check_vma=check_vma)
        grad = jax.grad(loss(f), wrt)
        got, moved = run(f, *xs)
        assert_close(got, expected(name)[0])
        assert moved == {}
        got, moved = run(grad, *xs)
        assert_close(got, expected(name)[1])
        assert set(moved) == {"all-reduce"}

    @pytest.mark.parametrize("name, manual", [("gqa", "model"), ("latent", "data")])
    def test_partial_shard_map(self, name, manual, kind):
        """JAX itself gathers what is Explicit at the edge of a partial shard_map; values are right everywhere."""
        case, mesh = OPS[name], mesh_of(kind)
        f, _, wrt = functions(case, case.operands())
        specs = specs_of(case, {a: x for a, x in LAYOUTS["batch_heads"].items() if x == manual}, mesh)
        xs = place(case, case.operands(), LAYOUTS["batch_heads"], mesh).values()
        out = P(*(a if a == manual else None for a in ("data", None, "model")))
        f = jax.shard_map(f, mesh=mesh, in_specs=(*specs.values(),), out_specs=(out, out), axis_names={manual})
        grad = jax.grad(loss(f), wrt)
        got, moved = run(f, *xs)
        assert_close(got, expected(name)[0])
        assert moved == {} or kind == "Explicit"
        got, moved = run(grad, *xs)
        assert_close(got, expected(name)[1])
        assert set(moved) == {"all-reduce"} or kind == "Explicit" or manual == "data"

    def test_under_set_mesh(self, kind):
        with jax.set_mesh(mesh_of(kind)):
            check_sharded("few_kv_heads", LAYOUTS["batch_heads"], mesh_of(kind))

    def test_sharded_keys(self, kind):
        """An error where types know of the sharding, a gather where they do not."""
        case, mesh = OPS["latent"], mesh_of(kind)
        f, _, _ = functions(case, case.operands())
        xs = place(case, case.operands(), {"t": "data"}, mesh).values()
        if kind == "Explicit":
            with pytest.raises(ValueError, match="fmha: k: got s_kv sharded over data, wanted that axis whole"):
                jax.jit(f)(*xs)
        else:
            got, moved = run(f, *xs)
            assert_close(got, expected("latent")[0])
            assert set(moved) == {"all-gather"}


def test_a_mesh_that_does_not_fit_heads_is_refused():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    q = jax.device_put(jnp.zeros((1, 4, 12, 16)), NamedSharding(mesh, P(None, None, "model")))
    k = jax.device_put(jnp.zeros((1, 4, 6, 16)), NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="query heads of whole key heads, or of one, on a device; there are 12 and 6"):
        jax.jit(fmha)(q, k)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 4, 12, 16), (1, 4, 6, 16)))
    got = jax.jit(fmha)(
        *(jax.device_put(x, NamedSharding(mesh, p)) for x, p in ((q, P(None, None, "model")), (k, P())))
    )
    assert_close(got, reference.fmha(q, k))


def test_a_device_s_part_of_alike_calls_is_traced_once(monkeypatch):
    """XLA's partitioner asks for each call what a device computes, and gets the same function."""
    seen, mesh = [], mesh_of("Auto")
    x = jax.device_put(jnp.ones((2, 8, 4, 16), jnp.bfloat16), NamedSharding(mesh, P("data")))
    monkeypatch.setattr(sharding, "folded", lambda call, *xs: seen.append(call) or folded(call, *xs))
    program = jax.jit(lambda q: functools.reduce(lambda q, _: fmha(q, q[:, :, :1], scale=0.3)[0], range(4), q))
    lowered = program.lower(x)
    before = len(seen)
    lowered.compile()
    assert len(seen) == before + 1


def test_arrays_without_numbers_stay_outside_of_shard_maps():
    """XLA of jax 0.11.2 crashes where a shard_map is given one."""
    mesh = mesh_of("Explicit")
    specs = P("data"), P("data", None), P()

    def run(*xs, is_partial):
        return (jnp.concatenate([x.reshape(len(x), -1) for x in xs[:2]], 1) + xs[2].size + is_partial,)

    def call(*xs):
        return on_explicit_axes(run, mesh.abstract_mesh, specs, (P("data"),), xs)[0]

    xs = [jnp.arange(4.0), jnp.zeros((4, 0)), jnp.zeros((3, 0))]
    xs = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]
    (eqn,) = [eqn for eqn in jax.make_jaxpr(call)(*xs).eqns if eqn.primitive.name == "shard_map"]
    assert [x.aval.shape for x in eqn.invars] == [(4,)]
    np.testing.assert_array_equal(jax.jit(call)(*xs)[:, 0], np.arange(4.0))


# Kinds of meshes, pools, and operands with different shardings


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kinds", [("Explicit", "Auto"), ("Auto", "Explicit")], ids="-".join)
@pytest.mark.parametrize("transform", ["", "gradient", "vmap"])
def test_a_mesh_of_two_kinds(kinds, transform):
    """Right with and without jax.set_mesh, which saves Auto operands from being gathered."""
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=tuple(KINDS[k] for k in kinds), devices=devices)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((4, 8, 4, 16), (4, 9, 1, 16)))
    of = {"": lambda f: f, "gradient": lambda f: jax.grad(lambda q: f(q, k)[0].sum()), "vmap": jax.vmap}[transform]
    xs = (q,) if transform == "gradient" else (q[:, None], k[:, None]) if transform == "vmap" else (q, k)
    want = jax.jit(of(functools.partial(reference.fmha)))(*xs)
    specs = {"vmap": (P("data"), P("data"))}.get(transform, (P("data", None, "model"), P("data")))
    placed = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip(xs, specs, strict=False)]
    assert_close(run(of(fmha), *placed)[0], want)
    if not transform:
        with jax.set_mesh(mesh):
            got, moved = run(fmha, *placed)
        assert_close(got, want)
        assert moved == {}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P("data", None, "model"), P("data", "model")], ids=str)
def test_sparse_over_a_pool(spec, kind):
    mesh, case = mesh_of(kind), OPS["sparse"]
    q, kv, indices, _, _ = case.operands().values()
    want = jax.jit(lambda *xs: reference.sparse_fmha(*xs)[0])(q, kv[0], indices)
    places = (spec, P(), P(*spec[:2]))
    xs = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip((q, kv[0], indices), places, strict=True)]
    got, moved = run(lambda *xs: sparse_fmha(*xs)[0], *xs)
    assert_close(got, want)
    assert moved == {}
    grad = jax.grad(lambda q, kv: (sparse_fmha(q, kv, xs[2])[0] ** 2).sum(), (0, 1))
    want = jax.jit(jax.grad(lambda q, kv: (reference.sparse_fmha(q, kv, indices)[0] ** 2).sum(), (0, 1)))(q, kv[0])
    got, moved = run(grad, *xs[:2])
    assert_close(got, want)
    assert moved == {"all-reduce": kv[0].size}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
def test_queries_of_pages(kind):
    """A chunk's queries over devices, by batch and s_q: every device has the pool, and what it needs of the table."""
    mesh, case = mesh_of(kind), OPS["fused_sparse"]
    q, window, _, _, indices, _ = case.operands().values()
    pool = normal(1, 2 * q.shape[0], 4, q.shape[3])
    xs = (q, window, indices, jnp.arange(2 * q.shape[0], dtype=jnp.int32)[::-1].reshape(-1, 2), pool)
    specs = P("data", "model"), P("data"), P("data", "model"), P("data"), P()

    def f(q, window, indices, table, pool):
        return dsv4_attention(q, window, Cache(pool, table), indices=indices, ratio=4, window=5, q_offset=8)

    want = jax.jit(f)(*xs)
    got, moved = run(f, *(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)))
    assert_close(got, want)
    assert moved == {}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("sharded", ["window", "kv"])
def test_two_passes_with_one_cache_sharded(sharded):
    case, mesh = OPS["two_pass"], mesh_of("Explicit")
    f, _, _ = functions(case, case.operands())
    xs = case.operands() | {sharded: jax.device_put(case.operands()[sharded], NamedSharding(mesh, P("data")))}
    got, moved = run(f, *xs.values())
    assert_close(got, expected("two_pass")[0])
    assert moved == {}
    # a sink with another sharding than the heads is this package's error, not JAX's
    xs = {"q": jax.device_put(xs["q"], NamedSharding(mesh, P(None, None, "model")))} | {
        "sink": jax.device_put(xs["sink"], NamedSharding(mesh, P("data")))
    }
    with pytest.raises(ValueError, match="sink: got h_q sharded over data, wanted h_q sharded over model"):
        jax.jit(f)(*(case.operands() | xs).values())


# Processes


DISTRIBUTED = """
import sys
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, process, examples = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
sys.path.insert(0, examples)
import context_parallel
from jax_dsv4_fmha import Span, fmha, reference
assert jax.device_count() == 8 and jax.local_device_count() == 4
rng = np.random.default_rng(0)
q, k, weights = (rng.standard_normal((2, 16, h, 16)).astype(np.float32) for h in (8, 1, 8))

def check(f, specs, mesh):
    place = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
    xs = [place(x, spec) for x, spec in zip((q, k, weights), specs)]
    loss = lambda f: lambda q, k, w: jnp.sum(f(q, k) * w)
    got = jax.jit(jax.value_and_grad(loss(f), (0, 1)))(*xs)
    want = jax.jit(jax.value_and_grad(loss(lambda q, k: reference.fmha(q, k, span=Span.causal(16))[0]), (0, 1)))(
        *map(jnp.asarray, (q, k, weights)))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        for shard in x.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(y)[shard.index], rtol=1e-4, atol=1e-4)

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
heads = P("data", None, "model")
check(lambda q, k: fmha(q, k, span=Span.causal(16))[0], (heads, P("data"), heads), mesh)
ring = jax.make_mesh((8,), ("ring",), axis_types=(AxisType.Auto,))
check(lambda q, k: context_parallel.attention(q, k, ring)[0], (P(None, "ring"),) * 3, ring)
print("right")
"""


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    examples = str(Path(__file__).parents[1] / "examples")
    processes = [run_python(DISTRIBUTED, port, str(i), examples, XLA_FLAGS=QUICK) for i in range(2)]
    for process in processes:
        text = process.communicate(timeout=180)[0]
        assert process.returncode == 0 and text.splitlines()[-1] == "right", text


# On GPUs, with the kernels


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["batch_heads", "queries_heads"])
@pytest.mark.parametrize("name", [name for name in OPS if name != "merge"])
def test_on_gpus(name, layout, kind):
    count = len(jax.devices("cuda"))
    shape = {1: (1, 1), 2: (1, 2), 3: (1, 2)}.get(count, (2, 2))
    d = 64 if name in ("gqa", "few_kv_heads", "drop_in") else 512
    check_sharded(name, LAYOUTS[layout], mesh_of(kind, shape, "cuda"), tolerance=3e-2, d=d, dtype=jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("how", [*KINDS, "shard_map"])
@pytest.mark.parametrize("axis", "bsh")
@pytest.mark.parametrize("name", ["latent", "sparse", "fused_sparse", "fused_dense"])
def test_gradients_on_several_gpus(name, axis, how):
    """By kernels on a part of the batch, the queries or the heads each, they are those of one GPU by kernels; nothing
    moves except what is summed."""
    count = {0: 1, 1: 1, 2: 2, 3: 2}.get(len(jax.devices("cuda")), 4)
    if count < 2:
        pytest.skip("needs two GPUs")
    case, layout = OPS[name], {axis: "model"}
    plain = case.operands(d=512, dtype=jnp.bfloat16)
    assert plain["q"].shape["bsh".index(axis)] % count == 0
    mesh = mesh_of("Auto" if how == "shard_map" else how, (1, count), "cuda")
    wrt = functions(case, plain)[2]

    def f(*xs: Any, **more: Any) -> Any:
        return case.op("cubin", **dict(zip(plain, xs, strict=True)), **more)

    def on_a_part(*xs: Any) -> Any:
        """As `f`, told where its queries begin: `q_offset` is of the queries that it sees."""
        moves = name.startswith("fused") and axis == "s"
        return f(*xs, **({"q_offset": 8 + jax.lax.axis_index("model") * xs[0].shape[1]} if moves else {}))

    want = jax.jit(jax.grad(loss(f), wrt))(*jax.device_put(tuple(plain.values()), jax.devices("cuda")[0]))
    g, xs = f, place(case, plain, layout, mesh).values()
    if how == "shard_map":
        specs = specs_of(case, layout, mesh)
        out = P(*("model" if a == axis else None for a in "bsh"))
        g = jax.shard_map(on_a_part, mesh=mesh, in_specs=(*specs.values(),), out_specs=(out, out))
    got, moved = run(jax.grad(loss(g), wrt), *xs)
    assert_close(got, want, tolerance=1e-2)
    assert set(moved) == {"all-reduce"}
