"""The attention layers of a model, from its config.json: DeepSeek-V4-Flash, V4-Pro and V4.1-Flash."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
_SIZES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "d": "head_dim",
    "q_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_rank": "o_lora_rank",
    "window": "sliding_window",
}
_INDEX_SIZES = {"heads": "index_n_heads", "d": "index_head_dim", "topk": "index_topk"}
_SOURCES = ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")
_CANDIDATES = ("candidate_topk_blocks", "candidate_block_size")
_DEEPSEEK_YARN = ("rope_factor", "original_seq_len", "beta_fast", "beta_slow")
"""YaRN in DeepSeek's inference code, which has no rope_scaling"""

_READ = {
    *_NAMES, *_NAMES.values(), *_RATE.values(), *_SIZES.values(), *_INDEX_SIZES.values(), *_SOURCES, *_CANDIDATES,
    *_DEEPSEEK_YARN, *("qk_rope_head_dim", "partial_rotary_factor", "layer_types", "compress_rates", "compress_ratios"),
    *("rope_theta", "compress_rope_theta", "rope_parameters", "rope_scaling"),
}  # fmt: skip
_MODEL = re.compile(r"deepseek_v41?(_\w+)?")
_MUST_BE = {"num_key_value_heads": 1, "attention_bias": False, "attention_dropout": 0}
"""Entries that change a layer, with the one value that these layers have"""

_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate")
_NO_YARN = {"factor": 1, "attention_factor": 1, "truncate": True}
"""Numbers that change nothing"""
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_YARN}
"""Entries that rope_scaling and rope_parameters may have for one RoPE"""

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

    A config with a `model_type` is a model's own, and has to say everything that changes attention. Others, as a
    program may write them, may leave out three things: `rms_norm_eps` (1e-6), YaRN (none), and the ratios of the kinds
    in `layer_types` (4 and 128).

    Args:
      config: the path of a config.json, or its contents: as published with the weights, as `transformers` saves it, or
        as DeepSeek's inference code reads it.
      fake_quantize: the attribute of all layers and indexers. None means what the model does: V4.1 rounds in every
        run, V4 in none.

    Raises:
      ValueError: an entry is missing, has a value that these layers do not support, contradicts another entry, or is
        not known: it may change attention.
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
    if fake_quantize is not None:
        _check.flags(_OP, fake_quantize=fake_quantize)
    entries = _mapping("config", config if isinstance(config, Mapping) else _read(Path(config)))
    text = _text(entries, {*_READ, *_MUST_BE})
    read = _Reader(text, is_whole=any(x.get("model_type") is not None for x in (entries, text)))
    read.refuse_unknown()
    n = _check.positive(_OP, "num_hidden_layers", read("num_hidden_layers"))
    is_v41 = read.is_v41()
    make, rounds = (_v41 if is_v41 else _v4), is_v41 if fake_quantize is None else fake_quantize
    layers = tuple(make(read, i, rounds) for i in range(n))
    read.check_lists(layers)
    return layers


