"""A layer's experts, from MXFP4, FP8 and bfloat16: definition, packing, errors, transformations, kernels on a GPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from interpreter.kernels import native
from interpreter.kernels.fused_moe import of_large_scales
from jax_dsv4_fmha import EXPORT_CHECKS, PackedExperts, explain, fused_moe, pack_experts
from jax_dsv4_fmha._host import fused_moe as raw
from jax_dsv4_fmha._testing import experts as cases
from jax_dsv4_fmha._testing.cases import MODEL
from jax_dsv4_fmha._testing.experts import E4M3, LIMIT, ExpertsCase, Problem, numbers, off, operands, wanted
from kernels.abi import MOST_GROUPS, GroupedProduct
from tests.helpers import collectives, kernels_in_graphs
from tests.transformed import KINDS

CASES = [case for case in MODEL if isinstance(case, ExpertsCase)]
WEIGHTS = ("MXFP4", "FP8", "bfloat16")
FLOAT32_SCALES = "FP8 with scales in float32"


def given_in(weights, rows, dtype=jnp.bfloat16, **sizes):
    """A problem, and the op's operands with matrices in this."""
    x = Problem.of(rows, fp8=weights.startswith("FP8"), **sizes)
    x = x.with_float32_scales() if weights == FLOAT32_SCALES else x
    return x, operands(x, dtype, is_packed=weights != "bfloat16")


@pytest.mark.parametrize("fp8", [False, True], ids=["MXFP4", "FP8"])
@pytest.mark.parametrize("change", [lambda x: x, of_large_scales], ids=["usual scales", "large and small scales"])
def test_packing_keeps_all_numbers(change, fp8):
    x = change(Problem.of([1, 0, 3], k=512, fp8=fp8))
    for packed, codes, scales in zip(x.packed, (x.codes13, x.codes2), (x.scales13, x.scales2), strict=True):
        assert packed.data.nbytes == codes.size * (4112 if fp8 else 2176) // 4096
        assert packed.format == ("e4m3" if fp8 else "mxfp4")
        np.testing.assert_array_equal(np.asarray(packed.unpacked()), numbers(codes, scales))


def test_what_scales_of_fp8_may_be():
    x = Problem.of([1, 2], fp8=True)
    codes, want = x.codes13.view(E4M3), x.packed[0]
    as_float32 = (2.0 ** (x.scales13.astype(int) - 127)).astype(np.float32)
    in_other_dtypes = (as_float32.astype(dtype) for dtype in (ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16))
    for scales in (x.scales13, as_float32, *in_other_dtypes):
        for pack in (pack_experts, jax.jit(pack_experts)):
            np.testing.assert_array_equal(pack(codes, scales).data, want.data)


@pytest.mark.parametrize(("greatest", "factor"), [(0.7, 1), (300, 2), (2.0**100, 2**93)])
def test_scales_of_fp8_that_are_no_powers_of_two(greatest, factor):
    x = Problem.of([1, 0, 3], k=512, fp8=True).with_float32_scales()
    x.scales13[1, 0, 1, 2] = x.scales2[1, 1, 0] = greatest
    for packed, codes, scales in zip(x.packed, (x.codes13, x.codes2), (x.scales13, x.scales2), strict=True):
        np.testing.assert_array_equal(np.asarray(packed.factor), [1, factor, 1])
        np.testing.assert_array_equal(np.asarray(packed.unpacked()), numbers(codes, scales))


