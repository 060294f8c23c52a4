"""A layer of `LatentAttention`, from the config.json of a model that has it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import _check
from .config import _OF_OTHERS, _OP, _OTHERS, _about, _known, _mapping, _mapping_or_none, _read, _text, _there
from .indexer import Indexer
from .rope import Rope


class _Model(NamedTuple):
    """The ways in which models differ beyond what their configs say."""

    chooses: bool = True
    """whether queries see chosen keys"""
    halves: bool = False
    """whether RoPE's pairs are two halves"""
    index_halves: bool = False
    index_rope_first: bool = True
    shares: bool = False
    """whether layers take earlier layers' choices"""
    has_sinks: bool = False
    """and a gate"""
    pools: bool = False
    """whether index keys are pooled, and there is no RoPE"""


_MODELS = {
    "deepseek_v3": _Model(chooses=False),
    "kimi_k2": _Model(chooses=False),
    "deepseek_v32": _Model(index_halves=True),
    "glm_moe_dsa": _Model(shares=True),
    "hy_v4": _Model(halves=True, index_halves=True, index_rope_first=False, shares=True, has_sinks=True),
    "glm5_next_text": _Model(shares=True, pools=True),
}
_SIZES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "latent": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "v": "v_head_dim",
}
_INDEX_SIZES = {"heads": "index_n_heads", "d": "index_head_dim", "topk": "index_topk"}
_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
_READ = {
    *_SIZES.values(), *_SHARING, "q_lora_rank", "qk_rope_head_dim", "qk_head_dim", "num_hidden_layers",
    "num_key_value_heads", "layer_types", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling",
    "rope_interleave", "indexer_rope_interleave",
}  # fmt: skip
_MUST_BE = {"attention_bias": False, "attention_dropout": 0}
"""Entries that change a layer, with the one value that these layers have"""
_OF_MODEL = {"head_dim", "num_mtp_layers", "learnable_sink_init", "num_experts"}
"""Entries that say nothing about attention beyond what others say"""
_OF_POOLS = {"index_kpool", "index_kpool_always_select_tail"}
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_ROPE = {
    "rope_type", "type", "rope_theta", *_YARN, "mscale", "mscale_all_dim", "attention_factor", "truncate",
    "partial_rotary_factor",
}  # fmt: skip
_NO_CHANGE = {"attention_factor": 1, "truncate": True, "partial_rotary_factor": 1}


def attributes(config: Mapping[str, Any] | str | Path, layer: int) -> dict[str, Any]:
    """The attributes of a model's layer of this number."""
    if not isinstance(config, Mapping | str | Path):
        raise _check.error(TypeError, _OP, "config", config, "a path or a mapping")
    whole = _mapping("config", config if isinstance(config, Mapping) else _read(Path(config)))
    entries = _there(_text(whole, {*_READ, *_MUST_BE, *_INDEX_SIZES.values(), *_OF_POOLS}))
    name: Any = entries.get("model_type")
    if not isinstance(name, str) or name not in _MODELS:
        raise _check.error(ValueError, _OP, "model_type", name, f"{', '.join(_MODELS)}; layers.from_config for V4")
    model = _MODELS[name]
    _refuse_unknown(entries, model)
    n = _check.positive(_OP, "num_hidden_layers", _entry(entries, "num_hidden_layers"))
    layer = _check.integer(_OP, "layer", layer, 0)
    if layer >= n:
        raise _check.error(ValueError, _OP, "layer", layer, f"a layer of the {n}")
    found = _sizes(entries, _SIZES)
    found["q_rank"] = _rank(entries, model)
    found["rope"], found["scale"] = (None, None) if model.pools else _rope(entries, found["nope"])
    dims = found["rope"].dims if found["rope"] else 0
    if entries.get("qk_rope_head_dim", dims) != dims:
        raise _check.error(ValueError, _OP, "qk_rope_head_dim", entries["qk_rope_head_dim"], "0")
    if entries.get("num_key_value_heads", found["heads"]) != found["heads"]:
        raise _check.error(
            ValueError, _OP, "num_key_value_heads", entries["num_key_value_heads"], f"{found['heads']}, as heads"
        )
    total = found["nope"] + dims
    if entries.get("qk_head_dim", total) != total:
        raise _check.error(ValueError, _OP, "qk_head_dim", entries["qk_head_dim"], f"{total}, the sum of both parts")
    kinds = _list(entries, "layer_types", n) if "layer_types" in entries else []
    fit: tuple[str, ...] = ("indexed_attention",) if model.chooses else ("full_attention",)
    if model.pools:  # the others are of another kind
        kinds, fit = _list(entries, "layer_types", n)[layer : layer + 1], (*fit, "full_attention")
    if wrong := [x for x in kinds if x not in fit]:
        raise _check.error(ValueError, _OP, "layer_types", wrong[0], f"{' or '.join(fit)}, latent attention")
    found |= {"sinks": model.has_sinks, "gated": model.has_sinks, "halves": _halves(entries, name, model)}
    if not model.chooses:
        return found
    found |= {"eps": _eps(entries)} if model.pools else {}
    found |= {"sparse": True, "index_halves": _index_halves(entries, model), "index_rope_first": model.index_rope_first}
    if not model.shares or _chooses(entries, layer, n, name):
        eps = _eps(entries) if name == "hy_v4" else 1e-6
        sizes = {"hidden": found["hidden"], "q_rank": found["q_rank"], "latent": found["hidden"]}
        if model.pools:
            sizes["pool"] = _check.positive(_OP, "index_kpool", _entry(entries, "index_kpool"))
            if not _flag(entries, "index_kpool_always_select_tail", True):
                raise _check.error(ValueError, _OP, "index_kpool_always_select_tail", False, "True")
        found["indexer"] = Indexer(**sizes, **_sizes(entries, _INDEX_SIZES), layer_norm=True, eps=eps)
    return found


