"""The kernel of FP8 products beside what its sums are: `hopper_e4m3` says so, and how far a number may be off."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from interpreter.kernels import attention
from interpreter.kernels.native import variant_of
from jax_dsv4_fmha import dequantize_cache, dsv4_attention, dsv4_decode
from jax_dsv4_fmha._definitions import e4m3
from jax_dsv4_fmha._dispatch import attend, plan
from jax_dsv4_fmha._dispatch.modes.fp8_products import Fp8Products
from jax_dsv4_fmha._host import key_codes
from jax_dsv4_fmha._host.mode import name_of
from jax_dsv4_fmha.layers import from_config
from kernels.abi import Forward
from kernels.variants import VARIANTS
from tests import hopper_e4m3
from tests.helpers import assert_right
from tests.test_fp8_products import BF16_ROPE, CHUNKS, E4M3_PRODUCTS, ROPE, by_e4m3, chunk, operands, relative

E4M3_KERNELS = [v for v in VARIANTS if isinstance(v, Forward) and v.mode.is_e4m3]


@contextlib.contextmanager
def modelled(**how):
    """Calls of the kernel are of `hopper_e4m3` in this context, with the same operands. o is complex, with half of its
    interval as the imaginary part."""

    def run(launch, q, scale):
        made = hopper_e4m3.OF_OP[name_of(launch.op, launch.mode)](q, *launch.operands, scale=scale, **how)
        return jax.lax.complex(made.o, made.slack), made.lse

    def definition(mode, inner):
        return lambda q, sources, sink, scale: plan.launch(q, sources, [mode], sink).run(q, scale)

    with mock.patch.object(plan.Launch, "run", run), mock.patch.object(Fp8Products, "definition", definition):
        attend._ops.cache_clear()
        yield
    attend._ops.cache_clear()


@pytest.fixture
def codes_by_definition(monkeypatch):
    """Puts the definition in the place of `key_codes`. A slot without a key is NaN."""

    def made(pool, slots, packing, rope):
        rows = (dequantize_cache(pool, packing) if packing else pool).reshape(
            -1, pool.shape[-1] if not packing else 512
        )
        keys = jnp.where((slots >= 0)[..., None], rows[jnp.maximum(slots, 0)].astype(jnp.float32), jnp.nan)
        return rows_of(keys, rope)

    monkeypatch.setattr(key_codes, "key_codes", made)


def rows_of(keys, rope=False):
    """Codes of keys, as `key_codes` makes them, by definition."""
    unit = e4m3.unit_of_key(keys)

    def in_bytes(x):
        made = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.float8_e4m3fn)
        return made.reshape(*x.shape[:-1], 2 * x.shape[-1])

    exact = [in_bytes(keys[..., -ROPE:] / unit)] if rope else []
    tail = in_bytes(jnp.concatenate([unit, jnp.zeros((*unit.shape[:-1], 7))], -1))
    return jnp.concatenate([e4m3.codes(keys, unit), *exact, tail], -1)


def assert_within(got, modelled):
    made, lse = modelled
    hopper_e4m3.assert_within(got, hopper_e4m3.Numbers(made.real, lse, made.imag))


@pytest.mark.usefixtures("codes_by_definition")
@pytest.mark.parametrize(
    ("case", "layout", "precision"),
    [
        *((case, layout, E4M3_PRODUCTS) for case in CHUNKS for layout in ("bfloat16", "v41_fp4")),
        *((case, "v4_fp8", BF16_ROPE) for case in ("rows", "pages, dense")),
    ],
)
def test_what_a_kernel_is_given_is_what_the_definition_takes(case, layout, precision):
    """Its keys, lists and sink; with sums in float32 that is the definition."""
    args, how = chunk(layout, **CHUNKS[case])
    how |= {"precision": precision}
    want = dsv4_decode(*args, **how, implementation="reference")
    with modelled(sums=hopper_e4m3.in_float32):
        o, lse = dsv4_decode(*args, **how)
    assert_right((o.real.astype(jnp.bfloat16), lse), want)


def test_sums_are_those_of_an_h100():
    """Sums of 512 products, of ten kinds of numbers; lse of one key has them, but for 2e-6 of it."""
    with np.load(Path(__file__).parent / "data" / "hopper_e4m3.npz") as record:
        q, k = (jnp.asarray(record[x].view(ml_dtypes.float8_e4m3fn), jnp.float32) for x in "qk")
        want = record["sums"]

    def share_of_right(**changed):
        with changes(changed):
            sums = hopper_e4m3.in_place(q, k[:, None])[..., 0]
        return (np.abs(sums - want) <= 2e-6 * np.abs(want) + 1e-4).mean(1)

    assert (share_of_right() == 1).all()
    for changed in ({"BITS": 12}, {"BITS": 14}, {"DEPTH": 16}, {"LEAST": -9}, {"_cut": lambda x: x}):
        assert share_of_right(**changed).min() < 0.99, changed


@pytest.mark.parametrize("kind", ["normal", "wide", "positive"])
def test_what_sums_lose(kind):
    """The bound is not broken, and of ten thousand sums some lose a twentieth of it, whatever the numbers are."""
    rng = np.random.default_rng(0)
    a, b = 40 * rng.standard_normal((2, 100, 512))
    if kind == "wide":
        a, b = np.sign(a) * 2 ** rng.uniform(-9, 7.9, a.shape), np.sign(b) * 2 ** rng.uniform(-9, 7.9, b.shape)
    if kind == "positive":
        a, b = abs(a), abs(b)
    a, b = (np.clip(x, -240, 240).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (a, b))
    lost = np.abs(hopper_e4m3.in_place(a, b) - a.astype(np.float64) @ b.T.astype(np.float64))
    bound = np.asarray(hopper_e4m3.lost_at_most(a, b))
    assert (lost <= bound).all() and (lost / bound).max() > 0.05


def changes(names):
    return mock.patch.multiple(hopper_e4m3, **names) if names else contextlib.nullcontext()


def modelled_list(sums=hopper_e4m3.in_place, s_q=6, h=3, unit=1.0, std=1.0, seed=0):
    """The numbers of a call over 200 chosen keys, in three tiles and a part of one."""
    rng = np.random.default_rng(seed)
    q, keys = (jnp.asarray(std * rng.standard_normal(x), jnp.bfloat16) for x in ((1, s_q, h, 512), (1, 300, 512)))
    rows = rows_of(keys.astype(jnp.float32))
    rows = rows.at[:, ::7, -15].set(rows_of(unit * keys.astype(jnp.float32))[:, ::7, -15])
    rows = rows.at[:, ::7, -16].set(rows_of(unit * keys.astype(jnp.float32))[:, ::7, -16])
    sources = [hopper_e4m3.Listed(rows, jnp.asarray(rng.integers(-2, 300, (1, s_q, 200)), jnp.int32))]
    sink = jnp.asarray(rng.standard_normal(h), jnp.float32)
    return hopper_e4m3.numbers(q, sources, sink, 512**-0.5, sums)


FAULTS = {
    "sums of P V go on in place, for two tiles": {"TILE": 128},
    "an accumulator with one more bit": {"BITS": 14},
    "an accumulator with one bit less": {"BITS": 12},
    "products of half of the depth": {"DEPTH": 16},
    "weights rounded in another place": {"HEAD": 1},
}


@pytest.mark.parametrize("fault", [*FAULTS, "sums in float32", "the unit of other keys"])
def test_a_kernel_that_sums_otherwise_is_found(fault):
    """The interval holds what is rounded to the nearest, and nothing of a kernel with such a fault."""
    want = modelled_list()
    right = want.o.astype(jnp.bfloat16), want.lse
    modelled = jax.lax.complex(want.o, want.slack), want.lse
    assert_within(right, modelled)
    changed = {"sums": hopper_e4m3.in_float32} if "float32" in fault else {"unit": 2.0} if "unit" in fault else {}
    with changes(FAULTS.get(fault, {})):
        got = modelled_list(**changed)
    with pytest.raises(AssertionError):
        assert_within((got.o.astype(jnp.bfloat16), want.lse if fault.startswith("sums of P V") else got.lse), modelled)


@pytest.mark.parametrize("variant", E4M3_KERNELS, ids=lambda v: v.key)
def test_operands_of_kernels_are_judged_by_a_gpus_sums(variant):
    """With sums in float32 numbers are float64's, by the bounds of kernels; as sums of a GPU they are wrong."""
    x, scale = attention.operands(variant, s_q=8, h_q=5), variant.d**-0.5
    o, lse, _ = hopper_e4m3.of_operands(x, scale, sums=hopper_e4m3.in_float32)
    in_float32 = o.astype(jnp.bfloat16), lse
    attention.assert_right([*map(np.asarray, in_float32)], x, scale)
    modelled = hopper_e4m3.of_operands(x, scale)
    on_a_gpu = modelled.o.astype(jnp.bfloat16), modelled.lse
    hopper_e4m3.assert_right(on_a_gpu, x, scale)
    for got in (in_float32, (in_float32[0], on_a_gpu[1]), (on_a_gpu[0], in_float32[1])):
        with pytest.raises(AssertionError):
            hopper_e4m3.assert_within(got, modelled)


