"""The whole model of examples/deepseek_v4 against Hugging Face's `DeepseekV4ForCausalLM`. `make test-hf` runs this.

Hugging Face writes a checkpoint with random weights of a small model, and the example reads it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4.model import Model
from examples.deepseek_v4.weights import load
from jax_dsv4_fmha.layers import DSV4Attention, Rope, from_state_dict

from .test_hf import hf_config, numpy_of, random_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 5e-5
"""of float32, for four layers: the largest difference of logits over the largest logit"""


def theirs(**changes):
    """Their model, with experts by the token's number in the first layer; everything random."""
    kinds = {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "hc_mult": 4, "n_routed_experts": 8}
    config = hf_config(eos_token_id=None, **{**kinds, **changes})
    model = random_weights(transformers.DeepseekV4ForCausalLM(config), seed=5)
    generator = torch.Generator().manual_seed(6)
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if hasattr(gate, "tid2eid"):
            order = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator).argsort(-1)
            gate.tid2eid.copy_(order[:, : config.num_experts_per_tok])
        else:
            gate.e_score_correction_bias.copy_(0.3 * torch.randn(config.n_routed_experts, generator=generator))
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Their model, ours, and its parameters, from the directory that theirs has written."""
    directory = tmp_path_factory.mktemp("checkpoint")
    model = theirs()
    model.save_pretrained(directory)
    ours = Model.from_config(directory / "config.json")
    return model, ours, load(ours, directory, jnp.float32)


def prompts(b, s, seed=3):
    return np.random.default_rng(seed).integers(0, 97, (b, s)).astype(np.int32)


def error(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


@torch.no_grad()
def test_logits(pair):
    model, ours, params = pair
    tokens = prompts(2, 37)
    want = numpy_of(model(torch.tensor(tokens)).logits)
    assert error(jax.jit(ours)(params, tokens), want) < TOLERANCE


@torch.no_grad()
def test_greedy_tokens(pair):
    """64 tokens after prompts of different lengths, read together in chunks: what their model says after each alone."""
    model, ours, params = pair
    lengths, steps, chunk = np.array([37, 5, 23], np.int32), 64, 16
    tokens = prompts(3, lengths.max())
    caches = ours.cache(3, lengths.max() + steps, jnp.float32)
    read, step = jax.jit(ours.read, donate_argnums=2), jax.jit(ours.step, donate_argnums=2)
    logits = np.zeros((3, 97), np.float32)
    for at in range(0, lengths.max(), chunk):
        part = np.pad(tokens, ((0, 0), (0, chunk)))[:, at : at + chunk]
        got, caches = read(params, part, caches, np.int32(at), np.minimum(lengths, at + chunk))
        ends = (lengths > at) & (lengths <= at + chunk)
        logits[ends] = np.asarray(got)[ends]
    joined, said, all_logits = ours.joined(params), [], []
    for i in range(steps):
        said.append(logits.argmax(-1).astype(np.int32))
        all_logits.append(logits)
        logits, caches = step(joined, said[-1], caches, lengths + i + 1)
        logits = np.asarray(logits)
    for i, n in enumerate(lengths):
        prompt = torch.tensor(tokens[i : i + 1, :n]).long()
        how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": steps, "do_sample": False}
        want = model.generate(prompt, **how, output_logits=True, return_dict_in_generate=True)
        assert error(np.stack(all_logits)[:, i], torch.cat(want.logits)) < TOLERANCE
        assert np.stack(said)[:, i].tolist() == want.sequences[0, n:].tolist()


def test_gradients(pair, tmp_path):
    """Of the mean loss of next tokens, to every parameter. Choices have none: nor have an indexer, table or bias."""
    model, ours, params = pair
    tokens = prompts(2, 41)
    model.zero_grad()
    want = model(torch.tensor(tokens).long(), labels=torch.tensor(tokens).long()).loss
    want.backward()
    grads = theirs()
    with torch.no_grad():
        for p, q in zip(grads.parameters(), model.parameters(), strict=True):
            p.copy_(torch.zeros_like(q) if q.grad is None else q.grad)
    grads.save_pretrained(tmp_path)
    of_theirs = load(ours, tmp_path, jnp.float32)

    @jax.jit
    @jax.value_and_grad
    def loss(learned, routing):
        logits = ours({**learned, "routing": routing}, tokens)[:, :-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    got, of_ours = loss({k: x for k, x in params.items() if k != "routing"}, params["routing"])
    assert abs(float(got) - float(want)) < 1e-5 * float(want)
    unseen = 0
    for path, g in jax.tree_util.tree_leaves_with_path(of_ours):
        w = of_theirs
        for key in path:
            w = w[getattr(key, "key", getattr(key, "idx", None))]
        name = jax.tree_util.keystr(path)
        if "indexer" in name:
            assert not np.any(g) and not np.any(w), name
            unseen += 1
        else:
            assert np.any(w), name
            assert error(g, w) < 1e-3, (name, error(g, w))
    assert unseen == 2 * 5


@torch.no_grad()
def test_bfloat16(pair, tmp_path):
    """As near to their logits in float32 as theirs in bfloat16 are."""
    model, ours, _ = pair
    tokens = prompts(4, 64)
    exact = numpy_of(model(torch.tensor(tokens)).logits)
    rounded = theirs().bfloat16()
    rounded.save_pretrained(tmp_path)
    of_theirs = numpy_of(rounded(torch.tensor(tokens)).logits.float())
    of_ours = np.asarray(jax.jit(ours)(load(ours, tmp_path), tokens))
    far = [np.linalg.norm(x - exact, axis=-1) / np.linalg.norm(exact, axis=-1) for x in (of_ours, of_theirs)]
    assert np.median(far[0]) < 1.2 * np.median(far[1])


@torch.no_grad()
def test_fp8_caches(tmp_path):
    """Heads of 512 with caches in the model's FP8 layout."""
    model = theirs(head_dim=512, partial_rotary_factor=64 / 512, index_head_dim=128)
    model.save_pretrained(tmp_path)
    ours = Model.from_config(tmp_path / "config.json")
    params, tokens, n = load(ours, tmp_path), prompts(2, 70), 40
    want = numpy_of(model(torch.tensor(tokens)).logits)
    for dtype, most in ((jnp.bfloat16, 0.05), (jnp.float8_e4m3fn, 0.15)):  # this small model takes rounding ill
        caches = ours.cache(2, 70, dtype)
        read, step = jax.jit(ours.read, donate_argnums=2), jax.jit(ours.step, donate_argnums=2)
        logits, caches = read(params, tokens[:, :n], caches, np.int32(0), np.full(2, n, np.int32))
        got = [logits]
        for i in range(n, 70):
            logits, caches = step(params, tokens[:, i], caches, np.full(2, i + 1, np.int32))
            got.append(logits)
        got = np.stack(got, 1)
        far = np.linalg.norm(got - want[:, n - 1 :], axis=-1) / np.linalg.norm(want[:, n - 1 :], axis=-1)
        assert np.median(far) < most, dtype


