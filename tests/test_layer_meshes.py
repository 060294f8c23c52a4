"""Layers on meshes: every kind of layer, call, sharding and kind of mesh gives the numbers of one device, with the
collectives that docs/meshes.md names and no others, with `jax.set_mesh` and without.

A plain run takes some of the combinations, in which every two choices meet; `pytest -m fuzz` takes the rest.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache, dsv4_decode, explain
from jax_dsv4_fmha.layers import Shared, from_config, rope
from tests.helpers import collectives, normal
from tests.test_layers import MODELS, random_params

pytestmark = pytest.mark.usefixtures("quick_to_compile")

B, S, HIDDEN, ROOM = 4, 32, 24, 64
AXES = {"Auto": (AxisType.Auto,) * 2, "Explicit": (AxisType.Explicit,) * 2, "mixed": (AxisType.Explicit, AxisType.Auto)}
SHARDED = {
    "batch": {"batch": "data"},
    "heads": {"heads": "tensor"},
    "both": {"batch": "data", "heads": "tensor"},
    "sequence": {"sequence": "data"},
}
CALLS = ("whole", "gradient", "chunk", "step")


@functools.cache
def layers():
    v4, v41 = (MODELS[name] | {"num_attention_heads": 8, "o_groups": 4} for name in MODELS)
    v4["compress_rates"] = {"heavily_compressed_attention": 16}  # long blocks, of which a cache keeps running sums
    of_kernels = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 128}
    found = dict(zip(("window", "sparse", "dense"), from_config(v4), strict=True))
    return found | {"reading": from_config(v41)[4], "sparse by kernels": from_config(v4 | of_kernels)[1]}


KINDS = ("window", "sparse", "dense", "reading")


@functools.cache
def operands(kind, call):
    """Parameters, x, a cache, what earlier layers share, and the tokens that each sequence has."""
    layer, cached = layers()[kind], call in ("chunk", "step")
    params, x = random_params(layer, 1), normal(2, B, 2 if call == "step" else S, HIDDEN)
    cache = shared = None
    if cached:
        cache = layer.cache(B, ROOM, jnp.float32, steps=2)
        cache = jax.tree.map(lambda x: (5 + 0.3 * normal(3, *x.shape)).astype(x.dtype), cache)
    if kind == "reading":
        n = ROOM if cached else S
        entries = normal(4, B, n, layer.d)
        indices = jnp.asarray(np.random.default_rng(5).integers(0, n, (B, x.shape[1], 3)), jnp.int32)
        shared = Shared(compressed=Cache(entries) if cached else entries, indices=indices)
    return params, x, cache, shared, jnp.arange(7, 7 + B, dtype=jnp.int32) if cached else None


def called(kind, call):
    """A function of `operands`."""
    layer = layers()[kind]

    def whole(params, x, cache, shared, at):
        return layer(params, x, cache, shared)

    def loss(params, x, shared):
        return jnp.sum(jnp.square(layer(params, x, shared=shared).y))

    return {
        "whole": whole,
        "gradient": lambda params, x, cache, shared, at: jax.grad(loss, (0, 1))(params, x, shared),
        "chunk": lambda params, x, cache, shared, at: layer(params, x, cache, shared, start=at),
        "step": lambda params, x, cache, shared, at: layer.step(params, x, cache, shared, lengths=at),
    }[call]


@functools.cache
def expected(kind, call):
    return jax.jit(called(kind, call))(*operands(kind, call))


def mesh_of(axes):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=AXES[axes], devices=jax.devices("cpu")[:8])


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def placed(kind, xs, mesh, batch=None, heads=None, sequence=None):
    params, x, cache, shared, at = xs
    params = jax.tree.map(lambda x, spec: put(mesh, x, *spec), params, layers()[kind].partition(heads))
    if shared is not None:
        entries = jax.tree.map(lambda x: put(mesh, x, batch), shared.compressed)
        shared = shared._replace(compressed=entries, indices=put(mesh, shared.indices, batch, sequence))
    at = None if at is None else put(mesh, at, batch)
    return params, put(mesh, x, batch, sequence), jax.tree.map(lambda x: put(mesh, x, batch), cache), shared, at


@pytest.mark.parametrize(
    "kind, call, axes",
    [
        ("sparse", "whole", None),  # which its gradient calls in other kinds of layers
        *itertools.product(KINDS[1:], ("chunk", "step"), (None,)),
        *itertools.product(KINDS[1:], ("gradient",), ("Explicit",)),
        ("sparse", "gradient", None),
    ],
)
@pytest.mark.usefixtures("few_objects")
def test_no_tracer_leaks(kind, call, axes):
    """Nothing that an equation keeps knows a traced array, on one device and over the devices of a mesh."""
    xs = operands(kind, call)
    if axes:
        xs = placed(kind, xs, mesh_of(axes), **SHARDED["sequence"])
    with jax.checking_leaks():
        jax.make_jaxpr(called(kind, call))(*xs)


def moved(kind, call, how, axes="Auto", packed=False):
    """The elements that each kind of collective moves, by docs/meshes.md."""
    layer, (params, x, *_) = layers()[kind], operands(kind, call)
    b, s, own = x.shape[0] // (2 if "batch" in how else 1), x.shape[1], layer.compressor
    entries, is_prompt = s // layer.ratio if own else 0, call in ("whole", "gradient")
    found = dict.fromkeys(("all-reduce", "all-gather", "collective-permute"), 0)
    if "heads" in how:
        found["all-reduce"] += b * s * layer.hidden
    if call == "gradient" and "heads" in how:  # of the low-rank query, latents and entries
        found["all-reduce"] += b * (s * layer.q_rank + (s + entries) * layer.d)
    if call == "gradient" and how.keys() != {"heads"}:  # of parameters; the indexer has no gradient
        specs = layer.partition("tensor")
        split = {
            name: 4 if "heads" in how and "tensor" in specs[name] else 1 for name in params.keys() - {"compressor"}
        }
        found["all-reduce"] += sum(params[name].size // n for name, n in split.items() if name != "indexer")
        found["all-reduce"] += sum(x.size for x in params.get("compressor", {}).values())
    compressors = [x for x in (own, layer.indexer and layer.indexer.compressor) if x]
    if "sequence" in how and is_prompt:
        halo = b * (layer.window - 1) * layer.d
        edges = [3 * b * x.d * (x.overlap + packed * x.blocks) for x in compressors]  # three sums of a block
        found["all-gather"] += b * entries * sum(x.d for x in compressors) + packed * b * s
        found["collective-permute"] += halo + sum(edges)
        if call == "gradient":  # on Auto axes the window's halo is sent again
            found["collective-permute"] += halo * (1 + (axes == "Auto")) + sum(edges[:1])
            found["all-reduce"] += b * entries * layer.d
    elif "sequence" in how:
        found["all-gather"] += b * s * (layer.d + sum(x.width for x in compressors))
    return {name: n for name, n in found.items() if n}


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(1, np.abs(y).max(initial=0)))


def run(f, xs, want, mesh=None):
    """The collectives of f, if its results are right; under `jax.set_mesh` with a mesh."""
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        compiled = jax.jit(f).lower(*xs).compile()
        close(compiled(*xs), want)
    return collectives(compiled)


def check(kind, call, how, axes, is_set):
    mesh = mesh_of(axes)
    xs = placed(kind, operands(kind, call), mesh, **SHARDED[how])
    got = run(called(kind, call), xs, expected(kind, call), mesh if is_set else None)
    if axes == "mixed" and "heads" in SHARDED[how] and (call == "gradient" or not is_set):  # as docs/transforms.md says
        assert set(got) == {"all-reduce", "all-gather"}
    else:
        assert got == moved(kind, call, SHARDED[how], axes)


ON = tuple(itertools.product(AXES, (True, False)))
TWICE = (0, 2, 3, 1)  # in the field of four elements, where a sum is an exclusive or
PLAIN = [
    (KINDS[i], CALLS[i ^ n % 4], tuple(SHARDED)[i ^ TWICE[n % 4]], *on) for n, on in enumerate(ON) for i in range(4)
]
ALL = [(*case, *on) for case in itertools.product(KINDS, CALLS, SHARDED) for on in ON]


@pytest.mark.parametrize("kind, call, how, axes, is_set", PLAIN)
def test_layers(kind, call, how, axes, is_set):
    check(kind, call, how, axes, is_set)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind, call, how, axes, is_set", [case for case in ALL if case not in PLAIN])
def test_all_other_combinations(kind, call, how, axes, is_set):
    check(kind, call, how, axes, is_set)


def test_every_two_choices_meet_in_a_plain_run():
    for i, j in itertools.combinations(range(5), 2):
        assert {(x[i], x[j]) for x in ALL} == {(x[i], x[j]) for x in PLAIN}, (i, j)


@pytest.mark.parametrize("kind, call", [("window", "step"), ("sparse", "chunk"), ("dense", "chunk")])
def test_outside_of_jit_without_a_mesh_that_is_set(kind, call):
    """Every operation is a program of its own then, and what has no place yet goes where the batch is."""
    params, x, cache, shared, at = operands(kind, call)
    placed_params, x, cache, *_ = placed(kind, (params, x, cache, shared, at), mesh_of("Explicit"), batch="data")
    close(called(kind, call)(placed_params, x, cache, shared, at), expected(kind, call))


# Documents, pages of a pool, and operands that do not lie where x does


@pytest.mark.parametrize(
    "axes, how",
    [("Auto", "sequence"), ("Explicit", "sequence"), pytest.param("Explicit", "both", marks=pytest.mark.fuzz)],
)
def test_packed_documents(axes, how):
    """Documents and blocks cross from one device to the next. Besides what moves without them, ids are gathered and the
    sums of a block that goes on are sent.
    """
    layer, mesh = layers()["sparse"], mesh_of(axes)
    params, x, *_ = xs = operands("sparse", "whole")
    ids = jnp.asarray(
        [[1] * 6 + [2] * 7 + [3] * 19, [5] * 32, [1] * 9 + [2] * 23, [1] * 4 + [2] * 4 + [3] * 24], jnp.int32
    )

    def f(params, x, ids):
        return layer(params, x, segment_ids=ids).y

    at = SHARDED[how]
    params, put_x, *_ = placed("sparse", xs, mesh, **at)
    got = run(f, (params, put_x, put(mesh, ids, at.get("batch"), at.get("sequence"))), jax.jit(f)(xs[0], x, ids))
    assert got == moved("sparse", "whole", at, axes, packed=how == "sequence")


def chunk_and_step(layer):
    """A chunk from position 3 on, and a step for some of the sequences."""

    def f(params, x, cache, lengths):
        out = layer(params, x[:, :-1], cache, start=3)
        return out, layer.step(params, x[:, -1:], out.cache, lengths=lengths)

    return f


@pytest.mark.parametrize("axes", [pytest.param("Auto", marks=pytest.mark.fuzz), "Explicit"])
def test_pages_of_a_pool(axes):
    """New entries are gathered, because every device has all of the pool."""
    layer, mesh = layers()["dense"], mesh_of(axes)
    table = jnp.asarray(np.random.default_rng(6).permutation(2 * B).reshape(B, 2), jnp.int32)
    params, x, _, _, at = operands("dense", "chunk")
    cache = layer.cache(B, ROOM, jnp.float32, block_table=table)
    f, xs = chunk_and_step(layer), (params, x, cache, at + 28)
    pool = Cache(put(mesh, cache.compressed.entries), put(mesh, table, "data"))
    entries = jax.tree.map(lambda x: put(mesh, x, "data"), cache._replace(compressed=None))
    params, put_x, *_ = placed("dense", (params, x, None, None, None), mesh, batch="data")
    got = run(f, (params, put_x, entries._replace(compressed=pool), put(mesh, at + 28, "data")), jax.jit(f)(*xs))
    assert set(got) == {"all-gather"}
    new_entries = B * (2 + 1)  # of the chunk's tokens 3 to 33, and of the step's
    assert got["all-gather"] <= new_entries * (layer.d + 2)  # each with its page and its place there


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_operands_that_are_not_placed(axes):
    """The batch over both axes of a mesh; a cache, lengths and an int for all sequences go where x is."""
    layer, mesh = layers()["window"], mesh_of(axes)
    params, x, *_ = operands("window", "chunk")
    x = jnp.concatenate([x, x[::-1]])
    f, cache, lengths = chunk_and_step(layer), layer.cache(2 * B, ROOM, jnp.float32), jnp.arange(35, 27, -1)
    lengths = lengths.astype(jnp.int32)
    params, put_x, *_ = placed("window", (params, x, None, None, None), mesh, batch=("data", "tensor"))
    got = run(f, (params, put_x, cache, lengths), jax.jit(f)(operands("window", "chunk")[0], x, cache, lengths))
    assert got == {}


@pytest.mark.parametrize("call", ["chunk", "step"])
@pytest.mark.parametrize("kind", ["window", "sparse", "dense"])
def test_caches_that_are_made_on_a_mesh(kind, call):
    """They, and the numbers beside them, are whole on every device, and go where x is."""
    layer, mesh = layers()[kind], mesh_of("Explicit")
    params, x, *_ = placed(kind, operands(kind, call), mesh, batch="data")

    def f(params, x):
        cache, at = layer.cache(B, ROOM, jnp.float32, steps=2), jnp.full(B, 2, jnp.int32)
        return layer(params, x, cache, start=at) if call == "chunk" else layer.step(params, x, cache, lengths=at)

    with jax.set_mesh(mesh):
        assert jax.eval_shape(f, params, x).y.sharding.spec == P("data", None, None)


@pytest.mark.parametrize("kind", ["window", "sparse", "dense"])
def test_parameters_on_no_mesh_have_gradients(kind):
    """They are whole on every device of x's mesh. Outside of jit JAX asks for `jax.set_mesh`."""
    params, x, *others = operands(kind, "gradient")
    xs, f = (params, put(mesh_of("Explicit"), x, "data"), *others), called(kind, "gradient")
    close(jax.jit(f)(*xs), expected(kind, "gradient"))
    with pytest.raises(ValueError, match="set_mesh"):
        f(*xs)


