"""Layers whose projections stay in FP8: they give what unpacked matrices give, and refuse what is no such matrix."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import PackedMatrix, pack_matrix
from jax_dsv4_fmha._bench.layer import LayerRow
from jax_dsv4_fmha._definitions.slabs import CODES
from jax_dsv4_fmha.layers import LatentAttention, Rope, from_config, from_state_dict, to_state_dict
from jax_dsv4_fmha.layers._operands import extents, packed_spec
from tests.test_layers import MODELS, checkpoint, near, random_params

SIZES = {
    "hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64,
    "o_groups": 2, "o_lora_rank": 128, "index_head_dim": 64, "index_n_heads": 4,
}  # fmt: skip
LIKE_FLASH = {
    "hidden_size": 512, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 256,
    "o_groups": 8, "o_lora_rank": 128, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 64,
}  # fmt: skip
OF_ATTENTION = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b"}
KINDS = pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
WINDOW_FIRST = pytest.mark.parametrize(
    "kind", [0, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (1, 2))], ids=["window", "sparse", "dense"]
)
B, S, ROOM = 2, 20, 32


def tensors_of(layer, block=128):
    """A layer's tensors as a checkpoint has them: projections in e4m3, with a power of two for each block."""
    tensors = {name: np.asarray(x) for name, x in checkpoint(layer, random_params(layer, 0), "").items()}
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b"):
        if (x := tensors.get(f"{name}.weight")) is None:
            continue
        scale = np.exp2(np.random.default_rng(1).integers(-8, -5, [-(-n // block) for n in x.shape]))
        whole = np.repeat(np.repeat(scale, block, 0), block, 1)[: x.shape[0], : x.shape[1]]
        tensors[f"{name}.weight"] = np.clip(x / whole, -448, 448).astype(jnp.float8_e4m3fn)  # more is NaN
        tensors[f"{name}.scale"] = scale.astype(jnp.float8_e8m0fnu)
    return tensors


@functools.cache
def both(kind, name="v4"):
    """A layer, its parameters in bfloat16, and with packed matrices."""
    layer = from_config(MODELS[name] | SIZES)[kind]
    tensors = tensors_of(layer)
    return layer, from_state_dict(layer, tensors), from_state_dict(layer, tensors, packed=True)


def packed_names(params):
    is_packed = lambda x: isinstance(x, PackedMatrix)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    return {".".join(key.key for key in path) for path, x in leaves if is_packed(x)}


def unpacked(params):
    is_packed = lambda x: isinstance(x, PackedMatrix)  # noqa: E731
    return jax.tree.map(lambda x: x.unpacked(jnp.bfloat16) if is_packed(x) else x, params, is_leaf=is_packed)


def hidden(s, width=128, b=B):
    return jax.random.normal(jax.random.key(7), (b, s, width), jnp.bfloat16)


def prompt_chunk_and_step(layer, params, x):
    """y of each of them."""
    whole = layer(params, x).y
    out = layer(params, x[:, :12], layer.cache(B, ROOM, x.dtype))
    then = layer(params, x[:, 12:-1], out.cache, start=12)
    return whole, out.y, then.y, layer.step(params, x[:, -1:], then.cache, lengths=x.shape[1]).y


@functools.cache
def usual(kind):
    """The same of unpacked matrices."""
    layer, plain, _ = both(kind)
    return jax.jit(functools.partial(prompt_chunk_and_step, layer))(plain, hidden(S))


def assert_equal(got, want):
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.tree.map(lambda y: np.asarray(y, np.float32), t) for t in (got, want))
    )


@KINDS
def test_a_checkpoint_s_matrices_stay(kind):
    """All numbers, in the shapes that the layer has."""
    _, want, got = both(kind)
    assert packed_names(got) == OF_ATTENTION | ({"indexer.wq_b"} if kind == 1 else set())
    assert got["wo_a"].data.shape[0] == 2 and got["wo_b"].data.shape[:2] == (2, 4)
    assert jax.tree.structure(unpacked(got)) == jax.tree.structure(want)
    assert_equal(unpacked(got), want)


def test_scales_that_are_no_powers_of_two_are_rounded():
    """To bfloat16. With scales in bfloat16 the numbers are those of matrices that do not stay."""
    layer = both(1)[0]
    tensors = tensors_of(layer)
    rng = np.random.default_rng(2)
    scales = {name: x.astype(np.float32) for name, x in tensors.items() if name.endswith(".scale")}
    scales = {name: x * rng.uniform(1, 2, x.shape).astype(np.float32) for name, x in scales.items()}
    got = from_state_dict(layer, tensors | scales, packed=True)
    assert packed_names(got) == OF_ATTENTION | {"indexer.wq_b"}
    kept = {name: x.astype(jnp.bfloat16) for name, x in scales.items()}
    assert_equal(unpacked(got), from_state_dict(layer, tensors | kept))


@WINDOW_FIRST
@pytest.mark.parametrize("is_joined", [pytest.param(False, marks=pytest.mark.slow), True], ids=["separate", "joined"])
def test_a_layer_gives_what_the_unpacked_matrices_give(kind, is_joined):
    layer, plain, packed = both(kind)
    run = jax.jit(functools.partial(prompt_chunk_and_step, layer))
    if is_joined:
        plain, packed = layer.joined(plain), layer.joined(packed)
        assert packed["wx"].dtype == jnp.bfloat16 and packed_names(packed) >= {"wq_b", "wo_a", "wo_b"}
    assert_equal(run(packed, hidden(S)), run(plain, hidden(S)) if is_joined else usual(kind))


def test_what_multiplies_x_is_packed_side_by_side():
    """In a layer without compressor, of whole blocks; a chunk takes its parts."""
    layer = from_config(MODELS["v4"] | SIZES | {"head_dim": 128, "q_lora_rank": 256})[0]
    packed = from_state_dict(layer, tensors_of(layer), packed=True)
    params, run = layer.joined(packed), jax.jit(functools.partial(prompt_chunk_and_step, layer))
    assert packed_names(params) == {"wx", "wq_b", "wo_a", "wo_b"} and params["wx"].shape == (128, 384)
    assert_equal(params["wx"].unpacked(), jnp.concatenate([packed[name].unpacked() for name in ("wq_a", "wkv")], 1))
    for got, want in zip(run(params, hidden(S)), run(layer.joined(unpacked(packed)), hidden(S)), strict=True):
        near(got, want, 1e-2)


@KINDS
def test_rounding_to_fp8(kind):
    """Every number is near; those that are numbers of e4m3 with such scales stay as they are."""
    layer, plain, _ = both(kind)
    params = layer.init(jax.random.key(3), jnp.bfloat16)
    found = layer.packed(params)
    assert packed_names(found) == OF_ATTENTION | ({"indexer.wq_b"} if kind == 1 else set())
    for got, want in zip(*map(jax.tree.leaves, (unpacked(found), params)), strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() <= np.maximum(2**-4 * np.abs(want), 2**-18 * np.abs(want).max()).max()
    assert_equal(unpacked(layer.packed(plain)), plain)
    again = layer.packed(layer.joined(found))
    assert packed_names(again) == packed_names(layer.joined(found))


@WINDOW_FIRST
def test_a_step_by_definition_gives_it_too(kind):
    """Of several tokens, with implementation="reference" and outside of a program."""
    layer, plain, packed = both(kind)

    def step(params):
        cache = layer(params, hidden(S), layer.cache(B, ROOM, jnp.bfloat16, steps=2)).cache
        return layer.step(params, hidden(2), cache, lengths=S + 2, implementation="reference").y

    assert_equal(step(packed), step(plain))


@pytest.mark.slow
def test_a_layer_of_v41_gives_it_too():
    """Its indexer's query is packed, and wk, which no kernel reads, is not."""
    sources = {"kv_source_layer_ids": [1], "index_source_layer_ids": [1], "candidate_source_layer_id": -1}
    config = MODELS["v4.1"] | SIZES | {"num_hidden_layers": 2, "compress_ratios": [0, 2]} | sources
    layer, x = from_config(config)[1], hidden(S)
    tensors = tensors_of(layer)
    plain, packed = (from_state_dict(layer, tensors, packed=is_packed) for is_packed in (False, True))
    assert packed_names(packed) == OF_ATTENTION | {"indexer.wq_b"}
    run = jax.jit(functools.partial(prompt_chunk_and_step, layer))
    assert_equal(run(packed, x), run(plain, x))


def test_x_has_a_gradient_and_packed_matrices_have_none():
    layer, plain, packed = both(0)

    def loss(params, gain, x):
        return jnp.sum(layer(params | {"kv_norm": gain}, x).y.astype(jnp.float32) ** 2)

    gradient, gain = jax.jit(jax.grad(loss, (1, 2))), plain["kv_norm"]
    for got, want in zip(*(gradient(params, gain, hidden(S)) for params in (packed, plain)), strict=True):
        near(got, want, 1e-2)
    of_all = jax.eval_shape(jax.grad(loss, allow_int=True), packed, gain, hidden(S))
    assert of_all["wq_b"].data.dtype == jax.dtypes.float0 and of_all["q_norm"].dtype == jnp.float32
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(loss)(packed, gain, hidden(S))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_heads_may_be_shared_out(axes):
    layer, *_ = both(1)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(axes,), devices=jax.devices("cpu")[:2])
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layer.partition("heads"))
    packed = from_state_dict(layer, tensors_of(layer), shardings=where, packed=True)
    assert packed_names(packed) == OF_ATTENTION | {"indexer.wq_b"}
    of_device = {name: packed[name].data.sharding.shard_shape(packed[name].data.shape)[:-1] for name in OF_ATTENTION}
    assert of_device == {"wq_a": (2, 2), "wkv": (2, 2), "wq_b": (2, 2), "wo_a": (1, 2, 2), "wo_b": (2, 2)}
    x = jax.device_put(hidden(S), NamedSharding(mesh, P()))
    for got, want in zip(jax.jit(functools.partial(prompt_chunk_and_step, layer))(packed, x), usual(1), strict=True):
        near(got, want, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_rounded_and_joined_where_heads_are_shared_out(axes):
    """Devices round their own tiles; a window's layer has what multiplies x in FP8."""
    layer = from_config(MODELS["v4"] | SIZES | {"head_dim": 128, "q_lora_rank": 256})[0]
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(axes,), devices=jax.devices("cpu")[:2])
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layer.partition("heads"))
    plain = layer.init(jax.random.key(0), jnp.bfloat16)
    want, got = layer.packed(plain), layer.packed(jax.device_put(plain, where), where)
    assert packed_names(got) == OF_ATTENTION
    assert_equal(unpacked(got), unpacked(want))
    assert got["wq_b"].data.sharding.shard_shape(got["wq_b"].data.shape)[0] == 4
    params, x = layer.joined(got), jax.device_put(hidden(S), NamedSharding(mesh, P()))
    assert packed_names(params) == {"wx", "wq_b", "wo_a", "wo_b"}
    run = jax.jit(functools.partial(prompt_chunk_and_step, layer))
    for y, of_one in zip(run(params, x), run(want, hidden(S)), strict=True):
        near(y, of_one, 2e-2)


