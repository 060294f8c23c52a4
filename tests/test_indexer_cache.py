"""The lightning indexer over caches gives the same as over contiguous keys."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import (
    EXPORT_CHECKS,
    Cache,
    Span,
    dequantize_cache,
    explain,
    indexer_blocks,
    indexer_scores,
    lightning_indexer,
    quantize_cache,
    quantize_indexer,
)
from jax_dsv4_fmha._host import library
from tests.helpers import collectives, normal

B, S_Q, H, PAGE, WIDTH = 2, 3, 4, 8, 3
LENGTHS = jnp.array([17, 50], jnp.int32)  # tokens
RATIO, TOPK = 2, 5


def table(b=B, width=WIDTH):
    return jnp.asarray(np.random.default_rng(4).permutation(b * width + 2)[: b * width].reshape(b, width), jnp.int32)


def filled(k, kind, page=PAGE):
    """A cache to which k was appended in two parts; the rest of it holds NaN."""
    b, n, d = k.shape
    width = n // page
    layouts = {"packed": "index_fp8", "fp4": "index_fp4"}
    how = {"layout": layouts[kind.split()[-1]]} if kind.split()[-1] in layouts else {"dtype": k.dtype}
    if "paged" in kind:
        cache = Cache.zeros(b * width + 2, page, d, block_table=table(b, width), **how)
    else:
        cache = Cache.zeros(b, n, d, **how)
    poison = 255 if cache.is_packed else jnp.nan
    cache = Cache(jnp.full_like(cache.entries, poison), cache.block_table, cache.layout)
    at = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, n))
    return cache.append(k[:, 5:], at[:, 5:]).append(k[:, :5], at[:, :5])


KINDS = ("contiguous", "paged", "contiguous packed", "paged packed")


def operands(kind, b=B):
    """q, k and weights; the cache of k."""
    d = 128 if "packed" in kind else 16
    q, k, weights = normal(0, b, S_Q, H, d), normal(1, b, PAGE * WIDTH, d), normal(2, b, S_Q, H)
    cache = filled(k, kind)
    if "packed" in kind:
        return *quantize_indexer(q, k, weights), cache
    return q, k, weights, cache


def over(q, k, weights, lengths=LENGTHS, **kwargs):
    s_q = q.shape[1]
    span = Span.compressed(s_q, RATIO, lengths - s_q)
    return lightning_indexer(q, k, weights, topk=TOPK, span=span, return_scores=True, **kwargs)


def check(got, want):
    """The same entries, and the same scores up to the order of sums."""
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_keys_side_by_side(kind):
    q, k, weights, cache = operands(kind)
    for lengths in (LENGTHS, jnp.array([2, 0], jnp.int32)):  # the second: positions below 0, and an idle sequence
        check(over(q, cache, weights, lengths), over(q, k, weights, lengths))


def test_what_has_no_page_counts_as_zeros():
    q, k, weights, cache = operands("paged")
    for none in (-1, 99):
        without = Cache(cache.entries, cache.block_table.at[1, 1].set(none))
        check(over(q, without, weights), over(q, k.at[1, PAGE : 2 * PAGE].set(0), weights))


@pytest.mark.parametrize("kind", ["paged packed", "contiguous"])
def test_steps_of_generation(kind):
    """Append and choose in one jitted step with a donated cache, under scan; each step equals the choice over all keys
    so far.
    """
    q, k, weights, full = operands(kind)
    raw = normal(1, *jax.tree.leaves(k)[0].shape)
    empty = jax.tree.map(lambda x: jnp.zeros_like(x) if x.ndim > 2 or x.dtype == jnp.uint8 else x, full)

    def step(cache, t):
        new = jax.lax.dynamic_slice_in_dim(raw, t, 1, 1)
        cache = cache.append(new, jnp.full((B, 1), t, jnp.int32))
        return cache, over(q, cache, weights, jnp.full(B, RATIO * (t + 1), jnp.int32))

    def steps(entries):
        cache, chosen = jax.lax.scan(
            step, Cache(entries, empty.block_table, empty.layout), jnp.arange(6, dtype=jnp.int32)
        )
        return cache.entries, chosen

    entries = jnp.copy(empty.entries)
    where = entries.unsafe_buffer_pointer()
    kept, chosen = jax.jit(steps, donate_argnums=0)(entries)
    assert kept.unsafe_buffer_pointer() == where  # in place
    for t in range(6):
        check([x[t] for x in chosen], over(q, full, weights, jnp.full(B, RATIO * (t + 1), jnp.int32)))


@pytest.mark.parametrize("kind", ["paged packed", "contiguous"])
def test_vmap(kind):
    """Over queries alone, with shared pages, and over caches."""
    q, _, weights, cache = operands(kind)
    q2, w2 = jnp.stack([q, -q.astype(jnp.float32).astype(q.dtype)]), jnp.stack([weights, weights[::-1]])
    rolled = Cache(jnp.roll(cache.entries, 1, 0), cache.block_table, cache.layout)
    for axes, caches in ((None, [cache, cache]), (0, [cache, rolled])):
        given = cache if axes is None else jax.tree.map(lambda *x: jnp.stack(x), *caches)
        got = jax.vmap(over, (0, axes, 0))(q2, given, w2)
        for i in range(2):
            check([x[i] for x in got], over(q2[i], caches[i], w2[i]))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_mesh(kind):
    """Sequences are sharded, with their tables; the pool is whole on each device."""
    q, _, weights, cache = operands("paged packed")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices("cpu")[:2])

    def placed(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    its = Cache(placed(cache.entries, P()), placed(cache.block_table, P("data")), cache.layout)
    x = placed(q, P("data")), its, placed(weights, P("data")), placed(LENGTHS, P("data"))
    program = jax.jit(over).lower(*x).compile()
    assert not collectives(program)
    check(program(*x), over(q, cache, weights))


@pytest.mark.parametrize("kind", [*KINDS, "contiguous fp4", "paged fp4"])
def test_two_levels(kind):
    """Blocks, and entries within them, of ragged sequences, an idle place and absent pages, as of keys in an array."""
    form = kind.replace("fp4", "packed")
    q, k, weights, cache = operands(form)
    if "fp4" in kind:
        q, k, weights = normal(0, B, S_Q, H, 128), normal(1, B, PAGE * WIDTH, 128), normal(2, B, S_Q, H)
        k = dequantize_cache(quantize_cache(k, "index_fp4"), "index_fp4").astype(q.dtype)
        cache = filled(k, kind)
    if "paged" in kind:  # the last page of sequence 1 is gone
        cache = dataclasses.replace(cache, block_table=cache.block_table.at[1, 2].set(-1))
        k = jax.tree.map(lambda x: x.at[1, 2 * PAGE :].set(0), k)
    for lengths in (LENGTHS, jnp.array([0, 33], jnp.int32)):
        seen = {"span": Span.compressed(S_Q, RATIO, lengths - S_Q)}

        @jax.jit
        def both(k, seen=seen):
            blocks = indexer_blocks(q, k, weights, count=3, block=2, **seen)
            how = {"topk": TOPK, "return_scores": True, **seen}
            return blocks, lightning_indexer(q, k, weights, blocks=blocks, block=2, **how)

        reasons = [x.reason for x in explain(both, cache)]
        assert len(reasons) == 2 and all("keys of a Cache as XLA gathers them" in x for x in reasons)
        got, want = both(cache), both(k)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert np.any(np.asarray(got[0]) >= 0) and (
            "fp4" not in kind
            or np.array_equal(*(lightning_indexer(q, x, weights, topk=TOPK, **seen) for x in (cache, k)))
        )


@pytest.mark.parametrize("kind", [*KINDS, "contiguous fp4", "paged fp4"])
def test_two_levels_that_kernels_have(kind, monkeypatch):
    """The ops over pages, of as many heads as V4.1 has: what is chosen of keys in an array."""
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    q, k, weights = normal(0, B, S_Q, 32, 128), normal(1, B, 128, 128), normal(2, B, S_Q, 32)
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    cache = filled(k, kind, 64 if "paged" in kind else 128)
    if "packed" in kind:
        q, k, weights = quantize_indexer(q, k, weights)
    if "fp4" in kind:
        k = dequantize_cache(quantize_cache(k, "index_fp4"), "index_fp4")
    span = Span.compressed(S_Q, RATIO, jnp.array([250, 31], jnp.int32) - S_Q)

    @jax.jit
    def both(k):
        blocks = indexer_blocks(q, k, weights, count=3, span=span)
        return blocks, lightning_indexer(q, k, weights, topk=TOPK, blocks=blocks, return_scores=True, span=span)

    assert not any("XLA" in (x.reason or "") for x in explain(both, cache))
    jax.tree.map(np.testing.assert_array_equal, both(cache), both(k))


def test_errors():
    q, _, weights, cache = operands("paged packed")
    plain = operands("paged")
    with pytest.raises(ValueError, match=r"^lightning_indexer: k: got a Cache of index_fp8, wanted one of float32"):
        over(plain[0], cache, plain[2])
    with pytest.raises(ValueError, match=r"^lightning_indexer: k: got a Cache of float32, wanted one of index_fp8"):
        over(q, plain[3], weights)
    with pytest.raises(ValueError, match=r"^lightning_indexer: k: got a Cache of v4_fp8, wanted one of index_fp8"):
        over(q, Cache.zeros(2, 8, layout="v4_fp8"), weights)
    with pytest.raises(ValueError, match=r"^lightning_indexer: k.entries: got float32\[8, 8, 16\]"):
        over(normal(0, B, S_Q, H, 32), plain[3], weights)
    with pytest.raises(ValueError, match=r"^lightning_indexer: k.block_table: got int32\[1, 3\]"):
        over(q, Cache(cache.entries, cache.block_table[:1], cache.layout), weights)
    with pytest.raises(NotImplementedError, match=r"'cubin' for float8_e4m3fn, h=4, d=128, topk=5, pages of 8"):
        over(q, cache, weights, implementation="cubin")


@pytest.mark.parametrize(
    ("dtype", "page", "width", "takes"),
    [("float8_e4m3fn", 64, 5, True), ("float8_e4m3fn", 16, 5, False), ("float8_e4m3fn", 100, 0, True),
     ("float8_e4m3fn", 98, 0, False), ("bfloat16", 8, 5, True), ("bfloat16", 12, 5, False), ("bfloat16", 99, 0, True),
     ("float16", 8, 5, False),
     ("index_fp4", 64, 5, True), ("index_fp4", 16, 5, False), ("index_fp4", 100, 0, True)],
)  # fmt: skip
def test_which_pages_kernels_take(dtype, page, width, takes, monkeypatch):
    """One custom call in an export for CUDA, or the reference."""
    of_4_bits = dtype == "index_fp4"
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",) if of_4_bits else ())
    how = {"layout": "index_fp8"} if dtype == "float8_e4m3fn" else {"dtype": dtype}
    how, dtype = ({"layout": dtype}, "bfloat16") if of_4_bits else (how, dtype)
    tables = jax.ShapeDtypeStruct((B, width), jnp.int32) if width else None
    made = jax.eval_shape(lambda: Cache.zeros(9 if width else B, page, 128, **how))
    cache = Cache(made.entries, tables, made.layout)
    q, weights = (jax.ShapeDtypeStruct(s, t) for s, t in (((B, 2, 64, 128), dtype), ((B, 2, 64), jnp.float32)))
    exported = jax.export.export(jax.jit(over), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(
        q, cache, weights, jax.ShapeDtypeStruct((B,), jnp.int32)
    )
    assert exported.mlir_module().count("custom_call @dsv4_fmha_paged_lightning_indexer") == takes


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("h", [32, 64])
@pytest.mark.parametrize(
    ("dtype", "page"), [("bfloat16", 64), ("bfloat16", 8), ("float8_e4m3fn", 64), ("float8_e4m3fn", 32)]
)
@pytest.mark.parametrize(("s_q", "n", "topk"), [(2, 1600, 64), (8, 9600, 512), (1, 5120, 2048)])
def test_kernel(cuda, h, dtype, page, s_q, n, topk):
    """It chooses bit by bit what the kernel for contiguous keys chooses, which sums in the same order."""
    with jax.default_device(cuda):
        q, k, weights = normal(0, 3, s_q, h, 128), normal(1, 3, n, 128), normal(2, 3, s_q, h)
        packed = dtype == "float8_e4m3fn"
        cache = filled(k if packed else k.astype(dtype), "paged packed" if packed else "paged", page)
        if packed:
            q, k, weights = quantize_indexer(q, k, weights)
        else:
            q, k = q.astype(dtype), k.astype(dtype)
        lengths = jnp.array([n, n // 2, 3], jnp.int32)
        span = Span.compressed(s_q, 1, lengths - s_q)
        how = {"topk": topk, "span": span, "return_scores": True, "implementation": "cubin"}
        got, want = lightning_indexer(q, cache, weights, **how), lightning_indexer(q, k, weights, **how)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize(("h", "dtype", "page"), [(32, "bfloat16", 64), (64, "float8_e4m3fn", 32), (32, "bfloat16", 8)])
@pytest.mark.parametrize(("s_q", "n", "count"), [(2, 1600, 20), (8, 9600, 300), (1, 40960, 2048)])
def test_kernels_in_two_levels(cuda, h, dtype, page, s_q, n, count):
    """Bit by bit what is chosen of contiguous keys: blocks, and entries within them."""
    with jax.default_device(cuda):
        q, k, weights = normal(0, 4, s_q, h, 128), normal(1, 4, n, 128), normal(2, 4, s_q, h)
        packed = dtype == "float8_e4m3fn"
        cache = filled(k if packed else k.astype(dtype), "paged packed" if packed else "paged", page)
        if packed:
            q, k, weights = quantize_indexer(q, k, weights)
        else:
            q, k = q.astype(dtype), k.astype(dtype)
        lengths = jnp.array([n, n // 2 + 3, 3, 0], jnp.int32)  # the last place is idle
        how = {"span": Span.compressed(s_q, 1, lengths - s_q), "implementation": "cubin"}
        got, want = (indexer_blocks(q, x, weights, count=count, **how) for x in (cache, k))
        np.testing.assert_array_equal(got, want)
        how |= {"topk": 64, "blocks": want, "return_scores": True}
        got, want = (lightning_indexer(q, x, weights, **how) for x in (cache, k))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("h", [32, 64])
@pytest.mark.parametrize(("s_q", "n", "page"), [(2, 1600, 32), (1, 40960, 64), (13, 9600, 64)])
def test_kernel_of_4_bits(cuda, h, s_q, n, page):
    """The entries that it chooses have the scores of the keys as numbers, and no other entry has a greater score."""
    with jax.default_device(cuda):
        q, k, weights = normal(0, 4, s_q, h, 128).astype(jnp.bfloat16), normal(1, 4, n, 128), normal(2, 4, s_q, h)
        k = k * jnp.exp2(jnp.arange(n) % 9 - 5.0)[:, None]  # with scales above 2 too
        cache = filled(k, "paged fp4", page)
        k = dequantize_cache(quantize_cache(k, "index_fp4"), "index_fp4")
        lengths = jnp.array([n, n // 2 + 3, 3, 0], jnp.int32)  # the last place is idle
        span = Span.compressed(s_q, 1, lengths - s_q)
        how = {"span": span, "topk": 64, "return_scores": True}

        def chosen(implementation):
            return jax.jit(lambda: lightning_indexer(q, cache, weights, implementation=implementation, **how))

        assert "dsv4_fmha_paged_lightning_indexer" in chosen("cubin").lower().as_text()
        got, again, want = chosen("cubin")(), chosen("cubin")(), chosen("reference")()
        jax.tree.map(np.testing.assert_array_equal, got, again)
        greatest = np.abs(np.where(np.isfinite(want[1]), want[1], 0)).max()
        there = got[0] >= 0
        np.testing.assert_array_equal(there, want[0] >= 0)
        exact = np.asarray(indexer_scores(q, k, weights, got[0], implementation="reference"))
        np.testing.assert_allclose(*(np.where(there, x, 0) for x in (got[1], exact)), atol=1e-5 * greatest, rtol=0)
        np.testing.assert_allclose(*(np.sort(x[1], -1) for x in (got, want)), atol=1e-5 * greatest, rtol=0)

        which = {"count": 20, "span": span}
        blocks, right = (
            np.asarray(indexer_blocks(q, cache, weights, implementation=x, **which)) for x in ("cubin", "reference")
        )
        same = [
            len(set(x) & set(y)) == len(set(y))
            for x, y in zip(blocks.reshape(-1, 20), right.reshape(-1, 20), strict=True)
        ]
        assert np.mean(same) > 0.9  # sums in another order may decide between two

        if h == 64:  # a kernel of choices within blocks is for V4.1's heads
            return
        how |= {"blocks": jnp.asarray(right)}

        def within(implementation):
            return jax.jit(lambda: lightning_indexer(q, cache, weights, implementation=implementation, **how))

        assert "dsv4_fmha_paged_indexer_within" in within("cubin").lower().as_text()
        got, again, want = within("cubin")(), within("cubin")(), within("reference")()
        jax.tree.map(np.testing.assert_array_equal, got, again)
        there = got[0] >= 0
        np.testing.assert_array_equal(there, want[0] >= 0)
        exact = np.asarray(indexer_scores(q, k, weights, got[0], implementation="reference"))
        np.testing.assert_allclose(*(np.where(there, x, 0) for x in (got[1], exact)), atol=1e-5 * greatest, rtol=0)
        np.testing.assert_allclose(*(np.sort(x[1], -1) for x in (got, want)), atol=1e-5 * greatest, rtol=0)


@pytest.mark.gpu
def test_kernel_under_cuda_graphs(cuda):
    """In a process of its own, where all that may go into a command buffer does: what plain launches choose, of caches
    that moved in memory too."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from tests import test_indexer_cache as t