@pytest.mark.parametrize("gated", [True, False])
def test_a_code_of_fp8_that_is_not_a_number_spoils_its_part_of_a_slab(gated):
    """In a gated matrix, 32 of its gates or of what they let through."""
    x = Problem.of([1, 1], fp8=True)
    codes, n = (x.codes13, 32) if gated else (x.codes2, 64)
    place = (1, 1, 70, 130) if gated else (1, 70, 130)
    codes[place] = 0xFF
    got, want = np.asarray(x.packed[not gated].unpacked()), np.ones(codes.shape, bool)
    want[(*place[:-2], slice(70 // n * n, 70 // n * n + n), slice(128, 192))] = False
    np.testing.assert_array_equal(np.isfinite(got), want)


def test_a_scale_that_is_not_a_number_stays_one():
    x = Problem.of([1])
    x.scales2[0, 3, 2] = 255
    assert not np.isfinite(np.asarray(x.packed[1].unpacked())[0, 3, 64:96]).any()


@pytest.mark.parametrize("weights", ["MXFP4", "FP8", FLOAT32_SCALES])
def test_definition(weights):
    x, _ = given_in(weights, [1, 0, 9, 20])
    assert off(fused_moe(*operands(x), limit=LIMIT), wanted(x)) < 2**-7
    assert off(fused_moe(*operands(x, jnp.float32), limit=LIMIT), wanted(x, round_inner=False)) < 1e-5


def test_an_expert_that_is_not_a_number_reaches_its_own_tokens_alone():
    x = Problem.of([1, 0, 9, 20])
    spoilt = Problem.of([1, 0, 9, 20])
    for scales in (spoilt.scales13, spoilt.scales2):
        scales[:2] = 255  # one that a token chose, and one that nobody did
    given, _, _, chosen, weights = operands(x, jnp.float32)
    others = np.asarray(chosen != 0).all(-1)
    assert 0 < others.sum() < others.size

    def result(of):
        def f(given, weights):
            return fused_moe(given, *of.packed, chosen, weights, limit=LIMIT, implementation="reference")

        y, back = jax.vjp(f, given, weights)
        return y, *back(jnp.ones_like(y))

    for got, want in zip(result(spoilt), result(x), strict=True):
        np.testing.assert_array_equal(got[others], want[others])
        assert np.isfinite(want).all() and np.isnan(got[~others]).any()


def test_the_gradient_of_an_expert_that_nobody_chose_is_0():
    """Even if it is not a number, as by kernels, which do not read it."""
    given, w13, w2, chosen, weights = operands(Problem.of([3, 0, 4]), jnp.float32, is_packed=False)
    bad = [w.at[1].set(jnp.nan) for w in (w13, w2)]

    def total(w13, w2):
        return fused_moe(given, w13, w2, chosen, weights, limit=LIMIT).sum()

    for got, want in zip(jax.grad(total, (0, 1))(*bad), jax.grad(total, (0, 1))(w13, w2), strict=True):
        assert not np.asarray(got[1]).any() and np.asarray(got[0]).any()
        np.testing.assert_array_equal(got, want)


def test_derivatives_of_every_mode_are_the_reference_s():
    """As the error of another implementation says."""
    _, w13, w2, chosen, weights = operands(Problem.of([3, 4]), jnp.float32, is_packed=False)
    given = jnp.ones((1, chosen.shape[1], w2.shape[1]))

    def total(given, implementation):
        return (fused_moe(given, w13, w2, chosen, weights, implementation=implementation) ** 2).sum()

    with pytest.raises(NotImplementedError, match=r"one forward, wanted jax.* once, or implementation="):
        jax.jvp(lambda x: total(x, None), (given,), (given,))
    _, along = jax.jvp(lambda x: total(x, "reference"), (given,), (given,))
    np.testing.assert_allclose(along, jax.grad(total)(given, None).sum(), rtol=1e-4)


def test_a_weight_of_0_has_a_gradient():
    given, w13, w2, chosen, weights = operands(Problem.of([3, 4]), jnp.float32)

    def total(weights):
        return fused_moe(given, w13, w2, chosen, weights, implementation="reference").sum()

    got = jax.grad(total)(jnp.zeros_like(weights))
    np.testing.assert_allclose(got, jax.grad(total)(weights), rtol=1e-4, atol=1e-4)  # the op is linear in them
    assert (got != 0).any()


@pytest.mark.parametrize("fp8", [False, True], ids=["MXFP4", "FP8"])
def test_matrices_in_bfloat16_make_the_same(fp8):
    """They have all numbers of MXFP4 and FP8, and so has a gradient in x and weights."""
    x = Problem.of([1, 0, 9, 20], fp8=fp8)
    packed, rows = (operands(x, is_packed=is_packed) for is_packed in (True, False))
    assert off(fused_moe(*rows, limit=LIMIT), wanted(x)) < 2**-7

    def result(w13, w2, given, weights, **how):
        y, back = jax.vjp(lambda x, of: fused_moe(x, w13, w2, rows[3], of, limit=LIMIT, **how), given, weights)
        return y, *back(jnp.ones_like(y))

    want = result(*packed[1:3], rows[0], rows[4], implementation="reference")
    for got, other in zip(result(*rows[1:3], rows[0], rows[4]), want, strict=True):
        np.testing.assert_array_equal(got, other)


def test_the_gradient_of_matrices_in_bfloat16():
    """Each matrix has what its own tokens make of it, and one without tokens has zeros."""
    x = Problem.of([3, 0, 4])
    given, w13, w2, chosen, weights = operands(x, is_packed=False)
    limit = 1e3  # that nothing reaches

    def plainly(given, w13, w2, weights):
        """Choice by choice, and a choice of another device adds nothing."""
        there, of = (chosen >= 0) & (chosen < 3), jnp.clip(chosen, 0, 2)
        up = jnp.einsum("bscghk,bsk->bscgh", w13.astype(jnp.float32)[of], given.astype(jnp.float32))
        inner = jax.nn.silu(up[..., 0, :]) * up[..., 1, :] * weights[..., None] * there[..., None]
        return jnp.einsum("bsckh,bsch->bsk", w2.astype(jnp.float32)[of], inner)

    def by_op(given, w13, w2, weights):
        return fused_moe(given, w13, w2, chosen, weights, limit=limit)

    def gradients(f):
        return jax.grad(lambda *args: (f(*args).astype(jnp.float32) ** 2).sum(), range(4))(given, w13, w2, weights)

    for got, want in zip(gradients(by_op), gradients(plainly), strict=True):
        got, want = (np.asarray(a, np.float32) for a in (got, want))
        assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
    assert not np.asarray(gradients(by_op)[1][1]).any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_check_s_cases(case):
    assert case.complaints("reference") == []


@pytest.mark.parametrize(
    "fault",
    [
        lambda x, w13, w2, chosen, weights: (x, w13, w2, chosen, weights[..., ::-1]),
        lambda x, w13, w2, chosen, weights: (x, w13, w2, chosen ^ 1, weights),
        lambda x, w13, w2, chosen, weights: (x, w13, jax.tree.map(lambda a: a[::-1], w2), chosen, weights),
    ],
    ids=["weights", "choices", "matrices"],
)
def test_check_finds_what_is_wrong(monkeypatch, fault):
    right = fused_moe
    monkeypatch.setattr(cases, "fused_moe", lambda *given, **how: right(*fault(*given), **how))
    (says,) = CASES[0].complaints("reference")
    assert says.startswith("results are off by ")


def test_without_a_limit():
    x = Problem.of([2, 3], scale=119)
    args = operands(x, jnp.float32)
    np.testing.assert_array_equal(fused_moe(*args), fused_moe(*args, limit=1e30))
    assert (np.asarray(fused_moe(*args)) != np.asarray(fused_moe(*args, limit=0.1))).any()


@pytest.mark.parametrize("matrices", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_two_devices_add_up(kind, matrices):
    """In a shard_map each device has some experts, and their numbers from 0 on."""
    x, (given, w13, w2, chosen, weights) = given_in(matrices, [3, 4], jnp.float32)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(KINDS[kind],))

    def of_device(given, w13, w2, chosen, weights):
        first = jax.lax.axis_index("expert") * jax.tree.leaves(w13)[0].shape[0]
        return jax.lax.psum(fused_moe(given, w13, w2, chosen - first, weights, limit=LIMIT), "expert")

    spec = P("expert")
    w13, w2 = jax.device_put((w13, w2), NamedSharding(mesh, spec))
    run = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), spec, spec, P(), P()), out_specs=P())
    text = jax.jit(run).lower(given, w13, w2, chosen, weights).compile().as_text()
    assert "all-gather" not in text
    y = jax.jit(run)(given, w13, w2, chosen, weights)
    assert off(y, wanted(x, round_inner=False)) < 1e-5


