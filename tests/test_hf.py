"""Layers against Hugging Face's `deepseek_v4` in float32: same weights, same numbers. `make test-hf` runs this.

Others wrote the compared modules, for torch; they run unchanged.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha.layers import from_config, from_state_dict

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
deepseek_v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
TOLERANCE = 2e-5
"""the error of float32 sums in another order, relative to the greatest number"""


def hf_config(**changes):
    """A model with every kind of layer, small; `topk` is below what most queries see, so that choosing matters."""
    entries = {
        "vocab_size": 97, "hidden_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 4,
        "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 24, "num_experts_per_tok": 2, "n_routed_experts": 4,
        "max_position_embeddings": 4096, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 16, "index_head_dim": 16,
        "index_topk": 6, "sliding_window": 8, "hc_mult": 2, "partial_rotary_factor": 8 / 32,
        "layer_types": [*KINDS, KINDS[1]], "mlp_layer_types": ["moe"] * 4,
        "compress_rates": {KINDS[1]: 4, KINDS[2]: 16},
        "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64,
                            "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0},
        "attn_implementation": "eager",
    }  # fmt: skip
    return transformers.DeepseekV4Config(**(entries | changes))


def numpy_of(x):
    return x.detach().cpu().numpy()


def random_weights(module, seed=0):
    """Everything random, because zeros and ones would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if "norm" in name else noise * (p.shape[-1] ** -0.5 if p.ndim > 1 else 1))
    return module.eval()


@functools.cache
def pair(kind):
    """Hugging Face's layer, ours, and its weights as ours."""
    config = hf_config()
    index = KINDS.index(kind)
    theirs = random_weights(deepseek_v4.DeepseekV4Attention(config, index), seed=index)
    ours = from_config(config.to_dict())[index]
    return config, theirs, ours, from_state_dict(ours, theirs.state_dict(), dtype=jnp.float32)