from tests.helpers import kernels_in_graphs
for dtype in ("bfloat16", "float8_e4m3fn"):
    q, k, weights = t.normal(0, 3, 2, 64, 128), t.normal(1, 3, 9600, 128), t.normal(2, 3, 2, 64)
    cache = t.filled(k if dtype == "float8_e4m3fn" else k.astype(dtype), *{
        "float8_e4m3fn": ("paged packed", 64)}.get(dtype, ("paged", 64)))
    if dtype == "float8_e4m3fn":
        q, _, weights = t.quantize_indexer(q, None, weights)
    lengths = jnp.array([9600, 4800, 3], jnp.int32)
    x = q.astype(dtype), cache, weights, lengths
    def f(q, cache, weights, lengths):
        how = {"topk": 512, "span": t.Span.compressed(2, 1, lengths - 2), "implementation": "cubin"}
        return t.lightning_indexer(q, cache, weights, **how) + 0
    alone = jax.jit(f).lower(*x).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    graph = jax.jit(f)
    assert (np.asarray(graph(*x)) >= 0).any()
    for i in range(4):
        y = jax.tree.map(jnp.copy, (x[0][:, :, ::-1] if i % 2 else x[0], *x[1:]))
        np.testing.assert_array_equal(graph(*y), alone(*y))
    for run, is_graph in ((graph, True), (alone, False)):
        found = kernels_in_graphs(run, *y)
        assert [found[x] for x in found if x.startswith("indexer_")] == [is_graph] * 2, found
"""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    here = os.path.dirname(__file__)
    path = os.pathsep.join([os.path.dirname(here), here, os.getcwd()])
    env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
