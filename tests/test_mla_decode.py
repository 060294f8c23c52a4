"""mla_decode; its values against float64 stand in test_reference.py, for every case of the table."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache, Span, dequantize_cache, explain, fmha, mla_decode, quantize_cache, sparse_fmha
from jax_dsv4_fmha._testing.attention import LatentStepCase, run, run_reference
from jax_dsv4_fmha._testing.cases import CASES
from tests.helpers import (
    assert_close,
    assert_gradient_on_the_reference_alone,
    assert_maps,
    assert_right,
    assert_right_twice,
    collectives,
    normal,
)

STEPS = [case for case in CASES if case.op == LatentStepCase.op]
B, S_Q, H, D, D_V, PAGE = 2, 3, 4, 24, 16, 3
TABLE = jnp.array([[4, 0, 6], [2, 5, 1]], jnp.int32)
LENGTHS = jnp.array([9, 4], jnp.int32)
Q, SINK, POOL = normal(0, B, S_Q, H, D), normal(1, H), normal(2, 7, PAGE, D)
PAGED, CONTIGUOUS = Cache(POOL, TABLE), Cache(POOL[TABLE].reshape(B, 9, D))
INDICES = jnp.asarray(np.random.default_rng(3).integers(-2, 10, (B, S_Q, 6)), jnp.int32)
CACHES = {"contiguous": CONTIGUOUS, "paged": PAGED}
step = functools.partial(mla_decode, d_v=D_V, sink=SINK)


def packed(paged=True, b=2, page=4, seed=5):
    """A cache of b sequences with room for 12 tokens each, and its entries."""
    entries = normal(seed, 3 * b + 1 if paged else b, page if paged else 3 * page, 576, dtype=jnp.bfloat16)
    table = np.random.default_rng(seed).permutation(3 * b + 1)[: 3 * b].reshape(b, 3).astype(np.int32)
    return Cache(quantize_cache(entries, "v32_fp8"), jnp.asarray(table) if paged else None, "v32_fp8")


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("chosen", ["all", "indices"])
@pytest.mark.parametrize("kind", CACHES)
def test_a_step_is_attention_over_what_the_cache_holds(kind, chosen, implementation):
    """Of the last tokens of sequences of different lengths."""
    position = LENGTHS[:, None] - S_Q + jnp.arange(S_Q)
    kv = CONTIGUOUS.entries
    if chosen == "all":
        want = fmha(Q, kv[:, :, None], d_v=D_V, span=Span(0, position + 1), sink=SINK)
    else:
        want = sparse_fmha(Q, kv, jnp.where(position[..., None] >= INDICES, INDICES, -1), d_v=D_V, sink=SINK)
    indices = None if chosen == "all" else INDICES
    got = step(Q, CACHES[kind], LENGTHS, indices, implementation=implementation)
    assert got[0].shape == (B, S_Q, H, D_V)
    assert_close(got, want)


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("layout", [None, "v32_fp8"])
@pytest.mark.parametrize("chosen", ["all", "indices"])
def test_steps_equal_the_whole_sequence(chosen, layout, s_q):
    """Row by row they equal attention over all positions, from pages that fill while steps go on."""
    s, d = 12, 576 if layout else D
    dtype, d_v = (jnp.bfloat16, 512) if layout else (jnp.float32, D_V)
    q, latent = normal(0, B, s, H, d, dtype=dtype), normal(1, B, s, d, dtype=dtype)
    cache = Cache.zeros(9, 3, d, dtype, jnp.array([[8, 2, 4, 0], [1, 7, 5, 3]]), layout=layout)
    indices = jnp.asarray(np.random.default_rng(3).integers(0, np.arange(1, s + 1)[:, None], (B, s, 5)), jnp.int32)
    held = cache.as_held(latent)
    if chosen == "all":
        want = fmha(q, held[:, :, None], d_v=d_v, span=Span.causal(s), sink=SINK)
    else:
        want = sparse_fmha(q, held, indices, d_v=d_v, sink=SINK)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(cache, length, q, latent, indices):
        cache = cache.append(latent, jnp.broadcast_to(length - s_q + jnp.arange(s_q), (B, s_q)))
        indices = None if chosen == "all" else indices
        return cache, mla_decode(q, cache, length, indices, d_v=d_v, sink=SINK)

    for i in range(0, s, s_q):
        now = slice(i, i + s_q)
        cache, got = add(cache, jnp.int32(i + s_q), q[:, now], latent[:, now], indices[:, now])
        assert_right(got, (want[0][:, now], want[1][:, now]))


@pytest.mark.parametrize("case", [c for c in STEPS if c.page == 64 and c.s_kv <= 900], ids=lambda case: case.id)
def test_rounds_once(case):
    want = run_reference(case)
    for implementation in (None, "reference"):
        assert_right(run(case, implementation), want)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("chosen", ["all", "indices"])
def test_padding_idle_places_and_what_has_no_room(chosen, kind, implementation):
    """Each query gives what it gives alone; others see nothing, whatever the cache holds."""
    counts, lengths = np.array([2, 0], np.int32), np.array([7, 0], np.int32)
    cache = Cache(jnp.where(jnp.isin(jnp.arange(7), TABLE[0])[:, None, None], POOL, jnp.nan), TABLE)
    cache = cache if kind == "paged" else Cache(cache.entries[TABLE].reshape(B, 9, D))
    indices = None if chosen == "all" else INDICES
    how = {"implementation": implementation}
    got = step(Q, cache, lengths, indices, q_offset=lengths - counts, **how)
    assert (got[0][0, 2:] == 0).all() and (got[1][0, 2:] == -jnp.inf).all()
    assert (got[0][1] == 0).all() and (got[1][1] == -jnp.inf).all()
    alone = step(Q[:1, :2], Cache(CONTIGUOUS.entries[:1]), 7, None if indices is None else indices[:1, :2], **how)
    assert_close([x[:1, :2] for x in got], alone)
    # tokens beyond the cache's room, and missing pages, are absent
    want = step(Q[:, :1], CACHES[kind], 9, None if indices is None else indices[:, :1], **how)
    far = step(Q[:, :1], CACHES[kind], 50, None if indices is None else indices[:, :1], **how)
    if chosen == "all":
        assert_close(far, want)
    holes = Cache(POOL, TABLE.at[0, 0].set(-1).at[1, 0].set(7))
    got = step(Q, holes, 9, **how)
    span = Span(3, jnp.broadcast_to(jnp.arange(7, 10)[None], (B, S_Q)))
    assert_close(got, fmha(Q, CONTIGUOUS.entries[:, :, None], d_v=D_V, span=span, sink=SINK))


@pytest.mark.parametrize("lengths", [-1, -(2**31), 2**31 - 1])
def test_extreme_lengths(lengths):
    for cache in CACHES.values():
        o, lse = step(Q, cache, lengths)
        want = step(Q, cache, lengths, implementation="reference")
        assert_close((o, lse), want)
        assert (lse == -jnp.inf).all() == (lengths < 0)


def test_an_empty_choice_and_all_of_an_entry():
    o, lse = step(Q, PAGED, LENGTHS, jnp.zeros((B, S_Q, 0), jnp.int32))
    assert (o == 0).all() and (lse == -jnp.inf).all()
    want = mla_decode(Q, PAGED, LENGTHS, d_v=D)
    assert want[0].shape == Q.shape
    assert_close(mla_decode(Q, PAGED, LENGTHS, d_v=None), want, rtol=0, atol=0)


def test_packed_entries_are_those_that_take_reads():
    """In pages, and without a block table."""
    q = normal(6, 2, S_Q, H, 576, dtype=jnp.bfloat16)
    for paged in (True, False):
        cache = packed(paged)
        for indices in (None, INDICES):
            got = mla_decode(q, cache, LENGTHS, indices, sink=SINK)
            assert_right(got, mla_decode(q, Cache(cache.take()), LENGTHS, indices, sink=SINK))


@pytest.mark.parametrize("kind", [*CACHES, "v32_fp8"])
@pytest.mark.parametrize("mapped", ["all", "q alone"])
def test_vmap(mapped, kind):
    q, cache, d_v = (Q, CACHES[kind], D_V) if kind in CACHES else (normal(0, B, S_Q, H, 576), packed(), 512)
    q = q if kind in CACHES else q.astype(jnp.bfloat16)
    for indices in (None, INDICES):
        f = lambda q, cache, indices=indices: mla_decode(q, cache, LENGTHS, indices, d_v=d_v, sink=SINK)  # noqa: E731
        assert_maps(f, q, cache, mapped)


def test_gradients():
    f = lambda q, cache, implementation: step(q, cache, LENGTHS, implementation=implementation)  # noqa: E731
    assert_gradient_on_the_reference_alone(f, "mla_decode", Q, PAGED)


def placed(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "v32_fp8", "contiguous v32_fp8"])
@pytest.mark.parametrize("chosen", ["all", "indices"])
def test_meshes(chosen, kind, axes):
    """A step, with its append, has no collective, with batch over one axis of a mesh and heads over the other."""
    is_packed, is_paged = "v32_fp8" in kind, not kind.startswith("contiguous")
    q, cache, d_v = (Q, CACHES[kind], D_V) if not is_packed else (normal(0, B, S_Q, H, 576), packed(is_paged), 512)
    q = q.astype(jnp.bfloat16) if is_packed else q
    new = normal(7, B, S_Q, q.shape[-1], dtype=q.dtype)

    def decode(q, cache, new, lengths, sink, indices):
        if not is_paged:  # every device that has a pool writes the entries of all sequences
            cache = cache.append(new, lengths[:, None] - S_Q + jnp.arange(S_Q, dtype=jnp.int32))
        return mla_decode(q, cache, lengths, None if chosen == "all" else indices, d_v=d_v, sink=sink)

    xs = (q, cache, new, LENGTHS, SINK, INDICES)
    want = jax.jit(decode)(*xs)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axes,) * 2, devices=devices)
    if is_paged:
        cache = Cache(placed(mesh, cache.entries), placed(mesh, cache.block_table, "data"), cache.layout)
    else:
        cache = Cache(placed(mesh, cache.entries, "data"), None, cache.layout)
    specs = ("data", None, "model"), ("data",), ("data",), ("model",), ("data",)
    q, new, lengths, sink, indices = (
        placed(mesh, x, *s) for x, s in zip((q, new, LENGTHS, SINK, INDICES), specs, strict=True)
    )
    compiled = jax.jit(decode).lower(q, cache, new, lengths, sink, indices).compile()
    assert collectives(compiled) == {}
    assert_right(compiled(q, cache, new, lengths, sink, indices), want)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "v32_fp8"])
def test_export_of_any_batch_and_cache(kind):
    b, s = jax.export.symbolic_shape("b, s")
    cache, q, d_v = (CACHES[kind], Q, D_V) if kind in CACHES else (packed(), normal(0, B, S_Q, H, 576), 512)
    q = q if kind in CACHES else q.astype(jnp.bfloat16)

    def like(x, *leading):
        return jax.ShapeDtypeStruct((*leading, *x.shape[len(leading) :]), x.dtype)

    def decode(q, cache, lengths):
        return mla_decode(q, cache, lengths, d_v=d_v)

    any_cache = Cache(like(cache.entries, b, s))
    if kind != "contiguous":
        any_cache = Cache(like(cache.entries, s), like(cache.block_table, b), cache.layout)
    exported = jax.export.export(jax.jit(decode), platforms=["cpu"])(like(q, b), any_cache, like(LENGTHS, b))
    call = jax.jit(lambda q, cache, lengths: exported.call(q, cache, lengths))
    assert_right(call(q, cache, LENGTHS), decode(q, cache, LENGTHS))


# ---- which kernels


def shapes(kind, d=576, h=64, b=2, s_q=2):
    layout = kind.split()[-1] if "_fp8" in kind else None
    table = None if kind.startswith("contiguous") else jax.ShapeDtypeStruct((b, 4), jnp.int32)
    cache = jax.eval_shape(lambda: Cache.zeros(9 if table else b, 64, d, layout=layout))
    numbers = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((b,), (b, s_q, 96))]
    return jax.ShapeDtypeStruct((b, s_q, h, d), jnp.bfloat16), Cache(cache.entries, table, cache.layout), *numbers


KERNELS = {
    ("contiguous", 576, "all"): ("mla_span_fwd_v512", None),
    ("contiguous", 576, "indices"): ("mla_sparse_fwd_v512", ""),
    ("paged", 576, "all"): ("mla_sparse_fwd_v512", ""),
    ("paged", 576, "indices"): ("mla_sparse_fwd_v512", ""),
    ("paged v32_fp8", 576, "all"): ("mla_sparse_fwd_v512", "v32_fp8"),
    ("paged v32_fp8", 576, "indices"): ("mla_sparse_fwd_v512", "v32_fp8"),
    ("contiguous v32_fp8", 576, "all"): ("mla_sparse_fwd_v512", "v32_fp8"),
    ("contiguous v32_fp8", 576, "indices"): ("mla_sparse_fwd_v512", "v32_fp8"),
    ("contiguous", 512, "all"): ("mla_span_fwd", None),
    ("paged", 512, "all"): ("mla_sparse_fwd", None),
    ("paged", 512, "indices"): ("mla_sparse_fwd", None),
    ("paged v4_fp8", 512, "indices"): ("dsv4_decode", "v4_fp8"),
    ("contiguous v4_fp8", 512, "indices"): ("dsv4_decode", "v4_fp8"),
    ("paged v41_fp8", 512, "all"): ("dsv4_decode", "v41_fp8"),
}


@pytest.mark.parametrize("kind, d, chosen", KERNELS)
def test_kernels(on_hopper, kind, d, chosen):
    """One launch that attends, by its name and packing, after one that finds chosen entries; `explain` names them; no
    copy of a cache.
    """
    q, cache, lengths, indices = shapes(kind, d)
    f = functools.partial(mla_decode, implementation="cubin")
    x = (q, cache, lengths) if chosen == "all" else (q, cache, lengths, indices)
    name, packing = KERNELS[kind, d, chosen]
    finds = [] if chosen == "all" else ["seen_slots"]
    *found, decision = explain(f, *x)
    is_inside = bool(finds) and kind.startswith("contiguous v")  # attention finds them itself
    assert [x.op for x in found if x.implementation == "kernel"] == ([] if is_inside else finds)
    assert decision.implementation == "kernel", decision
    assert decision.reason.startswith("seen_slots and " * is_inside + name), decision
    assert ("v32_fp8 caches" in decision.reason) == ("v32" in kind) and ("d_v=512" in decision.reason) == (d == 576)
    is_list = chosen == "all" and kind != "contiguous"
    assert ("all slots of a cache as indices" in decision.reason) == is_list
    text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @dsv4_fmha_(\w+)", text) == [*finds, name]
    assert chosen == "all" or "stablehlo.select" not in text, "other slots are made of those found"
    assert re.findall(r'packing = "(\w*)"', text) == ([] if packing is None else [packing])
    kinds = "broadcast_in_dim|gather|concatenate|pad|select|dynamic_slice"
    for found in re.findall(rf"stablehlo.(?:{kinds})\"?.*: \(tensor<([\dx]+)x.*-> tensor<([\dx]+)x(?:bf16|ui8)>", text):
        read, written = (math.prod(map(int, x.split("x"))) for x in found)
        assert read == written, found  # only another name for the same bytes


@pytest.mark.parametrize(
    "kind, d, d_v, words",
    [
        ("paged", 576, 448, "no kernel takes bfloat16, d=576, d_v=448"),
        ("paged v32_fp8", 576, None, "no kernel takes bfloat16, d=576, v32_fp8 caches"),
        ("paged v4_fp8", 512, 448, "no kernel takes bfloat16, d=512, d_v=448, v4_fp8 caches"),
    ],
)
def test_where_there_is_no_kernel(on_hopper, kind, d, d_v, words):
    q, cache, lengths, _ = shapes(kind, d)
    (decision,) = explain(functools.partial(mla_decode, d_v=d_v), q, cache, lengths)
    assert decision.implementation == "reference" and words in decision.reason
    for how in ({"implementation": "cubin"}, {"batch_invariant": True}):
        with pytest.raises(NotImplementedError, match=f"mla_decode: {next(iter(how))}: got"):
            jax.eval_shape(functools.partial(mla_decode, d_v=d_v, **how), q, cache, lengths)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "paged v32_fp8"])
def test_batch_invariant_calls_ask_for_the_canonical_order(on_hopper, kind):
    q, cache, lengths, indices = shapes(kind)
    f = functools.partial(mla_decode, batch_invariant=True)
    text = jax.jit(f).trace(q, cache, lengths, indices).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @dsv4_fmha_(\w+)", text) == ["seen_slots", "mla_sparse_fwd_v512"]
    assert "order = 2" in text


# ---- errors

PACKED = packed()
WIDE = jnp.ones((2, 1, 4, 576), jnp.bfloat16)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: mla_decode(Q, PAGED, 4), ValueError, "mla_decode: d_v: got 512, wanted an int of 1 to d=24"),
        (lambda: step(Q, POOL, 4), TypeError, r"mla_decode: cache: got float32\[7, 3, 24\].*wanted a Cache"),
        (lambda: step(Q[..., :16], PAGED, 4), ValueError, r"cache.entries: got float32\[7, 3, 24\]"),
        (lambda: step(Q.astype(jnp.bfloat16), PAGED, 4), ValueError, r"cache.entries: got float32\[7, 3, 24\]"),
        (lambda: step(Q, PAGED, jnp.ones(3, jnp.int32)), ValueError, r"mla_decode: lengths: got int32\[3\], wanted"),
        (lambda: step(Q, PAGED, 4, INDICES[:, :1]), ValueError, r"indices: got int32\[2, 1, 6\].*b=2, s_q=3, topk"),
        (lambda: step(Q, PAGED, 4, q_offset=1.5), TypeError, "mla_decode: q_offset: got 1.5"),
        (lambda: step(Q, PAGED, 4, scale=0), ValueError, "mla_decode: scale: got 0, wanted"),
        (
            lambda: step(Q, PAGED, 4, implementation="cuda"),
            ValueError,
            "mla_decode: implementation: got 'cuda', wanted",
        ),
        (lambda: step(Q, Cache(POOL, TABLE[:1]), 4), ValueError, r"cache.block_table: got int32\[1, 3\]"),
        (
            lambda: mla_decode(jnp.ones((2, 1, 4, 512), jnp.bfloat16), PACKED, 4),
            ValueError,
            r"cache.entries: got uint8\[7, 2624\] with d = 512, wanted d = 576 and pages of n entries in 656 n bytes",
        ),
        (
            lambda: mla_decode(WIDE.astype(jnp.float32), PACKED, 4),
            ValueError,
            r"mla_decode: q: got float32\[2, 1, 4, 576\], wanted bfloat16, with a packed cache",
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_cases_hold_what_the_issue_asks_for():
    assert {c.s_q for c in STEPS} >= {1, 2, 3, 4, 5, 8} and {c.h_q for c in STEPS} >= {8, 16, 64, 128}
    assert {c.d for c in STEPS} == {512, 576} and {c.page for c in STEPS} >= {0, 2, 61, 64, 69}
    for case in STEPS:
        if "nan" in case.features and case.s_kv <= 500:
            (_, cache), _ = case.operands()
            entries = dequantize_cache(cache.entries, cache.layout) if cache.is_packed else cache.entries
            assert jnp.isnan(entries).all(-1).any(), case.id


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.id)
def test_kernel(case):
    assert_right_twice(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("layout", [None, "v32_fp8"])
@pytest.mark.parametrize("chosen", ["all", "indices"])
def test_batch_invariant_kernel(chosen, layout):
    """A sequence has the same bits alone, in a batch, and with other pages."""
    b, s_q, h, page = 5, 3, 64, 64
    q, entries = normal(0, b, s_q, h, 576, dtype=jnp.bfloat16), normal(1, 4 * b, page, 576, dtype=jnp.bfloat16)
    lengths = jnp.array([256, 70, 3, 129, 200], jnp.int32)
    indices = jnp.asarray(np.random.default_rng(2).integers(-5, 256, (b, s_q, 150)), jnp.int32)
    table = jnp.asarray(np.random.default_rng(3).permutation(4 * b).reshape(b, 4), jnp.int32)

    def bits(n, order):
        pool = entries[jnp.argsort(order)]
        pool = pool if layout is None else quantize_cache(pool, layout)
        cache = Cache(pool, order[table[:n]], layout or "v4_fp8")
        given = None if chosen == "all" else indices[:n]
        f = jax.jit(functools.partial(mla_decode, batch_invariant=True))
        return [np.asarray(x[0]).tobytes() for x in f(q[:n], cache, lengths[:n], given)]

    want = bits(b, jnp.arange(4 * b))
    assert bits(1, jnp.arange(4 * b)) == want == bits(3, jnp.arange(4 * b)[::-1])
