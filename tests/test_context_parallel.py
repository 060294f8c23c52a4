"""A sequence over devices: values and gradients of one device, for whole sequences and packed documents, and the bytes
that a layer of V4-Flash moves, as XLA compiles it for 8 devices.

Layers whose sequence, heads and batch are sharded in all other ways are in test_layer_meshes.py.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Span, dsv4_attention, indexer_blocks, lightning_indexer
from jax_dsv4_fmha._dispatch import sharding
from jax_dsv4_fmha._dispatch.sequences import previous, whole_sequences
from jax_dsv4_fmha.layers import Shared, from_config, unzigzag, zigzag
from tests.helpers import normal
from tests.test_layers import MODELS, random_params, stack
from tests.transformed import assert_close, run

pytestmark = pytest.mark.usefixtures("quick_to_compile")

KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
FLASH = {
    "hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "compress_ratios": [0, 4, 128],
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
}  # fmt: skip
RATIOS = tuple(FLASH["compress_ratios"])
FLASH_41 = FLASH | {
    "hidden_size": 5120, "num_hidden_layers": 2, "q_lora_rank": 1280, "compress_ratios": [2, 1], "index_n_heads": 32,
    "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1], "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8,
}  # fmt: skip
S = 65536


def mesh_of(kind, devices):
    return jax.make_mesh((devices,), ("context",), axis_types=(KINDS[kind],), devices=jax.devices("cpu")[:devices])


# What moves


def call_triangles_long(patch, keys):
    """Those with so many keys are balanced; alike calls of other tests were split as the package does it."""
    patch.setattr(sharding, "LONG_TRIANGLE", keys)
    patch.setattr(sharding, "_of_device", functools.lru_cache(sharding._of_device.__wrapped__))


@functools.cache
def compiled(ratio, kind, packed, is_gradient=False, is_balanced=True, order=None):
    """The program of a layer for one sequence over 8 devices, and the names of its operands; order: as `zigzag`."""
    config = FLASH if ratio in RATIOS else FLASH_41
    layer, mesh = from_config(config)[config["compress_ratios"].index(ratio)], mesh_of(kind, 8)

    def operand(x, *spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = jax.eval_shape(functools.partial(layer.init, dtype=jnp.bfloat16), jax.random.key(0))
    params = jax.tree.map(operand, params)
    x = operand(jax.ShapeDtypeStruct((1, S, layer.hidden), jnp.bfloat16), None, "context")
    ids = operand(jax.ShapeDtypeStruct((1, S), jnp.int32), None, "context") if packed else None

    def forward(params, x, ids):
        return layer(params, x, segment_ids=ids, zigzag=order).y

    def loss(params, x, ids):
        return jnp.sum(jnp.square(forward(params, x, ids).astype(jnp.float32)))

    f = jax.grad(loss, (0, 1)) if is_gradient else forward
    with pytest.MonkeyPatch.context() as patch:
        if not is_balanced:
            call_triangles_long(patch, 2 * S)
        return jax.jit(f).lower(params, x, ids).compile().as_text(), params


def bytes_moved(text):
    """The bytes of the results of each kind of collective, on one device."""
    sizes, found = {"pred": 1, "u8": 1, "u16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}, {}
    kinds = "all-gather|(?:ragged-)?all-to-all|collective-permute|all-reduce|reduce-scatter|collective-broadcast"
    for types, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        for dtype, n in re.findall(r"(\w+)\[([\d,]*)\]", types):
            found[kind] = found.get(kind, 0) + sizes[dtype] * math.prod(map(int, filter(None, n.split(","))))
    return found


OF_TRIANGLE = S // 16 * (64 * (128 * 2 + 4) + 2 * 4 + 512 * 4)
"""what a device gets for half as many tokens as it has: index queries, weights and spans, and the choice for its own"""
PROGRAMS = tuple(itertools.product(RATIOS, KINDS, (False, True)))
FEW_PROGRAMS = ((0, "Auto", False), (4, "Auto", False), (128, "Auto", False), (4, "Explicit", True))


@pytest.mark.parametrize(
    "ratio, kind, packed",
    [*FEW_PROGRAMS, *(pytest.param(*x, marks=pytest.mark.fuzz) for x in PROGRAMS if x not in FEW_PROGRAMS)],
)
def test_bytes_of_a_layer(ratio, kind, packed):
    """At most 400 for a token, without what balances the indexer: entries and index keys in 16 bits, ids, halos. Never
    x, q, latents or what is pooled.
    """
    found = bytes_moved(compiled(ratio, kind, packed)[0])
    entries = 2 * {0: 0, 4: 512 + 128, 128: 512}[ratio] // (ratio or 1)
    gathered, sent = found.pop("all-gather", 0), found.pop("collective-permute")
    assert gathered == (entries + 4 * packed) * S
    # 127 latents, and float32 sums: of the block before for ratio 4, and of one that goes on in a document
    blocks = {0: 0, 4: (1 + 2 * packed) * (512 + 128), 128: packed * 512}[ratio]
    assert sent - OF_TRIANGLE * (ratio == 4) == 127 * 512 * 2 + 3 * 4 * blocks
    assert not found and gathered + sent - OF_TRIANGLE * (ratio == 4) <= 400 * S


@pytest.mark.parametrize("ratio, kind", [(2, "Explicit"), (1, "Auto")])
def test_bytes_of_a_layer_of_v41(ratio, kind):
    """Entries and index keys in FP4: 288 and 68 bytes. Blocks do not overlap, and devices have whole ones."""
    found = bytes_moved(compiled(ratio, kind, False, is_balanced=False)[0])
    assert found == {"all-gather": (288 + 68) * S // ratio, "collective-permute": 127 * 512 * 2}


@pytest.mark.parametrize(
    "ratio, kind, packed",
    [(4, "Auto", False), (4, "Explicit", True)]
    + [pytest.param(*x, marks=pytest.mark.fuzz) for x in PROGRAMS if x[0] != 4 or x[1:] == ("Auto", True)],
)
def test_bytes_of_a_layer_in_zigzag_order(ratio, kind, packed):
    """At most 400 for a token, with equal work: what `test_bytes_of_a_layer` counts, and halos from both sides. Never
    index queries.
    """
    found = bytes_moved(compiled(ratio, kind, packed, order=8)[0])
    entries = 2 * {0: 0, 4: 512 + 128, 128: 512}[ratio] // (ratio or 1)
    assert found.pop("all-gather", 0) == (entries + 4 * packed) * S
    blocks = {0: 0, 4: (1 + 2 * packed) * (512 + 128), 128: packed * 512}[ratio]
    assert found.pop("collective-permute") == 2 * (127 * 512 * 2 + 3 * 4 * blocks)
    assert not found and entries + 4 * packed + 10 <= 400


@pytest.mark.parametrize("ratio", [4, *(pytest.param(x, marks=pytest.mark.fuzz) for x in (0, 128))])
def test_bytes_of_a_gradient_in_zigzag_order(ratio):
    """Halos are sent once, from both sides, and their gradients back."""
    text, params = compiled(ratio, "Auto", False, is_gradient=True, order=8)
    found = bytes_moved(text)
    trained = sum(x.size for name, x in params.items() if name not in ("indexer", "compressor"))
    trained += sum(x.size for x in params.get("compressor", {}).values())
    assert found.pop("all-reduce") == 4 * (trained + (512 * S // ratio if ratio else 0))
    assert found.pop("collective-permute") == 2 * (127 * 512 * (2 + 2) + (ratio == 4) * 3 * 4 * 1152)
    assert found.pop("all-gather", 0) == 2 * {0: 0, 4: 512 + 128, 128: 512}[ratio] * S // (ratio or 1)
    assert not found


@pytest.mark.parametrize("ratio", [4, *(pytest.param(x, marks=pytest.mark.fuzz) for x in (0, 128))])
def test_bytes_of_a_gradient(ratio):
    """What the layer moves, halos twice; the way back of halos and sums; sums of float32 gradients of entries and of
    parameters.
    """
    text, params = compiled(ratio, "Auto", False, is_gradient=True)
    found = bytes_moved(text)
    trained = sum(x.size for name, x in params.items() if name not in ("indexer", "compressor"))
    trained += sum(x.size for x in params.get("compressor", {}).values())
    of_entries = 512 * S // ratio if ratio else 0
    assert found.pop("all-reduce") == 4 * (trained + of_entries)
    halos = 127 * 512 * (2 + 2 + 4) + (ratio == 4) * 3 * 4 * (2 * 512 + 128)
    assert found.pop("collective-permute") == halos + OF_TRIANGLE * (ratio == 4)
    assert found.pop("all-gather", 0) == 2 * {0: 0, 4: 512 + 128, 128: 512}[ratio] * S // (ratio or 1)
    assert not found


def needed_by_collectives(text):
    """The names of the operands of a program that its collectives depend on."""
    entry = text[text.index("\nENTRY") :]
    lines = re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$", entry, re.MULTILINE)
    uses = {name: re.findall(r"%([\w.-]+)", rest) for name, rest in lines}
    names = {name: re.search(r'op_name="([^"]*)"', rest)[1] for name, rest in lines if " parameter(" in rest}
    wanted = [name for name, rest in lines if re.search(r" (all-gather|collective-permute)(-start)?\(", rest)]
    seen = set(wanted)
    while wanted:
        new = set(uses.get(wanted.pop(), ())) - seen
        seen |= new
        wanted += new
    return {names[name] for name in seen & names.keys()}


@pytest.mark.parametrize("ratio", RATIOS)
def test_collectives_wait_for_no_query(ratio):
    """So XLA may run them beside the products that make q and the index queries; but for what balances the indexer."""
    found = needed_by_collectives(compiled(ratio, "Auto", False, is_balanced=ratio != 4)[0])
    assert any("wkv" in name for name in found) and any("compressor" in name for name in found) == (ratio > 0)
    assert not [name for name in found if "wq_" in name or "weights_proj" in name]


# Values


IDS = np.array([[0] * 3 + [1] * 30 + [2] * 9 + [3] * 22, [4] * 64], np.int32)


@functools.cache
def results(name, packed):
    """A layer's output and gradients as a function, its operands, and what one device makes of them."""
    f = function(name, packed, None)
    layer = from_config(MODELS[LAYERS[name][0]])[LAYERS[name][1]]
    params, x = random_params(layer, 1), normal(2, 2, 64, layer.hidden)
    return f, (params, x), jax.jit(f)(params, x)