@pytest.mark.parametrize(
    "axes, paged",
    [
        ("Explicit", False),
        ("Explicit", True),
        *(pytest.param("Auto", x, marks=pytest.mark.fuzz) for x in (False, True)),
    ],
)
def test_caches_alone(axes, paged):
    """`append`, `take` and `dsv4_decode` where only one of a cache's arrays is sharded."""
    mesh, new, at = mesh_of(axes), normal(1, B, 3, 16), jnp.arange(3, dtype=jnp.int32) + jnp.zeros((B, 1), jnp.int32)
    cache = Cache(normal(2, 2 * B, 4, 16), jnp.arange(2 * B, dtype=jnp.int32).reshape(B, 2)[::-1])
    cache = cache if paged else Cache(normal(2, B, 8, 16))
    q = normal(3, B, 2, 8, 16)

    def f(cache, new, at, q):
        cache = cache.append(new, at)
        return cache, cache.take(at - 1), dsv4_decode(q, cache, cache, ratio=1, window=4, lengths=at[:, 2] + 1)

    want = jax.jit(f)(cache, new, at, q)
    got = run(f, (cache, put(mesh, new, "data"), at, q), want)
    assert set(got) <= ({"all-gather"} if paged else set())
    got = run(f, (cache, new, put(mesh, at, "data"), put(mesh, q, "data", None, "tensor")), want)
    assert set(got) <= ({"all-gather"} if paged else set())


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_different_numbers_of_new_tokens(kind):
    def f(params, x, cache, shared, at, count):
        return layers()[kind].step(params, x, cache, shared, lengths=at, start=at - count)

    count = jnp.asarray(np.resize([1, 2, 0], B), jnp.int32)
    xs, mesh = operands(kind, "step"), mesh_of("Explicit")
    want = jax.jit(f)(*xs, count)
    got = run(f, (*placed(kind, xs, mesh, **SHARDED["both"]), put(mesh, count, "data")), want)
    assert got == moved(kind, "step", SHARDED["both"])


