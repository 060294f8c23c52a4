"""A config with an entry dropped, null, renamed, doubled or of another type gives the same layers, or an error by name.

These are whole configs, with a model_type, in every form that there is. A plain run changes each entry of each config;
`pytest -m fuzz` changes several at once.
"""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dsv4_fmha.layers import from_config
from jax_dsv4_fmha.layers.config import _NAMES
from tests.test_layer_config import published
from tests.test_layers import MODELS

YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


def whole(name, model="deepseek_v4"):
    return {"model_type": model} | copy.deepcopy(published(name))


def as_transformers_saves_it():
    """It has kinds of layers by name, nested RoPE, and what `DeepseekV4Config.to_dict` repeats at the top."""
    config = whole("flash")
    kinds = dict(zip((0, 4, 128), MODELS["v4"]["layer_types"], strict=True))
    config["layer_types"] = [kinds[ratio] for ratio in config.pop("compress_ratios")]
    share = config.pop("qk_rope_head_dim") / config["head_dim"]
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    compress = {**YARN, "rope_type": "yarn", "attention_factor": 1.0, "rope_theta": 160000.0,
                "partial_rotary_factor": share}  # fmt: skip
    del config["rope_scaling"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    ropes = {"main": main, "compress": compress}
    return config | {"compress_rates": rates, "partial_rotary_factor": share, "rope_parameters": ropes}


def by_deepseeks_names(name, model="deepseek_v4"):
    config = whole(name, model)
    config = config.pop("text_config", {}) | config
    config |= {"rope_factor": 16, "original_seq_len": 65536, "beta_fast": 32, "beta_slow": 1}
    del config["rope_scaling"]
    others = _NAMES | {"qk_rope_head_dim": "rope_head_dim"}
    return {others.get(key, key): x for key, x in config.items()}


CONFIGS = {
    "flash": whole("flash"),
    "pro": whole("pro"),
    "v4.1": {"model_type": "deepseek_v41", "text_config": whole("v4.1", "deepseek_v41")["text_config"]},
    "v4.1 with a model_type inside": {"text_config": published("v4.1")["text_config"] | {"model_type": "deepseek_v41"}},
    "flash, rope_parameters": {
        **{key: x for key, x in whole("flash").items() if key != "rope_scaling"},
        "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 10000},
    },
    "transformers": as_transformers_saves_it(),
    "DeepSeek's": by_deepseeks_names("flash"),
    "DeepSeek's, V4.1": by_deepseeks_names("v4.1", "deepseek_v41"),
    "other ratios": {
        **MODELS["v4"],
        "model_type": "deepseek_v4",
        "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64},
    },
    "rates of their own": {
        **{key: x for key, x in MODELS["v4"].items() if key != "compress_rates"},
        "model_type": "deepseek_v4",
        "compress_rate_csa": 8, "compress_rate_hca": 64,
    },
}  # fmt: skip
SAYS_NOTHING = {"model_type", "text_config"}
"""entries around the others; `from_config` says what a config without a model_type may leave out"""


def places(config, path=()):
    for key, x in config.items():
        yield (*path, key)
        if isinstance(x, dict):
            yield from places(x, (*path, key))


def with_change(config, path, change):
    config = copy.deepcopy(config)
    *outer, key = path
    inside = config
    for name in outer:
        inside = inside[name]
    change(inside, key)
    return config


def other(x):
    """A value of the same type that says something else."""
    if isinstance(x, dict):
        return {"factor": 7}
    if isinstance(x, list):
        return x[::-1] if x != x[::-1] else [*x[1:], x[0]]
    return x + "x" if isinstance(x, str) else x + 1


def renamed(to):
    return lambda inside, key: inside.update({to(key): inside.pop(key)})


def doubled(inside, key):
    """Under its other name, if it has one, with another value."""
    names = _NAMES | {"qk_rope_head_dim": "rope_head_dim", "type": "rope_type"}
    second = (names | {y: x for x, y in names.items()}).get(key)
    if second is not None:
        inside[second] = other(inside[key])


CHANGES = {
    "drop": lambda inside, key: inside.pop(key),
    "null": lambda inside, key: inside.update({key: None}),
    "add a letter": renamed(lambda key: key + "s"),
    "miss a letter": renamed(lambda key: key[:-1]),
    "in capitals": renamed(str.upper),
    "double": doubled,
    "as a str": lambda inside, key: inside.update({key: str(inside[key])}),
    "as a list": lambda inside, key: inside.update({key: [inside[key]]}),
    "not a number": lambda inside, key: inside.update({key: float("nan")}),
}


def complaint(config, changed):
    """The error, or None where the layers are the same; anything else fails."""
    try:
        got = from_config(changed)
    except (ValueError, TypeError) as e:
        return str(e)
    assert got == from_config(config), "other layers, without a word"
    return None


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_entry_changes(name, change):
    """The same layers, or an error that names the entry, or what it says."""
    config = CONFIGS[name]
    for path in places(config):
        if path[-1] in SAYS_NOTHING:
            continue
        changed = with_change(config, path, CHANGES[change])
        said = complaint(config, changed)
        names = {path[-1], *({n for pair in _NAMES.items() for n in pair if path[-1] in pair}), *path}
        if said is not None:
            assert any(name[:-1] in said or name.upper() in said for name in names), (path, said)


@pytest.mark.fuzz
@given(data=st.data())
@settings(settings.get_profile("fuzz"))
def test_two_entries_change(data):
    """More may make another config, as one without candidates; so may a second name alone."""
    changed = config = CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))]
    for _ in range(2):
        path = data.draw(st.sampled_from([path for path in places(changed) if path[-1] not in SAYS_NOTHING]))
        changed = with_change(changed, path, CHANGES[data.draw(st.sampled_from(sorted(CHANGES.keys() - {"double"})))])
    complaint(config, changed)