def test_a_state_dict_of_torch():
    """torch's dtypes are known by their names: FP8 has scales, and nothing else has."""
    layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
    shapes = {
        "wq_a.weight": (32, 64), "q_norm.weight": (32,), "wq_b.weight": (128, 32), "wkv.weight": (32, 64),
        "kv_norm.weight": (32,), "attn_sink": (4,), "wo_a.weight": (32, 64), "wo_b.weight": (64, 32),
    }  # fmt: skip
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"wkv.weight": tensors["wkv.weight"].to(torch.float8_e4m3fn), "wkv.scale": torch.full((1, 1), 2.0)}
    got = from_state_dict(layer, tensors, dtype=jnp.float32)["wkv"]
    np.testing.assert_array_equal(got, 2 * tensors["wkv.weight"].float().numpy().T)
    for dtype in (torch.float8_e5m2, torch.int8):
        with pytest.raises(ValueError, match=r"wkv\.weight: got .*, wanted floats"):
            from_state_dict(layer, {**tensors, "wkv.weight": tensors["wkv.weight"].float().to(dtype)})
    with pytest.raises(ValueError, match=r"wkv\.weight: got .*, wanted no wkv\.scale"):
        from_state_dict(layer, {**tensors, "wkv.weight": tensors["wkv.weight"].to(torch.bfloat16)})