@pytest.mark.parametrize("call", ["step", "chunk"])
def test_joined_parameters(call):
    layer, mesh = layers()["dense"], mesh_of("Explicit")
    params, *xs = placed("dense", operands("dense", call), mesh, **SHARDED["both"])
    got = run(called("dense", call), (layer.joined(params), *xs), expected("dense", call))
    assert got == moved("dense", call, SHARDED["both"])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "call, axes",
    [
        ("step", "Explicit"),
        *(pytest.param(*case, marks=pytest.mark.fuzz) for case in (("chunk", "Explicit"), ("gradient", "Auto"))),
    ],
)
def test_the_path_to_kernels(call, axes):
    kind = "sparse by kernels"
    ops = {x.op for x in explain(called(kind, call), *operands(kind, call))}
    assert {"norm_rope", "rope_hadamard", "lightning_indexer"} | ({"kv_insert"} if call == "step" else set()) <= ops
    check(kind, call, "both", axes, is_set=False)


def test_rope_of_operands_that_are_not_placed_alike():
    mesh, x, at = mesh_of("Explicit"), normal(1, B, 6, 2, 16), jnp.arange(6 * B, dtype=jnp.int32).reshape(B, 6)
    f = functools.partial(rope, rotation=layers()["window"].rope)
    want = f(x, at)
    for xs in ((put(mesh, x, "data"), at), (x, put(mesh, at, "data"))):
        assert run(f, xs, want) == {}


