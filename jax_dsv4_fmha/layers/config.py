"""The attention layers of a model, from its config.json: DeepSeek-V4-Flash, V4-Pro and V4.1-Flash."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _check
from .attention import DSV4Attention
from .compressor import Compressor
from .indexer import Indexer
from .rope import Rope

_NAMES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "rms_norm_eps": "norm_eps",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
}
"""Names in DeepSeek's own inference code for entries of Hugging Face's config.json"""

_RATIO = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_RATE = {"compressed_sparse_attention": "compress_rate_csa", "heavily_compressed_attention": "compress_rate_hca"}

_READ = {
    *_NAMES, *_NAMES.values(), *_RATE.values(),
    *("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "partial_rotary_factor"),
    *("layer_types", "compress_rates", "compress_ratios", "rope_theta", "compress_rope_theta"),
    *("rope_parameters", "rope_scaling", "original_seq_len", "rope_factor", "beta_fast", "beta_slow"),
    *("index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size"),
}  # fmt: skip
_MUST_BE = {"num_key_value_heads": 1, "attention_bias": False, "attention_dropout": 0}
"""Entries that change a layer, with the one value that these layers have"""

_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
         "beta_fast", "beta_slow", "attention_factor", "truncate"}  # fmt: skip
"""What rope_scaling and rope_parameters may say of one RoPE"""

_OTHERS = {
    "n_routed_experts", "n_shared_experts", "n_activated_experts", "num_experts_per_tok", "num_local_experts",
    "n_group", "topk_group", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor", "route_scale",
    "scoring_func", "score_func", "topk_method", "gate_temp", "num_hash_layers", "n_hash_layers",
    "intermediate_size", "hidden_act", "swiglu_limit", "aux_loss_alpha", "seq_aux", "ep_size",
    "num_nextn_predict_layers", "n_mtp_layers", "vocab_size", "max_position_embeddings", "max_seq_len",
    "max_batch_size", "initializer_range", "tie_word_embeddings", "pretraining_tp", "dtype", "torch_dtype",
    "scale_dtype", "scale_fmt", "architectures", "auto_map", "model_type", "transformers_version", "name_or_path",
    "attn_implementation", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "is_encoder_decoder", "chunk_size_feed_forward", "problem_type", "id2label", "label2id",
}  # fmt: skip
_OF_OTHERS = re.compile(
    r"_\w+|(engram|vision|dspark|mtp|moe|mlp|experts?|hc|image|audio|quantization|router|output_router)_\w+|\w+_token_id"
)
"""Entries that say nothing about attention, by name: of experts and other parts of a model, and Hugging Face's own"""


def from_config(
    config: Mapping[str, Any] | str | Path, *, fake_quantize: bool | None = None
) -> tuple[DSV4Attention, ...]:
    """The layers that a config.json describes, in the model's order, without the MTP layers after them.

    Args:
      config: the path of a config.json, or its contents: as published with the weights, as `transformers` saves it, or
        as DeepSeek's inference code reads it.
      fake_quantize: the attribute of all layers and indexers. None means what the model does: V4.1 rounds in every
        run, V4 in none.

    Raises:
      ValueError: an entry is missing, has a value that these layers do not support, or is not known: it may change
        attention.
      TypeError: neither a path nor a mapping, or an entry of another type.

    Examples:
      >>> from jax_dsv4_fmha.layers import from_config
      >>> config = {  # or the path of a config.json
      ...     "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
      ...     "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 8,
      ...     "compress_ratios": [0, 128], "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
      ... }
      >>> [layer.ratio for layer in from_config(config)]
      [0, 128]
    """
    if not isinstance(config, Mapping | str | Path):
        raise _check.error(TypeError, _OP, "config", config, "a path or a mapping")
    entries = _mapping("config", config if isinstance(config, Mapping) else json.loads(Path(config).read_text()))
    read = _Reader(_mapping("text_config", entries.get("text_config") or entries))
    read.refuse_unknown()
    n = _check.positive(_OP, "num_hidden_layers", read("num_hidden_layers"))
    is_v41 = read.has("kv_source_layer_ids")
    make, rounds = (_v41 if is_v41 else _v4), is_v41 if fake_quantize is None else fake_quantize
    return tuple(make(read, i, rounds) for i in range(n))


