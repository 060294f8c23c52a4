"""Writes parameters as a checkpoint of *.safetensors, which `weights.load` reads: a file a layer, one for the rest."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_dsv4_fmha import PackedExperts, PackedMatrix
from jax_dsv4_fmha.layers import to_state_dict

from .checkpoint import DTYPES, Checkpoint, read_json
from .model import Model
from .packed import Packed
from .weights import Source, Stack, sources

OF_DTYPE = {np.dtype(x): name for name, x in DTYPES.items()}
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""files that stay as they are, but for `OF_PACKED` of a configuration"""
OF_PACKED = ("quantization_config", "expert_dtype")
"""entries of a configuration about matrices in 4 and 8 bits"""
PIECE = 1 << 28
"""bytes that are gathered at a time: a piece is whole on every device for that time"""


def save(
    model: Model,
    params: dict[str, Any],
    directory: str | Path,
    like: str | Path | None = None,
    dtype: Any = jnp.bfloat16,
) -> None:
    """Writes the parameters of a model, matrices in dtype, and all else in the dtype that `model.init` gives it.

    The host holds a layer at a time, and at the end all that belongs to no layer. Several processes gather what they
    have in pieces, and the first one writes.

    Args:
      params: as `model.init` and `weights.load` make them, without `packed`.
      like: the directory of the checkpoint that they come from. Tensors get the names that they have there, and the
        configuration and the tokenizer are copied. None: DeepSeek's names, and no other files.

    Raises:
      ValueError: the directory has *.safetensors, the other checkpoint lacks a tensor, or the parameters are not those
        of the model: some are missing, are too many, have another shape, or are packed.
      TypeError: not a Model.
    """
    if not isinstance(model, Model):
        raise TypeError(f"save: model: got {type(model).__name__}, wanted a Model; layers for drafts are not saved")
    wanted = jax.eval_shape(lambda: model.init(jax.random.key(0), dtype))
    check(params, wanted)
    directory, own = Path(directory), None if like is None else Checkpoint(like)
    if any(directory.glob("*.safetensors")):
        raise ValueError(f"{directory}: got a directory with a checkpoint, wanted another")
    is_first, files = jax.process_index() == 0, dict[str, str]()
    if is_first:
        directory.mkdir(parents=True, exist_ok=True)
        for name in BESIDE if like is not None else ():
            if not (Path(like) / name).is_file():
                continue
            if name != "config.json":
                shutil.copyfile(Path(like) / name, directory / name)
                continue
            config = read_json(Path(like) / name)
            for part in (config, config.get("text_config") or {}):  # matrices have no scales here
                for entry in OF_PACKED:
                    part.pop(entry, None)
            (directory / name).write_text(json.dumps(config, indent=1) + "\n")
    of, count = sources(model), len(model.layers) + 1
    of_layers = of.pop("layers")
    for i in range(count):
        if i < len(of_layers):
            layer, p, like_p = model.layers[i], params["layers"][i], wanted["layers"][i]
            found = dict(stacked(of_layers[i], p, like_p, own))
            found |= of_attention(layer, p["attention"], like_p["attention"], f"layers.{i}.attn.", own)
        else:
            found = dict(stacked(of, params, wanted, own))
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        if is_first:
            write(directory / file, found)
        files |= dict.fromkeys(found, file)
    if is_first:
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save")  # nobody shuts down while the first one writes


def check(params: Any, wanted: Any) -> None:
    """Raises ValueError unless these are parameters with the shapes that are wanted, and no others."""
    has_no_array = lambda x: isinstance(x, Packed | PackedExperts | PackedMatrix)  # noqa: E731
    found, there = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
        for leaves in (
            jax.tree_util.tree_leaves_with_path(wanted),
            jax.tree_util.tree_leaves_with_path(params, is_leaf=has_no_array),
        )
    )
    for name in [*found, *(name for name in there if name not in found)]:
        x, of = there.get(name), found.get(name)
        shape = None if has_no_array(x) else getattr(x, "shape", None)
        if x is None or of is None or shape != of.shape:
            got = "none" if x is None else type(x).__name__ if shape is None else f"{x.dtype}{list(shape)}"
            raise ValueError(f"params: {name}: got {got}, wanted {'none' if of is None else list(of.shape)}")


def stacked(of: Any, params: Any, wanted: Any, own: Checkpoint | None) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of parameters outside of attention, by name. Where one tensor holds all experts, it is one here."""
    found = list[tuple[Source, Any, Any]]()
    Stack.map(lambda *x: found.append(x), of, params, wanted)
    for (names, axes), x, shape in found:
        names = np.array(names, object)
        x = on_host(x, shape.dtype).transpose(np.argsort(axes))
        called = [name if own is None else its_name(own, name) for name in names.flat]
        if len(called) > 1 and len(set(called)) == 1:  # [experts, out, in]
            yield called[0], x.reshape(len(names), -1, x.shape[-1])
        else:
            yield from zip(called, x.reshape(len(called), *x.shape[names.ndim :]), strict=True)


def of_attention(layer: Any, params: Any, wanted: Any, prefix: str, own: Checkpoint | None) -> dict[str, np.ndarray]:
    """The tensors of a layer's attention, by name."""
    params = jax.tree.map(lambda x, shape: on_host(x, shape.dtype), params, wanted)
    hugging_face = own is not None and f"{prefix}q_a_proj.weight" in own
    tensors = to_state_dict(layer, params, prefix, hugging_face=hugging_face)
    return {name if own is None else its_name(own, name): np.asarray(x) for name, x in tensors.items()}


def its_name(own: Checkpoint, name: str) -> str:
    """The name that a tensor has in a checkpoint's file."""
    if name not in own:
        raise ValueError(f"{own.directory}: {name}: got none, wanted it, as the model has it")
    return own.entries[name].name


def on_host(x: jax.Array, dtype: Any) -> np.ndarray:
    """An array that other processes may have parts of, in dtype. All processes call it in turn."""
    x = x.astype(dtype)
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    n = max(1, len(x) * PIECE // x.nbytes)
    pieces = (multihost_utils.process_allgather(x[i : i + n], tiled=True) for i in range(0, len(x), n))
    return np.concatenate([np.asarray(piece) for piece in pieces])


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a *.safetensors: the length of a header in JSON, the header, and the tensors one after the other."""
    header, at = dict[str, Any](), 0
    for name, x in tensors.items():
        header[name] = {"dtype": OF_DTYPE[x.dtype], "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(x.tobytes())