def function(name, packed, order):
    model, i = LAYERS[name]
    layer, ids = from_config(MODELS[model])[i], jnp.asarray(IDS) if packed else None
    if packed and order:
        ids = zigzag(ids, order)

    def total(params, x):
        y = layer(params, x, segment_ids=ids, zigzag=order).y
        return jnp.sum(jnp.square(y)), y

    return jax.value_and_grad(total, (0, 1), has_aux=True)


LAYERS = {"window": ("v4", 0), "sparse": ("v4", 1), "dense": ("v4", 2), "v4.1": ("v4.1", 1)}
PLAIN = (("sparse", True, 8, "Auto"),)
ALL = tuple(itertools.product(LAYERS, (False, True), (2, 4, 8), KINDS))


def check(name, packed, devices, kind):
    f, (params, x), want = results(name, packed)
    mesh = mesh_of(kind, devices)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    got = jax.jit(f)(params, jax.device_put(x, NamedSharding(mesh, P(None, "context"))))
    assert_close(got, want)


@pytest.mark.parametrize("name, packed, devices, kind", PLAIN)
def test_layer(name, packed, devices, kind):
    """8 devices have 8 tokens each: two blocks of ratio 4, and windows of 5. Documents and their blocks cross over."""
    check(name, packed, devices, kind)


