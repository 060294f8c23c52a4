"""A step's products, `layers/_few_rows.py`: by definition on a CPU and on meshes, by kernels on a GPU."""

import functools
import itertools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import PackedMatrix, pack_matrix
from jax_dsv4_fmha._bench.layer import LayerRow
from jax_dsv4_fmha._bench.measure import KERNEL_BY_KERNEL, interleaved
from jax_dsv4_fmha._definitions.slabs import BLOCK
from jax_dsv4_fmha._host import few_rows_product as raw
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha.layers import Shared, _few_rows, from_config

from .helpers import collectives
from .test_layer_config import published
from .test_layers import MODELS

B, S, H, R, G, N = 2, 3, 4, 32, 2, 24
RANK = 256  # of a query that is left to be normed
SCALE = 0.75
HADAMARD = np.array([[(-1.0) ** (i & j).bit_count() for i in range(raw.INDEX_D)] for j in range(raw.INDEX_D)])
HADAMARD *= raw.INDEX_D**-0.5
EPS = 1e-3


def normal(seed, *shape, dtype=jnp.bfloat16):
    x = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return (x * shape[-2] ** -0.5 if len(shape) > 3 else x).astype(dtype)


def operands(b=B, s=S, h=H, rank=R, groups=G, n=N, dtype=jnp.bfloat16):
    angle = jax.random.uniform(jax.random.key(9), (b, s, raw.DIMS // 2)) * 9
    return {
        "x": normal(0, b, s, rank, dtype=dtype),
        "wx": normal(1, rank, n, dtype=dtype) * rank**-0.5,
        "wq": normal(2, rank, h, raw.HEAD, dtype=dtype) * rank**-0.5,
        "o": normal(3, b, s, h, raw.HEAD, dtype=dtype) * raw.HEAD**0.5,
        "wa": normal(4, groups, h // groups * raw.HEAD, n, dtype=dtype) * (h * raw.HEAD) ** -0.5,
        "wb": normal(5, groups, n, rank, dtype=dtype) * n**-0.5,
        "wl": normal(6, rank, RANK + 72, dtype=dtype) * rank**-0.5,
        "gain": jnp.geomspace(0.5, 2, RANK),
        "wh": normal(7, RANK, h, raw.HEAD, dtype=dtype) * RANK**-0.5,
        "wi": normal(8, RANK, 64, raw.INDEX_D, dtype=dtype) * RANK**-0.5,
        "table": jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1).reshape(b, s, raw.DIMS),
    }


COLUMNS = {"wx": 1, "wq": 1, "wa": 2, "wb": 2, "wl": 1, "wh": 1, "wi": 1}
"""matrices, and where the axes of their columns begin: those before are of the channels that they take"""


def in_fp8(given):
    """These operands with packed matrices."""
    return given | {name: of_fp8(given[name], axes, name == "wa") for name, axes in COLUMNS.items()}


def of_fp8(w, axes, several):
    """w with scales by which the greatest number of a block is between 172 and 345; none is a power of two."""
    n = math.prod(w.shape[axes:])
    x = np.swapaxes(np.asarray(w, np.float32).reshape(*w.shape[:several], -1, n), -1, -2)
    filled = np.pad(x, [(0, 0)] * several + [(0, -m % BLOCK) for m in x.shape[-2:]])
    blocks = filled.reshape(*x.shape[:-2], filled.shape[-2] // BLOCK, BLOCK, filled.shape[-1] // BLOCK, BLOCK)
    scales = np.float32(1.3) * np.exp2(np.ceil(np.log2(np.abs(blocks).max((-3, -1)) / 448))).astype(np.float32)
    whole = np.repeat(np.repeat(scales, BLOCK, -2), BLOCK, -1)[..., : x.shape[-2], : x.shape[-1]]
    return pack_matrix((x / whole).astype(jnp.float8_e4m3fn), scales, w.shape)


def all_of(kernel, x, wx, wq, o, wa, wb, wl, gain, wh, wi, table):
    low, left = _few_rows.grouped_product(o, wa, table, kernel), {}
    if kernel:
        of_x, c = _few_rows.product_and_low_rank(x, wl, gain)
        how = {"column": RANK, "scale": SCALE, "eps": EPS}
        indexed, weights = _few_rows.index_query(c, wi, table, of_x, False, **how)
        left = {
            "of x": of_x,
            "normed heads": _few_rows.query_heads(c, wh, table, EPS, kernel),
            "indexed": indexed,
            "weights": weights,
        }
        if x.dtype == jnp.bfloat16:  # as packed caches are
            codes, scaled = _few_rows.index_query(c, wi, table, of_x, True, **how)
            left["codes"] = codes.astype(jnp.float32) * (scaled / weights)[..., None]
    return left | {
        "float32": _few_rows.plain_product(x, wx, jnp.float32, kernel),
        "plain": _few_rows.plain_product(x, wx, x.dtype, kernel),
        "heads": _few_rows.query_heads(_few_rows.LowRank(x), wq, table, EPS, kernel),
        "grouped": low,
        "summed": _few_rows.summed_product(low, wb, kernel),
    }


def by_numpy(**given):
    """float64, from the same operands."""
    dtype = given["x"].dtype
    plain = (a.unpacked() if isinstance(a, PackedMatrix) else a for a in given.values())
    x, wx, wq, o, wa, wb, wl, gain, wh, wi, table = (np.asarray(a, np.float64) for a in plain)
    turns = table[:, :, None, ::2] + 1j * table[:, :, None, 1::2]

    def turned(y, turns):
        y, n = y.copy(), raw.DIMS
        pairs = (y[..., -n::2] + 1j * y[..., -n + 1 :: 2]) * turns
        y[..., -n::2], y[..., -n + 1 :: 2] = pairs.real, pairs.imag
        return y

    def normed(q):
        return q / np.sqrt(np.mean(q * q, -1, keepdims=True) + EPS)

    q = turned(normed(np.einsum("bsk,khd->bshd", x, wq)), turns)
    of_x = x @ wl
    query = of_x[..., :RANK]
    left = np.asarray(jnp.asarray(query * gain, dtype), np.float64)
    c = left / np.sqrt(np.mean(query * query, -1, keepdims=True) + EPS)
    indexed = turned(np.einsum("bsk,khd->bshd", c, wi), turns) @ HADAMARD
    back = turned(o, turns.conj()).reshape(*o.shape[:2], len(wa), -1)
    low = np.einsum("bsgk,gkn->bsgn", np.asarray(jnp.asarray(back, dtype), np.float64), wa)
    rounded = np.asarray(jnp.asarray(low, dtype), np.float64)
    return {
        "float32": x @ wx,
        "plain": x @ wx,
        "heads": q,
        "grouped": low,
        "summed": np.einsum("bsgn,gnm->bsm", rounded, wb),
        "of x": of_x,
        "normed heads": turned(normed(np.einsum("bsk,khd->bshd", c, wh)), turns),
        "indexed": indexed,
        "weights": SCALE * of_x[..., RANK : RANK + 64],
        "codes": indexed,
    }


def assert_near(got, want, k=R):
    """A tensor core rounds its float32 sum toward zero at each 16 of the `k` terms, by half of a unit on average: with
    that in NumPy, one part's sum of 4360 terms is up to 3.3 * 2**-18 off, and that of four parts 0.7 * 2**-18.
    """
    in_float32 = max(2**-18, 2**-24 * k / 16)
    for name, y in got.items():
        size = np.abs(want[name]) + np.sqrt(np.mean(want[name] ** 2))
        bits = 2**-6 if name == "indexed" else 2**-7
        most = 2**-3 if name == "codes" else in_float32 if y.dtype == jnp.float32 else bits
        assert (np.abs(np.asarray(y, np.float64) - want[name]) <= most * size).all(), name


FORMS = pytest.mark.parametrize("form", [lambda given: given, in_fp8], ids=["bfloat16", "packed"])


@pytest.mark.usefixtures("built")
@FORMS
@pytest.mark.parametrize("kernel", [False, True])
def test_products_are_right(kernel, form):
    given = form(operands(n=BLOCK))
    got = jax.jit(lambda x: all_of(kernel, **x))(given)
    in_float32 = {name for name, y in got.items() if y.dtype == jnp.float32}
    assert in_float32 == {"float32", *(["of x", "weights", "codes"] if kernel else [])}
    assert_near(got, by_numpy(**given))


@pytest.mark.usefixtures("built")
@FORMS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_heads_and_batch_may_be_sharded(kind, form):
    """The one collective is the sum over groups of heads."""
    given = form(operands(b=4, n=BLOCK))
    want = by_numpy(**given)
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    specs = {"x": P("batch"), "wq": P(None, "heads"), "o": P("batch", None, "heads"), "table": P("batch")}
    specs |= {"wx": P(), "wa": P("heads"), "wb": P("heads")}
    specs |= {"wl": P(), "gain": P(), "wh": P(None, "heads"), "wi": P()}
    if isinstance(given["wq"], PackedMatrix):  # heads are tiles, and groups of heads are slabs of what sums over them
        specs |= {"wq": P("heads"), "wb": P(None, "heads"), "wh": P("heads")}
    given = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in given.items()}
    compiled = jax.jit(lambda x: all_of(True, **x)).lower(given).compile()
    assert_near(compiled(given), want)
    assert set(collectives(compiled)) == {"all-reduce"}


def test_the_gradient_of_a_matrix_of_groups_is_one_product():
    """It is made in the order of the matrix. Of three axes, XLA moves no transpose into the product: devices that share
    the groups then summed the gradient turned over, and the optimizer turned it back.
    """
    x, w = normal(0, B, S, G, RANK), normal(1, G, RANK, N)
    gradient = jax.grad(lambda w: _few_rows.summed_product(x, w, kernel=False).astype(jnp.float32).sum())
    moved = [e.params["permutation"] for e in jax.make_jaxpr(gradient)(w).eqns if e.primitive.name == "transpose"]
    assert moved == [(1, 0)]


def test_no_part_of_k_is_empty_where_devices_share_the_groups(monkeypatch):
    """One device cuts 8 groups of 64 into 8 parts; one of two has 4 groups, so it has no more parts."""
    seen, y = [], jnp.zeros((2, 1, 1, 256), jnp.bfloat16)
    monkeypatch.setattr(raw, "few_rows_product", lambda x, w, *, dtype, parts: seen.append((w.shape, parts)) or (y,))
    x, w = jnp.ones((2, 1, 8, 64), jnp.bfloat16), jnp.ones((1, 8, 64, 256), jnp.bfloat16)
    for groups in (8, 4, 1):
        _few_rows._summed_kernel(x[:, :, :groups], w[:, :groups], parts=raw.parts(8 * 64, 256, 1))
    assert seen == [((1, 64 * parts, 256), parts) for parts in (8, 4, 1)]


@pytest.mark.usefixtures("built")
@FORMS
def test_products_under_vmap(form):
    given = form(operands(n=BLOCK))
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), given)
    got = jax.jit(jax.vmap(lambda x: all_of(True, **x)))(twice)
    assert_near({name: y[1] for name, y in got.items()}, by_numpy(**given))


