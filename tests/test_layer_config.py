"""Layers from a model's config.json: DeepSeek's, transformers' and others, which are refused."""

import json

import jax
import jax.numpy as jnp
import pytest

from jax_dsv4_fmha.layers import Rope, from_config
from tests.test_layers import MODELS, shapes


def published(name):
    """The entries of a published config.json about attention."""
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    both = {
        "head_dim": 512, "qk_rope_head_dim": 64, "o_lora_rank": 1024, "sliding_window": 128, "index_head_dim": 128,
        "rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": yarn,
    }  # fmt: skip
    flash = both | {
        "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8,
        "index_n_heads": 64, "index_topk": 512, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    pro = flash | {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
        "index_topk": 1024, "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    }  # fmt: skip
    v41 = both | {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "q_lora_rank": 1280, "o_groups": 8,
        "index_n_heads": 32, "index_topk": 512, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "rms_norm_eps": 1e-20,
    }  # fmt: skip
    return {"flash": flash, "pro": pro, "v4.1": {"text_config": v41}}[name]


@pytest.mark.parametrize(
    "dtype, keys, size",
    [("bfloat16", None, 3200), ("float8_e4m3fn", None, 1490), ("float4_e2m1fn", None, 890),
     ("float4_e2m1fn", "bfloat16", 1360)],
)  # fmt: skip
def test_bytes_of_v41_a_token(dtype, keys, size):
    """Its pools of entries and index keys take what examples/deepseek_v4/serve.py counts and docs/tutorials say."""
    how = {"keys": keys, "block_table": jnp.zeros((1, 4), jnp.int32), "page_tokens": 256}
    caches = [layer.cache(1, 1024, dtype, **how) for layer in from_config(published("v4.1"))]
    pools = [x for cache in caches for x in (cache.compressed, cache.keys) if x is not None]
    assert sum(x.entries.nbytes for x in pools) == 1024 * size


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000], ids=["none", "cut", "bytes", "nested"])
def test_a_file_that_is_no_config(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"^from_config: .*config\.json: got no JSON, .*, wanted an object in JSON"):
        from_config(tmp_path / "config.json")


def test_config_of_v4(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published("flash")))
    layers = from_config(path)
    assert len(layers) == 43 and [layer.ratio for layer in layers[:5]] == [0, 0, 4, 128, 4]
    assert layers[0].rope == Rope(64, 10000) and layers[0].compressor is None
    for layer in layers[2:]:
        assert layer.rope == Rope(64, 160000, 16, 65536, 32, 1) and layer.norm_heads
        assert layer.compressor.overlap == layer.sparse == (layer.indexer is not None) == (layer.ratio == 4)
        assert layer.indexer is None or layer.indexer.compressor.overlap
    assert (layers[2].indexer.heads, layers[2].indexer.topk) == (64, 512)
    pro = from_config(published("pro"))
    assert (len(pro), pro[0].ratio, pro[2].heads, pro[2].indexer.topk, pro[0].o_groups) == (61, 128, 128, 1024, 16)


def test_config_of_v41():
    layers = from_config(published("v4.1"))
    assert [i for i, layer in enumerate(layers) if layer.compressor] == [2, 8, 14, 20]
    assert [i for i, layer in enumerate(layers) if layer.indexer] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [i for i, layer in enumerate(layers) if layer.indexer and layer.indexer.within_candidates] == [
        24,
        28,
        32,
        36,
    ]
    assert [i for i, layer in enumerate(layers) if layer.indexer and layer.indexer.candidate_blocks == 2048] == [20]
    assert len(layers) == 40 and all(layer.sparse == (i > 1) for i, layer in enumerate(layers))
    assert not any(layer.norm_heads for layer in layers) and layers[0].eps == 1e-20
    assert not layers[2].compressor.has_ape and not layers[2].compressor.overlap and layers[20].ratio == 1
    assert [layers[i].rope.theta for i in (1, 2, 20)] == [10000, 160000, 160000]
    without = {name: x for name, x in published("v4.1")["text_config"].items() if not name.startswith("candidate")}
    assert [layer.indexer.in_two_levels for layer in from_config(without) if layer.indexer] == [False] * 8
    names = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes(layers[20])["compressor"])]
    assert names == ["norm", "w"] and layers[20].compressor.width == 512  # of ratio 1