@pytest.mark.fuzz
@pytest.mark.parametrize("name, packed, devices, kind", [case for case in ALL if case not in PLAIN])
def test_layer_elsewhere(name, packed, devices, kind):
    check(name, packed, devices, kind)


def check_zigzag(name, packed, devices, kind):
    f, (_, (params, x), want) = function(name, packed, devices), results(name, packed)
    mesh = mesh_of(kind, devices)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    x = jax.device_put(zigzag(x, devices), NamedSharding(mesh, P(None, "context")))
    (loss, y), (of_params, of_x) = jax.device_get(jax.jit(f)(params, x))
    y, of_x = (unzigzag(x, devices) for x in (y, of_x))
    assert_close(((loss, y), (of_params, of_x)), want)


FEW_ZIGZAG = (("sparse", True, 8, "Auto"), ("dense", False, 4, "Explicit"), ("v4.1", False, 2, "Auto"))


@pytest.mark.parametrize("name, packed, devices, kind", FEW_ZIGZAG)
def test_layer_in_zigzag_order(name, packed, devices, kind):
    """Chunks of 4, 8 and 16 tokens, windows of 5, blocks of 4, 8 and 2."""
    check_zigzag(name, packed, devices, kind)


@pytest.mark.fuzz
@pytest.mark.parametrize("name, packed, devices, kind", [case for case in ALL if case not in FEW_ZIGZAG])
def test_layer_in_zigzag_order_elsewhere(name, packed, devices, kind):
    if (name, devices) == ("dense", 8):
        with pytest.raises(ValueError, match="wanted of 64 tokens 16 chunks of whole blocks"):
            check_zigzag(name, packed, devices, kind)
        return
    check_zigzag(name, packed, devices, kind)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.fuzz)])