def test_how_k_is_cut():
    """V4-Flash's matrices at ratios 0, 128 and 4, wo_a and wo_b; a small one, and one of many columns."""
    sizes = [(4096, 1536, 1), (4096, 2560, 1), (4096, 4160, 1), (4096, 1024, 8), (8192, 4096, 1)]
    assert [raw.parts(*x) for x in sizes] == [8, 4, 4, 2, 4]
    assert raw.parts(128, 64, 1) == 2 and raw.parts(1024, 1 << 20, 1) == 1
    assert [raw.parts(*x, BLOCK) for x in sizes] == [8, 5, 3, 2, 3] and raw.parts(128, 64, 1, BLOCK) == 1


def test_every_kernel_is_one_of_a_published_model(monkeypatch):
    """And every product of a step of V4-Flash, V4-Pro and V4.1 that asks for a kernel has one, whole and joined."""
    asked, shipped_for = set(), library.shipped_for

    def noted(op, **choices):
        if op.startswith("few_rows_product"):
            asked.add((op, *(choices.get(name, 1) for name in ("dtype", "to_float32", "to_fp8", "parts"))))
        return shipped_for(op, **choices)

    monkeypatch.setattr(library, "shipped_for", noted)

    def steps(layers, is_joined, key):
        x, shared = jnp.zeros((4, 1, layers[0].hidden), jnp.bfloat16), Shared()
        for layer in layers:
            params = layer.init(key, jnp.bfloat16)
            params, cache = (layer.joined(params), jnp.float8_e4m3fn) if is_joined else (params, jnp.bfloat16)
            out = layer.step(params, x, layer.cache(4, 65536, cache), shared, lengths=60000)
            shared = shared.after(out)
        return out.y

    for name, is_joined in itertools.product(("flash", "pro", "v4.1"), (False, True)):
        layers = [*dict.fromkeys(from_config(published(name)))]
        jax.eval_shape(functools.partial(steps, layers, is_joined), jax.random.key(0))
    kernels = (v for v in library.SHIPPED if v.family == "few_rows_product" and not v.choices["weights"])
    fields = ("dtype", "to_float32", "to_fp8", "parts")
    assert asked == {(v.op, *(v.choices[name] for name in fields)) for v in kernels}


