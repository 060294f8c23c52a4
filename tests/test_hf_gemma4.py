"""Gemma 4's attention against Hugging Face's own module in float32: window layers, and global ones with V of its own.
`make test-hf` runs this.
"""

import functools

import jax.numpy as jnp
import pytest

from jax_dsv4_fmha import Span, dot_product_attention, fmha

from .test_hf import assert_close, hidden, numpy_of, random_weights

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
configuration = pytest.importorskip("transformers.models.gemma4.configuration_gemma4")

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]

KINDS = ("sliding_attention", "full_attention")
HEADS, WINDOW, B, S = 8, 8, 2, 30


@functools.cache
def layer(kind):
    """Hugging Face's output, its matrix of o, and q, k and v [b, s, heads, d] as it attends with them."""
    config = configuration.Gemma4TextConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=4,
        num_global_key_value_heads=2, head_dim=16, global_head_dim=512, sliding_window=WINDOW, attention_k_eq_v=True,
        layer_types=list(KINDS), attn_implementation="eager",
    )  # fmt: skip
    theirs = random_weights(gemma4.Gemma4TextAttention(config, KINDS.index(kind)))
    x = torch.tensor(hidden(B, S))
    positions = torch.arange(S)[None].expand(B, -1)
    embeddings = gemma4.Gemma4TextRotaryEmbedding(config)(x, positions, kind)
    back = positions[0][:, None] - positions[0]
    seen = (back >= 0) & (back < (WINDOW if kind == KINDS[0] else S))
    mask = torch.where(seen, 0.0, -torch.inf)[None, None].expand(B, -1, -1, -1)
    with torch.no_grad():
        y = theirs(x, position_embeddings=embeddings, attention_mask=mask, shared_kv_states={})[0]
        q, k = (f(x).view(B, S, -1, theirs.head_dim) for f in (theirs.q_proj, theirs.k_proj))
        v = k if theirs.v_proj is None else theirs.v_proj(x).view(k.shape)
        q, k = (
            gemma4.apply_rotary_pos_emb(norm(z), *embeddings, unsqueeze_dim=2)
            for norm, z in ((theirs.q_norm, q), (theirs.k_norm, k))
        )
        v = theirs.v_norm(v)
    return numpy_of(y), jnp.asarray(numpy_of(theirs.o_proj.weight)), *(jnp.asarray(numpy_of(z)) for z in (q, k, v))


@pytest.mark.parametrize("kind", KINDS)
def test_prompt(kind):
    """By both functions; its logits are not scaled."""
    want, o_proj, q, k, v = layer(kind)
    window = WINDOW if kind == KINDS[0] else None
    o = dot_product_attention(q, k, v, scale=1.0, is_causal=True, local_window_size=window and (window - 1, 0))
    assert_close(o.reshape(B, S, -1) @ o_proj.T, want)
    span = Span.sliding_window(S, window) if window else Span.causal(S)
    o, _ = fmha(q, k, v, span=span, scale=1.0)
    assert_close(o.reshape(B, S, -1) @ o_proj.T, want)


def test_values_of_a_global_layer_are_not_its_keys():
    """Though one matrix makes both: keys have a norm with weights, and RoPE."""
    _, _, _, k, v = layer(KINDS[1])
    assert k.shape == v.shape == (B, S, 2, 512)
    assert abs(k - v).max() > 0.1