@pytest.mark.slow
def test_choices_in_zigzag_order(kind):
    """V4.1's layers hand on entries in their own order and choices in that of tokens; choices may be given, too."""

    def passes(order):
        def run(layer, p, x, shared, _):
            indexer = layer.indexer and dataclasses.replace(layer.indexer, fake_quantize=False)
            layer = dataclasses.replace(layer, fake_quantize=False, indexer=indexer)
            out = layer(p, x, shared=shared, zigzag=order)
            if layer.indexer is not None:
                again = layer(p, x, shared=shared, zigzag=order, indices=out.indices)
                out = out._replace(y=out.y + again.y)
            return out

        whole = stack("v4.1", run)
        return lambda x: whole(x)[0]

    x, mesh, shared_out = normal(3, 2, 64, 24), mesh_of(kind, 4), passes(4)
    with jax.set_mesh(mesh):
        got = jax.jit(shared_out)(jax.device_put(zigzag(x, 4), NamedSharding(mesh, P(None, "context"))))
    assert_close(unzigzag(np.asarray(got), 4), jax.jit(passes(None))(x))


@pytest.mark.parametrize("devices, axis", [(1, 0), (3, 1), (4, -1)])
def test_zigzag(devices, axis):
    """Each device has a chunk of the first half and its mirror image of the second."""
    x = np.arange(24) + 100 * np.arange(24)[:, None]
    got = np.asarray(zigzag(jnp.asarray(x), devices, axis))
    chunks = np.split(x, 2 * devices, axis)
    order = [i for device in range(devices) for i in (device, 2 * devices - 1 - device)]
    np.testing.assert_array_equal(got, np.concatenate([chunks[i] for i in order], axis))
    np.testing.assert_array_equal(unzigzag(got, devices, axis), x)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_model(name, kind):
    """All layers, of which V4.1's take entries, choices and candidates of earlier ones.

    They are equal without V4.1's rounding. With it a number near a tie may be rounded to the other side on a mesh, and
    another entry chosen, so that a few tokens differ.
    """

    def plain(layer, p, x, shared, _):
        indexer = layer.indexer and dataclasses.replace(layer.indexer, fake_quantize=False)
        return dataclasses.replace(layer, fake_quantize=False, indexer=indexer)(p, x, shared=shared)

    assert_close(*on_mesh_and_alone(stack(name, plain), kind))
    got, want = on_mesh_and_alone(stack(name, lambda layer, p, x, shared, _: layer(p, x, shared=shared)), kind)
    assert np.mean(np.isclose(got, want, rtol=1e-4, atol=1e-4).all(-1)) > 0.8