FIRST, HEADS, LAST = (
    ["few_rows_product_and_low_rank", "kv_insert"],
    ["few_rows_product_norm_rope"],
    ["few_rows_product_of_turned", "few_rows_product"],
)
CALLS = {
    0: [*FIRST, *HEADS, "seen_slots", "attention", *LAST],
    4: [
        *(*FIRST, "kv_insert_pooled", "kv_insert_pooled", *HEADS),
        *("few_rows_product_index_query", "paged_lightning_indexer", "seen_slots", "attention", *LAST),
    ],
    128: [*FIRST, "kv_insert_running", *HEADS, "seen_slots", "attention", *LAST],
}
LAUNCHES = {"bfloat16": {0: 8, 4: 14, 128: 9}, "float8_e4m3fn": {0: 8, 4: 15, 128: 9}}
"""of a step by ratio: XLA makes tables of RoPE in one kernel, and at ratio 4 what an indexer sees in another one. An
indexer's call has two kernels, and in FP8 that of attention to chosen entries has two."""


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("ratio", CALLS)
def test_calls_of_a_step(ratio, cache):
    """Of V4-Flash's layers, for any GPU."""
    row = LayerRow(b=64, s_q=1, s_kv=16384, ratio=ratio, cache=cache)
    layer = row.layer

    def made(key):
        params = layer.joined(layer.init(key, jnp.bfloat16))
        return params, jnp.zeros((64, 1, layer.hidden), jnp.bfloat16), layer.cache(64, 16384, jnp.dtype(cache))

    shapes = jax.eval_shape(made, jax.random.key(0))
    traced = jax.jit(layer.step, donate_argnums=2).trace(*shapes, lengths=jax.ShapeDtypeStruct((64,), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    attention = "dsv4_decode" if ratio or cache != "bfloat16" else "mla_sparse_fwd"
    wanted = [attention if name == "attention" else name for name in CALLS[ratio]]
    assert sorted(re.findall(r"custom_call @dsv4_fmha_(\w+)", text)) == sorted(wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("ratio", CALLS)
def test_launches_of_a_step(ratio, cache):
    row = LayerRow(b=64, s_q=1, s_kv=16384, ratio=ratio, cache=cache)
    step = row.compiled(row.inputs(1), KERNEL_BY_KERNEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the type of event.stats warns, and aborts where warnings are errors
        found = interleaved({"ours": step}, 1, "hlo_op")["ours"]
    assert found["launches"] == LAUNCHES[cache][ratio], found["kernels"]


SIZES = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 64}
SIZES |= {"num_attention_heads": 64, "hidden_size": 512, "q_lora_rank": 256, "o_groups": 8, "o_lora_rank": 128}


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
@pytest.mark.parametrize("sizes", [{}, {"o_groups": 2, "o_lora_rank": 1024}, {"hidden_size": 8192, "o_lora_rank": 64}])
def test_products_of_a_step_are_kernels(sizes, kind, cache):
    """Whatever the matrices: one that wants a number of parts that no kernel has takes another number."""
    layer = from_config(MODELS["v4"] | SIZES | sizes)[kind]

    def made(key):
        params = layer.joined(layer.init(key, jnp.bfloat16))
        return params, jnp.zeros((2, 1, layer.hidden), jnp.bfloat16), layer.cache(2, 48, jnp.dtype(cache))

    step = jax.jit(lambda *args: layer.step(*args, lengths=5, batch_invariant=True).y)
    text = step.trace(*jax.eval_shape(made, jax.random.key(0))).lower(lowering_platforms=("cuda",)).as_text()
    assert "few_rows_product_of_turned" in text
    assert "dot_general" not in text


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("rank", "groups", "n"), [(2632, 4, 2184), (4360, 1, 4360)], ids=["a few parts", "fewer"])
@pytest.mark.parametrize("rows", [1, 7, 64, 65, 128])
def test_kernels_are_right(rows, rank, groups, n):
    """Of sizes that no tile divides, each product by a kernel."""
    given = operands(b=rows, s=1, h=16, rank=rank, groups=groups, n=n)
    run = jax.jit(lambda x: all_of(True, **x))
    assert run.lower(given).as_text().count("custom_call @dsv4_fmha_few_rows_product") == 9
    assert_near(run(given), by_numpy(**given), rank)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("rank", "groups", "n"), [(2632, 4, 2176), (4360, 1, 4352)], ids=["a few parts", "fewer"])
@pytest.mark.parametrize("rows", [1, 7, 64, 65, 128])
def test_kernels_of_packed_matrices_are_right(rows, rank, groups, n):
    """Of sizes that no tile divides, each product by a kernel."""
    given = in_fp8(operands(b=rows, s=1, h=16, rank=rank, groups=groups, n=n))
    run = jax.jit(lambda x: all_of(True, **x))
    assert run.lower(given).as_text().count("custom_call @dsv4_fmha_few_rows_product") == 9
    assert_near(run(given), by_numpy(**given), rank)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_bits_of_packed_products_do_not_depend_on_other_rows():
    given = in_fp8(operands(b=128, s=1, h=16, rank=2632, groups=4, n=2176))
    run = jax.jit(lambda x: all_of(True, **x))
    whole = run(given)
    for rows in (slice(0, 1), slice(3, 60), slice(40, 128)):
        part = run(given | {name: given[name][rows] for name in ("x", "o", "table")})
        for name, y in part.items():
            assert np.array_equal(np.asarray(y), np.asarray(whole[name])[rows]), name


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["bfloat16 matrices", "packed"])
def test_a_step_s_bits_do_not_depend_on_the_batch(kind, cache, is_packed):
    """A whole layer steps 128 sequences of different lengths, and then some of them: the attention of one shares out
    columns, that of 100 does not, and products take a tile of rows or two.
    """
    layer = from_config(MODELS["v4"] | SIZES)[kind]
    params = layer.init(jax.random.key(0), jnp.bfloat16)
    params = layer.joined(layer.packed(params) if is_packed else params)
    x, rng = normal(1, 128, 40, 512), np.random.default_rng(0)
    lengths = jnp.asarray(rng.integers(1, 40, 128), jnp.int32)
    quickly = {"xla_gpu_autotune_level": "0"}  # compiled; the prompt's products may have any bits
    prompt = jax.jit(
        lambda x, n: layer(params, x, layer.cache(128, 48, jnp.dtype(cache)), lengths=n).cache, compiler_options=quickly
    )
    first = prompt(x, lengths)
    last = jnp.take_along_axis(x, lengths[:, None, None], 1)
    step = jax.jit(lambda x, cache, n: layer.step(params, x, cache, lengths=n, batch_invariant=True).y)
    whole = np.asarray(step(last, first, lengths + 1)).view(np.uint16)
    for b in (1, 33, 100):
        some = rng.permutation(128)[:b]
        y = step(last[some], jax.tree.map(lambda a, some=some: a[some], first), lengths[some] + 1)
        np.testing.assert_array_equal(np.asarray(y).view(np.uint16), whole[some])
