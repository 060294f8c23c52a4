"""New entries of caches: the kernel beside its definition on a GPU, and what a step's program has of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Cache
from jax_dsv4_fmha._definitions.packed import LAYOUTS
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing import insert as insert_cases
from jax_dsv4_fmha._testing.cases import INSERT
from jax_dsv4_fmha.layers import Compressor, DSV4Attention, Rope, RunningSums
from jax_dsv4_fmha.layers.insert import Entries, Rows, insert
from jax_dsv4_fmha.layers.pooling import pool_step

ROTATION = Rope(64, 160_000, 16, 4096)
SIZES = {  # of rows that are pooled: ratio, blocks, whether scores depend on the place
    "a token": (1, 1, False),
    "ratio 4": (4, 2, True),
    "ratio 2": (2, 1, False),
    "ratio 128": (128, 1, True),
    "running sums": (32, 1, True),
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
    if ratio == 32:
        sums = normal(b, 3, d).at[:, 1].set(2.0)
        state = RunningSums(normal(b, 5, width), sums, jnp.asarray([[60], [0], [7], [120], [440]], jnp.int32)[:b])
    ape = normal(ratio, width // 2) if has_ape else None
    made = Entries(1 + normal(d // 128 * 128) / 4, ROTATION, 1e-6, ratio, ape, is_transformed=d == 128)
    lengths = jnp.asarray([2 * ratio + 1, 0, 1, ratio * 4, ratio * 14 + 1], jnp.int32)[:b]
    return cache, state, normal(b, s, width + 12), made, lengths


def assert_same_bits(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(*(np.asarray(z).view(np.uint8) for z in (x, y)))


def of(rows, column=4):
    return Rows(rows, column, rows.shape[2] - 12)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("d", "layout", "dtype"),
    [(512, None, "bfloat16"), (512, "v4_fp8", "bfloat16"), (512, "v41_fp8", "bfloat16"),
     (576, None, "bfloat16"), (576, "v32_fp8", "bfloat16"),
     (128, None, "bfloat16"), (128, "index_fp8", "bfloat16"),
     (128, "index_fp4", "bfloat16")],
)  # fmt: skip
def test_kernel(d, layout, dtype, size, paged, ragged):
    ratio, blocks, has_ape = SIZES[size]
    if d == 128 and ratio in (1, 32):
        pytest.skip("keys that no block makes, and those of long blocks, have no kernel")
    if d == 576 and ratio > 1:
        pytest.skip("no model pools latents beside RoPE's numbers")
    cache, state, rows, made, lengths = operands(d, ratio, blocks, has_ape, layout, paged, dtype=jnp.dtype(dtype))
    start = lengths - jnp.asarray([2, 0, 1, 3, 1]) if ragged else None

    def run(kernel):
        f = jax.jit(lambda *x: insert(x[0], x[1], of(x[2]), made, lengths, jnp.dtype(dtype), kernel, start))
        lowered = f.lower(cache, state, rows)
        assert ("dsv4_fmha_kv_insert" in lowered.as_text()) == kernel
        exact = lowered.compile(compiler_options={"xla_allow_excess_precision": False})  # or XLA leaves roundings out
        return jax.block_until_ready(exact(cache, state, rows))

    (got, got_state), (want, want_state) = run(True), run(False)
    for x, y in zip(jax.tree.leaves(got_state), jax.tree.leaves(want_state), strict=True):
        if ratio == 32 and x.ndim == 3:
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(x, y)
    old, new, right = (np.asarray(x.take(), np.float32) for x in (cache, got, want))
    touched = (old != right).any(-1)
    assert touched.any() and not touched.all()
    np.testing.assert_array_equal(new[~touched], old[~touched])
    new, right = new[touched], right[touched]
    off = np.abs(new - right).max(-1) / np.abs(right).max(-1)
    of_codes = 0.34 if layout == "index_fp4" else 0.07  # of codes that differ by one
    assert off.max() <= (of_codes if layout else 2 ** (-7 if dtype == "bfloat16" else -10)), off.max()
    if layout is None:
        # in one of two entries alone: the transform spreads a last bit to 19 % of an entry on average, to 60 % at most
        assert (new != right).mean() < (0.4 if d == 128 and ragged else 0.02)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("scale", [1.0, 1e-12, np.inf])
def test_bytes_are_those_of_quantize_cache(scale):
    """Those of the numbers that the kernel writes to a cache in bfloat16; also tiny ones, and groups of NaN.

    Such a group's codes are NaN, so its scale may be any number: XLA's maximum of NaN and a number is either of them.
    """
    cache, _, rows, made, lengths = operands(576, 1, 1, False, None, False)
    made = made._replace(norm=made.norm.at[100:140].multiply(scale))

    def inserted(cache):
        run = jax.jit(lambda cache, rows: insert(cache, None, of(rows), made, lengths, jnp.bfloat16, True)[0])
        return np.asarray(run(cache, rows).entries)

    got, numbers = inserted(Cache.zeros(5, 16, layout="v32_fp8")).reshape(5, 16, 656), inserted(cache)
    new = got.any(-1)
    assert new.sum() == 3 + 0 + 1 + 3 + 3
    with jax.default_device(jax.devices("cpu")[0]):
        (want,) = LAYOUTS["v32_fp8"].encode(jnp.asarray(numbers))
    got, want, numbers = got[new], np.asarray(want)[new], numbers[new].astype(np.float32)
    scales = got[:, 512:528].view(np.float32), want[:, 512:528].view(np.float32)
    finite = np.isfinite(numbers[:, :512]).reshape(-1, 4, 128).all(-1)
    assert finite.any() and finite.all() == np.isfinite(scale)
    np.testing.assert_array_equal(*(np.where(finite, x, 0) for x in scales))
    np.testing.assert_array_equal(*(np.delete(x, slice(512, 528), axis=-1) for x in (got, want)))


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


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_cache_in_a_stack():
    """A layer's cache and state that are slices of arrays for all layers, as XLA hands them over."""
    cache, state, rows, made, lengths = operands(512, 4, 2, True, None, False)

    def f(cache, state, rows):
        return insert(cache, state, of(rows), made, lengths, jnp.bfloat16, True, None)

    def of_second(caches, states, rows):
        return f(*jax.tree.map(lambda x: x[1], (caches, states)), rows)

    stacked = jax.tree.map(lambda x: jnp.stack([x * 0, x, x * 0]), (cache, state))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(of_second)(*stacked, rows), jax.jit(f)(cache, state, rows))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("of_latents", [False, True])
