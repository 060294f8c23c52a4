"""No program takes the maximum or minimum of a negated int32: NVIDIA's assembler loses the minus in a chain of these.

ptxas 13.0 makes `max(max(a, b), c)` of `max(max(a, -b), c)`, for Hopper and Blackwell (docs/verification.md).
XLA decides which operations stand in one kernel, so bounds of keys are made without a negation at all.
"""

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from jax_dsv4_fmha import Span, dsv4_attention
from jax_dsv4_fmha.layers import DSV4Attention, from_config

_PASSED_ON = ("broadcast_in_dim", "reshape", "slice", "dynamic_slice", "transpose", "concatenate", "select")
_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 8, "index_n_heads": 2, "index_head_dim": 32,
    "index_topk": 8, "rope_theta": 1e4, "compress_rope_theta": 1.6e5, "compress_ratios": [0, 4, 128],
}  # fmt: skip


def bounded_negations(f, *operands):
    """Each maximum or minimum, in the program of f for a GPU, that has a negated int32 among its operands."""
    found = []

    def visit(op):
        if op.name.split(".")[-1] in ("maximum", "minimum", "clamp") and any(map(is_negated, op.operands)):
            found.append(str(op.location))
        return ir.WalkResult.ADVANCE

    jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir().operation.walk(visit)
    return found


def is_negated(x):
    made_by = x.owner
    if not str(x.type).endswith("i32>") or isinstance(made_by, ir.Block):
        return False
    name = made_by.name.removeprefix("stablehlo.")
    if name == "subtract":
        return is_zero(made_by.operands[0])
    return name == "negate" or (name in _PASSED_ON and any(map(is_negated, made_by.operands)))


def is_zero(x):
    made_by = x.owner
    if isinstance(made_by, ir.Block):
        return False
    if made_by.name == "stablehlo.broadcast_in_dim":
        return is_zero(made_by.operands[0])
    return made_by.name == "stablehlo.constant" and "dense<0>" in str(made_by.attributes["value"])


@pytest.mark.parametrize("negated", [lambda x: -x, lambda x: 0 - x, lambda x: (-x)[:, None][:, 0]])
def test_they_are_found(negated):
    a = jnp.arange(4, dtype=jnp.int32)
    assert len(bounded_negations(lambda a, b: jnp.maximum(jnp.maximum(a, negated(b[:, 0])), 0), a, a[:, None])) == 1
    assert not bounded_negations(lambda a, b: jnp.maximum(a - b, 0), a, a)


@pytest.mark.parametrize("first_key", [-3, "traced"])
def test_no_bound_of_attention_is_negated(first_key):
    def attend(q, kv, first):
        window = Span.sliding_window(4, 8, first).keys_from(first - 7 if first_key == "traced" else first_key)
        return dsv4_attention(q, kv, kv, window=window & Span.causal(4, first), ratio=4, q_offset=first)

    x = jnp.zeros((2, 4, 4, 64), jnp.bfloat16)
    for first in (jnp.int32(3), jnp.zeros(2, jnp.int32)):
        assert not bounded_negations(attend, x, x[:, :, 0], first)


CALLS = {
    "whole": lambda layer, params, cache, x, first: layer(params, x).y,
    "documents": lambda layer, params, cache, x, first: layer(params, x, segment_ids=x[..., 0].astype(jnp.int32)).y,
    "gradient": lambda layer, params, cache, x, first: jax.grad(lambda p: layer(p, x).y.astype(jnp.float32).sum())(
        params
    ),
    "chunk": lambda layer, params, cache, x, first: layer(params, x, cache, start=first)[:2],
    "ragged chunk": lambda layer, params, cache, x, first: layer(
        params, x, cache, start=first + jnp.arange(2), lengths=jnp.broadcast_to(first, 2)
    )[:2],
    "step": lambda layer, params, cache, x, first: layer.step(params, x[:, :1], cache, lengths=first),
    "drafts": lambda layer, params, cache, x, first: layer.step(
        params, x[:, :3], cache, lengths=first, is_causal=False
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_no_bound_of_a_layer_is_negated(ratio, call):
    (layer,) = (layer for layer in from_config(_SIZES) if layer.ratio == ratio)
    assert isinstance(layer, DSV4Attention)
    params = layer.init(jax.random.key(0), jnp.bfloat16)
    for pages in {}, {"block_table": jnp.zeros((2, 4), jnp.int32), "page_tokens": 128}:
        cache = layer.cache(2, 512, jnp.bfloat16, steps=4, **pages)
        x = jnp.zeros((2, 16, 64), jnp.bfloat16)
        assert not bounded_negations(lambda *x: CALLS[call](layer, *x), params, cache, x, jnp.int32(3))
