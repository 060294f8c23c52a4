"""Derivatives, residuals, export and the compilation cache: what other transforms make of an op, or may not."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import EXPORT_CHECKS, Span, fmha, indexer_loss, indexer_scores
from jax_dsv4_fmha._host import library
from tests.transformed import (
    OPS,
    functions,
    loops,
    loss,
    run_python,
)

pytestmark = pytest.mark.usefixtures("quick_to_compile")


NO_DERIVATIVE = "gradient: got a second derivative, or one forward, wanted jax.grad or .* implementation='reference'"


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", ["latent", "sparse"])
def test_a_second_derivative_is_refused(name):
    case = OPS[name]
    f, _, _ = functions(case, case.operands())
    _, *rest = case.operands().values()
    for twice in (jax.hessian, lambda f: jax.grad(lambda q: jax.grad(f)(q).sum())):
        with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
            twice(lambda q: f(q, *rest)[0].sum())(case.operands()["q"])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("where", ["plain", "jit", "vmap", "scan", "checkpoint", "shard_map", "within shard_map"])
def test_a_derivative_forward_is_refused(where):
    """Our error refuses it, wherever jax.jvp stands; a function that is only transposed works."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    q, k = (OPS["latent"].operands()[name] for name in ("q", "k"))
    f, push = (lambda q: fmha(q, k[: len(q)])[0]), (lambda f: lambda q: jax.jvp(f, (q,), (q,)))
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    calls = {
        "plain": push(f),
        "jit": push(jax.jit(f)),
        "vmap": lambda q: jax.vmap(push(f))(q[:, None]),
        "scan": push(lambda q: jax.lax.scan(lambda c, q: (c, f(q)), 0, q[:, None])),
        "checkpoint": jax.jit(push(jax.checkpoint(f))),
        "shard_map": push(on_mesh(f)),
        "within shard_map": on_mesh(push(f)),
    }
    with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
        calls[where](q)


@pytest.mark.usefixtures("built", "few_objects")
@pytest.mark.parametrize("name", OPS)
def test_no_tracer_leaks(name):
    """Nothing that an equation keeps knows a traced array: forward and backward, mapped."""
    x = OPS[name].operands()
    f, _, trained = functions(OPS[name], x)
    with jax.checking_leaks():
        jax.make_jaxpr(jax.vmap(jax.grad(loss(f), trained)))(*(jnp.stack([y, y]) for y in x.values()))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("op", ["indexer_scores", "indexer_loss"])