@pytest.mark.parametrize("key", [v.key for v in E4M3_KERNELS if v.mode.keeps_rope])
def test_cuts_of_rope_s_products_are_within_the_bound(key):
    """Sums of 22 to 24 bits after the leading one are, and those of e4m3's 13 are not. Where logits are thousands,
    `LOST_OF_ROPE` is what makes room for them.
    """
    variant = variant_of(key)
    x, scale = attention.operands(variant, s_q=2, b=1, topk=3, h_q=5), variant.d**-0.5
    with jax.enable_x64(True):

        def wrong(bits, scale):
            made = hopper_e4m3.of_operands(x, scale)
            o, *_ = hopper_e4m3.of_operands(x, scale, added=functools.partial(hopper_e4m3.cut_after, bits=bits))
            low, high = ((made.o + sign * made.slack).astype(jnp.bfloat16) for sign in (-1, 1))
            return int(((o.astype(jnp.bfloat16) < low) | (o.astype(jnp.bfloat16) > high)).sum())

        assert [wrong(bits, of) for of in (scale, scale * 2.0**-9) for bits in (22, 24)] == [0, 0, 0, 0]
        assert wrong(13, scale * 2.0**-9) > 500
        with changes({"LOST_OF_ROPE": 0.0}):
            assert wrong(22, scale) > 500  # of 5120


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_gpu_sums_so():
    """A query that sees one key has its sum as lse."""
    rng = np.random.default_rng(1)
    q, k = (np.exp2(rng.uniform(-9, 7.9, x)) * rng.choice([-1, 1], x) for x in ((3, 8, 128, 512), (3, 8, 512)))
    q[1], k[1] = 40 * np.abs(rng.standard_normal(q[1].shape)), 40 * rng.standard_normal(k[1].shape)
    q[2], k[2] = (40 * rng.standard_normal(x.shape) for x in (q[2], k[2]))
    q, k = (np.clip(x, -240, 240).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (q, k))
    q[..., 0], k[:, 0], k[..., 0] = 128, 0, 0
    k[..., 1] = 128  # units are 1
    _, lse = jax.jit(lambda *x: by_e4m3(*x, window=1, scale=2.0**-4, implementation="cubin"))(
        *(jnp.asarray(x, jnp.bfloat16) for x in (q, k))
    )
    sums = hopper_e4m3.in_place(jnp.asarray(q), jnp.asarray(k)[:, :, None])[..., 0]
    np.testing.assert_allclose(lse * 2.0**4, sums, rtol=2e-6, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
@pytest.mark.parametrize("h", [5, 64, 80, 128])
@pytest.mark.parametrize("compressed", ["chosen", "dense", "none"])
def test_every_number_of_the_kernel(compressed, h, precision):
    (q, w, c), how = operands(s_q=70, h=h, s_c=300, topk=130, d=512)
    if compressed != "chosen":
        del how["indices"]
    args, how = (
        ((q, w), how) if compressed == "none" else ((q, w, c), how | {"ratio": 4} if compressed == "dense" else how)
    )
    got, want = as_kernel_and_model(functools.partial(dsv4_attention, precision=precision, **how), args)
    assert_within(got, want)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("layout", "h"), [("bfloat16", 128), ("v4_fp8", 128), ("v41_fp8", 64), ("v4_fp4", 5), ("v41_fp4", 80)]
)
@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
@pytest.mark.parametrize("case", CHUNKS)
def test_every_number_of_the_kernel_over_caches(case, layout, h, precision):
    d = {"h": h, "s_q": 70, "s_c": 300 if CHUNKS[case].get("s_c", 300) == 300 else 13, "topk": 130}
    args, how = chunk(layout, **CHUNKS[case] | d)
    got, want = as_kernel_and_model(functools.partial(dsv4_decode, precision=precision, **how), args)
    assert_within(got, want)