def _refuse_unknown(entries: Mapping[str, Any], model: _Model) -> None:
    """Raises if an entry changes attention, or may change it, and would be ignored."""
    for name, value in _MUST_BE.items():
        if entries.get(name, value) != value:
            raise _check.error(ValueError, _OP, name, entries[name], str(value))
    known = {*_READ, *_MUST_BE, *_OTHERS, *_OF_MODEL, *(_INDEX_SIZES.values() if model.chooses else ())}
    known -= set() if model.shares else {*_SHARING}
    known |= _OF_POOLS | {x for x in entries if str(x).startswith("linear_")} if model.pools else set()
    if unknown := {name: x for name, x in entries.items() if not (name in known or _OF_OTHERS.fullmatch(str(name)))}:
        wanted = "no entries that are not known: they may change attention, and those that do not can be left out"
        raise _check.error(ValueError, _OP, ", ".join(unknown), ", ".join(map(str, unknown.values())), wanted)


def _entry(entries: Mapping[str, Any], name: str) -> Any:
    if name not in entries:
        raise _check.error(ValueError, _OP, name, "none", "it in the config")
    return entries[name]


def _flag(entries: Mapping[str, Any], name: str, default: bool) -> bool:
    _check.flags(_OP, **{name: entries.get(name, default)})
    return bool(entries.get(name, default))


def _eps(entries: Mapping[str, Any]) -> Any:
    eps = _entry(entries, "rms_norm_eps")
    with _about("rms_norm_eps"):
        _check.epsilon("LatentAttention", eps)
    return eps


def _list(entries: Mapping[str, Any], name: str, n: int) -> Sequence[Any]:
    """An entry that lists something of each layer."""
    found = _entry(entries, name)
    if not isinstance(found, list | tuple):
        raise _check.error(TypeError, _OP, name, found, "a list")
    if len(found) < n:
        raise _check.error(ValueError, _OP, name, str(len(found)), f"one for each of {n} layers")
    return found


def _sizes(entries: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: _check.positive(_OP, name, _entry(entries, name)) for ours, name in names.items()}


def _rank(entries: Mapping[str, Any], model: _Model) -> int:
    """The queries' rank; DeepSeek-V3's code takes null for none."""
    if "q_lora_rank" in entries or model.chooses:
        return int(_check.positive(_OP, "q_lora_rank", _entry(entries, "q_lora_rank")))
    return 0


def _halves(entries: Mapping[str, Any], name: str, model: _Model) -> bool:
    pairs = _flag(entries, "rope_interleave", not model.halves)
    if name not in ("deepseek_v3", "kimi_k2") and pairs == model.halves:
        raise _check.error(ValueError, _OP, "rope_interleave", pairs, f"{not model.halves} of {name}")
    return not pairs


