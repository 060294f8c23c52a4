"""Packed entries: every layout byte by byte, rounded by ml_dtypes, and back."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache, dequantize_cache, quantize_cache
from jax_dsv4_fmha._definitions import e4m3
from jax_dsv4_fmha._definitions.packed import LAYOUTS
from jax_dsv4_fmha._host import attention
from jax_dsv4_fmha._testing import float64
from kernels import packings
from kernels.packings import PACKED
from tests.helpers import normal

BF16, E4M3, E2M1 = (np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float4_e2m1fn"))


def power_above(x, least):
    """The exponent of the least power of two that is at least x and `least`."""
    return int(np.ceil(np.log2(max(x, least))))


def v4_fp8_in_numpy(entries):
    n = len(entries)
    page = bytearray(-(-n * 584 // 576) * 576)
    for i, entry in enumerate(entries):
        for group in range(7):
            values = entry[64 * group : 64 * (group + 1)]
            exponent = power_above(np.abs(values).max() / 448, 1e-4)
            at = 576 * i + 64 * group
            page[at : at + 64] = (values / 2.0**exponent).astype(E4M3).tobytes()
            page[576 * n + 8 * i + group] = 127 + exponent
        page[576 * i + 448 : 576 * i + 576] = entry[448:].astype(BF16).tobytes()
    return bytes(page)


def v41_fp8_in_numpy(entries):
    page = b""
    for entry in entries:
        groups = entry.reshape(16, 32)
        exponents = [power_above(max(np.abs(x).max(), 1e-4) / 448, 0) for x in groups]
        page += b"".join((x / 2.0**e).astype(E4M3).tobytes() for x, e in zip(groups, exponents, strict=True))
        page += bytes(127 + e for e in exponents)
    return page


def v41_fp4_in_numpy(entries):
    page = b""
    for entry in entries:
        groups = entry.reshape(32, 16)
        scales = np.maximum(np.abs(groups).max(1) / 6, 2.0**-9).astype(E4M3)
        codes = (groups / scales.astype(np.float64)[:, None]).astype(E2M1).view(np.uint8).ravel()
        page += bytes(low | high << 4 for low, high in zip(codes[::2] & 15, codes[1::2] & 15, strict=True))
        page += scales.tobytes()
    return page


def v4_fp4_in_numpy(entries):
    page = b""
    for entry in entries:
        groups = entry[:448].reshape(14, 32)
        exponents = [power_above(np.abs(x).max() / 6, 2.0**-126) for x in groups]
        codes = (groups / np.exp2(exponents)[:, None]).astype(E2M1).view(np.uint8).ravel()
        page += bytes(low | high << 4 for low, high in zip(codes[::2] & 15, codes[1::2] & 15, strict=True))
        page += bytes(127 + e for e in exponents) + bytes(2) + entry[448:].astype(BF16).tobytes()
    return page


def v32_fp8_in_numpy(entries):
    """By float32, as its scales are."""
    page = b""
    for entry in entries.astype(np.float32):
        groups = entry[:512].reshape(4, 128)
        scales = np.maximum(np.abs(groups).max(1), np.float32(2.0**-100)) * np.float32(1 / 448)
        page += np.clip(groups / scales[:, None], -448, 448).astype(E4M3).tobytes()
        page += scales.astype("<f4").tobytes() + entry[512:].astype(BF16).tobytes()
    return page


IN_NUMPY = {
    "v4_fp8": v4_fp8_in_numpy,
    "v4_fp4": v4_fp4_in_numpy,
    "v41_fp8": v41_fp8_in_numpy,
    "v41_fp4": v41_fp4_in_numpy,
    "v32_fp8": v32_fp8_in_numpy,
}
"""A page of each layout, entry by entry and byte by byte, rounded by ml_dtypes."""


@pytest.mark.parametrize("layout", IN_NUMPY)
@pytest.mark.parametrize("n", [1, 73])
def test_layout_byte_by_byte(layout, n):
    """Groups of all sizes: of zeros, at the least scale and below, and with values half-way between two codes."""
    entries = normal(n, 2, n, LAYOUTS[layout].d) * 10.0 ** normal(1, 2, n, 1)
    entries = entries.at[0, 0, :64].set(0).at[1, 0, :64].set(448 * 2.0**-13).at[1, -1, 64:128].set(448.0)
    entries = entries.at[0, -1, 128:160].set(jnp.linspace(-8, 8, 32) * 2.0**-10).at[1, 0, 160:192].set(1.0)
    entries = entries.at[0, -1, 192:448].set(jnp.arange(256) / 16 % 6.5).at[1, -1, 192:256].set(-1e-5)
    entries = entries.astype(jnp.bfloat16)
    got = jax.jit(quantize_cache, static_argnums=1)(entries, layout)
    size = {"v4_fp4": 368 * n, "v41_fp8": 528 * n, "v41_fp4": 288 * n, "v32_fp8": 656 * n}.get(layout)
    size = size or -(-n * 584 // 576) * 576
    assert got.shape == (2, size) and got.dtype == jnp.uint8
    assert LAYOUTS[layout].page_bytes(n) == size and LAYOUTS[layout].page_entries(size) == n
    for page, written in zip(got, entries, strict=True):
        np.testing.assert_array_equal(page, np.frombuffer(IN_NUMPY[layout](np.asarray(written, np.float64)), np.uint8))


def test_scales_of_e2m1_are_rounded_like_ml_dtypes():
    """amax / 6 for every bfloat16 between the least scale and the greatest, ties included."""
    amax = np.arange(0x3C00, 0x4600, dtype=np.uint16).view(BF16)
    entries = np.repeat(amax.reshape(-1, 32), 16, -1)  # values of a group, all the same
    got = jax.jit(quantize_cache, static_argnums=1)(entries, "v41_fp4")
    got = np.asarray(got).reshape(-1, 288)[:, 256:].view(E4M3).ravel()
    want = np.clip(amax.astype(np.float64) / 6, 2.0**-9, 448).astype(E4M3)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("layout", IN_NUMPY)
def test_every_code_is_read(layout):
    """All codes, under scales of all sizes."""
    how, rng = LAYOUTS[layout], np.random.default_rng(0)
    page = rng.integers(0, 256, (16, how.page_bytes(9)), np.uint8)
    got = np.asarray(dequantize_cache(jnp.asarray(page), layout), np.float64)
    entry = functools.partial(float64._entry, Cache(page, None, layout), ring=False)
    with np.errstate(invalid="ignore"):  # codes of NaN
        want = np.array([[entry(n, j) for j in range(9)] for n in range(16)])
    want[want >= 2.0**128], want[want <= -(2.0**128)] = np.inf, -np.inf
    least = 2.0**-117 if layout == "v32_fp8" else 2.0**-126  # XLA may flush less to 0, and scales in float32 too
    normal = ~(np.abs(want) < least)
    np.testing.assert_array_equal(got[normal], want[normal])


def test_kernels_know_the_same_layouts():
    for name, packing in PACKED.items():
        parts = (packing.values, packing.scales) if packing.separate_scales else (packing.entry,)
        assert (LAYOUTS[name].parts, LAYOUTS[name].multiple) == (parts, packing.multiple)
        assert (LAYOUTS[name].order[-1] == "plain") == (packing.after > 0)
        assert LAYOUTS[name].group == packing.group
    assert PACKED.keys() == {name for name, layout in LAYOUTS.items() if layout.d in (512, 576)}


def test_rope_has_as_many_dimensions_in_definitions_kernels_and_calls():
    assert e4m3.ROPE == packings.ROPE == attention.ROPE


def test_v4_fp8_takes_584_bytes_an_entry():
    page_bytes = LAYOUTS["v4_fp8"].page_bytes
    assert page_bytes(72) == 72 * 584
    assert all(page_bytes(n) - 584 * n < 576 for n in range(1, 600))


@pytest.mark.parametrize("layout", IN_NUMPY)
def test_round_trip(layout):
    """Within half a step of the codes; bfloat16 values are exact; a second round changes nothing."""
    entries = (normal(0, 3, 5, LAYOUTS[layout].d) * 10.0 ** (normal(1, 3, 5, 1) / 2)).astype(jnp.bfloat16)
    back = dequantize_cache(quantize_cache(entries, layout), layout)
    assert back.dtype == jnp.bfloat16 and back.shape == entries.shape
    x, y = (np.asarray(z, np.float64) for z in (entries, back))
    how = LAYOUTS[layout]
    np.testing.assert_array_equal(x[..., how.packed :], y[..., how.packed :])
    x, y = x[..., : how.packed], y[..., : how.packed]
    amax = np.abs(x.reshape(3, 5, -1, how.group)).max(-1).repeat(how.group, -1)
    # e4m3 has 3 bits, or 2^-10 scales where it is subnormal; e2m1 has 1, or 1/2 scales, which are up to twice amax / 6,
    # and e4m3 scales may be 1/16 less than it
    half = np.maximum(np.abs(x) / 16, amax / 448 * 2 * 2.0**-10)
    if how.bits == 4:
        half = np.maximum(np.abs(x), amax / (3 if how.group == 32 else 5)) / 4
    assert (np.abs(x - y) <= half).all() and np.abs(x - y).max() > 0
    if how.bits == 8:
        np.testing.assert_array_equal(dequantize_cache(quantize_cache(back, layout), layout), back)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", IN_NUMPY)
def test_packed_entries_are_rounded_where_they_are_read_at_once(cuda, layout):
    """XLA may leave out a conversion to a narrower type and back, within one computation."""
    entries = jax.device_put(normal(0, 64, LAYOUTS[layout].d), cuda)
    there, back = (jax.jit(f, static_argnums=1) for f in (quantize_cache, dequantize_cache))
    got = jax.jit(lambda x: dequantize_cache(quantize_cache(x, layout), layout))(entries)
    np.testing.assert_array_equal(got, back(there(entries, layout), layout))
    page = np.frombuffer(IN_NUMPY[layout](np.asarray(entries, np.float64)), np.uint8)
    if layout == "v32_fp8":  # a GPU's quotient may be another one by a bit, and a code its neighbour then
        got, want = (np.asarray(back(jnp.asarray(x), layout), np.float64) for x in (there(entries, layout), page))
        np.testing.assert_allclose(got, want, rtol=1 / 8, atol=1e-4)
        return
    np.testing.assert_array_equal(there(entries, layout), page)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_those_of_rounded_entries(layout, dtype):
    """XLA may leave out a rounding that comes right before the quantiser, but not one that says so."""

    def norm_and_quantize(x):
        return quantize_cache((x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))).astype(dtype), layout)

    text = jax.jit(norm_and_quantize).lower(jnp.ones((4, LAYOUTS[layout].d))).as_text()
    assert text.count("stablehlo.reduce_precision") >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_norm_and_the_quantiser_in_one_program_give_the_same_codes(cuda, layout):
    x = jax.device_put(jax.random.normal(jax.random.key(0), (64, LAYOUTS[layout].d)), cuda)

    def norm(x):
        return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))).astype(jnp.bfloat16)

    want = jax.jit(quantize_cache, static_argnums=1)(jax.jit(norm)(x), layout)
    np.testing.assert_array_equal(jax.jit(lambda x: quantize_cache(norm(x), layout))(x), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", IN_NUMPY)
def test_what_is_not_finite_keeps_to_its_group(layout, bad):
    entries = normal(0, 4, LAYOUTS[layout].d).at[2, 70].set(bad)
    back = dequantize_cache(quantize_cache(entries, layout), layout)
    want, group = np.zeros(entries.shape, bool), LAYOUTS[layout].group
    first = 70 // group * group
    want[2, first : first + group] = True
    np.testing.assert_array_equal(jnp.isnan(back), want)
    assert jnp.isfinite(back[~want]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda x: x.__name__)
@pytest.mark.parametrize("layout", IN_NUMPY)
def test_the_greatest_values_are_finite(layout, dtype):
    """A value that would round up to 2^128 is rounded down, those of e2m1 end sooner; only NaN and inf give NaN."""
    entries = (
        jnp.full((1, LAYOUTS[layout].d), jnp.finfo(dtype).max, dtype)
        .at[0, 1]
        .set(-jnp.finfo(dtype).max)
        .at[0, 2]
        .set(3e38)
    )
    entries = entries.at[0, 448:].set(0)
    back = np.asarray(dequantize_cache(quantize_cache(entries, layout), layout), np.float64)
    assert np.isfinite(back).all()
    want = np.asarray(entries, np.float64)[0]
    greatest = {"v41_fp4": 2688, "v4_fp4": 6 * 2.0**121}.get(layout, np.inf)
    want = np.clip(want, -greatest, greatest)
    np.testing.assert_allclose(back[0, :448], want[:448], rtol=1 / 16)


def test_no_gradient_through_bytes():
    """JAX would take bytes for constants: a step over a packed cache had gradients without its own keys."""
    x, at = jnp.ones((1, 4, 512), jnp.bfloat16), jnp.arange(4, dtype=jnp.int32)[None]
    cache = Cache.zeros(1, 4, 512, jnp.float8_e4m3fn)
    for read in (lambda x: dequantize_cache(quantize_cache(x)), lambda x: cache.append(x, at).take()):
        with pytest.raises(NotImplementedError, match="quantize_cache: gradient: got entries to differentiate, wanted"):
            jax.grad(lambda x: read(x).astype(jnp.float32).sum())(x)  # noqa: B023
        stopped = jax.grad(lambda x: (x * read(jax.lax.stop_gradient(x))).astype(jnp.float32).sum())(x)  # noqa: B023
        np.testing.assert_array_equal(stopped, read(x))


@pytest.mark.parametrize("layout", PACKED)
def test_entries_on_an_explicit_mesh(layout):
    """However they are sharded, and outside of jit too, without jax.set_mesh."""
    entries = normal(3, 2, 4, LAYOUTS[layout].d)
    positions, empty = jnp.array([[0, 1, 2, 9]] * 2), Cache.zeros(2, 16, LAYOUTS[layout].d, layout=layout)
    pages, kept = quantize_cache(entries, layout), empty.append(entries, positions)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    for spec in P("x"), P(None, "x"), P(None, None, "x"):
        made = quantize_cache(jax.device_put(entries, NamedSharding(mesh, spec)), layout)
        np.testing.assert_array_equal(made, pages)
        np.testing.assert_array_equal(dequantize_cache(made, layout), dequantize_cache(pages, layout))
    cache = empty.append(jax.device_put(entries, NamedSharding(mesh, P("x"))), positions)
    np.testing.assert_array_equal(cache.entries, kept.entries)
