"""fmha: the way to a kernel, without one and, on a GPU, with it.

The reference's values against float64 stand in test_reference.py. Here the seam is tested on a CPU by claiming that
kernels are built; and `gpu` tests compare every case of the table with the reference.
"""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Span, fmha, reference
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.attention import FmhaCase, run, run_reference
from jax_dsv4_fmha._testing.cases import CASES
from tests.helpers import assert_right

TABLE = [case for case in CASES if isinstance(case, FmhaCase)]
B, S, H, D = 2, 6, 2, 64


def small(dtype=jnp.bfloat16, b=B):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((b, S, H, D)), dtype) for _ in range(3))
    return q, k, v, jnp.array([0.5, -0.5])


@pytest.fixture
def unbuilt(monkeypatch):
    monkeypatch.setattr(library, "variants", lambda: ())


SOME = [
    next(c for c in TABLE if c.is_small and c.dtype == dtype and c.shared_kv == shared_kv)
    for dtype in ("bfloat16", "float16")
    for shared_kv in (False, True)
]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_rounds_once(case):
    want = run_reference(case)
    for implementation in (None, "reference"):
        got = run(case, implementation)
        assert got[0].dtype == case.dtype and got[1].dtype == jnp.float32
        assert_right(got, want)


@pytest.mark.usefixtures("built")
class TestSeam:
    """A kernel is built, this process has no GPU: everything works, on the reference."""

    span = Span.causal(S)

    def test_value(self):
        q, k, v, sink = small()
        for x, y in zip(
            fmha(q, k, v, span=self.span, sink=sink), reference.fmha(q, k, v, span=self.span, sink=sink), strict=True
        ):
            np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=1e-2, atol=1e-6)

    def test_jaxpr_has_both_ways(self):
        text = str(jax.make_jaxpr(lambda q, k, v: fmha(q, k, v))(*small()[:3]))
        assert "platform_index" in text and "dsv4_fmha_mha_fwd" in text

    @pytest.mark.parametrize("shared_kv", [False, True])
    def test_gradient(self, shared_kv):
        q, k, v, sink = (x.astype(jnp.float32) for x in small())
        v = None if shared_kv else v
        loss = lambda op: lambda *x: sum(jnp.cos(y).sum() for y in op(*x[:3], span=self.span, sink=x[3]))  # noqa: E731
        got = jax.jit(jax.grad(loss(fmha), (0, 1, 2, 3)))(q, k, v, sink)
        want = jax.jit(jax.grad(loss(reference.fmha), (0, 1, 2, 3)))(q, k, v, sink)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, want)

    def test_vmap_and_its_gradient(self):
        q, k, v, sink = (jnp.stack([x, x + 1]).astype(jnp.float32) for x in small())
        f = jax.jit(lambda *x: fmha(*x[:3], span=self.span, sink=x[3]))
        want = [jnp.stack(x) for x in zip(*(f(q[i], k[i], v[i], sink[i]) for i in range(2)), strict=True)]
        for x, y in zip(jax.jit(jax.vmap(f))(q, k, v, sink), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        one = jax.jit(jax.vmap(jax.grad(lambda *x: f(*x)[0].sum())))(q, k, v, sink)
        all_ = jax.jit(jax.grad(lambda *x: jax.vmap(f)(*x)[0].sum()))(q, k, v, sink)
        np.testing.assert_allclose(one, all_, rtol=1e-5, atol=1e-5)

    def test_remat_and_scan(self):
        q, k, v, sink = (x.astype(jnp.float32) for x in small())

        def step(x, _):
            return jax.checkpoint(lambda x: fmha(x, k, v, sink=sink)[0])(x), None

        grad = jax.jit(jax.grad(lambda q: jax.lax.scan(step, q, None, length=2)[0].sum()))(q)
        assert jnp.isfinite(grad).all()

    @pytest.mark.parametrize(
        "call",
        [lambda f, *x: f(*x), lambda f, *x: jax.jit(f)(*x), lambda f, *x: jax.vmap(f)(*(y[None] for y in x))],
        ids=["eager", "jit", "vmap"],
    )
    def test_cubin_insists_on_cuda(self, call):
        if jax.default_backend() != "cpu":
            pytest.skip("this process runs on a GPU")
        with pytest.raises(
            ValueError, match="fmha: implementation: got 'cubin' on platform cpu, wanted platform cuda"
        ) as e:
            call(lambda *x: fmha(*x, implementation="cubin"), *small()[:3])
        assert "built" not in str(e.value).splitlines()[0]  # what is missing is not a kernel

    @pytest.mark.parametrize("implementation", [None, "cubin"])
    def test_export_for_cuda(self, implementation):
        q, k, v, sink = small()
        f = jax.jit(lambda q, k, v, sink: fmha(q, k, v, sink=sink, implementation=implementation))
        allowed = [jax.export.DisabledSafetyCheck.custom_call("dsv4_fmha_mha_fwd")]
        exported = jax.export.export(f, platforms=["cuda"], disabled_checks=allowed)(q, k, v, sink)
        assert "dsv4_fmha_mha_fwd" in exported.mlir_module()

    def test_export_with_symbolic_batch(self):
        (b,) = jax.export.symbolic_shape("b")
        operands = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in small()[:3]]
        allowed = [jax.export.DisabledSafetyCheck.custom_call("dsv4_fmha_mha_fwd")]
        f = jax.jit(lambda q, k, v: fmha(q, k, v, span=self.span))
        jax.export.export(f, platforms=["cuda"], disabled_checks=allowed)(*operands)
        jax.export.export(f, platforms=["cpu"])(*operands)

    def test_cubin_has_a_gradient(self):
        f = jax.jit(jax.grad(lambda q: fmha(q, *small()[1:3], implementation="cubin")[1].sum()))
        assert "dsv4_fmha_mha_fwd" in f.trace(small()[0]).lower(lowering_platforms=("cuda",)).as_text()

    def test_another_local_architecture_means_the_reference(self, monkeypatch):
        monkeypatch.setattr(library, "local_architectures", lambda: ("sm_80",))
        assert "dsv4_fmha_mha_fwd" not in str(jax.make_jaxpr(lambda *x: fmha(*x))(*small()[:3]))

    def test_reference_means_the_reference(self):
        assert "dsv4_fmha_mha_fwd" not in str(
            jax.make_jaxpr(lambda *x: fmha(*x, implementation="reference"))(*small()[:3])
        )


