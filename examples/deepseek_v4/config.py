"""The entries of a config.json that say nothing about attention: each is checked, and none is guessed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import read_json

MUST_BE = {"norm_topk_prob": True, "hidden_act": "silu", "mlp_bias": False, "tie_word_embeddings": False}
"""Entries that change the model, with the one value that it has"""


class Entries:
    """The entries of a config.json, a path or its contents, by Hugging Face's names or DeepSeek's.

    A config that says its `model_type`, as those of checkpoints do, must have all entries. One that is written by hand
    may leave out those with a default.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path) -> None:
        whole = config if isinstance(config, Mapping) else read_json(config)
        self.all: Mapping[str, Any] = whole.get("text_config") or whole
        self.is_whole = any(x.get("model_type") is not None for x in (whole, self.all))
        for name, x in MUST_BE.items():
            if self.all.get(name) not in (None, x):
                raise NotImplementedError(f"config: {name}: got {self.all[name]!r}, wanted {x!r}")

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

    def number(self, *names: str, default: float | None = None) -> float:
        """A number that is not below 0; raises ValueError if it is none."""
        x = self.get(*names, default=default)
        if not isinstance(x, int | float) or isinstance(x, bool) or not 0 <= x < math.inf:
            raise ValueError(f"config: {names[0]}: got {x!r}, wanted a number of at least 0")
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