def on_mesh_and_alone(f, kind):
    x = normal(3, 2, 64, 24)
    mesh = mesh_of(kind, 4)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: f(x)[0])(jax.device_put(x, NamedSharding(mesh, P(None, "context"))))
    return got, jax.jit(lambda x: f(x)[0])(x)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_devices_without_whole_blocks(kind):
    """8 devices with 6 tokens each, of blocks of 4."""
    layer, x, mesh = from_config(MODELS["v4"])[1], normal(2, 1, 48, 24), mesh_of(kind, 8)
    params = random_params(layer, 1)
    placed = (
        jax.device_put(params, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P(None, "context"))),
    )
    assert_close(jax.jit(layer)(*placed).y, jax.jit(layer)(params, x).y)


# The ops


@pytest.mark.parametrize(
    "op, kind, devices",
    [
        ("choose", "Auto", 2),
        ("score", "Explicit", 4),
        ("blocks", "Auto", 8),
        *(
            pytest.param(*case, marks=pytest.mark.fuzz)
            for case in itertools.product(("choose", "score", "blocks"), KINDS, (2, 4, 8))
        ),
    ],
)
def test_a_balanced_triangle(op, kind, devices, monkeypatch):
    """Devices swap the earlier halves of their queries, and every query has the choice that it has on one device."""
    call_triangles_long(monkeypatch, 16)
    xs = normal(1, 2, 64, 4, 16), normal(2, 2, 16, 16), normal(3, 2, 64, 4)

    def f(q, k, weights):
        if op == "blocks":
            return indexer_blocks(q, k, weights, count=2, block=2, span=Span.compressed(64, 4))
        return lightning_indexer(q, k, weights, topk=5, span=Span.compressed(64, 4), return_scores=op == "score")

    mesh, want = mesh_of(kind, devices), f(*xs)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "context") if i != 1 else P())) for i, x in enumerate(xs)]
    got, moved = run(f, *placed)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    width = {"choose": 5, "score": 5 + 5, "blocks": 2}[op]  # elements of a result; 4 heads, and two bounds, are given
    assert moved == {"collective-permute": 2 * 64 // devices // 2 * (4 * 16 + 4 + 2 + width)}


def test_a_chunk_is_no_triangle(monkeypatch):
    """Its queries see all entries before it, so each device keeps its own."""
    call_triangles_long(monkeypatch, 16)
    xs, mesh = (normal(1, 1, 16, 4, 16), normal(2, 1, 32, 16), normal(3, 1, 16, 4)), mesh_of("Auto", 8)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "context") if i != 1 else P())) for i, x in enumerate(xs)]
    span = Span.compressed(16, 4, 112)
    _, moved = run(lambda q, k, w: lightning_indexer(q, k, w, topk=5, span=span), *placed)
    assert not moved


def attention(window):
    def f(q, kv, sink):
        o, lse = dsv4_attention(q, kv, sink=sink, window=window)
        return jnp.sum(jnp.square(o)) + jnp.sum(jnp.sin(lse)), (o, lse)

    return jax.value_and_grad(f, (0, 1, 2), has_aux=True)


FEW = (("Auto", 11), ("Explicit", 4))