def _read(path: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found and found[name] != value:
                raise _check.error(ValueError, _OP, name, f"{found[name]} and {value}", f"it once in {path.name}")
            found[name] = value
        return found

    text = path.read_bytes()
    try:
        json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _check.error(ValueError, _OP, str(path), f"no JSON, {e}", "an object in JSON") from None
    return json.loads(text, object_pairs_hook=once)


def _text(entries: Mapping[str, Any], names: set[str]) -> Mapping[str, Any]:
    """The entries of the text model, which may be a part of a larger one; of these names that says nothing else."""
    text = _mapping_or_none("text_config", entries.get("text_config")) or entries
    for name in names & entries.keys():
        if entries[name] is not None and entries[name] != text.get(name):
            raise _check.error(ValueError, _OP, name, entries[name], f"{text.get(name)}, as in text_config")
    return text


def _v4(read: "_Reader", layer: int, rounds: bool) -> DSV4Attention:
    ratio, sparse = read.kind(layer)
    sizes, eps = read.sizes(_SIZES), read.eps()
    compressor = indexer = None
    if ratio:
        compressor = Compressor(sizes["hidden"], sizes["d"], ratio, overlap=sparse, eps=eps)
    if sparse:
        of_index = read.sizes(_INDEX_SIZES)
        indexer = Indexer(
            sizes["hidden"],
            sizes["q_rank"],
            **of_index,
            compressor=Compressor(sizes["hidden"], of_index["d"], ratio, overlap=True, eps=eps),
            fake_quantize=rounds,
            eps=eps,
        )
    return DSV4Attention(
        **sizes,
        rope=read.rope(ratio > 0),
        ratio=ratio,
        compressor=compressor,
        sparse=sparse,
        indexer=indexer,
        fake_quantize=rounds,
        eps=eps,
    )


def _v41(read: "_Reader", layer: int, rounds: bool) -> DSV4Attention:
    sizes, eps, (ratio, _) = read.sizes(_SIZES), read.eps(), read.kind(layer)
    owns_entries = ratio > 0 and layer in read.numbers("kv_source_layer_ids")
    chooses = ratio > 0 and layer in read.numbers("index_source_layer_ids")
    compressor = indexer = None
    if owns_entries:
        compressor = Compressor(sizes["hidden"], sizes["d"], ratio, has_ape=False, eps=eps)
    if chooses:
        indexer = Indexer(
            sizes["hidden"],
            sizes["q_rank"],
            **read.sizes(_INDEX_SIZES),
            latent=sizes["d"] if owns_entries else 0,
            **read.candidates(layer),
            fake_quantize=rounds,
            eps=eps,
        )
    return DSV4Attention(
        **sizes,
        rope=read.rope(ratio > 0),
        ratio=ratio,
        compressor=compressor,
        sparse=ratio > 0,
        indexer=indexer,
        norm_heads=False,
        fake_quantize=rounds,
        eps=eps,
    )


class _Reader:
    """The entries of a config.json, by Hugging Face's names."""

    def __init__(self, entries: Mapping[str, Any], is_whole: bool) -> None:
        self.entries = entries
        self.is_whole = is_whole  # a model's own config, which leaves out nothing

    def get(self, name: str) -> Any:
        """An entry by either of its names, or None."""
        other = _NAMES.get(name, name)
        one, two = self.entries.get(name), self.entries.get(other)
        if one is not None and two is not None and one != two:
            raise _check.error(ValueError, _OP, other, two, f"the {one} of {name}")
        return two if one is None else one

    def __call__(self, name: str, default: Any = None, instead: str = "") -> Any:
        """An entry; default: of a config that is not whole; instead: the name of one that would do, for errors."""
        found = self.get(name)
        if found is None and (default is None or self.is_whole):
            raise _check.error(ValueError, _OP, name, "none", f"it in the config{instead and f', or {instead}'}")
        return default if found is None else found

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def refuse_unknown(self) -> None:
        """Raises if an entry changes attention, or may change it, and would be ignored."""
        there = {name: value for name, value in self.entries.items() if value is not None}
        model = str(there.get("model_type", "deepseek_v4"))
        if not _MODEL.fullmatch(model):
            wanted = "deepseek_v4 or deepseek_v41, whose attention this is; no model_type for other models that have it"
            wanted += "; LatentAttention.from_config for latent attention of others"
            raise _check.error(ValueError, _OP, "model_type", model, wanted)
        for name, value in _MUST_BE.items():
            if there.get(name, value) != value:
                raise _check.error(ValueError, _OP, name, there[name], str(value))
        known = {*_READ, *_MUST_BE, *_OTHERS}
        unknown = {str(name): x for name, x in there.items() if not (name in known or _OF_OTHERS.fullmatch(str(name)))}
        if unknown:
            wanted = "no entries that are not known: they may change attention, and those that do not can be left out"
            raise _check.error(ValueError, _OP, ", ".join(unknown), ", ".join(map(str, unknown.values())), wanted)

    def is_v41(self) -> bool:
        """Returns whether layers may read earlier layers' entries, as V4.1's do."""
        if self.has("kv_source_layer_ids"):
            return True
        of_v41 = [name for name in (*_SOURCES, *_CANDIDATES) if self.has(name)]
        if str(self.entries.get("model_type")).startswith("deepseek_v41"):
            of_v41.append("model_type deepseek_v41")
        if of_v41:
            raise _check.error(ValueError, _OP, "kv_source_layer_ids", "none", f"it with {', '.join(of_v41)}")
        return False

    def eps(self) -> float:
        found: float = self("rms_norm_eps", 1e-6)
        with _about("rms_norm_eps"):
            _check.epsilon("DSV4Attention", found)
        return found

    def sizes(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Sizes by the names of a layer's, or an indexer's, attributes."""
        found = {}
        for ours, name in names.items():
            with _about(name):
                found[ours] = _check.positive("DSV4Attention" if names is _SIZES else "Indexer", ours, self(name))
        return found

    def layers(self, name: str, instead: str = "") -> Any:
        """An entry that lists layers, or something of each layer."""
        values = self(name, instead=instead)
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise _check.error(TypeError, _OP, name, values, "a list")
        return values

    def numbers(self, name: str) -> list[int]:
        """An entry that lists layers by their numbers."""
        return [_check.integer(_OP, name, i, 0) for i in self.layers(name)]

    def candidates(self, layer: int) -> dict[str, Any]:
        """Returns an indexer's attributes for a choice in two levels."""
        source = self.get("candidate_source_layer_id")
        if source is None:
            if others := [name for name in _CANDIDATES if self.has(name)]:
                raise _check.error(ValueError, _OP, _SOURCES[2], "none", f"it with {' and '.join(others)}")
            return {}
        source = _check.integer(_OP, _SOURCES[2], source, -1)
        if source < 0:
            return {}
        if source not in self.numbers("index_source_layer_ids"):
            raise _check.error(ValueError, _OP, _SOURCES[2], source, "one of index_source_layer_ids")
        count, block = (_check.positive(_OP, name, self(name)) for name in _CANDIDATES)
        return {"block": block, "candidate_blocks": count * (layer == source), "within_candidates": source < layer}

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
        if not isinstance(kind, str) or kind not in _RATIO:
            raise _check.error(ValueError, _OP, "layer_types", kind, f"one of {', '.join(_RATIO)}")
        ratio = self.rate(kind)
        if self.has("compress_ratios") and self.of_layer("compress_ratios", layer) != ratio:
            got = self.of_layer("compress_ratios", layer)
            raise _check.error(ValueError, _OP, "compress_ratios", got, f"{ratio} in layer {layer}, a {kind}")
        return ratio, kind == "compressed_sparse_attention"

    def rate(self, kind: str) -> int:
        """Returns the tokens of an entry in layers of a kind; 0 for those with a window alone."""
        rates = _mapping_or_none("compress_rates", self.get("compress_rates"))
        if unknown := rates.keys() - _RATIO.keys():
            raise _check.error(ValueError, _OP, "compress_rates", ", ".join(unknown), f"only {', '.join(_RATIO)}")
        if kind not in _RATE:
            if rates.get(kind, 0) != 0:
                raise _check.error(ValueError, _OP, f"compress_rates.{kind}", rates[kind], "0")
            return 0
        name, own = f"compress_rates.{kind}", self.get(_RATE[kind])
        stated = rates.get(kind, own)
        if own not in (None, stated):
            raise _check.error(ValueError, _OP, _RATE[kind], own, f"the {stated} of {name}")
        if stated is None and (kind in rates or (self.is_whole and not self.has("compress_ratios"))):
            raise _check.error(ValueError, _OP, name, "none", f"it in the config, or {_RATE[kind]}")
        with _about(_RATE[kind]):
            return int(_check.positive(_OP, name, _RATIO[kind] if stated is None else stated))

    def of_layer(self, name: str, layer: int) -> Any:
        values = self.layers(name, "layer_types" if name == "compress_ratios" else "")
        if layer >= len(values):
            raise _check.error(ValueError, _OP, name, str(len(values)), f"one for each layer, more than {layer}")
        return values[layer]

    def check_lists(self, layers: Sequence[DSV4Attention]) -> None:
        """Raises if a list says something of a layer that is not there, or, of V4.1, does not say it of one that is."""
        n = len(layers)
        for name, of_drafts in (("compress_ratios", 0), ("layer_types", "sliding_attention")):
            rest = self.layers(name)[n:] if self.has(name) else ()
            if any(x != of_drafts for x in rest):
                wanted = f"{n}, one for each layer, or {of_drafts} in those for drafts after them"
                raise _check.error(ValueError, _OP, name, str(n + len(rest)), wanted)
        if not self.has("kv_source_layer_ids"):
            return
        for name, kept in zip(_SOURCES, ("compressor", "indexer"), strict=False):
            sources, there = self.numbers(name), [getattr(layer, kept) is not None for layer in layers]
            if wrong := [i for i in sources if i >= n or not there[i] or sources.count(i) > 1]:
                wanted = f"layers of the {n} whose ratio is not 0, each once"
                raise _check.error(ValueError, _OP, name, ", ".join(map(str, dict.fromkeys(wrong))), wanted)
            for i, layer in enumerate(layers):
                ratios = [layers[j].ratio for j in range(i + 1) if there[j]]
                if layer.ratio and ratios[-1:] != [layer.ratio]:
                    wanted = f"one of ratio {layer.ratio} at layer {i} or before it"
                    raise _check.error(ValueError, _OP, name, ", ".join(map(str, sources)) or "none", wanted)

    def rope(self, compressed: bool) -> Rope:
        """The Rope of layers with a compressed cache, or of layers with a window alone."""
        said: dict[str, Any] = {}
        place, theta = "rope_scaling", "compress_rope_theta" if compressed else "rope_theta"
        for where, entries in self.about_rope(compressed):
            for name, value in entries.items():
                if said.setdefault(name, value) != value:
                    its_name = theta if name == "rope_theta" else name
                    raise _check.error(ValueError, _OP, its_name, said[name], f"the {value} of {where}")
            if entries.keys() & {"rope_type", *_YARN}:
                place = where
        if "rope_theta" not in said:
            raise _check.error(ValueError, _OP, theta, "none", "it in the config")
        plain = {"dims": self.dims(said.get("partial_rotary_factor")), "theta": said["rope_theta"]}
        for name, (attribute, x) in zip(("qk_rope_head_dim", theta), plain.items(), strict=True):
            with _about(name):
                Rope(**{attribute: x})
        kind, yarn = said.get("rope_type"), {name: said[name] for name in _YARN if name in said}
        got = {name: x for name, x in said.items() if name == "rope_type" or name in _YARN}
        if kind is None and yarn:
            raise _check.error(ValueError, _OP, place, got, "rope_type or type too, yarn or default")
        if kind is None and compressed and self.is_whole:
            wanted = 'it, or rope_parameters, in the config: {"rope_type": "default"} if there is no YaRN'
            raise _check.error(ValueError, _OP, "rope_scaling", "none", wanted)
        wanted = "yarn with attention_factor 1, or none" if compressed else "no YaRN in layers with a window alone"
        if kind not in ((None, "default", "yarn") if compressed else (None, "default")) or any(
            yarn.get(name, _NO_YARN[name]) != _NO_YARN[name] for name in ("attention_factor", "truncate")
        ):
            raise _check.error(ValueError, _OP, place, got, wanted)
        if kind != "yarn":
            if any(x != _NO_YARN.get(name) for name, x in yarn.items()):
                raise _check.error(ValueError, _OP, place, got, "no numbers of YaRN with rope_type default")
            return Rope(**plain)
        if missing := [name for name in _YARN[:2] if name not in yarn]:
            raise _check.error(ValueError, _OP, place, got, f"{' and '.join(missing)} with yarn")
        with _about(place):
            betas = yarn.get("beta_fast", 32), yarn.get("beta_slow", 1)
            return Rope(plain["dims"], plain["theta"], yarn["factor"], yarn["original_max_position_embeddings"], *betas)

    def about_rope(self, compressed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields each place of the config that speaks of this kind of RoPE, and what it says, without nulls."""
        theta = self.get("compress_rope_theta" if compressed else "rope_theta")
        yield "the config", _there({"rope_theta": theta, "partial_rotary_factor": self.get("partial_rotary_factor")})
        for name in ("rope_parameters", "rope_scaling"):
            entries = self.rope_entries(name)
            if entries.keys() & {"main", "compress"}:
                kind = "compress" if compressed else "main"
                if compressed and kind not in entries:
                    raise _check.error(ValueError, _OP, f"{name}.compress", "none", f"it beside {name}.main")
                yield f"{name}.{kind}", entries.get(kind, {})
            else:  # theta is of layers with a window alone, and YaRN of all others
                of_window = ("rope_theta", "partial_rotary_factor")
                some = {n: x for n, x in entries.items() if n != "rope_theta" and (compressed or n in of_window)}
                yield name, some if compressed else {n: x for n, x in entries.items() if n in of_window}
        if compressed and any(self.has(name) for name in _DEEPSEEK_YARN):
            original = self("original_seq_len")
            if original == 0:
                yield "original_seq_len", {"rope_type": "default"}
            else:
                numbers = (self("rope_factor"), original, self.get("beta_fast"), self.get("beta_slow"))
                yield (
                    "rope_factor and original_seq_len",
                    {"rope_type": "yarn", **_there(dict(zip(_YARN, numbers, strict=False)))},
                )

    def dims(self, factor: Any) -> Any:
        """Returns the dimensions of a head that RoPE turns; the config gives their number or their share."""
        stated, d = self.get("qk_rope_head_dim"), self.sizes({"d": "head_dim"})["d"]
        if factor is None:
            return self("qk_rope_head_dim") if stated is None else stated
        share = _check.number(_OP, "partial_rotary_factor", factor, "a number of 0 to 1", lambda x: 0 < x <= 1) * d
        if abs(share - round(share)) > 1e-6 or stated not in (None, round(share)):
            wanted = f"an int of the {d} dimensions" if stated is None else f"{stated} of {d}, as qk_rope_head_dim says"
            raise _check.error(ValueError, _OP, "partial_rotary_factor", factor, wanted)
        return round(share)

    def rope_entries(self, name: str) -> dict[str, Any]:
        """rope_scaling or rope_parameters, which may be nested, after a check that every entry of theirs is known."""
        entries = _there(_mapping_or_none(name, self.get(name)))
        if kinds := entries.keys() & {"main", "compress"}:
            _known(name, entries, {"main", "compress"})
            return {kind: self.of_one_rope(f"{name}.{kind}", entries[kind]) for kind in kinds}
        return self.of_one_rope(name, entries)

    def of_one_rope(self, name: str, entries: Any) -> dict[str, Any]:
        found = _there(_mapping(name, entries))
        _known(name, found, _ROPE)
        if "type" in found and found.setdefault("rope_type", found["type"]) != found["type"]:
            raise _check.error(ValueError, _OP, f"{name}.type", found["type"], f"the {found['rope_type']} of rope_type")
        found.pop("type", None)
        return found


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """An error inside is one of the config's entry with that name."""
    try:
        yield
    except (ValueError, TypeError) as e:
        raise type(e)(f"{_OP}: {name}: {e}") from e


def _there(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in entries.items() if x is not None}


def _known(name: str, entries: Mapping[str, Any], names: set[str]) -> None:
    if unknown := entries.keys() - names:
        raise _check.error(ValueError, _OP, name, ", ".join(sorted(unknown)), f"only {', '.join(sorted(names))}")


def _mapping(name: str, x: Any) -> Mapping[str, Any]:
    if not isinstance(x, Mapping):
        raise _check.error(TypeError, _OP, name, x, "a mapping")
    return x


def _mapping_or_none(name: str, x: Any) -> Mapping[str, Any]:
    """A mapping that null stands for when it has nothing."""
    return {} if x is None else _mapping(name, x)


_OP = "from_config"