def test_yarn_without_its_type():
    """Such configs were read as if they had no YaRN."""
    config = published("flash")
    for scaling in (YARN, YARN | {"type": None}, YARN | {"rope_type": None}):
        with pytest.raises(
            ValueError, match=r"rope_scaling: got .*16.*, wanted rope_type or type too, yarn or default"
        ):
            from_config(config | {"rope_scaling": scaling})
    flat = {key: x for key, x in config.items() if key != "rope_scaling"} | {"rope_parameters": YARN}
    with pytest.raises(ValueError, match=r"rope_parameters: got .*wanted rope_type or type too"):
        from_config(flat)
    with pytest.raises(ValueError, match=r"rope_scaling: got .*wanted no numbers of YaRN with rope_type default"):
        from_config(config | {"rope_scaling": YARN | {"type": "default"}})


def test_entries_that_contradict_each_other():
    config = published("flash")
    for more, error in (
        ({"dim": 64}, "dim: got 64, wanted the 4096 of hidden_size"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type: got default, wanted the yarn of rope_scaling"),
        ({"rope_factor": 8, "original_seq_len": 65536}, "factor: got 16, wanted the 8 of rope_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor: got 0.25, wanted 64 of 512, as qk_rope"),
        ({"rope_scaling": config["rope_scaling"] | {"rope_type": "default"}}, "type: got yarn, wanted the default of"),
        ({"candidate_block_size": 8}, "kv_source_layer_ids: got none, wanted it with candidate_block_size"),
        ({"layer_types": MODELS["v4"]["layer_types"] * 15}, "compress_ratios: got 0, wanted 4 in layer 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            from_config(config | more)
    with pytest.raises(ValueError, match="sliding_window: got 64, wanted 128, as in text_config"):
        from_config({"text_config": config, "sliding_window": 64})


def test_a_file_that_says_an_entry_twice(tmp_path):
    path, text = tmp_path / "config.json", json.dumps(published("flash"))
    path.write_text(text[:-1] + ', "index_topk": 64}')
    with pytest.raises(ValueError, match=r"index_topk: got 512 and 64, wanted it once in config\.json"):
        from_config(path)
    path.write_text(text[:-1] + ', "index_topk": 512}')
    assert from_config(path) == from_config(published("flash"))


@pytest.mark.parametrize("changes, error", [
    ({"head_dim": "512"}, "from_config: head_dim: .*got 512, wanted an int >= 1, known while tracing; '512' is a str"),
    ({"index_topk": 0.5}, "from_config: index_topk: .*got 0.5, wanted an int >= 1"),
    ({"rms_norm_eps": "1e-6"}, "from_config: rms_norm_eps: .*'1e-6' is a str"),
    ({"rope_theta": "10000"}, "theta: got 10000, wanted a finite number > 1.*'10000' is a str"),
])  # fmt: skip
def test_numbers_that_came_as_text(changes, error):
    with pytest.raises((ValueError, TypeError), match=error):
        from_config(published("flash") | changes)
