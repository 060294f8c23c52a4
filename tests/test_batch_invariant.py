"""A query's bits depend on its own operands alone: the order of sums, read off in the interpreter; launches of other
shapes. `tests/same_bits.py` compares calls on a GPU, `tests/test_batch_invariant_calls.py` has the mode in the API.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import (
    attention,
    by_columns,
    gradients,
    indexer,
    kv_insert,
    mla_backward,
    native,
    probabilities,
    rope,
)
from interpreter.kernels.launch import Kernel, combine, launch
from interpreter.machine import scheduler
from jax_dsv4_fmha import (
    dequantize_cache,
    dsv4_attention,
    merge,
    quantize_cache,
    sparse_fmha,
)
from jax_dsv4_fmha.layers import Rope
from jax_dsv4_fmha.layers import rope as rope_of_rows
from jax_dsv4_fmha.layers._norm import rms_norm
from jax_dsv4_fmha.layers.rope import rope_of_normed
from kernels.abi import Forward, IndexQuery, KvInsert, NormRope
from kernels.abi import Rope as RopeVariant

from . import same_bits
from .order_of_sums import blocks_of, canonical, in_turn, pairs, probing, read_off

BF16 = np.dtype("bfloat16")
SINK = np.array([0, 1, -np.inf, -2], np.float32)
BUILT = {v.key for v in native.built(Forward)}
BACKWARD = (("mla_sparse_bwd", "_h64"), ("mla_sparse_bwd", ""), ("csa_bwd", "_h16"), ("csa_bwd", "_h64"))
ROPES = [v for family in (RopeVariant, NormRope, IndexQuery) for v in native.built(family)]
MANY, FEW = "sm_90a_d512_bfloat16", "sm_90a_d512_bfloat16_h16"
heads = pytest.mark.parametrize(("suffix", "h"), [(MANY, 33), (FEW, 8)], ids=["many heads", "few heads"])


@functools.cache
def kernel(key):
    if key not in BUILT and not key.startswith(("combine", "row_columns")):
        pytest.skip(f"{key} is not built")
    return Kernel.of(native.variant_of(key))


def keys(k, seen_from, seen_to):
    return attention.Keys(k, k, np.asarray(seen_from, np.int32), np.asarray(seen_to, np.int32), np.zeros(1))


def attend(key, q, *sources, splits=1, columns=None, **extents):
    """o and lse, with the sources' keys as `[b, s_kv, d]`; `columns`: by the two kernels for few queries, run so."""
    b, s_q, h, d = q.shape
    sources = tuple(replace(x, k=x.k[:, :, None], v=x.k[:, :, None]) for x in sources)
    sink = np.linspace(-3, 3, h, dtype=np.float32)
    sink = np.where(np.any(q), sink, -np.inf).astype(np.float32)  # none where an order is read off
    named = zip(("s_kv", "s_kv1"), (x.k.shape[1] for x in sources), strict=False)
    topk = max((x.seen_from.shape[-1] for x in sources if x.seen_from.ndim == 3), default=0)
    shape = native.Shape(b=b, s_q=s_q, h_q=h, h_kv=1, d=d, topk=topk, **{**dict(named), **extents})
    operands = attention.Operands(kernel(key).variant.op, shape, q, sources, sink)
    if columns is not None:
        scores = native.variant_of(key.replace("_sm_90a", "_by_columns_sm_90a"))
        return by_columns.run(Kernel.of(scores), kernel("row_columns_sm_90a_d512_bfloat16"), operands, **columns)
    run = launch(kernel(key), operands, splits=splits)
    scheduler.run(run.machine)
    if splits > 1:
        run = combine(kernel("combine_sm_90a_bfloat16"), run)
        scheduler.run(run.machine)
    return run.results()


def differing(a, b):
    """How many bytes of o and of lse."""
    return [int((x.view(np.uint8) != y.view(np.uint8)).sum()) for x, y in zip(a, b, strict=True)]


# ---- the order, read off


