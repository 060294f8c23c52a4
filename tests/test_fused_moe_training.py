"""The gradient of a layer's experts by products of rows by group: the sort, the passes around products, a GPU's kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import explain, fused_moe
from jax_dsv4_fmha._definitions.experts import of_experts
from jax_dsv4_fmha._host import expert_product as raw
from jax_dsv4_fmha._ops import fused_moe_training
from jax_dsv4_fmha._ops.fused_moe_training import grouped
from jax_dsv4_fmha._testing.experts import LIMIT, Problem, operands


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

    monkeypatch.setattr(raw, "expert_product", expert_product)
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
    assert by.count.tolist() == [len(want)] and by.tiles[: len(want)].tolist() == [list(t) for t in want]


def test_the_sort_of_many_rows_has_other_keys(monkeypatch):
    chosen = jnp.asarray(Problem.of([40, 0, 130]).chosen)[None]
    want = grouped(chosen, 3).list
    monkeypatch.setattr(jnp, "sort", None)
    np.testing.assert_array_equal(fused_moe_training._sorted(jnp.where(chosen.ravel() < 0, 3, chosen.ravel()), 1 << 30), want)


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