def _v4(read: "_Reader", layer: int, rounds: bool) -> DSV4Attention:
    ratio, sparse = read.kind(layer)
    hidden, eps = read("hidden_size"), read("rms_norm_eps", 1e-6)
    compressor = indexer = None
    if ratio:
        compressor = Compressor(hidden, read("head_dim"), ratio, overlap=sparse, eps=eps)
    if sparse:
        indexer = Indexer(
            hidden,
            read("q_lora_rank"),
            read("index_n_heads"),
            read("index_head_dim"),
            read("index_topk"),
            Compressor(hidden, read("index_head_dim"), ratio, overlap=True, eps=eps),
            fake_quantize=rounds,
            eps=eps,
        )
    return DSV4Attention(
        **read.sizes(),
        rope=read.rope(ratio > 0),
        ratio=ratio,
        compressor=compressor,
        sparse=sparse,
        indexer=indexer,
        fake_quantize=rounds,
    )


def _v41(read: "_Reader", layer: int, rounds: bool) -> DSV4Attention:
    hidden, eps, (ratio, _) = read("hidden_size"), read("rms_norm_eps", 1e-6), read.kind(layer)
    owns_entries = ratio > 0 and layer in read.layers("kv_source_layer_ids")
    chooses = ratio > 0 and layer in read.layers("index_source_layer_ids")
    compressor = indexer = None
    if owns_entries:
        compressor = Compressor(hidden, read("head_dim"), ratio, has_ape=False, eps=eps)
    if chooses:
        source = _check.integer(_OP, "candidate_source_layer_id", read("candidate_source_layer_id", -1), -1)
        indexer = Indexer(
            hidden,
            read("q_lora_rank"),
            read("index_n_heads"),
            read("index_head_dim"),
            read("index_topk"),
            latent=read("head_dim") if owns_entries else 0,
            block=read("candidate_block_size", 8),
            candidate_blocks=read("candidate_topk_blocks") if layer == source else 0,
            within_candidates=0 <= source < layer,
            fake_quantize=rounds,
            eps=eps,
        )
    return DSV4Attention(
        **read.sizes(),
        rope=read.rope(ratio > 0),
        ratio=ratio,
        compressor=compressor,
        sparse=ratio > 0,
        indexer=indexer,
        norm_heads=False,
        fake_quantize=rounds,
    )


