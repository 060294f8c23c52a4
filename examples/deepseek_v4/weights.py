"""A checkpoint's safetensors, straight to their devices: no tensor is on the host longer than it takes to pass.

`load` makes one parameter after the other. Each device gets its own part of it as the file has it, in 4, 8 or 16 bits,
and unpacks it there. So the host holds one parameter's part at a time, and several hosts each read what they need.
"""

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import PackedExperts, PackedMatrix, pack_experts, pack_matrix
from jax_dsv4_fmha.layers import from_state_dict

from .checkpoint import Checkpoint
from .drafts import SHARED, DSpark
from .engram import words
from .model import Model
from .packed import BLOCK, TILE, Packed, in_file, of_data, unpacked

OTHERS = r"vision\.|aligner\.|image_|.*\.gate\.bias_vl$"
"""of what reads pictures"""
STAY = re.compile(r".*(\.experts\.|\.engram\.wkv\.|\.main_proj\.)")
"""matrices that the model takes packed as the file has them"""
ROUTED = re.compile(r".*\.ffn\.experts\.")
SHARED_EXPERT = re.compile(r".*\.ffn\.shared_experts\.")
GREATEST_SCALE = 128.0
"""of a `PackedMatrix`"""
MXFP4 = (1, 32)
"""the block of a scale, which is a power of two"""
unpack = jax.jit(unpacked, static_argnames=("axes", "dtype"))


def connections(prefix: str) -> dict[str, Any]:
    return {"fn": (f"{prefix}_fn", (0, 1)), "base": (f"{prefix}_base", (0,)), "scale": (f"{prefix}_scale", (0,))}


def sources(model: Model, at: str = "layers") -> dict[str, Any]:
    """Says where each parameter outside of attention comes from: names of tensors, to be stacked, and the axes then."""

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
                "w13": ([[f"{ffn}.experts.{e}.w{w}.weight" for w in (1, 3)] for e in experts], (0, 1, 2, 3)),
                "w2": ([f"{ffn}.experts.{e}.w2.weight" for e in experts], (0, 1, 2)),
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


Source = tuple[Any, tuple[int, ...]]


class Stack(NamedTuple):
    """Layers of a checkpoint, and what is beside them."""

    model: Model
    at: str
    sources: dict[str, Any]
    wanted: Any
    """shapes and dtypes"""
    specs: Any

    def prefix(self, layer: int) -> str:
        """The beginning of the names of a layer's tensors of attention."""
        return f"{self.at}.{layer}.attn."

    @classmethod
    def map(cls, f: Callable[..., Any], sources: Any, *others: Any) -> Any:
        """f(source, …) of each source, and of what the others have in its place; they may have more."""
        if isinstance(sources, dict):
            return {name: cls.map(f, sources[name], *(x[name] for x in others)) for name in sorted(sources)}
        if isinstance(sources, list):
            return [cls.map(f, *of_one) for of_one in zip(sources, *others, strict=True)]
        return f(sources, *others)


def blocks_of(checkpoint: Checkpoint, source: Source, shape: jax.ShapeDtypeStruct) -> tuple[int, int] | None:
    """The rows and columns with one scale in the tensors of a parameter; None if they have none.

    Raises:
      ValueError: a tensor cannot be the parameter, or is in another form than the first.
    """
    names, axes = np.array(source[0], object), source[1]
    of_tensor = tuple(shape.shape[axes.index(axis)] for axis in range(names.ndim, len(axes)))
    forms = [checkpoint.check(name, of_tensor, shape.dtype) for name in names.flat]
    for name, form in zip(names.flat, forms, strict=True):
        if form != forms[0]:
            got, first = (f"{dtype} with scales of {block}" if block else dtype for dtype, block in (form, forms[0]))
            raise ValueError(f"{checkpoint.entries[name]}: got {got}, wanted {first}, as {names.flat[0]} is")
    return forms[0][1]