def order_of(key, lengths, swapped=False, heads=8, **how):
    """What is read off for a query whose sources show it so many keys each, listed from the first one on; and what the
    contract says. `swapped`: the kernel gets the second source first.
    """
    blocks, tiles = blocks_of(lengths)
    v, q = probing(blocks, sum(lengths), 512), np.zeros((1, 1, native.heads_for(kernel(key).variant, heads), 512), BF16)
    sources, first = [], 0
    for kind, n in zip(kernel(key).variant.sources, lengths, strict=True):
        k, first = v[None, first : first + n], first + n
        listed = np.full((1, 1, max(lengths)), -1)
        listed[..., :n] = np.arange(n)
        sources.append(keys(k, [[0]], [[n]]) if kind == "span" else keys(k, listed, [[n]]))
    o, _ = attend(key, q, *(reversed(sources) if swapped else sources), **how)
    few = q.shape[2] <= 32
    return read_off(o[0, 0, 0].astype(np.float32), blocks), [in_turn(blocks, x) for x in canonical(tiles, few)]


@heads
@pytest.mark.parametrize(
    ("op", "lengths"),
    [("mla_sparse_fwd", (256,)), ("csa_fwd", (70, 58)), ("dsv4_decode", (70, 58))],
    ids=["list", "window and list", "two lists"],
)
def test_the_order_is_that_of_the_contract(suffix, h, op, lengths):
    """Tiles of 64 keys, counted from the begin of each source, and what stands in docs/bits.md about halves."""
    got, wanted = order_of(f"{op}_{suffix}", lengths)
    assert got == wanted


@pytest.mark.parametrize(("op", "lengths"), [("mla_span_fwd", (234,)), ("hca_fwd", (70, 58))], ids=["one", "two"])
def test_spans_have_the_order_of_the_contract(op, lengths):
    got, wanted = order_of(f"{op}_{MANY}", lengths, heads=64)
    assert got == wanted


@pytest.mark.parametrize(
    ("op", "lengths"),
    [("csa_fwd", (70, 58)), pytest.param("mla_sparse_fwd", (256,), marks=pytest.mark.slow)],
    ids=["window and list", "list"],
)
def test_keys_and_columns_that_are_shared_out_have_the_same_order(op, lengths):
    got, wanted = order_of(f"{op}_{MANY}", lengths, columns={})
    assert got == wanted


def exchanged_tiles(scores, gathered):
    """The boundary of a pair of tiles has moved: the second and the third tile change places."""
    for x, tiles in ((scores, -2), (gathered, -3)):
        y = np.moveaxis(x, tiles, 0)
        y[[1, 2]] = y[[2, 1]]


def left_half_everywhere(text):
    """CTAs of the right half add the even tile of a pair first."""
    return edits.replace(text, r"(setp\.gt\.u32\s+%p\d+, %r\d+), 3;", lambda m: f"{m[1]}, 99;")


@pytest.mark.parametrize(
    ("fault", "order"),
    [({"between": exchanged_tiles}, [0, 2, 1, 3]), ({"edits": (str, left_half_everywhere)}, [0, 1, 2, 3])],
    ids=["boundary", "halves"],
)
def test_another_order_of_what_is_shared_out_is_found(fault, order):
    """What is read off is that of the fault."""
    key, (blocks, tiles) = f"mla_sparse_fwd_{MANY}", blocks_of((256,))
    got, wanted = order_of(key, (256,), columns=fault)
    left, right = canonical([tiles[t] for t in order], few_heads=False)
    faulty = [in_turn(blocks, left), in_turn(blocks, left if "edits" in fault else right)]
    assert got == faulty != wanted


def test_a_split_of_keys_is_another_order():
    """The planted fault is the host's: two splits. Keys of either half are summed by themselves."""
    key, blocks = f"mla_sparse_fwd_{FEW}", blocks_of((256,))[0]
    got, wanted = order_of(key, (256,), splits=2)
    across = [x for x, (i, j) in enumerate(pairs(len(blocks))) if i < 8 <= j]
    for half, expected in zip(got, wanted, strict=True):
        assert [half[x] for x in across] == [0] * len(across)  # the halves meet last of all
        assert half != expected