def test_shardings_of_packed_parameters():
    """They are those of a checkpoint's, and the layer's own: of arrays, of shapes, and under `jax.jit`."""
    layer, plain, _ = both(1)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layer.partition("heads"))
    packed = jax.eval_shape(lambda: layer.packed(plain, where))
    specs = layer.partition("heads", params=packed)
    got = jax.jit(layer.packed, out_shardings=jax.tree.map(functools.partial(NamedSharding, mesh), specs))(plain)
    want = from_state_dict(layer, tensors_of(layer), shardings=where, packed=True)
    assert_equal(unpacked(got), unpacked(want))
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), got, want))
    assert layer.partition("heads", params=plain) == layer.partition("heads")
    for separate in (plain, packed):
        joined = jax.eval_shape(layer.joined, separate)
        specs = layer.partition("heads", params=joined)
        of_separate = layer.partition("heads", params=separate)
        assert (
            specs.keys() == joined.keys() and specs["wx"] == P() and specs["indexer"].keys() == joined["indexer"].keys()
        )
        assert all(specs[name] == of_separate[name] for name in ("sink", "wq_b", "wo_a", "wo_b"))
    with pytest.raises(TypeError, match=r"DSV4Attention: params: got .*more.*, wanted a dict of"):
        layer.partition("heads", params={**joined, "more": plain["sink"]})
    of_eight = layer.partition("heads") | {"wo_b": P(None, None, "heads")}
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), of_eight | {"wo_a": P()})
    assert packed_names(layer.packed(plain, where)) == {"wq_a", "wkv", "wo_a", "indexer.wq_b"}
    with pytest.raises(TypeError, match=r"DSV4Attention: params: got wkv, wanted a dict of .*wq_b"):
        layer.partition("heads", params={"wkv": plain["wkv"]})


