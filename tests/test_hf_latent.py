"""`LatentAttention` against Hugging Face's own modules of DeepSeek-V3, V3.2, GLM-5, GLM-5.3-Flash and Hy4 in float32:
same weights, same numbers. `make test-hf` runs this.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha.layers import LatentAttention, Shared, from_state_dict, to_state_dict

from .test_hf import assert_close, hidden, numpy_of, random_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "q_lora_rank": 24,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 4, "max_position_embeddings": 4096,
    "attn_implementation": "eager",
}  # fmt: skip
# `topk` is below what most queries see, so that choosing matters; many index heads, so that no score is 0
CHOICE = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 6}
YARN = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
}  # fmt: skip
SHARED = {"indexer_types": ["full", "shared"]}
POOLS = {"qk_rope_head_dim": 0, "index_kpool": 4, "layer_types": ["indexed_attention"] * 2, "rms_norm_eps": 1e-3}
KINDS = {
    "v3": ("DeepseekV3", {"rope_parameters": YARN}, 1),
    "v3, halves, one matrix of queries": ("DeepseekV3", {"rope_interleave": False, "q_lora_rank": None}, 1),
    "v32": ("DeepseekV32", {**CHOICE, "rope_parameters": YARN}, 1),
    "glm": ("GlmMoeDsa", {**CHOICE, **SHARED}, 2),
    "glm flash": ("Glm5NextText", {**POOLS, **SHARED, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}, 2),
    "hy4": ("HYV4", {**CHOICE, **SHARED, "rms_norm_eps": 1e-3}, 2),
}
"""Names of classes, entries of the config, and how many layers run one after the other"""
FOLDERS = {
    "DeepseekV3": "deepseek_v3",
    "DeepseekV32": "deepseek_v32",
    "GlmMoeDsa": "glm_moe_dsa",
    "Glm5NextText": "glm5_next",
    "HYV4": "hy_v4",
}


@functools.cache
def pair(kind):
    """Hugging Face's config and layers, ours, and their weights as ours."""
    name, entries, count = KINDS[kind]
    module = importlib.import_module(f"transformers.models.{FOLDERS[name]}.modeling_{FOLDERS[name]}")
    config = getattr(module, f"{name}Config")(**(SIZES | entries))
    theirs = [random_weights(getattr(module, f"{name}Attention")(config, i), seed=i) for i in range(count)]
    ours = [LatentAttention.from_config(config.to_dict(), layer=i) for i in range(count)]
    params = [from_state_dict(x, y.state_dict(), dtype=jnp.float32) for x, y in zip(ours, theirs, strict=True)]
    return (config, getattr(module, f"{name}RotaryEmbedding", None)), theirs, ours, params


def their_run(kind, x, cache=None, start=0):
    """Their layers on x, each on the sum of what the one before it was given and gave."""
    (config, rotary), theirs, _, _ = pair(kind)
    b, s, _ = x.shape
    positions = torch.arange(start, start + s)[None].expand(b, -1)
    mask = torch.where(torch.arange(start + s)[None] <= positions[0][:, None], 0.0, -torch.inf)
    more = (
        {
            "position_embeddings": rotary(config)(x, positions),
            "attention_mask": mask[None, None].expand(b, -1, -1, -1),
            "position_ids": positions,
        }
        if rotary
        else {"attention_mask": torch.ones((b, s), dtype=torch.bool)}
    )
    for layer in theirs:
        y, _, *chosen = layer(x, cache=cache, **more)
        more |= {"prev_topk_indices": chosen[0]} if chosen else {}
        x = x + y
    return x


def our_run(kind, call, params, x, caches=None):
    """Ours; call: a layer's call with its cache. The result, and the new caches."""
    shared, new = Shared(), []
    for layer, its, cache in zip(pair(kind)[2], params, caches or [None] * 2, strict=False):
        out = call(layer, its, x, cache, shared)
        x, shared = x + out.y, shared.after(out)
        new.append(out.cache)
    return x, new