def test_sources_in_the_other_order_are_found():
    """The planted fault is in what hands sources over: the entries, and then the window."""
    got, wanted = order_of(f"dsv4_decode_{FEW}", (70, 58), swapped=True)
    blocks, (*window, entries) = blocks_of((70, 58))
    assert got == [in_turn(blocks, order) for order in canonical([entries, *window], few_heads=True)] != wanted


# ---- the same bits


def normal(seed, *shape, std=0.3):
    return (std * np.random.default_rng(seed).standard_normal(shape)).astype(BF16)


@heads
def test_company_does_not_matter(suffix, h):
    """A query alone, and as one of four in a batch, with a longer list whose end is absent."""
    key, n = f"mla_sparse_fwd_{suffix}", 150
    q, kv = normal(0, 1, 1, h, 512, std=4), normal(1, 1, 200, 512)
    listed = np.random.default_rng(2).permutation(200)[:n]
    alone = attend(key, q, keys(kv, listed[None, None], [[n]]))
    others, far = normal(3, 2, 2, h, 512, std=4), normal(4, 2, 260, 512)
    others[1, 1], far[1, :200] = q[0, 0], kv[0]
    indices = np.random.default_rng(5).integers(0, 260, (2, 2, 250))
    indices[1, 1] = np.pad(listed, (0, 100), constant_values=-1)
    together = attend(key, others, keys(far, indices, [[100, 250], [3, 250]]))
    assert differing((x[0, 0] for x in alone), (x[1, 1] for x in together)) == [0, 0]
    moved = np.pad(listed, (1, 0), constant_values=-1)[None, None]  # every tile begins a key earlier
    assert differing(alone, attend(key, q, keys(kv, moved, [[n + 1]])))[0] > 0


@heads
def test_a_prompt_a_step_and_a_list_of_all_agree(suffix, h):
    """A window as a run of an array beside a list; as a list of slots; and the entries as a run's list."""
    q, window, far = normal(0, 1, 1, h, 512, std=4), normal(1, 1, 120, 512), normal(2, 1, 90, 512)
    first, n = 13, 70
    prompt = attend(
        f"csa_fwd_{suffix}", q, keys(window, [[first]], [[first + n]]), keys(far, np.arange(90)[None, None], [[80]])
    )
    rng = np.random.default_rng(6)
    places, pool = (rng.permutation(300) for _ in range(2)), np.full((2, 300, 512), np.nan, BF16)
    of_window, of_far = places
    pool[0, of_window[:n]], pool[1, of_far[:80]] = window[0, first : first + n], far[0, :80]
    lists = [np.full((1, 1, 128), -1) for _ in range(2)]
    lists[0][..., :n], lists[1][..., :80] = of_window[:n], of_far[:80]
    pools = (keys(pool[None, i], listed, [[to]]) for i, (listed, to) in enumerate(zip(lists, (n, 128), strict=True)))
    assert differing(prompt, attend(f"dsv4_decode_{suffix}", q, *pools)) == [0, 0]
    alone = attend(
        f"csa_fwd_{suffix}", q, keys(window, [[first]], [[first + n]]), keys(far, np.zeros((1, 1, 1)), [[0]])
    )
    listed = attend(f"mla_sparse_fwd_{suffix}", q, keys(pool[None, 0], lists[0], [[n]]))
    assert differing(alone, listed) == [0, 0]


SPANS = {  # of two queries: what each sees of a window, and of entries, if there are any
    "a window's begin": ((0, 1), (1, 2)),
    "tiles and a bit": ((3, 131), (4, 133)),
    "a whole tile": ((7, 71), (0, 64)),
    "nothing": ((5, 5), (9, 140)),
    "entries": ((60, 188), (61, 189), (0, 3), (0, 90)),
    "entries alone": ((0, 0), (50, 50), (0, 70), (2, 67)),
}