def their_run(config, theirs, x, cache=None, start=0):
    """Hugging Face's layer on x, as its model calls it."""
    b, s, _ = x.shape
    positions = torch.arange(start, start + s)[None].expand(b, -1)
    rotary = deepseek_v4.DeepseekV4RotaryEmbedding(config)
    embeddings = {kind: rotary(x, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
    earlier = 0 if cache is None else min(start, config.sliding_window - 1)
    q, k = positions[0][:, None], torch.arange(start - earlier, start + s)[None]
    mask = torch.where((k <= q) & (k > q - config.sliding_window), 0.0, -torch.inf)[None, None].expand(b, -1, -1, -1)
    return theirs(
        x, position_embeddings=embeddings, position_ids=positions, attention_mask=mask, past_key_values=cache
    )[0]


def hidden(b, s, seed=7):
    return np.random.default_rng(seed).standard_normal((b, s, 48)).astype(np.float32)


def assert_close(got, want, name=""):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, name
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("s", [3, 70])
def test_prompt(kind, s):
    config, theirs, ours, params = pair(kind)
    x = hidden(2, s)
    assert_close(jax.jit(lambda p, x: ours(p, x).y)(params, x), numpy_of(their_run(config, theirs, torch.tensor(x))))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_generation(kind):
    """A prompt in chunks of any length, then 40 steps, over every boundary of blocks and around the rings."""
    config, theirs, ours, params = pair(kind)
    x = hidden(2, 83)
    cache = ours.cache(2, 96, jnp.float32)
    chunk = jax.jit(lambda p, x, c, start: ours(p, x, c, start=start)[:2], donate_argnums=2)
    step = jax.jit(lambda p, x, c, n: ours.step(p, x, c, lengths=n)[:2], donate_argnums=2)
    theirs_cache = transformers.DynamicCache(config=config)
    theirs_layer = theirs_cache.layers[theirs.layer_idx]
    at = 0
    for n in [6, 23, 14] + [1] * 40:
        want = their_run(config, theirs, torch.tensor(x[:, at : at + n]), theirs_cache, at)
        at += n
        if n > 1:
            got, cache = chunk(params, x[:, at - n : at], cache, jnp.int32(at - n))
        else:
            got, cache = step(params, x[:, at - 1 : at], cache, jnp.int32(at))
        assert_close(got, numpy_of(want), f"up to token {at}")
    if ours.compressor is not None:
        entries = numpy_of(theirs_layer.compressed_kv["compressor"])
        assert_close(cache.compressed.take()[:, : entries.shape[1]], entries, "entries")


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch(kind):
    """Prompts of different lengths in one call, then steps; each sequence gives the result that it gives alone."""
    config, theirs, ours, params = pair(kind)
    lengths = np.array([41, 5, 32], np.int32)
    x = hidden(3, 60)
    want = [numpy_of(their_run(config, theirs, torch.tensor(x[i : i + 1, : n + 9])))[0] for i, n in enumerate(lengths)]
    cache = ours.cache(3, 64, jnp.float32)
    call = jax.jit(lambda p, x, c, n: ours(p, x, c, lengths=n)[:2], donate_argnums=2)
    got, cache = call(params, x[:, :41], cache, lengths)
    for i, n in enumerate(lengths):
        assert_close(got[i, :n], want[i][:n], f"prompt {i}")
    step = jax.jit(lambda p, x, c, n: ours.step(p, x, c, lengths=n)[:2], donate_argnums=2)
    for more in range(9):
        new = np.stack([x[i, n + more] for i, n in enumerate(lengths)])[:, None]
        got, cache = step(params, new, cache, lengths + more + 1)
        for i, n in enumerate(lengths):
            assert_close(got[i, 0], want[i][n + more], f"sequence {i}, step {more}")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_parameter(kind):
    config, theirs, ours, params = pair(kind)
    x, dy = hidden(2, 37), hidden(2, 37, seed=8)
    leaf = torch.tensor(x, requires_grad=True)
    theirs.zero_grad()
    (their_run(config, theirs, leaf) * torch.tensor(dy)).sum().backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    want = from_state_dict(ours, grads, dtype=jnp.float32)
    got, dx = jax.jit(jax.grad(lambda p, x: (ours(p, x).y * dy).sum(), (0, 1)))(params, x)
    assert_close(dx, numpy_of(leaf.grad), "x")
    unseen = 0
    for path, g in jax.tree_util.tree_leaves_with_path(got):
        w = functools.reduce(lambda tree, key: tree[key.key], path, want)
        if path[0].key == "indexer":  # choosing has no gradient, in theirs and in ours
            assert not np.any(w) and not np.any(g)
            unseen += 1
        else:
            assert np.any(w), path
            assert_close(g, w, jax.tree_util.keystr(path))
    assert unseen == (5 if ours.indexer is not None else 0)


class Ours(torch.nn.Module):
    """Our layer in the place of Hugging Face's, with our caches."""

    def __init__(self, layer, params, cache):
        super().__init__()
        self.params, self.cache = params, cache
        self.chunk = jax.jit(lambda p, x, c, start: layer(p, x, c, start=start)[:2])
        self.step = jax.jit(lambda p, x, c, n: layer.step(p, x, c, lengths=n)[:2])

    def forward(self, hidden_states, position_ids, **_):
        x, start = numpy_of(hidden_states), int(position_ids[0, 0])
        if x.shape[1] > 1:
            y, self.cache = self.chunk(self.params, x, self.cache, np.int32(start))
        else:
            y, self.cache = self.step(self.params, x, self.cache, np.int32(start + 1))
        return torch.tensor(np.asarray(y)), None


@torch.no_grad()
def test_model_of_four_layers():
    """Logits of a prompt and 24 greedy tokens of their whole model, with their attention and with ours in its place."""
    config = hf_config(eos_token_id=None)
    model = random_weights(transformers.DeepseekV4ForCausalLM(config), seed=5)
    prompt = torch.tensor(np.random.default_rng(3).integers(0, 97, (2, 37)))
    want = model(prompt).logits
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    for layer, ours in zip(model.model.layers, from_config(config.to_dict()), strict=True):
        params = from_state_dict(ours, layer.self_attn.state_dict(), dtype=jnp.float32)
        layer.self_attn = Ours(ours, params, ours.cache(2, 64, jnp.float32))
    logits = model(prompt, use_cache=False).logits
    assert_close(numpy_of(logits), numpy_of(want), "logits")
    said = [prompt]
    for at in range(37, 37 + 24):
        said.append(logits[:, -1:].argmax(-1))
        assert torch.equal(said[-1][:, 0], tokens[:, at]), at
        logits = model(said[-1], position_ids=torch.tensor([[at]]).expand(2, 1), use_cache=False).logits