def test_shared_kv_runs_on_the_separate_kernel(monkeypatch):
    monkeypatch.setattr(library, "shipped_for", lambda op, **_: () if op == "mla_span_fwd" else ("sm_90a",))
    monkeypatch.setattr(library, "architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(library, "local_architectures", lambda: ())
    text = str(jax.make_jaxpr(lambda q, k: fmha(q, k))(*small()[:2]))
    assert "dsv4_fmha_mha_fwd" in text and "dsv4_fmha_mla_span_fwd" not in text


@pytest.mark.usefixtures("unbuilt")
def test_nothing_built():
    q, k, v, _ = small()
    assert "dsv4_fmha_mha_fwd" not in str(jax.make_jaxpr(lambda *x: fmha(*x))(q, k, v))
    with pytest.raises(
        NotImplementedError,
        match=r"'cubin' for bfloat16, d=64, separate K and V, wanted .*, built nothing here .*; there are mha_fwd",
    ):
        fmha(q, k, v, implementation="cubin")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
class TestKernel:
    @pytest.mark.parametrize("case", TABLE, ids=lambda case: case.id)
    def test_equals_the_reference(self, case):
        assert_right(run(case, "cubin"), run_reference(case))

    @pytest.mark.parametrize("case", [c for c in TABLE if not c.is_small and c.s_q < 10_000], ids=lambda case: case.id)
    def test_same_bits_on_every_run(self, case):
        args, kwargs = jax.device_put(case.operands())
        f = jax.jit(lambda args, kwargs: fmha(*args, **kwargs, implementation="cubin"))
        first = [np.asarray(x) for x in f(args, kwargs)]
        for _ in range(10):
            for x, y in zip(f(args, kwargs), first, strict=True):
                assert np.asarray(x).tobytes() == y.tobytes()

    def test_eight_threads(self):
        cases = [c for c in TABLE if c.is_small][::5][:8]
        want = [[np.asarray(x) for x in run(case, "cubin")] for case in cases]

        def repeat(case):
            return [[np.asarray(x) for x in run(case, "cubin")] for _ in range(5)]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for case, got, y in zip(cases, pool.map(repeat, cases), want, strict=True):
                for x in got:
                    assert all(a.tobytes() == b.tobytes() for a, b in zip(x, y, strict=True)), case.id

    def test_none_takes_the_kernel_and_has_a_gradient(self):
        q, k, v, sink = small()
        f = jax.jit(lambda *x: fmha(*x[:3], sink=x[3])[0])
        assert "dsv4_fmha_mha_fwd" in f.lower(q, k, v, sink).compile().as_text()
        loss = lambda op: lambda *x: op(*x[:3], sink=x[3])[0].astype(jnp.float32).sum()  # noqa: E731
        got = jax.jit(jax.grad(loss(fmha), (0, 1, 2, 3)))(q, k, v, sink)
        want = jax.jit(jax.grad(loss(reference.fmha), (0, 1, 2, 3)))(q, k, v, sink)
        for x, y in zip(got, want, strict=True):
            x, y = x.astype(np.float32), y.astype(np.float32)
            assert jnp.linalg.norm(x - y) < 2e-2 * jnp.linalg.norm(y)

    def test_vmap(self):
        q, k, v, sink = (jnp.stack([x, x[::-1]]) for x in small())
        f = lambda *x: fmha(*x[:3], sink=x[3], implementation="cubin")  # noqa: E731
        got = jax.jit(jax.vmap(f))(q, k, v, sink)
        for i in range(2):
            want = f(q[i], k[i], v[i], sink[i])
            np.testing.assert_array_equal(got[1][i], want[1])
            # a sink for every batch entry applies after the kernel, to an o that is rounded once already
            np.testing.assert_allclose(got[0][i].astype(np.float32), want[0].astype(np.float32), rtol=2**-7, atol=1e-6)

    def test_separate_v_at_576_is_refused(self):
        x = jnp.zeros((1, 4, 2, 576), jnp.bfloat16)
        got = "'cubin' for bfloat16, d=576, separate K and V"
        says = rf"{got}, wanted .*, built mha_fwd \(.*mla_span_fwd \(d=512, .*sm_90a"
        with pytest.raises(NotImplementedError, match=says):
            fmha(x, x, x, implementation="cubin")