def spans_and_lists(name, h):
    """o and lse of one launch over spans, and of one that gathers the same keys; they grow, so that maxima rise in the
    last tiles. What no query sees is NaN.
    """
    near, far = SPANS[name][:2], SPANS[name][2:]
    q, kv = normal(0, 1, 2, h, 512, std=4), []
    for seed, seen in ((1, near), (2, far or ((0, 0), (0, 0)))):
        k = normal(seed, 1, 200, 512) * np.geomspace(0.2, 1.5, 200).astype(BF16)[:, None]
        k[0, [all(not lo <= j < hi for lo, hi in seen) for j in range(200)]] = np.nan
        kv.append(k)
    spans = [keys(k, *np.transpose(seen)[:, None]) for k, seen in zip(kv, (near, far), strict=True) if seen]
    first, length = np.transpose([(lo, hi - lo) for lo, hi in far or ((0, 0), (0, 0))])
    listed = keys(kv[1], (first[:, None] + np.arange(200))[None], length[None])
    return (
        attend(f"{'hca' if far else 'mla_span'}_fwd_{MANY}", q, *spans),
        attend(f"csa_fwd_{MANY}", q, spans[0], listed),
    )


@pytest.mark.parametrize("name", [*SPANS])
def test_spans_are_like_lists(name):
    """Where a tile of rows has heads of one query."""
    assert differing(*spans_and_lists(name, 64)) == [0, 0]


@pytest.mark.slow
def test_spans_are_like_lists_for_two_tiles_of_rows():
    assert differing(*spans_and_lists("tiles and a bit", 128)) == [0, 0]


@pytest.mark.parametrize("name", ["tiles and a bit", "entries"])
def test_a_moved_boundary_of_tiles_is_found(name):
    """The planted fault is the host's: a tile of rows has heads of two queries, so the second one's tiles of keys begin
    earlier than it does.
    """
    o, lse = (np.abs(a.astype(np.float32) - b) for a, b in zip(*spans_and_lists(name, 32 + 64), strict=True))
    assert 0 < np.max(o) < 0.02 and np.max(lse) < 1e-3


@pytest.mark.parametrize(
    ("layout", "h"), [("v4_fp8", 66), *(pytest.param(x, 64, marks=pytest.mark.slow) for x in ("v4_fp8", "v41_fp4"))]
)
def test_packed_pages_are_like_rows(layout, h):
    """With more than 32 heads; with more than 64 two CTAs unpack for one another."""
    packed = kernel(f"dsv4_decode_{MANY}_{layout}{'_h64' * (h <= 64)}")
    x = attention.operands(packed.variant, b=1, s_q=2, s_kv=70, h_q=h, s_kv1=90, topk=80, seed=3)
    x = replace(x, q=(x.q.astype(np.float32) / 8).astype(BF16))
    rows = []
    for source, kind in zip(x.sources, packed.variant.sources, strict=True):
        k = np.asarray(dequantize_cache(source.pool, kind)).reshape(1, -1, 1, 512)
        rows.append(replace(source, pool=None, k=k, v=k))
    results = (
        launch(packed, x).run(),
        launch(kernel(f"dsv4_decode_{MANY}"), replace(x, sources=tuple(rows))).run(),
    )
    assert differing(*results) == [0, 0]


