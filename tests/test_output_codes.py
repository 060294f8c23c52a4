"""o of dsv4_attention as codes of e4m3: what they are, what is refused, and which kernel makes them."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import dsv4_attention, explain
from jax_dsv4_fmha._definitions.e4m3 import SCALED, scaled_codes
from jax_dsv4_fmha._host import attention as raw
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.compare import KERNEL
from jax_dsv4_fmha.layers import Rope

E4M3 = "float8_e4m3fn"
KINDS = {"": "mla_span_fwd", "all": "hca_fwd", "chosen": "csa_fwd"}
in_codes = functools.partial(dsv4_attention, o_dtype=E4M3)


def by_numpy(x):
    """In float64, by logarithms; a NaN does not count."""
    rows = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, SCALED)
    amax = np.nanmax(np.abs(np.concatenate([rows, np.zeros_like(rows[..., :1])], -1)), -1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(amax, 1e-10) / 448))
    return (rows / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).reshape(x.shape), scale[..., 0]


def assert_same(got, want):
    (codes, scales), (want_codes, want_scales) = got, want
    assert codes.dtype == want_codes.dtype == ml_dtypes.float8_e4m3fn and scales.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(codes, np.float32), np.asarray(want_codes, np.float32))
    np.testing.assert_array_equal(scales, want_scales)


def meant(codes, scales):
    return np.asarray(codes, np.float64) * np.repeat(np.asarray(scales, np.float64), SCALED, -1)


def test_the_definition():
    """For rows of any size, zeros, and a greatest number that is 448 times a power of two, or a bit more."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 4, SCALED)) * 2.0 ** rng.integers(-60, 60, (40, 4, 1))
    x[0], x[1, :, 1:] = 0, 0
    x[1, :, 0] = [448, np.nextafter(np.float32(448), 1000), -448 * 2.0**-9, 448 * 2.0**7]
    x[2, 0, 3], x[2, 1] = np.nan, np.nan
    x = x.reshape(40, -1).astype(np.float32)
    got = scaled_codes(jnp.asarray(x), blocks=4)
    assert_same(got, by_numpy(x))
    np.testing.assert_array_equal(got[1][1], [1, 2, 2.0**-9, 2.0**7])
    assert (
        (got[1][0] == 2.0**-42).all()
        and (got[1][2, 1] == 2.0**-42)
        and np.isnan(np.asarray(got[0], np.float32)).sum() == 129
    )


def test_an_infinity_stays_one():
    """By its code and scale; finite numbers beside it are lost, but not those of another block."""
    x = jnp.ones((1, 2 * SCALED)).at[0, 5].set(-jnp.inf)
    codes, scales = scaled_codes(x, blocks=2)
    meant = (codes.astype(jnp.float32).reshape(2, SCALED) * scales.reshape(2, 1)).reshape(-1)
    assert meant[5] == -jnp.inf and jnp.all(meant[:5] == 0) and jnp.all(meant[SCALED:] == 1)


