"""The entries of a config.json that say nothing about attention: each is checked, and none is guessed."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import read_json

MUST_BE = {
    "norm_topk_prob": True, "hidden_act": "silu", "mlp_bias": False, "tie_word_embeddings": False, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1, "topk_method": "noaux_tc",
}  # fmt: skip
"""Entries that change the model, with the one value that it has"""
KNOWN = {
    *MUST_BE, "hc_mult", "hc_sinkhorn_iters", "hc_eps", "moe_intermediate_size", "moe_inter_dim", "mlp_layer_types",
    "expert_dtype", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "engram_layer_ids",
    "engram_num_embeddings", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim", "engram_vocab_size",
    "engram_compressed_vocab_size", "engram_pad_token_id", "engram_pad_id", "dspark_block_size",
    "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank", "dspark_n_routed_experts",
    "dspark_num_experts_per_tok", "dspark_n_activated_experts", "vocab_size", "n_routed_experts", "num_local_experts",
    "n_shared_experts", "num_experts_per_tok", "n_activated_experts", "routed_scaling_factor", "route_scale",
    "scoring_func", "score_func", "swiglu_limit", "gate_temp", "num_hash_layers", "n_hash_layers", "n_mtp_layers",
    "num_nextn_predict_layers",
}  # fmt: skip
OF_MODEL = re.compile(r"(hc|moe|mlp|experts?|router|engram|dspark|mtp)_\w+")
"""names of entries that change the model, of which no other than those are known; `from_config` knows all the rest"""


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of the text model, which may be a part of a larger one; raises ValueError if they are no mapping."""
    text = config.get("text_config")
    if not (text is None or isinstance(text, Mapping)):
        raise ValueError(f"config: text_config: got {text!r}, wanted a mapping")
    return text or config


class Entries:
    """The entries of a config.json, a path or its contents, by Hugging Face's names or DeepSeek's.

    A config that says its `model_type`, as those of checkpoints do, must have all entries. One that is written by hand
    may leave out those with a default.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path) -> None:
        whole = config if isinstance(config, Mapping) else read_json(config)
        self.all = text_of(whole)
        self.is_whole = any(x.get("model_type") is not None for x in (whole, self.all))
        for name in KNOWN & whole.keys():
            if whole[name] not in (None, self.all.get(name)):
                raise ValueError(
                    f"config: {name}: got {whole[name]!r}, wanted {self.all.get(name)!r}, as in text_config"
                )
        for name, x in MUST_BE.items():
            if self.all.get(name) not in (None, x):
                raise NotImplementedError(f"config: {name}: got {self.all[name]!r}, wanted {x!r}")
        for name, x in self.all.items():
            if x is not None and name not in KNOWN and OF_MODEL.fullmatch(str(name)):
                raise ValueError(
                    f"config: {name}: got {x!r}, wanted no entry that is not known: it may change the model"
                )

    def get(self, *names: str, default: Any = None) -> Any:
        """An entry by the first of its names that is there; raises ValueError if it is there twice, or missing."""
        there = {name: self.all[name] for name in names if self.all.get(name) is not None}
        if len(set(map(repr, there.values()))) > 1:
            raise ValueError(f"config: got {there}, which are two names of one entry, wanted one value")
        if not there and (self.is_whole or default is None):
            raise ValueError(f"config: got none of {', '.join(names)}, wanted it")
        return next(iter(there.values()), default)

    def has(self, *names: str) -> bool:
        return any(self.all.get(name) is not None for name in names)

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: float = math.inf) -> int:
        """An integer; raises ValueError if it is none or out of range."""
        x = self.get(*names, default=default)
        if not isinstance(x, int) or isinstance(x, bool) or not least <= x <= most:
            span = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise ValueError(f"config: {names[0]}: got {x!r}, wanted an integer {span}")
        return x

    def number(self, *names: str, default: float | None = None, may_be_0: bool = True) -> float:
        """A number that is not below 0; raises ValueError if it is none."""
        x = self.get(*names, default=default)
        is_one = isinstance(x, int | float) and not isinstance(x, bool)
        if not is_one or not 0 <= x < math.inf or (x == 0 and not may_be_0):
            raise ValueError(
                f"config: {names[0]}: got {x!r}, wanted a number {'of at least' if may_be_0 else 'above'} 0"
            )
        return x

    def integers(self, name: str, most: float = math.inf) -> tuple[int, ...]:
        """A list of integers from 0 on, at least one; raises ValueError if it is none."""
        found = self.get(name)
        if not isinstance(found, list | tuple) or not found:
            raise ValueError(f"config: {name}: got {found!r}, wanted a list of integers")
        return tuple(Entries({name: x}).integer(name, least=0, most=most) for x in found)

    def hash_layers(self, layers: int) -> int:
        """Returns how many layers, the first ones, choose experts by the token's number; V4.1 has none."""
        names = ("num_hash_layers", "n_hash_layers")
        kinds = self.all.get("mlp_layer_types")
        if kinds is not None and not isinstance(kinds, list | tuple):
            raise ValueError(f"config: mlp_layer_types: got {kinds!r}, wanted a list")
        if kinds is None:
            default = 0 if self.has("kv_source_layer_ids", "kv_source_layers") else None
            return self.integer(*names, least=0, most=layers) if self.has(*names) or default is None else default
        hashed = list(kinds).count("hash_moe")
        if list(kinds) != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
            wanted = f"one of hash_moe or moe for each of {layers} layers, hash_moe in the first layers alone"
            raise NotImplementedError(f"config: got mlp_layer_types {kinds}, wanted {wanted}")
        if self.has(*names) and self.integer(*names, least=0) != hashed:
            raise ValueError(
                f"config: got num_hash_layers {self.get(*names)}, wanted {hashed}, as mlp_layer_types says"
            )
        return hashed
