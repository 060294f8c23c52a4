"""A checkpoint's safetensors, straight to their devices: no tensor is on the host longer than it takes to pass.

`load` makes one parameter after the other. Each device gets its own part of it as the file has it, in 4, 8 or 16 bits,
and unpacks it there. So the host holds one parameter's part at a time, and several hosts each read what they need.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha.layers import from_state_dict

from .drafts import SHARED, DSpark
from .engram import words
from .model import Model
from .packed import Packed, in_file, unpacked

DTYPES = {
    "F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16, "I64": jnp.int64,
    "I32": jnp.int32, "I8": jnp.uint8, "U8": jnp.uint8, "F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu,
}  # fmt: skip
NAMES = {
    r"^model\.": "", r"^language_model\.": "", r"^embed_tokens\.": "embed.", r"^lm_head\.": "head.",
    r"^hc_head\.hc_": "hc_head_", r"\.self_attn\.": ".attn.", r"\.attn\.norm\.": ".attn.kv_norm.", r"\.mlp\.": ".ffn.",
    r"\.input_layernorm\.": ".attn_norm.", r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.attn_hc\.": ".hc_attn_", r"\.ffn_hc\.": ".hc_ffn_", r"\.weight_scale_inv$": ".scale",
    r"\.gate\.e_score_correction_bias$": ".gate.bias", r"experts\.gate_proj\.": "experts.w1.",
    r"experts\.down_proj\.": "experts.w2.", r"experts\.up_proj\.": "experts.w3.",
}  # fmt: skip
"""DeepSeek's names for Hugging Face's, outside of attention"""


OTHERS = r"vision\.|aligner\.|image_|.*\.gate\.bias_vl$"
"""of what reads pictures"""
unpack = jax.jit(unpacked, static_argnames=("axes", "dtype"))


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a directory's *.safetensors by DeepSeek's names, mapped into memory: read where they are used.

    (The library safetensors gives NumPy no tensors of 8 bits.)
    """

    def __init__(self, directory: str | Path) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no *.safetensors in {directory}")
        for path in files:
            whole = np.memmap(path, np.uint8, "r")
            size = int(whole[:8].view("<u8")[0])
            for name, x in json.loads(bytes(whole[8 : 8 + size])).items():
                if name != "__metadata__":
                    begin, end = x["data_offsets"]
                    data = whole[8 + size + begin : 8 + size + end].view(DTYPES[x["dtype"]])
                    self._add(name, data.reshape(x["shape"]))

    def _add(self, name: str, x: np.ndarray) -> None:
        for theirs, ours in NAMES.items():
            name = re.sub(theirs, ours, name)
        stacked = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)  # Hugging Face's: all experts in one
        if stacked:
            parts = {"gate_up": ("w1", "w3"), "down": ("w2",)}[stacked[2]]
            for e, expert in enumerate(x):
                for part, y in zip(parts, np.split(expert, len(parts)), strict=True):
                    self.tensors[f"{stacked[1]}.{e}.{part}.weight"] = y
        else:
            self.tensors[name] = x

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def scale(self, name: str) -> np.ndarray | None:
        return self.tensors.get(name.removesuffix(".weight") + ".scale")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor unpacked; raises ValueError if there is none of this name."""
        if name not in self.tensors:
            raise ValueError(f"{name}: got none, wanted it in the checkpoint")
        x = self.tensors[name]
        return (*x.shape[:-1], x.shape[-1] * (2 if x.dtype == np.uint8 else 1))

    def piece(self, name: str, index: tuple[slice, ...], bare: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """A part of a tensor as it is in the file, and the scales of its rows, one for each block of columns, if any.

        index is one of the tensor unpacked: a byte of FP4 has two columns. bare: without the scales.
        """
        x = self[name]
        scale = self.scale(name)
        if scale is None or bare:
            return x[index], None
        shape = self.shape(name)
        per_byte = shape[1] // x.shape[1]
        rows, columns = (s.indices(n) for s, n in zip(index, shape, strict=True))
        block = [
            next(b for b in (1, 32, 128) if -(-n // b) == parts) for n, parts in zip(shape, scale.shape, strict=True)
        ]
        step = math.gcd(block[1], *columns[:2])  # columns that have one scale, wherever the part begins and ends
        scale = np.repeat(scale, block[0], 0)[rows[0] : rows[1]]
        scale = np.repeat(scale, block[1] // step, 1)[:, columns[0] // step : columns[1] // step]
        return x[rows[0] : rows[1], columns[0] // per_byte : columns[1] // per_byte], scale


def connections(prefix: str) -> dict[str, Any]:
    return {"fn": (f"{prefix}_fn", (1, 0)), "base": (f"{prefix}_base", (0,)), "scale": (f"{prefix}_scale", (0,))}


def sources(model: Model, at: str = "layers") -> dict[str, Any]:
    """Where each parameter outside of attention comes from: names of tensors, to be stacked, and the axes then."""

    grams = () if model.engrams is None else model.engrams.layers

    def engram(i: int) -> dict[str, Any]:
        own = f"{at}.{i}.engram"
        return {
            "wkv": (f"{own}.wkv.weight", (1, 0)),
            "q": (f"{own}.q_weight", (0, 1)),
            "k": (f"{own}.k_weight", (0, 1)),
        }

    def table(i: int) -> dict[str, Any]:
        own = f"{at}.{i}.engram.embed"
        return {"rows": (f"{own}.weight", (0, 1)), "scales": (f"{own}.scale", (0, 1))}

    def layer(i: int) -> dict[str, Any]:
        ffn = f"{at}.{i}.ffn"
        experts = range(model.experts)
        return {
            **({"engram": engram(i)} if i in grams else {}),
            "attention_norm": (f"{at}.{i}.attn_norm.weight", (0,)),
            "attention_hc": connections(f"{at}.{i}.hc_attn"),
            "moe_norm": (f"{at}.{i}.ffn_norm.weight", (0,)),
            "moe_hc": connections(f"{at}.{i}.hc_ffn"),
            "moe": {
                "gate": (f"{ffn}.gate.weight", (1, 0)),
                "w13": ([[f"{ffn}.experts.{e}.w{w}.weight" for w in (1, 3)] for e in experts], (0, 3, 1, 2)),
                "w2": ([f"{ffn}.experts.{e}.w2.weight" for e in experts], (0, 2, 1)),
                "shared13": ([f"{ffn}.shared_experts.w{w}.weight" for w in (1, 3)], (2, 0, 1)),
                "shared2": (f"{ffn}.shared_experts.w2.weight", (1, 0)),
            },
        }

    n = len(model.layers)
    kinds = [("tid2eid", (0, 1)) if i < model.hashed else ("bias", (0,)) for i in range(n)]
    return {
        **({} if model.delayed else {"hc": connections("hc_head")}),
        **({"tables": {str(i): table(i) for i in grams}} if grams else {}),
        "embed": ("embed.weight", (0, 1)),
        "layers": [layer(i) for i in range(n)],
        "norm": ("norm.weight", (0,)),
        "head": ("head.weight", (1, 0)),
        "routing": [(f"{at}.{i}.ffn.gate.{name}", axes) for i, (name, axes) in enumerate(kinds)],
    }


def sources_of_drafts(model: DSpark) -> dict[str, Any]:
    last = f"mtp.{len(model.stack.layers) - 1}"
    w1, w2 = ("embed", "head") if model.model.delayed else ("markov_w1", "markov_w2")
    return {name: x for name, x in sources(model.stack, "mtp").items() if name not in SHARED} | {
        "main": ("mtp.0.main_proj.weight", (1, 0)),
        "main_norm": ("mtp.0.main_norm.weight", (0,)),
        **({} if model.model.delayed else {"hc": connections(f"{last}.hc_head")}),
        "norm": (f"{last}.norm.weight", (0,)),
        "w1": (f"{last}.markov_head.{w1}.weight", (0, 1)),
        "w2": (f"{last}.markov_head.{w2}.weight", (1, 0)),
    }


def load(
    model: Model | DSpark,
    directory: str | Path,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
    progress: Callable[[str], None] = lambda text: None,
    packed: bool = False,
) -> dict[str, Any]:
    """The parameters of a checkpoint's directory, matrices in dtype, as `model.partition` lays them over a mesh.

    Names are Hugging Face's or DeepSeek's. Matrices in e4m3 or e2m1 come with scales for blocks, which are multiplied
    in; with packed=True they stay as they are, outside of attention, as `Packed`. Layers for drafts are left out of a
    `Model`, and what reads pictures. Engrams take words from tokenizer.json.

    Raises:
      ValueError: a tensor is missing, has another shape, or has no use.
    """
    checkpoint, used, began, size = Checkpoint(directory), set(), time.perf_counter(), 0
    wanted = jax.eval_shape(partial(model.init, dtype=dtype), jax.random.key(0))

    def sharding(spec: P) -> jax.sharding.Sharding:
        return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, spec)

    def parameter(source: tuple[Any, tuple[int, ...]], shape: jax.ShapeDtypeStruct, spec: P) -> jax.Array | Packed:
        names, axes = np.array(source[0], object), source[1]
        used.update(name.removesuffix(".weight") + end for name in names.flat for end in ("", ".weight", ".scale"))

        of_tensor = tuple(shape.shape[axes.index(axis)] for axis in range(names.ndim, len(axes)))
        for name in names.flat:
            if checkpoint.shape(name) != of_tensor:
                got = f"{checkpoint[name].dtype}{list(checkpoint.shape(name))}"
                raise ValueError(f"{name}: got {got}, wanted {list(of_tensor)}")

        of_file = (*names.shape, *of_tensor)
        bare = shape.dtype == jnp.float8_e4m3fn  # a table, whose scales are a parameter of their own

        def piece(index: Sequence[slice], device: jax.Device) -> tuple[jax.Array, jax.Array | None]:
            """A part of the tensors on its device as the file has it: codes and scales."""
            chosen = np.asarray(names[tuple(index[: names.ndim])], object)
            found = [checkpoint.piece(name, tuple(index[names.ndim :]), bare) for name in chosen.flat]
            codes, scales = (
                None if parts[0] is None else np.stack(parts).reshape(*chosen.shape, *parts[0].shape)
                for parts in zip(*found, strict=True)
            )
            return jax.device_put((codes, scales), device)

        def put(shape: tuple[int, ...], where: jax.sharding.Sharding, part: Callable[..., Any]) -> Any:
            """The array, or arrays, of this shape unpacked whose parts part(index, device) makes."""
            indices = where.addressable_devices_indices_map(shape).items()
            parts, columns = [part(index, device) for device, index in indices], where.shard_shape(shape)[-1]

            def joined(*parts: jax.Array) -> jax.Array:
                in_all = (*shape[:-1], shape[-1] * parts[0].shape[-1] // columns)
                return jax.make_array_from_single_device_arrays(in_all, where, list(parts))

            return jax.tree.map(joined, *parts)

        if packed and not bare and checkpoint.scale(names.flat[0]) is not None:
            return Packed(*put(of_file, sharding(in_file(spec, axes)), piece), axes)

        def part(index: tuple[slice, ...], device: jax.Device) -> jax.Array:
            with jax.set_mesh(None):  # a program of this device alone
                return unpack(*piece([index[axes.index(axis)] for axis in range(len(axes))], device), axes, shape.dtype)

        return put(shape.shape, sharding(spec), part)

    def parameters(of: Any, wanted: Any, specs: Any) -> Any:
        nonlocal size
        is_source = lambda x: isinstance(x, tuple)  # noqa: E731
        made = jax.tree.map(parameter, of, {k: wanted[k] for k in of}, {k: specs[k] for k in of}, is_leaf=is_source)
        size += sum(x.nbytes for x in jax.tree.leaves(made))
        return made

    def everything(model: Model, of: dict[str, Any], wanted: Any, specs: Any, at: str = "layers") -> dict[str, Any]:
        nonlocal size
        layers = of.pop("layers")
        params = {**parameters(of, wanted, specs), "layers": []}
        for i, layer in enumerate(model.layers):
            prefix = f"{at}.{i}.attn."
            tensors = {name: x for name, x in checkpoint.items() if name.startswith(prefix)}
            used.update(tensors)
            where = jax.tree.map(sharding, specs["layers"][i]["attention"])
            attention = from_state_dict(layer, tensors, prefix, dtype, where)
            own = parameters(layers[i], wanted["layers"][i], specs["layers"][i])
            size += sum(x.nbytes for x in jax.tree.leaves(attention))
            params["layers"].append({**own, "attention": attention})
            rate = size / 2**30 / (time.perf_counter() - began)
            progress(f"layer {i + 1} of {len(model.layers)}, {size / 2**30:.1f} GiB, {rate:.2f} GiB/s")
        return params

    specs, whole = model.partition(), model.model if isinstance(model, DSpark) else model
    params = everything(whole, sources(whole), wanted, specs)
    if isinstance(model, DSpark):
        params["drafts"] = everything(model.stack, sources_of_drafts(model), wanted["drafts"], specs["drafts"], "mtp")
    if whole.engrams is not None:
        of_tokens = np.zeros(whole.vocabulary, np.int32)
        found = words(Path(directory) / "tokenizer.json")
        if found.max() + 1 != whole.engrams.words or len(found) > whole.vocabulary:
            raise ValueError(f"tokenizer.json: got {found.max() + 1} words, wanted the config's {whole.engrams.words}")
        of_tokens[: len(found)] = found
        params["words"] = jax.device_put(of_tokens, sharding(P()))
    others = OTHERS + (r"|mtp\..*\.confidence_head\." if isinstance(model, DSpark) else r"|mtp\.")
    if unused := sorted(name for name in set(checkpoint) - used if not re.match(others, name)):
        raise ValueError(f"{directory}: {len(unused)} tensors have no use in this model: {', '.join(unused[:5])}, …")
    return params
