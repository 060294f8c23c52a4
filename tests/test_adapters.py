"""Adapters for others' code bases, beside the real packages where these are installed, and beside stand-ins.

A stand-in has the classes and signatures of the version that docs/howto/other-code-bases.md names, as read there.
`make test-adapters PYTHON=python3.12` runs this beside Levanter and ejkernel, in an environment of its own.
"""

import dataclasses
import importlib.util
import itertools
import sys
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

B, S, H_Q, H_KV, D = 2, 24, 4, 2, 16
Q = jax.random.normal(jax.random.key(0), (B, S, H_Q, D))
K, V = jax.random.normal(jax.random.key(1), (2, B, S, H_KV, D))
POSITIONS = jnp.arange(S)[None]
SINK = jnp.array([0.5, -1.0, 2.0, 0.0])
IDS = jnp.array([[1] * 5 + [2] * 12 + [3] * 7, [7] * 20 + [-1] * 4])  # the second row ends with padding
REAL = (IDS >= 0)[..., None, None]
BACK = np.arange(S)[:, None] - np.arange(S)
SAME = np.array(IDS[:, :, None] == IDS[:, None])
SEEN = {
    "all": np.ones((1, S, S), bool),
    "causal": (BACK >= 0)[None],
    "window": ((BACK >= 0) & (BACK < 6))[None],
    "segments": SAME,
    "causal segments": SAME & (BACK >= 0),
    "window segments": SAME & (BACK >= 0) & (BACK < 6),
}


