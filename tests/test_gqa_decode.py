"""gqa_decode; its values against float64 stand in test_reference.py, for every case of the table."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache, Span, explain, fmha, gqa_decode
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.attention import HeadsStepCase, run, run_reference
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

STEPS = [case for case in CASES if case.op == HeadsStepCase.op]
B, S_Q, H, H_KV, D, PAGE = 2, 3, 8, 4, 16, 3
TABLES = jnp.array([[[4, 0, 6], [2, 5, 1]], [[0, 3, 2], [6, 4, 5]]], jnp.int32)  # of K, and of V
LENGTHS = jnp.array([9, 4], jnp.int32)
Q, SINK, POOLS = normal(0, B, S_Q, H, D), normal(1, H), normal(2, 2, 7, PAGE, H_KV * D)
PAGED = [Cache(pool, table) for pool, table in zip(POOLS, TABLES, strict=True)]
CONTIGUOUS = [Cache(cache.take()) for cache in PAGED]
K, V = (cache.entries.reshape(B, -1, H_KV, D) for cache in CONTIGUOUS)
CACHES = {"contiguous": CONTIGUOUS, "paged": PAGED}
WINDOWS = {"all": None, "window": 4}
step = functools.partial(gqa_decode, sink=SINK)


def span(positions, window):
    """What queries at these positions see."""
    start = jnp.maximum(positions + 1 - window, 0) if window else 0
    return Span(start, positions + 1)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", CACHES)
def test_a_step_is_attention_over_what_the_caches_hold(kind, window, implementation):
    """Of the last tokens of sequences of different lengths."""
    position = LENGTHS[:, None] - S_Q + jnp.arange(S_Q)
    want = fmha(Q, K, V, span=span(position, window), sink=SINK)
    got = step(Q, *CACHES[kind], LENGTHS, window=window, implementation=implementation)
    assert got[0].shape == Q.shape
    assert_close(got, want)


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_steps_equal_the_whole_sequence(window, s_q):
    """Row by row they equal attention over all positions, from pages that fill while steps go on."""
    s = 12
    q, new = normal(0, B, s, H, D), normal(1, 2, B, s, H_KV * D)
    tables = jnp.array([[[8, 2, 4, 0], [1, 7, 5, 3]], [[1, 7, 6, 0], [2, 8, 5, 4]]])
    caches = [Cache.zeros(9, 3, H_KV * D, jnp.float32, table) for table in tables]
    k, v = new.reshape(2, B, s, H_KV, D)
    want = fmha(q, k, v, span=span(jnp.broadcast_to(jnp.arange(s), (B, s)), window), sink=SINK)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(caches, length, q, new):
        positions = jnp.broadcast_to(length - s_q + jnp.arange(s_q), (B, s_q))
        caches = [cache.append(x, positions) for cache, x in zip(caches, new, strict=True)]
        return caches, step(q, *caches, length, window=window)

    for i in range(0, s, s_q):
        now = slice(i, i + s_q)
        caches, got = add(caches, jnp.int32(i + s_q), q[:, now], new[:, :, now])
        assert_close(got, [x[:, now] for x in want])


@pytest.mark.parametrize("case", [c for c in STEPS if c.page == 64 and c.s_kv <= 900], ids=lambda case: case.id)
def test_rounds_once(case):
    want = run_reference(case)
    for implementation in (None, "reference"):
        assert_right(run(case, implementation), want)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", CACHES)
def test_padding_idle_places_and_what_has_no_room(kind, window, implementation):
    """Each query gives what it gives alone; others see nothing, whatever the caches hold."""
    counts, lengths = np.array([2, 0], np.int32), np.array([7, 0], np.int32)
    how = {"implementation": implementation, "window": window}
    caches = [
        Cache(jnp.where(jnp.isin(jnp.arange(7), x.block_table[0])[:, None, None], x.entries, jnp.nan), x.block_table)
        for x in PAGED
    ]
    caches = caches if kind == "paged" else [Cache(x.take()) for x in caches]
    got = step(Q, *caches, lengths, q_offset=lengths - counts, **how)
    assert (got[0][0, 2:] == 0).all() and (got[1][0, 2:] == -jnp.inf).all()
    assert (got[0][1] == 0).all() and (got[1][1] == -jnp.inf).all()
    alone = step(Q[:1, :2], *(Cache(x.entries[:1]) for x in CONTIGUOUS), 7, **how)
    assert_close([x[:1, :2] for x in got], alone)
    # tokens beyond the caches' room are absent
    far = step(Q[:, :1], *CACHES[kind], 12, **how)
    assert_close(far, fmha(Q[:, :1], K, V, span=Span(0 if window is None else 8, 9), sink=SINK))


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("lost, seen", [((0, 0), (5, 9)), ((0, 2), (5, 6)), ((1, 1), (0, 0)), ((0, 1), (0, 0))])
def test_nothing_is_seen_from_a_missing_page_on(lost, seen, implementation):
    """Of K or of V; and pages before a window may be missing. lost: whose, and which."""
    which, page = lost
    for number in (-1, 7, 2**31 - 1):
        tables = TABLES.at[which, 0, page].set(number)
        caches = [Cache(pool, table) for pool, table in zip(POOLS, tables, strict=True)]
        got = step(Q[:, :1], *caches, 9, window=4, implementation=implementation)
        start, stop = seen if seen != (0, 0) else (5, 5)
        want = fmha(Q[:1, :1], K[:1], V[:1], span=Span(start, stop), sink=SINK)
        assert_close([x[:1] for x in got], want)
        assert_close([x[1:] for x in got], fmha(Q[1:, :1], K[1:], V[1:], span=Span(5, 9), sink=SINK))


@pytest.mark.parametrize("window", [None, 1, 4, 2**31 - 1])
@pytest.mark.parametrize("lengths", [-1, -(2**31), 2**31 - 1])
def test_extreme_lengths(lengths, window):
    for caches in CACHES.values():
        o, lse = step(Q, *caches, lengths, window=window)
        assert_close((o, lse), step(Q, *caches, lengths, window=window, implementation="reference"))
        assert (lse == -jnp.inf).all() == (lengths < 0 or window in (1, 4))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("mapped", ["all", "q alone"])
def test_vmap(mapped, kind):
    assert_maps(lambda q, caches: step(q, *caches, LENGTHS, window=4), Q, CACHES[kind], mapped, assert_close)


def test_gradients():
    f = lambda q, caches, implementation: step(q, *caches, LENGTHS, implementation=implementation)  # noqa: E731
    assert_gradient_on_the_reference_alone(f, "gqa_decode", Q, PAGED)


# ---- caches in FP8

SCALES = {"k_scale": jnp.asarray([0.03, 0.07, 0.011, 0.2]), "v_scale": jnp.float32(0.05)}


def as_codes(cache, scale):
    """What a cache holds in units of its scale, and what that means."""
    scales = jnp.repeat(jnp.broadcast_to(scale, H_KV), D)
    codes = jnp.clip(cache.entries / scales, -448, 448).astype(jnp.float8_e4m3fn)
    return Cache(codes, cache.block_table), Cache(codes.astype(jnp.float32) * scales, cache.block_table)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", CACHES)
def test_codes_are_numbers_times_their_scales(kind, window, implementation):
    coded, meant = zip(*map(as_codes, CACHES[kind], SCALES.values()), strict=True)
    how = {"window": window, "implementation": implementation}
    assert_close(step(Q, *coded, LENGTHS, **how, **SCALES), step(Q, *meant, LENGTHS, **how))
    ones = [Cache(x.entries.astype(jnp.float32), x.block_table) for x in coded]
    assert_close(step(Q, *coded, LENGTHS, **how), step(Q, *ones, LENGTHS, **how))
    as_numbers = step(Q, *coded, LENGTHS, **how, k_scale=0.5, v_scale=2)
    assert_close(as_numbers, step(Q, *coded, LENGTHS, **how, k_scale=jnp.full(H_KV, 0.5), v_scale=jnp.float32(2)))


def test_new_codes_are_appended():
    coded, _ = as_codes(PAGED[0], SCALES["k_scale"])
    new = jnp.full((B, 1, H_KV * D), 3.0, jnp.float8_e4m3fn)
    taken = coded.append(new, LENGTHS[:, None] - 1).take(LENGTHS[:, None] - jnp.arange(1, 3))
    assert taken.dtype == jnp.float8_e4m3fn and (taken[:, 0] == 3).all()
    assert (taken[:, 1] == coded.take(LENGTHS[:, None] - 2)[:, 0]).all()


@pytest.mark.parametrize("mapped", ["all", "q alone"])
@pytest.mark.parametrize("kind", CACHES)
def test_vmap_of_codes(kind, mapped):
    """Scales are mapped with the caches that they are of."""
    coded = [as_codes(*x)[0] for x in zip(CACHES[kind], SCALES.values(), strict=True)]
    scales = {name: jnp.broadcast_to(x, H_KV) for name, x in SCALES.items()}
    f = lambda q, given: step(q, *given[0], LENGTHS, window=4, **given[1])  # noqa: E731
    assert_maps(f, Q, (coded, scales), mapped, assert_close)


def placed(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("codes", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("pool", ["whole", "heads"])
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", CACHES)
def test_meshes(kind, axes, pool, codes):
    """A step has no collective, with batch over one axis of a mesh and heads over the other; each device has the heads
    of its own caches, where these are Auto axes.
    """
    if pool == "heads" and axes == AxisType.Explicit:
        pytest.skip("a Cache on Explicit axes has whole entries")

    def decode(q, caches, lengths, sink):
        return gqa_decode(q, *caches, lengths, sink=sink, window=4, **(SCALES if codes else {}))

    given = {"contiguous": CONTIGUOUS, "paged": PAGED}
    if codes:
        given = {k: [as_codes(*x)[0] for x in zip(xs, SCALES.values(), strict=True)] for k, xs in given.items()}
    want = decode(Q, given[kind], LENGTHS, SINK)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axes,) * 2, devices=devices)
    heads = "model" if pool == "heads" else None
    if kind == "paged":
        caches = [
            Cache(placed(mesh, x.entries, None, None, heads), placed(mesh, x.block_table, "data")) for x in given[kind]
        ]
    else:
        caches = [Cache(placed(mesh, x.entries, "data", None, heads)) for x in given[kind]]
    q, lengths, sink = (
        placed(mesh, Q, "data", None, "model"),
        placed(mesh, LENGTHS, "data"),
        placed(mesh, SINK, "model"),
    )
    compiled = jax.jit(decode).lower(q, caches, lengths, sink).compile()
    assert collectives(compiled) == {}
    assert_close(compiled(q, caches, lengths, sink), want)


@pytest.mark.parametrize("kind", CACHES)
def test_export_of_any_batch_and_cache(kind):
    b, s = jax.export.symbolic_shape("b, s")

    def like(x, *leading):
        return jax.ShapeDtypeStruct((*leading, *x.shape[len(leading) :]), x.dtype)

    def decode(q, caches, lengths):
        return gqa_decode(q, *caches, lengths, window=4)

    if kind == "contiguous":
        any_caches = [Cache(like(x.entries, b, s)) for x in CONTIGUOUS]
    else:
        any_caches = [Cache(like(x.entries, s), like(x.block_table, b)) for x in PAGED]
    exported = jax.export.export(jax.jit(decode), platforms=["cpu"])(like(Q, b), any_caches, like(LENGTHS, b))
    call = jax.jit(lambda *x: exported.call(*x))
    assert_close(call(Q, CACHES[kind], LENGTHS), decode(Q, CACHES[kind], LENGTHS))


# ---- errors


def cache(*shape, table=None, dtype=jnp.float32):
    return Cache(jnp.zeros(shape, dtype), table)


CODES = cache(B, 9, 64, dtype=jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"k_cache": K}, "k_cache: got float32[2, 9, 4, 16], wanted a Cache"),
        ({"v_cache": None}, "v_cache: got None, wanted a Cache"),
        ({"k_cache": cache(B, 9, 60)}, "k_cache.entries: got float32[2, 9, 60], wanted entries of h_kv * d numbers"),
        (
            {"k_cache": cache(B, 9, 48), "v_cache": cache(B, 9, 48)},
            "q: got 8 heads of 3 queries, wanted a multiple of the 3 heads of k_cache",
        ),
        ({"v_cache": cache(B, 9, 32)}, "v_cache.entries: got float32[2, 9, 32], wanted float32[2, 9, 64] like k_c"),
        ({"v_cache": cache(B, 9, 64, dtype=jnp.bfloat16)}, "v_cache.entries: got bfloat16[2, 9, 64], wanted float32["),
        ({"v_cache": cache(B, 9, 64, table=TABLES[0])}, "v_cache.block_table: got int32[2, 3], wanted None like k_c"),
        (
            {"k_cache": cache(3, 9, 64)},
            "k_cache.entries: got float32[3, 9, 64], wanted float32 or float8_e4m3fn[b=2, page, d=64]",
        ),
        ({"k_cache": CODES}, "v_cache.entries: got float32[2, 9, 64], wanted float8_e4m3fn["),
        ({"k_scale": 2.0}, "k_scale: got 2.0, wanted None, or caches of float8_e4m3fn, not float32"),
        ({"k_cache": CODES, "v_cache": CODES, "k_scale": "1"}, "k_scale: got 1, wanted a number, a float32 scalar or"),
        (
            {"k_cache": CODES, "v_cache": CODES, "v_scale": jnp.ones(3)},
            "v_scale: got float32[3], wanted float32[h_kv=4]",
        ),
        ({"k_cache": Cache(jnp.zeros((B, 584), jnp.uint8))}, "k_cache.entries: got uint8[2, 584], wanted float32: ent"),
        ({"lengths": 2.0}, "lengths: got 2.0, wanted an int, an int32 scalar or int32[b=2]"),
        ({"lengths": jnp.ones(3, jnp.int32)}, "lengths: got int32[3], wanted int32[b=2]"),
        ({"window": 0}, "window: got 0, wanted an int >= 1, known while tracing, or None"),
        ({"window": "4"}, "window: got 4, wanted an int >= 1, known while tracing, or None; '4' is a str"),
        ({"sink": jnp.zeros(H_KV)}, "sink: got float32[4], wanted float32[h_q=8]"),
        ({"q_offset": jnp.zeros((B, 1), jnp.int32)}, "q_offset: got int32[2, 1], wanted int32[b=2]"),
        ({"scale": -1.0}, "scale: got -1.0, wanted a finite fp32 number > 0"),
        ({"implementation": "kernel"}, "implementation: got 'kernel', wanted None or 'cubin' or 'reference'"),
    ],
)
def test_errors(changed, words):
    given = {"q": Q, "k_cache": CONTIGUOUS[0], "v_cache": CONTIGUOUS[1], "lengths": LENGTHS} | changed
    with pytest.raises((ValueError, TypeError), match=re.escape(f"gqa_decode: {words}")):
        jax.eval_shape(functools.partial(gqa_decode, **given))


# ---- which kernels


def shapes(kind, d=64, b=2, s_q=2, page=64, h=64, h_kv=8, dtype=jnp.bfloat16, held=None):
    table = None if kind == "contiguous" else jax.ShapeDtypeStruct((b, 4), jnp.int32)
    entries = jax.ShapeDtypeStruct((9 if table else b, page, h_kv * d), held or dtype)
    length = jax.ShapeDtypeStruct((b,), jnp.int32)
    return jax.ShapeDtypeStruct((b, s_q, h, d), dtype), *[Cache(entries, table)] * 2, length


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kind, name", [("contiguous", "mha_fwd"), ("paged", "mha_fwd_paged")])
def test_kernels(on_hopper, kind, name, d, window):
    """One launch, by its name; `explain` names it; no copy of a cache."""
    x, f = shapes(kind, d), functools.partial(gqa_decode, implementation="cubin", window=window)
    (decision,) = explain(f, *x)
    assert decision.implementation == "kernel" and decision.reason.startswith(name), decision
    assert ("in pages" in decision.reason) == (kind == "paged")
    text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @dsv4_fmha_(\w+)", text) == [name]
    kinds = "broadcast_in_dim|gather|concatenate|pad|select|dynamic_slice"
    for found in re.findall(rf"stablehlo.(?:{kinds})\"?.*: \(tensor<([\dx]+)x.*-> tensor<([\dx]+)xbf16>", text):
        read, written = (math.prod(map(int, x.split("x"))) for x in found)
        assert read == written, found  # only another name for the same bytes


@pytest.mark.parametrize(
    "how, window, name",
    [
        ({}, 128, "mha_fwd_paged_window"),
        ({}, None, "mha_fwd_paged"),
        ({"s_q": 2}, 128, "mha_fwd_paged"),
        ({}, 31 * 16 + 1, "mha_fwd_paged_window"),
        ({}, 31 * 16 + 2, "mha_fwd_paged"),
        ({"d": 256}, 31 * 64 + 1, "mha_fwd_paged_window"),
        ({"d": 256}, 31 * 64 + 2, "mha_fwd_paged"),
        ({"page": 24}, 31 * 8 + 1, "mha_fwd_paged_window"),
        ({"page": 24}, 31 * 8 + 2, "mha_fwd_paged"),
        ({"held": jnp.float8_e4m3fn}, 128, "mha_fwd_paged_e4m3_window"),
        ({"held": jnp.float8_e4m3fn}, None, "mha_fwd_paged_e4m3"),
    ],
)
def test_which_windows_a_kernel_finds(on_hopper, how, window, name):
    """One of a single token, with at most 32 boxes of a page: then XLA makes no kernel beside it."""
    x = shapes("paged", **{"s_q": 1, **how})
    (decision,) = explain(functools.partial(gqa_decode, window=window), *x)
    assert decision.reason.split()[0].strip(":,;") == name, decision
    f = functools.partial(gqa_decode, window=window, implementation="cubin")
    text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert bool(re.search(r"stablehlo.(minimum|maximum|reduce|select)", text)) != name.endswith("window")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kind", CACHES)
def test_the_kernel_of_codes(on_hopper, kind, d, dtype):
    """Contiguous caches are pages, one for each sequence; no cache is copied, and none is made of numbers."""
    x, f = shapes(kind, d, dtype=dtype, held=jnp.float8_e4m3fn), functools.partial(gqa_decode, implementation="cubin")
    (decision,) = explain(f, *x)
    assert decision.implementation == "kernel", decision
    assert decision.reason.startswith("mha_fwd_paged_e4m3") and "in e4m3 in pages of 64" in decision.reason, decision
    text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @dsv4_fmha_(\w+)", text) == ["mha_fwd_paged_e4m3"]
    assert not re.findall(r"stablehlo.(?:convert|gather|concatenate|pad|select|dynamic_slice)\b.*f8E4M3FN", text)


@pytest.mark.skipif(not library.held(), reason="without kernels, whose tiles decide")
def test_a_window_is_not_split(on_hopper):
    """Where few sequences see all of their pages, their keys are split, whose parts another kernel merges."""
    for window, merged in ((None, True), (128, False)):
        (decision,) = explain(functools.partial(gqa_decode, window=window), *shapes("paged", b=1, page=4096))
        assert ("combine" in decision.reason) == merged, decision


@pytest.mark.parametrize(
    "how, words",
    [
        ({"d": 96}, "no kernel takes bfloat16, d=96, separate K and V in pages"),
        ({"dtype": jnp.float32}, "no kernel takes float32, d=64, separate K and V in pages"),
        ({"page": 12}, "no kernel takes bfloat16, d=64, separate K and V in pages of 12"),
        ({"held": jnp.float8_e4m3fn, "page": 12}, "no kernel takes bfloat16, d=64, separate K and V in e4m3 in pages"),
    ],
)
def test_where_there_is_no_kernel(on_hopper, how, words):
    x = shapes("paged", **how)
    (decision,) = explain(gqa_decode, *x)
    assert decision.implementation == "reference" and words in decision.reason, decision
    with pytest.raises(NotImplementedError, match="gqa_decode: implementation: got 'cubin' for"):
        jax.eval_shape(functools.partial(gqa_decode, implementation="cubin"), *x)


def test_cases_hold_what_steps_have():
    assert {c.d for c in STEPS} == {64, 128, 256} and {c.page for c in STEPS} >= {0, 7, 8, 16, 24, 64, 128}
    assert {c.h_q // c.h_kv for c in STEPS} >= {1, 7, 8, 16} and {c.s_q for c in STEPS} >= {1, 2, 3, 8}
    for case in STEPS:
        if "nan" in case.features and case.s_kv <= 500:
            (_, *caches), _ = case.operands()
            assert all(jnp.isnan(x.entries).all(-1).any() for x in caches), case.id


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", [c for c in STEPS if c.has_kernel], ids=lambda case: case.id)
def test_kernel(case):
    assert_right_twice(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["", "codes"])
@pytest.mark.parametrize(
    "d, page, window", [(64, 16, 100), (128, 64, 128), (64, 64, 300), (64, 8, 249), (256, 24, 200)]
)
def test_the_kernel_finds_what_a_window_sees(d, page, window, dtype):
    """Lengths that end anywhere, or have no room; queries without a token; pages that are missing, of K or of V."""
    b, pages, room = 16, 100, 8 * page
    rng = np.random.default_rng(0)
    entries = [jnp.asarray(rng.standard_normal((pages, page, 2 * d)), dtype) for _ in range(2)]
    tables = np.stack([rng.permutation(pages)[: b * 6].reshape(b, 6) for _ in range(2)]).repeat(2, -1)[..., :8]
    absent = rng.random(tables.shape) < 0.1
    tables[absent] = rng.choice([-1, pages, 2**31 - 1], absent.sum())
    caches = [Cache(x, jnp.asarray(table, jnp.int32)) for x, table in zip(entries, tables, strict=True)]
    lengths = jnp.asarray([*rng.integers(1, room + 1, b - 4), 0, -5, room + 9, 2**31 - 1], jnp.int32)
    q = jnp.asarray(rng.standard_normal((b, 1, 8, d)), jnp.bfloat16)
    for q_offset in (None, jnp.maximum(lengths, 2) - 2 + jnp.arange(b, dtype=jnp.int32) % 3):
        how = {"window": window, "q_offset": q_offset}
        got, want = (gqa_decode(q, *caches, lengths, implementation=x, **how) for x in ("cubin", "reference"))
        assert (want[1] == -jnp.inf).any() and jnp.isfinite(want[1]).any()
        np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(*(x[0].astype(jnp.float32) for x in (got, want)), rtol=0.02, atol=0.02)