def test_specs_of_data():
    assert packed_spec("indexer.wq_b", P(None, "heads")) == P("heads", None, None)
    assert packed_spec("wo_a", P("heads")) == P("heads", None, None, None)
    assert packed_spec("wo_b", P("heads")) == P(None, "heads", None)
    assert packed_spec("wkv", P()) == P(None, None, None)


def test_what_cannot_stay_is_unpacked():
    """Scales of blocks of 32, or too great ones; groups, or devices' parts, of no whole blocks."""
    layer = both(0)[0]
    tensors = tensors_of(layer)
    assert packed_names(from_state_dict(layer, tensors_of(layer, block=32), packed=True)) == set()
    changed = tensors | {"wkv.scale": np.full_like(tensors["wkv.scale"], 256, np.float32)}
    got = from_state_dict(layer, changed, packed=True)
    assert packed_names(got) == OF_ATTENTION - {"wkv"} and got["wkv"].dtype == jnp.bfloat16
    plain = tensors | {"wkv.weight": np.ones((64, 128), np.float32)}
    del plain["wkv.scale"]
    assert packed_names(from_state_dict(layer, plain, packed=True)) == OF_ATTENTION - {"wkv"}
    layer = from_config(MODELS["v4"] | SIZES | {"o_lora_rank": 64})[0]
    assert packed_names(from_state_dict(layer, tensors_of(layer), packed=True)) == OF_ATTENTION - {"wo_a"}
    of_six = {"num_attention_heads": 6, "o_groups": 6}
    mesh = jax.make_mesh((6,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:6])
    for sizes, whole in ((of_six, set()), (of_six | {"head_dim": 32}, {"wq_b"})):  # a head of 32 is half of a tile
        layer = from_config(MODELS["v4"] | SIZES | sizes)[0]
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layer.partition("heads"))
        got = from_state_dict(layer, tensors_of(layer), shardings=where, packed=True)
        assert packed_names(got) == OF_ATTENTION - whole and got["wq_b"].shape == (64, 6, layer.d)