def of_size_1(kind, call, heads):
    """Operands of one sequence, over an Explicit axis of size 1, and the function of them."""
    mesh = jax.make_mesh((1, 4), ("data", "tensor"), axis_types=AXES["Explicit"], devices=jax.devices("cpu")[:4])
    params, *others = operands(kind, call)
    one = (params, *jax.tree.map(lambda x: x[:1], others))
    return one, placed(kind, one, mesh, batch="data", heads=heads)


@pytest.mark.parametrize("heads", [None, "tensor"])
@pytest.mark.parametrize("call", [*CALLS, "documents", "pages"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_over_an_axis_of_size_1(kind, call, heads):
    """Results lie where x and the cache do, as over any other axis."""
    form = {"documents": "whole", "pages": "step"}.get(call, call)
    _, xs = of_size_1(kind, form, heads)
    params, x, cache, shared, at = xs
    f = called(kind, form)
    if call == "documents":
        ids = put(x.sharding.mesh, jnp.zeros((1, S), jnp.int32), "data")
        f = lambda params, x, *_: layers()[kind](params, x, shared=shared, segment_ids=ids)  # noqa: E731
    if call == "pages" and cache.compressed is not None:
        table = put(x.sharding.mesh, jnp.arange(2, dtype=jnp.int32)[None], "data")
        pool = Cache(put(x.sharding.mesh, normal(1, 2, 8, layers()[kind].d)), table)
        cache = cache._replace(compressed=pool)
    out = jax.eval_shape(f, params, x, cache, shared, at)
    if call == "gradient":
        for part, like in zip(jax.tree.leaves(out), jax.tree.leaves((params, x)), strict=True):
            assert part.sharding.spec == jax.typeof(like).sharding.spec
        return
    assert out.y.sharding.spec == P("data", None, None)
    for part, like in zip(jax.tree.leaves(out.cache), jax.tree.leaves(cache), strict=True):
        assert part.sharding.spec == jax.typeof(like).sharding.spec


@pytest.mark.parametrize("call", ["whole", "gradient", "chunk", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_beside_tokens_over_an_axis_of_size_1(kind, call):
    """Results have rows for all sequences, too, which the mesh axis of the batch cannot split."""
    mesh = jax.make_mesh((4, 1), ("data", "context"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    cached = call in ("chunk", "step")
    on_mesh = placed(kind, operands(kind, call), mesh, batch="data", sequence=None if cached else "context")
    out = jax.eval_shape(called(kind, call), *on_mesh)
    assert (out[1] if call == "gradient" else out.y).sharding.spec == P("data", None if cached else "context", None)


@pytest.mark.parametrize("call", ["chunk", "step", "gradient"])
def test_the_numbers_of_one_sequence_over_an_axis_of_size_1(call):
    one, xs = of_size_1("sparse", call, "tensor")
    run(called("sparse", call), xs, jax.jit(called("sparse", call))(*one))


@pytest.mark.parametrize("how", [{"batch": "data"}, {"batch": "data", "heads": "tensor"}, {"heads": "tensor"}])
@pytest.mark.parametrize("kind, s", [("sparse", 3), ("dense", 15), ("sparse", 1)])
def test_a_prompt_shorter_than_a_block(kind, s, how):
    """There are no entries to make, to gather or to reshape; on Explicit axes JAX refuses to reshape what is empty."""
    params, x, *others = operands(kind, "whole")
    xs = (params, x[:, :s], *others)
    on_mesh = placed(kind, xs, mesh_of("Explicit"), **how)
    for call in ("whole", "gradient"):
        jax.eval_shape(called(kind, call), *on_mesh)
    if how == {"batch": "data"}:
        assert run(called(kind, "whole"), on_mesh, jax.jit(called(kind, "whole"))(*xs)) == {}


# Errors


def test_errors():
    """An error says what Explicit axes must not shard."""
    layer, mesh = layers()["dense"], mesh_of("Explicit")
    params, x, cache, _, at = xs = operands("dense", "chunk")
    plain = placed("dense", xs, mesh, batch="data")
    f = jax.jit(called("dense", "chunk"))

    def raises(error, **changed):
        now = dict(zip(("params", "x", "cache", "shared", "at"), plain, strict=True)) | changed
        with pytest.raises(ValueError, match=error):
            f(*now.values())

    wanted = "hidden sharded over tensor, wanted that axis whole: only b and s may be sharded"
    raises(f"x: got {wanted}", x=put(mesh, x, None, None, "tensor"))
    heads = placed("dense", xs, mesh, heads="tensor")[0]
    wanted = "wanted mesh axes that do not shard the parameters' heads"
    raises(f"x: got b sharded over tensor, {wanted}", params=heads, x=put(mesh, x, "tensor"))
    wanted = r"wanted P\w*\(None, None\), as `partition` says"
    raises(rf"params.wkv: got it sharded as P\w*\(None, 'data'\), {wanted}",
           params=plain[0] | {"wkv": put(mesh, params["wkv"], None, "data")})  # fmt: skip
    raises(r"params.wo_a: got .*wanted P\w*\('tensor', ", params=heads | {"wo_a": plain[0]["wo_a"]})
    window = Cache(put(mesh, cache.window.entries, "tensor"))
    raises("cache: got b sharded over tensor, wanted b sharded over data", cache=cache._replace(window=window))
    window = Cache(put(mesh, cache.window.entries, None, None, "data"))
    raises(r"cache.window.entries: got .*wanted only the batch sharded", cache=cache._replace(window=window))
    raises("start: got b sharded over tensor, wanted b sharded over data", at=put(mesh, at, "tensor"))
    pool = Cache(put(mesh, normal(1, 2 * B, 4, layer.d), "data"), jnp.zeros((B, 2), jnp.int32))
    raises("sharded as .*wanted a pool of pages whole on every device", cache=cache._replace(compressed=pool))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("how", ["batch", "heads"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_steps_on_gpus(ratio, dtype, how):
    """A chunk of a prompt and steps after it by kernels, over all GPUs and on one. Every past entry is chosen: where a
    choice leaves some out, entries with nearly one score may change places.
    """
    if len(devices := jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    b = 2 * len(devices)
    layer = of_gpus(ratio)
    params, x = layer.init(jax.random.key(0), jnp.bfloat16), normal(1, b, 300, 256).astype(jnp.bfloat16)
    cache = layer.cache(b, 512, dtype)

    def f(params, x, cache):
        chunk, cache, *_ = layer(params, x[:, :296], cache)
        ys = [chunk]
        for i in range(296, 300):
            y, cache, *_ = layer.step(params, x[:, i : i + 1], cache, lengths=i + 1)
            ys.append(y)
        return jnp.concatenate(ys, 1)

    want = jax.jit(f)(*jax.device_put((params, x, cache), devices[0]))
    mesh = jax.make_mesh((len(devices),), ("all",), axis_types=(AxisType.Auto,), devices=devices)
    batch, heads = ("all", None) if how == "batch" else (None, "all")
    specs = layer.partition(heads)
    given = jax.tree.map(lambda x, spec: put(mesh, x, *spec), params, specs)
    got = jax.jit(f)(given, put(mesh, x, batch), jax.tree.map(lambda x: put(mesh, x, batch), cache))
    got, want = (np.asarray(y, np.float32) for y in (got, want))
    for part in (slice(0, 296), slice(296, 300)):
        assert np.linalg.norm((got - want)[:, part]) <= 1e-2 * np.linalg.norm(want[:, part])


def of_gpus(ratio):
    """A layer of sizes that kernels take."""
    config = {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 128, "o_groups": 8, "o_lora_rank": 64, "sliding_window": 128, "compress_ratios": [0, 4, 128],
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 128, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
    }  # fmt: skip
    return from_config(config)[config["compress_ratios"].index(ratio)]