def as_kernel_and_model(f, args):
    got = jax.jit(lambda *x: f(*x, implementation="cubin"))(*args)
    with modelled():
        return got, jax.jit(lambda *x: f(*x, implementation="cubin"))(*args)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("cache", "precision"),
    [("bfloat16", E4M3_PRODUCTS), ("float8_e4m3fn", E4M3_PRODUCTS), ("float8_e4m3fn", BF16_ROPE)],
)
def test_layers_on_a_gpu(cache, precision):
    """Chunks over pages, by kernels: at most 8 % off bfloat16, and steps after them as by bfloat16.

    A number of four bits is 2.6 % off, and attention rounds q, keys and weights. Every past entry is chosen.
    """
    sizes = {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 128, "o_groups": 8, "o_lora_rank": 64, "sliding_window": 128, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 128, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
        "compress_ratios": [0, 4, 128],
    }  # fmt: skip
    usual = from_config(sizes)
    rounded = tuple(dataclasses.replace(layer, precision=precision) for layer in usual)
    params = [
        layer.init(key, jnp.bfloat16) for layer, key in zip(usual, jax.random.split(jax.random.key(0), 3), strict=True)
    ]
    x = jax.random.normal(jax.random.key(1), (2, 384, 256)).astype(jnp.bfloat16)
    table = jnp.asarray(np.random.default_rng(0).permutation(8).reshape(2, 4), jnp.int32)
    pages = {"block_table": table, "page_tokens": 128}

    read = jax.jit(
        lambda layers, caches, x, start: [
            layer(p, x, cache, start=start)[:2] for layer, p, cache in zip(layers, params, caches, strict=True)
        ],
        static_argnums=0,
    )
    step = jax.jit(
        lambda layers, caches, x: [
            layer.step(p, x, cache, lengths=385).y for layer, p, cache in zip(layers, params, caches, strict=True)
        ],
        static_argnums=0,
    )
    kept = {layers: [layer.cache(2, 512, jnp.dtype(cache), **pages) for layer in layers] for layers in (usual, rounded)}
    for start in range(0, 384, 128):
        made = {layers: read(layers, kept[layers], x[:, start : start + 128], start) for layers in kept}
        kept = {layers: [after for _, after in made[layers]] for layers in made}
        for layer, (y, _), (want, _) in zip(usual, made[rounded], made[usual], strict=True):
            off = relative(y, want)
            assert 0.005 < off < 0.08, (layer.ratio, start)
    for y, want in zip(*(step(layers, kept[layers], x[:, :1]) for layers in (rounded, usual)), strict=True):
        assert relative(y, want) < 0.01  # caches are those of bfloat16, as far as XLA sums alike in both programs