@pytest.mark.parametrize("matrices", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_channels_of_two_devices_add_up(kind, matrices):
    """In a shard_map each device has some channels of every expert, and gathers no others: of packed matrices tiles of
    rows of w13, and slabs of columns of w2.
    """
    x, (given, w13, w2, chosen, weights) = given_in(matrices, [3, 4], jnp.float32, inner=512)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(KINDS[kind],))
    of_13, of_2 = P(None, None, "tensor"), P(None, None, "tensor")
    if matrices != "bfloat16":
        of_13, of_2 = (
            dataclasses.replace(w, data=spec, factor=P()) for w, spec in ((w13, P(None, "tensor")), (w2, of_2))
        )
    w13, w2 = (
        jax.device_put(w, jax.tree.map(functools.partial(NamedSharding, mesh), spec))
        for w, spec in ((w13, of_13), (w2, of_2))
    )

    def of_device(*args):
        return jax.lax.psum(fused_moe(*args, limit=LIMIT), "tensor")

    run = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=(P(), of_13, of_2, P(), P()), out_specs=P()))
    assert "all-gather" not in run.lower(given, w13, w2, chosen, weights).compile().as_text()
    assert off(run(given, w13, w2, chosen, weights), wanted(x, round_inner=False)) < 1e-5


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("is_packed", [True, False], ids=["MXFP4", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_devices_share_out_tokens(kind, is_packed):
    """Each has the matrices of all experts."""
    x = Problem.of([3, 0, 4, 8])
    dtype, most = (jnp.float32, 1e-5) if is_packed else (jnp.bfloat16, 2**-7)
    given, w13, w2, chosen, weights = operands(x, dtype, is_packed)
    mesh = jax.make_mesh((2,), ("context",), axis_types=(KINDS[kind],))
    by_tokens = NamedSharding(mesh, P(None, "context"))
    given, chosen, weights = (jax.device_put(a, by_tokens) for a in (given, chosen, weights))
    run = functools.partial(fused_moe, limit=LIMIT)
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(given, w13, w2, chosen, weights).compile()
        y = program(given, w13, w2, chosen, weights)
    assert collectives(program) == {} and y.sharding.is_equivalent_to(by_tokens, 3)
    assert off(y, wanted(x, round_inner=not is_packed)) < most


def test_explicit_axes_share_out_batch_and_tokens_of_a_gradient():
    """Where no kernel runs, the definition's leaves both where they are."""
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(KINDS["Explicit"],) * 2)
    shapes = (4, 4, 8), (3, 2, 8, 8), (3, 8, 8), (4, 4, 2)
    given, w13, w2, weights = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    chosen = jax.random.randint(jax.random.key(4), (4, 4, 2), -1, 4)

    def gradients(given, w13, w2, chosen, weights):
        run = functools.partial(fused_moe, limit=LIMIT)
        return jax.grad(lambda a, b, c, d: (run(a, b, c, chosen, d) ** 2).sum(), (0, 1, 2, 3))(given, w13, w2, weights)

    args = given, w13, w2, chosen, weights
    by_tokens = NamedSharding(mesh, P("data", "context"))
    placed = [jax.device_put(a, by_tokens) if i in (0, 3, 4) else a for i, a in enumerate(args)]
    with jax.set_mesh(mesh):
        made = jax.jit(gradients)(*placed)
    assert jax.typeof(made[0]).sharding.spec == P("data", "context", None)
    for a, b in zip(made, gradients(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("matrices", WEIGHTS)
def test_transformations(matrices):
    _, args = given_in(matrices, [2, 5], jnp.float32)
    run = functools.partial(fused_moe, limit=LIMIT)
    y = run(*args)
    np.testing.assert_allclose(jax.jit(run)(*args), y, rtol=1e-5, atol=1e-4)
    both = jax.vmap(run, (0, None, None, 0, 0))(
        *(jnp.stack([a, a]) if i in (0, 3, 4) else a for i, a in enumerate(args))
    )
    np.testing.assert_allclose(both[1], y, rtol=1e-5, atol=1e-4)
    loss = lambda given, weights: run(given, *args[1:4], weights, implementation="reference").sum()  # noqa: E731
    of_x, of_weights = jax.grad(loss, (0, 1))(args[0], args[4])
    assert np.isfinite(of_x).all() and np.abs(of_weights).max() > 0


@pytest.mark.parametrize("matrices", ["MXFP4", "FP8"])
def test_packed_matrices_have_the_gradient_of_what_they_stand_for(matrices):
    """In x and weights; a derivative in a factor is an error."""
    _, (given, w13, w2, chosen, weights) = given_in(matrices, [2, 0, 5])

    def result(w13, w2):
        y, back = jax.vjp(lambda x, of: fused_moe(x, w13, w2, chosen, of, limit=LIMIT), given, weights)
        return back(jnp.ones_like(y))

    for got, want in zip(result(w13, w2), result(*(w.unpacked(jnp.bfloat16) for w in (w13, w2))), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.asarray(got).any()

    def of_factor(factor):
        w = dataclasses.replace(w2, factor=factor)
        return fused_moe(given, w13, w, chosen, weights).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=r"a derivative in w2\.factor, wanted .*implementation='reference'"):
        jax.grad(of_factor)(w2.factor)


@pytest.mark.skipif(not native.built(GroupedProduct), reason="without kernels")
def test_an_export_leaves_batch_and_tokens_open():
    args = operands(Problem.of([1, 2]), jnp.float32)
    sizes = jax.export.symbolic_shape("b, s")
    given, chosen, weights = (jax.ShapeDtypeStruct((*sizes, *args[i].shape[2:]), args[i].dtype) for i in (0, 3, 4))
    f = functools.partial(fused_moe, limit=LIMIT)
    blob = jax.export.export(jax.jit(f))(given, *args[1:3], chosen, weights).serialize()
    np.testing.assert_array_equal(jax.export.deserialize(blob).call(*args), f(*args))


@pytest.mark.parametrize("matrices", WEIGHTS)
def test_the_call_is_exported(matrices):
    _, args = given_in(matrices, [1, 2])
    (decision,) = explain(fused_moe, *args)
    assert "group_rows and grouped_product" in decision.reason
    for num_experts, says in ((None, 2), (64, 64)):  # a device has two of them
        run = jax.jit(functools.partial(fused_moe, num_experts=num_experts))
        exported = jax.export.export(run, platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(*args)
        assert re.search(rf"dsv4_fmha_fused_moe.*num_experts = {says} : i64", exported.mlir_module())


def test_matrices_of_other_sizes_have_no_kernel():
    """The definition takes them."""
    given, w13, w2, chosen, weights = operands(Problem.of([1, 2], inner=512), is_packed=False)
    args = given, w13[:, :, :320], w2[:, :, :320], chosen, weights
    assert fused_moe(*args, implementation="reference").shape == given.shape
    with pytest.raises(NotImplementedError, match="2 experts of 320 x 256"):
        fused_moe(*args, implementation="cubin")


def test_errors_of_matrices_in_bfloat16():
    given, w13, w2, chosen, weights = operands(Problem.of([2, 5]), is_packed=False)
    packed = operands(Problem.of([2, 5]))[1]
    cases = [
        ((w13[:, 0], w2), "w13"),
        ((w13[:, :1], w2), "w13"),
        ((w13[..., :128], w2), "w13"),
        ((w13, w2[:1]), "w2"),
        ((w13, w2[..., :128]), "w2"),
        ((w13.astype(jnp.float16), w2), "w13"),
        ((w13.astype(jnp.float32), w2), "w2: got bfloat16"),
        ((packed, w2), "w2: got .*PackedExperts"),
        ((w13, operands(Problem.of([2, 5]))[2]), "w13: got .*PackedExperts"),
    ]
    for matrices, says in cases:
        with pytest.raises((ValueError, TypeError), match=says):
            fused_moe(given, *matrices, chosen, weights)


def test_errors():
    x, in_fp8 = Problem.of([2, 5]), Problem.of([2, 5], fp8=True).packed
    given, w13, w2, chosen, weights = operands(x)
    changed = functools.partial(dataclasses.replace, w13)
    cases = [
        ((given, w2, w2, chosen, weights), "w13: got a plain matrix, wanted a gated one"),
        ((given, w13, w13, chosen, weights), "w2: got a gated matrix, wanted a plain one"),
        ((given, w13, x.codes2, chosen, weights), "w2: got .*PackedExperts"),
        ((given[..., :128], w13, w2, chosen, weights), "w13: got 256 columns, wanted k=128"),
        ((given, w13, jax.tree.map(lambda a: a[:1], w2), chosen, weights), "w2: got 1 experts of 256 x 256"),
        ((given, w13, w2, chosen[0], weights), "chosen"),
        ((given, w13, w2, chosen.astype(jnp.float32), weights), "chosen"),
        ((given, w13, w2, chosen, weights[..., :1]), "weights"),
        ((given.astype(jnp.float16), w13, w2, chosen, weights), "x"),
        (
            (given, changed(data=w13.data[None]), w2, chosen, weights),
            r"w13.data: got .*, wanted uint8\[e, tiles, slabs",
        ),
        ((given, changed(data=w13.data[..., :2000]), w2, chosen, weights), "w13.data: got slabs of 2000 bytes, wanted"),
        ((given, changed(factor=w13.factor[:1]), w2, chosen, weights), r"w13.factor: got float32\[1\], wanted"),
        ((given, changed(factor=w13.factor.astype(jnp.bfloat16)), w2, chosen, weights), "w13.factor: got bfloat16"),
        ((given, w13, in_fp8[1], chosen, weights), "w2: got matrices in e4m3, wanted mxfp4, as w13 has"),
    ]
    for args, says in cases:
        with pytest.raises((ValueError, TypeError), match=says):
            fused_moe(*args)
    for limit in (0, -1.0, float("nan"), "3"):
        with pytest.raises((ValueError, TypeError), match="limit"):
            fused_moe(given, w13, w2, chosen, weights, limit=limit)
    for num_experts in (w13.experts - 1, 0, 2.0, "8"):
        with pytest.raises((ValueError, TypeError), match=f"num_experts: got .*, wanted an int >= {w13.experts}"):
            fused_moe(given, w13, w2, chosen, weights, num_experts=num_experts)


def test_the_package_knows_how_many_experts_kernels_take():
    assert raw.MOST_EXPERTS == MOST_GROUPS


def test_errors_of_packing():
    codes, scales = jnp.zeros((2, 256, 128), jnp.uint8), jnp.zeros((2, 256, 8), jnp.uint8)
    in_fp8, of_blocks = jnp.zeros((2, 256, 256), jnp.float8_e4m3fn), jnp.ones((2, 2, 2))
    cases = [
        ((codes[:, :64], scales[:, :64]), "rows in multiples of 256"),
        ((codes[..., :64], scales[..., :4]), "columns in multiples of 256"),
        ((codes, scales[..., :4]), "scales"),
        ((codes.astype(jnp.int32), scales), "codes"),
        ((codes, scales.astype(jnp.float32)), "scales"),
        ((codes[:, None], scales[:, None]), "codes"),
        ((in_fp8[:, :128], of_blocks[:, :1]), "rows in multiples of 256"),
        ((in_fp8[..., :128], of_blocks[..., :1]), "columns in multiples of 256"),
        ((in_fp8, of_blocks[:, :1]), "scales"),
        ((in_fp8, scales), "scales"),
        ((in_fp8, -of_blocks), "scales: got -1 among them, wanted numbers above 0"),
        ((in_fp8, of_blocks * jnp.inf), "scales: got inf among them, wanted numbers above 0"),
        ((in_fp8, of_blocks.astype(jnp.float16)), "scales"),
    ]
    for args, says in cases:
        with pytest.raises((ValueError, TypeError), match=says):
            pack_experts(*args)


@pytest.mark.parametrize("fp8", [False, True], ids=["MXFP4", "FP8"])
def test_packing_in_x64(fp8):
    """The dtypes are those that a kernel takes."""
    with jax.enable_x64(True):
        w13, w2 = Problem.of([1], fp8=fp8).packed
        assert {a.dtype.name for w in (w13, w2) for a in (w.factor, w.unpacked())} == {"float32"}


@pytest.mark.parametrize("fp8", [False, True], ids=["MXFP4", "FP8"])
def test_packed_experts_are_a_pytree(fp8):
    w13, _ = Problem.of([1, 1, 1], fp8=fp8).packed
    one = jax.tree.map(lambda a: a[1:2], w13)
    assert isinstance(one, PackedExperts) and one.experts == 1
    np.testing.assert_array_equal(one.unpacked()[0], w13.unpacked()[1])
    np.testing.assert_array_equal(one.unpacked(jnp.bfloat16), one.unpacked().astype(jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("matrices", [*WEIGHTS, FLOAT32_SCALES])
@pytest.mark.parametrize("rows", [[1, 0, 9, 20], [0, 150, 3, 90]], ids=["few rows", "many rows"])
def test_kernel(rows, matrices):
    x, args = given_in(matrices, rows, k=512, inner=256)
    y = jax.jit(functools.partial(fused_moe, limit=LIMIT, implementation="cubin"))(*args)
    assert off(y, wanted(x)) < 2**-6
    assert off(y, wanted(x)) < 1.5 * off(fused_moe(*args, limit=LIMIT, implementation="reference"), wanted(x))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("rows", [[1, 0, 9, 20], [700, 150, 3, 390]], ids=["few rows", "many rows"])
def test_kernels_under_cuda_graphs(rows):
    """What launches one by one make, of operands that moved in memory too."""
    _, args = given_in("MXFP4", rows, k=512)
    lowered = jax.jit(functools.partial(fused_moe, limit=LIMIT, implementation="cubin")).lower(*args)
    graph, alone = (lowered.compile({"xla_gpu_graph_min_graph_size": least}) for least in ("1", "10000"))
    for i in range(4):
        moved = [jax.tree.map(jnp.copy, a[:, ::-1] if i % 2 and j in (0, 3, 4) else a) for j, a in enumerate(args)]
        got, want = (np.asarray(run(*moved).view(jnp.uint16)) for run in (graph, alone))
        np.testing.assert_array_equal(got, want)
    for run, is_graph in ((graph, True), (alone, False)):
        found = kernels_in_graphs(run, *args)
        assert [found[x] for x in found if x.startswith("group")] == [is_graph] * 2, found


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("matrices", WEIGHTS)
def test_a_token_has_the_same_bits_in_any_batch(matrices):
    _, (given, w13, w2, chosen, weights) = given_in(matrices, [40, 3, 300, 60], k=256)
    run = jax.jit(functools.partial(fused_moe, limit=LIMIT, implementation="cubin"))
    whole = np.asarray(run(given, w13, w2, chosen, weights).view(jnp.uint16))
    for part in (slice(0, 1), slice(5, 9), slice(100, 164)):
        y = run(given[:, part], w13, w2, chosen[:, part], weights[:, part])
        np.testing.assert_array_equal(np.asarray(y.view(jnp.uint16)), whole[:, part])