def test_one_call_in_place(paged, ragged, of_latents):
    """A step's program for CUDA has one call for a cache, without a scatter; donated caches stay where they are."""
    sizes = (576, 1, 1, False, "v32_fp8") if of_latents else (512, 4, 2, True, None)
    cache, state, rows, made, lengths = operands(*sizes, paged)

    def f(cache, state, rows):
        return insert(cache, state, of(rows), made, lengths, jnp.bfloat16, True, lengths - 2 if ragged else None)

    exported = jax.export.export(
        jax.jit(f, donate_argnums=(0, 1)), platforms=("cuda",), disabled_checks=library.EXPORT_CHECKS
    )(cache, state, rows)
    program = exported.mlir_module()
    assert program.count("custom_call @dsv4_fmha_kv_insert") == 1
    assert "scatter" not in program and "gather" not in program


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", [None, "v4_fp8"])
def test_padding_leaves_no_trace(layout, size, paged):
    """Sequences with different numbers of new tokens: caches and states have the bits that each makes without others'.

    Both calls have the same shapes: on a CPU XLA may round the sums of other shapes otherwise.
    """
    ratio, blocks, has_ape = SIZES[size]
    cache, state, given, made, lengths = operands(512, ratio, blocks, has_ape, layout, paged)
    counts = np.array([2, 0, 1, 3, 1])
    padding = np.arange(3) >= counts[:, None]
    rows = of(jnp.where(padding[..., None], jnp.nan, given))
    got = insert(cache, state, rows, made, lengths, jnp.bfloat16, False, lengths - counts)
    want, states = cache, []
    for n in range(len(counts)):
        own = np.where(np.arange(len(counts)) == n, counts, 0)
        rows = of(jnp.where((np.arange(3) < own[:, None])[..., None], given, 0))
        want, after = insert(want, state, rows, made, lengths, jnp.bfloat16, False, lengths - own)
        states.append(jax.tree.map(lambda x, n=n: x[n : n + 1], after))
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *states)
    assert_same_bits(got, (want, joined))
    assert not np.array_equal(np.asarray(want.entries), np.asarray(cache.entries))