def check(checkpoint: Checkpoint, stacks: Sequence[Stack], model: Model) -> None:
    """Raises ValueError unless the checkpoint has what the stacks want and nothing else, before any of it is read.

    Tensors of attention are checked by `from_state_dict`, when they are read.
    """
    used: set[str] = set()

    def use(source: Source, shape: jax.ShapeDtypeStruct) -> None:
        names = list(np.array(source[0], object).flat)
        used.update(names)
        if blocks_of(checkpoint, source, shape):
            used.update(map(checkpoint.scale, names))
        if jnp.issubdtype(shape.dtype, jnp.integer):  # a table of experts
            table, entry = checkpoint[names[0]], checkpoint.entries[names[0]]
            if not 0 <= table.min() <= table.max() < model.experts:
                got = f"numbers of experts from {table.min()} to {table.max()}"
                raise ValueError(f"{entry}: got {got}, wanted 0 to {model.experts - 1}")

    for stack in stacks:
        stack.map(use, stack.sources, stack.wanted)
        prefixes = tuple(stack.prefix(i) for i in range(len(stack.model.layers)))
        used.update(name for name in checkpoint if name.startswith(prefixes))
    others = OTHERS + (r"|mtp\..*\.confidence_head\." if len(stacks) > 1 else r"|mtp\.")
    if unused := sorted(name for name in set(checkpoint) - used if not re.match(others, name)):
        some = "; ".join(str(checkpoint.entries[name]) for name in unused[:5]) + "; …" * (len(unused) > 5)
        raise ValueError(f"{checkpoint.directory}: got {len(unused)} tensors of no use here, wanted none: {some}")


def fits_fused_moe(checkpoint: Checkpoint, names: np.ndarray, block: tuple[int, int] | None) -> bool:
    """True if these are matrices `[rows, columns]` of routed experts in MXFP4 or FP8 that `pack_experts` takes."""
    if block not in (MXFP4, (BLOCK, BLOCK)) or not ROUTED.match(names.flat[0]):
        return False
    operands = (checkpoint[name] for name in (names.flat[0], checkpoint.scale(names.flat[0])))
    try:
        jax.eval_shape(pack_experts, *(jax.ShapeDtypeStruct((*names.shape, *x.shape), x.dtype) for x in operands))
    except (ValueError, TypeError):
        return False
    return block == MXFP4 or scales_are_within(checkpoint, names, float(np.finfo(np.float32).max))


def scales_are_within(checkpoint: Checkpoint, names: np.ndarray, greatest: float) -> bool:
    """True if all scales of these matrices are above 0 and at most this."""
    scales = (np.asarray(checkpoint[checkpoint.scale(name)]).astype(np.float32) for name in names.flat)
    return all(((x > 0) & (x <= greatest)).all() for x in scales)


def fits_step_product(
    checkpoint: Checkpoint, names: np.ndarray, block: tuple[int, int] | None, of_device: tuple[int, ...]
) -> bool:
    """True if these are matrices of a shared expert that `pack_matrix` takes, of which a device has whole blocks.

    of_device: the rows and columns of its part.
    """
    if block != (BLOCK, BLOCK) or not SHARED_EXPERT.match(names.flat[0]) or any(n % BLOCK for n in of_device):
        return False
    return scales_are_within(checkpoint, names, GREATEST_SCALE)


def is_whole(spec: P, mesh: Mesh | None) -> bool:
    """True if a device has its experts' matrices whole: this PartitionSpec shares out no axis but the first."""
    return mesh is None or all(mesh.shape[name] == 1 for name in jax.tree.leaves(tuple(spec[1:])))