class _Reader:
    """The entries of a config.json, by Hugging Face's names."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries

    def __call__(self, name: str, default: Any = None) -> Any:
        for key in (name, _NAMES.get(name, name)):
            if self.entries.get(key) is not None:
                return self.entries[key]
        if default is None:
            raise _check.error(ValueError, _OP, name, "none", "it in the config")
        return default

    def has(self, name: str) -> bool:
        return any(self.entries.get(key) is not None for key in (name, _NAMES.get(name, name)))

    def refuse_unknown(self) -> None:
        """Raises if an entry changes attention, or may change it, and would be ignored."""
        there = {name: value for name, value in self.entries.items() if value is not None}
        model = str(there.get("model_type", "deepseek_v4"))
        if not model.startswith("deepseek_v4"):
            wanted = "deepseek_v4 or deepseek_v41, whose attention this is; no model_type for other models that have it"
            raise _check.error(ValueError, _OP, "model_type", model, wanted)
        for name, value in _MUST_BE.items():
            if there.get(name, value) != value:
                raise _check.error(ValueError, _OP, name, there[name], str(value))
        known = {*_READ, *_MUST_BE, *_OTHERS}
        if unknown := {name: x for name, x in there.items() if not (name in known or _OF_OTHERS.fullmatch(name))}:
            wanted = "no entries that are not known: they may change attention, and those that do not can be left out"
            raise _check.error(ValueError, _OP, ", ".join(unknown), ", ".join(map(str, unknown.values())), wanted)

    def layers(self, name: str) -> Any:
        """An entry that lists layers, or something of each layer."""
        values = self(name)
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise _check.error(TypeError, _OP, name, values, "a list")
        return values

    def kind(self, layer: int) -> tuple[int, bool]:
        """The ratio of a layer, and whether, in V4, an indexer chooses its entries."""
        if not self.has("layer_types"):
            ratio = _check.integer(_OP, "compress_ratios", self.of_layer("compress_ratios", layer), 0)
            if not self.has("kv_source_layer_ids") and ratio not in _RATIO.values():
                wanted = (
                    "0, 4 or 128; for V4 with other ratios layer_types and compress_rates, for V4.1 kv_source_layer_ids"
                )
                raise _check.error(ValueError, _OP, "compress_ratios", ratio, wanted)
            return ratio, ratio == 4
        kind = self.of_layer("layer_types", layer)
        if kind not in _RATIO:
            raise _check.error(ValueError, _OP, "layer_types", kind, f"one of {', '.join(_RATIO)}")
        ratio = _mapping("compress_rates", self("compress_rates", {})).get(kind, _RATIO[kind])
        ratio = _check.integer(_OP, "compress_rates", self(_RATE[kind], ratio) if kind in _RATE else ratio, 0)
        if self.has("compress_ratios") and self.of_layer("compress_ratios", layer) != ratio:
            got = self.of_layer("compress_ratios", layer)
            raise _check.error(ValueError, _OP, "compress_ratios", got, f"{ratio} in layer {layer}, a {kind}")
        return ratio, kind == "compressed_sparse_attention"

    def of_layer(self, name: str, layer: int) -> Any:
        values = self.layers(name)
        if layer >= len(values):
            raise _check.error(ValueError, _OP, name, str(len(values)), f"one for each layer, more than {layer}")
        return values[layer]

    def sizes(self) -> dict[str, Any]:
        return {
            "hidden": self("hidden_size"),
            "heads": self("num_attention_heads"),
            "d": self("head_dim"),
            "q_rank": self("q_lora_rank"),
            "o_groups": self("o_groups"),
            "o_rank": self("o_lora_rank"),
            "window": self("sliding_window"),
            "eps": self("rms_norm_eps", 1e-6),
        }

    def rope(self, compressed: bool) -> Rope:
        """The Rope of layers with a compressed cache, or of layers with a window alone."""
        kinds = self.rope_entries("rope_parameters")
        if "main" in kinds or "compress" in kinds:
            own = kinds.get("compress" if compressed else "main", {})
        elif compressed:  # not nested: its theta is of layers with a window alone, the rest of all others
            own = {name: x for name, x in kinds.items() if name != "rope_theta"}
        else:
            own = {name: x for name, x in kinds.items() if name == "rope_theta"}
            if self.has("rope_theta") and own.get("rope_theta") not in (None, self("rope_theta")):
                raise _check.error(ValueError, _OP, "rope_theta", self("rope_theta"), f"{own} of rope_parameters")
        if self.has("qk_rope_head_dim"):
            dims = self("qk_rope_head_dim")
        else:
            dims = int((own.get("partial_rotary_factor") or self("partial_rotary_factor")) * self("head_dim"))
        theta = own.get("rope_theta") or self("compress_rope_theta" if compressed else "rope_theta")
        yarn = own or (self.rope_entries("rope_scaling") if compressed else {})
        if compressed and "rope_factor" in self.entries:  # DeepSeek's own names
            if not self.entries.get("original_seq_len"):
                return Rope(dims, theta)
            renamed = {"rope_factor": "factor", "original_seq_len": "original_max_position_embeddings"}
            yarn = {"type": "yarn"} | {renamed.get(k, k): v for k, v in self.entries.items()}
        kind = yarn.get("rope_type") or yarn.get("type") or "default"
        wanted = "yarn with attention_factor 1, or none" if compressed else "no YaRN in layers with a window alone"
        if (
            kind not in (("default", "yarn") if compressed else ("default",))
            or yarn.get("attention_factor") not in (None, 1)
            or yarn.get("truncate") not in (None, True)
        ):
            raise _check.error(ValueError, _OP, "rope_scaling", dict(yarn), wanted)
        if kind == "default":
            return Rope(dims, theta)
        if missing := [name for name in ("factor", "original_max_position_embeddings") if yarn.get(name) is None]:
            raise _check.error(ValueError, _OP, "rope_scaling", dict(yarn), f"{' and '.join(missing)} with yarn")
        betas = yarn.get("beta_fast", 32), yarn.get("beta_slow", 1)
        return Rope(dims, theta, yarn["factor"], yarn["original_max_position_embeddings"], *betas)

    def rope_entries(self, name: str) -> Mapping[str, Any]:
        """rope_scaling or rope_parameters, which may be nested, after a check that every entry of theirs is known."""
        entries = _mapping(name, self(name, {}))
        for own in [entries, *(_mapping(name, entries[kind]) for kind in ("main", "compress") if kind in entries)]:
            if unknown := {key for key, x in own.items() if x is not None} - {*_ROPE, "main", "compress"}:
                raise _check.error(
                    ValueError, _OP, name, ", ".join(sorted(unknown)), f"only {', '.join(sorted(_ROPE))}"
                )
        return entries


def _mapping(name: str, x: Any) -> Mapping[str, Any]:
    if not isinstance(x, Mapping):
        raise _check.error(TypeError, _OP, name, x, "a mapping")
    return x


_OP = "from_config"