@pytest.mark.parametrize(
    "kind, window",
    [
        *FEW,
        *(
            pytest.param(*case, marks=pytest.mark.fuzz)
            for case in itertools.product(KINDS, (4, 11, 100))
            if case not in FEW
        ),
    ],
)
def test_window_over_devices(kind, window):
    """Of 4 devices with 4 tokens each: keys of the one before, of the three before, and of all. Heads over two more."""
    mesh = jax.make_mesh((4, 2), ("context", "heads"), axis_types=(KINDS[kind],) * 2, devices=jax.devices("cpu")[:8])
    xs = normal(1, 2, 16, 2, 8), normal(2, 2, 16, 8), normal(3, 2)
    specs = P(None, "context", "heads"), P(None, "context"), P("heads")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]
    got, moved = run(attention(window), *placed)
    assert_close(got, jax.jit(attention(window))(*xs))
    assert "all-gather" not in moved
    sent = 2 * min(window - 1, 12) * 8
    assert moved["collective-permute"] == sent * (3 if kind == "Auto" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_window_under_vmap(kind):
    mesh, f = mesh_of(kind, 8), jax.vmap(lambda q, kv: dsv4_attention(q, kv, window=5)[0])
    xs = normal(1, 3, 2, 16, 2, 8), normal(2, 3, 2, 16, 8)
    got, moved = run(f, *(jax.device_put(x, NamedSharding(mesh, P(None, None, "context"))) for x in xs))
    assert_close(got, f(*xs))
    assert set(moved) == {"collective-permute"}


@pytest.mark.fuzz
def test_window_in_part_of_a_mesh():
    """Where XLA does not say which devices are neighbours, the keys are gathered."""
    mesh = jax.make_mesh((2, 4), ("batch", "context"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    xs = normal(1, 2, 16, 2, 8), normal(2, 2, 16, 8)

    def f(q, kv):
        return dsv4_attention(q, kv, window=5)[0]

    partial = jax.shard_map(f, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), axis_names={"batch"})
    got, moved = run(partial, *(jax.device_put(x, NamedSharding(mesh, P("batch", "context"))) for x in xs))
    assert_close(got, f(*xs))
    assert set(moved) == {"all-gather"}


def test_window_where_shardings_have_no_mesh():
    """As arrays of some older programs have them: there is no name for the device before, so keys are gathered."""
    mesh, xs = mesh_of("Auto", 8), (normal(1, 1, 16, 2, 8), normal(2, 1, 16, 8))
    named = NamedSharding(mesh, P(None, "context"))
    nameless = [GSPMDSharding(tuple(mesh.devices.flat), named._to_xla_hlo_sharding(x.ndim)) for x in xs]
    got, _ = run(lambda q, kv: dsv4_attention(q, kv, window=5)[0], *map(jax.device_put, xs, nameless))
    assert_close(got, dsv4_attention(*xs, window=5)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_device_before(kind):
    xs, mesh = (normal(1, 2, 16, 3), normal(2, 2, 16, 3)), mesh_of(kind, 8)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "context"))) for x in xs]

    def f(*xs):
        moved, pull = jax.vjp(previous, *xs)
        return moved, pull(moved), jax.vmap(previous)(xs[0][None], xs[1][None])

    got, moved = run(f, *placed)
    for x, (forward, back, mapped) in zip(xs, zip(*got, strict=True), strict=True):
        want = np.pad(np.asarray(x)[:, :-1], ((0, 0), (1, 0), (0, 0)))
        np.testing.assert_array_equal(forward, want)
        np.testing.assert_array_equal(mapped[0], want)
        np.testing.assert_array_equal(back, np.asarray(x) * (np.arange(16) < 15)[None, :, None])
    assert set(moved) == {"collective-permute"}


def test_rows_over_a_part_of_a_mesh_axis():
    """XLA shards 12 blocks over 4 of the 8 devices that had their 48 tokens, and JAX has no name for these 4."""
    x = normal(1, 1, 48, 3)

    def f(x):
        blocks = x.reshape(1, 12, 12) + 1
        return previous(blocks)[0], whole_sequences(blocks)

    placed = jax.device_put(x, NamedSharding(mesh_of("Auto", 8), P(None, "context")))
    blocks = np.asarray(x).reshape(1, 12, 12) + 1
    assert_close(jax.jit(f)(placed), (np.pad(blocks[:, :-1], ((0, 0), (1, 0), (0, 0))), blocks))


# On GPUs, with the kernels