def dense(q, k, v, seen, sink=None, scale=D**-0.5):
    """Attention by its definition; sink: the logits of one sink for each head."""
    k, v = (jnp.repeat(x, H_Q // H_KV, 2) for x in (k, v))
    logits = jnp.where(seen[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale, -jnp.inf)
    column = jnp.broadcast_to(-jnp.inf if sink is None else sink[:, None, None], (B, H_Q, S, 1))
    p = jax.nn.softmax(jnp.concatenate([logits, column], -1))[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def assert_same(f, g, *operands, real=REAL):
    """Outputs, and the gradients of all operands; padding does not count."""

    def run(f):
        def loss(*x):
            o = jnp.where(real, f(*x), 0)
            return jnp.cos(o).sum(), o

        (_, o), grads = jax.jit(jax.value_and_grad(loss, range(len(operands)), has_aux=True))(*operands)
        return o, *grads

    for x, y in zip(run(f), run(g), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def peer(name):
    """A module of another package, or a skip where the package is not installed; what it warns of is its own."""
    package = name.split(".")[0]
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def stand_in(monkeypatch, modules):
    """Puts modules, by name, in the place of a package; parents are made."""
    for name, attributes in modules.items():
        for i in range(name.count(".") + 1):
            part = name.rsplit(".", i)[0]
            if i == 0 or part not in modules:
                monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        vars(sys.modules[name]).update(attributes)


def adapter(monkeypatch, name):
    """The adapter's module, imported anew."""
    whole = f"jax_dsv4_fmha.adapters.{name}"
    monkeypatch.delitem(sys.modules, whole, raising=False)
    return importlib.import_module(whole)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("levanter", "pip install 'marin-levanter>=0.2"),
        ("ejkernel", "pip install 'ejkernel>=0.0.80'"),
        ("axlearn", "pip install git.https://github.com/apple/axlearn"),
        ("maxtext", "pip install 'maxtext>=0.2.5'"),
    ],
)
def test_without_the_package_the_error_names_it(name, package, monkeypatch):
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"adapters\.{name}: .*; {package}"):
        adapter(monkeypatch, name)


# ---- Levanter


@dataclasses.dataclass(frozen=True)
class Mask:
    """The fields of grug's AttentionMask."""

    is_causal: bool = False
    segment_ids: Any = None
    sliding_window: int | None = None
    fa4_bounds: Any = None


@pytest.fixture(params=["real", "stand-in"])
def levanter(request, monkeypatch):
    if request.param == "real":
        theirs = peer("levanter.grug.attention")
        return adapter(monkeypatch, "levanter"), theirs
    stand_in(monkeypatch, {"levanter.grug.attention": {"AttentionMask": Mask}})
    return adapter(monkeypatch, "levanter"), sys.modules["levanter.grug.attention"]


def grug_mask(kind, of, ids=IDS):
    return None if kind == "all" else of(
        is_causal=kind != "segments",
        segment_ids=(ids, ids) if "segments" in kind else None,
        sliding_window=6 if "window" in kind else None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", SEEN)
def test_levanter(levanter, kind):
    ours, theirs = levanter
    mask = grug_mask(kind, theirs.AttentionMask)
    f = lambda q, k, v: ours.attention(q, k, v, mask)  # noqa: E731
    assert_same(f, lambda q, k, v: dense(q, k, v, SEEN[kind]), Q, K, V)
    if hasattr(theirs, "reference_attention"):
        assert_same(f, lambda q, k, v: theirs.reference_attention(q, k, v, mask, logits_dtype=jnp.float32), Q, K, V)


def test_levanter_s_other_masks(levanter):
    """A window that is not causal, ids of one row for all, dense masks, and bounds instead of window and ids."""
    ours, theirs = levanter
    of = theirs.AttentionMask
    one = (BACK < 6)[None]
    bounds = jnp.where(IDS == 3, 17, jnp.where(IDS == 2, 5, 0)), IDS >= 0
    for mask, seen in (
        (of(sliding_window=6), one),
        (of(segment_ids=(IDS[0], IDS[0])), SAME[:1]),
        (of(segment_ids=(IDS[:1], jnp.array(IDS[:1]))), SAME[:1]),
        (jnp.asarray(SEEN["window segments"]), SEEN["window segments"]),
        (jnp.asarray(SEEN["causal"][0]), SEEN["causal"]),
        (of(is_causal=True, fa4_bounds=bounds), SEEN["causal segments"]),
    ):
        assert_same(lambda *x, m=mask: ours.attention(*x, m), lambda *x, s=seen: dense(*x, s), Q, K, V)


def test_levanter_s_own_bounds():
    """The bounds that Levanter computes for its FA4 are the window and the ids that they are computed from."""
    theirs = peer("levanter.grug.attention")
    ours = importlib.import_module("jax_dsv4_fmha.adapters.levanter")
    mask = theirs.AttentionMask.causal(sliding_window=6).with_segment_ids(IDS)
    bounds = theirs.fa4_cute_segment_bounds(mask, batch_size=B, seq_len=S, sliding_window=6)
    of_bounds = theirs.AttentionMask.causal().with_fa4_bounds(*bounds)
    o = ours.attention(Q, K, V, of_bounds)
    np.testing.assert_allclose(jnp.where(REAL, o, 0), jnp.where(REAL, ours.attention(Q, K, V, mask), 0), atol=1e-6)
    assert not o[1, 20:].any()


def test_levanter_what_is_not_taken(levanter):
    ours, theirs = levanter
    for mask, error in (
        (jnp.zeros((B, S, S)), NotImplementedError),
        (SEEN["causal"] & (BACK != 1), NotImplementedError),
        (theirs.AttentionMask(segment_ids=(jnp.tile(jnp.arange(S) % 3, (B, 1)),) * 2), ValueError),
        (theirs.AttentionMask(is_causal=True, sliding_window=0), ValueError),
        (theirs.AttentionMask(fa4_bounds=(IDS, IDS >= 0)), ValueError),
    ):
        with pytest.raises(error):
            ours.attention(Q, K, V, mask)
    with pytest.raises(ValueError, match="implementation"):
        ours.attention(Q, K, V, None, implementation="gpu_fa4_cute")
    apart = jnp.array([[1] * 8 + [2] * 8 + [1] * 8, [1] * S])  # traced: NaN, in this batch entry alone
    o = jax.jit(lambda ids: ours.attention(Q, K, V, theirs.AttentionMask(segment_ids=(ids, ids))))(apart)
    assert jnp.isnan(o[0]).all() and not jnp.isnan(o[1]).any()


def test_levanter_s_named_axes():
    """`levanter.layers.attention.dot_product_attention` on its plain backend; the real package alone has named axes."""
    theirs, hax = peer("levanter.layers.attention"), peer("haliax")
    ours = importlib.import_module("jax_dsv4_fmha.adapters.levanter_layers")
    batch, pos, k_pos, heads, group, size = (
        hax.Axis(*x) for x in (("b", B), ("pos", S), ("k_pos", S), ("heads", H_KV), ("group", H_Q // H_KV), ("d", D))
    )
    of, segment_ids = theirs.AttentionMask, (hax.named(IDS, (batch, pos)), hax.named(IDS, (batch, k_pos)))

    def run(f, mask, q, k, v, sink, **how):
        q = hax.named(q.reshape(B, S, H_KV, -1, D), (batch, pos, heads, group, size))
        k, v = (hax.named(x, (batch, k_pos, heads, size)) for x in (k, v))
        sink = hax.named(sink.reshape(H_KV, -1), (heads, group))
        o = f(pos, k_pos, size, q, k, v, mask, attn_sink=sink, scaling_factor=0.3, **how)
        return o.rearrange((batch, pos, heads, group, size)).array.reshape(Q.shape)

    for mask in (
        None,
        of.causal(),
        of.causal(sliding_window=6),
        of.causal(segment_ids=segment_ids),
        of(segment_ids=segment_ids),
        of.bidirectional_sliding_window(4),
    ):
        want = lambda *x, m=mask: run(theirs.dot_product_attention, m, *x, attn_backend="vanilla")  # noqa: E731
        assert_same(lambda *x, m=mask: run(ours.dot_product_attention, m, *x), want, Q, K, V, SINK)
    for mask, how in (
        (of.causal(offset=2), {}),
        (of.explicit(hax.ones((pos, k_pos), dtype=bool)), {}),
        (hax.ones((pos, k_pos), dtype=bool), {}),
        (None, {"dropout": 0.1}),
        (None, {"logits_soft_cap": 20.0}),
        (None, {"attn_backend": theirs.AttentionBackend.NVTE}),
    ):
        with pytest.raises(NotImplementedError, match="not supported"):
            run(ours.dot_product_attention, mask, Q, K, V, SINK, **how)


# ---- ejkernel


def flash_attention(
    query, key, value, attention_mask=None, bias=None, softmax_scale=None, dropout_prob=0.0, causal=False,
    dropout_seed=None, cum_seqlens_q=None, cum_seqlens_k=None, sliding_window=None, fwd_params=None, bwd_params=None,
    logits_soft_cap=None, softmax_aux=None, normalize_output=True, precision=jax.lax.Precision.DEFAULT,
    logits_dtype=jnp.float32, *, q_segment_ids=None, kv_segment_ids=None, block_tables=None,
):  # fmt: skip
    """The signature in ejkernel's registry."""


class Registry:
    """A registry of kernels like ejkernel's, by algorithm, platform, backend and priority."""

    def __init__(self):
        self._registry = {"flash_attention": [(0, "xla", "any", flash_attention)]}

    def register(self, algorithm, platform, backend, priority=0):
        def add(f):
            self._registry[algorithm].append((priority, platform, backend, f))
            self._registry[algorithm].sort(key=lambda x: -x[0])
            return f

        return add

    def get(self, algorithm, platform=None, backend=None):
        return next(f for _, *where, f in self._registry[algorithm] if where == [platform, backend])


@pytest.fixture(params=["real", "stand-in"])
def ejkernel(request, monkeypatch):
    """The adapter, ejkernel's own flash attention, and how to get what is registered."""
    if request.param == "real":
        monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
        registry = peer("ejkernel.kernels").kernel_registry
        monkeypatch.setattr(registry, "_registry", {k: [*v] for k, v in registry._registry.items()})
    else:
        registry = Registry()
        stand_in(monkeypatch, {"ejkernel.kernels": {"kernel_registry": registry}})
    own = registry.get("flash_attention", "xla", "any")

    priorities = itertools.count(1)  # of two that are equal the earlier counts

    def get(**options):
        ours.register("xla", "any", next(priorities), **options)
        return registry.get("flash_attention", "xla", "any")

    ours = adapter(monkeypatch, "ejkernel")
    return get, None if request.param == "stand-in" else own


def options_of(kind):
    return {
        "causal": kind not in ("all", "segments"),
        "sliding_window": 5 if "window" in kind else None,
        "q_segment_ids": IDS if "segments" in kind else None,
        "kv_segment_ids": IDS if "segments" in kind else None,
    }


@pytest.mark.parametrize("kind", SEEN)
def test_ejkernel(ejkernel, kind):
    """A sink of one number for every head, so that it means the same however `softmax_aux` is read."""
    get, own = ejkernel
    options = options_of(kind)
    ours = get()
    f = lambda q, k, v, sink: ours(q, k, v, softmax_aux=sink, softmax_scale=0.3, **options)  # noqa: E731
    g = lambda q, k, v, sink: dense(q, k, v, SEEN[kind], jnp.broadcast_to(sink, (H_Q,)), 0.3)  # noqa: E731
    assert_same(f, g, Q, K, V, SINK[:1])
    if own is not None:  # it has no gradient of sinks
        g = lambda q, k, v: own(q, k, v, softmax_aux=SINK[:1], softmax_scale=0.3, **options)  # noqa: E731
        assert_same(lambda q, k, v: f(q, k, v, SINK[:1]), g, Q, K, V)


def test_ejkernel_s_sinks_and_masks(ejkernel):
    get, own = ejkernel
    ours, per_head = get(), get(sink_per_head=True)
    causal = SEEN["causal"]
    every = jnp.broadcast_to(jax.nn.logsumexp(SINK), (H_Q,))
    mask = jnp.asarray(SEEN["window segments"])[:, None]
    for f, g in (
        (lambda *x: ours(*x[:3], causal=True, softmax_aux=x[3]), lambda *x: dense(*x[:3], causal, every + 0 * x[3])),
        (lambda *x: per_head(*x[:3], causal=True, softmax_aux=x[3]), lambda *x: dense(*x[:3], causal, x[3])),
        (lambda *x: ours(*x[:3], causal=True, softmax_aux=x[3][:, None]), lambda *x: dense(*x[:3], causal, x[3])),
        (lambda *x: ours(*x[:3], mask), lambda *x: dense(*x[:3], SEEN["window segments"])),
        (
            lambda *x: ours(*x[:3], mask.astype(jnp.int32) | 1, causal=True, sliding_window=(5, 0), q_segment_ids=IDS),
            lambda *x: dense(*x[:3], SEEN["window segments"]),
        ),
    ):
        got, want = f(Q, K, V, SINK), g(Q, K, V, SINK)
        np.testing.assert_allclose(jnp.where(REAL, got, 0), jnp.where(REAL, want, 0), rtol=2e-4, atol=2e-5)
    if own is not None:  # it counts all numbers for every head too
        options = {"causal": True, "softmax_aux": SINK}
        np.testing.assert_allclose(ours(Q, K, V, **options), own(Q, K, V, **options), rtol=2e-4, atol=2e-5)


def test_ejkernel_through_its_public_function(ejkernel, monkeypatch):
    """`ejkernel.modules.flash_attention`, which asks the registry, with ids in its MaskInfo."""
    get, own = ejkernel
    if own is None:
        pytest.skip("of the real package")
    modules, mask = peer("ejkernel.modules"), peer("ejkernel.types.mask")
    info = mask.MaskInfo.from_segments(IDS, IDS)
    run = lambda: modules.flash_attention(Q, K, V, mask_info=info, causal=True, platform="xla")  # noqa: E731
    want = run()
    calls = []
    kernel = get()
    kernels = importlib.import_module("ejkernel.kernels").kernel_registry
    kernels.register("flash_attention", "xla", "any", 200)(lambda **x: calls.append(1) or kernel(**x))
    np.testing.assert_allclose(jnp.where(REAL, run(), 0), jnp.where(REAL, want, 0), rtol=2e-4, atol=2e-5)
    assert calls


def test_ejkernel_what_is_not_taken(ejkernel):
    get, _ = ejkernel
    ours = get()
    for options in (
        {"bias": jnp.zeros((B, H_Q, S, S))},
        {"dropout_prob": 0.1},
        {"logits_soft_cap": 20.0},
        {"normalize_output": False},
        {"logits_dtype": jnp.bfloat16},
        {"cum_seqlens_q": jnp.arange(3), "cum_seqlens_k": jnp.arange(3)},
        {"block_tables": jnp.zeros((B, 1), jnp.int32)},
    ):
        with pytest.raises(Exception, match=f"{next(iter(options))[:8]}.*not supported"):
            ours(Q, K, V, **options)
    for operands, options in (
        ((Q[:, :4], K, V), {"causal": True}),
        ((Q, K, V, jnp.asarray(SEEN["causal"] & (BACK != 1))[None]), {}),
        ((Q, K, V, jnp.ones((B, H_Q, S, S), bool)), {}),
        ((Q, K, V), {"sliding_window": -1}),
        ((Q, K, V), {"kv_segment_ids": IDS}),
    ):
        with pytest.raises((NotImplementedError, ValueError), match="wanted"):
            ours(*operands, **options)
    given = {"fwd_params": object(), "precision": jax.lax.Precision.HIGHEST, "logits_dtype": jnp.dtype("float32")}
    np.testing.assert_array_equal(ours(Q, K, V, **given), ours(Q, K, V))


# ---- AXLearn


class Bias:
    """AXLearn's biases that are masks, as far as the adapter asks; a sum of them is a tuple."""

    def __init__(self, target_positions=None, source_positions=None, sliding_window_size=None, segment_ids=None):
        self.target_positions, self.source_positions = target_positions, source_positions
        self.sliding_window_size, self.segment_ids = sliding_window_size, segment_ids

    def has_value(self):
        return not isinstance(self, Zero)


class Zero(Bias):
    pass


class Causal(Bias):
    pass


class Window(Bias):
    pass


class Segments(Bias):
    pass


class Tensor(Bias):
    pass


def split(bias, *kinds):
    bias = bias if isinstance(bias, tuple) else (bias,)
    rest = [x for x in bias if type(x) not in (*kinds, Zero)]
    return (*(next((x for x in bias if type(x) is kind), Zero()) for kind in kinds), (rest or [Zero()])[0])


class BaseFlashAttention:
    """AXLearn's base class of kernels, as far as the adapter asks."""

    def __init__(self, **cfg):
        self.cfg = types.SimpleNamespace(**{"softmax_scale": 1.0, "dropout_rate": 0.0, "interpret": True} | cfg)

    def get_backend_overrides(self, name, default):
        return default

    def _log_unsupported(self, reason):
        return False

    def is_supported(self, input_batch, kv_cache_type):
        return True


@pytest.fixture(params=["real", "stand-in"])
def axlearn(request, monkeypatch):
    """A function that computes by the kernel that AXLearn chooses, or gives None if it is not ours; one that makes a
    bias; and AXLearn's reference.
    """
    if request.param == "real":
        utils, biases = peer("axlearn.common.flash_attention.utils"), peer("axlearn.common.attention_bias")
        monkeypatch.setitem(utils.BACKENDS, "cpu", [*utils.BACKENDS["cpu"]])

        def make(kind, positions=POSITIONS, window=None, segment_ids=None):
            both = {"target_positions": positions, "source_positions": positions}
            if kind == "causal":
                return biases.CausalAttentionBias(**both)
            if kind == "window":
                mask = biases.sliding_window_causal_mask(window)
                return biases.SlidingWindowAttentionBias(mask=mask, sliding_window_size=window, **both)
            if kind == "segments":
                return biases.SegmentIdAttentionBias(segment_ids)
            return biases.TensorAttentionBias(jnp.zeros((B, 1, S, S)))

        def run(q, k, v, masks, sink=None, **cfg):
            bias = biases.CompositeAttentionBias(masks)
            specs = utils.flash_attention_implementation(
                "cpu", query=q, key=k, value=v, bias=bias, logit_sink=sink, softmax_scale=0.3, **cfg
            )
            if type(specs.fn).__name__ != "FMHA":
                return None
            return specs.fn({"query": q, "key": k, "value": v, "bias": bias, "logit_sink": sink})

        ours = adapter(monkeypatch, "axlearn")
        assert utils.BACKENDS["cpu"][0].__name__ == "ReferenceMHA"
        theirs = utils.BACKENDS["cpu"][0].default_config().set(softmax_scale=0.3).instantiate()
        ours.register("cpu")

        def reference(q, k, v, masks, sink):
            bias = biases.CompositeAttentionBias(masks)
            return theirs({"query": q, "key": k, "value": v, "bias": bias, "logit_sink": sink})

        return run, make, reference

    kinds = {"causal": Causal, "window": Window, "segments": Segments}
    names = ("CausalAttentionBias", "SlidingWindowAttentionBias", "SegmentIdAttentionBias")
    of_biases = dict(zip(names, kinds.values(), strict=True)) | {"split": split}
    backends = {"cpu": []}
    where = "axlearn.common.flash_attention"
    stand_in(monkeypatch, {
        "axlearn.common": {"attention_bias": types.SimpleNamespace(**of_biases)},
        f"{where}.common": {"BaseFlashAttention": BaseFlashAttention},
        f"{where}.utils": {"BACKENDS": backends},
    })  # fmt: skip
    adapter(monkeypatch, "axlearn").register("cpu")

    def make(kind, positions=POSITIONS, window=None, segment_ids=None):
        return kinds.get(kind, Tensor)(positions, positions, window, segment_ids)

    def run(q, k, v, masks, sink=None, kv_cache_type=None, **cfg):
        kernel = backends["cpu"][0](softmax_scale=0.3, **cfg)
        batch = {"query": q, "key": k, "value": v, "bias": tuple(masks), "logit_sink": sink}
        return kernel(batch) if kernel.is_supported(batch, kv_cache_type) else None

    return run, make, None


def masks_of(kind, make, ids=IDS, **positions):
    found = [] if kind in ("all", "segments") else [make("causal", **positions)]
    found += [make("window", window=5, **positions)] if "window" in kind else []
    return found + ([make("segments", segment_ids=ids)] if "segments" in kind else [])


@pytest.mark.parametrize("kind", SEEN)
def test_axlearn(axlearn, kind):
    run, make, reference = axlearn
    masks = masks_of(kind, make)
    f = lambda q, k, v, sink: run(q, k, v, masks, sink)  # noqa: E731
    assert_same(f, lambda q, k, v, sink: dense(q, k, v, SEEN[kind], sink, 0.3), Q, K, V, SINK)
    if reference is not None:
        assert_same(f, lambda q, k, v, sink: reference(q, k, v, masks, sink), Q, K, V, SINK, real=True)


def test_axlearn_what_is_not_taken(axlearn):
    run, make, _ = axlearn
    causal = masks_of("causal", make)
    assert run(Q, K, V, causal) is not None
    assert run(Q, K, V, [*causal, make("tensor")]) is None
    assert run(Q, K, V, causal, dropout_rate=0.1) is None
    assert run(Q, K, V, causal, kv_cache_type=dict) is None
    assert run(Q[:, :4], K, V, []) is None
    ids = jnp.array([[1] * 8 + [2] * 8 + [1] * 8, [1] * S])
    o = jax.jit(lambda ids: run(Q, K, V, masks_of("causal segments", make, ids)))(ids)
    assert jnp.isnan(o[0]).all() and not jnp.isnan(o[1]).any()
    packed = jnp.asarray(np.array([[*range(5), *range(12), *range(7)], [*range(20), *range(4)]]))
    o = run(Q, K, V, masks_of("causal segments", make, positions=packed))
    np.testing.assert_array_equal(o, run(Q, K, V, masks_of("causal segments", make)))
    assert jnp.isnan(run(Q, K, V, masks_of("causal", make, positions=packed))).all()