def turned(w, shape):
    codes = jnp.ones((w.rows, w.columns), jnp.float8_e4m3fn)
    return pack_matrix(codes, jnp.ones((-(-w.rows // 128), -(-w.columns // 128))), shape)


def test_errors():
    layer, _, packed = both(1)
    other = turned(packed["wq_b"], (64, 256))
    cases = [
        (
            {"wq_b": other},
            r"params.wq_b: got a PackedMatrix\[64, 256\] of 256 rows and 64 columns, wanted .*\[64, 4, 64\]",
        ),
        ({"wkv": packed["wq_a"].reshape(128, 8, 8)}, r"params.wkv: got a PackedMatrix\[128, 8, 8\]"),
        ({"wq_a": PackedMatrix(packed["wq_a"].data[:1], 64, 128, (128, 64))}, r"params.wq_a.data: got uint8"),
        ({"sink": packed["wkv"]}, "params.sink: got a PackedMatrix, wanted floats"),
        ({"indexer": packed["indexer"] | {"weights_proj": packed["wkv"]}}, "weights_proj: got a PackedMatrix"),
        ({"compressor": packed["compressor"] | {"w": packed["wkv"]}}, "compressor.w: got a PackedMatrix"),
    ]
    for changes, says in cases:
        with pytest.raises((ValueError, TypeError), match=f"^DSV4Attention: .*{says}"):
            layer(packed | changes, hidden(S))
    with pytest.raises(
        ValueError, match=r"to_state_dict: params.indexer.wq_b: got a PackedMatrix, wanted an array, as"
    ):
        to_state_dict(layer, packed)
    latent = LatentAttention(hidden=128, heads=4, q_rank=128, latent=48, nope=16, v=16, rope=Rope(16))
    params = latent.init(jax.random.key(0), jnp.bfloat16)
    wq_a = pack_matrix(jnp.ones((128, 128), jnp.float8_e4m3fn), jnp.ones((1, 1)))
    for f in (lambda p: latent(p, hidden(3)), lambda p: to_state_dict(latent, p)):
        with pytest.raises(TypeError, match=r"LatentAttention: params.wq_a: got a PackedMatrix, wanted floats"):
            f(params | {"wq_a": wq_a})
    with pytest.raises(TypeError, match="from_state_dict: packed: got 1"):
        from_state_dict(layer, tensors_of(layer), packed=1)


@KINDS
@pytest.mark.parametrize("tokens", [1, 64, 128])
@pytest.mark.parametrize("is_joined", [False, True], ids=["separate", "joined"])
def test_kernels_of_a_step_read_fp8(kind, tokens, is_joined):
    """Of V4-Flash's sizes, for any GPU: no product of a packed matrix is XLA's."""
    layer = LayerRow(b=tokens, s_q=1, s_kv=16384, ratio=(0, 4, 128)[kind]).layer

    def made(key):
        params, x = layer.init(key, jnp.bfloat16), jnp.zeros((tokens, 1, layer.hidden), jnp.bfloat16)
        params = in_fp8(params) | ({"indexer": in_fp8(params["indexer"])} if kind == 1 else {})
        return layer.joined(params) if is_joined else params, x, layer.cache(tokens, 16384, jnp.float8_e4m3fn)

    lengths = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    traced = jax.jit(layer.step).trace(*jax.eval_shape(made, jax.random.key(0)), lengths=lengths)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @dsv4_fmha_few_rows_product.*", text)
    reads_codes = [call for call in calls if re.search(r"x4112xui8>.*->", call)]
    assert len(reads_codes) == (3 + (kind == 0) if is_joined else 5) + (kind == 1)
    assert f"x{CODES}xui8>" not in text  # which XLA would unpack


def in_fp8(params):
    """These parameters with packed matrices, of any numbers."""

    def made(name, shape):
        several, rows, columns = extents(name, shape)
        scales = jnp.ones((*several, -(-rows // 128), -(-columns // 128)), jnp.float8_e8m0fnu)
        return pack_matrix(jnp.ones((*several, rows, columns), jnp.float8_e4m3fn), scales, shape)

    return params | {name: made(name, params[name].shape) for name in OF_ATTENTION & params.keys()}


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 128])
@pytest.mark.parametrize("is_joined", [False, True], ids=["separate", "joined"])
@KINDS
def test_steps_by_kernels(kind, is_joined, tokens, cache):
    """A step by kernels is near the definition's, and near that of the unpacked matrices by kernels."""
    layer = from_config(MODELS["v4"] | LIKE_FLASH)[kind]
    packed = from_state_dict(layer, tensors_of(layer), packed=True)
    assert packed_names(packed) == OF_ATTENTION | ({"indexer.wq_b"} if kind == 1 else set())
    plain, x = unpacked(packed), hidden(41, 512, tokens)
    params, plain = (layer.joined(packed), layer.joined(plain)) if is_joined else (packed, plain)
    cached = jax.jit(lambda p, x: layer(p, x, layer.cache(tokens, 64, jnp.dtype(cache))).cache)(plain, x[:, :40])

    @functools.partial(jax.jit, static_argnums=3)
    def step(params, x, cache, implementation):
        return layer.step(params, x, cache, lengths=41, implementation=implementation).y

    got = step(params, x[:, 40:], cached, None)
    near(got, step(params, x[:, 40:], cached, "reference"), 2e-2)
    near(got, step(plain, x[:, 40:], cached, None), 2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@KINDS
def test_prompts_on_a_gpu(kind):
    """XLA's products of unpacked matrices are those of the same matrices in bfloat16."""
    layer = from_config(MODELS["v4"] | LIKE_FLASH)[kind]
    packed, x = from_state_dict(layer, tensors_of(layer), packed=True), hidden(90, 512)
    run = jax.jit(lambda params: layer(params, x).y)
    near(run(packed), run(unpacked(packed)), 1e-2)