def prompt(kind):
    return lambda params, x: our_run(kind, lambda layer, p, x, _, shared: layer(p, x, None, shared), params, x)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("s", [3, 41])
def test_prompt(kind, s):
    x = hidden(2, s)
    assert_close(jax.jit(prompt(kind))(pair(kind)[3], x), numpy_of(their_run(kind, torch.tensor(x))))


def continuing(kind):
    """A chunk, and a step, with caches."""

    def run(params, x, caches, how, is_step):
        def call(layer, p, x, cache, shared):
            return layer.step(p, x, cache, shared, **how) if is_step else layer(p, x, cache, shared, **how)

        return our_run(kind, call, params, x, caches)

    return jax.jit(run, donate_argnums=2, static_argnums=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
def test_chunks_and_generation(kind, pages):
    """A prompt in chunks of any length, then 40 steps."""
    (config, _), _, ours, params = pair(kind)
    x, run = hidden(2, 69), continuing(kind)
    table = jnp.array([[5, 2, 0, 7, 9], [1, 4, 3, 6, 8]], jnp.int32) if pages else None
    caches = [layer.cache(2, 80, jnp.float32, block_table=table) for layer in ours]
    theirs_cache = transformers.DynamicCache(config=config)
    at = 0
    for n in [6, 14, 9] + [1] * 40:
        want = their_run(kind, torch.tensor(x[:, at : at + n]), theirs_cache, at)
        at += n
        how = {"lengths": np.full(2, at, np.int32)} if n == 1 else {"start": jnp.int32(at - n)}
        got, caches = run(params, x[:, at - n : at], caches, how, n == 1)
        assert_close(got, numpy_of(want), f"up to token {at}")


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch(kind):
    """Prompts of different lengths in one call, then steps; each sequence gives the result that it gives alone."""
    _, _, ours, params = pair(kind)
    lengths, x, run = np.array([31, 5, 22], np.int32), hidden(3, 40), continuing(kind)
    want = [numpy_of(their_run(kind, torch.tensor(x[i : i + 1, : n + 5])))[0] for i, n in enumerate(lengths)]
    caches = [layer.cache(3, 48, jnp.float32) for layer in ours]
    got, caches = run(params, x[:, :31], caches, {"lengths": lengths}, False)
    for i, n in enumerate(lengths):
        assert_close(got[i, :n], want[i][:n], f"prompt {i}")
    for more in range(5):
        new = np.stack([x[i, n + more] for i, n in enumerate(lengths)])[:, None]
        got, caches = run(params, new, caches, {"lengths": lengths + more + 1}, True)
        for i, n in enumerate(lengths):
            assert_close(got[i, 0], want[i][n + more], f"sequence {i}, step {more}")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_parameter(kind):
    _, theirs, ours, params = pair(kind)
    x, dy = hidden(2, 27), hidden(2, 27, seed=8)
    leaf = torch.tensor(x, requires_grad=True)
    for layer in theirs:
        layer.zero_grad()
    (their_run(kind, leaf) * torch.tensor(dy)).sum().backward()
    got, dx = jax.jit(jax.grad(lambda p, x: (prompt(kind)(p, x) * dy).sum(), (0, 1)))(params, x)
    assert_close(dx, numpy_of(leaf.grad), "x")
    for layer, its, grads in zip(theirs, ours, got, strict=True):
        raw = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()}
        for name, g in to_state_dict(its, grads).items():
            if name.startswith("indexer"):  # choosing has no gradient, in theirs and in ours
                assert not np.any(numpy_of(raw[name])) and not np.any(g)
            else:
                assert np.any(numpy_of(raw[name])), name
                assert_close(g, numpy_of(raw[name]), name)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back(kind):
    _, theirs, ours, params = pair(kind)
    for layer, its, p in zip(theirs, ours, params, strict=True):
        state = layer.state_dict()
        found = to_state_dict(its, p)
        assert found.keys() == state.keys()
        for name, x in found.items():
            np.testing.assert_array_equal(x, numpy_of(state[name]), err_msg=name)
