"""New entries of caches: the kernel beside its definition on a GPU, and what a step's program has of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Cache
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha.layers import Rope
from jax_dsv4_fmha.layers.insert import Entries, Rows, insert

ROTATION = Rope(64, 160_000, 16, 4096)
SIZES = {  # of rows that are pooled: ratio, blocks, whether scores depend on the place
    "a token": (1, 1, False),
    "ratio 4": (4, 2, True),
    "ratio 2": (2, 1, False),
    "ratio 128": (128, 1, True),
}


def operands(d, ratio, blocks, has_ape, layout, paged, *, b=5, s=3, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    pooled = ratio > 1
    width = 2 * blocks * d if pooled else d
    table = jnp.asarray(rng.permutation(3 * b)[: 2 * b].reshape(b, 2), jnp.int32) if paged else None
    cache = Cache.zeros(3 * b if paged else b, 8 if paged else 16, d, dtype, table, layout=layout)
    if layout is None:
        cache = dataclasses.replace(cache, entries=normal(*cache.entries.shape).astype(dtype))
    state = Cache(normal(b, blocks * ratio + 6, width)) if pooled else None
    ape = normal(ratio, width // 2) if has_ape else None
    made = Entries(1 + normal(d) / 4, ROTATION, 1e-6, ratio, ape, is_transformed=d == 128)
    lengths = jnp.asarray([2 * ratio + 1, 0, 1, ratio * 4, ratio * 14 + 1], jnp.int32)[:b]
    return cache, state, normal(b, s, width + 12), made, lengths


def of(rows, column=4):
    return Rows(rows, column, rows.shape[2] - 12)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("d", "layout", "dtype"),
    [(512, None, "bfloat16"), (512, None, "float16"), (512, "v4_fp8", "bfloat16"), (512, "v41_fp8", "bfloat16"),
     (128, None, "bfloat16"), (128, None, "float16"), (128, "index_fp8", "bfloat16")],
)  # fmt: skip
def test_kernel(d, layout, dtype, size, paged):
    ratio, blocks, has_ape = SIZES[size]
    if d == 128 and ratio == 1:
        pytest.skip("keys that no block makes have no kernel")
    cache, state, rows, made, lengths = operands(d, ratio, blocks, has_ape, layout, paged, dtype=jnp.dtype(dtype))

    def run(kernel):
        f = jax.jit(lambda *x: insert(x[0], x[1], of(x[2]), made, lengths, jnp.dtype(dtype), kernel))
        lowered = f.lower(cache, state, rows)
        assert ("dsv4_fmha_kv_insert" in lowered.as_text()) == kernel
        exact = lowered.compile(compiler_options={"xla_allow_excess_precision": False})  # or XLA leaves roundings out
        return jax.block_until_ready(exact(cache, state, rows))

    (got, got_state), (want, want_state) = run(True), run(False)
    if state is not None:
        np.testing.assert_array_equal(got_state.entries, want_state.entries)
    old, new, right = (np.asarray(x.take(), np.float32) for x in (cache, got, want))
    touched = (old != right).any(-1)
    assert touched.any() and not touched.all()
    np.testing.assert_array_equal(new[~touched], old[~touched])
    new, right = new[touched], right[touched]
    off = np.abs(new - right).max(-1) / np.abs(right).max(-1)
    assert off.max() <= (0.07 if layout else 2 ** (-7 if dtype == "bfloat16" else -10)), off.max()
    if layout is None:
        assert (new != right).mean() < 0.02


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_kernel_again_and_again():
    """The same bits in every run, and in every order of a history: tokens that were taken back leave no trace."""
    cache, state, rows, made, _ = operands(512, 4, 2, True, "v4_fp8", False)
    step = jax.jit(lambda cache, state, rows, n: insert(cache, state, of(rows), made, n, jnp.bfloat16, True))
    n = jnp.asarray([8, 5, 9, 12, 16], jnp.int32)
    straight = step(cache, state, rows, n)
    wandered = step(*step(cache, state, rows[:, ::-1], n), rows, n)
    for x, y in zip(jax.tree.leaves(straight), jax.tree.leaves(wandered), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("paged", [False, True])
def test_one_call_in_place(paged):
    """A step's program for CUDA has one call for a cache, without a scatter; donated caches stay where they are."""
    if not library.built_for("kv_insert", d=512):
        pytest.skip("kernels are not built")
    cache, state, rows, made, lengths = operands(512, 4, 2, True, None, paged)

    def f(cache, state, rows):
        return insert(cache, state, of(rows), made, lengths, jnp.bfloat16, True)

    exported = jax.export.export(
        jax.jit(f, donate_argnums=(0, 1)), platforms=("cuda",), disabled_checks=library.EXPORT_CHECKS
    )(cache, state, rows)
    program = exported.mlir_module()
    assert program.count("custom_call @dsv4_fmha_kv_insert") == 1
    assert "scatter" not in program and "gather" not in program


def test_the_definition_is_differentiable_and_maps():
    cache, state, rows, made, lengths = operands(128, 4, 2, True, None, False, dtype=jnp.float32)

    def loss(rows):
        new, ring = insert(cache, state, of(rows), made, lengths, jnp.float32, False)
        return jnp.sum(new.entries**2) + jnp.sum(ring.entries**2)

    assert np.isfinite(jax.grad(loss)(rows)).all()
    both = jax.vmap(loss)(jnp.stack([rows, 2 * rows]))
    np.testing.assert_allclose(both, [loss(rows), loss(2 * rows)], rtol=1e-6)