@pytest.mark.parametrize(
    ("d", "h", "h_kv"),
    [
        (64, 4, 2),
        (128, 4, 2),
        *(pytest.param(d, h, n, marks=pytest.mark.slow) for d, h, n in ((256, 4, 1), (512, 4, 2))),
    ],
)
def test_company_does_not_matter_for_dense_keys(d, h, h_kv):
    """Of queries that see keys from the first one on: each in a sequence of its own, or all in one, after others."""
    n, others, rng = 12, 20, np.random.default_rng(6)
    q, before = normal(0, n, 1, h, d, std=1), normal(3, 1, others, h, d)
    k, v = normal(1, 1, 300, h_kv, d, std=1), normal(2, 1, 300, h_kv, d)

    def run(q, k, v, start, stop):
        shape = native.Shape(b=q.shape[0], s_q=q.shape[1], s_kv=k.shape[1], h_q=h, h_kv=h_kv, d=d)
        sources = (
            attention.Keys(k, v, *(x.reshape(q.shape[:2]).astype(np.int32) for x in (start, stop)), np.zeros(1)),
        )
        return launch(
            kernel(f"mha_fwd_sm_90a_d{d}_bfloat16"), attention.Operands("mha_fwd", shape, q, sources, SINK)
        ).run()

    def both(start, stop):
        alone = run(q, *(np.repeat(x, n, axis=0) for x in (k, v)), np.full(n, start), stop)
        stops = np.concatenate([rng.integers(1, 301, others), stop])
        starts = np.concatenate([np.zeros(others), np.full(n, start)])
        together = run(np.concatenate([before, q.swapaxes(0, 1)], 1), k, v, starts, stops)
        return differing((x[:, 0] for x in alone), (x[0, others:] for x in together))

    assert both(0, np.concatenate([rng.integers(1, 140, n // 2), rng.integers(140, 301, n // 2)])) == [0, 0]
    assert both(33, np.full(n, 290))[0] > 0  # which the mode refuses: others begin earlier, and so do their tiles


@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_factor_may_be_a_fused_product(d):
    """ptxas makes one instruction of a product and a difference, which rounds once. Exponents of scores may be such, of
    the tile and, at d 128, of few keys; a factor would be 1 within rounding where the maximum stays.
    """
    dense = kernel(f"mha_fwd_sm_90a_d{d}_bfloat16")
    made = dict(re.findall(r"sub\.f32\s+(%\w+), (%\w+),", dense.ptx))
    products = set(re.findall(r"mul\.f32\s+(%\w+),", dense.ptx))
    exponents = re.findall(r"ex2\.approx\.ftz\.f32\s+%\w+, (%\w+);", dense.ptx)
    of_scores = dense.facts["tile_n"] // 2  # of a tile, two rows a thread; the first tile has code of its own
    assert sum(made.get(x) in products for x in exponents) == 2 * of_scores + (144 // 2 if d == 128 else 0)


@pytest.mark.parametrize("name", [pytest.param("heads64_bfloat16", marks=pytest.mark.slow), "heads64_float8_e4m3fn"])
def test_an_indexers_scores_and_choice_have_the_same_bits(name):
    """Without a mode: of a batch, and of some queries of one sequence, in an array and in pages."""
    key = f"indexer_scores_sm_90a_{name}"
    variant, paged = (native.variant_of(x) for x in (key, f"{key}_paged"))
    if key not in native.built_keys():
        pytest.skip(f"{key} is not built")
    x = indexer.Problem.of(variant, b=2, s_q=5, s_c=300, topk=40)
    whole = indexer.run(variant, x)
    some = {name: getattr(x, name)[1:, 2:4] for name in ("q", "weights", "start", "stop")}
    y = replace(x, **some, k=x.k[1:], k_scale=x.k_scale[1:])
    for got in (indexer.run(variant, y, processors=1), indexer.run(paged, replace(y, page=64))):
        assert differing([got.scores[y.seen]], [whole.scores[1:, 2:4][y.seen]]) == [0]
        assert differing((got.indices, got.values), (whole.indices[1:, 2:4], whole.values[1:, 2:4])) == [0, 0]


@pytest.mark.parametrize(
    "key",
    [
        "mla_sparse_bwd_sm_90a_d512_bfloat16_h16",
        *(pytest.param(f"{x}_sm_90a_d512_bfloat16{y}", marks=pytest.mark.slow) for x, y in BACKWARD),
    ],
)
def test_dq_of_lists_has_the_same_bits(key):
    """Of a query among three, and alone with a longer list, whose end is absent."""
    variant = native.variant_of(key)
    if key not in native.built_keys():
        pytest.skip(f"{key} is not built")
    h = native.heads_for(variant, 8)
    x = gradients.operands(variant, b=1, s_q=3, s_kv=150, h_q=h, s_kv1=150, topk=100)

    def alone(y):
        return None if y is None else y[:, 2:]

    def longer(y):
        seen = alone(y.seen_from)
        padded = seen if seen.ndim == 2 else np.pad(seen, ((0, 0), (0, 0), (0, 90)), constant_values=-1)
        return replace(y, seen_from=padded, seen_to=alone(y.seen_to))

    a = x.attention
    shape = a.shape._replace(s_q=1, topk=190)
    one = replace(a, shape=shape, q=alone(a.q), sources=tuple(map(longer, a.sources)))
    rows = {name: alone(getattr(x, name)) for name in ("do", "lse", "sink_factor", "delta")}
    whole, got = (mla_backward.launch(Kernel.of(variant), y).run()[0] for y in (x, replace(x, attention=one, **rows)))
    assert np.any(got) and differing([whole[:, 2:]], [got]) == [0]


def test_rows_that_are_normed_and_turned_have_the_same_bits():
    """RoPE, and a norm before it: of all rows of a call, and of some."""
    if not ROPES:
        pytest.skip("not built")
    for op in ("rope", "norm_rope", "index_query"):
        variant = next(v for v in ROPES if v.op == op and v.arch == "sm_90a")
        x = rope.Problem.of(variant, 2, 5, 7)
        some = replace(x, **{name: getattr(x, name)[1:, 2:4] for name in ("x", "dy", "angle")})
        whole, got = (rope.run(y).reshape(*y.x.shape[:3], -1) for y in (x, some))
        assert differing([np.ascontiguousarray(whole[1:, 2:4])], [got]) == [0]


INSERTED = {
    "rows": ({"pooled": False}, {"lengths": (9, 3, 1, 30), "s": 2}),
    "blocks": ({"pooled": True, "running": False}, {"lengths": (8, 6, 5, 4), "s": 2, "ratio": 4, "blocks": 2}),
    "long blocks": ({"running": True}, {"lengths": (128, 1, 37, 65), "s": 2, "ratio": 32, "steps": 4}),
}


@pytest.mark.parametrize(("choices", "sizes"), INSERTED.values(), ids=INSERTED)
@pytest.mark.parametrize("packing", ["", "v4_fp8"])
def test_inserted_entries_have_the_same_bits(choices, sizes, packing):
    """Pooled, normed, turned and packed: of a sequence among four, and alone. Its ring and sums, too."""
    assert_inserted_alike({"packing": packing, "rope": False, **choices}, sizes)


@pytest.mark.parametrize("packing", ["", "v32_fp8"])
def test_inserted_latents_have_the_same_bits(packing):
    """Of 512 numbers and RoPE's."""
    assert_inserted_alike({"packing": packing, "rope": True}, INSERTED["rows"][1])


def assert_inserted_alike(choices, sizes):
    wanted = {"d": 512, "dtype": "bfloat16", **choices}
    found = [v for v in native.built(KvInsert) if v.arch == "sm_90a" and wanted.items() <= v.choices.items()]
    if not found:
        pytest.skip("not built")
    x, i = kv_insert.Problem.of(found[0], **sizes), slice(0, 1) if "ratio" in sizes else slice(3, 4)
    names = ("bounds", "joined", "state", "sums", "folded", "history", "angle", "block_table")
    alone = kv_insert.run(replace(x, pages=1, **{name: getattr(x, name)[i] for name in names}))
    assert np.any(alone[0] != kv_insert.UNWRITTEN)
    assert differing((y[i] for y in kv_insert.run(x)), alone) == [0] * 4


def of_positions(f):
    return lambda x: f(x, jnp.arange(x.shape[1], dtype=jnp.int32)[None] + 7, Rope(64))


def packed(layout):
    return lambda x: dequantize_cache(quantize_cache(x.reshape(-1, 8, 512), layout), layout).reshape(x.shape)


OF_ROWS = {
    "norm": lambda x: rms_norm(x, jnp.linspace(0.5, 1.5, 512), 1e-6),
    "RoPE": of_positions(rope_of_rows),
    "norm and RoPE": of_positions(functools.partial(rope_of_normed, eps=1e-6)),
    **{layout: packed(layout) for layout in ("v4_fp8", "v4_fp4", "v41_fp8", "v41_fp4")},
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_what_layers_do_with_rows_has_the_same_bits(name):
    """As XLA computes it here: of all rows of a call, and of the first ones of one sequence."""
    f, x = jax.jit(OF_ROWS[name]), normal(0, 3, 40, 8, 512, std=2)
    x = x if name.startswith("v4") else x.astype(np.float32)  # which hides no bit
    whole, some = (np.asarray(f(jnp.asarray(y))) for y in (x, x[1:2, :3]))
    assert differing([np.ascontiguousarray(whole[1:2, :3])], [some]) == [0]


def test_merged_rows_have_the_same_bits():
    """As XLA computes them here."""
    parts = [(normal(i, 3, 5, 8, 64), normal(i + 9, 3, 5, 8).astype(np.float32)) for i in range(3)]
    whole = jax.jit(merge)(parts)
    some = jax.jit(merge)([(o[1:2, 2:4], lse[1:2, 2:4]) for o, lse in parts])
    assert differing(map(np.asarray, some), (np.asarray(x)[1:2, 2:4] for x in whole)) == [0, 0]


def test_head_summed_probabilities_have_the_same_bits():
    """Without a mode: of a query in a batch, and alone with a longer list, whose end is absent."""
    variant = native.variant_of("head_summed_probabilities_sm_90a_d512_bfloat16")
    if variant.key not in native.built_keys():
        pytest.skip(f"{variant.key} is not built")
    x = probabilities.Problem.of(variant, b=2, s_q=2, h_q=20, s_kv=200, topk=140)
    longer = np.pad(x.indices[1:, 1:], ((0, 0), (0, 0), (0, 70)), constant_values=-1)
    alone = replace(x, q=x.q[1:, 1:], lse=x.lse[1:, 1:], indices=longer, k=x.k[1:])
    whole, got = probabilities.run(variant, x), probabilities.run(variant, alone, processors=1)
    assert differing([whole[1, 1]], [got[0, 0, :140]]) == [0]


# ---- random pairs of calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["list", "causal", "probabilities", "gradient", "merge"])
def test_the_program_compares_the_same_queries(monkeypatch, kind):
    """By numbers of the reference: what is called random is the call alone."""
    for name, value in (("TOKENS", 24), ("SEQUENCES", 2), ("WINDOW", 10)):
        monkeypatch.setattr(same_bits, name, value)
    w = same_bits.World(kind, "v4_fp8" if kind == "list" else "rows", 40, "bfloat16", 8, seed=3, exact=False)
    calls = [same_bits.Prompt((1, 0), 7, 5, before=3, room=2)]
    calls += [same_bits.Step((1, 0, 1), (24, 9, 1), 2, page=8, ring=12, room=5, shuffled=4)] * (kind == "list")
    for call in calls:
        n, wrong = same_bits.differing(w, call)
        assert n == {same_bits.Prompt: 10, same_bits.Step: 5}[type(call)] and wrong == 0
        w.alone[0][:] = np.roll(w.alone[0], 1, axis=1)  # another query's
        assert same_bits.differing(w, call)[1] == n
        w.alone[0][:] = np.roll(w.alone[0], -1, axis=1)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("h", [8, 16, 32, 33, 64, 128])
def test_the_order_on_a_chip_is_that_of_the_contract(h):
    """Of a window of 70 keys and a list of 58, and of a list of 256."""
    blocks, tiles = blocks_of((70, 58))
    v, q = jnp.asarray(probing(blocks, 128, 512))[None], jnp.zeros((1, 1, h, 512), jnp.bfloat16)
    o, _ = dsv4_attention(
        q, v[:, :70], v[:, 70:], indices=jnp.arange(58)[None, None], q_offset=69, batch_invariant=True
    )
    assert read_off(np.asarray(o[0, 0, -1], np.float32), blocks) == [
        in_turn(blocks, x) for x in canonical(tiles, h <= 32)
    ]
    blocks, tiles = blocks_of((256,))
    v = jnp.asarray(probing(blocks, 256, 512))[None]
    o, _ = sparse_fmha(q, v, jnp.arange(256)[None, None], batch_invariant=True)
    assert read_off(np.asarray(o[0, 0, 0], np.float32), blocks) == [
        in_turn(blocks, x) for x in canonical(tiles, h <= 32)
    ]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_random_calls_have_the_same_bits():
    compared, found = same_bits.fuzz(30)
    assert not found and compared["all queries"] > 500


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_without_the_mode_they_have_not():
    """So the comparison can fail."""
    assert same_bits.fuzz(20, invariant=False)[1]
