"""Low-rank additions to attention's matrices: W + 2 A B, of which A and B alone learn.

An adapter has a dict `{"wq_b": {"a": [in, rank], "b": [rank, out]}, …}` for each layer, in float32. A layer computes
with the sum in its own dtype, as it does with a checkpoint that `applied` made. `save` and `load` are of the two files
of Hugging Face's PEFT.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.serving.request import integer, number
from jax_dsv4_fmha import PackedMatrix

from . import save as saving
from .checkpoint import Checkpoint, read_json
from .model import Model

SCALE = 2
"""of what is added; PEFT's alpha over rank"""
MATRICES = {"wq_a": (1, "q_a_proj"), "wq_b": (1, "q_b_proj"), "wkv": (1, "kv_proj"), "wo_b": (2, "o_b_proj")}
"""the matrices that may have an addition: how many axes are columns in a checkpoint, and Hugging Face's name"""
FILES = "adapter_model.safetensors", "adapter_config.json"
OTHERS = (
    "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias",
    "trainable_token_indices",
)  # fmt: skip
"""entries of a configuration that change what is added"""
Adapter = list[dict[str, dict[str, Any]]]


def init(model: Model, rank: int, only: str = "", seed: int = 0) -> Adapter:
    """A random A and a B of zeros for each matrix whose path, "layers/0/attention/wq_a", `only` matches in part.

    Raises:
      ValueError: it matches none.
    """
    key, adapter = jax.random.key(seed), Adapter()
    for i in range(len(model.layers)):
        adapter.append({})
        for n, (name, (rows, columns)) in enumerate(sizes(model, i).items()):
            if re.search(only, f"layers/{i}/attention/{name}"):
                a = jax.random.normal(jax.random.fold_in(key, i * len(MATRICES) + n), (rows, rank)) * rows**-0.5
                adapter[i][name] = {"a": a, "b": jnp.zeros((rank, columns))}
    if not any(adapter):
        raise ValueError(f'--only: got {only!r}, wanted a part of a path such as "layers/0/attention/wq_a"')
    return adapter


def sizes(model: Model, layer: int) -> dict[str, tuple[int, int]]:
    """The count of numbers that each of a layer's matrices takes, and of those that it makes."""
    params = jax.eval_shape(model.layers[layer].init, jax.random.key(0))
    shapes = {name: (params[name].shape, n) for name, (n, _) in MATRICES.items() if name in params}
    return {name: (math.prod(x[:n]), math.prod(x[n:])) for name, (x, n) in shapes.items()}


def merged(attention: dict[str, Any], adapter: dict[str, dict[str, Any]], dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """A layer's parameters of attention with what an adapter adds: in their own dtypes, and packed ones in dtype."""

    def sum_of(w: jax.Array | PackedMatrix, a: jax.Array, b: jax.Array) -> jax.Array:
        w = w.unpacked(dtype) if isinstance(w, PackedMatrix) else w
        added = jnp.matmul(a, SCALE * b, precision="highest").reshape(w.shape)
        return (w.astype(jnp.float32) + added).astype(w.dtype)

    return attention | {name: sum_of(attention[name], **x) for name, x in adapter.items()}


def beside(params: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    """Parameters whose layers have an adapter, too."""
    layers = [p | {"lora": x} for p, x in zip(params["layers"], adapter, strict=True)]
    return params | {"layers": layers}


def applied(params: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    """Parameters with what an adapter adds to them, as `merged` does it."""
    layers = zip(params["layers"], adapter, strict=True)
    return params | {"layers": [p | {"attention": merged(p["attention"], x)} for p, x in layers]}


def modules(model: Model, checkpoint: str | Path | None) -> dict[str, tuple[int, str]]:
    """The layer and the matrix of each module that may have an addition, by its name in the checkpoint."""
    own, found = None if checkpoint is None else Checkpoint(checkpoint), {}
    for i in range(len(model.layers)):
        for matrix in sizes(model, i):
            name = f"layers.{i}.attn.{matrix}.weight"
            if own is not None:
                name = name if name in own else name.replace(matrix, MATRICES[matrix][1])
                name = saving.its_name(own, name)
            found[name.removesuffix(".weight")] = i, matrix
    return found


def save(model: Model, adapter: Adapter, directory: str | Path, checkpoint: str | None = None) -> None:
    """Writes an adapter for the model of a checkpoint; None: with DeepSeek's names.

    Raises:
      ValueError: the directory has an adapter.
    """
    directory, tensors = Path(directory), {}
    if (directory / FILES[0]).exists():
        raise ValueError(f"{directory}: got a directory with an adapter, wanted another")
    there = {name: at for name, at in modules(model, checkpoint).items() if at[1] in adapter[at[0]]}
    for name, (i, matrix) in there.items():
        for part, x in adapter[i][matrix].items():
            tensors[f"base_model.model.{name}.lora_{part.upper()}.weight"] = saving.on_host(x, jnp.float32).T
    if jax.process_index():
        return
    directory.mkdir(parents=True, exist_ok=True)
    saving.write(directory / FILES[0], tensors)
    rank = min(min(x.shape) for x in tensors.values())
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": checkpoint, "bias": "none",
        "r": rank, "lora_alpha": SCALE * rank, "lora_dropout": 0.0, "fan_in_fan_out": False, "inference_mode": True,
        "target_modules": sorted(there),
    }  # fmt: skip
    (directory / FILES[1]).write_text(json.dumps(config, indent=1) + "\n")


def load(model: Model, directory: str | Path, checkpoint: str | Path | None = None) -> Adapter:
    """An adapter of a model, and of the names that the checkpoint has.

    Raises:
      ValueError: a tensor is missing, has another shape, or adds to something else; or the configuration has no rank
        or no alpha.
      NotImplementedError: the configuration says another addition.
    """
    directory = Path(directory)
    config, tensors = read_json(directory / FILES[1]), Checkpoint(directory).entries.values()
    rank = integer(f"{directory / FILES[1]}: r", config.get("r"), 1)
    alpha = number(f"{directory / FILES[1]}: lora_alpha", config.get("lora_alpha"), 0, math.inf)
    named = modules(model, checkpoint)
    for name in OTHERS:
        if config.get(name):
            raise NotImplementedError(f"{directory / FILES[1]}: {name}: got {config[name]!r}, wanted none")
    adapter: Adapter = [{} for _ in model.layers]
    for entry in tensors:
        found = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.weight", entry.name)
        if not found or found[1] not in named:
            raise ValueError(f"{entry}: got it, wanted additions to attention's {', '.join(MATRICES)} alone")
        i, matrix = named[found[1]]
        rows, columns = sizes(model, i)[matrix]
        if entry.shape != (wanted := (rank, rows) if found[2] == "A" else (columns, rank)):
            raise ValueError(f"{entry}: got {list(entry.shape)}, wanted {list(wanted)}")
        x = jnp.asarray(entry.data, jnp.float32).T
        x = x if found[2] == "A" else x * (alpha / rank / SCALE)
        adapter[i].setdefault(matrix, {})[found[2].lower()] = x
    for i, of in enumerate(adapter):
        for matrix, x in of.items():
            if len(x) != 2:
                raise ValueError(f"{directory}: layer {i}: {matrix}: got one of A and B, wanted both")
    return adapter
