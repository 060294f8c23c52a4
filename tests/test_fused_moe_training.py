"""The gradient of a layer's experts by products of rows by group: the sort, the passes around products, kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import EXPORT_CHECKS, explain, fused_moe
from jax_dsv4_fmha._definitions.experts import of_experts
from jax_dsv4_fmha._host import expert_product as raw
from jax_dsv4_fmha._host import expert_rows as raw_rows
from jax_dsv4_fmha._ops import fused_moe_training
from jax_dsv4_fmha._ops.fused_moe_training import grouped
from jax_dsv4_fmha._testing.experts import LIMIT, Problem, operands
from tests.helpers import collectives
from tests.transformed import KINDS


def by_tiles(a, b, to, tiles, count, *, turned=False):
    """`raw.expert_product`, tile by tile; rows of no tile are not numbers."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    b = b if turned else b.swapaxes(1, 2)
    y = np.full((len(a), b.shape[2]), np.nan, np.float32)
    for group, first, rows, _ in np.asarray(tiles)[: int(count[0])]:
        assert 0 < rows <= raw.TILE
        places = slice(first, first + rows)
        y[np.asarray(to)[places]] = a[places] @ b[group]
    return y


def by_groups(a, b, first, sizes):
    """`raw.expert_outer_product`, group by group."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    spans = [slice(x, x + n) for x, n in zip(np.asarray(first), np.asarray(sizes), strict=True)]
    return np.stack([a[span].T @ b[span] for span in spans])


def through(made, weights, limit):
    """What gates let through, times weights."""
    gate, up = jnp.moveaxis(made.astype(jnp.float32), 1, 0)
    y = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit) * weights[:, None]
    return y.astype(made.dtype)


@pytest.fixture
def products(monkeypatch):
    """Products by NumPy, in the dtype of their rows, in place of the kernels'."""

    def expert_product(a, b, *where, turned=False):
        shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[2 if turned else 1]), jnp.float32)
        run = functools.partial(by_tiles, turned=turned)
        return jax.pure_callback(run, shape, a, b, *where).astype(a.dtype)

    def expert_outer_product(a, b, first, sizes):
        shape = jax.ShapeDtypeStruct((first.shape[0], a.shape[1], b.shape[1]), jnp.float32)
        return jax.pure_callback(by_groups, shape, a, b, first, sizes).astype(a.dtype)

    def expert_product_gated(a, b, to, tiles, count, weights, *, limit):
        made = expert_product(a, b.reshape(len(b), -1, b.shape[3]), to, tiles, count).reshape(len(a), *b.shape[1:3])
        return made, through(made[to], weights[to], limit)

    def expert_product_gated_back(a, b, made, to, tiles, count, weights, *, limit):
        of_inner = expert_product(a, b, jnp.arange(len(a)), tiles, count, turned=True)
        inner, back = jax.vjp(functools.partial(through, limit=limit), made[to], weights[to])
        of_made, of_weights = back(of_inner)
        parts = jnp.full((len(a), b.shape[2] // raw.COLUMNS), jnp.nan).at[to].set(0)
        return of_made, inner, parts.at[to, 0].set(of_weights)

    def taken(x, list, count):
        """Rows of no expert are not numbers."""
        there = jnp.arange(list.shape[0]) < count[0]
        return jnp.where(there[:, None], x[list // (list.shape[0] // x.shape[0])], jnp.nan)

    def summed(x, chosen, experts):
        is_here = (chosen >= 0) & (chosen < experts)
        return jnp.where(is_here[..., None], x.reshape(*chosen.shape, -1), 0).sum(1)

    monkeypatch.setattr(raw_rows, "expert_rows_taken", taken)
    monkeypatch.setattr(raw_rows, "expert_rows_summed", summed)
    monkeypatch.setattr(raw, "expert_product", expert_product)
    monkeypatch.setattr(raw, "expert_product_gated", expert_product_gated)
    monkeypatch.setattr(raw, "expert_product_gated_back", expert_product_gated_back)
    monkeypatch.setattr(raw, "expert_outer_product", expert_outer_product)


@pytest.mark.parametrize("rows", [[1], [0, 0, 3], [40, 0, 130, 1, 0, 16], [700, 0, 333]])
def test_sort(rows):
    x = Problem.of(rows)
    by = jax.tree.map(np.asarray, grouped(jnp.asarray(x.chosen)[None], len(rows)))
    end = 0
    for e, choices in x.rows().items():
        assert (by.first[e], by.sizes[e]) == (end, len(choices))
        assert by.list[end : end + len(choices)].tolist() == choices
        end += len(choices)
    assert sorted(by.list.tolist()) == list(range(x.chosen.size))
    want = [
        (e, by.first[e] + i, min(raw.TILE, n - i), 0) for e, n in enumerate(by.sizes) for i in range(0, n, raw.TILE)
    ]
    assert by.tile_count.tolist() == [len(want)] and by.tiles[: len(want)].tolist() == [list(t) for t in want]


def test_the_sort_of_many_rows_has_other_keys(monkeypatch):
    chosen = jnp.asarray(Problem.of([40, 0, 130]).chosen)[None]
    want = grouped(chosen, 3).list
    monkeypatch.setattr(jnp, "sort", None)
    np.testing.assert_array_equal(
        fused_moe_training._sorted(jnp.where(chosen.ravel() < 0, 3, chosen.ravel()), 1 << 30), want
    )


@pytest.mark.parametrize("limit", [LIMIT, 1e3])
@pytest.mark.usefixtures("products")
def test_gradient(limit):
    """The definition's, in float32, with choices of no expert here and an expert that nobody chose."""
    given, w13, w2, chosen, weights = operands(Problem.of([3, 0, 150, 9]), jnp.float32, is_packed=False)
    dy = jax.random.normal(jax.random.key(0), given.shape)
    args = given, weights, w13[None].astype(jnp.float32), w2[None].astype(jnp.float32)
    y, made = fused_moe_training.forward(*args, chosen, limit=limit)
    got = fused_moe_training.gradient(*args, chosen, made, dy, limit=limit)

    want, back = jax.vjp(lambda x, of, *w: of_experts(x, w[0][0], w[1][0], chosen, of, limit=limit), *args)
    of = back(dy)
    for a, b in zip((y, *got), (want, *of), strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()
    assert not np.asarray(got[2][0, 1]).any() and not np.asarray(got[3][0, 1]).any()


def gradients(args, implementation, limit=LIMIT):
    """The result, and the gradients of x, w13, w2 and weights."""
    given, w13, w2, chosen, weights = args

    def run(given, w13, w2, weights):
        return fused_moe(given, w13, w2, chosen, weights, limit=limit, implementation=implementation)

    y, back = jax.vjp(run, given, w13, w2, weights)
    return y, *back(0 * y + jax.random.normal(jax.random.key(0), y.shape).astype(y.dtype))  # placed as y is


@pytest.mark.usefixtures("built")
def test_explain_says_what_a_gradient_launches():
    args = operands(Problem.of([3, 4]), is_packed=False)
    decisions = explain(lambda *args: gradients(args, None), *args)
    assert [(d.op, d.part) for d in decisions] == [("fused_moe_training", "forward"), ("fused_moe", "gradient")]
    assert all("expert_product" in d.reason for d in decisions)


def calls(run, args):
    """How often an exported program calls each form of the products, and what moves rows; no other experts' kernel."""
    text = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(*args).mlir_module()
    assert "dsv4_fmha_fused_moe(" not in text
    names = "product", "product_gated", "product_turned", "product_gated_back", "outer_product"
    names += "rows_taken", "rows_summed"
    return [text.count(f"dsv4_fmha_expert_{name}(") for name in names]


@pytest.mark.usefixtures("built")
def test_the_calls_are_exported():
    args = operands(Problem.of([3, 4]), is_packed=False)
    assert calls(lambda *args: gradients(args, None), args) == [1, 1, 1, 1, 2, 3, 2]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("names, anew", [((), 1), (("dsv4_fmha_gates",), 0)])
def test_a_policy_that_keeps_gates_makes_no_product_twice(names, anew):
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def run(given, w13, w2, chosen, weights):
        of = functools.partial(fused_moe, chosen=chosen, limit=LIMIT)
        y, back = jax.vjp(
            jax.checkpoint(lambda x, *w: of(x, *w[:2], weights=w[2]), policy=policy), given, w13, w2, weights
        )
        return y, *back(y)

    assert calls(run, operands(Problem.of([3, 4]), is_packed=False)) == [
        1 + anew,
        1 + anew,
        1,
        1,
        2,
        3 + anew,
        2 + anew,
    ]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
def test_devices_that_share_out_tokens_add_up_the_gradients_of_matrices(kind):
    args = operands(Problem.of([3, 0, 4, 8]), is_packed=False)
    want = gradients(args, "reference")
    mesh = jax.make_mesh((2,), ("context",), axis_types=(KINDS[kind],))
    by_tokens = NamedSharding(mesh, P(None, "context"))
    placed = [jax.device_put(a, by_tokens) if i in (0, 3, 4) else a for i, a in enumerate(args)]
    with jax.set_mesh(mesh):
        program = jax.jit(lambda *args: gradients(args, None)).lower(*placed).compile()
        got = program(*placed)
    assert set(collectives(program)) == {"all-reduce"}
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_two_devices(kind):
    """In a shard_map each device has the gradients of its own experts, and tokens the sum; no kernel's result is summed
    where it must not be.
    """
    args = operands(Problem.of([3, 0, 4, 8]), is_packed=False)
    want = gradients(args, "reference")
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(KINDS[kind],))
    spec = P("expert")
    args = tuple(jax.device_put(a, NamedSharding(mesh, spec if i in (1, 2) else P())) for i, a in enumerate(args))

    def of_device(given, w13, w2, chosen, weights):
        first = jax.lax.axis_index("expert") * w13.shape[0]
        return jax.lax.psum(fused_moe(given, w13, w2, chosen - first, weights, limit=LIMIT), "expert")

    def run(given, w13, w2, chosen, weights):
        f = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), spec, spec, P(), P()), out_specs=P())
        y, back = jax.vjp(lambda *of: f(*of[:3], chosen, of[3]), given, w13, w2, weights)
        return y, *back(0 * y + jax.random.normal(jax.random.key(0), y.shape).astype(y.dtype))

    for a, b in zip(jax.jit(run)(*args), want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()
    texts = [jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")]
    assert texts[0].count("dsv4_fmha_expert_outer_product(") == 2
    assert texts[0].count("all_reduce") == texts[1].count("all_reduce")


@pytest.mark.usefixtures("built")
def test_vmap():
    """Of a gradient, by the definition."""
    args = operands(Problem.of([3, 4]), is_packed=False)
    want = gradients(args, "reference")
    both = [jnp.stack([a, a]) if i in (0, 3, 4) else a for i, a in enumerate(args)]
    made = jax.vmap(lambda *args: gradients(args, None), (0, None, None, 0, 0))(*both)
    for a, b in zip(made, want, strict=True):
        np.testing.assert_allclose(np.asarray(a[1], np.float32), np.asarray(b, np.float32), rtol=0.02, atol=0.5)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("form", ["rows", "turned", "outer"])
def test_products(form):
    """Of groups with no row, with one, with whole stages and tiles, and with more; of rows of no group, which are not
    numbers.
    """
    sizes = np.array([5, 0, 1, 64, 128, 333, 0, 1000], np.int32)
    first, rows, m, n = (np.cumsum(sizes) - sizes).astype(np.int32), int(sizes.sum()), 640, 512
    shapes = {"rows": (len(sizes), n, m), "turned": (len(sizes), m, n), "outer": (rows + 7, n)}
    a = jax.random.normal(jax.random.key(1), (rows + 7, m), jnp.bfloat16).at[rows:].set(jnp.nan)
    b = jax.random.normal(jax.random.key(2), shapes[form], jnp.bfloat16)
    if form == "outer":
        b = b.at[rows:].set(jnp.nan)
        run, where = raw.expert_outer_product, (first, sizes)
        want = by_groups(a, b, *where)
    else:
        chosen = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(7, -1)]).astype(np.int32)
        by = grouped(jnp.asarray(chosen)[None, :, None], len(sizes))
        to = jax.random.permutation(jax.random.key(3), jnp.arange(rows + 7, dtype=jnp.int32))
        run, where = functools.partial(raw.expert_product, turned=form == "turned"), (to, by.tiles, by.tile_count)
        want = by_tiles(a, b, *where, turned=form == "turned")
    got, again = (np.asarray(jax.jit(run)(a, b, *where)) for _ in range(2))
    there = ~np.isnan(want)
    far = np.abs(got.astype(np.float32) - want)[there] - 2**-8 * np.abs(want[there])
    assert there.sum() == (want.size if form == "outer" else rows * n)
    assert far.max() < 2**-8 * m**0.5
    assert (got[there].view(np.uint16) == again[there].view(np.uint16)).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_products_with_gates():
    """Gates and up projections in the plain product's bits; what they let through, and the gradients, of these."""
    sizes = np.array([5, 0, 1, 64, 128, 333, 0, 1000], np.int32)
    e, left, m, n = len(sizes), 7, 640, 512
    chosen = np.concatenate([np.repeat(np.arange(e), sizes), np.full(left, -1)]).astype(np.int32)
    by, rows = grouped(jnp.asarray(chosen)[None, :, None], e), len(chosen)
    to = jax.random.permutation(jax.random.key(3), jnp.arange(rows, dtype=jnp.int32))
    where, there = (to, by.tiles, by.tile_count), slice(rows - left)
    a = jax.random.normal(jax.random.key(1), (rows, m), jnp.bfloat16).at[there.stop :].set(jnp.nan)
    w13 = jax.random.normal(jax.random.key(2), (e, 2, n, m), jnp.bfloat16) * m**-0.5
    w2 = jax.random.normal(jax.random.key(4), (e, m, n), jnp.bfloat16)
    weights = jax.random.uniform(jax.random.key(5), (rows,), jnp.float32, 0.25, 2)

    run = jax.jit(functools.partial(raw.expert_product_gated, limit=LIMIT))
    made, inner = (np.asarray(x, np.float32) for x in run(a, w13, *where, weights))
    plain = np.asarray(raw.expert_product(a, w13.reshape(e, 2 * n, m), *where), np.float32).reshape(made.shape)
    listed = np.asarray(to)[there]
    np.testing.assert_array_equal(made[listed], plain[listed])
    wide = jnp.asarray(made[listed]), weights[listed]
    np.testing.assert_allclose(inner[there], through(*wide, LIMIT), rtol=2**-7, atol=1e-5)

    run = jax.jit(functools.partial(raw.expert_product_gated_back, limit=LIMIT))
    kept = jnp.asarray(made, jnp.bfloat16)
    got, again = ([np.asarray(x, np.float32) for x in run(a, w2, kept, *where, weights)] for _ in range(2))
    of_inner = by_tiles(a, w2, np.arange(rows), by.tiles, by.tile_count, turned=True)[there]
    value, back = jax.vjp(functools.partial(through, limit=LIMIT), *wide)
    for name, x, y, want in zip(
        ("made", "inner", "weights"),
        (got[0][there], got[1][there], got[2].sum(1)[listed]),
        (again[0][there], again[1][there], again[2].sum(1)[listed]),
        (back(of_inner)[0], value, back(of_inner)[1]),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y, name)
        assert np.linalg.norm(x - want) <= 2**-8 * np.linalg.norm(want), name


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("experts", [1, 8, 16])
def test_rows(experts):
    """The bits of all rows that are taken, and of all sums, of many tokens, whose choices are among 16 experts."""
    tokens, c, k = 3001, 6, 1280
    chosen = jax.random.randint(jax.random.key(0), (tokens, c), 0, 16, jnp.int32)
    x = jax.random.normal(jax.random.key(1), (tokens, k), jnp.bfloat16)
    by = grouped(chosen[None], experts)
    listed = np.asarray(by.list)[: int(by.own[0])]
    is_here = np.asarray(chosen) < experts
    assert len(listed) == is_here.sum()
    taken = np.asarray(jax.jit(raw_rows.expert_rows_taken)(x, by.list, by.own))
    np.testing.assert_array_equal(taken[: len(listed)].view(np.uint16), np.asarray(x)[listed // c].view(np.uint16))
    y = jax.random.normal(jax.random.key(2), (tokens * c, k), jnp.bfloat16)
    y = jnp.where(is_here.reshape(-1, 1), y, jnp.nan)
    summed = np.asarray(jax.jit(raw_rows.expert_rows_summed, static_argnums=2)(y, chosen, experts))
    want = np.zeros((tokens, k), np.float32)
    for j in range(c):
        want += np.where(is_here[:, j, None], np.asarray(y, np.float32).reshape(tokens, c, k)[:, j], 0)
    np.testing.assert_array_equal(summed.view(np.uint16), want.astype(summed.dtype).view(np.uint16))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("limit", [LIMIT, 1e3])
@pytest.mark.parametrize("rows", [[1, 0, 9, 20], [0, 150, 3, 90, 700]], ids=["few rows", "many rows"])
def test_a_gradient_by_kernels(rows, limit):
    """Near the definition's in float32, and in bits the same again. Gates are kept rounded: where one becomes the
    limit, its derivative is half of that before it.
    """
    x = Problem.of(rows, k=512, inner=256)
    args = operands(x, is_packed=False)
    got, again = (jax.jit(lambda *args: gradients(args, "cubin", limit))(*args) for _ in range(2))
    given, w13, w2, chosen, weights = args

    def definition(given, w13, w2, weights):
        return of_experts(given, w13, w2, chosen, weights, limit=limit)

    wide = (a.astype(jnp.float32) for a in (given, w13, w2, weights))
    y, back = jax.vjp(definition, *wide)
    dy = jax.random.normal(jax.random.key(0), y.shape).astype(given.dtype)
    names = ("y", "x", "w13", "w2", "weights")
    for name, a, b, c in zip(names, got, (y, *back(dy.astype(jnp.float32))), again, strict=True):
        a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
        most = 0.1 if limit == LIMIT and name in ("x", "w13") else 0.01
        assert np.linalg.norm(a - b) <= most * np.linalg.norm(b), name
        assert most > 0.01 or np.abs(a - b).max() <= 0.02 * np.abs(b).max(), name
        np.testing.assert_array_equal(a, c, name)
    for e, n in enumerate(rows):
        assert n or not (np.asarray(got[2][e]).any() or np.asarray(got[3][e]).any())


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_packed_experts_of_two_devices(kind):
    """Each device unpacks its own."""
    args = operands(Problem.of([3, 0, 4, 8]))
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(KINDS[kind],))
    spec = P("expert")
    placed = [jax.device_put(a, NamedSharding(mesh, spec if i in (1, 2) else P())) for i, a in enumerate(args)]

    def of_device(given, w13, w2, chosen, weights):
        first = jax.lax.axis_index("expert") * w13.experts
        return jax.lax.psum(fused_moe(given, w13, w2, chosen - first, weights, limit=LIMIT), "expert")

    def run(f, given, w13, w2, chosen, weights):
        y, back = jax.vjp(lambda x, of: f(x, w13, w2, chosen, of), given, weights)
        return y, *back(0 * y + jax.random.normal(jax.random.key(0), y.shape).astype(y.dtype))

    f = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), spec, spec, P(), P()), out_specs=P())
    program = jax.jit(functools.partial(run, f)).lower(*placed).compile()
    assert set(collectives(program)) == {"all-reduce"}
    want = run(functools.partial(fused_moe, limit=LIMIT, implementation="reference"), *args)
    for a, b in zip(program(*placed), want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("fp8", [False, True], ids=["MXFP4", "FP8"])
def test_a_gradient_of_packed_matrices_by_kernels(fp8):
    """The bits of the one from arrays; no gradient of a matrix is made."""
    given, w13, w2, chosen, weights = operands(Problem.of([0, 150, 3, 90], k=512, inner=256, fp8=fp8))

    def result(w13, w2, given, weights):
        y, back = jax.vjp(
            lambda x, of: fused_moe(x, w13, w2, chosen, of, limit=LIMIT, implementation="cubin"), given, weights
        )
        return back(jnp.ones_like(y))

    run = jax.jit(result).lower(w13, w2, given, weights).compile()
    assert "expert_product_turned" in run.as_text() and "expert_outer_product" not in run.as_text()
    arrays = (w.unpacked(jnp.bfloat16) for w in (w13, w2))
    for got, want in zip(run(w13, w2, given, weights), jax.jit(result)(*arrays, given, weights), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_what_is_not_a_number_stays_in_its_experts():
    """A token that is not a number spoils the gradients of matrices that it chose, and no others."""
    x = Problem.of([150, 30, 70, 5])
    args = operands(x, is_packed=False)
    usual = jax.jit(lambda *args: gradients(args, "cubin"))(*args)
    spoilt = args[0].at[0, 3, 7].set(jnp.nan)
    made = jax.jit(lambda *args: gradients(args, "cubin"))(spoilt, *args[1:])
    hit = set(x.chosen[3].tolist())
    for a, b in zip(made[2:4], usual[2:4], strict=True):
        for e in range(4):
            if e in hit:
                assert np.isnan(np.asarray(a[e], np.float32)).any()
            else:
                np.testing.assert_array_equal(np.asarray(a[e], np.float32), np.asarray(b[e], np.float32))
    others = np.arange(len(x.x)) != 3
    np.testing.assert_array_equal(
        np.asarray(made[0], np.float32)[0, others], np.asarray(usual[0], np.float32)[0, others]
    )