def gpus():
    if len(devices := jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    return devices


SMALL = {"hidden_size": 256, "q_lora_rank": 128, "o_lora_rank": 64}


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("is_zigzag", [False, True], ids=["", "zigzag"])
@pytest.mark.parametrize("kind, packed", [("Auto", False), ("Explicit", True)])
@pytest.mark.parametrize("ratio", RATIOS)
def test_layer_on_gpus(ratio, kind, packed, is_zigzag, monkeypatch):
    """Output and gradients of a sequence over all GPUs are those of one of them, by the same kernels. Every past entry
    is chosen: products over fewer rows may round otherwise, and entries with nearly one score then change places.
    """
    devices = gpus()
    call_triangles_long(monkeypatch, 256)
    s = 512 * len(devices)
    layer = from_config(FLASH | SMALL | {"index_topk": s // 4})[RATIOS.index(ratio)]
    params, x = layer.init(jax.random.key(0), jnp.bfloat16), normal(1, 1, s, 256).astype(jnp.bfloat16)
    ids = (jnp.arange(s) * 3 // s)[None] if packed else None

    def f(params, x, ids, order=None):
        y, pull = jax.vjp(lambda params, x: layer(params, x, segment_ids=ids, zigzag=order).y, params, x)
        return y, pull(jnp.sin(y))

    operands = jax.device_put((params, x, ids), devices[0])
    want, order = jax.jit(f)(*operands), len(devices) if is_zigzag else None
    if is_zigzag:
        x, ids = zigzag(x, order), ids if ids is None else zigzag(ids, order)
    mesh = jax.make_mesh((len(devices),), ("context",), axis_types=(KINDS[kind],), devices=devices)
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P(None, "context")))
    placed = jax.device_put(params, whole), jax.device_put(x, rows), ids if ids is None else jax.device_put(ids, rows)
    (y, (of_params, of_x)), moved = run(functools.partial(f, order=order), *placed)
    y, of_x = (unzigzag(np.asarray(a), order) if is_zigzag else a for a in (y, of_x))
    assert "collective-permute" in moved
    near((y, (of_params, of_x)), want)


def near(got, want, tolerance=1e-2):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.isfinite(x).all() and np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind, is_zigzag", [("Auto", False), ("Explicit", True)])
def test_v41_on_gpus(kind, is_zigzag):
    """V4.1's layers, one of which chooses within another one's candidates, as in `test_model`. Every past entry is
    chosen.
    """
    devices = gpus()
    s = 256 * len(devices)
    more = {"num_hidden_layers": 4, "compress_ratios": [2, 1, 1, 1], "index_source_layer_ids": [0, 1, 3]}
    layers = from_config(FLASH_41 | SMALL | more | {"candidate_topk_blocks": s // 8, "index_topk": s})
    params = [layer.init(jax.random.key(i), jnp.bfloat16) for i, layer in enumerate(layers)]
    x, order = normal(1, 1, s, 256).astype(jnp.bfloat16), len(devices) if is_zigzag else None
    mesh = jax.make_mesh((len(devices),), ("context",), axis_types=(KINDS[kind],), devices=devices)
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P(None, "context")))
    for rounds in (False, True):

        def f(params, x, order=None, rounds=rounds):
            shared = Shared()
            for layer, p in zip(layers, params, strict=True):
                if not rounds:
                    indexer = layer.indexer and dataclasses.replace(layer.indexer, fake_quantize=False)
                    layer = dataclasses.replace(layer, fake_quantize=False, indexer=indexer)
                out = layer(p, x, shared=shared, zigzag=order)
                x, shared = x + out.y, shared.after(out)
            return x

        want = np.asarray(jax.jit(f)(*jax.device_put((params, x), devices[0])), np.float32)
        given = jax.device_put(params, whole), jax.device_put(zigzag(x, order) if order else x, rows)
        got = np.asarray(jax.jit(functools.partial(f, order=order))(*given), np.float32)
        near(unzigzag(got, order) if order else got, want)