def test_so_of_what_the_indexer_learns_by(op):
    """Forward derivatives and second ones are refused; gradients go through vmap on either side."""
    x = {name: jnp.ones(s) for name, s in {"q": (1, 3, 2, 8), "k": (1, 5, 8), "w": (1, 3, 2), "kv": (1, 5, 4)}.items()}
    indices = jnp.arange(9, dtype=jnp.int32).reshape(1, 3, 3) - 2

    def f(q):
        if op == "indexer_scores":
            return indexer_scores(q, x["k"], x["w"], indices).sum()
        return indexer_loss(q, x["k"], x["w"], q[..., :4], x["kv"], x["w"], span=Span.causal(3)).sum()

    for derivative in (jax.jacfwd, jax.hessian, lambda f: lambda q: jax.jvp(f, (q,), (q,))):
        with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
            derivative(f)(x["q"])
    q = jnp.stack([x["q"], 2 * x["q"]])
    want = jnp.stack([jax.grad(f)(q[0]), jax.grad(f)(q[1])])
    np.testing.assert_allclose(jax.grad(lambda q: jax.vmap(f)(q).sum())(q), want, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("built")
def test_a_linear_function_is_transposed():
    q, k = (OPS["latent"].operands()[name] for name in ("q", "k"))
    f = lambda q: fmha(q, k)[0]  # noqa: E731
    _, tangent = jax.linearize(f, q)
    (got,) = jax.linear_transpose(tangent, q)(q)
    np.testing.assert_array_equal(got, jax.vjp(f, q)[1](q)[0])


# Residuals


@pytest.mark.usefixtures("built")
def test_a_policy_saves_o_and_lse():
    case = OPS["latent"]
    f, _, wrt = functions(case, case.operands())
    xs = case.operands().values()

    def launches(policy):
        step = jax.value_and_grad(loss(jax.checkpoint(f, policy=policy)), wrt)
        return loops(jax.make_jaxpr(step)(*xs).jaxpr, "ffi_call")[0]

    names = jax.checkpoint_policies.save_only_these_names("dsv4_fmha_o", "dsv4_fmha_lse")
    backward = 1
    assert (launches(None), launches(names)) == (2 + backward, 1 + backward)


# Export and caches


@pytest.mark.parametrize("here", [("sm_80",), ("sm_80", "sm_90a")], ids="-".join)
def test_what_is_exported_does_not_depend_on_this_machine(here, built, monkeypatch):
    """It has the kernel, for the target device; a call here gets the reference, or an error if it insists."""
    monkeypatch.setattr(library, "local_architectures", lambda: here)
    q = jax.ShapeDtypeStruct((1, 2, 4, 16), jnp.float32)
    exported = jax.export.export(jax.jit(fmha), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(q, q)
    assert "custom_call @dsv4_fmha_mla_span_fwd" in exported.mlir_module()
    text = jax.jit(fmha).trace(q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @dsv4_fmha" not in text
    insists = jax.jit(functools.partial(fmha, implementation="cubin"))
    exported = jax.export.export(insists, platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(q, q)
    assert "custom_call @dsv4_fmha_mla_span_fwd" in exported.mlir_module()
    if "sm_90a" not in here:
        with pytest.raises(NotImplementedError, match="fmha: implementation: got 'cubin' on sm_80, wanted a kernel th"):
            insists.trace(q, q).lower(lowering_platforms=("cuda",))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("name", ["latent", "sparse", "fused_dense", "fused_sparse"])
def test_export_with_symbolic_batch_and_lengths(name, with_gradient):
    case = OPS[name]
    f, _, wrt = functions(case, case.operands())
    f = jax.grad(loss(f), wrt) if with_gradient else f
    sizes = dict(zip("bst", jax.export.symbolic_shape("b, s, t"), strict=True))
    operands = [
        jax.ShapeDtypeStruct([sizes.get(a, n) for a, n in zip(case.axes[key], x.shape, strict=True)], x.dtype)
        for key, x in case.operands().items()
    ]
    exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(*operands)
    assert "custom_call @dsv4_fmha_" in exported.mlir_module()


CACHED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
from jax import monitoring
from jax_dsv4_fmha import fmha
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
q, k = jnp.ones((2, 4, 2, 16)), jnp.ones((2, 4, 1, 16))
f = lambda q, k: fmha(q, k)[0]
counts = []
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
for g in (f, jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))):
    jax.block_until_ready((q, k))
    before = len(hits)
    jax.jit(g).lower(q, k).compile()
    counts.append(len(hits) - before)
print(counts)
"""


def test_the_persistent_cache_hits_in_another_process(tmp_path):
    outputs = []
    for _ in range(2):
        process = run_python(CACHED, str(tmp_path))
        outputs.append(process.communicate(timeout=120)[0])
        assert process.returncode == 0, outputs[-1]
    assert [text.splitlines()[-1] for text in outputs] == ["[0, 0]", "[1, 1]"]


def test_what_tests_take_from_their_cache_is_kept():
    """It becomes the newest there."""

    def taken_again(x):
        return jnp.cos(x) + 1

    def run():
        jax.clear_caches()
        jax.jit(taken_again)(jnp.ones(77))
        (path,) = cache.glob("jit_taken_again-*-cache")
        return path

    cache = Path(jax.config.jax_compilation_cache_dir)
    for path in cache.glob("jit_taken_again-*"):  # XLA may have had other flags
        path.unlink()
    os.utime(run(), (0, 0))
    assert run().stat().st_mtime > 0
