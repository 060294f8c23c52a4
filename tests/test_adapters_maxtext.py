"""The adapter for MaxText, beside MaxText where it is installed, and beside a stand-in as MaxText 0.2.5 was read.

`make test-maxtext PYTHON=python3.12` runs this beside MaxText, in an environment of its own, with what MaxText imports
on a CPU. It leaves out `tests/conftest.py`, because JAX 0.11 does not know all of XLA's flags that this sets.
"""

import enum
import importlib.util
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import explain
from jax_dsv4_fmha._host import attention, library
from tests.helpers import collectives, every_kernel
from tests.test_adapters import (
    BACK,
    H_KV,
    H_Q,
    IDS,
    REAL,
    SAME,
    SEEN,
    SINK,
    B,
    D,
    K,
    Q,
    S,
    V,
    adapter,
    assert_same,
    dense,
    peer,
    stand_in,
)  # fmt: skip

KINDS = {  # MaxText's attention types, and what queries see
    "full": SEEN["all"],
    "global": SEEN["causal"],
    "local_sliding": SEEN["window"],
    "chunk": ((BACK >= 0) & (np.arange(S)[:, None] // 5 == np.arange(S) // 5))[None],
    "block_diffusion": (np.arange(S)[:, None] // 5 >= np.arange(S) // 5)[None],
}
POSITIONS = jnp.array([[*range(5), *range(12), *range(7)], [*range(20), *range(4)]])


class AttentionType(enum.Enum):
    GLOBAL, FULL, LOCAL_SLIDING, CHUNK = "global", "full", "local_sliding", "chunk"
    COMPRESSED, BLOCK_DIFFUSION = "compressed", "block_diffusion"


class AttentionOp:
    """MaxText's, as far as the adapter asks; its own attention gives a word."""

    def __init__(self, attention_type, attention_kernel="dot_product", attn_logits_soft_cap=None, moba=False):
        self.attention_type, self.attention_kernel = attention_type, attention_kernel
        self.sliding_window_size, self.chunk_attn_window_size, self.causal_block_size = 6, 5, 5
        self.attn_logits_soft_cap, self.config = attn_logits_soft_cap, types.SimpleNamespace(moba=moba)
        self._context_parallel_size = lambda: 1

    def apply_attention(self, query, **rest):
        return "MaxText's", None, None

    def __call__(
        self, query, key, value, decoder_segment_ids, inputs_positions, model_mode, sinks=None, compressed_mask=None,
        compressed_kv=None, compress_ratio=0, bidirectional_mask=None, indexer_mask=None, record_max_logits=False,
        previous_chunk=None,
    ):  # fmt: skip
        if compressed_kv is not None:
            key, value = (jnp.concatenate([x, compressed_kv], 1) for x in (key, value))
        return self.apply_attention(
            query=query, key=key, value=value, decoder_segment_ids=decoder_segment_ids, model_mode=model_mode,
            segment_positions=inputs_positions, lengths=None, use_ragged_attention=False, previous_chunk=previous_chunk,
            bidirectional_mask=bidirectional_mask, sinks=sinks, indexer_mask=indexer_mask, pad_kv_total=0,
            compressed_mask=compressed_mask, record_max_logits=record_max_logits, compress_ratio=compress_ratio,
            qk_product_einsum=jnp.einsum, wv_product_einsum=jnp.einsum, decoder_segment_ids_kv=None,
        )[0]  # fmt: skip


class DeepseekV4Indexer:
    def __call__(self, indices):
        return indices, None


class CompressedAttention:
    def get_compressed_mask(self, inputs_positions, compressed_len, sparse_compressed_mask=None):
        return sparse_compressed_mask


@pytest.fixture(params=["real", "stand-in"])
def maxtext(request, monkeypatch):
    """A function that makes MaxText's `AttentionOp`, and the classes that the adapter changed."""
    if request.param == "real":
        attention_op, compressed = peer("maxtext.layers.attention_op"), peer("maxtext.layers.attention_compressed")
        kinds = importlib.import_module("maxtext.common.common_types").AttentionType
        classes = attention_op.AttentionOp, compressed.DeepseekV4Indexer, compressed.CompressedAttention
    else:
        stand_in(monkeypatch, {
            "maxtext.common.common_types": {
                "MODEL_MODE_TRAIN": "train", "MODEL_MODE_PREFILL": "prefill", "AttentionType": AttentionType,
            },
            "maxtext.layers.attention_op": {"AttentionOp": AttentionOp},
            "maxtext.layers.attention_compressed": {
                "CompressedAttention": CompressedAttention, "DeepseekV4Indexer": DeepseekV4Indexer,
            },
        })  # fmt: skip
        kinds, classes = AttentionType, (AttentionOp, DeepseekV4Indexer, CompressedAttention)
    for of, name in zip(classes, ("apply_attention", "__call__", "get_compressed_mask"), strict=True):
        monkeypatch.setattr(of, name, getattr(of, name))  # so that they are MaxText's again after the test
    adapter(monkeypatch, "maxtext").register()

    def make(kind, kernel="dot_product", heads=(H_Q, H_KV), **options):
        if request.param == "stand-in":
            return classes[0](kinds(kind), kernel, **options)
        config = configure(causal_block_size=5, moba=options.pop("moba", False))
        return classes[0](
            config=config, mesh=mesh(config), attention_kernel=kernel, max_target_length=S, num_query_heads=heads[0],
            num_kv_heads=heads[1], attention_type=kinds(kind), sliding_window_size=6, chunk_attn_window_size=5,
            **options,
        )  # fmt: skip

    return make, classes


def base():
    """MaxText's base.yml, and options of a run on this machine."""
    where = Path(importlib.util.find_spec("maxtext").origin).parent / "configs/base.yml"
    return [
        str(where), "run_name=test", "hardware=cpu", "skip_jax_distributed_system=true", "enable_checkpointing=false",
        "log_config=false", "dtype=float32", "matmul_precision=highest", "attention=dot_product",
        f"base_output_directory={tempfile.gettempdir()}",
    ]  # fmt: skip


def configure(**options):
    pyconfig = importlib.import_module("maxtext.configs.pyconfig")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pyconfig.initialize(["", *base(), *(f"{name}={str(x).lower()}" for name, x in options.items())])


def mesh(config):
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes)), config.mesh_axes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(maxtext, kind, packed):
    """GQA, with a sink and without. `autoselected` stays MaxText's attention, which means dot products on a CPU."""
    make, _ = maxtext
    seen, ids = (KINDS[kind] & SAME, IDS) if packed else (KINDS[kind], None)
    op, real = make(kind), REAL if packed else True
    without = lambda q, k, v: op(q, k, v, ids, POSITIONS, "train")  # noqa: E731
    with_sink = lambda q, k, v, sink: op(q, k, v, ids, POSITIONS, "train", sinks=sink)  # noqa: E731
    operands = Q * D**-0.5, K, V, SINK  # MaxText scales q
    assert_same(without, lambda *x: dense(*x, seen, scale=1.0), *operands[:3], real=real)
    assert_same(with_sink, lambda *x: dense(*x[:3], seen, x[3], scale=1.0), *operands, real=real)
    if type(op) is not AttentionOp:
        own = make(kind, "autoselected")
        assert_same(without, lambda *x: own(*x, ids, POSITIONS, "train"), *operands[:3], real=real)
        theirs = lambda q, k, v, sink: own(q, k, v, ids, POSITIONS, "train", sinks=sink)  # noqa: E731
        assert_same(with_sink, theirs, *operands, real=real)


N = S // 4  # entries, of 4 tokens each
PAST = np.arange(N) * 4 + 4 <= np.arange(S)[:, None] + 1
FIRST = np.array([[0] * 5 + [5] * 12 + [17] * 7, [0] * 20 + [20] * 4])[..., None]  # of each token's document
OF_ENTRIES = jnp.where(IDS.reshape(B, N, 4).min(-1) == IDS.reshape(B, N, 4).max(-1), IDS[:, ::4], -1)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_compressed_attention(maxtext, packed, chosen):
    """V4's window and entries under one softmax. Entries that two packed documents share are not seen."""
    make, (_, indexer, layer) = maxtext
    op, kv, entries = make("compressed", heads=(H_Q, 1)), K[:, :, :1], V[:, :N, :1]
    ids, ids_kv, real = (IDS, jnp.concatenate([IDS, OF_ENTRIES], 1), REAL) if packed else (None, None, True)
    far = np.broadcast_to(PAST & (np.arange(N) * 4 >= FIRST) if packed else PAST, (B, S, N))
    if chosen:
        if type(op) is not AttentionOp:
            pytest.skip("MaxText's indexer makes its own choice: see test_layer")
        scores = np.where(far, np.random.default_rng(0).random(far.shape), -1)
        indices = np.where(np.take_along_axis(far, order := np.argsort(-scores)[..., :2], -1), order, -1)
        far = (indices[..., None] == np.arange(N)).any(-2)
    near = np.broadcast_to(SEEN["window segments" if packed else "window"], (B, S, S))
    mask = jnp.where(far, 0.0, 0.7 * jnp.finfo(jnp.float32).min)[:, None, None]

    def run(op, q, kv, entries, sink):
        if chosen:
            indexer()(jnp.asarray(indices))
            layer().get_compressed_mask(POSITIONS, N, mask)
        more = {} if type(op) is AttentionOp else {"decoder_segment_ids_kv": ids_kv}
        how = {"sinks": sink, "compressed_mask": mask, "compressed_kv": entries, "compress_ratio": 4, **more}
        return op(q, kv, kv, ids, POSITIONS, "train", **how)

    def want(q, kv, entries, sink):
        both = jnp.concatenate([kv, entries], 1).repeat(H_KV, 2)
        return dense(q, both, both, np.concatenate([near, far], -1), sink, 1.0)

    operands = Q * D**-0.5, kv, entries, SINK
    assert_same(lambda *x: run(op, *x), want, *operands, real=real)
    if type(op) is not AttentionOp:
        own = make("compressed", "autoselected", heads=(H_Q, 1))
        assert_same(lambda *x: run(op, *x), lambda *x: run(own, *x), *operands, real=real)


def test_a_latent_stays_one_operand(maxtext, monkeypatch):
    """V4's layers of a window alone pass one array as K and V. At d 512 kernels want it so."""
    make, _ = maxtext
    op = make("local_sliding", heads=(64, 1))
    monkeypatch.setattr(attention, "split_count", lambda *_: 1)
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q, kv = (jax.ShapeDtypeStruct((B, S, heads, 512), jnp.bfloat16) for heads in (64, 1))
    decision, *more = explain(lambda q, kv: op(q, kv, kv, IDS, POSITIONS, "train"), q, kv)
    assert (decision.variant, more) == ("mla_span_fwd_sm_90a_d512_bfloat16", [])


def test_what_is_not_taken(maxtext):
    make, _ = maxtext
    run = lambda op, **how: op(Q, K, V, IDS, POSITIONS, "train", **how)  # noqa: E731
    shared = make("global")
    shared._context_parallel_size = lambda: 2
    for op, how in (
        (shared, {}),
        (make("global", attn_logits_soft_cap=20.0), {}),
        (make("global", moba=True), {}),
        (make("global"), {"bidirectional_mask": jnp.zeros((B, S), bool)}),
        (make("global"), {"indexer_mask": jnp.zeros((B, S, S))}),
        (make("global"), {"record_max_logits": True}),
    ):
        with pytest.raises(NotImplementedError, match="not supported"):
            run(op, **how)
    for k, v in ((K, V[..., :8]), (K[:, :8], V[:, :8])):
        with pytest.raises(NotImplementedError, match="not supported"):
            make("global")(Q, k, v, None, POSITIONS, "train")
    apart = jnp.array([[1] * 8 + [2] * 8 + [1] * 8, [1] * S])  # traced: NaN, in this batch entry alone
    o = jax.jit(lambda ids: make("global")(Q, K, V, ids, POSITIONS, "train"))(apart)
    assert jnp.isnan(o[0]).all() and not jnp.isnan(o[1]).any()


def test_what_stays_maxtext_s(maxtext):
    make, _ = maxtext
    if type(make("global")) is not AttentionOp:
        pytest.skip("of the stand-in")
    chunk = {"previous_chunk": object()}
    for kernel, mode, how in (
        ("cudnn_flash_te", "train", {}), ("dot_product", "autoregressive", {}), ("dot_product", "prefill", chunk),
    ):  # fmt: skip
        assert make("global", kernel)(Q, K, V, IDS, POSITIONS, mode, **how) == "MaxText's"
    prompt = make("global")(Q, K, V, IDS, POSITIONS, "prefill")
    np.testing.assert_array_equal(prompt, make("global")(Q, K, V, IDS, POSITIONS, "train"))


# ---- MaxText's own layers and its trainer

V4 = {
    "model_name": "deepseek4-tiny", "override_model_config": True, "base_num_decoder_layers": 5,
    "compress_ratios": "[0,0,4,128,4]", "vocab_size": 256, "indexer_topk": 8, "max_target_length": 256,
    "per_device_batch_size": 2, "sparse_matmul": False, "megablox": False,
}  # fmt: skip
STAGES = {  # of V4's indexer in training: a mask of what it chose, with its loss and without; all entries
    "sparse": {"indexer_sparse_training": True, "indexer_loss_scaling_factor": 0.1},
    "sparse without loss": {"indexer_sparse_training": True},
    "warm-up": {"indexer_loss_scaling_factor": 1.0},
    "dense": {"use_indexer": False},
}
GPT_OSS = {
    "model_name": "gpt-oss-20b", "override_model_config": True, "base_num_decoder_layers": 2, "base_emb_dim": 64,
    "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 16, "base_mlp_dim": 64, "base_moe_mlp_dim": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "sliding_window_size": 32, "vocab_size": 256, "max_target_length": 256,
    "per_device_batch_size": 2, "sparse_matmul": False, "megablox": False,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MaxText's by flax
@pytest.mark.parametrize("maxtext", ["real"], indirect=True)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ratio", [0, 4, 8])
@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_layer(maxtext, mode, ratio, stage):
    """MaxText's layer of V4 with its parameters, on documents that begin inside of a block; ratio 8 is its HCA."""
    if stage != "sparse" and (ratio != 4 or mode != "train"):
        pytest.skip("the indexer is of ratio 4, and its loss of training")
    nnx, (*_, layer) = importlib.import_module("flax.nnx"), maxtext[1]
    config = configure(**V4, **STAGES[stage])
    x = jax.random.normal(jax.random.key(0), (2, 92, config.emb_dim))
    ids = jnp.array([[1] * 37 + [2] * 11 + [3] * 44, [1] * 3 + [2] * 80 + [0] * 9])
    positions = jnp.array([[*range(37), *range(11), *range(44)], [*range(3), *range(80), *range(9)]])

    def make(kernel):
        module = layer(
            config=config, compress_ratio=ratio, num_query_heads=config.num_query_heads, num_kv_heads=1,
            head_dim=config.head_dim, max_target_length=93, attention_kernel=kernel, inputs_q_shape=x.shape,
            inputs_kv_shape=x.shape, mesh=mesh(config), dtype=jnp.float32, q_lora_rank=config.q_lora_rank,
            sliding_window_size=config.sliding_window_size, model_mode=mode, max_prefill_predict_length=92,
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))  # sinks and biases of pooling begin as 0
        leaves = [p + 0.3 * jax.random.normal(key, p.shape) for p, key in zip(leaves, keys, strict=True)]

        def run(x, *leaves):
            module = nnx.merge(graph, jax.tree.unflatten(tree, leaves), jax.tree.map(jnp.asarray, rest))  # caches too
            y, _ = module(x, x, ids, positions, deterministic=True, model_mode=mode)
            loss = getattr(module, "indexer_loss", None)
            return y if loss is None else y + loss.get_value()

        return run, leaves

    (ours, leaves), (theirs, _) = make("dot_product"), make("autoselected")
    assert_same(ours, theirs, x, *leaves, real=True)
    if stage == "sparse without loss":  # no mask of what the indexer chose, 8 of 23 entries, is computed
        programs = (jax.jit(f).lower(x, *leaves).compile().as_text() for f in (ours, theirs))
        assert ["pred[2,92,8,23]" in program for program in programs] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("options", [GPT_OSS, V4 | STAGES["sparse"]], ids=["gpt-oss", "v4"])
def test_trainer(options, tmp_path):
    """Losses of MaxText's trainer with its dot products and with this package, on its packed synthetic data.

    `examples/maxtext_times.py` takes the same steps as the trainer, both ways.
    """
    peer("maxtext.layers.attention_op")
    args = [*base(), *(f"{name}={str(x).lower()}" for name, x in options.items())]
    args += ["dataset_type=synthetic", "steps=5", "learning_rate=3e-3", "max_segments_per_seq=4"]

    def run(*command):
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.run([sys.executable, *command], check=True, env=env, stdout=subprocess.PIPE, text=True).stdout

    def losses(module):
        file = tmp_path / f"{module}.jsonl"
        run("-m", module, *args, f"metrics_file={file}")
        lines = map(json.loads, file.read_text().splitlines())
        return [[x["learning/loss"], x["learning/raw_grad_norm"]] for x in lines]

    ours, theirs = map(losses, ("jax_dsv4_fmha.adapters.maxtext", "maxtext.trainers.pre_train.train"))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    assert ours[-1][0] < ours[0][0] - 0.1
    how = ("--hardware", "cpu", "--tokens", "256", "--steps", "5")
    *steps, whole = map(json.loads, run("examples/maxtext_times.py", "train", *how, *args[1:]).splitlines()[-6:])
    for way, want in (("ours", ours), ("dots", theirs)):
        np.testing.assert_allclose([[x[f"{way}_loss"], x[f"{way}_grad_norm"]] for x in steps], want, rtol=1e-5)
    assert whole["apart"] < 1e-4 and whole["dots_ms"] > 0 < whole["ours_ms"]


def test_fresh_tokens():
    """Of examples/maxtext_times.py: one language, in which four tokens may follow each, in other words each step."""
    fresh = runpy.run_path("examples/maxtext_times.py")["fresh"]
    old = {name: jnp.zeros((2, 400), jnp.int32) for name in ("inputs", "targets", "inputs_segmentation")}
    batches, followed = [fresh(old, 16, seed) for seed in range(3)], {}
    for batch in batches:
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        assert batch["inputs_segmentation"] is old["inputs_segmentation"]
        for token, after in zip(np.ravel(batch["inputs"]), np.ravel(batch["targets"]), strict=True):
            followed.setdefault(int(token), set()).add(int(after))
    assert {len(x) for x in followed.values()} <= {1, 2, 3, 4} and max(map(len, followed.values())) == 4
    assert (batches[0]["inputs"] != batches[1]["inputs"]).any()
    np.testing.assert_array_equal(fresh(old, 16, 1)["inputs"], batches[1]["inputs"])


ON_DEVICES = {  # MaxText does not start V4 with tensor parallelism: V4 has one KV head
    "gpt-oss-2": (GPT_OSS, {"ici_fsdp_parallelism": 2}),
    "gpt-oss-4": (GPT_OSS, {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}),
    "v4-2": (V4 | {"indexer_sparse_training": True}, {"ici_fsdp_parallelism": 2}),
    "v4-4": (V4 | {"indexer_sparse_training": True}, {"ici_fsdp_parallelism": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("on", ON_DEVICES)
def test_no_collective_is_added(on, tmp_path):
    """MaxText's compiled training step on virtual devices: the kinds of collectives, and what each kind moves."""
    peer("maxtext.layers.attention_op")
    model, split = ON_DEVICES[on]
    args = [*base(), *(f"{name}={str(x).lower()}" for name, x in (model | split).items())]
    args += ["dataset_type=synthetic", "steps=1", "max_segments_per_seq=4"]
    devices = f"--xla_force_host_platform_device_count={math.prod(split.values())}"

    def moved(module):
        folder = tmp_path / module
        flags = f"{devices} --xla_dump_to={folder} --xla_dump_hlo_module_re=.*train_step.*"
        uncached = {"JAX_ENABLE_COMPILATION_CACHE": "0"}  # a program from MaxText's cache would not be dumped
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **uncached}
        subprocess.run([sys.executable, "-m", module, *args], check=True, env=env)
        (program,) = folder.glob("*.cpu_after_optimizations.txt")
        return collectives(types.SimpleNamespace(as_text=program.read_text))

    ours, theirs = map(moved, ("jax_dsv4_fmha.adapters.maxtext", "maxtext.trainers.pre_train.train"))
    assert theirs and ours.keys() <= theirs.keys(), (ours, theirs)
    assert all(ours[kind] <= theirs[kind] for kind in ours), (ours, theirs)