def test_config_as_transformers_saves_it():
    """Kinds of layers by name, with their own ratios, and RoPE by kind of layer."""
    theirs = published("flash")
    kinds = dict(zip((0, 4, 128), MODELS["v4"]["layer_types"], strict=True))
    rates = {"compress_rates": None, "layer_types": [kinds[ratio] for ratio in theirs.pop("compress_ratios")]}
    yarn = {**theirs.pop("rope_scaling"), "rope_type": "yarn", "rope_theta": theirs.pop("compress_rope_theta")}
    main = {"rope_type": "default", "rope_theta": theirs.pop("rope_theta")}
    dims = {"partial_rotary_factor": theirs.pop("qk_rope_head_dim") / 512}
    theirs |= rates | dims | {"rope_parameters": {"main": main, "compress": yarn}}
    assert from_config(theirs) == from_config(published("flash"))


def test_config_of_deepseeks_own_code():
    theirs = {
        "dim": 4096, "n_layers": 4, "n_heads": 64, "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64,
        "norm_eps": 1e-6, "o_groups": 8, "o_lora_rank": 1024, "window_size": 128, "compress_ratios": [0, 4, 128, 4, 0],
        "compress_rope_theta": 160000.0, "original_seq_len": 65536, "rope_theta": 10000.0, "rope_factor": 16,
        "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    }  # fmt: skip
    flash = from_config(published("flash"))
    assert from_config(theirs) == (flash[0], flash[2], flash[3], flash[2])
    assert from_config(theirs | {"original_seq_len": 0})[1].rope == Rope(64, 160000)  # no YaRN


def test_config_of_v41_in_deepseeks_own_code():
    """The lists of layers have other names there; read as V4's, layers would load and be wrong."""
    theirs = dict(published("v4.1")["text_config"])
    for ours, name in (("kv_source_layer_ids", "kv_source_layers"), ("index_source_layer_ids", "index_source_layers"),
                       ("candidate_source_layer_id", "candidate_source_layer")):  # fmt: skip
        theirs[name] = theirs.pop(ours)
    assert from_config(theirs) == from_config(published("v4.1"))


def test_config_with_rope_parameters_that_are_not_nested():
    theirs = published("flash")
    yarn = theirs.pop("rope_scaling")
    theirs["rope_parameters"] = yarn | {"rope_type": yarn.pop("type"), "rope_theta": 10000.0}
    assert from_config(theirs) == from_config(published("flash"))


def test_config_of_another_model():
    """Llama's entries, without the name of the model: what is wrong is said by name."""
    llama = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 128}  # fmt: skip
    with pytest.raises(ValueError, match="num_key_value_heads: got 8, wanted 1"):
        from_config(llama)
    with pytest.raises(ValueError, match="compress_ratios: got none, wanted it in the config"):
        from_config(llama | {"num_key_value_heads": 1})


def test_config_with_rates_as_entries_of_their_own():
    rates = {"compress_rate_csa": 8, "compress_rate_hca": 64}
    layers = from_config(MODELS["v4"] | {"compress_rates": None} | rates)
    assert [layer.ratio for layer in layers] == [0, 8, 64]


