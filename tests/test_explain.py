"""Which implementation runs, and why: `explain`, and the log."""

import functools
import logging

import jax
import jax.numpy as jnp
import pytest

from jax_dsv4_fmha import QueryRope, dsv4_attention, explain, fmha, sparse_fmha
from jax_dsv4_fmha._dispatch import plan
from jax_dsv4_fmha._dispatch.explain import _warn
from jax_dsv4_fmha._host import attention, library
from jax_dsv4_fmha.layers import from_config

from .helpers import every_kernel
from .test_layers import MODELS, shapes


@pytest.fixture(autouse=True)
def again():
    """Clears caches: what is traced under one pretence must not serve another."""
    jax.clear_caches()
    _warn.cache_clear()
    yield
    jax.clear_caches()


@pytest.fixture
def hopper(monkeypatch):
    """As if this process had an H100 and compiled for it, with every kernel built in, and no keys to split."""
    monkeypatch.setattr(attention, "split_count", lambda *_: 1)
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def x(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(q, kv, **options):
    return dsv4_attention(q, kv, kv, ratio=4, **options)[0]


def loss(q, kv, **options):
    return layer(q, kv, **options).astype(jnp.float32).sum()


OPERANDS = x(1, 64, 16, 512), x(1, 64, 512)


def said(f, *args):
    return [(d.op, d.part, d.implementation, d.times) for d in explain(f, *args)]


def test_kernels_of_a_layer_and_its_gradient(hopper):
    op = "dsv4_attention"
    assert said(layer, *OPERANDS) == [(op, "forward", "kernel", 1)]
    assert said(jax.jit(jax.grad(loss)), *OPERANDS) == [(op, "forward", "kernel", 1), (op, "gradient", "kernel", 1)]
    (decision,) = explain(layer, *OPERANDS)
    assert str(decision).startswith("dsv4_attention, forward: kernel: hca_fwd, built for ")
    assert decision.variant == "hca_fwd_sm_90a_d512_bfloat16"
    assert decision.variant in {v.key for v in library.variants()}
    few = x(1, 4, 9, 512), x(1, 8, 512), x(1, 4, 3, dtype=jnp.int32)
    assert explain(sparse_fmha, *few)[0].variant == "mla_sparse_fwd_sm_90a_d512_bfloat16_h16"


def rotated(q, kv, heads, **options):
    table = jnp.ones((1, q.shape[1], 64))
    q = jnp.tile(q, (1, 1, heads // q.shape[2], 1))
    o, _ = dsv4_attention(q, kv, window=9, rope=QueryRope(table, 1e-6), **options)
    return o.astype(jnp.float32).sum()


LAUNCHED = {
    "split keys": (layer, "hca_fwd and combine"),
    "canonical order": (
        lambda q, kv: layer(jnp.tile(q, (1, 1, 3, 1)), kv, batch_invariant=True), "csa_fwd_by_columns and row_columns"
    ),
    "FP8 products": (
        lambda q, kv: layer(q, kv, precision="float8_e4m3fn"), "key_codes and hca_fwd_e4m3"
    ),
    "RoPE inside": (lambda q, kv: rotated(q, kv, 64), "mla_span_fwd_turned and combine"),
    "its gradient": (jax.grad(lambda q, kv: rotated(q, kv, 64)), "mla_span_bwd_turned"),
    "its gradient by passes": (
        jax.grad(lambda q, kv: rotated(q, kv, 128)), "norm_rope, rope, mla_span_bwd and norm_rope_bwd"
    ),
    "deterministic gradient": (
        jax.grad(lambda q, kv: loss(q, kv, deterministic=True)), "hca_bounds and hca_bwd"
    ),
    "dense gradient": (
        jax.grad(lambda q, _: fmha(*[q[..., :64]] * 3)[0].astype(jnp.float32).sum()), "tile_spans, mha_dkdv and mha_dq"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_launch_of_a_call_is_named(hopper, monkeypatch, name):
    """In order, with those that prepare keys, and those that end what others begin."""
    monkeypatch.setattr(attention, "split_count", lambda *_: 3)
    monkeypatch.setattr(plan, "columns_pay", lambda *_: True)
    f, names = LAUNCHED[name]
    *_, last = explain(f, *OPERANDS)
    found = [d.reason.split(", built for")[0] for d in explain(f, *OPERANDS)]
    assert names in found and last.implementation == "kernel"


@pytest.mark.parametrize(
    "f, operand, says",
    [
        (
            lambda q: fmha(q, q),
            x(1, 4, 2, 64, dtype=jnp.float32),
            "no kernel takes float32, d=64, V=K; built mha_fwd (d=64",
        ),
        (lambda q: fmha(q, q), x(1, 4, 2, 96), "no kernel takes bfloat16, d=96"),
        (lambda q: fmha(q, q, q + 0), x(1, 4, 1, 576), "no kernel takes bfloat16, d=576, separate K and V; built "),
    ],
)
def test_why_the_reference_and_one_line_of_it(hopper, caplog, f, operand, says):
    (decision,) = explain(f, operand)
    assert decision.implementation == "reference" and says in decision.reason
    with caplog.at_level(logging.WARNING, "jax_dsv4_fmha"):
        caplog.clear()
        _warn.cache_clear()
        jax.clear_caches()
        for _ in range(2):
            jax.eval_shape(lambda q: jax.vmap(f)(q), jax.ShapeDtypeStruct((2, *operand.shape), operand.dtype))
    assert [r.name for r in caplog.records] == ["jax_dsv4_fmha"] and says in caplog.text


def test_values_of_their_own_at_512_have_kernels(hopper):
    f = jax.grad(lambda q: fmha(q, q, q + 0)[0].astype(jnp.float32).sum())
    for dtype in (jnp.bfloat16, jnp.float16):
        forward, gradient = explain(f, x(1, 4, 2, 512, dtype=dtype))
        assert forward.variant == f"mha_fwd_sm_90a_d512_{jnp.dtype(dtype).name}"
        assert gradient.implementation == "kernel" and "tile_spans, mha_dkdv and mha_dq" in gradient.reason


def test_other_devices(monkeypatch, caplog):
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_80",))
    (decision,) = explain(layer, *OPERANDS)
    assert decision.implementation == "reference" and "and this process has sm_80" in decision.reason
    assert "and this process has sm_80" in caplog.text


def test_without_a_gpu_nothing_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(library, "local_architectures", lambda: ())
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    (decision,) = explain(layer, *OPERANDS)
    assert decision.implementation == "reference" and not caplog.records
    assert "JAX compiles for cpu here" in decision.reason or "no kernels are built in" in decision.reason
    assert "it would be hca_fwd: bfloat16, d=512" in decision.reason


@pytest.mark.parametrize("built", [(), ("sm_100f",)])
def test_what_would_run_where_no_kernel_is_built(monkeypatch, built):
    """By the table of this version's kernels, with the launches that there would be."""
    kernels = tuple(v for v in every_kernel() if v.arch in built)
    monkeypatch.setattr(library, "variants", lambda: kernels)
    monkeypatch.setattr(library, "local_architectures", lambda: ())
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    forward, gradient = explain(jax.grad(loss), *OPERANDS)
    would_be = "sm_100f" if built else "sm_100f and sm_90a"
    assert f"on {would_be} it would be hca_fwd: bfloat16, d=512" in forward.reason
    would_be = "sm_100f" if built else "sm_90a and sm_100f"
    assert f"on {would_be} it would be hca_bwd: bfloat16, d=512" in gradient.reason
    *_, gradient = explain(jax.grad(lambda q, kv: loss(q, kv, deterministic=True)), *OPERANDS)
    missing = "for sm_90a " if built else ""
    assert f"no kernels {missing}are built in (`python -m jax_dsv4_fmha info`)" in gradient.reason
    assert "on sm_90a it would be hca_bwd: bfloat16, d=512" in gradient.reason
    (decision,) = explain(lambda q: fmha(q, q), x(1, 4, 2, 96))
    assert "no kernel takes bfloat16, d=96" in decision.reason and "mha_fwd (d=64 or d=128" in decision.reason
    (decision,) = explain(lambda q: fmha(q, q), x(1, 4, 2, 64))
    assert decision.implementation == "reference" and "it would be mha_fwd" in decision.reason
    with pytest.raises(NotImplementedError, match="got 'cubin' for bfloat16, d=96"):
        jax.eval_shape(lambda q: fmha(q, q, implementation="cubin"), x(1, 4, 2, 96))
    if not built:
        with pytest.raises(NotImplementedError, match=r"built nothing here .*; there are hca_fwd \(d=512, bfloat16"):
            jax.eval_shape(lambda q, kv: dsv4_attention(q, kv, kv, ratio=4, implementation="cubin"), *OPERANDS)


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize(
    "option, says",
    [({"batch_invariant": True}, "batch_invariant=True"), ({"implementation": "cubin"}, "implementation='cubin'")],
)
def test_a_call_that_insists_on_a_kernel_elsewhere(monkeypatch, option, says, is_built):
    """On a CPU, with kernels built in and without: explain says that it is an error, and the error names the option."""
    monkeypatch.setattr(library, "variants", every_kernel if is_built else lambda: ())
    monkeypatch.setattr(library, "local_architectures", lambda: ())
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    run = jax.jit(lambda q, kv: dsv4_attention(q, kv, window=64, **option)[0])
    (decision,) = explain(run, *OPERANDS)
    assert decision.implementation == "kernel" and decision.reason.startswith(f"{says} insists on it")
    assert ("exporting it for cuda is not" in decision.reason) == is_built
    assert ("so the call is an error: no kernels are built in" in decision.reason) == (not is_built)
    got = "True" if "batch" in says else "'cubin'"
    where = " on platform cpu, wanted platform cuda" if is_built else r" for bfloat16, d=512.*built nothing here"
    (name,) = option
    with pytest.raises((ValueError, NotImplementedError), match=f"^dsv4_attention: {name}: got {got}{where}"):
        run.lower(*OPERANDS)


@pytest.fixture
def blackwell(monkeypatch):
    """As if this process had a B200 and compiled for it, with every kernel built in."""
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_100f",))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_gradients_on_blackwell(blackwell):
    """The default one has a kernel. One with the same bits every time has none: XLA's, or an error where XLA cannot."""
    forward, gradient = explain(jax.grad(loss), *OPERANDS)
    assert forward.variant == "hca_fwd_sm_100f_d512_bfloat16" and gradient.variant == "hca_bwd_sm_100f_d512_bfloat16"
    *_, gradient = explain(jax.grad(lambda q, kv: loss(q, kv, deterministic=True)), *OPERANDS)
    assert gradient.implementation == "reference"
    assert "hca_bwd: built for sm_90a, and this process has sm_100f" in gradient.reason
    indices = jax.ShapeDtypeStruct((1, 64, 8), jnp.int32)

    def selected(q, kv, indices, **options):
        return dsv4_attention(q, kv, kv, indices=indices, **options)[0].astype(jnp.float32).sum()

    *_, gradient = explain(jax.grad(selected), *OPERANDS, indices)
    assert gradient.variant == "csa_bwd_sm_100f_d512_bfloat16"
    with pytest.raises(NotImplementedError, match=r"deterministic: got True for bfloat16, d=512.*csa_bwd"):
        jax.eval_shape(jax.grad(lambda *x: selected(*x, deterministic=True)), *OPERANDS, indices)


def test_latents_of_576_on_blackwell(blackwell):
    """No kernel is compiled for it: the reference runs and says why, or "cubin" is an error."""
    q, kv = x(1, 4, 64, 576), x(1, 16, 576)
    indices = jax.ShapeDtypeStruct((1, 4, 8), jnp.int32)
    calls = {
        "mla_span_fwd_v512": (lambda q, kv, **how: fmha(q, kv[:, :, None], d_v=512, **how), (q, kv)),
        "mla_sparse_fwd_v512": (lambda q, kv, i, **how: sparse_fmha(q, kv, i, d_v=512, **how), (q, kv, indices)),
    }
    for name, (f, operands) in calls.items():
        (decision,) = explain(f, *operands)
        words = f"{name}: built for sm_90a, and this process has sm_100f"
        assert decision.implementation == "reference" and words in decision.reason
        for how in ({"batch_invariant": True}, {"implementation": "cubin"}):
            with pytest.raises(NotImplementedError, match=f"got .* on sm_100f, wanted a kernel .*, built {name}"):
                jax.jit(functools.partial(f, **how)).trace(*operands).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_step_on_blackwell(blackwell, dtype):
    """Every part of it has a kernel there too."""
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64}
    layer = from_config(MODELS["v4"] | sizes)[1]
    cache = jax.eval_shape(lambda: layer.cache(2, 64, dtype))
    found = explain(lambda *args: layer.step(*args, lengths=9), shapes(layer), x(2, 1, layer.hidden), cache)
    index_query = "index_query" if dtype == "float8_e4m3fn" else "rope_hadamard"
    ops = {"norm_rope", "rope", "kv_insert", "lightning_indexer", index_query, "dsv4_decode"}
    assert {d.op for d in found} == ops  # over caches without a table slots are a part of attention
    assert {d.implementation for d in found} == {"kernel"}
    for decision in found:
        if decision.op in ("rope", "kv_insert", "lightning_indexer"):
            assert "built for sm_90a and sm_100f: " in decision.reason


def test_inside_of_loops():
    q = x(1, 4, 2, 64)
    body = jax.checkpoint(lambda c: fmha(c, c)[0])
    looped = explain(lambda q: jax.lax.scan(lambda c, _: (body(c), None), q, None, length=3)[0], q)
    assert [(d.op, d.times) for d in looped] == [("fmha", 1)]
    assert explain(lambda q: fmha(q, q, implementation="reference"), q) == []
