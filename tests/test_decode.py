"""dsv4_decode; its values against float64 stand in test_reference.py, for every case of the table."""

import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import (
    Cache,
    Span,
    dequantize_cache,
    dsv4_attention,
    dsv4_decode,
    fmha,
    quantize_cache,
    sparse_fmha,
)
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.attention import LAYOUTS_OF, DecodeCase, run, run_reference
from jax_dsv4_fmha._testing.cases import CASES
from tests.helpers import assert_close, assert_right, assert_right_twice, collectives, normal
from tests.test_cache import CACHES, TABLE

STEPS = [case for case in CASES if case.op == DecodeCase.op and not case.by_e4m3]


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "ring"])
@pytest.mark.parametrize("far", ["window", "dense", "topk"])
def test_steps_equal_the_whole_sequence(far, kind, s_q):
    """Row by row they equal dsv4_attention over all positions, from caches that fill while steps go on."""
    b, s, h, d, ratio, window = 2, 24, 3, 16, 4, 5
    q, latent, sink = normal(0, b, s, h, d), normal(1, b, s, d), normal(2, h)
    compressed = latent.reshape(b, s // ratio, ratio, d).mean(2)
    past = (jnp.arange(s) + 1) // ratio
    indices = jnp.asarray(np.random.default_rng(3).integers(0, np.maximum(past, 1)[:, None], (b, s, 4)), jnp.int32)
    indices = jnp.where(past[:, None] > 0, indices, -1)
    chosen = {"window": {}, "dense": {"ratio": ratio}, "topk": {"indices": indices}}[far]
    want = dsv4_attention(q, latent, None if far == "window" else compressed, sink=sink, window=window, **chosen)

    def empty(room):
        if kind != "paged":
            return Cache.zeros(b, room, d, jnp.float32)
        pages = -(-room // 3)
        table = np.random.default_rng(4).permutation(b * pages + 2)[: b * pages].reshape(b, pages)
        return Cache.zeros(b * pages + 2, 3, d, jnp.float32, jnp.asarray(table, jnp.int32))

    caches = empty(window + s_q - 1 if kind == "ring" else s), empty(s // ratio)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches, length, q, latent, compressed, indices):
        near, far_cache = caches
        p = jnp.broadcast_to(length - s_q + jnp.arange(s_q, dtype=jnp.int32), (b, s_q))
        near = near.append(latent, p)
        far_cache = far_cache.append(compressed, jnp.where((p + 1) % ratio == 0, p // ratio, -1))
        kwargs = {"topk": {"indices": indices}, "dense": {"ratio": ratio}, "window": {}}[far]
        cache = None if far == "window" else far_cache
        return (near, far_cache), dsv4_decode(q, near, cache, lengths=length, sink=sink, window=window, **kwargs)

    for i in range(0, s, s_q):
        now = slice(i, i + s_q)
        entries = compressed[:, np.arange(i, i + s_q) // ratio]
        caches, got = step(caches, jnp.int32(i + s_q), q[:, now], latent[:, now], entries, indices[:, now])
        assert_close(got, (want[0][:, now], want[1][:, now]))


@pytest.mark.parametrize("case", [c for c in STEPS if c.page in (61, 64)], ids=lambda case: case.id)
def test_rounds_once(case):
    want = run_reference(case)
    for implementation in (None, "reference"):
        assert_right(run(case, implementation), want)


@pytest.mark.slow
def test_cases_hold_what_the_issue_asks_for():
    assert {c.page for c in STEPS} >= {0, 2, 61, 64, 69, 256, 576} and {c.b for c in STEPS} >= {1, 4, 74, 321}
    assert {c.s_q for c in STEPS} >= {1, 2, 3, 5, 8} and {c.h_q for c in STEPS} >= {7, 8, 16, 32, 64, 96, 128}
    poisoned = [c for c in STEPS if "nan" in c.features and c.b <= 4 and c.s_kv < 5000]
    decoded = jax.jit(dequantize_cache, static_argnums=1)
    for case in poisoned:
        (_, *caches), _ = case.operands()
        for cache in caches:
            entries = decoded(cache.entries, cache.layout) if cache.is_packed else cache.entries
            assert np.isnan(np.asarray(entries)).all(-1).any(), case.id
    assert {c.layouts for c in poisoned} == {(None, None), *LAYOUTS_OF.values()}


def small(b=2, s_q=2, d=16, **kwargs):
    q, sink = normal(0, b, s_q, 4, d), normal(1, 4)
    near, far = Cache(normal(2, b, 9, d)), Cache(normal(3, b, 6, d))
    return q, near, far, {"lengths": jnp.array([20, 11], jnp.int32), "sink": sink, "window": 8, **kwargs}


def test_idle_sequences_and_absent_rows():
    """They see nothing, whatever indices say, and do not affect the others."""
    q, near, far, kwargs = small(lengths=jnp.array([0, 20], jnp.int32), indices=jnp.zeros((2, 2, 3), jnp.int32))
    near, far = (Cache(x.entries.at[0].set(jnp.nan)) for x in (near, far))
    o, lse = dsv4_decode(q, near, far, **kwargs)
    assert (o[0] == 0).all() and (lse[0] == -jnp.inf).all()
    assert jnp.isfinite(o[1]).all() and jnp.isfinite(lse[1]).all()
    # a step of two tokens, the first of which begins its sequence
    o, lse = dsv4_decode(q, near, far, **{**kwargs, "lengths": jnp.array([20, 1], jnp.int32)})
    assert (lse[1, 0] == -jnp.inf).all() and jnp.isfinite(lse[1, 1]).all()
    holes = Cache(normal(2, 3, 3, 16), jnp.full((2, 3), -1, jnp.int32))
    o, lse = dsv4_decode(q, holes, holes, **kwargs)
    assert (o == 0).all() and (lse == -jnp.inf).all()


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("far", ["window", "dense", "topk"])
def test_sequences_with_different_numbers_of_new_tokens(far, implementation):
    """Each gives what it gives alone; padding sees nothing, whatever the caches hold, and costs no keys."""
    counts, lengths = np.array([3, 1, 0, 2], np.int32), np.array([20, 11, 9, 2], np.int32)
    q, near, cache = normal(0, 4, 3, 4, 16), normal(2, 4, 10, 16), normal(3, 4, 6, 16)
    near, cache = (x.at[2].set(jnp.nan) for x in (near, cache))  # its place is idle
    how = {"sink": normal(1, 4), "window": 8, "implementation": implementation}
    how |= {"window": {}, "dense": {"ratio": 4}, "topk": {"ratio": 4, "indices": jnp.zeros((4, 3, 3), jnp.int32)}}[far]
    caches = [Cache(near)] if far == "window" else [Cache(near), Cache(cache)]
    got = dsv4_decode(q, *caches, lengths=lengths, q_offset=lengths - counts, **how)
    for n, count in enumerate(counts):
        assert (got[0][n, count:] == 0).all() and (got[1][n, count:] == -jnp.inf).all()
        if count:
            alone = [Cache(x.entries[n : n + 1]) for x in caches]
            own = how | ({"indices": how["indices"][:1, :count]} if far == "topk" else {})
            want = dsv4_decode(q[n : n + 1, :count], *alone, lengths=int(lengths[n]), **own)
            assert_close([x[n : n + 1, :count] for x in got], want)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_drafts_see_each_other(implementation):
    """Every query sees the window before the block, and the whole block: an interval of keys."""
    s_q, window, lengths, counts = 5, 8, np.array([20, 11, 3, 0], np.int32), np.array([5, 3, 2, 0], np.int32)
    q, kv, sink = normal(0, 4, s_q, 4, 16), normal(2, 4, 20, 16), normal(1, 4)
    first = lengths - counts
    ring = Cache.zeros(4, window + s_q, 16, jnp.float32)
    ring = ring.append(kv, jnp.where(np.arange(20) < lengths[:, None], np.arange(20), -1).astype(jnp.int32))
    how = {"sink": sink, "window": window, "is_causal": False, "implementation": implementation}
    got = dsv4_decode(q, ring, lengths=lengths, q_offset=first, **how)
    is_query = np.arange(s_q) < counts[:, None]
    span = Span(first[:, None] - window, np.where(is_query, lengths[:, None], 0))
    assert_close(got, fmha(q, kv[:, :, None], span=span, sink=sink))
    with pytest.raises(ValueError, match=r"room for 12 entries of a sequence, wanted window \+ s_q = 13 at least"):
        dsv4_decode(q, Cache.zeros(4, window + s_q - 1, 16, jnp.float32), lengths=lengths, **how)


def test_compressed_entries_of_drafts():
    """A query sees those that are past at its own position, as it does without the block."""
    q, _, far, kwargs = small(ratio=4)
    absent = Cache(jnp.zeros((2, 3, 16)), jnp.full((2, 4), -1, jnp.int32))  # a window without pages
    want = dsv4_decode(q, absent, far, **kwargs)
    assert_close(dsv4_decode(q, absent, far, is_causal=False, **kwargs), want)


@pytest.mark.parametrize("far", ["dense", "topk"])
def test_a_chunk_of_a_prompt_over_pages_that_are_shared(far):
    """64 new queries at once, for sequences whose first 40 tokens share pages; one place is idle. A page that belongs
    to nobody is not read.
    """
    b, s, s_q, d, ratio, page, shared = 3, 100, 64, 16, 4, 10, 4
    q, latent, sink = normal(0, b, s, 3, d), normal(1, b, s, d), normal(2, 3)
    latent = latent.at[1, : shared * page].set(latent[0, : shared * page])
    compressed = latent.reshape(b, s // ratio, ratio, d).mean(2)
    lengths = jnp.array([100, 87, 0], jnp.int32)

    def paged(entries, page, shared):
        n = entries.shape[1] // page
        table = np.random.default_rng(3).permutation(2 * n + 4)[: 2 * n].reshape(2, n)
        table[1, :shared] = table[0, :shared]
        pool = jnp.full((2 * n + 4, page, d), jnp.nan).at[table].set(entries[:2].reshape(2, n, page, d))
        return Cache(pool, jnp.asarray(np.concatenate([table, np.full((1, n), -1)]), jnp.int32))

    near, entries = paged(latent, page, shared), paged(compressed, page // 2, shared // 2)
    position = np.asarray(lengths)[:, None] - s_q + np.arange(s_q)
    past = np.maximum((position + 1) // ratio, 1)[..., None]
    indices = jnp.asarray(np.random.default_rng(4).integers(0, past, (b, s_q, 6)), jnp.int32)
    chosen = {"dense": {}, "topk": {"indices": indices}}[far]
    rows = jnp.asarray(np.maximum(position, 0))
    now = jax.vmap(lambda q, rows: q[rows])(q, rows)
    how = {"sink": sink, "window": 7, "ratio": ratio, **chosen}
    got = dsv4_decode(now, near, entries, lengths=lengths, **how)
    want = dsv4_attention(now, latent, compressed, q_offset=lengths - s_q, **how)
    assert_close([x[:2] for x in got], [x[:2] for x in want])
    assert (got[0][2] == 0).all() and (got[1][2] == -jnp.inf).all()


def test_lengths_from_none_to_a_million():
    """In one batch: sequences of all lengths, with rings for windows and pages for compressed entries."""
    lengths, ratio, d, page = np.array([0, 1, 1_000_000, 129, 65_536, 3], np.int32), 128, 16, 64
    b, n = len(lengths), -(-1_000_000 // ratio // page)
    rng = np.random.default_rng(0)
    table = np.full((b, n), -1, np.int32)
    used = -(-(lengths // ratio) // page)  # pages of each sequence
    free = iter(rng.permutation(used.sum() + 2))
    for row, count in zip(table, used, strict=True):
        row[:count] = [next(free) for _ in range(count)]
    pool = normal(1, used.sum() + 2, page, d).at[np.array(list(free))].set(jnp.nan)
    near, far = Cache(normal(2, b, 130, d)), Cache(pool, jnp.asarray(table))
    indices = rng.integers(0, np.maximum(lengths // ratio, 1)[:, None, None], (b, 2, 9), np.int32)
    q = normal(3, b, 2, 3, d)
    step = functools.partial(dsv4_decode, q, near, far, lengths=jnp.asarray(lengths), indices=indices, ratio=ratio)
    got, want = step(), step(implementation="reference")
    assert_close(got, want)
    assert jnp.isfinite(got[0]).all() and (got[1][0] == -jnp.inf).all() and jnp.isfinite(got[1][2]).all()


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_compressed_cache_that_has_run_over_shows_no_future(kind, implementation):
    """Several new tokens, and more entries than there is room for: each token sees the remaining entries before it."""
    s_q, lengths, ratio, d = 3, np.array([15, 9], np.int32), 1, 512  # room for 9 entries
    compressed, q = normal(0, 2, 15, d), normal(1, 2, s_q, 2, d)
    near = Cache(normal(2, 2, 9, d))
    far = CACHES[kind](jnp.float32)
    for p in range(15):
        at = jnp.where(p < lengths, p, -1)[:, None].astype(jnp.int32)
        far = far.append(compressed[:, p : p + 1], at)
    if kind == "paged":
        near = Cache(near.entries.reshape(6, 3, d), jnp.arange(6, dtype=jnp.int32).reshape(2, 3))
    step = functools.partial(dsv4_decode, lengths=jnp.asarray(lengths), window=2, implementation=implementation)
    got = step(q, near, far, ratio=ratio)
    w = np.arange(15)
    p = lengths[:, None] - s_q + np.arange(s_q)
    left = (w >= lengths[:, None] // ratio - 9)[:, None] & (w < (p[..., None] + 1) // ratio)
    indices = np.where(left, w % 9, -1).astype(np.int32)
    assert (left.sum(-1) == [[7, 8, 9], [7, 8, 9]]).all()
    assert_close(got, step(q, near, far, indices=jnp.asarray(indices)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("here", ["sm_100f", "sm_90a", "sm_120f"])
def test_packed_caches_on_a_device_that_no_kernel_unpacks_them_on(here, monkeypatch):
    """Hopper and Blackwell have kernels that read packed entries: elsewhere "cubin" is an error, as soon as it is
    lowered."""
    monkeypatch.setattr(library, "local_architectures", lambda: (here,))
    near, far = (Cache.zeros(2, n, layout="v4_fp8", block_table=jnp.zeros((1, 2), jnp.int32)) for n in (64, 32))
    q, lengths = jnp.zeros((1, 1, 64, 512), jnp.bfloat16), jnp.array([90], jnp.int32)
    step = functools.partial(dsv4_decode, window=64, ratio=4, implementation="cubin")
    traced = jax.jit(step).trace(q, near, far, lengths=lengths)
    if here in library.architectures():
        assert "custom_call @dsv4_fmha_dsv4_decode" in traced.lower(lowering_platforms=("cuda",)).as_text()
        return
    with pytest.raises(
        NotImplementedError, match="dsv4_decode: implementation: got 'cubin' on sm_120f, wanted a kernel that is built"
    ):
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("lengths", [0, -1, -(2**31) + 1, -(2**31)])
def test_a_sequence_of_less_than_no_tokens_sees_nothing(lengths):
    q, near, far, kwargs = small(ratio=4)
    o, lse = dsv4_decode(q, near, far, **{**kwargs, "lengths": lengths})
    assert (o == 0).all() and (lse == -jnp.inf).all()


@pytest.mark.parametrize("mapped", ["all", "pools", "q alone"])
def test_vmap(mapped):
    q, near, far, kwargs = small(ratio=4)
    if mapped == "pools":
        near, far = (Cache(normal(seed, 7, 3, 16), TABLE) for seed in (5, 6))
    qs, caches = jnp.stack([q, -q]), (near, far)
    axes = None if mapped == "q alone" else 0
    if axes == 0:
        caches = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), caches)
    f = jax.jit(lambda q, caches: dsv4_decode(q, *caches, **kwargs))
    got = jax.jit(jax.vmap(f, in_axes=(0, axes)))(qs, caches)
    for i in range(2):
        want = f(qs[i], caches if axes is None else jax.tree.map(lambda x, i=i: x[i], caches))
        assert_close((x[i] for x in got), want)


def placed(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
class TestMeshes:
    """A step, with its append, has no collective, with batch over one axis of a mesh and heads over the other."""

    def mesh(self, kind):
        return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:8])

    def check(self, step, operands, want):
        compiled = jax.jit(step).lower(*operands).compile()
        assert collectives(compiled) == {}
        for got, y in zip(jax.tree.leaves(compiled(*operands)), jax.tree.leaves(want), strict=True):
            one_step = {jnp.uint8: {"rtol": 0, "atol": 0}, jnp.bfloat16: {"rtol": 2**-7}}
            assert_close((got,), (y,), **one_step.get(got.dtype.type, {}))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn], ids=lambda x: x.__name__)
    def test_contiguous(self, kind, dtype):
        q, near, far, kwargs = small(d=512)
        if dtype != jnp.float32:
            q, near, far = q.astype(jnp.bfloat16), *(Cache(quantize_cache(x.entries)) for x in (near, far))
        new, lengths, sink = normal(7, 2, 2, 512, dtype=q.dtype), kwargs.pop("lengths"), kwargs.pop("sink")

        def step(q, near, far, new, lengths, sink):
            near = near.append(new, lengths[:, None] - 2 + jnp.arange(2, dtype=jnp.int32))
            return near, dsv4_decode(q, near, far, ratio=4, lengths=lengths, sink=sink, **kwargs)

        want = jax.jit(step)(q, near, far, new, lengths, sink)
        mesh = self.mesh(kind)
        specs = ("data", None, "model"), ("data",), ("data",), ("data",), ("data",), ("model",)
        xs = (jax.tree.map(lambda x, s=s: placed(mesh, x, *s), x)
              for x, s in zip((q, near, far, new, lengths, sink), specs, strict=True))  # fmt: skip
        self.check(step, tuple(xs), want)

    def pools(self):
        """Two shards, each with its own pool, pages and sequences."""
        q, _, _, kwargs = small(b=4)
        caches = [Cache(normal(seed, 2, 7, 3, 16), jnp.stack([TABLE, TABLE[::-1]])) for seed in (5, 6)]
        q, lengths = q.reshape(2, 2, *q.shape[1:]), jnp.array([[20, 0], [3, 11]], jnp.int32)
        sink = kwargs.pop("sink")

        def step(q, near, far, lengths):
            return dsv4_decode(q, near, far, ratio=4, **{**kwargs, "lengths": lengths, "sink": sink})

        return step, (q, *caches, lengths)

    def test_a_pool_for_each_shard_by_vmap(self, kind):
        step, xs = self.pools()
        want = jax.jit(jax.vmap(step))(*xs)
        mesh = self.mesh(kind)
        self.check(jax.vmap(step), jax.tree.map(lambda x: placed(mesh, x, "data"), xs), want)

    def test_a_pool_for_each_shard_by_shard_map(self, kind):
        step, xs = self.pools()
        want = jax.jit(jax.vmap(step))(*xs)
        mesh = self.mesh(kind)
        own = lambda *xs: jax.tree.map(lambda x: x[None], step(*jax.tree.map(lambda x: x[0], xs)))  # noqa: E731
        local = jax.shard_map(own, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        self.check(local, jax.tree.map(lambda x: placed(mesh, x, "data"), xs), want)

    def test_a_ring_and_a_pool(self, kind):
        """README's caches: a window ring for each sequence, and compressed entries in shared pages."""
        q, ring, _, kwargs = small()
        cache, lengths = Cache(normal(5, 7, 3, 16), TABLE), kwargs.pop("lengths")

        def step(q, ring, cache, lengths):
            return dsv4_decode(q, ring, cache, ratio=4, lengths=lengths, **kwargs)

        want = jax.jit(step)(q, ring, cache, lengths)
        mesh = self.mesh(kind)
        ring, cache = (
            Cache(placed(mesh, ring.entries, "data")),
            Cache(placed(mesh, cache.entries), placed(mesh, TABLE, "data")),
        )
        self.check(step, (placed(mesh, q, "data", None, "model"), ring, cache, placed(mesh, lengths, "data")), want)

    def test_one_pool_for_all(self, kind):
        q, _, _, kwargs = small()
        cache, lengths = Cache(normal(5, 7, 3, 16), TABLE), kwargs.pop("lengths")

        def step(q, cache, lengths):
            return dsv4_decode(q, cache, cache, ratio=4, lengths=lengths, **kwargs)

        want = jax.jit(step)(q, cache, lengths)
        mesh = self.mesh(kind)
        cache = Cache(placed(mesh, cache.entries), placed(mesh, TABLE, "data"))
        self.check(step, (placed(mesh, q, "data"), cache, placed(mesh, lengths, "data")), want)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "layouts, packing",
    [
        ((None,), None),
        ((None, None), ""),
        (("v4_fp8",), "v4_fp8"),
        (("v4_fp8", "v4_fp8"), "v4_fp8"),
        (("v4_fp8", "v4_fp4"), "v4_fp4"),
        (("v4_fp4",), "v4_fp4"),
        (("v41_fp8",), "v41_fp8"),
        (("v41_fp8", "v41_fp8"), "v41_fp8"),
        (("v41_fp8", "v41_fp4"), "v41_fp4"),
        (("v41_fp4",), "v41_fp4"),
    ],
)
@pytest.mark.parametrize("kind", ["contiguous", "paged", "mixed", "drafts"])
def test_launches(layouts, packing, kind):
    """A call that finds the slots, except of drafts over a window alone; one that attends; no copy of a cache, and for
    new tokens in order nothing that makes other slots of those found.
    """
    q, b = jnp.zeros((3, 2, 8, 512), jnp.bfloat16), 3
    paged = {"contiguous": (False, False), "paged": (True, True)}.get(kind, (False, True))
    ragged = {"q_offset": jnp.array([699, 698, 700]), "is_causal": False} if kind == "drafts" else {}
    table = jnp.zeros((b, 16), jnp.int32)
    caches = tuple(
        Cache.zeros(50, 64, block_table=table, layout=layout) if pages else Cache.zeros(b, 1000, layout=layout)
        for layout, pages in zip(layouts, paged, strict=False)
    )
    ratio = len(caches) * 4 - 4 or None
    f = jax.jit(functools.partial(dsv4_decode, lengths=700, ratio=ratio, implementation="cubin", **ragged))
    text = f.trace(q, *caches).lower(lowering_platforms=("cuda",)).as_text()
    attends = "mla_sparse_fwd" if packing is None else "dsv4_decode"
    finds = [] if kind == "drafts" and len(caches) == 1 else ["seen_slots"]
    assert re.findall(r"custom_call @dsv4_fmha_(\w+)", text) == [*finds, attends]
    assert kind == "drafts" or "stablehlo.select" not in text
    assert re.findall(r'packing = "(\w*)"', text) == ([] if packing is None else [packing])
    kinds = "broadcast_in_dim|gather|concatenate|pad|select|dynamic_slice"
    for found in re.findall(rf"stablehlo.(?:{kinds})\"?.*: \(tensor<([\dx]+)x.*-> tensor<([\dx]+)x(?:bf16|ui8)>", text):
        read, written = (math.prod(map(int, x.split("x"))) for x in found)
        assert read == written, found  # only another name for the same bytes


def test_a_pair_of_layouts_without_a_kernel():
    """It has a meaning, and the reference."""
    near, far = (Cache.zeros(1, 129, layout=layout) for layout in ("v41_fp4", "v4_fp8"))
    step = functools.partial(dsv4_decode, jnp.ones((1, 1, 8, 512), jnp.bfloat16), near, far, lengths=5, ratio=4)
    with pytest.raises(
        NotImplementedError, match=r"dsv4_decode: implementation: got 'cubin'.*v41_fp4 caches, v4_fp8 c"
    ):
        step(implementation="cubin")
    assert (step()[0] == 0).all()


@pytest.mark.parametrize("kind", ["contiguous", "paged", "fp8"])
def test_export_of_any_batch_and_cache(kind):
    """One program for any batch, any number of pages and any room for a sequence."""
    b, s = jax.export.symbolic_shape("b, s")
    table = jnp.asarray(np.random.default_rng(1).permutation(14)[:12].reshape(3, 4), jnp.int32)
    cache = Cache(normal(2, 14, 8, 512, dtype=jnp.bfloat16), table)
    if kind == "contiguous":
        cache = Cache(normal(2, 3, 20, 512, dtype=jnp.bfloat16))
    if kind == "fp8":
        cache = Cache(quantize_cache(cache.entries), table)
    q, lengths = normal(0, 3, 1, 4, 512, dtype=jnp.bfloat16), jnp.array([9, 0, 20], jnp.int32)

    def step(q, cache, lengths):
        cache = cache.append(q[:, :, 0], lengths[:, None] - 1)
        return dsv4_decode(q, cache, cache, lengths=lengths, ratio=4, window=16)

    def like(x, *leading):
        return jax.ShapeDtypeStruct((*leading, *x.shape[len(leading) :]), x.dtype)

    any_cache = Cache(like(cache.entries, b, s) if kind == "contiguous" else like(cache.entries, s))
    if kind != "contiguous":
        any_cache = Cache(any_cache.entries, like(table, b))
    exported = jax.export.export(jax.jit(step), platforms=["cpu"])(like(q, b), any_cache, like(lengths, b))
    call = jax.jit(lambda q, cache, lengths: exported.call(q, cache, lengths))
    assert_close(call(q, cache, lengths), jax.jit(step)(q, cache, lengths))


def test_gradients():
    """There is none, and the error says so, except on the reference."""
    q, near, far, kwargs = small(ratio=4)

    def loss(q, near, implementation):
        return dsv4_decode(q, near, far, **kwargs, implementation=implementation)[0].sum()

    with pytest.raises(NotImplementedError, match="dsv4_decode: gradient: got a call to differentiate, wanted stop_gr"):
        jax.grad(loss)(q, near, None)
    dq, dnear = jax.grad(loss, (0, 1))(q, near, "reference")
    assert jnp.isfinite(dq).all() and jnp.abs(dq).max() > 0 and jnp.abs(dnear.entries).max() > 0


def test_a_pool_of_sparse_fmha():
    """Caches of other libraries: a flat pool and physical indices."""
    q, sink = normal(0, 3, 2, 4, 16), normal(1, 4)
    pool, indices = normal(2, 50, 16), jnp.asarray(np.random.default_rng(3).integers(-5, 55, (3, 2, 9)), jnp.int32)
    want = sparse_fmha(q, jnp.broadcast_to(pool, (3, 50, 16)), indices, sink=sink)
    for implementation in (None, "reference"):
        assert_close(sparse_fmha(q, pool, indices, sink=sink, implementation=implementation), want)
    got = jax.grad(lambda pool: sparse_fmha(q, pool, indices, sink=sink)[0].sum())(pool)
    want = jax.grad(lambda pool: sparse_fmha(q, jnp.broadcast_to(pool, (3, 50, 16)), indices, sink=sink)[0].sum())(pool)
    assert_close((got,), (want,), rtol=1e-4, atol=1e-5)


def test_the_recipe_for_pages_of_others():
    """From docs/layouts.md."""
    q, cache = normal(0, 2, 3, 4, 16), Cache(normal(1, 7, 3, 16), TABLE.at[0, 1].set(-1))
    entries = jnp.asarray(np.random.default_rng(2).integers(-2, 12, (2, 3, 8)), jnp.int32)
    text = (Path(__file__).parents[1] / "docs/layouts.md").read_text(encoding="utf-8")
    recipe = re.search(r"\n(pages = .*?)```", text, re.DOTALL).group(1)
    names = {"jnp": jnp, "sparse_fmha": sparse_fmha, "q": q, "pool": cache.entries, "block_table": cache.block_table}
    exec(recipe, names | {"entries": entries, "page": 3, "d": 16}, got := {})
    empty = Cache(jnp.zeros((2, 1, 16)), jnp.full((2, 3), -1, jnp.int32))
    want = dsv4_decode(q, empty, cache, lengths=40, indices=entries, window=1)
    assert_close((got["o"], got["lse"]), want)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.id)
def test_kernel(case):
    assert_right_twice(case)
