"""gpt-oss's attention against Hugging Face's own module in float32: prompts by `dot_product_attention`, steps by
`gqa_decode` over pages. `make test-hf` runs this.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Cache, dot_product_attention, gqa_decode

from .test_hf import assert_close, hidden, numpy_of, random_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]

KINDS = ("sliding_attention", "full_attention")
HEADS, H_KV, D, WINDOW, PAGE = 8, 2, 16, 8, 4
B, S = 2, 30


@functools.cache
def layer(kind):
    """Hugging Face's layer, its inputs, its output, and q, k and v [b, s, heads, d] after RoPE, which it makes."""
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=H_KV,
        head_dim=D, sliding_window=WINDOW, layer_types=list(KINDS), attn_implementation="eager",
    )  # fmt: skip
    theirs = random_weights(gpt_oss.GptOssAttention(config, KINDS.index(kind)))
    x = torch.tensor(hidden(B, S))
    positions = torch.arange(S)[None].expand(B, -1)
    embeddings = gpt_oss.GptOssRotaryEmbedding(config)(x, positions)
    back = positions[0][:, None] - positions[0]
    seen = (back >= 0) & (back < (WINDOW if kind == KINDS[0] else S))
    mask = torch.where(seen, 0.0, -torch.inf)[None, None].expand(B, -1, -1, -1)
    with torch.no_grad():
        y = theirs(x, position_embeddings=embeddings, attention_mask=mask)[0]
        q, k, v = (f(x).view(B, S, -1, D).transpose(1, 2) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        q, k = gpt_oss.apply_rotary_pos_emb(q, k, *embeddings)
    q, k, v = (jnp.asarray(numpy_of(x.transpose(1, 2))) for x in (q, k, v))
    weights = {name: jnp.asarray(numpy_of(x)) for name, x in theirs.named_parameters()}
    return numpy_of(y), weights, q, k, v


def projected(o, weights):
    return o.reshape(*o.shape[:2], -1) @ weights["o_proj.weight"].T + weights["o_proj.bias"]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt(kind):
    want, weights, q, k, v = layer(kind)
    window = (WINDOW - 1, 0) if kind == KINDS[0] else None
    o = dot_product_attention(q, k, v, is_causal=True, local_window_size=window, sinks=weights["sinks"])
    assert_close(projected(o, weights), want)


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind, s_q):
    """Token by token, or three at a time, over pages."""
    want, weights, q, k, v = layer(kind)
    tables = np.random.default_rng(0).permutation(2 * B * 8).reshape(2, B, 8).astype(np.int32)
    caches = [Cache.zeros(2 * B * 8, PAGE, H_KV * D, jnp.float32, jnp.asarray(x)) for x in tables]
    window = WINDOW if kind == KINDS[0] else None

    @jax.jit
    def step(caches, n, q, k, v):
        positions = jnp.broadcast_to(n - s_q + jnp.arange(s_q), (B, s_q))
        caches = [cache.append(x.reshape(B, s_q, -1), positions) for cache, x in zip(caches, (k, v), strict=True)]
        return caches, gqa_decode(q, *caches, n, window=window, sink=weights["sinks"])[0]

    for i in range(0, S, s_q):
        caches, o = step(caches, jnp.int32(i + s_q), *(x[:, i : i + s_q] for x in (q, k, v)))
        assert_close(projected(o, weights), want[:, i : i + s_q])
