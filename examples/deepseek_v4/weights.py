"""A checkpoint's safetensors, straight to their devices: no tensor is on the host longer than it takes to pass.

`load` makes one parameter after the other. Each device gets its own part of it as the file has it, in 4, 8 or 16 bits,
and unpacks it there. So the host holds one parameter's part at a time, and several hosts each read what they need.
"""

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha.layers import from_state_dict

from .checkpoint import Checkpoint
from .drafts import SHARED, DSpark
from .engram import words
from .model import Model
from .packed import Packed, in_file, unpacked

OTHERS = r"vision\.|aligner\.|image_|.*\.gate\.bias_vl$"
"""of what reads pictures"""
STAY = re.compile(r".*(experts\.|\.engram\.wkv\.|\.main_proj\.)")
"""matrices that the model takes packed"""
unpack = jax.jit(unpacked, static_argnames=("axes", "dtype"))


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
      FileNotFoundError: there are no such files, or one that the index names is not there.
      ValueError: a file is damaged; a tensor is missing, is there twice, has another shape or dtype, or has no use; a
        matrix in 4 or 8 bits has no scales, or those of other blocks, or scales have no such matrix.
    """
    whole = model.model if isinstance(model, DSpark) else model
    checkpoint, used, began, size = Checkpoint(directory), set(), time.perf_counter(), 0
    wanted = jax.eval_shape(partial(model.init, dtype=dtype), jax.random.key(0))

    def sharding(spec: P) -> jax.sharding.Sharding:
        return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, spec)

    def parameter(source: tuple[Any, tuple[int, ...]], shape: jax.ShapeDtypeStruct, spec: P) -> jax.Array | Packed:
        names, axes = np.array(source[0], object), source[1]
        of_tensor = tuple(shape.shape[axes.index(axis)] for axis in range(names.ndim, len(axes)))
        kinds = {name: checkpoint.check(name, of_tensor, shape.dtype) for name in names.flat}
        first, block = kinds[names.flat[0]]
        for name, (kind, own) in kinds.items():
            if (kind, own) != (first, block):
                other = f"{first}, in blocks of {block}, as {names.flat[0]} is" if block else first
                raise ValueError(f"{checkpoint.entries[name]}: got {kind}, in blocks of {own}, wanted {other}")
        used.update(names.flat)
        if block:
            used.update(map(checkpoint.scale, names.flat))
        if jnp.issubdtype(shape.dtype, jnp.integer):
            numbers = checkpoint[names.item()]
            if numbers.size and not 0 <= numbers.min() <= numbers.max() < whole.experts:
                got = f"numbers of experts from {numbers.min()} to {numbers.max()}"
                raise ValueError(f"{checkpoint.entries[names.item()]}: got {got}, wanted 0 to {whole.experts - 1}")
        of_file = (*names.shape, *of_tensor)

        def piece(index: Sequence[slice], device: jax.Device) -> tuple[jax.Array, jax.Array | None]:
            """A part of the tensors on its device as the file has it: codes and scales."""
            chosen = np.asarray(names[tuple(index[: names.ndim])], object)
            found = [checkpoint.piece(name, tuple(index[names.ndim :]), block) for name in chosen.flat]
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

        if packed and block and STAY.match(names.flat[0]):
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
            tensors = {name: checkpoint[name] for name in checkpoint if name.startswith(prefix)}
            used.update(tensors)
            where = jax.tree.map(sharding, specs["layers"][i]["attention"])
            try:
                attention = from_state_dict(layer, tensors, prefix, dtype, where)
            except ValueError as e:
                raise ValueError(f"{checkpoint.directory}: {checkpoint.named(str(e))}") from None
            own = parameters(layers[i], wanted["layers"][i], specs["layers"][i])
            size += sum(x.nbytes for x in jax.tree.leaves(attention))
            params["layers"].append({**own, "attention": attention})
            rate = size / 2**30 / (time.perf_counter() - began)
            progress(f"layer {i + 1} of {len(model.layers)}, {size / 2**30:.1f} GiB, {rate:.2f} GiB/s")
        return params

    specs = model.partition()
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
        some = "; ".join(str(checkpoint.entries[name]) for name in unused[:5]) + "; …" * (len(unused) > 5)
        raise ValueError(f"{directory}: got {len(unused)} tensors that have no use in this model, wanted none: {some}")
    return params