def test_the_definition_is_differentiable_and_maps():
    cache, state, rows, made, lengths = operands(128, 4, 2, True, None, False, dtype=jnp.float32)

    def loss(rows):
        new, ring = insert(cache, state, of(rows), made, lengths, jnp.float32, False)
        return jnp.sum(new.entries**2) + jnp.sum(ring.entries**2)

    assert np.isfinite(jax.grad(loss)(rows)).all()
    both = jax.vmap(loss)(jnp.stack([rows, 2 * rows]))
    np.testing.assert_allclose(both, [loss(rows), loss(2 * rows)], rtol=1e-6)


def test_running_sums_are_the_same_as_whole_sequences():
    """Chunks and steps may have any size, tokens be taken back, and places have padding, be idle or be used again."""
    rng = np.random.default_rng(0)
    compressor = Compressor(24, 8, 16)
    params = compressor.init(jax.random.key(0)) | {"ape": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)}
    x = jnp.asarray(rng.standard_normal((2, 80, 24)), jnp.float32)
    whole, state = compressor(params, x), compressor.state(2, 4)
    assert isinstance(state, RunningSums) and sum(y.size for y in jax.tree.leaves(state)) == 2 * (4 * 16 + 3 * 8 + 1)
    wrong = jnp.ones((2, 4, 24))
    extend = jax.jit(compressor.extend)
    for chunks in ((80,), (5, 30, 1, 1, 20, 23), (16, 16, 48), (3,) * 26 + (2,)):
        found, at = {}, 0
        for n in chunks:
            _, _, drafted = extend(params, wrong, state, jnp.full(2, at), jnp.full(2, at + 4))
            state = drafted if at else state  # taken back
            lengths = jnp.asarray([at + n, 0 if n == 23 else at + n])
            padded = jnp.pad(x[:, at : at + n], ((0, 0), (0, 3), (0, 0)))
            latents, entry, state = extend(params, padded, state, jnp.full(2, at), lengths)
            found |= {(i, int(e)): latents[i, k] for i in range(2) for k, e in enumerate(entry[i]) if e >= 0}
            at += n
        assert {i for i, _ in found} == {0, 1} and len(found) >= 8
        for (i, e), latent in found.items():
            np.testing.assert_allclose(latent, whole[i, e], atol=1e-6)


def test_histories_leave_no_trace():
    """Steps of any size, with others that are taken back: entries have the same bits."""
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((1, 48, 16)), jnp.float32)

    def after(steps):
        state, entries = RunningSums.zeros(1, 4, 8), []
        for first, count, right in steps:
            given = rows[:, first : first + count] * (1 if right else -1)
            entry, state = pool_step(state, given, jnp.asarray([first]), jnp.asarray([first + count]), 16)
            if (first + count) // 16 > first // 16 and right:
                entries.append(entry)
        return jnp.concatenate(entries, 1)

    singles = [(i, 1, True) for i in range(48)]
    drafts = [x for i in range(0, 48, 2) for x in ((i, 4 if i < 45 else 2, False), (i, 2, True))]
    entries = after(singles)
    assert entries.shape == (1, 3, 8)
    np.testing.assert_array_equal(entries, after(drafts))


def test_more_tokens_than_the_steps_of_a_cache():
    layer = DSV4Attention(24, 2, 16, 8, 2, 8, ratio=32, compressor=Compressor(24, 16, 32), rope=Rope(8))
    params = layer.init(jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"DSV4Attention: x: got float32\[1, 3, 24\], wanted at most 2 tokens, the cache's steps"
    ):
        layer.step(params, jnp.zeros((1, 3, 24)), layer.cache(1, 64, jnp.float32, steps=2), lengths=3)


@pytest.mark.parametrize("case", INSERT, ids=lambda case: case.id)
def test_check_s_cases(case):
    """The definition is right, by NumPy in float64."""
    assert case.complaints("reference") == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda made: made._replace(eps=0.1), "off by"),
        (lambda made: made._replace(norm=made.norm[::-1]), "off by"),
        (lambda made: made._replace(rotation=Rope(64)), "off by"),
    ],
    ids=["eps", "norm", "frequencies"],
)
def test_check_finds_what_is_wrong(monkeypatch, fault, says):
    run = insert_cases.insert
    monkeypatch.setattr(insert_cases, "insert", lambda a, b, c, made, *x: run(a, b, c, fault(made), *x))
    assert says in INSERT[3].complaints("reference")[0]