def _index_halves(entries: Mapping[str, Any], model: _Model) -> bool:
    pairs = _flag(entries, "indexer_rope_interleave", not model.index_halves)
    if pairs == model.index_halves:
        raise _check.error(ValueError, _OP, "indexer_rope_interleave", pairs, str(not model.index_halves))
    return model.index_halves


def _chooses(entries: Mapping[str, Any], layer: int, n: int, name: str) -> bool:
    """Returns whether a layer has an indexer of its own; others take the choice of the last layer that has one."""
    kinds: Any = entries.get("indexer_types")
    pattern = entries.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        letters = tuple(pattern) if isinstance(pattern, str) else _list(entries, "index_topk_pattern", n)
        kinds = [{"F": "full", "S": "shared"}.get(x, x) for x in map(str, letters)]
    if kinds is None and name == "hy_v4":
        kinds = ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(n)]
    if kinds is None:
        often = _check.positive(_OP, "index_topk_freq", entries.get("index_topk_freq", 1))
        offset = _check.integer(_OP, "index_skip_topk_offset", entries.get("index_skip_topk_offset", 2), 0)
        kinds = ["full" if max(i - offset + 1, 0) % often == 0 else "shared" for i in range(n)]
    if not isinstance(kinds, Sequence) or len(kinds) < n or not {*kinds} <= {"full", "shared"} or kinds[0] != "full":
        raise _check.error(
            ValueError, _OP, "indexer_types", kinds, f"full or shared for each of {n} layers, full first"
        )
    return bool(kinds[layer] == "full")


def _rope(entries: Mapping[str, Any], nope: int) -> tuple[Rope, float]:
    """RoPE, and the factor of logits, in which YaRN's mscale is."""
    said: dict[str, Any] = {}
    for place in ("rope_parameters", "rope_scaling"):
        found = _there(_mapping_or_none(place, entries.get(place)))
        _known(place, found, _ROPE)
        if "type" in found:
            found.setdefault("rope_type", found.pop("type"))
        for name, value in found.items():
            if said.setdefault(name, value) != value:
                raise _check.error(ValueError, _OP, name, said[name], f"the {value} of {place}")
    theta = entries.get("rope_theta", said.get("rope_theta"))
    if theta is None or said.get("rope_theta", theta) != theta:
        raise _check.error(ValueError, _OP, "rope_theta", theta, "one number in the config")
    for name, value in _NO_CHANGE.items():
        if said.get(name, value) != value:
            raise _check.error(ValueError, _OP, name, said[name], str(value))
    dims = _check.positive(_OP, "qk_rope_head_dim", _entry(entries, "qk_rope_head_dim"))
    scale, kind = (nope + dims) ** -0.5, said.get("rope_type", "default")
    if kind == "default":
        if wrong := [name for name in (*_YARN, "mscale", "mscale_all_dim") if name in said]:
            raise _check.error(ValueError, _OP, ", ".join(wrong), said[wrong[0]], "none with rope_type default")
        with _about("rope_parameters"):
            return Rope(dims, theta), scale
    if kind != "yarn":
        raise _check.error(ValueError, _OP, "rope_type", kind, "default or yarn")
    if missing := [name for name in _YARN[:2] if name not in said]:
        raise _check.error(ValueError, _OP, "rope_parameters", said, f"{' and '.join(missing)} with yarn")
    with _about("rope_parameters"):
        betas = said.get("beta_fast", 32), said.get("beta_slow", 1)
        rope = Rope(dims, theta, said["factor"], said["original_max_position_embeddings"], *betas)
    # cos and sin have the factor m(mscale) / m(mscale_all_dim), which is 1 in the models
    of_all, own = said.get("mscale_all_dim"), said.get("mscale")
    if "attention_factor" not in said and rope.factor > 1 and not (own and own == of_all):
        raise _check.error(ValueError, _OP, "mscale", own, f"{of_all}, as mscale_all_dim: RoPE that scales q and k")
    of_all = 0 if of_all is None else _check.number(_OP, "mscale_all_dim", of_all, "a number >= 0", lambda x: x >= 0)
    mscale = 0.1 * of_all * math.log(rope.factor) + 1
    return rope, scale * mscale**2