def load(
    model: Model | DSpark,
    directory: str | Path,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
    progress: Callable[[str], None] = lambda text: None,
    packed: bool = False,
    fused: bool = True,
) -> dict[str, Any]:
    """The parameters of a checkpoint's directory, matrices in dtype, as `model.partition` lays them over a mesh.

    Names are Hugging Face's or DeepSeek's. Matrices in e4m3 or e2m1 come with scales for blocks, which are multiplied
    in; with packed=True they stay in 4 or 8 bits: as `Packed`, or, routed experts that no device has a part of, laid
    out for `fused_moe`, attention's projections as `from_state_dict` packs them, and shared experts in FP8 of which
    devices have whole blocks as `pack_matrix` does, the gate before what it lets through. None has a gradient, and
    fused=False makes no use of `fused_moe`. Layers for drafts are left out of a `Model`, and what reads pictures.
    Engrams take words from tokenizer.json.

    Raises:
      FileNotFoundError: there are no such files, or one that the index names is not there.
      ValueError: a file is damaged; a tensor is missing, is there twice, has another shape or dtype, or has no use; a
        matrix in 4 or 8 bits has no scales, or those of other blocks, or scales have no such matrix.
    """
    checkpoint, began, size = Checkpoint(directory), time.perf_counter(), 0
    wanted, specs = jax.eval_shape(partial(model.init, dtype=dtype), jax.random.key(0)), model.partition()
    whole = model.model if isinstance(model, DSpark) else model
    stacks = [Stack(whole, "layers", sources(whole), wanted, specs)]
    if isinstance(model, DSpark):
        stacks.append(Stack(model.stack, "mtp", sources_of_drafts(model), wanted["drafts"], specs["drafts"]))
    check(checkpoint, stacks, whole)

    def sharding(spec: P) -> jax.sharding.Sharding:
        return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, spec)

    def parameter(source: Source, shape: jax.ShapeDtypeStruct, spec: P) -> jax.Array | Packed | PackedExperts:
        names, axes = np.array(source[0], object), source[1]
        block = blocks_of(checkpoint, source, shape)
        of_tensor = tuple(shape.shape[axes.index(axis)] for axis in range(names.ndim, len(axes)))

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

        def experts(where: jax.sharding.Sharding) -> PackedExperts:
            rest = (slice(None),) * (len(axes) - 1)
            parts = []
            for device, index in where.addressable_devices_indices_map((len(names),)).items():
                with jax.set_mesh(None):
                    codes, scales = piece([*index, *rest], device)  # of every row
                    parts.append(pack_experts(codes, scales[..., :: block[0], :]))

            def joined(*parts: jax.Array) -> jax.Array:
                return jax.make_array_from_single_device_arrays((len(names), *parts[0].shape[1:]), where, list(parts))

            return jax.tree.map(joined, *parts)

        in_tensor = (*names.shape, *of_tensor)
        of_file = sharding(in_file(spec, axes))

        def shared_expert() -> PackedMatrix:
            *_, rows, columns = in_tensor
            parts = []
            for device, index in of_file.addressable_devices_indices_map(in_tensor).items():
                with jax.set_mesh(None):
                    codes, scales = piece(index, device)  # of every row
                    parts.append(pack_matrix(codes, scales[..., ::BLOCK, :]).data)
            where, (*several, _, _) = sharding(of_data(spec, parts[0].ndim)), in_tensor
            data = (*several, rows // TILE, columns // TILE, parts[0].shape[-1])
            made = jax.make_array_from_single_device_arrays(data, where, parts)
            return PackedMatrix(made, rows, columns, (*several, columns, rows))

        if packed and fused and fits_fused_moe(checkpoint, names, block) and is_whole(spec, mesh):
            return experts(sharding(P(spec[0])))
        if packed and fits_step_product(checkpoint, names, block, of_file.shard_shape(in_tensor)[-2:]):
            return shared_expert()
        if packed and block and STAY.match(names.flat[0]):
            return Packed(*put(in_tensor, of_file, piece), axes)

        def part(index: tuple[slice, ...], device: jax.Device) -> jax.Array:
            with jax.set_mesh(None):  # a program of this device alone
                return unpack(*piece([index[axes.index(axis)] for axis in range(len(axes))], device), axes, shape.dtype)

        return put(shape.shape, sharding(spec), part)

    def attention(layer: Any, prefix: str, specs: Any) -> Any:
        tensors = {name: checkpoint[name] for name in checkpoint if name.startswith(prefix)}
        try:
            return from_state_dict(layer, tensors, prefix, dtype, jax.tree.map(sharding, specs), packed)
        except ValueError as e:
            raise ValueError(f"{directory}: {checkpoint.named(str(e))}") from None

    def counted(made: Any) -> Any:
        nonlocal size
        size += sum(x.nbytes for x in jax.tree.leaves(made))
        return made

    def everything(of: Stack) -> dict[str, Any]:
        layers = of.sources.pop("layers")
        params = {**counted(of.map(parameter, of.sources, of.wanted, of.specs)), "layers": []}
        for i, layer in enumerate(of.model.layers):
            its = of.specs["layers"][i]
            own = counted(of.map(parameter, layers[i], of.wanted["layers"][i], its))
            own["attention"] = counted(attention(layer, of.prefix(i), its["attention"]))
            params["layers"].append(own)
            rate = size / 2**30 / (time.perf_counter() - began)
            progress(f"layer {i + 1} of {len(of.model.layers)}, {size / 2**30:.1f} GiB, {rate:.2f} GiB/s")
        return params

    params = everything(stacks[0])
    for of in stacks[1:]:
        params["drafts"] = everything(of)
    if whole.engrams is not None:
        of_tokens = np.zeros(whole.vocabulary, np.int32)
        found = words(Path(directory) / "tokenizer.json")
        if found.max() + 1 != whole.engrams.words or len(found) > whole.vocabulary:
            raise ValueError(f"tokenizer.json: got {found.max() + 1} words, wanted the config's {whole.engrams.words}")
        of_tokens[: len(found)] = found
        params["words"] = jax.device_put(of_tokens, sharding(P()))
    return params
