"""Which gradients use a backward kernel: programs lowered for cuda without a GPU, under every transform."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Span, dot_product_attention, dsv4_attention, fmha, merge, sparse_fmha
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._host.call import TARGETS
from kernels.abi import BACKWARD_OPS

B, S, S_KV, S_C, H, D, TOPK = 2, 4, 12, 6, 8, 512, 5
CUSTOM_CALLS = [jax.export.DisabledSafetyCheck.custom_call(f"dsv4_fmha_{name}") for name in TARGETS]
INDICES, SINK = np.zeros((B, S, TOPK), np.int32), np.zeros(H, np.float32)


def arrays(*shapes, dtype=jnp.bfloat16):
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def layer(**kwargs):
    return functools.partial(dsv4_attention, window=3, sink=SINK, **kwargs)


def two_passes(q, window, kv, indices=None):
    """The window and the entries in a launch each, merged."""
    near = fmha(q, window[:, :, None], span=Span.sliding_window(S, 3))
    far = fmha(q, kv[:, :, None], span=Span.compressed(S, 4)) if indices is None else sparse_fmha(q, kv, indices)
    return merge([near, far], SINK)


Q, WINDOW, KV = (B, S, H, D), (B, S_KV, D), (B, S_C, D)
SMALL, KEYS = (B, S, H, 64), (B, S_KV, 2, 64)
# the call, its operands, and the targets of its gradient
OPS = {
    "latent": (lambda q, k: fmha(q, k, span=Span.causal(S), sink=SINK), (Q, (B, S_KV, 1, D)), ["mla_span_bwd"]),
    "heads of keys": (lambda q, k: fmha(q, k, span=Span(0, 7)), (Q, (B, S_KV, 2, D)), ["mla_span_bwd"]),
    "apart": (lambda q, k, v: fmha(q, k, v, span=Span.causal(S), sink=SINK), (SMALL, *2 * [KEYS]), ["mha_bwd"]),
    "apart at d 512": (lambda q, k, v: fmha(q, k, v, sink=SINK), (Q, *2 * [(B, S_KV, 2, D)]), ["mha_bwd"]),
    "latent of d 64": (lambda q, k: fmha(q, k, sink=SINK), (SMALL, KEYS), ["mha_bwd_shared_kv"]),
    "sparse": (lambda q, kv: sparse_fmha(q, kv, INDICES, sink=SINK), (Q, WINDOW), ["mla_sparse_bwd"]),
    "pool": (lambda q, kv: sparse_fmha(q, kv, INDICES), (Q, (S_KV, D)), ["mla_sparse_bwd"]),
    "window": (layer(), (Q, WINDOW), ["mla_span_bwd"]),
    "fused dense": (layer(ratio=4), (Q, WINDOW, KV), ["hca_bwd"]),
    "fused top-k": (layer(indices=INDICES), (Q, WINDOW, KV), ["csa_bwd"]),
    "two-pass dense": (two_passes, (Q, WINDOW, KV), ["mla_span_bwd", "mla_span_bwd"]),
    "two-pass top-k": (
        functools.partial(two_passes, indices=INDICES),
        (Q, WINDOW, KV),
        ["mla_span_bwd", "mla_sparse_bwd"],
    ),
}


def gradient(f):
    def loss(*operands):
        o, lse = f(*operands)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(jnp.where(jnp.isinf(lse), 0, lse))

    return lambda *operands: jax.grad(loss, tuple(range(len(operands))))(*operands)


def lowered(f, *operands, platform="cuda"):
    return jax.jit(f).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def targets(text, suffix="bwd"):
    return sorted(name for name in re.findall(r"@dsv4_fmha_(\w+)\(", text) if suffix in name)


TRANSFORMS = {
    "grad": gradient,
    "grad of a checkpoint": lambda f: gradient(jax.checkpoint(f)),
    "grad of a scan": lambda f: gradient(lambda *x: jax.lax.scan(lambda c, _: (c, f(*x)), 0, length=1)[1]),
    "vmap of a grad": lambda f: jax.vmap(gradient(f)),
    "grad of a vmap": lambda f: gradient(jax.vmap(f)),
}


@pytest.mark.parametrize(
    ("op", "transform"), [(op, "grad") for op in OPS] + [("fused top-k", t) for t in TRANSFORMS if t != "grad"]
)
def test_a_gradient_takes_the_kernel(op, transform):
    f, shapes, wanted = OPS[op]
    if "vmap" in transform:
        shapes = [(3, *shape) for shape in shapes]
    text = lowered(TRANSFORMS[transform](f), *arrays(*shapes))
    assert targets(text) == sorted(wanted)
    assert not re.search(r"all_reduce|all_gather|all_to_all|collective", text)


def test_every_target_is_taken():
    dense = {"mha_bwd", "mha_bwd_shared_kv"}
    assert {name for _, _, wanted in OPS.values() for name in wanted} == {*BACKWARD_OPS, *dense}


@pytest.mark.parametrize(
    ("d", "s", "window", "deterministic", "dtype"),
    [
        (64, 1024, None, False, "f32"),  # sums, by the kernel that makes all gradients
        (64, 1024, None, True, "bf16"),
        (64, 1024, 128, False, "bf16"),
        (128, 512, None, False, "bf16"),
        (256, 1024, None, False, "bf16"),
        (512, 1024, None, False, "bf16"),
    ],
)
def test_one_kernel_makes_all_gradients_where_queries_see_many_keys(d, s, window, deterministic, dtype):
    span = Span.causal(s) if window is None else Span.causal(s) & Span.sliding_window(s, window)
    q, k = arrays((1, s, 2, d), (1, s, 1, d))
    text = lowered(gradient(functools.partial(fmha, span=span, deterministic=deterministic)), q, k, k)
    (found,) = re.findall(rf"@dsv4_fmha_mha_bwd\(.*-> \(tensor<1x{s}x2x{d}x(\w+)>", text)
    assert found == dtype


@pytest.mark.parametrize("is_causal, dtype", [(True, "bf16"), (False, "f32")])
def test_a_window_to_the_right_counts_where_it_is_seen(is_causal, dtype):
    q, k = arrays((1, 1024, 2, 64), (1, 1024, 1, 64))
    window = functools.partial(dot_product_attention, local_window_size=(128, 700), return_residual=True)
    text = lowered(gradient(functools.partial(window, is_causal=is_causal)), q, k, k)
    assert re.findall(r"@dsv4_fmha_mha_bwd\(.*-> \(tensor<1x1024x2x64x(\w+)>", text) == [dtype]


@pytest.mark.parametrize("op", OPS)
def test_inside_shard_map(op):
    """Over batch: each device runs a kernel on its own entries, and sends nothing."""
    f, shapes, wanted = OPS[op]
    if op in ("pool", "sparse", "fused top-k", "two-pass top-k"):
        pytest.skip("its indices are of the whole batch here")
    mesh = jax.sharding.AbstractMesh((B,), ("b",))
    run = jax.shard_map(gradient(f), mesh=mesh, in_specs=P("b"), out_specs=P("b"))
    text = lowered(run, *arrays(*shapes))
    assert targets(text) == sorted(wanted)
    assert not re.search(r"all_reduce|all_gather|all_to_all|collective", text)


def test_an_export_has_the_kernel():
    f, shapes, wanted = OPS["fused top-k"]
    exported = jax.export.export(jax.jit(gradient(f)), platforms=["cuda"], disabled_checks=CUSTOM_CALLS)(
        *arrays(*shapes)
    )
    assert targets(exported.mlir_module()) == wanted


def test_without_a_backward_kernel_the_gradient_is_jnp():
    """Here in float32, for which there is no forward kernel either."""
    shapes = (B, S, H, D), (B, S_KV, 1, D), (B, S_KV, 1, D)
    text = lowered(gradient(fmha), *arrays(*shapes, dtype=jnp.float32))
    assert targets(text) == targets(text, "fwd") == []


def test_on_a_cpu_the_gradient_is_jnp():
    f, shapes, _ = OPS["fused top-k"]
    assert "dsv4_fmha" not in re.sub(r"dsv4_fmha_(o|lse)", "", lowered(gradient(f), *arrays(*shapes), platform="cpu"))


def test_cubin_insists_on_the_backward_kernel_too():
    q, k = arrays((B, S, H, D), (B, S_KV, 1, D))
    o, rows = q, jax.ShapeDtypeStruct((B, S, H), jnp.float32)

    def backward_alone(q, k, do):
        _, vjp = jax.vjp(functools.partial(fmha, implementation="cubin"), q, k)
        return vjp((do, jnp.zeros(rows.shape)))

    assert targets(lowered(backward_alone, q, k, o)) == ["mla_span_bwd"]
    with pytest.raises(ValueError, match="'cubin' on platform cpu, wanted platform cuda"):
        lowered(backward_alone, q, k, o, platform="cpu")


@pytest.mark.parametrize("transform", ["grad", "vmap of a grad"])
def test_a_deterministic_gradient_takes_a_kernel_of_its_own(transform):
    """That kernel adds 32-bit integers, with a unit for each key that another one bounds first."""
    f = layer(indices=INDICES, deterministic=True)
    shapes = [(3, *shape) for shape in (Q, WINDOW, KV)] if transform != "grad" else (Q, WINDOW, KV)
    text = lowered(TRANSFORMS[transform](f), *arrays(*shapes))
    assert targets(text, "csa_b") == ["csa_bounds", "csa_bwd"]
    (call,) = (line for line in text.splitlines() if "@dsv4_fmha_csa_bwd(" in line)
    assert len(re.findall(r"x512xui32>", call.split("->")[1])) == 2


def test_deterministic_without_a_kernel(monkeypatch):
    """Gradients in jnp scatter for a selection: in order on a CPU, but not on a GPU."""
    q, kv = jnp.ones((B, S, H, 16)), jnp.ones((B, S_KV, 16))
    f = gradient(functools.partial(sparse_fmha, indices=INDICES, deterministic=True))
    for got, want in zip(f(q, kv), gradient(functools.partial(sparse_fmha, indices=INDICES))(q, kv), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="deterministic: got 1, wanted a bool"):
        sparse_fmha(q, kv, INDICES, deterministic=1)
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    with pytest.raises(NotImplementedError, match="sparse_fmha: deterministic: got True for float32, d=16, wanted"):
        sparse_fmha(q, kv, INDICES, deterministic=True)