def test_config_with_entries_of_other_parts_of_a_model():
    others = {
        "model_type": "deepseek_v4", "vocab_size": 9, "hc_mult": 4, "n_routed_experts": 256, "use_cache": True,
        "norm_topk_prob": True, "num_key_value_heads": 1, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_layer_types": ["moe"], "engram_n_heads": 8, "engram_head_dim": 64, "dspark_block_size": 5,
        "_attn_implementation_autoset": True, "attn_implementation": "eager", "output_attentions": False,
        "tie_word_embeddings": False, "quantization_config": {}, "num_nextn_predict_layers": 1, "expert_dtype": "fp4",
        "routed_scaling_factor": 1.5, "max_position_embeddings": 2**20, "transformers_version": "5.0", "mlp_bias": 0,
        "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "num_hash_layers": 3,
    }  # fmt: skip
    assert from_config(published("flash") | others) == from_config(published("flash"))


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"q_lora_rank": None}, "q_lora_rank: got none"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: got .*linear"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 2}}, "wanted yarn with attention_factor 1"),
        ({"compress_ratios": None, "layer_types": ["full_attention"] * 43}, "layer_types: got full_attention"),
        ({"compress_ratios": [-1] * 43}, "compress_ratios: got -1"),
        ({"compress_ratios": [4]}, "compress_ratios: got 1, wanted one for each layer"),
        ({"compress_ratios": [0, 4, 8] * 15}, "compress_ratios: got 8, wanted 0, 4 or 128"),
        ({"attention_bias": True}, "attention_bias: got True, wanted False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: got 8, wanted 1"),
        ({"index_share_layers": 2}, "index_share_layers: got 2, wanted no entries that are not known"),
        ({"clip_qkv": 8.0, "use_qk_norm": True}, r"clip_qkv, use_qk_norm: got 8\.0, True, wanted no entries"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}}, "rope_scaling: got mscale, wanted only"),
        ({"rope_parameters": {"main": {"rope_type": "yarn", "factor": 4}}}, "wanted no YaRN in layers with a window"),
        ({"rope_parameters": {"rope_theta": 500.0}}, r"rope_theta: got 10000, wanted .*500\.0.* of rope_parameters"),
        ({"model_type": "llama"}, "model_type: got llama, wanted deepseek_v4 or deepseek_v41, whose attention this is"),
        ({"model_type": "deepseek_v42"}, "model_type: got deepseek_v42, wanted deepseek_v4 or deepseek_v41"),
        ({"num_hidden_layers": 20}, "compress_ratios: got 44, wanted 20, one for each layer, or 0 in those for drafts"),
        ({"compress_ratios": [0, 4] * 22}, "compress_ratios: got 44, wanted 43, one for each layer"),
        ({3: 4, None: 1}, "3, None: got 4, 1, wanted no entries that are not known"),
        ({"o_groups": 3}, "o_groups: got 3, wanted a divisor of the 64 heads"),
        ({"qk_rope_head_dim": 7}, "dims: got 7, wanted an even int"),
    ],
)
def test_config_errors(changes, error):
    with pytest.raises(ValueError, match=error):
        from_config(published("flash") | changes)


@pytest.mark.parametrize("nothing", [[], False, 0, ""])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "text_config"])
def test_what_is_no_mapping_is_not_taken_for_null(name, nothing):
    with pytest.raises(TypeError, match=f"{name}: got .*, wanted a mapping"):
        from_config(published("flash") | {name: nothing})


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"kv_source_layer_ids": [2, 8, 14, 20, 40]}, "kv_source_layer_ids: got 40, wanted layers of the 40 whose"),
        ({"kv_source_layer_ids": [2, 8, 8, 14, 20]}, "kv_source_layer_ids: got 8, wanted .*, each once"),
        ({"kv_source_layer_ids": [0, 2, 8, 14, 20]}, "kv_source_layer_ids: got 0, wanted layers .* ratio is not 0"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids: got none, wanted one of ratio 2 at layer 2 or before it"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "kv_source_layer_ids: got 2, 8, 14, wanted one of ratio 1 at layer 20"),
        ({"index_source_layer_ids": [8, 14, 20]}, "index_source_layer_ids: got 8, 14, 20, wanted one of ratio 2 at"),
        ({"index_source_layer_ids": [2, 20, 99]}, "index_source_layer_ids: got 99, wanted layers of the 40"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 1, 0]}, "compress_ratios: got 43, wanted 40"),
    ],
)
def test_lists_of_layers_in_v41(changes, error):
    """A source that is no layer was ignored, and a layer without one was an error of its first call."""
    with pytest.raises(ValueError, match=error):
        from_config({"text_config": published("v4.1")["text_config"] | changes})