def operands(h=64, s=7, kinds="", d=512, dtype=jnp.bfloat16, b=1, dims=64):
    rng = np.random.default_rng(1)
    shapes = {"q": (b, s, h, d), "window_kv": (b, s, d), "compressed_kv": (b, s // 2, d)}
    x = {name: jnp.asarray(2 * rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    if not kinds:
        del x["compressed_kv"]
    how = {"sink": jnp.asarray(rng.standard_normal(h), jnp.float32), "window": min(s, 128)}
    how |= {"norm_eps": 1e-2, "rope_table": Rope(dims).table(jnp.arange(s, dtype=jnp.int32)[None])}
    chosen = jnp.tile(jnp.arange(s // 2, dtype=jnp.int32), (b, s, 1))
    return x, how | {"": {}, "all": {"ratio": 2}, "chosen": {"indices": chosen}}[kinds]


NO_TURN = {"rope_table": None, "norm_eps": None}


@pytest.mark.parametrize(
    "of, how",
    [
        ({}, {}),
        ({"kinds": "all"}, {}),
        ({"kinds": "chosen"}, {"method": "two_pass"}),
        ({"kinds": "all"}, {"implementation": "reference"}),
        ({"kinds": "chosen"}, {"products": E4M3}),
        ({"d": 128, "dtype": jnp.float16}, {}),
        ({"d": 256, "dtype": jnp.float32, "kinds": "chosen"}, {"norm_eps": None}),
        ({"kinds": "all"}, NO_TURN),
        ({"kinds": "chosen"}, {"compressed_kv": None, "indices": None}),
    ],
)
def test_whatever_the_operands_codes_are_of_o(of, how):
    x, given = operands(h=3, **of)
    given |= how
    x |= {name: given.pop(name) for name in ("compressed_kv",) if name in given}
    o, lse = dsv4_attention(**x, **given)
    got, got_lse = in_codes(**x, **given)
    assert got[0].shape == o.shape and got[1].shape == (*o.shape[:-1], o.shape[-1] // SCALED)
    assert_same(got, by_numpy(np.asarray(o, np.float32)))
    np.testing.assert_array_equal(got_lse, lse)


def small():
    return operands(h=4, s=6, b=2, kinds="chosen", d=256, dtype=jnp.float32)


@pytest.mark.parametrize("maps_sink", [False, True])
def test_vmap(maps_sink):
    x, how = small()
    sink = jnp.stack([how["sink"], how["sink"] + 3]) if maps_sink else how["sink"]
    table = how["rope_table"]

    def one(q, w, c, indices, sink):
        return in_codes(q[None], w[None], c[None], indices=indices[None], sink=sink, window=6, rope_table=table,
                        norm_eps=how["norm_eps"])  # fmt: skip

    arrays = (x["q"], x["window_kv"], x["compressed_kv"], how["indices"])
    (codes, scales), lse = jax.vmap(one, (0, 0, 0, 0, 0 if maps_sink else None))(*arrays, sink)
    for i in range(2):
        want, want_lse = one(*(y[i] for y in arrays), sink[i] if maps_sink else sink)
        assert_same((codes[i], scales[i]), want)
        np.testing.assert_allclose(lse[i], want_lse, rtol=1e-6)


@pytest.mark.usefixtures("hopper")
def test_a_mapped_sink_where_a_kernel_makes_codes():
    """Entry by entry: no factor scales codes, as one scales o. Here the definition stands for the kernel."""
    x, how = operands(s=132)
    sinks = jnp.stack([how.pop("sink"), jnp.full(64, 2.0)])
    f = lambda sink: in_codes(**x, **how, sink=sink)  # noqa: E731
    assert "mla_span_fwd_turned_to_e4m3" in str(explain(f, sinks[0]))
    (codes, scales), lse = jax.vmap(f)(sinks)
    for i in range(2):
        want, want_lse = f(sinks[i])
        o, want_o = meant(codes[i], scales[i]), meant(*want)  # XLA keeps other intermediate numbers in bfloat16
        assert np.linalg.norm(o - want_o) < 0.02 * np.linalg.norm(want_o)
        np.testing.assert_allclose(lse[i], want_lse, rtol=1e-2)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_on_a_mesh(axis):
    """Batch, queries or heads over two devices: results are placed as o is."""
    x, how = small()
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    placed = jax.device_put(x["q"], NamedSharding(mesh, P(*("x" if i == axis else None for i in range(4)))))
    (codes, scales), lse = jax.jit(lambda q: in_codes(**(x | {"q": q}), **how))(placed)
    want, want_lse = in_codes(**x, **how)
    assert_same((codes, scales), want)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    for result in (codes, scales):
        assert result.sharding.shard_shape(result.shape)[axis] * 2 == result.shape[axis]


def test_in_a_shard_map():
    x, how = small()
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    f = lambda q, w, c, indices: in_codes(q, w, c, **(how | {"indices": indices}))  # noqa: E731
    arrays = (x["q"], x["window_kv"], x["compressed_kv"], how["indices"])
    got, _ = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(*arrays)
    assert_same(got, f(*arrays)[0])


@pytest.mark.parametrize(
    "d, given, message",
    [
        (512, {"o_dtype": "float8_e5m2"}, r"o_dtype: got 'float8_e5m2', wanted None or 'float8_e4m3fn'"),
        (192, {}, r"o_dtype: got float8_e4m3fn, wanted None with d=192: d is to be a multiple of 128"),
    ],
)
def test_what_is_refused(d, given, message):
    x, how = operands(h=3, d=d)
    with pytest.raises(ValueError, match=message):
        in_codes(**x, **(how | given))


@pytest.mark.parametrize("how", [{}, {"implementation": "reference"}])
def test_there_is_no_gradient(how):
    x, given = operands(h=3)
    with pytest.raises(NotImplementedError, match="wanted stop_gradient around it, or o_dtype=None, which has one"):
        jax.grad(lambda q: in_codes(**(x | {"q": q}), **given, **how)[0][1].sum())(x["q"])


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(
    "h, s, how, ends",
    [
        (64, 132, {}, "_turned_to_e4m3"),
        (128, 66, {}, "_turned_to_e4m3"),
        (64, 131, {}, "_turned"),  # whose keys may be split
        (64, 132, {"norm_eps": None}, ""),
        (64, 132, {"batch_invariant": True}, ""),
    ],
)
def test_which_kernel_makes_them(kinds, h, s, how, ends):
    dtype = how.get("dtype", jnp.bfloat16)
    x, given = operands(h, s, kinds, dtype=dtype)
    given |= {name: y for name, y in how.items() if name != "dtype"}
    f = jax.jit(lambda x: in_codes(**x, **given))
    text = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (found,) = (name for name in re.findall(r"custom_call @dsv4_fmha_(\w+)", text) if "rope" not in name)
    assert found == KINDS[kinds] + ends
    decisions = [str(x) for x in explain(f, x)]
    assert any(f"{KINDS[kinds]}_turned_to_e4m3" in line for line in decisions)  # it, or which operands it takes
    assert len([x for x in decisions if "o in float8_e4m3fn" in x]) == (ends != "_turned_to_e4m3")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("h", [64, 128])
def test_a_kernel_rounds_o_once(kinds, h):
    """Codes are those of the o that the kernel without them rounds to bfloat16, as far as that says what it was. And
    they are those of the definition in float32, as far as o is.
    """
    x, how = operands(h, 601, kinds)
    whole, plain = (jax.jit(functools.partial(f, **how)) for f in (in_codes, dsv4_attention))
    if "sm_90a" not in library.local_architectures():
        pytest.skip("needs a kernel that makes codes")
    assert f"dsv4_fmha_{KINDS[kinds]}_turned_to_e4m3" in whole.lower(**x).as_text()
    (codes, scales), lse = whole(**x)
    o, want_lse = plain(**x)
    np.testing.assert_array_equal(lse, want_lse)
    o, codes, scales = (np.asarray(y, np.float64) for y in (o.astype(jnp.float32), codes.astype(jnp.float32), scales))
    low, high = (by_numpy((o * (1 + side * 2.0**-8)).reshape(o.shape)) for side in (-1, 1))
    smaller, greater = (np.minimum(low[1], high[1]), np.maximum(low[1], high[1]))
    assert ((smaller <= scales) & (scales <= greater)).all()
    unit = np.repeat(scales, SCALED, -1)
    ends = [np.asarray(np.clip(o * (1 + side * 2.0**-8) / unit, -448, 448), np.float32) for side in (-1, 1)]
    ends = [y.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for y in ends]
    assert ((np.minimum(*ends) <= codes) & (codes <= np.maximum(*ends))).all()
    wide = {name: y.astype(jnp.float32) for name, y in x.items()}
    o, _ = jax.jit(functools.partial(dsv4_attention, **how, implementation="reference"))(**wide)
    exact, exact_scales = by_numpy(np.asarray(o))
    same = np.repeat(exact_scales == scales, SCALED, -1)
    assert np.mean(same) > 0.99 and np.mean((codes != exact)[same]) < 0.05
    # rounded to the nearest: half a unit off, of a code's last place, beside what attention in 16 bits is off
    o, unit = np.asarray(o, np.float64), np.repeat(scales, SCALED, -1)
    near = np.maximum(16 * KERNEL["o"].abs, KERNEL["o"].rel * np.abs(o))  # for keys 16 times as large
    half = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(codes), 2.0**-9))), -6) - 4)
    assert (np.abs(codes * unit - o) <= half * unit + near).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_nothing_is_left_of_what_was_in_memory():
    """Results over buffers of NaN, by the raw call, with rows that fill no tile and a query that sees nothing."""
    if "sm_90a" not in library.local_architectures():
        pytest.skip("needs a kernel that makes codes")
    x, how = operands(72, 133)
    start = jnp.zeros((1, 133), jnp.int32)
    stop = jnp.arange(133, dtype=jnp.int32)[None]
    spans = (x["window_kv"][:, :, None], start, stop, how["sink"], how["rope_table"])

    run = functools.partial(raw.mla_span_fwd_turned_to_e4m3, scale=512**-0.5, eps=1e-2)
    into = jax.jit(lambda poisoned, q, spans: run(q, *spans), donate_argnums=0, keep_unused=True)
    shapes, runs = jax.eval_shape(run, x["q"], *spans), []
    for value in (np.nan, 1.0):
        poisoned = tuple(jnp.full(y.shape, value, y.dtype) for y in shapes)
        runs.append([np.asarray(y.astype(jnp.float32)) for y in into(poisoned, x["q"], spans)])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    codes, lse, scales = runs[0]
    assert np.isfinite(codes).all() and np.isfinite(scales).all() and (codes[:, 0] == 0).all()
    assert (scales[:, 0] == 2.0**-42).all() and np.isneginf(lse[:, 0]).all()
